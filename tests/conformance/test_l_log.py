"""Group L: cases of NSQ's disk queue, on our log: `topics/<topic>.topic/*.log`."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from tests.support import BrokerThread, ConnectionClosed, TestBroker, wait_until
from tests.support.polling import DEADLINE

pytestmark = pytest.mark.deviation("NSQ's disk queue has other files")


def segments(broker: TestBroker, topic: str = "topic") -> list[Path]:
    return sorted((broker.data_path / "topics").glob(f"{topic}.topic/*.log"))


def sizes(broker: TestBroker) -> list[int]:
    return [path.stat().st_size for path in segments(broker)]


def drain(broker: TestBroker, count: int) -> list[bytes]:
    """Read and finish exactly this many messages of a channel, in order; none may follow."""
    with broker.connect() as connection:
        connection.sub("topic", "channel", rdy=min(2500, max(1, count)))
        messages = connection.read_messages(count, finish=True)
        connection.barrier()
        connection.expect_silence(0.2)
        connection.cls()  # so that nothing more is sent here before the end is noticed
        return [message.body for message in messages]


def publish_singly(broker: TestBroker, bodies: list[bytes]) -> None:
    with broker.connect() as connection:
        for body in bodies:
            connection.pub("topic", body)


def bodies(start: int, end: int) -> list[bytes]:
    return [b"message %05d" % number for number in range(start, end)]


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def test_case_163_a_torn_tail_is_cut_off_and_the_rest_is_kept(own_broker, caplog):
    broker = own_broker()
    broker.control("create", "topic", "channel")
    publish_singly(broker, bodies(0, 10))
    broker.stop()
    (segment,) = segments(broker)
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size - 5)
    with caplog.at_level(logging.WARNING):
        broker.start()
    assert "cut off" in caplog.text
    broker.publish("topic", *bodies(10, 15))
    assert drain(broker, 14) == bodies(0, 9) + bodies(10, 15)


def test_case_163_garbage_after_the_last_message_is_cut_off(own_broker):
    broker = own_broker()
    broker.control("create", "topic", "channel")
    publish_singly(broker, bodies(0, 10))
    broker.stop()
    (segment,) = segments(broker)
    with segment.open("ab") as file:
        file.write(b"\x00" * 1000)
    broker.start()
    publish_singly(broker, bodies(10, 12))
    assert drain(broker, 12) == bodies(0, 12)


def test_case_164_a_damaged_batch_is_reported_and_the_next_is_read(own_broker, caplog):
    broker = own_broker(max_bytes_per_file=1000, mem_queue_size=1)
    broker.control("create", "topic", "channel")
    publish_singly(broker, bodies(0, 50))
    broker.stop()
    damaged = segments(broker)[1]
    content = damaged.read_bytes()
    flip_bit(damaged, content.index(b"message"))
    lost = content[content.index(b"message") :][: len(bodies(0, 1)[0])]
    with caplog.at_level(logging.WARNING):
        broker.start()
        expected = [body for body in bodies(0, 50) if body != lost]
        assert drain(broker, 49) == expected
    assert damaged.name in caplog.text
    stats = broker.channel_stats("topic", "channel")
    assert (stats["depth"], stats["in_flight_count"]) == (0, 0)


def test_case_165_segments_roll_at_max_bytes_per_file(own_broker):
    body = b"x" * 100
    probe = own_broker()
    publish_singly(probe, [body])
    (size,) = sizes(probe)
    broker = own_broker(max_bytes_per_file=9 * size)
    publish_singly(broker, [body] * 10)
    assert sizes(broker) == [9 * size, size]


def test_case_165_a_message_larger_than_the_limit_gets_a_segment_of_its_own(own_broker):
    broker = own_broker(max_bytes_per_file=200)
    broker.control("create", "topic", "channel")
    big = [bytes([65 + number]) * 1000 for number in range(3)]
    publish_singly(broker, big)
    assert len(segments(broker)) == 3
    broker.restart()
    assert drain(broker, 3) == big


def test_case_166_changing_max_bytes_per_file_between_runs_loses_nothing(own_broker):
    broker = own_broker(mem_queue_size=5)
    broker.control("create", "topic", "channel")
    for number, limit in enumerate((10_000, 500, 2_000)):
        broker.stop()
        broker.flags["max_bytes_per_file"] = limit
        broker.start()
        publish_singly(broker, bodies(30 * number, 30 * number + 30))
    broker.restart()
    assert drain(broker, 90) == bodies(0, 90)


def test_case_167_finished_messages_do_not_return_after_a_clean_stop(own_broker):
    broker = own_broker(mem_queue_size=10)
    broker.control("create", "topic", "channel")
    broker.publish("topic", *bodies(0, 100))
    with broker.connect() as connection:
        connection.sub("topic", "channel", rdy=100)
        messages = connection.read_messages(100)
        for message in messages[1::3]:
            connection.fin(message.id)
        connection.barrier()
    kept = [message.body for number, message in enumerate(messages) if number % 3 != 1]
    for _ in range(2):
        broker.restart()
        assert broker.channel_stats("topic", "channel")["depth"] == len(kept)
    assert sorted(drain(broker, len(kept))) == sorted(kept)
    broker.restart()
    assert drain(broker, 0) == []


def test_case_167_finished_messages_do_not_return_after_a_crash_once_checkpointed(own_process):
    process = own_process()
    process.publish("topic", *bodies(0, 100))
    with process.connect() as connection:
        connection.sub("topic", "channel", rdy=100)
        messages = connection.read_messages(100)
        for message in messages[:60]:
            connection.fin(message.id)
        connection.barrier()
        connection.expect_silence(1.6)  # the checkpoint is written about every second
        process.kill()
    process.start()
    assert sorted(drain(process, 40)) == sorted(message.body for message in messages[60:])


def test_case_168_concurrent_writers_and_readers_over_restarts_get_every_message(own_broker):
    broker = own_broker(mem_queue_size=50, max_bytes_per_file=20_000)
    broker.control("create", "topic", "channel")
    per_writer, writers = 1500, 3
    acknowledged: list[bytes] = []
    finished: set[bytes] = set()  # FIN known to have been handled
    again: list[bytes] = []
    seen: set[bytes] = set()
    lock = threading.Lock()
    stop = threading.Event()

    def connect():
        while not stop.is_set():
            try:
                return broker.connect()
            except OSError:
                time.sleep(0.01)
        return None

    def write(number: int) -> None:
        waiting = [b"%d:%d" % (number, index) for index in range(per_writer)]
        while waiting and not stop.is_set():
            connection = connect()
            if connection is None:
                return
            with connection:
                try:
                    while waiting:
                        batch = waiting[:10]
                        connection.mpub("topic", batch)
                        with lock:
                            acknowledged.extend(batch)
                        del waiting[:10]
                except (ConnectionClosed, OSError):
                    # They may be stored or not: publish them again with other names, so that each
                    # is unique.
                    waiting = [body + b"'" for body in waiting[:10]] + waiting[10:]

    def read() -> None:
        while not stop.is_set():
            connection = connect()
            if connection is None:
                return
            with connection:
                try:
                    connection.sub("topic", "channel", rdy=20)
                    while not stop.is_set():
                        batch = []
                        try:
                            batch.append(connection.read_message(0.1))
                            while len(batch) < 20:
                                batch.append(connection.read_message(0))
                        except TimeoutError:
                            pass
                        with lock:
                            again.extend(message.body for message in batch if message.body in finished)
                            seen.update(message.body for message in batch)
                        for message in batch:
                            connection.fin(message.id)
                        connection.barrier()
                        with lock:
                            finished.update(message.body for message in batch)
                except (ConnectionClosed, OSError):
                    continue

    def everything_seen() -> bool:
        with lock:
            return seen >= set(acknowledged)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    readers = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads + readers:
        thread.start()
    try:
        for _ in range(3):
            target = len(finished) + 600
            wait_until(lambda target=target: len(finished) >= target or everything_seen())
            broker.restart()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        wait_until(everything_seen)
    finally:
        stop.set()
        for thread in threads + readers:
            thread.join(DEADLINE)
    assert len(acknowledged) == per_writer * writers
    assert len(set(acknowledged)) == len(acknowledged)
    assert again == []
    # A FIN just before the stop may be unknown here, so `seen` must be complete.
    assert seen >= set(acknowledged)


def test_case_169_empty_leaves_no_depth_and_no_old_files(own_broker):
    broker = own_broker(mem_queue_size=5, max_bytes_per_file=2000)
    broker.control("create", "topic", "channel")
    publish_singly(broker, bodies(0, 200))
    assert len(segments(broker)) > 5
    broker.control("empty", "topic", "channel")
    stats = broker.channel_stats("topic", "channel")
    assert (stats["depth"], stats["backend_depth"]) == (0, 0)
    # The segment that is being written may stay.
    wait_until(lambda: len(segments(broker)) <= 1, what="old segments to be removed")
    publish_singly(broker, bodies(200, 210))
    broker.restart()
    assert drain(broker, 10) == bodies(200, 210)


def test_case_169_an_unfinished_message_does_not_hold_its_segments_and_is_not_lost(own_broker):
    broker = own_broker(mem_queue_size=5, max_bytes_per_file=2000)
    with broker.connect() as holder, broker.connect() as publisher:
        holder.sub("topic", "channel", rdy=1)
        publisher.pub("topic", b"stuck")
        stuck = holder.read_message()
        for body in bodies(0, 400):
            publisher.pub("topic", body)
        assert len(segments(broker)) > 10
        assert drain(broker, 400) == bodies(0, 400)
        wait_until(lambda: len(segments(broker)) <= 4, what="segments around one message to be removed")
        holder.rdy(0)
        holder.req(stuck.id, 0)
        holder.barrier()
    assert drain_with_attempts(broker) == [(b"stuck", 2)]


def test_case_169_an_unfinished_message_survives_reclaim_and_restart(own_broker):
    broker = own_broker(mem_queue_size=5, max_bytes_per_file=2000)
    with broker.connect() as holder:
        holder.sub("topic", "channel", rdy=1)
        publish_singly(broker, [b"stuck", *bodies(0, 400)])
        assert holder.read_message().body == b"stuck"
        assert drain(broker, 400) == bodies(0, 400)
        wait_until(lambda: len(segments(broker)) <= 4, what="segments around one message to be removed")
        broker.restart()
    assert drain_with_attempts(broker) == [(b"stuck", 2)]
    broker.restart()
    assert drain(broker, 0) == []


def drain_with_attempts(broker: TestBroker) -> list[tuple[bytes, int]]:
    with broker.connect() as connection:
        connection.sub("topic", "channel", rdy=1)
        message = connection.read_message()
        connection.fin(message.id)
        connection.barrier()
        connection.expect_silence(0.1)
        return [(message.body, message.attempts)]


def test_case_169_consumed_segments_are_removed(own_broker):
    broker = own_broker(mem_queue_size=5, max_bytes_per_file=2000)
    assert isinstance(broker, BrokerThread)
    broker.control("create", "topic", "channel")
    publish_singly(broker, bodies(0, 200))
    assert len(segments(broker)) > 5
    assert drain(broker, 200) == bodies(0, 200)
    wait_until(lambda: len(segments(broker)) <= 1, what="consumed segments to be removed")
