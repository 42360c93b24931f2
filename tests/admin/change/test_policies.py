"""Delivery policies and the order of channels through nsqadmin: on all nodes or on none, and shown
with where they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.admin.support import REFERENCE_ADMIN, AdminThread, Cluster
from tests.support import TestBroker, unique_name

pytestmark = pytest.mark.skipif(bool(REFERENCE_ADMIN), reason="ours only")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nsqds=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> AdminThread:
    return cluster.admin()  # type: ignore[return-value]  # ours


@pytest.fixture
def topic(cluster: Cluster) -> str:
    topic = unique_name("policy")
    cluster.add(topic, "c")
    return topic


def own(nsqd: TestBroker, topic: str) -> Any:
    return json.loads(nsqd.http("GET", "/topic/settings", topic=topic))["policy"]


def set_on(nsqd: TestBroker, topic: str, policy: Any) -> None:
    body = json.dumps({"policy": policy}).encode()
    nsqd.request("PUT", f"/topic/settings?topic={topic}", body).expect_json()


def test_a_policy_is_set_on_all_nodes_and_shown_with_its_origin(
    cluster: Cluster, admin: AdminThread, topic: str
) -> None:
    answer = admin.call("PUT", f"/api/policy/{topic}", {"policy": {"retry_delay": "90s"}})
    assert answer.expect_json() == {"message": ""}
    assert [own(nsqd, topic)["retry_delay"] for nsqd in cluster.nsqds] == [90, 90]
    found = admin.get(f"/api/policy/{topic}/c")
    assert {one["node"] for one in found["nodes"]} == {*cluster.addresses}
    assert [(one["policy"], one["effective"]["retry_delay"]) for one in found["nodes"]] == [(None, 90)] * 2
    assert "the topic&#39;s" in admin.page(f"/topics/{topic}/c")
    admin.call("PUT", f"/api/policy/{topic}/c", {"policy": {}}).expect_json()
    assert "set here" in admin.page(f"/topics/{topic}/c")
    assert "policies of their own" in admin.page(f"/topics/{topic}")
    for path in (f"/api/policy/{topic}/c", f"/api/policy/{topic}"):
        admin.call("PUT", path, {"policy": None}).expect_json()
    assert [own(nsqd, topic) for nsqd in cluster.nsqds] == [None, None]


def test_nodes_that_disagree_are_shown(cluster: Cluster, admin: AdminThread, topic: str) -> None:
    set_on(cluster.nsqds[0], topic, {"max_attempts": 9})
    page = admin.page(f"/topics/{topic}")
    assert "The nodes have different policies" in page and "9 failures" in page


def test_a_policy_that_one_node_refuses_is_set_on_none(
    cluster: Cluster, admin: AdminThread, topic: str
) -> None:
    cluster.nsqds[1].control("create", f"{topic}.dead")
    set_on(cluster.nsqds[1], f"{topic}.dead", {"dead_letters": topic})
    answer = admin.call("PUT", f"/api/policy/{topic}", {"policy": {}})
    assert (answer.status, answer.json()["message"]) == (409, "POLICY_REFUSED")
    assert answer.json()["reason"] == f"{cluster.addresses[1]}: dead letters of {topic} would come back to it"
    assert [own(nsqd, topic) for nsqd in cluster.nsqds] == [None, None]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "give policy"),
        ({"policy": {}, "more": 1}, "give policy"),
        ({"policy": 5}, "a policy must be an object"),
        ({"policy": {"max_attempts": -1}}, "max_attempts must be a whole number"),
    ],
)
def test_a_wrong_policy_is_refused(admin: AdminThread, topic: str, body: Any, reason: str) -> None:
    answer = admin.call("PUT", f"/api/policy/{topic}", body)
    assert (answer.status, answer.json()["message"]) == (400, "INVALID_SETTINGS")
    assert reason in answer.json()["reason"]


def test_a_channel_that_no_node_has_is_not_found(admin: AdminThread, topic: str) -> None:
    answer = admin.call("PUT", f"/api/policy/{topic}/other", {"policy": {}})
    assert (answer.status, answer.json()["message"]) == (404, "CHANNEL_NOT_FOUND")


def ordered_by(nsqd: TestBroker, topic: str) -> Any:
    return json.loads(nsqd.http("GET", "/channel/settings", topic=topic, channel="c"))["ordered_by"]


def test_an_order_is_set_and_removed_on_all_nodes(cluster: Cluster, admin: AdminThread, topic: str) -> None:
    assert "No fixed order, as in NSQ." in admin.page(f"/topics/{topic}/c")
    answer = admin.call("PUT", f"/api/order/{topic}/c", {"ordered_by": "/customer/id"})
    assert answer.expect_json() == {"message": ""}
    assert [ordered_by(nsqd, topic) for nsqd in cluster.nsqds] == ["/customer/id"] * 2
    found = admin.get(f"/api/order/{topic}/c")
    assert sorted(one["node"] for one in found["nodes"]) == sorted(cluster.addresses)
    assert [one["ordered_by"] for one in found["nodes"]] == ["/customer/id"] * 2
    assert '<td class="name">/customer/id</td>' in admin.page(f"/topics/{topic}/c")
    admin.call("PUT", f"/api/order/{topic}/c", {"ordered_by": None}).expect_json()
    assert [ordered_by(nsqd, topic) for nsqd in cluster.nsqds] == [None, None]


def test_nodes_with_different_orders_are_shown(cluster: Cluster, admin: AdminThread, topic: str) -> None:
    path = f"/channel/settings?topic={topic}&channel=c"
    cluster.nsqds[0].request("PUT", path, b'{"ordered_by": "/<b>"}').expect_json()
    page = admin.page(f"/topics/{topic}/c")
    assert "The nodes order the channel by different keys" in page
    assert "/&lt;b&gt;" in page and "<b>" not in page


@pytest.mark.parametrize(
    ("channel", "body", "expected"),
    [
        ("c", {}, (400, "INVALID_SETTINGS", "give ordered_by")),
        ("c", {"ordered_by": "/k", "policy": {}}, (400, "INVALID_SETTINGS", "give ordered_by")),
        ("c", {"ordered_by": "customer"}, (409, "ORDER_REFUSED", "must be a JSON pointer")),
        ("c", {"ordered_by": 5}, (409, "ORDER_REFUSED", "must be a JSON pointer")),
        ("other", {"ordered_by": "/k"}, (404, "CHANNEL_NOT_FOUND", "")),
    ],
)
def test_a_wrong_order_is_refused(
    cluster: Cluster, admin: AdminThread, topic: str, channel: str, body: Any, expected: tuple[int, str, str]
) -> None:
    answer = admin.call("PUT", f"/api/order/{topic}/{channel}", body)
    status, code, reason = expected
    assert (answer.status, answer.json()["message"]) == (status, code)
    assert reason in answer.json().get("reason", "")
    assert [ordered_by(nsqd, topic) for nsqd in cluster.nsqds] == [None, None]


def test_messages_that_wait_for_their_keys_are_summed(
    cluster: Cluster, admin: AdminThread, topic: str
) -> None:
    admin.call("PUT", f"/api/order/{topic}/c", {"ordered_by": "/k"}).expect_json()
    for nsqd in cluster.nsqds:
        nsqd.publish(topic, b'{"k": 1}', b'{"k": 1}', b'{"k": 1}')
    with cluster.nsqds[0].connect() as one, cluster.nsqds[1].connect() as two:
        for consumer in (one, two):
            consumer.sub(topic, "c", rdy=5)
            consumer.read_message()
            consumer.barrier()
        assert admin.get(f"/api/topics/{topic}/c")["parked_count"] == 4
        assert '<dd id="channel-parked">4</dd>' in admin.page(f"/topics/{topic}/c")


def test_dead_letters_and_expired_messages_are_summed(
    cluster: Cluster, admin: AdminThread, topic: str
) -> None:
    admin.call("PUT", f"/api/policy/{topic}", {"policy": {"max_attempts": 1}}).expect_json()
    for nsqd in cluster.nsqds:
        nsqd.publish(topic, b"poison")
        with nsqd.connect() as consumer:
            consumer.sub(topic, "c", rdy=1)
            consumer.req(consumer.read_message().id)
            consumer.barrier()
    found = admin.get(f"/api/topics/{topic}/c")
    assert (found["dead_letter_count"], found["expired_count"]) == (2, 0)
    assert [one["dead_letter_count"] for one in found["nodes"]] == [1, 1]
