"""Groups B and G: heartbeats and read deadlines. All these tests wait at the same time."""

from __future__ import annotations

import time

import pytest

from tests.support import HEARTBEAT, RESPONSE, ConnectionClosed, unique_name

from .overlap import Overlap

together = Overlap()

INTERVAL = 1.0
LATE = 0.4  # room for a busy machine


def watch(connection, seconds: float, *, answer: bool) -> tuple[list[float], float | None]:
    """Times of the heartbeats seen within so many seconds, and that of the end of stream, if it came."""
    start = time.monotonic()
    beats: list[float] = []
    while (remaining := start + seconds - time.monotonic()) > 0:
        try:
            frame = connection.read_raw_frame(remaining)
        except TimeoutError:
            break
        except (ConnectionClosed, ConnectionResetError):
            return beats, time.monotonic() - start
        assert frame == (RESPONSE, HEARTBEAT)
        beats.append(time.monotonic() - start)
        if answer:
            connection.nop()
    return beats, None


def assert_steady(beats: list[float], count: int) -> None:
    assert len(beats) == count, beats
    for number, beat in enumerate(beats, start=1):
        assert number * INTERVAL - 0.1 <= beat <= number * INTERVAL + LATE, beats


@together
def test_case_022_without_heartbeats_there_is_no_deadline(broker):
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=-1)
        assert watch(connection, 3.5, answer=False) == ([], None)
        connection.pub(unique_name(), b"still here")


@together
def test_cases_091_and_093_heartbeats_come_each_interval_and_nop_resets_the_deadline(broker):
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=1000)
        connection.sub(unique_name(), "c")
        beats, closed = watch(connection, 3.5, answer=True)
        assert_steady(beats, 3)
        assert closed is None
        connection.barrier()


@together
def test_case_092_silent_consumer_is_closed_after_two_intervals_without_a_frame(broker):
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=1000)
        connection.sub(unique_name(), "c")
        beats, closed = watch(connection, 3.5, answer=False)
        assert closed is not None and 1.9 <= closed <= 2.0 + LATE
        assert 1 <= len(beats) <= 2


@together
def test_case_092_silent_publisher_is_closed_too(broker):
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=1000)
        connection.pub(unique_name(), b"one")
        beats, closed = watch(connection, 3.5, answer=False)
        assert closed is not None and 1.9 <= closed <= 2.0 + LATE
        assert 1 <= len(beats) <= 2


@together
def test_case_092_the_deadline_covers_a_body_that_does_not_come(broker):
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=1000)
        start = time.monotonic()
        connection.send(b"PUB t\n\x00\x00\x00\x10half")
        for _ in range(6):
            time.sleep(0.25)
            connection.send(b".")
        with pytest.raises((ConnectionClosed, ConnectionResetError, AssertionError)):
            while True:
                # A frame that tells of the failed read may come first.
                frame = connection.read_raw_frame(2.0)
                assert frame in (
                    (RESPONSE, HEARTBEAT),
                    (1, b"E_BAD_MESSAGE PUB failed to read message body"),
                )
        assert 1.9 <= time.monotonic() - start <= 2.0 + LATE


@together
def test_case_093_any_command_resets_the_deadline(broker):
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=1000)
        topic = unique_name()
        connection.sub(topic, "c")
        start = time.monotonic()
        while time.monotonic() - start < 3.4:
            connection.rdy(1)
            watch(connection, 0.8, answer=False)
        connection.barrier()


@together
def test_case_094_publishers_get_heartbeats_like_consumers(broker):
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=1000)
        beats, closed = watch(connection, 3.5, answer=True)
        assert_steady(beats, 3)
        assert closed is None
        connection.pub(unique_name(), b"still here")


@together
def test_case_094_heartbeats_come_between_messages(broker):
    topic = unique_name()
    with broker.connect() as connection, broker.connect() as publisher:
        connection.identify(heartbeat_interval=1000)
        connection.sub(topic, "c", rdy=1)
        start = time.monotonic()
        while time.monotonic() - start < 2.5:
            publisher.pub(topic, b"message")
            connection.fin(connection.read_message().id)
            time.sleep(0.05)
        connection.barrier()
        assert 1 <= connection.heartbeats_seen <= 3


repeated = Overlap()


@pytest.mark.deviation("NSQ's delivery side keeps to the first IDENTIFY")
@repeated
def test_the_latest_identify_sets_the_heartbeat(broker):
    with broker.connect() as faster, broker.connect() as off:
        off.identify(heartbeat_interval=1000)
        off.identify(heartbeat_interval=-1)
        faster.identify(heartbeat_interval=60_000)
        faster.identify(heartbeat_interval=1000)
        beats, _ = watch(faster, 1.5, answer=True)
        assert_steady(beats, 1)
        assert watch(off, 1.5, answer=False) == ([], None)
        off.pub(unique_name(), b"still here")


@pytest.mark.deviation("NSQ's delivery side keeps to the first IDENTIFY")
@repeated
def test_the_latest_identify_sets_the_message_timeout(broker):
    topic = unique_name()
    broker.publish(topic, b"slow")
    with broker.connect() as connection:
        connection.identify(msg_timeout=60_000)
        connection.identify(msg_timeout=1000)
        connection.sub(topic, "c", rdy=1)
        connection.read_message()
        start = time.monotonic()
        assert connection.read_message(3.0).attempts == 2
        assert 0.95 <= time.monotonic() - start <= 1.0 + LATE
