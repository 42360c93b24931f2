"""Positions, commits and seeks of many topics in one request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from nsparq.http.api import Endpoint, endpoints_of
from nsparq.options import NsqdOptions
from nsparq.server.api import many_topics
from nsparq.server.daemon import Nsqd
from tests.support import Answer, BrokerThread, unique_name, wait_until


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as broker:
        yield broker


@pytest.fixture
def topics(broker: BrokerThread) -> list[str]:
    """Three topics, each with a message and the channel `c`."""
    names = [unique_name("topic") for _ in range(3)]
    for name in names:
        broker.control("create", name, "c")
        broker.publish(name, b"x")
    return names


def post(broker: BrokerThread, path: str, content: Any, **query: Any) -> Answer:
    body = content if isinstance(content, bytes) else json.dumps({"topics": content}).encode()
    return broker.request("POST", f"{path}?{urlencode(query)}", body)


def look(broker: BrokerThread, known: dict[str, int | None], **query: Any) -> dict[str, Any]:
    found: dict[str, Any] = post(broker, "/topics/positions", known, **query).expect_json()["topics"]
    return found


def states(found: dict[str, Any]) -> dict[str, int | None]:
    return {name: 0 if one is None else one["state"] for name, one in found.items()}


def single(broker: BrokerThread, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = broker.request("GET", f"/topic/positions?topic={topic}").expect_json()
    return found


# positions


def test_positions_are_those_of_the_single_topics(broker: BrokerThread, topics: list[str]) -> None:
    broker.control("pause", topics[0])
    broker.publish(topics[0], b"y", b"z")
    found = look(broker, dict.fromkeys([*topics, "nobody"]), channel="c")
    assert found.pop("nobody") is None
    assert [*found] == topics
    for name in topics:
        one = single(broker, name)
        assert found[name].items() >= {key: one[key] for key in one.keys() & found[name].keys()}.items()
        assert found[name]["channel"] == "there"
    assert found[topics[0]]["latest"] - found[topics[0]]["visible"] == 2


def test_unchanged_topics_are_left_out(broker: BrokerThread, topics: list[str]) -> None:
    known = states(look(broker, dict.fromkeys([*topics, "nobody"]), channel="c"))
    assert look(broker, known, channel="c") == {}
    broker.publish(topics[1], b"y")
    assert [*look(broker, known, channel="c")] == [topics[1]]


def test_every_described_value_changes_the_state(broker: BrokerThread, topics: list[str]) -> None:
    name = topics[0]
    known = states(look(broker, {name: None}, channel="c"))

    def is_changed(channel: str | None = "there") -> bool:
        found = look(broker, known, channel="c")
        known.update(states(found))
        said = found[name] and found[name]["channel"]
        return [*found] == [name] and said == channel and look(broker, known, channel="c") == {}

    for action, channel in (("pause", "paused"), ("unpause", "there"), ("delete", "missing")):
        broker.control(action, name, "c")
        assert is_changed(channel), action
    broker.control("create", name, "c")
    assert is_changed()
    post(broker, "/channels/commit", {name: place(broker, name)}, channel="c", owner="one").expect_json()
    assert is_changed()
    broker.control("pause", name)
    broker.publish(name, b"y")
    assert is_changed()
    broker.control("empty", name)
    assert is_changed()
    assert look(broker, {name: None})[name]["messages"] == 1
    broker.control("unpause", name)
    broker.control("delete", name)
    assert is_changed(None)
    broker.control("create", name, "c")
    assert is_changed()


def test_a_request_may_wait_for_a_change(broker: BrokerThread, topics: list[str]) -> None:
    known = states(look(broker, dict.fromkeys(topics)))
    found: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: found.append(look(broker, known, wait=10_000)))
    waiting.start()
    broker.publish(topics[2], b"y")
    waiting.join()
    assert [*found[0]] == [topics[2]]
    # Without a change it ends at the deadline. With an earlier change it does not wait.
    assert look(broker, known | states(found[0]), wait=20) == {}
    assert [*look(broker, known, wait=10_000)] == [topics[2]]


def test_a_stopping_daemon_answers_waiting_requests_at_once() -> None:
    with BrokerThread() as broker:
        broker.control("create", "t")
        known = states(look(broker, {"t": None}))
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(look(broker, known, wait=10_000)))
        waiting.start()
        wait_until(lambda: any(one._busy for http in broker.nsqd._http for one in http.connections))
        broker.stop()
        waiting.join()
        assert found == [{}]


# commits and seeks


def place(broker: BrokerThread, topic: str, ahead: int = 0) -> list[Any]:
    found = single(broker, topic)
    return [found["incarnation"], found["latest"] + ahead]


def test_commits_of_many_topics_are_one_request(broker: BrokerThread, topics: list[str]) -> None:
    broker.control("delete", topics[2], "c")
    wanted = {name: place(broker, name) for name in topics} | {"nobody": ["0", 1]}
    found = post(broker, "/channels/commit", wanted, channel="c").expect_json()["topics"]
    assert found == {
        topics[0]: {"cursor": wanted[topics[0]][1], "depth": 0},
        topics[1]: {"cursor": wanted[topics[1]][1], "depth": 0},
        topics[2]: {"message": "CHANNEL_NOT_FOUND", "status": 404},
        "nobody": {"message": "TOPIC_NOT_FOUND", "status": 404},
    }
    stats = broker.channel_stats(topics[0], "c")
    assert stats is not None and stats["depth"] == 0


def test_a_refused_commit_has_the_reason(broker: BrokerThread, topics: list[str]) -> None:
    end = place(broker, topics[0])
    wanted = {topics[0]: place(broker, topics[0], 1), topics[1]: ["other", 1]}
    found = post(broker, "/channels/commit", wanted, channel="c").expect_json()["topics"]
    assert found == {
        topics[0]: {"message": "OFFSET_AHEAD", "status": 416, "latest": end[1]},
        topics[1]: {
            "message": "WRONG_INCARNATION",
            "status": 409,
            "incarnation": place(broker, topics[1])[0],
        },
    }


def test_a_seek_moves_channels_back_and_creates_those_that_are_missing(
    broker: BrokerThread, topics: list[str]
) -> None:
    ends = {name: place(broker, name) for name in topics}
    post(broker, "/channels/commit", ends, channel="c").expect_json()
    broker.control("delete", topics[2], "c")
    starts = {name: [incarnation, end - 1] for name, (incarnation, end) in ends.items()}
    found = post(broker, "/channels/seek", starts, channel="c").expect_json()["topics"]
    assert found == {
        name: {"cursor": start, "depth": 1, "created": name == topics[2]}
        for name, (_, start) in starts.items()
    }
    broker.restart()
    for name in topics:
        stats = broker.channel_stats(name, "c")
        assert stats is not None and stats["depth"] == 1


def test_commits_and_seeks_of_many_topics_respect_the_owner_of_each_channel(
    broker: BrokerThread, topics: list[str]
) -> None:
    one, two, missing = topics
    broker.control("delete", missing, "c")
    ends = {name: place(broker, name) for name in topics}
    post(broker, "/channels/commit", {one: ends[one]}, channel="c", owner="first").expect_json()
    for path, owner in (("commit", {}), ("commit", {"owner": "second"}), ("seek", {"owner": "second"})):
        found = post(broker, f"/channels/{path}", ends, channel="c", **owner).expect_json()["topics"]
        refused = found[one]
        assert (refused["message"], refused["status"], refused["owner"]) == ("CHANNEL_OWNED", 409, "first")
        assert refused["since"] and "cursor" in found[two]
    owners = {name: said["owner"] for name, said in look(broker, dict.fromkeys(topics), channel="c").items()}
    assert owners == {one: "first", two: "second", missing: "second"}


# errors: every one in the table


def table() -> list[Endpoint]:
    return endpoints_of(many_topics.ManyTopicsApi(Nsqd(NsqdOptions())), "The log")


@pytest.mark.parametrize("endpoint", table(), ids=lambda one: one.path)
def test_every_error_in_the_table_is_reached(broker: BrokerThread, endpoint: Endpoint) -> None:
    bad_values: list[Any] = ["x", True, [], ["0"], ["0", -1], ["0", 1, 2], [0, 0], {}]
    bad_values += [["0", 1.5], ["0", 1 << 63], ["0", True]]
    if endpoint.path != "/topics/positions":
        bad_values += [None, 0]
    bodies = [{"t": value} for value in bad_values]
    wrong: dict[str, list[tuple[Any, dict[str, Any]]]] = {
        "INVALID_BODY": [
            *((body, {}) for body in bodies),
            *((body, {}) for body in (b"x", b"[]", b"{}", b'{"topics": []}', b"[" * 100_000)),
            *(({name: None}, {}) for name in ("", "a b", "x" * 65, "\udcff")),
        ],
        "INVALID_ARG_CHANNEL": [({}, {"channel": name}) for name in ("", "a b", "x" * 65)],
        "MISSING_ARG_CHANNEL": [({}, {"channel": None})],
        "INVALID_ARG_OWNER": [({}, {"owner": text}) for text in ("", "x" * 101, "a\nb", "ü")],
        "INVALID_ARG_WAIT": [({}, {"wait": wait}) for wait in ("", "x", "-1", "10001", "1.5")],
    }
    for status, code in endpoint.errors:
        for body, changed in wrong[code]:
            query = {name: value for name, value in ({"channel": "c"} | changed).items() if value is not None}
            answer = post(broker, endpoint.path, body, **query)
            assert (answer.status, answer.json()["message"]) == (status, code), (body, changed, answer)


def test_long_lists_do_not_block_the_event_loop(
    broker: BrokerThread, topics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_topics, "SLICE", 1)
    monkeypatch.setattr(many_topics, "SLICE_ON_DISK", 1)
    known = dict.fromkeys([*topics, "nobody"])
    assert [*look(broker, known, channel="c")] == [*known]
    places = {name: place(broker, name) for name in topics}
    for path in ("/channels/commit", "/channels/seek"):
        assert [*post(broker, path, places, channel="c").expect_json()["topics"]] == topics
