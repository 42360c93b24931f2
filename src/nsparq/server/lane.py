"""Lanes: many publishers that send one PUB, wait for OK and send the next are read from together.

The event loop reads from its connections one by one, and each read takes several calls before the
message is gathered. Connections that do nothing but PUB to the same topic are moved to an epoll of
their own, the topic's lane. One compiled call reads from all of them that have sent something, and
another one sends OK to all when their messages are appended. A connection that sends or gets
anything else goes back to the event loop, with what was read: so no rule of the protocol is written
twice. Messages with headers have a lane of their own.

While there is a lane, the end of a turn may be put off for a moment, until half of these publishers
have sent. `benchmarks/decisions/optimisations.py` measures what that brings.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

from nsparq import kernel
from nsparq.broker.seen_numbers import NumberRefused
from nsparq.broker.topic import Topic
from nsparq.busy_poll import MAX_SKIPPED, usable_cores
from nsparq.packed import PackedBodies
from nsparq.wire.frames import OK
from nsparq.wire.header_blocks import split_headers
from nsparq.wire.mpub import SIZE

if TYPE_CHECKING:
    from nsparq.server.connection import Connection
    from nsparq.server.daemon import Nsqd

logger = logging.getLogger(__name__)

JOIN_AFTER: Final = 16
"""Single PUBs after which a client is moved to a lane."""
MAX_JOIN_AFTER: Final = 4096
"""The same for a client that has left lanes again and again."""
MOST_LANES: Final = 64
FILL_S: Final = 40e-6
"""How long to wait for half of the publishers. Each needs about 5 us to send its next message."""
REVIEW_AFTER: Final = 32
"""Reads after which the number of active publishers is counted anew."""


class Lanes:
    """The lanes of an nsqd, at most two for each topic; and when to append what they have read."""

    def __init__(
        self, nsqd: Nsqd, clock: Callable[[], float] = perf_counter, *, cores: int | None = None
    ) -> None:
        self._nsqd = nsqd
        self._clock = clock
        self._may_wait = (usable_cores() if cores is None else cores) > 1
        """On a single core waiting would keep the publishers from sending."""
        self._lanes: dict[tuple[Topic, bool], Lane] = {}
        """By topic, and whether the messages have headers."""
        self._since = 0.0
        """When waiting for publishers began; 0 if nothing waits."""
        self._penalty = 0
        """Times that waiting is skipped after the last failure."""
        self._to_skip = 0
        """Times that waiting is still to be skipped."""

    def __len__(self) -> int:
        return len(self._lanes)

    def of(self, topic: Topic, *, has_headers: bool = False) -> Lane | None:
        return self._lanes.get((topic, has_headers))

    def join(self, topic: Topic, connection: Connection, *, has_headers: bool) -> Lane | None:
        """Move the connection to the topic's lane. None if that is not possible: without compiled
        code, on another system than Linux, where publishers wait for the disk, beyond a number of
        lanes, and when the system has no descriptor left."""
        if kernel.read_publishes is None or topic.is_synchronous:
            return None
        try:
            lane = self.of(topic, has_headers=has_headers)
            if lane is None:
                if len(self._lanes) >= MOST_LANES:
                    return None
                lane = Lane(self._nsqd, topic, has_headers=has_headers)
            lane.join(connection)
        except OSError as error:
            logger.warning("%s: reading from publishers one by one: %s", topic, error)
            return None
        self._lanes[topic, has_headers] = lane
        self._nsqd.broker.next_turn.should_wait = self.are_filling
        return lane

    def ended(self, topic: Topic, *, has_headers: bool) -> None:
        self._lanes.pop((topic, has_headers), None)
        if not self._lanes:
            self._nsqd.broker.next_turn.should_wait = None

    def are_filling(self) -> bool:
        """Whether to put off the end of the turn, because more publishers are about to send.

        It is best if two halves of them alternate: one prepares its next messages while the other
        is served. Otherwise the groups get smaller the faster we are, and the cost of a turn is
        shared by fewer messages.
        """
        waiting = sum([lane.waiting for lane in self._lanes.values()])
        if not waiting:
            return False
        if 2 * waiting >= sum([lane.active for lane in self._lanes.values()]):
            if self._since:
                self._since = 0.0
                self._penalty = 0
            return False
        if not self._since:
            if self._to_skip:
                self._to_skip -= 1
            elif self._may_wait:
                self._since = self._clock()
            return self._since > 0.0
        if self._clock() < self._since + FILL_S:
            return True
        self._since = 0.0
        self._penalty = self._to_skip = min(2 * self._penalty + 1, MAX_SKIPPED)
        return False


class LaneMember:
    """The part of a connection that moves it to a lane and back. It does not refer to the
    connection: see Connection._release()."""

    def __init__(self) -> None:
        self.lone_publishes = 0
        """Publishes since the last one that was not a single PUB."""
        self.join_after = JOIN_AFTER
        """Single PUBs after which the connection is moved to a lane."""
        self._lane: Lane | None = None

    def join(self, connection: Connection, topic: Topic, *, has_headers: bool) -> None:
        """Have a lane read from the client from now on, unless something is in the way."""
        self.lone_publishes = 0
        outbox, transport = connection.outbox, connection.outbox.transport
        is_busy = connection.client.channel is not None or not connection.is_reading
        is_plain = outbox.layers is None and not connection.auth.is_required
        if is_busy or not is_plain or outbox.has_frames:
            return
        if transport.is_closing() or transport.get_write_buffer_size():
            return
        self._lane = connection.nsqd.lanes.join(topic, connection, has_headers=has_headers)
        if self._lane is not None:
            outbox.before_send = partial(self.leave, connection)
            transport.pause_reading()

    def leave(self, connection: Connection) -> None:
        """Have the event loop read from the client again. The next time it takes longer to join."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        outbox = connection.outbox
        outbox.before_send = None
        outbox.unanswered += lane.leave(connection)
        self.join_after = min(2 * self.join_after, MAX_JOIN_AFTER)
        if not outbox.transport.is_closing():
            outbox.transport.resume_reading()


class Lane:
    """The publishers of one topic that are read from together. It lasts as long as there is one."""

    def __init__(self, nsqd: Nsqd, topic: Topic, *, has_headers: bool = False) -> None:
        self.waiting = 0
        """Messages that were read and whose publishers are not answered."""
        self.active = 0
        """Number of members that have published lately."""
        self._nsqd = nsqd
        self._topic = topic
        self._has_headers = has_headers
        self._line = b"PUB %b%b\n" % (topic.name.encode(), b" headers" if has_headers else b"")
        self._members: dict[int, Connection] = {}
        """By the descriptor of their socket."""
        self._unanswered: list[_Read] = []
        self._heard: set[int] = set()
        """Descriptors that have been read from since the last review."""
        self._reads = 0
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._loop.add_reader(self._epoll.fileno(), self._on_readable)

    def __len__(self) -> int:
        return len(self._members)

    def join(self, connection: Connection) -> None:
        """Read from the client; the event loop must not. Raises OSError."""
        try:
            self._epoll.register(connection.outbox.descriptor, select.EPOLLIN)
            self._members[connection.outbox.descriptor] = connection
        finally:
            self._end_if_empty()

    def leave(self, connection: Connection) -> int:
        """Read from the client no more. Gives the number of its publishes that are unanswered:
        Connection.published() is called for each of them later."""
        descriptor = connection.outbox.descriptor
        del self._members[descriptor]
        with suppress(OSError):  # closed, so the system has removed it already
            self._epoll.unregister(descriptor)
        self._end_if_empty()
        unanswered = [read for read in self._unanswered if read.waiting.pop(descriptor, None)]
        for read in unanswered:
            read.left.append(connection)
        return len(unanswered)

    def _end_if_empty(self) -> None:
        if not self._members:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._nsqd.lanes.ended(self._topic, has_headers=self._has_headers)

    def _on_readable(self) -> None:
        members = [*self._members.values()]
        try:
            if self._topic.is_exiting or self._topic.is_synchronous:
                # The event loop reads what they have sent.
                for connection in members:
                    connection.lane_member.leave(connection)
            else:
                self._read()
        except Exception:
            logger.exception("internal error while reading publishes")
            # Messages that were read may be lost, and nobody is to wait for an answer.
            for connection in members:
                connection.close()

    def _read(self) -> None:
        assert kernel.read_publishes is not None
        members, topic = self._members, self._topic
        max_size = self._nsqd.limits.max_msg_size
        descriptors, bodies, others = kernel.read_publishes(self._epoll.fileno(), self._line, max_size)
        messages = dict(zip(descriptors, bodies, strict=True)) if self._has_headers else {}
        if self._has_headers:
            descriptors, packed = self._split(descriptors, bodies, others)
        else:
            packed = PackedBodies.of(bodies)
        leaving = [(members[descriptor], data) for descriptor, data in others]
        if descriptors:
            publishers = {descriptor: members[descriptor] for descriptor in descriptors}
            read = _Read(publishers.copy())
            self._unanswered.append(read)
            self.waiting += len(descriptors)
            try:
                topic.publishing.publish(packed, 0, partial(self._answer, read))
            except (NumberRefused, OSError):
                # Each is published by itself, so that only those are refused that must be.
                self._unanswered.remove(read)
                self.waiting -= len(descriptors)
                leaving += [(publishers[one], self._publish_of(messages[one])) for one in descriptors]
            else:
                now = self._loop.time()
                for connection in publishers.values():
                    connection.client.publish_counts[topic.name] += 1
                    connection.last_command = now
                self._review(descriptors)
        for connection, data in leaving:
            connection.lane_member.leave(connection)
            # Nothing was read at an end of stream or an error. The event loop will meet it again.
            if data:
                connection.data_received(data)

    def _split(
        self, descriptors: list[int], messages: list[bytes], others: list[tuple[int, bytes]]
    ) -> tuple[list[int], PackedBodies]:
        """Take the headers off the messages. Publishes that break a rule go to `others`."""
        found = split_headers(PackedBodies.of(messages))
        if len(found.lengths) == len(messages):
            return descriptors, found
        good: dict[int, bytes] = {}
        for descriptor, message in zip(descriptors, messages, strict=True):
            if split_headers(PackedBodies.of([message])):
                good[descriptor] = message
            else:
                others.append((descriptor, self._publish_of(message)))
        return [*good], split_headers(PackedBodies.of(good.values()))

    def _publish_of(self, message: bytes) -> bytes:
        """The command that the client has sent."""
        return self._line + SIZE.pack(len(message)) + message

    def _review(self, descriptors: list[int]) -> None:
        self._heard.update(descriptors)
        self._reads += 1
        if self._reads == REVIEW_AFTER:
            self.active = len(self._heard)
            self._heard.clear()
            self._reads = 0

    def _answer(self, read: _Read, error: Exception | None) -> None:
        assert kernel.send_each is not None
        self._unanswered.remove(read)
        waiting = [*read.waiting.values()]
        self.waiting -= len(waiting) + len(read.left)
        if error is None:
            for index, sent in kernel.send_each([*read.waiting], OK, self._nsqd.oks.ring):
                connection = waiting[index]
                connection.lane_member.leave(connection)
                connection.outbox.finish_ok(sent, 1)
        else:
            for connection in waiting:
                connection.published(1, "PUB", error)
        for connection in read.left:
            connection.published(1, "PUB", error)


class _Read:
    """Messages that were read together, and whose publishers are answered together."""

    def __init__(self, waiting: dict[int, Connection]) -> None:
        self.waiting = waiting
        self.left: list[Connection] = []
        """Publishers that have left the lane since."""
