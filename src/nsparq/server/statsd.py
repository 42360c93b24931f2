"""Pushes figures to a statsd daemon: NSQ's names, kinds and order, in UDP packets spread over the
interval.

Lost packets are not sent again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final
from weakref import WeakKeyDictionary

from nsparq.addresses import join_address, split_address
from nsparq.broker.broker import Broker
from nsparq.broker.channel import Channel
from nsparq.broker.stats import topic_stats
from nsparq.broker.topic import Topic
from nsparq.names import is_ephemeral
from nsparq.server.memory import memory_stats

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 1.0
"""Time for the name lookup. UDP itself needs no connection."""
TOPICS_PER_TURN: Final = 50
"""Topics to gather figures from before the event loop runs other work."""

_HOST_KEY: Final = str.maketrans(".:", "__")


def expand_prefix(template: str, broadcast_address: str, http_port: int) -> str:
    """`nsq.%s` becomes `nsq.my_host_4151.`. An empty template stays empty."""
    if not template:
        return ""
    prefix = template.replace("%s", join_address(broadcast_address, http_port).translate(_HOST_KEY))
    return prefix if prefix.endswith(".") else prefix + "."


class Statsd:
    """Pushes the broker's figures every `interval` seconds, first after one interval."""

    def __init__(
        self,
        broker: Broker,
        address: str,
        *,
        interval: float,
        prefix: str,
        packet_size: int,
        mem_stats: bool = True,
        exclude_ephemeral: bool = False,
    ) -> None:
        self._broker = broker
        self._address = address
        self._interval = interval
        self._packet_size = packet_size
        self._lines = _Lines(prefix, exclude_ephemeral)
        self._mem_stats = mem_stats
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._is_failing: bool | None = None
        """None until the first push."""

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="statsd")

    async def stop(self) -> None:
        """Send the rest of a push that has begun, and end. Calling it again does nothing."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_push = loop.time()
        while True:
            next_push = max(next_push + self._interval, loop.time())
            await self._pause_until(next_push)
            if self._stopping.is_set():
                return
            try:
                await self._push()
            except Exception:
                logger.exception("STATSD: internal error")

    async def _push(self) -> None:
        endpoint = await self._open()
        if endpoint is None:
            return
        with endpoint:
            packets = [*pack(await self._gather(), self._packet_size)]
            # NSQ leaves the last second of the interval free, and crashes if the interval is 1 s.
            spread = self._interval - 1.0 if self._interval > 1.0 else self._interval / 2
            next_packet = asyncio.get_running_loop().time()
            for packet in packets:
                with suppress(OSError):  # nobody may be listening there
                    endpoint.send(packet)
                next_packet += spread / len(packets)
                await self._pause_until(next_packet)

    async def _gather(self) -> list[bytes]:
        lines: list[bytes] = []
        for count, name in enumerate(sorted(self._broker.topics)):
            topic = self._broker.topics.get(name)
            if topic is not None:
                lines += self._lines.of_topic(topic)
            if count % TOPICS_PER_TURN == TOPICS_PER_TURN - 1:
                await asyncio.sleep(0)
        if self._mem_stats:
            lines += self._lines.of_memory(memory_stats())
        return lines

    async def _open(self) -> socket.socket | None:
        """A socket to the daemon, after a new name lookup. A failure is logged once."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                endpoint = await self._connect()
        except OSError as error:
            if not self._is_failing:
                reason = str(error) or "timed out"
                logger.error("failed to create UDP socket to statsd(%s) - %s", self._address, reason)
            self._is_failing = True
            return None
        if self._is_failing is not False:
            logger.info("STATSD: pushing stats to %s", self._address)
        self._is_failing = False
        return endpoint

    async def _connect(self) -> socket.socket:
        # Not create_datagram_endpoint: uvloop leaves the socket open if connecting fails. And
        # sending needs no waiting, and nothing is received.
        host, port = split_address(self._address) or ("", 0)
        if not port:
            raise OSError("not host:port")
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or "localhost", port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        endpoint = socket.socket(family, kind, protocol)
        try:
            endpoint.setblocking(False)
            endpoint.connect(address)
        except BaseException:
            endpoint.close()
            raise
        return endpoint

    async def _pause_until(self, when: float) -> None:
        """Returns at once if we are stopping."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(when):
                await self._stopping.wait()


class _Lines:
    """The lines of a push. Remembers the counts of the last push by topic and channel objects, not
    by names: a topic that was deleted and created again starts at zero."""

    def __init__(self, prefix: str, exclude_ephemeral: bool) -> None:
        self._prefix = prefix
        self._exclude_ephemeral = exclude_ephemeral
        self._last: WeakKeyDictionary[Topic | Channel, dict[str, int]] = WeakKeyDictionary()
        self._last_runs = 0

    def of_topic(self, topic: Topic) -> Iterator[bytes]:
        """The topic's lines, then those of its channels, sorted by name."""
        if self._is_excluded(topic.name):
            return
        stats = topic_stats(topic)
        key = f"topic.{topic.name}."
        yield from self._counters(key, topic, stats, "message_count", "message_bytes")
        yield from self._gauges(key, stats, "depth", "backend_depth")
        yield from self._latencies(key, stats)
        for of_channel in stats["channels"]:
            name = of_channel["channel_name"]
            if not self._is_excluded(name):
                yield from self._of_channel(f"{key}channel.{name}.", topic.channels[name], of_channel)

    def _of_channel(self, key: str, channel: Channel, stats: dict[str, Any]) -> Iterator[bytes]:
        yield from self._counters(key, channel, stats, "message_count")
        yield from self._gauges(key, stats, "depth", "backend_depth", "in_flight_count", "deferred_count")
        yield from self._counters(key, channel, stats, "requeue_count", "timeout_count")
        yield self._line(f"{key}clients", stats["client_count"], "g")
        yield from self._latencies(key, stats)

    def of_memory(self, stats: dict[str, int]) -> Iterator[bytes]:
        names = [name for name in stats if name != "gc_total_runs"]
        yield from self._gauges("mem.", stats, *names)
        runs = stats["gc_total_runs"]
        yield self._line("mem.gc_runs", runs - self._last_runs, "c")
        self._last_runs = runs

    def _is_excluded(self, name: str) -> bool:
        return self._exclude_ephemeral and is_ephemeral(name)

    def _counters(
        self, key: str, owner: Topic | Channel, stats: dict[str, Any], *names: str
    ) -> Iterator[bytes]:
        last = self._last.setdefault(owner, {})
        for name in names:
            yield self._line(key + name, stats[name] - last.get(name, 0), "c")
            last[name] = stats[name]

    def _gauges(self, key: str, stats: dict[str, Any], *names: str) -> Iterator[bytes]:
        for name in names:
            yield self._line(key + name, stats[name], "g")

    def _latencies(self, key: str, stats: dict[str, Any]) -> Iterator[bytes]:
        for found in stats["e2e_processing_latency"]["percentiles"] or ():
            name = f"{key}e2e_processing_latency_{found['quantile'] * 100:.0f}"
            yield self._line(name, int(found["value"]), "g")

    def _line(self, name: str, value: int, kind: str) -> bytes:
        return f"{self._prefix}{name}:{value}|{kind}\n".encode("utf-8", "surrogateescape")


def pack(lines: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Whole lines in packets of at most `size` bytes. A longer line gets its own packet."""
    packet = b""
    for line in lines:
        if packet and len(packet) + len(line) > size:
            yield packet
            packet = b""
        packet += line
    if packet:
        yield packet
