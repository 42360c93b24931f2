"""Batches in memory, found by sequence number."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from nsparq.storage.batch import Batch
from nsparq.storage.gaps import Gaps
from nsparq.storage.log_range import LogRange, range_in_memory


class BatchList:
    """Batches in the order of their sequence numbers. Numbers between two batches may be
    missing."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._batches: dict[int, Batch] = {}

    def __len__(self) -> int:
        return len(self._bases)

    def __iter__(self) -> Iterator[Batch]:
        return map(self._batches.__getitem__, self._bases)

    def __getitem__(self, index: int) -> Batch:
        return self._batches[self._bases[index]]

    def __contains__(self, batch: Batch) -> bool:
        return batch.base in self._batches

    def append(self, batch: Batch) -> None:
        """Add the newest batch."""
        self._bases.append(batch.base)
        self._batches[batch.base] = batch

    def insert(self, batch: Batch) -> None:
        insort(self._bases, batch.base)
        self._batches[batch.base] = batch

    def remove(self, batch: Batch) -> None:
        del self._batches[batch.base]
        del self._bases[bisect_left(self._bases, batch.base)]

    def pop_before(self, sequence: int) -> list[Batch]:
        """Remove the oldest batches, as far as they end at `sequence` or before."""
        popped: list[Batch] = []
        while len(popped) < len(self._bases) and self[len(popped)].end <= sequence:
            popped.append(self[len(popped)])
        del self._bases[: len(popped)]
        for batch in popped:
            del self._batches[batch.base]
        return popped

    def clear(self) -> None:
        self._bases.clear()
        self._batches.clear()

    def at_or_after(self, sequence: int) -> Batch | None:
        """The batch that holds `sequence`, or else the first one after it."""
        bases = self._bases
        entry = bisect_right(bases, sequence)
        if entry:
            batch = self._batches[bases[entry - 1]]
            if sequence < batch.end:
                return batch
        return self._batches[bases[entry]] if entry < len(bases) else None

    def since(self, base: int) -> Iterator[Batch]:
        """The batches that begin at `base` or later."""
        bases = self._bases
        return (self._batches[bases[i]] for i in range(bisect_left(bases, base), len(bases)))

    def locate(self, sequence: int, max_bytes: int, gaps: Gaps) -> LogRange | None:
        """Batches from the one at or after `sequence` on, up to about `max_bytes`."""
        found = self.at_or_after(sequence)
        return None if found is None else range_in_memory(self.since(found.base), max_bytes, gaps)
