"""Sinks in pipelines, on a real broker and in one Spark session."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.execute.progress import State
from nsparq.testing import Broker
from tests.pipeline.conftest import Runs, bodies
from tests.support.with_headers import publish_with_headers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.allow_leftovers("deltalake has threads with sockets, which stay")

UPSERTS = """
[pipeline.sold]
source = "orders"
decode = { format = "json", schema = "id INT, item STRING, n INT" }
sql = "SELECT item, sum(n) AS sold FROM input GROUP BY item"
output_mode = "update"
sink = { delta = "sold", key = ["item"] }
trigger = "available-now"
[pipeline.latest]
source = "orders"
decode = { format = "json", schema = "id INT, item STRING, n INT" }
sql = "SELECT id, item, _timestamp, _offset FROM input"
sink = { jdbc = "jdbc:derby:memory:latest;create=true", table = "latest", key = ["id"] }
trigger = "available-now"
[pipeline.changes]
source = "orders"
decode = { format = "json", schema = "id INT, item STRING, n INT" }
sql = "SELECT item, sum(n) AS sold FROM input GROUP BY item"
output_mode = "update"
sink = { jdbc = "jdbc:derby:memory:latest;create=true", table = "changes", batch_column = "batch" }
trigger = "available-now"
"""


def orders(broker: Broker, *rows: tuple[int | None, str, int]) -> None:
    found = [{"id": id, "item": item, "n": n} for id, item, n in rows]
    broker.publish("orders", *(json.dumps(one).encode() for one in found))


def forget_commit(run: Runs, pipeline: str, batch: int) -> None:
    """As after a crash: the sink has the batch, but Spark's checkpoint does not show it."""
    commits = run.directory / "checkpoints" / "p" / pipeline / "rows" / "commits"
    (commits / str(batch)).unlink()
    (commits / f".{batch}.crc").unlink(missing_ok=True)


def test_a_row_for_each_key_is_kept_up_to_date_also_after_a_crash(
    run: Runs, broker: Broker, spark: SparkSession
) -> None:
    deltalake = pytest.importorskip("deltalake")

    def results() -> tuple[list[tuple[str, int]], list[tuple[int, str]]]:
        sold = deltalake.DeltaTable(str(run.directory / "sold")).to_pyarrow_table().to_pylist()
        latest = spark.read.jdbc("jdbc:derby:memory:latest", "latest").collect()
        return sorted((one["item"], one["sold"]) for one in sold), sorted(
            (one.id, one.item) for one in latest
        )

    orders(broker, (1, "tea", 1), (2, "milk", 1), (1, "juice", 5))
    assert {one.error for one in run(UPSERTS).values()} == {""}
    assert results() == ([("juice", 5), ("milk", 1), ("tea", 1)], [(1, "juice"), (2, "milk")])
    for name in ("sold", "latest", "changes"):
        forget_commit(run, name, 0)
    version = deltalake.DeltaTable(str(run.directory / "sold")).version()
    orders(broker, (2, "tea", 2), (3, "tea", 3))
    assert {one.error for one in run(UPSERTS).values()} == {""}
    assert deltalake.DeltaTable(str(run.directory / "sold")).version() == version + 1
    assert results() == ([("juice", 5), ("milk", 1), ("tea", 6)], [(1, "juice"), (2, "tea"), (3, "tea")])
    changes = spark.read.jdbc("jdbc:derby:memory:latest", "changes").collect()
    assert sorted((one.batch, one.item, one.sold) for one in changes) == [
        (0, "juice", 5),
        (0, "milk", 1),
        (0, "tea", 1),
        (1, "tea", 6),
    ]
    orders(broker, (None, "tea", 1))
    text = UPSERTS[UPSERTS.index("[pipeline.latest]") : UPSERTS.index("[pipeline.changes]")]
    refused = run(text)["latest"]
    assert (refused.state, refused.failures) == (State.FAILED, 1)
    assert 'a row has null in its key: {"id":null}' in refused.error


# headers

HEADERS = """
[pipeline.traced]
source = "orders"
decode = { format = "json", schema = "n INT", headers = true }
sql = "SELECT n, _headers['traceparent'] AS trace, _headers, map('n', string(n)) AS own FROM input"
trigger = "available-now"
[[pipeline.traced.sink]]
topic = "traced"
[[pipeline.traced.sink]]
name = "own"
topic = "own"
headers_from = "own"
[pipeline.copy]
source = "orders"
decode = "message"
sink = { topic = "copy" }
trigger = "available-now"
"""


def test_a_topic_gets_columns_of_any_name(run: Runs, broker: Broker) -> None:
    row = {"a`b": 1, "c.d": 2, 'e"f': 3, "": 4}
    broker.publish("odd", json.dumps(row).encode())
    found = run(
        """
[pipeline.odd]
source = "odd"
decode = "json"
sink = { topic = "copy" }
trigger = "available-now"
"""
    )["odd"]
    assert (found.state, found.error) == (State.FINISHED, "")
    del row[""]
    assert bodies(broker, "copy") == [row]


def test_headers_of_messages_are_in_sql_and_go_to_topics(run: Runs, broker: Broker) -> None:
    trace, plain = (b'{"n": 1}', {"traceparent": "00-1"}), (b'{"n": 2}', {})
    publish_with_headers(broker.http_address, "orders", trace, plain)
    assert {one.error for one in run(HEADERS).values()} == {""}

    def found(topic: str) -> list[tuple[bytes, dict[str, str]]]:
        return [(one.body, one.headers) for one in broker.peek(topic)]

    assert found("traced") == [
        (b'{"n":1,"trace":"00-1","own":{"n":"1"}}', {"traceparent": "00-1"}),
        (b'{"n":2,"trace":null,"own":{"n":"2"}}', {}),
    ]
    assert [headers for _, headers in found("own")] == [{"n": "1"}, {"n": "2"}]
    # A pipeline that does not ask for headers has the same columns as before.
    assert found("copy") == [(b'{"n": 1}', {}), (b'{"n": 2}', {})]


# any format


def test_formats_that_spark_can_write(run: Runs, broker: Broker, spark: SparkSession) -> None:
    text = """
[pipeline.csv]
source = "orders"
decode = "text"
sql = "SELECT text, length(text) AS n FROM input"
trigger = "available-now"
[[pipeline.csv.sink]]
format = "csv"
path = "csv"
partition_by = ["n"]
options = { header = true }
[[pipeline.csv.sink]]
name = "catalog"
format = "parquet"
table = "default.texts"
[[pipeline.csv.sink]]
name = "batches"
format = "jdbc"
batches = true
options = { url = "jdbc:derby:memory:formats;create=true", dbtable = "texts" }
"""
    try:
        for texts in ((b"a", b"bb"), (b"ccc",)):
            broker.publish("orders", *texts)
            assert run(text)["csv"].error == ""
        found = [
            spark.read.csv(str(run.directory / "csv"), header=True, schema="text STRING"),
            spark.table("default.texts").select("text"),
            spark.read.jdbc("jdbc:derby:memory:formats", "texts").select("text"),
        ]
        assert [sorted(row.text for row in one.collect()) for one in found] == [["a", "bb", "ccc"]] * 3
        assert (run.directory / "csv" / "n=3").is_dir()
    finally:
        spark.sql("DROP TABLE IF EXISTS default.texts")


# functions

FUNCTION = """
[run]
retry_delay = "1ms"
[pipeline.p]
source = "orders"
decode = "text"
sink = { python = "given_sinks:SINK" }
trigger = "available-now"
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    """The user's functions, beside the pipeline file."""
    before = sys.path[:]
    path = tmp_path / "given_sinks.py"
    path.write_text(
        """
from pathlib import Path
from pyspark.sql.functions import udf
SEEN = Path(__file__).with_name("seen")
def once(text):
    return text.upper()
def save(batch, number):
    rows = batch.select(udf(once)("text").alias("text")).collect()
    with SEEN.open("a") as file:
        file.write(f"{number} {sorted(row.text for row in rows)}\\n")
    if SEEN.read_text().count("\\n") == 1:
        raise ConnectionError("try again")
def wrong_column(batch, number):
    batch.select("nothing")
def short(batch):
    pass
"""
    )
    yield path
    sys.path[:] = before
    sys.modules.pop("given_sinks", None)


def test_a_function_gets_a_repeated_micro_batch_with_the_same_number(
    run: Runs, broker: Broker, module: Path
) -> None:
    broker.publish("orders", b"a", b"b")
    text = FUNCTION.replace("SINK", "save")
    done = run(text)["p"]
    assert (done.state, done.failures) == (State.FINISHED, 1)
    broker.publish("orders", b"c")
    assert run(text)["p"].error == ""
    seen = module.with_name("seen").read_text().splitlines()
    assert seen == ["0 ['A', 'B']", "0 ['A', 'B']", "1 ['C']"]
    failed = run(FUNCTION.replace("pipeline.p]", "pipeline.q]").replace("SINK", "wrong_column"))["q"]
    assert (failed.state, failed.failures) == (State.FAILED, 1)
    assert (
        "[pipeline.q.sink] python: given_sinks:wrong_column raised AnalysisException in batch 0: "
        in failed.error
    )


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        ('format = "kafka"', r"\[pipeline.p.sink\] format: Spark does not know 'kafka': .* its JAR"),
        ('format = "nonsense"', "Spark does not know 'nonsense'"),
        ('format = "jdbc"', "'jdbc' cannot write streams; set batches = true"),
        ('python = "given_sinks:short"', "given_sinks:short must take a DataFrame and the number"),
        ('python = "given_sinks:nothing"', "given_sinks has no function nothing"),
        ('delta = "t", key = ["id"]', "key: there is no column 'id'; there are text"),
        ('jdbc = "jdbc:derby:x", table = "t", key = "text", latest_by = "at"', "latest_by: there is no"),
    ],
)  # fmt: skip
def test_check_reports_rows_that_cannot_be_written(
    spark: SparkSession, tmp_path: Path, module: Path, sink: str, expected: str
) -> None:
    from nsparq.pipeline.execute import check
    from nsparq.pipeline.file.reading import parse

    text = f'[pipeline.p]\nsource = "x"\ndecode = "text"\nsink = {{ {sink} }}\n'
    file = parse(text, tmp_path / "p.toml")
    with pytest.raises(PipelineError, match=expected):
        check.check(spark, file, file.pipelines[0])
