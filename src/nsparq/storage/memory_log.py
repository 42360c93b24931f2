"""The log of an ephemeral topic: the same sequence numbers as on disk, but in memory alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nsparq.packed import PackedBodies
from nsparq.storage.batch import Batch
from nsparq.storage.batch_list import BatchList
from nsparq.storage.gaps import Gaps
from nsparq.storage.log import Group, LogPositions, LogSettings, check_reach
from nsparq.storage.log_range import LogRange, Lost, TimeSearch, locate_in_memory
from nsparq.storage.log_sync import Sync
from nsparq.storage.segment import Segment


class EphemeralMemory:
    """Bytes of all ephemeral topics: their logs, and what their channels carried over."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.latest: MemoryLog | None = None
        """The log that was appended to last. Its newest batch stays, however large it is."""


class MemoryLog:
    """Batches in memory until every channel is past them. See `Log` for the methods of both logs.

    The topic limits the number of messages and the bytes.
    """

    def __init__(self, *, floor: int, memory: EphemeralMemory | None = None) -> None:
        """`floor` is the first sequence number."""
        self.memory = memory or EphemeralMemory(sys.maxsize)
        self.held_bytes = 0
        """Memory of the batches, and of the messages that channels carried over from this log."""
        self.end = floor
        self.gaps = Gaps()
        self.lost = Gaps()
        self._batches = BatchList()

    @property
    def start(self) -> int:
        return self._batches[0].base if self._batches else self.end

    @property
    def memory_start(self) -> int:
        return self.start

    # messages

    def append(self, groups: Sequence[Group], now_ns: int, tag: int = 0) -> list[Batch]:
        batches = []
        for bodies, due_ns in groups:
            packed = PackedBodies.of(bodies)
            batch = Batch(self.end, now_ns, due_ns, packed.lengths, packed.data, tag, packed.headers)
            self._batches.append(batch)
            self.end = batch.end
            batches.append(batch)
        self.hold(sum([batch.size for batch in batches]))
        self.memory.latest = self
        return batches

    def hold(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        self.memory.size_bytes += size_bytes
        assert self.held_bytes >= 0
        assert self.memory.size_bytes >= self.held_bytes

    def read(self, sequence: int, *, wait: bool = False) -> Batch | None:
        return self._batches.at_or_after(sequence)

    def count(self, start: int, end: int) -> int:
        return self.gaps.count_messages(start, end)

    def deferred_since(self, sequence: int, due_after: int = 0) -> list[tuple[int, int]]:
        return [
            (batch.base, batch.due_ns)
            for batch in self._batches.since(sequence)
            if batch.due_ns > due_after and self.gaps.skip(batch.base) == batch.base
        ]

    def positions(self) -> LogPositions:
        if not self._batches:
            return LogPositions(self.start, self.end, 0, 0)
        first_ns, last_ns = self._batches[0].timestamp_of(0), self._batches[-1].timestamp_of(0)
        return LogPositions(self.start, self.end, first_ns, last_ns)

    def locate(self, sequence: int, max_bytes: int) -> LogRange:
        check_reach(self, sequence)
        found = locate_in_memory(self._batches, self.gaps.skip(sequence), max_bytes, self.gaps)
        return found or LogRange(self.end, self.end, 0)

    def search_time(self, timestamp_ns: int) -> TimeSearch:
        found = (batch.base for batch in self._batches if batch.timestamp_of(0) >= timestamp_ns)
        return TimeSearch(timestamp_ns, next(found, self.end))

    # removing

    @property
    def archived_end(self) -> int:
        return self.start

    def trim(self, low: int, now_s: float = 0, start_low: int = 0) -> list[Segment]:
        self.hold(-sum([batch.size for batch in self._batches.pop_before(low)]))
        self.gaps.drop_before(low)
        return []

    def discard_oldest(self, start: int, limit: int) -> int:
        """Drop whole batches from `start` on, until at most `limit` messages or one batch are left
        after it. Gives the number of dropped messages."""
        dropped = 0
        while self.count(start, self.end) > limit:
            batch = next(self._batches.since(start), None)
            if batch is None or batch is self._batches[-1]:
                break
            self._batches.remove(batch)
            self.hold(-batch.size)
            self.gaps.add(batch.base, batch.end)
            dropped += batch.count
        return dropped

    def end_of_oldest(self, size_bytes: int) -> int:
        """End of the oldest batches that take `size_bytes`, or of all that may be dropped."""
        end = self.start
        batches = [*self._batches]
        for batch in batches[:-1] if self.memory.latest is self else batches:
            if size_bytes <= 0:
                break
            size_bytes -= batch.size
            end = batch.end
        return end

    def discard(self) -> None:
        self._batches.clear()
        self.hold(-self.held_bytes)
        if self.memory.latest is self:
            self.memory.latest = None

    # nothing is on disk

    disk_end = size_bytes = corrupt_batches = corrupt_messages = unsynced = 0
    is_syncing = has_aging_segments = False
    doubtful: Sequence[Segment] = ()

    @property
    def committed(self) -> int:
        return self.end

    def sealed_segments(self) -> list[Segment]:
        return []

    def begin_sync(self) -> None:
        return None

    def end_sync(self, sync: Sync) -> None: ...

    def sync_since(self, sequence: int) -> None: ...

    def note_lost(self, found: LogRange, lost: Sequence[Lost]) -> None: ...

    def persist(self) -> None: ...

    def close(self) -> None: ...

    def release_files(self) -> bool:
        return True

    def change_settings(self, settings: LogSettings) -> None: ...
