"""/metrics: the daemon's figures in Prometheus' text format.

Written out by hand rather than through prometheus-client, whose registry takes ten times as long for each
sample: a node with 10,000 channels has some 80,000 of them, and the event loop that makes them delivers
messages too. The tests read the result back with prometheus-client's own parser.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import shutil
import sys
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final

from nsparq.http.api import Request, Response
from nsparq.version import NSQ_VERSION, __version__

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic
    from nsparq.broker.transactions import Transactions
    from nsparq.server.daemon import Nsqd

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SLICE: Final = 200
"""Topics and channels written down before others have their turn."""
LAG_INTERVAL_S: Final = 0.5
LAG_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_PAGE: Final = resource.getpagesize()

_TOPIC: Final = {
    "depth": ("gauge", "messages that the topic itself holds", "depth"),
    "backend_depth": ("gauge", "the part of them that is on disk only", "backend_depth"),
    "messages_total": ("counter", "messages published", "message_count"),
    "message_bytes_total": ("counter", "bytes of their bodies", "message_bytes"),
    "paused": ("gauge", "1 while paused", "paused"),
    "dropped_messages_total": ("counter", "messages given up for lack of room", "dropped_count"),
    "corrupt_batches_total": ("counter", "batches of the log that were damaged", "corrupt_batches"),
    "corrupt_messages_total": ("counter", "messages lost to that", "corrupt_messages"),
    "corrupt_files_total": ("counter", "files beside the log that were damaged or missing", "corrupt_files"),
    "log_bytes": ("gauge", "size of the log on disk", "log_bytes"),
}
_CHANNEL: Final = {
    "depth": ("gauge", "messages ready to be sent", "depth"),
    "backend_depth": ("gauge", "the part of them that is on disk only", "backend_depth"),
    "in_flight": ("gauge", "messages sent and not answered", "in_flight_count"),
    "deferred": ("gauge", "messages that wait for their time", "deferred_count"),
    "messages_total": ("counter", "messages that came to the channel", "message_count"),
    "requeued_messages_total": ("counter", "messages that clients put back", "requeue_count"),
    "timed_out_messages_total": ("counter", "messages not answered in time", "timeout_count"),
    "dropped_messages_total": ("counter", "messages given up", "dropped_count"),
    "clients": ("gauge", "connected consumers", "client_count"),
    "paused": ("gauge", "1 while paused", "paused"),
}


class LoopLag:
    """How late the event loop is: the time for which everybody waits."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LAG_BUCKETS) + 1)
        self.sum_s = 0.0

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.record(max(0.0, loop.time() - due))

    def record(self, lag_s: float) -> None:
        self.counts[bisect_left(LAG_BUCKETS, lag_s)] += 1
        self.sum_s += lag_s


class Exposition:
    """Families of samples, each under one heading, in the order in which they were first named."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def family(self, name: str, kind: str, help_text: str) -> list[str]:
        """Where the family's samples go, one line each."""
        lines = self._families.get(name)
        if lines is None:
            lines = self._families[name] = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        return lines

    def add(self, name: str, kind: str, help_text: str, value: float, labels: str = "") -> None:
        self.family(name, kind, help_text).append(f"{name}{labels} {_number(value)}")

    def text(self) -> str:
        return "\n".join("\n".join(lines) for lines in self._families.values()) + "\n"


class Metrics:
    """The figures of one nsqd."""

    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd

    async def handle(self, request: Request) -> Response:
        out = Exposition()
        await self._about_daemon(out)
        now_ns = self._nsqd.broker.monotonic_ns()
        written = 0
        for topic in [*self._nsqd.broker.topics.values()]:
            if written >= SLICE:
                written = 0
                await asyncio.sleep(0)
            if not topic.is_exiting:
                _about_topic(out, topic, now_ns)
                written += 1 + len(topic.channels)
        return Response(body=out.text().encode(), content_type=CONTENT_TYPE)

    async def _about_daemon(self, out: Exposition) -> None:
        nsqd, broker = self._nsqd, self._nsqd.broker
        labels = f'{{version="{__version__}",nsq_version="{NSQ_VERSION}"}}'
        out.add("nsqd_info", "gauge", "which version runs", 1, labels)
        out.add("nsqd_start_time_seconds", "gauge", "when the daemon started", broker.start_s)
        out.add("nsqd_healthy", "gauge", "1 unless /ping says NOK", broker.health.error is None)
        corrupt = "damaged files that belong to no topic: nsqd.dat, and those of transactions"
        out.add("nsqd_corrupt_files_total", "counter", corrupt, broker.corrupt_files)
        out.add("nsqd_topics", "gauge", "topics", len(broker.topics))
        out.add("nsqd_connections", "gauge", "TCP connections", len(nsqd.connections))
        out.add("nsqd_http_connections", "gauge", "HTTP and HTTPS connections", nsqd.http_connection_count)
        _about_transactions(out, broker.transactions)
        disk = await asyncio.to_thread(shutil.disk_usage, broker.data_path.path)
        out.add("nsqd_disk_free_bytes", "gauge", "room left where the messages are kept", disk.free)
        out.add("nsqd_disk_size_bytes", "gauge", "size of that file system", disk.total)
        _about_lag(out, nsqd.lag)
        _about_process(out)


def _about_transactions(out: Exposition, transactions: Transactions) -> None:
    prefix = "nsqd_transactions"
    out.add(
        f"{prefix}_open", "gauge", "transactions that may still be committed", transactions.undecided_count()
    )
    out.add(f"{prefix}_staged_bytes", "gauge", "bytes put aside for them", transactions.staged_bytes())
    out.add(f"{prefix}_committed_total", "counter", "transactions committed", transactions.committed_count)
    out.add(f"{prefix}_aborted_total", "counter", "transactions aborted", transactions.aborted_count)
    out.add(
        f"{prefix}_expired_total",
        "counter",
        "transactions given up by their producers",
        transactions.expired_count,
    )
    out.add(
        f"{prefix}_damaged",
        "gauge",
        "transactions that wait for an operator: see /transaction/resolve",
        len(transactions.damaged()),
    )
    out.add(
        f"{prefix}_lost_messages_total",
        "counter",
        "staged messages that were damaged when they were to be published",
        transactions.lost_messages,
    )


def _about_lag(out: Exposition, lag: LoopLag) -> None:
    name = "nsqd_loop_lag_seconds"
    lines = out.family(name, "histogram", "how late the event loop was, sampled twice a second")
    total = 0
    for bound, count in zip((*LAG_BUCKETS, math.inf), lag.counts, strict=True):
        total += count
        lines.append(f'{name}_bucket{{le="{"+Inf" if bound == math.inf else bound}"}} {total}')
    lines += [f"{name}_sum {_number(lag.sum_s)}", f"{name}_count {total}"]


def _about_process(out: Exposition) -> None:
    """The names that every Prometheus client library uses."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    out.add("process_cpu_seconds_total", "counter", "processor time used", round(cpu_s, 6))
    out.add("process_max_fds", "gauge", "most open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as statm:
            resident = int(statm.read().split()[1]) * _PAGE
        out.add("process_resident_memory_bytes", "gauge", "memory in use", resident)
        out.add("process_open_fds", "gauge", "open files", len(os.listdir("/proc/self/fd")))
    out.add("process_start_time_seconds", "gauge", "when the process started", _START_S)


_START_S: Final = round(time.time(), 3)


def _about_topic(out: Exposition, topic: Topic, now_ns: int) -> None:
    stats = topic.stats("", False, now_ns)
    labels = f'{{topic="{topic.name}"}}'
    _figures(out, "nsqd_topic", _TOPIC, stats, labels)
    _latency(out, "nsqd_topic", stats, f'topic="{topic.name}"')
    for channel in stats["channels"]:
        pair = f'topic="{topic.name}",channel="{channel["channel_name"]}"'
        _figures(out, "nsqd_channel", _CHANNEL, channel, f"{{{pair}}}")
        _latency(out, "nsqd_channel", channel, pair)


def _figures(
    out: Exposition, prefix: str, table: dict[str, tuple[str, str, str]], stats: dict[str, Any], labels: str
) -> None:
    for name, (kind, help_text, key) in table.items():
        full = f"{prefix}_{name}"
        out.family(full, kind, help_text).append(f"{full}{labels} {_number(stats[key])}")


def _latency(out: Exposition, prefix: str, stats: dict[str, Any], pair: str) -> None:
    found = stats["e2e_processing_latency"]
    if not found["percentiles"]:
        return
    name = f"{prefix}_e2e_processing_latency_seconds"
    lines = out.family(name, "gauge", "time from publish to FIN, by quantile")
    for entry in found["percentiles"]:
        value = _number(entry["value"] / 1e9)
        lines.append(f'{name}{{{pair},quantile="{entry["quantile"]}"}} {value}')


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, bool) else repr(value)
