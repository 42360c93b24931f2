"""The changes of a primary on their way to its followers: numbered, in blocks.

Blocks stay in memory until every follower has confirmed them, so that one whose connection broke
for a moment goes on where it was. A lost follower is waited for as long as there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from nsparq.replication.frames import encode_changes
from nsparq.storage.files import Buffer

KEPT_BYTES: Final = 64 << 20
"""Limit on changes in memory. A follower that is further behind has to join anew."""
JOIN_LIMIT: Final = 16 << 10
"""Smaller blocks are joined: then a copy costs less than many pieces."""


@dataclass(slots=True)
class Block:
    """Consecutive changes."""

    first: int
    """Number of changes before these."""
    end: int
    size: int
    frame: list[Buffer]
    """For the followers, in pieces."""


class Feed:
    """Takes changes from any thread, one at a time. Everything else is called by one thread."""

    def __init__(self, wake: Callable[[], None], kept_bytes: int = KEPT_BYTES) -> None:
        """`wake` is called with the first change after flush(), by the thread that made it."""
        self.end = 0
        """Number of changes that flush() has taken."""
        self.recorded = 0
        """Number of all changes, with those that flush() has yet to take."""
        self._wake = wake
        self._is_awake = False
        """Whether flush() is about to be called."""
        self.kept_bytes = kept_bytes
        self._new: deque[list[bytes]] = deque()
        self._blocks: deque[Block] = deque()
        self._size = 0
        self._confirmed: dict[str, int] = {}
        """Changes that followers have, by name: of those that are connected, and of lost ones whose
        next change is still in memory."""

    def record(self, change: list[bytes]) -> int:
        """Takes an encoded change. Gives the number of changes, with this one. One thread calls it
        at a time."""
        self.recorded = number = self.recorded + 1
        self._new.append(change)
        # Behind the change, so that flush() either finds the change or is called again.
        if not self._is_awake:
            self._is_awake = True
            self._wake()
        return number

    def flush(self) -> None:
        """Make a block of the new changes."""
        self._is_awake = False
        count = len(self._new)
        if not count:
            return
        # Other threads may add more meanwhile.
        pieces = [piece for _ in range(count) for piece in self._new.popleft()]
        first, self.end = self.end, self.end + count
        frame, size = encode_changes(first, pieces)
        self._blocks.append(Block(first, self.end, size, [b"".join(frame)] if size < JOIN_LIMIT else frame))
        self._size += size
        while self._size > self.kept_bytes and len(self._blocks) > 1:
            self._drop_first()
            dropped = self._blocks[0].first
            self._confirmed = {name: made for name, made in self._confirmed.items() if made >= dropped}

    def _drop_first(self) -> None:
        self._size -= self._blocks.popleft().size

    def confirmed(self, name: str, number: int) -> None:
        """A follower will not ask for the first `number` changes again."""
        self._confirmed[name] = number
        needed = min(self._confirmed.values())
        while self._blocks and self._blocks[0].end <= needed:
            self._drop_first()

    def bytes_behind(self, number: int) -> int:
        """Bytes of the changes in memory behind so many."""
        behind = takewhile(lambda block: block.end > number, reversed(self._blocks))
        return sum(block.size for block in behind)

    def since(self, number: int) -> list[Block] | None:
        """The blocks behind so many changes. None if they are no longer in memory, or if no block
        begins there."""
        if number == self.end:
            return []
        if self._blocks and self._blocks[-1].first == number:
            return [self._blocks[-1]]
        # From the end: there may be a hundred thousand blocks, and most callers miss the last.
        behind = [*takewhile(lambda block: block.first >= number, reversed(self._blocks))]
        return behind[::-1] if behind and behind[-1].first == number else None
