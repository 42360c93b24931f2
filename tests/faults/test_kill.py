"""kill -9: what was acknowledged is delivered after the restart."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import REFERENCE, start_process, wait_until

from .load import assert_whole_or_absent, await_checkpoint, drain, drain_messages, running_load, sequence_of

ROUNDS = 10
CHECKPOINT = 0.2

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason="the reference loses what it holds in memory")


def test_killed_ten_times_under_load_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    with start_process(tmp_path, checkpoint_interval=CHECKPOINT) as broker, running_load(broker, "t") as load:
        may_come_again = 0
        for _ in range(ROUNDS):
            load.await_more(200)
            # Checkpoints are to make a difference.
            now_ns = time.time_ns()
            await_checkpoint(broker, "live", lambda state, now_ns=now_ns: state.written_ns > now_ns)
            may_come_again += load.crash()
            load.await_delivery(load.acknowledged())
        load.stop_publishing()
        acknowledged = load.acknowledged()
        load.await_delivery(acknowledged)

        received = load.received()
        duplicates = received.total() - len(received)
        audited = drain(broker, "t", "audit")
    unanswered = [batch for publisher in load.publishers for batch in publisher.unanswered]
    sys.stdout.write(
        f"{len(acknowledged)} messages acknowledged over {ROUNDS} kills, {duplicates} delivered again, "
        f"{len(unanswered)} batches without an answer\n"
    )
    assert not [publisher.failed for publisher in load.publishers if publisher.failed]
    # A crash may repeat what was delivered since the last checkpoint, not the history.
    assert duplicates <= may_come_again
    # The channel that nobody read has each message once, whatever its neighbour went through.
    assert acknowledged <= set(audited)
    assert len(audited) == len(set(audited))
    assert_whole_or_absent(unanswered, set(audited))
    assert_whole_or_absent(unanswered, set(received))


def test_killed_while_segments_are_reclaimed_nothing_is_lost_or_reported_lost(tmp_path: Path) -> None:
    with (
        start_process(tmp_path, max_bytes_per_file=100_000, checkpoint_interval=CHECKPOINT) as broker,
        running_load(broker, "t", audit=False) as load,
    ):
        for _ in range(3):
            load.await_more(2000)
            load.crash()
            load.await_delivery(load.acknowledged())
        load.stop_publishing()
        load.await_delivery(load.acknowledged())
        published = sum(len(body) for body in load.acknowledged())

        def is_reclaimed() -> bool:
            with suppress(FileNotFoundError):  # reclaimed at this moment
                return sum(file.stat().st_size for file in tmp_path.rglob("*.log")) < published / 2
            return False

        wait_until(is_reclaimed, what="half of the log to be reclaimed")
        broker.restart()
        log = broker.stderr_text()
    # Finished messages whose segment is gone are no loss, and are not reported as one.
    assert not [line for line in log.splitlines() if " ERROR: " in line]


def test_messages_finished_well_before_a_crash_are_not_delivered_again(tmp_path: Path) -> None:
    with start_process(tmp_path, checkpoint_interval=CHECKPOINT) as broker:
        bodies = [b"old-%d" % i for i in range(500)]
        broker.publish("t", *bodies)
        finished = drain_messages(broker, "t", "c", quiet=0.2)
        assert [message.body for message in finished] == bodies
        end = sequence_of(finished[-1].id) + 1
        await_checkpoint(broker, "c", lambda state: state.cursor == end and not len(state.sequences))
        broker.publish("t", b"new")
        broker.kill()
        broker.start()
        assert drain(broker, "t", "c") == [b"new"]


def test_messages_finished_by_a_consumer_without_rdy_are_not_delivered_again(tmp_path: Path) -> None:
    with start_process(tmp_path, checkpoint_interval=CHECKPOINT) as broker, broker.connect() as connection:
        broker.publish("t", b"one", b"two")
        connection.identify()
        connection.sub("t", "c", rdy=2)
        messages = connection.read_messages(2)
        connection.rdy(0)
        connection.barrier()
        await_checkpoint(broker, "c", lambda state: len(state.sequences) == 2)
        for message in messages:
            connection.fin(message.id)
        connection.barrier()
        await_checkpoint(broker, "c", lambda state: not len(state.sequences))
        broker.kill()
        broker.start()
        assert drain(broker, "t", "c") == []


def test_attempts_survive_a_crash(tmp_path: Path) -> None:
    with start_process(tmp_path, checkpoint_interval=CHECKPOINT) as broker:
        broker.publish("t", b"one")
        with broker.connect() as connection:
            connection.identify()
            connection.sub("t", "c", rdy=1)
            for attempt in (1, 2, 3):
                message = connection.read_message()
                assert message.attempts == attempt
                connection.req(message.id)
            connection.rdy(0)
            connection.barrier()
            # RDY 0 may come after the message has gone out for a fourth time.
            await_checkpoint(broker, "c", lambda state: (state.attempts >= 3).any())
            broker.kill()
        broker.start()
        with broker.connect() as connection:
            connection.identify()
            connection.sub("t", "c", rdy=1)
            assert connection.read_message().attempts >= 4


@pytest.mark.parametrize("is_noted", [False, True], ids=["at once", "after a checkpoint"])
def test_a_deferred_message_is_not_early_after_a_crash(tmp_path: Path, is_noted: bool) -> None:
    with start_process(tmp_path, checkpoint_interval=CHECKPOINT) as broker:
        with broker.connect() as connection:
            connection.identify()
            connection.sub("t", "c")
            published, now_ns = time.monotonic(), time.time_ns()
            connection.dpub("t", 3000, b"later")
            connection.pub("t", b"now")
        if is_noted:
            await_checkpoint(broker, "c", lambda state: state.written_ns > now_ns)
        broker.kill()
        broker.start()
        with broker.connect() as connection:
            connection.identify()
            connection.sub("t", "c", rdy=10)
            first, second = connection.read_messages(2, finish=True)
            assert (first.body, second.body) == (b"now", b"later")
            assert time.monotonic() - published >= 2.9
