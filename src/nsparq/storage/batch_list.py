"""The batches of one log in memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter

from nsparq.storage.batch import Batch

_base_of = attrgetter("base")


class BatchList(list[Batch]):
    """In the order of their sequence numbers. Numbers between two batches may be missing."""

    def add(self, batch: Batch) -> bool:
        """Add a batch that was read back from disk. False if another begins with its number."""
        index = bisect_left(self, batch.base, key=_base_of)
        if index < len(self) and self[index].base == batch.base:
            return False
        self.insert(index, batch)
        return True

    def remove(self, batch: Batch) -> None:
        del self[bisect_left(self, batch.base, key=_base_of)]

    def pop_before(self, sequence: int) -> list[Batch]:
        """Remove the oldest batches, as far as they end at `sequence` or before."""
        number = 0
        while number < len(self) and self[number].end <= sequence:
            number += 1
        popped = self[:number]
        del self[:number]
        return popped

    def at_or_after(self, sequence: int) -> Batch | None:
        """The batch that holds `sequence`, or else the first one after it."""
        index = bisect_right(self, sequence, key=_base_of)
        if index and sequence < self[index - 1].end:
            return self[index - 1]
        return self[index] if index < len(self) else None

    def since(self, base: int) -> Iterator[Batch]:
        """The batches that begin at `base` or later."""
        return (self[index] for index in range(bisect_left(self, base, key=_base_of), len(self)))
