"""Watching the cluster: every few seconds all nsqds are asked for their figures, which are kept for charts
and for the overview.

How often is bounded by what it costs: at most a twentieth of the time. See `gather` for how figures of
several nsqds become one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from nsparq.admin.collect.cluster import Cluster, Unreachable
from nsparq.admin.collect.gather import CHANNEL, CLIENT, NODE, TOPIC, TOTAL, Gatherer, Parts
from nsparq.admin.collect.history import Table, steady_clock
from nsparq.admin.collect.merge import Node, NodeStats
from nsparq.admin.collect.upstream import AskFailed, Refused

__all__ = ["NodeState", "Watch"]

logger = logging.getLogger(__name__)

MOST_BUSY: Final = 20
"""Asking may take one part in so many of the time."""
DETAILS_S: Final = 60.0
"""How often an nsqd is asked what else it can say: features, room on disk."""
PEAKS: Final = ("depth", "backlog", "in_flight", "deferred", "latency", "median")

Key = tuple[str, ...]


@dataclass(slots=True)
class NodeState:
    """What is known about an nsqd."""

    node: Node
    error: str = ""
    """Why the last poll brought nothing; empty if it did."""
    since_s: float = 0.0
    """When it began to be so, in Unix time."""
    health: str = "OK"
    start_time: int = 0
    features: frozenset[str] = frozenset()
    """Paths of its HTTP API beyond NSQ's; none for NSQ's own nsqd."""
    disk_free: int | None = None
    disk_size: int | None = None
    asked_s: float = -math.inf
    """When it was last asked about those."""
    parts: Parts = field(default_factory=Parts)
    """Its figures at the last poll that brought any."""

    def has(self, path: str) -> bool:
        return path in self.features


class Watch:
    """start() and close() once each. Everything else may be read at any time, on the loop's thread."""

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
        """Unix time that moves evenly."""
        self._max_clients = max_clients
        share = history_bytes // 16
        self.totals = self._table(TOTAL, min(history_bytes, 8 << 20), 1)
        self.nodes_table = self._table(NODE, share)
        self.clients = self._table(CLIENT, share, max_clients)
        self.topics = self._table(TOPIC, share)
        # A topic may have ten of them, and each takes twice as much.
        self.channels = self._table(CHANNEL, history_bytes - 3 * share)
        self._gatherer = Gatherer(self.topics, self.channels, self.clients)
        self.nodes: dict[str, NodeState] = {}
        self.errors: list[str] = []
        """Why the last poll may not be all."""
        self.paused: set[Key] = set()
        """Topics and channels that are paused on some node, as (topic,) and (topic, channel)."""
        self.channels_of: dict[str, list[str]] = {}
        """Channels by topic, sorted, as of the last poll."""
        self.lost: dict[Key, int] = {}
        """Messages that nsqds have lost, by topic: to a damaged disk, or for lack of room."""
        self.polled_s = 0.0
        self.took_s = 0.0
        """Processor time of the last poll, about."""
        self.number = 0
        """Of the last poll, counted from 1."""
        self._task: asyncio.Task[None] | None = None
        self._polled = asyncio.Condition()

    def _table(self, figures: tuple[str, ...], max_bytes: int, max_series: int = 1 << 30) -> Table:
        return Table(
            figures, poll_s=self._interval_s, peaks=PEAKS, max_bytes=max_bytes, max_series=max_series
        )

    @property
    def interval_s(self) -> float:
        """From poll to poll, at present."""
        return max(self._interval_s, MOST_BUSY * self.took_s)

    @property
    def message_count(self) -> int:
        """Messages that all channels have had, as their nodes count them."""
        return int(sum(state.parts.channel_counts[:, 0].sum() for state in self.nodes.values()))

    @property
    def history_bytes(self) -> int:
        """The most that the figures of what is there now can take."""
        tables = (self.totals, self.nodes_table, self.clients, self.topics, self.channels)
        return sum(table.size_bytes for table in tables)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                await self.poll()
            except Exception:
                logger.exception("gathering figures failed")
            await asyncio.sleep(max(begun + self.interval_s - loop.time(), self._interval_s / 10))

    # Polling

    async def poll(self) -> None:
        """Ask everybody, and take down what they say."""
        try:
            found = await self._cluster.nodes()
            nodes, errors = found.value, list(found.errors)
        except Unreachable as error:
            # Who was there before is asked all the same.
            nodes, errors = [state.node for state in self.nodes.values()], [str(error)]
        now_s = self._clock()
        known = {node.address: node for node in nodes}
        for address in self.nodes.keys() - known.keys():
            del self.nodes[address]
        for address, node in known.items():
            self.nodes.setdefault(address, NodeState(node, since_s=now_s)).node = node
        states = [self.nodes[address] for address in known]
        begun = time.process_time()
        answers = await asyncio.gather(*(self._ask(state) for state in states))
        self._take(states, answers)
        self.took_s = time.process_time() - begun
        self.errors = errors + [f"{state.node.address}: {state.error}" for state in states if state.error]
        self.number += 1
        async with self._polled:
            self._polled.notify_all()

    async def wait_for_first(self) -> None:
        """Return when there is something to show, or soon in any case."""
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
            # Without an answer features() asks for itself, and the next poll asks again.
            with suppress(AskFailed):
                await self._ask_details(state)
                state.asked_s = now_s
        return found.value[0]

    async def features(self, node: Node) -> frozenset[str]:
        """What the nsqd can do beyond NSQ's; asked now, if it was not before. Raises AskFailed."""
        state = self.nodes.get(node.address)
        if state is None or state.asked_s == -math.inf:
            state = state or NodeState(node)
            await self._ask_details(state)
        return state.features

    async def _ask_details(self, state: NodeState) -> None:
        """Raises AskFailed. NSQ's own nsqd answers that there is no such path."""
        try:
            said = await self._cluster.get(state.node, "/openapi.json")
            paths = said.get("paths") if isinstance(said, dict) else None
            state.features = frozenset(paths) if isinstance(paths, dict) else frozenset()
        except Refused:
            state.features = frozenset()
        if "/metrics" in state.features:
            state.disk_free, state.disk_size = await self._ask_disk(state.node)

    async def _ask_disk(self, node: Node) -> tuple[int | None, int | None]:
        try:
            answer = await self._cluster.ask(node, "GET", "/metrics")
        except AskFailed:
            return None, None
        found: dict[bytes, int] = {}
        for line in answer.body[:65536].splitlines():
            name, _, value = line.partition(b" ")
            if name in (b"nsqd_disk_free_bytes", b"nsqd_disk_size_bytes"):
                try:
                    found[name] = int(float(value))
                except (ValueError, OverflowError):
                    continue
        return found.get(b"nsqd_disk_free_bytes"), found.get(b"nsqd_disk_size_bytes")

    # Taking down

    def _take(self, states: list[NodeState], answers: list[NodeStats | None]) -> None:
        now_s = self._clock()
        tables = (self.totals, self.nodes_table, self.topics, self.channels, self.clients)
        for table in tables:
            table.begin(now_s)
        gathered = self._gatherer
        gathered.begin()
        total = np.zeros(len(TOTAL))
        is_whole = True
        for state, stats in zip(states, answers, strict=True):
            if stats is None:
                is_whole = False
                gathered.leave_open(state.parts)
                figures = np.full(len(NODE), math.nan)
            else:
                state.health, state.start_time = stats.health, stats.start_time
                state.parts, sums = gathered.take(stats, state.parts, now_s)
                total += sums
                is_known = state.disk_free is not None and bool(state.disk_size)
                share = (state.disk_free or 0) / (state.disk_size or 1) if is_known else math.nan
                figures = np.array([*sums[:4], share])
            self.nodes_table.put((state.node.address,), figures)
        gathered.finish()
        self.totals.put((), total if is_whole else np.full(len(TOTAL), math.nan))
        self.paused, self.lost = gathered.paused, gathered.lost
        self.channels_of = gathered.channels_of([state.parts for state in states])
        self.polled_s = now_s
        for table in tables:
            table.commit()
