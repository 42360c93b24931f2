"""The driver's part of queue mode: when a batch starts, and how many messages each node gives to
it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from nsparq.addresses import join_address, split_address
from nsparq.errors import NsparqError
from nsparq.spark.cluster.api import Client, valid_answer
from nsparq.spark.cluster.http_client import Refused, Unreachable
from nsparq.spark.cluster.nodes import Cluster, Node
from nsparq.spark.options import NsqOptions
from nsparq.spark.queue.staging import Staging
from nsparq.spark.queue.task import QueuePartition
from nsparq.spark.trigger import BatchTimer, Limit

__all__ = ["Backlog", "QueuePlanner", "Take", "share", "tcp_address"]

logger = logging.getLogger(__name__)

SLOT_ROWS: Final = 5_000
"""Rows that justify another connection."""
ROW_BYTES: Final = 36
"""Size of a row besides its body."""
POLL_S: Final = 0.02
"""First pause between two polls. It grows up to option pollInterval."""
ANSWER_S: Final = 3.0
"""Limit on the time for an answer about a backlog, even if requestTimeout is longer."""
RETRY_S: Final = (0.2, 5.0)
"""Shortest and longest pause before asking a node again that was away, or gave no messages."""
GIVE_UP_S: Final = 2.0
"""With trigger availableNow: the query does not wait for a node whose pause is longer."""
TIMEOUT_SLACK_S: Final = 6.0
"""Delay with which NSQ's nsqd may requeue a timed-out message."""

Place = tuple[str, str]
"""A topic and the name of a node."""
Take = dict[str, dict[str, list[int]]]
"""Limit of rows for each connection, by topic and node."""


class Backlog(NamedTuple):
    depth: int
    """Messages that wait in the channel."""
    row_bytes: float
    """Average size of a message; 0 if unknown."""
    in_topic: int = 0
    """Messages that the topic has not passed to the channel yet."""
    in_flight: int = 0
    """Messages that a consumer has and that come back unless they are finished."""


@dataclass(slots=True)
class _Pause:
    """A growing pause before a node is asked again."""

    until: float = 0.0
    step: float = 0.0

    def extend(self) -> None:
        first, most = RETRY_S
        self.step = min(max(first, self.step * 2), most)
        self.until = time.monotonic() + self.step


def _is_over(pause: _Pause | None) -> bool:
    return pause is None or time.monotonic() >= pause.until


class QueuePlanner:
    """What the driver knows while the query runs."""

    def __init__(self, options: NsqOptions, staging: Staging, is_available_now: bool) -> None:
        assert options.channel is not None
        self._options = options
        self._channel = options.channel
        self._staging = staging
        # A node that does not answer must not delay the others.
        self.cluster = Cluster(
            replace(options, request_timeout=min(ANSWER_S, options.request_timeout or ANSWER_S))
        )
        self.backlogs: dict[Place, Backlog] = {}
        """By the last poll."""
        self._is_available_now = is_available_now
        self._timer = BatchTimer.of(options, time.monotonic)
        self._allowed: dict[Place, int] | None = None
        """With trigger availableNow: messages from before the start that are still to be taken."""
        self._nodes: dict[str, Node] = {}
        self._topics: dict[str, frozenset[str]] = {}
        """Names of the nodes that have a topic, by topic."""
        self._look_at = 0.0
        self._poll_pause = POLL_S
        self._away: dict[str, _Pause] = {}
        """Nodes that did not answer, by name."""
        self._barren: dict[Place, _Pause] = {}
        """Nodes that reported messages and then gave none."""
        self._noted = -1
        self._gained_at = time.monotonic()

    def look(self) -> None:
        """Find the nodes, and create missing channels."""
        began = time.monotonic()
        found = self.cluster.look()
        # Waiting for daemons that do not answer must not take most of the time.
        ended = time.monotonic()
        self._look_at = ended + max(self._options.discovery_interval, 10 * (ended - began))
        if found.is_complete:
            self._nodes, self._topics = found.nodes, found.topics
        else:
            # Nodes that are missing in an incomplete answer may still be there.
            self._nodes = {**self._nodes, **found.nodes}
            for topic, names in found.topics.items():
                self._topics[topic] = names | self._topics.get(topic, frozenset())
        self._poll()

    def plan(self, limit: Limit, wait: float) -> Take:
        """How many messages the next batch takes from each node; empty if none arrive in time."""
        deadline = time.monotonic() + wait
        was_empty = False
        while True:
            if time.monotonic() >= self._look_at or not self._nodes:
                self.look()
            else:
                self._poll()
            available = self._available()
            rows = self._limited(limit, available) if available else 0
            if available and self._may_start(limit, available, rows):
                self._poll_pause = POLL_S
                self._timer.start()
                return share(available, rows, self._options.connections_per_node)
            if time.monotonic() >= deadline and not self._may_still_come():
                if was_empty or not self._owed():
                    return {}
                # Poll again: messages may have left the topic after the channel's depth was read.
                was_empty = True
                continue
            was_empty = False
            time.sleep(max(POLL_S, min(self._poll_pause, deadline - time.monotonic())))
            self._poll_pause = min(self._poll_pause * 1.5, max(POLL_S, self._options.poll_interval))

    def _may_start(self, limit: Limit, available: Mapping[Place, Backlog], rows: int) -> bool:
        """A full batch is not delayed, nor are batches of a query that ends by itself."""
        total = sum(backlog.depth for backlog in available.values())
        is_ending = self._is_available_now or limit.is_everything
        return is_ending or rows < total or self._timer.may_start(total)

    def _poll(self) -> None:
        self.backlogs = {}
        for topic, names in sorted(self._topics.items()):
            for name in sorted(names & self._nodes.keys()):
                if not _is_over(self._away.get(name)) or not _is_over(self._barren.get((topic, name))):
                    continue
                try:
                    backlog = self._backlog(topic, self._nodes[name])
                except Unreachable as error:
                    self._set_aside(name, error)
                except Refused as refused:
                    if refused.status in (401, 403):
                        raise
                    self._set_aside(name, refused)
                else:
                    if backlog is not None:
                        self.backlogs[topic, name] = backlog
                    if self._away.pop(name, None):
                        logger.info("%s answers again", name)

    def _backlog(self, topic: str, node: Node) -> Backlog | None:
        """None if the topic was deleted. A topic that the options name is created again."""
        client = self.cluster.client(node)
        found = self._found_backlog(client, topic)
        if found is not None:
            return found
        if self._options.topics_pattern is not None and not client.stats(topic):
            return None
        logger.info("%s: created channel %s of topic %s", node.name, self._channel, topic)
        client.create_channel(topic, self._channel)
        return self._found_backlog(client, topic) or Backlog(0, 0.0)

    def _found_backlog(self, client: Client, topic: str) -> Backlog | None:
        topics = client.stats(topic, self._channel)
        with valid_answer():
            for found in topics:
                for channel in found["channels"] or ():
                    if (found["topic_name"], channel["channel_name"]) == (topic, self._channel):
                        return _backlog_of(found, channel)
        return None

    def _set_aside(self, name: str, error: NsparqError) -> None:
        if name not in self._away:
            logger.warning("%s is left out until it answers again: %s", name, error)
        self._away.setdefault(name, _Pause()).extend()

    def note_result(self, batch: int, take: Take) -> None:
        """After a batch: do not ask a node again at once that reported messages but gave none."""
        if batch == self._noted:
            return
        self._noted = batch
        for place, slots in _slots(take).items():
            planned = take[place[0]][place[1]]
            found = [self._staging.rows(batch, slot) for slot in slots]
            rows = sum(most if some is None else some for some, most in zip(found, planned, strict=True))
            if rows:
                self._gained_at = time.monotonic()
                self._barren.pop(place, None)
            else:
                self._barren.setdefault(place, _Pause()).extend()
            if self._allowed is not None and place in self._allowed:
                self._allowed[place] -= rows

    def _available(self) -> dict[Place, Backlog]:
        if self._is_available_now and self._allowed is None:
            self._allowed = self._present()
        found = {place: backlog for place, backlog in self.backlogs.items() if backlog.depth}
        if self._allowed is None:
            return found
        return {
            place: backlog._replace(depth=min(backlog.depth, self._allowed[place]))
            for place, backlog in found.items()
            if self._allowed.get(place, 0) > 0
        }

    def _present(self) -> dict[Place, int]:
        """How many messages there are now, including those that the topic has not passed to the
        channel.

        Rather too many than too few: the topic's depth is read before the channel's, so messages
        passed on in between count twice, and one is added for the message that the topic holds
        while it passes it on.
        """
        before = self.backlogs
        self._poll()
        return {
            place: backlog.depth + (topic.in_topic + 1 if topic.in_topic else 0)
            for place, backlog in self.backlogs.items()
            if (topic := before.get(place, backlog))
        }

    def _owed(self) -> list[Place]:
        """With trigger availableNow: nodes that still have messages from before the start."""
        return [place for place, count in (self._allowed or {}).items() if count > 0]

    def _may_still_come(self) -> bool:
        """With trigger availableNow: whether messages from before the start may still arrive: from
        the topic, after a failed task, or from a node that has not failed often."""
        patience = self._options.message_timeout + TIMEOUT_SLACK_S
        is_patient = time.monotonic() < self._gained_at + patience
        for place in self._owed():
            pause = self._barren.get(place) or self._away.get(place[1])
            if pause is not None and pause.step < GIVE_UP_S:
                return True
            backlog = self.backlogs.get(place)
            if backlog is not None and (backlog.in_topic or backlog.in_flight) and is_patient:
                return True
        return False

    def _limited(self, limit: Limit, available: Mapping[Place, Backlog]) -> int:
        """Rows that the batch may have."""
        total = sum(backlog.depth for backlog in available.values())
        rows = total if limit.rows is None else min(total, limit.rows)
        if self._options.max_bytes_per_trigger:
            size = sum(backlog.depth * backlog.row_bytes for backlog in available.values()) / total
            if size:
                rows = min(rows, max(1, int(self._options.max_bytes_per_trigger / size)))
        return rows

    def partitions(self, batch: int, take: Take) -> Iterator[QueuePartition]:
        if not self._nodes:
            # Spark repeats a batch from before a restart.
            self.look()
        slots = _slots(take)
        count = sum(map(len, slots.values()))
        for (topic, name), numbers in slots.items():
            node = self._nodes.get(name)
            backlog = self.backlogs.get((topic, name))
            for number, rows in zip(numbers, take[topic][name], strict=True):
                yield QueuePartition(
                    batch=batch,
                    slot=number,
                    topic=topic,
                    node=name,
                    address=tcp_address(node) if node else "",
                    rows=rows,
                    row_bytes=backlog.row_bytes if backlog else 0.0,
                    max_bytes=ceil((self._options.max_bytes_per_trigger or 0) / count),
                )


def _backlog_of(topic: Mapping[str, Any], channel: Mapping[str, Any]) -> Backlog:
    """From a topic and a channel in /stats."""
    count, size = int(topic["message_count"]), int(topic.get("message_bytes") or 0)
    row_bytes = ROW_BYTES + size / count if count and size else 0.0
    if channel["paused"]:
        return Backlog(0, row_bytes)
    return Backlog(
        depth=max(0, int(channel["depth"])),
        row_bytes=row_bytes,
        in_topic=0 if topic["paused"] else max(0, int(topic["depth"])),
        in_flight=max(0, int(channel["in_flight_count"])),
    )


def _slots(take: Take) -> dict[Place, range]:
    """Slot numbers of each place, counted in the order of the offset."""
    found: dict[Place, range] = {}
    next = 0
    for topic in sorted(take):
        for node in sorted(take[topic]):
            found[topic, node] = range(next, next + len(take[topic][node]))
            next += len(take[topic][node])
    return found


def share(available: Mapping[Place, Backlog], rows: int, connections: int) -> Take:
    """Share `rows` out in proportion to the backlogs, at least one row for each."""
    total = sum(backlog.depth for backlog in available.values())
    take: Take = {}
    for (topic, node), backlog in available.items():
        part = max(1, backlog.depth * rows // total)
        slots = min(connections, ceil(part / SLOT_ROWS))
        each, more = divmod(part, slots)
        take.setdefault(topic, {})[node] = [each + (number < more) for number in range(slots)]
    return take


def tcp_address(node: Node) -> str:
    """The node's TCP port, on the host where its HTTP API was reached."""
    found = split_address(node.tcp_address)
    host = urlsplit(node.url).hostname
    return join_address(host, found[1]) if found and host else ""
