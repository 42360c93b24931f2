"""Helpers for tasks and timers on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

logger = logging.getLogger(__name__)


class Alarm:
    """Calls a function once, at the earliest of the times that were set."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        self._loop, self._function = loop, function
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0

    def set(self, at: float | None) -> None:
        """Call the function at `at`, or earlier if that was set. None cancels."""
        if self._timer is not None:
            if at is not None and self._at <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer, self._at = self._loop.call_at(at, self._ring), at

    def _ring(self) -> None:
        self._timer = None
        self._function()


def log_failure(task: asyncio.Task[Any]) -> None:
    """Done callback for tasks that nobody awaits: logs an unexpected exception."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_coro(), exc_info=error)


async def wait_to_the_end(wait: Callable[[], Awaitable[object]], on_cancel: Callable[[], None]) -> None:
    """Await `wait()`, also after a cancellation: that calls `on_cancel`, and CancelledError is
    raised at the end."""
    was_cancelled = False
    while True:
        try:
            await wait()
            break
        except asyncio.CancelledError:
            was_cancelled = True
            on_cancel()
    if was_cancelled:
        raise asyncio.CancelledError


async def all_to_the_end(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all together. A cancellation goes to each of them, and CancelledError is raised when
    all have ended."""
    tasks = [asyncio.create_task(work) for work in works]
    call_soon = asyncio.get_running_loop().call_soon

    def cancel() -> None:
        for task in tasks:
            # Soon: a task that is cancelled before it has begun does nothing at all.
            call_soon(task.cancel)

    if tasks:
        await wait_to_the_end(lambda: asyncio.wait(tasks), cancel)
    for task in tasks:
        task.result()


def is_cancelled() -> bool:
    """Whether the current task was cancelled, and not only something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
