"""From a consumer's connections to its handlers: the queue of messages, the tasks that take from
it, and the threads that run handlers which are not coroutine functions."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from nsparq.client.consume.event_loop import is_cancelled, log_failure
from nsparq.client.consume.rdy import Signal
from nsparq.client.consume.retries import FailureLog
from nsparq.client.message import Message, Reject, Requeue

if TYPE_CHECKING:
    from nsparq.client.consume.in_flight import InFlight
    from nsparq.client.consumer import Consumer

logger = logging.getLogger(__name__)

Call = Callable[[Any], Awaitable[Any]]

SLICE_S: Final = 0.01
"""How long handlers that never wait may keep the event loop."""
RESTART_S: Final = 1.0
"""Pause before a worker that failed is replaced."""
FATAL: Final = (GeneratorExit, KeyboardInterrupt, SystemExit)
"""These end the task or the program. Any other exception of a handler concerns its message only."""


class Inbox:
    """Messages that no handler has yet, in order of arrival."""

    def __init__(self) -> None:
        self.queue: deque[Message] = deque()
        self.is_ended = False
        self._arrival = asyncio.Event()

    def put(self, messages: Iterable[Message]) -> None:
        self.queue.extend(messages)
        self._arrival.set()

    async def get(self) -> Message | None:
        """The oldest message; None when no more will come."""
        queue = self.queue
        while not queue:
            if self.is_ended:
                return None
            await self.change()
        return queue.popleft()

    async def change(self) -> None:
        """Wait for put(), end() or wake()."""
        self._arrival.clear()
        await self._arrival.wait()

    def end(self) -> None:
        """No more messages will come."""
        self.is_ended = True
        self._arrival.set()

    def wake(self) -> None:
        """Make those that wait in change() check whether to go on."""
        self._arrival.set()

    def drop_answered(self) -> None:
        left = [message for message in self.queue if not message.is_answered]
        self.queue.clear()
        self.queue.extend(left)


class Workers:
    """The tasks that take messages, call the handler, and answer by its outcome."""

    def __init__(
        self,
        consumer: Consumer,
        inbox: Inbox,
        in_flight: InFlight,
        call: Call | None,
        batch_size: int,
        batch_timeout: float,
    ) -> None:
        """`call` is the handler; it gets lists unless `batch_size` is 0."""
        self.tasks: list[asyncio.Task[None]] = []
        self._consumer, self._inbox, self._in_flight = consumer, inbox, in_flight
        tracing = consumer.config.tracing
        if call is not None and tracing is not None:
            call = tracing.trace_handler(call, consumer.topic, consumer.channel)
        self._call = call
        self._batch_size, self._batch_timeout = batch_size, batch_timeout
        self._max_attempts = consumer.config.max_attempts or math.inf
        self._failures = FailureLog()

    @property
    def has_handler(self) -> bool:
        return self._call is not None

    def start(self, count: int) -> None:
        for _ in range(count):
            self._add()

    def _add(self) -> None:
        if self._call is None or self._consumer.is_stopping:
            return
        work = self._work_in_batches(self._call) if self._batch_size else self._work(self._call)
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self.tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        log_failure(task)
        is_error = not task.cancelled() and isinstance(task.exception(), Exception)
        if is_error and not self._consumer.is_stopping:
            # This should never happen. But a consumer that silently consumes nothing would be
            # worse.
            self.tasks.remove(task)
            asyncio.get_running_loop().call_later(RESTART_S, self._add)

    async def _work(self, call: Call) -> None:
        """Handle one message after the other, until no more come."""
        answer = self._in_flight.answer_here
        queue, get = self._inbox.queue, self._inbox.get
        until = monotonic() + SLICE_S
        while (message := queue.popleft() if queue else await get()) is not None:
            if message.attempts > self._max_attempts:
                await self._consumer.give_up(message)
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

    async def _work_in_batches(self, call: Call) -> None:
        while (batch := await self._next_batch()) is not None:
            if not batch:
                continue
            try:
                await call(batch)
            except FATAL:
                raise
            except BaseException as error:
                await self._fail(batch, error)
            else:
                self._in_flight.finish_all(batch)

    async def _next_batch(self) -> list[Message] | None:
        """Collect messages until the batch is full, its time is up, or no more can come before some
        are answered. None when no more will come at all."""
        consumer, inbox = self._consumer, self._inbox
        message = await inbox.get()
        if message is None:
            return None
        batch = [message]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._batch_timeout):
                while len(batch) < self._batch_size:
                    if inbox.queue:
                        batch.append(inbox.queue.popleft())
                    elif consumer.is_stopping or consumer.is_starved or inbox.is_ended:
                        break
                    else:
                        await inbox.change()
        for message in batch:
            if message.attempts > self._max_attempts and not message.is_answered:
                await self._consumer.give_up(message)
        # Leave out the messages of connections that were lost in the meantime.
        return [message for message in batch if not message.is_answered]

    async def _fail(self, messages: list[Message], error: BaseException) -> None:
        """The handler raised `error`."""
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise error
        if isinstance(error, Requeue):
            for message in messages:
                message.requeue(error.delay, backoff=error.backoff)
        elif isinstance(error, Reject):
            for message in messages:
                if not message.is_answered:
                    await self._consumer.give_up(message, str(error))
        else:
            # A CancelledError gets here when a task inside the handler was cancelled, not this one.
            delays = [self._in_flight.requeue_delay(message.attempts) for message in messages]
            what = messages[0] if len(messages) == 1 else f"{len(messages)} messages"
            self._failures.add(
                f"{self._consumer}: the handler failed on {what}",
                error,
                delay=delays[0],
                attempts=messages[0].attempts,
                limit=self._consumer.config.max_attempts,
            )
            for message, delay in zip(messages, delays, strict=True):
                message.requeue(delay)


class Calls:
    """Makes the user's functions awaitable. Those that are not coroutine functions run in threads,
    so that one that blocks does not delay heartbeats or other handlers."""

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
            # A plain function, such as a lambda, may return an awaitable.
            return await result if inspect.isawaitable(result) else result

        return call

    def close(self) -> None:
        """Does not wait for calls that still run: threads cannot be ended."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _run(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except StopIteration as error:
        # A future cannot carry StopIteration: its waiter would wait forever.
        raise RuntimeError("a handler raised StopIteration") from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of it returns an awaitable."""
    call = getattr(function, "__call__", None)  # noqa: B004  # an object with an async __call__ counts too
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
