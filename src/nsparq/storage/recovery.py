"""Finds the batches in a file that a crash or a bad disk may have damaged.

A message body may itself look like a batch, if somebody publishes pieces of a log. So bytes after
damage are believed only where a batch can be: at the end of the damaged batch, if its header is
still plausible, or at a header whose numbers fit between the batch before the damage and the
number of messages that the skipped bytes could have held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from nsparq.storage.batch import HEADER_SIZE, MAGIC_PREFIX, Head, checksum_holds, decode_head

_WINDOW = 4 << 20
"""Bytes in memory while scanning, whatever the size of the segment."""

_LEAST_MESSAGE = 4
"""The fewest bytes that a message takes in a batch: its entry in the table of lengths."""

Read = Callable[[int, int], bytes]
"""Reads bytes of the file: (size, position)."""


class Found(NamedTuple):
    """A whole batch with a correct checksum."""

    position: int
    head: Head


class Damage(NamedTuple):
    """Bytes that are not a batch. A whole batch or the end of the file follows them."""

    position: int
    end: int


def scan(read: Read, size: int, *, first: int | None) -> Iterator[Found | Damage]:
    """Every whole batch of a file, and the damage between them.

    The first batch begins with the number `first`, and the others follow without a gap. None is
    for a file whose batches are in no order.
    """
    window = _Window(read, size)
    position, expected = 0, first
    while position < size:
        head = window.batch_at(position)
        if head is not None:
            yield Found(position, head)
            position += head.size
            expected = None if first is None else head.end
            continue
        end = _end_of_damage(window, position, size, expected)
        yield Damage(position, end)
        position = end


def end_of_damage(read: Read, position: int, size: int, expected: int | None) -> int:
    """The position after the damage at `position`; `size` if no batch follows. A batch that begins
    with the number `expected` should be there; None if the number is not known."""
    return _end_of_damage(_Window(read, size), position, size, expected)


def _end_of_damage(window: _Window, position: int, size: int, expected: int | None) -> int:
    head = window.head_at(position)
    if head is not None and head.base == expected:
        # The header is plausible, so the batch has the size it says, or ends with a torn file.
        end = position + head.size
        if end >= size or window.batch_at(end) is not None:
            return min(end, size)
    found = position + 1
    while (found := window.find_magic(found)) < size:
        head = window.head_at(found)
        if head is not None and _can_follow(head, expected, found - position):
            if window.batch_at(found) is not None:
                return found
        found += 1
    return size


def _can_follow(head: Head, expected: int | None, skipped_bytes: int) -> bool:
    return expected is None or expected <= head.base <= expected + skipped_bytes // _LEAST_MESSAGE


class _Window:
    """A file seen through a bounded buffer that moves forward."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._data = b""
        self._start = 0

    def _load(self, position: int, size: int) -> int:
        """Load `size` bytes from `position` on, as far as the file has them. Gives their offset in
        the buffer."""
        offset = position - self._start
        if offset < 0 or offset + size > len(self._data):
            self._data = self._read(min(max(size, _WINDOW), self._size - position), position)
            self._start, offset = position, 0
        return offset

    def head_at(self, position: int) -> Head | None:
        if self._size - position < HEADER_SIZE:
            return None
        offset = self._load(position, HEADER_SIZE)
        return decode_head(self._data, offset)

    def batch_at(self, position: int) -> Head | None:
        """The header of the batch at `position`, if the batch is whole and its checksum correct."""
        head = self.head_at(position)
        if head is None or position + head.size > self._size:
            return None
        offset = self._load(position, head.size)
        return head if checksum_holds(head, self._data, offset) else None

    def find_magic(self, position: int) -> int:
        """The next place from `position` on that begins like a batch; the file's size if none
        does."""
        while self._size - position >= HEADER_SIZE:
            offset = self._load(position, HEADER_SIZE)
            found = self._data.find(MAGIC_PREFIX, offset)
            if found >= 0:
                return self._start + found
            # The magic may lie across two windows.
            position = max(position + 1, self._start + len(self._data) - len(MAGIC_PREFIX) + 1)
        return self._size
