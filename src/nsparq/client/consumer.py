"""A consumer: one channel of one topic, from as many nsqd as have it.

    async def handle(message):
        print(message.body)

    async with Consumer("events", "print", handle, nsqlookupd=["127.0.0.1:4161"]):
        await asyncio.sleep(60)

or, without a handler, `async for message in consumer`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import get_ident
from time import monotonic
from typing import Any, Final

from nsparq.client.config import Config, milliseconds
from nsparq.client.connection import Connection
from nsparq.client.dead_letters import DeadLetters, check_dead_letter
from nsparq.client.discovery import Discovery, log_failure
from nsparq.client.errors import Stopped, reason_of
from nsparq.client.handling import FATAL, Call, Calls, Inbox, Workers, is_cancelled
from nsparq.client.lookup import Lookup
from nsparq.client.message import Message
from nsparq.client.rdy import Distribution, Signal
from nsparq.client.touching import Touching
from nsparq.names import is_valid_name
from nsparq.wire import client as wire
from nsparq.wire.client import Received

__all__ = ["Consumer"]

logger = logging.getLogger(__name__)

Handler = Callable[[Message], Any]
BatchHandler = Callable[[list[Message]], Any]

STOP_S: Final = 30.0
CANCEL_S: Final = 2.0
"""How long handlers that were cancelled may take to end."""
WORKER_RETRY_S: Final = 1.0
CLOSE_WAIT_S: Final = 2.0
"""How long a server may take to confirm that it will send nothing more."""
PREFETCH: Final = 8
"""Messages per handler at a time that are asked for when nothing is said of max_in_flight."""


class Consumer:
    """start() it, or use it as a context manager; stop() finishes what is in flight.

    Handlers that are coroutine functions run on the event loop, others in threads. A message is finished when
    its handler returns. If that raises, the message is requeued, and the consumer backs off: it lets one
    message at a time through, after longer and longer pauses, until that goes well. Messages are kept from
    timing out for as long as a handler takes, or they wait for one.
    """

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
        on_give_up: Handler | None = None,
        dead_letter: str | Handler | None = None,
        auto_touch: bool = True,
        config: Config | None = None,
    ) -> None:
        """`concurrency` is how many handlers run at a time. A batch handler gets up to `batch_size` messages,
        or fewer after `batch_timeout` seconds, or when no more can come before some are answered.

        A message that was tried more than `config.max_attempts` times, or whose handler raised Reject, is
        given up: `on_give_up` is told; then `dead_letter` gets it, which is a function, or the name of a
        topic to which its body is published, on the nsqd that it came from. Only when both have succeeded it
        is finished; if one of them fails it is requeued instead.
        """
        for what, name in (("topic", topic), ("channel", channel)):
            if not is_valid_name(name.encode()):
                raise ValueError(f"invalid {what} name {name!r}")
        if handler is not None and batch_handler is not None:
            raise ValueError("a handler or a batch handler, not both")
        if concurrency < 1 or batch_size < 1:
            raise ValueError("concurrency and batch_size are at least 1")
        check_dead_letter(dead_letter, topic)
        config = config or Config()
        if max_in_flight is None:
            max_in_flight = config.max_in_flight
        if max_in_flight is None:
            max_in_flight = concurrency * (batch_size if batch_handler else PREFETCH)
        config = replace(config, max_in_flight=max_in_flight)
        self.topic, self.channel, self.config = topic, channel, config
        self.messages_received = 0
        self.messages_finished = 0
        self.messages_requeued = 0
        self.messages_given_up = 0
        """Of those finished."""
        self._calls = Calls(concurrency, f"nsq-{topic}")
        self._handler = self._prepared(handler)
        self._batch_handler = self._prepared(batch_handler)
        self._batch_size, self._batch_timeout = batch_size, batch_timeout
        self._concurrency = concurrency
        self._on_give_up = self._prepared(on_give_up)
        self._dead_topic = dead_letter if isinstance(dead_letter, str) else ""
        self._dead_letter = None if isinstance(dead_letter, str) else self._prepared(dead_letter)
        self._dead_letters = DeadLetters(config)
        self._auto_touch = auto_touch
        self._distribution = Distribution(config)
        lookup = Lookup(nsqlookupd, config)
        self._discovery = Discovery(config, topic, lookup, nsqd, self._open, self._opened)
        self._inbox = Inbox()
        self._held: dict[Message, None] = {}
        """Messages not yet answered, in the order in which they came."""
        self._hands: dict[Message, asyncio.Task[Any] | None] = {}
        """Those that a loop over the messages has, and the task that it runs in."""
        self._confirmed: set[Connection] = set()
        """Connections that will send nothing more."""
        self._change = asyncio.Event()
        """A connection has ended."""
        self._workers: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._touching: Touching | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._is_stopping = False
        self._is_draining = False
        self._is_hurried = False
        """Whoever waits for the stop does not want to wait any more."""
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def _prepared(self, function: Callable[[Any], Any] | None) -> Call | None:
        return None if function is None else self._calls.prepare(function)

    # life

    async def __aenter__(self) -> Consumer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._begin_stop(STOP_S)
        # Loops over the messages in this task are over, or this would not be reached.
        for message, task in [*self._hands.items()]:
            if task is None or task is asyncio.current_task() or task.done():
                message.requeue(0, backoff=False)
        await self._wait_for_stop()

    async def start(self) -> None:
        """Begin. Brokers that cannot be reached are tried again and again."""
        if self._is_stopping:
            raise Stopped
        if self._loop is not None:
            raise RuntimeError("already started")
        self._loop, self._thread = asyncio.get_running_loop(), get_ident()
        if self._auto_touch:
            self._touching = Touching(self._held, self._discovery.connections, self._touch)
        for _ in range(self._concurrency):
            self._add_worker()
        self._discovery.start()

    def _add_worker(self) -> None:
        if self._handler is not None:
            work = Workers(self, self._inbox, self._handler).work()
        elif self._batch_handler is not None:
            workers = Workers(self, self._inbox, self._batch_handler)
            work = workers.work_in_batches(self._batch_size, self._batch_timeout)
        else:
            return
        worker = asyncio.create_task(work)
        worker.add_done_callback(self._worker_ended)
        self._workers.append(worker)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        log_failure(worker)
        is_error = not worker.cancelled() and isinstance(worker.exception(), Exception)
        if is_error and not self._is_stopping and self._loop is not None:
            # It should not happen. If it does all the same, a consumer that consumes nothing is worse.
            self._workers.remove(worker)
            self._loop.call_later(WORKER_RETRY_S, self._replace_worker)

    def _replace_worker(self) -> None:
        if not self._is_stopping:
            self._add_worker()

    async def stop(self, grace: float = STOP_S) -> None:
        """Take no new messages, let what is in flight be answered, close. What is not answered within
        `grace` seconds is left to the server, which sends it to another.

        Called from a handler, or from within a loop over the messages, it returns at once, since that is what
        it would have to wait for. Called again, the shorter grace holds. Whoever is cancelled while waiting
        cuts it short."""
        self._begin_stop(grace)
        if asyncio.current_task() in self._workers:
            return
        if self._is_iterating_here():
            # A loop that was just left has its iterator closed by the event loop, a few turns later.
            for _ in range(3):
                await asyncio.sleep(0)
            if self._is_iterating_here():
                return
        await self._wait_for_stop()

    async def wait_stopped(self) -> None:
        """Until somebody has called stop() and it is done."""
        await self._stopped.wait()

    def _begin_stop(self, grace: float) -> None:
        self._is_stopping = True
        if self._loop is None:
            self._stopped.set()
        elif self._stopping is None:
            # Before anything is given back: it would come here again, and lose an attempt.
            self._take_no_more()
            if self._workers:
                # Batches need not wait for more than there is.
                self._inbox.wake()
            else:
                self._give_back()
                self._inbox.end()
            self._stopping = self._loop.create_task(self._wind_up(grace))
            self._stopping.add_done_callback(log_failure)
        elif not self._stopped.is_set():
            self._loop.call_later(grace, self._hurry)

    def _take_no_more(self) -> None:
        self._distribution.stop()
        for connection in [*self._discovery.connections.values()]:
            self._retire(connection)

    def _hurry(self) -> None:
        """Wait for nothing any more."""
        self._is_hurried = True
        if self._is_draining and self._stopping is not None:
            self._stopping.cancel()

    async def _wait_for_stop(self) -> None:
        is_cancelled = False
        while not self._stopped.is_set():
            try:
                await self._stopped.wait()
            except asyncio.CancelledError:
                # The end of it takes a moment, however often that is said.
                is_cancelled = True
                self._hurry()
        if is_cancelled:
            raise asyncio.CancelledError

    async def _wind_up(self, grace: float) -> None:
        try:
            if not self._is_hurried:
                self._is_draining = True
                await self._drain(grace)
        except asyncio.CancelledError:
            if not self._is_hurried:
                raise
        finally:
            self._is_draining = False
            await self._clean_up()

    async def _drain(self, grace: float) -> None:
        assert self._loop is not None
        deadline = self._loop.time() + grace
        await self._discovery.stop()
        # One may just have been made.
        self._take_no_more()
        try:
            async with asyncio.timeout_at(deadline):
                while self._discovery.connections:
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            logger.warning("%s: %d messages were not answered in time", self, len(self._held))
        self._inbox.end()
        if self._workers:
            # They may be at messages of connections that were lost.
            await asyncio.wait(self._workers, timeout=max(0.0, deadline - self._loop.time()))

    async def _clean_up(self) -> None:
        self._distribution.stop()
        self._inbox.end()
        for worker in self._workers:
            worker.cancel()
        connections = [*self._discovery.connections.values()]
        for connection in connections:
            connection.close()
        await self._discovery.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._touching is not None:
            self._touching.stop()
        if self._workers:
            _, stubborn = await asyncio.wait(self._workers, timeout=CANCEL_S)
            if stubborn:
                logger.error("%s: %d handlers do not let themselves be cancelled", self, len(stubborn))
        self._calls.close()
        for connection in connections:
            await connection.closed.wait()
        await self._dead_letters.stop()
        self._stopped.set()

    def _give_back(self) -> None:
        """What no loop over the messages will come to."""
        while self._inbox.queue:
            self._inbox.queue.popleft().requeue(0, backoff=False)

    def _is_iterating_here(self) -> bool:
        return asyncio.current_task() in self._hands.values()

    # brokers

    @property
    def connections(self) -> list[str]:
        """Addresses of the nsqd that it is connected to."""
        return [*self._discovery.connections]

    async def connect(self, address: str) -> None:
        """Connect to one nsqd, and keep connected to it. Raises ConnectFailed if it cannot be reached now,
        ClientError if it is connected already."""
        if self._is_stopping:
            raise Stopped
        if self._loop is None:
            raise RuntimeError("not started")
        try:
            await self._discovery.connect(address)
        except Exception:
            if self._is_stopping:
                raise Stopped from None
            raise

    async def disconnect(self, address: str) -> None:
        """Forget one nsqd: take no more messages of it, and close the connection when those in flight are
        answered. Raises ClientError if it is not connected."""
        connection = self._discovery.forget(address)
        if connection is not None:
            self._retire(connection)

    async def _open(self, address: str) -> Connection:
        return await Connection.open(address, self.config, self)

    def _opened(self, connection: Connection) -> None:
        connection.last_message = self._now()
        connection.write(wire.sub(self.topic, self.channel))
        logger.info("%s: connected to %s", self, connection)
        self._distribution.add(connection, self._now())
        self._schedule()
        if self._touching is not None:
            self._touching.schedule()

    def _retire(self, connection: Connection) -> None:
        """Have it send nothing more, and close it when it has nothing of ours to wait for."""
        if connection.is_closing:
            return
        assert self._loop is not None
        connection.is_closing = True
        self._distribution.remove(connection, self._now())
        self._schedule()
        connection.write(wire.CLS)
        # It must not hang on a server that does not confirm.
        self._loop.call_later(CLOSE_WAIT_S, self._confirm, connection)

    def _confirm(self, connection: Connection) -> None:
        if not connection.closed.is_set():
            self._confirmed.add(connection)
            self._close_if_idle(connection)

    def _close_if_idle(self, connection: Connection) -> None:
        if connection in self._confirmed and not connection.in_flight:
            connection.close()

    # what connections report

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None:
        now = connection.last_message = self._now()
        connection.in_flight += len(messages)
        self.messages_received += len(messages)
        made = [
            Message(
                self, connection, received.id, received.body, received.timestamp_ns, received.attempts, now
            )
            for received in messages
        ]
        self._held.update(dict.fromkeys(made))
        self._inbox.put(made)
        if self._is_stopping and not self._workers:
            self._give_back()

    def on_response(self, connection: Connection, data: bytes, count: int) -> None:
        if data == wire.CLOSE_WAIT:
            connection.is_closing = True
            self._confirm(connection)

    def on_error(self, connection: Connection, text: str) -> None:
        # A FIN, REQ or TOUCH that came too late is not the end of the connection; anything else is.
        level = logging.WARNING if text.startswith(("E_FIN", "E_REQ", "E_TOUCH")) else logging.ERROR
        logger.log(level, "%s: %s: %s", self, connection, text)
        if text.startswith("E_TOUCH"):
            # It has timed out all the same, and is another's by now: to touch it again would be of no use.
            for message in self._held:
                if message._connection is connection and message.id.decode("ascii", "replace") in text:
                    message.touched = math.inf

    def on_closed(self, connection: Connection, reason: Exception | None) -> None:
        self._confirmed.discard(connection)
        # The server sends them to another: whatever becomes of them here has no effect.
        for message in [m for m in self._held if m._connection is connection]:
            message.is_answered = True
            del self._held[message]
        self._inbox.drop_answered()
        if not connection.is_closing or reason is not None:
            logger.warning("%s: lost %s: %s", self, connection, reason_of(reason))
        self._distribution.remove(connection, self._now())
        self._discovery.lost(connection)
        self._change.set()
        self._schedule()

    def on_writable(self, connection: Connection) -> None:
        """Answers are small, and no more than there are messages in flight: they need not wait."""

    # answers

    def answer(self, message: Message, signal: Signal, delay: float | None) -> None:
        """FIN, or REQ with a delay. A message that has its answer gets no other. From any thread."""
        if get_ident() == self._thread:
            self.answer_here(message, signal, delay)
        else:
            self._call_soon(self.answer_here, message, signal, delay)

    def answer_here(self, message: Message, signal: Signal, delay: float | None) -> None:
        """The same on the event loop."""
        if message.is_answered:
            return
        message.is_answered = True
        self._held.pop(message, None)
        connection = message._connection
        connection.in_flight -= 1
        # Outside of back-off a success changes nothing.
        if signal is not Signal.RESUME or self._distribution.backoff_count:
            self._distribution.signal(signal, self._now())
            self._schedule()
        if delay is None:
            self.messages_finished += 1
            connection.write(wire.fin(message.id))
        else:
            self.messages_requeued += 1
            connection.write(wire.req(message.id, milliseconds(delay)))
        if connection.is_closing:
            self._close_if_idle(connection)

    def finish_all(self, messages: Sequence[Message]) -> None:
        """FIN for those that have no answer and are not to get one from elsewhere, in one piece for each
        connection. On the event loop."""
        if self._distribution.backoff_count:
            # Each may change what the next one means.
            for message in messages:
                if message.auto_response:
                    self.answer_here(message, Signal.RESUME, None)
            return
        finished: dict[Connection, list[bytes]] = {}
        for message in messages:
            if message.auto_response and not message.is_answered:
                message.is_answered = True
                self._held.pop(message, None)
                finished.setdefault(message._connection, []).append(message.id)
        for connection, ids in finished.items():
            self.messages_finished += len(ids)
            connection.in_flight -= len(ids)
            connection.write(wire.fin_all(ids))
            if connection.is_closing:
                self._close_if_idle(connection)

    def touch(self, message: Message) -> None:
        """TOUCH, unless it is answered. From any thread."""
        if get_ident() == self._thread:
            self._touch(message)
        else:
            self._call_soon(self._touch, message)

    def _touch(self, message: Message) -> None:
        if not message.is_answered:
            message.touched = self._now()
            message._connection.write(wire.touch(message.id))

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        # A handler may outlive the loop that started it; then there is nobody left to answer to.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    # flow

    def change_max_in_flight(self, count: int) -> None:
        """How many messages may be in flight from now on; 0 pauses."""
        if count < 0:
            raise ValueError("max_in_flight is at least 0")
        self._distribution.change_max_in_flight(count, self._now())
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

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def _now(self) -> float:
        return self._loop.time() if self._loop is not None else monotonic()

    def _schedule(self) -> None:
        """Have the distribution looked at when it has something to do."""
        if self._loop is None:
            return
        at = self._distribution.next_event()
        if self._timer is not None:
            if at is not None and self._timer_at <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer, self._timer_at = self._loop.call_at(at, self._tick), at

    def _tick(self) -> None:
        self._timer = None
        self._distribution.tick(self._now())
        self._schedule()

    # handlers

    async def __aiter__(self) -> AsyncIterator[Message]:
        """The messages, one by one. Each is finished when the next is asked for, unless it was answered; if
        the loop's body raises, or is left, it is requeued at once. stop() ends the loop."""
        if self._handler is not None or self._batch_handler is not None:
            raise RuntimeError("this consumer has a handler")
        if self._loop is None:
            raise RuntimeError("not started")
        while (message := await self._inbox.get()) is not None:
            if 0 < self.config.max_attempts < message.attempts:
                await self.give_up(message)
                continue
            self._hands[message] = asyncio.current_task()
            try:
                yield message
            except BaseException:
                message.requeue(0, backoff=False)
                raise
            finally:
                del self._hands[message]
            if message.auto_response:
                message.finish()

    async def give_up(self, message: Message, reason: str = "") -> None:
        """Have `on_give_up` and `dead_letter` take a message, and finish it. If one of them fails it is
        requeued: what nobody has is not finished."""
        if message.is_answered:
            return
        why = reason or f"it has been tried {message.attempts - 1} times"
        logger.warning("%s: giving up on %r: %s", self, message, why)
        try:
            if self._on_give_up is not None:
                await self._on_give_up(message)
            if self._dead_letter is not None:
                await self._dead_letter(message)
            if self._dead_topic:
                await self._dead_letters.publish(message.address, self._dead_topic, message.body)
        except FATAL:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            logger.error("%s: cannot give up on %r", self, message, exc_info=error)
            message.requeue()
            return
        if not message.is_answered:
            self.messages_given_up += 1
        message.finish()

    def __str__(self) -> str:
        return f"{self.topic}/{self.channel}"
