"""Runs tests that mostly wait at the same time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from tests.support import TestBroker

Scenario = Callable[[TestBroker], None]


class Overlap:
    """Decorator for tests that take the one fixture `broker` (shared at least by the module).

    When the first of them is run, all start, each in a thread; each test then reports its own
    outcome.
    """

    def __init__(self) -> None:
        self._scenarios: list[Scenario] = []
        self._running: dict[Scenario, Future[None]] = {}

    def __call__(self, scenario: Scenario) -> Scenario:
        self._scenarios.append(scenario)

        @functools.wraps(scenario)
        def run(broker: TestBroker) -> None:
            if not self._running:
                self._start(broker)
            self._running[scenario].result()

        return run

    def _start(self, broker: TestBroker) -> None:
        self._running = {scenario: Future() for scenario in self._scenarios}
        for scenario, future in self._running.items():
            Thread(target=_run, args=(scenario, broker, future), daemon=True).start()


def _run(scenario: Scenario, broker: TestBroker, future: Future[None]) -> None:
    try:
        future.set_result(scenario(broker))
    except BaseException as error:
        future.set_exception(error)
