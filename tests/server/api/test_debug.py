"""/debug: its reports, and that they do no harm."""

from __future__ import annotations

import cProfile
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import TEXT, Answer, BrokerThread, wait_until
from tests.support.polling import DEADLINE


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as broker:
        yield broker


def show(broker: BrokerThread, path: str) -> str:
    answer = broker.request("GET", f"/debug/pprof{path}")
    assert (answer.status, answer.header("Content-Type")) == (200, TEXT)
    assert answer.header("X-NSQ-Content-Type") is None
    return answer.body.decode()


def test_the_index_lists_everything_under_debug(broker: BrokerThread) -> None:
    lines = show(broker, "/").splitlines()
    listed = {tuple(line.partition(": ")[0].split()) for line in lines}
    endpoints = broker.request("GET", "/openapi.json").json()["paths"]
    assert listed == {
        (method.upper(), path)
        for path, methods in endpoints.items()
        if path.startswith("/debug/")
        for method in methods
    }
    assert all(line.endswith(".") for line in lines)


def test_the_command_line_is_that_of_the_process(broker: BrokerThread) -> None:
    assert show(broker, "/cmdline").split("\0") == sys.orig_argv


def test_the_command_line_is_shown_without_the_secrets_of_addresses(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["nsqd", "--auth-http-address", "https://user:" + "password@10.0.0.1/auth?key=password"]
    monkeypatch.setattr(sys, "orig_argv", [*given, "--data-path=/a@b", "-x"])
    shown = ["nsqd", "--auth-http-address", "https://10.0.0.1/auth", "--data-path=/a@b", "-x"]
    assert show(broker, "/cmdline").split("\0") == shown


def test_the_stacks_of_threads_and_tasks_are_shown(broker: BrokerThread) -> None:
    release = threading.Event()

    def wait_for_a_good_reason() -> None:
        release.wait(DEADLINE)

    thread = threading.Thread(target=wait_for_a_good_reason, name="patient")
    thread.start()
    try:
        text = show(broker, "/goroutine")
    finally:
        release.set()
        thread.join()
    assert "thread patient:\n" in text and "wait_for_a_good_reason" in text
    assert "in _maintain" in text and "in watch" in text
    assert text.endswith(" tasks\n") and int(text.split()[-2]) >= 3


def test_the_number_of_tasks_shown_is_limited(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsparq.server.api import debug

    whole = show(broker, "/goroutine")
    monkeypatch.setattr(debug, "SHOWN_TASKS", 1)
    less = show(broker, "/goroutine")
    assert whole.count("Stack for <") > less.count("Stack for <") == 1
    assert whole.splitlines()[-1] == less.splitlines()[-1], "but all are counted"


class Rarity:
    pass


def test_the_heap_is_counted_by_type(broker: BrokerThread) -> None:
    kept = [Rarity() for _ in range(200_000)]
    for one in kept:
        one.itself = one  # type: ignore[attr-defined]  # so that it is tracked
    lines = show(broker, "/heap").splitlines()
    total = int(lines[0].split()[0])
    counts = {name: int(count) for count, name in (line.split(maxsplit=1) for line in lines[1:])}
    assert counts[f"{__name__}.Rarity"] == 200_000
    assert [*counts.values()] == sorted(counts.values(), reverse=True) and len(counts) <= 50
    assert total >= sum(counts.values())
    for one in kept:
        del one.itself  # type: ignore[attr-defined]


def test_memory_is_freed_on_request(broker: BrokerThread) -> None:
    class Cycle:
        freed = 0

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            Cycle.freed += 1

    Cycle()
    broker.request("POST", "/debug/freememory").expect_empty()
    assert Cycle.freed == 1


# Profiles


def profile(broker: BrokerThread, seconds: str) -> Answer:
    return broker.request("GET", f"/debug/pprof/profile?seconds={seconds}")


def test_a_profile_shows_the_work_of_the_loop(broker: BrokerThread) -> None:
    done = threading.Event()

    def keep_busy() -> None:
        with broker.connect() as connection:
            while not done.is_set():
                connection.pub("profiled", b"x")

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        answer = profile(broker, "0.3")
    finally:
        done.set()
        thread.join()
    assert (answer.status, answer.header("Content-Type")) == (200, TEXT)
    text = answer.body.decode()
    assert "Ordered by: internal time" in text
    assert "(flush)" in text and "(append)" in text


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "nan", "inf", "300.1", "1e9", ""])
def test_an_invalid_duration_is_refused(broker: BrokerThread, seconds: str) -> None:
    profile(broker, seconds).expect_error(400, "INVALID_ARG_SECONDS")


def test_only_one_profile_runs_and_it_ends_with_its_client(broker: BrokerThread) -> None:
    with broker.http_connect() as first:
        first.send_request("GET", "/debug/pprof/profile?seconds=300")
        wait_until(lambda: profile(broker, "0.01").status == 409)
        profile(broker, "0.01").expect_error(409, "ALREADY_PROFILING")
        first.abort()
        # It does not take the 30 seconds of the request.
        wait_until(lambda: profile(broker, "0.01").status == 200)


def test_a_profile_by_another_tool_is_refused_and_leaves_nothing(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(cProfile.Profile):
        def enable(self, *_: Any, **__: Any) -> None:
            raise ValueError("Another profiling tool is already active")

    with monkeypatch.context() as patch:
        patch.setattr(cProfile, "Profile", Refusing)
        profile(broker, "0.01").expect_error(409, "ALREADY_PROFILING")
    assert profile(broker, "0.01").status == 200


def test_a_daemon_that_stops_does_not_wait_for_a_profile() -> None:
    with BrokerThread() as broker:
        connection = broker.http_connect()
        connection.send_request("GET", "/debug/pprof/profile?seconds=300")
        wait_until(lambda: profile(broker, "0.01").status == 409)
        broker.stop()
        connection.expect_closed()
        connection.close()
