"""The poll loop: asks all nsqds for their /stats every few seconds, for the charts and the
overview.

The interval grows so that polling takes at most a twentieth of the time. gather.py merges the
figures of several nsqds, history.py keeps them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nsparq.admin.collect.cluster import Cluster, Recalled, Unreachable
from nsparq.admin.collect.fields import as_object
from nsparq.admin.collect.gather import CHANNEL, CLIENT, NODE, TOPIC, TOTAL, Gatherer, Parts
from nsparq.admin.collect.history import Table, Trend, steady_clock
from nsparq.admin.collect.merge import Node, NodeStats
from nsparq.admin.collect.replicated import Replicated
from nsparq.admin.collect.upstream import BadStatus, RequestFailed
from nsparq.tasks import cancel_all

__all__ = ["NodeState", "Watch"]

logger = logging.getLogger(__name__)

MOST_BUSY: Final = 20
"""A poll may use at most this fraction of the time: 1/20."""
DETAILS_S: Final = 60.0
"""How often an nsqd is asked for its features and its disk."""
PEAKS: Final = ("depth", "backlog", "in_flight", "deferred", "latency", "median", "age")
FORGET_S: Final = 3600.0
"""How long a node is remembered and asked after it has left nsqlookupd."""
FOLLOWS: Final = "NOT_PRIMARY"
"""In the answer of a former primary. Another node of its cluster has its messages."""
TREND_S: Final = 300.0
LEAST_TREND_S: Final = 60.0
"""Growth and drain time of a channel are measured over TREND_S; soon after the start over less, but
at least over LEAST_TREND_S."""

Key = tuple[str, ...]


@dataclass(slots=True)
class NodeState:
    """The last known state of an nsqd."""

    node: Node
    error: str = ""
    """Why the last poll failed; empty if it worked."""
    since_s: float = 0.0
    """Unix time since when it fails, or works."""
    left_s: float | None = None
    """Unix time since when no nsqlookupd lists it; None while one does."""
    health: str = "OK"
    start_time: int = 0
    replication: Replicated | None = None
    """Its cluster of copies, if it is in one."""
    features: frozenset[str] = frozenset()
    """Paths of its HTTP API beyond NSQ's; none for NSQ's own nsqd."""
    disk_free: int | None = None
    disk_size: int | None = None
    disk_device: str = ""
    """Name of the file system on its machine; empty if unknown."""
    asked_s: float = -math.inf
    """When it was last asked for features and disk."""
    parts: Parts = field(default_factory=Parts)
    """Its counters at the last poll that worked."""

    def has(self, path: str) -> bool:
        return path in self.features

    @property
    def is_gone(self) -> bool:
        """It has left nsqlookupd, and does not answer."""
        return self.left_s is not None and bool(self.error)

    @property
    def is_standby(self) -> bool:
        """It keeps a copy for another node: no nsqlookupd lists it, and that is right."""
        return not self.error and self.replication is not None and not self.replication.is_primary


class Watch:
    """start() and close() once each. The rest may be read at any time, on the loop's thread.

    More than 20 attributes: the tables of the history, and what the last poll found.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        interval_s: float,
        history_bytes: int,
        max_clients: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._cluster = cluster
        self._interval_s = interval_s
        self._clock = clock or steady_clock()
        """Unix time that never jumps."""
        self._max_clients = max_clients
        share = history_bytes // 16
        self.totals = self._table(TOTAL, min(history_bytes, 8 << 20), 1)
        self.nodes_table = self._table(NODE, share)
        self.clients = self._table(CLIENT, share, max_clients)
        self.topics = self._table(TOPIC, share)
        # A topic may have ten channels, and a channel needs twice as much as a topic.
        self.channels = self._table(CHANNEL, history_bytes - 3 * share)
        self._gatherer = Gatherer(self.topics, self.channels, self.clients)
        self.trend = Trend(np.empty(0), np.empty(0), np.empty(0))
        """How the depth of each channel changes, by place."""
        self.nodes: dict[str, NodeState] = {}
        self.errors: list[str] = []
        """Errors of the last poll."""
        self.paused: set[Key] = set()
        """Topics and channels that are paused on any node, as (topic,) and (topic, channel)."""
        self.channels_of: dict[str, list[str]] = {}
        """Channels by topic, both sorted, at the last poll."""
        self.lost: dict[Key, int] = {}
        """Lost messages by topic: to a damaged disk, or for lack of room."""
        self.polled_s = 0.0
        self.took_s = 0.0
        """Processor time of the last poll, roughly."""
        self.number = 0
        """Polls so far."""
        self.on_poll: Callable[[], None] = lambda: None
        """Called after each poll."""
        self._task: asyncio.Task[None] | None = None
        self._polled = asyncio.Condition()

    def _table(self, figures: tuple[str, ...], max_bytes: int, max_series: int = 1 << 30) -> Table:
        return Table(
            figures, poll_s=self._interval_s, peaks=PEAKS, max_bytes=max_bytes, max_series=max_series
        )

    @property
    def interval_s(self) -> float:
        """The current time from poll to poll."""
        return max(self._interval_s, MOST_BUSY * self.took_s)

    @property
    def message_count(self) -> int:
        """Messages of all channels, as their nodes count them."""
        return int(sum(state.parts.channel_counts[:, 0].sum() for state in self.nodes.values()))

    @property
    def unreachable(self) -> int:
        """Nodes that did not answer the last poll."""
        return sum(bool(state.error) for state in self.nodes.values())

    @property
    def tables(self) -> dict[str, Table]:
        return {
            "totals": self.totals,
            "nodes": self.nodes_table,
            "topics": self.topics,
            "channels": self.channels,
            "clients": self.clients,
        }

    @property
    def history_bytes(self) -> int:
        """The most memory that the history of the present series can take."""
        return sum(table.size_bytes for table in self.tables.values())

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await cancel_all([task])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                await self.poll()
            except Exception:
                logger.exception("the poll failed")
            await asyncio.sleep(max(begun + self.interval_s - loop.time(), self._interval_s / 10))

    # Polling

    async def poll(self) -> None:
        """Ask every node, and record the answers."""
        try:
            found = await self._cluster.nodes()
            errors = list(found.errors)
            self._list_nodes(found.value)
        except Unreachable as error:
            # Ask the nodes of the last poll.
            errors = [str(error)]
        states = [*self.nodes.values()]
        begun = time.process_time()
        answers = await asyncio.gather(*(self._ask(state) for state in states))
        self._record(states, answers)
        self.took_s = time.process_time() - begun
        for address, state in [*self.nodes.items()]:
            if state.is_gone and FOLLOWS in state.error:
                del self.nodes[address]
        self.errors = errors + [f"{name}: {one.error}" for name, one in self.nodes.items() if one.error]
        self.number += 1
        async with self._polled:
            self._polled.notify_all()
        self.on_poll()

    def _list_nodes(self, nodes: list[Node]) -> None:
        """nsqlookupd no longer lists a node that has crashed, or that has lost the connection to
        it. The node still has its messages, so it is asked for FORGET_S more."""
        now_s = self._clock()
        listed = {node.address: node for node in nodes}
        for address, state in [*self.nodes.items()]:
            if address in listed:
                continue
            if state.left_s is None:
                state.left_s, state.node = now_s, replace(state.node, remote_addresses=())
            # A node of --nsqd-http-address that does not answer is in the errors.
            if state.node.configured or now_s - state.left_s >= FORGET_S:
                del self.nodes[address]
        for address, node in listed.items():
            state = self.nodes.setdefault(address, NodeState(node, since_s=now_s))
            state.node, state.left_s = node, None

    def recall(self, topic: str) -> list[Recalled]:
        """The nodes that had the topic at the last poll; every node if it is empty."""
        return [
            Recalled(state.node, state.error)
            for state in self.nodes.values()
            if not topic or ((topic,) in state.parts.topics and (topic, True) not in state.node.topics)
        ]

    async def wait_for_first(self) -> None:
        """Returns after the first poll, or after one interval."""
        try:
            async with asyncio.timeout(self._interval_s), self._polled:
                await self._polled.wait_for(lambda: self.number)
        except TimeoutError:
            pass

    async def _ask(self, state: NodeState) -> NodeStats | None:
        node = state.node
        now_s = self._clock()
        try:
            found = await self._cluster.stats([node], clients=state.parts.client_count <= self._max_clients)
        except Unreachable as error:
            reason = "; ".join(error.errors)
            if not state.error:
                state.since_s = now_s
                logger.warning("%s: %s", node.address, reason)
            state.error = reason
            return None
        if state.error:
            state.error, state.since_s = "", now_s
            logger.info("%s: answers again", node.address)
        if now_s - state.asked_s > DETAILS_S:
            # If this fails, features() asks itself, and the next poll asks again.
            with suppress(RequestFailed):
                await self._ask_details(state)
                state.asked_s = now_s
        state.node = found.value[0].node
        return found.value[0]

    async def features(self, node: Node) -> frozenset[str]:
        """The paths of the nsqd's HTTP API; asks the node if needed. Raises RequestFailed."""
        state = self.nodes.get(node.address)
        if state is None or state.asked_s == -math.inf:
            state = state or NodeState(node)
            await self._ask_details(state)
        return state.features

    async def _ask_details(self, state: NodeState) -> None:
        """Raises RequestFailed. NSQ's own nsqd has no /openapi.json: it answers 404."""
        try:
            answer = await self._cluster.get(state.node, "/openapi.json")
            state.features = frozenset(as_object(as_object(answer).get("paths")))
        except BadStatus:
            state.features = frozenset()
        if "/metrics" in state.features:
            await self._ask_disk(state)

    async def _ask_disk(self, state: NodeState) -> None:
        state.disk_free, state.disk_size, state.disk_device = None, None, ""
        with suppress(RequestFailed):
            answer = await self._cluster.ask(state.node, "GET", "/metrics")
            found: dict[str, int] = {}
            for line in answer.body[:65536].decode("utf-8", "replace").splitlines():
                name, _, value = line.partition(" ")
                if name.startswith("nsqd_disk_info{"):
                    state.disk_device = name.partition('device="')[2].partition('"')[0]
                elif name in ("nsqd_disk_free_bytes", "nsqd_disk_size_bytes"):
                    with suppress(ValueError, OverflowError):
                        found[name] = int(float(value))
            state.disk_free = found.get("nsqd_disk_free_bytes")
            state.disk_size = found.get("nsqd_disk_size_bytes")

    # Recording

    def _record(self, states: list[NodeState], answers: list[NodeStats | None]) -> None:
        now_s = self._clock()
        tables = self.tables.values()
        for table in tables:
            table.begin(now_s)
        gathered = self._gatherer
        gathered.begin()
        total = np.zeros(len(TOTAL))
        is_whole = True
        for state, stats in zip(states, answers, strict=True):
            if stats is None:
                if not state.is_gone:
                    is_whole = False
                    gathered.mark_unknown(state.parts)
                figures = np.full(len(NODE), math.nan)
            else:
                state.health, state.start_time = stats.health, stats.start_time
                state.replication = Replicated.parse(stats.replication)
                state.parts, sums = gathered.take(stats, state.parts, now_s)
                total += sums
                is_known = state.disk_free is not None and bool(state.disk_size)
                share = (state.disk_free or 0) / (state.disk_size or 1) if is_known else math.nan
                figures = np.array([*sums[:4], share])
            self.nodes_table.put((state.node.address,), figures)
        gathered.finish()
        ages = self.topics.now[:, self.topics.column["age"]]
        total[-1] = np.fmax.reduce(ages, initial=math.nan)
        self.totals.put((), total if is_whole else np.full(len(TOTAL), math.nan))
        self.paused, self.lost = gathered.paused, gathered.lost
        self.channels_of = gathered.channels_of([state.parts for state in states])
        self.polled_s = now_s
        for table in tables:
            table.commit()
        over_s = max(TREND_S, 4 * self.interval_s)
        self.trend = self.channels.trend("depth", over_s, LEAST_TREND_S)

    def drain_times(self) -> NDArray[np.float64]:
        """For each channel, by place: seconds until nothing waits if its depth goes on falling as
        it does; infinity if it does not fall, 0 if nothing waits, NaN if unknown."""
        depth = self.channels.now[:, self.channels.column["depth"]]
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.where(self.trend.slope < 0, depth / -self.trend.slope, math.inf)
        found[np.isnan(self.trend.slope)] = math.nan
        found[depth == 0] = 0.0
        found[np.isnan(depth)] = math.nan
        return found

    def add_drain(self, channel: dict[str, Any]) -> None:
        """Fill in `drain_rate` and `drain_time_s` of a channel's total, as nsqd does for its
        own."""
        place = self.channels.find((channel["topic_name"], channel["channel_name"]))
        rate = -float(self.trend.slope[place]) if 0 <= place < len(self.trend.slope) else math.nan
        channel["drain_rate"] = None if math.isnan(rate) else round(rate, 3)
        if not channel["depth"]:
            channel["drain_time_s"] = 0.0
        elif rate > 0:
            channel["drain_time_s"] = round(channel["depth"] / rate, 3)
