"""Whether a changed query fits its checkpoint: our verdict, and what Spark does."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException

from nsparq.pipeline.errors import is_refused_state, retry_helps
from nsparq.pipeline.execute import check, queries
from nsparq.pipeline.execute.progress import State
from nsparq.pipeline.execute.state_check import Verdict, judge
from nsparq.pipeline.file.reading import parse
from nsparq.testing import Broker
from nsparq.tools.main import main
from tests.pipeline.conftest import Runs
from tests.support.polling import SPARK_DEADLINE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COUNT = "SELECT item, count(*) AS sold FROM input GROUP BY item"
MINUTES = "SELECT window(at, '1 minute') AS minute, count(*) AS n FROM input GROUP BY window(at, '1 minute')"
LINES = '{"item": "tea", "price": 1.5, "at": "2026-11-15T12:00:00Z"}\n'


class Shop:
    """Runs queries over a stream of orders."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark, self._directory = spark, directory
        self._numbers = itertools.count()
        (directory / "orders").mkdir()

    def rows(self, sql: str, delay: str) -> DataFrame:
        orders = self._spark.readStream.schema("item STRING, price DOUBLE, at TIMESTAMP")
        orders.json(str(self._directory / "orders")).withWatermark("at", delay).createOrReplaceTempView(
            "input"
        )
        try:
            return self._spark.sql(sql)
        finally:
            self._spark.catalog.dropTempView("input")

    def run(self, sql: str, mode: str, checkpoint: Path, delay: str = "10 seconds") -> None:
        """Runs one micro-batch or more. Raises StreamingQueryException."""
        (self._directory / "orders" / f"{next(self._numbers)}.json").write_text(LINES)
        writer = self.rows(sql, delay).writeStream.format("noop").outputMode(mode)
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        assert query.awaitTermination(SPARK_DEADLINE)

    def first(self, sql: str, mode: str) -> Path:
        """The checkpoint that it leaves."""
        checkpoint = self._directory / "checkpoint"
        self.run(sql, mode, checkpoint)
        return checkpoint


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Shop:
    # A batch without rows, which only moves the watermark, takes as long as one with rows.
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    return Shop(spark, tmp_path)


def content(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def assert_spark_agrees(
    shop: Shop, sql: str, mode: str, checkpoint: Path, delay: str = "10 seconds"
) -> Verdict:
    """Our verdict, and what Spark does."""
    before = content(checkpoint)
    verdict = judge(shop.rows(sql, delay), mode, checkpoint)
    assert content(checkpoint) == before
    copy = checkpoint.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(checkpoint, copy)
    try:
        shop.run(sql, mode, copy, delay)
    except StreamingQueryException as error:
        assert verdict.refused, error
        assert is_refused_state(error) and not retry_helps(error)
    else:
        assert not verdict.refused
    return verdict


def test_an_aggregation_that_has_changed(shop: Shop, spark: SparkSession) -> None:
    checkpoint = shop.first(COUNT, "update")

    def verdict(sql: str) -> Verdict:
        return assert_spark_agrees(shop, sql, "update", checkpoint)

    assert verdict(COUNT.replace("GROUP", "WHERE price > 1 GROUP")) == Verdict()
    assert verdict("SELECT item AS product, count(*) AS number FROM input GROUP BY item") == Verdict()
    assert verdict("SELECT item, count(*) AS sold, sum(price) AS paid FROM input GROUP BY item").refused == (
        "the state of an aggregation has count BIGINT, and would now have count BIGINT, sum DOUBLE"
    )
    assert verdict("SELECT item, price, count(*) AS sold FROM input GROUP BY item, price").refused == (
        "the state of an aggregation is grouped by item STRING, and would now be by item STRING, price DOUBLE"
    )
    assert verdict("SELECT item FROM input").refused == (
        "its state belongs to an aggregation, and the query has no step with state now"
    )
    twice = "(SELECT item FROM input UNION ALL SELECT item FROM input)"
    assert verdict(COUNT.replace("input", twice)).refused == (
        "the query had 1 source, and has 2 sources now; a source that a join or a union reads twice "
        "counts twice"
    )
    # Spark takes one for the other, because both are strings.
    other = verdict("SELECT upper(item) AS name, count(*) AS sold FROM input GROUP BY upper(item)")
    assert "item STRING is taken for an expression STRING" in other.note
    # Spark keeps the number in the checkpoint.
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    assert verdict(COUNT) == Verdict()


def test_windows_and_watermarks(shop: Shop) -> None:
    checkpoint = shop.first(MINUTES, "append")
    assert assert_spark_agrees(shop, MINUTES, "append", checkpoint, delay="1 hour") == Verdict()
    hour = "window(minute, '1 hour')"
    twice = f"SELECT {hour} AS hour, sum(n) AS n FROM ({MINUTES}) GROUP BY {hour}"
    assert assert_spark_agrees(shop, twice, "append", checkpoint).refused == (
        "its state belongs to an aggregation, and the query has an aggregation, then an aggregation now"
    )


def test_the_step_that_has_changed_is_named(shop: Shop) -> None:
    hour = "window(minute, '1 hour')"
    twice = f"SELECT {hour} AS hour, sum(n) AS n FROM input GROUP BY {hour}"
    checkpoint = shop.first(twice.replace("input", f"({MINUTES})"), "append")
    for changed, first, second in (
        ("step 2: the state of an aggregation is grouped by window,", MINUTES, f"{twice}, n"),
        (
            "step 1: the state of an aggregation has count BIGINT,",
            MINUTES.replace("AS n", "AS n, max(price) AS most"),
            twice.replace("(n) AS n", "(n) AS n, max(most) AS most"),
        ),
    ):
        sql = second.replace("input", f"({first})")
        steps = {
            "step 1": shop.rows(first, "10 seconds"),
            "step 2": shop.rows(sql, "10 seconds"),
            "step 3": shop.rows(sql, "10 seconds").where("n > 0"),
        }
        assert judge(steps["step 3"], "append", checkpoint, steps).refused.startswith(changed)


def test_a_query_without_state_cannot_get_any(shop: Shop) -> None:
    checkpoint = shop.first("SELECT item FROM input", "append")
    assert assert_spark_agrees(shop, "SELECT price FROM input", "append", checkpoint) == Verdict()
    assert assert_spark_agrees(shop, MINUTES, "append", checkpoint).refused == (
        "the checkpoint has no state, and an aggregation needs it"
    )


def test_a_missing_checkpoint_fits_every_query(shop: Shop, tmp_path: Path) -> None:
    assert judge(shop.rows(COUNT, "1 second"), "update", tmp_path / "none") == Verdict()
    assert not (tmp_path / "none").exists()


SOLD = """
[pipeline.sold]
source = "orders"
decode = { format = "json", schema = "item STRING, price DOUBLE" }
sql = "SELECT item, count(*) AS sold FROM input GROUP BY item"
output_mode = "update"
sink = { topic = "sold" }
trigger = "available-now"
"""


@pytest.mark.usefixtures("root_logger_restored")
def test_check_reports_a_changed_state(
    run: Runs,
    broker: Broker,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda self: None)
    broker.publish("orders", LINES.encode())
    assert run(SOLD)["sold"].state is State.FINISHED
    path = run.directory / "p.toml"

    def checked(text: str) -> tuple[int, str, str]:
        path.write_text(text)
        status = main(["pipeline", "check", str(path)])
        output = capsys.readouterr()
        return status, output.out, output.err

    status, output, _ = checked(
        SOLD.replace("item, count", "upper(item), count").replace("BY item", "BY upper(item)")
    )
    assert (status, "note: " in output) == (0, True)
    changed = SOLD.replace("count(*) AS sold", "count(*) AS sold, sum(price) AS paid")
    checkpoint = run.directory / "checkpoints" / "p" / "sold" / "rows"
    status, output, errors = checked(changed)
    assert (status, output) == (2, "")
    assert errors.startswith(
        f"{path}: [pipeline.sold] does not fit its checkpoint {checkpoint}: the state of an aggregation has "
        "count BIGINT, and would now have count BIGINT, sum DOUBLE. Either run it under another name beside"
    )


def test_a_checkpoint_on_another_machine_is_not_checked(spark: SparkSession) -> None:
    file = parse('[run]\ncheckpoint = "hdfs://host/p"\n[pipeline.p]\nsource = "x"\nsink = "noop"')
    (note,) = check.check_state(spark, file.pipelines[0], queries.Frames({}, {}, {}))
    assert note.startswith("hdfs://host/p/p is not on this machine")
