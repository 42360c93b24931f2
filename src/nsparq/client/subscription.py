"""Subscriptions by decorator: functions that get the payload of a message as their declared type.

    app = Subscriptions(nsqlookupd=["127.0.0.1:4161"])

    @app.subscribe("orders", "billing", concurrency=10, dead_letter="orders.dead")
    async def bill(order: Order, message: Message) -> None: ...

    app.run()

A payload that does not have the declared type never reaches the function and is not retried: the
message becomes a dead letter. So does a message whose last attempt has failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from time import perf_counter
from typing import Any, Final, TypeVar

from nsparq.client import metrics
from nsparq.client.config import Config
from nsparq.client.consume.dead_letters import DeadLetters, check_dead_letter
from nsparq.client.consume.event_loop import all_to_the_end
from nsparq.client.consume.handler_shape import HandlerShape, handler_shape
from nsparq.client.consume.rdy import Signal
from nsparq.client.consume.retries import RetryDelay, RetryOn, RetryRules
from nsparq.client.consume.workers import Calls, is_async
from nsparq.client.consumer import STOP_S, Consumer
from nsparq.client.errors import PublishFailed
from nsparq.client.message import Message, Requeue
from nsparq.client.payloads.decode import DecodeFailed
from nsparq.client.payloads.encode import encode_payload
from nsparq.dead_letter import DeadLetter, as_text

__all__ = ["DeadLetter", "DecodeFailed", "Subscription", "Subscriptions"]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
DeadLetterHook = Callable[[Message, Exception], Any]

MAX_ERROR: Final = 1000
"""Longest error text in a dead letter, in characters."""
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_of_the_parent: list[object] = []
"""Kept forever in a child of fork(): what the lifespan of the parent has entered. Leaving or
dropping it would close what the parent uses."""


class GivenUp(Exception):
    """The error in a dead letter whose attempts were used up without a failure in this process."""


class Subscriptions:
    """The handlers of a program. Declare them, then call run() or use `async with`."""

    def __init__(
        self,
        *,
        nsqd: Iterable[str] = (),
        nsqlookupd: Iterable[str] = (),
        lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
        config: Config | None = None,
    ) -> None:
        """`lifespan` returns a context manager for what the handlers need, such as a pool of
        connections. It is entered before the first message and exited after the last."""
        self.subscriptions: list[Subscription] = []
        self._nsqd, self._nsqlookupd = tuple(nsqd), tuple(nsqlookupd)
        if not self._nsqd and not self._nsqlookupd:
            raise ValueError("subscriptions need the address of an nsqd or of an nsqlookupd")
        self._config = config or Config()
        self._dead_letters = DeadLetters(self._config, retry=True)
        self._lifespan = lifespan
        self._resources = AsyncExitStack()
        """What the present start has entered."""
        self._running_in = 0
        """The process that started it; 0 while it is stopped."""

    def subscribe(
        self,
        topic: str,
        channel: str,
        *,
        concurrency: int = 1,
        max_in_flight: int | None = None,
        batch_size: int | None = None,
        batch_timeout: float = 1.0,
        retries: int | None = None,
        retry_delay: RetryDelay | None = None,
        retry_on: RetryOn | None = None,
        dead_letter: str | DeadLetterHook | None = None,
        payload: Any = None,
        auto_touch: bool = True,
        config: Config | None = None,
    ) -> Callable[[F], F]:
        """Decorator: call a function for every message of a channel. Returns the function
        unchanged.

        Its first parameter gets the payload, decoded as its annotation (or as `payload`). A second
        parameter without a default gets the Message. With a `batch_size` both are lists. Plain
        functions run in threads. `config` replaces the common one.

        A message that fails is tried again up to `retries` times: after `retry_delay` seconds,
        doubled for every further retry, or after the seconds that the function `retry_delay`
        returns for the number of the retry. Exceptions that are not in `retry_on` are not retried.
        Without these, `config` decides. After the last retry the message is a dead letter:
        `dead_letter` is a topic that gets DeadLetters, or a function of message and exception;
        without it, dead letters are only logged. Raises TypeError, ValueError.
        """
        check_dead_letter(dead_letter, topic)
        rules = RetryRules.of(config or self._config, retries, retry_delay, retry_on)
        if self.is_running:
            raise RuntimeError("declare subscriptions before they are started")

        def decorate(handler: F) -> F:
            shape = handler_shape(handler, payload, batch_size is not None, sys._getframe(1).f_locals)
            subscription = Subscription(
                self,
                topic,
                channel,
                handler,
                shape,
                rules,
                dead_letter,
                concurrency=concurrency,
                max_in_flight=max_in_flight,
                batch_size=batch_size,
                batch_timeout=batch_timeout,
                auto_touch=auto_touch,
            )
            self.subscriptions.append(subscription)
            return handler

        return decorate

    # start and stop

    async def __aenter__(self) -> Subscriptions:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def is_running(self) -> bool:
        """Whether this process has started it. After fork() it runs in the parent only, and the
        child may start its own."""
        return self._running_in == os.getpid()

    async def start(self) -> None:
        """Start consuming. Brokers that cannot be reached are tried again and again."""
        if self.is_running:
            raise RuntimeError("already started")
        if self._running_in:
            # It was started before fork().
            _of_the_parent.append(self._resources)
        self._resources = AsyncExitStack()
        if self._lifespan is not None:
            await self._resources.enter_async_context(self._lifespan())
        self._running_in = os.getpid()
        for subscription in self.subscriptions:
            await subscription.start()

    async def stop(self, grace: float = STOP_S) -> None:
        """Wait for answers to messages in flight, at most `grace` seconds, and close. It can be
        started again."""
        if not self.is_running:
            return
        try:
            await all_to_the_end(subscription.stop(grace) for subscription in self.subscriptions)
        finally:
            # Also if the caller is cancelled.
            try:
                await self._dead_letters.stop()
            finally:
                self._running_in = 0
                await self._resources.aclose()

    def metrics(self) -> str:
        """The figures of all subscriptions in Prometheus' text format."""
        return metrics.text(subscription.figures() for subscription in self.subscriptions)

    def run(self) -> None:
        """Run until SIGINT or SIGTERM, then stop cleanly; a second signal ends the program at once.
        For the main thread. Elsewhere, or beside other coroutines, use `async with`."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("run() needs the main thread, for signals: use `async with` here")
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        is_done = asyncio.Event()

        def end() -> None:
            for signum in _STOP_SIGNALS:
                loop.remove_signal_handler(signum)
            is_done.set()

        for signum in _STOP_SIGNALS:
            loop.add_signal_handler(signum, end)
        async with self:
            await is_done.wait()

    # for subscriptions

    def make_consumer(self, topic: str, channel: str, **options: Any) -> Consumer:
        """A consumer with the common addresses. Subscription calls it."""
        return Consumer(topic, channel, nsqd=self._nsqd, nsqlookupd=self._nsqlookupd, **options)

    async def publish_letter(self, topic: str, letter: DeadLetter, address: str) -> None:
        """Returns when the nsqd at `address`, which sent the message, has acknowledged it."""
        publish = self._dead_letters.publish
        try:
            await publish(address, topic, encode_payload(letter))
        except PublishFailed as error:
            if error.code != "E_BAD_MESSAGE":
                raise
            # Too large, because of the fields that we add.
            logger.error(
                "%s: %s is too large, published without its error: %s", topic, letter.id, letter.error
            )
            await publish(address, topic, letter.body, letter.headers)


class Subscription:
    """One function on one channel."""

    def __init__(
        self,
        owner: Subscriptions,
        topic: str,
        channel: str,
        handler: Callable[..., Any],
        shape: HandlerShape,
        rules: RetryRules,
        dead_letter: str | DeadLetterHook | None,
        **options: Any,
    ) -> None:
        self.topic, self.channel, self.handler = topic, channel, handler
        self.failed_count = 0
        """Messages on which the handler failed, each attempt counted."""
        self.undecodable_count = 0
        """Messages whose payload did not have the declared type."""
        self.dead_letter_count = 0
        """All dead letters: undecodable, rejected, or out of attempts."""
        self._owner = owner
        self._shape = shape
        self._rules = rules
        self._durations = metrics.Durations()
        self._dead_letter = dead_letter
        self._options = options
        self._calls: Calls
        self.consumer = self._make_consumer()
        """The consumer, with its connections and counts."""

    def _make_consumer(self) -> Consumer:
        rules = self._rules
        options = dict(
            self._options, config=rules.config, requeue_delay=rules.delay, on_give_up=self._give_up
        )
        if options["batch_size"] is None:
            del options["batch_size"], options["batch_timeout"]
            options["handler"] = self._handle
        else:
            options["batch_handler"] = self._handle_batch
        return self._owner.make_consumer(self.topic, self.channel, **options)

    async def start(self) -> None:
        """Start consuming. Subscriptions.start() calls it."""
        self._calls = Calls(self._options["concurrency"], f"nsq-{self.topic}")
        self.consumer = self._make_consumer()
        await self.consumer.start()

    async def stop(self, grace: float = STOP_S) -> None:
        """Stop consuming. Subscriptions.stop() calls it."""
        try:
            await self.consumer.stop(grace)
        finally:
            self._calls.close()

    def figures(self) -> metrics.Figures:
        """Counts and gauges since the start, for `nsparq.client.metrics`."""
        consumer = self.consumer
        return {
            "topic": self.topic,
            "channel": self.channel,
            "received": consumer.messages_received,
            "finished": consumer.messages_finished,
            "requeued": consumer.messages_requeued,
            "failed": self.failed_count,
            "undecodable": self.undecodable_count,
            "dead_letters": self.dead_letter_count,
            "in_flight": consumer.messages_in_flight,
            "connections": len(consumer.connections),
            "in_backoff": int(consumer.is_in_backoff),
            **self._durations.figures(),
        }

    # messages

    async def _handle(self, message: Message) -> None:
        try:
            value = self._shape.decode(message)
        except DecodeFailed as error:
            await self._handle_undecodable(message, error)
            return
        try:
            await self._call_handler(value, message)
        except Exception as error:
            if message.is_answered or not self._rules.is_final(message, error):
                raise
            logger.exception("%s: the handler failed on %r for the last time", self, message)
            await self._handle_failed(message, error)

    async def _handle_batch(self, messages: list[Message]) -> None:
        values, decoded = [], []
        for message in messages:
            try:
                values.append(self._shape.decode(message))
                decoded.append(message)
            except DecodeFailed as error:
                await self._handle_undecodable(message, error)
        if not values:
            return
        try:
            await self._call_handler(values, decoded)
        except Exception as error:
            for message in decoded:
                if not message.is_answered and self._rules.is_final(message, error):
                    await self._handle_failed(message, error)
            # The others are requeued.
            raise

    async def _call_handler(self, value: Any, message: Message | list[Message]) -> None:
        began = perf_counter()
        try:
            await self._call(self.handler, *((value, message) if self._shape.takes_message else (value,)))
        except Exception as error:
            if not isinstance(error, Requeue):
                self.failed_count += len(message) if isinstance(message, list) else 1
            raise
        finally:
            self._durations.add(perf_counter() - began)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function of the user, in a thread unless it is a coroutine function."""
        if is_async(function):
            await function(*arguments)
        else:
            await self._calls.prepare(lambda given: function(*given))(arguments)

    # dead letters

    async def _handle_undecodable(self, message: Message, error: DecodeFailed) -> None:
        self.undecodable_count += 1
        logger.error("%s: %r cannot be decoded: %s", self, message, error)
        await self._send_dead_letter(message, error)
        message.finish()

    async def _handle_failed(self, message: Message, error: Exception) -> None:
        """After the last attempt a message becomes a dead letter at once, with the error; NSQ's
        clients would requeue it once more, only to give it up."""
        await self._send_dead_letter(message, error)
        # The message is finished. But if the handler failed, the consumer should back off.
        message._answer(Signal.RESUME if self._rules.is_hopeless(error) else Signal.BACKOFF, None)

    async def _give_up(self, message: Message) -> None:
        """Its attempts were used up elsewhere, or by timeouts. The consumer finishes it."""
        await self._send_dead_letter(message, GivenUp(f"tried {message.attempts - 1} times"))

    async def _send_dead_letter(self, message: Message, error: Exception) -> None:
        """If this fails, the message is requeued."""
        if (tracing := self._rules.config.tracing) is not None:
            tracing.failed(error)
        hook = self._dead_letter
        if isinstance(hook, str):
            letter = _letter_of(self.topic, self.channel, message, error)
            await self._owner.publish_letter(hook, letter, message.address)
        elif hook is not None:
            await self._call(hook, message, error)
        self.dead_letter_count += 1

    def __str__(self) -> str:
        return f"{self.topic}/{self.channel}"


def _letter_of(topic: str, channel: str, message: Message, error: Exception) -> DeadLetter:
    """The dead letter for a message that a channel gives up because of an error."""
    return DeadLetter(
        topic=topic,
        channel=channel,
        id=message.id.decode(),
        timestamp_ns=message.timestamp_ns,
        attempts=message.attempts,
        error=f"{type(error).__name__}: {error}"[:MAX_ERROR],
        headers=dict(message.headers) or None,
        **as_text(message.body),
    )
