"""Topics and channels after a restart or a crash."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsparq.broker.stats import broker_stats
from nsparq.errors import ClientError
from nsparq.wire.message import SEQUENCE_BITS
from tests.broker.rig import Later, Rig, bodies, counts

MakeRig = Callable[..., Rig]

both_ends = pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "crash"])


def end(rig: Rig, clean: bool) -> None:
    """Restart cleanly, or crash right after a checkpoint."""
    if clean:
        rig.restart()
    else:
        rig.maintain()
        rig.crash()


@both_ends
def test_a_backlog_survives_a_restart(rig: Rig, clean: bool):
    rig.channel()
    rig.publish("t", *bodies(10))
    end(rig, clean)
    assert counts(rig.channel()) == (10, 0, 0)
    assert rig.subscribe(rdy=100).take_bodies() == bodies(10)


@both_ends
def test_finished_messages_stay_finished(rig: Rig, clean: bool):
    client = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(10))
    messages = client.take()
    rig.finish(client, *messages[2:5], messages[7])
    end(rig, clean)
    assert counts(rig.channel()) == (6, 0, 0)
    again = rig.subscribe(rdy=100).take()
    assert sorted(m.body for m in again) == [b"0", b"1", b"5", b"6", b"8", b"9"]
    assert {m.attempts for m in again} == {2}
    assert {m.id for m in again} <= {m.id for m in messages}
    assert {m.timestamp_ns for m in again} == {messages[0].timestamp_ns}


@both_ends
def test_messages_in_flight_are_sent_again_in_the_order_of_their_delivery(rig: Rig, clean: bool):
    for _ in range(20):
        rig.subscribe(rdy=2)
    rig.publish("t", *bodies(40))
    end(rig, clean)
    assert rig.subscribe(rdy=100).take_bodies() == bodies(40)


@both_ends
def test_requeued_messages_keep_their_attempts(rig: Rig, clean: bool):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    rig.requeue(client, client.messages[0])
    rig.requeue(client, client.messages[0])
    rig.ready(client, 0)
    rig.requeue(client, client.messages[0])
    assert counts(rig.channel()) == (1, 0, 0)
    end(rig, clean)
    assert counts(rig.channel()) == (1, 0, 0)
    assert [m.attempts for m in rig.subscribe(rdy=1).take()] == [4]


@both_ends
def test_due_times_are_kept(rig: Rig, clean: bool):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"requeued")
    rig.requeue(client, client.messages[0], 10_000)
    rig.publish("t", b"published", defer_ms=20_000)
    rig.ready(client, 0)
    end(rig, clean)
    assert counts(rig.channel()) == (0, 0, 2)
    client = rig.subscribe(rdy=10)
    started = 1.0 if not clean else 0.0
    rig.pass_time(10 - started - 0.001)
    assert client.take() == []
    rig.pass_time(0.001)
    assert [(m.body, m.attempts) for m in client.take()] == [(b"requeued", 2)]
    rig.pass_time(10)
    assert [(m.body, m.attempts) for m in client.take()] == [(b"published", 1)]


@both_ends
def test_messages_that_fell_due_during_the_downtime_are_delivered_at_once(rig: Rig, clean: bool):
    rig.channel()
    rig.publish("t", b"later", defer_ms=500)
    end(rig, clean)
    client = rig.subscribe(rdy=1)
    rig.pass_time(1)
    assert client.take_bodies() == [b"later"]


@both_ends
def test_depth_is_right_when_deferred_messages_lie_on_both_sides_of_the_cursor(rig: Rig, clean: bool):
    client = rig.subscribe()
    for number in range(4):
        rig.publish("t", b"now %d" % number)
        rig.publish("t", b"later %d" % number, defer_ms=60_000)
    rig.ready(client, 2)
    rig.finish(client, client.messages[0])
    rig.ready(client, 0)
    before = counts(rig.channel())
    end(rig, clean)
    assert sum(counts(rig.channel())) == sum(before) == 7
    assert counts(rig.channel())[2] == 4
    client = rig.subscribe(rdy=100, msg_timeout_ms=600_000)
    rig.pass_time(60)
    assert sorted(m.body for m in client.take()) == sorted(
        [b"now %d" % n for n in range(1, 4)] + [b"later %d" % n for n in range(4)]
    )
    assert counts(rig.channel()) == (0, 7, 0)


@both_ends
def test_a_deferred_message_that_is_finished_stays_finished_though_the_cursor_is_before_it(
    rig: Rig, clean: bool
):
    client = rig.subscribe()
    rig.publish("t", b"now")
    rig.publish("t", b"later", defer_ms=100)
    rig.pass_time(1)
    rig.ready(client, 1)
    while client.messages[-1].body != b"later":
        rig.requeue(client, client.messages[-1])
    rig.ready(client, 0)
    rig.finish(client, client.messages[-1])
    end(rig, clean)
    rig.pass_time(1)
    assert counts(rig.channel()) == (1, 0, 0)
    assert rig.subscribe(rdy=10).take_bodies() == [b"now"]


@both_ends
def test_a_pause_and_its_messages_survive_a_restart(rig: Rig, clean: bool):
    rig.channel("a").pause()
    rig.channel("b")
    rig.publish("t", b"0")
    rig.topic().pause()
    rig.publish("t", b"1")
    rig.publish("t", b"later", defer_ms=60_000)
    end(rig, clean)
    assert rig.topic().paused
    assert rig.channel("a").paused
    assert not rig.channel("b").paused
    assert rig.topic().depth == 2
    assert counts(rig.channel("b")) == (1, 0, 0)
    rig.topic().unpause()
    assert counts(rig.channel("a")) == counts(rig.channel("b")) == (2, 0, 1)


@both_ends
def test_a_topic_paused_before_it_held_anything_holds_nothing(rig: Rig, clean: bool):
    rig.topic().pause()
    end(rig, clean)
    rig.channel()
    assert rig.topic().depth == 0
    rig.publish("t", b"x")
    assert rig.topic().depth == 1
    rig.topic().unpause()
    assert counts(rig.channel()) == (1, 0, 0)
    assert rig.channel().message_count == 1


@both_ends
def test_a_topic_without_channels_still_keeps_its_messages(rig: Rig, clean: bool):
    rig.channel()
    rig.publish("t", b"old")
    rig.topic().delete_channel("c")
    rig.publish("t", b"0")
    rig.publish("t", b"later", defer_ms=60_000)
    end(rig, clean)
    assert rig.topic().depth == 2
    assert counts(rig.channel("first")) == (1, 0, 1)
    assert counts(rig.channel("second")) == (0, 0, 0)


@both_ends
def test_an_emptied_channel_stays_empty(rig: Rig, clean: bool):
    client = rig.subscribe(rdy=2)
    rig.publish("t", *bodies(5))
    rig.publish("t", b"later", defer_ms=100)
    client.channel.empty()
    end(rig, clean)
    rig.pass_time(1)
    assert counts(rig.channel()) == (0, 0, 0)
    rig.publish("t", b"new")
    assert rig.subscribe(rdy=10).take_bodies() == [b"new"]


@both_ends
def test_a_deleted_channel_stays_deleted(rig: Rig, clean: bool):
    rig.channel("a")
    rig.channel("b")
    rig.topic("u")
    rig.maintain()
    rig.topic().delete_channel("a")
    rig.broker.delete_topic("u")
    end(rig, clean)
    assert [*rig.broker.topics] == ["t"]
    assert [*rig.topic().channels] == ["b"]


@both_ends
def test_ids_continue_without_repeating(rig: Rig, clean: bool):
    client = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(3))
    end(rig, clean)
    after = rig.subscribe(rdy=10)
    rig.publish("t", b"new")
    new = [m for m in after.take() if m.body == b"new"]
    assert new[0].id > max(m.id for m in client.messages)


def test_a_clean_stop_leaves_no_gap_in_the_numbers(rig: Rig):
    client = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(3))
    rig.finish(client, *client.take())
    rig.clock.advance(3600)
    rig.restart()
    after = rig.subscribe(rdy=10)
    rig.publish("t", b"new")
    assert after.messages[0].id == client.messages[-1].id + 1


@both_ends
def test_counters_start_over_and_depths_do_not(rig: Rig, clean: bool):
    rig.channel()
    rig.publish("t", *bodies(3))
    end(rig, clean)
    (topic,) = broker_stats(rig.broker)["topics"]
    assert topic["message_count"] == 0
    assert topic["channels"][0]["message_count"] == 0
    assert topic["channels"][0]["depth"] == 3


# Crashes without a checkpoint before them.


def test_a_crash_redelivers_what_was_finished_since_the_last_checkpoint_and_nothing_else(rig: Rig):
    client = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(6))
    messages = client.take()
    rig.finish(client, *messages[:2])
    rig.maintain()
    rig.finish(client, *messages[2:4])
    rig.crash()
    assert sorted(m.body for m in rig.subscribe(rdy=10).take()) == [b"2", b"3", b"4", b"5"]


def test_a_crash_before_any_checkpoint_delivers_everything_again(rig: Rig):
    client = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(3))
    rig.publish("t", b"later", defer_ms=100)
    rig.pass_time(1)
    rig.finish(client, *client.take())
    rig.crash()
    client = rig.subscribe(rdy=10)
    rig.pass_time(1)
    assert sorted(client.take_bodies()) == [b"0", b"1", b"2", b"later"]
    assert counts(rig.channel()) == (0, 4, 0)


def test_a_channel_is_known_after_a_crash_before_any_checkpoint(rig: Rig):
    rig.publish("t", b"before")
    rig.channel("a")
    rig.channel("b")
    rig.publish("t", b"after")
    rig.crash()
    assert rig.channel("a").depth == 2
    assert rig.channel("b").depth == 1


def test_kept_messages_handed_to_the_first_channel_survive_a_crash_right_after(rig: Rig):
    rig.publish("t", b"now")
    rig.publish("t", b"later", defer_ms=60_000)
    rig.channel()
    rig.crash()
    assert counts(rig.channel()) == (1, 0, 1)


def test_messages_deferred_after_the_last_checkpoint_are_deferred_again(rig: Rig):
    rig.channel()
    rig.maintain()
    rig.publish("t", b"now")
    rig.publish("t", b"later", defer_ms=60_000)
    rig.crash()
    assert counts(rig.channel()) == (1, 0, 1)


def test_one_crash_after_another_loses_nothing(rig: Rig):
    rig.channel()
    for number in range(5):
        rig.publish("t", b"%d" % number)
        rig.publish("t", b"later %d" % number, defer_ms=60_000)
        rig.crash()
    assert counts(rig.channel()) == (5, 0, 5)
    client = rig.subscribe(rdy=100, msg_timeout_ms=600_000)
    rig.pass_time(60)
    assert len(client.take()) == 10


def test_a_crash_right_after_a_restart_loses_nothing(rig: Rig):
    client = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(3))
    rig.finish(client, client.messages[0])
    rig.restart()
    rig.crash()
    assert counts(rig.channel()) == (2, 0, 0)


def test_damaged_channel_state_means_that_everything_kept_is_sent_again(rig: Rig):
    client = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(3))
    rig.publish("t", b"later", defer_ms=100)
    rig.finish(client, *client.take())
    rig.close()
    path = rig.topic_directory() / "c.channel"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    rig.start()
    assert counts(rig.channel()) == (3, 0, 1)
    rig.crash()
    assert counts(rig.channel()) == (3, 0, 1)


def test_damaged_topic_state_keeps_the_log_and_the_channels(rig: Rig):
    rig.channel()
    rig.publish("t", *bodies(3))
    rig.close()
    (rig.topic_directory() / "topic.json").write_text("?")
    rig.clock.advance(1)
    rig.start()
    assert counts(rig.channel()) == (3, 0, 0)
    rig.publish("t", b"3")
    assert rig.subscribe(rdy=10).take_bodies() == bodies(4)


def test_a_message_lost_to_a_bad_disk_is_counted_and_the_others_are_delivered(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"doomed")
    rig.close()
    (path,) = rig.topic_directory().glob("*.log")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    rig.start()
    client = rig.subscribe(rdy=10)
    assert client.take() == []
    assert rig.channel().dropped_count == 1
    assert counts(rig.channel()) == (0, 0, 0)
    shown = broker_stats(rig.broker)["topics"][0]
    assert shown["corrupt_batches"] == 1
    rig.publish("t", b"fine")
    assert client.take_bodies() == [b"fine"]


# Carried-over messages.


def fill(rig: Rig, client, count: int = 100) -> None:
    for number in range(0, count, 10):
        rig.publish("t", *bodies(10, start=number, size=150))


def test_a_message_that_is_never_answered_does_not_pin_its_segment(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    held, *rest = client.take()
    rig.finish(client, *rest)
    assert len(rig.names("*.log")) == 10
    rig.maintain()
    assert len(rig.names("*.log")) <= 3
    assert rig.names("*.carry") == ["c.carry"]
    assert counts(rig.channel()) == (0, 1, 0)
    rig.requeue(client, held)
    assert client.take() == [held._replace(attempts=2)]


@both_ends
def test_carried_over_messages_survive_a_restart(make_rig: MakeRig, clean: bool):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    messages = client.take()
    held, deferred = messages[0], messages[15]
    rig.requeue(client, deferred, 60_000)
    rig.finish(client, *(m for m in messages if m not in (held, deferred)))
    rig.maintain()
    assert rig.names("*.carry")
    end(rig, clean)
    assert counts(rig.channel()) == (1, 0, 1)
    client = rig.subscribe(rdy=10, msg_timeout_ms=600_000)
    assert client.take() == [held._replace(attempts=2)]
    rig.pass_time(60)
    assert client.take() == [deferred._replace(attempts=2)]


def test_a_carried_over_message_is_dropped_when_it_is_finished(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    held, *rest = client.take()
    rig.finish(client, *rest)
    rig.maintain()
    rig.finish(client, held)
    rig.maintain()
    assert rig.names("*.carry") == []
    rig.crash()
    assert counts(rig.channel()) == (0, 0, 0)


def test_many_stragglers_pin_their_segment(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    messages = client.take()
    rig.finish(client, *messages[5:])
    rig.maintain()
    assert len(rig.names("*.log")) == 10
    assert rig.names("*.carry") == []
    rig.finish(client, *messages[1:5])
    rig.maintain()
    assert len(rig.names("*.log")) <= 3


def test_a_channel_that_is_behind_pins_its_segments(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    rig.channel("slow")
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    rig.finish(client, *client.take())
    rig.maintain()
    assert len(rig.names("*.log")) == 10
    rig.topic().delete_channel("slow")
    rig.maintain()
    assert len(rig.names("*.log")) == 1


def run(later: Later, index: int) -> None:
    """Run one of the jobs that upkeep has started."""
    work, then = later.jobs.pop(index)
    work()
    then()


def test_messages_carried_over_but_not_yet_checkpointed_are_delivered_once_after_a_crash(make_rig: MakeRig):
    """The carry file is written. The checkpoint is not, and the segments are not removed."""
    later = Later()
    rig = make_rig(max_bytes_per_file=2000, background=later)
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    held, *rest = client.take()
    rig.finish(client, *rest)
    rig.maintain()
    run(later, -2)  # the round of syncs is last
    assert rig.names("*.carry")
    assert len(rig.names("*.log")) == 10
    rig.crash()
    assert counts(rig.channel()) == (100, 0, 0)
    client = rig.subscribe(rdy=200)
    got = [m.id for m in client.take()]
    assert len(got) == len(set(got)) == 100


def test_messages_carried_over_whose_segments_are_gone_before_the_checkpoint_survive_a_crash(
    make_rig: MakeRig,
):
    later = Later()
    rig = make_rig(max_bytes_per_file=2000, background=later)
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    held, *rest = client.take()
    rig.finish(client, *rest)
    rig.maintain()
    run(later, -2)  # the round of syncs is last
    rig.maintain()
    run(later, -1)
    assert len(rig.names("*.log")) <= 3
    rig.crash()
    client = rig.subscribe(rdy=200)
    got = client.take()
    assert held.body in {m.body for m in got}
    assert len({m.id for m in got}) == len(got)


def test_a_topic_of_deferred_messages_alone_closes_its_files(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000, mem_queue_size=5)
    client = rig.subscribe(rdy=10)
    for number in range(100):
        rig.publish("t", *bodies(1, start=number, size=200), defer_ms=100)
        rig.pass_time(0.1)
        rig.finish(client, *client.take())
    assert client.finish_count == 100
    rig.maintain()
    assert len(rig.names("*.log")) <= 3
    rig.crash()
    assert counts(rig.channel()) == (0, 0, 0)
    assert rig.subscribe(rdy=10).take() == []


def damage_carry_file(rig: Rig) -> None:
    path = rig.topic_directory() / "c.carry"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_carried_over_message_is_counted_and_the_others_are_delivered(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000, mem_queue_size=1)
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    held, *rest = client.take()
    rig.finish(client, *rest)
    rig.maintain()
    damage_carry_file(rig)
    log = rig.topic().log
    for batch in [*log._batches]:
        if batch.base < log.memory_start:
            log.forget(batch)
    rig.requeue(client, held)
    assert client.take() == []
    assert rig.channel().dropped_count == 1
    rig.publish("t", b"fine")
    assert client.take_bodies() == [b"fine"]


def test_a_carried_over_message_that_is_damaged_at_the_start_is_logged(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    rig.finish(client, *client.take()[1:])
    rig.maintain()
    rig.close()
    damage_carry_file(rig)
    rig.start()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any("c.carry" in text for text in errors)


def test_a_message_that_was_lost_before_it_could_be_carried_over_leaves_no_damage(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    rig.finish(client, *client.take()[1:])
    path = rig.topic_directory() / rig.names("*.log")[0]
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    rig.maintain()
    rig.restart()
    assert (rig.names("*.carry"), rig.topic().corrupt_files) == ([], 0)


# another node id: a re-created container, a disk moved to another host


def test_another_node_id_keeps_everything_unfinished(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000, node_id=5)
    client = rig.subscribe(rdy=200)
    fill(rig, client)
    messages = client.take()
    # One of each segment: more of them would not be carried over.
    carried, carried_requeued, carried_deferred = messages[0], messages[15], messages[25]
    rest = [m for m in messages if m not in (carried, carried_requeued, carried_deferred)]
    rig.requeue(client, carried_requeued)
    (carried_requeued,) = client.take()
    rig.requeue(client, carried_deferred, 30_000)
    rig.finish(client, *rest)
    rig.maintain()
    assert rig.names("*.carry") == ["c.carry"]
    rig.publish("t", b"in flight", b"requeued", b"put off", b"finished")
    in_flight, requeued, put_off, finished = client.take()
    rig.ready(client, 0)
    rig.requeue(client, requeued)
    rig.requeue(client, put_off, 10_000)
    rig.finish(client, finished)
    rig.publish("t", b"published late", defer_ms=20_000)
    rig.publish("t", b"waiting")
    rig.restart(node_id=6)
    assert counts(rig.channel()) == (5, 0, 3)
    client = rig.subscribe(rdy=100, msg_timeout_ms=600_000)
    other_node = (6 - 5) << SEQUENCE_BITS
    again = {m.body: m for m in client.take()}
    for message, attempts in ((carried, 2), (carried_requeued, 3), (in_flight, 2), (requeued, 2)):
        expected = message._replace(id=message.id + other_node, attempts=attempts)
        assert again.pop(message.body) == expected
    assert [(m.body, m.attempts) for m in again.values()] == [(b"waiting", 1)]
    for body, attempts in ((b"put off", 2), (b"published late", 1), (carried_deferred.body, 2)):
        assert client.take() == []
        rig.pass_time(10)
        assert [(m.body, m.attempts) for m in client.take()] == [(body, attempts)]
    assert rig.finish(client, *client.messages) == []
    assert counts(rig.channel()) == (0, 0, 0)


def test_an_id_of_the_earlier_node_is_not_in_flight(make_rig: MakeRig):
    rig = make_rig(node_id=5)
    before = rig.subscribe(rdy=1)
    rig.publish("t", b"x")
    (old,) = before.take()
    rig.restart(node_id=6)
    client = rig.subscribe(rdy=1)
    (error,) = rig.finish(client, old)
    assert f"FIN {old.id:016x} failed ID not in flight" in str(error)
    with pytest.raises(ClientError, match=f"{old.id:016x}"):
        rig.requeue(client, old)
    with pytest.raises(ClientError, match=f"{old.id:016x}"):
        rig.touch(client, old)
    assert counts(rig.channel()) == (0, 1, 0)
    assert rig.finish(client, *client.messages) == []


def test_a_crash_forgets_the_delay_of_a_requeue_since_the_last_checkpoint(rig: Rig):
    """The message does not wait: it is sent at once, and not twice."""
    client = rig.subscribe(rdy=2)
    rig.publish("t", b"before", b"after")
    before, after = client.take()
    rig.requeue(client, before, timeout_ms=60_000)
    rig.maintain()
    rig.requeue(client, after, timeout_ms=60_000)
    rig.crash()
    assert counts(rig.channel()) == (1, 0, 1)
    client = rig.subscribe(rdy=2)
    assert client.take_bodies() == [b"after"]
    rig.pass_time(59)
    assert client.take_bodies() == [b"before"]
