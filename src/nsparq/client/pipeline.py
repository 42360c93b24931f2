"""Publishes on one connection: sent one behind the other, without waiting, and answered in that order.

A pipeline knows nothing of other brokers and never sends anything twice. What became of a publish is for the
producer to judge.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from nsparq.busy_poll import BusyPoll
from nsparq.client.config import Config
from nsparq.client.connection import Connection
from nsparq.client.errors import NotConnected, PublishFailed, PublishTimeout, reason_of
from nsparq.wire import client as wire
from nsparq.wire.client import Received

FEW: Final = 8
"""Publishes on their way. With more of them there is always something to do, and no need to stay awake."""
LEAVE_SHARE: Final = 0.75
"""Part of the publish timeout for which a broker that let a publish time out may have said nothing at all:
some of the time may have gone into connecting to it."""
SLACK_S: Final = 0.002
"""Timers of event loops are about as exact as this."""


class NotReached(Exception):
    """The broker has refused an earlier publish and ended the connection: it never looked at this one."""


Outcome = PublishFailed | NotConnected | PublishTimeout | NotReached | None
"""What became of a publish; None if it was acknowledged. It is a future's result, not its exception: whoever
waited may have been cancelled in the same moment, and an exception that nobody looks at is complained of."""


class Pipeline:
    """open() one; send() until it is closing. `on_room` is called when more may be sent, `on_end` once."""

    connection: Connection

    def __init__(
        self,
        config: Config,
        max_pending: int,
        on_room: Callable[[], object],
        on_end: Callable[[Pipeline, Exception | None], None],
    ) -> None:
        self.has_refused = False
        """The last answer was a refusal: the broker looks at nothing that came behind."""
        self._timeout = config.publish_timeout
        self._max_pending = max_pending
        self._on_room, self._on_end = on_room, on_end
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[asyncio.Future[Outcome], float]] = deque()
        """Publishes that are not answered, the oldest first, each with its deadline. Those that nobody waits
        for any more keep their place: the answers come in order."""
        self._busy_poll = BusyPoll(self._loop, config.busy_poll)
        self._depth = 0
        """How many are on their way at a time, of late."""
        self._silent_since = 0.0
        """The last answer, or when there began to be something to answer."""
        self._is_left = False
        """We have ended it ourselves, because it acknowledges nothing."""
        self._timer: asyncio.TimerHandle | None = None
        """For the deadline of the oldest: one for all of them."""

    async def open(self, address: str, config: Config) -> None:
        """Raises ConnectFailed, with nothing left open."""
        self.connection = await Connection.open(address, config, self)

    @property
    def is_closing(self) -> bool:
        return self.connection.is_closing

    def send(self, command: bytes, deadline: float) -> asyncio.Future[Outcome] | None:
        """Put a publish on its way. None if there is no room for it now."""
        connection, pending = self.connection, self._pending
        if len(pending) >= self._max_pending or not connection.is_writable or connection.is_closing:
            return None
        if not pending:
            self._silent_since = monotonic()
            if self._timer is None:
                self._timer = self._loop.call_later(deadline - self._silent_since, self.expire)
            self._busy_poll.start()
        answer: asyncio.Future[Outcome] = self._loop.create_future()
        pending.append((answer, deadline))
        if len(pending) > self._depth:
            self._depth = len(pending)
        # Those of a turn leave together, but half of what is on its way does not wait for the rest: the
        # broker is at the one half while we are at the other, and neither waits for the other.
        connection.write(command, at_once=2 * connection.unsent_count + 2 >= self._depth)
        return answer

    async def settle(self) -> None:
        """Until all that was sent has its outcome. That takes no longer than the publish timeout."""
        while waiting := [answer for answer, _ in self._pending if not answer.done()]:
            await asyncio.wait(waiting)

    async def close(self) -> None:
        self.connection.close()
        await self.connection.closed.wait()

    # time

    def expire(self) -> None:
        """Tell those that are out of time, and leave a broker that acknowledges nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._pending or self._is_left:
            return
        now = monotonic() + SLACK_S
        silence = now - self._silent_since
        wake_at = self._silent_since + self._timeout
        patience = self._timeout
        # The deadline of one that was sent again may be earlier than that of those before it; whoever waits
        # for it has a timer of its own.
        for answer, deadline in self._pending:
            if deadline > now:
                wake_at = min(wake_at, deadline)
                break
            patience = self._timeout * LEAVE_SHARE
            if not answer.done():
                answer.set_result(PublishTimeout(f"not acknowledged within {self._timeout:g} s"))
        if silence >= patience:
            # It reads, perhaps, but that is all. Better another broker, or a new connection, for the next.
            self._is_left = True
            self.connection.fail(TimeoutError(f"nothing was acknowledged for {silence:.1f} s"))
        else:
            self._timer = self._loop.call_later(wake_at - now + SLACK_S, self.expire)

    # what the connection reports

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None:
        connection.fail(ConnectionError("it sends messages to a producer"))

    def on_response(self, connection: Connection, data: bytes, count: int) -> None:
        pending = self._pending
        known = min(count, len(pending))
        self._depth = max(len(pending), self._depth - 1)
        self.has_refused = False
        self._silent_since = monotonic()
        outcome = None if data == wire.OK else PublishFailed(data.decode("utf-8", "replace"))
        for _ in range(known):
            answer, _ = pending.popleft()
            if not answer.done():
                answer.set_result(outcome)
        if known < count:
            connection.fail(ConnectionError(f"it answers {data[:100]!r} to nothing"))
        if not pending:
            self._busy_poll.stop()
        elif self._depth <= FEW:
            self._busy_poll.start()
        self._on_room()

    def on_error(self, connection: Connection, text: str) -> None:
        """The oldest publish was refused, and the broker ends the connection. What came behind it was not
        looked at if the command was at fault; if the broker was, it may have been."""
        if not self._pending:
            connection.fail(ConnectionError(f"it answers {text[:100]!r} to nothing"))
            return
        self.has_refused = not text.partition(" ")[0].endswith("PUB_FAILED")
        answer, _ = self._pending.popleft()
        if not answer.done():
            answer.set_result(PublishFailed(text))
        connection.close()

    def on_closed(self, connection: Connection, reason: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        pending, self._pending = self._pending, deque()
        for answer, _ in pending:
            if not answer.done():
                answer.set_result(self._unanswered(connection, reason))
        self._on_end(self, reason)

    def _unanswered(self, connection: Connection, reason: Exception | None) -> Outcome:
        if self.has_refused:
            return NotReached()
        if self._is_left:
            return PublishTimeout(f"{connection}: {reason}")
        return NotConnected(f"{connection} is gone: {reason_of(reason)}")

    def on_writable(self, connection: Connection) -> None:
        self._on_room()
