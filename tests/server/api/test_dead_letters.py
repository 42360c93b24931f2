"""Dead letters over HTTP: shown in groups, rehearsed, put back, refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from nsparq.server.api import dead_letters as dead_letters_module
from tests.support import Answer, BrokerThread, unique_name, wait_until
from tests.support.dead_letters import give_up


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as broker:
        yield broker


def ask(broker: BrokerThread, method: str, path: str, topic: str, **query: Any) -> Answer:
    return broker.request(method, f"/dead_letters{path}?{urlencode({'topic': f'{topic}.dead', **query})}")


def redriven(broker: BrokerThread, topic: str, **query: Any) -> Any:
    """Put letters back; the result of the redrive."""
    ask(broker, "POST", "/redrive", topic, origin_topic=topic, **query).expect_json()

    def ended() -> Any:
        progress = ask(broker, "GET", "/redrive", topic).expect_json()
        return progress if progress["state"] != "running" else None

    return wait_until(ended)


def test_letters_are_shown_in_groups_with_examples(broker: BrokerThread):
    topic = unique_name("topic")
    give_up(broker, topic, b"one", b"\xff", b'{"a":1}')
    broker.publish(f"{topic}.dead", b"not a letter")
    shown = ask(broker, "GET", "", topic, examples=2).expect_json()
    (group,) = shown.pop("groups")
    assert shown == {"letters": 3, "foreign": 1, "next": None}
    newest, second = group.pop("examples")
    assert group.pop("first") < group.pop("last")
    assert group == {"topic": topic, "channel": "c", "reason": "requeued", "states": {"ready": 3}}
    assert (newest["body"], second["body_base64"]) == ('{"a":1}', "/w==")
    assert (newest["attempts"], newest["size"], newest["state"]) == (1, 7, "ready")
    assert newest["client"].startswith("127.0.0.1:")


def test_letters_are_rehearsed_and_put_back_once(broker: BrokerThread):
    topic = unique_name("topic")
    give_up(broker, topic, b'{"a":1}', b'{"a":2}')
    wanted = {"field": "/a", "value": "2", "reason": "requeued", "channel": "c", "since": "1"}
    (group,) = ask(broker, "GET", "", topic, **wanted).expect_json()["groups"]
    assert (group["states"], group["examples"][0]["body"]) == ({"ready": 1}, '{"a":2}')
    result = redriven(broker, topic, **wanted)
    assert (result["state"], result["redriven"], result["skipped"], result["waits_for"]) == (
        "finished",
        1,
        {},
        "",
    )
    assert result["filter"]["field"] == "/a"
    with broker.connect() as connection:
        connection.sub(topic, "c", rdy=1)
        message = connection.read_message()
        assert (message.body, message.attempts) == (b'{"a":2}', 1)
        connection.fin(message.id)
    (group,) = ask(broker, "GET", "", topic).expect_json()["groups"]
    assert group["states"] == {"ready": 1, "redriven": 1}
    assert redriven(broker, topic, **wanted)["skipped"] == {"redriven": 1}


def test_a_long_list_comes_in_pieces(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dead_letters_module, "SCAN_BYTES", 1)
    monkeypatch.setattr(dead_letters_module, "PART_BYTES", 1)
    topic = unique_name("topic")
    give_up(broker, topic, *[b"%d" % n + b"." * 40_000 for n in range(6)])
    found, start, requests = 0, 0, 0
    while start is not None:
        shown = ask(broker, "GET", "", topic, start=start).expect_json()
        found, start, requests = found + shown["letters"], shown["next"], requests + 1
    assert found == 6
    assert requests > 1


def test_a_redrive_is_cancelled_and_refused_while_one_runs(broker: BrokerThread):
    topic = unique_name("topic")
    give_up(broker, topic, b"one", b"two", b"three")
    started = ask(broker, "POST", "/redrive", topic, origin_topic=topic, rate=0.5).expect_json()
    assert (started["state"], started["rate"], started["redriven"]) == ("running", 0.5, 0)
    again = ask(broker, "POST", "/redrive", topic, origin_topic=topic)
    assert (again.status, again.json()) == (409, {"message": "REDRIVE_RUNNING"})
    cancelled = ask(broker, "POST", "/redrive/cancel", topic).expect_json()
    assert cancelled["state"] == "cancelled"
    assert redriven(broker, topic)["redriven"] == 3 - cancelled["redriven"]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({}, "MISSING_ARG_ORIGIN_TOPIC"),
        ({"origin_topic": "no name"}, "INVALID_ARG_ORIGIN_TOPIC"),
        ({"origin_topic": "t", "channel": "no name"}, "INVALID_ARG_CHANNEL"),
        ({"origin_topic": "t", "since": "yesterday"}, "INVALID_ARG_SINCE"),
        ({"origin_topic": "t", "until": "-1"}, "INVALID_ARG_UNTIL"),
        ({"origin_topic": "t", "field": "a"}, "INVALID_ARG_FIELD"),
        ({"origin_topic": "t", "value": "a"}, "INVALID_ARG_FIELD"),
        ({"origin_topic": "t", "rate": "-1"}, "INVALID_ARG_RATE"),
        ({"origin_topic": "t", "rate": "nan"}, "INVALID_ARG_RATE"),
    ],
)
def test_wrong_values_are_refused(broker: BrokerThread, query: dict[str, str], code: str):
    broker.control("create", "refused.dead")
    answer = ask(broker, "POST", "/redrive", "refused", **query)
    assert (answer.status, answer.json()["message"]) == (400, code)
    assert ask(broker, "GET", "/redrive", "refused").status == 404


def test_a_restart_continues(tmp_path: Path):
    with BrokerThread(tmp_path) as broker:
        give_up(broker, "t", b"one", b"two")
        ask(broker, "POST", "/redrive", "t", origin_topic="t", rate=1).expect_json()
        broker.restart()
        wait_until(lambda: ask(broker, "GET", "/redrive", "t").expect_json()["state"] == "finished")
        assert broker.channel_stats("t", "c")["depth"] == 2
