"""The log of an ephemeral topic: the same line of sequence numbers, nothing on disk."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from nsparq.packed import PackedBodies
from nsparq.storage.batch import Batch
from nsparq.storage.gaps import Gaps
from nsparq.storage.ranges import LogPositions, Lost, OffsetAhead, OffsetGone, Range, TimeSearch, memory_range


class MemoryLog:
    """Batches in memory, held until every channel is past them. Channels bound how far behind they fall."""

    corrupt_batches = 0
    corrupt_messages = 0
    size_bytes = 0
    disk_end = 0

    def __init__(self, *, floor: int) -> None:
        self.end = floor
        self.gaps = Gaps()
        self.lost = Gaps()
        self._bases: list[int] = []
        self._batches: dict[int, Batch] = {}

    @property
    def start(self) -> int:
        return self._bases[0] if self._bases else self.end

    @property
    def memory_start(self) -> int:
        return self.start

    def append(self, groups: Sequence[tuple[Sequence[bytes], int]], now_ns: int, tag: int = 0) -> list[Batch]:
        batches = []
        for bodies, due_ns in groups:
            packed = PackedBodies.of(bodies)
            batch = Batch(self.end, now_ns, due_ns, packed.lengths, packed.data, tag)
            self._bases.append(batch.base)
            self._batches[batch.base] = batch
            self.end = batch.end
            batches.append(batch)
        return batches

    def read(self, sequence: int, *, wait: bool = False) -> Batch | None:
        entry = bisect_right(self._bases, sequence) - 1
        if entry >= 0 and sequence < self._batches[self._bases[entry]].end:
            return self._batches[self._bases[entry]]
        return self._batches[self._bases[entry + 1]] if entry + 1 < len(self._bases) else None

    def deferred_since(self, sequence: int, due_after: int = 0) -> list[tuple[int, int]]:
        return [
            (batch.base, batch.due_ns)
            for batch in self._batches.values()
            if batch.due_ns > due_after
            and batch.base >= sequence
            and self.gaps.skip(batch.base) == batch.base
        ]

    def positions(self) -> LogPositions:
        if not self._bases:
            return LogPositions(self.start, self.end, 0, 0)
        first, last = self._batches[self._bases[0]], self._batches[self._bases[-1]]
        return LogPositions(self.start, self.end, first.timestamp_of(0), last.timestamp_of(0))

    def locate(self, sequence: int, max_bytes: int) -> Range:
        """As in Log, from memory."""
        if sequence < self.start:
            raise OffsetGone(sequence, self.start)
        if sequence > self.end:
            raise OffsetAhead(sequence, self.end)
        wanted = self.gaps.skip(sequence)
        entry = max(0, bisect_right(self._bases, wanted) - 1)
        following = (self._batches[self._bases[i]] for i in range(entry, len(self._bases)))
        found = memory_range((b for b in following if b.end > wanted), max_bytes, self.gaps.ranges)
        return found or Range(self.end, self.end, 0)

    def search_time(self, timestamp_ns: int) -> TimeSearch:
        """As in Log."""
        batches = (self._batches[base] for base in self._bases)
        found = (batch.base for batch in batches if batch.timestamp_of(0) >= timestamp_ns)
        return TimeSearch(timestamp_ns, next(found, self.end))

    def sequence_at(self, timestamp_ns: int) -> int:
        return self.search_time(timestamp_ns).run()

    def note_lost(self, found: Range, lost: Sequence[Lost]) -> None:
        """Memory loses nothing."""

    def count(self, start: int, end: int) -> int:
        return max(0, end - start - self.gaps.count(start, end))

    def discard_oldest(self, start: int, limit: int) -> int:
        """Drop whole batches from `start` on until no more than `limit` messages follow it, or one batch."""
        dropped = 0
        entry = bisect_right(self._bases, start - 1)
        while entry + 1 < len(self._bases) and self.count(start, self.end) > limit:
            batch = self._batches.pop(self._bases.pop(entry))
            self.gaps.add(batch.base, batch.end)
            dropped += batch.count
        return dropped

    def trim(self, low: int) -> None:
        keep = 0
        while keep < len(self._bases) and self._batches[self._bases[keep]].end <= low:
            del self._batches[self._bases[keep]]
            keep += 1
        del self._bases[:keep]
        self.gaps.drop_before(low)
