"""Setting the wall clock affects no interval or timeout while nsqd runs, and little after a
restart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsparq.broker.stats import channel_stats
from nsparq.broker.transaction import Incomplete
from nsparq.flags import MAX_DURATION_S
from nsparq.packed import PackedBodies
from tests.broker.rig import SECOND, Later, Rig, bodies, counts

MakeRig = Callable[..., Rig]

HOUR = 3600
either_way = pytest.mark.parametrize("step", [-HOUR, HOUR], ids=["an hour back", "an hour forward"])


# while it runs


@either_way
def test_checkpoints_continue_when_the_clock_is_set(rig: Rig, step: float):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"before")
    rig.finish(client, *client.take())
    rig.maintain()
    rig.clock.set_wall(step)
    rig.publish("t", b"after")
    rig.finish(client, *client.take())
    rig.clock.advance(1)
    rig.maintain()
    rig.crash()
    assert counts(rig.channel()) == (0, 0, 0)


@either_way
def test_syncs_keep_their_interval_when_the_clock_is_set(make_rig: MakeRig, step: float):
    rig = make_rig(sync_timeout=2.0)
    rig.publish("t", b"x")
    rig.maintain()
    synced = rig.files.calls["sync"]
    rig.publish("t", b"x")
    rig.clock.set_wall(step)
    rig.clock.advance(0.9)
    rig.maintain()
    assert rig.files.calls["sync"] == synced
    rig.clock.advance(0.1)
    rig.maintain()
    assert rig.files.calls["sync"] == synced + 1


@either_way
def test_syncs_after_so_many_messages_stay_a_tenth_of_a_second_apart(make_rig: MakeRig, step: float):
    later = Later()
    rig = make_rig(sync_every=10, background=later)
    rig.publish("t", *bodies(10))
    later.run_all()
    rig.clock.set_wall(step)
    rig.publish("t", *bodies(10))
    later.run_all()
    assert rig.files.calls["sync"] == 1
    rig.clock.advance(0.1)
    rig.publish("t", *bodies(10))
    later.run_all()
    assert rig.files.calls["sync"] == 2


@either_way
def test_messages_in_flight_time_out_when_their_time_is_over(rig: Rig, step: float):
    client = rig.subscribe(rdy=2)
    rig.publish("t", b"touched", b"not touched")
    first, _ = client.take()
    rig.clock.set_wall(step)
    rig.pass_time(59)
    rig.touch(client, first)
    assert client.take() == []
    rig.pass_time(1)
    assert client.take_bodies() == [b"not touched"]
    rig.pass_time(59)
    assert b"touched" in client.take_bodies()


@either_way
def test_deferred_messages_come_when_they_are_due(rig: Rig, step: float):
    client = rig.subscribe(rdy=10)
    rig.publish("t", b"put back")
    rig.requeue(client, client.take()[0], timeout_ms=10_000)
    rig.publish("t", b"published with a delay", defer_ms=10_000)
    rig.publish("without channel", b"published with a delay", defer_ms=10_000)
    rig.clock.set_wall(step)
    other = rig.subscribe("without channel", rdy=10)
    rig.pass_time(9.999)
    assert client.take() == other.take() == []
    rig.pass_time(0.001)
    assert sorted(client.take_bodies()) == [b"published with a delay", b"put back"]
    assert other.take_bodies() == [b"published with a delay"]


@either_way
def test_due_times_are_shown_in_the_present_wall_time(rig: Rig, step: float):
    rig.channel()
    rig.publish("t", b"x", defer_ms=10_000)
    rig.clock.set_wall(step)
    (due_ns,) = rig.channel().unfinished.deferred.due_ns.values()
    assert rig.broker.wall_of(due_ns) == rig.clock.wall() + 10 * SECOND


@either_way
def test_a_staged_transaction_without_requests_is_dropped_after_the_timeout(rig: Rig, step: float):
    transactions = rig.broker.transactions
    transactions.stage("p", 1, "part", "t", PackedBodies.of(bodies(3)))
    rig.clock.set_wall(step)
    rig.clock.advance(HOUR - 1)
    rig.maintain()
    assert transactions.promise("p", 1, {"part": 3}).messages == 3
    transactions.stage("p", 2, "part", "t", PackedBodies.of(bodies(3)))
    rig.clock.advance(HOUR + 1)
    rig.maintain()
    assert [*transactions.producers["p"].open] == [1]
    with pytest.raises(Incomplete):
        transactions.promise("p", 2, {"part": 3})


@either_way
def test_latencies_stay_in_their_window(make_rig: MakeRig, step: float):
    rig = make_rig(e2e_processing_latency_percentile=(1.0,), e2e_processing_latency_window_time=600)
    client = rig.subscribe(rdy=1)

    def count() -> int:
        channel = channel_stats(rig.channel())
        return channel["e2e_processing_latency"]["count"]

    rig.publish("t", b"x")
    rig.finish(client, *client.take())
    rig.clock.set_wall(step)
    rig.clock.advance(299)
    assert count() == 1
    rig.clock.advance(601)
    assert count() == 0


# over a restart


def deferred_rig(rig: Rig) -> Rig:
    """Two messages that are due in 30 seconds: one requeued, and one published with a delay."""
    client = rig.subscribe(rdy=10)
    rig.publish("t", b"put back")
    rig.requeue(client, client.take()[0], timeout_ms=30_000)
    rig.publish("t", b"published with a delay", defer_ms=30_000)
    rig.maintain()
    return rig


def waits(rig: Rig) -> set[float]:
    """How many seconds the channel's deferred messages still wait."""
    return {(due_ns - rig.clock()) / SECOND for due_ns in rig.channel().unfinished.deferred.due_ns.values()}


@pytest.mark.parametrize("stop", [Rig.close, Rig.drop], ids=["a clean stop", "a crash"])
def test_a_delay_continues_while_nsqd_is_down_and_over_a_reboot(rig: Rig, stop: Callable[[Rig], None]):
    stop(deferred_rig(rig))
    rig.clock.advance(10)
    rig.clock.reboot()
    rig.start()
    assert waits(rig) == {20}
    assert counts(rig.channel()) == (0, 0, 2)


def test_a_clock_set_while_nsqd_runs_does_not_matter_at_the_next_start(rig: Rig):
    deferred_rig(rig)
    rig.clock.set_wall(-HOUR)
    rig.restart()
    assert waits(rig) == {30}


@pytest.mark.parametrize("stop", [Rig.close, Rig.drop], ids=["a clean stop", "a crash"])
def test_a_clock_set_back_while_nsqd_is_down_makes_no_delay_longer_than_it_was_at_the_stop(
    rig: Rig, stop: Callable[[Rig], None]
):
    stop(deferred_rig(rig))
    rig.clock.set_wall(-HOUR)
    rig.start()
    assert waits(rig) == {30}


def test_a_message_published_after_the_clock_was_set_back_is_not_early_after_a_crash(rig: Rig):
    rig.subscribe()
    rig.maintain()
    rig.clock.set_wall(-HOUR)
    rig.publish("t", b"later than the checkpoint", defer_ms=30_000)
    rig.drop()
    rig.start()
    assert waits(rig) == {30}


def test_a_clock_set_forward_while_nsqd_is_down_counts_as_elapsed_time(rig: Rig):
    deferred_rig(rig).close()
    rig.clock.set_wall(HOUR)
    rig.start()
    client = rig.subscribe(rdy=10)
    rig.scan()
    assert len(client.take()) == 2


def test_no_delay_read_back_is_longer_than_a_client_can_ask_for(make_rig: MakeRig):
    """A message that no channel has seen: only the log has its due time."""
    rig = make_rig(max_req_timeout=HOUR)
    rig.publish("t", b"x", defer_ms=30_000)
    rig.close()
    rig.clock.set_wall(-1000 * HOUR)
    rig.start()
    assert waits(rig) == {HOUR}


def test_the_longest_delay_that_an_option_allows_is_kept(make_rig: MakeRig):
    rig = make_rig(max_req_timeout=MAX_DURATION_S)
    rig.options.validate()
    longest_ms = round(MAX_DURATION_S * 1000)
    client = rig.subscribe(rdy=10)
    rig.publish("t", b"put back")
    rig.requeue(client, client.take()[0], timeout_ms=longest_ms)
    rig.publish("t", b"published with a delay", defer_ms=longest_ms)
    rig.maintain()
    rig.crash(1)
    assert waits(rig) == {MAX_DURATION_S - 1}


# what is removed because of its age


def retaining_rig(make_rig: MakeRig, age: float = HOUR) -> Rig:
    """Ten segments that nobody needs, with a retention of an hour."""
    rig = make_rig(max_bytes_per_file=1000, retention_age=age)
    client = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(1, size=800))
    for number in range(1, 10):
        rig.clock.advance(1)
        rig.publish("t", *bodies(1, start=number, size=800))
    rig.finish(client, *client.take())
    rig.maintain()
    assert len(rig.names("*.log")) == 10
    return rig


def live(rig: Rig, seconds: int) -> None:
    """Let time pass, with upkeep every second."""
    for _ in range(seconds):
        rig.clock.advance(1)
        rig.maintain()


@either_way
def test_segments_are_kept_for_their_age_when_the_clock_is_set_while_nsqd_runs(
    make_rig: MakeRig, step: float
):
    rig = retaining_rig(make_rig)
    rig.clock.set_wall(step)
    live(rig, HOUR - 10)
    assert len(rig.names("*.log")) == 10


@either_way
def test_segments_are_kept_for_their_age_when_the_clock_is_set_while_nsqd_is_down(
    make_rig: MakeRig, step: float
):
    rig = retaining_rig(make_rig)
    rig.close()
    rig.clock.set_wall(step)
    rig.start()
    live(rig, HOUR - 10)
    assert len(rig.names("*.log")) == 10


def test_segments_of_idle_topics_are_removed_at_their_age(make_rig: MakeRig):
    rig = retaining_rig(make_rig)
    live(rig, HOUR - 10)
    assert len(rig.names("*.log")) == 10
    live(rig, 70)
    assert len(rig.names("*.log")) == 1


def test_after_a_short_stop_age_counts_at_once(make_rig: MakeRig):
    rig = retaining_rig(make_rig)
    live(rig, HOUR - 10)
    rig.publish("t", b"now")
    rig.finish(client := rig.subscribe(rdy=1), *client.take())
    rig.close()
    rig.clock.advance(20)
    rig.start()
    rig.maintain()
    assert len(rig.names("*.log")) == 1


def test_a_clock_set_forward_is_trusted_after_an_hour(make_rig: MakeRig, caplog: pytest.LogCaptureFixture):
    rig = retaining_rig(make_rig, age=100 * HOUR)
    rig.clock.set_wall(200 * HOUR)
    live(rig, HOUR - 10)
    rig.clock.set_wall(100 * HOUR)
    live(rig, HOUR - 10)
    assert len(rig.names("*.log")) == 10
    assert [
        record.getMessage().partition(":")[0] for record in caplog.records if record.levelname == "WARNING"
    ] == ["the clock was set forward by 720000 s", "the clock was set forward by 1080000 s"]
    live(rig, 70)
    assert len(rig.names("*.log")) == 1


def test_a_clock_corrected_within_the_hour_removes_nothing(make_rig: MakeRig):
    rig = retaining_rig(make_rig)
    rig.clock.set_wall(100 * HOUR)
    live(rig, 100)
    rig.clock.set_wall(-100 * HOUR)
    live(rig, HOUR - 110)
    assert len(rig.names("*.log")) == 10
    live(rig, 70)
    assert len(rig.names("*.log")) == 1


def test_a_commit_is_remembered_when_the_clock_is_set_forward(make_rig: MakeRig):
    """If nsqd forgot the commit, it could be repeated."""
    rig = make_rig(transaction_retention=HOUR)
    transactions = rig.broker.transactions
    transaction = transactions.promise("p", 1, {})
    transactions.decide(transaction)
    transaction.write_promise(sync=False)
    transactions.finish(transaction, transactions.write_committed(transaction, sync=False, remember_s=HOUR))
    rig.clock.set_wall(2 * HOUR)
    live(rig, HOUR - 10)
    assert transactions.producers["p"].committed.sequence == 1
    live(rig, 20)
    assert "p" not in transactions.producers


# sequence numbers


def reads_from(rig: Rig) -> int:
    """The next sequence number for a reader that follows the log."""
    return rig.topic().positions().latest


@pytest.mark.parametrize("durability", ["memory", "os", "fsync"])
@pytest.mark.parametrize(("channel", "count"), [("", 50), ("c", 50), ("c#ephemeral", 50), ("c", 1)])
def test_a_clock_set_back_over_a_crash_repeats_no_number(
    make_rig: MakeRig, durability: str, channel: str, count: int, monkeypatch: pytest.MonkeyPatch
):
    """A reader of the log has seen the numbers of messages that were only in memory."""
    monkeypatch.setattr("nsparq.broker.topic_checkpoint.RESERVED_NUMBERS", 20)
    rig = make_rig(durability=durability)
    for _ in range(3):
        if channel:
            rig.channel(channel)
        rig.publish("t", b"x")
        rig.maintain()
        for number in range(count):
            rig.publish("t", b"%d" % number)
        used = reads_from(rig)
        rig.clock.set_wall(-HOUR)
        rig.crash()
        assert reads_from(rig) >= used


@either_way
def test_a_topic_deleted_and_created_again_gets_new_numbers(rig: Rig, step: float):
    rig.publish("t", *bodies(10))
    used = reads_from(rig)
    rig.broker.delete_topic("t")
    rig.clock.set_wall(step)
    assert reads_from(rig) >= used
