"""`async for message in consumer`: the loops over a consumer's messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from nsparq.client.consume.workers import Inbox
from nsparq.client.message import Message

if TYPE_CHECKING:
    from nsparq.client.consumer import Consumer


class Iteration:
    """The messages that loops are at, each with the task of its loop."""

    def __init__(self, consumer: Consumer, inbox: Inbox) -> None:
        self._consumer, self._inbox = consumer, inbox
        self._tasks: dict[Message, asyncio.Task[Any] | None] = {}

    async def messages(self) -> AsyncIterator[Message]:
        """The messages, one by one. Asking for the next one finishes the one before."""
        consumer = self._consumer
        max_attempts, tracing = consumer.config.max_attempts, consumer.config.tracing
        while (message := await self._inbox.get()) is not None:
            if 0 < max_attempts < message.attempts:
                await consumer.give_up(message)
                continue
            if tracing is not None:
                tracing.received(message, consumer.topic, consumer.channel)
            self._tasks[message] = asyncio.current_task()
            try:
                yield message
            except BaseException:
                message.requeue(0, backoff=False)
                raise
            finally:
                del self._tasks[message]
            if message.auto_response:
                message.finish()

    @property
    def is_in_this_task(self) -> bool:
        return asyncio.current_task() in self._tasks.values()

    def requeue_left(self) -> None:
        """Requeue the messages of loops in this task, which have ended, and of ended tasks."""
        for message, task in [*self._tasks.items()]:
            if task is None or task is asyncio.current_task() or task.done():
                message.requeue(0, backoff=False)
