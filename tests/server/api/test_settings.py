"""Delivery policies and ordering over HTTP and TCP: set, shown, kept, refused, and applied to
clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from nsparq.delivery_policy import DeliveryPolicy
from tests.support import Answer, BrokerThread, unique_name


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as broker:
        yield broker


@pytest.fixture
def topic(broker: BrokerThread) -> str:
    name = unique_name("topic")
    broker.control("create", name, "c")
    return name


def change(broker: BrokerThread, kind: str, body: Any, **names: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return broker.request("PUT", f"/{kind}/settings?{urlencode(names)}", data)


def shown(broker: BrokerThread, **names: str) -> Any:
    return broker.request("GET", f"/channel/settings?{urlencode(names)}").expect_json()


def settings(policy: Any, effective: Any, ordered_by: str | None = None) -> dict[str, Any]:
    return {"policy": policy, "ordered_by": ordered_by, "effective": {"policy": effective}}


def test_a_channel_shows_its_own_policy_and_the_one_in_effect(tmp_path: Path) -> None:
    default = {name: getattr(DeliveryPolicy(), name) for name in DeliveryPolicy.__slots__}
    with BrokerThread(tmp_path) as broker:
        broker.control("create", "t", "c")
        assert shown(broker, topic="t", channel="c") == settings(None, None)
        change(broker, "topic", {"policy": {"max_attempts": 9}}, topic="t").expect_json()
        of_topic = {**default, "max_attempts": 9}
        assert shown(broker, topic="t", channel="c") == settings(None, of_topic)
        own = {**default, "expire_after": 60}
        answer = change(broker, "channel", {"policy": {"expire_after": 60}}, topic="t", channel="c")
        assert answer.expect_json() == settings(own, own)
        broker.restart()
        assert shown(broker, topic="t", channel="c") == settings(own, own)
        change(broker, "channel", {"policy": None}, topic="t", channel="c").expect_json()
        assert shown(broker, topic="t", channel="c")["effective"]["policy"] == of_topic


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "Expecting"),
        ([], "not an object"),
        ({}, "a channel has the settings policy and ordered_by"),
        ({"policy": {}, "durability": "os"}, "a channel has the settings policy and ordered_by"),
        ({"policy": 5}, "a policy must be an object"),
        ({"policy": {"max_attempts": "3"}}, "max_attempts must be a whole number"),
        ({"policy": {}, "ordered_by": "customer"}, "ordered_by must be a JSON pointer"),
        ({"policy": {}, "ordered_by": ""}, "ordered_by must be a JSON pointer"),
        ({"ordered_by": "header:a b"}, "not a header name"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_setting_is_refused_with_the_reason(
    broker: BrokerThread, topic: str, body: Any, reason: str
) -> None:
    answer = change(broker, "channel", body, topic=topic, channel="c")
    assert (answer.status, answer.json()["message"]) == (400, "INVALID_SETTINGS")
    assert reason in answer.json()["reason"]
    assert shown(broker, topic=topic, channel="c")["policy"] is None


def test_a_policy_needs_an_existing_channel(broker: BrokerThread, topic: str) -> None:
    answer = change(broker, "channel", {"policy": {}}, topic=topic, channel="other")
    assert (answer.status, answer.json()["message"]) == (404, "CHANNEL_NOT_FOUND")


@pytest.mark.parametrize("kind", ["topic", "channel"])
def test_a_dry_run_checks_a_policy_and_does_not_set_it(broker: BrokerThread, topic: str, kind: str) -> None:
    names = {"topic": topic} if kind == "topic" else {"topic": topic, "channel": "c"}
    answer = change(broker, kind, {"policy": {"retry_delay": "90s"}}, **names, dry_run="true").expect_json()
    assert answer["policy"]["retry_delay"] == answer["effective"]["policy"]["retry_delay"] == 90
    assert shown(broker, topic=topic, channel="c")["effective"]["policy"] is None
    answer = change(broker, kind, {"policy": {"dead_letters": topic}}, **names, dry_run="true").json()
    assert answer["reason"] == f"dead letters of {topic} would come back to it"
    change(broker, kind, {"policy": {}}, **names, dry_run="yes").expect_error(400, "INVALID_ARG_DRY_RUN")


def test_a_topic_lists_the_policies_of_its_channels(broker: BrokerThread, topic: str) -> None:
    change(broker, "channel", {"policy": {"max_attempts": 3}}, topic=topic, channel="c").expect_json()
    broker.control("create", topic, "other")
    found = broker.request("GET", f"/topic/settings?topic={topic}").expect_json()
    assert found["policy"] is None
    assert {name: one["max_attempts"] for name, one in found["channel_policies"].items()} == {"c": 3}


def test_a_plain_client_sees_a_poison_message_as_often_as_the_policy_says(
    broker: BrokerThread, topic: str
) -> None:
    change(broker, "channel", {"policy": {"max_attempts": 3}}, topic=topic, channel="c").expect_json()
    with broker.connect() as consumer:
        consumer.sub(topic, "c", rdy=1)
        broker.publish(topic, b"poison", b"good")
        seen = []
        while len(seen) < 4:
            message = consumer.read_message()
            seen.append((message.body, message.attempts))
            if message.body == b"poison":
                consumer.req(message.id)
            else:
                consumer.fin(message.id)
        consumer.barrier()
    assert sorted(seen) == [(b"good", 1), (b"poison", 1), (b"poison", 2), (b"poison", 3)]
    stats = broker.channel_stats(topic, "c")
    assert (stats["depth"], stats["dead_letter_count"]) == (0, 1)
    with broker.connect() as reader:
        reader.sub(f"{topic}.dead", "report", rdy=1)
        letter = json.loads(reader.read_message().body)
    assert (letter["topic"], letter["channel"], letter["text"]) == (topic, "c", "poison")
    metrics = broker.request("GET", "/metrics").body.decode()
    assert f'nsqd_channel_dead_letters_total{{topic="{topic}",channel="c"}} 1' in metrics


def test_a_channel_is_ordered_by_a_key_until_the_setting_is_removed(tmp_path: Path) -> None:
    with BrokerThread(tmp_path) as broker:
        broker.control("create", "t", "c")
        names = {"topic": "t", "channel": "c"}
        answer = change(broker, "channel", {"ordered_by": "/customer/id"}, **names)
        assert answer.expect_json() == settings(None, None, "/customer/id")
        change(broker, "channel", {"policy": None}, **names).expect_json()
        broker.restart()
        assert shown(broker, **names) == settings(None, None, "/customer/id")
        broker.publish("t", *(b'{"customer": {"id": %d}}' % number for number in (1, 1, 2)))
        with broker.connect() as one, broker.connect() as other:
            one.sub("t", "c", rdy=1)
            first = one.read_message()
            other.sub("t", "c", rdy=5)
            assert other.read_message().body == b'{"customer": {"id": 2}}'
            stats = broker.channel_stats("t", "c")
            assert (stats["ordered_by"], stats["depth"], stats["parked_count"]) == ("/customer/id", 1, 1)
            one.rdy(0)
            one.fin(first.id)
            assert other.read_message().body == b'{"customer": {"id": 1}}'
        change(broker, "channel", {"ordered_by": None}, **names).expect_json()
        assert shown(broker, **names) == settings(None, None)
