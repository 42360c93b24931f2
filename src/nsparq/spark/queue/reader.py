"""Queue mode: a channel of any nsqd as a stream. The driver's side: when there is a batch, and who takes
what.

An offset counts batches. It also says how much each node gives to the batch, so that a batch which is run
again after a crash is the same one, whatever nodes there are by then:

    {"batch": 7, "staging": "5f0c…", "take": {"events": {"host:4151": [2500, 2500]}}}

What a batch holds is decided when it is first read: see queue_task.py for that, and staging.py for where it
is kept. Batch 0 is the beginning: it takes nothing. Spark runs it if nothing waits when the query starts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from nsparq.addresses import join_address, split_address
from nsparq.client.config import Config
from nsparq.errors import NsparqError
from nsparq.spark.cluster.http_client import Client, Refused, Unreachable
from nsparq.spark.cluster.nodes import Cluster, Node
from nsparq.spark.columns import arrow_schema
from nsparq.spark.hold import Hold
from nsparq.spark.options import NsqOptions, OptionError
from nsparq.spark.queue.staging import Staging
from nsparq.spark.queue.task import QueuePartition, Taking, fill, rows_of
from nsparq.spark.stream_api import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from nsparq.spark.worker import prepare_worker
from nsparq.version import __version__

__all__ = ["QueueStreamReader"]

logger = logging.getLogger(__name__)

DEFAULT_ROWS: Final = 100_000
"""Per micro-batch, if nothing else is said."""
SLOT_ROWS: Final = 5_000
"""Fewer are not worth a second connection."""
ROW_BYTES: Final = 36
"""What a row takes besides its body."""
POLL_S: Final = 0.02
"""How soon nsqd is asked again at first; then less and less often, up to option pollInterval: it may log each
time."""
WAIT_S: Final = 0.5
"""How long the driver waits for messages before it tells Spark that there are none."""
ANSWER_S: Final = 3.0
"""How long an nsqd may take to say how much it has, whatever else it is allowed."""
RETRY_S: Final = (0.2, 5.0)
"""When a node is asked again that was away, or gave nothing: first, and at most."""
GIVE_UP_S: Final = 2.0
"""With trigger AvailableNow: a node that is to be left alone for longer is no longer waited for."""
TIMEOUT_SLACK_S: Final = 6.0
"""NSQ's nsqd may requeue a message that has timed out so much later: it looks at some channels at a time."""

Place = tuple[str, str]
"""Topic, and name of a node."""
Take = dict[str, dict[str, list[int]]]
"""Rows that each connection takes at most, by topic and node."""


class Backlog(NamedTuple):
    depth: int
    """Messages that wait."""
    row_bytes: float
    """About how large one is; 0 if unknown."""
    in_topic: int = 0
    """Messages that the topic has yet to pass on to the channel. NSQ's nsqd moves them one by one."""
    in_flight: int = 0
    """Messages that somebody has, and that come back unless they are finished."""


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See DataSourceStreamReader for who calls what, and when. Everything of the driver is made at its first
    call: tasks get a copy of this object that has only been constructed."""

    def __init__(self, schema: StructType, options: NsqOptions) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        assert options.staging is not None
        self._staging = Staging(options.staging)
        self._driver: _Driver | None = None
        self._is_available_now = False

    # the driver

    def prepareForTriggerAvailableNow(self) -> None:
        """Called before anything else."""
        self._is_available_now = True

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_rows_per_trigger or DEFAULT_ROWS)

    def initialOffset(self) -> dict[str, Any]:
        driver = self._open()
        driver.look()
        return _offset(0, self._staging.identity, {})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        driver = self._open()
        batch, take = self._checked(start)
        driver.note_result(batch, take)
        take = driver.plan(limit, wait=0.0 if self._is_available_now else WAIT_S)
        return _offset(batch + 1, self._staging.identity, take) if take else start

    def reportLatestOffset(self) -> dict[str, Any]:
        """Shown in Spark's progress: how much waits now."""
        depth: dict[str, dict[str, int]] = {}
        for (topic, node), backlog in sorted(self._open().backlogs.items()):
            depth.setdefault(topic, {})[node] = backlog.depth
        return {"depth": depth}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        driver = self._open()
        batch, take = self._checked(end)
        if not batch:
            return []
        self._staging.begin(batch)
        return [*driver.partitions(batch, take)]

    def commit(self, end: dict[str, Any]) -> None:
        self._open()
        self._staging.finish(int(end["batch"]))

    def stop(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.cluster.close()
        self._staging.close()

    def _open(self) -> _Driver:
        if self._driver is None:
            options = self._options
            pattern = options.topics_pattern
            topics = [*options.wanted_topics] if pattern is None else pattern.pattern
            about = {"topics": topics, "channel": options.channel}
            self._staging.open(about)
            self._driver = _Driver(options, self._staging, self._is_available_now)
        return self._driver

    def _checked(self, offset: dict[str, Any]) -> tuple[int, Take]:
        """An offset of the checkpoint. Raises OptionError, StagingError."""
        if not offset.keys() >= {"batch", "staging", "take"}:
            raise OptionError(
                "option mode: this checkpoint was not written in queue mode; give the query a new one"
            )
        batch = int(offset["batch"])
        self._staging.check(str(offset["staging"]), batch)
        return batch, offset["take"]

    # tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, QueuePartition):
            # Spark makes up a partition where there is none.
            return iter(())
        prepare_worker()
        slot = fill(self._staging, partition, taking(self._options))
        return rows_of(slot, self._schema)


def taking(options: NsqOptions) -> Taking:
    assert options.channel is not None
    # What a client can be told; 0 stands for as long as it takes.
    patience = min(max(0.1, options.request_timeout or 60.0), 300.0)
    config = Config(
        client_id="nsparq-spark",
        user_agent=f"nsparq-spark/{__version__}",
        auth_secret=options.auth_token or "",
        auth_secret_for=options.auth_token_for,
        dial_timeout=min(3.0, patience),
        handshake_timeout=patience,
        write_timeout=patience,
        tls_v1=options.tls,
        tls_root_ca_file=options.tls_ca_file or "",
        tls_cert=options.tls_cert_file or "",
        tls_key=options.tls_key_file or options.tls_cert_file or "",
        tls_insecure_skip_verify=not options.tls_verify,
        snappy=options.snappy,
        msg_timeout=options.message_timeout,
        # The least that nsqd allows: at the end of a queue messages wait for nothing else.
        output_buffer_timeout=0.025,
        output_buffer_size=64 << 10,
    )
    return Taking(options.channel, config, options.batch_duration, options.dedupe)


def _offset(batch: int, staging: str, take: Take) -> dict[str, Any]:
    """Spark compares the text: the order of the keys is always the same."""
    ordered = {topic: {node: take[topic][node] for node in sorted(take[topic])} for topic in sorted(take)}
    return {"batch": batch, "staging": staging, "take": ordered}


@dataclass(slots=True)
class _Rest:
    """When a node may be asked again."""

    until: float = 0.0
    step: float = 0.0

    def lengthen(self) -> None:
        first, most = RETRY_S
        self.step = min(max(first, self.step * 2), most)
        self.until = time.monotonic() + self.step


def _is_over(rest: _Rest | None) -> bool:
    return rest is None or time.monotonic() >= rest.until


class _Driver:
    """What the driver knows while the query runs."""

    def __init__(self, options: NsqOptions, staging: Staging, is_available_now: bool) -> None:
        assert options.channel is not None
        self._options = options
        self._channel = options.channel
        self._staging = staging
        # One that does not answer must not keep the others waiting.
        self.cluster = Cluster(
            replace(options, request_timeout=min(ANSWER_S, options.request_timeout or ANSWER_S))
        )
        self.backlogs: dict[Place, Backlog] = {}
        """What waited where when it was last looked at."""
        self._is_available_now = is_available_now
        self._hold = Hold.of(options, time.monotonic)
        self._allowed: dict[Place, int] | None = None
        """With that trigger: what was there at the start, and is still to be taken."""
        self._nodes: dict[str, Node] = {}
        self._topics: dict[str, frozenset[str]] = {}
        """Names of the nodes that have it, by topic."""
        self._look_at = 0.0
        self._pause = POLL_S
        self._away: dict[str, _Rest] = {}
        """Nodes that did not answer, by name."""
        self._barren: dict[Place, _Rest] = {}
        """Nodes that had messages, and then gave none."""
        self._noted = -1
        self._gained_at = time.monotonic()
        """With that trigger: when a batch last had rows."""

    def look(self) -> None:
        """See what nodes there are, and that each has the channel: from then on it keeps messages for us."""
        began = time.monotonic()
        found = self.cluster.look()
        # To wait for somebody who does not answer must not take all the time there is.
        ended = time.monotonic()
        self._look_at = ended + max(self._options.discovery_interval, 10 * (ended - began))
        if found.is_complete:
            self._nodes, self._topics = found.nodes, found.topics
        else:
            # Of those who were not named now, nobody has said that they are gone.
            self._nodes = {**self._nodes, **found.nodes}
            for topic, names in found.topics.items():
                self._topics[topic] = names | self._topics.get(topic, frozenset())
        self._measure()

    def plan(self, limit: ReadLimit, wait: float) -> Take:
        """What the next batch takes; nothing if nothing came in time."""
        deadline = time.monotonic() + wait
        was_nothing = False
        while True:
            if time.monotonic() >= self._look_at or not self._nodes:
                self.look()
            else:
                self._measure()
            available = self._available()
            most = self._most_rows(limit, available) if available else 0
            if available and self._is_due(limit, available, most):
                self._pause = POLL_S
                self._hold.begin()
                return share(available, most, self._options.connections_per_node)
            if time.monotonic() >= deadline and not self._may_still_come():
                if was_nothing or not self._owed():
                    return {}
                # Look again: messages may have left the topic after the channel's depth was taken.
                was_nothing = True
                continue
            was_nothing = False
            time.sleep(max(POLL_S, min(self._pause, deadline - time.monotonic())))
            self._pause = min(self._pause * 1.5, max(POLL_S, self._options.poll_interval))

    def _is_due(self, limit: ReadLimit, available: Mapping[Place, Backlog], most: int) -> bool:
        """Whether the batch may begin. One that is full is not held back, nor are those of a query that ends
        by itself."""
        total = sum(backlog.depth for backlog in available.values())
        is_ending = self._is_available_now or isinstance(limit, ReadAllAvailable)
        return is_ending or most < total or self._hold.is_over(total)

    def _measure(self) -> None:
        """Ask every node for its depth."""
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
        """None if the topic has been deleted there. One that was named is made again, channel and all."""
        client = self.cluster.client(node)
        found = self._found_backlog(client, topic)
        if found is not None:
            return found
        if self._options.topics_pattern is not None and not client.stats(topic):
            return None
        logger.info("%s: channel %s of topic %s is created", node.name, self._channel, topic)
        client.create_channel(topic, self._channel)
        return self._found_backlog(client, topic) or Backlog(0, 0.0)

    def _found_backlog(self, client: Client, topic: str) -> Backlog | None:
        for found in client.stats(topic, self._channel):
            if found["topic_name"] != topic:
                continue
            for channel in found["channels"] or ():
                if channel["channel_name"] == self._channel:
                    return _backlog_of(found, channel)
        return None

    def _set_aside(self, name: str, error: NsparqError) -> None:
        if name not in self._away:
            logger.warning("%s is left out until it answers again: %s", name, error)
        self._away.setdefault(name, _Rest()).lengthen()

    def note_result(self, batch: int, take: Take) -> None:
        """A node that had messages, and then gave none, is not asked again at once: that would be a batch
        without rows, and another, and another."""
        if batch == self._noted:
            return
        self._noted = batch
        for place, slots in _slots(take).items():
            planned = take[place[0]][place[1]]
            found = [self._staging.rows(batch, slot) for slot in slots]
            rows = sum(more if some is None else some for some, more in zip(found, planned, strict=True))
            if rows:
                self._gained_at = time.monotonic()
                self._barren.pop(place, None)
            else:
                self._barren.setdefault(place, _Rest()).lengthen()
            if self._allowed is not None and place in self._allowed:
                self._allowed[place] -= rows

    def _available(self) -> dict[Place, Backlog]:
        found = {place: backlog for place, backlog in self.backlogs.items() if backlog.depth}
        if not self._is_available_now:
            return found
        if self._allowed is None:
            self._allowed = self._present()
            found = {place: backlog for place, backlog in self.backlogs.items() if backlog.depth}
        allowed = self._allowed
        return {
            place: backlog._replace(depth=min(backlog.depth, allowed[place]))
            for place, backlog in found.items()
            if allowed.get(place, 0) > 0
        }

    def _present(self) -> dict[Place, int]:
        """How many messages are there now, on their way from the topic to the channel too. Not fewer than
        there are: the topic is looked at first, and what it passes on until the channel is looked at counts
        twice. While it passes messages on it holds one that no figure has."""
        before = self.backlogs
        self._measure()
        return {
            place: backlog.depth + (topic.in_topic + 1 if topic.in_topic else 0)
            for place, backlog in self.backlogs.items()
            if (topic := before.get(place, backlog))
        }

    def _owed(self) -> list[Place]:
        """With that trigger: who has not given all that was there at the start."""
        return [place for place, count in (self._allowed or {}).items() if count > 0]

    def _may_still_come(self) -> bool:
        """With that trigger: whether messages that were there at the start are still to come. They may be in
        the topic, in flight after a task that failed, or on a node that has not failed us often."""
        patience = self._options.message_timeout + TIMEOUT_SLACK_S
        is_patient = time.monotonic() < self._gained_at + patience
        for place in self._owed():
            rest = self._barren.get(place) or self._away.get(place[1])
            if rest is not None and rest.step < GIVE_UP_S:
                return True
            backlog = self.backlogs.get(place)
            if backlog is not None and (backlog.in_topic or backlog.in_flight) and is_patient:
                return True
        return False

    def _most_rows(self, limit: ReadLimit, available: Mapping[Place, Backlog]) -> int:
        total = sum(backlog.depth for backlog in available.values())
        if isinstance(limit, ReadMaxRows):
            most = min(total, limit.max_rows)
        else:
            assert isinstance(limit, ReadAllAvailable), limit
            most = total
        if self._options.max_bytes_per_trigger:
            size = sum(backlog.depth * backlog.row_bytes for backlog in available.values()) / total
            if size:
                most = min(most, max(1, int(self._options.max_bytes_per_trigger / size)))
        return most

    def partitions(self, batch: int, take: Take) -> Iterator[QueuePartition]:
        if not self._nodes:
            # The batch is from before a restart.
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
    """From what /stats says of a topic and of the channel."""
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
    """The numbers of the slots of each place: counted through, in the order of the offset."""
    found: dict[Place, range] = {}
    next = 0
    for topic in sorted(take):
        for node in sorted(take[topic]):
            found[topic, node] = range(next, next + len(take[topic][node]))
            next += len(take[topic][node])
    return found


def share(available: Mapping[Place, Backlog], most: int, connections: int) -> Take:
    """Who gives how much: as the backlogs are to each other, and everybody something."""
    total = sum(backlog.depth for backlog in available.values())
    take: Take = {}
    for (topic, node), backlog in available.items():
        rows = max(1, backlog.depth * most // total)
        slots = min(connections, ceil(rows / SLOT_ROWS))
        each, more = divmod(rows, slots)
        take.setdefault(topic, {})[node] = [each + (number < more) for number in range(slots)]
    return take


def tcp_address(node: Node) -> str:
    """Where NSQ's own protocol is spoken: on the host at which the node's HTTP API was reached."""
    found = split_address(node.tcp_address)
    host = urlsplit(node.url).hostname
    return join_address(host, found[1]) if found and host else ""
