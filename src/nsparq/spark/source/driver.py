"""The driver's side of reading logs: how far a micro-batch goes, into which ranges it is cut, what is gone.

Spark calls from one thread, and an exception ends the query. So a node that is away is no error: its place
stays where it is until it answers. What the offsets say is the only truth about what has been read.

Rule 1: rows come only from a log that both offsets of a batch name. A log that is new is entered first, in
one batch, and read from the next one on: where it was begun is on record before a row of it is out.
Rule 2: the channel is moved to `start`, which the sink has committed, whenever Spark asks how far it may go.
Rule 3: what is lost is judged before a channel is moved or created. Otherwise the next start would find
everything in order, and go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import ceil
from typing import Final, NamedTuple
from uuid import uuid4

from nsparq.spark.cluster.channels import Channels
from nsparq.spark.cluster.http_client import Chunk, Positions, Refused, Unreachable
from nsparq.spark.cluster.peers import Log, Peers, View
from nsparq.spark.errors import DataLoss, NoAnswer
from nsparq.spark.hold import Hold
from nsparq.spark.options import NsqOptions, OptionError
from nsparq.spark.source.filters import Filters
from nsparq.spark.source.plan import (
    RANGE_COST,
    Stretch,
    begins_epoch,
    find_time,
    join,
    piece_bytes,
    share,
    split,
)
from nsparq.spark.source.positions import EARLIEST, LATEST, Offsets, Place, Rule, Rules
from nsparq.spark.source.range_reader import LogRange
from nsparq.storage.batch import decode_head

__all__ = ["Limit", "LogSource"]

logger = logging.getLogger(__name__)

IDLE_S: Final = 1.0
"""How long to wait for messages before telling Spark that there are none."""
FIRST_STEP_S: Final = 0.004
LAST_STEP_S: Final = 0.05
"""Between a look that found nothing and the next one, for which the nodes wait until something is new."""
HELD_STEP_S: Final = 0.2
"""Between two looks while messages wait for more to come."""
GUESSED_BYTES: Final = 256.0
"""Of a message, where nsqd does not know."""


class Limit(NamedTuple):
    """How much a micro-batch may hold."""

    rows: int | None = None
    bytes: int | None = None
    is_everything: bool = False
    """All there is is asked for, at once."""

    @property
    def is_bounded(self) -> bool:
        return self.rows is not None or self.bytes is not None


class Behind(NamedTuple):
    """What is published and in no micro-batch yet, as far as nsqd has said."""

    bytes: int
    """About."""
    rows: int
    """At most: there may be gaps in the numbers."""


class _Growth(NamedTuple):
    """What a log has to offer."""

    log: Log
    positions: Positions
    first: int
    end: int


class _Plan(NamedTuple):
    """How far a micro-batch would go now."""

    end: Offsets
    moves: list[tuple[str, str, Place]]
    """Channels to be moved or created then, beside those in the offsets that it starts from."""
    waiting: int = 0
    """Rows that could be read, at most: more than are in it, if there is a limit."""
    is_full: bool = False
    """A limit has cut it short."""


class LogSource:
    """The logs that a query reads: one object for each run of it. Without a channel, for a batch."""

    def __init__(
        self,
        options: NsqOptions,
        *,
        interval: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`interval` is the least time between two micro-batches that are not full."""
        self._options = options
        self._is_wanted = options.topic_filter()
        self._clock, self._sleep = clock, sleep
        self._hold = Hold.of(options, clock, interval)
        self._starting = Rules(
            "startingPosition", options.starting_position, ("earliest", "latest", "channel"), EARLIEST
        )
        self._ending = Rules("endingPosition", options.ending_position, ("latest",), LATEST)
        if self._starting.uses("channel") and options.channel is None:
            raise OptionError("option channel is missing: startingPosition is where the channel is")
        self._peers = Peers(options, clock, sleep)
        self._channels = Channels(options.channel or "", self._peers)
        self._ends: dict[Log, Place] = {}
        """Where the logs ended when they were last looked at, by whatever name they had then."""
        self._target: dict[tuple[str, str], int] | None = None
        """Where a query that ends by itself will end, by topic and incarnation."""
        self._new_query = uuid4().hex if options.own_channel and options.channel else ""
        """Who the query is from now on, if its offsets do not say."""
        self._unwritten: Offsets | None = None
        """The beginning, as long as Spark may not have written it down."""
        self._planned = Offsets()
        """Where the last micro-batch ends."""
        self._step = FIRST_STEP_S
        self._told: set[str] = set()

    def close(self) -> None:
        self._peers.close()

    # beginning

    def initial(self) -> Offsets:
        """Where a stream without a checkpoint begins. Its channels are there from now on, and keep what it
        has yet to read. Raises NoAnswer, NoLog, OptionError."""
        offsets = Offsets()
        views = self._peers.ask_everybody(insist=False)
        self._check_named(self._starting, views)
        for (topic, name), view in self._distinct(views):
            positions = view.positions or self._create(topic, name)
            if positions is not None:
                offsets.put(topic, name, self._place(self._starting, topic, name, positions))
        self._channels.begin(offsets.items_flat())
        for topic in self._options.wanted_topics:
            self._peers.cluster.announce(topic, self._options.channel or "")
        offsets.query, offsets.began = self._new_query, offsets.copy()
        self._unwritten = offsets
        return offsets

    def _create(self, topic: str, name: str) -> Positions | None:
        """The topic and our channel, on a node whose own address was given: SUB would do the same."""
        peer = self._peers.answering(name)
        if peer is None or not peer.node.is_given or topic not in self._options.wanted_topics:
            return None
        try:
            peer.client.create_channel(topic, self._options.channel or "")
            return peer.client.positions(topic)
        except (Refused, Unreachable) as error:
            logger.warning("cannot create the topic %s on %s: %s", topic, name, error)
            return None

    def batch(self, filters: Filters | None = None) -> tuple[Offsets, Offsets]:
        """From where to where a batch reads, as far as the filters need it. Raises NoAnswer, NoLog,
        OptionError, DataLoss."""
        filters = filters or Filters()
        start, end = Offsets(), Offsets()
        found: set[str] = set()
        views = self._peers.ask_everybody(insist=True)
        for rules in (self._starting, self._ending):
            self._check_named(rules, views)
        for (topic, name), view in self._distinct(views):
            positions = view.positions
            if positions is None:
                continue
            found.add(topic)
            if not filters.wants(topic, name):
                continue
            first = self._place(self._starting, topic, name, positions)
            last = self._place(self._ending, topic, name, positions)
            self._check_order(topic, name, first, last)
            at_time = partial(self._at_time, topic, name, positions)
            low, high = filters.narrowed(first.sequence, last.sequence, at_time)
            start.put(topic, name, first._replace(sequence=low))
            end.put(topic, name, last._replace(sequence=high))
        for topic in self._options.wanted_topics:
            if topic not in found:
                raise OptionError(f"option topic: no nsqd has a topic {topic}")
        return start, end

    def _check_named(self, rules: Rules, views: dict[Log, View]) -> None:
        """A topic that nobody reads, or that nobody has, is misspelt: its position would mean nothing."""
        there = {topic for (topic, _), view in views.items() if view.positions is not None}
        for topic in rules.topics:
            if not self._is_wanted(topic):
                raise OptionError(
                    f"option {rules.option} names the topic {topic}, which is not among the topics to be read"
                )
            is_named = topic in self._options.wanted_topics
            if topic not in there and not is_named and self._peers.has_heard_everybody:
                raise OptionError(f"option {rules.option} names the topic {topic}, which no nsqd has")

    def _check_order(self, topic: str, name: str, first: Place, last: Place) -> None:
        start, end = self._starting.rule(topic, name), self._ending.rule(topic, name)
        is_before = last.sequence < first.sequence
        if start.time_ns is not None and end.time_ns is not None:
            # There may be no message in between to tell.
            is_before = end.time_ns < start.time_ns
        if is_before:
            raise OptionError(
                f"option endingPosition is before startingPosition: topic {topic} on {name} would end at "
                f"{_shown(end, last)} and begin at {_shown(start, first)}"
            )

    def _place(self, rules: Rules, topic: str, name: str, positions: Positions) -> Place:
        rule, option = rules.rule(topic, name), rules.option
        incarnation = positions.incarnation
        if rule.word == "earliest":
            return Place(incarnation, positions.earliest)
        if rule.word == "latest":
            return Place(incarnation, positions.visible)
        if rule.word == "channel":
            try:
                cursor = self._channels.cursor(topic, name, incarnation)
            except (Refused, Unreachable) as error:
                raise NoAnswer(f"option {option}: the channel cannot be asked for: {error}") from error
            return Place(incarnation, positions.earliest if cursor is None else cursor)
        if rule.time_ns is not None:
            return Place(incarnation, self._at_time(topic, name, positions, rule.time_ns))
        assert rule.sequence is not None
        if rule.incarnation not in (None, incarnation):
            raise OptionError(
                f"option {option}: topic {topic} on {name} is not the log {rule.incarnation} any more; "
                f"it has been deleted and created again"
            )
        if rule.sequence > positions.latest:
            raise OptionError(
                f"option {option}: topic {topic} on {name} ends at {positions.latest}, before {rule.sequence}"
            )
        return Place(incarnation, rule.sequence)

    def _at_time(self, topic: str, name: str, positions: Positions, time_ns: int) -> int:
        def read(sequence: int) -> Stretch:
            chunk = self._probe(topic, name, positions, sequence)
            heads: list[tuple[int, int]] = []
            at = 0
            while chunk is not None and (head := decode_head(chunk.data, at)) is not None:
                heads.append((head.base, head.timestamp_ns))
                at += head.size
            return Stretch(heads, sequence + 1 if chunk is None else chunk.next)

        found = find_time(positions.earliest, positions.visible, time_ns, read)
        return min(found, positions.visible)

    # how far

    def prepare_available_now(self) -> None:
        """Whatever is there now is what the query reads before it ends."""
        self._target = {
            (topic, view.positions.incarnation): view.positions.visible
            for (topic, _), view in self._peers.ask_everybody(insist=False).items()
            if view.positions is not None
        }

    def latest(self, start: Offsets, limit: Limit) -> Offsets:
        """How far the next micro-batch goes: no further than `start` if nothing comes for a while. Raises
        DataLoss, ChannelOwned, NoLog."""
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
            views = self._peers.observe(logs, wait=wait)
            if self._peers.changes != seen:
                seen = self._peers.changes
                plan = self._advance(start, limit, views)
                self.committed(start)
                self._channels.move(plan.moves)
                end = plan.end
                if end != start and not is_beginning:
                    end.began = None
                # Offsets of before do not say whose they are: the next ones do, even if nothing is new.
                end.query = start.query or self._new_query
            if end.query != start.query or (end != start and self._is_due(start, plan, limit)):
                self._step = FIRST_STEP_S
                if plan.waiting:
                    self._hold.begin()
                return end
            is_held = end != start
            if self._target is not None or self._clock() >= deadline:
                # Spark is to notice that the query should stop.
                return start if is_held else end
            # Something may change all the time that is nothing to us: a topic whose channel is paused.
            self._sleep(min(HELD_STEP_S, self._hold.remaining()) if is_held else self._step)
            self._step = min(self._step * 2, LAST_STEP_S)
            # Until held messages are due nobody has to tell us of others.
            wait = 0.0 if is_held else max(0.0, deadline - self._clock())

    def _is_due(self, start: Offsets, plan: _Plan, limit: Limit) -> bool:
        """Whether the batch may begin. Not held back are one that is full, one that enters or leaves a log,
        and those of a query that ends by itself."""
        if self._target is not None or limit.is_everything or plan.is_full:
            return True
        places = [(topic, name, place.incarnation) for topic, name, place in start.items_flat()]
        if places != [(topic, name, place.incarnation) for topic, name, place in plan.end.items_flat()]:
            return True
        return self._hold.is_over(plan.waiting)

    def _note_written(self, offsets: Offsets) -> None:
        """Spark has these offsets in its checkpoint: from now on the channels can be the query's own."""
        self._unwritten = None
        self._channels.owner = offsets.query

    def committed(self, offsets: Offsets) -> None:
        """Everything before is in the sink. Raises ChannelOwned."""
        self._channels.settle(offsets.items_flat())

    def report(self) -> Offsets:
        """Where the logs ended when they were last looked at."""
        offsets = Offsets()
        for (topic, name), place in self._ends.items():
            offsets.put(topic, name, place)
        offsets.query = self._channels.owner or self._new_query
        return offsets

    def behind(self) -> Behind:
        """How much the last micro-batch has left to be read. A log that the query has not entered yet counts
        as a whole."""
        rows = size = 0
        for (topic, name), last in self._ends.items():
            view = self._peers.view(topic, name)
            if view is None or view.positions is None:
                continue
            place = self._planned.place(topic, name)
            is_entered = place is not None and place.incarnation == last.incarnation
            first = place.sequence if place is not None and is_entered else view.positions.earliest
            count = min(max(0, last.sequence - first), view.positions.messages)
            rows, size = rows + count, size + int(count * view.positions.bytes_per_message)
        return Behind(size, rows)

    def _advance(self, start: Offsets, limit: Limit, views: dict[Log, View]) -> _Plan:
        end = start.copy()
        for topic in start:
            if not self._is_wanted(topic):
                self._note_unwanted(topic, end.pop(topic))
        growing: list[_Growth] = []
        moves: list[tuple[str, str, Place]] = []
        for log, view in self._distinct(views, start):
            positions = view.positions
            if positions is None:
                self._note_deleted(log, start, end)
                continue
            place = self._enter(log, view, start, end, moves)
            self._ends[log] = Place(positions.incarnation, positions.visible)
            if place is None:
                continue
            if not view.has_channel:
                moves.append((*log, place))
            if place.sequence > positions.latest:
                end.put(*log, self._back(log, place, positions))
                continue
            first = self._kept(log, place, view)
            visible = self._visible(log, positions)
            if visible > first and not view.is_paused:
                growing.append(_Growth(log, positions, first, visible))
        if limit.is_bounded or self._hold.counts_rows:
            growing = [g._replace(first=self._first_from(g.log, g.positions, g.first)) for g in growing]
        counts = [min(max(0, g.end - g.first), g.positions.messages) for g in growing]
        taken = self._limited(growing, counts, limit) if limit.is_bounded else counts
        for growth, count in zip(growing, taken, strict=True):
            last = min(growth.end, growth.first + count) if limit.is_bounded else growth.end
            end.put(*growth.log, Place(growth.positions.incarnation, last))
        return _Plan(end, moves, sum(counts), taken != counts)

    def _distinct(self, views: dict[Log, View], start: Offsets | None = None) -> list[tuple[Log, View]]:
        """In order, and a log that is seen under two names once only: under the one that `start` has."""
        chosen: dict[tuple[str, str], Log] = {}
        for log, view in sorted(views.items()):
            if view.positions is not None:
                key = log[0], view.positions.incarnation
                if key not in chosen or (start is not None and start.find(*key) == log[1]):
                    chosen[key] = log
        logs = set(chosen.values())
        doubles = [log for log, view in views.items() if view.positions is not None and log not in logs]
        for log in doubles:
            self._tell(f"{log[0]} on {log[1]} is the same log as on another address")
        return [(log, view) for log, view in sorted(views.items()) if log in logs or view.positions is None]

    def _visible(self, log: Log, positions: Positions) -> int:
        if self._target is None:
            return positions.visible
        return self._target.get((log[0], positions.incarnation), 0)

    def _enter(
        self,
        log: Log,
        view: View,
        start: Offsets,
        end: Offsets,
        moves: list[tuple[str, str, Place]],
    ) -> Place | None:
        """Where the query stands in this log. One that is new to it is entered into `end`, its channel is to
        be moved there, and None."""
        topic, name = log
        positions = view.positions
        assert positions is not None
        place = start.place(topic, name)
        if place is not None and place.incarnation == positions.incarnation:
            return place
        if self._target is not None and (topic, positions.incarnation) not in self._target:
            return None
        earlier = start.find(topic, positions.incarnation)
        if earlier is not None:
            logger.warning("what was %s on %s is now on %s", topic, earlier, name)
            entered = start[topic][earlier]
            self._kept(log, entered, view)
            end.drop(topic, earlier)
        else:
            if place is not None:
                self._note_replaced(log, place)
            entered = Place(positions.incarnation, positions.earliest)
            logger.info("%s on %s is new to the query, and read from %d on", topic, name, entered.sequence)
        end.put(topic, name, entered)
        moves.append((topic, name, entered))
        return None

    def _limited(self, growing: list[_Growth], counts: list[int], limit: Limit) -> list[int]:
        """How many messages of each: as far as the limit goes, shared out by how much there is."""
        if limit.rows is not None:
            counts = share(counts, limit.rows)
        if limit.bytes is not None:
            sizes = [g.positions.bytes_per_message or GUESSED_BYTES for g in growing]
            wanted = [int(n * size) for n, size in zip(counts, sizes, strict=True)]
            if sum(wanted) > limit.bytes:
                parts = share(wanted, limit.bytes)
                # One at least, however big: or nothing would ever move.
                counts = [min(n, max(1, int(p / s))) for n, p, s in zip(counts, parts, sizes, strict=True)]
        return counts

    def _note_unwanted(self, topic: str, places: dict[str, Place]) -> None:
        """It was taken out of the options. The channel stays, and is not deleted here: whoever puts the topic
        back in has lost nothing then."""
        option = "topicsPattern" if self._options.topics_pattern is not None else "topics"
        for name, place in places.items():
            self._ends.pop((topic, name), None)
            self._tell(
                f"topic {topic} on {name} is not read any more, since option {option} does not name it: it "
                f"has been read up to {place.sequence}. Its channel {self._options.channel} stays, and nsqd "
                "keeps what comes after that. If nobody needs it, delete the channel"
            )

    # what is gone

    def _lose(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLoss(what)
        self._tell(f"{what}; going on without", logging.ERROR)

    def _tell(self, text: str, level: int = logging.WARNING) -> None:
        """Once."""
        if text not in self._told:
            self._told.add(text)
            logger.log(level, "%s", text)

    def _note_deleted(self, log: Log, start: Offsets, end: Offsets) -> None:
        """The node answers, and does not have the topic."""
        topic, name = log
        place = start.place(topic, name)
        if place is None:
            return
        self._channels.forget(log)
        end.drop(topic, name)
        if self._all_was_read(log, place):
            logger.warning("topic %s on %s has been deleted; all of it had been read", topic, name)
        else:
            self._lose(f"topic {topic} on {name} has been deleted{self._unread(log, place)}")
        self._ends.pop(log, None)

    def _note_replaced(self, log: Log, place: Place) -> None:
        self._channels.forget(log)
        what = f"topic {log[0]} on {log[1]} has been deleted and created again"
        if self._all_was_read(log, place):
            logger.warning("%s; all of it had been read", what)
        else:
            self._lose(what + self._unread(log, place))

    def _all_was_read(self, log: Log, place: Place) -> bool:
        last = self._ends.get(log)
        return last is not None and last.incarnation == place.incarnation and last.sequence <= place.sequence

    def _unread(self, log: Log, place: Place) -> str:
        last = self._ends.get(log)
        if last is None or last.incarnation != place.incarnation:
            return f", perhaps with messages from {place.sequence} on that had not been read"
        return f" with up to {last.sequence - place.sequence} messages that had not been read"

    def _back(self, log: Log, place: Place, positions: Positions) -> Place:
        """The log ends before what has been read: it is an older copy of itself. Goes on at its end."""
        self._lose(
            f"topic {log[0]} on {log[1]} ends at {positions.latest}, and had been read to {place.sequence}"
        )
        return place._replace(sequence=positions.latest)

    def _kept(self, log: Log, place: Place, view: View) -> int:
        """The number to go on from: where the query stands, or where the log begins by now."""
        positions = view.positions
        assert positions is not None
        if place.sequence < positions.earliest:
            self._note_removed(log, place.sequence, positions.earliest, view)
        return max(place.sequence, positions.earliest)

    def _note_removed(self, log: Log, start: int, earliest: int, view: View) -> None:
        """The log begins behind where the query stands. No loss if it has gone on from there after a crash,
        and there is a channel, which keeps what has not been read: then all before it had been."""
        if not (self._is_held(log, view) and begins_epoch(earliest)):
            topic, name = log
            self._lose(
                f"topic {topic} on {name}: up to {earliest - start} messages from {start} on have been "
                "removed before they were read"
            )

    def _is_held(self, log: Log, view: View | None) -> bool:
        if self._options.channel is None:
            return False
        return view is None or (view.has_channel and self._channels.is_ours(log, view.owner))

    # cutting

    def tasks(self, start: Offsets, end: Offsets) -> list[tuple[LogRange, ...]]:
        """The work of a micro-batch, or of a batch. Small ranges share a task: a task costs more than reading
        them. Raises DataLoss."""
        ranges = self.ranges(start, end)
        sizes = [work.size_bytes + RANGE_COST for work in ranges]
        size = piece_bytes(sum(sizes), self._options.partition_bytes)
        return [tuple(ranges[first:last]) for first, last in join(sizes, size)]

    def ranges(self, start: Offsets, end: Offsets) -> list[LogRange]:
        """What there is to read, in pieces that are no more than a task. Raises DataLoss, ChannelOwned."""
        if end.query:
            self._note_written(end)
        if end.began is not None and (start != end or start.began != end.began):
            # Spark may have asked for the beginning again, which is another by now.
            start = end.began
        if any(self._peers.view(topic, name) is None for topic, name, _ in end.items_flat()):
            # A batch that is run again after a restart comes before anything has been asked.
            self._peers.observe((topic, name) for topic, name, _ in end.items_flat())
        wanted: list[tuple[str, str, Place, int]] = []
        for topic, name, last in end.items_flat():
            first = start.place(topic, name)
            if first is None or first.incarnation != last.incarnation:
                earlier = start.find(topic, last.incarnation)
                first = None if earlier is None else start[topic][earlier]
            if first is not None and first.sequence < last.sequence:
                wanted.append((topic, name, first, last.sequence))
        wholes = [self._whole(*one) for one in wanted]
        size = piece_bytes(sum(whole.size_bytes for whole in wholes), self._options.partition_bytes)
        ranges = [work for whole in wholes for work in self._cut(whole, size)]
        if end.query:
            self._channels.settle((topic, name, first) for topic, name, first, _ in wanted)
        return ranges

    def _whole(self, topic: str, name: str, first: Place, end: int) -> LogRange:
        """All that a batch reads of a log, where that is now. If it is away, a task waits for it."""
        where = self._peers.find(topic, first.incarnation, name) or name
        positions = self._positions(topic, where, first.incarnation)
        count = end - first.sequence
        size = GUESSED_BYTES
        if positions is not None:
            count = min(count, positions.messages)
            size = positions.bytes_per_message or GUESSED_BYTES
        url = self._peers.known(where).url
        return LogRange(
            topic,
            name,
            url,
            first.incarnation,
            first.sequence,
            end,
            int(count * size),
            where=where,
            is_held=self._is_held((topic, where), self._peers.view(topic, where)),
        )

    def _cut(self, whole: LogRange, size: int) -> list[LogRange]:
        """Into tasks of so many bytes."""
        log = whole.topic, whole.where
        positions = self._positions(*log, whole.incarnation)
        view = self._peers.view(*log)
        if positions is None or view is None:
            return [whole]
        size_of_one = positions.bytes_per_message or GUESSED_BYTES
        start = self._kept(log, Place(whole.incarnation, whole.start), view)
        first_from = partial(self._known_first_from, log, positions) if _has_gaps(positions) else None
        # Rounded up, or what is left over would be one more task.
        count = max(1, ceil(size / size_of_one))
        try:
            pieces = split(start, whole.end, count, first_from)
        except Unreachable:
            # Nobody says where the gaps are, and cut by numbers alone they would be thousands of tasks.
            return [replace(whole, start=start)]
        first_id = self._first_id(*log, pieces[0][0]) if pieces else None
        return [
            replace(
                whole,
                start=low,
                end=high,
                size_bytes=int(min(high - low, positions.messages) * size_of_one),
                first_id=first_id,
            )
            for low, high in pieces
        ]

    def _positions(self, topic: str, name: str, incarnation: str) -> Positions | None:
        """What was last said about this very log."""
        view = self._peers.view(topic, name)
        positions = view.positions if view is not None else None
        return positions if positions is not None and positions.incarnation == incarnation else None

    def _first_from(self, log: Log, positions: Positions, sequence: int) -> int:
        """The number of the first message at or after one."""
        if not _has_gaps(positions):
            return sequence
        try:
            return self._known_first_from(log, positions, sequence)
        except Unreachable:
            return sequence

    def _known_first_from(self, log: Log, positions: Positions, sequence: int) -> int:
        """Raises Unreachable if nobody can say, DataLoss."""
        chunk = self._probe(*log, positions, sequence)
        if chunk is None:
            raise Unreachable(f"{log[1]} does not answer")
        if chunk.removed_before > sequence:
            # Since the positions were asked for; the channel has been moved since, for instance.
            self._note_removed(log, sequence, chunk.removed_before, self._peers.view(*log) or View(positions))
        return max(sequence, chunk.first)

    def _probe(self, topic: str, name: str, positions: Positions, sequence: int) -> Chunk | None:
        """As little as nsqd hands out at a time, some 64 KiB, from a number on, or from the first that is
        there still. None if it cannot be had."""
        peer = self._peers.answering(name)
        if peer is None:
            return None
        try:
            return peer.client.read(topic, sequence, 1, positions.incarnation)
        except Unreachable as error:
            self._peers.lost(peer, error)
        except Refused as refused:
            earliest = int(refused.details.get("earliest", 0))
            if refused.code == "OFFSET_GONE" and earliest > sequence:
                chunk = self._probe(topic, name, positions, earliest)
                return chunk and chunk._replace(removed_before=max(earliest, chunk.removed_before))
            logger.info("%s on %s at %d: %s", topic, name, sequence, refused)
        return None

    def _first_id(self, topic: str, name: str, sequence: int) -> int | None:
        peer = self._peers.answering(name)
        if peer is not None and peer.first_id is None:
            try:
                peer.first_id = peer.client.first_id(topic, sequence)
            except Unreachable as error:
                self._peers.lost(peer, error)
            except Refused:
                return None
        return peer.first_id if peer is not None else None


def _shown(rule: Rule, place: Place) -> str:
    """A position as the user gave it, and what it came to."""
    if rule.time_ns is not None:
        given = datetime.fromtimestamp(rule.time_ns / 1e9, UTC).isoformat()
        return f"{place.sequence} ({given})"
    return f"{place.sequence} ({rule.word})" if rule.word else str(place.sequence)


def _has_gaps(positions: Positions) -> bool:
    return positions.messages != positions.latest - positions.earliest
