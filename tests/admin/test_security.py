"""Permissions: every change that the API and the forms offer, tried by every kind of user.

The tables here are complete: a test fails for an endpoint or an action that is not in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest

from nsparq.admin.security import CHANGES
from nsparq.admin.show.forms import ACTIONS
from nsparq.server.auth.policy_file import hash_generated
from tests.admin.support import REFERENCE_ADMIN, AdminThread
from tests.support import Answer
from tests.support.web import HandlerServer

pytestmark = pytest.mark.skipif(bool(REFERENCE_ADMIN), reason="ours only")

ALL = ("read", "subscribe", "publish", "admin")


class Rule(NamedTuple):
    """An [[identity.allow]] of the policy."""

    topic: str
    permissions: tuple[str, ...]
    channels: str = ".*"


USERS: dict[str, list[Rule]] = {
    "everything": [Rule(".*", ALL)],
    "reader": [Rule(".*", ("read",))],
    "topic-all": [Rule("^t$", ALL)],
    "topic-admin": [Rule(".*", ("read",)), Rule("^t$", ("admin",))],
    "topic-publisher": [Rule(".*", ("read",)), Rule("^t$", ("publish",))],
    "topic-subscriber": [Rule(".*", ("read",)), Rule("^t$", ("subscribe",))],
    "channel-all": [Rule("^t$", ALL, "^c$")],
    "channel-admin": [Rule(".*", ("read",)), Rule("^t$", ("admin",), "^c$")],
    "other-topic": [Rule(".*", ("read",)), Rule("^u$", ALL)],
    "other-channel": [Rule(".*", ("read",)), Rule("^t$", ALL, "^d$")],
    "nothing": [],
}

FORM = {"Content-Type": "application/x-www-form-urlencoded"}

Need = tuple[str, str, str]
"""Permission, topic, channel; empty names stand for the whole cluster, and for the whole topic."""


def may(user: str, need: Need) -> bool:
    permission, topic, channel = need
    return any(
        permission in rule.permissions and re.search(rule.topic, topic) and re.search(rule.channels, channel)
        for rule in USERS[user]
    )


TOPIC, CHANNEL, LETTERS = ("admin", "t", ""), ("admin", "t", "c"), ("admin", "t.dead", "")
COPY = {"messages": [{"node": "n", "sequence": 1}], "to": "u"}

# Endpoint: what it takes, and a body. `NODE` stands for the node.
API: dict[str, tuple[list[Need], Any]] = {
    "POST /api/topics": ([TOPIC], {"topic": "t"}),
    "POST /api/topics/{topic}": ([TOPIC], {"action": "pause"}),
    "POST /api/topics/{topic}/{channel}": ([CHANNEL], {"action": "empty"}),
    "DELETE /api/topics/{topic}": ([TOPIC], None),
    "DELETE /api/topics/{topic}/{channel}": ([CHANNEL], None),
    "DELETE /api/nodes/{node}": ([TOPIC], {"topic": "t", "channel": "c"}),
    "POST /api/nodes/{node}": ([("admin", "", "")], {"action": "switch_over"}),
    "POST /api/messages/{topic}": ([("publish", "t", "")], {"body": "x"}),
    "POST /api/copy/{topic}": ([TOPIC, ("subscribe", "t", "")], COPY),
    "POST /api/move/{topic}/{channel}": ([CHANNEL, ("subscribe", "t", "c")], {"to": "u"}),
    "POST /api/replay/{topic}/{channel}": ([CHANNEL], {"to": "start", "dry_run": False}),
    "PUT /api/settings/{topic}": ([TOPIC], {"durability": "os"}),
    "PUT /api/policy/{topic}": ([TOPIC, LETTERS], {"policy": {}}),
    "PUT /api/policy/{topic}/{channel}": ([CHANNEL, LETTERS], {"policy": {}}),
    "PUT /api/order/{topic}/{channel}": ([CHANNEL], {"ordered_by": "/k"}),
    "POST /download/{topic}": ([("subscribe", "t", "")], {}),
    "PUT /config/{key}": ([("admin", "", "")], ["127.0.0.1:1"]),
}
OPEN = {"POST /login", "POST /logout", "GET /ping", "GET /login", "GET /static/{file}", "GET /fonts/{file}"}
"""What needs no permission."""

FORMS: dict[str, list[Need]] = {
    "create": [CHANNEL],
    "delete": [CHANNEL],
    "pause": [CHANNEL],
    "unpause": [CHANNEL],
    "empty": [CHANNEL],
    "tombstone": [TOPIC],
    "switch_over": [("admin", "", "")],
    "publish": [("publish", "t", "")],
    "copy": [TOPIC, ("subscribe", "t", "")],
    "move": [CHANNEL, ("subscribe", "t", "c")],
    "settings": [TOPIC],
    "policy": [CHANNEL, LETTERS],
    "remove_policy": [CHANNEL],
    "order": [CHANNEL],
    "remove_order": [CHANNEL],
    "seek": [CHANNEL],
    "redrive": [TOPIC],
    "cancel_redrive": [TOPIC],
}


class FakeCluster:
    """An nsqlookupd and an nsqd with the topic t and its channel c. They accept every change."""

    def __init__(self) -> None:
        self.changes: list[str] = []
        self.is_topic_known = True
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                if owner.is_topic_known or path not in ("/lookup", "/stats"):
                    self._say(owner.tell(path))
                else:
                    self._say({}, 404 if path == "/lookup" else 200)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if "dry_run" not in self.path:
                    owner.changes.append(self.path)
                self._say({})

            def _say(self, value: Any, status: int = 200) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = HandlerServer(Handler)
        self.address = self._server.address

    def tell(self, path: str) -> Any:
        port = self._server.port
        node = {"broadcast_address": "127.0.0.1", "http_port": port, "tcp_port": 1, "topics": ["t"]}
        channel = {"channel_name": "c", "depth": 1}
        return {
            "/nodes": {"producers": [node]},
            "/lookup": {"producers": [node]},
            "/topics": {"topics": ["t"]},
            "/stats": {"topics": [{"topic_name": "t", "channels": [channel]}]},
            "/openapi.json": {"paths": {"/topic/peek": {}, "/channel/seek": {}}},
        }.get(path, {})

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeCluster]:
    fake = FakeCluster()
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def admin(fake: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminThread]:
    lines = []
    for user, rules in USERS.items():
        lines += ["[[identity]]", f'name = "{user}"', f'secret = "{hash_generated(user.encode())}"']
        for topic, permissions, channels in rules:
            lines += ["[[identity.allow]]", f'topic = "{topic}"', f'channels = ["{channels}"]']
            lines += [f"permissions = {list(permissions)}"]
    policy = tmp_path_factory.mktemp("policy") / "policy.toml"
    policy.write_text("\n".join(lines))
    with AdminThread(
        lookupd_http_address=(fake.address,), auth_policy_file=str(policy), poll_interval=3600.0
    ) as admin:
        yield admin


def call(admin: AdminThread, user: str, method: str, path: str, body: Any = None, **more: str) -> Answer:
    return admin.call(method, path, body, {"Authorization": f"Bearer {user}", **more})


def is_refused(answer: Answer) -> bool:
    assert answer.status < 500 or answer.status in (501, 502), answer
    return answer.status in (401, 403)


def endpoints(admin: AdminThread, methods: tuple[str, ...]) -> set[str]:
    found = {f"{one.method} {one.path}" for one in admin.daemon.api.endpoints if one.method in methods}
    return found - OPEN


def concrete(path: str, fake: FakeCluster) -> str:
    names = {"topic": "t", "channel": "c", "node": fake.address, "key": "nsqlookupd_http_addresses"}
    return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], "x"), path)


def test_the_tables_name_every_change(admin: AdminThread) -> None:
    assert endpoints(admin, CHANGES) == {*API, "POST /act"}
    assert ACTIONS.keys() == FORMS.keys()


@pytest.mark.parametrize("user", USERS)
def test_a_change_by_the_api_needs_its_permission(admin: AdminThread, fake: FakeCluster, user: str) -> None:
    for endpoint, (needs, body) in API.items():
        method, path = endpoint.split()
        lookupds = admin.daemon.cluster.lookupds
        fake.changes.clear()
        answer = call(admin, user, method, concrete(path, fake), body)
        allowed = all(may(user, need) for need in needs)
        assert is_refused(answer) is not allowed, (endpoint, answer)
        if not allowed:
            assert not fake.changes, endpoint
            assert admin.daemon.cluster.lookupds == lookupds, endpoint
        admin.daemon.change_lookupds(lookupds)


@pytest.mark.parametrize("user", USERS)
def test_a_change_by_a_form_needs_its_permission(admin: AdminThread, fake: FakeCluster, user: str) -> None:
    for action, needs in FORMS.items():
        fields = {"action": action, "topic": "t", "channel": "c", "node": fake.address}
        fields |= {"confirm": "t" if needs[0] == TOPIC else "c", "body": "x", "message": f"1@{fake.address}"}
        fields |= {"to": "start" if action == "seek" else "u", "origin": "t"}
        fake.changes.clear()
        answer = call(admin, user, "POST", "/act", urlencode(fields).encode(), **FORM)
        # The form is on pages that take `read` for something.
        can_read = any("read" in rule.permissions for rule in USERS[user])
        allowed = can_read and all(may(user, need) for need in needs)
        assert is_refused(answer) is not allowed, (action, answer)
        assert allowed or not fake.changes, action


@pytest.mark.parametrize("user", USERS)
def test_reading_needs_its_permission(admin: AdminThread, fake: FakeCluster, user: str) -> None:
    for endpoint in admin.daemon.api.endpoints:
        if endpoint.method != "GET" or f"GET {endpoint.path}" in OPEN:
            continue
        need = (
            endpoint.permission,
            "t" if "{topic}" in endpoint.path else "",
            "c" if "{channel}" in endpoint.path else "",
        )
        answer = call(admin, user, "GET", concrete(endpoint.path, fake))
        assert is_refused(answer) is not may(user, need), (endpoint.path, answer)


def test_a_right_to_one_channel_does_not_create_its_topic(admin: AdminThread, fake: FakeCluster) -> None:
    body = {"topic": "t", "channel": "c"}
    assert call(admin, "channel-all", "POST", "/api/topics", body).status == 200
    fake.changes.clear()
    fake.is_topic_known = False
    try:
        call(admin, "channel-all", "POST", "/api/topics", body).expect_error(403, "FORBIDDEN")
        form = urlencode({"action": "create", **body}).encode()
        assert call(admin, "channel-all", "POST", "/act", form, **FORM).status == 403
        assert not fake.changes
        call(admin, "topic-all", "POST", "/api/topics", body)
        assert fake.changes
    finally:
        fake.is_topic_known = True


def test_without_a_secret_nothing_is_shown_or_changed(admin: AdminThread) -> None:
    for endpoint in sorted(endpoints(admin, (*CHANGES, "GET"))):
        method, path = endpoint.split()
        answer = admin.call(method, re.sub(r"\{\w+\}", "x", path), {} if method != "GET" else None)
        is_login = answer.status == 303 and "/login?" in (answer.header("Location") or "")
        assert answer.status == 401 or is_login, endpoint
