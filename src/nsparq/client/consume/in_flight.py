"""The messages that a consumer has not answered yet: their answers, and the TOUCH that keeps them
from timing out while they wait or are handled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any, Final

from nsparq.client.config import Config, milliseconds
from nsparq.client.connect.connection import Connection
from nsparq.client.consume.event_loop import Alarm
from nsparq.client.consume.rdy import Distribution, Signal
from nsparq.client.message import Message
from nsparq.wire import client as wire
from nsparq.wire.client import Received

TOUCH_SHARE: Final = 3
"""A message is touched after this fraction (a third) of its timeout."""
LEAST_S: Final = 0.005


class InFlight:
    """start() it first. answer() and touch() work from any thread, the rest on the event loop."""

    def __init__(
        self,
        config: Config,
        distribution: Distribution,
        on_signal: Callable[[Signal], None],
        on_answer: Callable[[Connection], None],
        auto_touch: bool,
    ) -> None:
        """`on_signal` gets every answer that matters for back-off, before it is sent. `on_answer`
        gets a closing connection after one of its messages was answered."""
        self.requeue_delay: Callable[[int], float] = config.requeue_delay
        """Seconds before a message that has failed is sent again, by its attempts."""
        self.received = self.finished = self.requeued = 0
        self._distribution = distribution
        self._on_signal, self._on_answer = on_signal, on_answer
        self._auto_touch = auto_touch
        self._messages: dict[Message, None] = {}
        """In order of arrival."""
        self._touched: dict[tuple[Connection, bytes], Message] = {}
        """Those that were touched, for the errors of nsqd, which name the id. Some are answered."""
        self._connections: Mapping[str, Connection] = {}
        self._loop: asyncio.AbstractEventLoop
        self._thread = 0
        self._touch_alarm: Alarm

    def start(self, connections: Mapping[str, Connection]) -> None:
        """`connections` is the consumer's mapping of open connections, which changes."""
        self._connections = connections
        self._loop, self._thread = asyncio.get_running_loop(), get_ident()
        self._touch_alarm = Alarm(self._loop, self._touch_old)

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, connection: Connection, received: Sequence[Received]) -> list[Message]:
        now = connection.last_message = self._loop.time()
        connection.in_flight += len(received)
        self.received += len(received)
        messages = [Message(self, connection, one, now) for one in received]
        self._messages.update(dict.fromkeys(messages))
        return messages

    def drop(self, connection: Connection) -> None:
        """Forget the messages of a lost connection: the server requeues them."""
        for message in [message for message in self._messages if message._connection is connection]:
            message.is_answered = True
            del self._messages[message]
        self._forget_answered()

    # answers

    def answer(self, message: Message, signal: Signal, delay: float | None) -> None:
        """FIN, or REQ with a delay. A second answer to a message does nothing. From any thread."""
        if get_ident() == self._thread:
            self.answer_here(message, signal, delay)
        else:
            self._call_soon(self.answer_here, message, signal, delay)

    def answer_here(self, message: Message, signal: Signal, delay: float | None) -> None:
        """The same on the event loop."""
        if message.is_answered:
            return
        message.is_answered = True
        self._messages.pop(message, None)
        connection = message._connection
        connection.in_flight -= 1
        # Outside of back-off a success changes nothing.
        if signal is not Signal.RESUME or self._distribution.backoff_count:
            self._on_signal(signal)
        if delay is None:
            self.finished += 1
            connection.write(wire.fin(message.id))
        else:
            self.requeued += 1
            connection.write(wire.req(message.id, milliseconds(delay)))
        if connection.is_closing:
            self._on_answer(connection)

    def finish_all(self, messages: Sequence[Message]) -> None:
        """FIN for messages that wait for an automatic answer, in one write per connection."""
        if self._distribution.backoff_count:
            # Each answer may change the back-off, and so what the next one does.
            for message in messages:
                if message.auto_response:
                    self.answer_here(message, Signal.RESUME, None)
            return
        finished: dict[Connection, list[bytes]] = {}
        for message in messages:
            if message.auto_response and not message.is_answered:
                message.is_answered = True
                self._messages.pop(message, None)
                finished.setdefault(message._connection, []).append(message.id)
        for connection, ids in finished.items():
            self.finished += len(ids)
            connection.in_flight -= len(ids)
            connection.write(wire.fin_all(ids))
            if connection.is_closing:
                self._on_answer(connection)

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        # A handler in a thread may run longer than the loop. Then its answer has nowhere to go.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    # TOUCH

    def touch(self, message: Message) -> None:
        """TOUCH an unanswered message. From any thread."""
        if get_ident() == self._thread:
            self._touch(message)
        else:
            self._call_soon(self._touch, message)

    def _touch(self, message: Message) -> None:
        if not message.is_answered:
            message.touched = self._loop.time()
            if self._auto_touch:
                self._touched[message._connection, message.id] = message
            message._connection.write(wire.touch(message.id))

    def touch_failed(self, connection: Connection, text: str) -> None:
        """Stop touching the message that an E_TOUCH error names: it has timed out at the server.
        The text is `E_TOUCH_FAILED TOUCH <id> failed <reason>`."""
        words = text.split(maxsplit=3)
        if len(words) > 2:
            message = self._touched.pop((connection, words[2].encode("utf-8", "replace")), None)
            if message is not None:
                message.touched = math.inf

    def _forget_answered(self) -> None:
        self._touched = {key: one for key, one in self._touched.items() if not one.is_answered}

    def schedule_touch(self) -> None:
        """Call it when a connection was opened: its messages may time out sooner than others."""
        if self._auto_touch and self._connections:
            shortest = min(connection.msg_timeout for connection in self._connections.values())
            self._touch_alarm.set(self._loop.time() + max(shortest / TOUCH_SHARE / 2, LEAST_S))

    def _touch_old(self) -> None:
        now = self._loop.time()
        self._forget_answered()
        for message in self._messages:
            if now - message.touched >= message._connection.msg_timeout / TOUCH_SHARE:
                self._touch(message)
        self.schedule_touch()

    def stop_touching(self) -> None:
        self._touch_alarm.set(None)
