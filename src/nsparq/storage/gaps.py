"""Sequence numbers that hold no message: skipped by a restart, emptied, or lost to a bad disk."""

from __future__ import annotations


class Gaps:
    """Disjoint half-open ranges in order. There are few of them, so plain lists do."""

    def __init__(self, ranges: list[tuple[int, int]] | None = None) -> None:
        self.ranges: list[tuple[int, int]] = ranges or []

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        merged = []
        for low, high in self.ranges:
            if high < start or low > end:
                merged.append((low, high))
            else:
                start, end = min(start, low), max(end, high)
        merged.append((start, end))
        self.ranges = sorted(merged)

    def drop_before(self, sequence: int) -> None:
        if self.ranges and self.ranges[0][1] <= sequence:
            self.ranges = [gap for gap in self.ranges if gap[1] > sequence]

    def count(self, start: int, end: int) -> int:
        """How many numbers of the range hold no message."""
        return sum(max(0, min(high, end) - max(low, start)) for low, high in self.ranges)

    def back(self, end: int, count: int) -> int:
        """The number from which on there are `count` messages before `end`."""
        for low, high in reversed(self.ranges):
            if low < end:
                if end - high >= count:
                    break
                count -= max(0, end - high)
                end = low
        return end - count

    def skip(self, sequence: int) -> int:
        """`sequence`, or the end of the gap it lies in."""
        for low, high in self.ranges:
            if low <= sequence < high:
                return high
        return sequence
