"""Publishing into one topic: what is gathered in a turn, and the publishers that wait for an answer.

Publishes are appended together when the turn ends (see `turn`): one write for all of them, whatever their
number. A large publish gains nothing by waiting for others, and is appended at once.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from nsparq.errors import Exiting, StorageError, SyncFailed
from nsparq.packed import PackedBodies

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

MAX_BATCH: Final = 2500
"""Messages in one batch; a larger publish becomes several. One read from a publisher's socket, 256 KiB, is
usually less than this: to cut it in two would mean to copy it."""
EAGER_BATCH: Final = 64
"""Gathered messages that are appended at once: they gain nothing by waiting for others, and the publisher can
prepare its next ones while we serve others."""
COMPANY_BATCH: Final = 1024
"""The same where waiting does gain: the client is about to publish more, or many channels read the topic, and
what is appended together is also delivered together to each of them."""
MANY_CHANNELS: Final = 4
EAGER_BYTES: Final = 64 << 10
"""A publish of this size is appended at once, which bounds the size of a batch."""

Done = Callable[[str, Exception | None], None]
"""Called with the publisher's verb, and None once its messages are as durable as configured, or the error."""
Publisher = tuple[Done, str]
"""Whom to tell, and its verb."""


class Publishing:
    """The publishes of one topic on their way into its log."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._published: list[PackedBodies] = []
        """Messages of this turn."""
        self._singles: list[bytes] = []
        """Messages of this turn that came one by one, behind those."""
        self._gathered = 0
        """Number of messages in both."""
        self._deferred: list[tuple[PackedBodies, int]] = []
        """Deferred messages of this turn, one each, with their delays."""
        self._waiting: list[Publisher] = []
        """Publishers of this turn."""
        self._uncommitted: list[tuple[int, list[Publisher]]] = []
        """Publishers that wait for an fsync, with the end of the log that it must reach; the oldest first."""

    def publish(
        self, bodies: Sequence[bytes], defer_ns: int, done: Done, verb: str, *, has_company: bool = False
    ) -> None:
        """Append at the end of this turn, or at once. `has_company` says that the same client is about to
        publish more. Raises Exiting."""
        topic = self._topic
        if topic.is_exiting:
            raise Exiting
        packed = PackedBodies.of(bodies)
        self._waiting.append((done, verb))
        if defer_ns:
            # One batch each: a deferred batch is known by its first sequence number alone.
            self._deferred += ((single, defer_ns) for single in packed.split(1))
        else:
            self._pack_singles()
            self._published.append(packed)
            self._gathered += len(packed.lengths)
        gains = has_company or len(topic.channels) >= MANY_CHANNELS
        enough = COMPANY_BATCH if gains else EAGER_BATCH
        if self._gathered >= enough or len(packed.data) >= EAGER_BYTES:
            self.flush()
        else:
            topic.broker.next_turn.add_topic(topic)

    def publish_singles(self, bodies: list[bytes], publisher: Publisher) -> None:
        """Append one message each of several clients, which are told together. The topic is not exiting."""
        self._waiting.append(publisher)
        self._singles += bodies
        self._gathered += len(bodies)
        if self._gathered >= EAGER_BATCH:
            self.flush()
        else:
            self._topic.broker.next_turn.add_topic(self._topic)

    def _pack_singles(self) -> None:
        if self._singles:
            self._published.append(PackedBodies.of(self._singles))
            self._singles = []

    def flush(self) -> None:
        """Append what was published in this turn."""
        waiting = self._waiting
        if not waiting:
            return
        self._pack_singles()
        published, groups = self._published, self._deferred
        self._published, self._deferred, self._waiting, self._gathered = [], [], [], 0
        if published:
            groups = [(part, 0) for part in PackedBodies.join(published).split(MAX_BATCH)] + groups
        try:
            self._topic.append(groups)
        except Exception as error:
            if not isinstance(error, StorageError | Exiting | OSError):
                logger.exception("%s: internal error while appending", self._topic)
            self._tell(waiting, error)
            return
        self._await_commit(waiting)

    def append_tagged(self, bodies: PackedBodies, defer_ns: int, tag: int) -> None:
        """Append at once, behind what was published before. Raises StorageError, OSError or Exiting, with
        nothing appended."""
        self.flush()
        # A deferred message is a batch of its own, as in publish().
        size = 1 if defer_ns else MAX_BATCH
        self._topic.append([(part, defer_ns) for part in bodies.split(size)], tag)

    # durability

    def when_committed(self, done: Done, verb: str) -> None:
        """Have `done` called once all that was appended so far is as durable as configured, or is known not
        to be."""
        topic = self._topic
        if topic.is_synchronous and topic.log.doubtful:
            self._tell([(done, verb)], SyncFailed("an earlier one did"))
        else:
            self._await_commit([(done, verb)])

    def _await_commit(self, waiting: list[Publisher]) -> None:
        topic = self._topic
        if topic.is_synchronous and not topic.is_ephemeral:
            self._uncommitted.append((topic.log.end, waiting))
            topic.broker.upkeep.request_sync(topic)
        else:
            self._tell(waiting, None)

    @property
    def awaits_sync(self) -> bool:
        """Whether publishers wait for an fsync."""
        return bool(self._uncommitted)

    def synced(self, error: Exception | None) -> None:
        """An fsync of the log has ended."""
        topic, uncommitted = self._topic, self._uncommitted
        number = len(uncommitted)
        if error is None:
            number = bisect_right(uncommitted, topic.log.committed, key=itemgetter(0))
        self._uncommitted = uncommitted[number:]
        for _, waiting in uncommitted[:number]:
            self._tell(waiting, error)
        if self._uncommitted:
            topic.broker.upkeep.request_sync(topic)

    def refuse_all(self) -> None:
        """The topic is being deleted: nobody gets another answer."""
        unanswered = [self._waiting, *(waiting for _, waiting in self._uncommitted)]
        self._waiting, self._uncommitted = [], []
        for waiting in unanswered:
            self._tell(waiting, Exiting())

    def _tell(self, waiting: list[Publisher], error: Exception | None) -> None:
        """Answer publishers. If the callback of one fails, the others still get their answers."""
        for done, verb in waiting:
            try:
                done(verb, error)
            except Exception:
                logger.exception("%s: internal error while answering a publisher", self._topic)
