"""The driver's part of log mode: plans how far each micro-batch reads.

Spark calls it from one thread, and an exception ends the query. So a node that is away is no error:
its offset stays where it is until the node answers. Only the offsets say what has been read.

Rule 1: a batch reads only logs that both of its offsets name. A new log is added to the offsets in
one batch and read from the next batch on, so the checkpoint has the place where reading began
before any row is out. Rule 2: whenever Spark asks how far the next batch may go, the channels are
moved to `start`, which the sink has committed. Rule 3: losses are judged before a channel is moved
or created; see losses.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple
from uuid import uuid4

from nsparq.spark.cluster.api import LogStatus, Positions
from nsparq.spark.options import NsqOptions
from nsparq.spark.source.archived import ArchivedLogs
from nsparq.spark.source.bounds import Bounds
from nsparq.spark.source.channels import Channels
from nsparq.spark.source.filters import Filters
from nsparq.spark.source.losses import Losses
from nsparq.spark.source.peers import Log, Peers
from nsparq.spark.source.plan import share
from nsparq.spark.source.positions import Offsets, Place
from nsparq.spark.source.range_reader import LogRange
from nsparq.spark.source.ranges import GUESSED_BYTES, RangePlanner, unread
from nsparq.spark.trigger import BatchTimer, Limit
from nsparq.storage.gaps import Gaps

__all__ = ["LogSource"]

logger = logging.getLogger(__name__)

IDLE_S: Final = 1.0
"""How long to wait for messages before telling Spark that there are none."""
FIRST_STEP_S: Final = 0.004
LAST_STEP_S: Final = 0.05
"""Shortest and longest pause after a poll that found nothing."""
HELD_STEP_S: Final = 0.2
"""Pause between two polls while the batch waits for more rows."""


class Behind(NamedTuple):
    """Messages that are published and in no micro-batch yet, by the last poll."""

    bytes: int
    """An estimate."""
    rows: int
    """An upper bound: numbers may have gaps."""


class _Growth(NamedTuple):
    log: Log
    positions: Positions
    first: int
    end: int


class _Plan(NamedTuple):
    """A micro-batch that could start now."""

    end: Offsets
    moves: list[tuple[str, str, Place]]
    """Channels to move or create, besides those of the start offsets."""
    waiting: int = 0
    """Upper bound of the rows that could be read; with a limit, more than the batch takes."""
    is_full: bool = False
    """A limit has cut it short."""


class LogSource:
    """The logs that a query reads: one object for each run of a stream, or for a batch."""

    def __init__(
        self,
        options: NsqOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._is_wanted = options.topic_filter()
        self._clock, self._sleep = clock, sleep
        self._timer = BatchTimer.of(options, clock)
        self._peers = Peers(options, clock, sleep)
        self._channels = Channels(options.channel or "", self._peers)
        self._archived = ArchivedLogs(options, clock)
        self._bounds = Bounds(options, self._peers, self._channels, self._archived)
        self._losses = Losses(options, self._channels)
        self._planner = RangePlanner(options, self._peers, self._losses, self._archived)
        self._target: dict[tuple[str, str], int] | None = None
        """With trigger availableNow: where the query ends, by topic and incarnation."""
        self._new_query = uuid4().hex if options.own_channel and options.channel else ""
        """The query's id, if its offsets have none yet."""
        self._unwritten: Offsets | None = None
        """The initial offsets, until Spark has certainly written them to the checkpoint."""
        self._planned = Offsets()
        self._step = FIRST_STEP_S

    def close(self) -> None:
        self._peers.close()

    # start

    def initial(self) -> Offsets:
        """Where a stream begins. Creates its channels. Raises NoAnswer, NoLog, OptionError."""
        offsets = self._bounds.initial()
        self._channels.begin(offsets.items_flat())
        for topic in self._options.wanted_topics:
            self._peers.cluster.announce(topic, self._options.channel or "")
        offsets.query, offsets.began = self._new_query, offsets.copy()
        self._unwritten = offsets
        return offsets

    def batch(self, filters: Filters | None = None) -> tuple[Offsets, Offsets]:
        """Start and end of a batch. Raises NoAnswer, NoLog, OptionError."""
        return self._bounds.batch(filters or Filters())

    def prepare_available_now(self) -> None:
        """The query reads what is there now, and then ends."""
        self._target = {
            (topic, status.positions.incarnation): status.positions.visible
            for (topic, _), status in self._peers.poll_all(require_all=False).items()
            if status.positions is not None
        }

    # planning a micro-batch

    def latest(self, start: Offsets, limit: Limit) -> Offsets:
        """The end of the next micro-batch. Raises DataLoss, ChannelOwned, NoLog."""
        self._planned = self._next(start, limit)
        return self._planned

    def _next(self, start: Offsets, limit: Limit) -> Offsets:
        is_beginning = self._unwritten is not None and start == self._unwritten
        if not is_beginning:
            self._note_written(start)
        deadline = self._clock() + IDLE_S
        logs = [(topic, name) for topic, name, _ in start.items_flat() if self._is_wanted(topic)]
        wait, seen = 0.0, -1
        while True:
            statuses = self._peers.poll(logs, wait=wait)
            if self._peers.changes != seen:
                seen = self._peers.changes
                plan = self._plan(start, limit, statuses)
                self.committed(start)
                self._channels.move(plan.moves)
                end = plan.end
                if end != start and not is_beginning:
                    end.began = None
                # Offsets of version 1 have no query id. The next ones get it, even if nothing is
                # new.
                end.query = start.query or self._new_query
            if end.query != start.query or (end != start and self._may_start(start, plan, limit)):
                self._step = FIRST_STEP_S
                if plan.waiting:
                    self._timer.start()
                return end
            is_delayed = end != start
            if self._target is not None or self._clock() >= deadline:
                # Return to Spark, which may want to stop the query.
                return start if is_delayed else end
            # Pause in any case: changes may keep coming that do not concern us, as on a paused
            # channel.
            self._sleep(min(HELD_STEP_S, self._timer.remaining()) if is_delayed else self._step)
            self._step = min(self._step * 2, LAST_STEP_S)
            # While the batch is delayed, nodes need not report further messages at once.
            wait = 0.0 if is_delayed else max(0.0, deadline - self._clock())

    def _may_start(self, start: Offsets, plan: _Plan, limit: Limit) -> bool:
        """Whether the batch may start. Not delayed are a full batch, one that adds or removes a
        log, and all batches of a query that ends by itself."""
        if self._target is not None or limit.is_everything or plan.is_full:
            return True
        logs = [(topic, name, place.incarnation) for topic, name, place in start.items_flat()]
        if logs != [(topic, name, place.incarnation) for topic, name, place in plan.end.items_flat()]:
            return True
        return self._timer.may_start(plan.waiting)

    def _note_written(self, offsets: Offsets) -> None:
        """Spark's checkpoint has these offsets, so the query can own its channels from now on."""
        self._unwritten = None
        self._channels.owner = offsets.query

    def _plan(self, start: Offsets, limit: Limit, statuses: dict[Log, LogStatus]) -> _Plan:
        end = start.copy()
        for topic in start:
            if not self._is_wanted(topic):
                self._note_unwanted(topic, end.pop(topic))
        growing: list[_Growth] = []
        moves: list[tuple[str, str, Place]] = []
        for log, status in self._peers.distinct(statuses, start):
            positions = status.positions
            if positions is None:
                place = start.place(*log)
                if place is not None:
                    end.drop(*log)
                    self._losses.note_deleted(log, place)
                continue
            place = self._place_or_add(log, status, start, end, moves)
            self._losses.ends[log] = Place(positions.incarnation, positions.visible)
            if place is None:
                continue
            if not status.has_channel:
                moves.append((*log, place))
            if place.sequence > positions.latest:
                end.put(*log, self._losses.note_rollback(log, place, positions))
                continue
            first = self._losses.readable_from(log, place, status)
            visible = positions.visible
            if self._target is not None:
                visible = self._target.get((log[0], positions.incarnation), 0)
            if visible > first and not status.is_paused:
                growing.append(_Growth(log, positions, first, visible))
        counts = _counts(growing)
        if _limited(growing, counts, limit) != counts or self._timer.counts_rows:
            first_message = self._planner.first_message
            growing = [g._replace(first=first_message(g.log, g.positions, g.first)) for g in growing]
            counts = _counts(growing)
        taken = _limited(growing, counts, limit)
        for growth, count, wanted in zip(growing, taken, counts, strict=True):
            # A log with gaps reaches further than its number of messages says.
            last = growth.end if count == wanted else min(growth.end, growth.first + count)
            end.put(*growth.log, Place(growth.positions.incarnation, last))
        return _Plan(end, moves, sum(counts), taken != counts)

    def _place_or_add(
        self,
        log: Log,
        status: LogStatus,
        start: Offsets,
        end: Offsets,
        moves: list[tuple[str, str, Place]],
    ) -> Place | None:
        """The query's place in this log. A new log is added to `end` and `moves`; then None."""
        topic, name = log
        positions = status.positions
        assert positions is not None
        place = start.place(topic, name)
        if place is not None and place.incarnation == positions.incarnation:
            return place
        if self._target is not None and (topic, positions.incarnation) not in self._target:
            return None
        earlier = start.find(topic, positions.incarnation)
        if earlier is not None:
            logger.warning("topic %s on %s is now on %s", topic, earlier, name)
            added = start[topic][earlier]
            self._losses.readable_from(log, added, status)
            end.drop(topic, earlier)
        else:
            if place is not None:
                self._losses.note_replaced(log, place)
            added = Place(positions.incarnation, positions.earliest)
            logger.info("topic %s on %s is new to the query; reading it from %d", *log, added.sequence)
        end.put(topic, name, added)
        moves.append((topic, name, added))
        return None

    def _note_unwanted(self, topic: str, places: dict[str, Place]) -> None:
        """The options no longer name the topic. Its channel stays, in case they do later."""
        option = "topicsPattern" if self._options.topics_pattern is not None else "topics"
        for name, place in places.items():
            self._losses.ends.pop((topic, name), None)
            self._losses.warn_once(
                f"topic {topic} on {name} is no longer read, since option {option} does not name it. The "
                f"query has read it up to {place.sequence}. Its channel {self._options.channel} stays, and "
                "nsqd keeps the messages after that. Delete the channel if nobody needs them"
            )

    # progress

    def committed(self, offsets: Offsets) -> None:
        """Everything before these offsets is in the sink. Raises ChannelOwned."""
        self._channels.settle(offsets.items_flat())

    def report(self) -> Offsets:
        """The ends of the logs at the last poll."""
        offsets = Offsets()
        for (topic, name), place in self._losses.ends.items():
            offsets.put(topic, name, place)
        offsets.query = self._channels.owner or self._new_query
        return offsets

    def behind(self) -> Behind:
        """Messages after the last micro-batch. A log that is not in the offsets counts whole."""
        rows = size = 0
        for (topic, name), last in self._losses.ends.items():
            status = self._peers.status(topic, name)
            if status is None or status.positions is None:
                continue
            place = self._planned.place(topic, name)
            is_added = place is not None and place.incarnation == last.incarnation
            first = place.sequence if place is not None and is_added else status.positions.earliest
            count = self._count(topic, first, last, status.positions)
            rows, size = rows + count, size + int(count * status.positions.bytes_per_message)
        return Behind(size, rows)

    def _count(self, topic: str, first: int, last: Place, positions: Positions) -> int:
        """Messages from `first` to before `last`, at most. The manifest knows the gaps of its
        part."""
        manifest = None
        if positions.has_gaps:
            manifest = self._archived.manifest(topic, last.incarnation, first)
        archived = 0
        if manifest is not None:
            border = min(manifest.end, last.sequence)
            archived = Gaps([*manifest.gaps]).count_messages(first, border)
            first = max(first, border)
        return min(archived + max(0, last.sequence - first), positions.messages)

    # tasks

    def tasks(self, start: Offsets, end: Offsets) -> list[tuple[LogRange, ...]]:
        """The tasks of a micro-batch or a batch. Raises DataLoss, ChannelOwned."""
        return self._planner.tasks(self.ranges(start, end))

    def ranges(self, start: Offsets, end: Offsets) -> list[LogRange]:
        """What a batch reads, cut into ranges for tasks. Raises DataLoss, ChannelOwned."""
        if end.query:
            self._note_written(end)
        if end.began is not None and (start != end or start.began != end.began):
            # After a restart Spark may have asked for the initial offsets again, and got other
            # ones.
            start = end.began
        if any(self._peers.status(topic, name) is None for topic, name, _ in end.items_flat()):
            # After a restart Spark repeats a batch before it asks for anything else.
            self._peers.poll((topic, name) for topic, name, _ in end.items_flat())
        wanted = unread(start, end)
        ranges = self._planner.ranges(wanted)
        if end.query:
            self._channels.settle((topic, name, first) for topic, name, first, _ in wanted)
        return ranges


def _counts(growing: list[_Growth]) -> list[int]:
    """Messages that each log has for the batch, at most."""
    return [min(max(0, g.end - g.first), g.positions.messages) for g in growing]


def _limited(growing: list[_Growth], counts: list[int], limit: Limit) -> list[int]:
    """Messages to take of each log: the limit, shared out in proportion to what each has."""
    if limit.rows is not None:
        counts = share(counts, limit.rows)
    if limit.bytes is not None:
        sizes = [g.positions.bytes_per_message or GUESSED_BYTES for g in growing]
        wanted = [int(n * size) for n, size in zip(counts, sizes, strict=True)]
        if sum(wanted) > limit.bytes:
            parts = share(wanted, limit.bytes)
            # At least one message, however big. Otherwise the query would never advance.
            counts = [min(n, max(1, int(p / s))) for n, p, s in zip(counts, parts, sizes, strict=True)]
    return counts
