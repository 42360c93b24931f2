"""Filters that Spark pushes down to a batch: they decide which logs are read, and which part of
each.

A filter is *settled* if every row that is read passes it. Spark tests the rows with all other
filters, though these may have narrowed the range too.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql import datasource
from pyspark.sql.datasource import Filter

from nsparq.spark.columns import SCHEMA

__all__ = ["CLOCK_SLACK_NS", "Filters"]

CLOCK_SLACK_NS: Final = 300 * 10**9
"""How far nsqd's clock may have been set back. The search for a time assumes that messages are in
the order of their times, which holds while the clock runs evenly."""

_TESTS: Final[dict[str, Callable[[str, Any], bool]]] = {
    "EqualTo": lambda text, value: text == value,
    "EqualNullSafe": lambda text, value: text == value,
    "In": lambda text, value: text in value,
    "StringStartsWith": lambda text, value: text.startswith(value),
    "StringEndsWith": lambda text, value: text.endswith(value),
    "StringContains": lambda text, value: value in text,
}
_BOUNDS: Final[dict[str, tuple[int | None, int | None]]] = {
    "EqualTo": (0, 1),
    "EqualNullSafe": (0, 1),
    "GreaterThan": (1, None),
    "GreaterThanOrEqual": (0, None),
    "LessThan": (None, 0),
    "LessThanOrEqual": (None, 1),
}
"""What to add to the value for the lowest number that passes, and for the one after the highest."""

_NEVER_NULL: Final = frozenset(field.name for field in SCHEMA.fields if not field.nullable)


class Filters:
    """All pushed filters of a read. Holds plain values, since Spark pickles it with the reader."""

    def __init__(self) -> None:
        self._names: list[tuple[str, str, Any, bool]] = []
        """Tests of a topic or a node: column, kind, value, and the required result."""
        self.low, self.high = 0, 1 << 63
        """Offsets that pass: from `low` to before `high`."""
        self.since_us: int | None = None
        self.until_us: int | None = None
        """Times that pass, in microseconds: from `since_us` to before `until_us`."""

    def take(self, given: Filter) -> bool:
        """Apply a filter. Returns whether it is settled."""
        is_negated = isinstance(given, datasource.Not)
        one: Any = given.child if isinstance(given, datasource.Not) else given
        kind = type(one).__name__
        column = one.attribute[0] if len(one.attribute) == 1 else ""
        if kind == "IsNotNull":
            return not is_negated and column in _NEVER_NULL
        value = getattr(one, "value", None)
        if column in ("topic", "node"):
            return self._take_name(column, kind, value, is_negated)
        if is_negated:
            return False
        if column == "offset":
            return self._take_offset(kind, value)
        if column == "timestamp":
            self._take_time(kind, value)
        return False

    def _take_name(self, column: str, kind: str, value: Any, is_negated: bool) -> bool:
        texts = value if kind == "In" else [value]
        # A comparison with null is neither true nor false.
        if kind not in _TESTS or not all(isinstance(text, str) for text in texts):
            return False
        self._names.append((column, kind, value, not is_negated))
        return True

    def _take_offset(self, kind: str, value: Any) -> bool:
        if kind == "In" and value and all(type(one) is int for one in value):
            self._narrow(min(value), max(value) + 1)
            return len(value) == 1
        if kind not in _BOUNDS or type(value) is not int:
            return False
        more_low, more_high = _BOUNDS[kind]
        self._narrow(
            None if more_low is None else value + more_low, None if more_high is None else value + more_high
        )
        return True

    def _narrow(self, low: int | None, high: int | None) -> None:
        self.low = self.low if low is None else max(self.low, low)
        self.high = self.high if high is None else min(self.high, high)

    def _take_time(self, kind: str, value: Any) -> None:
        if kind not in _BOUNDS or not isinstance(value, datetime) or value.tzinfo is None:
            return
        us = (value - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
        more_low, more_high = _BOUNDS[kind]
        if more_low is not None:
            self.since_us = max(us + more_low, self.since_us or 0)
        if more_high is not None:
            until = us + more_high
            self.until_us = until if self.until_us is None else min(until, self.until_us)

    def wants(self, topic: str, node: str) -> bool:
        names = {"topic": topic, "node": node}
        return all(
            _TESTS[kind](names[column], value) is must_be for column, kind, value, must_be in self._names
        )

    def narrowed(self, first: int, last: int, at_time: Callable[[int], int]) -> tuple[int, int]:
        """The part of a range that may pass. `at_time` returns the place of a time in ns."""
        first, last = max(first, self.low), min(last, self.high)
        if first < last and self.since_us is not None:
            first = max(first, at_time(self.since_us * 1000 - CLOCK_SLACK_NS))
        if first < last and self.until_us is not None:
            last = min(last, at_time(self.until_us * 1000 + CLOCK_SLACK_NS))
        return first, max(first, last)
