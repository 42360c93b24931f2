"""Sequence numbers without a message: skipped by a restart, emptied, or lost to damage."""

from __future__ import annotations


class Gaps:
    """Disjoint half-open ranges in order. There are few of them, so plain lists are fast enough."""

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
        """Number of sequence numbers in a range that have no message."""
        return sum(max(0, min(high, end) - max(low, start)) for low, high in self.ranges)

    def count_messages(self, start: int, end: int) -> int:
        """Number of sequence numbers in a range that have a message."""
        if start >= end:
            return 0
        return end - start - self.count(start, end) if self.ranges else end - start

    def inside(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """The parts of the gaps that lie between two sequence numbers."""
        return tuple(
            (max(low, start), min(high, end)) for low, high in self.ranges if low < end and high > start
        )

    def back(self, end: int, count: int) -> int:
        """The sequence number with `count` messages between it and `end`."""
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
