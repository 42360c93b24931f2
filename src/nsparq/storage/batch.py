"""The batch, unit of append, checksum and memory, and the file that batches are appended to. Little
endian on disk.

 0       4       8      12     14     16       24          32      40      44      48
 +-------+-------+------+------+------+--------+-----------+-------+-------+-------+----------+--------+
 | magic | crc   | size | tag  | mark | base   | published | due   | count | data  | lengths  | bodies |
 +-------+-------+------+------+------+--------+-----------+-------+-------+-------+----------+--------+
  "NQB1"  crc32c  whole                sequence ns          ns      u32     bytes   count×u32

The crc covers everything after itself. `due` is 0, or the time before which the messages must not
be delivered. `tag` is 0, or the tag of the transaction that published the messages. `mark` names
the log, see mark_of(); 0 in old batches. Bodies lie end to end, so the length table alone gives
every position: one cumulative sum for a delivery, and the offsets buffer of an Arrow array.

A batch in which a message has headers begins with "NQB2", and has two more parts behind the bodies:
the lengths of the header blocks (count×u32), and the blocks. `data` is the size of the bodies
alone.

In memory, one BatchCache limits the bytes of all logs together.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from nsparq import kernel
from nsparq.packed import PackedBodies, join_headers
from nsparq.storage.files import Buffer, Files
from nsparq.storage.segment_index import SegmentIndex
from nsparq.storage.zeros import zeros

Timestamps = int | npt.NDArray[np.int64]
"""One publish time for the whole batch, or one for each message."""

MAGIC: Final = b"NQB1"
MAGIC_WITH_HEADERS: Final = b"NQB2"
MAGIC_PREFIX: Final = b"NQB"
HEADER: Final = struct.Struct("<4sIIHHQqqII")
HEADER_SIZE: Final = HEADER.size
_SEALED = struct.Struct("<4sI")
_CHECKED = struct.Struct("<IHHQqqII")
"""The header in two parts. The checksum begins with the second."""
CHECKED_FROM: Final = 8
"""The checksum covers everything from here on."""
PREPARE_SIZE: Final = 256 << 10
"""A busy segment grows in steps of this size, filled with zeros, and batches overwrite the zeros.
A file system allocates many pages at once in half the time. Larger steps gain little more."""
PREPARE_FROM: Final = 1 << 20
"""A segment of this size is busy. Smaller ones do not grow ahead, so that they stay small."""

_BIG_ENDIAN = sys.byteorder == "big"


@dataclass(slots=True, eq=False)
class Batch:
    """Consecutive messages of a topic, in memory."""

    base: int
    """Sequence number of the first message."""
    timestamps_ns: Timestamps
    due_ns: int
    lengths: array[int]
    data: bytes
    tag: int = 0
    headers: PackedBodies | None = None
    """Header blocks of the messages; None if no message has headers."""
    count: int = field(init=False)
    end: int = field(init=False)
    """The sequence number after the last message."""
    size: int = field(init=False)
    """Estimated bytes in memory, frames included."""
    frames: tuple[bytes, array[int]] | None = field(default=None, init=False)
    """Message frames and their offsets, built for the first channel and shared by all. They are for
    clients that did not ask for headers, and for all clients if the batch has none."""
    frames_with_headers: tuple[bytes, array[int]] | None = field(default=None, init=False)
    """The same for clients that asked, if the batch has headers."""

    def __post_init__(self) -> None:
        self.count = len(self.lengths)
        self.end = self.base + self.count
        self.size = 2 * len(self.data) + 48 * self.count
        if self.headers is not None:
            self.size += len(self.data) + 2 * len(self.headers.data) + 48 * self.count

    @classmethod
    def join(
        cls, base: int, parts: list[tuple[int, array[int], memoryview, PackedBodies | None]], tag: int = 0
    ) -> Batch:
        """One batch of several neighbours, given as (publish time, lengths, bodies, headers)."""
        lengths = array("I")
        for part in parts:
            lengths.extend(part[1])
        stamps = np.repeat(np.array([part[0] for part in parts], np.int64), [len(part[1]) for part in parts])
        headers = join_headers([(len(part[1]), part[3]) for part in parts])
        return cls(base, stamps, 0, lengths, b"".join([part[2] for part in parts]), tag, headers)

    @classmethod
    def single(cls, sequence: int, timestamp_ns: int, body: bytes, block: bytes = b"", tag: int = 0) -> Batch:
        """A batch of one message. An empty block means no headers."""
        headers = PackedBodies(lengths_of([block]), block) if block else None
        return cls(sequence, timestamp_ns, 0, lengths_of([body]), body, tag, headers)

    def bodies(self) -> list[bytes]:
        ends = np.cumsum(np.frombuffer(self.lengths, np.uint32), dtype=np.int64).tolist()
        return [self.data[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def only(self, index: int) -> Batch:
        """One of the messages as a batch of its own."""
        body = _cut(self.lengths, self.data, index)
        block = b"" if self.headers is None else _cut(self.headers.lengths, self.headers.data, index)
        return Batch.single(self.base + index, self.timestamp_of(index), body, block, self.tag)

    def timestamp_of(self, index: int) -> int:
        stamps = self.timestamps_ns
        return stamps if isinstance(stamps, int) else int(stamps[index])

    def timestamps_of(self, index: int, count: int) -> Timestamps:
        """The publish times of `count` messages from `index` on."""
        stamps = self.timestamps_ns
        return stamps if isinstance(stamps, int) else stamps[index : index + count]


class Owner(Protocol):
    """A log that keeps batches in memory and can drop them."""

    def forget(self, batch: Batch) -> bool: ...


class BatchCache:
    """Counts the bytes of all batches in memory. Over the limit, the least recently used one goes.

    The newest batch always stays, however large: it is about to be delivered.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._batches: OrderedDict[Batch, Owner] = OrderedDict()

    def add(self, owner: Owner, batch: Batch) -> None:
        self._batches[batch] = owner
        self.size_bytes += batch.size
        if self.size_bytes > self.limit_bytes:
            self._evict(batch)

    def _evict(self, newest: Batch) -> None:
        while self.size_bytes > self.limit_bytes:
            batch, owner = next(iter(self._batches.items()))
            if batch is newest:
                return
            if not owner.forget(batch):
                self._evict_others(newest)
                return

    def _evict_others(self, newest: Batch) -> None:
        """The disk refuses the oldest batch, so it stays. Evict others instead."""
        for batch, owner in [*self._batches.items()]:
            if self.size_bytes <= self.limit_bytes:
                return
            if batch is not newest and batch in self._batches:
                owner.forget(batch)

    def use(self, batch: Batch) -> None:
        """Note that a batch that was read back from disk was used again."""
        self._batches.move_to_end(batch)

    def remove(self, batch: Batch) -> None:
        """The owner calls this once, when it drops a batch."""
        del self._batches[batch]
        self.size_bytes -= batch.size


def lengths_of(bodies: list[bytes]) -> array[int]:
    return array("I", map(len, bodies))


def _cut(lengths: array[int], data: bytes, index: int) -> bytes:
    """String `index` of those that lie end to end in `data`."""
    start = int(np.frombuffer(lengths, np.uint32)[:index].sum(dtype=np.int64))
    return data[start : start + lengths[index]]


def mark_of(incarnation: str) -> int:
    """The mark of a log: 16 bits of its incarnation, and never 0."""
    return (crc32c(incarnation.encode()) & 0xFFFF) or 1


def encode_batch(batch: Batch, mark: int = 0) -> tuple[bytes, bytes, bytes]:
    """The batch as it stands on disk, in pieces. It was never there, so it has one publish time."""
    stamp_ns = batch.timestamp_of(0)
    tail = b"" if batch.headers is None else encode_tail(batch.headers)
    head = encode_head(batch.base, stamp_ns, batch.due_ns, batch.lengths, batch.data, batch.tag, mark, tail)
    return head, batch.data, tail


def encode_tail(headers: PackedBodies) -> bytes:
    """Everything behind the bodies of a batch with headers."""
    return table_bytes(headers.lengths) + headers.data


def encode_singles(
    sequences: npt.NDArray[np.int64],
    timestamps_ns: npt.NDArray[np.int64],
    bodies: list[bytes],
    blocks: list[bytes],
    mark: int,
) -> tuple[bytes, list[int]]:
    """Many messages, each a batch of its own, end to end, and the size of each. An empty block
    means no headers."""
    if kernel.encode_singles is not None:
        data, sizes = kernel.encode_singles(sequences, timestamps_ns, bodies, blocks, mark)
        return data, np.frombuffer(sizes, np.int64).tolist()
    columns = sequences.tolist(), timestamps_ns.tolist(), bodies, blocks
    made = [b"".join(encode_batch(Batch.single(*one), mark)) for one in zip(*columns, strict=True)]
    return b"".join(made), [*map(len, made)]


def encode_head(
    base: int,
    timestamp_ns: int,
    due_ns: int,
    lengths: array[int],
    data: bytes,
    tag: int = 0,
    mark: int = 0,
    tail: bytes = b"",
) -> bytes:
    """Everything before the bodies. `tail` is what follows them: the headers, if there are any."""
    table = table_bytes(lengths) if _BIG_ENDIAN else lengths.tobytes()
    size = HEADER_SIZE + len(table) + len(data) + len(tail)
    checked = _CHECKED.pack(size, tag, mark, base, timestamp_ns, due_ns, len(lengths), len(data)) + table
    crc = crc32c(data, crc32c(checked))
    if tail:
        return _SEALED.pack(MAGIC_WITH_HEADERS, crc32c(tail, crc)) + checked
    return _SEALED.pack(MAGIC, crc) + checked


class Head(NamedTuple):
    """A decoded and plausible batch header."""

    magic: bytes
    crc: int
    size: int
    tag: int
    mark: int
    base: int
    timestamp_ns: int
    due_ns: int
    messages: int
    data_size: int

    @property
    def end(self) -> int:
        return self.base + self.messages

    @property
    def is_plausible(self) -> bool:
        """Whether the sizes fit together."""
        tail = self.size - (HEADER_SIZE + 4 * self.messages + self.data_size)
        if self.magic == MAGIC:
            return tail == 0 and self.messages > 0
        return self.magic == MAGIC_WITH_HEADERS and tail >= 4 * self.messages > 0


def decode_head(buffer: bytes | memoryview, position: int = 0) -> Head | None:
    """The header at `position`; None if the bytes there are not a header."""
    if len(buffer) - position < HEADER_SIZE:
        return None
    head = Head._make(HEADER.unpack_from(buffer, position))
    return head if head.is_plausible else None


def checksum_holds(head: Head, buffer: bytes | memoryview, position: int = 0) -> bool:
    """Whether `buffer` holds the whole batch with the bytes that were written."""
    end = position + head.size
    return end <= len(buffer) and crc32c(memoryview(buffer)[position + CHECKED_FROM : end]) == head.crc


def decode_lengths(head: Head, buffer: bytes | memoryview, position: int = 0) -> array[int]:
    start = position + HEADER_SIZE
    return lengths_from(buffer[start : start + 4 * head.messages])


def data_range(head: Head, position: int = 0) -> tuple[int, int]:
    """Start and end of the bodies in a buffer that holds the batch at `position`."""
    start = position + HEADER_SIZE + 4 * head.messages
    return start, start + head.data_size


def decode_blocks(head: Head, buffer: bytes | memoryview, position: int = 0) -> PackedBodies | None:
    """The header blocks of a batch; None if it has none."""
    if head.magic == MAGIC:
        return None
    table = data_range(head, position)[1]
    blocks = table + 4 * head.messages
    return PackedBodies(lengths_from(buffer[table:blocks]), bytes(buffer[blocks : position + head.size]))


def lengths_from(table: bytes | memoryview) -> array[int]:
    lengths = array("I")
    lengths.frombytes(table)
    if _BIG_ENDIAN:
        lengths.byteswap()
    return lengths


def table_bytes(lengths: array[int]) -> bytes:
    """The length table as it stands on disk."""
    if _BIG_ENDIAN:
        lengths = array("I", lengths)
        lengths.byteswap()
    return lengths.tobytes()


class SegmentFile:
    """Batches end to end in one file of a log. Segment, which the log uses, can also read it.

    `base` names the file; `end` is the next sequence number.
    """

    def __init__(self, files: Files, directory: Path, base: int, mark: int = 0) -> None:
        """`mark` is the mark of the log, see mark_of; 0 accepts any."""
        self.files = files
        self.mark = mark
        self.path = directory / f"{base:020d}.log"
        self.base = base
        self.end = base
        self.size = 0
        self.first_ns = 0
        """Publish time of the first message."""
        self.last_ns = 0
        """The latest publish time: that of the last message, unless the clock was set back."""
        self.index = SegmentIndex()
        self.has_index = False
        """Whether the index on disk covers the whole segment."""
        self._fd = -1
        self._is_ragged = False
        """Whether a failed write left bytes after `size`."""
        self._prepared = 0
        """Size of the file with the zeros after `size`; 0 if there are none."""
        self._may_prepare = True

    def append(self, buffers: list[Buffer], size: int) -> None:
        """Write whole batches, or raise and leave the file as it was."""
        if self._is_ragged:
            self._cut()
        end = self.size + size
        room = 0
        if end > self._prepared and self.size >= PREPARE_FROM and self._may_prepare:
            room = -end % PREPARE_SIZE
        written = buffers + zeros(room) if room else buffers
        try:
            self.files.write(self._fd if self._fd >= 0 else self.fd, written, self.size)
        except OSError:
            self._is_ragged = True
            with suppress(OSError):
                self._cut()
            if not room:
                raise
            # There may still be room for the batches alone.
            self._may_prepare = False
            self.append(buffers, size)
            return
        if room:
            self._prepared = end + room
        self.size = end

    def note(self, position: int, base: int, end: int, timestamp_ns: int, due_ns: int) -> None:
        """Account for a batch that stands at `position`."""
        if position >= self.index.next_position:
            self.index.add(position, base, self.last_ns)
        if due_ns:
            self.index.deferred.extend((base, due_ns))
        if not self.first_ns:
            self.first_ns = timestamp_ns
        if timestamp_ns > self.last_ns:
            self.last_ns = timestamp_ns
        self.end = end
        self.has_index = False

    def cut_failed_write(self) -> None:
        """Remove what a failed write left, so that it is never read as if it had succeeded."""
        if self._is_ragged:
            self._cut()

    def cut_to_size(self) -> None:
        """Remove the prepared zeros, too: nothing will be appended for a while."""
        if self._is_ragged or self._prepared > self.size:
            self._cut()

    def _cut(self) -> None:
        self.files.truncate(self.fd, self.size)
        self._is_ragged = False
        self._prepared = 0

    @property
    def fd(self) -> int:
        if self._fd < 0:
            self._fd = self.files.open(self.path)
        return self._fd

    def close(self) -> None:
        """Close the file. It opens again when it is used."""
        if self._fd >= 0:
            self.files.close(self._fd)
            self._fd = -1
