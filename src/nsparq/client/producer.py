"""A producer: publishes to one nsqd, and to another when the connection is lost.

    async with Producer("127.0.0.1:4150") as producer:
        await producer.publish("events", b"hello")

A publish returns when the broker has acknowledged it; otherwise it raises. It is not retried if the
broker may already have it, unless `retry=True` says that a duplicate is better than an error. With
`idempotent=True` the broker knows the repeat, and there is no duplicate.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Iterable
from contextlib import aclosing
from time import monotonic
from typing import Final

from nsparq.client.config import Config, milliseconds
from nsparq.client.connect.candidates import Candidates
from nsparq.client.connect.lookup import Lookup, LookupFailed
from nsparq.client.connect.producer_connection import SLACK_S, NotReached, Outcome, ProducerConnection
from nsparq.client.consume.event_loop import wait_to_the_end
from nsparq.client.errors import (
    ConnectFailed,
    HeadersNotSupported,
    NotConnected,
    PublishFailed,
    PublishTimeout,
    Stopped,
    reason_of,
)
from nsparq.client.message import check_delay
from nsparq.client.payloads.encode import encode_bodies, encode_payload
from nsparq.client.payloads.numbers import Numbers, name_in_child
from nsparq.headers import Headers, HeadersOfMany
from nsparq.names import is_valid_name
from nsparq.wire import client as wire

__all__ = ["Producer"]

logger = logging.getLogger(__name__)

MAX_PENDING: Final = 1000
"""Unanswered publishes on a connection; further ones wait."""


class Producer:
    """Connects at the first publish. Safe to use from many tasks of one event loop.

    After fork() it works in both processes: the child has its own event loop, and the producer
    opens a new connection there."""

    def __init__(
        self,
        *nsqd: str,
        nsqlookupd: Iterable[str] = (),
        retry: bool = False,
        idempotent: bool = False,
        name: str = "",
        max_pending: int = MAX_PENDING,
        config: Config | None = None,
    ) -> None:
        """Addresses of nsqd in order of preference, and of nsqlookupds that know more. At most
        `max_pending` publishes are unanswered at a time; further ones wait.

        With `retry`, a publish is sent again if its connection was lost before the acknowledgement,
        and tried again if no broker can be reached, until `config.publish_timeout` has passed. The
        message may then be delivered twice.

        With `idempotent`, which implies `retry`, it is not: nsqd knows the message again and does
        not store it twice. A publish that an nsqd may have is sent again to that nsqd only. If it
        does not come back in time, the publish raises PublishTimeout. Of producers with the same
        `name` only the one made last can publish; without a name each has its own."""
        if max_pending < 1:
            raise ValueError("max_pending is at least 1")
        self.config = config or Config()
        self._candidates = Candidates(nsqd, Lookup(nsqlookupd, self.config))
        if name and not idempotent:
            raise ValueError("only an idempotent producer has a name")
        self._retry = retry or idempotent
        self._numbers = Numbers(name) if idempotent else None
        self._repeats_failed = idempotent
        """Whether a publish is sent again if the broker failed, for example because its disk is
        full."""
        self._max_pending = max_pending
        self._is_stopped = False
        self._lines: dict[str, bytes] = {}
        """The line of PUB for each topic, whose name was checked."""
        self._begin()
        _all.add(self)
        if self.config.tracing is not None:
            self.config.tracing.trace_producer(self)

    def _begin(self) -> None:
        """No connection yet. In the child of a fork it begins again: the rest is the parent's."""
        self._connection: ProducerConnection | None = None
        self._waiting = 0
        """Publishes that could not be sent at once. Later ones queue behind them."""
        self._next_to_send = asyncio.Lock()
        """Held by the first of those that wait."""
        self._room = asyncio.Event()
        self._opening: asyncio.Task[str | None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._returns: dict[str, Producer] = {}
        """Producers for publishes that a broker may have, after the connection moved to another."""
        self._users = 0
        """For one of those: publishes that use it."""

    def _begin_in_child(self) -> object:
        """Returns what belongs to the parent."""
        left = (
            self._connection, self._next_to_send, self._room, self._opening, self._stopping, self._returns
        )  # fmt: skip
        self._begin()
        if self._numbers is not None:
            self._numbers = Numbers(name_in_child(self._numbers.name))
        return left

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
        stopping = self._stopping
        # Closing takes a moment, also after a second cancellation.
        await wait_to_the_end(lambda: asyncio.wait({stopping}), self._abort)

    def _abort(self) -> None:
        if self._connection is not None:
            self._connection.raw.abort()

    async def _finish_stop(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        connection = self._connection
        if connection is not None:
            await connection.settle()
            await connection.close()
        for producer in [*self._returns.values()]:
            await producer.stop()

    @property
    def address(self) -> str:
        """Address of the connected nsqd, or an empty string."""
        return self._connection.raw.address if self._connection is not None else ""

    # publishing

    async def publish(
        self, topic: str, body: object, *, defer: float = 0.0, headers: Headers | None = None
    ) -> None:
        """Publish one message, to be delivered after `defer` seconds.

        `body` is bytes, a text, or an object that becomes JSON: a dictionary, a list, a dataclass,
        a pydantic model, a msgspec Struct. A subscription with the same type gets an equal object.
        Raises PublishFailed with the broker's error, NotConnected or ConnectFailed, PublishTimeout,
        Stopped; HeadersNotSupported if there are `headers` and the broker does not know them;
        TypeError for an object that has no form in JSON; ValueError for an empty message or bad
        headers."""
        line = self._lines.get(topic) or self._line(topic)
        if type(body) is not bytes:
            body = encode_payload(body)
        if not body:
            raise ValueError("an empty message cannot be published")
        if defer:
            check_delay(defer)
            line = wire.dpub_line(line, milliseconds(defer))
        if self._numbers is not None:
            await self._send(self._numbers.pub(topic, line, body, headers), True)
        elif headers:
            await self._send(*wire.pub_with_headers(line, body, headers))
        else:
            await self._send(wire.pub(line, body))

    async def publish_many(
        self,
        topic: str,
        bodies: Iterable[object],
        *,
        headers: HeadersOfMany | None = None,
    ) -> None:
        """Publish several messages, all or none of them: bytes, texts or objects, as publish().
        `headers` is a mapping for all of them, or a list with one mapping, or None, for each.
        Raises as publish()."""
        line = wire.mpub_line(self._lines.get(topic) or self._line(topic))
        if self._numbers is not None:
            await self._send(self._numbers.mpub(topic, line, bodies, headers, encode_bodies), True)
        elif headers is None:
            await self._send(wire.mpub(line, bodies, encode_bodies))
        else:
            await self._send(*wire.mpub_with_headers(line, bodies, headers, encode_bodies))

    def _line(self, topic: str) -> bytes:
        """Raises ValueError for an invalid name."""
        name = topic.encode()
        if not is_valid_name(name):
            # The broker would close the connection, and other publishes on it would fail.
            raise ValueError(f"invalid topic name {topic!r}")
        if len(self._lines) > 1000:
            self._lines.clear()
        self._lines[topic] = line = wire.pub_line(name)
        return line

    async def _send(self, command: bytes, needs_headers: bool = False) -> None:
        if self._is_stopped:
            raise Stopped
        deadline = monotonic() + self.config.publish_timeout
        connection = self._connection
        outcome: Outcome = None
        if connection is not None and not self._waiting:
            # The usual case: there is a connection with room, and no publish waits.
            answer = connection.send(command, deadline, needs_headers)
            if answer is not None:
                outcome = await answer
                if outcome is None:
                    return
                self._raise_if_final(outcome, _doubt(None, outcome))
        left = deadline - monotonic()
        if left <= SLACK_S:
            raise self._timed_out()
        try:
            async with asyncio.timeout(left):
                await self._send_in_turn(command, deadline, needs_headers, connection, outcome)
        except PublishTimeout:
            raise
        except TimeoutError as error:
            if self._connection is not None:
                # The next publish must not use a broker that acknowledges nothing.
                self._connection.expire()
            raise self._timed_out() from error

    async def _send_in_turn(
        self,
        command: bytes,
        deadline: float,
        needs_headers: bool,
        connection: ProducerConnection | None = None,
        outcome: Outcome = None,
    ) -> None:
        """Wait for a connection and for room on it, and send again if _raise_if_final() allows it.
        `outcome` is what became of the publish on `connection`, if it was sent before."""
        bound_to = ""
        delay = self.config.reconnect_delay
        doubt = _doubt(None, outcome)
        while True:
            if outcome is not None and connection is not None:
                if self._repeats_failed and not isinstance(outcome, NotReached):
                    bound_to = connection.raw.address
                if isinstance(outcome, PublishFailed):
                    await asyncio.sleep(delay)
                    delay = self._longer(delay)
            self._waiting += 1
            try:
                connection, answer = await self._sent(command, deadline, needs_headers, bound_to)
            except (Stopped, HeadersNotSupported):
                # These say that it was not published.
                if doubt is None:
                    raise
                raise doubt from None
            finally:
                self._waiting -= 1
            if answer is None:
                await self._send_back(bound_to, command, deadline, doubt)
                return
            outcome = await answer
            if outcome is None:
                return
            doubt = _doubt(doubt, outcome)
            self._raise_if_final(outcome, doubt)

    async def _sent(
        self, command: bytes, deadline: float, needs_headers: bool, bound_to: str
    ) -> tuple[ProducerConnection, asyncio.Future[Outcome] | None]:
        """Send a command as soon as there is a connection with room. Nothing is sent, and there
        will be no answer, if the connection leads to another broker than `bound_to`."""
        while True:
            # Outside the lock: if no connection can be made, all waiting publishes fail together.
            await self._connected_with_retry()
            async with self._next_to_send:
                while (connection := self._connection) is not None and not connection.is_closing:
                    if self._is_stopped:
                        raise Stopped
                    if bound_to and connection.raw.address != bound_to:
                        return connection, None
                    answer = connection.send(command, deadline, needs_headers)
                    if answer is not None:
                        return connection, answer
                    self._room.clear()
                    await self._room.wait()

    async def _send_back(self, address: str, command: bytes, deadline: float, doubt: Doubt) -> None:
        """Send a publish to the broker that may have it, while the others use another broker."""
        producer = self._returns.get(address)
        if producer is None:
            producer = Producer(address, retry=True, max_pending=self._max_pending, config=self.config)
            producer._repeats_failed = True
            self._returns[address] = producer
        producer._users += 1
        try:
            await producer._send_in_turn(command, deadline, True, outcome=doubt)
        finally:
            producer._users -= 1
            if not producer._users:
                self._returns.pop(address, None)
                await producer.stop()

    def _raise_if_final(self, outcome: Outcome, doubt: Doubt) -> None:
        """Returns if the command may be sent again; raises otherwise."""
        may_retry = self._retry or isinstance(outcome, NotReached)
        if isinstance(outcome, PublishFailed):
            may_retry = self._repeats_failed and outcome.code.endswith("PUB_FAILED")
        if not may_retry:
            assert outcome is not None
            if doubt is not outcome and isinstance(doubt, NotConnected | PublishTimeout):
                raise type(doubt)(f"{doubt}; sent again, it was refused: {outcome}") from outcome
            raise outcome
        if self._is_stopped:
            raise doubt or Stopped

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
            delay = self._longer(delay)

    def _longer(self, delay: float) -> float:
        """The pause after this one."""
        return min(max(delay, 0.01) * 2, self.config.max_reconnect_delay)

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
        reasons = []
        try:
            async with aclosing(self._candidates.in_order()) as candidates:
                async for address in candidates:
                    connection = ProducerConnection(
                        self.config, self._max_pending, self._room.set, self._ended
                    )
                    try:
                        await connection.open(address, self.config)
                    except ConnectFailed as error:
                        logger.warning("%s", error)
                        self._candidates.failed(address)
                        reasons.append(str(error))
                        continue
                    self._connection = connection
                    return None
            return "; ".join(reasons) or "nsqlookupd knows no nsqd"
        except LookupFailed as error:
            return "; ".join([*reasons, str(error)])
        finally:
            self._opening = None

    def _ended(self, connection: ProducerConnection, reason: Exception | None) -> None:
        """A connection has ended, and every publish on it has its outcome."""
        if connection is self._connection:
            self._connection = None
        if not self._is_stopped:
            log = logger.info if connection.has_refused else logger.warning
            log("lost %s: %s", connection.raw, reason_of(reason))
            # An idempotent producer tries the same broker first: it knows the repeats.
            if not connection.has_refused and self._numbers is None:
                self._candidates.failed(connection.raw.address)
        self._room.set()


Doubt = PublishFailed | NotConnected | PublishTimeout | None
"""The outcome of a publish that was sent several times: what is raised if it cannot be sent again.
None if it never reached a broker."""


def _doubt(earlier: Doubt, outcome: Outcome) -> Doubt:
    """That the publish may be stored counts more than a refusal of its repeat."""
    if outcome is None or isinstance(outcome, NotReached):
        return earlier
    return earlier if isinstance(earlier, NotConnected | PublishTimeout) else outcome


_all: weakref.WeakSet[Producer] = weakref.WeakSet()


def _begin_in_child() -> None:
    _of_the_parent.extend([producer._begin_in_child() for producer in _all])


_of_the_parent: list[object] = []
"""Kept forever in a child: futures and tasks of the parent's event loop, which nobody awaits
there."""


os.register_at_fork(after_in_child=_begin_in_child)
