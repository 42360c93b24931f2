"""A producer: publishes to one nsqd, and to another when the connection is lost.

    async with Producer("127.0.0.1:4150") as producer:
        await producer.publish("events", b"hello")

A publish returns when the broker has acknowledged it; otherwise it raises. It is not retried if the
broker may already have it, unless `retry=True` says that a duplicate is better than an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Final

from nsparq.client.config import Config, milliseconds
from nsparq.client.connect.connection import checked_addresses
from nsparq.client.connect.lookup import Lookup, LookupFailed
from nsparq.client.connect.producer_connection import SLACK_S, NotReached, Outcome, ProducerConnection
from nsparq.client.errors import ConnectFailed, PublishFailed, PublishTimeout, Stopped, reason_of
from nsparq.client.message import check_delay
from nsparq.names import is_valid_name
from nsparq.private_random import private_random
from nsparq.wire import client as wire

__all__ = ["Producer"]

logger = logging.getLogger(__name__)

MAX_PENDING: Final = 1000
"""Unanswered publishes on a connection; further ones wait."""
AVOID_S: Final = 30.0
"""For this time a broker that failed is tried after the others."""


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
        """Addresses of nsqd in order of preference, and of nsqlookupds that know more. At most
        `max_pending` publishes are unanswered at a time; further ones wait.

        With `retry`, a publish is sent again if its connection was lost before the acknowledgement,
        and tried again if no broker can be reached, until `config.publish_timeout` has passed. The
        message may then be delivered twice."""
        if max_pending < 1:
            raise ValueError("max_pending is at least 1")
        self.config = config or Config()
        self._lookup = Lookup(nsqlookupd, self.config)
        self._nsqd = checked_addresses(nsqd)
        if not self._nsqd and not self._lookup.addresses:
            raise ValueError("a producer needs the address of an nsqd or of an nsqlookupd")
        self._retry = retry
        self._max_pending = max_pending
        self._connection: ProducerConnection | None = None
        self._waiting = 0
        """Publishes that could not be sent at once. Later ones queue behind them."""
        self._next_to_send = asyncio.Lock()
        """Held by the first of those that wait."""
        self._room = asyncio.Event()
        self._opening: asyncio.Task[str | None] | None = None
        self._failed: dict[str, float] = {}
        """When each broker last failed."""
        self._is_stopped = False
        self._stopping: asyncio.Task[None] | None = None
        self._names: dict[str, bytes] = {}
        """Encoded names of topics, already checked."""

    # start and stop

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def connect(self) -> None:
        """Connect now instead of at the first publish. Raises ConnectFailed, Stopped."""
        await self._connected()

    async def ping(self) -> None:
        """Connect if necessary and send NOP. Raises ConnectFailed, Stopped."""
        (await self._connected()).raw.write(wire.NOP)

    async def stop(self) -> None:
        """Wait for the answers to all sent publishes, at most the publish timeout, and close for
        good. Publishes that were not sent yet raise Stopped. If the caller is cancelled while it
        waits, nothing stays open."""
        if self._stopping is None:
            self._is_stopped = True
            self._room.set()
            self._stopping = asyncio.create_task(self._finish_stop())
        is_cancelled = False
        while not self._stopping.done():
            try:
                await asyncio.wait({self._stopping})
            except asyncio.CancelledError:
                # Closing still takes a moment, also after a second cancellation.
                is_cancelled = True
                if self._connection is not None:
                    self._connection.raw.abort()
        if is_cancelled:
            raise asyncio.CancelledError

    async def _finish_stop(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        connection = self._connection
        if connection is not None:
            await connection.settle()
            await connection.close()

    def leave_to_parent(self) -> None:
        """In the child of a fork: drop the connection without sending anything to the broker."""
        if self._connection is not None:
            self._connection.raw.leave_to_parent()

    @property
    def address(self) -> str:
        """Address of the connected nsqd, or an empty string."""
        return self._connection.raw.address if self._connection is not None else ""

    # publishing

    async def publish(self, topic: str, body: bytes, *, defer: float = 0.0) -> None:
        """Publish one message, to be delivered after `defer` seconds. Raises PublishFailed with the
        broker's error, NotConnected or ConnectFailed, PublishTimeout, Stopped."""
        name = self._names.get(topic) or self._name(topic)
        if type(body) is not bytes:
            # The length of another buffer may not be its number of bytes.
            body = bytes(memoryview(body))
        if not body:
            raise ValueError("an empty message cannot be published")
        if defer:
            check_delay(defer)
            await self._send(wire.dpub(name, milliseconds(defer), body))
        else:
            await self._send(wire.pub(name, body))

    async def publish_many(self, topic: str, bodies: Sequence[bytes]) -> None:
        """Publish several messages, all or none of them. Raises as publish()."""
        name = self._names.get(topic) or self._name(topic)
        await self._send(wire.mpub(name, bodies))

    def _name(self, topic: str) -> bytes:
        """The encoded name of a topic. Raises ValueError."""
        name = topic.encode()
        if not is_valid_name(name):
            # The broker would close the connection, and other publishes on it would fail.
            raise ValueError(f"invalid topic name {topic!r}")
        if len(self._names) > 1000:
            self._names.clear()
        self._names[topic] = name
        return name

    async def _send(self, command: bytes) -> None:
        if self._is_stopped:
            raise Stopped
        deadline = monotonic() + self.config.publish_timeout
        connection = self._connection
        if connection is not None and not self._waiting:
            # The usual case: there is a connection with room, and no publish waits.
            answer = connection.send(command, deadline)
            if answer is not None:
                outcome = await answer
                if outcome is None:
                    return
                self._raise_if_final(outcome)
        left = deadline - monotonic()
        if left <= SLACK_S:
            raise self._timed_out()
        try:
            async with asyncio.timeout(left):
                await self._send_in_turn(command, deadline)
        except PublishTimeout:
            raise
        except TimeoutError as error:
            if self._connection is not None:
                # The next publish must not use a broker that acknowledges nothing.
                self._connection.expire()
            raise self._timed_out() from error

    async def _send_in_turn(self, command: bytes, deadline: float) -> None:
        """Wait for a connection and for room on it, and send again if _raise_if_final() allows it."""
        while True:
            self._waiting += 1
            try:
                answer = await self._sent(command, deadline)
            finally:
                self._waiting -= 1
            outcome = await answer
            if outcome is None:
                return
            self._raise_if_final(outcome)

    async def _sent(self, command: bytes, deadline: float) -> asyncio.Future[Outcome]:
        """Send a command as soon as there is a connection with room."""
        while True:
            # Outside the lock: if no connection can be made, all waiting publishes fail together.
            await self._connected_with_retry()
            async with self._next_to_send:
                while (connection := self._connection) is not None and not connection.is_closing:
                    if self._is_stopped:
                        raise Stopped
                    answer = connection.send(command, deadline)
                    if answer is not None:
                        return answer
                    self._room.clear()
                    await self._room.wait()

    def _raise_if_final(self, outcome: Outcome) -> None:
        """Returns if the command may be sent again; raises otherwise."""
        if isinstance(outcome, NotReached):
            if self._is_stopped:
                raise Stopped
        elif isinstance(outcome, PublishFailed) or not self._retry or self._is_stopped:
            assert outcome is not None
            raise outcome

    def _timed_out(self) -> PublishTimeout:
        return PublishTimeout(f"not acknowledged within {self.config.publish_timeout:g} s")

    # connecting

    async def _connected_with_retry(self) -> None:
        """Connect; with `retry`, until the publish times out. Raises ConnectFailed, Stopped."""
        delay = self.config.reconnect_delay
        while True:
            try:
                await self._connected()
                return
            except ConnectFailed:
                if not self._retry:
                    raise
            await asyncio.sleep(delay)
            delay = min(max(delay, 0.01) * 2, self.config.max_reconnect_delay)

    async def _connected(self) -> ProducerConnection:
        """The connection; the first caller opens it. Raises ConnectFailed, Stopped."""
        while True:
            if self._is_stopped:
                raise Stopped
            if self._connection is not None:
                if not self._connection.is_closing:
                    return self._connection
                # Its publishes need their outcome first.
                await self._connection.raw.closed.wait()
                continue
            if self._opening is None:
                self._opening = asyncio.create_task(self._open())
            opening = self._opening
            # Not cancelled together with this call: others may wait for it too.
            await asyncio.wait({opening})
            if not opening.cancelled() and (failure := opening.result()) is not None:
                raise ConnectFailed(failure)

    async def _open(self) -> str | None:
        """Connect to the first broker that answers. Returns an error text if none does."""
        try:
            reasons = []
            for address in await self._candidates():
                connection = ProducerConnection(self.config, self._max_pending, self._room.set, self._ended)
                try:
                    await connection.open(address, self.config)
                except ConnectFailed as error:
                    logger.warning("%s", error)
                    self._failed[address] = monotonic()
                    reasons.append(str(error))
                    continue
                self._connection = connection
                return None
            return "; ".join(reasons) or "nsqlookupd knows no nsqd"
        except LookupFailed as error:
            return str(error)
        finally:
            self._opening = None

    def _ended(self, connection: ProducerConnection, reason: Exception | None) -> None:
        """A connection has ended, and every publish on it has its outcome."""
        if connection is self._connection:
            self._connection = None
        if not self._is_stopped:
            log = logger.info if connection.has_refused else logger.warning
            log("lost %s: %s", connection.raw, reason_of(reason))
            if not connection.has_refused:
                self._failed[connection.raw.address] = monotonic()
        self._room.set()

    async def _candidates(self) -> list[str]:
        """Addresses of brokers, in the order to try them."""
        found = [*self._nsqd]
        if self._lookup.addresses:
            try:
                discovered = await self._lookup.nodes()
            except LookupFailed as error:
                if not found:
                    raise
                logger.warning("%s", error)
            else:
                # Random: producers spread over the brokers.
                private_random.shuffle(discovered)
                found += discovered
        since = monotonic() - AVOID_S
        self._failed = {address: at for address, at in self._failed.items() if at > since}
        return sorted(dict.fromkeys(found), key=lambda address: self._failed.get(address, 0.0))
