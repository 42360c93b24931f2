"""Delivery policies: attempts, delays, dead letters and expiry, over restarts and crashes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from nsparq.broker import dead_letters, delivery
from nsparq.broker.channel import Channel
from nsparq.broker.stats import channel_stats
from nsparq.broker.tagged import DEAD_LETTERS
from nsparq.dead_letter import ORIGIN_HEADERS, DeadLetter
from nsparq.delivery_policy import DeliveryPolicy, Failure, parse_policy
from nsparq.headers import decode_headers, encode_headers
from nsparq.packed import PackedBodies
from tests.broker.rig import SECOND, FakeClient, Later, Rig

MakeRig = Callable[..., Rig]


def set_policy(rig: Rig, channel: str = "c", topic: str = "t", **values: Any) -> None:
    rig.channel(channel, topic).change_policy(parse_policy(values, topic))


def letters(rig: Rig, topic: str = "t.dead") -> list[dict[str, Any]]:
    """All dead letters in a topic, in order."""
    log = rig.topic(topic).log
    found = []
    sequence = log.start
    while (batch := log.read(sequence, wait=True)) is not None:
        blocks = batch.headers or [b""] * batch.count
        for body, block in zip(batch.bodies(), blocks, strict=True):
            letter = DeadLetter.from_message(body, decode_headers(block))
            assert letter is not None
            found.append(json.loads(letter.to_json()))
        sequence = batch.end
    return found


def fail(rig: Rig, client: FakeClient, times: int, body: bytes = b"poison") -> None:
    """Requeue each delivery of one message, so many times."""
    for _ in range(times):
        (message,) = client.take()
        assert message.body == body
        rig.requeue(client, message)


# values


def test_the_default_is_below_the_limits_of_client_libraries():
    policy = parse_policy({}, "t")
    assert policy == DeliveryPolicy()
    assert (policy.max_attempts, policy.dead_letter_topic("t")) == (4, "t.dead")
    assert policy.stored() == {}


def test_what_is_stored_can_be_read_again():
    values = {"max_attempts": 7, "retry_delay": 1.5, "dead_letters": "x", "expired": "drop"}
    assert parse_policy(values, "t").stored() == values
    assert parse_policy(parse_policy(values, "t").stored(), "t") == parse_policy(values, "t")
    assert parse_policy({"retry_delay": "90s", "expire_after": "24h"}, "t").stored() == {
        "retry_delay": 90.0,
        "expire_after": 86400.0,
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "a policy must be an object"),
        ({"attempts": 3}, "a policy has no 'attempts'; it has max_attempts, count"),
        ({"max_attempts": -1}, "max_attempts must be a whole number from 0 to 65535, not -1"),
        ({"max_attempts": True}, "max_attempts must be"),
        ({"max_attempts": 2.0}, "max_attempts must be"),
        ({"count": "all"}, "count must be 'failures' or 'deliveries', not 'all'"),
        ({"expired": None}, "expired must be 'dead_letters' or 'drop', not None"),
        ({"retry_delay": "soon"}, "retry_delay must be seconds, or a duration such as '5m', not 'soon'"),
        ({"expire_after": "-1s"}, "expire_after must be a number from 0 to"),
        ({"retry_factor": "2s"}, "retry_factor must be a number from 1 to 1000"),
        ({"retry_delay": float("nan")}, "retry_delay must be"),
        ({"retry_factor": 0.5}, "retry_factor must be a number from 1 to 1000"),
        ({"retry_jitter": 1.5}, "retry_jitter must be a number from 0 to 1"),
        ({"retry_delay": 400}, "max_retry_delay must not be smaller than retry_delay"),
        ({"dead_letters": "not a name"}, "dead_letters must be the name of a topic, not 'not a name'"),
        ({"dead_letters": 5}, "dead_letters must be the name of a topic, not 5"),
        ({"dead_letters": "x#ephemeral"}, "dead_letters must not be an ephemeral topic"),
    ],
)
def test_wrong_values_are_refused_with_a_reason(values: object, text: str):
    with pytest.raises(ValueError) as caught:
        parse_policy(values, "t")
    assert text in str(caught.value)


def test_a_default_name_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="dead_letters must be the name of a topic"):
        parse_policy({}, "t" * 64)


def test_delays_grow_up_to_the_longest():
    policy = parse_policy({"retry_delay": 1, "max_retry_delay": 5, "retry_jitter": 0}, "t")
    assert [policy.delay_ns(n) / SECOND for n in (1, 2, 3, 4, 60_000)] == [1, 2, 4, 5, 5]
    assert parse_policy({}, "t").delay_ns(9) == 0


def test_jitter_spreads_delays():
    policy = parse_policy({"retry_delay": 10, "retry_jitter": 0.5}, "t")
    delays = {policy.delay_ns(1) for _ in range(100)}
    assert len(delays) > 50
    assert all(5 * SECOND <= delay <= 15 * SECOND for delay in delays)


def test_a_client_that_disconnects_counts_only_among_deliveries():
    assert not parse_policy({}, "t").counts(Failure.DISCONNECTED)
    assert parse_policy({"count": "deliveries"}, "t").counts(Failure.DISCONNECTED)


# attempts


def test_without_a_policy_a_message_is_sent_for_ever(rig: Rig):
    client = rig.subscribe(rdy=1)
    rig.publish("t", b"poison")
    fail(rig, client, 20)
    assert client.take()[0].attempts == 21
    assert [*rig.broker.topics] == ["t"]


@pytest.mark.parametrize("attempts", [1, 2, 4])
def test_a_message_becomes_a_dead_letter_when_its_last_attempt_ends(rig: Rig, attempts: int):
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=attempts)
    rig.publish("t", b"poison")
    (first,) = client.messages
    fail(rig, client, attempts)
    assert client.take() == [], "not one delivery more"
    (letter,) = letters(rig)
    assert letter == {
        "topic": "t",
        "channel": "c",
        "id": f"{first.id:016x}",
        "timestamp_ns": first.timestamp_ns,
        "attempts": attempts,
        "error": "requeued",
        "text": "poison",
        "base64": None,
        "client": "127.0.0.1:1",
        "given_up_ns": rig.clock.wall(),
    }
    stats = channel_stats(rig.channel())
    assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (0, 0, 0)
    assert stats["dead_letter_count"] == 1


BLOCK = encode_headers({"key": "ü", "nsq-number": "5"})


def give_up(rig: Rig, body: bytes = b"poison", block: bytes = b"", topic: str = "t") -> None:
    """Publish a message, and fail its only attempt."""
    client = rig.subscribe(topic, rdy=1)
    set_policy(rig, topic=topic, max_attempts=1)
    rig.publish(topic, body, blocks=[block])
    rig.requeue(client, client.take()[0])
    rig.disconnect(client)


@pytest.mark.parametrize("body", [b"poison", b"\xff\x00"])
@pytest.mark.parametrize("block", [b"", BLOCK], ids=["plain", "with headers"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_dead_letter_is_the_message_with_its_origin_as_headers(
    rig: Rig, body: bytes, block: bytes, is_restarted: bool
):
    for channel in ("asked", "plain"):
        rig.channel(channel, "t.dead")
    for _ in range(2):
        give_up(rig, body, block)
    if is_restarted:
        rig.restart()
    first, second = rig.subscribe("t.dead", "asked", rdy=10, headers=True).take()
    headers = decode_headers(first.block)
    own = decode_headers(block)
    assert (first.body, second.body) == (body, body)
    assert {name: headers.pop(name) for name in own} == own
    assert headers == {
        "nsq-dead-topic": "t",
        "nsq-dead-channel": "c",
        "nsq-dead-id": f"{rig.topic().first_id + rig.topic().log.start:016x}",
        "nsq-dead-timestamp": str(first.timestamp_ns),
        "nsq-dead-attempts": "1",
        "nsq-dead-reason": "requeued",
        "nsq-dead-client": "127.0.0.1:1",
        "nsq-dead-given-up": str(first.timestamp_ns),
    }
    # Clients without headers get the form that the client library writes.
    as_json = rig.subscribe("t.dead", "plain", rdy=10).take()
    assert [json.loads(one.body) for one in as_json] == letters(rig)
    letter = json.loads(as_json[0].body)
    assert (letter["text"], letter["base64"]) == (("poison", None) if body == b"poison" else (None, "/wA="))
    assert letter.get("headers") == (own or None)
    found = DeadLetter.from_message(as_json[0].body, {})
    assert found == DeadLetter.from_message(first.body, decode_headers(first.block))
    assert found is not None and (found.body, found.headers) == (body, own or None)


def test_a_letter_that_is_given_up_keeps_its_first_origin(rig: Rig):
    give_up(rig, b"poison", BLOCK)
    client = rig.subscribe("t.dead", rdy=1)
    set_policy(rig, topic="t.dead", max_attempts=1)
    rig.turn()
    rig.requeue(client, client.take()[0])
    (again,) = letters(rig, "t.dead.dead")
    assert (again["topic"], again["channel"]) == ("t.dead", "c")
    first = json.loads(again["text"])
    assert (first["topic"], first["text"], first["headers"]) == ("t", "poison", decode_headers(BLOCK))


@pytest.mark.parametrize("name", [name for name in ORIGIN_HEADERS if name != "nsq-dead-topic"])
def test_a_message_cannot_say_where_its_dead_letter_comes_from(rig: Rig, name: str):
    """A publisher may choose any header. With the name twice the letter could not be read, and the
    channels of the dead-letter topic would stand still."""
    rig.channel("asked", "t.dead")
    rig.channel("plain", "t.dead")
    give_up(rig, b'{"topic": "x", "error": "y", "text": "z"}', encode_headers({name: "mine", "own": "x"}))
    (letter,) = rig.subscribe("t.dead", "asked", rdy=1, headers=True).take()
    headers = decode_headers(letter.block)
    assert (headers["nsq-dead-topic"], headers["own"]) == ("t", "x") and headers[name] != "mine"
    assert letter.body == b'{"topic": "x", "error": "y", "text": "z"}'
    (plain,) = rig.subscribe("t.dead", "plain", rdy=1).take_bodies()
    assert json.loads(plain)["headers"] == {"own": "x"}


def test_messages_that_only_look_like_dead_letters_stay_as_they_are(rig: Rig):
    """Somebody copies a letter with its headers."""
    block = encode_headers({"nsq-dead-topic": "t", "nsq-dead-attempts": "many"})
    rig.channel("asked", "copies")
    rig.channel("c", "copies")
    rig.publish("copies", b"body", blocks=[block])
    assert rig.subscribe("copies", rdy=1).take_bodies() == [b"body"]
    assert rig.subscribe("copies", "asked", rdy=1, headers=True).take()[0].block == block


def test_letters_of_an_earlier_version_are_settled_and_delivered(rig: Rig):
    """It wrote them as JSON."""
    client = rig.subscribe(rdy=10)
    set_policy(rig, max_attempts=2)
    rig.publish("t", b"poison")
    rig.maintain()
    (message,) = client.take()
    letter = DeadLetter("t", "c", f"{message.id:016x}", message.timestamp_ns, 2, "requeued", text="poison")
    rig.topic("t.dead").publishing.append_tagged(PackedBodies.of([letter.to_json()]), 0, DEAD_LETTERS)
    rig.disconnect(client)
    rig.crash()
    for channel in ("asked", "plain"):
        rig.channel(channel, "t.dead").seek(rig.topic("t.dead").log.start)
    give_up(rig, b"new")
    assert rig.subscribe(rdy=10).take_bodies() == []
    old, new = rig.subscribe("t.dead", "asked", rdy=10, headers=True).take()
    assert (old.body, old.block, new.body) == (letter.to_json(), b"", b"new")
    assert [one["text"] for one in letters(rig)] == ["poison", "new"]
    plain = rig.subscribe("t.dead", "plain", rdy=10).take_bodies()
    assert [json.loads(body)["text"] for body in plain] == ["poison", "new"]


def test_a_message_that_is_finished_in_time_leaves_nothing(rig: Rig):
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=3)
    rig.publish("t", b"poison")
    fail(rig, client, 2)
    rig.finish(client, *client.take())
    assert "t.dead" not in rig.broker.topics
    assert rig.channel().unfinished.failures == {}


def test_timeouts_count(rig: Rig):
    client = rig.subscribe(rdy=1, msg_timeout_ms=1000)
    set_policy(rig, max_attempts=2)
    rig.publish("t", b"slow")
    for _ in range(2):
        assert client.take_bodies() == [b"slow"]
        rig.pass_time(1.1)
    assert client.take() == []
    assert [(one["error"], one["attempts"]) for one in letters(rig)] == [("timed out", 2)]


@pytest.mark.parametrize(("count", "is_dead"), [("failures", False), ("deliveries", True)])
def test_clients_that_go_away(rig: Rig, count: str, is_dead: bool):
    set_policy(rig, max_attempts=2, count=count)
    rig.publish("t", b"m")
    for _ in range(2):
        client = rig.subscribe(rdy=1)
        assert client.take_bodies() == [b"m"]
        rig.disconnect(client)
    assert rig.subscribe(rdy=1).take_bodies() == ([] if is_dead else [b"m"])
    if is_dead:
        assert [one["error"] for one in letters(rig)] == ["disconnected"]


def test_other_messages_are_not_disturbed(rig: Rig):
    client = rig.subscribe(rdy=3)
    set_policy(rig, max_attempts=3)
    bodies = [b"poison-%d" % n if n % 10 == 0 else b"good-%d" % n for n in range(100)]
    rig.publish("t", *bodies)
    seen: Counter[bytes] = Counter()
    while messages := client.take():
        for message in messages:
            seen[message.body] += 1
            if message.body.startswith(b"poison"):
                rig.requeue(client, message)
            else:
                rig.finish(client, message)
    assert seen == {body: 3 if body.startswith(b"poison") else 1 for body in bodies}
    assert sorted(one["text"] for one in letters(rig)) == sorted(f"poison-{n}" for n in range(0, 100, 10))


def test_a_delay_of_the_client_wins_over_that_of_the_policy(rig: Rig):
    client = rig.subscribe(rdy=1)
    set_policy(rig, retry_delay=10, retry_jitter=0)
    rig.publish("t", b"m")
    rig.requeue(client, *client.take(), timeout_ms=2000)
    rig.pass_time(2.1)
    rig.requeue(client, *client.take())
    # The second failure: twice the delay.
    rig.pass_time(19.8)
    assert client.take() == []
    rig.pass_time(0.3)
    assert client.take_bodies() == [b"m"]


# whose policy


def test_the_channel_wins_over_the_topic(rig: Rig):
    own, other = rig.subscribe(channel="own", rdy=1), rig.subscribe(channel="other", rdy=1)
    rig.topic().change_settings({"policy": {"max_attempts": 1, "dead_letters": "of-topic"}})
    set_policy(rig, "own", max_attempts=2, dead_letters="of-channel")
    rig.publish("t", b"poison")
    fail(rig, other, 1)
    fail(rig, own, 2)
    assert own.take() == other.take() == []
    assert [one["channel"] for one in letters(rig, "of-topic")] == ["other"]
    assert [one["channel"] for one in letters(rig, "of-channel")] == ["own"]


def test_dead_letters_have_no_policy_of_their_own(rig: Rig):
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=1)
    rig.publish("t", b"poison")
    fail(rig, client, 1)
    reader = rig.subscribe("t.dead", rdy=1)
    for attempt in range(1, 10):
        (message,) = reader.take()
        assert message.attempts == attempt
        rig.requeue(reader, message)


def test_a_cycle_of_dead_letters_is_refused(rig: Rig):
    rig.topic("a").change_settings({"policy": {"dead_letters": "b"}})
    set_policy(rig, "c", "b", dead_letters="t")
    for change in (
        lambda: rig.topic().change_settings({"policy": {"dead_letters": "a"}}),
        lambda: set_policy(rig, dead_letters="b"),
        lambda: set_policy(rig, dead_letters="t"),
    ):
        with pytest.raises(ValueError, match="dead letters of t would come back to it"):
            change()
    assert rig.topic().settings.policy is rig.channel().retries.policy is None


def test_a_policy_that_is_removed_lets_messages_go_on(rig: Rig):
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=2)
    rig.publish("t", b"poison")
    fail(rig, client, 1)
    rig.channel().change_policy(None)
    fail(rig, client, 5)
    assert client.take_bodies() == [b"poison"]


# expiry


def test_messages_that_are_too_old_are_not_delivered(rig: Rig):
    set_policy(rig, expire_after=60)
    rig.publish("t", b"old")
    rig.pass_time(50)
    rig.publish("t", b"young")
    rig.pass_time(11)
    client = rig.subscribe(rdy=10)
    assert client.take_bodies() == [b"young"]
    assert [(one["error"], one["text"], one["attempts"]) for one in letters(rig)] == [("expired", "old", 0)]


def test_expired_messages_can_be_dropped_and_are_counted(rig: Rig):
    set_policy(rig, expire_after=60, expired="drop")
    rig.publish("t", *[b"%d" % n for n in range(2500)])
    rig.pass_time(61)
    rig.maintain()
    rig.turn()
    stats = channel_stats(rig.channel())
    assert (stats["depth"], stats["expired_count"], stats["dead_letter_count"]) == (0, 2500, 0)
    assert "t.dead" not in rig.broker.topics


@pytest.mark.parametrize("expired", ["dead_letters", "drop"])
@pytest.mark.parametrize(("number", "pump_ns"), [(2500, delivery.PUMP_NS), (25, -1)])
def test_no_expired_message_is_delivered_however_many_there_are(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, expired: str, number: int, pump_ns: int
):
    """Their letters are written in portions, and a turn ends when its time is up."""
    monkeypatch.setattr(delivery, "PUMP_NS", pump_ns)
    set_policy(rig, expire_after=60, expired=expired)
    rig.publish("t", *[b"old"] * number)
    rig.clock.advance(61)
    rig.publish("t", b"young")
    client = rig.subscribe(rdy=2500)
    while rig.broker.next_turn._channels:
        rig.turn()
    assert client.take_bodies() == [b"young"]
    stats = channel_stats(rig.channel())
    assert stats["expired_count"] + stats["dead_letter_count"] == number


def test_messages_expire_without_any_consumer(rig: Rig):
    set_policy(rig, expire_after=60)
    rig.publish("t", *[b"%d" % n for n in range(2500)])
    rig.pass_time(61)
    rig.maintain()
    while rig.broker.next_turn._channels:
        rig.turn()
    assert rig.channel().depth == 0
    assert [one["text"] for one in letters(rig)] == [str(n) for n in range(2500)]


def test_a_requeued_message_expires(rig: Rig):
    client = rig.subscribe(rdy=1)
    set_policy(rig, expire_after=60, max_attempts=0)
    rig.publish("t", b"m")
    rig.requeue(client, *client.take(), timeout_ms=70_000)
    rig.pass_time(71)
    assert client.take() == []
    assert [(one["error"], one["attempts"]) for one in letters(rig)] == [("expired", 1)]


def test_a_seek_back_finds_expired_messages_at_once(make_rig: MakeRig):
    rig = make_rig(retention_age=3600.0)
    client = rig.subscribe(rdy=10)
    set_policy(rig, expire_after=60, expired="drop")
    rig.publish("t", b"old")
    rig.finish(client, *client.take())
    rig.pass_time(61)
    rig.publish("t", b"new")
    rig.finish(client, *client.take())
    rig.channel().seek(0)
    rig.turn()
    assert client.take_bodies() == [b"new"]


# restarts


def test_policies_survive_a_restart(rig: Rig):
    set_policy(rig, max_attempts=2, dead_letters="x")
    rig.topic().change_settings({"policy": {"max_attempts": 9}})
    for begin in (rig.crash, rig.restart):
        begin()
        assert rig.channel().retries.policy == parse_policy({"max_attempts": 2, "dead_letters": "x"}, "t")
        assert rig.topic().settings.policy == parse_policy({"max_attempts": 9}, "t")


def test_failed_attempts_survive_a_restart(rig: Rig):
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=3)
    rig.publish("t", b"poison")
    fail(rig, client, 2)
    assert len(client.take()) == 1
    rig.restart()
    client = rig.subscribe(rdy=1)
    # A stop of nsqd is not a failure of the attempt that was under way.
    fail(rig, client, 1)
    assert client.take() == []
    assert len(letters(rig)) == 1


def test_a_message_may_fail_more_often_than_a_checkpoint_can_count(rig: Rig):
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=0)
    rig.publish("t", b"poison")
    fail(rig, client, 1)
    failures = rig.channel().unfinished.failures
    failures.update(dict.fromkeys(failures, 65_535))
    fail(rig, client, 1)
    rig.maintain()
    assert rig.broker.health.errors == {}
    rig.crash()
    assert [*rig.channel().unfinished.failures.values()] == [65_535]


def test_a_stop_of_nsqd_is_no_failed_attempt(rig: Rig):
    rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=1, count="deliveries")
    rig.publish("t", b"m")
    rig.restart()
    assert rig.subscribe(rdy=1).take_bodies() == [b"m"]
    assert "t.dead" not in rig.broker.topics


@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["checkpoint", "no checkpoint"])
@pytest.mark.parametrize("with_others", [True, False], ids=["others", "alone"])
def test_a_crash_after_the_letter_writes_no_second_one(rig: Rig, has_checkpoint: bool, with_others: bool):
    client = rig.subscribe(rdy=10)
    set_policy(rig, max_attempts=2)
    rig.maintain()
    rig.publish("t", b"poison", *([b"good"] if with_others else []))
    rig.requeue(client, client.take()[0])
    if has_checkpoint:
        rig.maintain()
    rig.requeue(client, client.take()[-1])
    assert len(letters(rig)) == 1
    rig.crash()
    client = rig.subscribe(rdy=10)
    assert client.take_bodies() == [b"good"] * with_others
    rig.pass_time(1)
    rig.maintain()
    rig.turn()
    assert len(letters(rig)) == 1


def test_a_crash_writes_no_second_letter_after_a_change_of_the_dead_letter_topic(make_rig: MakeRig):
    """The topic changes while letters wait for an fsync, and the crash comes before the next
    checkpoint."""
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=1, dead_letters="first")
    for body in (b"one", b"two"):
        rig.publish("t", body)
    later.run_all()
    rig.turn()
    fail(rig, client, 1, b"one")
    set_policy(rig, max_attempts=1, dead_letters="second")
    fail(rig, client, 1, b"two")
    later.run_all()
    rig.turn()
    later.run_all()
    assert [len(letters(rig, name)) for name in ("first", "second")] == [1, 1]
    rig.crash()
    assert rig.channel().depth == 0


def test_a_crash_does_not_read_all_letters_since_an_idle_channel_was_used(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dead_letters, "MAX_BEHIND", 8)
    set_policy(rig, "idle", "other", max_attempts=1, dead_letters="t.dead")
    set_policy(rig, max_attempts=1)
    rig.maintain()
    client = rig.subscribe(rdy=1)
    for _ in range(20):
        rig.publish("t", b"poison")
        fail(rig, client, 1)
        rig.maintain()
    rig.crash()
    name, position = rig.channel("idle", "other").checkpoint.letters_seen
    log = rig.topic(name).log
    assert 0 < log.count(position, log.end) <= 8


def test_a_deferred_message_that_became_a_letter_counts_once_after_a_crash(rig: Rig):
    """The cursor has not reached it, and skips it anyway."""
    set_policy(rig, max_attempts=1)
    rig.publish("t", b"one", b"two")
    rig.publish("t", b"late", defer_ms=1000)
    rig.publish("t", b"three")
    rig.maintain()
    rig.pass_time(2)
    client = rig.subscribe(rdy=1)
    fail(rig, client, 1, b"late")
    assert len(letters(rig)) == 1
    rig.crash()
    assert rig.channel().depth == 3
    assert rig.subscribe(rdy=9).take_bodies() == [b"one", b"two", b"three"]


def test_a_replayed_message_may_become_a_dead_letter_again(make_rig: MakeRig):
    rig = make_rig(retention_age=1000)
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=1)
    rig.publish("t", b"poison")
    fail(rig, client, 1)
    rig.channel().seek(0)
    rig.crash()
    client = rig.subscribe(rdy=1)
    fail(rig, client, 1)
    assert len(letters(rig)) == 2


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_seek_back_while_a_letter_waits_for_its_fsync_survives_a_crash(
    make_rig: MakeRig, has_checkpoint: bool
):
    later = Later()
    rig = make_rig(durability="fsync", background=later)
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=1)
    rig.publish("t", b"poison")
    later.run_all()
    rig.turn()
    fail(rig, client, 1)
    rig.disconnect(client)
    fsyncs, later.jobs = later.jobs, []
    rig.channel().seek(0)
    if has_checkpoint:
        rig.maintain()
        later.run()
    assert fsyncs and len(letters(rig)) == 1
    rig.crash()
    assert rig.subscribe(rdy=1).take_bodies() == [b"poison"]


def test_a_letter_that_cannot_be_written_keeps_its_message(rig: Rig):
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=1)
    rig.publish("t", b"poison")
    rig.topic("t.dead")
    rig.files.fail("write", ".log")
    fail(rig, client, 1)
    assert "cannot write dead letters to t.dead" in rig.broker.health.errors["dead letters t:c"]
    assert len([*rig.channel().unfinished]) == 1
    rig.files.heal()
    rig.maintain()
    rig.turn()
    assert rig.broker.health.error is None
    assert len(letters(rig)) == 1
    assert [*rig.channel().unfinished] == []


@pytest.mark.parametrize("way", [Channel.empty, lambda channel: channel.change_policy(None)])
def test_the_error_of_a_letter_ends_when_it_is_not_to_be_written_any_more(
    rig: Rig, way: Callable[[Channel], None]
):
    rig.topic("t.dead")
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=1)
    rig.publish("t", b"poison")
    rig.files.fail("write", ".log")
    fail(rig, client, 1)
    rig.maintain()
    assert [*rig.broker.health.errors] == ["publish", "dead letters t:c"]
    rig.files.heal()
    way(rig.channel())
    rig.publish("t", b"fine")
    rig.maintain()
    rig.maintain()
    assert rig.broker.health.errors == {}


def test_with_fsync_the_message_stays_until_the_letter_is_on_disk(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later, durability="fsync")
    client = rig.subscribe(rdy=1)
    later.run_all()
    set_policy(rig, max_attempts=1)
    rig.publish("t", b"poison")
    later.run_all()
    rig.turn()
    fail(rig, client, 1)
    assert len([*rig.channel().unfinished]) == 1
    later.run_all()
    assert [*rig.channel().unfinished] == []
    assert len(letters(rig)) == 1


def test_a_stop_before_the_letter_is_on_disk_writes_no_second_one(make_rig: MakeRig):
    later = Later()
    rig = make_rig(background=later, durability="fsync")
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=1)
    later.run_all()
    rig.publish("t", b"poison")
    later.run_all()
    rig.turn()
    fail(rig, client, 1)
    assert len([*rig.channel().unfinished]) == 1
    rig.restart()
    rig.maintain()
    later.run_all()
    rig.turn()
    assert len(letters(rig)) == 1


def test_the_dead_letter_topic_keeps_what_a_crash_needs(make_rig: MakeRig):
    rig = make_rig(max_bytes_per_file=2000)
    client, reader = rig.subscribe(rdy=1), rig.subscribe("t.dead", rdy=100)
    set_policy(rig, max_attempts=1)
    rig.maintain()
    for n in range(50):
        rig.publish("t", b"%d" % n)
        fail(rig, client, 1, b"%d" % n)
        rig.finish(reader, *reader.take())
    before = len(letters(rig))
    rig.topic("t.dead").log.trim(rig.topic("t.dead").low(), 0)
    assert len(letters(rig)) == before == 50
    rig.maintain()
    rig.topic("t.dead").log.trim(rig.topic("t.dead").low(), 0)
    assert len(letters(rig)) < 50, "a checkpoint has settled them"


def no_policy(rig: Rig) -> None:
    rig.channel().change_policy(None)


def other_topic(rig: Rig) -> None:
    set_policy(rig, max_attempts=1, dead_letters="elsewhere")


def delete_channel(rig: Rig) -> None:
    rig.topic().delete_channel("c")


def delete_topic(rig: Rig) -> None:
    rig.broker.delete_topic("t")


@pytest.mark.parametrize("end", [no_policy, other_topic, delete_channel, delete_topic])
def test_the_dead_letter_topic_keeps_nothing_for_a_channel_that_writes_no_more_letters(
    make_rig: MakeRig, end: Callable[[Rig], None]
):
    rig = make_rig(max_bytes_per_file=2000)
    rig.channel("other")
    client, reader = rig.subscribe(rdy=1), rig.subscribe("t.dead", rdy=100)
    set_policy(rig, max_attempts=1)
    rig.publish("t", b"poison")
    fail(rig, client, 1)
    end(rig)
    for _ in range(10):
        rig.publish("t.dead", b"." * 1000)
        rig.finish(reader, *reader.take())
        rig.maintain()
    assert len(rig.names("*.log", "t.dead")) == 1


def test_the_dead_letter_topic_keeps_nothing_for_an_ephemeral_channel(make_rig: MakeRig):
    """No state of such a channel is on disk, so a start finds none of its messages."""
    rig = make_rig(max_bytes_per_file=2000)
    client, reader = rig.subscribe(channel="c#ephemeral", rdy=1), rig.subscribe("t.dead", rdy=100)
    set_policy(rig, "c#ephemeral", max_attempts=1)
    for n in range(50):
        rig.publish("t", b"%d" % n)
        fail(rig, client, 1, b"%d" % n)
        rig.finish(reader, *reader.take())
        rig.maintain()
    assert len(rig.names("*.log", "t.dead")) == 1


def test_a_checkpoint_that_was_replaced_meanwhile_gives_no_letters_up(make_rig: MakeRig):
    """A thread has written the state before the policy changed, and says so afterwards."""
    later = Later()
    rig = make_rig(background=later)
    client = rig.subscribe(rdy=1)
    set_policy(rig, max_attempts=1)
    rig.publish("t", b"poison")
    later.run_all()
    rig.maintain()
    checkpoints, later.jobs = later.jobs, []
    for work, _ in checkpoints:
        work()
    set_policy(rig, max_attempts=1, dead_letters="elsewhere")
    before = rig.topic("elsewhere").log.end
    fail(rig, client, 1)
    for _, then in checkpoints:
        then()
    assert [*rig.topic("elsewhere").holds.values()] == [before]
    later.run_all()
    rig.maintain()
    later.run_all()
    assert rig.topic("elsewhere").holds == {}


def test_a_channel_that_the_disk_refuses_writes_no_dead_letters(rig: Rig):
    rig.topic().change_settings({"policy": {"expire_after": 60}})
    client = rig.subscribe(rdy=10)
    rig.files.fail("replace", ".channel")
    with pytest.raises(OSError, match="No space"):
        rig.channel("refused")
    rig.files.heal()
    rig.publish("t", b"m")
    rig.finish(client, *client.take())
    rig.pass_time(61)
    rig.maintain()
    rig.turn()
    assert [*rig.broker.topics] == ["t"]
