"""Finding the batches in a file that a crash, or a bad disk, may have damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from nsparq.storage.batch import HEADER_SIZE, MAGIC, Head, checksum_holds, decode_head

_WINDOW = 4 << 20
"""Bytes held while scanning: recovery costs the same memory whatever the segment's size."""

Read = Callable[[int, int], bytes]
"""Bytes of the file: (size, position)."""


class Found(NamedTuple):
    """A whole batch, checksum and all."""

    position: int
    head: Head


class Damage(NamedTuple):
    """Bytes that are no batch, with a whole batch, or the end of the file, behind them."""

    position: int
    end: int


def scan(read: Read, position: int, size: int) -> Iterator[Found | Damage]:
    """Every whole batch from `position` to `size`, and every stretch that is none."""
    window = _Window(read, size)
    while position < size:
        head = window.batch_at(position)
        if head is not None:
            yield Found(position, head)
            position += head.size
            continue
        behind = _next_batch(window, position + 1, size)
        yield Damage(position, behind)
        position = behind


def next_batch(read: Read, position: int, size: int) -> int:
    """Where the first whole batch at or after `position` begins; `size` when there is none."""
    return _next_batch(_Window(read, size), position, size)


def _next_batch(window: _Window, position: int, size: int) -> int:
    while position < size:
        data = window.bytes_at(position, min(_WINDOW, size - position))
        found = data.find(MAGIC)
        if found < 0:
            # The magic may straddle two windows.
            position += max(1, len(data) - len(MAGIC) + 1)
            continue
        position += found
        if window.batch_at(position) is not None:
            return position
        position += 1
    return size


class _Window:
    """A file seen through a bounded buffer that moves forward."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._data = b""
        self._start = 0

    def bytes_at(self, position: int, size: int) -> bytes:
        offset = position - self._start
        if offset < 0 or offset + size > len(self._data):
            self._data = self._read(max(size, min(_WINDOW, self._size - position)), position)
            self._start, offset = position, 0
        return self._data[offset : offset + size]

    def batch_at(self, position: int) -> Head | None:
        """The header of the batch at `position`, if the whole batch is there and is what was written."""
        head = decode_head(self.bytes_at(position, min(HEADER_SIZE, self._size - position)))
        if head is None or position + head.size > self._size:
            return None
        if head.size > len(self._data) - (position - self._start):
            self.bytes_at(position, head.size)
        return head if checksum_holds(head, self._data, position - self._start) else None
