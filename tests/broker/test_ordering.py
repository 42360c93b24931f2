"""Channels that are ordered by keys: one message of a key at a time, in order, whatever happens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from nsparq.broker import ordering
from nsparq.broker.message_key import key_reader
from nsparq.broker.peek import READY, peek_channel
from nsparq.broker.stats import channel_stats
from nsparq.delivery_policy import parse_policy
from nsparq.headers import encode_headers
from nsparq.packed import PackedBodies
from nsparq.storage.batch import Batch, lengths_of
from tests.broker.rig import FakeClient, Later, Rig, counts

MakeRig = Callable[..., Rig]


def order(rig: Rig, channel: str = "c", by: str = "/k") -> None:
    rig.channel(channel).ordering.change(by)
    rig.turn()


def message(name: str) -> bytes:
    """A message whose key is the first letter of its name; none for a dash."""
    return json.dumps({"k": name[0] if name[0] != "-" else None, "name": name}).encode()


def publish(rig: Rig, names: str, **options: Any) -> None:
    assert rig.publish("t", *(message(name) for name in names.split()), **options).is_ok


def take(client: FakeClient) -> dict[str, int]:
    """The new messages of a client: their names and ids."""
    return {json.loads(one.body)["name"]: one.id for one in client.take()}


def got(client: FakeClient) -> str:
    return " ".join(take(client))


# keys


@pytest.mark.parametrize(
    ("pointer", "body", "key"),
    [
        ("/k", b'{"k": "a"}', "a"),
        ("/k", b'{"k": 7}', 7),
        ("/k", b'{"k": true}', True),
        ("/k", b'{"k": ""}', ""),
        ("/", b'{"": "a"}', "a"),
        ("/a~1b/m~0n", b'{"a/b": {"m~n": "x"}}', "x"),
        ("/items/1", b'{"items": ["a", "b"]}', "b"),
        ("/items/01", b'{"items": ["a", "b"]}', None),
        ("/items/2", b'{"items": ["a", "b"]}', None),
        ("/items/-", b'{"items": ["a", "b"]}', None),
        ("/k", b'{"k": null}', None),
        ("/k", b'{"k": [1]}', None),
        ("/k", b'{"k": {"a": 1}}', None),
        ("/k", b'{"k": NaN}', None),
        ("/k", b'"text"', None),
        ("/k/l", b'{"k": "text"}', None),
        ("/k", b"no JSON", None),
        ("/k", b"\xff\xfe", None),
        ("/k", b"", None),
        ("/k", b'{"k": ' + b"9" * 5000 + b"}", None),
        ("/k", b"[" * 200_000, None),
    ],
)
def test_the_key_of_a_body(pointer: str, body: bytes, key: object):
    batch = Batch(1, 0, 0, lengths_of([b"before", body]), b"before" + body)
    assert key_reader(pointer)(batch, 1, 1) == [None if key is None else hash(key)]


def test_the_key_in_a_header():
    blocks = [encode_headers({"trace": "1", "customer": "7"}), b"", encode_headers({"trace": "2"})]
    batch = Batch(1, 0, 0, lengths_of([b"x"] * 3), b"xxx", headers=PackedBodies.of(blocks))
    assert key_reader("header:Customer")(batch, 0, 3) == [hash("7"), None, None]
    assert key_reader("header:trace")(batch, 1, 2) == [None, hash("2")]
    assert key_reader("header:trace")(Batch.single(1, 0, b"x"), 0, 1) == [None]


def test_large_bodies_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nsparq.broker.message_key.MAX_BYTES", 20)
    bodies = [b'{"k": %d}' % number for number in (10, 11, 12)]
    batch = Batch(1, 0, 0, lengths_of(bodies), b"".join(bodies))
    assert key_reader("/k")(batch, 0, 3) == [10, 11]
    assert key_reader("/k")(batch, 2, 1) == [12]


@pytest.mark.parametrize(
    "bad", ["", "customer", "/a~2", "/a~", "/" + "x" * 2000, 7, None, ["/a"], "header:", "header:a b"]
)
def test_ordered_by_is_checked(bad: object):
    with pytest.raises(ValueError, match="ordered_by|JSON pointer|header name"):
        key_reader(bad)


# delivery


def test_a_channel_ordered_by_a_header(rig: Rig):
    """For clients that know of headers, and for others."""
    order(rig, by="header:customer")
    client, modern = rig.subscribe(rdy=10), rig.subscribe(rdy=10, headers=True)
    blocks = [encode_headers({"customer": name}) for name in "aabac"] + [b""]
    rig.publish("t", *(b"%d" % number for number in range(6)), blocks=blocks)
    rig.publish("t", b"6")
    held = {one.body: (one, who) for who in (client, modern) for one in who.take()}
    assert sorted(held) == [b"0", b"2", b"4", b"5", b"6"]
    rig.finish(held[b"0"][1], held[b"0"][0])
    assert [one.body for who in (client, modern) for one in who.take()] == [b"1"]


def test_one_message_of_a_key_is_with_a_client_at_a_time(rig: Rig):
    order(rig)
    clients = [rig.subscribe(rdy=10), rig.subscribe(rdy=10)]
    publish(rig, "a1 a2 b1 a3 c1 b2")
    held = {name: (client, number) for client in clients for name, number in take(client).items()}
    assert sorted(held) == ["a1", "b1", "c1"]
    client, number = held["a1"]
    rig.finish(client, number)
    assert sorted(name for client in clients for name in take(client)) == ["a2"]
    assert counts(rig.channel()) == (2, 3, 0)


def test_messages_without_a_key_are_delivered_freely(rig: Rig):
    order(rig)
    client = rig.subscribe(rdy=10)
    publish(rig, "-1 a1 -2 a2 -3")
    rig.publish("t", b"no JSON")
    names = [one.body for one in client.take()]
    assert names == [message("-1"), message("a1"), message("-2"), message("-3"), b"no JSON"]


def test_a_key_stays_locked_over_requeues_timeouts_and_lost_clients(rig: Rig):
    order(rig)
    client = rig.subscribe(rdy=5, msg_timeout_ms=10_000)
    publish(rig, "a1 a2")
    rig.requeue(client, take(client)["a1"])
    rig.requeue(client, take(client)["a1"], 3000)
    assert got(client) == ""
    rig.pass_time(3)
    assert got(client) == "a1"
    rig.pass_time(10)
    assert got(client) == "a1"
    rig.disconnect(client)
    other = rig.subscribe(rdy=5)
    assert [(json.loads(one.body)["name"], one.attempts) for one in other.messages] == [("a1", 5)]
    rig.finish(other, take(other)["a1"])
    assert got(other) == "a2"


def test_a_client_that_joins_moves_nothing(rig: Rig):
    order(rig)
    first = rig.subscribe(rdy=2)
    publish(rig, "a1 b1 a2 c1")
    held = take(first)
    assert list(held) == ["a1", "b1"]
    second = rig.subscribe(rdy=5)
    assert got(second) == "c1"
    rig.finish(first, held["a1"])
    assert {got(first), got(second)} == {"a2", ""}


def test_a_late_answer_of_a_message_that_timed_out_does_not_release_its_key(rig: Rig):
    order(rig)
    client = rig.subscribe(rdy=1, msg_timeout_ms=1000)
    publish(rig, "a1 a2")
    number = take(client)["a1"]
    rig.ready(client, 0)
    rig.pass_time(2)
    assert len(rig.finish(client, number)) == 1
    rig.ready(client, 5)
    assert got(client) == "a1"


def test_messages_published_with_a_delay_take_their_place_when_they_are_due(rig: Rig):
    order(rig)
    client = rig.subscribe(rdy=5)
    publish(rig, "a1", defer_ms=5000)
    publish(rig, "a2 a3")
    held = take(client)
    assert list(held) == ["a2"]
    rig.pass_time(6)
    assert got(client) == ""
    rig.finish(client, held["a2"])
    held = take(client)
    assert list(held) == ["a3"]
    rig.finish(client, held["a3"])
    assert got(client) == "a1"


def test_what_a_sampled_client_leaves_out_is_finished_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    order(rig)
    publish(rig, "a1 a2 b1 a3")
    monkeypatch.setattr("nsparq.broker.sampling.private_random.randrange", lambda _: 99)
    client = rig.subscribe(rdy=5, sample_rate=1)
    assert got(client) == ""
    assert counts(rig.channel()) == (0, 0, 0)


def test_latencies_are_recorded(make_rig: MakeRig):
    rig = make_rig(e2e_processing_latency_percentile=[1.0])
    order(rig)
    client = rig.subscribe(rdy=5)
    publish(rig, "a1 b1")
    publish(rig, "c1 a2")
    rig.clock.advance(2)
    rig.finish(client, *take(client).values())
    (percentile,) = channel_stats(rig.channel())["e2e_processing_latency"]["percentiles"]
    assert percentile["value"] == pytest.approx(2e9, rel=0.1)


# limits


def test_the_cursor_waits_when_many_messages_are_parked(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ordering, "MAX_PARKED", 3)
    order(rig)
    client = rig.subscribe(rdy=10)
    publish(rig, "a1 a2 b1 a3 a4 c1 a5 d1")
    held = take(client)
    assert list(held) == ["a1", "b1"]
    assert len(rig.channel().unfinished.parked) == 3
    assert rig.channel().depth == 6
    rig.finish(client, held["a1"])
    assert got(client) == "a2 c1"
    assert len(rig.channel().unfinished.parked) == 3


def test_only_unfinished_messages_take_memory(rig: Rig):
    """However many keys there are."""
    order(rig)
    client = rig.subscribe(rdy=2500)
    for start in range(0, 20_000, 2000):
        rig.publish("t", *(b'{"k": "key-%d"}' % (number) for number in range(start, start + 2000)))
        rig.finish(client, *client.take())
    keys = rig.channel().unfinished.keys
    assert keys is not None
    assert not keys.key_of and not keys._queues and not keys.unknown
    assert sys.getsizeof(keys.key_of) < 1 << 20


# policies


def test_the_next_message_follows_when_the_one_before_becomes_a_dead_letter(rig: Rig):
    rig.channel().change_policy(parse_policy({"max_attempts": 2, "retry_delay": 5, "retry_jitter": 0}, "t"))
    order(rig)
    client = rig.subscribe(rdy=5)
    publish(rig, "a1 a2 b1")
    held = take(client)
    assert list(held) == ["a1", "b1"]
    rig.requeue(client, held["a1"])
    assert got(client) == "", "a1 waits, and a2 behind it"
    rig.pass_time(5)
    rig.requeue(client, take(client)["a1"])
    assert got(client) == "a2"
    assert rig.channel().dead_letters.count == 1


@pytest.mark.parametrize("expired", ["drop", "dead_letters"])
def test_an_expired_message_does_not_lock_its_key(rig: Rig, expired: str):
    rig.channel().change_policy(parse_policy({"expire_after": 60, "expired": expired}, "t"))
    order(rig)
    client = rig.subscribe(rdy=1)
    publish(rig, "a1 a2 a3")
    held = take(client)
    rig.clock.advance(30)
    publish(rig, "a4")
    rig.clock.advance(40)
    rig.finish(client, held["a1"])
    assert got(client) == "a4"
    assert counts(rig.channel()) == (0, 1, 0)


# the setting


def test_a_channel_with_messages_in_flight_becomes_ordered(rig: Rig):
    """What is with clients stays there. The next message of a key waits for all of them."""
    client = rig.subscribe(rdy=3)
    publish(rig, "a1 a2 b1 a3 b2")
    held = take(client)
    assert list(held) == ["a1", "a2", "b1"]
    order(rig)
    rig.ready(client, 10)
    assert got(client) == ""
    rig.finish(client, held["a2"])
    rig.requeue(client, held["a1"])
    rig.finish(client, take(client)["a1"])
    assert got(client) == "a3"


def test_a_message_that_is_finished_before_its_key_was_read_locks_nothing(rig: Rig):
    client = rig.subscribe(rdy=1)
    publish(rig, "a1 a2")
    held = take(client)
    rig.channel().ordering.change("/k")
    rig.finish(client, held["a1"])
    assert got(client) == "a2"


def test_parked_messages_are_delivered_when_the_channel_is_not_ordered_any_more(rig: Rig):
    order(rig)
    client = rig.subscribe(rdy=5)
    publish(rig, "a1 a2 a3")
    assert got(client) == "a1"
    order(rig, by="")
    assert got(client) == "a2 a3"
    assert rig.channel().unfinished.keys is None


def test_with_another_key_what_was_sent_comes_first(rig: Rig):
    order(rig)
    client = rig.subscribe(rdy=5)
    rig.publish("t", *(b'{"k": "%s", "other": 1, "name": "%s"}' % (n[:1], n) for n in (b"a1", b"a2", b"b1")))
    held = take(client)
    assert list(held) == ["a1", "b1"]
    order(rig, by="/other")
    rig.finish(client, held["a1"])
    assert got(client) == "", "b1 is still with a client, and has the same key now"
    rig.finish(client, held["b1"])
    assert got(client) == "a2"


def test_a_disk_that_refuses_leaves_the_setting_as_it_was(rig: Rig):
    rig.channel()
    rig.files.fail("replace", ".channel")
    with pytest.raises(OSError):
        rig.channel().ordering.change("/k")
    assert rig.channel().ordering.ordered_by == ""
    assert rig.channel().unfinished.keys is None


def test_order_and_policy_are_saved_with_one_write_or_not_at_all(rig: Rig):
    channel, policy = rig.channel(), parse_policy({"max_attempts": 2}, "t")
    rig.files.fail("replace", ".channel")
    with pytest.raises(OSError):
        channel.change_settings(policy, "/k")
    assert (channel.retries.own_policy, channel.ordering.ordered_by) == (None, "")
    rig.files.heal()
    with pytest.raises(ValueError):
        channel.change_settings(policy, "k")
    assert (channel.retries.own_policy, channel.ordering.ordered_by) == (None, "")
    channel.change_settings(policy, "/k")
    assert (channel.retries.own_policy, channel.ordering.ordered_by) == (policy, "/k")
    assert channel.unfinished.keys is not None


# over restarts


@pytest.mark.parametrize("way", ["restart", "crash"])
def test_the_order_survives(rig: Rig, way: str):
    order(rig)
    client = rig.subscribe(rdy=5)
    publish(rig, "a1 a2 b1 a3 b2 c1")
    rig.requeue(client, take(client)["a1"], 5000)
    rig.maintain()
    getattr(rig, way)()
    assert rig.channel().ordering.ordered_by == "/k"
    assert counts(rig.channel()) == (5, 0, 1)
    client = rig.subscribe(rdy=10)
    held = take(client)
    assert list(held) == ["b1", "c1"], "a1 is deferred and has its key"
    rig.pass_time(6)
    held |= take(client)
    seen = []
    while held:
        name, number = held.popitem()
        seen.append(name)
        rig.finish(client, number)
        held |= take(client)
    assert sorted(seen) == ["a1", "a2", "a3", "b1", "b2", "c1"]
    assert [name for name in seen if name[0] == "a"] == ["a1", "a2", "a3"]
    assert seen.index("b1") < seen.index("b2")


def test_the_order_survives_two_restarts(rig: Rig):
    """New messages are parked before those that the first restart has brought back."""
    order(rig)
    client = rig.subscribe(rdy=5)
    publish(rig, "a1 a2 a3 a4")
    assert got(client) == "a1"
    rig.restart()
    publish(rig, "a5 a6 b1")
    client = rig.subscribe(rdy=1)
    assert got(client) == "a1"
    other = rig.subscribe(rdy=1)
    rig.finish(other, take(other)["b1"])
    assert len(rig.channel().unfinished.parked) == 5
    rig.restart()
    client = rig.subscribe(rdy=1)
    seen = []
    while held := take(client):
        seen += held
        rig.finish(client, *held.values())
    assert seen == ["a1", "a2", "a3", "a4", "a5", "a6"]


def test_keys_are_read_from_a_slow_disk_before_anything_is_sent(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later, mem_queue_size=1, mem_queue_bytes=100)
    order(rig)
    later.run_all()
    client = rig.subscribe(rdy=5)
    publish(rig, "a1 a2 b1 a3")
    rig.files.is_cold = True
    rig.restart()
    client = rig.subscribe(rdy=10)
    assert got(client) == ""
    for _ in range(10):
        later.run_all()
        rig.turn()
    assert sorted(take(client)) == ["a1", "b1"]


def test_parked_messages_are_carried_over(make_rig: MakeRig):
    """They keep no segments, and come in order from where they are then."""
    rig = make_rig(max_bytes_per_file=6000, mem_queue_size=1)
    order(rig)
    client = rig.subscribe(rdy=100)
    publish(rig, "a1 a2 a3")
    assert got(client) == "a1"
    for _ in range(30):
        rig.publish("t", *(b'{"name": "%d"}' % number for number in range(60)))
        rig.finish(client, *client.take())
        rig.maintain()
    channel = rig.channel()
    assert len(channel.carried_over.store.kept) == 3
    assert counts(channel) == (2, 1, 0)
    rig.maintain()
    rig.restart()
    client = rig.subscribe(rdy=5)
    for name in ("a1", "a2", "a3"):
        held = take(client)
        assert list(held) == [name]
        rig.finish(client, held[name])
    assert counts(rig.channel()) == (0, 0, 0)


# management


def test_empty_seek_and_commit_release_keys(rig: Rig):
    order(rig)
    client = rig.subscribe(rdy=5)
    publish(rig, "a1 a2")
    assert got(client) == "a1"
    rig.channel().empty()
    publish(rig, "a3 a4")
    assert got(client) == "a3"
    rig.channel().seek(0)
    rig.turn()
    held = take(client)
    assert list(held) == ["a1"]
    rig.channel().commit(held["a1"] - rig.topic().first_id + 2)
    rig.turn()
    assert got(client) == "a3"
    assert counts(rig.channel()) == (1, 1, 0)


def test_peek_shows_parked_messages_as_ready(rig: Rig):
    order(rig)
    client = rig.subscribe(rdy=1)
    publish(rig, "a1 b1 a2")
    client2 = rig.subscribe(rdy=1)
    publish(rig, "b2 c1")
    assert got(client) + got(client2) == "a1b1"
    look = peek_channel(rig.channel(), [READY], 10, 1 << 20)
    assert [json.loads(one.body)["name"] for one in look.read()] == ["a2", "b2", "c1"]


def test_a_bounded_channel_drops_parked_messages_too(make_rig: MakeRig):
    rig = make_rig(mem_queue_size=3)
    client = rig.subscribe(channel="c#ephemeral", rdy=1)
    order(rig, "c#ephemeral")
    publish(rig, "a1 a2 a3 a4 a5 a6")
    channel = rig.channel("c#ephemeral")
    assert (channel.depth, channel.dropped_count) == (3, 2)
    rig.finish(client, take(client)["a1"])
    assert got(client) == "a4"


def test_a_parked_message_that_is_lost_to_damage_is_passed(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    order(rig)
    client = rig.subscribe(rdy=5)
    publish(rig, "a1 a2 a3")
    held = take(client)
    lost = held["a1"] - rig.topic().first_id + 1
    find = rig.channel().delivery.find
    monkeypatch.setattr(rig.channel().delivery, "find", lambda one: None if one == lost else find(one))
    rig.finish(client, held["a1"])
    assert got(client) == "a3"
    assert rig.channel().dropped_count == 1
