"""From a consumer's connections to its handlers: the queue between them, the tasks that take from it, and the
threads in which handlers run that do not await."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, Final, Protocol

from nsparq.client.config import Config
from nsparq.client.message import Message, Reject, Requeue
from nsparq.client.rdy import Signal

logger = logging.getLogger(__name__)

Call = Callable[[Any], Awaitable[Any]]

SLICE_S: Final = 0.01
"""How long handlers that never wait may keep the event loop."""
FATAL: Final = (GeneratorExit, KeyboardInterrupt, SystemExit)
"""The end of the task or of the program. Whatever else a handler raises is about its message."""


class Inbox:
    """Messages that no handler has yet, in the order in which they came."""

    def __init__(self) -> None:
        self.queue: deque[Message] = deque()
        self.is_ended = False
        self._arrival = asyncio.Event()

    def put(self, messages: Iterable[Message]) -> None:
        self.queue.extend(messages)
        self._arrival.set()

    async def get(self) -> Message | None:
        """The one that has waited longest; None when there will be no more."""
        queue = self.queue
        while not queue:
            if self.is_ended:
                return None
            await self.change()
        return queue.popleft()

    async def change(self) -> None:
        """Until something has come, or will not, or wake() is called."""
        self._arrival.clear()
        await self._arrival.wait()

    def end(self) -> None:
        """Nothing will follow what is there."""
        self.is_ended = True
        self._arrival.set()

    def wake(self) -> None:
        """Have those that wait for more see whether it is still worth it."""
        self._arrival.set()

    def drop_answered(self) -> None:
        left = [message for message in self.queue if not message.is_answered]
        self.queue.clear()
        self.queue.extend(left)


class Owner(Protocol):
    """What workers know of their consumer."""

    config: Config

    @property
    def is_starved(self) -> bool: ...
    @property
    def is_stopping(self) -> bool: ...
    def answer_here(self, message: Message, signal: Signal, delay: float | None) -> None: ...
    def finish_all(self, messages: Sequence[Message]) -> None: ...
    async def give_up(self, message: Message, reason: str = "") -> None: ...


class Workers:
    """Tasks that take messages, singly or in batches, call the handler and answer by how it went."""

    def __init__(self, owner: Owner, inbox: Inbox, call: Call) -> None:
        self._owner, self._inbox, self._call = owner, inbox, call
        self._max_attempts = owner.config.max_attempts or math.inf

    async def work(self) -> None:
        """One message after the other, until there are no more."""
        call, answer = self._call, self._owner.answer_here
        queue, get = self._inbox.queue, self._inbox.get
        until = monotonic() + SLICE_S
        while (message := queue.popleft() if queue else await get()) is not None:
            if message.attempts > self._max_attempts:
                await self._owner.give_up(message)
                continue
            try:
                await call(message)
            except FATAL:
                raise
            except BaseException as error:
                await self._fail([message], error)
            else:
                if message.auto_response:
                    answer(message, Signal.RESUME, None)
            if monotonic() > until:
                await asyncio.sleep(0)
                until = monotonic() + SLICE_S

    async def work_in_batches(self, size: int, wait_s: float) -> None:
        """Up to `size` messages at a time, or those of `wait_s` seconds."""
        while (batch := await self._next_batch(size, wait_s)) is not None:
            if not batch:
                continue
            try:
                await self._call(batch)
            except FATAL:
                raise
            except BaseException as error:
                await self._fail(batch, error)
            else:
                self._owner.finish_all(batch)

    async def _next_batch(self, size: int, wait_s: float) -> list[Message] | None:
        """Messages until the batch is full, its time is up, or no more can come before some are answered.
        None when there will be no more at all."""
        owner, inbox = self._owner, self._inbox
        message = await inbox.get()
        if message is None:
            return None
        batch = [message]
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(batch) < size:
                    if inbox.queue:
                        batch.append(inbox.queue.popleft())
                    elif owner.is_stopping or owner.is_starved or inbox.is_ended:
                        break
                    else:
                        await inbox.change()
        for message in batch:
            if message.attempts > self._max_attempts and not message.is_answered:
                await owner.give_up(message)
        # Those of connections that were lost meanwhile are another's.
        return [message for message in batch if not message.is_answered]

    async def _fail(self, messages: list[Message], error: BaseException) -> None:
        """A handler has raised something."""
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise error
        if isinstance(error, Requeue):
            for message in messages:
                message.requeue(error.delay, backoff=error.backoff)
        elif isinstance(error, Reject):
            for message in messages:
                if not message.is_answered:
                    await self._owner.give_up(message, str(error))
        else:
            # Perhaps a task of the handler's own was cancelled: that is not the end of this one.
            what = messages[0] if len(messages) == 1 else f"{len(messages)} messages"
            logger.error("%s: the handler failed on %s", self._owner, what, exc_info=error)
            for message in messages:
                message.requeue()


def is_cancelled() -> bool:
    """Whether it is this task that is to end, not just something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Calls:
    """Makes functions of the user's awaitable. Those that are not coroutine functions run in threads, so that
    one that blocks keeps neither heartbeats nor other handlers from running."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads, self._name = threads, name
        self._pool: ThreadPoolExecutor | None = None

    def prepare(self, function: Callable[[Any], Any]) -> Call:
        if is_async(function):
            return function

        async def call(argument: Any) -> Any:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)
            loop, context = asyncio.get_running_loop(), contextvars.copy_context()
            result = await loop.run_in_executor(self._pool, context.run, _run, function, argument)
            # A function may give something to await without saying so, a lambda for one.
            return await result if inspect.isawaitable(result) else result

        return call

    def close(self) -> None:
        """A call that still runs cannot be ended, but nothing waits for it."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _run(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except StopIteration as error:
        # A future cannot carry it: whoever waits would wait for ever.
        raise RuntimeError("a handler raised StopIteration") from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    call = getattr(function, "__call__", None)  # noqa: B004  # an object with an async __call__ counts too
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
