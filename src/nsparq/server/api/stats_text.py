"""/stats as text in NSQ's fixed layout: people read it in a terminal, and scripts parse it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from nsparq.version import version_line

_UNITS = ((3600, "h"), (60, "m"))


def render_stats(stats: dict[str, Any], now_s: float) -> Iterator[str]:
    """The text of /stats in pieces, one for each topic. `stats` is the JSON form of /stats."""
    start_s = stats["start_time"]
    started = datetime.fromtimestamp(start_s).astimezone().isoformat(timespec="seconds")
    lines = [
        version_line("nsqd"),
        f"start_time {started.replace('+00:00', 'Z')}",
        f"uptime {go_duration(now_s - start_s)}",
        "",
        f"Health: {stats['health']}",
    ]
    if "memory" in stats:
        lines += ["", "Memory:"]
        lines += [f"   {name:<25}\t{value}" for name, value in stats["memory"].items()]
    topics = stats["topics"] or []
    lines += ["", "Topics:" if topics else "Topics: None"]
    yield _joined(lines)
    for number, topic in enumerate(topics):
        yield _joined(([""] if number else []) + _topic_lines(topic, now_s))
    producers = stats["producers"] or []
    lines = ["", "Producers:" if producers else "Producers: None"]
    lines += ["   " + _producer(client, now_s) for client in producers]
    yield _joined(lines)


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _topic_lines(topic: dict[str, Any], now_s: float) -> list[str]:
    mark = "*P " if topic["paused"] else "   "
    about = (
        f"{mark}[{topic['topic_name']:<15}] depth: {topic['depth']:<5} be-depth: {topic['backend_depth']:<5} "
        f"msgs: {topic['message_count']:<8} e2e%: {_percentiles(topic)}"
    )
    lines = [about]
    for channel in topic["channels"]:
        mark = "   *P " if channel["paused"] else "      "
        lines.append(
            f"{mark}[{channel['channel_name']:<25}] depth: {channel['depth']:<5} "
            f"be-depth: {channel['backend_depth']:<5} inflt: {channel['in_flight_count']:<4} "
            f"def: {channel['deferred_count']:<4} re-q: {channel['requeue_count']:<5} "
            f"timeout: {channel['timeout_count']:<5} msgs: {channel['message_count']:<8} "
            f"e2e%: {_percentiles(channel)}"
        )
        # On a line of its own, so that scripts find NSQ's lines as they were.
        if channel["depth"]:
            lines.append(f"        oldest: {_lag(channel)}")
        for client in channel["clients"] or []:
            shown = _producer if "pub_counts" in client else _consumer
            lines.append("        " + shown(client, now_s))
    return lines


def _lag(channel: dict[str, Any]) -> str:
    age_s, rate, drain_s = (channel[key] for key in ("oldest_message_age_s", "drain_rate", "drain_time_s"))
    drain = go_duration(round(drain_s)) if drain_s is not None else "unknown" if rate is None else "never"
    return f"{'unknown' if age_s is None else go_duration(round(age_s, 1))} drain: {drain}"


def _consumer(client: dict[str, Any], now_s: float) -> str:
    return (
        f"[{client['version']} {_name(client):<21}] state: {client['state']} "
        f"inflt: {client['in_flight_count']:<4} rdy: {client['ready_count']:<4} "
        f"fin: {client['finish_count']:<8} re-q: {client['requeue_count']:<8} "
        f"msgs: {client['message_count']:<8} connected: {_connected(client, now_s)}"
    )


def _producer(client: dict[str, Any], now_s: float) -> str:
    counts = client.get("pub_counts", ())
    topics = ",".join(f"{entry['topic']}={entry['count']}" for entry in counts)
    total = sum(entry["count"] for entry in counts)
    return (
        f"[{client['version']} {_name(client):<21}] msgs: {total:<8} topics: {topics} "
        f"connected: {_connected(client, now_s)}"
    )


def _name(client: dict[str, Any]) -> str:
    port = client["remote_address"].rpartition(":")[2]
    return " ".join(filter(None, (f"{client['hostname']}:{port}", client["user_agent"])))


def _connected(client: dict[str, Any], now_s: float) -> str:
    return go_duration(int(now_s - client["connect_ts"]))


def _percentiles(shown: dict[str, Any]) -> str:
    found = shown["e2e_processing_latency"]["percentiles"] or []
    return ", ".join(_nanoseconds(entry["value"]) for entry in found)


def _nanoseconds(value: float) -> str:
    for factor, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if value > factor:
            return f"{value / factor:.1f}{unit}"
    return f"{value:.1f}ns"


def go_duration(seconds: float) -> str:
    """A duration in Go's format: 2m33.01473855s, 1h0m0s, 350ms."""
    seconds = max(0.0, round(seconds, 9))
    if seconds == 0:
        return "0s"
    if seconds < 1:
        for factor, unit in ((1e3, "ms"), (1e6, "µs"), (1e9, "ns")):
            if seconds * factor >= 1:
                return f"{_without_zeros(seconds * factor)}{unit}"
    text = ""
    rest = seconds
    for size, unit in _UNITS:
        if text or rest >= size:
            text += f"{int(rest // size)}{unit}"
            rest %= size
    return f"{text}{_without_zeros(rest)}s"


def _without_zeros(number: float) -> str:
    return f"{number:.9f}".rstrip("0").rstrip(".")
