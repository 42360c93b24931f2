"""TOUCH by itself: nothing that a consumer holds times out, however long its handler takes, or it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from nsparq.client.connection import Connection
from nsparq.client.message import Message

TOUCH_SHARE: Final = 3
"""A message is touched when this part of its timeout has passed."""
LEAST_S: Final = 0.005


class Touching:
    """schedule() it whenever a connection was made; it goes on for as long as there is one."""

    def __init__(
        self,
        held: Iterable[Message],
        connections: Mapping[str, Connection],
        touch: Callable[[Message], None],
    ) -> None:
        """`held` and `connections` are the consumer's own, as they are at any time."""
        self._held, self._connections, self._touch = held, connections, touch
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def schedule(self) -> None:
        if not self._connections:
            return
        shortest = min(connection.msg_timeout for connection in self._connections.values())
        at = self._loop.time() + max(shortest / TOUCH_SHARE / 2, LEAST_S)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._look), at

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for message in self._held:
            if now - message.touched >= message._connection.msg_timeout / TOUCH_SHARE:
                self._touch(message)
        self.schedule()
