"""nsparq policy: shown, set and removed on all nodes, rehearsed, and refused as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import TestBroker
from tests.support.auth_server import unused_port

from .conftest import Run
from .processes import http


def own(broker: TestBroker, topic: str) -> Any:
    return json.loads(broker.http("GET", "/topic/settings", topic=topic))["policy"]


def test_a_policy_is_set_shown_and_removed_on_all_nodes(nsparq: Run, topic: str, both: list[str]) -> None:
    assert b"none" in nsparq("policy", "show", topic, *both).out
    fields = ("--max-attempts=6", "--retry-delay=5s", "--expire-after=7d", "--expired=drop")
    done = nsparq("policy", "set", topic, *fields, *both)
    assert (done.status, done.err) == (0, "")
    expected = (
        f"{topic} 6 failures 5s, ×2 up to 5m00s, ±10% {topic}.dead after 7d00h, dropped own all 2 nodes "
        f"Changed {topic} on all 2 nodes."
    )
    assert " ".join(done.out.decode().split()).endswith(expected)
    assert nsparq("policy", "set", topic, *fields, *both).out.endswith(b"it was like this before.\n")
    done = nsparq("policy", "show", topic, "c", *both)
    assert b"of the topic  all 2 nodes" in done.out
    assert nsparq("policy", "set", topic, "c", "--count=deliveries", *both).status == 0
    out = nsparq("policy", "show", topic, *both).out.decode()
    assert f"{topic}/c" in out and "4 deliveries" in out
    assert nsparq("policy", "remove", topic, "c", *both).status == 0
    assert nsparq("policy", "remove", topic, *both).status == 0
    shown = json.loads(nsparq("policy", "show", topic, "c", "--json", *both).out)
    assert [one["effective"] for one in shown["nodes"]] == [None, None]


def test_a_rehearsal_changes_nothing_and_a_refusal_of_one_node_is_one_of_all(
    nsparq: Run, broker: TestBroker, second: TestBroker, topic: str, both: list[str]
) -> None:
    done = nsparq("policy", "set", topic, "--dry-run", *both)
    assert done.out.decode().endswith(f"This would change {topic} on all 2 nodes.\n")
    assert (own(broker, topic), own(second, topic)) == (None, None)
    # On the second node the dead letters would come back.
    second.control("create", f"{topic}.dead")
    body = json.dumps({"policy": {"dead_letters": topic}}).encode()
    second.request("PUT", f"/topic/settings?topic={topic}.dead", body).expect_json()
    done = nsparq("policy", "set", topic, *both)
    assert done.status == 1
    assert done.err.startswith(
        f"nsparq policy: nothing has changed: PUT http://{http(second)}/topic/settings"
    )
    assert done.err.endswith(f"400 INVALID_SETTINGS: dead letters of {topic} would come back to it\n")
    assert own(broker, topic) is None


def test_nodes_that_disagree_or_are_down_are_named(
    nsparq: Run, broker: TestBroker, second: TestBroker, topic: str, both: list[str]
) -> None:
    assert nsparq("policy", "set", topic, "--max-attempts=7", both[0]).status == 0
    done = nsparq("policy", "show", topic, *both)
    assert http(second) in done.out.decode() and "the nodes disagree" in done.err
    down = f"127.0.0.1:{unused_port()}"
    done = nsparq("policy", "set", topic, "--json", *both, f"--nsqd-http-address={down}")
    answer = json.loads(done.out)
    assert [one["node"] for one in answer["nodes"]] == [http(broker), http(second)]
    assert [one["node"] for one in answer["unreachable"]] == [down]
    assert done.status == 1 and down in done.err
    assert own(broker, topic) == own(second, topic) == answer["nodes"][0]["policy"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("show",), "TOPIC is missing"),
        (("orders",), "ACTION: must be one of show, set, remove"),
        (("set", "orders", "--retry-delay=soon"), "is not a duration"),
        (("set", "orders", "--retry-delay=1h"), "max_retry_delay must not be smaller than retry_delay"),
        (("remove", "orders", "--max-attempts=3"), "--max-attempts is for set"),
        (("show", "orders", "--dry-run"), "--dry-run is for set and remove"),
    ],
)
def test_a_wrong_command_line_is_refused(nsparq: Run, arguments: tuple[str, ...], error: str) -> None:
    done = nsparq("policy", *arguments)
    assert done.status == 2 and error in done.err
