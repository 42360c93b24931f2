"""A consumer: one channel of one topic, from all nsqd that have it.

    async def handle(message):
        print(message.body)

    async with Consumer("events", "print", handle, nsqlookupd=["127.0.0.1:4161"]):
        await asyncio.sleep(60)

or, without a handler, `async for message in consumer`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, Final

from nsparq.client.config import Config
from nsparq.client.connect.connection import Connection
from nsparq.client.connect.lookup import Lookup
from nsparq.client.consume.dead_letters import GiveUp, check_dead_letter
from nsparq.client.consume.discovery import Discovery
from nsparq.client.consume.event_loop import Alarm, log_failure, wait_to_the_end
from nsparq.client.consume.in_flight import InFlight
from nsparq.client.consume.iteration import Iteration
from nsparq.client.consume.rdy import Distribution, Signal
from nsparq.client.consume.workers import Calls, Inbox, Workers
from nsparq.client.errors import Stopped, reason_of
from nsparq.client.message import Message
from nsparq.names import is_valid_name
from nsparq.wire import client as wire
from nsparq.wire.client import Received

__all__ = ["Consumer"]

logger = logging.getLogger(__name__)

Handler = Callable[[Message], Any]
BatchHandler = Callable[[list[Message]], Any]

STOP_S: Final = 30.0
CANCEL_S: Final = 2.0
"""How long cancelled handlers may take to end."""
CLOSE_WAIT_S: Final = 2.0
"""How long a server may take to confirm CLS."""
PREFETCH: Final = 8
"""Default of max_in_flight, for each handler that runs at a time."""


class Consumer:
    """Use start() and stop(), or `async with`. stop() waits until messages in flight are answered.

    Coroutine functions run on the event loop, other handlers in threads. A message is finished when
    its handler returns. If the handler raises, the message is requeued and the consumer backs off:
    after longer and longer pauses it takes one message at a time, until one succeeds. A message
    that waits or is being handled does not time out.

    It has more than 30 methods: they are the public interface, the stop sequence, and the events of
    its connections. Everything else is in `nsparq.client.consume`.
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
        requeue_delay: Callable[[int], float] | None = None,
        auto_touch: bool = True,
        config: Config | None = None,
    ) -> None:
        """`concurrency` is how many handlers run at a time. A batch handler gets up to `batch_size`
        messages. It gets fewer after `batch_timeout` seconds, or when no more can come before some
        are answered.

        A message is given up after more than `config.max_attempts` attempts, or when its handler
        raises Reject. Then `on_give_up` gets it, and after that `dead_letter`: a function, or the
        name of a topic to which its body is published on the nsqd that sent it. If both succeed the
        message is finished; if one fails it is requeued. `requeue_delay` returns the delay of a
        failed message for its attempts, instead of `config.requeue_delay`.
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
        self._concurrency = concurrency
        self._calls = Calls(concurrency, f"nsq-{topic}")
        self._distribution = Distribution(config)
        self._rdy_alarm: Alarm | None = None
        lookup = Lookup(nsqlookupd, config)
        self._discovery = Discovery(
            config, topic, lookup, nsqd, lambda address: Connection.open(address, config, self), self._opened
        )
        self._in_flight = InFlight(config, self._distribution, self._signal, self._close_if_idle, auto_touch)
        self._in_flight.requeue_delay = requeue_delay or config.requeue_delay
        self.give_up = GiveUp(str(self), config, self._calls, on_give_up, dead_letter)
        self._inbox = Inbox()
        function = handler if handler is not None else batch_handler
        call = self._calls.prepare(function) if function is not None else None
        size = batch_size if batch_handler is not None else 0
        self._workers = Workers(self, self._inbox, self._in_flight, call, size, batch_timeout)
        self._iteration = Iteration(self, self._inbox)
        self._process = 0
        """Set by start(): after fork() it belongs to the parent."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_stopping = False
        self._is_draining = False
        self._is_cut_short = False
        """Stop without waiting any longer."""
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    # counts

    @property
    def messages_received(self) -> int:
        """Deliveries; a message that comes again counts again."""
        return self._in_flight.received

    @property
    def messages_finished(self) -> int:
        """Those that were given up included."""
        return self._in_flight.finished

    @property
    def messages_requeued(self) -> int:
        """Requeued by an answer, not by a timeout or a lost connection."""
        return self._in_flight.requeued

    @property
    def messages_given_up(self) -> int:
        """Given up, and finished."""
        return self.give_up.count

    @property
    def messages_in_flight(self) -> int:
        """Received and not answered."""
        return len(self._in_flight)

    # start and stop

    async def __aenter__(self) -> Consumer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._begin_stop(STOP_S)
        # A loop over the messages in this task has ended, or this line would not be reached.
        self._iteration.requeue_left()
        await self._wait_for_stop()

    async def start(self) -> None:
        """Start consuming. Brokers that cannot be reached are tried again and again."""
        if self.is_stopping:
            raise Stopped
        if self._loop is not None:
            raise RuntimeError("already started")
        self._loop, self._process = asyncio.get_running_loop(), os.getpid()
        self._rdy_alarm = Alarm(self._loop, self._tick)
        self._in_flight.start(self._discovery.connections)
        self._workers.start(self._concurrency)
        self._discovery.start()

    async def stop(self, grace: float = STOP_S) -> None:
        """Take no new messages, wait for answers to those in flight, and close. After `grace`
        seconds the server requeues what is not answered.

        Called from a handler, or inside a loop over the messages, it returns at once: it would wait
        for its own caller. If it is called again, the shorter grace counts. If the caller is
        cancelled while it waits, the grace is over."""
        self._begin_stop(grace)
        if asyncio.current_task() in self._workers.tasks:
            return
        if self._iteration.is_in_this_task:
            # If the loop has just ended, asyncio closes its iterator a few turns later.
            for _ in range(3):
                await asyncio.sleep(0)
            if self._iteration.is_in_this_task:
                return
        await self._wait_for_stop()

    async def wait_stopped(self) -> None:
        """Wait until stop() was called and has finished."""
        await self._stopped.wait()

    def _refuse_in_child(self) -> None:
        if self._process not in (0, os.getpid()):
            raise RuntimeError(f"{self} was started before fork() and runs in the parent: make another one")

    def _begin_stop(self, grace: float) -> None:
        self._refuse_in_child()
        self.is_stopping = True
        if self._loop is None:
            self._stopped.set()
        elif self._stopping is None:
            # Before messages are given back: otherwise they would be sent to this consumer again.
            self._retire_all()
            if self._workers.tasks:
                # Batches no longer wait to be full.
                self._inbox.wake()
            else:
                self._give_back()
                self._inbox.end()
            self._stopping = self._loop.create_task(self._finish_stop(grace))
            self._stopping.add_done_callback(log_failure)
            # However it ends: the event loop may cancel it before it begins, or in its cleanup.
            self._stopping.add_done_callback(lambda _: self._stopped.set())
        elif not self._stopped.is_set():
            self._loop.call_later(grace, self._cut_short)

    def _retire_all(self) -> None:
        self._distribution.stop()
        for connection in [*self._discovery.connections.values()]:
            self._retire(connection)

    def _cut_short(self) -> None:
        self._is_cut_short = True
        if self._is_draining and self._stopping is not None:
            self._stopping.cancel()

    async def _wait_for_stop(self) -> None:
        # The cleanup takes a moment, also after a second cancellation.
        await wait_to_the_end(self._stopped.wait, self._cut_short)

    async def _finish_stop(self, grace: float) -> None:
        try:
            if not self._is_cut_short:
                self._is_draining = True
                await self._drain(grace)
        except asyncio.CancelledError:
            if not self._is_cut_short:
                raise
        finally:
            self._is_draining = False
            await self._clean_up()

    async def _drain(self, grace: float) -> None:
        """Wait until all connections have closed, after their messages were answered."""
        assert self._loop is not None
        deadline = self._loop.time() + grace
        await self._discovery.stop()
        # A connection may have been opened since.
        self._retire_all()
        try:
            async with asyncio.timeout_at(deadline):
                for connection in [*self._discovery.connections.values()]:
                    await connection.closed.wait()
        except TimeoutError:
            logger.warning("%s: %d messages were not answered in time", self, len(self._in_flight))
        self._inbox.end()
        if self._workers.tasks:
            # Handlers may still be busy with messages of lost connections.
            await asyncio.wait(self._workers.tasks, timeout=max(0.0, deadline - self._loop.time()))

    async def _clean_up(self) -> None:
        self._distribution.stop()
        self._inbox.end()
        for task in self._workers.tasks:
            task.cancel()
        connections = [*self._discovery.connections.values()]
        for connection in connections:
            connection.close()
        await self._discovery.stop()
        if self._rdy_alarm is not None:
            self._rdy_alarm.set(None)
        self._in_flight.stop_touching()
        if self._workers.tasks:
            _, running = await asyncio.wait(self._workers.tasks, timeout=CANCEL_S)
            if running:
                logger.error("%s: %d handlers still run after they were cancelled", self, len(running))
        self._calls.close()
        for connection in connections:
            await connection.closed.wait()
        await self.give_up.stop()

    def _give_back(self) -> None:
        """Requeue the messages that no loop over the messages will get."""
        while self._inbox.queue:
            self._inbox.queue.popleft().requeue(0, backoff=False)

    # connections

    @property
    def connections(self) -> list[str]:
        """Addresses of the connected nsqd."""
        return [*self._discovery.connections]

    @property
    def is_ready(self) -> bool:
        """Whether it is connected to an nsqd, or waits for the first one that has the topic."""
        return self._discovery.is_ready

    async def connect(self, address: str) -> None:
        """Connect to one nsqd, and reconnect whenever the connection is lost. Raises ConnectFailed
        if it cannot be reached now, ClientError if it is already connected."""
        self._refuse_in_child()
        if self.is_stopping:
            raise Stopped
        if self._loop is None:
            raise RuntimeError("not started")
        try:
            await self._discovery.connect(address)
        except Exception:
            if self.is_stopping:
                raise Stopped from None
            raise

    async def disconnect(self, address: str) -> None:
        """Take no more messages from one nsqd, and close the connection when those in flight are
        answered. Raises ClientError if it is not connected."""
        connection = self._discovery.forget(address)
        if connection is not None:
            self._retire(connection)

    def _opened(self, connection: Connection) -> None:
        connection.last_message = self._now()
        connection.write(wire.sub(self.topic, self.channel))
        logger.info("%s: connected to %s", self, connection)
        self._distribution.add(connection, self._now())
        self._schedule()
        self._in_flight.schedule_touch()

    def _retire(self, connection: Connection) -> None:
        """Send CLS, and close the connection when its messages are answered."""
        if connection.is_closing:
            return
        assert self._loop is not None
        connection.is_closing = True
        self._distribution.remove(connection)
        self._schedule()
        connection.write(wire.CLS)
        # A server that does not confirm must not keep the connection open.
        self._loop.call_later(CLOSE_WAIT_S, self._confirm_close, connection)

    def _confirm_close(self, connection: Connection) -> None:
        connection.is_close_confirmed = True
        self._close_if_idle(connection)

    def _close_if_idle(self, connection: Connection) -> None:
        if connection.is_close_confirmed and not connection.in_flight:
            connection.close()

    # events of a connection

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None:
        self._inbox.put(self._in_flight.add(connection, messages))
        if self.is_stopping and not self._workers.tasks:
            self._give_back()

    def on_response(self, connection: Connection, data: bytes, count: int) -> None:
        if data == wire.CLOSE_WAIT:
            connection.is_closing = True
            self._confirm_close(connection)

    def on_error(self, connection: Connection, text: str) -> None:
        # After a late FIN, REQ or TOUCH the connection goes on; any other error ends it.
        level = logging.WARNING if text.startswith(("E_FIN", "E_REQ", "E_TOUCH")) else logging.ERROR
        logger.log(level, "%s: %s: %s", self, connection, text)
        if text.startswith("E_TOUCH"):
            self._in_flight.touch_failed(connection, text)

    def on_closed(self, connection: Connection, reason: Exception | None) -> None:
        self._in_flight.drop(connection)
        self._inbox.drop_answered()
        if not connection.is_closing or reason is not None:
            logger.warning("%s: lost %s: %s", self, connection, reason_of(reason))
        self._distribution.remove(connection)
        self._discovery.lost(connection)
        self._schedule()

    def on_writable(self, connection: Connection) -> None:
        """Answers never wait for room: they are small, one per message in flight."""

    # RDY

    def change_max_in_flight(self, count: int) -> None:
        """Set how many messages may be in flight from now on; 0 pauses."""
        if count < 0:
            raise ValueError("max_in_flight is at least 0")
        self._distribution.change_max_in_flight(count, self._now())
        self._schedule()

    @property
    def max_in_flight(self) -> int:
        """How many messages may be in flight now."""
        return self._distribution.max_in_flight

    @property
    def is_starved(self) -> bool:
        """Whether a server has sent nearly all it may: answer what was collected."""
        return self._distribution.is_starved

    @property
    def is_in_backoff(self) -> bool:
        """Whether handlers have failed and it takes one message at a time, after pauses."""
        return self._distribution.is_in_backoff

    def _signal(self, signal: Signal) -> None:
        self._distribution.signal(signal, self._now())
        self._schedule()

    def _now(self) -> float:
        return self._loop.time() if self._loop is not None else monotonic()

    def _schedule(self) -> None:
        if self._rdy_alarm is not None:
            self._rdy_alarm.set(self._distribution.next_event())

    def _tick(self) -> None:
        self._distribution.tick(self._now())
        self._schedule()

    # iteration

    def __aiter__(self) -> AsyncIterator[Message]:
        """The messages, one by one. A message is finished when the next one is requested. If the
        body of the loop raises or leaves the loop, its message is requeued at once. A message that
        was already answered gets no other answer. stop() ends the loop."""
        if self._workers.has_handler:
            raise RuntimeError("this consumer has a handler")
        if self._loop is None:
            raise RuntimeError("not started")
        self._refuse_in_child()
        return self._iteration.messages()

    def __str__(self) -> str:
        return f"{self.topic}/{self.channel}"
