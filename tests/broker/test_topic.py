"""broker.topic: publishing, messages of a topic without channels, pause, empty, delete,
durability."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

import pytest

from nsparq.broker.turn import EAGER_BATCH, EAGER_BYTES, MAX_BATCH
from nsparq.errors import Exiting, SyncFailed, WriteFailed
from nsparq.packed import PackedBodies
from nsparq.storage.files import Buffer
from tests.broker.rig import FakeClient, Later, Receipt, Rig, TestFiles, bodies, counts, publish

MakeRig = Callable[..., Rig]

# Publishing.


def test_a_publish_is_answered_at_the_end_of_the_turn(rig: Rig):
    receipt = Receipt()
    publish(rig.broker, "t", [b"a", b"b"], receipt)
    assert not receipt.answers
    rig.turn()
    assert receipt.answers == [None]


def test_publishes_of_one_turn_are_one_write(rig: Rig):
    rig.publish("t", b"first")
    rig.files.calls.clear()
    receipts = [rig.send("t", b"%d" % number) for number in range(20)]
    rig.turn()
    assert all(receipt.is_ok for receipt in receipts)
    assert rig.files.calls["write"] == 1


def test_one_write_serves_any_number_of_channels(rig: Rig):
    for number in range(8):
        rig.channel(f"c{number}")
    rig.publish("t", b"first")
    rig.files.calls.clear()
    rig.publish("t", *bodies(10))
    assert rig.files.calls["write"] == 1
    assert {rig.channel(f"c{number}").depth for number in range(8)} == {11}


def test_a_large_publish_is_appended_at_once(rig: Rig):
    receipt = rig.send("t", *bodies(EAGER_BATCH))
    assert receipt.is_ok
    assert rig.topic().depth == EAGER_BATCH


def test_a_large_message_is_appended_at_once(rig: Rig):
    assert rig.send("t", b"x" * EAGER_BYTES).is_ok


def test_many_small_publishes_are_appended_when_they_are_many(rig: Rig):
    receipts = [rig.send("t", b"x") for _ in range(EAGER_BATCH)]
    assert all(receipt.is_ok for receipt in receipts)


def test_a_very_large_publish_becomes_several_batches(rig: Rig):
    count = 2 * MAX_BATCH + 10
    client = rig.subscribe(rdy=count)
    rig.publish("t", *bodies(count))
    assert client.take_bodies() == bodies(count)


def test_counters_grow_when_a_publish_is_accepted(rig: Rig):
    topic = rig.topic()
    rig.publish("t", b"abc", b"de")
    rig.publish("t", b"fghi", defer_ms=10)
    assert topic.message_count == 3
    assert topic.message_bytes == 9


def test_several_publishers_of_one_turn_each_get_their_answer_once(rig: Rig):
    receipts = [rig.send("t", b"x"), rig.send("t", b"y", defer_ms=5), rig.send("t", b"z")]
    rig.turn()
    rig.turn()
    assert [receipt.answers for receipt in receipts] == [[None]] * 3


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_publisher_whose_callback_fails_does_not_affect_the_others(
    make_rig: MakeRig, durability: str, caplog: pytest.LogCaptureFixture
):
    def fail(error: Exception | None) -> None:
        raise RuntimeError("the connection has gone wrong")

    rig = make_rig(durability=durability)
    client = rig.subscribe(rdy=10)
    first = rig.send("t", b"0")
    publish(rig.broker, "t", [b"1"], fail)
    last = [rig.send("t", b"2"), rig.send("other", b"3")]
    rig.turn()
    assert all(receipt.is_ok for receipt in (first, *last))
    assert client.take_bodies() == bodies(3)
    assert "the connection has gone wrong" in caplog.text


def test_a_failed_append_is_an_error_for_its_publishers_and_keeps_no_message(rig: Rig):
    client = rig.subscribe(rdy=10)
    rig.publish("t", b"before")
    rig.files.fail("write", ".log")
    receipts = [rig.send("t", b"a"), rig.send("t", b"b", defer_ms=10)]
    rig.turn()
    for receipt in receipts:
        assert isinstance(receipt.error, WriteFailed)
        assert "No space left" in str(receipt.error)
    assert rig.topic().message_count == 1
    assert counts(rig.channel()) == (0, 1, 0)
    rig.files.heal()
    assert rig.publish("t", b"after").is_ok
    rig.pass_time(1)
    assert client.take_bodies() == [b"before", b"after"]


def test_consumers_continue_while_the_disk_is_full(rig: Rig):
    rig.channel()
    rig.publish("t", *bodies(3))
    rig.files.fail("write")
    rig.files.fail("replace")
    rig.publish("t", b"refused")
    client = rig.subscribe(rdy=1)
    for _ in range(3):
        rig.finish(client, client.take()[0])
        rig.maintain()
    assert client.finish_count == 3


def test_a_publish_to_a_topic_deleted_in_the_same_turn_gets_an_error(rig: Rig):
    receipt = rig.send("t", b"x")
    rig.broker.delete_topic("t")
    rig.turn()
    assert isinstance(receipt.error, Exiting)


def test_an_exiting_topic_takes_no_publish_and_no_channel(rig: Rig):
    topic = rig.topic()
    rig.broker.delete_topic("t")
    with pytest.raises(Exiting):
        topic.publishing.publish(PackedBodies.of([b"x"]), 0, Receipt())
    with pytest.raises(Exiting):
        topic.get_channel("c")


def test_a_gathered_publish_gets_an_error_if_its_topic_begins_to_exit(rig: Rig):
    receipt = rig.send("t", b"x")
    rig.topic().is_exiting = True
    rig.turn()
    assert isinstance(receipt.error, Exiting)
    assert rig.broker.health.error is None


def test_a_turn_without_publishes_writes_nothing(rig: Rig):
    rig.publish("t", b"x")
    rig.files.calls.clear()
    rig.broker.next_turn.add_topic(rig.topic())
    rig.turn()
    assert not rig.files.calls


# A topic without channels.


def test_a_topic_without_channels_keeps_its_messages_for_the_first(rig: Rig):
    rig.publish("t", *bodies(3))
    rig.publish("t", b"later", defer_ms=1000)
    assert rig.topic().depth == 4
    first, second = rig.channel("first"), rig.channel("second")
    assert counts(first) == (3, 0, 1)
    assert first.message_count == 4
    assert counts(second) == (0, 0, 0)
    assert second.message_count == 0
    assert rig.topic().depth == 0
    rig.publish("t", b"4")
    assert first.depth == 4
    assert second.depth == 1


def test_the_delay_of_a_kept_message_runs_from_its_publishing(rig: Rig):
    rig.publish("t", b"later", defer_ms=1000)
    rig.clock.advance(0.6)
    client = rig.subscribe(rdy=1)
    rig.pass_time(0.3)
    assert client.take() == []
    rig.pass_time(0.1)
    assert client.take_bodies() == [b"later"]


def test_a_topic_keeps_again_when_its_last_channel_is_deleted(rig: Rig):
    rig.channel("a")
    rig.channel("b")
    rig.publish("t", *bodies(3))
    rig.topic().delete_channel("a")
    rig.publish("t", b"3")
    assert rig.topic().depth == 0
    rig.topic().delete_channel("b")
    assert rig.topic().depth == 0
    rig.publish("t", b"4", b"5")
    assert rig.topic().depth == 2
    assert rig.subscribe(rdy=10).take_bodies() == [b"4", b"5"]


def test_deferred_messages_of_a_deleted_last_channel_are_gone_for_the_next(rig: Rig):
    rig.channel()
    rig.publish("t", b"later", defer_ms=1000)
    rig.topic().delete_channel("c")
    assert counts(rig.channel()) == (0, 0, 0)


# Pause.


def test_a_paused_topic_takes_publishes_and_shows_them_to_nobody(rig: Rig):
    client = rig.subscribe(rdy=10)
    rig.publish("t", b"0")
    rig.topic().pause()
    receipt = rig.publish("t", b"1", b"2")
    assert receipt.is_ok
    assert client.take_bodies() == [b"0"]
    assert rig.channel().depth == 0
    assert rig.channel().message_count == 1
    assert rig.topic().depth == 2
    rig.topic().unpause()
    rig.turn()
    assert client.take_bodies() == [b"1", b"2"]
    assert rig.channel().message_count == 3
    assert rig.topic().depth == 0


def test_channels_of_a_paused_topic_deliver_the_messages_they_have(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"0", b"1")
    rig.topic().pause()
    rig.publish("t", b"2")
    rig.finish(client, client.messages[0])
    assert client.take_bodies() == [b"0", b"1"]
    rig.requeue(client, client.messages[1])
    assert [m.attempts for m in client.take()] == [2]
    rig.finish(client, client.messages[-1])
    assert client.take() == []


def test_a_channel_stops_at_the_pause_inside_a_batch_read_from_disk(
    make_rig: MakeRig,
):
    rig = make_rig(mem_queue_size=1)
    rig.channel()
    rig.publish("t", b"0")
    rig.topic().pause()
    rig.publish("t", b"1")
    rig.publish("t", b"2")
    client = rig.subscribe(rdy=10)
    assert client.take_bodies() == [b"0"]
    rig.topic().unpause()
    rig.turn()
    assert client.take_bodies() == [b"1", b"2"]


def test_a_paused_topic_holds_back_deferred_messages(rig: Rig):
    client = rig.subscribe(rdy=10)
    rig.topic().pause()
    rig.publish("t", b"later", defer_ms=1000)
    assert counts(rig.channel()) == (0, 0, 0)
    assert rig.topic().depth == 1
    rig.pass_time(5)
    assert client.take() == []
    rig.topic().unpause()
    rig.scan()
    assert client.take_bodies() == [b"later"]
    assert counts(rig.channel()) == (0, 1, 0)


def test_channels_created_during_a_pause_get_the_messages_of_the_pause(rig: Rig):
    rig.channel("a")
    rig.publish("t", b"0")
    rig.topic().pause()
    rig.publish("t", b"1")
    second = rig.channel("b")
    rig.topic().unpause()
    assert rig.channel("a").depth == 2
    assert second.depth == 1


def test_a_topic_paused_without_channels_keeps_everything_for_the_first(rig: Rig):
    rig.publish("t", b"0")
    rig.topic().pause()
    rig.publish("t", b"1")
    rig.publish("t", b"later", defer_ms=10)
    assert rig.topic().depth == 3
    channel = rig.channel()
    assert counts(channel) == (0, 0, 0)
    assert rig.topic().depth == 3
    rig.topic().unpause()
    assert counts(channel) == (2, 0, 1)
    assert channel.message_count == 3
    assert rig.topic().depth == 0


def test_deleting_the_last_channel_during_a_pause_keeps_the_messages_of_the_pause(rig: Rig):
    rig.channel()
    rig.publish("t", b"0")
    rig.topic().pause()
    rig.publish("t", b"1")
    rig.publish("t", b"later", defer_ms=10)
    rig.topic().delete_channel("c")
    assert rig.topic().depth == 2
    rig.topic().unpause()
    assert counts(rig.channel()) == (1, 0, 1)
    assert rig.subscribe(rdy=10).take_bodies() == [b"1"]


def test_pausing_a_paused_topic_does_not_move_the_pause(rig: Rig):
    rig.channel()
    rig.topic().pause()
    rig.publish("t", b"0")
    rig.topic().pause()
    assert rig.topic().depth == 1
    assert rig.channel().depth == 0
    rig.topic().unpause()
    rig.topic().unpause()
    assert rig.channel().depth == 1
    assert rig.channel().message_count == 1


# Empty.


def test_emptying_a_topic_without_channels_drops_what_it_keeps(rig: Rig):
    rig.publish("t", *bodies(3))
    rig.publish("t", b"later", defer_ms=10)
    rig.topic().empty()
    assert rig.topic().depth == 0
    rig.publish("t", b"3")
    assert counts(rig.channel()) == (1, 0, 0)


def test_emptying_a_topic_leaves_its_channels(rig: Rig):
    rig.channel()
    rig.publish("t", *bodies(3))
    rig.publish("t", b"later", defer_ms=10)
    rig.topic().empty()
    assert counts(rig.channel()) == (3, 0, 1)


def test_emptying_a_paused_topic_drops_only_the_messages_of_the_pause(rig: Rig):
    client = rig.subscribe()
    rig.publish("t", b"0")
    rig.topic().pause()
    rig.publish("t", b"1", b"2")
    rig.publish("t", b"later", defer_ms=10)
    rig.topic().empty()
    assert rig.topic().depth == 0
    rig.publish("t", b"3")
    assert rig.topic().depth == 1
    rig.topic().unpause()
    rig.publish("t", b"4")
    assert counts(rig.channel()) == (3, 0, 0)
    assert rig.channel().message_count == 3
    rig.ready(client, 10)
    rig.pass_time(1)
    assert client.take_bodies() == [b"0", b"3", b"4"]
    assert counts(rig.channel()) == (0, 3, 0)


def test_a_topic_paused_and_emptied_without_channels_starts_over(rig: Rig):
    rig.topic().pause()
    rig.publish("t", b"0")
    rig.topic().empty()
    rig.publish("t", b"1")
    rig.channel()
    rig.topic().unpause()
    assert rig.subscribe(rdy=10).take_bodies() == [b"1"]


@pytest.mark.parametrize("rdy", [1, 10])
@pytest.mark.parametrize("how", ["from disk", "after a restart", "after a crash"])
def test_emptied_messages_do_not_come_back_with_their_neighbours_from_disk(
    make_rig: MakeRig, how: str, rdy: int
):
    rig = make_rig(mem_queue_size=1 if how == "from disk" else 10_000)
    rig.channel()
    rig.publish("t", b"0")
    rig.topic().pause()
    rig.publish("t", b"dropped")
    rig.topic().empty()
    rig.topic().unpause()
    rig.publish("t", b"1")
    rig.publish("t", b"2")
    if how == "after a restart":
        rig.restart()
    elif how == "after a crash":
        rig.crash()
    assert rig.channel().depth == 3
    client = rig.subscribe(rdy=rdy)
    got = []
    while new := client.take():
        got += [message.body for message in new]
        rig.finish(client, *new)
    assert got == [b"0", b"1", b"2"]
    assert counts(rig.channel()) == (0, 0, 0)


@pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "crash"])
def test_an_emptied_deferred_message_does_not_come_back_with_a_restart(rig: Rig, clean: bool):
    rig.channel()
    rig.publish("t", b"0")
    rig.topic().pause()
    rig.publish("t", b"later", defer_ms=10)
    rig.topic().empty()
    rig.topic().unpause()
    rig.publish("t", b"1")
    rig.restart() if clean else rig.crash()
    rig.pass_time(1)
    assert counts(rig.channel()) == (2, 0, 0)
    assert rig.subscribe(rdy=10).take_bodies() == [b"0", b"1"]


def test_emptying_a_topic_frees_the_disk_at_the_next_maintenance(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    for number in range(40):
        rig.publish("t", *bodies(1, start=number, size=200))
    rig.maintain()
    assert len(rig.names("*.log")) > 3
    rig.topic().empty()
    rig.maintain()
    assert len(rig.names("*.log")) == 1


# Delete.


def test_deleting_a_topic_closes_its_clients_and_removes_its_files(rig: Rig):
    clients = [rig.subscribe(channel=name, rdy=1) for name in ("a", "b")]
    rig.publish("t", b"x")
    directory = rig.topic_directory()
    assert directory.exists()
    rig.broker.delete_topic("t")
    assert [client.close_calls for client in clients] == [1, 1]
    assert not directory.exists()
    assert [*directory.parent.iterdir()] == []
    assert rig.broker.topics == {}
    rig.maintain()
    rig.pass_time(100)


def test_deleting_a_topic_closes_its_sealed_segments_that_are_not_synced(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000, sync_every=1000)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        rig.publish("t", b"%d" % number + b"x" * 200)
    sealed = len(rig.topic().log.sealed_segments())
    assert sealed > 2
    assert len(os.listdir("/proc/self/fd")) > before + sealed
    rig.broker.delete_topic("t")
    assert len(os.listdir("/proc/self/fd")) == before


def test_deleting_a_missing_topic_returns_false(rig: Rig):
    with pytest.raises(KeyError):
        rig.broker.delete_topic("nobody")


def test_a_publish_after_the_deletion_of_a_topic_creates_it_again(rig: Rig):
    rig.channel()
    old = rig.topic()
    rig.publish("t", b"old")
    rig.broker.delete_topic("t")
    rig.clock.advance(1)
    rig.publish("t", b"new")
    assert rig.topic().incarnation != old.incarnation
    assert rig.topic().depth == 1
    assert rig.topic().channels == {}
    assert rig.subscribe(rdy=10).take_bodies() == [b"new"]


def test_ids_of_a_topic_deleted_and_created_again_are_new(rig: Rig):
    first = rig.subscribe(rdy=1)
    rig.publish("t", b"old")
    rig.broker.delete_topic("t")
    rig.clock.advance(1)
    second = rig.subscribe(rdy=1)
    rig.publish("t", b"new")
    assert second.messages[0].id > first.messages[0].id


def test_publishers_that_wait_for_an_fsync_get_an_error_when_their_topic_is_deleted(make_rig: MakeRig):
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    receipt = rig.publish("t", b"x")
    assert not receipt.answers
    rig.broker.delete_topic("t")
    assert isinstance(receipt.error, Exiting)
    later.run_all()
    assert len(receipt.answers) == 1


def test_a_deleted_topic_stays_deleted_after_a_crash(rig: Rig):
    rig.channel()
    rig.publish("t", b"x")
    rig.maintain()
    rig.broker.delete_topic("t")
    rig.crash()
    assert rig.broker.topics == {}


def test_the_next_start_finishes_an_interrupted_deletion(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later)
    rig.publish("t", b"x")
    rig.broker.delete_topic("t")
    (trash,) = rig.topic_directory().parent.iterdir()
    assert trash.name.endswith(".deleted")
    rig.crash()
    assert not trash.exists()
    assert rig.broker.topics == {}


# Durability.


def test_with_fsync_a_publish_is_answered_only_after_the_sync(make_rig: MakeRig):
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    receipt = rig.publish("t", b"x")
    assert not receipt.answers
    assert rig.files.calls["sync"] == 0
    later.run()
    assert receipt.is_ok
    assert rig.files.calls["sync"] == 2, "the log, and the state of the topic, which is new"
    rig.publish("t", b"y")
    later.run()
    assert rig.files.calls["sync"] == 3


def test_publishes_during_a_sync_share_the_next_one(make_rig: MakeRig):
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    first = rig.publish("t", b"0")
    others = [rig.publish("t", b"%d" % number) for number in range(1, 20)]
    assert len(later.jobs) == 1
    later.run()
    assert first.is_ok
    assert not any(receipt.answers for receipt in others)
    assert len(later.jobs) == 1
    later.run()
    assert all(receipt.is_ok for receipt in others)
    assert rig.files.calls["sync"] == 2 + 1, "the topic is new"
    assert not later.jobs


def test_each_topic_syncs_for_itself(make_rig: MakeRig):
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    receipts = [rig.send(name, b"x") for name in ("a", "b")]
    rig.turn()
    assert len(later.jobs) == 2
    later.run()
    assert all(receipt.is_ok for receipt in receipts)


def test_after_a_failed_fsync_publishers_get_the_error(make_rig: MakeRig):
    """Nobody knows whether the disk has the messages. They are delivered all the same: see
    docs/guarantees.md."""
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    client = rig.subscribe(rdy=10)
    rig.files.fail("sync", error=errno.EIO)
    told = [rig.publish("t", b"0"), rig.publish("t", b"1")]
    later.run_all()
    for receipt in told:
        assert isinstance(receipt.error, SyncFailed)
        assert "may be delivered or lost" in str(receipt.error)
    assert client.take_bodies() == bodies(2)
    assert "fsync failed" in rig.broker.health.error
    rig.files.heal()
    again = rig.publish("t", b"2")
    later.run_all()
    assert again.is_ok, "it is in a file of its own"
    assert len(rig.names("*.log")) == 2
    assert "fsync failed" in rig.broker.health.error, "of the others nothing is known yet"
    commit = Receipt()
    rig.topic().publishing.when_committed(commit)
    assert isinstance(commit.error, SyncFailed)
    rig.maintain()
    later.run_all()
    assert rig.broker.health.error is None
    assert len(told[0].answers) == 1
    rig.crash()
    again = rig.subscribe(rdy=10)
    assert sorted(again.take_bodies()) == bodies(3)


def test_a_segment_that_cannot_be_copied_after_a_failed_fsync_is_tried_again_after_a_while(make_rig: MakeRig):
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    rig.files.fail("sync", error=errno.EIO)
    rig.publish("t", b"x")
    later.run_all()
    attempts = []
    for _ in range(21):
        rig.maintain()
        before = rig.files.calls["sync"]
        later.run_all()
        attempts.append(rig.files.calls["sync"] - before)
        rig.clock.advance(1)
    assert [second for second, count in enumerate(attempts) if count] == [0, 10, 20]
    rig.files.heal()
    rig.clock.advance(10)
    rig.maintain()
    later.run_all()
    assert rig.broker.health.error is None
    rig.restart()
    assert rig.topic().depth == 1


def test_with_fsync_a_message_is_synced_across_a_change_of_segment(make_rig: MakeRig):
    later = Later()
    rig = make_rig(durability="fsync", background=later, max_bytes_per_file=1000)
    receipts = [rig.publish("t", *bodies(1, size=600)) for _ in range(4)]
    later.run_all()
    assert all(receipt.is_ok for receipt in receipts)
    assert len(rig.names("*.log")) == 4
    assert rig.files.calls["sync"] >= 4


def test_with_os_a_publish_is_answered_once_it_is_written(make_rig: MakeRig):
    later = Later()
    rig = make_rig(durability="os", background=later)
    receipt = rig.publish("t", b"x")
    assert receipt.is_ok
    assert rig.files.calls["write"] >= 1
    rig.drop()
    rig.start()
    assert rig.topic().depth == 1


def test_with_os_a_sync_is_begun_every_so_many_messages_but_not_more_than_ten_times_a_second(
    make_rig: MakeRig,
):
    later = Later()
    rig = make_rig(sync_every=10, background=later)
    rig.publish("t", *bodies(9))
    assert not later.jobs
    rig.publish("t", b"9")
    later.run_all()
    assert rig.files.calls["sync"] == 1
    for _ in range(5):
        rig.publish("t", *bodies(20))
    later.run_all()
    assert rig.files.calls["sync"] == 1
    rig.clock.advance(0.1)
    rig.publish("t", *bodies(20))
    later.run_all()
    assert rig.files.calls["sync"] == 2


def test_with_os_a_sync_is_begun_in_time_whatever_the_number(make_rig: MakeRig):
    """By the last round of upkeep before the limit."""
    rig = make_rig(sync_timeout=2.0, checkpoint_interval=0.5)
    rig.publish("t", b"x")
    rig.maintain()
    synced = rig.files.calls["sync"]
    rig.publish("t", b"x")
    rig.clock.advance(1.4)
    rig.maintain()
    assert rig.files.calls["sync"] == synced
    rig.clock.advance(0.1)
    rig.maintain()
    assert rig.files.calls["sync"] == synced + 1
    rig.clock.advance(100)
    rig.maintain()
    assert rig.files.calls["sync"] == synced + 1


def test_with_memory_nothing_is_written_until_memory_overflows(make_rig: MakeRig):
    rig = make_rig(durability="memory", mem_queue_size=5)
    rig.channel()
    for number in range(5):
        assert rig.publish("t", b"%d" % number).is_ok
    assert rig.names("*.log") == []
    for number in range(5, 8):
        rig.publish("t", b"%d" % number)
    assert len(rig.names("*.log")) == 1
    assert rig.channel().depth == 8
    assert rig.channel().backend_depth == 3
    assert rig.subscribe(rdy=100).take_bodies() == bodies(8)


def test_with_memory_a_clean_stop_writes_everything(make_rig: MakeRig):
    rig = make_rig(durability="memory")
    rig.channel()
    rig.publish("t", *bodies(5))
    rig.publish("t", b"later", defer_ms=1000)
    rig.restart()
    assert counts(rig.channel()) == (5, 0, 1)
    client = rig.subscribe(rdy=100)
    rig.pass_time(1)
    assert client.take_bodies() == [*bodies(5), b"later"]


def test_with_memory_finished_messages_are_never_written(make_rig: MakeRig):
    rig = make_rig(durability="memory", mem_queue_size=5)
    client = rig.subscribe(rdy=1)
    for number in range(50):
        rig.publish("t", b"%d" % number)
        rig.finish(client, client.take()[0])
        rig.clock.advance(1)
    assert rig.names("*.log") == []
    rig.restart()
    assert rig.names("*.log") == []
    assert counts(rig.channel()) == (0, 0, 0)


def test_with_memory_a_crash_loses_only_the_messages_in_memory(make_rig: MakeRig):
    rig = make_rig(durability="memory", mem_queue_size=5)
    rig.channel()
    for number in range(8):
        rig.publish("t", b"%d" % number)
    rig.crash()
    assert rig.subscribe(rdy=100).take_bodies() == bodies(3)
    rig.publish("t", b"new")
    assert rig.channel().depth + len(rig.channel().unfinished.in_flight) == 4


@pytest.mark.parametrize("seconds", [0.001, 1.0])
def test_with_memory_messages_published_after_a_crash_are_delivered_under_new_ids(
    make_rig: MakeRig, seconds: float
):
    rig = make_rig(durability="memory")
    client = rig.subscribe(rdy=10)
    rig.publish("t", *bodies(5))
    old = client.take()
    rig.finish(client, *old)
    rig.maintain()
    rig.crash(seconds)
    client = rig.subscribe(rdy=10)
    rig.publish("t", b"new")
    (message,) = client.take()
    assert message.body == b"new"
    assert message.id not in {m.id for m in old}


def test_with_memory_an_overflow_that_the_disk_refuses_is_an_error_for_the_publisher(make_rig: MakeRig):
    rig = make_rig(durability="memory", mem_queue_size=2)
    rig.publish("t", b"0", b"1")
    rig.files.fail("write", ".log")
    assert isinstance(rig.publish("t", b"2").error, WriteFailed)
    assert rig.topic().depth == 2
    rig.files.heal()
    assert rig.publish("t", b"2").is_ok
    assert rig.subscribe(rdy=10).take_bodies() == bodies(3)


# Memory.


def test_the_tail_of_the_log_is_in_memory_and_the_rest_is_backend(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=5)
    for number in range(12):
        rig.publish("t", b"%d" % number)
    assert (rig.topic().depth, rig.topic().backend_depth) == (12, 7)
    rig.channel()
    assert (rig.channel().depth, rig.channel().backend_depth) == (12, 7)
    assert (rig.topic().depth, rig.topic().backend_depth) == (0, 0)
    rig.topic().pause()
    for number in range(8):
        rig.publish("t", b"%d" % number)
    assert (rig.topic().depth, rig.topic().backend_depth) == (8, 3)


def test_the_backend_is_never_deeper_than_the_whole(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=2)
    channel = rig.channel()
    for _ in range(10):
        rig.publish("t", b"later", defer_ms=1000)
    assert channel.depth == 0
    assert channel.backend_depth == 0
    rig.publish("t", b"0")
    rig.publish("t", b"1")
    assert channel.backend_depth <= channel.depth == 2


def test_a_backlog_beyond_memory_is_read_back_in_order(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=5, max_bytes_per_file=1000)
    client = rig.subscribe()
    for number in range(0, 200, 4):
        rig.publish("t", *bodies(4, start=number))
    rig.ready(client, 7)
    got = []
    while new := client.take():
        got += [message.body for message in new]
        rig.finish(client, *new)
    assert got == bodies(200)


def test_the_name_of_a_topic_is_found_in_its_directory(rig: Rig):
    topic = rig.topic("some.topic")
    assert topic.directory == rig.data_path / "topics" / "some.topic.topic"
    assert topic.directory.is_dir()


def test_a_client_may_subscribe_to_a_topic_that_is_new(rig: Rig):
    client = FakeClient()
    rig.broker.subscribe(client, "new", "c")
    assert client.channel is rig.broker.topics["new"].channels["c"]


@pytest.mark.parametrize("has_channel", [False, True])
def test_a_pause_that_cannot_be_kept_does_not_happen(rig: Rig, has_channel: bool):
    topic = rig.topic()
    client = rig.subscribe(rdy=10) if has_channel else None
    rig.publish("t", b"one")
    rig.files.fail("replace", "topic.json")
    with pytest.raises(OSError, match="No space"):
        topic.pause()
    rig.publish("t", b"two")
    assert not topic.paused
    if client is not None:
        assert client.take_bodies() == [b"one", b"two"]
    rig.files.heal()
    topic.pause()
    rig.publish("t", b"three")
    rig.files.fail("replace", "topic.json")
    with pytest.raises(OSError, match="No space"):
        topic.unpause()
    rig.turn()
    assert topic.paused and (client is None or client.take() == [])
    rig.files.heal()
    topic.unpause()
    rig.turn()
    found = [b"three"] if has_channel else [b"one", b"two", b"three"]
    assert (client or rig.subscribe(rdy=10)).take_bodies() == found


class FullDisk(TestFiles):
    """New files can be made, but they stay empty."""

    is_full = False

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, buffers, position)


def test_a_channel_that_a_full_disk_refuses_leaves_no_file(make_rig: MakeRig):
    files = FullDisk()
    rig = make_rig(files=files)
    rig.channel("other")
    files.is_full = True
    with pytest.raises(OSError, match="No space"):
        rig.channel("refused")
    files.is_full = False
    rig.restart()
    assert [*rig.topic().channels] == ["other"]
    assert rig.topic().corrupt_files == 0
