"""The batch: unit of append, checksum and memory. Little endian on disk.

 0       4       8      12     14     16       24          32      40      44      48
 +-------+-------+------+------+------+--------+-----------+-------+-------+-------+----------+--------+
 | magic | crc   | size | tag  | mark | base   | published | due   | count | data  | lengths  | bodies |
 +-------+-------+------+------+------+--------+-----------+-------+-------+-------+----------+--------+
  "NQB1"  crc32c  whole                sequence ns          ns      u32     bytes   count×u32

The crc covers everything after itself. `due` is 0, or the time before which the messages may not be
delivered. `tag` is 0, or tells by which transaction they came, while that is being committed. `mark` tells to
which log they belong, see mark_of(); 0 in batches of before.
Bodies lie end to end, so that the length table alone gives every position: one cumulative sum for a delivery,
and the offsets buffer of an Arrow array for a pipeline.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

Timestamps = int | npt.NDArray[np.int64]
"""One publish time for the whole batch, or one for each message."""

MAGIC: Final = b"NQB1"
HEADER: Final = struct.Struct("<4sIIHHQqqII")
HEADER_SIZE: Final = HEADER.size
_SEALED = struct.Struct("<4sI")
_CHECKED = struct.Struct("<IHHQqqII")
"""The header in two parts: the second is what the checksum begins with."""
CHECKED_FROM: Final = 8
"""The checksum covers everything from here on."""
_BIG_ENDIAN = sys.byteorder == "big"


class Batch:
    """Consecutive messages of a topic, in memory."""

    __slots__ = (
        "base",
        "count",
        "data",
        "due_ns",
        "end",
        "frames",
        "lengths",
        "size",
        "tag",
        "timestamps_ns",
    )

    def __init__(
        self,
        base: int,
        timestamps_ns: Timestamps,
        due_ns: int,
        lengths: array[int],
        data: bytes,
        tag: int = 0,
    ) -> None:
        self.base = base
        """Sequence number of the first message."""
        self.count = len(lengths)
        self.end = base + self.count
        """The sequence number after the last message."""
        self.timestamps_ns = timestamps_ns
        self.due_ns = due_ns
        self.tag = tag
        self.lengths = lengths
        self.data = data
        self.size = 2 * len(data) + 48 * len(lengths)
        """Bytes it is taken to occupy in memory, its frames included."""
        self.frames: tuple[bytes, array[int]] | None = None
        """Message frames and their offsets, once some channel has needed them; shared by all channels."""

    @classmethod
    def join(cls, base: int, parts: list[tuple[int, array[int], memoryview]]) -> Batch:
        """Neighbouring batches, each as (publish time, lengths, bodies), as one."""
        lengths = array("I")
        for part in parts:
            lengths.extend(part[1])
        stamps = np.repeat(np.array([part[0] for part in parts], np.int64), [len(part[1]) for part in parts])
        return cls(base, stamps, 0, lengths, b"".join([part[2] for part in parts]))

    @classmethod
    def single(cls, sequence: int, timestamp_ns: int, body: bytes) -> Batch:
        return cls(sequence, timestamp_ns, 0, lengths_of([body]), body)

    def bodies(self) -> list[bytes]:
        ends = np.cumsum(np.frombuffer(self.lengths, np.uint32), dtype=np.int64).tolist()
        return [self.data[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def timestamp_of(self, index: int) -> int:
        stamps = self.timestamps_ns
        return stamps if isinstance(stamps, int) else int(stamps[index])

    def timestamps_of(self, index: int, count: int) -> Timestamps:
        """Those of `count` messages from that one on."""
        stamps = self.timestamps_ns
        return stamps if isinstance(stamps, int) else stamps[index : index + count]


def lengths_of(bodies: list[bytes]) -> array[int]:
    return array("I", map(len, bodies))


def mark_of(incarnation: str) -> int:
    """What a log's batches are known by: 16 bits of its incarnation, and never 0."""
    return (crc32c(incarnation.encode()) & 0xFFFF) or 1


def encode_head(
    base: int,
    timestamp_ns: int,
    due_ns: int,
    lengths: array[int],
    data: bytes,
    tag: int = 0,
    mark: int = 0,
) -> bytes:
    """Everything before the bodies."""
    table = table_bytes(lengths)
    size = HEADER_SIZE + len(table) + len(data)
    checked = _CHECKED.pack(size, tag, mark, base, timestamp_ns, due_ns, len(lengths), len(data)) + table
    return _SEALED.pack(MAGIC, crc32c(data, crc32c(checked))) + checked


class Head:
    """A decoded and plausible batch header."""

    __slots__ = ("base", "count", "crc", "data_size", "due_ns", "mark", "size", "tag", "timestamp_ns")

    def __init__(self, fields: tuple[int, ...]) -> None:
        (
            _,
            self.crc,
            self.size,
            self.tag,
            self.mark,
            self.base,
            self.timestamp_ns,
            self.due_ns,
            self.count,
            self.data_size,
        ) = fields

    @property
    def end(self) -> int:
        return self.base + self.count


def decode_head(buffer: bytes | memoryview, position: int = 0) -> Head | None:
    """The header at `position`; None when these bytes cannot be one."""
    if len(buffer) - position < HEADER_SIZE:
        return None
    fields = HEADER.unpack_from(buffer, position)
    if fields[0] != MAGIC:
        return None
    head = Head(fields)
    if head.count == 0 or head.size != HEADER_SIZE + 4 * head.count + head.data_size:
        return None
    return head


def checksum_holds(head: Head, buffer: bytes | memoryview, position: int = 0) -> bool:
    """Whether `buffer` holds the whole batch with the bytes that were written."""
    end = position + head.size
    return end <= len(buffer) and crc32c(memoryview(buffer)[position + CHECKED_FROM : end]) == head.crc


def decode_lengths(head: Head, buffer: bytes | memoryview, position: int = 0) -> array[int]:
    start = position + HEADER_SIZE
    return lengths_from(buffer[start : start + 4 * head.count])


def data_range(head: Head, position: int = 0) -> tuple[int, int]:
    """Where the bodies lie in a buffer that holds the batch at `position`."""
    start = position + HEADER_SIZE + 4 * head.count
    return start, start + head.data_size


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
