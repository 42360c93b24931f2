"""Pages of messages over several nodes: a topic's log forward and back, and what a channel holds.

Each node numbers its messages itself, so a place in a topic is a number for each node. The address
of a page has it: `17@10.0.0.1:4151,9@10.0.0.2:4151`. A filter goes on reading until it has a page
of matches, or has read MAX_SCANNED messages; the next page goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from nsparq.admin.collect.cluster import Cluster
from nsparq.admin.collect.filter import Filter
from nsparq.admin.collect.merge import Node
from nsparq.admin.collect.messages import (
    DEFAULT_COUNT,
    MAX_COUNT,
    STATES,
    ShownMessage,
    peek,
)
from nsparq.errors import NsparqError

__all__ = ["BadPlace", "Page", "Place", "Reason", "Wanted", "browse", "by_reason"]

MAX_SCANNED: Final = 10_000
"""Messages that one page reads to find matches."""
MAX_GROUPED: Final = 2000
"""Messages that are read to count the reasons of dead letters."""
MAX_NODES: Final = 1000
READY: Final = "ready"


class BadPlace(NsparqError):
    """Not a place in a topic. The text is for the user."""


@dataclass(frozen=True, slots=True)
class Place:
    """A sequence number for each node. Nodes that it does not name have no limit."""

    numbers: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises BadPlace."""
        numbers = {}
        for part in text.split(",")[:MAX_NODES] if text else ():
            number, _, node = part.partition("@")
            if not (number.isascii() and number.isdigit() and len(number) < 19 and node):
                raise BadPlace(f"{part!r} is not a place in a topic")
            numbers[node] = int(number)
        return cls(numbers)

    def __str__(self) -> str:
        return ",".join(f"{number}@{node}" for node, number in self.numbers.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which messages to show. Of `before`, `after`, `start` and `time` at most one is given; the
    newest messages otherwise."""

    count: int = DEFAULT_COUNT
    before: Place | None = None
    """Messages before this place."""
    after: Place | None = None
    """Messages from this place on. In a channel: ready ones."""
    start: int | None = None
    """From this sequence number on, on every node."""
    time: str = ""
    """From this time on: Unix seconds or RFC 3339."""
    state: str = ""
    """In a channel: only messages in this state."""
    filter: Filter = field(default_factory=lambda: Filter(""))

    @property
    def is_backward(self) -> bool:
        return self.after is None and self.start is None and not self.time


@dataclass(slots=True)
class Page:
    """Messages to show: of a topic the newest first, of a channel in the order of delivery."""

    messages: list[ShownMessage] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    missing: int = 0
    """Messages lost to a damaged disk."""
    scanned: int = 0
    """Messages that were read to find these."""
    older: Place | None = None
    """`before` of the page with older messages; None if there are none."""
    newer: Place | None = None
    """`after` of the page with newer messages, in a channel with later ones."""
    reasons: list[Reason] = field(default_factory=list)


@dataclass(slots=True)
class Reason:
    """Dead letters with the same reason, origin and topic."""

    text: str
    topic: str
    channel: str
    count: int = 0
    first_ns: int = 0
    last_ns: int = 0


def by_reason(messages: Iterable[ShownMessage]) -> list[Reason]:
    """The dead letters among the messages, by reason, the most frequent first."""
    found: dict[tuple[str, str, str], Reason] = {}
    for one in messages:
        if (letter := one.letter) is None:
            continue
        key = (letter.reason, letter.topic, letter.channel)
        group = found.setdefault(key, Reason(*key, first_ns=one.timestamp_ns))
        group.count += 1
        group.first_ns = min(group.first_ns, one.timestamp_ns)
        group.last_ns = max(group.last_ns, one.timestamp_ns)
    return sorted(found.values(), key=lambda one: -one.count)


async def browse(
    cluster: Cluster,
    nodes: Sequence[Node],
    topic: str,
    channel: str,
    wanted: Wanted,
    *,
    with_reasons: bool = False,
) -> Page:
    """A page of messages. The reasons of dead letters are counted in up to MAX_GROUPED
    messages."""
    walk = _Walk(cluster, nodes, topic, channel, wanted)
    count = max(1, min(wanted.count, MAX_COUNT))
    page = Page(errors=walk.errors)
    read: list[ShownMessage] = []
    is_at_end = False
    while len(page.messages) < count and page.scanned < MAX_SCANNED and not is_at_end:
        run = await walk.next(MAX_COUNT if wanted.filter else count)
        is_at_end = not run
        for one in run:
            walk.go_past(one)
            page.scanned += 1
            read.append(one)
            if wanted.filter.matches(one):
                page.messages.append(one)
                if len(page.messages) == count:
                    break
    page.missing = walk.missing
    onward = None if is_at_end else walk.place
    if channel:
        page.newer = onward if wanted.state in ("", READY) else None
    elif wanted.is_backward:
        page.older, page.newer = onward, wanted.before
    else:
        page.older, page.newer = walk.began, onward
        page.messages.reverse()
    if with_reasons and any(one.letter for one in page.messages):
        while len(read) < MAX_GROUPED and (run := await walk.next(MAX_COUNT)):
            for one in run:
                walk.go_past(one)
            read += run
        page.reasons = by_reason(one for one in read if wanted.filter.matches(one))
    return page


class _Walk:
    """Reads the messages of several nodes in the order of their times."""

    def __init__(
        self, cluster: Cluster, nodes: Sequence[Node], topic: str, channel: str, wanted: Wanted
    ) -> None:
        self._cluster, self._topic, self._channel = cluster, topic, channel
        self._wanted = wanted
        self._is_backward = wanted.is_backward and not channel
        given = wanted.before if self._is_backward else wanted.after
        self._numbers: dict[str, int] = dict(given.numbers) if given else {}
        """How far each node has been read."""
        self._began = dict(self._numbers)
        if wanted.start is not None:
            self._numbers = {node.address: wanted.start for node in nodes}
        self._nodes = [*nodes]
        """Those that have more."""
        self._is_first = True
        self.errors: list[str] = []
        self.missing = 0

    @property
    def place(self) -> Place:
        return Place(dict(self._numbers))

    @property
    def began(self) -> Place:
        """Where the first message was, on each node that has one."""
        return Place(dict(self._began))

    def go_past(self, message: ShownMessage) -> None:
        if self._channel and message.state != READY:
            self._numbers.setdefault(message.node, 0)
            return
        self._began.setdefault(message.node, message.sequence)
        self._numbers[message.node] = message.sequence + (0 if self._is_backward else 1)

    async def next(self, count: int) -> list[ShownMessage]:
        """The next messages, up to `count`; none at the end.

        A node may answer with fewer messages than it has. So only those are in order that come
        before the last message of each answer."""
        answers = await asyncio.gather(*(self._ask(node, count) for node in self._nodes))
        self._is_first = False
        self._nodes = [node for node, answer in zip(self._nodes, answers, strict=True) if answer]
        known = sorted((one for answer in answers for one in answer), key=self._order)
        if not known:
            return []
        edge = min(max(map(self._order, answer)) for answer in answers if answer)
        return [one for one in known if self._order(one)[:2] <= edge[:2]][:count]

    def _order(self, one: ShownMessage) -> tuple[int, int, str, int]:
        if self._is_backward:
            return 0, -one.timestamp_ns, one.node, -one.sequence
        state = STATES.index(one.state) if self._channel and one.state in STATES else len(STATES)
        return state, one.timestamp_ns, one.node, one.sequence

    async def _ask(self, node: Node, count: int) -> list[ShownMessage]:
        number = self._numbers.get(node.address)
        where = self._query(number)
        if where is None:
            return []
        found = await peek(self._cluster, [node], self._topic, self._channel, count=count, **where)
        self.errors += found.errors
        self.missing += found.missing
        # Whatever the node answers, the walk goes on.
        return [one for one in found.messages if self._is_further(one, number)]

    def _query(self, number: int | None) -> dict[str, str] | None:
        """What to ask a node that has been read up to a number; None if it has no more."""
        wanted = self._wanted
        if self._is_backward:
            return {} if number is None else {"before": str(number)}
        if self._channel and self._is_first and wanted.after is None:
            return {"state": wanted.state} if wanted.state else {}
        if self._channel:
            return {"from": str(number or 0)} if wanted.state in ("", READY) else None
        if number is not None:
            return {"from": str(number)}
        return {"time": wanted.time} if wanted.time and self._is_first else None

    def _is_further(self, one: ShownMessage, number: int | None) -> bool:
        is_start = self._is_first and self._wanted.after is None
        if self._channel and not is_start and one.state != READY:
            return False
        if number is None:
            return True
        return one.sequence < number if self._is_backward else one.sequence >= number
