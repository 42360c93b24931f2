"""Pipelines with several sources, outputs and tables, on a real broker and in one Spark session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nsparq.pipeline.progress import State
from nsparq.testing import Broker
from tests.pipeline.conftest import Runs, bodies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("spark")


def order(number: int) -> bytes:
    return json.dumps({"number": number, "at": f"2026-11-15T12:{number:02}:00Z"}).encode()


def payment(number: int) -> bytes:
    return json.dumps({"order": number, "paid": f"2026-11-15T12:{number:02}:30Z"}).encode()


SHOP = """
[pipeline.shop]
trigger = "available-now"
[pipeline.shop.sources.orders]
topic = "orders"
decode = { format = "json", schema = "number INT NOT NULL, at TIMESTAMP" }
dead_letters = "orders.dead"
watermark = { column = "at", delay = "10s" }
[pipeline.shop.sources.payments]
topic = "payments"
decode = { format = "json", schema = "order INT NOT NULL, paid TIMESTAMP" }
dead_letters = "payments.dead"
watermark = { column = "paid", delay = "10s" }
[[pipeline.shop.step]]
name = "settled"
sql = '''SELECT number, paid FROM orders JOIN payments
         ON number = order AND paid BETWEEN at AND at + INTERVAL 1 MINUTE'''
[[pipeline.shop.sink]]
topic = "settled"
[[pipeline.shop.sink]]
name = "orders"
from = "orders"
parquet = "orders"
"""
LATER = """
[[pipeline.shop.sink]]
name = "later"
from = "orders"
topic = "later"
"""


def numbers(broker: Broker, topic: str) -> list[int]:
    return sorted(one["number"] for one in bodies(broker, topic))


def test_streams_are_joined_and_every_output_gets_each_row_once_also_after_a_restart(
    run: Runs, broker: Broker, spark: SparkSession
) -> None:
    broker.publish("orders", *(order(number) for number in range(5)), b"junk")
    broker.publish("payments", *(payment(number) for number in (0, 2)), b"more", b"junk")
    first = run(SHOP)["shop"]
    assert (first.state, first.error) == (State.FINISHED, "")
    # Each message counts once, although two queries read the orders, and one more their dead letters.
    assert (first.rows, first.undecodable, first.dead_letters, first.lag) == (10, 3, 3, 0)
    assert [(one.name, one.rows) for one in first.outputs] == [("", 10), ("orders", 6)]
    assert first.channels.keys() >= {"shop.orders", "shop.payments", "shop.orders.orders", "shop.orders.dead"}

    broker.publish("orders", *(order(number) for number in range(5, 8)))
    broker.publish("payments", *(payment(number) for number in (3, 6)))
    second = run(SHOP + LATER)["shop"]
    assert (second.state, second.error) == (State.FINISHED, "")
    # A payment that comes later finds its order in the state of the query.
    assert numbers(broker, "settled") == [0, 2, 3, 6]
    rows = spark.read.parquet(str(run.directory / "orders")).collect()
    assert sorted(row.number for row in rows) == list(range(8))
    # An output that is new begins at the beginning, and the others go on.
    assert numbers(broker, "later") == list(range(8))
    assert [one["text"] for one in bodies(broker, "orders.dead")] == ["junk"]
    assert [one["channel"] for one in bodies(broker, "payments.dead")] == ["shop.payments"] * 2
    # No channel holds messages for an output that does not read them.
    assert broker.channel_stats("payments", "shop.payments") is not None
    assert broker.channel_stats("payments", "shop.payments.orders") is None


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


def test_a_crash_of_one_output_neither_loses_nor_doubles_rows_of_any(
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
    assert numbers(broker, "plain") == list(range(9))
    rows = spark.read.parquet(str(run.directory / "checked")).collect()
    assert sorted(row.number for row in rows) == list(range(9))
