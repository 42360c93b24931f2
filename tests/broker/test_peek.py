"""Peeking at messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from nsparq.broker.peek import (
    DEFERRED,
    IN_FLIGHT,
    READY,
    REQUEUED,
    STATES,
    PeekedMessage,
    peek_channel,
    peek_topic,
)
from nsparq.broker.stats import broker_stats
from nsparq.storage.log_range import OffsetAhead, OffsetGone
from tests.broker.rig import MILLISECOND, SECOND, Rig, bodies, counts

MakeRig = Callable[..., Rig]
KEPT: dict[str, Any] = {"retention_bytes": 1 << 30}
in_all_modes = pytest.mark.parametrize("durability", ["os", "fsync", "memory"])


def look(rig: Rig, *states: str, count: int = 1000, channel: str = "c", topic: str = "t", **limits: int):
    limits = {"max_bytes": 1 << 20} | limits
    return peek_channel(rig.channel(channel, topic), states or STATES, count, **limits).read()


def shown(messages: list[PeekedMessage]) -> list[tuple[bytes, str, int]]:
    return [(message.body, message.state, message.attempts) for message in messages]


def everything(rig: Rig, topic: str = "t") -> object:
    """Everything that a peek could change."""
    found = rig.broker.topics[topic]
    log = found.log
    return (
        broker_stats(rig.broker),
        [
            (c.cursor.position, counts(c), c.checkpoint.is_stale, c.checkpoint.capture()().encode())
            for c in found.channels.values()
        ],
        (rig.broker.cache.size_bytes, [*rig.broker.cache._batches]),
        (log.start, log.end, [*log.gaps.ranges]),
        {*rig.broker.upkeep.changed},
    )


# a topic's end


def test_the_newest_messages_are_shown_even_if_they_are_large(make_rig: MakeRig):
    """Not the first ones of the last `count`."""
    rig = make_rig(**KEPT)
    for body in bodies(20):
        rig.publish("t", body * 50)
    found = peek_topic(rig.topic(), None, 20, max_bytes=300).read()
    assert [one.body for one in found] == [b"%d" % number * 50 for number in (17, 18, 19)]
    last = found[0].sequence
    found = peek_topic(rig.topic(), None, 20, max_bytes=300, before=last).read()
    assert [one.body for one in found] == [b"%d" % number * 50 for number in (14, 15, 16)]


# a channel


@in_all_modes
def test_every_unfinished_message_is_shown_with_its_state(make_rig: MakeRig, durability: str):
    rig = make_rig(durability=durability)
    client = rig.subscribe(rdy=5, address="10.0.0.7:4711", msg_timeout_ms=60_000)
    published_ns = rig.clock.wall()
    rig.publish("t", *bodies(10))
    due_ns = rig.clock.wall() + 5000 * MILLISECOND
    rig.publish("t", b"published deferred", defer_ms=5000)
    held = client.take()
    rig.clock.advance(1)
    rig.channel().pause()
    rig.finish(client, held[0])
    rig.requeue(client, held[1])
    rig.requeue(client, held[2], 9000)
    found = look(rig)
    assert shown(found) == [
        (b"3", IN_FLIGHT, 1),
        (b"4", IN_FLIGHT, 1),
        (b"1", REQUEUED, 1),
        (b"published deferred", DEFERRED, 0),
        (b"2", DEFERRED, 1),
        *[(b"%d" % i, READY, 0) for i in range(5, 10)],
    ]
    assert found[0] == PeekedMessage(
        id=f"{held[3].id:016x}",
        sequence=held[3].id - rig.topic().first_id,
        timestamp_ns=published_ns,
        attempts=1,
        state=IN_FLIGHT,
        due_ns=None,
        deadline_ns=published_ns + 60 * SECOND,
        client="10.0.0.7:4711",
        body=b"3",
        size=1,
    )
    assert [message.due_ns for message in found[3:5]] == [due_ns, rig.clock.wall() + 9 * SECOND]
    assert {(m.due_ns, m.deadline_ns, m.client) for m in found[5:]} == {(None, None, "")}


def test_states_can_be_chosen_and_come_in_the_order_asked_for(rig: Rig):
    client = rig.subscribe(rdy=2)
    rig.publish("t", *bodies(4))
    rig.requeue(client, client.take()[0], 1000)
    rig.ready(client, 1)
    assert [m.state for m in look(rig, READY)] == [READY]
    assert [m.state for m in look(rig, READY, IN_FLIGHT)] == [READY, IN_FLIGHT, IN_FLIGHT]
    assert [m.state for m in look(rig, DEFERRED, READY, count=2)] == [DEFERRED, READY]
    assert [m.state for m in look(rig, DEFERRED, READY, count=1)] == [DEFERRED]
    assert look(rig, REQUEUED) == []
    assert look(rig, count=0) == []
    with pytest.raises(KeyError):
        look(rig, "finished")


def test_ready_messages_are_shown_in_the_order_of_delivery(make_rig: MakeRig):
    rig = make_rig(**KEPT)
    start = rig.channel().cursor.position
    rig.publish("t", *bodies(5))
    rig.publish("t", b"deferred", defer_ms=60_000)
    rig.publish("t", *bodies(5, 5))
    rig.topic().pause()
    rig.publish("t", *bodies(3, 100))
    rig.topic().empty()
    rig.topic().unpause()
    rig.publish("t", *bodies(5, 10))
    rig.crash()
    rig.channel().cursor.skips.add(start + 2, start + 4)
    rig.publish("t", b"after the crash")
    rig.topic().pause()
    rig.publish("t", b"held back")
    found = look(rig, READY)
    assert look(rig, READY, count=4) == found[:4]
    client = rig.subscribe(rdy=100)
    delivered = client.take()
    assert [(m.body, int(m.id, 16), m.timestamp_ns) for m in found] == [
        (m.body, m.id, m.timestamp_ns) for m in delivered
    ]
    assert len(found) == 14


def test_a_deferred_message_met_again_after_its_time_is_ready(make_rig: MakeRig):
    rig = make_rig(**KEPT)
    start = rig.channel().cursor.position
    rig.publish("t", b"a")
    rig.publish("t", b"was deferred", defer_ms=10)
    rig.pass_time(1)
    rig.channel().seek(start)
    assert shown(look(rig)) == [(b"a", READY, 0), (b"was deferred", READY, 0)]


def test_messages_carried_over_are_shown(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=300)
    client = rig.subscribe(rdy=200)
    rig.publish("t", *bodies(5))
    held = client.take()
    rig.finish(client, *held[2:])
    for i in range(20):
        rig.publish("t", *bodies(10, 10 * (i + 1)))
        rig.finish(client, *client.take())
        rig.maintain()
    assert rig.topic().log.start > held[1].id - rig.topic().first_id
    assert shown(look(rig)) == [(b"0", IN_FLIGHT, 1), (b"1", IN_FLIGHT, 1)]
    peek = peek_channel(rig.channel(), STATES, 10, 1 << 20)
    rig.finish(client, *held[:2])
    rig.maintain()
    assert rig.names("*.carry") == []
    assert [message.body for message in peek.read()] == [b"0", b"1"], "chosen is chosen"


def test_an_ephemeral_topic_can_be_peeked_at(rig: Rig):
    client = rig.subscribe("t#ephemeral", rdy=2)
    rig.publish("t#ephemeral", *bodies(5))
    rig.publish("t#ephemeral", b"later", defer_ms=1000)
    held = client.take()
    rig.finish(client, held[1])
    rig.maintain()
    found = look(rig, topic="t#ephemeral")
    assert [m.body for m in found] == [b"0", b"2", b"later", b"3", b"4"]
    assert [m.state for m in found] == [IN_FLIGHT, IN_FLIGHT, DEFERRED, READY, READY]
    held_back = peek_topic(rig.topic("t#ephemeral"), None, 2, 1000).read()
    assert [m.body for m in held_back] == [b"4", b"later"]


# limits


def test_long_bodies_are_cut_and_shown_with_their_size(rig: Rig):
    rig.channel()
    rig.publish("t", b"x" * 1000, b"y" * 5)
    assert [(m.body, m.size) for m in look(rig, body_limit=10)] == [(b"x" * 10, 1000), (b"y" * 5, 5)]
    assert [(len(m.body), m.size) for m in peek_topic(rig.topic(), None, 9, 10_000, 4).read()] == [
        (4, 1000),
        (4, 5),
    ]


def test_the_bytes_shown_are_limited_but_one_message_always_comes(rig: Rig):
    rig.channel()
    start = rig.topic().log.start
    rig.publish("t", *bodies(100, size=100))
    assert len(look(rig, max_bytes=1000)) == 10
    assert len(look(rig, max_bytes=1)) == 1
    assert len(peek_topic(rig.topic(), start, 1000, 1000).read()) == 10
    assert len(peek_topic(rig.topic(), start, 1000, 1).read()) == 1
    assert len(look(rig, max_bytes=1000, body_limit=10)) == 100


def test_a_peek_at_a_large_topic_reads_little_of_it(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=100)
    rig.channel()
    for _ in range(300):
        rig.publish("t", *[b"x" * 1000] * 20)
    rig.files.calls.clear()
    assert len(look(rig, count=50)) == 50
    start = rig.topic().log.start
    assert len(peek_topic(rig.topic(), start + 3000, 50, 1 << 20).read()) == 50
    assert rig.files.calls["read"] <= 6
    assert rig.files.calls["open_read"] <= 2


# a topic


@in_all_modes
def test_a_topic_shows_what_is_stored_from_a_number_on(make_rig: MakeRig, durability: str):
    rig = make_rig(durability=durability, max_bytes_per_file=300, mem_queue_size=10, **KEPT)
    client = rig.subscribe(rdy=100)
    topic = rig.topic()
    start = topic.log.end
    for i in range(20):
        rig.publish("t", *bodies(5, 5 * i))
    rig.publish("t", b"later", defer_ms=1000)
    rig.finish(client, *client.take())
    for first in (0, 3, 50, 98, 100):
        found = peek_topic(topic, start + first, 4, 1 << 20).read()
        assert [m.body for m in found] == [*bodies(100), b"later"][first : first + 4]
        assert [m.sequence for m in found] == [*range(start + first, start + min(first + 4, 101))]
        assert {(m.state, m.attempts) for m in found} == {("stored", 0)}
    assert found[0].due_ns == rig.clock.wall() + SECOND
    newest = peek_topic(topic, None, 3, 1 << 20).read()
    assert [m.body for m in newest] == [b"98", b"99", b"later"]
    assert len(peek_topic(topic, None, 1000, 1 << 20).read()) == 101
    assert peek_topic(topic, topic.log.end, 5, 1000).read() == []
    with pytest.raises(OffsetGone):
        peek_topic(topic, start - 1, 5, 1000)
    with pytest.raises(OffsetAhead):
        peek_topic(topic, topic.log.end + 1, 5, 1000)


def test_the_newest_are_found_beyond_a_gap(make_rig: MakeRig):
    rig = make_rig(**KEPT)
    rig.channel()
    rig.publish("t", *bodies(5))
    rig.crash(1_000_000)
    rig.publish("t", *bodies(2, 5))
    rig.topic().pause()
    rig.publish("t", b"emptied")
    rig.topic().empty()
    found = peek_topic(rig.topic(), None, 4, 1 << 20).read()
    assert [m.body for m in found] == bodies(4, 3)
    assert [m.body for m in peek_topic(rig.topic(), None, 100, 1 << 20).read()] == bodies(7)


def test_an_empty_topic_shows_nothing(rig: Rig):
    assert peek_topic(rig.topic(), None, 10, 1000).read() == []
    assert look(rig) == []


# a peek changes nothing


@in_all_modes
def test_a_peek_changes_nothing(make_rig: MakeRig, durability: str):
    rig = make_rig(
        durability=durability, mem_queue_size=5, max_bytes_per_file=500, mem_queue_bytes=2000, **KEPT
    )
    client = rig.subscribe(rdy=10)
    for i in range(20):
        rig.publish("t", *bodies(5, 5 * i))
    rig.publish("t", b"later", defer_ms=1000)
    held = client.take()
    rig.finish(client, *held[3:6])
    rig.requeue(client, held[7], 500)
    rig.maintain()
    rig.maintain()
    before = everything(rig)
    for _ in range(2):
        assert len(look(rig)) == 98
        assert len(peek_topic(rig.topic(), rig.topic().log.start, 1000, 1 << 20).read()) == 101
    assert everything(rig) == before


def test_a_peek_at_a_cold_disk_blocks_nobody(make_rig: MakeRig):
    """Choosing reads nothing; reading happens in a thread."""
    rig = make_rig(mem_queue_size=1, **KEPT)
    rig.channel()
    rig.publish("t", *bodies(50))
    rig.restart()
    rig.files.is_cold = True
    rig.files.calls.clear()
    start = rig.topic().log.start
    peeks = [peek_channel(rig.channel(), STATES, 10, 1000), peek_topic(rig.topic(), start, 10, 1000)]
    assert rig.files.calls["read"] == rig.files.calls["read_cached"] == 0
    found: list[list[PeekedMessage]] = []
    thread = threading.Thread(target=lambda: found.extend(peek.read() for peek in peeks))
    thread.start()
    thread.join()
    assert [[m.body for m in messages] for messages in found] == [bodies(10), bodies(10)]


def test_messages_reclaimed_after_the_choice_can_still_be_read(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=300)
    rig.channel()
    for i in range(20):
        rig.publish("t", *bodies(5, 5 * i))
    start = rig.topic().log.start
    peeks = [peek_channel(rig.channel(), STATES, 10, 1000), peek_topic(rig.topic(), start, 10, 1000)]
    rig.channel().empty()
    rig.maintain()
    assert rig.topic().log.start > start + 50
    assert [[m.body for m in peek.read()] for peek in peeks] == [bodies(10), bodies(10)]


def test_messages_lost_to_damage_are_left_out_and_counted(rig: Rig):
    rig.channel()
    for i in range(3):
        rig.publish("t", *bodies(2, 2 * i))
    (name,) = rig.names("*.log")
    path = rig.topic_directory("t") / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    peek = peek_channel(rig.channel(), STATES, 10, 1000)
    assert [m.body for m in peek.read()] == [b"0", b"1", b"4", b"5"]
    assert peek.missing == 2
    stored = peek_topic(rig.topic(), rig.topic().log.start, 10, 1000)
    assert [m.body for m in stored.read()] == [b"0", b"1", b"4", b"5"]
    assert stored.missing == 2
