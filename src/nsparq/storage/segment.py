"""One file of a topic's log: batches end to end, with a sparse index beside it once it is closed.

The index file holds what a restart needs, so that opening a log reads no message: where each 64 KiB or so
of the segment begins, the range of sequence numbers, the times, and which messages were deferred. It is
written when the segment is sealed and at a clean stop, and believed only if it names the segment's size.
"""

from __future__ import annotations

import logging
import struct
from array import array
from bisect import bisect_left, bisect_right
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from nsparq.errors import CorruptBatch
from nsparq.storage.batch import (
    HEADER_SIZE,
    Batch,
    Head,
    checksum_holds,
    data_range,
    decode_head,
    decode_lengths,
)
from nsparq.storage.files import Buffer, Files
from nsparq.storage.recovery import Damage, behind_damage, scan

logger = logging.getLogger(__name__)

INDEX_EVERY: Final = 64 << 10
READ_SIZE: Final = 128 << 10
GATHER_SIZE: Final = 96 << 10
"""Small neighbouring batches are read as one, up to about this many bytes."""
PREPARE_SIZE: Final = 256 << 10
"""A busy segment grows in steps of this: a file system makes room for many pages at once in half the time
that it takes one by one. Batches are then written over the zeros there. Larger steps gain little more."""
PREPARE_FROM: Final = 1 << 20
"""The size from which on a segment is busy, so that one with a few messages stays small."""

COPY_SUFFIX: Final = ".log.copy"
"""Of a segment that is being copied."""
_COPY_SIZE: Final = 1 << 20

_INDEX = struct.Struct("<4sIQQQqqQQ")
_INDEX_MAGIC = b"NQX3"
_UNMARKED_INDEX_MAGIC = b"NQX2"
"""The same without the log's mark, which is the first of the arrays' bytes."""
_OLD_INDEX_MAGIC = b"NQX1"
"""Without times; the segment is read instead, once."""
_MARK = struct.Struct("<Q")
FOREIGN_SUFFIX: Final = ".log.foreign"
"""Files in the place of a segment that hold another one."""
_ZEROS: Buffer = memoryview(bytes(16 << 10))
"""Short, so that they stay in the processor's nearest memory."""


class Cold(Exception):
    """The bytes are on the disk and not in memory: reading them here would stall the loop."""

    def __init__(self, path: Path, position: int) -> None:
        super().__init__(f"{path} at byte {position}")
        self.path, self.position = path, position


class Stretch(NamedTuple):
    """Whole batches of a segment, from one byte position to another."""

    position: int
    end: int
    first: int
    """The sequence number that the first of them begins with."""
    next: int
    """The one after the last."""


class Segment:
    """A run of batches in one file. `base` names the file; `end` is the sequence number after the last."""

    def __init__(self, files: Files, directory: Path, base: int, mark: int = 0) -> None:
        """`mark` is the log's, see storage.batch.mark_of; 0 takes any."""
        self.files = files
        self.mark = mark
        self.path = directory / f"{base:020d}.log"
        self.index_path = self.path.with_suffix(".index")
        self.base = base
        self.end = base
        self.size = 0
        self.index_end = base
        """Where it ended when its index was written, if there is one."""
        self.first_ns = 0
        self.last_ns = 0
        """The latest publish time: that of the last message, unless the clock was set back."""
        self.deferred = array("q")
        """Pairs of sequence number and due time."""
        self._sequences = array("Q")
        self._positions = array("Q")
        self._times = array("q")
        """The latest publish time of all that lies before each entry; so in order, whatever the clock did."""
        self._fd = -1
        self._is_ragged = False
        """Whether a failed write has left bytes behind `size`."""
        self._prepared = 0
        """How far the file reaches, zeros included, if that is beyond `size`."""
        self._may_prepare = True
        self.has_index = False
        """Whether the index on disk speaks of all that is here."""
        self._damage: dict[int, int] = {}
        """Where unreadable bytes begin, and where reading goes on."""

    # writing

    def append(self, buffers: list[Buffer], size: int) -> None:
        """Write whole batches, or raise and leave the file as it was."""
        end = self.size + size
        if end <= self._prepared or self.size < PREPARE_FROM or not self._may_prepare:
            self._write(buffers)
        else:
            room = -end % PREPARE_SIZE
            try:
                self._write(buffers + _zeros(room))
                self._prepared = end + room
            except OSError:
                # There may be room for the batches alone.
                self._may_prepare = False
                self._write(buffers)
        self.size = end

    def _write(self, buffers: list[Buffer]) -> None:
        self.tidy()
        try:
            self.files.write(self.fd, buffers, self.size)
        except OSError:
            self._is_ragged = True
            with suppress(OSError):
                self.tidy()
            raise

    def tidy(self) -> None:
        """Cut off what a failed write has left, so that it can never be read as if it had succeeded."""
        if self._is_ragged:
            self._cut()

    def settle(self) -> None:
        """Cut off what was prepared, too: nothing will be appended for a while."""
        if self._is_ragged or self._prepared > self.size:
            self._cut()

    def _cut(self) -> None:
        self.files.truncate(self.fd, self.size)
        self._is_ragged = False
        self._prepared = 0

    def note(self, position: int, base: int, end: int, timestamp_ns: int, due_ns: int) -> None:
        """Account for a batch that stands at `position`."""
        if not self._positions or position - self._positions[-1] >= INDEX_EVERY:
            self._sequences.append(base)
            self._positions.append(position)
            self._times.append(self.last_ns)
        if not self.first_ns:
            self.first_ns = timestamp_ns
        if timestamp_ns > self.last_ns:
            self.last_ns = timestamp_ns
        self.end = end
        self.has_index = False
        if due_ns:
            self.deferred.extend((base, due_ns))

    @property
    def fd(self) -> int:
        if self._fd < 0:
            self._fd = self.files.open(self.path)
        return self._fd

    def close(self) -> None:
        """Let go of the file. It opens again by itself when used."""
        if self._fd >= 0:
            self.files.close(self._fd)
            self._fd = -1

    def detach(self) -> int:
        """Give the file's descriptor away; the caller closes it."""
        fd, self._fd = self.fd, -1
        return fd

    def write_index(self) -> None:
        """Without waiting for the disk: a segment whose index is missing or torn is as good."""
        self.settle()
        arrays = (self._sequences, self._positions, self._times, self.deferred)
        body = _MARK.pack(self.mark) + b"".join(entries.tobytes() for entries in arrays)
        fields = (self.base, self.end, self.size, self.first_ns, self.last_ns)
        counts = (len(self._positions), len(self.deferred))
        crc = crc32c(body, crc32c(_INDEX.pack(_INDEX_MAGIC, 0, *fields, *counts)))
        head = _INDEX.pack(_INDEX_MAGIC, crc, *fields, *counts)
        # One in the place of another would have to be synced.
        self.files.unlink(self.index_path)
        self.files.replace(self.index_path, head + body, sync=False)
        self.files.never_sync(self.index_path)
        self.has_index = True

    def copy_anew(self) -> None:
        """Put a copy of the whole file in its place, and have that on disk. Once an fsync has failed, only
        another file can be known to be there: see Log.doubtful. Nothing may be appended any more. May be
        called in a thread. Raises OSError, with the file as it was."""
        copy = self.path.with_suffix(COPY_SUFFIX)
        source = self.files.open_read(self.path)
        try:
            target = self.files.open(copy)
            try:
                self.files.truncate(target, 0)
                for position in range(0, self.size, _COPY_SIZE):
                    size = min(_COPY_SIZE, self.size - position)
                    self.files.write(target, [self.files.read(source, size, position)], position)
                self.files.sync(target)
                self._report_lost(target)
            finally:
                self.files.close(target)
        finally:
            self.files.close(source)
        self.files.rename(copy, self.path)
        self.files.sync_names(self.path.parent)

    def _report_lost(self, fd: int) -> None:
        """Say so if the system no longer had what it could not write."""

        def read(size: int, position: int) -> bytes:
            return self.files.read(fd, size, position)

        for item in scan(read, self.size, first=self.base):
            if isinstance(item, Damage) and item.position not in self._damage:
                logger.error(
                    "%s", CorruptBatch(self.path, item.position, "messages are lost to a failed fsync")
                )

    def remove(self) -> None:
        self.close()
        # An index without its segment tells of a segment that is lost.
        self.files.unlink(self.index_path)
        self.files.unlink(self.path)

    def is_foreign(self) -> bool:
        """Whether the file begins with a whole batch of another log, or of another place in this one."""
        head = decode_head(self._read_at(HEADER_SIZE, 0))
        if head is None or (head.base == self.base and (not self.mark or head.mark in (0, self.mark))):
            return False
        return checksum_holds(head, self._read_at(head.size, 0))

    def read_mark(self) -> int:
        """The mark of the first batch; 0 if it has none or is damaged."""
        head = decode_head(self._read_at(HEADER_SIZE, 0))
        return head.mark if head is not None and checksum_holds(head, self._read_at(head.size, 0)) else 0

    def set_aside(self) -> Path:
        """Rename the file, so that it is no segment any more."""
        self.close()
        aside = self.path.with_suffix(FOREIGN_SUFFIX)
        self.files.rename(self.path, aside)
        return aside

    # opening

    def open(self, *, last: bool) -> list[Damage]:
        """Learn what the file holds, from its index or by reading it. Gives the damage found.

        Only the last segment of a log can end in a torn batch, and then it is cut off: nothing in it was
        acknowledged. In any other place bytes are never thrown away, except zeros at the end, where nothing
        had been written yet.
        """
        self.size = self.files.size(self.fd)
        if self._load_index():
            return []
        found: list[Damage] = []
        for item in scan(self._read_at, self.size, first=self.base):
            if isinstance(item, Damage):
                found.append(item)
                self._damage[item.position] = item.end
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
                del self._damage[torn.position]
                self.files.truncate(self.fd, torn.position)
                self.size = torn.position
        for damage in found:
            logger.error(
                "%s",
                CorruptBatch(self.path, damage.position, f"{damage.end - damage.position} bytes unreadable"),
            )
        if not found and not last and self.size:
            # The next start need not read it again.
            with suppress(OSError):
                self.write_index()
        return found

    def _is_zero(self, damage: Damage) -> bool:
        """Whether it is no damage, but what append() has prepared."""
        if damage.end - damage.position >= PREPARE_SIZE:
            return False
        return not any(self._read_at(damage.end - damage.position, damage.position))

    def load_index_end(self) -> int:
        """Where a segment ended whose file is gone, or another's."""
        self._load_index()
        return self.index_end

    def _load_index(self) -> bool:
        raw = self.files.read_whole(self.index_path)
        if raw is None or len(raw) < _INDEX.size:
            return False
        magic, crc, base, end, size, first_ns, last_ns, entries, deferred = _INDEX.unpack_from(raw)
        body = raw[_INDEX.size :]
        unsigned = _INDEX.pack(magic, 0, base, end, size, first_ns, last_ns, entries, deferred)
        if magic == _OLD_INDEX_MAGIC:
            return False
        is_known = magic in (_INDEX_MAGIC, _UNMARKED_INDEX_MAGIC)
        if not is_known or crc32c(body, crc32c(unsigned)) != crc:
            logger.warning("%s is damaged; reading the segment instead", self.index_path.name)
            return False
        if magic == _INDEX_MAGIC:
            (mark,) = _MARK.unpack_from(body)
            body = body[_MARK.size :]
            if mark and self.mark and mark != self.mark:
                logger.warning("%s is of another log; reading the segment instead", self.index_path.name)
                return False
        if base != self.base:
            return False
        self.index_end = end
        if size != self.size:
            return False
        self.end, self.first_ns, self.last_ns = end, first_ns, last_ns
        self._sequences.frombytes(body[: 8 * entries])
        self._positions.frombytes(body[8 * entries : 16 * entries])
        self._times.frombytes(body[16 * entries : 24 * entries])
        self.deferred.frombytes(body[24 * entries :])
        self.has_index = True
        return True

    # reading

    def place_before(self, sequence: int) -> tuple[int, int]:
        """The position of a batch at or before the one with `sequence`, and the number it begins with."""
        entry = bisect_right(self._sequences, sequence) - 1
        return (self._positions[entry], self._sequences[entry]) if entry >= 0 else (0, self.base)

    def stretch(self, sequence: int, max_bytes: int, known: int | None = None) -> Stretch:
        """About `max_bytes` of whole batches, the one with `sequence` among the first of them. By the index
        alone: it begins and ends at entries, or at the segment's end, and so has one entry's worth at least.
        `known` is where the batch that begins with `sequence` stands, if that is known.
        """
        place = self.place_before(sequence) if known is None else (known, sequence)
        position, first = place
        if self.size - position <= max_bytes:
            return Stretch(position, self.size, first, self.end)
        least = bisect_right(self._positions, position)
        entry = max(least, bisect_right(self._positions, position + max_bytes) - 1)
        if entry >= len(self._positions):
            return Stretch(position, self.size, first, self.end)
        return Stretch(position, self._positions[entry], first, self._sequences[entry])

    def stretch_at_time(self, timestamp_ns: int) -> Stretch:
        """Where the first message published at or after a time is; there must be one."""
        entry = max(0, bisect_left(self._times, timestamp_ns) - 1)
        following = entry + 1
        is_last = following == len(self._positions)
        return Stretch(
            self._positions[entry],
            self.size if is_last else self._positions[following],
            self._sequences[entry],
            self.end if is_last else self._sequences[following],
        )

    def note_damage(self, position: int, end: int) -> bool:
        """Bytes that are no batch. False if that is known already."""
        if position in self._damage:
            return False
        self._damage[position] = end
        return True

    def read(self, place: tuple[int, int], sequence: int, *, wait: bool) -> tuple[Batch, int] | None:
        """The first batch from `place` on that ends beyond `sequence`, and the position behind it.

        None at the end of the segment. Neighbouring small batches come joined. Raises CorruptBatch at
        bytes that do not check out, Cold where the disk would have to be waited for and `wait` is false.
        """
        position, expected = place
        while position < self.size:
            if position in self._damage:
                position, expected = self._damage[position], -1
                continue
            block = self._block(position, READ_SIZE, wait)
            offset = 0
            while offset < len(block) and position + offset not in self._damage:
                head = decode_head(block, offset)
                if head is None:
                    if len(block) - offset < HEADER_SIZE and position + len(block) < self.size:
                        break
                    raise self.corrupt(position + offset, "no batch header", expected)
                if head.end > sequence:
                    return self._gather(block, offset, head, position, expected, wait)
                if head.base != expected and not self._is_whole(block, offset, head, position):
                    # Numbers in a segment follow each other. This may be a batch that we want, misnumbered.
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
            logger.error(
                "%s", CorruptBatch(self.path, position + len(block), "the file is shorter than it was")
            )
            self.size = position + len(block)
        return memoryview(block)

    def _gather(
        self, block: memoryview, offset: int, head: Head, position: int, expected: int, wait: bool
    ) -> tuple[Batch, int]:
        """The batch at `offset` of a block read from `position`, joined with small ones that follow it."""
        if head.size > len(block) - offset:
            position += offset
            block, offset = self._block(position, head.size, wait), 0
        parts: list[tuple[int, array[int], memoryview]] = []
        base, due_ns, size = head.base, head.due_ns, 0
        following: Head | None = head
        while following is not None:
            if not checksum_holds(following, block, offset):
                if parts:
                    break
                raise self.corrupt(position + offset, "checksum mismatch", expected)
            start, end = data_range(following, offset)
            parts.append((following.timestamp_ns, decode_lengths(following, block, offset), block[start:end]))
            offset += following.size
            size += following.size
            if due_ns or size >= GATHER_SIZE:
                break
            behind = following.end
            following = decode_head(block, offset)
            if following is not None and (following.due_ns or following.base != behind):
                break
        if len(parts) == 1:
            timestamp_ns, lengths, data = parts[0]
            return Batch(base, timestamp_ns, due_ns, lengths, bytes(data)), position + offset
        return Batch.join(base, parts), position + offset

    def corrupt(self, position: int, reason: str, expected: int) -> CorruptBatch:
        """Note the damage at `position`, where a batch beginning with the number `expected` should be (-1 if
        that is not known), so that the next read goes on behind it."""
        known = None if expected < 0 else expected
        self._damage[position] = behind_damage(self._read_at, position, self.size, known)
        return CorruptBatch(self.path, position, reason)


def _zeros(size: int) -> list[Buffer]:
    whole, rest = divmod(size, len(_ZEROS))
    return [_ZEROS] * whole + [_ZEROS[:rest]]
