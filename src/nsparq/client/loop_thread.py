"""An event loop in its own thread, for code that does not use asyncio. It keeps one resource open
and lets other threads call functions on the loop."""

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

__all__ = ["LoopThread", "NotRunning"]

T = TypeVar("T")
R = TypeVar("R")
Run = Callable[[Coroutine[Any, Any, None]], object]

START_S: Final = 30.0
STOP_S: Final = 30.0
CALL_S: Final = 30.0


class NotRunning(RuntimeError):
    """The event loop has ended."""


class LoopThread(Generic[R]):
    """Enters the context manager that `make` returns, on a loop in a thread, and exits it at
    stop(). The thread is a daemon: a program that forgets stop() still ends, and atexit closes the
    resource.

    After fork() it belongs to the parent. In the child there is no thread, and the sockets are
    shared with the parent, so nothing runs there and stop() does nothing."""

    def __init__(
        self,
        make: Callable[[], AbstractAsyncContextManager[R]],
        *,
        name: str,
        run: Run = asyncio.run,
        on_loop_error: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Raises what opening the resource raises; then nothing is left open."""
        self.loop: asyncio.AbstractEventLoop
        self.resource: R
        self._make = make
        self._on_loop_error = on_loop_error
        self._stopping: asyncio.Event
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._calls: set[concurrent.futures.Future[Any]] = set()
        """Not yet done."""
        self._has_ended = False
        """The loop runs nothing any more."""
        self._pid = os.getpid()
        self._is_abandoned = False
        """The caller gave up before the resource was open."""
        self._thread = threading.Thread(target=self._work, args=(run,), name=name, daemon=True)
        self._thread.start()
        try:
            self._opened.result(START_S)
        except BaseException:
            # Opening failed or took too long, or the caller was interrupted.
            self._abandon()
            raise
        _live.add(self)

    def _abandon(self) -> None:
        self._is_abandoned = True
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
        finally:
            # Calls that the loop has taken and not run would be waited for in vain. call() looks
            # in the other order, so none is missed.
            self._has_ended = True
            for call in [*self._calls]:
                call.cancel()

    async def _keep_open(self) -> None:
        self.loop = asyncio.get_running_loop()
        if self._on_loop_error is not None:
            report = self._on_loop_error
            self.loop.set_exception_handler(lambda _, context: report(context))
        self._stopping = asyncio.Event()
        self._task = asyncio.current_task()
        if self._is_abandoned:
            return
        async with self._make() as self.resource:
            self._opened.set_result(None)
            await self._stopping.wait()

    @property
    def is_running(self) -> bool:
        return self.is_ours and self._thread.is_alive()

    @property
    def is_ours(self) -> bool:
        """False in a child of the process that started it."""
        return self._pid == os.getpid()

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = CALL_S) -> Any:
        """Call a function on the loop and return its result, awaited if it is awaitable. Raises
        NotRunning, TimeoutError. If the caller is interrupted, the call is cancelled."""
        if not self.is_running:
            raise NotRunning(f"{self._thread.name} has been stopped")
        if self._thread is threading.current_thread():
            raise RuntimeError("called from the thread of the event loop itself")

        async def work() -> Any:
            result = function(*arguments)
            return await result if inspect.isawaitable(result) else result

        working = work()
        try:
            future = asyncio.run_coroutine_threadsafe(working, self.loop)
        except RuntimeError as error:
            # Another thread has stopped it since.
            working.close()
            raise NotRunning(f"{self._thread.name} has been stopped") from error
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        if self._has_ended:
            future.cancel()
        try:
            return future.result(timeout)
        except BaseException as error:
            future.cancel()
            if self._has_ended and inspect.getcoroutinestate(working) == inspect.CORO_CREATED:
                working.close()
                raise NotRunning(f"{self._thread.name} has been stopped") from error
            raise

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the loop soon. Does nothing once the loop has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def stop(self, timeout: float = STOP_S) -> None:
        """Close the resource and join the thread. Raises what closing raised. Twice is safe."""
        if not self.is_ours:
            # Waking the loop would wake the parent's loop.
            return
        _live.discard(self)
        self.post(self._stopping.set)
        if self._thread is threading.current_thread():
            # Called by the garbage collector in this thread; the thread ends by itself.
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name} did not stop within {timeout:g} s")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


_live: weakref.WeakSet[LoopThread[Any]] = weakref.WeakSet()


_of_the_parent: list[LoopThread[Any]] = []
"""Kept forever in a child: closing a loop would change the epoll that the parent shares."""


def _leave_to_parent() -> None:
    _of_the_parent.extend(_live)
    _live.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _stop_all() -> None:
    """Close everything while daemon threads still run: the interpreter stops them at its end."""
    for thread in [*_live]:
        with suppress(Exception):
            thread.stop(5)
