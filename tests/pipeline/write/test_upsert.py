"""The newest row of each key, in a micro-batch and against the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from nsparq.pipeline.errors import PipelineError, in_words, retry_helps
from nsparq.pipeline.write.upsert import Upsert

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = "id INT, item STRING, `at.x` INT, n INT, tags MAP<STRING, INT>"
PLACE = "[pipeline.p.sink]"


def latest(spark: SparkSession, upsert: Upsert, *rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    found = upsert.latest_rows(spark.createDataFrame(rows, SCHEMA), ["item"]).collect()
    return sorted(tuple(row) for row in found)


def test_one_row_counts_for_each_key(spark: SparkSession) -> None:
    by_two = Upsert(("id", "item"), ("at.x", "n"))
    rows = [
        (1, "tea", 1, 9, {"a": 1}),
        (1, "tea", 2, 1, {"a": 2}),
        (1, "tea", 2, 0, {"a": 3}),
        # Null is the smallest, and equal rows count once.
        (1, "milk", None, 5, {"b": 1}),
        (1, "milk", 0, None, {"b": 2}),
        (1, "milk", 0, None, {"b": 2}),
    ]
    assert latest(spark, by_two, *rows) == [(1, "milk", 0, None, {"b": 2}), (1, "tea", 2, 1, {"a": 2})]
    assert latest(spark, Upsert(("id", "item"), ()), rows[0], rows[0], rows[3]) == [rows[3], rows[0]]


@pytest.mark.parametrize(
    ("latest_by", "second", "reason"),
    [
        ((), (1, "tea", 2, 1, {}), '{"id":1,"item":"tea"}, and nothing says which one is newer'),
        (("at.x",), (1, "tea", 1, 1, {"a": 1}), "and the same at.x: add columns to latest_by"),
        ((), (None, "tea", 1, 1, {}), 'a row has null in its key: {"id":null,"item":"tea"}'),
        ((), (2, "", 1, 1, {}), 'a row has null in its key: {"id":2,"item":""}'),
    ],
)  # fmt: skip
def test_equally_new_rows_of_a_key_are_refused(
    spark: SparkSession, latest_by: tuple[str, ...], second: tuple[Any, ...], reason: str
) -> None:
    with pytest.raises(PySparkException) as raised:
        latest(spark, Upsert(("id", "item"), latest_by), (1, "tea", 1, 1, {}), second)
    assert reason in in_words(raised.value)
    assert not retry_helps(raised.value)


def test_columns_are_checked_and_the_place_in_the_log_orders_rows_that_have_it() -> None:
    rows = (
        StructType().add("id", "integer").add("price", "double").add("body", "binary").add("_offset", "long")
    )
    assert Upsert.of(["id"], (), rows, PLACE).latest_by == ()
    with_origin = StructType([*rows.fields]).add("_timestamp", "timestamp")
    assert Upsert.of(["id"], (), with_origin, PLACE).latest_by == ("_timestamp", "_offset")
    assert Upsert.of(["id"], ["price"], with_origin, PLACE).latest_by == ("price",)
    for key, latest_by, reason in (
        (["no"], (), r"\[pipeline.p.sink\] key: there is no column 'no'; there are id, price, body"),
        (["price"], (), "key: 'price' is DOUBLE, which cannot be compared reliably"),
        (["id"], ["body"], "latest_by: 'body' is BINARY"),
    ):
        with pytest.raises(PipelineError, match=reason):
            Upsert.of(key, latest_by, rows, PLACE)


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        ((2, 0), (1, 9), True),
        ((1, 9), (2, 0), False),
        ((1, 1), (1, 1), True),
        ((1, 0), (1, 1), False),
        ((1, 0), (None, 1), True),
        ((None, 9), (1, 0), False),
        ((None, 1), (None, 0), True),
        ((None, 0), (None, 1), False),
        ((1, None), (1, 0), False),
        ((1, None), (1, None), True),
    ],
)
def test_a_row_replaces_one_that_is_not_newer(
    new: tuple[int | None, ...], old: tuple[int | None, ...], expected: bool
) -> None:
    import sqlite3

    condition = Upsert(("id",), ("a", "b")).is_later(lambda name: f"s.{name}", lambda name: f"t.{name}")
    with sqlite3.connect(":memory:") as database:
        found = database.execute(
            f"SELECT 1 FROM (SELECT ? a, ? b) s, (SELECT ? a, ? b) t WHERE {condition}", (*new, *old)
        ).fetchall()
    database.close()
    assert bool(found) is expected
