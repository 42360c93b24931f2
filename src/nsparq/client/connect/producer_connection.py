"""A producer's connection to one nsqd. Publishes are sent without waiting for earlier ones, and
nsqd answers them in order.

It never sends a publish twice and knows no other nsqd: the producer decides what a failure means.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from nsparq.busy_poll import BusyPoll
from nsparq.client.config import Config
from nsparq.client.connect.connection import Connection
from nsparq.client.errors import HeadersNotSupported, NotConnected, PublishFailed, PublishTimeout, reason_of
from nsparq.wire import client as wire
from nsparq.wire.client import Received

BUSY_POLL_DEPTH: Final = 8
"""With more unanswered publishes than this, the loop always has work: no busy-polling."""
SILENT_SHARE: Final = 0.75
"""A publish timed out. If the broker was silent for this part of the timeout, the connection is
closed. Not for all of it: a part may have been spent on connecting."""
SLACK_S: Final = 0.002
"""How exact the timers of an event loop are."""


class NotReached(Exception):
    """The broker refused an earlier publish and closed: it never processed this one."""


Outcome = PublishFailed | NotConnected | PublishTimeout | NotReached | None
"""The outcome of a publish; None if it was acknowledged. It is the result of a future, not its
exception: if the waiting task was just cancelled, asyncio would complain about an exception that
nobody retrieved."""


class ProducerConnection:
    """open() it, then send(). `on_room` is called when more can be sent, `on_end` at the end."""

    raw: Connection

    def __init__(
        self,
        config: Config,
        max_pending: int,
        on_room: Callable[[], object],
        on_end: Callable[[ProducerConnection, Exception | None], None],
    ) -> None:
        self.has_refused = False
        """The last answer was an error after which the broker processes no later publish."""
        self._timeout = config.publish_timeout
        self._max_pending = max_pending
        self._on_room, self._on_end = on_room, on_end
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[asyncio.Future[Outcome], float]] = deque()
        """Unanswered publishes with their deadlines, the oldest first. A publish that nobody waits
        for any more keeps its place, because answers come in order."""
        self._busy_poll = BusyPoll(self._loop, config.busy_poll)
        self._depth = 0
        """How many publishes were recently unanswered at a time."""
        self._silent_since = 0.0
        """Time of the last answer, or of the first publish after a time without any."""
        self._is_given_up = False
        """We closed the connection, because the broker acknowledged nothing."""
        self._timer: asyncio.TimerHandle | None = None
        """One timer for all publishes: the deadline of the oldest."""

    async def open(self, address: str, config: Config) -> None:
        """Raises ConnectFailed, and then leaves nothing open."""
        self.raw = await Connection.open(address, config, self)

    @property
    def is_closing(self) -> bool:
        return self.raw.is_closing

    def send(
        self, command: bytes, deadline: float, needs_headers: bool = False
    ) -> asyncio.Future[Outcome] | None:
        """Send a publish. None if there is no room for it now. Raises HeadersNotSupported."""
        connection, pending = self.raw, self._pending
        if needs_headers and not connection.has_headers:
            raise HeadersNotSupported(connection.address)
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
        # Publishes of one turn are sent together, but not all of them at the end of the turn: once
        # half of the usual number has gathered, it is sent at once. The broker then works on it
        # while we prepare the other half.
        connection.write(command, at_once=2 * connection.unsent_count + 2 >= self._depth)
        return answer

    async def settle(self) -> None:
        """Wait until every publish has its outcome, which takes at most the publish timeout."""
        while waiting := [answer for answer, _ in self._pending if not answer.done()]:
            await asyncio.wait(waiting)

    async def close(self) -> None:
        self.raw.close()
        await self.raw.closed.wait()

    # time

    def expire(self) -> None:
        """Time out overdue publishes, and close if the broker acknowledges nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._pending or self._is_given_up:
            return
        now = monotonic() + SLACK_S
        silence = now - self._silent_since
        wake_at = self._silent_since + self._timeout
        allowed_silence = self._timeout
        # A publish that was sent again may have an earlier deadline than those before it. Its
        # caller has its own timer.
        for answer, deadline in self._pending:
            if deadline > now:
                wake_at = min(wake_at, deadline)
                break
            allowed_silence = self._timeout * SILENT_SHARE
            if not answer.done():
                answer.set_result(PublishTimeout(f"not acknowledged within {self._timeout:g} s"))
        if silence >= allowed_silence:
            # The next publish should use another broker, or a new connection.
            self._is_given_up = True
            self.raw.fail(TimeoutError(f"the server acknowledged nothing for {silence:.1f} s"))
        else:
            self._timer = self._loop.call_later(wake_at - now + SLACK_S, self.expire)

    # events of the connection

    def on_messages(self, connection: Connection, messages: Sequence[Received]) -> None:
        connection.fail(ConnectionError("the server sent messages to a producer"))

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
            connection.fail(ConnectionError(f"unexpected response {data[:100]!r}"))
        if not pending:
            self._busy_poll.stop()
        elif self._depth <= BUSY_POLL_DEPTH:
            self._busy_poll.start()
        self._on_room()

    def on_error(self, connection: Connection, text: str) -> None:
        """The broker refused the oldest publish and closes the connection. If the command was
        wrong, the broker processed none of the later ones; if the broker failed, it may have."""
        if not self._pending:
            connection.fail(ConnectionError(f"unexpected error {text[:100]!r}"))
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
        if self._is_given_up:
            return PublishTimeout(f"{connection}: {reason}")
        return NotConnected(f"lost {connection}: {reason_of(reason)}")

    def on_writable(self, connection: Connection) -> None:
        self._on_room()
