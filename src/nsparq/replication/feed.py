"""The changes of a primary on their way to its followers: numbered, in blocks.

The latest blocks stay in memory, so that a follower whose connection broke for a moment goes on
where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from threading import Lock
from typing import Final, NamedTuple

from nsparq.replication.changes import Change
from nsparq.storage.files import Buffer

KEPT_BYTES: Final = 64 << 20
"""Bytes of changes in memory. A follower that is further behind has to join anew."""
JOIN_LIMIT: Final = 16 << 10
"""Smaller blocks are joined: then a copy costs less than many pieces."""


class Block(NamedTuple):
    """Consecutive changes."""

    first: int
    """Number of changes before these."""
    end: int
    size: int
    pieces: list[Buffer]
    """The changes, encoded."""


class Feed:
    """Takes changes from any thread. Everything else is called by one thread."""

    def __init__(self, wake: Callable[[], None], kept_bytes: int = KEPT_BYTES) -> None:
        """`wake` is called with the first change after flush(), by the thread that made it."""
        self.end = 0
        """Number of changes that flush() has taken."""
        self._wake = wake
        self.kept_bytes = kept_bytes
        self._lock = Lock()
        self._new: list[Change] = []
        self._blocks: deque[Block] = deque()
        self._size = 0

    def record(self, change: Change) -> int:
        """Gives the number of changes, with this one."""
        with self._lock:
            self._new.append(change)
            count = len(self._new)
            number = self.end + count
        if count == 1:
            self._wake()
        return number

    @property
    def recorded(self) -> int:
        """Number of all changes, with those that flush() has yet to take."""
        with self._lock:
            return self.end + len(self._new)

    def flush(self) -> None:
        """Make a block of the new changes."""
        with self._lock:
            new, self._new = self._new, []
            first, self.end = self.end, self.end + len(new)
        if not new:
            return
        pieces = [piece for change in new for piece in change.pieces]
        size = sum(map(len, pieces))
        self._blocks.append(Block(first, self.end, size, [b"".join(pieces)] if size < JOIN_LIMIT else pieces))
        self._size += size
        while self._size > self.kept_bytes and len(self._blocks) > 1:
            self._size -= self._blocks.popleft().size

    def bytes_behind(self, number: int) -> int:
        """Bytes of the changes in memory behind so many."""
        behind = takewhile(lambda block: block.end > number, reversed(self._blocks))
        return sum(block.size for block in behind)

    def since(self, number: int) -> list[Block] | None:
        """The blocks behind so many changes. None if they are no longer in memory, or if no block
        begins there."""
        if number == self.end:
            return []
        # From the end: there may be a hundred thousand blocks, and most callers miss the last.
        behind = [*takewhile(lambda block: block.first >= number, reversed(self._blocks))]
        return behind[::-1] if behind and behind[-1].first == number else None
