"""Pipelines with a checkpoint in an object store: a run continues, and what cannot work is
refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("obstore")
pytest.importorskip("moto")

from nsparq.pipeline.errors import PipelineError  # noqa: E402
from nsparq.pipeline.execute.check import check, check_state  # noqa: E402
from nsparq.pipeline.file.reading import parse  # noqa: E402
from nsparq.testing import Broker  # noqa: E402
from tests.pipeline.conftest import Runs  # noqa: E402
from tests.support.s3 import run_s3  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.allow_leftovers("obstore and deltalake have threads with sockets, which stay")

SINKS = """
import json
from pathlib import Path

def count(batch, number):
    with open(Path(__file__).parent / "counted", "a") as file:
        print(number, sorted(json.loads(row.text) for row in batch.collect()), file=file)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with run_s3("lake") as storage:
        yield storage


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.items():
        monkeypatch.setenv(name, value)


def text(sink: str, more: str = "") -> str:
    return f"""
[run]
checkpoint = "s3://lake/checkpoints"
[pipeline.orders]
source = "orders"
decode = "text"
trigger = "available-now"
{more}
{sink}
"""


@pytest.mark.usefixtures("s3")
def test_a_run_continues_from_the_store(run: Runs, broker: Broker) -> None:
    (run.directory / "counting.py").write_text(SINKS)
    merged = 'sink = [{ name = "merged", delta = "merged", key = ["_id"] }, { python = "counting:count" }]'
    for number in (1, 2):
        broker.publish("orders", b"%d" % number)
        assert run(text(merged))["orders"].error == ""
        # Nothing is left on this machine.
        assert not (run.directory / "checkpoints").exists()
    table = deltalake.DeltaTable(str(run.directory / "merged")).to_pyarrow_table()
    assert sorted(table["text"].to_pylist()) == ["1", "2"]
    # A new driver runs the last batch again, with the same number and the same rows.
    counted = (run.directory / "counted").read_text().splitlines()
    assert [line.partition(" ")[2] for line in counted] == ["[1]", "[1]", "[2]"]
    assert counted[0] == counted[1] != counted[2]


@pytest.mark.usefixtures("s3", "broker")
@pytest.mark.parametrize(
    ("sink", "more", "reason"),
    [
        ('sink = "console"', "", "needs a sink that is a topic, Parquet files in a directory, a Delta table"),
        ('sink = { parquet = "s3://lake/p" }', "", "needs a sink that is a topic"),
        (
            'sink = { topic = "counts" }',
            'sql = "SELECT _topic, count(*) AS n FROM input GROUP BY _topic"\noutput_mode = "update"',
            r"this pipeline has state \(an aggregation, .*: use a directory that they share, or add",
        ),
        ('sink = { topic = "copies" }', "", ""),
    ],
)
def test_what_cannot_work_is_refused_by_check(
    spark: SparkSession, broker: Broker, tmp_path: Path, sink: str, more: str, reason: str
) -> None:
    nsq = f'[nsq]\nnsqd = ["{broker.http_address}"]\n'
    file = parse(nsq + text(sink, more), tmp_path / "p.toml")
    if reason:
        with pytest.raises(PipelineError, match=reason):
            check(spark, file, file.pipelines[0])
    else:
        frames = check(spark, file, file.pipelines[0])
        assert frames is not None and check_state(spark, file.pipelines[0], frames) == []


@pytest.mark.usefixtures("s3")
def test_a_queue_is_refused(spark: SparkSession) -> None:
    file = parse(
        text("sink = { topic = 'copies' }").replace('"orders"\n', '{ topic = "orders", mode = "queue" }\n')
    )
    with pytest.raises(PipelineError, match="mode 'queue' keeps messages there, which all executors write"):
        check(spark, file, file.pipelines[0])


def test_files_in_a_store_need_a_file_system_of_spark(spark: SparkSession, broker: Broker) -> None:
    sink = 'sink = { parquet = "s3://lake/p" }'
    file = parse(text(sink).replace('"s3://lake/checkpoints"', '"checkpoints"'))
    with pytest.raises(
        PipelineError, match="Spark has no file system for s3://lake/p: add its JAR, .* delta"
    ):
        check(spark, file, file.pipelines[0])
