"""Shows messages without delivering them. Changes neither topic nor channel, nor the cache.

The messages are chosen at once, from memory. A thread then reads the bodies (see
storage.log_range), so that a slow disk does not block the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge, nsmallest
from itertools import islice
from typing import Final, NamedTuple

from nsparq.broker.channel import Channel
from nsparq.broker.topic import Topic
from nsparq.headers import decode_headers
from nsparq.storage.log_range import LogRange, OffsetGone
from nsparq.storage.raw_batch import RawBatch, find_batch, iter_batches

IN_FLIGHT: Final = "in_flight"
REQUEUED: Final = "requeued"
DEFERRED: Final = "deferred"
READY: Final = "ready"
STORED: Final = "stored"
STATES: Final = (IN_FLIGHT, REQUEUED, DEFERRED, READY)
"""States of a channel's unfinished messages."""

BODY_LIMIT: Final = 64 << 10
"""Default for the bytes shown of a body."""


@dataclass(frozen=True, slots=True)
class PeekedMessage:
    """A message, for display."""

    id: str
    """16 hex digits, as clients get it."""
    sequence: int
    timestamp_ns: int
    attempts: int
    """Deliveries so far."""
    state: str
    """One of STATES. STORED for a message of a topic's log, whatever the channels did with it."""
    due_ns: int | None
    """When a deferred message is due."""
    deadline_ns: int | None
    """When a message in flight times out."""
    client: str
    """The address of the client that has it in flight."""
    body: bytes
    """Only the beginning, if it is long."""
    size: int
    """Bytes of the whole body."""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def shown_bytes(self) -> int:
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers.items())


class _Wanted(NamedTuple):
    sequence: int
    state: str
    attempts: int = 0
    due_ns: int | None = None
    deadline_ns: int | None = None
    client: str = ""


class Peek:
    """Chosen messages. Call read() once, in any thread."""

    def __init__(
        self,
        first_id: int,
        walk: Walk,
        max_bytes: int,
        body_limit: int,
        *,
        keeps_last: bool = False,
        is_remote: bool = False,
    ) -> None:
        self.is_remote = is_remote
        """Whether read() waits for an archive."""
        self.missing = 0
        """Chosen messages that are lost to damage."""
        self._first_id = first_id
        self._walk = walk
        self._max_bytes = max_bytes
        self._body_limit = body_limit
        self._keeps_last = keeps_last

    def read(self) -> list[PeekedMessage]:
        """The messages in order, up to `max_bytes` of bodies and headers, but at least one: the
        first of them, or the last."""
        found: deque[PeekedMessage] = deque()
        size = 0
        for wanted, batch in self._walk(self):
            message = _to_show(self._first_id, wanted, batch, self._body_limit)
            size += message.shown_bytes
            if found and size > self._max_bytes and not self._keeps_last:
                break
            found.append(message)
            while size > self._max_bytes and len(found) > 1:
                size -= found.popleft().shown_bytes
        return [*found]


Walk = Callable[[Peek], Iterator[tuple[_Wanted, RawBatch]]]
"""Reads the chosen messages one by one, and counts the missing ones."""


def peek_topic(
    topic: Topic,
    sequence: int | None,
    count: int,
    max_bytes: int,
    body_limit: int = BODY_LIMIT,
    *,
    before: int | None = None,
) -> Peek:
    """Up to `count` messages of the log from `sequence` on. If it is None: the newest ones, or the
    last ones before `before`. Raises OffsetGone or OffsetAhead."""
    log = topic.log
    is_backward = sequence is None
    end = log.end if before is None else max(log.start, min(before, log.end))
    start = max(log.start, log.gaps.back(end, count)) if sequence is None else sequence
    ranges: list[LogRange] = []
    size, reached = 0, start
    # Backward, `max_bytes` limits what is kept, not how far the reading goes.
    while not ranges or (
        log.count(start, reached) < count and reached < end and (is_backward or size <= max_bytes)
    ):
        ranges.append(log.locate(reached, 1))
        size += ranges[-1].size
        reached = ranges[-1].next

    def walk(peek: Peek) -> Iterator[tuple[_Wanted, RawBatch]]:
        for place in ranges:
            verified = place.read_verified()
            for lost in verified.lost:
                peek.missing += max(0, min(lost.next, end) - max(lost.first, start))
            for batch in iter_batches(verified.data):
                for number in range(max(batch.base, start), min(batch.end, end)):
                    if not any(low <= number < high for low, high in place.gaps):
                        yield _Wanted(number, STORED, due_ns=batch.due_ns or None), batch

    return Peek(
        topic.first_id,
        lambda peek: islice(walk(peek), count),
        max_bytes,
        body_limit,
        keeps_last=is_backward,
        is_remote=any(place.is_remote for place in ranges),
    )


def peek_channel(
    channel: Channel,
    states: Sequence[str],
    count: int,
    max_bytes: int,
    body_limit: int = BODY_LIMIT,
    *,
    start: int = 0,
) -> Peek:
    """Up to `count` unfinished messages of the channel, state by state. In flight by number,
    requeued in the order of delivery, deferred by due time, ready from `start` on, or from the
    cursor if that is later."""
    wanted: list[_Wanted] = []
    for state in states:
        wanted += _CHOOSE[state](channel, count - len(wanted), start)
    places: dict[int, LogRange] = {}
    known: LogRange | None = None
    for sequence in sorted(one.sequence for one in wanted):
        if known is None or not known.first <= sequence < known.next:
            try:
                known = channel.locate(sequence)
            except OffsetGone:
                # It was finished or lost long ago. Delivery drops it.
                known = None
                continue
        places[sequence] = known
    chosen = [(one, places[one.sequence]) for one in wanted if one.sequence in places]

    def walk(peek: Peek) -> Iterator[tuple[_Wanted, RawBatch]]:
        known: LogRange | None = None
        batches: list[RawBatch] = []
        for one, place in chosen:
            if place is not known:
                known, batches = place, [*iter_batches(place.read_verified().data)]
            batch = find_batch(batches, one.sequence)
            if batch is None:
                peek.missing += 1
            else:
                yield one, batch

    is_remote = any(place.is_remote for _, place in chosen)
    peek = Peek(channel.topic.first_id, walk, max_bytes, body_limit, is_remote=is_remote)
    peek.missing = len(wanted) - len(chosen)
    return peek


def _in_flight(channel: Channel, count: int, _: int) -> list[_Wanted]:
    runs = nsmallest(count, channel.unfinished.in_flight.runs, key=lambda run: run.low)
    flying = ((sequence, run) for run in runs for sequence in run.unanswered())
    wall_of = channel.topic.broker.wall_of
    return [
        _Wanted(s, IN_FLIGHT, run.attempts, deadline_ns=wall_of(run.deadline_ns), client=run.client.address)
        for s, run in islice(flying, count)
    ]


def _requeued(channel: Channel, count: int, _: int) -> list[_Wanted]:
    return [
        _Wanted(s, REQUEUED, channel.unfinished.attempts_of(s))
        for s in islice(channel.unfinished.requeued, count)
    ]


def _deferred(channel: Channel, count: int, _: int) -> list[_Wanted]:
    due_ns, wall_of = channel.unfinished.deferred.due_ns, channel.topic.broker.wall_of
    soonest = channel.unfinished.deferred.soonest(count)
    return [_Wanted(s, DEFERRED, channel.unfinished.attempts_of(s), wall_of(due_ns[s])) for s in soonest]


def _ready(channel: Channel, count: int, start: int) -> list[_Wanted]:
    """Messages that wait for their keys, too."""
    unfinished = channel.unfinished
    parked = nsmallest(count, (sequence for sequence in unfinished.parked if sequence >= start))
    found = merge(parked, channel.cursor.next_messages(count, start))
    return [_Wanted(s, READY, unfinished.attempts_of(s)) for s in islice(found, count)]


_CHOOSE = {IN_FLIGHT: _in_flight, REQUEUED: _requeued, DEFERRED: _deferred, READY: _ready}


def _to_show(first_id: int, wanted: _Wanted, batch: RawBatch, body_limit: int) -> PeekedMessage:
    message = batch.between(wanted.sequence, wanted.sequence + 1)
    body = message.data
    return PeekedMessage(
        id=f"{first_id + wanted.sequence:016x}",
        timestamp_ns=batch.timestamp_ns,
        body=bytes(body[:body_limit]),
        size=len(body),
        headers=decode_headers(message.blocks()[0]),
        **wanted._asdict(),
    )
