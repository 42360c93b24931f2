"""One file of a topic's log: batches end to end, with a sparse index beside it once it is
sealed."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from nsparq.errors import CorruptBatch
from nsparq.packed import PackedBodies
from nsparq.storage.batch import (
    HEADER_SIZE,
    PREPARE_SIZE,
    Batch,
    Head,
    SegmentFile,
    checksum_holds,
    data_range,
    decode_blocks,
    decode_head,
    decode_lengths,
)
from nsparq.storage.files import Files
from nsparq.storage.log_range import LogRange, SharedReader
from nsparq.storage.manifest import SegmentEntry
from nsparq.storage.recovery import Damage, end_of_damage, scan
from nsparq.storage.segment_index import Entry, Extent, SegmentIndex

logger = logging.getLogger(__name__)

READ_SIZE: Final = 128 << 10
GATHER_SIZE: Final = 96 << 10
"""Small neighbouring batches are read as one, up to about this many bytes."""
COPY_SUFFIX: Final = ".log.copy"
"""Suffix of a segment's copy while it is written."""
FOREIGN_SUFFIX: Final = ".log.foreign"
"""Suffix of a file that was found in the place of a segment and belongs to another log."""


class Cold(Exception):
    """The bytes are on disk and not in memory: reading them would block the event loop."""

    def __init__(self, path: Path, position: int, fetch: Callable[[], object] | None = None) -> None:
        super().__init__(f"{path} at byte {position}")
        self.path, self.position = path, position
        self.fetch = fetch
        """Gets the file from an archive first; None if it is there. Raises OSError."""


class Segment(SegmentFile):
    """One file of a log: opened after a restart, read, and closed."""

    is_local = True
    """Whether the file is in the data path, and not only in an archive."""
    keeps_index = False
    """Whether remove() leaves the index: the segment goes on in an archive."""

    def __init__(self, files: Files, directory: Path, base: int, mark: int = 0) -> None:
        super().__init__(files, directory, base, mark)
        self.index_path = self.path.with_suffix(".index")
        self.index_end = base
        """The segment's end when its index was written, if there is one."""
        self.is_doubtful = False
        """Whether an fsync failed. The system may then drop what it could not write, and still
        report success for a second fsync of the same file. So nothing more is appended, and the
        segment must be copied: see storage.doubtful."""
        self.entry: SegmentEntry | None = None
        """What the archive has confirmed; None for nothing."""
        self._reader = SharedReader(files, self.path)
        self.damage: dict[int, int] = {}
        """Start and end of unreadable bytes."""

    def release(self) -> None:
        """Close the file, without the prepared zeros."""
        try:
            self.cut_to_size()
        except OSError as error:
            logger.warning("%s: keeps more disk space than it needs: %s", self.path.name, error)
        self.close()

    def detach(self) -> int:
        """Give the file's descriptor away; the caller closes it."""
        fd, self._fd = self.fd, -1
        return fd

    def write_index(self) -> None:
        """Does not wait for the disk: a segment without an index is only slower to open."""
        self.cut_to_size()
        # Replacing an existing file would sync it.
        self.files.unlink(self.index_path)
        self.files.replace(self.index_path, self.encode_index(), sync=False)
        self.files.never_sync(self.index_path)
        self.has_index = True

    def doubt(self) -> None:
        """An fsync failed. An empty file has nothing to lose, and another segment of the same name
        may take its place while it would be copied."""
        self.is_doubtful = self.size > 0

    def copied(self) -> None:
        """doubtful.replace_by_copy() is done: the segment is safe again."""
        self.is_doubtful = False
        self.close()
        self._reader.forget()

    def _log_damage(self, position: int, reason: str) -> None:
        logger.error("%s", CorruptBatch(self.path, position, reason))

    def remove(self) -> None:
        self.close()
        # The index goes first: an index without its segment means that the segment was lost.
        if not self.keeps_index:
            self.files.unlink(self.index_path)
        self.files.unlink(self.path)

    def encode_index(self) -> bytes:
        extent = Extent(self.base, self.end, self.size, self.first_ns, self.last_ns)
        return self.index.encode(extent, self.mark)

    def is_foreign(self) -> bool:
        """Whether the file begins with a batch of another log, or of another segment."""
        head = decode_head(self._read_at(HEADER_SIZE, 0))
        if head is None or (head.base == self.base and (not self.mark or head.mark in (0, self.mark))):
            return False
        return checksum_holds(head, self._read_at(head.size, 0))

    def read_mark(self) -> int:
        """The mark of the first batch; 0 if it has none or is damaged."""
        head = decode_head(self._read_at(HEADER_SIZE, 0))
        return head.mark if head is not None and checksum_holds(head, self._read_at(head.size, 0)) else 0

    def set_aside(self) -> Path:
        """Rename the file, so that it does not count as a segment any more."""
        self.close()
        aside = self.path.with_suffix(FOREIGN_SUFFIX)
        self.files.rename(self.path, aside)
        return aside

    # opening

    def open(self, *, last: bool) -> list[Damage]:
        """Find out what the file holds, from its index or by reading it. Gives the damage found.

        Only the last segment of a log can end in a torn batch. It is cut off: no message in it was
        acknowledged. Anywhere else bytes are kept, except zeros at the end, which were prepared
        for batches that were never written.
        """
        self.size = self.files.size(self.fd)
        if self._load_index():
            return []
        found: list[Damage] = []
        for item in scan(self._read_at, self.size, first=self.base):
            if isinstance(item, Damage):
                found.append(item)
                self.damage[item.position] = item.end
            else:
                head = item.head
                self.note(item.position, head.base, head.end, head.timestamp_ns, head.due_ns)
        if found and found[-1].end == self.size:
            torn = found[-1]
            is_prepared = self._is_zero(torn)
            if last and not is_prepared:
                logger.warning(
                    "%s: cut off %d bytes of an unfinished write at byte %d",
                    self.path.name, self.size - torn.position, torn.position,
                )  # fmt: skip
            if last or is_prepared:
                found.pop()
                del self.damage[torn.position]
                self.files.truncate(self.fd, torn.position)
                self.size = torn.position
        for damage in found:
            self._log_damage(damage.position, f"{damage.end - damage.position} bytes unreadable")
        if not found and not last and self.size:
            # The next start need not read it again.
            with suppress(OSError):
                self.write_index()
        return found

    def _is_zero(self, damage: Damage) -> bool:
        """Whether these bytes are not damage but zeros that append() prepared."""
        if damage.end - damage.position >= PREPARE_SIZE:
            return False
        return not any(self._read_at(damage.end - damage.position, damage.position))

    def load_index_end(self) -> int:
        """The end of a segment whose file is missing or foreign, according to its index."""
        self._load_index()
        return self.index_end

    def _load_index(self) -> bool:
        """Whether there is an index that covers the whole segment."""
        raw = self.files.read_whole(self.index_path)
        try:
            found = None if raw is None else SegmentIndex.decode(raw, self.mark)
        except ValueError as error:
            logger.warning("%s is %s; reading the segment instead", self.index_path.name, error)
            return False
        if found is None or found[0].base != self.base:
            return False
        extent, index = found
        self.index_end = extent.end
        if extent.size != self.size:
            return False
        self.end, self.first_ns, self.last_ns = extent.end, extent.first_ns, extent.last_ns
        self.index = index
        self.has_index = True
        return True

    # reading

    def place_before(self, sequence: int) -> Entry:
        """The position of a batch at or before the one with `sequence`, and its first number."""
        return self.index.before(sequence) or (0, self.base)

    def locate(self, sequence: int, max_bytes: int, known: int | None = None) -> LogRange:
        """About `max_bytes` of whole batches; the one with `sequence` is among the first of them.

        Uses the index alone. The range begins and ends at entries of the index, or at the
        segment's end, and so has at least the batches of one entry. `known` is the position of the
        batch that begins with `sequence`, if the caller knows it.
        """
        start = self.place_before(sequence) if known is None else (known, sequence)
        if self.size - start[0] <= max_bytes:
            return self._range(start, None)
        return self._range(start, self.index.after(start[0], max_bytes))

    def locate_time(self, timestamp_ns: int) -> LogRange:
        """The batches with the first message published at or after a time. There must be one."""
        return self._range(*self.index.around(timestamp_ns))

    def _range(self, start: Entry, end: Entry | None) -> LogRange:
        position, first = start
        stop, following = end or (self.size, self.end)
        return LogRange(first, following, stop - position, (), position, self._reader.get())

    def note_damage(self, position: int, end: int) -> bool:
        """Note unreadable bytes. False if they are known already."""
        if position in self.damage:
            return False
        self.damage[position] = end
        self._log_damage(position, f"{end - position} bytes unreadable")
        return True

    def read(self, place: Entry, sequence: int, *, wait: bool) -> tuple[Batch, int] | None:
        """The first batch from `place` on that ends after `sequence`, and the position after it.

        None at the end of the segment. Neighbouring small batches come joined. Raises CorruptBatch
        at bytes with a wrong checksum, and Cold if the bytes are not in memory and `wait` is false.
        """
        position, expected = place
        while position < self.size:
            if position in self.damage:
                position, expected = self.damage[position], -1
                continue
            block = self._block(position, READ_SIZE, wait)
            offset = 0
            while offset < len(block) and position + offset not in self.damage:
                head = decode_head(block, offset)
                if head is None:
                    if len(block) - offset < HEADER_SIZE and position + len(block) < self.size:
                        break
                    raise self.corrupt(position + offset, "no batch header", expected)
                if head.end > sequence:
                    return self._gather(block, offset, head, position, expected, wait)
                if head.base != expected and not self._is_whole(block, offset, head, position):
                    # Numbers in a segment have no gap. This may be the batch we want, with a wrong
                    # number.
                    raise self.corrupt(position + offset, "checksum mismatch", expected)
                expected = head.end
                offset += head.size
            position += offset
        return None

    def _is_whole(self, block: memoryview, offset: int, head: Head, position: int) -> bool:
        if head.size <= len(block) - offset:
            return checksum_holds(head, block, offset)
        return checksum_holds(head, self._read_at(head.size, position + offset))

    def _read_at(self, size: int, position: int) -> bytes:
        return self.files.read(self.fd, size, position)

    def _block(self, position: int, size: int, wait: bool) -> memoryview:
        size = min(size, self.size - position)
        if not wait:
            cached = self.files.read_cached(self.fd, size, position)
            if cached is None or len(cached) < size:
                raise Cold(self.path, position)
            return cached
        block = self._read_at(size, position)
        if len(block) < size:
            self._log_damage(position + len(block), "the file is shorter than it was")
            self.size = position + len(block)
        return memoryview(block)

    def _gather(
        self, block: memoryview, offset: int, head: Head, position: int, expected: int, wait: bool
    ) -> tuple[Batch, int]:
        """The batch at `offset` of a block from `position`, joined with the small ones after it."""
        if head.size > len(block) - offset:
            position += offset
            block, offset = self._block(position, head.size, wait), 0
        parts: list[tuple[int, array[int], memoryview, PackedBodies | None]] = []
        base, due_ns, size = head.base, head.due_ns, 0
        following: Head | None = head
        while following is not None:
            if not checksum_holds(following, block, offset):
                if parts:
                    break
                raise self.corrupt(position + offset, "checksum mismatch", expected)
            start, end = data_range(following, offset)
            lengths, headers = (
                decode_lengths(following, block, offset),
                decode_blocks(following, block, offset),
            )
            parts.append((following.timestamp_ns, lengths, block[start:end], headers))
            offset += following.size
            size += following.size
            if due_ns or size >= GATHER_SIZE:
                break
            next_base = following.end
            following = decode_head(block, offset)
            if following is not None and (
                following.due_ns or following.base != next_base or following.tag != head.tag
            ):
                break
        if len(parts) == 1:
            timestamp_ns, lengths, data, headers = parts[0]
            batch = Batch(base, timestamp_ns, due_ns, lengths, bytes(data), head.tag, headers)
            return batch, position + offset
        return Batch.join(base, parts, head.tag), position + offset

    def corrupt(self, position: int, reason: str, expected: int) -> CorruptBatch:
        """Note damage at `position`, so that the next read continues after it. A batch that begins
        with the number `expected` should be there; -1 if the number is not known."""
        known = None if expected < 0 else expected
        self.damage[position] = end_of_damage(self._read_at, position, self.size, known)
        return CorruptBatch(self.path, position, reason)
