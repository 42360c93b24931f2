"""Answers that no nsqd gives end a command with one line, and not with a traceback."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from nsparq.fetch import Answer
from nsparq.tools.answers import SHAPES, Each, Maybe, check_answer
from nsparq.tools.cluster import AskFailed
from tests.support.lookupd import start_lookupd

from .conftest import Run
from .processes import http

COMMANDS = {
    "/info": ["publish t one", "create t", "delete t c --yes"],
    "/topic/peek": ["peek t", "peek t --json"],
    "/channel/peek": ["peek t c", "peek t c --json"],
    "/topic/positions": ["tail t --since=1h", "settings t", "replay t c 1h"],
    "/channel/seek": ["replay t c 1h --yes", "replay t c 1h --yes --json"],
    "/topic/settings": [
        "settings t",
        "settings t --durability=os",
        "policy show t",
        "policy set t --count=failures",
    ],
    "/channel/settings": ["settings t c", "policy show t c", "policy remove t c --json"],
    "/dead_letters": ["dead-letters list t", "dead-letters list t --json"],
    "/dead_letters/redrive": ["dead-letters redrive t --yes"],
    "/dead_letters/redrive/cancel": ["dead-letters cancel t"],
    "/replication": ["replication status", "replication status --json"],
    "/stats": ["topics", "channels", "nodes", "delete t", "top --once --interval=1ms"],
}
STATS = {
    "version": "1",
    "health": "OK",
    "start_time": 1,
    "topics": [
        {
            "topic_name": "t",
            "depth": 1,
            "message_count": 1,
            "log_bytes": 1,
            "channels": [{"channel_name": "c", "depth": 1, "drain_time_s": 0.5, "oldest_message_age_s": 1}],
        }
    ],
}
ODD: list[Any] = [None, True, 10**400, -1.5, math.nan, math.inf, "\ud800", [{}], {"x": []}]


def example(shape: Any) -> Any:
    """An answer that is as it should be."""
    if isinstance(shape, list):
        return [example(shape[0])]
    if isinstance(shape, dict):
        return {key: example(one) for key, one in shape.items()}
    if isinstance(shape, Each):
        return {"ready": example(shape.shape)}
    if isinstance(shape, Maybe):
        return None if shape.shape is int else example(shape.shape)
    return {int: 5, float: 0.5, str: "x", bool: True}[shape]


ANSWERS = {path: example(shape) for path, shape in SHAPES.items()} | {"/stats": STATS}


def broken(value: Any) -> Iterator[Any]:
    """The same with another value somewhere, or without it."""
    yield from ODD
    if isinstance(value, list):
        yield from ([other] for other in broken(value[0]))
    elif isinstance(value, dict):
        for key, one in value.items():
            yield {name: value[name] for name in value if name != key}
            yield from (value | {key: other} for other in broken(one))


@pytest.mark.parametrize("path", COMMANDS)
def test_no_answer_causes_a_traceback(nsparq: Run, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    answers = dict(ANSWERS)

    def fetch(url: str, **_: object) -> Answer:
        return Answer(200, json.dumps(answers.get(urlsplit(url).path, {})).encode(), {})

    monkeypatch.setattr("nsparq.tools.cluster.fetch", fetch)
    for command in COMMANDS[path]:
        for answer in broken(ANSWERS[path]):
            answers[path] = answer
            done = nsparq(*command.split(), "--nsqd-http-address=127.0.0.1:1")
            assert done.status in (0, 1)
            assert done.status == 0 or done.err
        if path in SHAPES:
            answers[path] = {}
            name = command.split()[0]
            said = (
                f"nsparq {name}: 127.0.0.1:1 is not an nsqd, or one of another version: {path} has no valid "
            )
            assert said in nsparq(*command.split(), "--nsqd-http-address=127.0.0.1:1").err


@pytest.mark.parametrize(
    ("path", "answer", "name"),
    [
        ("/info", {"tcp_port": "4150"}, "tcp_port"),
        ("/info", {"tcp_port": True}, "tcp_port"),
        ("/info", {"tcp_port": 1 << 63}, "tcp_port"),
        (
            "/topic/settings",
            {"effective": {"durability": "os", "retention_age": math.nan}},
            "effective.retention_age",
        ),
        ("/topic/peek", {"messages": {}, "missing": 0}, "messages"),
        ("/topic/peek", {"messages": [{}], "missing": 0}, "messages.sequence"),
        ("/topics/positions", {"topics": {"t": {"incarnation": "x", "state": 5}}}, "topics.t.earliest"),
        ("/dead_letters", {"letters": 0, "foreign": 0, "next": "5", "groups": []}, "next"),
    ],
)
def test_the_part_that_is_not_as_expected_is_named(path: str, answer: dict[str, Any], name: str) -> None:
    check_answer("a:1", path, ANSWERS[path])
    with pytest.raises(AskFailed, match=f"^a:1 is not an nsqd, .*: {path} has no valid {name}$"):
        check_answer("a:1", path, answer)


def test_what_may_be_missing_may_be_null() -> None:
    check_answer("a:1", "/topics/positions", {"topics": {"t": None}})
    for more in ({}, {"next": None}, {"next": 7}):
        check_answer("a:1", "/dead_letters", {"letters": 0, "foreign": 0, "groups": []} | more)


@pytest.mark.parametrize("command", ["publish t one", "create t", "create t c", "delete t --yes"])
def test_nsqlookupd_is_not_taken_for_an_nsqd(nsparq: Run, command: str) -> None:
    """It can create and delete topics, too, of its own."""
    with start_lookupd() as lookupd:
        lookupd.post("/topic/create", topic="t")
        before = lookupd.debug()
        done = nsparq(*command.split(), f"--nsqd-http-address={http(lookupd)}")
        assert (done.status, lookupd.debug()) == (1, before)
    assert f"{http(lookupd)} is not an nsqd" in done.err


def test_dead_letters_that_do_not_end_are_refused(nsparq: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps(ANSWERS["/dead_letters"] | {"next": 0}).encode()
    monkeypatch.setattr("nsparq.tools.cluster.fetch", lambda *_, **__: Answer(200, answer, {}))
    done = nsparq("dead-letters", "list", "t", "--nsqd-http-address=a:1")
    assert done.err == "nsparq dead-letters: a:1 is not an nsqd: /dead_letters begins again\n"
