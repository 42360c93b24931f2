"""The log of a topic on disk: segments, and the newest batches also in memory.

Three positions, always in this order: committed (fsynced) <= stable (written) <= end (appended).
With durability `memory`, `stable` is lower than `end`: batches are written when they leave memory
and at a clean stop.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from nsparq.errors import CorruptBatch, WriteFailed
from nsparq.packed import PackedBodies
from nsparq.storage.archived import SegmentSource
from nsparq.storage.batch import Batch, BatchCache, encode_head, encode_tail
from nsparq.storage.batch_list import BatchList
from nsparq.storage.doubtful import replace_by_copy, sync_each
from nsparq.storage.files import Buffer, Files
from nsparq.storage.gaps import Gaps
from nsparq.storage.log import Durability, Group, LogPositions, LogSettings, check_reach
from nsparq.storage.log_range import LogRange, Lost, TimeSearch, locate_in_memory
from nsparq.storage.log_sync import Sync, SyncState
from nsparq.storage.segment import Segment
from nsparq.storage.segment_list import SegmentList, write_index

logger = logging.getLogger(__name__)


class DiskLog:
    """One topic's messages on disk. Not thread safe; only Sync.run() may run in a thread.

    With the methods of `Log`, which are documented there, it has more than 30.
    """

    def __init__(
        self,
        files: Files,
        directory: Path,
        cache: BatchCache,
        settings: LogSettings,
        *,
        floor: int,
        mark: int = 0,
        source: SegmentSource | None = None,
    ) -> None:
        """`floor`: first sequence number if the disk names none. `mark`: see batch.mark_of.
        `source`: the segments that are only in an archive; None without an archive."""
        self.directory = directory
        self.settings = settings
        self.gaps = Gaps()
        self.lost = Gaps()
        self.corrupt_batches = 0
        self.corrupt_messages = 0
        self.end = floor
        self.stable = floor
        """End of the messages that were written to a file."""
        self.memory_start = floor
        self.unsynced = 0
        self.low = floor
        """No reader needs messages before this."""
        self.reader_low: Callable[[], int] = lambda: self.low
        """The current low. Asked in memory mode before writing messages that nobody may need."""
        self.on_lost: Callable[[int, int], None] = lambda start, end: None
        """Called with a half-open range of sequence numbers that turn out to be lost to damage."""
        self._files = files
        self._cache = cache
        self._batches = BatchList()
        """Batches in memory: all from `memory_start` on, and some that were read back from disk."""
        self._sync = SyncState(files, directory, floor)
        self.segments = SegmentList(files, directory, mark, source)
        self._dropped_before = floor
        """Messages before this are gone from the disk, though memory may still have some."""

    def _check_positions(self) -> None:
        assert self._sync.committed <= self.stable <= self.end
        assert self.memory_start <= self.end

    def begin_at(self, end: int) -> None:
        """The log has been opened, and memory has none of its messages."""
        self.end = self.stable = self._sync.committed = self.memory_start = self._dropped_before = end
        self.low = self.start
        self._check_positions()

    @property
    def start(self) -> int:
        return self.segments[0].base if self.segments else max(self.memory_start, self._dropped_before)

    @property
    def disk_end(self) -> int:
        return self.segments[-1].end if self.segments else 0

    @property
    def size_bytes(self) -> int:
        return self.segments.size_bytes

    # closing

    def close(self) -> None:
        self.persist()
        self._forget_all()

    def persist(self) -> None:
        self._write_out(self.end)
        self.sync_now()
        for segment in self.doubtful:
            try:
                replace_by_copy(segment)
            except OSError as error:
                raise WriteFailed(f"{self.directory.name}: {error}") from error
            segment.copied()
        active = self.segments.active
        if active is not None and not active.has_index:
            write_index(active)
        for segment in self.segments:
            segment.close()

    def discard(self) -> None:
        self._sync.close_descriptors()
        for segment in self.segments:
            segment.close()
        self.segments.clear()
        self._forget_all()

    def release_files(self) -> bool:
        if self.unsynced or self.is_syncing:
            return False
        for segment in self.segments:
            segment.release()
        return True

    def change_settings(self, settings: LogSettings) -> None:
        """Messages in memory are written first if the new settings want them on disk."""
        if self.settings.durability is Durability.MEMORY is not settings.durability:
            self._write_out(self.end)
        self.settings = settings

    # appending

    def append(self, groups: Sequence[Group], now_ns: int, tag: int = 0) -> list[Batch]:
        batches = []
        base = self.end
        for bodies, due_ns in groups:
            packed = bodies if type(bodies) is PackedBodies else PackedBodies.of(bodies)
            batch = Batch(base, now_ns, due_ns, packed.lengths, packed.data, tag, packed.headers)
            batches.append(batch)
            base = batch.end
        if self.settings.durability is not Durability.MEMORY:
            self._write(batches)
        else:
            # Write what these messages will push out of memory.
            is_full = self._cache.size_bytes > self._cache.limit_bytes
            leaving = self.end if is_full else min(base - self.settings.memory_messages, self.end)
            if leaving > self.stable:
                self._write_out(leaving)
        self.end = base
        for batch in batches:
            self._batches.append(batch)
            self._cache.add(self, batch)
        # Keep the newest messages, up to the queue's size, and always the newest batch.
        while self.end - self.memory_start > self.settings.memory_messages:
            oldest = self._batches.at_or_after(self.memory_start)
            if oldest is None or oldest.end == self.end or not self.forget(oldest):
                break
        assert self._sync.committed <= self.stable <= self.end
        return batches

    def _write(self, batches: list[Batch]) -> None:
        """Write batches to one segment of at most `segment_bytes`, or of one write. Raises
        WriteFailed, with nothing written."""
        buffers: list[Buffer] = []
        places = []
        size = 0
        for batch in batches:
            stamp_ns, data = batch.timestamps_ns, batch.data
            assert isinstance(stamp_ns, int), "only batches read back from disk have several"
            tail = b"" if batch.headers is None else encode_tail(batch.headers)
            mark = self.segments.mark
            head = encode_head(batch.base, stamp_ns, batch.due_ns, batch.lengths, data, batch.tag, mark, tail)
            buffers += (head, data, tail) if tail else (head, data)
            places.append((size, batch.base, batch.end, stamp_ns, batch.due_ns))
            size += len(head) + len(data) + len(tail)
        base, end = batches[0].base, batches[-1].end
        segment = self.segments[-1] if self.segments else None
        try:
            # A gap in the numbers begins a new segment, so that opening a log finds its gaps again.
            if (
                segment is None
                or segment.end != base
                or not segment.is_local
                or (segment.size and segment.size + size > self.settings.segment_bytes)
                or segment.is_doubtful
            ):
                segment = self._begin_segment(base)
            position = segment.size
            try:
                segment.append(buffers, size)
            except OSError as error:
                if error.errno != errno.EFBIG or not position:
                    raise
                # The system allows no larger files (ulimit -f).
                segment, position = self._begin_segment(base), 0
                segment.append(buffers, size)
        except OSError as error:
            raise WriteFailed(f"{self.directory.name}: {error.strerror or error}") from error
        for offset, first, following, stamp_ns, due_ns in places:
            segment.note(position + offset, first, following, stamp_ns, due_ns)
        self.unsynced += end - base
        self.stable = end

    def _begin_segment(self, base: int) -> Segment:
        """Seal the active segment, and begin another."""
        active = self.segments.active
        if active is not None and active.size:
            active.cut_failed_write()
            write_index(active)
            self._sync.add_sealed(active)
        elif active is not None:
            self.segments.pop().remove()
        self.segments.append(self.segments.new(base))
        return self.segments[-1]

    def _write_out(self, end: int) -> None:
        """Memory mode: write batches that begin before `end`. Batches that nobody needs any more
        are not written: they are gone from now on, so that nobody goes back to them."""
        settings = self.settings
        keeps_all = settings.retention_s or settings.retention_bytes or settings.is_archived
        low = -1 if keeps_all else self.reader_low()
        for batch in self._batches.since(max(self.stable, self.memory_start)):
            if batch.base >= end:
                break
            if batch.end > low:
                self._write([batch])
            elif self.segments:
                self.gaps.add(batch.base, batch.end)
            else:
                self._dropped_before = batch.end
            self.stable = batch.end

    # memory

    def forget(self, batch: Batch) -> bool:
        """Drop a batch from memory, and all before it if it is one of the newest. Writes them first
        if they are not on disk. False if the disk refuses: then they stay."""
        if batch.end > self.stable:
            try:
                self._write_out(batch.end)
            except WriteFailed as error:
                logger.error("keeping messages in memory: %s", error)
                return False
        if batch.base < self.memory_start:
            self._drop(batch)
            return True
        while self.memory_start < batch.end:
            oldest = self._batches.at_or_after(self.memory_start)
            assert oldest is not None and oldest.base == self.memory_start
            self.memory_start = oldest.end
            self._drop(oldest)
        return True

    def _drop(self, batch: Batch) -> None:
        self._batches.remove(batch)
        self._cache.remove(batch)

    def _forget_all(self) -> None:
        self.stable = self.memory_start = self.end
        for batch in [*self._batches]:
            self._drop(batch)

    def hold(self, size_bytes: int) -> None:
        """Only the memory of ephemeral topics is counted."""

    # reading

    def read(self, sequence: int, *, wait: bool = False) -> Batch | None:
        batch = self._batches.at_or_after(sequence)
        if sequence >= self.memory_start:
            return batch
        if batch is not None and batch.base <= sequence:
            self._cache.use(batch)
            return batch
        return self._read_disk(sequence, wait)

    def _read_disk(self, sequence: int, wait: bool) -> Batch | None:
        known = self.segments.recall(sequence)
        while True:
            segment = known[0] if known else self.segments.find(sequence)
            if segment is None:
                return self._batches.at_or_after(sequence)
            place = (known[1], sequence) if known else segment.place_before(sequence)
            known = None
            if not segment.is_local:
                self.segments.prefetch_after(segment)
            try:
                found = segment.read(place, sequence, wait=wait)
            except CorruptBatch as error:
                self.corrupt_batches += 1
                logger.error("%s; its messages are lost, reading continues after it", error)
                continue
            following = segment.end if found is None else found[0].base
            if following > sequence:
                self._note_gap(sequence, following, segment)
            if found is None:
                sequence = segment.end
                continue
            batch, position = found
            self.segments.remember(batch.end, segment, position)
            if self._batches.add(batch):
                self._cache.add(self, batch)
            return batch

    def _note_gap(self, start: int, end: int, segment: Segment) -> None:
        """Note missing numbers. Inside a segment none is left out on purpose: those are lost."""
        inside = max(start, segment.base)
        self.corrupt_messages += self.gaps.count_messages(inside, end)
        self.gaps.add(start, end)
        self.on_lost(start, end)

    def count(self, start: int, end: int) -> int:
        return self.gaps.count_messages(start, end)

    def deferred_since(self, sequence: int, due_after: int = 0) -> list[tuple[int, int]]:
        found = self.segments.deferred_since(sequence, due_after)
        unwritten = self._batches.since(max(sequence, self.stable))
        found += [(batch.base, batch.due_ns) for batch in unwritten if batch.due_ns > due_after]
        if self.gaps.ranges:
            found = [pair for pair in found if self.gaps.skip(pair[0]) == pair[0]]
        return found

    # ranges

    def positions(self) -> LogPositions:
        start = self.start
        stored = [segment for segment in self.segments if segment.size]
        kept = next(self._batches.since(max(start, self.memory_start)), None)
        first_ns = stored[0].first_ns if stored else kept.timestamp_of(0) if kept is not None else 0
        last_ns = self._batches[-1].timestamp_of(0) if kept is not None else 0
        last_ns = max([last_ns, *(segment.last_ns for segment in stored[:1] + stored[-1:])])
        return LogPositions(start, self.end, first_ns, last_ns, sum(segment.size for segment in stored))

    def locate(self, sequence: int, max_bytes: int) -> LogRange:
        """Takes the same time whatever the range holds. On disk a range begins and ends at entries
        of the index, about every 64 KiB, and is at least that long."""
        check_reach(self, sequence)
        wanted = min(self.gaps.skip(sequence), self.end)
        known = self.segments.recall(wanted)
        if known is not None and known[1] < known[0].size:
            return self._finish_range(known[0], known[0].locate(wanted, max_bytes, known[1]))
        segment = self.segments.find(wanted)
        if segment is not None:
            return self._finish_range(segment, segment.locate(wanted, max_bytes))
        found = locate_in_memory(self._batches, wanted, max_bytes, self.gaps)
        return found or LogRange(self.end, self.end, 0)

    def _finish_range(self, segment: Segment, found: LogRange) -> LogRange:
        if not segment.is_local:
            self.segments.prefetch_after(segment)
        end = found.position + found.size
        if end == segment.size:
            # A reader that follows the log comes back for what is appended after this range.
            self.segments.remember(found.next, segment, end)
        gaps = self.gaps.inside(found.first, found.next)
        return replace(found, gaps=gaps) if gaps else found

    def note_lost(self, found: LogRange, lost: Sequence[Lost]) -> None:
        reader = found.reader
        for segment in self.segments:
            is_same = reader is not None and segment.path == reader.path and not reader.is_replaced
            for damage in lost if is_same else ():
                self.corrupt_batches += segment.note_damage(damage.position, damage.end)
                self._note_gap(damage.first, damage.next, segment)

    def search_time(self, timestamp_ns: int) -> TimeSearch:
        """Exact even if the clock was set back: all messages before have earlier publish times."""
        for segment in self.segments:
            if segment.last_ns >= timestamp_ns and segment.end > segment.base:
                found = self._finish_range(segment, segment.locate_time(timestamp_ns))
                return TimeSearch(timestamp_ns, found.next, found)
        for batch in self._batches.since(max(self.start, self.stable)):
            if batch.timestamp_of(0) >= timestamp_ns:
                return TimeSearch(timestamp_ns, batch.base)
        return TimeSearch(timestamp_ns, self.end)

    # syncing

    @property
    def committed(self) -> int:
        return self._sync.committed

    @property
    def is_syncing(self) -> bool:
        return self._sync.is_running

    @property
    def doubtful(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.is_doubtful]

    def begin_sync(self) -> Sync:
        is_awaited = self.settings.durability is Durability.FSYNC
        sync = self._sync.begin(self.segments.active, self.stable, self.unsynced, is_awaited=is_awaited)
        self.unsynced = 0
        return sync

    def end_sync(self, sync: Sync) -> None:
        if not self._sync.end(sync):
            self.unsynced += max(sync.count, 1)
        self._check_positions()

    def sync_now(self) -> None:
        """Sync everything that was written, and wait for it. Raises WriteFailed."""
        if self.unsynced or self._sync.is_needed(self.stable):
            sync = self.begin_sync()
            sync.run()
            self.end_sync(sync)
            error = sync.error or sync.obstacle
            if error is not None:
                raise WriteFailed(f"{self.directory.name}: {error}") from error

    def sync_since(self, sequence: int) -> None:
        sync_each(segment for segment in self.segments if segment.is_local and segment.end > sequence)

    # removing

    def sealed_segments(self) -> list[Segment]:
        return self.segments[:-1]

    @property
    def archived_end(self) -> int:
        return max((segment.end for segment in self.segments if not segment.is_local), default=self.start)

    @property
    def has_aging_segments(self) -> bool:
        # An archive also has objects that are removed at an age.
        is_aging = self.settings.retention_s or self.settings.is_archived
        return bool(is_aging and len(self.segments) > 1)

    def trim(self, low: int, now_s: float, start_low: int = sys.maxsize) -> list[Segment]:
        self.low = low
        dropped = self.segments.trim(low, now_s, self.settings, start_low)
        gone = [segment for segment in dropped if not segment.keeps_index]
        if gone:
            self._dropped_before = gone[-1].end
            self.gaps.drop_before(min(low, self.start))
        return dropped
