"""The topic log: segments on disk, the recent batches in memory, one line of sequence numbers.

Three positions, always in this order: committed (fsynced) <= stable (written) <= dirty (appended, `end`).
What a failed fsync was about counts as committed with the next one that works: it is in a `doubtful` segment.
In `memory` mode `stable` trails behind: batches are written when they leave memory and at a clean stop.
"""

from __future__ import annotations

import errno
import logging
import re
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from nsparq.errors import CorruptBatch, WriteFailed
from nsparq.packed import PackedBodies
from nsparq.storage.batch import Batch, decode_head, encode_head
from nsparq.storage.cache import BatchCache
from nsparq.storage.files import Buffer, Files
from nsparq.storage.gaps import Gaps
from nsparq.storage.log_range import (
    Handle,
    LogPositions,
    LogRange,
    Lost,
    OffsetAhead,
    OffsetGone,
    TimeSearch,
    inside,
    memory_range,
)
from nsparq.storage.segment import COPY_SUFFIX, Segment, Stretch

logger = logging.getLogger(__name__)

EPOCH_BITS = 12
"""A log opened after a crash goes on at the clock's millisecond, shifted by this: its numbers cannot have
been used before, even where the disk has lost the last of them, as long as a topic takes under four million
messages a second. 42 bits of milliseconds last until 2109."""

_SEGMENT_NAME = re.compile(r"[0-9]{20}\.log")
_INDEX_NAME = re.compile(r"[0-9]{20}\.index")

_IDLE_ROLL_SIZE = 8 << 20
"""A segment that all channels have passed is rolled, and so reclaimed, at this size already."""

_TAG_SEARCH_SIZE = 4 << 20

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def read_marks(files: Files, directory: Path) -> list[int]:
    """The marks that the segments of a directory begin with, where they are whole."""
    marks = []
    for name in files.list_directory(directory):
        if _SEGMENT_NAME.fullmatch(name):
            segment = Segment(files, directory, int(name[:-4]))
            marks.append(segment.read_mark())
            segment.close()
    return [mark for mark in marks if mark]


class Durability(Enum):
    OS = "os"
    FSYNC = "fsync"
    MEMORY = "memory"


class LogSettings(NamedTuple):
    """What a log needs to know of the daemon's options."""

    durability: Durability = Durability.OS
    segment_bytes: int = 100 << 20
    memory_messages: int = 10_000
    retention_s: float = 0
    retention_bytes: int = 0


class Log:
    """One topic's messages on disk. Not thread safe; only `Sync.run` may be called elsewhere."""

    def __init__(
        self, files: Files, directory: Path, cache: BatchCache, settings: LogSettings, *, floor: int
    ) -> None:
        """`floor` is the first sequence number to use if none is known from the disk."""
        self.files = files
        self.directory = directory
        self.settings = settings
        self.mark = 0
        """Written into each batch, so that a segment of another log is known; see storage.batch.mark_of."""
        self.gaps = Gaps()
        self.lost = Gaps()
        """Numbers of which open() has found that they had been on disk and are not any more."""
        self.corrupt_batches = 0
        self.corrupt_messages = 0
        self.end = floor
        """Dirty: the next sequence number."""
        self.stable = floor
        self.committed = floor
        self.memory_start = floor
        """From here to the end every message is in memory."""
        self.unsynced = 0
        """Messages written since the last fsync began."""
        self.is_syncing = False
        self.low = floor
        """No reader needs what lies before this."""
        self.reader_low: Callable[[], int] = lambda: self.low
        """Asked in memory mode, before writing out what perhaps nobody needs any more."""
        self.on_lost: Callable[[int, int], None] = lambda start, end: None
        """Told of numbers, from the first to before the second, that turn out to be lost to a bad disk."""
        self._cache = cache
        self._segments: list[Segment] = []
        self._given_up = floor
        """What lies before this is on no disk and gone, though some of it may still be in memory."""
        self._tail: deque[Batch] = deque()
        """The newest batches, without a break up to the end."""
        self._bases: list[int] = []
        """Sequence numbers at which a batch in memory begins, the tail's and those read back, in order."""
        self._memory: dict[int, Batch] = {}
        self._next_position: dict[int, tuple[Segment, int]] = {}
        """Where on disk the batch after one just read begins; bounded."""
        self._closing: list[tuple[int, Segment]] = []
        """Sealed segments not yet synced, with a descriptor each."""
        self.doubtful: list[Segment] = []
        """Segments whose fsync failed. The system may drop what it could not write, and a second fsync of the
        same file succeeds all the same. So nothing more is appended to them, and they have to be copied:
        Segment.copy_anew."""
        self._handles: WeakValueDictionary[Path, Handle] = WeakValueDictionary()
        """Segments that ranges are being read of."""

    # opening and closing

    def open(self, *, clean_end: int, epoch: int, needed: tuple[int, int] = (0, 0)) -> None:
        """Read what is on disk. `clean_end` is where the last clean stop ended, -1 if there was none;
        `epoch` the number from which on nothing can have been used. `needed` are the first number that a
        reader needs and the end of what was on disk, as far as that is known from elsewhere."""
        names = self.files.list_directory(self.directory)
        bases = [int(name[:-4]) for name in names if _SEGMENT_NAME.fullmatch(name)]
        indexed = [int(name[:-6]) for name in names if _INDEX_NAME.fullmatch(name)]
        for name in names:
            if name.endswith(COPY_SUFFIX):
                self.files.unlink(self.directory / name)
        for base in sorted({*bases, *indexed}):
            segment = Segment(self.files, self.directory, base, self.mark)
            if base not in bases:
                self._lose(base, segment.load_index_end(), f"{segment.path} is missing")
                segment.remove()
                continue
            if segment.is_foreign():
                text = f"{segment.path} is another segment, and kept as {segment.set_aside().name}"
                self._lose(base, max(base + 1, segment.load_index_end()), text)
                segment.remove()
                continue
            for _ in segment.open(last=base == max(bases)):
                self.corrupt_batches += 1
            self._lose(segment.end, segment.index_end, f"{segment.path} is shorter than it was")
            if segment.size == 0:
                segment.remove()
                continue
            segment.close()
            if self._segments:
                self.gaps.add(self._segments[-1].end, base)
            self._segments.append(segment)
        low, disk_end = needed
        self._lose(max(low, self.disk_end), disk_end, f"{self.directory}: the log's end is missing")
        if self._segments:
            self.end = self._segments[-1].end
        elif clean_end >= 0:
            self.end = clean_end
        if self.end != clean_end:
            start = max(self.end, clean_end, epoch)
            # Without a segment nothing says where the numbers that were used ended: none of them is left.
            self.gaps.add(self.end if self._segments else 0, start)
            self.end = start
        self.stable = self.committed = self.memory_start = self._given_up = self.end
        self.low = self.start

    def _lose(self, start: int, end: int, reason: str) -> None:
        """Note that numbers are missing that had been on disk; none, if `end` is not beyond `start`."""
        if start >= end:
            return
        count = self.count(start, end)
        self.corrupt_batches += 1
        self.corrupt_messages += count
        self.gaps.add(start, end)
        self.lost.add(start, end)
        logger.error("%s: %d messages are lost", reason, count)

    @property
    def disk_end(self) -> int:
        """The end of what is on disk; 0 if that is nothing."""
        return self._segments[-1].end if self._segments else 0

    def deferred_since(self, sequence: int, due_after: int = 0) -> list[tuple[int, int]]:
        """Sequence number and due time of every deferred message from `sequence` on, in order; of those with
        later due times alone, if asked."""
        found: list[tuple[int, int]] = []
        for segment in self._segments:
            if segment.end > sequence and segment.deferred:
                pairs = np.array(segment.deferred, np.int64).reshape(-1, 2)
                found += map(tuple, pairs[(pairs[:, 0] >= sequence) & (pairs[:, 1] > due_after)].tolist())
        for batch in self._tail:
            if batch.due_ns > due_after and batch.base >= max(sequence, self.stable):
                found.append((batch.base, batch.due_ns))
        if self.gaps.ranges:
            found = [pair for pair in found if self.gaps.skip(pair[0]) == pair[0]]
        return found

    @property
    def start(self) -> int:
        """The oldest sequence number that can still be read."""
        return self._segments[0].base if self._segments else max(self.memory_start, self._given_up)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def close(self) -> None:
        """Persist everything, and let go of it. Raises WriteFailed; it can be tried again then."""
        self.persist()
        self._forget_all()

    def persist(self) -> None:
        """Write what only memory holds, sync, and leave an index that makes the next start quick. Raises
        WriteFailed; it can be tried again then. May be called in a thread if nobody else uses the log."""
        self._write_out(self.end)
        self.sync_now()
        self._copy_doubtful()
        if self._segments and not self._segments[-1].has_index:
            self._write_index(self._segments[-1])
        for segment in self._segments:
            segment.close()

    def delete(self) -> None:
        """Let go of everything; the directory is the caller's to remove."""
        self.close_descriptors()
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self._forget_all()

    def release_files(self) -> bool:
        """Close the files of an idle topic, unless they are being synced; they open again when needed."""
        if self.unsynced or self.is_syncing:
            return False
        for segment in self._segments:
            try:
                segment.settle()
            except OSError as error:
                logger.warning("%s: keeps more room than it needs: %s", segment.path.name, error)
            segment.close()
        return True

    def change_settings(self, settings: LogSettings) -> None:
        """Go by other settings from now on. What memory alone holds is written first if that is no longer to
        be so; raises WriteFailed, with nothing changed."""
        if self.settings.durability is Durability.MEMORY is not settings.durability:
            self._write_out(self.end)
        self.settings = settings

    # appending

    def append(self, groups: Sequence[tuple[Sequence[bytes], int]], now_ns: int, tag: int = 0) -> list[Batch]:
        """Append each group, (bodies, due time or 0), as one batch; all of them or, raising, none."""
        batches = []
        base = self.end
        for bodies, due_ns in groups:
            packed = PackedBodies.of(bodies)
            batch = Batch(base, now_ns, due_ns, packed.lengths, packed.data, tag)
            batches.append(batch)
            base = batch.end
        if self.settings.durability is not Durability.MEMORY:
            self._write(batches)
        else:
            self._make_room(base - self.end)
        self.end = base
        for batch in batches:
            self._bases.append(batch.base)
            self._memory[batch.base] = batch
            self._tail.append(batch)
            self._cache.add(self, batch)
        self._bound_memory()
        return batches

    def _write(self, batches: list[Batch]) -> None:
        buffers: list[Buffer] = []
        places = []
        size = 0
        for batch in batches:
            stamp_ns = batch.timestamp_of(0)
            head = encode_head(
                batch.base, stamp_ns, batch.due_ns, batch.lengths, batch.data, batch.tag, self.mark
            )
            buffers += (head, batch.data)
            places.append((size, batch.base, batch.base + batch.count, stamp_ns, batch.due_ns))
            size += len(head) + len(batch.data)
        try:
            segment = self._segment_for(size, batches[0].base)
            position = segment.size
            try:
                segment.append(buffers, size)
            except OSError as error:
                if error.errno != errno.EFBIG or not position:
                    raise
                # The system allows no larger files (ulimit -f).
                self._seal(segment)
                segment, position = self._begin_segment(batches[0].base), 0
                segment.append(buffers, size)
        except OSError as error:
            raise WriteFailed(f"{self.directory.name}: {error.strerror or error}") from error
        for offset, base, end, stamp_ns, due_ns in places:
            segment.note(position + offset, base, end, stamp_ns, due_ns)
        end = batches[-1].end
        self.unsynced += end - batches[0].base
        self.stable = end

    def _segment_for(self, size: int, base: int) -> Segment:
        if self._segments:
            active = self._segments[-1]
            # A gap in the numbers begins a new segment, so that opening a log finds its gaps again.
            fits = active.size + size <= self.settings.segment_bytes or not active.size
            if active.end == base and fits and active not in self.doubtful:
                return active
            if active.size:
                self._seal(active)
            else:
                self._segments.pop().remove()
        return self._begin_segment(base)

    def _begin_segment(self, base: int) -> Segment:
        segment = Segment(self.files, self.directory, base, self.mark)
        self._segments.append(segment)
        return segment

    def _seal(self, segment: Segment) -> None:
        segment.tidy()
        self._write_index(segment)
        if segment in self.doubtful:
            segment.close()
        else:
            self._closing.append((segment.detach(), segment))

    def _write_index(self, segment: Segment) -> None:
        """Without its index a segment is as good, but slower to open."""
        try:
            segment.write_index()
        except OSError as error:
            logger.warning("%s: has no index, the next start reads all of it: %s", segment.path.name, error)

    # memory

    def _bound_memory(self) -> None:
        """Keep the newest messages, up to the queue's size, and always the newest batch."""
        tail, limit = self._tail, self.settings.memory_messages
        while self.end - self.memory_start > limit and len(tail) > 1:
            if not self.forget(tail[0]):
                break

    def _make_room(self, count: int) -> None:
        """Memory mode: write out what `count` more messages will push out of memory; raises if it cannot."""
        leaving = self.end + count - self.settings.memory_messages
        if self._cache.size_bytes > self._cache.limit_bytes:
            leaving = self.end
        if leaving > self.stable:
            self._write_out(min(leaving, self.end))

    def forget(self, batch: Batch) -> bool:
        """Drop a batch from memory, and those of the tail before it: the tail has no break. Where memory is
        all there is, they go to disk first. False if the disk refuses: then they stay."""
        if batch.end > self.stable:
            try:
                self._write_out(batch.end)
            except WriteFailed as error:
                logger.error("keeping messages in memory: %s", error)
                return False
        if batch.base < self.memory_start:
            self._drop(batch)
            return True
        tail = self._tail
        first = None
        while first is not batch:
            first = tail.popleft()
            self.memory_start = tail[0].base if tail else self.end
            self._drop(first)
        return True

    def _drop(self, batch: Batch) -> None:
        del self._memory[batch.base]
        del self._bases[bisect_right(self._bases, batch.base) - 1]
        self._cache.remove(batch)

    def _write_out(self, end: int) -> None:
        """Memory mode: write batches that begin before `end`, except those that nobody needs any more: they
        are gone from now on, so that nobody comes back to them."""
        settings = self.settings
        low = -1 if settings.retention_s or settings.retention_bytes else self.reader_low()
        for batch in self._tail:
            if batch.base >= end:
                break
            if batch.base >= self.stable:
                if batch.end > low:
                    self._write([batch])
                elif self._segments:
                    self.gaps.add(batch.base, batch.end)
                else:
                    self._given_up = batch.end
                self.stable = batch.end

    def _forget_all(self) -> None:
        self.stable = self.end
        for batch in [*self._memory.values()]:
            self.forget(batch)
        self._tail.clear()

    # reading

    def read(self, sequence: int, *, wait: bool = False) -> Batch | None:
        """The batch that holds `sequence`, or else the first one after it; None at the end.

        Raises Cold when the disk would have to be waited for and `wait` is false. Damaged batches are
        reported, counted, and passed over.
        """
        bases = self._bases
        entry = bisect_right(bases, sequence) - 1
        if entry >= 0:
            batch = self._memory[bases[entry]]
            if sequence < batch.end:
                if batch.base < self.memory_start:
                    self._cache.use(batch)
                return batch
        if sequence >= self.memory_start:
            return self._first_in_memory(sequence)
        return self._read_disk(sequence, wait)

    def _read_disk(self, sequence: int, wait: bool) -> Batch | None:
        known = self._next_position.pop(sequence, None)
        while True:
            if known is not None:
                segment, place = known[0], (known[1], sequence)
                known = None
            else:
                number = bisect_right(self._segments, sequence, key=lambda s: s.base) - 1
                while number < len(self._segments) and (number < 0 or self._segments[number].end <= sequence):
                    number += 1
                if number >= len(self._segments):
                    return self._first_in_memory(sequence)
                segment = self._segments[number]
                place = segment.place_before(sequence)
            try:
                found = segment.read(place, sequence, wait=wait)
            except CorruptBatch as error:
                self.corrupt_batches += 1
                logger.error("%s; its messages are lost, reading goes on behind it", error)
                continue
            following = segment.end if found is None else found[0].base
            if following > sequence:
                self._note_gap(sequence, following, segment)
            if found is None:
                sequence = segment.end
                continue
            batch, behind = found
            self._note_position(batch.end, segment, behind)
            self._remember(batch)
            return batch

    def _note_position(self, sequence: int, segment: Segment, position: int) -> None:
        if len(self._next_position) >= 64:
            self._next_position.clear()
        self._next_position[sequence] = (segment, position)

    def _first_in_memory(self, sequence: int) -> Batch | None:
        entry = bisect_left(self._bases, sequence)
        return self._memory[self._bases[entry]] if entry < len(self._bases) else None

    def _remember(self, batch: Batch) -> None:
        if batch.base not in self._memory:
            insort(self._bases, batch.base)
            self._memory[batch.base] = batch
            self._cache.add(self, batch)

    def _note_gap(self, start: int, end: int, segment: Segment) -> None:
        """Numbers that are not there. Inside a segment none are left out on purpose: those are lost."""
        inside = max(start, segment.base)
        self.corrupt_messages += max(0, end - inside - self.gaps.count(inside, end))
        self.gaps.add(start, end)
        self.on_lost(start, end)

    def count(self, start: int, end: int) -> int:
        """Messages between two sequence numbers."""
        if start >= end:
            return 0
        return end - start - (self.gaps.count(start, end) if self.gaps.ranges else 0)

    # ranges

    def positions(self) -> LogPositions:
        """How far the log reaches, in numbers and in time."""
        start = self.start
        stored = [segment for segment in (self._segments[:1] + self._segments[-1:]) if segment.size]
        kept = next((batch for batch in self._tail if batch.base >= start), None)
        first_ns = stored[0].first_ns if stored else kept.timestamp_of(0) if kept is not None else 0
        last_ns = self._tail[-1].timestamp_of(0) if kept is not None else 0
        return LogPositions(start, self.end, first_ns, max([last_ns, *(s.last_ns for s in stored)]))

    def locate(self, sequence: int, max_bytes: int) -> LogRange:
        """Whole batches from the one with `sequence` on, or a little before it, up to about `max_bytes`.
        Raises OffsetGone or OffsetAhead; at the end the range is empty.

        This costs the same whatever the range holds. It begins and ends where the index knows a batch to
        begin, every 64 KiB or so, and is at least as long as that.
        """
        if sequence < self.start:
            raise OffsetGone(sequence, self.start)
        if sequence > self.end:
            raise OffsetAhead(sequence, self.end)
        wanted = min(self.gaps.skip(sequence), self.end)
        known = self._next_position.get(wanted)
        if known is not None and known[1] < known[0].size:
            return self._range_of(known[0], known[0].stretch(wanted, max_bytes, known[1]))
        number = bisect_right(self._segments, wanted, key=lambda s: s.base) - 1
        while number < len(self._segments) and (number < 0 or self._segments[number].end <= wanted):
            number += 1
        if number < len(self._segments):
            segment = self._segments[number]
            return self._range_of(segment, segment.stretch(wanted, max_bytes))
        entry = max(0, bisect_right(self._bases, wanted) - 1)
        following = (self._memory[self._bases[i]] for i in range(entry, len(self._bases)))
        found = memory_range((b for b in following if b.end > wanted), max_bytes, self.gaps.ranges)
        return found or LogRange(self.end, self.end, 0)

    def _range_of(self, segment: Segment, stretch: Stretch) -> LogRange:
        if stretch.end == segment.size:
            # A reader that follows the log comes back for exactly what is appended behind this.
            self._note_position(stretch.next, segment, stretch.end)
        return LogRange(
            stretch.first,
            stretch.next,
            stretch.end - stretch.position,
            inside(self.gaps.ranges, stretch.first, stretch.next),
            stretch.position,
            self._handle_of(segment),
        )

    def _handle_of(self, segment: Segment) -> Handle:
        handle = self._handles.get(segment.path)
        if handle is None:
            handle = self._handles[segment.path] = Handle(self.files, segment.path)
        return handle

    def note_lost(self, found: LogRange, lost: Sequence[Lost]) -> None:
        """Damage that reading a range has met: reported and counted once, whoever meets it first."""
        for segment in self._segments:
            if found.handle is None or segment.path != found.handle.path:
                continue
            for damage in lost:
                if segment.note_damage(damage.position, damage.end):
                    self.corrupt_batches += 1
                    reason = f"{damage.end - damage.position} bytes unreadable"
                    logger.error("%s", CorruptBatch(segment.path, damage.position, reason))
                self._note_gap(damage.first, damage.next, segment)

    def search_time(self, timestamp_ns: int) -> TimeSearch:
        """A search for the first message in the log published at or after a time. Exact whatever the clock
        did: all messages before the one found were published earlier, by the clock of their time."""
        for segment in self._segments:
            if segment.last_ns >= timestamp_ns and segment.end > segment.base:
                found = self._range_of(segment, segment.stretch_at_time(timestamp_ns))
                return TimeSearch(timestamp_ns, found.next, found)
        first = max(self.start, self.stable)
        for batch in self._tail:
            if batch.base >= first and batch.timestamp_of(0) >= timestamp_ns:
                return TimeSearch(timestamp_ns, batch.base)
        return TimeSearch(timestamp_ns, self.end)

    def sequence_at(self, timestamp_ns: int) -> int:
        """The same at once; may wait for the disk."""
        return self.search_time(timestamp_ns).run()

    def count_tagged(self, tag: int, since: int) -> int:
        """Messages with this tag, from a number on; may wait for the disk."""
        count, sequence = 0, max(since, self.start)
        while sequence < self.end:
            found = self.locate(sequence, _TAG_SEARCH_SIZE)
            data, position = found.read_verified().data, 0
            while (head := decode_head(data, position)) is not None:
                if head.tag == tag and head.base >= since:
                    count += head.count
                position += head.size
            sequence = found.next
        return count

    # syncing

    def begin_sync(self) -> Sync:
        """What must be synced for everything stable to be committed; run() it in a thread."""
        active = self._segments[-1:] if self._segments and self._segments[-1] not in self.doubtful else []
        opened = [(self._descriptor_to_sync(segment), segment) for segment in active]
        opened, self._closing = self._closing + opened, []
        is_awaited = self.settings.durability is Durability.FSYNC
        sync = Sync(self.files, opened, self.directory, self.stable, self.unsynced, is_awaited=is_awaited)
        self.unsynced = 0
        self.is_syncing = True
        return sync

    def _descriptor_to_sync(self, segment: Segment) -> int:
        try:
            return self.files.duplicate(segment.fd)
        except OSError as error:
            if error.errno not in _OUT_OF_DESCRIPTORS:
                raise
            # Its own one, then, which is free when that is done; the file opens again when it is used.
            return segment.detach()

    def end_sync(self, sync: Sync) -> None:
        """Take note of how it went. Segments whose fsync failed are doubtful from now on."""
        self.is_syncing = False
        if sync.error is None and sync.obstacle is None:
            self.committed = max(self.committed, sync.end)
            return
        self.doubtful += (segment for segment in sync.failed if segment in self._segments)
        # What could not be tried is for the next one.
        self.unsynced += max(sync.count, 1)

    def sync_now(self) -> None:
        if self.unsynced or self._closing or self.committed < self.stable:
            sync = self.begin_sync()
            sync.run()
            self.end_sync(sync)
            error = sync.error or sync.obstacle
            if error is not None:
                raise WriteFailed(f"{self.directory.name}: {error}") from error

    def copied(self, segment: Segment) -> None:
        """A doubtful segment has been copied: its file is another one now."""
        self.doubtful.remove(segment)
        segment.close()

    def _copy_doubtful(self) -> None:
        for segment in [*self.doubtful]:
            try:
                segment.copy_anew()
            except OSError as error:
                raise WriteFailed(f"{self.directory.name}: {error}") from error
            self.copied(segment)

    def close_descriptors(self) -> None:
        """Let go of sealed segments that are still to be synced."""
        for fd, _ in self._closing:
            self.files.close(fd)
        self._closing.clear()

    # reclaiming

    def sealed_segments(self) -> list[Segment]:
        """All but the one being written to."""
        return self._segments[:-1]

    def trim(self, low: int, now_s: float) -> list[Segment]:
        """Nothing before `low` is needed by a reader. Takes out of the log, and gives back for removal,
        the segments that retention does not keep."""
        self.low = low
        dropped: list[Segment] = []
        for number, segment in enumerate(self._segments):
            is_active = segment is self._segments[-1]
            if segment.end > low or (is_active and segment.size < _IDLE_ROLL_SIZE):
                break
            if segment in self.doubtful:
                # A copy of it may be under way, and would bring it back.
                break
            if self._is_retained(number, now_s):
                break
            dropped.append(segment)
        if dropped:
            self._given_up = dropped[-1].end
            del self._segments[: len(dropped)]
            self._next_position.clear()
            self.gaps.drop_before(min(low, self.start))
        return dropped

    def _is_retained(self, number: int, now_s: float) -> bool:
        """Whether retention keeps a segment, and so all that follow it."""
        settings, segments = self.settings, self._segments[number:]
        if not settings.retention_s and not settings.retention_bytes:
            return False
        # A stamp in the future says nothing. Such a segment is at least as old as the one that follows it.
        stamps = (segment.last_ns / 1e9 for segment in segments)
        last_s = next((stamp for stamp in stamps if stamp <= now_s), now_s)
        young = not settings.retention_s or last_s > now_s - settings.retention_s
        size = sum(segment.size for segment in segments)
        return young and (not settings.retention_bytes or size <= settings.retention_bytes)


class Sync:
    """An fsync of everything a log had written when it was made."""

    def __init__(
        self,
        files: Files,
        opened: list[tuple[int, Segment]],
        directory: Path,
        end: int,
        count: int,
        *,
        is_awaited: bool,
    ) -> None:
        self._files = files
        self._opened = opened
        self._directory = directory
        """The log's: the names of new segments are synced as well, and its own."""
        self._is_awaited = is_awaited
        """Whether publishers wait for it. Then the states of a topic and channels that are new are synced,
        too: a message that is acknowledged finds them after a power cut."""
        self.end = end
        self.count = count
        """Messages it is about."""
        self.failed: list[Segment] = []
        """Segments whose sync failed."""
        self.error: OSError | None = None
        """What the disk said no with: what this is about may not be there after a power cut."""
        self.obstacle: OSError | None = None
        """Why it could not be tried to the end. Nothing is known to be wrong; it has to be tried again."""

    def run(self) -> None:
        for fd, segment in self._opened:
            try:
                self._files.sync(fd)
            except OSError as error:
                self.error = error
                self.failed.append(segment)
            finally:
                self._files.close(fd)
        try:
            if self._is_awaited:
                self._files.sync_written(self._directory)
            else:
                self._files.sync_names(self._directory)
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self.obstacle = error
            else:
                self.error = error
