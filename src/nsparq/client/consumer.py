"""A consumer: one channel of one topic, from as many nsqd as have it.

    async def handle(message):
        print(message.body)

    async with Consumer("events", "print", handle, nsqlookupd=["127.0.0.1:4161"]):
        await asyncio.sleep(60)

or, without a handler, `async for message in consumer`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic
from typing import Any, Final

from nsparq.client.config import Config
from nsparq.client.connection import Connection
from nsparq.client.errors import ClientError, ConnectFailed, Stopped
from nsparq.client.lookup import Lookup, LookupFailed
from nsparq.client.message import Message, Requeue
from nsparq.client.rdy import Distribution, Signal
from nsparq.names import is_valid_name
from nsparq.wire import client as wire
from nsparq.wire.client import Received

__all__ = ["Consumer"]

logger = logging.getLogger(__name__)

Handler = Callable[[Message], Any]
BatchHandler = Callable[[list[Message]], Any]
GiveUp = Callable[[Message], Any]

SLICE_S: Final = 0.01
"""How long handlers that never wait may keep the event loop."""
TOUCH_SHARE: Final = 3
"""A message is touched when this part of its timeout has passed."""
STOP_S: Final = 30.0
PREFETCH: Final = 8
"""Messages per handler at a time that are asked for when nothing is said of max_in_flight."""


class Consumer:
    """start() it, or use it as a context manager; stop() finishes what is in flight."""

    def __init__(
        self,
        topic: str,
        channel: str,
        handler: Handler | None = None,
        *,
        nsqd: Iterable[str] = (),
        nsqlookupd: Iterable[str] = (),
        max_in_flight: int | None = None,
        concurrency: int = 1,
        batch_handler: BatchHandler | None = None,
        batch_size: int = 100,
        batch_timeout: float = 1.0,
        on_give_up: GiveUp | None = None,
        auto_touch: bool = True,
        config: Config | None = None,
    ) -> None:
        """A handler may be a coroutine function or a plain one, which then runs in a thread. `concurrency`
        is how many run at a time. A batch handler gets up to `batch_size` messages, or fewer after
        `batch_timeout` seconds. `on_give_up` is told of messages that were tried more than
        `config.max_attempts` times, before they are finished."""
        for what, name in (("topic", topic), ("channel", channel)):
            if not is_valid_name(name.encode()):
                raise ValueError(f"invalid {what} name {name!r}")
        if handler is not None and batch_handler is not None:
            raise ValueError("a handler or a batch handler, not both")
        if concurrency < 1 or batch_size < 1:
            raise ValueError("concurrency and batch_size are at least 1")
        config = config or Config()
        if max_in_flight is None and config.max_in_flight == 1:
            max_in_flight = concurrency * (batch_size if batch_handler else PREFETCH)
        if max_in_flight is not None:
            config = replace(config, max_in_flight=max_in_flight)
        self.topic, self.channel, self.config = topic, channel, config
        self.messages_received = 0
        self.messages_finished = 0
        self.messages_requeued = 0
        self.messages_given_up = 0
        self._handler = handler
        self._batch_handler = batch_handler
        self._batch_size, self._batch_timeout = batch_size, batch_timeout
        self._concurrency = concurrency
        self._on_give_up = on_give_up
        self._auto_touch = auto_touch
        self._direct = list(dict.fromkeys(nsqd))
        self._lookup = Lookup(nsqlookupd, config)
        self._distribution = Distribution(config)
        self._connections: dict[str, Connection] = {}
        self._connecting: set[str] = set()
        self._queue: deque[Message] = deque()
        self._held: dict[Message, None] = {}
        """Messages not yet answered, in the order in which they came."""
        self._arrival: asyncio.Event
        self._lost = asyncio.Event()
        """A connection was lost: time to ask nsqlookupd."""
        self._gone = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._workers: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop
        self._is_started = False
        self._is_stopping = False
        self._stopped: asyncio.Future[None] | None = None

    # life

    async def __aenter__(self) -> Consumer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begin. Brokers that cannot be reached are tried again and again."""
        if self._is_stopping:
            raise Stopped
        if self._is_started:
            raise RuntimeError("already started")
        self._is_started = True
        self._loop = asyncio.get_running_loop()
        self._arrival = asyncio.Event()
        if self._handler is not None or self._batch_handler is not None:
            work = self._work if self._handler is not None else self._work_in_batches
            self._workers = [self._loop.create_task(work()) for _ in range(self._concurrency)]
        for address in self._direct:
            self._launch(self._keep(address))
        if self._lookup.addresses:
            self._launch(self._poll())
        if self._auto_touch:
            self._launch(self._touch_all())

    async def stop(self, grace: float = STOP_S) -> None:
        """Take no new messages, let what is in flight be answered, close. What is not answered within
        `grace` seconds is left to the server, which sends it to another."""
        if self._stopped is not None:
            await asyncio.shield(self._stopped)
            return
        self._is_stopping = True
        if not self._is_started:
            return
        self._stopped = self._loop.create_future()
        try:
            await self._wind_up(grace)
        finally:
            self._stopped.set_result(None)

    async def _wind_up(self, grace: float) -> None:
        self._distribution.stop()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in [*self._connections.values()]:
            connection.write(wire.CLS)
        self._arrival.set()
        try:
            async with asyncio.timeout(grace):
                while self._held and self._connections:
                    self._gone.clear()
                    await self._gone.wait()
        except TimeoutError:
            logger.warning("%s: %d messages were not answered in time", self, len(self._held))
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for connection in [*self._connections.values()]:
            connection.close()
        try:
            async with asyncio.timeout(2):
                while self._connections:
                    self._gone.clear()
                    await self._gone.wait()
        except TimeoutError:
            for connection in [*self._connections.values()]:
                connection.abort()
        if self._timer is not None:
            self._timer.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._held.clear()
        self._queue.clear()

    async def wait_stopped(self) -> None:
        """Until somebody has called stop() and it is done."""
        while self._stopped is None:
            self._gone.clear()
            await self._gone.wait()
        await asyncio.shield(self._stopped)

    def _launch(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # brokers

    @property
    def connections(self) -> list[str]:
        """Addresses of the nsqd that it is connected to."""
        return [*self._connections]

    async def connect(self, address: str) -> None:
        """Connect to one nsqd, and keep connected to it. Raises ConnectFailed if it cannot be reached now,
        ClientError if it is connected already."""
        if self._is_stopping:
            raise Stopped
        if address in self._connections or address in self._connecting or address in self._direct:
            raise ClientError(f"{address}: already connected")
        self._direct.append(address)
        try:
            await self._open(address)
        except BaseException:
            self._direct.remove(address)
            raise
        self._launch(self._keep(address))

    async def disconnect(self, address: str) -> None:
        """Forget one nsqd. Raises ClientError if it is not connected."""
        connection = self._connections.get(address)
        if connection is None and address not in self._direct:
            raise ClientError(f"{address}: not connected")
        if address in self._direct:
            self._direct.remove(address)
        if connection is not None:
            connection.close()

    async def _open(self, address: str) -> None:
        self._connecting.add(address)
        try:
            connection = await Connection.open(address, self.config, self)
        finally:
            self._connecting.discard(address)
        if self._is_stopping:
            connection.close()
            raise Stopped
        self._connections[address] = connection
        connection.last_message = self._loop.time()
        connection.write(wire.sub(self.topic, self.channel))
        logger.info("%s: connected to %s", self, address)
        self._distribution.add(connection, self._loop.time())
        self._schedule()

    async def _keep(self, address: str) -> None:
        """Stay connected to an nsqd that was named, for as long as it is wanted."""
        delay = self.config.reconnect_delay
        while address in self._direct and not self._is_stopping:
            if address in self._connections:
                self._lost.clear()
                await self._lost.wait()
                continue
            began = monotonic()
            try:
                await self._open(address)
                delay = self.config.reconnect_delay
            except ConnectFailed as error:
                logger.warning("%s: %s; trying again in %.1f s", self, error, delay)
            except Stopped:
                return
            if address not in self._connections or monotonic() - began < delay:
                await asyncio.sleep(delay)
                delay = min(max(delay, 0.01) * 2, self.config.max_reconnect_delay)

    async def _poll(self) -> None:
        """Ask nsqlookupd now, then regularly, and soon after a connection was lost."""
        interval = self.config.lookupd_poll_interval
        jitter = random.uniform(0, self.config.lookupd_poll_jitter * interval)
        hurry = 0.0
        while not self._is_stopping:
            before = len(self._connections)
            await self._discover()
            missing = before > len(self._connections) or (hurry and not self._connections)
            hurry = min(hurry * 2 or 0.25, interval) if missing else 0.0
            wait = hurry or interval + jitter
            jitter = 0.0
            self._lost.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._lost.wait()
                hurry = hurry or 0.25
                await asyncio.sleep(min(hurry, self.config.reconnect_delay))
            except TimeoutError:
                pass

    async def _discover(self) -> None:
        try:
            found = await self._lookup.producers(self.topic)
        except LookupFailed as error:
            logger.warning("%s: %s", self, error)
            return
        new = [a for a in found if a not in self._connections and a not in self._connecting]
        for outcome in await asyncio.gather(*map(self._open, new), return_exceptions=True):
            if isinstance(outcome, ConnectFailed):
                logger.warning("%s: %s", self, outcome)
            elif isinstance(outcome, Exception) and not isinstance(outcome, Stopped):
                logger.error("%s: cannot connect", self, exc_info=outcome)

    # what connections report

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None:
        now = connection.last_message = self._loop.time()
        connection.in_flight += len(messages)
        self.messages_received += len(messages)
        made = [
            Message(
                self, connection, received.id, received.body, received.timestamp_ns, received.attempts, now
            )
            for received in messages
        ]
        self._held.update(dict.fromkeys(made))
        self._queue.extend(made)
        self._arrival.set()

    def on_response(self, connection: Connection, data: bytes) -> None:
        if data == wire.CLOSE_WAIT:
            connection.is_closing = True

    def on_error(self, connection: Connection, text: str) -> None:
        # A FIN, REQ or TOUCH that came too late is not the end of the connection; anything else is.
        level = logging.WARNING if text.startswith(("E_FIN", "E_REQ", "E_TOUCH")) else logging.ERROR
        logger.log(level, "%s: %s: %s", self, connection, text)

    def on_closed(self, connection: Connection, reason: Exception | None) -> None:
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]
        self._distribution.remove(connection, self._loop.time())
        # The server sends them to another: whatever becomes of them here has no effect.
        for message in [m for m in self._held if m._connection is connection]:
            message.is_answered = True
            del self._held[message]
        if self._queue:
            self._queue = deque(m for m in self._queue if m._connection is not connection)
        if not self._is_stopping:
            logger.warning("%s: lost %s: %s", self, connection, reason or "closed")
        self._lost.set()
        self._gone.set()
        self._schedule()

    def on_writable(self, connection: Connection) -> None:
        """Answers are small; they may pile up until a slow server takes them."""

    # answers

    def answer(self, message: Message, signal: Signal, delay: float | None) -> None:
        """FIN, or REQ with a delay. A message that has its answer gets no other."""
        if message.is_answered:
            return
        message.is_answered = True
        self._held.pop(message, None)
        connection = message._connection
        connection.in_flight -= 1
        distribution = self._distribution
        # Outside of back-off a success changes nothing.
        if signal is not Signal.RESUME or distribution.backoff_count:
            distribution.signal(signal, self._loop.time())
            self._schedule()
        if delay is None:
            self.messages_finished += 1
            connection.write(b"FIN " + message.id + b"\n")
        else:
            self.messages_requeued += 1
            connection.write(wire.req(message.id, int(delay * 1000)))
        if self._is_stopping and not self._held:
            self._gone.set()

    def touch(self, message: Message) -> None:
        if not message.is_answered:
            message.touched = self._loop.time()
            message._connection.write(wire.touch(message.id))

    async def _touch_all(self) -> None:
        """Keep what is held from timing out, however long its handler takes or it waits for one."""
        while True:
            timeouts = [c.msg_timeout for c in self._connections.values() if c.msg_timeout]
            shortest = min(timeouts, default=1.0)
            await asyncio.sleep(shortest / TOUCH_SHARE / 2)
            now = self._loop.time()
            for message in self._held:
                if now - message.touched < shortest / TOUCH_SHARE:
                    # Those behind it came later, unless they were touched: these come up again soon enough.
                    continue
                self.touch(message)

    # flow

    def change_max_in_flight(self, count: int) -> None:
        """How many messages may be in flight from now on; 0 pauses."""
        if count < 0:
            raise ValueError("max_in_flight is at least 0")
        self._distribution.change_max_in_flight(count, self._loop.time())
        self._schedule()

    @property
    def max_in_flight(self) -> int:
        return self._distribution.max_in_flight

    @property
    def is_starved(self) -> bool:
        """Whether a server has sent nearly all it may: time to answer what is being collected."""
        return self._distribution.is_starved

    @property
    def is_in_backoff(self) -> bool:
        return self._distribution.is_in_backoff

    def _schedule(self) -> None:
        """Have the distribution looked at when it has something to do."""
        at = self._distribution.next_event()
        if self._timer is not None:
            if at is not None and self._timer.when() <= at and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if at is not None and not self._is_stopping:
            self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._distribution.tick(self._loop.time())
        self._schedule()

    # handlers

    async def __aiter__(self) -> AsyncIterator[Message]:
        """The messages, one by one. Each is finished when the next is asked for, unless it was answered; if
        the loop's body raises, or is left, it is requeued at once."""
        if self._handler is not None or self._batch_handler is not None:
            raise RuntimeError("this consumer has a handler")
        while True:
            message = await self._next()
            if message is None:
                return
            if self._is_hopeless(message):
                await self._give_up(message)
                continue
            try:
                yield message
            except BaseException:
                message.requeue(0, backoff=False)
                raise
            if message.auto_response:
                message.finish()

    async def _next(self) -> Message | None:
        """The message that has waited longest; None when the consumer stops."""
        queue = self._queue
        while not queue:
            if self._is_stopping:
                return None
            self._arrival.clear()
            await self._arrival.wait()
            queue = self._queue
        return queue.popleft()

    async def _work(self) -> None:
        handler = self._handler
        assert handler is not None
        call = handler if _is_async(handler) else self._in_thread(handler)
        until = monotonic() + SLICE_S
        while (message := await self._next()) is not None:
            if self._is_hopeless(message):
                await self._give_up(message)
                continue
            try:
                await call(message)
            except Requeue as wish:
                message.requeue(wish.delay, backoff=wish.backoff)
            except Exception:
                logger.exception("%s: the handler failed on %r", self, message)
                message.requeue()
            else:
                if message.auto_response:
                    self.answer(message, Signal.RESUME, None)
            if monotonic() > until:
                await asyncio.sleep(0)
                until = monotonic() + SLICE_S

    async def _work_in_batches(self) -> None:
        handler = self._batch_handler
        assert handler is not None
        call = handler if _is_async(handler) else self._in_thread(handler)
        while batch := await self._next_batch():
            try:
                await call(batch)
            except Requeue as wish:
                for message in batch:
                    message.requeue(wish.delay, backoff=wish.backoff)
            except Exception:
                logger.exception("%s: the handler failed on %d messages", self, len(batch))
                for message in batch:
                    message.requeue()
            else:
                for message in batch:
                    if message.auto_response:
                        message.finish()

    async def _next_batch(self) -> list[Message]:
        """Messages until the batch is full, its time is up, or no more can come before some are answered."""
        first = await self._next()
        if first is None:
            return []
        batch = [first]
        try:
            async with asyncio.timeout(self._batch_timeout):
                while len(batch) < self._batch_size and not (self._is_stopping and not self._queue):
                    if not self._queue and self.is_starved:
                        break
                    message = await self._next()
                    if message is None:
                        break
                    batch.append(message)
        except TimeoutError:
            pass
        hopeless = [message for message in batch if self._is_hopeless(message)]
        for message in hopeless:
            await self._give_up(message)
        batch = [message for message in batch if not message.is_answered]
        return batch or await self._next_batch()

    def _in_thread(self, handler: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix=f"nsq-{self.topic}")
        threads = self._threads

        async def call(argument: Any) -> Any:
            return await self._loop.run_in_executor(threads, handler, argument)

        return call

    def _is_hopeless(self, message: Message) -> bool:
        return 0 < self.config.max_attempts < message.attempts

    async def _give_up(self, message: Message) -> None:
        """It was tried often enough: tell whoever wants to know, and be done with it. If that fails, the
        message is kept."""
        logger.warning("%s: giving up on %r", self, message)
        try:
            if self._on_give_up is not None:
                result = self._on_give_up(message)
                if inspect.isawaitable(result):
                    await result
        except Exception:
            logger.exception("%s: cannot give up on %r", self, message)
            message.requeue()
            return
        self.messages_given_up += 1
        message.finish()

    def __str__(self) -> str:
        return f"{self.topic}/{self.channel}"


def _is_async(handler: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    call = getattr(handler, "__call__", None)  # noqa: B004  # an object with an async __call__ counts too
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)
