"""What a task does with its range: all of it, once, whatever happens to the nsqd meanwhile."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Refused, Unreachable
from nsparq.spark.datasource import SCHEMA
from nsparq.spark.errors import DataLoss, NoAnswer
from nsparq.spark.options import Use
from nsparq.spark.source import range_reader
from nsparq.spark.source.driver import LogSource
from nsparq.spark.source.range_reader import LogRange, close_idle, read_range
from nsparq.testing import Broker, FaultProxy, run_broker
from tests.spark.source.support import numbered, options

ARROW_SCHEMA = to_arrow_schema(SCHEMA, timezone="UTC")


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    close_idle()


@pytest.fixture
def broker() -> Iterator[Broker]:
    with run_broker() as running:
        yield running


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "CHUNK", 64 << 10)
    monkeypatch.setattr(range_reader, "MARGIN", 1)


def work(broker: Broker, **given: Any) -> LogRange:
    """All of topic t, as one task."""
    chosen = options(Use.LOG_BATCH, nsqd=broker.http_address, partitionBytes="1g", **given)
    source = LogSource(chosen)
    try:
        found = source.ranges(*source.batch())
        return replace(found[0], end=found[-1].end, size_bytes=sum(one.size_bytes for one in found))
    finally:
        source.close()


def read(task: LogRange, **given: Any) -> Iterator[pa.RecordBatch]:
    given = {"nsqd": "127.0.0.1:1", "retryFor": "5s", **given}
    return read_range(task, options(Use.LOG_BATCH, **given), ARROW_SCHEMA)


def bodies(batches: Iterator[pa.RecordBatch] | list[pa.RecordBatch]) -> list[bytes]:
    return [body for batch in batches for body in batch["body"].to_pylist()]


def publish(broker: Broker, batches: int, size: int = 1000) -> list[bytes]:
    """Many publishes of a hundred messages each."""
    all_of_them = [number + b"x" * size for number in numbered(batches * 100)]
    for start in range(0, len(all_of_them), 100):
        broker.publish("t", *all_of_them[start : start + 100])
    return all_of_them


def test_a_range_of_many_pieces_gives_every_message_once_and_in_order(
    broker: Broker, small_chunks: None
) -> None:
    sent = publish(broker, 50)
    task = work(broker)
    assert bodies(read(task)) == sent
    part = replace(task, start=task.start + 777, end=task.end - 777, size_bytes=task.size_bytes // 2)
    assert bodies(read(part)) == sent[777:-777]


def test_a_guess_of_its_size_that_is_wrong_does_no_harm(broker: Broker) -> None:
    sent = publish(broker, 20)
    for size in (0, 1, 1 << 40):
        assert bodies(read(replace(work(broker), size_bytes=size))) == sent


def test_bodies_of_a_megabyte_and_of_any_bytes(broker: Broker) -> None:
    sent = [bytes(range(256)) * 4096, b"\0", b"\xff" * 1_000_000, "ü".encode()]
    for body in sent:
        broker.publish("t", body)
    assert bodies(read(work(broker))) == sent


def test_tasks_that_follow_each_other_use_the_same_connection(broker: Broker) -> None:
    broker.publish("t", b"x")
    with FaultProxy(broker.http_address) as proxy:
        task = replace(work(broker), url=f"http://{proxy.address}")
        for _ in range(3):
            assert bodies(read(task)) == [b"x"]
        assert proxy.accepted_count == 1
        close_idle()


def test_a_task_that_is_not_wanted_any_more_leaves_nothing_behind(broker: Broker, small_chunks: None) -> None:
    publish(broker, 50)
    for _ in range(3):
        reading = read(work(broker))
        assert next(reading).num_rows > 0
        reading.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nsq-read")]


def test_memory_is_bounded_by_the_piece_and_not_by_the_range(broker: Broker, small_chunks: None) -> None:
    publish(broker, 100, 2000)
    task = work(broker)
    assert task.size_bytes > 20_000_000
    tracemalloc.start()
    try:
        assert sum(batch.num_rows for batch in read(task)) == 10_000
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


# when something is away


def test_a_task_goes_on_where_it_was_when_the_connection_breaks(broker: Broker, small_chunks: None) -> None:
    sent = publish(broker, 50)
    with FaultProxy(broker.http_address) as proxy:
        reading = read(replace(work(broker), url=f"http://{proxy.address}"))
        found = bodies([next(reading)])
        for fault in (proxy.reset, proxy.disconnect, lambda: proxy.cut_after(100_000)):
            fault()
            healing = threading.Timer(0.1, proxy.heal)
            healing.start()
            found += bodies([next(reading)])
            healing.join()
        found += bodies(reading)
        assert found == sent
        close_idle()


def test_a_task_waits_for_an_nsqd_that_restarts(broker: Broker, small_chunks: None) -> None:
    sent = publish(broker, 50)
    reading = read(work(broker))
    found = bodies([next(reading)])
    broker.stop()
    back = threading.Timer(0.3, broker.start)
    back.start()
    found += bodies(reading)
    back.join()
    assert found == sent


def test_an_nsqd_that_stays_away_fails_the_task(broker: Broker, small_chunks: None) -> None:
    publish(broker, 50)
    reading = read(work(broker), retryFor="200ms")
    next(reading)
    broker.stop()
    with pytest.raises(NoAnswer, match=r"topic t on \S+, numbers \d+ to \d+: .*, for 0.2 seconds"):
        bodies(reading)


def test_an_nsqd_that_does_not_answer_in_time_counts_as_away(broker: Broker) -> None:
    broker.publish("t", b"x")
    with FaultProxy(broker.http_address) as proxy:
        proxy.stall()
        task = replace(work(broker), url=f"http://{proxy.address}")
        with pytest.raises(NoAnswer, match="timed out"):
            bodies(read(task, retryFor="300ms", requestTimeout="100ms"))
        proxy.heal()


# when something is gone


def test_a_topic_deleted_while_it_is_read_fails_the_task_or_ends_it(
    broker: Broker, small_chunks: None
) -> None:
    for fails in (True, False):
        sent = publish(broker, 50)
        reading = read(work(broker), failOnDataLoss=str(fails))
        found = bodies([next(reading)])
        broker.delete("t")
        if fails:
            with pytest.raises(
                DataLoss, match=r"numbers \d+ to \d+: the topic has been deleted, before \d+ was r"
            ):
                bodies(reading)
        else:
            found += bodies(reading)
            assert found == sent[: len(found)] and len(found) < len(sent)


def test_a_log_of_another_incarnation_is_not_read(broker: Broker) -> None:
    broker.publish("t", b"x")
    with pytest.raises(DataLoss, match="the topic has been deleted"):
        bodies(read(replace(work(broker), incarnation="another")))


def test_numbers_that_are_not_there_are_a_loss(broker: Broker) -> None:
    broker.publish("t", b"x")
    task = work(broker)
    ahead = replace(task, end=task.end + 5)
    with pytest.raises(DataLoss, match=f"the log ends at {task.end}, before {task.end} was read"):
        bodies(read(ahead))
    assert bodies(read(ahead, failOnDataLoss="false")) == [b"x"]
    before = replace(task, start=task.start - 5)
    with pytest.raises(DataLoss, match=f"everything before {task.start} has been removed"):
        bodies(read(before))
    assert bodies(read(before, failOnDataLoss="false")) == [b"x"]
    gone = replace(task, start=task.start - 5, end=task.start)
    assert bodies(read(gone, failOnDataLoss="false")) == []


def test_damage_fails_the_task_or_costs_what_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with run_broker(tmp_path) as broker:
        broker.create("t", "c")
        sent = publish(broker, 5)
        broker.stop()
        (segment,) = (tmp_path / "topics" / "t.topic").glob("*.log")
        content = bytearray(segment.read_bytes())
        at = content.find(sent[250])
        content[at] ^= 1
        segment.write_bytes(content)
        broker.start()
        task = work(broker)
        with pytest.raises(DataLoss, match="100 messages are damaged"):
            bodies(read(task))
        assert bodies(read(task, failOnDataLoss="false")) == sent[:200] + sent[300:]
        assert "asking nsqd for the readable rest" in caplog.text


def test_a_task_that_does_not_know_the_ids_asks(broker: Broker) -> None:
    broker.publish("t", b"x")
    task = work(broker)
    assert task.first_id is not None
    (known,), (asked,) = ([*read(replace(task, first_id=value))] for value in (task.first_id, None))
    assert known["id"] == asked["id"]
    assert known["id"].to_pylist() == [message.id for message in broker.peek("t")]


def ids(batches: Iterator[pa.RecordBatch]) -> list[str]:
    return [id for batch in batches for id in batch["id"].to_pylist()]


def test_a_task_asks_for_the_ids_while_nothing_else_uses_the_connection(
    broker: Broker, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(broker, 10)
    task = work(broker)
    known, real = ids(read(task)), Client.first_id

    def ask(self: Client, *arguments: Any) -> int | None:
        assert not [one for one in threading.enumerate() if one.name.startswith("nsq-read")]
        return real(self, *arguments)

    monkeypatch.setattr(Client, "first_id", ask)
    assert ids(read(replace(task, first_id=None))) == known


@pytest.mark.parametrize(
    "trouble",
    [Unreachable("gone"), *(Refused("GET", status, "X", {}) for status in (503, 410, 416)), None],
    ids=lambda error: getattr(error, "status", error),
)
def test_ids_are_right_although_nsqd_does_not_tell_them_at_once(
    broker: Broker, trouble: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.publish("t", b"x")
    task = work(broker)
    troubles, real = iter([trouble]), Client.first_id

    def ask(self: Client, *arguments: Any) -> int | None:
        for error in troubles:
            if error is None:
                return None
            raise error
        return real(self, *arguments)

    monkeypatch.setattr(Client, "first_id", ask)
    assert ids(read(replace(task, first_id=None))) == [message.id for message in broker.peek("t")]


def test_rows_whose_ids_cannot_be_known_any_more_are_a_loss(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.publish("t", b"x")
    task = replace(work(broker), first_id=None)

    def ask(self: Client, *arguments: Any) -> int | None:
        raise Refused("GET /topic/peek", 404, "TOPIC_NOT_FOUND", {})

    monkeypatch.setattr(Client, "first_id", ask)
    with pytest.raises(DataLoss, match="tells the ids"):
        bodies(read(task))
    assert bodies(read(task, failOnDataLoss="false")) == []


def test_an_error_of_the_disk_is_tried_again(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.publish("t", b"x")
    task = work(broker)
    real, refusals = Client.read, iter([500, 503])

    def sometimes(self: Client, *arguments: Any, **more: Any) -> Any:
        for status in refusals:
            raise Refused("GET", status, "LOG_DAMAGED", {})
        return real(self, *arguments, **more)

    monkeypatch.setattr(Client, "read", sometimes)
    assert bodies(read(task)) == [b"x"]
    refusals = iter([403])
    with pytest.raises(Refused):
        bodies(read(task))
