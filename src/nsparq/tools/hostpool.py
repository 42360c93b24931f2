"""Which of several destinations is next: in turn, in turn without those that fail, or mostly the
fastest.

No network and no clock: `now` is an argument, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from nsparq.private_random import private_random

__all__ = ["EpsilonGreedy", "HostPool", "RoundRobin", "make_pool"]

FIRST_DELAY_S: Final = 30.0
LONGEST_DELAY_S: Final = 900.0
MEMORY_S: Final = 300.0
"""Time constant after which old response times hardly count."""
EXPLORE_FIRST: Final = 0.3
EXPLORE_LEAST: Final = 0.01
EXPLORE_DECAY_S: Final = 2.5
"""The share of random choices falls by a tenth each time this has passed."""


class RoundRobin:
    """In turn, whether they fail or not."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self.hosts = list(dict.fromkeys(hosts))
        self._next = 0

    def pick(self, now: float) -> str:
        host = self.hosts[self._next]
        self._next = (self._next + 1) % len(self.hosts)
        return host

    def report(self, host: str, ok: bool, seconds: float, now: float) -> None:
        """Record the outcome of a request to a host that was picked."""


class HostPool(RoundRobin):
    """In turn. A host that failed is skipped for a time, which doubles while it keeps failing. When
    all have failed, all are tried again."""

    def __init__(self, hosts: Iterable[str]) -> None:
        super().__init__(hosts)
        self._retry_at: dict[str, float] = {}
        """When each failed host is tried again."""
        self._delay: dict[str, float] = {}

    def pick(self, now: float) -> str:
        for _ in self.hosts:
            host = super().pick(now)
            if self._may_try(host, now):
                return host
        self._retry_at.clear()
        self._next = 0
        return super().pick(now)

    def _may_try(self, host: str, now: float) -> bool:
        if host not in self._retry_at:
            return True
        if now < self._retry_at[host]:
            return False
        # One try now; unless it succeeds, the next one comes after a longer time.
        self._delay[host] = min(self._delay[host] * 2, LONGEST_DELAY_S)
        self._retry_at[host] = now + self._delay[host]
        return True

    def report(self, host: str, ok: bool, seconds: float, now: float) -> None:
        if ok:
            self._retry_at.pop(host, None)
        elif host not in self._retry_at:
            self._delay[host] = FIRST_DELAY_S
            self._retry_at[host] = now + FIRST_DELAY_S


class EpsilonGreedy(HostPool):
    """Mostly the host with the fastest recent answers, sometimes another one, to measure it."""

    def __init__(self, hosts: Iterable[str], draw: Callable[[], float] = private_random.random) -> None:
        super().__init__(hosts)
        self._draw = draw
        self._began: float | None = None
        self._times: dict[str, tuple[float, float, float]] = {}
        """Weighted sum of response times, sum of the weights, and the time of both."""

    def pick(self, now: float) -> str:
        if self._began is None:
            self._began = now
        share = max(EXPLORE_FIRST * 0.9 ** ((now - self._began) / EXPLORE_DECAY_S), EXPLORE_LEAST)
        known = [host for host in self.hosts if host in self._times and host not in self._retry_at]
        if not known or len(known) + len(self._retry_at) < len(self.hosts) or self._draw() < share:
            return super().pick(now)
        return min(known, key=lambda host: self._times[host][0] / self._times[host][1])

    def report(self, host: str, ok: bool, seconds: float, now: float) -> None:
        super().report(host, ok, seconds, now)
        if ok:
            total, weight, at = self._times.get(host, (0.0, 0.0, now))
            kept = math.exp((at - now) / MEMORY_S)
            self._times[host] = (total * kept + seconds, weight * kept + 1, now)


POOLS: Final = {"round-robin": RoundRobin, "hostpool": HostPool, "epsilon-greedy": EpsilonGreedy}


def make_pool(mode: str, hosts: Iterable[str]) -> RoundRobin | None:
    """None for an unknown mode."""
    pool: type[RoundRobin] | None = POOLS.get(mode)
    return pool(hosts) if pool is not None else None
