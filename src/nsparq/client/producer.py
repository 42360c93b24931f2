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

from nsparq.chance import chance
from nsparq.client.config import Config, milliseconds
from nsparq.client.connection import Connection, checked_addresses
from nsparq.client.errors import ConnectFailed, NotConnected, PublishFailed, PublishTimeout, Stopped
from nsparq.client.lookup import Lookup, LookupFailed
from nsparq.client.message import check_delay
from nsparq.names import is_valid_name
from nsparq.wire import client as wire
from nsparq.wire.client import Received

__all__ = ["Producer"]

logger = logging.getLogger(__name__)

MAX_PENDING: Final = 1000
"""Publishes on their way to a broker; further ones wait."""
AVOID_S: Final = 30.0
"""How long a broker that has failed is tried after the others."""


class _NotReached(Exception):
    """The broker has refused an earlier publish and ended the connection: it never looked at this one."""


Outcome = bytes | NotConnected | PublishTimeout | _NotReached
"""What became of a publish: the broker's answer, or why there is none. Not set as a future's exception, since
whoever waited for it may have been cancelled in the same moment, and nobody would ever look at it."""


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
        self._connection: Connection | None = None
        self._pending: deque[tuple[asyncio.Future[Outcome], float]] = deque()
        """Publishes on the connection that are not answered, the oldest first, each with its deadline. Those
        that nobody waits for any more keep their place: the answers come in order."""
        self._timer: asyncio.TimerHandle | None = None
        """For the deadline of the oldest."""
        self._last_answer = 0.0
        self._has_refused = False
        """The last answer was a refusal: the broker looks at nothing that came behind."""
        self._turn = asyncio.Lock()
        """Whoever has it is the next to send. Publishes that cannot be sent at once queue for it."""
        self._room = asyncio.Event()
        self._opening: asyncio.Task[str | None] | None = None
        self._failed: dict[str, float] = {}
        """When a broker last failed."""
        self._is_stopped = False
        self._stopping: asyncio.Task[None] | None = None
        self._known_topics: set[str] = set()

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
        (await self._connected()).write(wire.NOP)

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
                if self._connection is not None:
                    self._connection.abort()
        if is_cancelled:
            raise asyncio.CancelledError

    async def _wind_up(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        waiting = [answer for answer, _ in self._pending if not answer.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=self.config.publish_timeout)
        connection = self._connection
        if connection is not None:
            connection.close()
            await connection.closed.wait()

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
        if defer:
            check_delay(defer)
            await self._send(wire.dpub(topic, milliseconds(defer), body))
        else:
            await self._send(wire.pub(topic, body))

    async def publish_many(self, topic: str, bodies: Sequence[bytes]) -> None:
        """Publish several messages, all or none of them. Raises as publish()."""
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
        deadline = asyncio.get_running_loop().time() + self.config.publish_timeout
        if connection is not None and self._has_room(connection) and not self._turn.locked():
            # The usual case: there is a connection and nobody is in line.
            outcome = await self._write(connection, command, deadline)
            if outcome == wire.OK:
                return
            self._judge(outcome)
        try:
            async with asyncio.timeout_at(deadline):
                await self._send_in_turn(command, deadline)
        except TimeoutError as error:
            if isinstance(error, PublishTimeout):
                raise
            self._leave_if_silent()
            raise self._timed_out() from error

    async def _send_in_turn(self, command: bytes, deadline: float) -> None:
        """Wait for a connection and for room on it, as often as it takes."""
        while True:
            # Not in turn: those who wait for a connection that cannot be made are told so together.
            await self._connected_some_time()
            async with self._turn:
                connection = await self._with_room()
                if connection is None:
                    continue
                answer = self._write(connection, command, deadline)
            outcome = await answer
            if outcome == wire.OK:
                return
            self._judge(outcome)

    def _judge(self, outcome: Outcome) -> None:
        """Returns if the command may be sent again. Raises otherwise."""
        if isinstance(outcome, bytes):
            raise PublishFailed(outcome.decode("utf-8", "replace"))
        if isinstance(outcome, PublishTimeout):
            raise outcome
        if self._is_stopped:
            raise Stopped if isinstance(outcome, _NotReached) else outcome
        if isinstance(outcome, NotConnected) and not self._retry:
            raise outcome

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

    async def _with_room(self) -> Connection | None:
        """The connection when something can be written to it; None if there is none any more."""
        while (connection := self._connection) is not None and not connection.is_closing:
            if self._is_stopped:
                raise Stopped
            if self._has_room(connection):
                return connection
            self._room.clear()
            await self._room.wait()
        return None

    def _has_room(self, connection: Connection) -> bool:
        return connection.is_writable and not connection.is_closing and len(self._pending) < self._max_pending

    def _write(self, connection: Connection, command: bytes, deadline: float) -> asyncio.Future[Outcome]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Outcome] = loop.create_future()
        if not self._pending:
            self._last_answer = loop.time()
        self._pending.append((answer, deadline))
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._expire)
        connection.write(command)
        return answer

    def _expire(self) -> None:
        """The oldest publish may be out of time, or the broker."""
        self._timer = None
        if not self._pending:
            return
        loop = asyncio.get_running_loop()
        self._leave_if_silent()
        wake_at = self._last_answer + self.config.publish_timeout
        for answer, deadline in self._pending:
            if deadline > loop.time():
                wake_at = min(wake_at, deadline)
                break
            if not answer.done():
                answer.set_result(self._timed_out())
        self._timer = loop.call_at(max(wake_at, loop.time() + 0.01), self._expire)

    def _leave_if_silent(self) -> None:
        """A broker that reads, perhaps, but acknowledges nothing: better another, or a new connection."""
        silence = asyncio.get_running_loop().time() - self._last_answer
        # Not to the last millisecond: whoever publishes next must not find it again.
        if self._pending and self._connection is not None and silence >= 0.9 * self.config.publish_timeout:
            self._connection.fail(TimeoutError(f"nothing was acknowledged for {silence:.1f} s"))

    def _timed_out(self) -> PublishTimeout:
        return PublishTimeout(f"not acknowledged within {self.config.publish_timeout:g} s")

    # connecting

    async def _connected(self) -> Connection:
        """The connection, opened if need be by whoever asks first. Raises ConnectFailed, Stopped."""
        while True:
            if self._is_stopped:
                raise Stopped
            if self._connection is not None:
                if not self._connection.is_closing:
                    return self._connection
                # First it has to be settled what became of the publishes on it.
                await self._connection.closed.wait()
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
                try:
                    self._connection = await Connection.open(address, self.config, self)
                except ConnectFailed as error:
                    logger.warning("%s", error)
                    self._failed[address] = asyncio.get_running_loop().time()
                    reasons.append(str(error))
                    continue
                self._has_refused = False
                return None
            return "; ".join(reasons) or "nsqlookupd knows of no nsqd"
        except LookupFailed as error:
            return str(error)
        finally:
            self._opening = None

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
                chance.shuffle(discovered)
                found += discovered
        since = asyncio.get_running_loop().time() - AVOID_S
        self._failed = {address: at for address, at in self._failed.items() if at > since}
        return sorted(dict.fromkeys(found), key=lambda address: self._failed.get(address, 0.0))

    # what the connection reports

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None:
        connection.fail(ConnectionError("it sends messages to a producer"))

    def on_response(self, connection: Connection, data: bytes) -> None:
        self._has_refused = False
        self._answer(connection, data)

    def on_error(self, connection: Connection, text: str) -> None:
        """The oldest publish was refused, and the broker ends the connection. What came behind it was not
        looked at if the command was at fault; if the broker was, it may have been."""
        self._has_refused = not text.partition(" ")[0].endswith("PUB_FAILED")
        self._answer(connection, text.encode())
        connection.close()

    def _answer(self, connection: Connection, data: bytes) -> None:
        if connection is not self._connection or not self._pending:
            connection.fail(ConnectionError(f"it answers {data[:100]!r} to nothing"))
            return
        answer, _ = self._pending.popleft()
        self._last_answer = asyncio.get_running_loop().time()
        if not answer.done():
            answer.set_result(data)
        self._room.set()

    def on_closed(self, connection: Connection, reason: Exception | None) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        if not self._is_stopped:
            log = logger.info if self._has_refused else logger.warning
            log("lost %s: %s", connection, reason or "closed")
            if not self._has_refused:
                self._failed[connection.address] = asyncio.get_running_loop().time()
        pending, self._pending = self._pending, deque()
        for answer, _ in pending:
            if not answer.done():
                gone = NotConnected(f"{connection} is gone: {reason or 'closed'}")
                answer.set_result(_NotReached() if self._has_refused else gone)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._room.set()

    def on_writable(self, connection: Connection) -> None:
        self._room.set()
