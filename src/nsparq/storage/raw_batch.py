"""Batches decoded from the bytes of a LogRange, without a loop over single messages.

A reader that gets CorruptRange asks for the rest, from the sequence number in the error on, with
damaged batches left out (LogRange.read_verified).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from nsparq.errors import StorageError
from nsparq.storage.batch import CHECKED_FROM, HEADER, HEADER_SIZE, MAGIC

_U32 = np.dtype("<u4")


class CorruptRange(StorageError):
    """The bytes are not the batch that was written, or not all of it."""

    def __init__(self, position: int, sequence: int | None, reason: str) -> None:
        super().__init__(f"{reason} at byte {position}")
        self.position = position
        self.sequence = sequence
        """The first message that was not read; None if no batch came before it."""
        self.reason = reason


class RawBatch(NamedTuple):
    """Consecutive messages, published together: views into the decoded buffer."""

    base: int
    """Sequence number of the first message."""
    timestamp_ns: int
    due_ns: int
    """The time before which they must not be delivered; 0 for none."""
    lengths: npt.NDArray[np.uint32]
    data: memoryview
    """The bodies, end to end."""

    @property
    def end(self) -> int:
        """The sequence number after the last message."""
        return self.base + len(self.lengths)

    def between(self, start: int, end: int) -> RawBatch:
        """The messages with numbers from `start` to before `end`."""
        low = min(max(start - self.base, 0), len(self.lengths))
        high = max(low, min(end - self.base, len(self.lengths)))
        if low == 0 and high == len(self.lengths):
            return self
        first = int(self.lengths[:low].sum(dtype=np.int64))
        last = first + int(self.lengths[low:high].sum(dtype=np.int64))
        return self._replace(base=self.base + low, lengths=self.lengths[low:high], data=self.data[first:last])

    def offsets(self) -> npt.NDArray[np.int64]:
        """The start of each body in `data`, and the end of the last one."""
        offsets = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return offsets

    def bodies(self) -> list[bytes]:
        ends = self.offsets().tolist()
        return [bytes(self.data[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def find_batch(batches: Sequence[RawBatch], sequence: int) -> RawBatch | None:
    """The batch that holds a sequence number, among batches in order."""
    entry = bisect_right(batches, sequence, key=attrgetter("base")) - 1
    return batches[entry] if entry >= 0 and sequence < batches[entry].end else None


def iter_batches(buffer: bytes | bytearray | memoryview) -> Iterator[RawBatch]:
    """The batches of a range, each checked. Raises CorruptRange at the first damaged one."""
    view = memoryview(buffer)
    size = len(view)
    position = 0
    expected: int | None = None
    while position < size:
        if size - position < HEADER_SIZE:
            raise CorruptRange(position, expected, "the last batch is cut off")
        fields = HEADER.unpack_from(view, position)
        magic, crc, whole, _, _, base, timestamp_ns, due_ns, count, data_size = fields
        table = position + HEADER_SIZE
        data = table + 4 * count
        if magic != MAGIC or not count or whole != HEADER_SIZE + 4 * count + data_size:
            raise CorruptRange(position, expected, "no batch header")
        if position + whole > size:
            raise CorruptRange(position, expected, "the last batch is cut off")
        if crc32c(view[position + CHECKED_FROM : position + whole]) != crc:
            raise CorruptRange(position, expected, "checksum mismatch")
        yield RawBatch(
            base, timestamp_ns, due_ns, np.frombuffer(view, _U32, count, table), view[data : data + data_size]
        )
        position += whole
        expected = base + count
