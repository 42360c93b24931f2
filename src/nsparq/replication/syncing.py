"""Syncs that a follower makes beside the changes, so that a slow disk does not delay those.

A sync that waits for its turn covers later ones of the same file, too.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, NamedTuple

AT_ONCE: Final = 4
"""Syncs that run at the same time."""
MAX_WAITING: Final = 1000
"""More than this have to wait before further changes are made: each may hold a descriptor."""


class Sync(NamedTuple):
    number: int
    """Of the change that asks for it."""
    key: int | str
    """What is synced: the number of a file, or a name."""
    run: Callable[[], None]
    cancel: Callable[[], None]
    """Called instead of `run`, if it is not needed."""


class Syncing:
    """Lives in one event loop. `ended` is called after each sync, with its error."""

    def __init__(self, ended: Callable[[BaseException | None], None]) -> None:
        self._ended = ended
        self._waiting: dict[int | str, Sync] = {}
        """By key, the oldest first."""
        self._running: dict[asyncio.Task[None], int] = {}
        """With the numbers of their changes."""

    def add(self, syncs: Iterable[Sync]) -> None:
        for sync in syncs:
            if sync.key in self._waiting:
                sync.cancel()
            else:
                self._waiting[sync.key] = sync
        self._start()

    @property
    def before(self) -> int:
        """The syncs of this many changes are made; more than there are, if nothing is left to
        sync."""
        if not self._running and not self._waiting:
            return sys.maxsize
        first = [sync.number for sync in islice(self._waiting.values(), 1)]
        return min([*self._running.values(), *first], default=sys.maxsize) - 1

    async def has_room(self) -> None:
        """Wait until not too many wait."""
        while len(self._waiting) > MAX_WAITING:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Drop those that wait, and wait for those that run."""
        while self._waiting:
            self._waiting.popitem()[1].cancel()
        while self._running:
            await asyncio.wait([*self._running])

    def _start(self) -> None:
        while self._waiting and len(self._running) < AT_ONCE:
            sync = self._waiting.pop(next(iter(self._waiting)))
            task = asyncio.create_task(self._run(sync))
            self._running[task] = sync.number
            task.add_done_callback(self._finish)

    async def _run(self, sync: Sync) -> None:
        await asyncio.to_thread(sync.run)

    def _finish(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._start()
        self._ended(None if task.cancelled() else task.exception())
