"""Publishers who send one message, wait for its answer and send the next: many of them, read from together.

The event loop reads from its connections one by one, and each read takes a handful of calls before the
message is where it belongs. Here connections that do nothing but PUB to the same topic are handed to an epoll
of their own. When any of them has something to say, one compiled call reads from all that have, and another
one says OK to all of them when their messages are appended. Whoever says anything else goes back to the event
loop, with what was read: so no rule of the protocol is written twice.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final

from nsparq import kernel
from nsparq.broker.topic import Topic
from nsparq.busy_poll import AdaptiveBackoff, usable_cores
from nsparq.wire.server import publish_line

if TYPE_CHECKING:
    from nsparq.server.connection import Connection
    from nsparq.server.daemon import Nsqd

logger = logging.getLogger(__name__)

JOIN_AFTER: Final = 16
"""PUBs one at a time, without anything else, that show that a client publishes like that."""
MAX_JOIN_AFTER: Final = 4096
"""The same for one that has left lanes again and again."""
MOST_LANES: Final = 64
FILL_S: Final = 40e-6
"""How long half of the publishers are waited for. Each of them needs 5 us or so to send the next message."""
REVIEW_AFTER: Final = 32
"""Reads after which it is looked at how many publish."""


class Lanes:
    """The lanes of an nsqd, one for each topic that is published to like that; and when to append what they
    have read."""

    def __init__(
        self, nsqd: Nsqd, clock: Callable[[], float] = perf_counter, *, cores: int | None = None
    ) -> None:
        self._nsqd = nsqd
        self._clock = clock
        self._may_wait = (usable_cores() if cores is None else cores) > 1
        """On a single core we would be in the way of who is to send."""
        self._lanes: dict[Topic, Lane] = {}
        self._backoff = AdaptiveBackoff()
        self._since = 0.0
        """When filling them began; 0 if they are not being filled."""

    def __len__(self) -> int:
        return len(self._lanes)

    def of(self, topic: Topic) -> Lane | None:
        return self._lanes.get(topic)

    def join(self, topic: Topic, connection: Connection, descriptor: int) -> Lane | None:
        """The topic's lane, which reads from the client from now on. None if there can be none: without
        compiled code, on another system than Linux, where publishers wait for the disk, beyond a number of
        topics, and when the system has no descriptor left."""
        if kernel.read_publishes is None or topic.is_synchronous:
            return None
        try:
            lane = self.of(topic)
            if lane is None:
                if len(self._lanes) >= MOST_LANES:
                    return None
                lane = Lane(self._nsqd, topic)
            lane.join(connection, descriptor)
        except OSError as error:
            logger.warning("%s: publishers are read from one by one: %s", topic, error)
            return None
        self._lanes[topic] = lane
        return lane

    def ended(self, topic: Topic) -> None:
        self._lanes.pop(topic, None)

    def are_filling(self) -> bool:
        """Whether to put off the end of the turn for a moment, because more publishers are about to send.

        Two halves of them in turn are best: one prepares its next messages while the other is served. Left to
        chance the groups get smaller the faster we are, and what a group costs is shared by fewer.
        """
        waiting = sum([lane.waiting for lane in self._lanes.values()])
        if not waiting:
            return False
        if 2 * waiting >= sum([lane.active for lane in self._lanes.values()]):
            if self._since:
                self._since = 0.0
                self._backoff.succeeded()
            return False
        if not self._since:
            if self._may_wait and self._backoff.should_try():
                self._since = self._clock()
            return self._since > 0.0
        if self._clock() < self._since + FILL_S:
            return True
        self._since = 0.0
        self._backoff.failed()
        return False


class Lane:
    """The publishers of one topic that are read from together. It lasts as long as there is one."""

    def __init__(self, nsqd: Nsqd, topic: Topic) -> None:
        self.waiting = 0
        """Messages read whose publishers are not answered."""
        self.active = 0
        """How many have published lately."""
        self._nsqd = nsqd
        self._topic = topic
        self._line = publish_line(topic.name)
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

    def join(self, connection: Connection, descriptor: int) -> None:
        """Read from the client; the event loop must not. Raises OSError."""
        try:
            self._epoll.register(descriptor, select.EPOLLIN)
            self._members[descriptor] = connection
        finally:
            self._end_if_empty()

    def leave(self, connection: Connection, descriptor: int) -> int:
        """Read from the client no more. Gives the number of its publishes that are unanswered: published() is
        called for each of them later."""
        del self._members[descriptor]
        with suppress(OSError):  # closed, and so forgotten by the system already
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
            self._nsqd.lanes.ended(self._topic)

    def _on_readable(self) -> None:
        try:
            if self._topic.is_exiting or self._topic.is_synchronous:
                # What they have said is still to be read.
                for connection in [*self._members.values()]:
                    connection.leave_lane()
            else:
                self._read()
        except Exception:
            logger.exception("internal error while reading publishes")
            # What was read may be lost, and nobody is to wait for an answer.
            for connection in [*self._members.values()]:
                connection.close()

    def _read(self) -> None:
        assert kernel.read_publishes is not None
        members, topic = self._members, self._topic
        descriptors, bodies, others = kernel.read_publishes(
            self._epoll.fileno(), self._line, self._nsqd.limits.max_msg_size
        )
        leaving = [(members[descriptor], data) for descriptor, data in others]
        if descriptors:
            read = _Read(self, {descriptor: members[descriptor] for descriptor in descriptors})
            now = self._loop.time()
            for connection in read.waiting.values():
                connection.note_publish(topic.name, now)
            self._unanswered.append(read)
            self.waiting += len(bodies)
            self._review(descriptors)
            topic.publishing.publish_singles(bodies, (read.done, "PUB"))
        for connection, data in leaving:
            connection.receive_from_lane(data)

    def _review(self, descriptors: list[int]) -> None:
        self._heard.update(descriptors)
        self._reads += 1
        if self._reads == REVIEW_AFTER:
            self.active = len(self._heard)
            self._heard.clear()
            self._reads = 0

    def answer(self, read: _Read, verb: str, error: Exception | None) -> None:
        self._unanswered.remove(read)
        waiting = [*read.waiting.values()]
        self.waiting -= len(waiting) + len(read.left)
        if error is None:
            for index, sent in self._nsqd.sender.send_ok_to([*read.waiting]):
                waiting[index].leave_lane()
                waiting[index].outbox.finish_ok(sent, 1)
        else:
            for connection in waiting:
                connection.published(1, verb, error)
        for connection in read.left:
            connection.published(1, verb, error)


class _Read:
    """Messages that were read together, and whose publishers are answered together."""

    __slots__ = ("_lane", "left", "waiting")

    def __init__(self, lane: Lane, waiting: dict[int, Connection]) -> None:
        self._lane = lane
        self.waiting = waiting
        self.left: list[Connection] = []
        """Those who have left the lane since."""

    def done(self, verb: str, error: Exception | None) -> None:
        self._lane.answer(self, verb, error)
