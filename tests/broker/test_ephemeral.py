"""Topics and channels that end in #ephemeral: never on disk, bounded, deleted with their last
client."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from nsparq.storage.memory_log import MemoryLog
from tests.broker.rig import Delivered, FakeClient, Rig, bodies, counts

MakeRig = Callable[..., Rig]
TOPIC = "t#ephemeral"
CHANNEL = "c#ephemeral"


def test_an_ephemeral_channel_is_deleted_with_its_last_client(rig: Rig):
    first, second = rig.subscribe(channel=CHANNEL), rig.subscribe(channel=CHANNEL)
    rig.disconnect(first)
    assert CHANNEL in rig.topic().channels
    rig.disconnect(second)
    assert rig.topic().channels == {}
    assert "t" in rig.broker.topics


def test_an_ephemeral_channel_without_clients_waits_for_its_first(rig: Rig):
    rig.channel(CHANNEL)
    rig.publish("t", b"x")
    rig.maintain()
    assert rig.channel(CHANNEL).depth == 1


def test_a_topic_keeps_again_when_its_last_channel_was_ephemeral(rig: Rig):
    client = rig.subscribe(channel=CHANNEL, rdy=10)
    rig.publish("t", b"0")
    rig.disconnect(client)
    rig.publish("t", b"1")
    assert rig.subscribe(rdy=10).take_bodies() == [b"1"]


def test_an_ephemeral_topic_is_deleted_with_its_last_channel(rig: Rig):
    rig.channel("a", TOPIC)
    rig.channel("b", TOPIC)
    rig.topic(TOPIC).delete_channel("a")
    assert TOPIC in rig.broker.topics
    rig.topic(TOPIC).delete_channel("b")
    assert TOPIC not in rig.broker.topics


def test_an_ephemeral_topic_is_deleted_with_the_last_client_of_its_ephemeral_channel(rig: Rig):
    client = rig.subscribe(TOPIC, CHANNEL, rdy=1)
    rig.publish(TOPIC, b"x")
    rig.disconnect(client)
    assert TOPIC not in rig.broker.topics
    rig.maintain()


def test_an_ephemeral_topic_that_never_had_a_channel_stays(rig: Rig):
    rig.publish(TOPIC, b"x")
    rig.maintain()
    assert rig.subscribe(TOPIC, rdy=1).take_bodies() == [b"x"]


def test_an_ephemeral_topic_may_be_deleted_with_its_clients(rig: Rig):
    client = rig.subscribe(TOPIC, CHANNEL, rdy=1)
    rig.broker.delete_topic(TOPIC)
    assert client.close_calls == 1
    assert rig.broker.topics == {}


def test_delivery_on_an_ephemeral_topic_follows_the_same_rules(rig: Rig):
    client = rig.subscribe(TOPIC, rdy=2, msg_timeout_ms=1000)
    rig.publish(TOPIC, b"0", b"1")
    rig.publish(TOPIC, b"later", defer_ms=500)
    zero, one = client.take()
    rig.requeue(client, zero)
    rig.finish(client, one)
    (again,) = client.take()
    assert again.attempts == 2
    rig.pass_time(0.5)
    assert client.take_bodies() == [b"later"]
    rig.pass_time(0.5)
    assert [(m.body, m.attempts) for m in client.take()] == [(b"0", 3)]
    assert counts(rig.channel(topic=TOPIC)) == (0, 2, 0)


def test_an_ephemeral_topic_pauses_empties_and_keeps_like_any_other(rig: Rig):
    topic = rig.topic(TOPIC)
    rig.publish(TOPIC, b"kept")
    assert topic.depth == 1
    client = rig.subscribe(TOPIC, rdy=10)
    topic.pause()
    rig.publish(TOPIC, b"dropped")
    rig.publish(TOPIC, b"dropped too", defer_ms=1)
    assert topic.depth == 2
    topic.empty()
    rig.publish(TOPIC, b"held")
    topic.unpause()
    rig.pass_time(1)
    assert client.take_bodies() == [b"kept", b"held"]
    assert counts(rig.channel(topic=TOPIC)) == (0, 2, 0)


def test_nothing_ephemeral_is_on_disk(rig: Rig):
    rig.channel("durable", TOPIC)
    rig.channel(CHANNEL, TOPIC)
    rig.publish(TOPIC, *bodies(100))
    rig.topic(TOPIC).pause()
    rig.channel(CHANNEL, TOPIC).pause()
    rig.maintain()
    rig.close()
    names = sorted(path.name for path in rig.data_path.rglob("*"))
    assert names == ["clean-stop", "nsqd.dat", "reserve"]
    assert b"ephemeral" not in (rig.data_path / "nsqd.dat").read_bytes()


def test_an_ephemeral_channel_of_a_durable_topic_leaves_no_file(rig: Rig):
    client = rig.subscribe(channel=CHANNEL, rdy=5)
    rig.publish("t", *bodies(10))
    rig.maintain()
    assert rig.names("*ephemeral*") == []
    rig.disconnect(client)
    rig.maintain()
    assert rig.names("*ephemeral*") == []


def test_ephemerals_are_gone_after_a_restart(rig: Rig):
    rig.channel("c", TOPIC)
    rig.channel(CHANNEL, "t")
    rig.restart()
    assert [*rig.broker.topics] == ["t"]
    assert rig.topic().channels == {}


@pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "crash after a checkpoint"])
def test_messages_finished_by_an_ephemeral_channel_do_not_come_back_after_a_restart(rig: Rig, clean: bool):
    client = rig.subscribe(channel=CHANNEL, rdy=10)
    rig.publish("t", *bodies(3))
    rig.finish(client, *client.take())
    rig.maintain()
    rig.restart() if clean else rig.crash()
    assert rig.topic().depth == 0
    assert rig.subscribe(rdy=10).take() == []


# Bounds.


@pytest.mark.parametrize("step", [1, 7, 100], ids=["one by one", "in sevens", "in hundreds"])
def test_an_ephemeral_channel_keeps_the_newest_and_counts_what_it_drops(make_rig: MakeRig, step: int):
    rig = make_rig(mem_queue_size=10)
    channel = rig.channel(CHANNEL)
    for start in range(0, 700, step):
        assert rig.publish("t", *bodies(step, start=start)).is_ok
        assert channel.depth <= 10
    assert channel.dropped_count == 690
    assert rig.subscribe(channel=CHANNEL, rdy=100).take_bodies() == bodies(10, start=690)


def test_a_bounded_channel_does_not_hold_back_its_neighbour(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=10)
    rig.channel(CHANNEL)
    rig.channel("durable")
    rig.publish("t", *bodies(100))
    assert rig.channel(CHANNEL).depth == 10
    assert rig.channel("durable").depth == 100
    assert rig.channel("durable").dropped_count == 0


def test_an_ephemeral_channel_drops_requeued_messages_first(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=10)
    client = rig.subscribe(channel=CHANNEL, rdy=5)
    channel = rig.channel(CHANNEL)
    rig.publish("t", *bodies(5))
    rig.ready(client, 0)
    for message in client.take():
        rig.requeue(client, message)
    rig.publish("t", *bodies(7, start=5))
    assert channel.depth == 10
    assert channel.dropped_count == 2
    rig.publish("t", *bodies(10, start=12))
    rig.ready(client, 100)
    assert client.take_bodies() == bodies(10, start=12)
    assert channel.dropped_count == 12


def test_deferred_messages_of_an_ephemeral_channel_are_passed_over_not_dropped(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=5)
    channel = rig.channel(CHANNEL)
    for number in range(10):
        rig.publish("t", b"later %d" % number, defer_ms=1000)
        rig.publish("t", b"now %d" % number)
    assert counts(channel) == (5, 0, 10)
    assert channel.dropped_count == 5


def test_an_ephemeral_channel_is_bounded_without_waiting_for_the_disk(make_rig: MakeRig):
    """Dropping skips messages that only the disk has. A cold disk must not end the turn."""
    rig = make_rig(mem_queue_size=2)
    rig.files.is_cold = True
    channel = rig.channel(CHANNEL)
    channel.paused = True
    for _ in range(3):
        rig.publish("t", b"later", defer_ms=1000)
        rig.publish("t", b"now")
    for number in range(20):
        rig.publish("t", b"%d" % number)
    assert counts(channel) == (2, 0, 3)
    assert channel.dropped_count == 21


@pytest.mark.parametrize("step", [1, 100], ids=["one by one", "in hundreds"])
def test_an_ephemeral_topic_without_channels_keeps_the_newest(make_rig: MakeRig, step: int):
    rig = make_rig(mem_queue_size=10)
    for start in range(0, 500, step):
        assert rig.publish(TOPIC, *bodies(step, start=start)).is_ok
        log = rig.topic(TOPIC).log
        assert log.end - log.start <= 20 + step
    rig.maintain()
    assert rig.topic(TOPIC).depth == 10
    assert rig.topic(TOPIC).dropped_count == 490
    assert rig.subscribe(TOPIC, rdy=100).take_bodies() == bodies(10, start=490)


def test_deferred_messages_that_an_ephemeral_topic_drops_are_gone(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=5)
    rig.publish(TOPIC, b"later", defer_ms=1000)
    for number in range(20):
        rig.publish(TOPIC, b"%d" % number)
    rig.maintain()
    client = rig.subscribe(TOPIC)
    channel = rig.channel(topic=TOPIC)
    assert counts(channel) == (5, 0, 0)
    rig.ready(client, 100)
    rig.pass_time(1)
    assert client.take_bodies() == bodies(5, start=15)
    assert counts(channel) == (0, 5, 0)


def test_a_paused_ephemeral_topic_keeps_the_newest_of_what_it_holds(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=10)
    client = rig.subscribe(TOPIC, rdy=100)
    topic = rig.topic(TOPIC)
    topic.pause()
    for number in range(100):
        rig.publish(TOPIC, b"%d" % number)
    rig.maintain()
    assert topic.depth == 10
    assert topic.dropped_count == 90
    topic.unpause()
    rig.turn()
    assert client.take_bodies() == bodies(10, start=90)
    assert rig.channel(topic=TOPIC).message_count == 10


def test_deferred_messages_that_a_paused_ephemeral_topic_drops_are_gone(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=5)
    client = rig.subscribe(TOPIC)
    topic, channel = rig.topic(TOPIC), rig.channel(topic=TOPIC)
    topic.pause()
    rig.publish(TOPIC, b"later", defer_ms=1000)
    for number in range(20):
        rig.publish(TOPIC, b"%d" % number)
    rig.maintain()
    topic.unpause()
    assert counts(channel) == (5, 0, 0)
    rig.ready(client, 100)
    rig.pass_time(1)
    assert client.take_bodies() == bodies(5, start=15)
    assert counts(channel) == (0, 5, 0)


def test_an_ephemeral_topic_paused_without_channels_counts_what_it_still_has(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=10)
    topic = rig.topic(TOPIC)
    topic.pause()
    for number in range(50):
        rig.publish(TOPIC, b"%d" % number)
    rig.maintain()
    assert topic.depth == 10
    channel = rig.channel(topic=TOPIC)
    assert topic.depth == 10
    assert channel.depth == 0
    topic.unpause()
    assert channel.depth == 10
    assert channel.message_count == 10


def test_every_channel_of_an_ephemeral_topic_is_bounded(make_rig: MakeRig):
    """It has no disk to overflow to."""
    rig = make_rig(mem_queue_size=10)
    channel = rig.channel("c", TOPIC)
    for number in range(200):
        rig.publish(TOPIC, b"%d" % number)
    rig.maintain()
    assert channel.depth == 10
    assert channel.dropped_count == 190


def test_finished_messages_of_an_ephemeral_topic_leave_memory(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=10)
    client = rig.subscribe(TOPIC, CHANNEL, rdy=1)
    log = rig.topic(TOPIC).log
    assert isinstance(log, MemoryLog)
    for number in range(100):
        rig.publish(TOPIC, b"%d" % number)
        rig.finish(client, client.take()[0])
    rig.maintain()
    assert log.start == log.end


def test_a_message_held_while_its_neighbours_leave_memory_is_still_redelivered(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=10)
    client = rig.subscribe(TOPIC, CHANNEL, rdy=2)
    rig.publish(TOPIC, b"held")
    held = client.take()[0]
    for number in range(100):
        rig.publish(TOPIC, b"%d" % number)
        rig.finish(client, client.take()[0])
    rig.maintain()
    log = rig.topic(TOPIC).log
    assert log.start == log.end
    rig.maintain()
    rig.requeue(client, held)
    (again,) = client.take()
    assert again == held._replace(attempts=2)
    rig.finish(client, again)
    rig.maintain()
    assert len(rig.channel(CHANNEL, TOPIC).carried_over.store.kept) == 0


# Bytes.

KIB = 1024
SIZE = 10 * KIB
LIMIT = 1000 * KIB
"""Room for 50 messages of SIZE: memory counts the frames of a message, too."""


def memory_of(rig: Rig) -> int:
    """Bytes that ephemeral messages take, with their frames. The broker's own count has to be the
    same."""
    size = 0
    for topic in rig.broker.topics.values():
        if isinstance(topic.log, MemoryLog):
            size += sum(batch.size for batch in topic.log._batches)
            size += sum(b.size for c in topic.channels.values() for b in c.carried_over.store.kept.values())
    assert rig.broker.ephemeral_memory.size_bytes == size
    return size


def publish_large(rig: Rig, topic: str = TOPIC, count: int = 100, size: int = SIZE, **extra: int) -> None:
    for number in range(count):
        rig.publish(topic, *bodies(1, number, size), **extra)
        assert memory_of(rig) <= LIMIT


def test_an_ephemeral_topic_without_a_channel_is_bounded_by_bytes(make_rig: MakeRig):
    rig = make_rig(mem_queue_bytes=LIMIT)
    publish_large(rig)
    topic = rig.topic(TOPIC)
    assert 45 <= topic.depth <= 50
    assert topic.dropped_count == 100 - topic.depth
    kept = topic.depth
    assert rig.subscribe(TOPIC, rdy=100).take_bodies() == bodies(kept, 100 - kept, SIZE)


def test_a_channel_of_an_ephemeral_topic_is_bounded_by_bytes(make_rig: MakeRig):
    rig = make_rig(mem_queue_bytes=LIMIT)
    channel = rig.channel(topic=TOPIC)
    publish_large(rig)
    kept = channel.depth
    assert 45 <= kept <= 50
    assert channel.dropped_count == 100 - kept
    assert rig.topic(TOPIC).dropped_count == 0
    assert rig.subscribe(TOPIC, rdy=100).take_bodies() == bodies(kept, 100 - kept, SIZE)


def test_a_paused_ephemeral_topic_is_bounded_by_bytes(make_rig: MakeRig):
    rig = make_rig(mem_queue_bytes=LIMIT)
    channel, topic = rig.channel(topic=TOPIC), rig.topic(TOPIC)
    publish_large(rig, count=10)
    topic.pause()
    publish_large(rig, count=100)
    assert channel.dropped_count == 10, "what it had seen is older than what the topic holds back"
    kept = topic.depth
    assert topic.dropped_count == 100 - kept
    topic.unpause()
    assert (channel.depth, channel.message_count) == (kept, 10 + kept)
    assert rig.subscribe(TOPIC, rdy=100).take_bodies() == bodies(kept, 100 - kept, SIZE)


def test_the_ephemeral_topic_with_the_most_bytes_drops_its_oldest_messages(make_rig: MakeRig):
    rig = make_rig(mem_queue_bytes=LIMIT)
    publish_large(rig, "large#ephemeral", 40)
    publish_large(rig, "small#ephemeral", 20)
    assert rig.topic("small#ephemeral").dropped_count == 0
    large = rig.topic("large#ephemeral")
    assert large.dropped_count == 40 - large.depth > 0
    publish_large(rig, "small#ephemeral", 100)
    assert abs(rig.topic("small#ephemeral").depth - large.depth) < 10


def test_many_small_ephemeral_topics_share_the_bytes(make_rig: MakeRig):
    rig = make_rig(mem_queue_bytes=LIMIT)
    for number in range(200):
        publish_large(rig, f"{number}#ephemeral", 1)
    assert sum(topic.depth for topic in rig.broker.topics.values()) >= 45


def test_an_ephemeral_message_in_flight_that_was_given_up_can_be_finished_but_not_sent_again(
    make_rig: MakeRig,
):
    rig = make_rig(mem_queue_bytes=LIMIT)
    client = rig.subscribe(TOPIC, rdy=100)
    channel = rig.channel(topic=TOPIC)
    publish_large(rig)
    rig.maintain()
    assert memory_of(rig) <= LIMIT
    sent = client.take()
    assert len(sent) == len(channel.unfinished.in_flight) == 100
    assert channel.dropped_count == 0, "they may still be finished"
    assert rig.finish(client, sent[0]) == []
    rig.requeue(client, sent[1])
    assert channel.dropped_count == 1
    rig.requeue(client, sent[2], timeout_ms=1000)
    assert channel.dropped_count == 2
    rig.pass_time(60)
    again = client.take()
    assert [message.body for message in again] == bodies(len(again), 100 - len(again), SIZE)
    assert 45 <= len(again) <= 50
    assert channel.dropped_count == 99 - len(again)
    assert channel.unfinished._attempts == {}
    rig.finish(client, *again)
    rig.maintain()
    assert memory_of(rig) == 0


def test_no_ephemeral_message_is_given_up_while_finished_ones_take_the_memory(make_rig: MakeRig):
    rig = make_rig(mem_queue_bytes=LIMIT)
    client = rig.subscribe(TOPIC, rdy=2)
    rig.publish(TOPIC, b"held")
    (held,) = client.take()
    for number in range(200):
        rig.publish(TOPIC, *bodies(1, number, SIZE))
        rig.finish(client, *client.take())
        assert memory_of(rig) <= LIMIT
    rig.requeue(client, held)
    assert client.take_bodies() == [b"held"]
    assert rig.channel(topic=TOPIC).dropped_count == 0


def test_carried_over_messages_of_an_ephemeral_topic_are_bounded_by_bytes(make_rig: MakeRig):
    rig = make_rig(mem_queue_bytes=LIMIT)
    slow = [rig.subscribe(TOPIC, name, rdy=1000) for name in ("a", "b")]
    for number in range(100):
        rig.publish(TOPIC, *bodies(1, number, SIZE), *bodies(5))
        for client in slow:
            rig.finish(client, *client.take()[1:])
        rig.maintain()
        assert memory_of(rig) <= LIMIT
    channel = rig.channel("a", TOPIC)
    assert len(channel.carried_over.store.kept) >= 20, "each channel has its own copy"
    rig.pass_time(60)
    kept = len(slow[0].take())
    assert channel.dropped_count == 100 - kept


def test_deferred_and_requeued_messages_that_are_given_up_are_counted(make_rig: MakeRig):
    rig = make_rig(mem_queue_bytes=LIMIT)
    client = rig.subscribe(TOPIC, rdy=10)
    channel = rig.channel(topic=TOPIC)
    publish_large(rig, count=10)
    rig.ready(client, 0)
    for message in client.take():
        rig.requeue(client, message)
    publish_large(rig, count=10, defer_ms=1000)
    assert counts(channel) == (10, 0, 10)
    publish_large(rig, count=60)
    assert counts(channel) == (80 - channel.dropped_count, 0, 0)
    assert channel.unfinished._attempts == {}


def test_an_ephemeral_message_larger_than_the_bound_is_delivered(make_rig: MakeRig):
    rig = make_rig(mem_queue_bytes=0)
    client = rig.subscribe(TOPIC)
    rig.publish(TOPIC, b"old")
    rig.publish(TOPIC, b"new")
    rig.ready(client, 1)
    assert client.take_bodies() == [b"new"]


def test_bytes_of_an_ephemeral_topic_that_is_gone_do_not_count(make_rig: MakeRig):
    rig = make_rig(mem_queue_bytes=LIMIT)
    client = rig.subscribe(TOPIC, CHANNEL, rdy=10)
    publish_large(rig, count=20)
    rig.maintain()
    assert memory_of(rig) > 0
    rig.disconnect(client)
    assert TOPIC not in rig.broker.topics
    assert memory_of(rig) == 0


@pytest.mark.parametrize("seed", range(4))
def test_no_ephemeral_message_is_lost_without_being_counted(make_rig: MakeRig, seed: int):
    rig = make_rig(mem_queue_bytes=LIMIT, mem_queue_size=40)
    random = Random(seed)
    clients = [rig.subscribe(TOPIC, name, rdy=30) for name in ("a", "b", "b")]
    topic = rig.topic(TOPIC)
    finished = dict.fromkeys("ab", 0)
    held: list[tuple[FakeClient, Delivered]] = []
    for _ in range(400):
        size = random.choice((10, SIZE, 5 * SIZE))
        rig.publish(TOPIC, *bodies(random.randrange(1, 4), size=size), defer_ms=random.choice((0, 0, 0, 500)))
        held += [(client, message) for client in clients for message in client.take()]
        for _ in range(random.randrange(6)):
            if not held:
                break
            client, message = held.pop(random.randrange(len(held)))
            assert client.channel is not None
            if client.channel.unfinished.in_flight.find(message.id - topic.first_id) is None:
                continue
            if random.random() < 0.6:
                finished[client.channel.name] += not rig.finish(client, message)
            elif client.channel.unfinished.in_flight.find(message.id - topic.first_id).client is client:
                rig.requeue(client, message, random.choice((0, 300)))
        step = random.random()
        if step < 0.05:
            topic.unpause() if topic.paused else topic.pause()
        elif step < 0.3:
            rig.maintain()
        elif step < 0.4:
            rig.pass_time(random.choice((0.3, 70)))
        assert memory_of(rig) <= LIMIT + 2 * 150 * KIB
        for channel in topic.channels.values():
            gone = finished[channel.name] + channel.dropped_count
            assert channel.message_count == gone + sum(counts(channel))
    assert topic.dropped_count and topic.channels["a"].dropped_count
