"""Published NSQ clients over TLS, snappy, deflate and their combinations, with client certificates
and AUTH.

Each client library runs in a process of its own, through the scenario of `secure_scenario.py` over
all kinds of connections at once; the tests then read what it reported, and what the brokers know of
its connections. (ansq has none of these.)
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from nsparq.options import TlsRequired
from tests.support import BrokerProcess, start_process
from tests.support.certificates import certificates
from tests.support.polling import DEADLINE

from .test_published_clients import NSQJS, nsqjs_command, python_command

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
SECRET = "open sesame"
CLIENTS = {
    "pynsq": python_command("nsq", "drive_pynsq_secure.py"),
    "gnsq": python_command("gnsq", "drive_gnsq_secure.py"),
    "nsqjs": nsqjs_command() and [*nsqjs_command()[:1], str(NSQJS / "drive_nsqjs_secure.js")],
}
# By name: the layers, and whether credentials are required (certificate, and AUTH inside TLS).
KINDS = {
    "tls": ({"tls"}, False),
    "snappy": ({"snappy"}, False),
    "deflate": ({"deflate"}, False),
    "tls+snappy": ({"tls", "snappy"}, False),
    "tls+deflate": ({"tls", "deflate"}, False),
    "identified+tls": ({"tls"}, True),
    "identified+tls+snappy": ({"tls", "snappy"}, True),
    "identified+tls+deflate": ({"tls", "deflate"}, True),
}

Event = dict[str, Any]


class AuthServer(ThreadingHTTPServer):
    """Accepts clients with the secret and the right certificate, and records the queries."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), AuthHandler)
        self.asked: list[dict[str, str]] = []
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class AuthHandler(BaseHTTPRequestHandler):
    server: AuthServer

    def do_GET(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self.server.asked.append(query)
        allowed = (query.get("secret"), query.get("common_name"), query["tls"]) == (SECRET, "client", "true")
        permission = {"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]}
        answer = {"ttl": 3600, "identity": "tester", "authorizations": [permission] if allowed else []}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Driver:
    """A running client library."""

    def __init__(self, command: list[str], connections: list[dict[str, Any]]) -> None:
        self.process = subprocess.Popen(
            [*command, "127.0.0.1", json.dumps(connections)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.events: list[Event] = []
        self.errors: list[str] = []
        self.clients: dict[str, list[dict[str, Any]]] = {}
        """The broker's stats of the connections, by kind."""
        self._readers = [
            threading.Thread(target=self._read_events),
            threading.Thread(target=self._read_errors),
        ]
        for reader in self._readers:
            reader.start()

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def of(self, kind: str, event: str) -> list[Event]:
        return [
            found for found in tuple(self.events) if (found["connections"], found["event"]) == (kind, event)
        ]

    def await_done(self, deadline: float) -> None:
        """Wait until all kinds are done, the client ends, or time is up; the tests check which."""
        while not all(self.of(kind, "done") for kind in KINDS):
            if self.process.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def close(self) -> None:
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.write("end\n")
            self.process.stdin.flush()
        try:
            self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def auth_server() -> Iterator[AuthServer]:
    server = AuthServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def drivers(auth_server: AuthServer) -> Iterator[dict[str, Driver]]:
    """Every installed client, at the end of its scenario (or stuck in it)."""
    found = certificates()
    strict = found.server_flags(
        tls_client_auth_policy="require-verify",
        tls_root_ca_file=str(found.ca.cert),
        tls_required=TlsRequired.EXCEPT_HTTP,
        auth_http_address=(auth_server.address,),
    )
    with start_process(**found.server_flags()) as free, start_process(**strict) as guarded:
        started: dict[str, Driver] = {}
        try:
            for client, command in CLIENTS.items():
                if command:
                    plan = [connections(client, kind, free, guarded) for kind in KINDS]
                    started[client] = Driver(command, plan)
            deadline = time.monotonic() + DEADLINE
            for client, driver in started.items():
                driver.await_done(deadline)
                for kind, (_, is_identified) in KINDS.items():
                    broker = guarded if is_identified else free
                    stats = broker.channel_stats(topic_of(client, kind), "secure")
                    driver.clients[kind] = (stats or {"clients": []})["clients"]
        finally:
            for driver in started.values():
                driver.close()
        yield started


def topic_of(client: str, kind: str) -> str:
    return f"{client}_{kind}".replace("+", "-")


def connections(client: str, kind: str, free: BrokerProcess, guarded: BrokerProcess) -> dict[str, Any]:
    layers, is_identified = KINDS[kind]
    found = certificates()
    broker = guarded if is_identified else free
    plan: dict[str, Any] = {"name": kind, "port": broker.address[1], "topic": topic_of(client, kind)}
    plan |= {layer: layer in layers for layer in ("tls", "snappy", "deflate")} | {"ca": str(found.ca.cert)}
    if is_identified:
        plan |= {"cert": str(found.client.cert), "key": str(found.client.key), "secret": SECRET}
    return plan


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, drivers: dict[str, Driver]) -> Driver:
    if request.param not in drivers:
        if IN_CI:
            pytest.fail(f"{request.param} is not installed")
        pytest.skip(f"{request.param} is not installed")
    driver = drivers[request.param]
    # Shown by pytest with the failures.
    print("".join(driver.errors))  # noqa: T201
    return driver


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_published_comes_back_and_is_finished(client: Driver, kind: str) -> None:
    published = [body for event in client.of(kind, "published") for body in event["bodies"]]
    finished = [event["body"] for event in client.of(kind, "finished")]
    assert len(published) == 103
    assert sorted(finished) == sorted(published)
    assert client.of(kind, "done")


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_are_really_there(client: Driver, kind: str) -> None:
    layers, is_identified = KINDS[kind]
    (consumer,) = client.clients[kind]
    assert {name for name in ("tls", "snappy", "deflate") if consumer[name]} == layers
    if "tls" in layers:
        assert consumer["tls_version"] in ("TLS1.2", "TLS1.3")
    identity = (consumer.get("authed", False), consumer.get("auth_identity", ""))
    assert identity == ((True, "tester") if is_identified else (False, ""))


def test_the_auth_server_is_told_who_asks(client: Driver, auth_server: AuthServer) -> None:
    wanted = {"remote_ip": "127.0.0.1", "tls": "true", "secret": SECRET, "common_name": "client"}
    # Three kinds of connections, each with a publisher and a consumer, for every client.
    installed = sum(command is not None for command in CLIENTS.values())
    assert auth_server.asked == [wanted] * (6 * installed)
