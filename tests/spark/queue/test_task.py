"""Filling a slot, with a crash at every point: nothing is lost or doubled."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import nsparq.spark.queue.reader
from nsparq.spark.queue import staging
from nsparq.spark.queue.connection import QueueConnection, QueueError
from nsparq.spark.queue.reader import task_settings
from nsparq.spark.queue.staging import Lost, Slot, Staging
from nsparq.spark.queue.task import fill, rows_of
from tests.spark.queue.support import Crash, Query, address, numbered, options
from tests.support import RawConnection, TestBroker, start_broker, start_process, wait_until


@pytest.fixture(scope="module")
def shared() -> Iterator[TestBroker]:
    with start_broker() as found:
        yield found


@pytest.fixture
def broker(shared: TestBroker) -> Iterator[TestBroker]:
    shared.control("create", "t", "c")
    yield shared
    shared.control("delete", "t")


@pytest.fixture
def query(tmp_path: Path, broker: TestBroker) -> Iterator[Query]:
    found = Query(tmp_path, broker)
    yield found
    found.kill()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks even of few messages, and no long waiting for more."""
    monkeypatch.setattr("nsparq.spark.queue.reader.WAIT_S", 0.05)
    # A busy machine is silent at times.
    monkeypatch.setattr("nsparq.spark.queue.task.IDLE_S", 0.5)
    monkeypatch.setattr("nsparq.spark.queue.task.FIRST_ROWS", 100)
    monkeypatch.setattr("nsparq.spark.queue.task.WINDOW_BYTES", 42 * 100)


def channel(broker: TestBroker) -> dict[str, Any]:
    found = broker.channel_stats("t", "c")
    assert found is not None
    return found


def assert_once(query: Query, bodies: list[bytes]) -> None:
    counts = query.counts()
    assert not {*bodies} - counts.keys(), "lost"
    assert counts == Counter(bodies)


# what a batch is


def test_a_batch_takes_what_was_there_in_several_chunks(query: Query, broker: TestBroker) -> None:
    bodies = numbered(1000)
    broker.publish("t", *bodies)
    assert query.step() == 1000
    assert_once(query, bodies)
    files = os.listdir(query.staging / "batch-1")
    chunks = [name for name in files if name.endswith(".arrow")]
    assert len(chunks) > 5 and len(files) == 2 * len(chunks), "each chunk is proven"
    assert (channel(broker)["depth"], channel(broker)["in_flight_count"]) == (0, 0)


def test_rows_say_what_is_known_of_a_message(query: Query, broker: TestBroker) -> None:
    broker.publish("t", b"\x00\xff binary")
    query.step()
    (row,) = query.rows
    assert (row["topic"], row["body"], row["attempts"]) == ("t", b"\x00\xff binary", 1)
    assert row["offset"] == -1, "it has no place in a log"
    assert row["node"].rpartition(":")[2] == address(broker).rpartition(":")[2]
    assert len(row["id"]) == 16
    assert abs(row["timestamp"].timestamp() - os.stat(query.staging / "batch-1").st_mtime) < 30


def test_a_batch_is_one_chunk_when_that_is_enough(query: Query, broker: TestBroker) -> None:
    broker.publish("t", *numbered(50))
    assert query.step() == 50
    assert sorted(os.listdir(query.staging / "batch-1")) == ["0-000000.arrow", "0-000000.fin"]


def test_no_more_is_taken_than_was_planned(query: Query, broker: TestBroker) -> None:
    broker.publish("t", *numbered(300))
    query.start()
    assert query.reader is not None and query._plan(query.reader)
    broker.publish("t", *numbered(300, 300))
    assert query.step() == 300
    assert channel(broker)["depth"] == 300


def test_a_batch_ends_when_others_have_taken_the_rest(query: Query, broker: TestBroker) -> None:
    broker.publish("t", *numbered(300))
    query.start()
    assert query.reader is not None and query._plan(query.reader)
    with broker.connect() as other:
        other.sub("t", "c", rdy=2500)
        mine = [message.body for message in other.read_messages(300, finish=True)]
        other.barrier()
    broker.publish("t", *numbered(10, 300))
    assert query.step() == 10
    assert sorted(mine) == numbered(300)


def test_large_messages_are_taken_a_few_at_a_time(
    tmp_path: Path, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsparq.spark.queue.task.WINDOW_BYTES", 4 << 20)
    monkeypatch.setattr("nsparq.spark.queue.task.CHUNK_BYTES", 2 << 20)
    windows: list[int] = []
    ready = QueueConnection.ready
    monkeypatch.setattr(QueueConnection, "ready", lambda self, n: (windows.append(n), ready(self, n))[1])
    bodies = [b"%02d" % number * (1 << 19) for number in range(20)]
    with RawConnection(broker.address) as publisher:
        for body in bodies:
            publisher.pub("t", body)
    query = Query(tmp_path, broker, messageTimeout="60s")
    assert query.step() == 20
    assert_once(query, bodies)
    assert max(windows) <= 8
    query.kill()


# crashes


def crash_before_link(patch: pytest.MonkeyPatch, nth: int) -> None:
    _patch_nth(patch, staging.os, "link", nth, before=True)


def crash_after_link(patch: pytest.MonkeyPatch, nth: int) -> None:
    _patch_nth(patch, staging.os, "link", nth, before=False)


def crash_mid_fin(patch: pytest.MonkeyPatch, nth: int) -> None:
    finish = QueueConnection.finish

    def half(self: QueueConnection, ids: bytes) -> None:
        finish(self, ids[: len(ids) // 32 * 16])
        raise Crash

    _replace_nth(patch, QueueConnection, "finish", nth, half)


def crash_after_fin(patch: pytest.MonkeyPatch, nth: int) -> None:
    _patch_nth(patch, QueueConnection, "finish", nth, before=False)


def crash_before_proof(patch: pytest.MonkeyPatch, nth: int) -> None:
    _patch_nth(patch, QueueConnection, "confirm_fins", 0, before=True)


def crash_after_proof(patch: pytest.MonkeyPatch, nth: int) -> None:
    _patch_nth(patch, Slot, "mark_finished", nth, before=False)


def crash_before_sink(patch: pytest.MonkeyPatch, nth: int) -> None:
    _patch_nth(patch, nsparq.spark.queue.reader, "fill", 0, before=False)


def crash_after_sink(patch: pytest.MonkeyPatch, nth: int) -> None:
    _patch_nth(patch, Query, "before_commit", 0, before=True)


def _patch_nth(patch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, *, before: bool) -> None:
    original = getattr(owner, name)

    def crash(*arguments: Any, **named: Any) -> None:
        if not before:
            original(*arguments, **named)
        raise Crash

    _replace_nth(patch, owner, name, nth, crash)


def _replace_nth(
    patch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, other: Callable[..., Any]
) -> None:
    original = getattr(owner, name)
    calls = iter(range(1 << 30))

    def call(*arguments: Any, **named: Any) -> Any:
        return (other if next(calls) == nth else original)(*arguments, **named)

    patch.setattr(owner, name, call)


POINTS = [
    crash_before_link,
    crash_after_link,
    crash_mid_fin,
    crash_after_fin,
    crash_before_proof,
    crash_after_proof,
    crash_before_sink,
    crash_after_sink,
]


@pytest.mark.parametrize("nth", [0, 2])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
def test_a_crash_at_any_point_loses_nothing_and_doubles_nothing(
    query: Query, broker: TestBroker, monkeypatch: pytest.MonkeyPatch, point: Any, nth: int
) -> None:
    bodies = numbered(400)
    query.start()
    query.step()  # Whoever it is that owns the directory is written before the first batch.
    broker.publish("t", *bodies)
    with monkeypatch.context() as patch:
        point(patch, nth)
        with pytest.raises(Crash):
            query.step()
    query.start()
    more = numbered(100, 400)
    broker.publish("t", *more)
    query.drain_until(bodies + more)
    assert_once(query, bodies + more)
    wait_until(lambda: _is_worked_off(query, broker), interval=0.1)
    assert_once(query, bodies + more)


def _is_worked_off(query: Query, broker: TestBroker) -> bool:
    query.step()
    found = channel(broker)
    return found["depth"] == found["in_flight_count"] == 0


@pytest.mark.parametrize("point", [crash_after_link, crash_mid_fin], ids=lambda point: point.__name__)
def test_without_dedupe_a_crash_doubles_what_was_staged_and_not_finished(
    tmp_path: Path, broker: TestBroker, monkeypatch: pytest.MonkeyPatch, point: Any
) -> None:
    query = Query(tmp_path, broker, dedupe="false")
    query.step()
    bodies = numbered(80)
    broker.publish("t", *bodies)
    with monkeypatch.context() as patch:
        point(patch, 0)
        with pytest.raises(Crash):
            query.step()
    query.start()
    query.drain_until(bodies)
    wait_until(lambda: _is_worked_off(query, broker), interval=0.1)
    counts = query.counts()
    assert counts.keys() == {*bodies}
    doubled = sum(counts.values()) - len(bodies)
    assert doubled == {"crash_after_link": 80, "crash_mid_fin": 40}[point.__name__]
    query.kill()


def test_crashes_one_after_the_other_still_lose_nothing(
    query: Query, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = numbered(600)
    query.step()
    for round, point in enumerate([*POINTS, *reversed(POINTS)]):
        broker.publish("t", *bodies[round * 30 : round * 30 + 30])
        with monkeypatch.context() as patch:
            point(patch, 0)
            try:
                for _ in range(4):
                    query.step()
            except Crash:
                pass
        query.start()
    broker.publish("t", *bodies[480:])
    query.drain_until(bodies)
    wait_until(lambda: _is_worked_off(query, broker), interval=0.1)
    assert_once(query, bodies)


def test_a_batch_that_the_sink_has_takes_nothing_new_when_it_is_run_again(
    query: Query, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The sink would not look at it: whatever it took then would be lost.
    broker.publish("t", *numbered(50))
    with monkeypatch.context() as patch:
        crash_after_sink(patch, 0)
        with pytest.raises(Crash):
            query.step()
    broker.publish("t", *numbered(50, 50))
    query.start()
    assert query.step() == 50
    assert channel(broker)["depth"] == 50
    query.drain()
    assert_once(query, numbered(100))


def test_staged_messages_are_dropped_even_if_nsqd_has_reset_their_attempts(
    query: Query, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that was killed says of what it delivers again that it is the first time.
    query.step()
    broker.publish("t", *numbered(80))
    with monkeypatch.context() as patch:
        crash_after_link(patch, 0)
        with pytest.raises(Crash):
            query.step()
    query.start()
    take = QueueConnection.take

    def forgetful(self: QueueConnection) -> Any:
        taken = take(self)
        ones = pa.array([1] * len(taken.rows), pa.int32())
        return taken._replace(rows=taken.rows.set_column(1, taken.rows.schema.field(1), ones))

    monkeypatch.setattr(QueueConnection, "take", forgetful)
    query.drain_until(numbered(80))
    wait_until(lambda: _is_worked_off(query, broker), interval=0.1)
    assert_once(query, numbered(80))


# several attempts at a time


def test_an_attempt_that_comes_second_follows_the_first(query: Query, broker: TestBroker) -> None:
    broker.publish("t", *numbered(300))
    reader = query.start()
    assert query._plan(reader)
    part = query.partition()
    first = [*reader.read(part)]
    again = [*reader.read(part)]
    assert sum(map(len, first)) == 300
    assert all(a.equals(b) for a, b in zip(first, again, strict=True))
    query.step()
    assert_once(query, numbered(300))


def test_the_loser_of_a_race_gives_back_what_it_took(
    query: Query, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It stands just before its first link while another attempt does all the work.
    broker.publish("t", *numbered(300))
    reader = query.start()
    assert query._plan(reader)
    part = query.partition()
    how = task_settings(query._options)
    link = os.link
    calls = iter(range(1 << 30))

    def overtaken(source: Any, target: Any) -> None:
        if next(calls) == 0:
            fill(Staging(query.staging), part, how)
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(staging.os, "link", overtaken)
        slot = fill(Staging(query.staging), part, how)
    taken = [row for rows in rows_of(slot, reader._schema) for row in rows.column("body").to_pylist()]
    assert len(taken) < 300, "the loser held some of them"
    query.step()
    query.drain_until(numbered(300))
    assert_once(query, numbered(300))


def test_attempts_side_by_side_make_one_result(query: Query, broker: TestBroker) -> None:
    broker.publish("t", *numbered(2000))
    reader = query.start()
    assert query._plan(reader)
    part = query.partition()
    results: list[list[bytes]] = []

    def attempt() -> None:
        rows = [row for rows in reader.read(part) for row in rows.column("body").to_pylist()]
        results.append(rows)

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(one == results[0] for one in results)
    query.step()
    query.drain_until(numbered(2000))
    wait_until(lambda: _is_worked_off(query, broker), interval=0.1)
    assert_once(query, numbered(2000))


def test_a_zombie_finishes_nothing_once_its_batch_is_over(
    query: Query, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.publish("t", *numbered(300))
    reader = query.start()
    assert query._plan(reader)
    part = query.partition()
    how = task_settings(query._options)
    link = os.link
    calls = iter(range(1 << 30))

    def overtaken(source: Any, target: Any) -> None:
        if next(calls) == 0:
            query.step()
            query.step()
            assert not (query.staging / "batch-1").exists() or query.reader is not None
            reader.commit(query.offsets[0])
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(staging.os, "link", overtaken)
        with pytest.raises(Lost):
            fill(Staging(query.staging), part, how)
    query.drain_until(numbered(300))
    assert_once(query, numbered(300))


# when something is away


def test_a_node_that_is_away_ends_its_slot_and_not_the_query(query: Query, broker: TestBroker) -> None:
    broker.publish("t", *numbered(10))
    reader = query.start()
    assert query._plan(reader)
    part = query.partition()
    part.address = "127.0.0.1:1"
    assert [*reader.read(part)] == []
    assert query.step() == 0, "that is what this batch is, now and for ever"
    query.drain_until(numbered(10))


def test_a_node_that_nobody_knows_ends_its_slot(query: Query, broker: TestBroker) -> None:
    broker.publish("t", *numbered(10))
    reader = query.start()
    assert query._plan(reader)
    part = query.partition()
    part.address = ""
    assert [*reader.read(part)] == []


def test_a_refusal_is_an_error_and_the_batch_stays_open(query: Query, broker: TestBroker) -> None:
    broker.publish("t", *numbered(10))
    reader = query.start()
    assert query._plan(reader)
    part = query.partition()
    part.address = address(broker)
    with pytest.raises(QueueError):
        reader.read(part)
    assert query.step() == 10


def test_a_disk_that_is_too_slow_gives_messages_back(
    query: Query, broker: TestBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    query.step()
    broker.publish("t", *numbered(10))
    publish = Slot.publish

    def late(self: Slot, index: int, chunk: Any, until: float | None = None) -> bool:
        return publish(self, index, chunk, until=None if until is None else 0.0)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Slot, "publish", late)
        assert query.step() == 0
    assert "increase option messageTimeout" in caplog.text
    query.drain_until(numbered(10))
    assert_once(query, numbered(10))


def test_an_nsqd_that_dies_while_it_delivers_ends_the_slot(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with start_process(tmp_path / "data") as victim:
        query = Query(tmp_path, victim)
        query.step()
        victim.publish("t", *numbered(1000))
        connections: list[QueueConnection] = []
        receive = QueueConnection.receive

        def dying(self: QueueConnection, seconds: float) -> bool:
            came = receive(self, seconds)
            if self not in connections:
                connections.append(self)
            elif victim.alive():
                victim.kill()
            return came

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(QueueConnection, "receive", dying)
            count = query.step()
        assert count is not None and count < 1000
        query.kill()


def test_a_slot_without_its_end_is_never_taken_for_whole(query: Query, broker: TestBroker) -> None:
    broker.publish("t", *numbered(300))
    reader = query.start()
    assert query._plan(reader)
    part = query.partition()
    rows = reader.read(part)
    assert len(next(rows)) < 300
    for path in (query.staging / "batch-1").glob("*.arrow"):
        path.unlink()
    with pytest.raises(Lost):
        list(rows)


def test_task_settings_follow_from_the_options(broker: TestBroker) -> None:
    how = task_settings(
        options(
            broker,
            staging="/nowhere",
            messageTimeout="7s",
            batchDuration="3s",
            dedupe="false",
            authToken="s",
            tls="true",
            tlsVerify="false",
            snappy="true",
        )
    )
    assert (how.channel, how.batch_duration, how.dedupe) == ("c", 3.0, False)
    config = how.config
    assert (config.msg_timeout, config.auth_secret, config.snappy) == (7.0, "s", True)
    assert config.tls_v1 and config.tls_insecure_skip_verify


@pytest.mark.parametrize(("given", "seconds"), [("0", 60.0), ("1h", 300.0), ("1ms", 0.1), ("7s", 7.0)])
def test_any_request_timeout_is_one_for_the_connection(
    broker: TestBroker, given: str, seconds: float
) -> None:
    config = task_settings(options(broker, staging="/nowhere", requestTimeout=given)).config
    assert config.handshake_timeout == config.write_timeout == seconds
