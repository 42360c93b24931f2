"""Tests of the pipelines beside this file: messages in, rows out. They need no broker."""

from pathlib import Path

from pyspark.sql import SparkSession

from nsparq.testing import given, try_pipeline

HERE = Path(__file__).parent


def test_only_large_orders_pass(nsq_spark: SparkSession) -> None:
    orders = [{"number": 1, "item": "tea", "price": 250.0}, {"number": 2, "price": 3.0}, b"one tea please"]
    result = try_pipeline(HERE / "large_orders.toml", "large-orders", {"orders": orders})
    assert result.messages == [{"number": 1, "item": "tea", "price": 250.0}]
    assert [letter["text"] for letter in result.letters] == ["one tea please"]


def test_each_minute_has_its_revenue(nsq_spark: SparkSession) -> None:
    orders = [
        {"item": "tea", "price": 3.0, "at": "2026-11-15T12:00:10Z"},
        {"item": "cake", "price": 4.5, "at": "2026-11-15T12:00:50Z"},
        {"item": "tea", "price": 3.0, "at": "2026-11-15T12:01:00Z"},
    ]
    result = try_pipeline(HERE / "revenue.toml", "revenue", {"orders": orders})
    minutes = sorted(result.messages, key=lambda minute: minute["minute"])
    assert [(one["orders"], one["revenue"]) for one in minutes] == [(2, 7.5), (1, 3.0)]


def test_orders_are_filed_by_country_and_day(nsq_spark: SparkSession) -> None:
    order = {"number": 7, "price": 1.0, "at": "2026-11-15T23:59:59Z", "phone": "+49 30 1"}
    result = try_pipeline(HERE / "lake.toml", "lake", {"orders": [order, given({"number": 8}, attempts=2)]})
    (row,) = result.rows
    assert (row["number"], row["country"], str(row["date"])) == (7, "DE", "2026-11-15")
