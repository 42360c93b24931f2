"""Published NSQ clients do their work against our nsqd, and get over its death.

Each client runs in a process of its own (event loops and monkey patches do not mix) through the
scenario of `scenario.py`. They all run at once against one broker, which is killed and started
again in the middle; the tests then read what each of them reported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import BrokerProcess, start_process, wait_until
from tests.support.polling import DEADLINE

from . import scenario

HERE = Path(__file__).parent
NSQJS = HERE.parent / "nsqjs"
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

Event = dict[str, Any]


class Driver:
    """A running client: the process and its reports so far."""

    def __init__(self, name: str, command: list[str], address: tuple[str, int]) -> None:
        self.topic = f"clients_{name}"
        self.events: list[Event] = []
        self.process = subprocess.Popen(
            [*command, address[0], str(address[1]), self.topic],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
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

    def of(self, event: str) -> list[Event]:
        return [found for found in tuple(self.events) if found["event"] == event]

    def await_event(self, event: str, deadline: float) -> None:
        """Wait for a report, or until the client ends or time is up; the tests check which."""
        while not self.of(event) and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def python_command(package: str, script: str) -> list[str] | None:
    return [sys.executable, str(HERE / script)] if importlib.util.find_spec(package) else None


def nsqjs_command() -> list[str] | None:
    node = shutil.which("node")
    installed = (NSQJS / "node_modules" / "nsqjs").exists()
    return [node, str(NSQJS / "drive_nsqjs.js")] if node and installed else None


COMMANDS = {
    "pynsq": python_command("nsq", "drive_pynsq.py"),
    "gnsq": python_command("gnsq", "drive_gnsq.py"),
    "ansq": python_command("ansq", "drive_ansq.py"),
    "nsqjs": nsqjs_command(),
}


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with start_process(msg_timeout=scenario.MSG_TIMEOUT_MS / 1000) as process:
        yield process


@pytest.fixture(scope="module")
def drivers(broker: BrokerProcess) -> Iterator[dict[str, Driver]]:
    """Every installed client, at the end of its scenario (or stuck in it)."""
    deadline = time.monotonic() + DEADLINE
    host, port = broker.address
    started: dict[str, Driver] = {}
    try:
        for name, command in COMMANDS.items():
            if command:
                set_policy(broker, f"clients_{name}")
                started[name] = Driver(name, command, (host, port))
        for driver in started.values():
            driver.await_event("holding", deadline - DEADLINE / 2)
        broker.kill()
        # The clients have one address, so the broker has to reuse it.
        broker.flags["tcp_address"] = f"{host}:{port}"
        broker.start()
        for driver in started.values():
            driver.tell("restarted")
        for driver in started.values():
            driver.await_event("done", deadline)
        yield started
    finally:
        for driver in started.values():
            driver.close()


def set_policy(broker: BrokerProcess, topic: str) -> None:
    broker.control("create", topic, scenario.CHANNEL)
    if not broker.is_reference:
        policy = json.dumps({"policy": {"max_attempts": scenario.POISON_ATTEMPTS}}).encode()
        broker.request("PUT", f"/topic/settings?topic={topic}", policy).expect_json()


@pytest.fixture(params=COMMANDS)
def client(request: pytest.FixtureRequest, drivers: dict[str, Driver]) -> Driver:
    if request.param not in drivers:
        if IN_CI:
            pytest.fail(f"{request.param} is not installed")
        pytest.skip(f"{request.param} is not installed")
    driver = drivers[request.param]
    # Shown by pytest with the failures.
    sys.stdout.write("".join(driver.errors) + "\n".join(map(str, driver.events)))
    return driver


def bodies(events: list[Event]) -> set[str]:
    return {event["body"] for event in events}


def test_publishes_one_several_and_deferred(client: Driver) -> None:
    acknowledged = [(event["command"], event["bodies"]) for event in client.of("published")]
    assert acknowledged[:3] == [
        ("PUB", [scenario.SINGLE]),
        ("MPUB", list(scenario.MULTI)),
        ("DPUB", [scenario.DEFERRED]),
    ]


def test_receives_and_finishes_everything_published(client: Driver) -> None:
    assert client.of("worked")
    good = {scenario.SINGLE, scenario.DEFERRED, *scenario.MULTI} - {scenario.POISON}
    assert bodies(client.of("finished")) >= good


def test_a_deferred_message_arrives_when_due(client: Driver) -> None:
    published = next(event for event in client.of("published") if event["command"] == "DPUB")
    received = next(event for event in client.of("message") if event["body"] == scenario.DEFERRED)
    # On a busy machine, its clock may start after ours.
    assert scenario.DEFER_MS / 1000 - 0.1 <= received["at"] - published["at"] < 5


def test_a_requeued_message_comes_back_with_attempts_two(client: Driver) -> None:
    deliveries = [event["attempts"] for event in client.of("message") if event["body"] == scenario.REQUEUED]
    assert deliveries == [1, 2]


def test_a_poison_message_ends_in_the_dead_letters_after_its_attempts(
    client: Driver, broker: BrokerProcess
) -> None:
    """Also over the crash that follows."""
    if broker.is_reference:
        pytest.skip("the reference has no delivery policies")
    deliveries = [event["attempts"] for event in client.of("message") if event["body"] == scenario.POISON]
    assert deliveries == [*range(1, scenario.POISON_ATTEMPTS + 1)]
    with broker.connect() as connection:
        connection.sub(f"{client.topic}.dead", "check", rdy=10)
        stats = broker.channel_stats(f"{client.topic}.dead", "check")
        assert stats["depth"] + stats["in_flight_count"] == 1
        assert json.loads(connection.read_message().body)["text"] == scenario.POISON


def test_a_touched_message_does_not_time_out(client: Driver) -> None:
    finished = next(event for event in client.of("finished") if event["body"] == scenario.TOUCHED)
    deliveries = [event for event in client.of("message") if event["body"] == scenario.TOUCHED]
    assert finished["at"] - deliveries[0]["at"] > scenario.MSG_TIMEOUT_MS / 1000
    # The crash soon after it may repeat it.
    assert len([event for event in deliveries if event["at"] < finished["at"]]) == 1


def test_has_as_many_in_flight_as_it_asked_for(client: Driver) -> None:
    assert len(client.of("holding")[0]["bodies"]) == scenario.MAX_IN_FLIGHT


def test_reconnects_to_a_killed_broker_and_loses_no_acknowledged_message(
    client: Driver, broker: BrokerProcess
) -> None:
    if broker.is_reference:
        pytest.skip("the reference loses what is in flight when killed")
    holding = client.of("holding")[0]["at"]
    finished_after = bodies([event for event in client.of("finished") if event["at"] > holding])
    assert finished_after >= {*scenario.KEPT, scenario.AFTER}
    # A crash may repeat messages finished since the last checkpoint, about one second.
    long_ago = bodies([event for event in client.of("finished") if event["at"] < holding - 2])
    assert not finished_after & long_ago
    assert client.of("done")
    assert wait_until(lambda: client.process.poll() is not None)
    assert client.process.returncode == 0


def test_leaves_nothing_unfinished_in_its_channel(client: Driver, broker: BrokerProcess) -> None:
    if broker.is_reference:
        pytest.skip("the reference loses what is in flight when killed")
    wait_until(lambda: client.process.poll() is not None)
    with broker.connect() as connection:
        connection.identify()
        connection.sub(client.topic, scenario.CHANNEL)
        connection.pub(client.topic, b"end")
        connection.rdy(10)
        assert connection.read_messages(1, finish=True)[0].body == b"end"
        connection.expect_silence(0.2)


def test_the_lock_of_the_npm_packages_names_no_registry() -> None:
    lock = json.loads((NSQJS / "package-lock.json").read_text())
    assert lock["packages"]["node_modules/nsqjs"]["integrity"]
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]
