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

from nsparq.errors import StorageError
from nsparq.storage.batch import HEADER_SIZE, checksum_holds, data_range, decode_head

_U32 = np.dtype("<u4")


class CorruptRange(StorageError):
    """The bytes are not the batch that was written, or not all of it."""

    def __init__(self, position: int, sequence: int | None, reason: str) -> None:
        super().__init__(f"{reason} at byte {position}")
        self.position = position
        self.sequence = sequence
        """The first message that was not read; None if no batch came before it."""
        self.reason = reason


class RawBlocks(NamedTuple):
    """Strings of bytes, end to end: views into the decoded buffer."""

    lengths: npt.NDArray[np.uint32]
    data: memoryview

    def between(self, low: int, high: int) -> RawBlocks:
        """Those from index `low` to before `high`."""
        first = int(self.lengths[:low].sum(dtype=np.int64))
        last = first + int(self.lengths[low:high].sum(dtype=np.int64))
        return RawBlocks(self.lengths[low:high], self.data[first:last])

    def offsets(self) -> npt.NDArray[np.int64]:
        """The start of each in `data`, and the end of the last one."""
        offsets = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return offsets

    def split(self) -> list[bytes]:
        ends, data = self.offsets().tolist(), bytes(self.data)
        return [data[a:b] for a, b in zip(ends, ends[1:], strict=False)]


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
    size: int
    """Bytes of the whole batch in the buffer."""
    tag: int = 0
    headers: RawBlocks | None = None
    """Header blocks of the messages; None if no message has headers."""

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
        lengths, data = RawBlocks(self.lengths, self.data).between(low, high)
        headers = None if self.headers is None else self.headers.between(low, high)
        return self._replace(base=self.base + low, lengths=lengths, data=data, headers=headers)

    def offsets(self) -> npt.NDArray[np.int64]:
        """The start of each body in `data`, and the end of the last one."""
        return RawBlocks(self.lengths, self.data).offsets()

    def bodies(self) -> list[bytes]:
        return RawBlocks(self.lengths, self.data).split()

    def blocks(self) -> list[bytes]:
        """The header block of each message, empty where it has no headers."""
        return [b""] * len(self.lengths) if self.headers is None else self.headers.split()


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
        head = decode_head(view, position)
        if head is None:
            raise CorruptRange(position, expected, "no batch header")
        if position + head.size > size:
            raise CorruptRange(position, expected, "the last batch is cut off")
        if not checksum_holds(head, view, position):
            raise CorruptRange(position, expected, "checksum mismatch")
        data, tail = data_range(head, position)
        count, end = head.messages, position + head.size
        yield RawBatch(
            head.base,
            head.timestamp_ns,
            head.due_ns,
            np.frombuffer(view, _U32, count, position + HEADER_SIZE),
            view[data:tail],
            head.size,
            head.tag,
            None
            if tail == end
            else RawBlocks(np.frombuffer(view, _U32, count, tail), view[tail + 4 * count : end]),
        )
        position = end
        expected = head.end
