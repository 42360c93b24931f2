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
import base64
import dataclasses
import functools
import inspect
import json
import logging
import signal
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, get_args, get_origin

from nsparq.client.config import Config
from nsparq.client.consume.dead_letters import DeadLetters, check_dead_letter
from nsparq.client.consume.rdy import Signal
from nsparq.client.consume.workers import Calls, is_async
from nsparq.client.consumer import Consumer
from nsparq.client.decode.payload import DecodeFailed, payload_decoder
from nsparq.client.errors import PublishFailed
from nsparq.client.message import Message, Reject, Requeue

__all__ = ["DeadLetter", "DecodeFailed", "Subscription", "Subscriptions"]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
DeadLetterHook = Callable[[Message, Exception], Any]

MAX_ERROR: Final = 1000
"""Longest error text in a dead letter, in characters."""
_LISTS: Final = (list, Sequence, Iterable)
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class GivenUp(Exception):
    """The error in a dead letter whose attempts were used up without a failure in this process."""


@dataclass(frozen=True)
class DeadLetter:
    """Published to a dead-letter topic, as JSON. As a dataclass, it can be a handler's payload."""

    topic: str
    channel: str
    id: str
    """Message id, 16 hex digits."""
    timestamp_ns: int
    """When the message was published."""
    attempts: int
    error: str
    """Name and text of the exception."""
    text: str | None = None
    """The body, if it is UTF-8."""
    base64: str | None = None
    """The body, if it is not."""

    @classmethod
    def of(cls, topic: str, channel: str, message: Message, error: Exception) -> DeadLetter:
        text, encoded = None, None
        try:
            text = message.body.decode()
        except UnicodeDecodeError:
            encoded = base64.b64encode(message.body).decode()
        return cls(
            topic=topic,
            channel=channel,
            id=message.id.decode(),
            timestamp_ns=message.timestamp_ns,
            attempts=message.attempts,
            error=f"{type(error).__name__}: {error}"[:MAX_ERROR],
            text=text,
            base64=encoded,
        )

    @property
    def body(self) -> bytes:
        """The original body of the message."""
        return base64.b64decode(self.base64) if self.base64 is not None else (self.text or "").encode()

    def to_json(self) -> bytes:
        text = json.dumps(dataclasses.asdict(self), ensure_ascii=False)
        # A lone surrogate is valid in JSON but not in UTF-8: it stays an escape.
        return text.encode(errors="backslashreplace")


class Subscriptions:
    """The handlers of a program. Declare them, then call run() or use `async with`."""

    def __init__(
        self, *, nsqd: Iterable[str] = (), nsqlookupd: Iterable[str] = (), config: Config | None = None
    ) -> None:
        self.subscriptions: list[Subscription] = []
        self._nsqd, self._nsqlookupd = tuple(nsqd), tuple(nsqlookupd)
        if not self._nsqd and not self._nsqlookupd:
            raise ValueError("subscriptions need the address of an nsqd or of an nsqlookupd")
        self._config = config or Config()
        self._dead_letters = DeadLetters(self._config, retry=True)
        self._is_running = False

    def subscribe(
        self,
        topic: str,
        channel: str,
        *,
        concurrency: int = 1,
        max_in_flight: int | None = None,
        batch_size: int | None = None,
        batch_timeout: float = 1.0,
        dead_letter: str | DeadLetterHook | None = None,
        payload: Any = None,
        auto_touch: bool = True,
        config: Config | None = None,
    ) -> Callable[[F], F]:
        """Decorator: call a function for every message of a channel. Returns the function
        unchanged.

        Its first parameter gets the payload, decoded as its annotation (or as `payload`). A second
        parameter without a default gets the Message. With a `batch_size` both are lists. Plain
        functions run in threads. `dead_letter` is a topic that gets DeadLetters, or a function of
        message and exception; without it, dead letters are only logged. `config` replaces the
        common one. Raises TypeError, ValueError.
        """
        check_dead_letter(dead_letter, topic)
        if self._is_running:
            raise RuntimeError("declare subscriptions before they are started")

        def decorate(handler: F) -> F:
            shape = _shape(handler, payload, batch_size is not None, sys._getframe(1).f_locals)
            subscription = Subscription(
                self,
                topic,
                channel,
                handler,
                shape,
                dead_letter,
                concurrency=concurrency,
                max_in_flight=max_in_flight,
                batch_size=batch_size,
                batch_timeout=batch_timeout,
                auto_touch=auto_touch,
                config=config or self._config,
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

    async def start(self) -> None:
        """Start consuming. Brokers that cannot be reached are tried again and again."""
        if self._is_running:
            raise RuntimeError("already started")
        self._is_running = True
        for subscription in self.subscriptions:
            await subscription.start()

    async def stop(self) -> None:
        """Wait for answers to messages in flight, and close. It can be started again."""
        await asyncio.gather(*(subscription.stop() for subscription in self.subscriptions))
        await self._dead_letters.stop()
        self._is_running = False

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
        return Consumer(topic, channel, nsqd=self._nsqd, nsqlookupd=self._nsqlookupd, **options)

    async def publish_letter(self, topic: str, letter: DeadLetter, address: str) -> None:
        """Returns when the nsqd at `address`, which sent the message, has acknowledged it."""
        publish = self._dead_letters.publish
        try:
            await publish(address, topic, letter.to_json())
        except PublishFailed as error:
            if error.code != "E_BAD_MESSAGE":
                raise
            # Too large, because of the fields that we add.
            logger.error(
                "%s: %s is too large, published without its error: %s", topic, letter.id, letter.error
            )
            await publish(address, topic, letter.body)


class Subscription:
    """One function on one channel."""

    def __init__(
        self,
        owner: Subscriptions,
        topic: str,
        channel: str,
        handler: Callable[..., Any],
        shape: _Shape,
        dead_letter: str | DeadLetterHook | None,
        **options: Any,
    ) -> None:
        self.topic, self.channel, self.handler = topic, channel, handler
        self.undecodable_count = 0
        """Messages whose payload did not have the declared type."""
        self.dead_letter_count = 0
        """All dead letters: undecodable, rejected, or out of attempts."""
        self._owner = owner
        self._shape = shape
        self._dead_letter = dead_letter
        self._options = options
        self._calls: Calls
        self.consumer = self._make_consumer()
        """The consumer, with its connections and counts."""

    def _make_consumer(self) -> Consumer:
        options = dict(self._options, on_give_up=self._give_up)
        if options["batch_size"] is None:
            del options["batch_size"], options["batch_timeout"]
            options["handler"] = self._handle
        else:
            options["batch_handler"] = self._handle_batch
        return self._owner.make_consumer(self.topic, self.channel, **options)

    async def start(self) -> None:
        self._calls = Calls(self._options["concurrency"], f"nsq-{self.topic}")
        self.consumer = self._make_consumer()
        await self.consumer.start()

    async def stop(self) -> None:
        await self.consumer.stop()
        self._calls.close()

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
            if not self._is_final(message, error):
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
                if self._is_final(message, error):
                    await self._handle_failed(message, error)
            # The others are requeued.
            raise

    async def _call_handler(self, value: Any, message: Message | list[Message]) -> None:
        await self._call(self.handler, *((value, message) if self._shape.takes_message else (value,)))

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function of the user, in a thread unless it is a coroutine function."""
        if is_async(function):
            await function(*arguments)
        else:
            await self._calls.prepare(lambda given: function(*given))(arguments)

    # dead letters

    def _is_final(self, message: Message, error: Exception) -> bool:
        """Whether the message is a dead letter. After the last attempt it becomes one at once, with
        the error; NSQ's clients would requeue it once more, only to give it up."""
        if self._dead_letter is None or message.is_answered or isinstance(error, Requeue):
            return False
        return isinstance(error, Reject) or 0 < self.consumer.config.max_attempts <= message.attempts

    async def _handle_undecodable(self, message: Message, error: DecodeFailed) -> None:
        self.undecodable_count += 1
        logger.error("%s: %r cannot be decoded: %s", self, message, error)
        await self._send_dead_letter(message, error)
        message.finish()

    async def _handle_failed(self, message: Message, error: Exception) -> None:
        await self._send_dead_letter(message, error)
        # The message is finished. But if the handler failed, the consumer should back off.
        message._answer(Signal.RESUME if isinstance(error, Reject) else Signal.BACKOFF, None)

    async def _give_up(self, message: Message) -> None:
        """Its attempts were used up elsewhere, or by timeouts. The consumer finishes it."""
        await self._send_dead_letter(message, GivenUp(f"tried {message.attempts - 1} times"))

    async def _send_dead_letter(self, message: Message, error: Exception) -> None:
        """If this fails, the message is requeued."""
        hook = self._dead_letter
        if isinstance(hook, str):
            letter = DeadLetter.of(self.topic, self.channel, message, error)
            await self._owner.publish_letter(hook, letter, message.address)
        elif hook is not None:
            await self._call(hook, message, error)
        self.dead_letter_count += 1

    def __str__(self) -> str:
        return f"{self.topic}/{self.channel}"


@dataclass(frozen=True)
class _Shape:
    """How to call a handler."""

    decode: Callable[[Message], Any]
    takes_message: bool


def _shape(handler: Callable[..., Any], payload: Any, is_batch: bool, names: Mapping[str, Any]) -> _Shape:
    """Raises TypeError if the handler cannot be called with a payload."""
    shown = getattr(handler, "__qualname__", repr(handler))
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [*inspect.signature(handler).parameters.values()]
    first = [one for one in parameters if one.kind in positional]
    needed = [
        one
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if not first or any(one not in first[:2] for one in needed):
        raise TypeError(f"{shown} must take the payload, and optionally the message after it")
    kind = payload
    if kind is None:
        if first[0].annotation is inspect.Parameter.empty:
            raise TypeError(f"{shown} has no type for its payload: annotate {first[0].name!r}")
        kind = _evaluate(first[0].annotation, handler, names)
        if is_batch:
            if get_origin(kind) not in _LISTS:
                raise TypeError(f"{shown} handles batches: annotate {first[0].name!r} as a list of something")
            kind = get_args(kind)[0]
    takes_message = len(first) > 1 and first[1] in needed
    if kind is Message:
        return _Shape(lambda message: message, takes_message)
    decode = payload_decoder(kind, names)
    return _Shape(lambda message: decode(message.body), takes_message)


def _evaluate(annotation: Any, handler: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    """Evaluate one annotation only: others may be for type checkers."""
    function: Any = handler.func if isinstance(handler, functools.partial) else handler
    function = inspect.unwrap(function)
    where = getattr(function, "__globals__", None) or getattr(type(function).__call__, "__globals__", {})
    holder = types.SimpleNamespace(__annotations__={"payload": annotation})
    try:
        return typing.get_type_hints(holder, where, dict(names), include_extras=True)["payload"]
    except NameError as error:
        raise TypeError(f"the annotation {annotation!r} cannot be resolved: {error}") from error
