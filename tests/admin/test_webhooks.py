"""Webhooks: which changes are sent, and what happens when the receiver does not take them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from dataclasses import replace
from typing import Any

import pytest

from nsparq.admin.change.actions import Notifier
from nsparq.admin.collect.upstream import Answer, Upstream
from nsparq.admin.health import Problem, Severity
from nsparq.admin.health.problem import MAX_PER_KIND, in_order
from nsparq.admin.security import Actor
from nsparq.admin.webhooks import CLEAR_S, GIVE_UP_S, MAX_WAITING, Alerts, Webhook
from tests.support.aio import run, until
from tests.tools.processes import WebServer, free_address

GROWING = Problem("growing", Severity.WARNING, "backlog is growing", "5 waiting", "", topic="t", channel="c")
DOWN = Problem("unreachable", Severity.CRITICAL, "node does not answer", "", "", node="h:4151")


# Changes


def events(alerts: Alerts, now_s: float, *problems: Problem) -> list[tuple[str, str, str]]:
    found = [*alerts.compare(problems, now_s)]
    return [(one["event"], one["finding"]["id"], one["finding"]["severity"]) for one in found]


def test_a_finding_is_sent_when_it_appears_changes_its_severity_and_clears() -> None:
    alerts = Alerts()
    assert events(alerts, 0, GROWING) == [("appeared", "growing/t/c", "warning")]
    assert events(alerts, 5, replace(GROWING, detail="9 waiting")) == []
    worse = replace(GROWING, severity=Severity.CRITICAL)
    (changed,) = alerts.compare([worse], 10)
    assert (changed["event"], changed["previous_severity"]) == ("changed", "warning")
    assert changed["finding"]["since"] == "1970-01-01T00:00:00Z"
    # Absent for a moment is not gone.
    assert events(alerts, 9 + CLEAR_S) == []
    assert events(alerts, 10 + CLEAR_S) == [("cleared", "growing/t/c", "critical")]
    assert events(alerts, 20 + CLEAR_S) == []


def test_what_was_sent_is_known_after_a_restart() -> None:
    before = Alerts()
    events(before, 100, GROWING, DOWN)
    after = Alerts()
    after.load(json.loads(json.dumps(before.dump())) + ["nonsense", {"kind": 1}], 200)
    assert events(after, 205, GROWING) == []
    assert events(after, 200 + CLEAR_S, GROWING) == [("cleared", "unreachable/h:4151", "critical")]
    after.load("nonsense", 0)


def test_findings_beyond_the_limit_of_their_kind_are_not_cleared() -> None:
    many = [replace(GROWING, channel=f"c{number:03}") for number in range(MAX_PER_KIND + 1)]
    alerts = Alerts()
    assert len(events(alerts, 0, *in_order(many[:-1]))) == MAX_PER_KIND
    heavier = replace(many[-1], weight=1.0)
    assert len(events(alerts, 5, *in_order([*many[:-1], heavier]))) == 1
    assert events(alerts, 5 + CLEAR_S, *in_order([*many[:-1], heavier])) == []


# Sending


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


def send(url: str, count: int = 1, secret: str = "") -> tuple[Webhook, Clock]:
    """Send events until none waits."""

    async def run() -> tuple[Webhook, Clock]:
        clock, upstream = Clock(), Upstream(connect_timeout=5, request_timeout=5)
        webhook = Webhook(upstream, url, secret, sleep=clock.sleep, clock=clock)
        for number in range(count):
            for event in Alerts().compare([replace(GROWING, topic=f"t{number}")], 0):
                webhook.add(event)
        webhook.start()
        async with asyncio.timeout(60):
            await webhook._is_empty.wait()
        await webhook.close()
        await upstream.close()
        return webhook, clock

    return asyncio.run(run())


def bodies(server: WebServer) -> list[dict[str, Any]]:
    return [json.loads(one.body) for one in server.requests]


def test_an_event_is_posted_as_signed_json() -> None:
    with WebServer(204) as server:
        webhook, _ = send(server.url + "/hook", secret="s3cret")
        (request,) = server.requests
    assert (request.method, request.path, webhook.sent) == ("POST", "/hook", 1)
    assert request.headers["content-type"] == "application/json"
    assert request.headers["x-nsparq-event"] == "appeared"
    signature = hmac.new(b"s3cret", request.body, hashlib.sha256).hexdigest()
    assert request.headers["x-nsparq-signature"] == f"sha256={signature}"
    event = json.loads(request.body)
    assert {*event} == {"id", "event", "time", "nsqadmin", "finding"}
    assert event["finding"] == {
        "id": "growing/t0/c",
        "since": "1970-01-01T00:00:00Z",
        "severity": "warning",
        "kind": "growing",
        "title": "backlog is growing",
        "detail": "5 waiting",
        "hint": "",
        "topic": "t0",
        "channel": "c",
    }


def test_a_failing_receiver_is_asked_again_and_gets_the_events_in_order() -> None:
    with WebServer(500, 429, 503, 200) as server:
        webhook, clock = send(server.url, count=3)
        topics = [one["finding"]["topic"] for one in bodies(server)]
        ids = [one["id"] for one in bodies(server)]
    assert topics == ["t0", "t0", "t0", "t0", "t1", "t2"]
    assert len({*ids}) == 3
    assert clock.pauses == [1, 2, 4]
    assert (webhook.sent, webhook.failures, webhook.dropped, webhook.error) == (3, 3, 0, "")


def test_an_event_that_is_refused_or_fails_for_an_hour_is_dropped() -> None:
    with WebServer(400, 200) as server:
        webhook, _ = send(server.url, count=2)
        assert (webhook.sent, webhook.dropped, len(server.requests)) == (1, 1, 2)
    webhook, clock = send(f"http://{free_address()}/secret-path")
    assert (webhook.sent, webhook.dropped) == (0, 1)
    assert GIVE_UP_S <= clock.now_s < GIVE_UP_S + 180
    assert max(clock.pauses) == 60
    assert webhook.error and "secret-path" not in webhook.error


class Breaking(Upstream):
    """An unexpected error at the first request."""

    def __init__(self) -> None:
        super().__init__(connect_timeout=5, request_timeout=5)
        self.bodies: list[Any] = []
        self.broke = False

    async def exchange(self, method: str, url: str, body: Any = None, **more: Any) -> Answer:
        if not self.broke:
            self.broke = True
            raise RuntimeError("a mistake")
        self.bodies.append(json.loads(body))
        return Answer(200, {}, b"")


def test_an_unexpected_error_does_not_end_the_sending(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        clock, upstream = Clock(), Breaking()
        webhook = Webhook(upstream, "http://x", sleep=clock.sleep, clock=clock)
        webhook.add({"event": "appeared", "finding": {"id": "1"}})
        webhook.start()
        await until(lambda: upstream.bodies)
        await webhook.close()
        assert (webhook.sent, webhook.failures) == (1, 1)
        told = Breaking()
        notifier = Notifier(told, "http://x")
        notifier.start()
        for action in ("first", "second"):
            notifier.notify(action, Actor("", "", "", ""), {})
        await until(lambda: told.bodies)
        await notifier.close()
        assert [one["action"] for one in told.bodies] == ["second"]

    run(scenario())
    assert caplog.text.count("a mistake") >= 2


def test_the_oldest_event_goes_if_too_many_wait() -> None:
    async def run() -> Webhook:
        webhook = Webhook(Upstream(connect_timeout=1, request_timeout=1), "http://x", clock=Clock())
        for number in range(MAX_WAITING + 5):
            webhook.add({"event": "appeared", "finding": {"id": str(number)}})
        return webhook

    webhook = asyncio.run(run())
    assert (webhook.waiting, webhook.dropped) == (MAX_WAITING, 5)
