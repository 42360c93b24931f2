"""Producing and consuming without asyncio, for scripts.

    with Producer("127.0.0.1:4150") as producer:
        producer.publish("events", b"hello")

    for message in consume("events", "print", nsqd=["127.0.0.1:4150"]):
        print(message.body)

Each producer and each loop over messages runs the asyncio client in its own thread. So heartbeats
are answered, and messages do not time out, however long the script takes. After fork() a producer
works in both processes; the child opens a new connection.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final

from nsparq.client.config import Config
from nsparq.client.consumer import Consumer
from nsparq.client.errors import ConnectFailed, NotConnected, PublishTimeout, Stopped
from nsparq.client.loop_thread import LoopThread, NotRunning
from nsparq.client.message import Message
from nsparq.client.payloads.encode import encode_bodies, encode_payload
from nsparq.client.payloads.numbers import name_in_child
from nsparq.client.producer import Producer as AsyncProducer
from nsparq.headers import Headers, HeadersOfMany

__all__ = ["Producer", "consume"]

logger = logging.getLogger(__name__)

MARGIN_S: Final = 2.0
"""How much longer a call may take than the timeout of the asyncio client."""
GRACE_S: Final = 5.0
"""After a loop over messages: how long a message that is being given up may take."""
STOP_S: Final = 10.0
"""How long everything after a loop over messages may take. Cancelled calls may take 2 seconds, the
end of the connections one."""


class Producer:
    """Connects at the first publish. May be used from several threads."""

    def __init__(
        self,
        *nsqd: str,
        nsqlookupd: Iterable[str] = (),
        retry: bool = False,
        idempotent: bool = False,
        name: str = "",
        config: Config | None = None,
    ) -> None:
        """Like nsparq.client.Producer. No call takes longer than `config.publish_timeout`."""
        # No busy-polling: it would keep other threads from running Python code.
        config = dataclasses.replace(config or Config(), busy_poll=0)
        self._timeout = config.publish_timeout
        lookups, process = tuple(nsqlookupd), os.getpid()
        self._make: Callable[[], AsyncProducer] = lambda: AsyncProducer(
            *nsqd,
            nsqlookupd=lookups,
            retry=retry,
            idempotent=idempotent,
            name=name if not name or os.getpid() == process else name_in_child(name),
            config=config,
        )
        # Made once here, so that wrong arguments raise in the caller.
        self._make()
        self._is_closed = False
        self._threads: dict[int, LoopThread[AsyncProducer]] = {os.getpid(): self._start()}
        """By process id: after fork() the child starts its own."""

    def _start(self) -> LoopThread[AsyncProducer]:
        return LoopThread(self._make, name="nsq-producer")

    @property
    def _thread(self) -> LoopThread[AsyncProducer]:
        return self._threads.get(os.getpid()) or self._start_in_child()

    def _start_in_child(self) -> LoopThread[AsyncProducer]:
        """Start a thread with a new connection. No lock: one held at the fork stays locked."""
        if self._is_closed:
            raise Stopped
        made = self._start()
        kept = self._threads.setdefault(os.getpid(), made)
        if kept is not made:
            made.stop()
        return kept

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Connect now instead of at the first publish. Raises ConnectFailed."""
        try:
            self._call(self._thread.resource.connect, limit=self._timeout)
        except TimeoutError as error:
            raise ConnectFailed(f"not connected within {self._timeout:g} s") from error
        except CancelledError as error:
            # Another thread closed it.
            raise Stopped from error

    def publish(
        self, topic: str, body: object, *, defer: float = 0.0, headers: Headers | None = None
    ) -> None:
        """Publish one message, to be delivered after `defer` seconds. Returns when the broker has
        acknowledged it. `body` is bytes, a text, or an object that becomes JSON, as for
        nsparq.client.Producer, and so are `headers`. Raises PublishFailed, NotConnected,
        ConnectFailed, PublishTimeout, Stopped, HeadersNotSupported; TypeError for an object that
        has no form in JSON."""
        encoded = encode_payload(body)
        self._publish(lambda: self._thread.resource.publish(topic, encoded, defer=defer, headers=headers))

    def publish_many(
        self,
        topic: str,
        bodies: Iterable[object],
        *,
        headers: HeadersOfMany | None = None,
    ) -> None:
        """Publish several messages, all or none of them. `headers` is a mapping for all of them, or
        a list with one mapping, or None, for each. Raises as publish()."""
        encoded = encode_bodies(bodies)
        self._publish(lambda: self._thread.resource.publish_many(topic, encoded, headers=headers))

    def close(self) -> None:
        """Wait for publishes of other threads, then close for good. Twice is safe."""
        self._is_closed = True
        thread = self._threads.get(os.getpid())
        if thread is not None:
            thread.stop(self._timeout + MARGIN_S)

    def _publish(self, function: Callable[[], Any]) -> None:
        try:
            self._call(function, limit=self._timeout + MARGIN_S)
        except PublishTimeout:
            raise
        except TimeoutError as error:
            raise PublishTimeout(f"not acknowledged within {self._timeout:g} s") from error
        except CancelledError as error:
            # Another thread closed it while this publish waited for a connection. It may have been
            # sent before.
            raise NotConnected("closed before the acknowledgement") from error

    def _call(self, function: Callable[[], Any], limit: float) -> None:
        if self._is_closed or not self._thread.is_running:
            raise Stopped
        try:
            self._thread.call(function, timeout=limit)
        except NotRunning as error:
            raise Stopped from error


def consume(
    topic: str,
    channel: str,
    *,
    nsqd: Iterable[str] = (),
    nsqlookupd: Iterable[str] = (),
    max_in_flight: int = 8,
    idle_timeout: float | None = None,
    on_give_up: Callable[[Message], Any] | None = None,
    dead_letter: str | None = None,
    config: Config | None = None,
) -> Generator[Message, None, None]:
    """The messages of a channel, one by one, forever, or until none has come for `idle_timeout`
    seconds.

    A message is finished when the next one is requested. If the body of the loop raises or breaks,
    its message is requeued at once. Messages that the body already answered get no other answer. Up
    to `max_in_flight` messages are fetched ahead; they are requeued too when the loop ends. A
    message with more than `config.max_attempts` attempts does not reach the loop: `on_give_up` gets
    it, in another thread, and the topic `dead_letter`.
    """
    feed = _Feed(
        topic,
        channel,
        nsqd=tuple(nsqd),
        nsqlookupd=tuple(nsqlookupd),
        max_in_flight=max_in_flight,
        on_give_up=on_give_up,
        dead_letter=dead_letter,
        config=config or Config(),
    )
    return _messages(feed, idle_timeout)


def _messages(feed: _Feed, idle_timeout: float | None) -> Generator[Message, None, None]:
    thread = LoopThread(lambda: feed, name="nsq-consumer")
    try:
        while (message := feed.next(idle_timeout)) is not None:
            yield message
            if not thread.is_ours:
                raise RuntimeError(
                    "the loop over messages belongs to the parent of the fork: start another one"
                )
            message.finish()
    finally:
        try:
            # This requeues the message at which the loop ended.
            thread.stop(STOP_S)
        except Exception as error:
            # Not raised: it would replace an exception of the loop's body.
            logger.error("%s: the loop over messages did not end cleanly: %r", feed, error)


class _Feed:
    """Between the client's thread and the loop over messages. It does not refer to the generator,
    so that a generator that nobody uses any more is closed."""

    def __init__(self, topic: str, channel: str, *, config: Config, **options: Any) -> None:
        self._tracing = config.tracing
        # The body of the loop is the handler, not _take().
        config = dataclasses.replace(config, tracing=None)
        self._consumer = Consumer(topic, channel, self._take, config=config, **options)
        self._waiting: SimpleQueue[Message] = SimpleQueue()
        self._handed_out: Message | None = None
        self._is_closed = False

    async def __aenter__(self) -> _Feed:
        await self._consumer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Requeue the message at which the loop ended, and those fetched ahead."""
        self._is_closed = True
        # First, or they would be sent to this consumer again.
        self._consumer.change_max_in_flight(0)
        if self._handed_out is not None:
            self._handed_out.requeue(0, backoff=False)
        while not self._waiting.empty():
            self._waiting.get_nowait().requeue(0, backoff=False)
        await self._consumer.stop(GRACE_S)

    async def _take(self, message: Message) -> None:
        message.auto_response = False
        if self._is_closed:
            message.requeue(0, backoff=False)
        else:
            self._waiting.put(message)

    def next(self, idle_timeout: float | None) -> Message | None:
        """The oldest message; None if none arrives in time."""
        deadline = None if idle_timeout is None else monotonic() + idle_timeout
        while True:
            try:
                left = None if deadline is None else max(0.0, deadline - monotonic())
                message = self._waiting.get(timeout=left)
            except Empty:
                return None
            # If its connection was lost, nsqd sends the message to another consumer.
            if not message.is_answered:
                self._handed_out = message
                if self._tracing is not None:
                    self._tracing.received(message, self._consumer.topic, self._consumer.channel)
                return message

    def __str__(self) -> str:
        return str(self._consumer)
