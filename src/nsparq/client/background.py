"""An event loop in a thread of its own, for code that does not await: it keeps one thing open and lets other
threads call into it."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Generic, TypeVar

__all__ = ["LoopThread"]

T = TypeVar("T")
R = TypeVar("R")
Run = Callable[[Coroutine[Any, Any, None]], object]

START_S: Final = 30.0
STOP_S: Final = 30.0
CALL_S: Final = 30.0


class LoopThread(Generic[R]):
    """Opens what `make` gives, on a loop in a thread, and closes it at stop(). The thread is a daemon: a
    program that forgets stop() still ends, and what is open is closed at its end.

    After fork() it is the parent's: the child has neither the thread nor a right to what is open, whose
    sockets both processes hold. There nothing runs, and stop() does nothing."""

    def __init__(
        self,
        make: Callable[[], AbstractAsyncContextManager[R]],
        *,
        name: str,
        run: Run = asyncio.run,
        on_loop_error: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Raises what opening raises, with nothing left over."""
        self.loop: asyncio.AbstractEventLoop
        self.resource: R
        self._make = make
        self._on_loop_error = on_loop_error
        self._stopping: asyncio.Event
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._pid = os.getpid()
        self._is_unwanted = False
        """The caller has gone before it was open."""
        self._thread = threading.Thread(target=self._work, args=(run,), name=name, daemon=True)
        self._thread.start()
        try:
            self._opened.result(START_S)
        except BaseException:
            # It failed, is too slow, or the caller was interrupted while waiting.
            self._abandon()
            raise
        _live.add(self)

    def _abandon(self) -> None:
        self._is_unwanted = True
        if self._task is not None:
            self.post(self._task.cancel)
        self._thread.join(STOP_S)

    def _work(self, run: Run) -> None:
        try:
            run(self._keep_open())
        except BaseException as error:
            if self._opened.done():
                self._failure = error
            else:
                self._opened.set_exception(error)

    async def _keep_open(self) -> None:
        self.loop = asyncio.get_running_loop()
        if self._on_loop_error is not None:
            report = self._on_loop_error
            self.loop.set_exception_handler(lambda _, context: report(context))
        self._stopping = asyncio.Event()
        self._task = asyncio.current_task()
        if self._is_unwanted:
            return
        async with self._make() as self.resource:
            self._opened.set_result(None)
            await self._stopping.wait()

    @property
    def is_running(self) -> bool:
        return self.is_ours and self._thread.is_alive()

    @property
    def is_ours(self) -> bool:
        """False in a child of the process that has started it."""
        return self._pid == os.getpid()

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = CALL_S) -> Any:
        """The result of a function, or of the coroutine that it gives, called on the loop. Raises
        TimeoutError; whoever is interrupted while waiting leaves nothing running."""
        if not self.is_running:
            raise RuntimeError(f"{self._thread.name} has been stopped")
        if self._thread is threading.current_thread():
            raise RuntimeError("called from the thread that would have to answer")

        async def work() -> Any:
            result = function(*arguments)
            return await result if inspect.isawaitable(result) else result

        future = asyncio.run_coroutine_threadsafe(work(), self.loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a function called on the loop, soon. Without effect once the loop has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def stop(self, timeout: float = STOP_S) -> None:
        """Close, and wait for the end of the thread. Raises what closing raised; twice is safe."""
        if not self.is_ours:
            # Even to wake the loop would be to wake the parent's.
            return
        _live.discard(self)
        self.post(self._stopping.set)
        if self._thread is threading.current_thread():
            # The collector found us here; the thread ends by itself.
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name} did not stop within {timeout:g} s")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


_live: weakref.WeakSet[LoopThread[Any]] = weakref.WeakSet()


_of_the_parent: list[LoopThread[Any]] = []
"""Kept in a child for good: collecting a loop would undo what the parent's loop waits for; they share it."""


def _leave_to_parent() -> None:
    _of_the_parent.extend(_live)
    _live.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _stop_all() -> None:
    """Daemon threads do not outlive the interpreter's last moments: what they have open is closed before."""
    for thread in [*_live]:
        with suppress(Exception):
            thread.stop(5)
