"""When a micro-batch starts, and how much it may hold. Both modes, log and queue, use this."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from nsparq.spark.options import NsqOptions

__all__ = ["BatchTimer", "Limit"]


class Limit(NamedTuple):
    """How much a micro-batch may hold."""

    rows: int | None = None
    bytes: int | None = None
    is_everything: bool = False
    """The trigger asks for everything at once."""

    @property
    def is_bounded(self) -> bool:
        return self.rows is not None or self.bytes is not None


class BatchTimer:
    """Delays micro-batches until they have enough rows. The first one of a run is never delayed."""

    def __init__(
        self, min_rows: int, max_delay: float, clock: Callable[[], float], interval: float = 0.0
    ) -> None:
        """A batch starts `interval` seconds after the last one or later: when it has `min_rows`, or
        with fewer rows `max_delay` seconds after the last one."""
        self._min_rows, self._max_delay, self._interval = min_rows, max_delay, interval
        self._clock = clock
        self._started_at = -inf

    @classmethod
    def of(cls, options: NsqOptions, clock: Callable[[], float]) -> BatchTimer:
        interval = options.trigger_interval
        return cls(options.min_rows_per_trigger or 0, options.max_trigger_delay, clock, interval)

    @property
    def counts_rows(self) -> bool:
        return self._min_rows > 0

    def start(self) -> None:
        self._started_at = self._clock()

    def may_start(self, rows: int) -> bool:
        """Whether a batch of so many rows may start."""
        passed = self._clock() - self._started_at
        return passed >= self._interval and (rows >= self._min_rows or passed >= self._max_delay)

    def remaining(self) -> float:
        """Seconds until a batch that may not start now may start without further rows."""
        passed = self._clock() - self._started_at
        return max(0.0, (self._interval if passed < self._interval else self._max_delay) - passed)
