"""The log of an ephemeral topic: the same line of sequence numbers, nothing on disk."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence

from nsparq.packed import PackedBodies
from nsparq.storage.batch import Batch
from nsparq.storage.gaps import Gaps
from nsparq.storage.log_range import (
    LogPositions,
    LogRange,
    Lost,
    OffsetAhead,
    OffsetGone,
    TimeSearch,
    memory_range,
)


class EphemeralMemory:
    """Counts the bytes of all ephemeral topics: their logs, and what their channels have carried over."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.latest: MemoryLog | None = None
        """The log that was appended to last. Its newest batch stays, however large it is."""


class MemoryLog:
    """Batches in memory, held until every channel is past them. The topic bounds their number and bytes."""

    corrupt_batches = 0
    corrupt_messages = 0
    size_bytes = 0
    disk_end = 0

    def __init__(self, *, floor: int, memory: EphemeralMemory | None = None) -> None:
        self.memory = memory or EphemeralMemory(sys.maxsize)
        self.held_bytes = 0
        """Memory of its batches, and of the messages that channels have carried over from it."""
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
        self.hold(sum([batch.size for batch in batches]))
        self.memory.latest = self
        return batches

    def hold(self, size_bytes: int) -> None:
        """Count bytes that are in memory from now on; negative ones that no longer are."""
        self.held_bytes += size_bytes
        self.memory.size_bytes += size_bytes

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

    def locate(self, sequence: int, max_bytes: int) -> LogRange:
        """As in Log, from memory."""
        if sequence < self.start:
            raise OffsetGone(sequence, self.start)
        if sequence > self.end:
            raise OffsetAhead(sequence, self.end)
        wanted = self.gaps.skip(sequence)
        entry = max(0, bisect_right(self._bases, wanted) - 1)
        following = (self._batches[self._bases[i]] for i in range(entry, len(self._bases)))
        found = memory_range((b for b in following if b.end > wanted), max_bytes, self.gaps.ranges)
        return found or LogRange(self.end, self.end, 0)

    def search_time(self, timestamp_ns: int) -> TimeSearch:
        """As in Log."""
        batches = (self._batches[base] for base in self._bases)
        found = (batch.base for batch in batches if batch.timestamp_of(0) >= timestamp_ns)
        return TimeSearch(timestamp_ns, next(found, self.end))

    def sequence_at(self, timestamp_ns: int) -> int:
        return self.search_time(timestamp_ns).run()

    def note_lost(self, found: LogRange, lost: Sequence[Lost]) -> None:
        """Memory loses nothing."""

    def count(self, start: int, end: int) -> int:
        return max(0, end - start - self.gaps.count(start, end))

    def discard_oldest(self, start: int, limit: int) -> int:
        """Drop whole batches from `start` on until no more than `limit` messages follow it, or one batch."""
        dropped = 0
        entry = bisect_right(self._bases, start - 1)
        while entry + 1 < len(self._bases) and self.count(start, self.end) > limit:
            batch = self._batches.pop(self._bases.pop(entry))
            self.hold(-batch.size)
            self.gaps.add(batch.base, batch.end)
            dropped += batch.count
        return dropped

    def end_of_oldest(self, size_bytes: int) -> int:
        """Where the oldest batches end that take `size_bytes`, or all but the one that has to stay."""
        end = self.start
        for base in self._bases[:-1] if self.memory.latest is self else self._bases:
            if size_bytes <= 0:
                break
            size_bytes -= self._batches[base].size
            end = self._batches[base].end
        return end

    def trim(self, low: int) -> None:
        """Let go of the batches before `low`."""
        keep = freed = 0
        while keep < len(self._bases) and self._batches[self._bases[keep]].end <= low:
            freed += self._batches.pop(self._bases[keep]).size
            keep += 1
        del self._bases[:keep]
        self.hold(-freed)
        self.gaps.drop_before(low)

    def delete(self) -> None:
        """Let go of everything, with what channels have carried over."""
        self._bases.clear()
        self._batches.clear()
        self.hold(-self.held_bytes)
        if self.memory.latest is self:
            self.memory.latest = None
