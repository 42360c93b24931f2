"""The file sink in Spark, with a changed pipeline file or an older checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nsparq.pipeline.execute.progress import State
from nsparq.testing import Broker
from nsparq.tools.main import main
from tests.pipeline.conftest import Runs, bodies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("spark", "root_logger_restored")


def test_a_changed_partition_by_is_refused_and_no_row_is_lost(
    run: Runs, broker: Broker, spark: SparkSession
) -> None:
    before, after = '["topic"]', '["topic", "date"]'

    def text(partition_by: str) -> str:
        return f"""
[pipeline.files]
source = "orders"
decode = "message"
sink = {{ parquet = "table", partition_by = {partition_by}, date_from = "timestamp", compact = 3 }}
trigger = "available-now"
"""

    table = run.directory / "table"
    for _ in range(2):
        broker.publish("orders", *[b"1"] * 30)
        assert run(text(before))["files"].state is State.FINISHED
    broker.publish("orders", *[b"1"] * 30)
    refused = run(text(after))["files"]
    assert refused.state is State.FAILED
    assert "is partitioned by" in refused.error
    assert "another directory" in refused.error
    assert main(["pipeline", "compact", str(table)]) == 0
    assert spark.read.parquet(str(table)).count() == 60
    assert run(text(before))["files"].rows == 30
    assert spark.read.parquet(str(table)).count() == 90


def test_without_partition_by_compaction_logs_why_it_is_impossible(
    run: Runs, broker: Broker, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
[pipeline.files]
source = "orders"
sink = { parquet = "table" }
trigger = "available-now"
"""
    for _ in range(2):
        broker.publish("orders", b"1", b"2")
        run(text)
    table: Path = run.directory / "table"
    assert main(["pipeline", "compact", str(table)]) == 1
    assert "only a subdirectory of the table can be replaced" in capsys.readouterr().err
    assert spark.read.parquet(str(table)).count() == 4


RESTORED = """
[pipeline.files]
source = "orders"
sink = { parquet = "table" }
trigger = "available-now"
[pipeline.sparks]
source = "orders"
sink = { parquet = "sparks", writer = "spark" }
trigger = "available-now"
[pipeline.delta]
source = "orders"
sink = { delta = "delta" }
trigger = "available-now"
[pipeline.database]
source = "orders"
sql = "SELECT CAST(body AS STRING) AS n FROM input"
sink = { jdbc = "jdbc:derby:memory:restored;create=true", table = "orders", batch_column = "batch" }
trigger = "available-now"
[pipeline.updates]
source = "orders"
output_mode = "update"
sink = { topic = "copies" }
trigger = "available-now"
[pipeline.merges]
source = "orders"
sql = "SELECT CAST(CAST(body AS STRING) AS INT) AS n, 'tea' AS item FROM input"
trigger = "available-now"
[[pipeline.merges.sink]]
delta = "merged"
key = ["n"]
[[pipeline.merges.sink]]
name = "database"
jdbc = "jdbc:derby:memory:restored;create=true"
table = "merged"
key = ["n"]
[pipeline.json]
source = "orders"
sink = { format = "json", path = "json" }
trigger = "available-now"
"""


def test_a_checkpoint_restored_from_an_older_copy_is_refused_by_every_sink(
    run: Runs, broker: Broker, spark: SparkSession
) -> None:
    """It is one batch behind. It plans a batch with a number that each sink has already."""
    deltalake = pytest.importorskip("deltalake")

    def results() -> list[object]:
        return [
            spark.read.parquet(str(run.directory / "table")).count(),
            spark.read.parquet(str(run.directory / "sparks")).count(),
            deltalake.DeltaTable(str(run.directory / "delta")).count(),
            spark.read.jdbc("jdbc:derby:memory:restored", "orders").count(),
            len(bodies(broker, "copies")),
            deltalake.DeltaTable(str(run.directory / "merged")).count(),
            spark.read.jdbc("jdbc:derby:memory:restored", "merged").count(),
            spark.read.json(str(run.directory / "json")).count(),
        ]

    checkpoint, copy = run.directory / "checkpoints", run.directory / "copy"
    broker.publish("orders", b"1", b"2")
    assert {one.error for one in run(RESTORED).values()} == {""}
    shutil.copytree(checkpoint, copy)
    broker.publish("orders", b"3")
    assert {one.error for one in run(RESTORED).values()} == {""}
    before = results()
    assert before == [3] * 8
    shutil.rmtree(checkpoint)
    shutil.copytree(copy, checkpoint)
    broker.publish("orders", b"4")
    for name, one in run(RESTORED).items():
        assert "is an older copy" in one.error, name
    assert results() == before


def test_an_empty_partition_value_is_read_as_spark_reads_its_own(spark: SparkSession, tmp_path: Path) -> None:
    import pyarrow as pa

    from nsparq.pipeline.write.file_sink import ParquetFiles

    rows = [(1, "tea"), (2, ""), (3, None)]
    spark.createDataFrame(rows, "n INT, item STRING").write.partitionBy("item").parquet(f"{tmp_path}/theirs")
    sink = ParquetFiles(tmp_path / "ours", ("item",), "zstd", 0)
    batch = pa.RecordBatch.from_pydict({"n": [row[0] for row in rows], "item": [row[1] for row in rows]})
    sink.commit("query", 0, sink.write(iter([batch]), "query", 0), None)  # type: ignore[arg-type]
    ours, theirs = (
        sorted((row.n, row.item) for row in spark.read.parquet(f"{tmp_path}/{name}").collect())
        for name in ("ours", "theirs")
    )
    assert ours == theirs == [(1, "tea"), (2, None), (3, None)]
