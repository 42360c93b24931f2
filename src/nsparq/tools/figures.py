"""The figures of a cluster, from /stats of its nsqds: rows of topics, channels, nodes and clients.

A row is a plain object with the keys that `--json` prints. Figures of several nsqds are summed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nsparq.tools.cluster import number_in, objects
from nsparq.tools.source import Answers, Source

__all__ = ["Poll", "add_rates", "poll"]

Row = dict[str, Any]

TOPIC_SUMS: Final = ("depth", "backend_depth", "message_count", "message_bytes", "log_bytes")
CHANNEL_SUMS: Final = (
    "depth", "backend_depth", "in_flight_count", "deferred_count", "requeue_count", "timeout_count",
    "message_count", "client_count",
)  # fmt: skip
LAG_KEYS: Final = ("oldest_message_age_s", "drain_time_s")
CLIENT_TEXTS: Final = ("client_id", "hostname", "remote_address", "user_agent")
CLIENT_NUMBERS: Final = (
    "ready_count", "in_flight_count", "message_count", "finish_count", "requeue_count", "connect_ts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Poll:
    """One round of questions."""

    answers: Answers[Mapping[str, Any]]
    """/stats by the address of the nsqd."""
    at: float = field(default_factory=time.monotonic)

    def topics(self) -> list[Row]:
        def begin(name: str) -> Row:
            row: Row = {"topic": name, **dict.fromkeys(TOPIC_SUMS, 0)}
            return row | {
                "channels_depth": 0,
                "deferred_count": 0,
                "channels": 0,
                "paused": False,
                "nodes": 0,
            }

        rows: dict[str, Row] = {}
        channels: dict[str, set[str]] = {}
        for _, topic in self._topics():
            name = str(topic.get("topic_name"))
            row = rows.setdefault(name, begin(name))
            _add(row, topic, TOPIC_SUMS)
            row["paused"] |= topic.get("paused") is True
            row["nodes"] += 1
            for channel in objects(topic, "channels"):
                channels.setdefault(name, set()).add(str(channel.get("channel_name")))
                row["channels_depth"] += _number(channel, "depth")
                row["deferred_count"] += _number(channel, "deferred_count")
        for name, found in channels.items():
            rows[name]["channels"] = len(found)
        return sorted(rows.values(), key=lambda row: row["topic"])

    def channels(self) -> list[Row]:
        rows: dict[tuple[str, str], Row] = {}
        for _, topic in self._topics():
            for channel in objects(topic, "channels"):
                key = str(topic.get("topic_name")), str(channel.get("channel_name"))
                new: Row = {"topic": key[0], "channel": key[1], **dict.fromkeys(CHANNEL_SUMS, 0)}
                row = rows.setdefault(key, new | {"paused": False, "nodes": 0})
                _add(row, channel, CHANNEL_SUMS)
                _add_lag(row, channel)
                row["paused"] |= channel.get("paused") is True
                row["nodes"] += 1
        return sorted(rows.values(), key=lambda row: (row["topic"], row["channel"]))

    def nodes(self) -> list[Row]:
        rows = []
        for address, stats in self.answers.done.items():
            topics = objects(stats, "topics")
            channels = [channel for topic in topics for channel in objects(topic, "channels")]
            waiting = sum(_number(one, "depth") for one in (*topics, *channels))
            rows.append(
                {
                    "node": address,
                    "version": stats.get("version"),
                    "health": stats.get("health"),
                    "uptime_s": max(0, int(time.time()) - _number(stats, "start_time")),
                    "topics": len(topics),
                    "channels": len(channels),
                    "clients": sum(_number(channel, "client_count") for channel in channels),
                    "depth": waiting,
                    "message_count": sum(_number(topic, "message_count") for topic in topics),
                    "log_bytes": sum(_number(topic, "log_bytes") for topic in topics),
                }
            )
        return sorted(rows, key=lambda row: str(row["node"]))

    def clients(self) -> list[Row]:
        return [
            {
                "topic": topic.get("topic_name"),
                "channel": channel.get("channel_name"),
                "node": address,
                **{key: text if isinstance(text := client.get(key), str) else None for key in CLIENT_TEXTS},
                **{key: number_in(client, key) for key in CLIENT_NUMBERS},
            }
            for address, topic in self._topics()
            for channel in objects(topic, "channels")
            for client in objects(channel, "clients")
        ]

    def _topics(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for address, stats in self.answers.done.items():
            for topic in objects(stats, "topics"):
                yield address, topic


def poll(source: Source, topic: str = "", channel: str = "", *, clients: bool = False) -> Poll:
    """Raises AskFailed if no nsqd answers."""
    query = {"format": "json", "include_clients": str(clients).lower(), "include_mem": "false"}
    query |= {name: value for name, value in (("topic", topic), ("channel", channel)) if value}
    return Poll(source.each(source.nsqds(), lambda address: source.ask("GET", address, "/stats", **query)))


RATES: Final[dict[str, Callable[[Row, Row], float]]] = {
    "publish_rate": lambda now, before: now["message_count"] - before["message_count"],
    "finish_rate": lambda now, before: _finished(now) - _finished(before),
    "requeue_rate": lambda now, before: now["requeue_count"] - before["requeue_count"],
    "timeout_rate": lambda now, before: now["timeout_count"] - before["timeout_count"],
}


def add_rates(
    rows: Sequence[Row], before: Iterable[Row], seconds: float, keys: Sequence[str], names: Sequence[str]
) -> None:
    """Add figures per second to rows. `keys` identify a row, `names` are keys of RATES. Without an
    earlier row, or after a restart, which sets the counters back, a rate is None."""
    if not names:
        return
    known = {tuple(row[key] for key in keys): row for row in before}
    for row in rows:
        earlier = known.get(tuple(row[key] for key in keys))
        is_usable = earlier is not None and earlier["message_count"] <= row["message_count"] and seconds > 0
        for name in names:
            change = RATES[name](row, earlier) if is_usable and earlier is not None else None
            row[name] = None if change is None else max(0.0, round(change / seconds, 1))


def _finished(row: Row) -> int:
    left: int = row["depth"] + row["in_flight_count"] + row["deferred_count"]
    return int(row["message_count"]) - left


def _number(values: Mapping[str, Any], key: str) -> int:
    found = number_in(values, key)
    return found if isinstance(found, int) else 0


def _add_lag(row: Row, channel: Mapping[str, Any]) -> None:
    """The oldest message of all nsqds, and the slowest of them. None if one does not know."""
    for key in LAG_KEYS:
        value = number_in(channel, key)
        known = row.get(key, 0.0)
        row[key] = None if value is None or known is None else max(known, value)


def _add(row: Row, values: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        row[key] += _number(values, key)
