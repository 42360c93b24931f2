"""A producer: publishes to one nsqd at a time, and to the next when that one is gone.

    async with Producer("127.0.0.1:4150") as producer:
        await producer.publish("events", b"hello")

A publish returns when the broker has acknowledged it, or raises. It never retries by itself what a broker may
already have: say `retry=True` if a duplicate is better than an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from nsparq.client.config import Config
from nsparq.client.connection import Connection
from nsparq.client.errors import ConnectFailed, NotConnected, PublishFailed, PublishTimeout, Stopped
from nsparq.client.lookup import Lookup, LookupFailed
from nsparq.names import is_valid_name
from nsparq.wire import client as wire
from nsparq.wire.client import Received

__all__ = ["Producer"]

logger = logging.getLogger(__name__)

MAX_PENDING: Final = 1000
"""Publishes on their way to a broker; further ones wait."""


class Producer:
    """Connects at the first publish. Safe to use from many tasks of one event loop."""

    def __init__(
        self,
        *nsqd: str,
        nsqlookupd: Iterable[str] = (),
        retry: bool = False,
        max_pending: int = MAX_PENDING,
        config: Config | None = None,
    ) -> None:
        """Addresses of nsqd in order of preference, and of nsqlookupds that know more. With `retry` a publish
        whose connection was lost before its acknowledgement is sent again: it may then come twice."""
        self.config = config or Config()
        self._lookup = Lookup(nsqlookupd, self.config)
        if not nsqd and not self._lookup.addresses:
            raise ValueError("a producer needs the address of an nsqd or of an nsqlookupd")
        self._nsqd = list(dict.fromkeys(nsqd))
        self._retry = retry
        self._max_pending = max_pending
        self._connection: Connection | None = None
        self._pending: deque[asyncio.Future[bytes]] = deque()
        """Publishes on the connection that are not answered, the oldest first."""
        self._room: asyncio.Event | None = None
        self._opening: asyncio.Task[Connection] | None = None
        self._is_stopped = False
        self._closed: asyncio.Event | None = None
        self._known_topics: set[str] = set()

    # life

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def connect(self) -> None:
        """Connect now instead of at the first publish. Raises ConnectFailed."""
        await self._connected()

    async def ping(self) -> None:
        """Connect if need be and say something that needs no answer."""
        (await self._connected()).write(wire.NOP)

    async def stop(self) -> None:
        """Wait for what is on its way, within the publish timeout, and close. Final."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._opening is not None:
            self._opening.cancel()
        if self._pending:
            await asyncio.wait([*self._pending], timeout=self.config.publish_timeout)
        connection = self._connection
        if connection is not None:
            self._closed = asyncio.Event()
            connection.close()
            try:
                async with asyncio.timeout(2):
                    await self._closed.wait()
            except TimeoutError:
                connection.abort()

    @property
    def address(self) -> str:
        """The nsqd that it is connected to, or nothing."""
        return self._connection.address if self._connection is not None else ""

    # publishing

    async def publish(self, topic: str, body: bytes, *, defer: float = 0.0) -> None:
        """Publish one message, to be delivered `defer` seconds from now or later. Raises PublishFailed with
        the broker's words, NotConnected or ConnectFailed, PublishTimeout, Stopped."""
        self._check_topic(topic)
        if not body:
            raise ValueError("an empty message cannot be published")
        if defer < 0:
            raise ValueError("a message cannot be deferred into the past")
        command = wire.dpub(topic, int(defer * 1000), body) if defer else wire.pub(topic, body)
        await self._send(command)

    async def publish_many(self, topic: str, bodies: Sequence[bytes]) -> None:
        """Publish several messages, all or none of them."""
        self._check_topic(topic)
        if not bodies or not all(bodies):
            raise ValueError("there must be messages, and none of them empty")
        await self._send(wire.mpub(topic, bodies))

    def _check_topic(self, topic: str) -> None:
        # The broker would end the connection over it, and with it the publishes of others.
        if topic in self._known_topics:
            return
        if not is_valid_name(topic.encode()):
            raise ValueError(f"invalid topic name {topic!r}")
        if len(self._known_topics) > 1000:
            self._known_topics.clear()
        self._known_topics.add(topic)

    async def _send(self, command: bytes) -> None:
        if self._is_stopped:
            raise Stopped
        connection = self._connection
        if (
            connection is not None
            and connection.is_writable
            and not connection.is_closing
            and len(self._pending) < self._max_pending
        ):
            # The usual case, without a timer of its own: the connection's deadline ends it.
            answer = asyncio.get_running_loop().create_future()
            self._pending.append(answer)
            connection.write(command)
            try:
                await self._await(answer)
                return
            except NotConnected:
                if not self._retry:
                    raise
        try:
            async with asyncio.timeout(self.config.publish_timeout):
                await self._send_somewhere(command)
        except TimeoutError as error:
            raise PublishTimeout(f"not acknowledged within {self.config.publish_timeout:g} s") from error

    async def _await(self, answer: asyncio.Future[bytes]) -> None:
        timer = asyncio.get_running_loop().call_later(
            self.config.publish_timeout, _expire, answer, self.config.publish_timeout
        )
        try:
            data = await answer
        finally:
            timer.cancel()
        if data != wire.OK:
            raise PublishFailed(data.decode("utf-8", "replace"))

    async def _send_somewhere(self, command: bytes) -> None:
        """Wait for a connection and for room on it, as often as it takes."""
        while True:
            connection = await self._connected()
            while not self._has_room(connection):
                if self._room is None:
                    self._room = asyncio.Event()
                self._room.clear()
                await self._room.wait()
                if connection.is_closing:
                    break
            if connection.is_closing or connection is not self._connection:
                continue
            answer = asyncio.get_running_loop().create_future()
            self._pending.append(answer)
            connection.write(command)
            try:
                data = await answer
            except NotConnected:
                if self._retry and not self._is_stopped:
                    continue
                raise
            if data != wire.OK:
                raise PublishFailed(data.decode("utf-8", "replace"))
            return

    def _has_room(self, connection: Connection) -> bool:
        return connection.is_writable and len(self._pending) < self._max_pending

    # connecting

    async def _connected(self) -> Connection:
        """The connection, opened if need be by whoever asks first. Raises ConnectFailed, Stopped."""
        if self._is_stopped:
            raise Stopped
        if self._connection is not None and not self._connection.is_closing:
            return self._connection
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, task: asyncio.Task[Connection]) -> None:
        self._opening = None
        if not task.cancelled():
            # Whoever waits for it gets the error; if nobody does any more, it is not news.
            task.exception()

    async def _open(self) -> Connection:
        """A connection to the first of the brokers that can be reached."""
        reasons = []
        for address in await self._candidates():
            try:
                connection = await Connection.open(address, self.config, self)
            except ConnectFailed as error:
                logger.warning("%s", error)
                reasons.append(str(error))
                continue
            if self._is_stopped:
                connection.close()
                raise Stopped
            self._connection = connection
            return connection
        raise ConnectFailed("; ".join(reasons) or "nsqlookupd knows of no nsqd")

    async def _candidates(self) -> list[str]:
        found = [*self._nsqd]
        if self._lookup.addresses:
            try:
                found += await self._lookup.nodes()
            except LookupFailed as error:
                if not found:
                    raise ConnectFailed(str(error)) from error
                logger.warning("%s", error)
        return list(dict.fromkeys(found))

    # what the connection reports

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None:
        logger.error("%s sends messages to a producer", connection)
        connection.abort()

    def on_response(self, connection: Connection, data: bytes) -> None:
        if connection is self._connection and self._pending:
            answer = self._pending.popleft()
            if not answer.done():
                answer.set_result(data)
            if self._room is not None:
                self._room.set()
        else:
            logger.error("%s answers %r to nothing", connection, data[:100])
            connection.abort()

    def on_error(self, connection: Connection, text: str) -> None:
        """The oldest publish was refused. The broker ends the connection, and with it all the others."""
        self.on_response(connection, text.encode())

    def on_closed(self, connection: Connection, reason: Exception | None) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        pending, self._pending = self._pending, deque()
        for answer in pending:
            if not answer.done():
                answer.set_exception(NotConnected(f"{connection} is gone: {reason or 'closed'}"))
        if self._room is not None:
            self._room.set()
        if self._closed is not None:
            self._closed.set()
        elif not self._is_stopped:
            logger.warning("lost %s: %s", connection, reason or "closed")

    def on_writable(self, connection: Connection) -> None:
        if self._room is not None:
            self._room.set()


def _expire(answer: asyncio.Future[bytes], seconds: float) -> None:
    if not answer.done():
        answer.set_exception(PublishTimeout(f"not acknowledged within {seconds:g} s"))
