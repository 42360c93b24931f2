"""A producer: publishes to one nsqd at a time, and to the next when that one is gone.

    async with Producer("127.0.0.1:4150") as producer:
        await producer.publish("events", b"hello")

A publish returns when the broker has acknowledged it, or raises. It never retries by itself what a broker may
already have: say `retry=True` if a duplicate is better than an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Final

from nsparq.client.config import Config, milliseconds
from nsparq.client.connection import checked_addresses
from nsparq.client.errors import ConnectFailed, PublishFailed, PublishTimeout, Stopped, reason_of
from nsparq.client.lookup import Lookup, LookupFailed
from nsparq.client.message import check_delay
from nsparq.client.pipeline import SLACK_S, NotReached, Outcome, Pipeline
from nsparq.names import is_valid_name
from nsparq.private_random import private_random
from nsparq.wire import client as wire

__all__ = ["Producer"]

logger = logging.getLogger(__name__)

MAX_PENDING: Final = 1000
"""Publishes on their way to a broker; further ones wait."""
AVOID_S: Final = 30.0
"""How long a broker that has failed is tried after the others."""


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
        """Addresses of nsqd in order of preference, and of nsqlookupds that know more. At most `max_pending`
        publishes are on their way at a time; further ones wait for their turn.

        With `retry` a publish whose connection was lost before its acknowledgement is sent again, and one
        that finds no broker tries again, until `config.publish_timeout` has passed. It may come twice."""
        if max_pending < 1:
            raise ValueError("max_pending is at least 1")
        self.config = config or Config()
        self._lookup = Lookup(nsqlookupd, self.config)
        self._nsqd = checked_addresses(nsqd)
        if not self._nsqd and not self._lookup.addresses:
            raise ValueError("a producer needs the address of an nsqd or of an nsqlookupd")
        self._retry = retry
        self._max_pending = max_pending
        self._pipeline: Pipeline | None = None
        self._in_line = 0
        """Publishes that could not be sent at once. Nobody overtakes them."""
        self._turn = asyncio.Lock()
        """Whoever of them has it is the next to send."""
        self._room = asyncio.Event()
        self._opening: asyncio.Task[str | None] | None = None
        self._failed: dict[str, float] = {}
        """When a broker last failed."""
        self._is_stopped = False
        self._stopping: asyncio.Task[None] | None = None
        self._names: dict[str, bytes] = {}
        """Of topics that were published to: checked, and as they are sent."""

    # life

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def connect(self) -> None:
        """Connect now instead of at the first publish. Raises ConnectFailed, Stopped."""
        await self._connected()

    async def ping(self) -> None:
        """Connect if need be and say something that needs no answer. Raises ConnectFailed, Stopped."""
        (await self._connected()).connection.write(wire.NOP)

    async def stop(self) -> None:
        """Wait for what is on its way, within the publish timeout, and close. Final. What is not yet on its
        way gets Stopped. Whoever is cancelled while waiting leaves nothing open."""
        if self._stopping is None:
            self._is_stopped = True
            self._room.set()
            self._stopping = asyncio.create_task(self._wind_up())
        is_cancelled = False
        while not self._stopping.done():
            try:
                await asyncio.wait({self._stopping})
            except asyncio.CancelledError:
                # The end of it takes a moment, however often that is said.
                is_cancelled = True
                if self._pipeline is not None:
                    self._pipeline.connection.abort()
        if is_cancelled:
            raise asyncio.CancelledError

    async def _wind_up(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        pipeline = self._pipeline
        if pipeline is not None:
            await pipeline.settle()
            await pipeline.close()

    def leave_to_parent(self) -> None:
        """After fork(), in the child: let go of the connection without a word to the broker."""
        if self._pipeline is not None:
            self._pipeline.connection.leave_to_parent()

    @property
    def address(self) -> str:
        """The nsqd that it is connected to, or nothing."""
        return self._pipeline.connection.address if self._pipeline is not None else ""

    # publishing

    async def publish(self, topic: str, body: bytes, *, defer: float = 0.0) -> None:
        """Publish one message, to be delivered `defer` seconds from now or later. Raises PublishFailed with
        the broker's words, NotConnected or ConnectFailed, PublishTimeout, Stopped."""
        name = self._names.get(topic) or self._name(topic)
        if type(body) is not bytes:
            # Anything else may have another length than bytes.
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
        """A topic's name as it is sent. Raises ValueError."""
        name = topic.encode()
        if not is_valid_name(name):
            # The broker would end the connection over it, and with it the publishes of others.
            raise ValueError(f"invalid topic name {topic!r}")
        if len(self._names) > 1000:
            self._names.clear()
        self._names[topic] = name
        return name

    async def _send(self, command: bytes) -> None:
        if self._is_stopped:
            raise Stopped
        deadline = monotonic() + self.config.publish_timeout
        pipeline = self._pipeline
        if pipeline is not None and not self._in_line:
            # The usual case: there is a connection, with room, and nobody is in line.
            answer = pipeline.send(command, deadline)
            if answer is not None:
                outcome = await answer
                if outcome is None:
                    return
                self._judge(outcome)
        left = deadline - monotonic()
        if left <= SLACK_S:
            raise self._timed_out()
        try:
            async with asyncio.timeout(left):
                await self._send_in_turn(command, deadline)
        except PublishTimeout:
            raise
        except TimeoutError as error:
            if self._pipeline is not None:
                # Whoever publishes next is not to find a broker that acknowledges nothing.
                self._pipeline.expire()
            raise self._timed_out() from error

    async def _send_in_turn(self, command: bytes, deadline: float) -> None:
        """Wait for a connection and for room on it, as often as it takes."""
        while True:
            self._in_line += 1
            try:
                answer = await self._sent(command, deadline)
            finally:
                self._in_line -= 1
            outcome = await answer
            if outcome is None:
                return
            self._judge(outcome)

    async def _sent(self, command: bytes, deadline: float) -> asyncio.Future[Outcome]:
        """Send a command as soon as it can be."""
        while True:
            # Not in turn: those who wait for a connection that cannot be made are told so together.
            await self._connected_some_time()
            async with self._turn:
                while (pipeline := self._pipeline) is not None and not pipeline.is_closing:
                    if self._is_stopped:
                        raise Stopped
                    answer = pipeline.send(command, deadline)
                    if answer is not None:
                        return answer
                    self._room.clear()
                    await self._room.wait()

    def _judge(self, outcome: Outcome) -> None:
        """Returns if the command is to be sent again. Raises otherwise."""
        if isinstance(outcome, NotReached):
            if self._is_stopped:
                raise Stopped
        elif isinstance(outcome, PublishFailed) or not self._retry or self._is_stopped:
            assert outcome is not None
            raise outcome

    def _timed_out(self) -> PublishTimeout:
        return PublishTimeout(f"not acknowledged within {self.config.publish_timeout:g} s")

    # connecting

    async def _connected_some_time(self) -> None:
        """With `retry` it is tried until the publish is out of time. Raises ConnectFailed, Stopped."""
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

    async def _connected(self) -> Pipeline:
        """The connection, opened if need be by whoever asks first. Raises ConnectFailed, Stopped."""
        while True:
            if self._is_stopped:
                raise Stopped
            if self._pipeline is not None:
                if not self._pipeline.is_closing:
                    return self._pipeline
                # First it has to be settled what became of the publishes on it.
                await self._pipeline.connection.closed.wait()
                continue
            if self._opening is None:
                self._opening = asyncio.create_task(self._open())
            opening = self._opening
            # Not cancelled with us: others may be waiting for it too.
            await asyncio.wait({opening})
            if not opening.cancelled() and (failure := opening.result()) is not None:
                raise ConnectFailed(failure)

    async def _open(self) -> str | None:
        """Connect to the first of the brokers that can be reached. Returns why there is none, if so."""
        try:
            reasons = []
            for address in await self._candidates():
                pipeline = Pipeline(self.config, self._max_pending, self._room.set, self._ended)
                try:
                    await pipeline.open(address, self.config)
                except ConnectFailed as error:
                    logger.warning("%s", error)
                    self._failed[address] = monotonic()
                    reasons.append(str(error))
                    continue
                self._pipeline = pipeline
                return None
            return "; ".join(reasons) or "nsqlookupd knows of no nsqd"
        except LookupFailed as error:
            return str(error)
        finally:
            self._opening = None

    def _ended(self, pipeline: Pipeline, reason: Exception | None) -> None:
        """A connection is gone, and everything on it has its outcome."""
        if pipeline is self._pipeline:
            self._pipeline = None
        if not self._is_stopped:
            log = logger.info if pipeline.has_refused else logger.warning
            log("lost %s: %s", pipeline.connection, reason_of(reason))
            if not pipeline.has_refused:
                self._failed[pipeline.connection.address] = monotonic()
        self._room.set()

    async def _candidates(self) -> list[str]:
        """Brokers in the order in which they are to be tried."""
        found = [*self._nsqd]
        if self._lookup.addresses:
            try:
                discovered = await self._lookup.nodes()
            except LookupFailed as error:
                if not found:
                    raise
                logger.warning("%s", error)
            else:
                # Producers are to spread over them.
                private_random.shuffle(discovered)
                found += discovered
        since = monotonic() - AVOID_S
        self._failed = {address: at for address, at in self._failed.items() if at > since}
        return sorted(dict.fromkeys(found), key=lambda address: self._failed.get(address, 0.0))
