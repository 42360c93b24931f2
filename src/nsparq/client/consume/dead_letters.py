"""Messages that are given up: callbacks, and a dead-letter topic on the same nsqd."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from nsparq.client.config import Config
from nsparq.client.consume.event_loop import all_to_the_end, is_cancelled
from nsparq.client.consume.workers import FATAL, Calls
from nsparq.client.message import Message
from nsparq.client.producer import Producer
from nsparq.names import is_valid_name

logger = logging.getLogger(__name__)


def check_dead_letter(dead_letter: object, topic: str) -> None:
    """Raises ValueError if `dead_letter` cannot take the dead letters of the topic."""
    if isinstance(dead_letter, str) and not is_valid_name(dead_letter.encode()):
        raise ValueError(f"invalid topic name {dead_letter!r}")
    if dead_letter == topic:
        raise ValueError("a topic cannot take its own dead letters")


class DeadLetters:
    """Publishes dead letters, with one producer per nsqd. Can be used again after stop()."""

    def __init__(self, config: Config, *, retry: bool = False) -> None:
        self._config, self._retry = config, retry
        self._producers: dict[str, Producer] = {}

    async def publish(
        self, address: str, topic: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Returns when the nsqd at `address` has acknowledged it. Raises ClientError."""
        producer = self._producers.get(address)
        if producer is None:
            producer = self._producers[address] = Producer(address, retry=self._retry, config=self._config)
        await producer.publish(topic, body, headers=headers)

    async def stop(self) -> None:
        """Also if the caller is cancelled, every connection is closed."""
        producers, self._producers = self._producers, {}
        await all_to_the_end(producer.stop() for producer in producers.values())


class GiveUp:
    """Gives up a message: calls `on_give_up`, then `dead_letter`, and finishes it."""

    def __init__(
        self,
        name: str,
        config: Config,
        calls: Calls,
        on_give_up: Callable[[Message], Any] | None,
        dead_letter: str | Callable[[Message], Any] | None,
    ) -> None:
        self.count = 0
        """Messages that were given up and finished."""
        self._name = name
        self._topic = dead_letter if isinstance(dead_letter, str) else ""
        hooks = (on_give_up, None if isinstance(dead_letter, str) else dead_letter)
        self._hooks = [calls.prepare(hook) for hook in hooks if hook is not None]
        self._letters = DeadLetters(config)

    async def __call__(self, message: Message, reason: str = "") -> None:
        """If a hook fails, or the publish, the message is requeued: it is not lost."""
        if message.is_answered:
            return
        why = reason or f"it has been tried {message.attempts - 1} times"
        logger.warning("%s: giving up on %r: %s", self._name, message, why)
        try:
            for hook in self._hooks:
                await hook(message)
            if self._topic:
                await self._letters.publish(message.address, self._topic, message.body, message.headers)
        except FATAL:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            logger.error("%s: cannot give up on %r", self._name, message, exc_info=error)
            message.requeue()
            return
        if not message.is_answered:
            self.count += 1
        message.finish()

    async def stop(self) -> None:
        await self._letters.stop()
