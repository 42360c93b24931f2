"""Upserts into a database: Derby, which comes with Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.file.sinks import Jdbc
from nsparq.pipeline.write.jdbc import Connection, JdbcUpsert, _schema_of, options_of
from nsparq.pipeline.write.upsert import Upsert
from nsparq.spark.checkpoint import CheckpointBehind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINK = Jdbc(url="jdbc:derby:memory:upserts;create=true", table="shop.orders", key_columns=("id",))
UPSERT = Upsert(("id",), ("at",))
SCHEMA = "id STRING, item STRING, at INT"


@pytest.fixture
def database(spark: SparkSession) -> Iterator[Connection]:
    with closing(Connection(spark, SINK)) as connection:
        connection.execute("CREATE SCHEMA shop")
        yield connection
    drop = Jdbc(url="jdbc:derby:memory:upserts;drop=true", table="x")
    with pytest.raises(Exception, match="Database 'memory:upserts' dropped"):
        Connection(spark, drop)


class Writer:
    """A run of a query."""

    def __init__(self, spark: SparkSession, query: str = "query") -> None:
        self._spark, self._query = spark, query
        self._upsert = JdbcUpsert(SINK, UPSERT, "[pipeline.p.sink]")

    def write(self, number: int, planned: str, *rows: tuple[Any, ...], schema: str = SCHEMA) -> None:
        batch = self._spark.createDataFrame(rows, schema)
        self._upsert.write(self._query, number, planned, batch)


def rows_of(spark: SparkSession, table: str = "shop.orders") -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in spark.read.jdbc(SINK.url, table).collect())


def tables(spark: SparkSession) -> list[str]:
    found = spark.read.jdbc(SINK.url, "SYS.SYSTABLES").where("TABLETYPE = 'T'").collect()
    return sorted(row.TABLENAME.lower() for row in found)


def test_each_batch_of_a_query_replaces_the_rows_of_its_keys_once(
    spark: SparkSession, database: Connection
) -> None:
    """A batch that runs again changes nothing, even if others have written meanwhile."""
    run = Writer(spark)
    run.write(0, "a0", ("x", "tea", 1), ("x", "milk", 2), ("y", "tea", None))
    run.write(1, "a1", ("y", "juice", 1), ("z", "tea", 1), ("x", "old", 1))
    expected = [("x", "milk", 2), ("y", "juice", 1), ("z", "tea", 1)]
    assert rows_of(spark) == expected
    database.execute("DELETE FROM shop.orders WHERE \"id\" = 'z'")
    again = Writer(spark)
    again.write(1, "a1", ("y", "juice", 1), ("z", "tea", 1), ("x", "old", 1))
    # A checkpoint that is older than the table is refused.
    for number, planned, reason in ((0, "a0", "has batches up to 1"), (1, "b1", "has another batch 1")):
        with pytest.raises(CheckpointBehind, match=reason):
            again.write(number, planned, ("x", "wrong", 3))
    assert rows_of(spark) == expected[:2]
    # Another query has its own numbers.
    Writer(spark, "another").write(0, "b0", ("z", "tea", 1))
    assert rows_of(spark) == expected
    assert tables(spark) == ["nsparq_batches", "orders"]


def test_a_replaced_driver_merges_nothing(
    spark: SparkSession, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops while its tasks write to the staging table, and continues beside another driver."""
    first, second = Writer(spark), Writer(spark)
    first.write(0, "a0", ("x", "tea", 1))
    stage = JdbcUpsert._stage

    def stopped(self: JdbcUpsert, *given: Any) -> None:
        stage(self, *given)
        monkeypatch.undo()
        second.write(1, "a1", ("x", "milk", 2))

    monkeypatch.setattr(JdbcUpsert, "_stage", stopped)
    with pytest.raises(CheckpointBehind, match="another driver of the same query"):
        first.write(1, "a1", ("x", "zombie", 9))
    assert rows_of(spark) == [("x", "milk", 2)]
    assert tables(spark) == ["nsparq_batches", "orders"]


def test_a_staging_table_left_by_a_crash_is_dropped(
    spark: SparkSession, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: Any, *given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(JdbcUpsert, "_merge", crash)
    with pytest.raises(KeyboardInterrupt):
        Writer(spark).write(0, "a0", ("x", "tea", 1))
    monkeypatch.undo()
    assert len(tables(spark)) == 3 and rows_of(spark) == []
    # An error in the transaction leaves the table and the number unchanged.
    monkeypatch.setattr(
        "nsparq.pipeline.write.upsert_sql.Dialect.statements", lambda *_: ["DELETE FROM no_table"]
    )
    with pytest.raises(Exception, match="NO_TABLE"):
        Writer(spark).write(0, "a0", ("x", "tea", 1))
    monkeypatch.undo()
    Writer(spark).write(0, "a0", ("x", "tea", 1))
    assert tables(spark) == ["nsparq_batches", "orders"]
    assert rows_of(spark) == [("x", "tea", 1)]


def test_a_table_of_the_users_keeps_its_types_and_names(spark: SparkSession, database: Connection) -> None:
    database.execute(
        "CREATE TABLE shop.orders "
        '(id VARCHAR(20) NOT NULL PRIMARY KEY, item VARCHAR(9), "AT" INT, more INT DEFAULT 7)'
    )
    database.execute("INSERT INTO shop.orders VALUES ('x', 'tea', 1, 5)")
    Writer(spark).write(0, "a0", ("x", "milk", 2), ("y", "tea", 1))
    assert rows_of(spark) == [("x", "milk", 2, 5), ("y", "tea", 1, 7)]
    with pytest.raises(
        PipelineError, match="the table shop.orders has no column 'price'; it has ID, ITEM, AT"
    ):
        Writer(spark).write(1, "a1", ("x", "tea", 3, 1.0), schema=f"{SCHEMA}, price DOUBLE")


def test_the_usual_driver_is_named_since_java_does_not_find_one_in_spark_jars() -> None:
    url = "jdbc:postgresql://host/db"
    assert options_of(Jdbc(url=url, table="t", user="u"))["driver"] == "org.postgresql.Driver"
    assert options_of(Jdbc(url=url, table="t", driver="x.Y")) == {"driver": "x.Y"}
    assert options_of(SINK) == {}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("orders", ""),
        ("shop.orders", "shop."),
        ('a."b.c"', "a."),
        ('"x.y"."z"', '"x.y".'),
        ("[a].[b]", "[a]."),
    ],
)
def test_our_tables_are_in_the_schema_of_the_users_table(table: str, expected: str) -> None:
    assert _schema_of(table) == expected
