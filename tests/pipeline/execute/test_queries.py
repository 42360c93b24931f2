"""Pipelines with several sources, outputs and tables, on a real broker and in one Spark session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nsparq.pipeline.errors import PipelineError, retry_helps
from nsparq.pipeline.execute.progress import State
from nsparq.pipeline.file.reading import parse
from nsparq.testing import Broker
from tests.pipeline.conftest import Runs, bodies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("spark")


def order(number: int) -> bytes:
    return json.dumps({"number": number, "at": f"2026-11-15T12:{number:02}:00Z"}).encode()


def numbers(broker: Broker, topic: str) -> list[int]:
    return sorted(one["number"] for one in bodies(broker, topic))


# outputs. test_examples.py runs a pipeline with two sources, twice.

STEPS = """
from pathlib import Path
from pyspark.sql import functions as F

def checked(rows):
    trouble = Path(__file__).with_name("trouble")

    @F.udf("int")
    def same(number):
        if trouble.exists():
            raise OSError("no more room")
        return number

    return rows.select(same("number").alias("number"))
"""
CRASH = """
[run]
retry_delay = "10ms"
[pipeline.two]
source = { topic = "orders", max_rows_per_trigger = 4 }
decode = { format = "json", schema = "number INT NOT NULL, at TIMESTAMP" }
trigger = "0s"
[[pipeline.two.step]]
name = "checked"
python = "crash_steps:checked"
[[pipeline.two.sink]]
from = "messages"
topic = "plain"
[[pipeline.two.sink]]
name = "checked"
parquet = "checked"
"""
LATER = """
[[pipeline.two.sink]]
name = "later"
from = "messages"
topic = "later"
"""


def test_a_crash_of_one_output_loses_and_duplicates_no_rows_of_any(
    run: Runs, broker: Broker, spark: SparkSession
) -> None:
    (run.directory / "crash_steps.py").write_text(STEPS)
    trouble: Path = run.directory / "trouble"
    trouble.touch()
    broker.publish("orders", *(order(number) for number in range(6)))

    def until(figures: object) -> bool:
        assert run.status is not None
        (one,) = run.status.pipelines
        if one.failures and trouble.exists():
            trouble.unlink()
            broker.publish("orders", *(order(number) for number in range(6, 9)))
        return one.rows_written >= 18 and one.lag == 0

    found = run(CRASH, until)["two"]
    assert (found.state, found.rows) == (State.STOPPED, 9)
    assert found.failures and "no more room" in found.error
    # A new output starts at the beginning, and the others continue.
    run(CRASH + LATER, lambda _: len(broker.peek("later")) >= 9)
    assert numbers(broker, "later") == numbers(broker, "plain") == list(range(9))
    rows = spark.read.parquet(str(run.directory / "checked")).collect()
    assert sorted(row.number for row in rows) == list(range(9))


# tables

KINDS = ("parquet", "csv", "delta", "jdbc", "json")
DATABASE = "jdbc:derby:memory:prices;create=true"


def prices(directory: Path) -> str:
    """A pipeline that looks up a number in tables of all kinds."""
    values = ", ".join(f"of_{kind}.v AS {kind}" for kind in KINDS)
    joins = " ".join(f"LEFT JOIN of_{kind} USING (number)" for kind in KINDS)
    return f"""
[pipeline.prices]
source = "sold"
decode = {{ format = "json", schema = "number INT" }}
trigger = "0s"
sql = "SELECT {values} FROM input {joins}"
sink = {{ topic = "prices" }}
[pipeline.prices.tables]
of_parquet = {{ parquet = "parquet" }}
of_csv = {{ csv = "csv", schema = "number INT, v STRING" }}
of_delta = {{ delta = "delta" }}
of_jdbc = {{ jdbc = "{DATABASE}", table = "prices" }}
of_json = {{ format = "json", options = {{ path = "{directory}/json" }} }}
"""


def add_row(spark: SparkSession, directory: Path, number: int, value: str) -> None:
    """Adds a row to each of the tables."""
    import deltalake

    rows = spark.createDataFrame([(number, value)], "number INT, v STRING").coalesce(1)
    for format in ("parquet", "csv", "json"):
        rows.write.format(format).mode("append").option("header", "true").save(str(directory / format))
    deltalake.write_deltalake(str(directory / "delta"), rows.toArrow(), mode="append")
    rows.write.jdbc(DATABASE, "prices", mode="append")


def test_when_changes_of_joined_tables_become_visible(run: Runs, broker: Broker, spark: SparkSession) -> None:
    pytest.importorskip("deltalake")
    add_row(spark, run.directory, 1, "old")
    broker.publish("sold", b'{"number": 1}')

    def until(figures: object) -> bool:
        count = len(broker.peek("prices"))
        if count == 1 and len(broker.peek("sold")) == 1:
            add_row(spark, run.directory, 2, "new")
            broker.publish("sold", b'{"number": 2}')
        return count == 2

    run(prices(run.directory), until)
    broker.publish("sold", b'{"number": 2}')
    run(prices(run.directory), lambda figures: len(broker.peek("prices")) == 3)
    first, while_it_runs, after_a_restart = bodies(broker, "prices")
    assert first == dict.fromkeys(KINDS, "old")
    assert while_it_runs == dict.fromkeys(KINDS) | {"jdbc": "new"}
    assert after_a_restart == dict.fromkeys(KINDS, "new")


@pytest.mark.parametrize(
    ("table", "more", "may_pass", "expected"),
    [
        ('{ parquet = "nothing" }', "", False, r"\[pipeline.p.tables.t\]: .*PATH_NOT_FOUND.*nothing"),
        ('{ delta = "nothing" }', "", False, r"\[pipeline.p.tables.t\]: .*nothing"),
        ('{ jdbc = "jdbc:derby:memory:no", table = "t" }', "", True, r"\.tables.t\]: .*Couldn't connect to"),
        ('{ format = "nonsense" }', "", False, r"\[pipeline.p.tables.t\]: .*nonsense"),
        (
            '{ csv = "t.csv", schema = "a INT" }',
            'sql = "SELECT * FROM t"',
            False,
            r"\[pipeline.p.sink\] from: 'result' reads tables only; it must read a source",
        ),
    ],
)
def test_errors_that_spark_finds_in_a_table(
    spark: SparkSession, tmp_path: Path, table: str, more: str, may_pass: bool, expected: str
) -> None:
    from nsparq.pipeline.execute import check

    (tmp_path / "t.csv").write_text("a\n1\n")
    text = f'[pipeline.p]\nsource = "x"\nsink = "noop"\ntables.t = {table}\n{more}'
    file = parse(text, tmp_path / "p.toml")
    with pytest.raises(PipelineError, match=expected) as caught:
        check.check(spark, file, file.pipelines[0])
    assert retry_helps(caught.value) is may_pass
