"""When the next micro-batch may begin: with enough rows, or after enough time. Both modes ask here."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from nsparq.spark.options import NsqOptions

__all__ = ["Hold"]


class Hold:
    """Holds micro-batches back. The first one of a run is not held back."""

    def __init__(
        self, min_rows: int, max_delay: float, clock: Callable[[], float], interval: float = 0.0
    ) -> None:
        """A batch begins `interval` seconds after the last one if it has `min_rows` then, as soon as it has
        them later, and after `max_delay` seconds with fewer."""
        self._min_rows, self._max_delay, self._interval = min_rows, max_delay, interval
        self._clock = clock
        self._begun = -inf
        """When the last batch did."""

    @classmethod
    def of(cls, options: NsqOptions, clock: Callable[[], float], interval: float = 0.0) -> Hold:
        return cls(options.min_rows_per_trigger or 0, options.max_trigger_delay, clock, interval)

    @property
    def counts_rows(self) -> bool:
        return self._min_rows > 0

    def begin(self) -> None:
        """A batch begins now."""
        self._begun = self._clock()

    def is_over(self, rows: int) -> bool:
        """Whether a batch that would have so many rows may begin."""
        passed = self._clock() - self._begun
        return passed >= self._interval and (rows >= self._min_rows or passed >= self._max_delay)

    def remaining(self) -> float:
        """Seconds until the next time at which a batch may begin that may not now."""
        passed = self._clock() - self._begun
        return max(0.0, (self._interval if passed < self._interval else self._max_delay) - passed)
