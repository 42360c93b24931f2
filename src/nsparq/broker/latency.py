"""End-to-end latency percentiles: how long after its publication a message was finished.

Values are counted in buckets that grow by two per cent, so any percentile is exact within one per
cent, whatever the distribution. Two half windows are kept; the older one is dropped when its time
is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil, exp, log
from typing import Any

_GROWTH = log(1.02)


class Latency:
    """The estimator of one channel. Times in nanoseconds."""

    def __init__(self, percentiles: tuple[float, ...], window_s: float, now_ns: int) -> None:
        self.percentiles = percentiles
        self._half_ns = int(window_s * 1e9 / 2)
        self._rotate_at = now_ns + self._half_ns
        self._current: Counter[int] = Counter()
        self._previous: Counter[int] = Counter()

    def record(self, latency_ns: int, now_ns: int) -> None:
        self._rotate(now_ns)
        self._current[ceil(log(max(latency_ns, 1)) / _GROWTH)] += 1

    def buckets(self, now_ns: int) -> Counter[int]:
        self._rotate(now_ns)
        return self._current + self._previous

    def _rotate(self, now_ns: int) -> None:
        late_ns = now_ns - self._rotate_at
        if late_ns >= self._half_ns:
            # No value for more than half a window: both halves are old.
            self._previous, self._current = Counter(), Counter()
            self._rotate_at = now_ns + self._half_ns
        elif late_ns >= 0:
            self._previous, self._current = self._current, Counter()
            self._rotate_at += self._half_ns


def summarize(percentiles: tuple[float, ...], parts: Iterable[Counter[int]]) -> dict[str, Any]:
    """The merge of several estimators in the shape of NSQ's stats."""
    if not percentiles:
        return {"count": 0, "percentiles": None}
    merged: Counter[int] = Counter()
    for part in parts:
        merged.update(part)
    total = merged.total()
    values = [
        {"quantile": quantile, "value": _value_at(merged, quantile * total)} for quantile in percentiles
    ]
    return {"count": total, "percentiles": values}


def _value_at(buckets: Counter[int], rank: float) -> int:
    seen = 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= rank:
            return round(exp((bucket - 0.5) * _GROWTH))
    return 0
