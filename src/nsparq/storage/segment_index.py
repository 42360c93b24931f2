"""The sparse index of a segment: where about every 64 KiB of it begins.

On disk, little endian, it holds what a restart needs, so that opening a log reads no message:

 +-------+------+-----------------------------+--------+------+-----------+-----------+-------+----------+
 | magic | crc  | base end size first_ns last | counts | mark | sequences | positions | times | deferred |
 +-------+------+-----------------------------+--------+------+-----------+-----------+-------+----------+
  "NQX3"  crc32c of everything else             2×u64    u64    u64 each    u64 each    i64     pairs of i64

It is written when the segment is sealed and at a clean stop. It counts only if it names the
segment's size. Files that begin with "NQX2" have no mark. Files that begin with "NQX1" have no
times, and are not used.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

from crc32c import crc32c

INDEX_EVERY: Final = 64 << 10

_HEAD = struct.Struct("<4sIQQQqqQQ")
_MAGIC = b"NQX3"
_MAGIC_WITHOUT_MARK = b"NQX2"
_MAGIC_WITHOUT_TIMES = b"NQX1"
_MARK = struct.Struct("<Q")


class Extent(NamedTuple):
    """The numbers, the bytes and the times of a segment."""

    base: int
    end: int
    size: int
    first_ns: int
    last_ns: int


Entry = tuple[int, int]
"""Position of a batch, and the sequence number it begins with."""


class SegmentIndex:
    """Entries in the order of the file, and the deferred messages of the segment."""

    def __init__(self) -> None:
        self._sequences = array("Q")
        self._positions = array("Q")
        self._times = array("q")
        """For each entry, the latest publish time before it: in order, even if the clock was
        not."""
        self.deferred = array("q")
        """Pairs of sequence number and due time."""
        self.next_position = 0
        """The first batch at this position or after it gets the next entry."""

    def add(self, position: int, base: int, last_ns: int) -> None:
        """Add the entry of a batch. `last_ns` is the latest publish time before it."""
        self._sequences.append(base)
        self._positions.append(position)
        self._times.append(last_ns)
        self.next_position = position + INDEX_EVERY

    def before(self, sequence: int) -> Entry | None:
        """The last entry at or before a sequence number."""
        return self._entry(bisect_right(self._sequences, sequence) - 1)

    def after(self, position: int, max_bytes: int) -> Entry | None:
        """The last entry within `max_bytes` after `position`, or else the first one after it. None
        if that is the segment's end."""
        following = bisect_right(self._positions, position)
        return self._entry(max(following, bisect_right(self._positions, position + max_bytes) - 1))

    def around(self, timestamp_ns: int) -> tuple[Entry, Entry | None]:
        """The entries around the first message published at or after a time; the second is None at
        the segment's end."""
        number = max(0, bisect_left(self._times, timestamp_ns) - 1)
        return (self._positions[number], self._sequences[number]), self._entry(number + 1)

    def _entry(self, number: int) -> Entry | None:
        if 0 <= number < len(self._positions):
            return self._positions[number], self._sequences[number]
        return None

    def encode(self, extent: Extent, mark: int) -> bytes:
        arrays = (self._sequences, self._positions, self._times, self.deferred)
        body = _MARK.pack(mark) + b"".join(entries.tobytes() for entries in arrays)
        counts = (len(self._positions), len(self.deferred))
        crc = crc32c(body, crc32c(_HEAD.pack(_MAGIC, 0, *extent, *counts)))
        return _HEAD.pack(_MAGIC, crc, *extent, *counts) + body

    @classmethod
    def decode(cls, raw: bytes, mark: int) -> tuple[Extent, SegmentIndex] | None:
        """What encode() was given. None for the oldest format and for a file cut short. Raises
        ValueError for a damaged index, and for one with another mark, where both are known."""
        if len(raw) < _HEAD.size:
            return None
        magic, crc, *fields = _HEAD.unpack_from(raw)
        body = raw[_HEAD.size :]
        if magic == _MAGIC_WITHOUT_TIMES:
            return None
        is_known = magic in (_MAGIC, _MAGIC_WITHOUT_MARK)
        if not is_known or crc32c(body, crc32c(_HEAD.pack(magic, 0, *fields))) != crc:
            raise ValueError("damaged")
        if magic == _MAGIC:
            (found,) = _MARK.unpack_from(body)
            body = body[_MARK.size :]
            if found and mark and found != mark:
                raise ValueError("from another log")
        entries = fields[5]
        index = cls()
        index._sequences.frombytes(body[: 8 * entries])
        index._positions.frombytes(body[8 * entries : 16 * entries])
        index._times.frombytes(body[16 * entries : 24 * entries])
        index.deferred.frombytes(body[24 * entries :])
        if entries:
            index.next_position = index._positions[-1] + INDEX_EVERY
        return Extent(*fields[:5]), index
