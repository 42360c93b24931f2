"""Groups B and G: heartbeats and read deadlines. The tests wait at the same time."""

from __future__ import annotations

import time

import pytest

from tests.support import DEADLINE, HEARTBEAT, RESPONSE, ConnectionClosed, unique_name

from .overlap import Overlap

together = Overlap()

INTERVAL = 1.0


def watch(connection, seconds: float = DEADLINE, *, answer: bool) -> tuple[list[float], float | None]:
    """Times of the heartbeats within this many seconds, and of the end of the stream, if any."""
    start = time.monotonic()
    beats: list[float] = []
    while (remaining := start + seconds - time.monotonic()) > 0:
        try:
            frame = connection.read_raw_frame(remaining)
        except TimeoutError:
            break
        except (ConnectionClosed, ConnectionResetError):
            return beats, time.monotonic()
        assert frame == (RESPONSE, HEARTBEAT)
        beats.append(time.monotonic())
        if answer:
            connection.nop()
    return beats, None


def answer_heartbeats(connection, count: int, start: float) -> None:
    """This many heartbeats arrive, none too early; each is answered. `start` is before IDENTIFY."""
    for number in range(1, count + 1):
        assert connection.read_raw_frame() == (RESPONSE, HEARTBEAT)
        assert time.monotonic() - start >= number * INTERVAL - 0.1
        connection.nop()


@together
def test_case_022_without_heartbeats_there_is_no_deadline(broker):
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=-1)
        assert watch(connection, 3.5, answer=False) == ([], None)
        connection.pub(unique_name(), b"still here")


@together
def test_cases_091_and_093_heartbeats_come_each_interval_and_nop_resets_the_deadline(broker):
    with broker.connect() as connection:
        start = time.monotonic()
        connection.identify(heartbeat_interval=1000)
        connection.sub(unique_name(), "c")
        answer_heartbeats(connection, 3, start)
        connection.barrier()


@together
def test_case_092_silent_consumer_is_closed_after_two_intervals_without_a_frame(broker):
    with broker.connect() as connection:
        start = time.monotonic()
        connection.identify(heartbeat_interval=1000)
        connection.sub(unique_name(), "c")
        beats, closed = watch(connection, answer=False)
        assert closed is not None and closed - start >= 1.9
        assert 1 <= len(beats) <= 2


@together
def test_case_092_silent_publisher_is_closed_too(broker):
    with broker.connect() as connection:
        start = time.monotonic()
        connection.identify(heartbeat_interval=1000)
        connection.pub(unique_name(), b"one")
        beats, closed = watch(connection, answer=False)
        assert closed is not None and closed - start >= 1.9
        assert 1 <= len(beats) <= 2


@together
def test_case_092_the_deadline_covers_a_body_that_does_not_come(broker):
    with broker.connect() as connection:
        start = time.monotonic()
        connection.identify(heartbeat_interval=1000)
        connection.send(b"PUB t\n\x00\x00\x00\x10half")
        frames = []
        with pytest.raises((ConnectionClosed, ConnectionError)):
            for _ in range(6):
                time.sleep(0.25)
                connection.send(b".")
            while True:
                frames.append(connection.read_raw_frame())
        # An error frame about the failed read may come last.
        known = [(RESPONSE, HEARTBEAT), (1, b"E_BAD_MESSAGE PUB failed to read message body")]
        assert all(frame in known for frame in frames), frames
        assert time.monotonic() - start >= 1.9


@together
def test_case_093_any_command_resets_the_deadline(broker):
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=1000)
        topic = unique_name()
        connection.sub(topic, "c")
        start = time.monotonic()
        while time.monotonic() - start < 3.4:
            connection.rdy(1)
            watch(connection, 0.2, answer=False)
        connection.barrier()


@together
def test_case_094_publishers_get_heartbeats_like_consumers(broker):
    with broker.connect() as connection:
        start = time.monotonic()
        connection.identify(heartbeat_interval=1000)
        answer_heartbeats(connection, 3, start)
        connection.pub(unique_name(), b"still here")


@together
def test_case_094_heartbeats_come_between_messages(broker):
    topic = unique_name()
    with broker.connect() as connection, broker.connect() as publisher:
        connection.identify(heartbeat_interval=1000)
        connection.sub(topic, "c", rdy=1)
        while connection.heartbeats_seen < 2:
            publisher.pub(topic, b"message")
            connection.fin(connection.read_message().id)
            time.sleep(0.05)
        connection.barrier()


repeated = Overlap()


@pytest.mark.deviation("NSQ's delivery side keeps to the first IDENTIFY")
@repeated
def test_the_latest_identify_sets_the_heartbeat(broker):
    with broker.connect() as faster, broker.connect() as off:
        off.identify(heartbeat_interval=1000)
        off.identify(heartbeat_interval=-1)
        start = time.monotonic()
        faster.identify(heartbeat_interval=60_000)
        faster.identify(heartbeat_interval=1000)
        answer_heartbeats(faster, 1, start)
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
        start = time.monotonic()
        connection.sub(topic, "c", rdy=1)
        connection.read_message()
        assert connection.read_message().attempts == 2
        assert time.monotonic() - start >= 0.95
