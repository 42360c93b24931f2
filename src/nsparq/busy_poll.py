"""Busy-poll: after a write, keep the event loop awake for a moment, because the reply is often on
its way.

A process that sleeps has to be woken, which takes time, and its peer pays for a part of that. Where
a few clients wait for each reply before they send again, both sides would fall asleep and be woken
at every step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import Final, Protocol

MAX_SKIPPED: Final = 15
"""While no replies come in time, busy-poll is skipped more and more often, up to this many times in
a row."""


class Loop(Protocol):
    """The part of an event loop that is needed here."""

    def call_soon(self, callback: Callable[[], object]) -> object: ...


class BusyPoll:
    """start() it after each write, and stop() it when no reply is expected any more. While no
    replies come in time it is skipped more and more often. On a single core it is off: there it
    would only keep the peer from replying."""

    def __init__(
        self,
        loop: Loop,
        awake_s: float,
        clock: Callable[[], float] = perf_counter,
        *,
        cores: int | None = None,
    ) -> None:
        self._loop = loop
        self._awake_s = awake_s
        self._clock = clock
        self._is_enabled = awake_s > 0 and (usable_cores() if cores is None else cores) > 1
        self._until = 0.0
        self._is_on = False
        self._is_stopping = False
        """Whether the next poll ends it."""
        self._has_polled = False
        """Whether the event loop has looked for input since the last write."""
        self._penalty = 0
        """Times that it is skipped after the last failure."""
        self._to_skip = 0
        """Times that it is still to be skipped."""

    def start(self) -> None:
        """Have the event loop poll for input instead of sleeping, for a moment."""
        self._is_stopping = False
        if self._is_on:
            if self._has_polled:
                # There is something to write again, so something was received.
                self._penalty = 0
                self._has_polled = False
                self._until = self._clock() + self._awake_s
        elif self._to_skip:
            self._to_skip -= 1
        elif self._is_enabled:
            self._is_on = True
            self._has_polled = False
            self._until = self._clock() + self._awake_s
            self._loop.call_soon(self._poll)

    def stop(self) -> None:
        """The reply has come, and no other is expected."""
        if self._is_on:
            self._penalty = 0
            self._is_stopping = True

    def _poll(self) -> None:
        """Called in every turn while it is on: an event loop with something to do does not
        sleep."""
        self._has_polled = True
        if self._is_stopping:
            self._is_on = False
        elif self._clock() < self._until:
            self._loop.call_soon(self._poll)
        else:
            self._is_on = False
            self._penalty = self._to_skip = min(2 * self._penalty + 1, MAX_SKIPPED)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
