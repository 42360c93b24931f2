"""One turn of the event loop, from the first publish to the last byte sent.

While the loop reads from its sockets, Publishing gathers the publishes of each topic. Channels that
have something to deliver are added to the Turn, and so are outboxes that have something to send.
`Turn.run()` does the rest, in this order:

1. append what each topic has gathered, with one write;
2. answer the publishers (`answer`), so that they prepare their next messages meanwhile;
3. deliver on the channels that have messages and ready clients;
4. bound the memory of ephemeral topics;
5. flush the outboxes;
6. stay awake for a moment, because replies are on their way (`stay_awake`).

The broker knows no socket and no event loop, so the server plugs in `wake`, `answer` and
`stay_awake`. A large publish gains nothing by waiting for others: it is appended at once.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Protocol

from nsparq.broker.ephemeral import bound_memory
from nsparq.broker.idempotence import PRODUCER, Added, begin
from nsparq.errors import Exiting, StorageError, SyncFailed
from nsparq.packed import PackedBodies

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

MAX_BATCH: Final = 2500
"""Messages in one batch; a larger publish becomes several. One read from a publisher's socket, 256
KiB, is usually less than this. To cut it in two means to copy it."""
EAGER_BATCH: Final = 64
"""Gathered messages that are appended at once: they gain nothing by waiting for others, and the
publisher can prepare its next ones while we serve others."""
COMPANY_BATCH: Final = 1024
"""The same where waiting does gain: the client is about to publish more, or many channels read the
topic, and messages appended together are also delivered together to each of them."""
MANY_CHANNELS: Final = 4
EAGER_BYTES: Final = 64 << 10
"""A publish of this size is appended at once, which bounds the size of a batch."""
DELIVERY_PARTS: Final = 4
DELIVERY_MESSAGES: Final = 500
"""A turn stops delivering when it has delivered this many messages and has served one in
DELIVERY_PARTS of the channels. The next turn serves the others."""

Done = Callable[[Exception | None], None]
"""Called with None once a publisher's messages are as durable as configured, or with the error."""
Groups = list[tuple[PackedBodies, int]]
"""Messages that become one batch each, with their due time on the wall clock, or 0."""


class Outgoing(Protocol):
    """Something that gathers frames during a turn."""

    def flush(self) -> None:
        """Send them."""

    def fail(self, error: Exception) -> None:
        """flush() has raised."""


class Turn:
    """The work for the end of the present turn."""

    def __init__(self, broker: Broker, wake: Callable[[], object]) -> None:
        """`wake` has run() called at the end of the present turn of the event loop."""
        self.wake = wake
        self.answer: Callable[[], None] = lambda: None
        self.should_wait: Callable[[], bool] | None = None
        """Asked before a turn ends: whether more publishers are about to send."""
        self.stay_awake: Callable[[], None] = lambda: None
        self.is_scheduled = False
        """Whether run() is about to be called, or is running."""
        self.outboxes: list[Outgoing] = []
        """To be flushed at the end of the turn."""
        self._broker = broker
        self._topics: dict[Topic, None] = {}
        self._channels: dict[Channel, None] = {}

    def add_topic(self, topic: Topic) -> None:
        """The topic has gathered publishes."""
        self._topics[topic] = None
        if not self.is_scheduled:
            self.is_scheduled = True
            self.wake()

    def add_channel(self, channel: Channel) -> None:
        """The channel may have something to deliver."""
        self._channels[channel] = None
        if not self.is_scheduled:
            self.is_scheduled = True
            self.wake()

    def schedule(self) -> None:
        """Have run() called, for outboxes and OKs. Callers look at `is_scheduled` first."""
        self.is_scheduled = True
        self.wake()

    def forget_topic(self, topic: Topic) -> None:
        self._topics.pop(topic, None)

    def forget_channel(self, channel: Channel) -> None:
        self._channels.pop(channel, None)

    def run(self, may_wait: bool = False) -> None:
        """End the turn, or put its end off if that is allowed. An error in one topic or channel
        does not end the turn of the others."""
        # Everything added from here on is served below, or left for another turn.
        self.is_scheduled = True
        if may_wait and self.should_wait is not None and self.should_wait():
            self.wake()
            return
        broker, memory = self._broker, self._broker.ephemeral_memory
        topics, self._topics = self._topics, {}
        try:
            for topic in topics:
                try:
                    topic.publishing.flush()
                except Exception:
                    logger.exception("%s: internal error while publishing", topic)
            self.answer()

            # Deliver. If that is a lot, on a part of the channels: then messages published and
            # finished meanwhile are delivered together with the rest. So deliveries get larger and
            # fewer the more there is to do.
            now_ns = broker.monotonic_ns()
            channels, self._channels = self._channels, {}
            part = -(-len(channels) // DELIVERY_PARTS)
            waiting = iter(channels)
            delivered = 0
            for number, channel in enumerate(waiting, 1):
                broker.upkeep.changed.add(channel.topic)
                try:
                    delivered += channel.delivery.pump(now_ns)
                except Exception:
                    logger.exception("%s: internal error while delivering", channel)
                    broker.upkeep.retry(channel)
                if number >= part and delivered >= DELIVERY_MESSAGES:
                    break
            # The next turn begins with those that are left.
            self._channels = dict.fromkeys(waiting) | self._channels

            for topic in topics:
                try:
                    if topic.bound is not None:
                        topic.bound.apply()
                except Exception:
                    logger.exception("%s: internal error while limiting its memory", topic)
            if memory.size_bytes > memory.limit_bytes:
                bound_memory(broker.topics, memory)
        finally:
            self.is_scheduled = False
            if self._topics or self._channels:
                self.schedule()
        outboxes, self.outboxes = self.outboxes, []
        for outbox in outboxes:
            try:
                outbox.flush()
            except Exception as error:
                outbox.fail(error)
        self.stay_awake()


class Publishing:
    """The publishes of one topic on their way into its log."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._gathered: list[PackedBodies] = []
        """Messages of this turn."""
        self._count = 0
        """Number of these."""
        self._deferred: Groups = []
        """Deferred messages of this turn, one each."""
        self._waiting: list[Done] = []
        """Publishers of this turn."""
        self._added: Added = []
        """Numbers of producers that count as stored when the messages of this turn are."""
        self._uncommitted: list[tuple[int, list[Done], Added]] = []
        """Publishers that wait for an fsync, with the end of the log that it must reach and the
        numbers of their messages; the oldest first."""

    def publish(self, bodies: PackedBodies, defer_ns: int, done: Done, *, has_company: bool = False) -> None:
        """Append at the end of this turn, or at once. `has_company` says that the same client is
        about to publish more. Raises Exiting; for messages with numbers also NumberRefused and
        OSError."""
        topic = self._topic
        if topic.is_exiting:
            raise Exiting
        headers = bodies.headers
        if headers is not None and headers.has_numbers and PRODUCER in headers.data:
            bodies, added = begin(topic).without_repeats(bodies)
            self._added += added
        # A repeat waits, too: for the append and the fsync of the original.
        self._waiting.append(done)
        if not bodies.lengths:
            pass
        elif defer_ns:
            self._deferred += self._defer(bodies, defer_ns)
        else:
            self._gathered.append(bodies)
            self._count += len(bodies.lengths)
        gains = has_company or len(topic.channels) >= MANY_CHANNELS
        if self._count >= (COMPANY_BATCH if gains else EAGER_BATCH) or len(bodies.data) >= EAGER_BYTES:
            self.flush()
        else:
            topic.broker.next_turn.add_topic(topic)

    def _defer(self, bodies: PackedBodies, defer_ns: int) -> Groups:
        """A deferred message is a batch of its own: deferred batches are known by their first
        number."""
        due_ns = self._topic.broker.wall_ns() + defer_ns
        return [(body, due_ns) for body in bodies.split(1)]

    def flush(self) -> None:
        """Append the messages of this turn, and answer their publishers."""
        waiting = self._waiting
        if not waiting:
            return
        gathered, groups, added = self._gathered, self._deferred, self._added
        self._added = []
        self._gathered, self._deferred, self._waiting, self._count = [], [], [], 0
        if gathered:
            bodies = gathered[0] if len(gathered) == 1 else PackedBodies.join(gathered)
            if len(bodies.lengths) <= MAX_BATCH:
                groups.insert(0, (bodies, 0))
            else:
                groups = [(part, 0) for part in bodies.split(MAX_BATCH)] + groups
        try:
            if groups:
                self._append(groups)
        except Exception as error:
            self._forget(added)
            if not isinstance(error, StorageError | Exiting | OSError):
                logger.exception("%s: internal error while appending", self._topic)
            self._answer(waiting, error)
            return
        if self._topic.is_synchronous and not self._topic.is_ephemeral:
            self._await_sync(waiting, added)
        elif self._topic.broker.replicas is None:
            self._answer(waiting, None)
        else:
            self._confirm(waiting)

    def append_tagged(self, bodies: PackedBodies, defer_ns: int, tag: int) -> None:
        """Append at once, behind what was published before. Raises StorageError, OSError or
        Exiting, with nothing appended."""
        self.flush()
        self._append(
            self._defer(bodies, defer_ns) if defer_ns else [(part, 0) for part in bodies.split(MAX_BATCH)],
            tag,
        )

    def _append(self, groups: Groups, tag: int = 0) -> None:
        """Append each group as one batch. Raises with nothing appended. Nothing here may raise once
        the log has the messages: they would be refused, and delivered all the same."""
        topic, log, broker = self._topic, self._topic.log, self._topic.broker
        before, wall_ns = log.end, broker.wall_ns()
        if broker.replicas is not None and not topic.is_ephemeral:
            # It is no error of this disk, and /ping shows it by itself.
            broker.replicas.check()
        try:
            if topic.is_exiting:
                raise Exiting
            if before > topic.checkpoint.reserve_at:
                topic.checkpoint.write()
            if not broker.data_path.needs_headers:
                for bodies, _ in groups:
                    if bodies.headers is not None and not topic.is_ephemeral:
                        broker.data_path.need_headers()
                        break
            batches = log.append(groups, wall_ns, tag)
        except (StorageError, OSError) as error:
            broker.health.set(str(error))
            raise
        if broker.health.errors and not topic.is_ephemeral:
            broker.health.set(None)
        count = log.end - before
        topic.message_count += count
        for batch in batches:
            topic.message_bytes += len(batch.data)
            if batch.due_ns:
                due_ns = broker.monotonic_ns() + batch.due_ns - wall_ns
                topic.held_back.append((batch.base, due_ns))
        if topic.bound is not None:
            broker.next_turn.add_topic(topic)
        if not topic.paused:
            topic.visible_end = log.end
            if topic.held_back:
                self.show_deferred()
            for channel in topic.channels.values():
                channel.delivery.appended(count, batches[0])
        broker.upkeep.use_count += 1
        broker.upkeep.changed.add(topic)
        if log.unsynced >= broker.options.sync_every:
            broker.upkeep.sync_soon(topic)

    def show_deferred(self) -> None:
        """Hand deferred messages that the channels have not seen to all of them."""
        topic = self._topic
        if topic.channels:
            held_back, topic.held_back = topic.held_back, []
            for channel in topic.channels.values():
                for sequence, due_ns in held_back:
                    channel.defer_published(sequence, due_ns)

    # durability

    def when_committed(self, done: Done) -> None:
        """Have `done` called once everything appended so far is as durable as configured, or is
        known not to be."""
        topic = self._topic
        if not topic.is_synchronous or topic.is_ephemeral:
            self._confirm([done])
        elif topic.log.doubtful:
            self._answer([done], SyncFailed("an earlier fsync failed"))
        else:
            self._await_sync([done], [])

    def _await_sync(self, waiting: list[Done], added: Added) -> None:
        self._uncommitted.append((self._topic.log.end, waiting, added))
        self._topic.broker.upkeep.request_sync(self._topic)

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
        for _, waiting, added in uncommitted[:number]:
            if error is not None:
                self._forget(added)
                self._answer(waiting, error)
            else:
                self._confirm(waiting)
        if self._uncommitted:
            topic.broker.upkeep.request_sync(topic)

    def refuse_all(self) -> None:
        """The topic is being deleted: everybody who waits gets an error."""
        unanswered = [self._waiting, *(waiting for _, waiting, _ in self._uncommitted)]
        self._waiting, self._uncommitted = [], []
        for waiting in unanswered:
            self._answer(waiting, Exiting())

    def _forget(self, added: Added) -> None:
        if added and self._topic.idempotence is not None:
            self._topic.idempotence.forget(added)

    def _confirm(self, waiting: list[Done]) -> None:
        """This node has done its part. If there are replicas, they must have done theirs."""
        replicas = self._topic.broker.replicas
        if replicas is None or self._topic.is_ephemeral:
            self._answer(waiting, None)
        else:
            replicas.when_safe(partial(self._answer, waiting))

    def _answer(self, waiting: list[Done], error: Exception | None) -> None:
        """If the callback of one publisher fails, the others still get their answers."""
        for done in waiting:
            try:
                done(error)
            except Exception:
                logger.exception("%s: internal error while answering a publisher", self._topic)
