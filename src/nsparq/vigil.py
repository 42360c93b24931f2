"""Staying awake for a moment after something was said, because the answer is often on its way.

A process that sleeps has to be woken. That takes time, and whoever sends it something pays for a part of it.
Where a few clients wait for each answer before they say the next thing, both sides would fall asleep and be
woken at every step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import Final, Protocol

MOST_LEFT_OUT: Final = 15


class Patience:
    """For what pays at times, and at other times does not: then it is tried less and less often, but once in
    a while again."""

    def __init__(self) -> None:
        self._penalty = 0
        """How many occasions were left out after the last time in vain."""
        self._left_out = 0
        """How many are still to be."""

    def is_left(self) -> bool:
        """Whether to take this occasion."""
        if self._left_out:
            self._left_out -= 1
            return False
        return True

    def paid(self) -> None:
        self._penalty = 0

    def in_vain(self) -> None:
        self._penalty = min(2 * self._penalty + 1, MOST_LEFT_OUT)
        self._left_out = self._penalty


class Loop(Protocol):
    """The part of an event loop that is needed here."""

    def call_soon(self, callback: Callable[[], object]) -> object: ...


class Vigil:
    """begin() it whenever something has been said, and end() it when nothing more is expected. Where nothing
    comes of it, it is left out more and more often; once in a while it is tried again. On a single core it
    would be in the way of who is to answer."""

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
        self._is_of_use = awake_s > 0 and (usable_cores() if cores is None else cores) > 1
        self._until = 0.0
        self._is_on = False
        self._is_over = False
        """Whether it is to end at the next look, because what was expected has come."""
        self._has_looked = False
        """Whether the event loop has looked for input since something was said."""
        self._patience = Patience()

    def begin(self) -> None:
        """Have the event loop look for what comes next instead of waiting for it, for a moment."""
        self._is_over = False
        if self._is_on:
            if self._has_looked:
                # There is something to say again, so something has come.
                self._patience.paid()
                self._has_looked = False
                self._until = self._clock() + self._awake_s
        elif self._is_of_use and self._patience.is_left():
            self._is_on = True
            self._has_looked = False
            self._until = self._clock() + self._awake_s
            self._loop.call_soon(self._look)

    def end(self) -> None:
        """What was expected has come, and there is no more of it."""
        if self._is_on:
            self._patience.paid()
            self._is_over = True

    def _look(self) -> None:
        """Called in every turn while the vigil lasts: an event loop with something to do does not sleep."""
        self._has_looked = True
        if self._is_over:
            self._is_on = False
        elif self._clock() < self._until:
            self._loop.call_soon(self._look)
        else:
            self._is_on = False
            self._patience.in_vain()


def usable_cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
