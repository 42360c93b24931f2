"""Subscriptions by decorator: functions that get the payload of a message as the type that they declare.

    app = Subscriptions(nsqlookupd=["127.0.0.1:4161"])

    @app.subscribe("orders", "billing", concurrency=10, dead_letter="orders.dead")
    async def bill(order: Order, message: Message) -> None: ...

    app.run()

A payload that is not what was declared never reaches the function and is not tried again: it is a dead
letter, and so is a message whose last attempt has failed.
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
from nsparq.client.consumer import Consumer
from nsparq.client.dead_letters import DeadLetters, check_dead_letter
from nsparq.client.errors import PublishFailed
from nsparq.client.handling import Calls, is_async
from nsparq.client.message import Message, Reject, Requeue
from nsparq.client.payload import DecodeFailed, payload_decoder
from nsparq.client.rdy import Signal

__all__ = ["DeadLetter", "DecodeFailed", "Subscription", "Subscriptions"]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
DeadLetterHook = Callable[[Message, Exception], Any]

MAX_ERROR: Final = 1000
"""Characters of an error in a dead letter."""
_LISTS: Final = (list, Sequence, Iterable)
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class GivenUp(Exception):
    """Why a message is a dead letter that no handler here has just failed on: it has had its attempts."""


@dataclass(frozen=True)
class DeadLetter:
    """What is published to a dead-letter topic, as JSON. Being a dataclass, it can be subscribed to."""

    topic: str
    channel: str
    id: str
    """Of the message, 16 hex digits."""
    timestamp_ns: int
    """When the message was published."""
    attempts: int
    error: str
    """What was wrong, with the name of the exception."""
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
        """Of the message, as it was."""
        return base64.b64decode(self.base64) if self.base64 is not None else (self.text or "").encode()

    def to_json(self) -> bytes:
        text = json.dumps(dataclasses.asdict(self), ensure_ascii=False)
        # Half a character, which JSON can hold and UTF-8 cannot, stays an escape.
        return text.encode(errors="backslashreplace")


class Subscriptions:
    """A program's handlers. Declare them, then `run()`, or `async with` it."""

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
        """Have a function called with what comes on a channel. It is given back as it was.

        Its first parameter gets the payload, as the type that it is annotated with (or `payload`); a second
        one without a default gets the Message. With a `batch_size` it gets lists of both. Plain functions run
        in threads. `dead_letter` is a topic, which gets DeadLetters, or a function of message and exception;
        without it they are only logged. `config` is instead of the common one. Raises TypeError, ValueError.
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

    # life

    async def __aenter__(self) -> Subscriptions:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begin. Brokers that cannot be reached are tried again and again."""
        if self._is_running:
            raise RuntimeError("already started")
        self._is_running = True
        for subscription in self.subscriptions:
            await subscription.start()

    async def stop(self) -> None:
        """Take no new messages, let what is in flight be answered, close. May be started again."""
        await asyncio.gather(*(subscription.stop() for subscription in self.subscriptions))
        await self._dead_letters.stop()
        self._is_running = False

    def run(self) -> None:
        """Work until SIGINT or SIGTERM, then stop in order; a second one ends it at once. For the main
        thread; elsewhere, and beside other coroutines, use `async with`."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("run() waits for signals, which only the main thread gets: use `async with`")
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        is_over = asyncio.Event()

        def end() -> None:
            for signum in _STOP_SIGNALS:
                loop.remove_signal_handler(signum)
            is_over.set()

        for signum in _STOP_SIGNALS:
            loop.add_signal_handler(signum, end)
        async with self:
            await is_over.wait()

    # for subscriptions

    def make_consumer(self, topic: str, channel: str, **options: Any) -> Consumer:
        return Consumer(topic, channel, nsqd=self._nsqd, nsqlookupd=self._nsqlookupd, **options)

    async def publish_letter(self, topic: str, letter: DeadLetter, address: str) -> None:
        """Returns when the nsqd at `address`, where the message is from, has acknowledged it."""
        publish = self._dead_letters.publish
        try:
            await publish(address, topic, letter.to_json())
        except PublishFailed as error:
            if error.code != "E_BAD_MESSAGE":
                raise
            # Too big, by what we have added.
            logger.error("%s: %s is published without what was wrong: %s", topic, letter.id, letter.error)
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
        """Messages that were not what the handler declares."""
        self.dead_letter_count = 0
        """Those, and the ones whose attempts are used up."""
        self._owner = owner
        self._shape = shape
        self._dead_letter = dead_letter
        self._options = options
        self._calls: Calls
        self.consumer = self._make_consumer()
        """What is known of connections, and NSQ's counts."""

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
            await self._bury_undecodable(message, error)
            return
        try:
            await self._call_handler(value, message)
        except Exception as error:
            if not self._is_final(message, error):
                raise
            logger.exception("%s: the handler failed on %r for the last time", self, message)
            await self._bury_failed(message, error)

    async def _handle_batch(self, messages: list[Message]) -> None:
        values, decoded = [], []
        for message in messages:
            try:
                values.append(self._shape.decode(message))
                decoded.append(message)
            except DecodeFailed as error:
                await self._bury_undecodable(message, error)
        if not values:
            return
        try:
            await self._call_handler(values, decoded)
        except Exception as error:
            for message in decoded:
                if self._is_final(message, error):
                    await self._bury_failed(message, error)
            # The others are tried again.
            raise

    async def _call_handler(self, value: Any, message: Message | list[Message]) -> None:
        await self._call(self.handler, *((value, message) if self._shape.takes_message else (value,)))

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """A function of the user's; in a thread unless it can be awaited."""
        if is_async(function):
            await function(*arguments)
        else:
            await self._calls.prepare(lambda given: function(*given))(arguments)

    # dead letters

    def _is_final(self, message: Message, error: Exception) -> bool:
        """Whether trying again is of no use. After the last attempt the error is at hand; NSQ's clients would
        have the message sent once more, only to throw it away."""
        if self._dead_letter is None or message.is_answered or isinstance(error, Requeue):
            return False
        return isinstance(error, Reject) or 0 < self.consumer.config.max_attempts <= message.attempts

    async def _bury_undecodable(self, message: Message, error: DecodeFailed) -> None:
        self.undecodable_count += 1
        logger.error("%s: %r is not what it should be: %s", self, message, error)
        await self._bury(message, error)
        message.finish()

    async def _bury_failed(self, message: Message, error: Exception) -> None:
        await self._bury(message, error)
        # Done with, but if things are not going well, the others must not follow as fast as they can.
        is_fine = isinstance(error, Reject)
        self.consumer.answer(message, Signal.RESUME if is_fine else Signal.BACKOFF, None)

    async def _give_up(self, message: Message) -> None:
        """Its attempts were used up elsewhere, or without an answer; the consumer finishes it."""
        await self._bury(message, GivenUp(f"tried {message.attempts - 1} times"))

    async def _bury(self, message: Message, error: Exception) -> None:
        """If this fails the message stays with the broker, and comes again."""
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
    """How a handler is called."""

    decode: Callable[[Message], Any]
    takes_message: bool


def _shape(handler: Callable[..., Any], payload: Any, is_batch: bool, names: Mapping[str, Any]) -> _Shape:
    """Raises TypeError for a handler that cannot be called with a payload."""
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
        raise TypeError(f"{shown} must take the payload, and may take the message behind it")
    kind = payload
    if kind is None:
        if first[0].annotation is inspect.Parameter.empty:
            raise TypeError(f"{shown} does not say what its payload is: annotate {first[0].name!r}")
        kind = _evaluate(first[0].annotation, handler, names)
        if is_batch:
            if get_origin(kind) not in _LISTS:
                raise TypeError(f"{shown} handles batches: annotate {first[0].name!r} as a list of something")
            kind = get_args(kind)[0]
    takes_message = len(first) > 1 and first[1] in needed
    return _Shape(_message_decoder(kind, names), takes_message)


def _message_decoder(kind: Any, names: Mapping[str, Any]) -> Callable[[Message], Any]:
    if kind is Message:
        return lambda message: message
    decode = payload_decoder(kind, names)
    return lambda message: decode(message.body)


def _evaluate(annotation: Any, handler: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    """An annotation as a type. That one alone: the others may be for the type checker's eyes only."""
    function: Any = handler.func if isinstance(handler, functools.partial) else handler
    function = inspect.unwrap(function)
    where = getattr(function, "__globals__", None) or getattr(type(function).__call__, "__globals__", {})
    holder = types.SimpleNamespace(__annotations__={"payload": annotation})
    try:
        return typing.get_type_hints(holder, where, dict(names), include_extras=True)["payload"]
    except NameError as error:
        raise TypeError(f"the annotation {annotation!r} cannot be resolved: {error}") from error
