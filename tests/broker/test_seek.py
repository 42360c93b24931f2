"""Seek, commit, and channels that start at a given sequence number."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nsparq.errors import Exiting
from nsparq.options import TABLE
from nsparq.storage.log_range import OffsetAhead
from tests.broker.rig import SECOND, FakeClient, Later, Rig, bodies, counts, publish

MakeRig = Callable[..., Rig]
README = Path(__file__).parents[2] / "README.md"
MODES = ["os", "fsync", "memory"]
KEPT = {"retention_bytes": 1 << 30}
"""Keeps old messages, so that a seek finds them."""

in_all_modes = pytest.mark.parametrize("durability", MODES)


def consume(rig: Rig, client: FakeClient) -> list[bytes]:
    """Take and finish all messages."""
    found = []
    while messages := client.take():
        found += [message.body for message in messages]
        rig.finish(client, *messages)
    return found


def number(rig: Rig, topic: str = "t") -> int:
    """The sequence number that the next message gets."""
    return rig.topic(topic).log.end


# seek


@in_all_modes
def test_seeking_back_delivers_everything_from_there_on_again(make_rig: MakeRig, durability: str):
    rig = make_rig(durability=durability, mem_queue_size=10, max_bytes_per_file=500, **KEPT)
    client = rig.subscribe(rdy=5)
    start = number(rig)
    for i in range(10):
        rig.publish("t", *bodies(5, 5 * i))
    assert consume(rig, client) == bodies(50)
    rig.maintain()
    for target in (0, 17, 49, 50):
        plan = rig.channel().seek(start + target)
        rig.turn()
        assert plan == (start + 50, start + target, 50 - target, 0)
        assert consume(rig, client) == bodies(50 - target, target)
        rig.maintain()
        assert counts(rig.channel()) == (0, 0, 0)


@pytest.mark.parametrize("act", ["seek", "commit", "empty"])
def test_after_a_seek_clients_are_served_in_the_order_in_which_they_subscribed(make_rig: MakeRig, act: str):
    rig = make_rig(**KEPT)
    start = number(rig)
    clients = [rig.subscribe(rdy=2) for _ in range(20)]
    rig.publish("t", *bodies(40))
    assert all(len(client.take()) == 2 for client in clients)
    if act == "seek":
        rig.channel().seek(start)
    elif act == "commit":
        rig.channel().commit(start + 40)
    else:
        rig.channel().empty()
    if act != "seek":
        rig.publish("t", *bodies(40))
    rig.turn()
    assert [body for client in clients for body in client.take_bodies()] == bodies(40)


@in_all_modes
def test_after_a_seek_messages_are_sent_as_if_for_the_first_time(make_rig: MakeRig, durability: str):
    rig = make_rig(durability=durability, **KEPT)
    client = rig.subscribe(rdy=5)
    start = number(rig)
    rig.publish("t", b"tried")
    for _ in range(3):
        rig.requeue(client, client.take()[0])
    (message,) = client.take()
    assert message.attempts == 4
    rig.channel().seek(start)
    rig.turn()
    (again,) = client.take()
    assert (again.id, again.attempts, again.timestamp_ns) == (message.id, 1, message.timestamp_ns)


@pytest.mark.parametrize("with_flags", [True, False])
def test_yesterday_is_replayed_only_with_the_flags_that_the_readme_names(make_rig: MakeRig, with_flags: bool):
    points = re.split(r"\n(?=- |\n)", README.read_text(encoding="utf-8"))
    (promise,) = (point for point in points if "back to yesterday noon" in " ".join(point.split()))
    _, flags = TABLE.read_flags(re.findall(r"--[\w-]+=\w+", promise) if with_flags else [])
    rig = make_rig(max_bytes_per_file=1000, **flags)
    client = rig.subscribe(rdy=100)
    start = number(rig)
    yesterday = bodies(10, size=800)
    for body in yesterday:
        rig.publish("t", body)
    assert consume(rig, client) == yesterday
    rig.pass_time(24 * 3600)
    rig.publish("t", b"today" * 100)
    assert consume(rig, client) == [b"today" * 100]
    rig.maintain()
    rig.channel().seek(start)
    rig.turn()
    assert consume(rig, client) == [*(yesterday if with_flags else []), b"today" * 100]


def test_seeking_forward_finishes_the_messages_before_it(rig: Rig):
    rig.channel()
    start = number(rig)
    rig.publish("t", *bodies(10))
    rig.publish("t", b"later", defer_ms=60_000)
    rig.publish("t", *bodies(10, 10))
    plan = rig.channel().seek(start + 12)
    assert plan == (start, start + 12, 0, 12)
    assert counts(rig.channel()) == (9, 0, 0)
    rig.pass_time(100)
    assert consume(rig, rig.subscribe(rdy=100)) == bodies(9, 11)


def test_a_target_beyond_the_log_becomes_its_end(rig: Rig):
    rig.channel()
    start = number(rig)
    rig.publish("t", *bodies(3))
    assert rig.channel().seek(start + 1000).target == start + 3
    assert counts(rig.channel()) == (0, 0, 0)
    assert rig.channel().seek(0).target == start
    assert counts(rig.channel()) == (3, 0, 0)
    rig.topic().pause()
    rig.publish("t", b"not to be seen yet")
    assert rig.channel().seek(start + 1000).target == start + 3
    rig.topic().unpause()
    assert counts(rig.channel()) == (1, 0, 0)


def test_a_seek_drops_unfinished_messages_and_clients_continue(rig: Rig):
    client = rig.subscribe(rdy=4)
    start = number(rig)
    rig.publish("t", *bodies(10))
    flying = client.take()
    rig.requeue(client, flying[0], 50_000)
    rig.requeue(client, flying[1])
    flying = flying[2:] + client.take()
    assert len(rig.channel().unfinished.deferred) == 1
    assert client.in_flight == 4
    plan = rig.channel().plan_seek(start + 8)
    assert plan.skipped == 8
    assert rig.channel().seek(start + 8) == plan
    rig.turn()
    assert consume(rig, client) == [b"8", b"9"]
    errors = rig.finish(client, *flying)
    assert {error.code for error in errors} == {"E_FIN_FAILED"}
    assert len(errors) == len(flying)
    rig.pass_time(100)
    assert client.take() == []
    assert counts(rig.channel()) == (0, 0, 0)
    assert client.in_flight == 0


def test_a_plan_changes_nothing_and_equals_the_seek(rig: Rig):
    client = rig.subscribe(rdy=3)
    start = number(rig)
    rig.publish("t", *bodies(6))
    rig.publish("t", b"soon", defer_ms=5_000)
    rig.publish("t", *bodies(6, 6))
    held = client.take()
    rig.finish(client, held[1])
    before = (rig.channel().cursor.position, counts(rig.channel()))
    # 0 and 2, 3 are in flight, 1 is finished, 4, 5 and the others wait, 6 is deferred.
    expected = {0: (4, 0), 1: (3, 1), 3: (1, 2), 4: (0, 3), 6: (0, 5), 7: (0, 6), 8: (0, 7), 13: (0, 12)}
    for target, (again, skipped) in expected.items():
        plan = rig.channel().plan_seek(start + target)
        assert plan == (start + 4, start + target, again, skipped)
    assert (rig.channel().cursor.position, counts(rig.channel())) == before
    assert rig.channel().seek(start + 7) == (start + 4, start + 7, 0, 6)


@pytest.mark.parametrize(
    ("durability", "how"),
    [("os", "restart"), ("os", "crash"), ("fsync", "restart"), ("fsync", "crash"), ("memory", "restart")],
)
def test_a_seek_is_on_disk_before_it_returns(make_rig: MakeRig, durability: str, how: str):
    rig = make_rig(durability=durability, **KEPT)
    client = rig.subscribe(rdy=100)
    start = number(rig)
    rig.publish("t", *bodies(10))
    rig.publish("t", b"due", defer_ms=1_000)
    rig.publish("t", b"not due", defer_ms=3_600_000)
    rig.pass_time(2)
    assert consume(rig, client) == [*bodies(10), b"due"]
    rig.maintain()
    rig.channel().seek(start + 5)
    rig.crash() if how == "crash" else rig.restart()
    assert counts(rig.channel()) == (6, 0, 1)
    client = rig.subscribe(rdy=100)
    assert consume(rig, client) == [*bodies(5, 5), b"due"]
    rig.pass_time(3_600)
    assert consume(rig, client) == [b"not due"]


def test_a_seek_that_the_disk_refuses_changes_nothing(rig: Rig):
    client = rig.subscribe(rdy=3)
    start = number(rig)
    rig.publish("t", *bodies(10))
    held = client.take()
    rig.finish(client, held[0])
    held = held[1:] + client.take()
    before = (rig.channel().cursor.position, counts(rig.channel()), client.in_flight)
    rig.files.fail("replace", ".channel")
    with pytest.raises(OSError, match="No space left"):
        rig.channel().seek(start)
    assert (rig.channel().cursor.position, counts(rig.channel()), client.in_flight) == before
    rig.files.heal()
    rig.maintain()
    rig.crash()
    assert counts(rig.channel()) == (9, 0, 0), "what was done before it is kept nevertheless"


def test_a_checkpoint_under_way_does_not_undo_a_seek(make_rig: MakeRig):
    background = Later()
    rig = make_rig(background=background, **KEPT)
    client = rig.subscribe(rdy=100)
    start = number(rig)
    rig.publish("t", *bodies(10))
    background.run_all()
    assert consume(rig, client) == bodies(10)
    rig.broker.maintain()
    assert background.jobs
    rig.channel().seek(start + 3)
    background.run_all()
    rig.crash()
    assert counts(rig.channel()) == (7, 0, 0)


@in_all_modes
def test_deferred_messages_ahead_wait_for_their_time_again(make_rig: MakeRig, durability: str):
    rig = make_rig(durability=durability, mem_queue_size=8, max_bytes_per_file=600, **KEPT)
    client = rig.subscribe(rdy=100)
    start = number(rig)
    for i in range(10):
        rig.publish("t", b"plain %d" % i)
        rig.publish("t", b"deferred %d" % i, defer_ms=1000 * (i + 1))
    rig.pass_time(4.5)
    past_due = [b"deferred %d" % i for i in range(4)]
    assert sorted(consume(rig, client)) == past_due + [b"plain %d" % i for i in range(10)]
    rig.channel().seek(start + 2)
    rig.turn()
    # Messages that are due are delivered in their place, the others at their time.
    assert consume(rig, client) == [
        b"plain 1", b"deferred 1", b"plain 2", b"deferred 2", b"plain 3", b"deferred 3",
        *[b"plain %d" % i for i in range(4, 10)],
    ]  # fmt: skip
    assert counts(rig.channel()) == (0, 0, 6)
    rig.pass_time(1)
    assert consume(rig, client) == [b"deferred 4"]
    rig.restart()
    assert counts(rig.channel()) == (0, 0, 5)
    client = rig.subscribe(rdy=100)
    rig.pass_time(100)
    assert sorted(consume(rig, client)) == [b"deferred %d" % i for i in range(5, 10)]


def test_a_deferred_message_is_not_lost_between_a_seek_and_its_delivery(make_rig: MakeRig):
    """The message was due before the seek. After each crash the cursor still delivers it."""
    rig = make_rig(**KEPT)
    client = rig.subscribe(rdy=100)
    start = number(rig)
    rig.publish("t", b"a", b"b")
    rig.publish("t", b"was deferred", defer_ms=100)
    rig.publish("t", b"c", b"d")
    rig.pass_time(1)
    consume(rig, client)
    rig.disconnect(client)
    rig.channel().seek(start)
    client = rig.subscribe(rdy=1)
    rig.finish(client, client.take()[0])
    rig.maintain()
    for _ in range(3):
        rig.crash()
        assert counts(rig.channel()) == (4, 0, 0)
    client = rig.subscribe(rdy=1)
    assert sorted(consume(rig, client)) == [b"b", b"c", b"d", b"was deferred"]
    rig.publish("t", b"deferred since", defer_ms=100)
    rig.crash()
    rig.pass_time(1)
    assert b"deferred since" in consume(rig, rig.subscribe(rdy=100))


def test_a_seek_over_deferred_messages_of_long_ago_costs_nothing_for_them(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=100, **KEPT)
    channel = rig.channel()
    start = number(rig)
    for _ in range(50):
        publish(rig.broker, "t", bodies(400), lambda error: None, 1)
    rig.turn()
    rig.pass_time(1)
    channel.empty()
    started = time.process_time()
    channel.seek(start)
    assert time.process_time() - started < 0.1
    assert counts(channel) == (20_000, 0, 0)
    assert not channel.unfinished.deferred.due_ns
    client = rig.subscribe(rdy=2500)
    assert len(consume(rig, client)) == 20_000


def test_messages_after_a_seek_are_not_reclaimed(make_rig: MakeRig):
    """Also in memory mode, which does not write messages that nobody needs."""
    for durability in MODES:
        rig = make_rig(durability=durability, mem_queue_size=20, max_bytes_per_file=300)
        client = rig.subscribe(rdy=100)
        rig.publish("t", *bodies(10))
        consume(rig, client)
        rig.ready(client, 0)
        rig.clock.advance(0.001)
        channel = rig.channel()
        start = rig.topic().log.start
        channel.seek(start)
        expected = channel.depth
        assert expected == 10
        for i in range(20):
            rig.publish("t", *bodies(5, 100 + 5 * i))
            rig.maintain()
        assert channel.depth == 110
        rig.ready(client, 200)
        assert consume(rig, client) == [*bodies(10), *bodies(100, 100)]
        rig.drop()


def test_a_seek_drops_carried_over_messages(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=300)
    client = rig.subscribe(rdy=200)
    rig.publish("t", *bodies(5))
    held = client.take()
    rig.finish(client, *held[1:])
    for i in range(20):
        rig.publish("t", *bodies(10, 10 * (i + 1)))
        consume(rig, client)
        rig.maintain()
    assert rig.names("*.carry") == ["c.carry"]
    start = rig.topic().log.start
    assert start > held[0].id - rig.topic().first_id
    plan = rig.channel().seek(0)
    assert (plan.target, plan.skipped) == (start, 1)
    rig.maintain()
    assert rig.names("*.carry") == []
    rig.crash()
    client = rig.subscribe(rdy=1000)
    assert held[0].body not in consume(rig, client)


def test_gaps_are_skipped_again_after_a_seek(make_rig: MakeRig):
    rig = make_rig(**KEPT)
    channel = rig.channel()
    start = number(rig)
    rig.publish("t", b"one")
    rig.topic().pause()
    rig.publish("t", *bodies(5))
    rig.topic().empty()
    rig.topic().unpause()
    rig.publish("t", b"two")
    rig.crash()
    rig.publish("t", b"three")
    channel = rig.channel()
    channel.empty()
    plan = channel.seek(start + 3)
    assert plan.again == channel.depth == 2
    assert channel.seek(start).again == 1
    assert channel.depth == 3
    assert consume(rig, rig.subscribe(rdy=10)) == [b"one", b"two", b"three"]


def test_messages_taken_over_for_one_channel_are_delivered_like_any_other(rig: Rig):
    """After a seek the channel reads the log as it is now."""
    channel = rig.channel()
    rig.publish("t", *bodies(10))
    start = channel.cursor.position
    channel.cursor.skips.add(start + 2, start + 4)
    channel.add_tried(start + 6, [3, 4])
    assert counts(channel) == (8, 0, 0)
    channel.seek(start)
    assert counts(channel) == (10, 0, 0)
    client = rig.subscribe(rdy=100)
    assert {message.attempts for message in client.messages} == {1}
    assert consume(rig, client) == bodies(10)


def test_a_paused_channel_stays_paused(rig: Rig):
    client = rig.subscribe(rdy=10)
    start = number(rig)
    rig.publish("t", *bodies(3))
    consume(rig, client)
    rig.channel().pause()
    rig.channel().seek(start)
    rig.turn()
    assert client.take() == []
    rig.restart()
    assert rig.channel().paused
    assert counts(rig.channel()) == (3, 0, 0)


def test_an_ephemeral_channel_keeps_its_bound(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=10, **KEPT)
    channel = rig.channel("c#ephemeral")
    start = number(rig)
    for i in range(10):
        rig.publish("t", *bodies(5, 5 * i))
    channel.empty()
    dropped = channel.dropped_count
    channel.seek(start)
    rig.turn()
    assert channel.depth == 10
    assert channel.dropped_count == dropped + 40
    assert consume(rig, rig.subscribe(channel="c#ephemeral", rdy=100)) == bodies(10, 40)


def test_an_ephemeral_topic_goes_back_as_far_as_memory_does(rig: Rig):
    client = rig.subscribe("t#ephemeral", rdy=100)
    channel = client.channel
    assert channel is not None
    start = channel.cursor.position
    rig.publish("t#ephemeral", *bodies(5))
    rig.publish("t#ephemeral", b"later", defer_ms=5_000)
    assert consume(rig, client) == bodies(5)
    assert channel.seek(start).target == start
    rig.turn()
    assert consume(rig, client) == bodies(5)
    rig.pass_time(5)
    assert consume(rig, client) == [b"later"]


def test_a_seek_does_not_affect_other_channels(make_rig: MakeRig):
    rig = make_rig(**KEPT)
    here, there = rig.subscribe(rdy=100), rig.subscribe(channel="other", rdy=2)
    start = number(rig)
    rig.publish("t", *bodies(6))
    consume(rig, here)
    held = there.take()
    rig.channel().seek(start)
    rig.turn()
    assert counts(rig.channel("other")) == (4, 2, 0)
    assert rig.finish(there, *held) == []
    assert consume(rig, here) == bodies(6)


# commit


def test_a_commit_finishes_all_messages_before_it(rig: Rig):
    channel = rig.channel()
    start = number(rig)
    rig.publish("t", *bodies(10))
    rig.publish("t", b"deferred", defer_ms=1000)
    rig.publish("t", *bodies(10, 10))
    channel.commit(start + 5)
    assert counts(channel) == (15, 0, 1)
    channel.commit(start + 11)
    assert counts(channel) == (10, 0, 0)
    rig.pass_time(10)
    assert consume(rig, rig.subscribe(rdy=100)) == bodies(10, 10)


def test_a_commit_never_goes_back(rig: Rig):
    channel = rig.channel()
    start = number(rig)
    rig.publish("t", *bodies(10))
    for _ in range(2):
        channel.commit(start + 5)
        assert channel.cursor.position == start + 5
    channel.commit(start + 2)
    channel.commit(0)
    assert channel.cursor.position == start + 5
    assert counts(channel) == (5, 0, 0)


def test_a_commit_beyond_the_end_is_an_error(rig: Rig):
    channel = rig.channel()
    end = number(rig)
    rig.publish("t", *bodies(3))
    channel.commit(end + 3)
    with pytest.raises(OffsetAhead) as ahead:
        channel.commit(end + 4)
    assert ahead.value.latest == end + 3
    rig.topic().pause()
    rig.publish("t", b"held back")
    with pytest.raises(OffsetAhead):
        channel.commit(end + 4)
    assert channel.cursor.position == end + 3


def test_a_commit_drops_the_exceptions_below_it_and_keeps_the_others(rig: Rig):
    client = rig.subscribe(rdy=10)
    other = rig.subscribe(rdy=10)
    start = number(rig)
    rig.publish("t", *bodies(20))
    first = rig.topic().first_id
    holders = {message.id - first - start: (c, message) for c in (client, other) for message in c.take()}
    assert sorted(holders) == [*range(20)]
    rig.channel().pause()
    for i in (3, 12):
        holder, message = holders[i]
        rig.requeue(holder, message)
    for i in (4, 13):
        holder, message = holders[i]
        rig.requeue(holder, message, 50_000)
    holder, message = holders[6]
    rig.finish(holder, message)
    assert counts(rig.channel()) == (2, 15, 2)
    rig.channel().commit(start + 10)
    assert counts(rig.channel()) == (1, 8, 1)
    assert client.in_flight + other.in_flight == 8
    for i, (holder, message) in holders.items():
        if i not in (12, 13):
            assert len(rig.finish(holder, message)) == (i < 10), i
    rig.channel().unpause()
    rig.pass_time(100)
    again = [message for c in (client, other) for message in c.take()]
    assert sorted((message.body, message.attempts) for message in again) == [(b"12", 2), (b"13", 2)]


def test_a_commit_in_the_middle_of_a_run_makes_room_for_more(rig: Rig):
    client = rig.subscribe(rdy=10)
    start = number(rig)
    rig.publish("t", *bodies(20))
    held = client.take()
    rig.finish(client, held[7], held[9])
    held += client.take()
    assert len(held) == 12
    rig.channel().commit(start + 8)
    rig.turn()
    assert [message.body for message in client.take()] == bodies(7, 12)
    assert client.in_flight == len(rig.channel().unfinished.in_flight) == 10
    assert rig.channel().low() == start + 8
    assert rig.finish(client, held[8]) == []
    assert [e.code for e in rig.finish(client, held[9])] == ["E_FIN_FAILED"]


def test_a_commit_is_kept_by_the_next_checkpoint(rig: Rig):
    channel = rig.channel()
    start = number(rig)
    rig.publish("t", *bodies(10))
    rig.maintain()
    writes = rig.files.calls["replace"]
    channel.commit(start + 7)
    assert rig.files.calls["replace"] == writes, "no commit waits for the disk"
    rig.maintain()
    rig.crash()
    assert counts(rig.channel()) == (3, 0, 0)


def test_messages_before_a_commit_are_reclaimed(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=300)
    channel = rig.channel()
    for i in range(20):
        rig.publish("t", *bodies(10, 10 * i))
    assert len(rig.names("*.log")) == 10
    channel.commit(number(rig))
    rig.maintain()
    assert len(rig.names("*.log")) == 1


def test_the_cost_of_a_commit_does_not_depend_on_deferred_messages(make_rig: MakeRig):
    def cost(deferred: int) -> float:
        rig = make_rig()
        channel = rig.channel()
        for _ in range(deferred // 1000):
            publish(rig.broker, "t", bodies(1000), lambda error: None, 3_600_000)
        rig.turn()
        best = 1e9
        for start in range(number(rig) - deferred, number(rig) - deferred + 12, 4):
            started = time.process_time()
            for i in range(200):
                channel.commit(start + i // 50)
            best = min(best, time.process_time() - started)
        return best

    assert cost(40_000) < 6 * cost(2_000) + 0.01


# channels that start at a sequence number


@in_all_modes
def test_a_channel_can_start_at_a_sequence_number(make_rig: MakeRig, durability: str):
    rig = make_rig(durability=durability, **KEPT)
    start = number(rig)
    first = rig.subscribe(channel="first", rdy=100)
    rig.publish("t", *bodies(10))
    rig.publish("t", b"due", defer_ms=100)
    rig.publish("t", b"not due", defer_ms=100_000)
    rig.pass_time(1)
    consume(rig, first)
    late = rig.topic().get_channel("late", start=start + 3)
    assert late.message_count == 9
    assert counts(late) == (8, 0, 1)
    rig.restart() if durability == "memory" else rig.crash()
    assert counts(rig.channel("late")) == (8, 0, 1)
    client = rig.subscribe(channel="late", rdy=100)
    assert consume(rig, client) == [*bodies(7, 3), b"due"]
    rig.pass_time(100)
    assert consume(rig, client) == [b"not due"]


def test_the_first_channel_can_start_at_a_sequence_number(rig: Rig):
    start = number(rig)
    rig.publish("t", *bodies(5))
    rig.publish("t", b"deferred", defer_ms=1000)
    channel = rig.topic().get_channel("c", start=start + 2)
    assert counts(channel) == (3, 0, 1)
    other = rig.topic().get_channel("other", start=start)
    assert counts(other) == (5, 0, 1)
    rig.publish("t", b"new")
    rig.pass_time(1)
    client = rig.subscribe(rdy=100)
    assert sorted(consume(rig, client)) == [b"2", b"3", b"4", b"deferred", b"new"]
    assert counts(rig.channel()) == (0, 0, 0)


def test_on_a_paused_topic_a_channel_starts_no_further_than_it_may_see(rig: Rig):
    rig.channel("first")
    start = number(rig)
    rig.publish("t", *bodies(3))
    rig.topic().pause()
    rig.publish("t", b"held back")
    rig.publish("t", b"deferred and held back", defer_ms=10)
    assert counts(rig.topic().get_channel("low", start=start)) == (3, 0, 0)
    assert counts(rig.topic().get_channel("high", start=start + 1000)) == (0, 0, 0)
    rig.topic().unpause()
    assert counts(rig.channel("low")) == (4, 0, 1)
    assert counts(rig.channel("high")) == (1, 0, 1)


def test_a_start_before_the_log_is_its_start(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=300)
    client = rig.subscribe(rdy=100)
    for i in range(20):
        rig.publish("t", *bodies(10, 10 * i))
        consume(rig, client)
        rig.maintain()
    log = rig.topic().log
    channel = rig.topic().get_channel("late", start=0)
    assert channel.cursor.position == log.start
    assert channel.depth == log.count(log.start, log.end)


def test_a_start_is_for_new_channels_only(rig: Rig):
    start = number(rig)
    rig.channel()
    rig.publish("t", *bodies(3))
    rig.channel().empty()
    assert counts(rig.topic().get_channel("c", start=start)) == (0, 0, 0)


def test_a_channel_that_the_disk_refuses_is_not_created(rig: Rig):
    start = number(rig)
    rig.publish("t", b"plain")
    rig.publish("t", b"deferred", defer_ms=1000)
    rig.files.fail("replace", ".channel")
    with pytest.raises(OSError, match="No space left"):
        rig.topic().get_channel("c", start=start)
    assert not rig.topic().channels
    rig.files.heal()
    assert counts(rig.topic().get_channel("c")) == (1, 0, 1)


def test_no_channel_can_be_created_on_a_deleted_topic(rig: Rig):
    topic = rig.topic()
    rig.broker.delete_topic("t")
    with pytest.raises(Exiting):
        topic.get_channel("c", start=0)


@in_all_modes
def test_a_hold_keeps_everything_from_it_on(make_rig: MakeRig, durability: str):
    rig = make_rig(durability=durability, max_bytes_per_file=300, mem_queue_size=10)
    topic = rig.topic()
    birth = topic.holds["test"] = number(rig)
    client = rig.subscribe(rdy=100)
    for i in range(20):
        rig.publish("t", *bodies(10, 10 * i))
        consume(rig, client)
        rig.clock.advance(1)
        rig.maintain()
    assert topic.low() == birth
    late = topic.get_channel("late", start=birth)
    del topic.holds["test"]
    assert counts(late) == (200, 0, 0)
    rig.maintain()
    assert consume(rig, rig.subscribe(channel="late", rdy=100)) == bodies(200)
    rig.maintain()
    assert topic.log.start > birth


def test_a_hold_on_an_ephemeral_topic_keeps_its_bound(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=50)
    topic = rig.topic("t#ephemeral")
    birth = topic.holds["test"] = topic.log.end
    client = rig.subscribe("t#ephemeral", rdy=100)
    for i in range(20):
        rig.publish("t#ephemeral", *bodies(10, 10 * i))
        consume(rig, client)
        rig.maintain()
    assert 50 <= topic.log.end - topic.log.start <= 70
    topic.get_channel("late", start=birth)
    del topic.holds["test"]
    rig.turn()
    client = rig.subscribe("t#ephemeral", "late", rdy=100)
    assert consume(rig, client) == bodies(50, 150)


def test_positions_name_the_log_and_its_ends(make_rig: MakeRig):
    rig = make_rig(**KEPT)
    topic = rig.topic()
    start = number(rig)
    empty = topic.positions()
    assert empty == (topic.incarnation, start, start, 0, 0, 0, 0)
    published_ns = rig.clock.wall()
    rig.publish("t", *bodies(3))
    rig.pass_time(5)
    rig.publish("t", *bodies(2))
    found = topic.positions()
    assert (found.earliest, found.latest, found.messages) == (start, start + 5, 5)
    assert (found.first_ns, found.last_ns) == (published_ns, published_ns + 5 * SECOND)
    assert found.size_bytes == sum(path.stat().st_size for path in rig.topic_directory("t").glob("*.log"))
    rig.restart()
    assert rig.topic().positions()[:3] == found[:3]
    rig.broker.delete_topic("t")
    assert rig.topic().positions().incarnation != found.incarnation


def test_a_seek_ignores_a_pending_read_of_the_old_position(make_rig: MakeRig):
    background = Later()
    rig = make_rig(mem_queue_size=1, background=background, **KEPT)
    rig.channel()
    start = number(rig)
    for i in range(10):
        rig.publish("t", b"%d" % i + b"." * 200_000)
    background.run_all()
    rig.files.is_cold = True
    client = rig.subscribe(rdy=1)
    assert len(background.jobs) == 1
    rig.channel().seek(start + 5)
    rig.turn()
    assert len(background.jobs) == 2, "what is needed now is asked for at once"
    rig.files.calls.clear()
    first, second = background.jobs
    background.jobs.clear()
    first[0]()
    first[1]()
    reads = rig.files.calls["read"]
    rig.turn()
    assert rig.files.calls["read"] == reads, "the loop has not read what may be cold"
    assert client.take() == []
    second[0]()
    second[1]()
    rig.turn()
    assert [message.body[:1] for message in client.take()] == [b"5"]
