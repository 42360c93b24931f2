"""GET /metrics: the daemon's figures in Prometheus' text format."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final

from nsparq.broker.stats import topic_stats
from nsparq.http.api import Endpoint, Request, Response
from nsparq.http.metrics import Exposition, add_process, number
from nsparq.version import NSQ_VERSION, __version__

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic
    from nsparq.broker.transactions import Transactions
    from nsparq.server.archiving import Archiving
    from nsparq.server.daemon import Nsqd

SLICE: Final = 200
"""Topics and channels to write before the event loop runs other work."""
LAG_INTERVAL_S: Final = 0.5
LAG_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

_TOPIC: Final = {
    "depth": ("gauge", "messages that no channel has received", "depth"),
    "backend_depth": ("gauge", "messages that are only on disk", "backend_depth"),
    "messages_total": ("counter", "messages published", "message_count"),
    "message_bytes_total": ("counter", "bytes of the messages published", "message_bytes"),
    "paused": ("gauge", "1 while paused", "paused"),
    "dropped_messages_total": ("counter", "messages dropped for lack of space", "dropped_count"),
    "corrupt_batches_total": ("counter", "damaged batches of the log", "corrupt_batches"),
    "corrupt_messages_total": ("counter", "messages lost in damaged batches", "corrupt_messages"),
    "corrupt_files_total": ("counter", "damaged or missing files other than the log", "corrupt_files"),
    "log_bytes": ("gauge", "size of the log on disk", "log_bytes"),
    "repeated_messages_total": (
        "counter",
        "messages published again by idempotent producers, and not stored",
        "repeated_count",
    ),
}
_ARCHIVE: Final = {
    "segments": ("gauge", "log files in the archive", "segments"),
    "bytes": ("gauge", "bytes of the log in the archive", "bytes"),
    "waiting_segments": ("gauge", "sealed log files that are not in the archive yet", "waiting_segments"),
    "waiting_bytes": ("gauge", "bytes of them", "waiting_bytes"),
    "oldest_waiting_age_seconds": (
        "gauge",
        "time since the last message of the oldest of them was published",
        "oldest_waiting_age_s",
    ),
    "failing": ("gauge", "1 while nsqd cannot write to the archive", "failing"),
}
_CHANNEL: Final = {
    "depth": ("gauge", "messages ready to be sent", "depth"),
    "backend_depth": ("gauge", "messages that are only on disk", "backend_depth"),
    "in_flight": ("gauge", "messages sent and not finished", "in_flight_count"),
    "deferred": ("gauge", "deferred messages", "deferred_count"),
    "parked": ("gauge", "messages of the depth that wait for their keys", "parked_count"),
    "messages_total": ("counter", "messages that the channel received", "message_count"),
    "requeued_messages_total": ("counter", "messages requeued by clients", "requeue_count"),
    "timed_out_messages_total": ("counter", "messages that timed out", "timeout_count"),
    "dropped_messages_total": ("counter", "messages dropped", "dropped_count"),
    "dead_letters_total": ("counter", "messages given up by the policy", "dead_letter_count"),
    "expired_messages_total": ("counter", "messages dropped because of their age", "expired_count"),
    "clients": ("gauge", "connected consumers", "client_count"),
    "paused": ("gauge", "1 while paused", "paused"),
}


class LoopLag:
    """How late the event loop runs its timers."""

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


class MetricsApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd

    @Endpoint(
        method="GET",
        path="/metrics",
        summary="Get the figures for Prometheus.",
        permission="read",
        success="the text exposition format",
        success_type="text/plain",
    )
    async def read(self, request: Request) -> Response:
        out = Exposition()
        await self._add_daemon(out)
        written = 0
        for topic in [*self._nsqd.broker.topics.values()]:
            if written >= SLICE:
                written = 0
                await asyncio.sleep(0)
            if not topic.is_exiting:
                _add_topic(out, topic)
                written += 1 + len(topic.channels)
        return out.response()

    async def _add_daemon(self, out: Exposition) -> None:
        nsqd, broker = self._nsqd, self._nsqd.broker
        labels = f'{{version="{__version__}",nsq_version="{NSQ_VERSION}"}}'
        out.add("nsqd_info", "gauge", "version of the daemon", 1, labels)
        out.add("nsqd_start_time_seconds", "gauge", "start of the daemon, Unix time", broker.start_s)
        out.add("nsqd_healthy", "gauge", "1 unless /ping says NOK", broker.health.error is None)
        corrupt = "damaged files of no topic: nsqd.dat and transactions"
        out.add("nsqd_corrupt_files_total", "counter", corrupt, broker.corrupt_files)
        out.add("nsqd_topics", "gauge", "topics", len(broker.topics))
        out.add("nsqd_connections", "gauge", "TCP connections", len(nsqd.connections))
        out.add("nsqd_http_connections", "gauge", "HTTP and HTTPS connections", nsqd.http_connection_count)
        if nsqd.replication is not None:
            nsqd.replication.state.add_metrics(out)
        _add_transactions(out, broker.transactions)
        path = broker.data_path.path
        disk, device = await asyncio.to_thread(lambda: (shutil.disk_usage(path), os.stat(path).st_dev))
        named = f'{{device="{os.major(device)}:{os.minor(device)}"}}'
        out.add("nsqd_disk_info", "gauge", "the data path's file system, by device number", 1, named)
        out.add("nsqd_disk_free_bytes", "gauge", "free space of the data path's file system", disk.free)
        out.add("nsqd_disk_size_bytes", "gauge", "size of the data path's file system", disk.total)
        if nsqd.archiving is not None:
            _add_archive(out, nsqd.archiving)
        _add_lag(out, nsqd.lag)
        add_process(out)


def _add_transactions(out: Exposition, transactions: Transactions) -> None:
    for name, kind, help_text, value in (
        ("open", "gauge", "transactions that are not committed yet", transactions.undecided_count()),
        ("staged_bytes", "gauge", "bytes staged for open transactions", transactions.staged_bytes()),
        ("committed_total", "counter", "transactions committed", transactions.committed_count),
        ("aborted_total", "counter", "transactions aborted", transactions.aborted_count),
        ("expired_total", "counter", "transactions that expired", transactions.expired_count),
        ("damaged", "gauge", "transactions that need /transaction/resolve", len(transactions.damaged())),
        ("lost_messages_total", "counter", "staged messages lost to damage", transactions.lost_messages),
    ):
        out.add(f"nsqd_transactions_{name}", kind, help_text, value)


def _add_archive(out: Exposition, archiving: Archiving) -> None:
    cache = archiving.cache
    for name, kind, help_text, value in (
        ("sent_bytes_total", "counter", "bytes of log files sent to the archive", archiving.sent_bytes),
        ("sent_segments_total", "counter", "log files sent to the archive", archiving.sent_segments),
        ("fetched_bytes_total", "counter", "bytes of log files read back", cache.fetched_bytes),
        ("fetched_segments_total", "counter", "log files read back", cache.fetched_segments),
        ("fetch_failing", "gauge", "1 while nsqd cannot read from the archive", bool(cache.error)),
        ("cache_bytes", "gauge", "size of the copies of log files read back", cache.size_bytes),
    ):
        out.add(f"nsqd_archive_{name}", kind, help_text, value)


def _add_lag(out: Exposition, lag: LoopLag) -> None:
    name = "nsqd_loop_lag_seconds"
    lines = out.family(name, "histogram", "lateness of the event loop, sampled twice a second")
    total = 0
    for bound, count in zip((*LAG_BUCKETS, math.inf), lag.counts, strict=True):
        total += count
        lines.append(f'{name}_bucket{{le="{"+Inf" if bound == math.inf else bound}"}} {total}')
    lines += [f"{name}_sum {number(lag.sum_s)}", f"{name}_count {total}"]


def _add_topic(out: Exposition, topic: Topic) -> None:
    stats = topic_stats(topic)
    labels = f'{{topic="{topic.name}"}}'
    _figures(out, "nsqd_topic", _TOPIC, stats, labels)
    if stats["archive"] is not None:
        archive = {**stats["archive"], "failing": bool(stats["archive"]["error"])}
        _figures(out, "nsqd_topic_archive", _ARCHIVE, archive, labels)
    _latency(out, "nsqd_topic", stats, f'topic="{topic.name}"')
    for channel in stats["channels"]:
        pair = f'topic="{topic.name}",channel="{channel["channel_name"]}"'
        _figures(out, "nsqd_channel", _CHANNEL, channel, f"{{{pair}}}")
        _latency(out, "nsqd_channel", channel, pair)
        _lag(out, channel, f"{{{pair}}}")


def _figures(
    out: Exposition, prefix: str, table: dict[str, tuple[str, str, str]], stats: dict[str, Any], labels: str
) -> None:
    for name, (kind, help_text, key) in table.items():
        full = f"{prefix}_{name}"
        out.family(full, kind, help_text).append(f"{full}{labels} {number(stats[key])}")


def _latency(out: Exposition, prefix: str, stats: dict[str, Any], pair: str) -> None:
    found = stats["e2e_processing_latency"]
    if not found["percentiles"]:
        return
    name = f"{prefix}_e2e_processing_latency_seconds"
    lines = out.family(name, "summary", "time from publish to FIN, by quantile")
    for entry in found["percentiles"]:
        value = number(entry["value"] / 1e9)
        lines.append(f'{name}{{{pair},quantile="{entry["quantile"]}"}} {value}')


def _lag(out: Exposition, channel: dict[str, Any], labels: str) -> None:
    """Unknown figures have no sample. A channel that does not drain takes forever."""
    age_s, drain_s = channel["oldest_message_age_s"], channel["drain_time_s"]
    if age_s is not None:
        name = "nsqd_channel_oldest_message_age_seconds"
        out.add(name, "gauge", "time since the oldest waiting message was published", age_s, labels)
    if drain_s is not None or channel["drain_rate"] is not None:
        name = "nsqd_channel_drain_time_seconds"
        value = math.inf if drain_s is None else drain_s
        out.add(name, "gauge", "time until nothing waits at the current rate", value, labels)
