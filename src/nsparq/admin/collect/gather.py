"""Merges the figures of single nsqds into the history tables. Knows no I/O.

A rate is the difference of one nsqd's counter between two polls. So an nsqd that restarts, or does
not answer for a while, makes no jump in the sum. There may be 10,000 channels every few seconds, so
all channels of a node are processed at once, as arrays, and the places of their names are reused
while the names are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nsparq.admin.collect.fields import MAX_NUMBER, number, objects, real, text
from nsparq.admin.collect.history import Places, Table
from nsparq.admin.collect.merge import OLDEST_AGE, NodeStats, archive_of

__all__ = ["CHANNEL", "CLIENT", "NODE", "TOPIC", "TOTAL", "Gatherer", "Parts"]

TOPIC: Final = ("depth", "backlog", "in_flight", "in_rate", "latency", "deferred", "age")
"""`backlog` is the depth of the channels. Rates are per second. `latency` is the highest percentile
that nsqd counts, `median` the lowest, in seconds. `age` is that of the oldest waiting message, in
seconds, of the channel and the node where it is the highest."""
CHANNEL: Final = (
    "depth",
    "in_flight",
    "deferred",
    "clients",
    "in_rate",
    "out_rate",
    "requeue_rate",
    "timeout_rate",
    "latency",
    "median",
    "age",
)
NODE: Final = ("depth", "in_flight", "clients", "in_rate", "disk_free")
"""`disk_free` is a share of the disk's size."""
CLIENT: Final = ("in_flight", "ready", "finish_rate", "requeue_rate")
TOTAL: Final = (
    "depth",
    "in_flight",
    "clients",
    "in_rate",
    "out_rate",
    "requeue_rate",
    "timeout_rate",
    "deferred",
    "age",
)

_CHANNEL_FIELDS: Final = (
    "depth",
    "in_flight_count",
    "deferred_count",
    "client_count",
    "message_count",
    "requeue_count",
    "timeout_count",
)
_TOPIC_FIELDS: Final = ("depth", "message_count")
CLIENT_NAMES: Final = ("hostname", "user_agent", "client_id", "auth_identity")
_CLIENT_FIELDS: Final = ("in_flight_count", "ready_count", "finish_count", "requeue_count")

Key = tuple[str, ...]
Array = NDArray[np.float64]


def _no_places() -> Places:
    return np.empty(0, dtype=np.intp)


@dataclass(slots=True)
class Parts:
    """The counters of one nsqd at one poll, and the places of their series in the tables."""

    time_s: float = -math.inf
    topics: list[Key] = field(default_factory=list)
    topic_places: Places = field(default_factory=_no_places)
    topic_counts: Array = field(default_factory=lambda: np.empty((0, 1)))
    topic_depths: Array = field(default_factory=lambda: np.empty(0))
    """For each topic, its waiting messages: its own and those of its channels."""
    channels: list[Key] = field(default_factory=list)
    channel_places: Places = field(default_factory=_no_places)
    channel_topics: Places = field(default_factory=_no_places)
    """For each channel, the place of its topic."""
    channel_counts: Array = field(default_factory=lambda: np.empty((0, 4)))
    """Messages, requeues, timeouts, and unfinished messages."""
    clients: dict[Key, tuple[float, float]] = field(default_factory=dict)
    client_names: dict[Key, tuple[str, ...]] = field(default_factory=dict)
    """The CLIENT_NAMES of each client, for the search."""
    archives: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By topic, archives with log files that are not there yet, or with an error."""
    client_count: int = 0
    held: float = 0.0
    """Unfinished messages: those of the topics and of all channels."""


class Gatherer:
    """For each poll: begin(), take() or mark_unknown() for each nsqd, finish()."""

    def __init__(self, topics: Table, channels: Table, clients: Table) -> None:
        self._topics, self._channels, self._clients = topics, channels, clients
        self.paused: set[Key] = set()
        self.lost: dict[Key, int] = {}
        self._unknown: list[Parts] = []
        self._listed: dict[str, list[str]] = {}
        self._listed_of: list[list[Key]] = []

    def begin(self) -> None:
        self.paused = set()
        self.lost = {}
        self._unknown = []

    def mark_unknown(self, parts: Parts) -> None:
        """The nsqd has not answered. The sums of its topics and channels are unknown."""
        self._unknown.append(parts)

    def take(self, stats: NodeStats, before: Parts, now_s: float) -> tuple[Parts, Array]:
        """Returns the counters for the next poll, and the nsqd's part of the totals."""
        names: list[Key] = []
        channels: list[Key] = []
        entries: list[Mapping[str, Any]] = []
        owners: list[int] = []
        for place, topic in enumerate(stats.topics):
            name = text(topic, "topic_name")
            names.append((name,))
            for channel in objects(topic, "channels"):
                channels.append((name, text(channel, "channel_name")))
                entries.append(channel)
                owners.append(place)
        parts = Parts(time_s=now_s)
        elapsed_s = now_s - before.time_s
        arrived = self._take_topics(stats.topics, names, parts, before, elapsed_s)
        values = self._take_channels(entries, channels, owners, parts, before, elapsed_s)
        self._take_clients(stats.node.address, entries, channels, parts, before, elapsed_s)
        held = values.sum(axis=0) if len(values) else np.zeros(8)
        parts.client_count = int(held[3])
        own_depth = float(arrived[:, 0].sum()) if len(arrived) else 0.0
        parts.topic_depths = arrived[:, 0] + np.bincount(owners, values[:, 0], minlength=len(names))
        parts.held = own_depth + float(held[:3].sum())
        in_rate = float(arrived[:, 1].sum()) if len(arrived) else 0.0
        return parts, np.array([own_depth + held[0], held[1], held[3], in_rate, *held[5:8], held[2], 0.0])

    def finish(self) -> None:
        for parts in self._unknown:
            self._topics.now[parts.topic_places] = np.nan
            self._channels.now[parts.channel_places] = np.nan

    def channels_of(self, everyone: Sequence[Parts]) -> dict[str, list[str]]:
        """Channel names by topic, both sorted."""
        known = [parts.channels for parts in everyone] + [parts.topics for parts in everyone]
        if known == self._listed_of:
            return self._listed
        listed: dict[str, set[str]] = {}
        for parts in everyone:
            for (name,) in parts.topics:
                listed.setdefault(name, set())
            for topic, channel in parts.channels:
                listed[topic].add(channel)
        self._listed_of = known
        self._listed = {name: sorted(listed[name]) for name in sorted(listed)}
        return self._listed

    # One kind each

    def _take_topics(
        self,
        entries: Sequence[Mapping[str, Any]],
        names: list[Key],
        parts: Parts,
        before: Parts,
        elapsed_s: float,
    ) -> Array:
        """Returns depth and publish rate of each topic."""
        table = self._topics
        is_same = names == before.topics
        parts.topics = before.topics if is_same else names
        parts.topic_places = places = before.topic_places if is_same else table.places(names)
        table.see(places)
        fields = _matrix(entries, _TOPIC_FIELDS)
        parts.topic_counts = fields[:, 1:]
        known = before.topic_counts if is_same else _aligned(names, before.topics, before.topic_counts)
        arrived = _rates(parts.topic_counts, known, elapsed_s)
        latencies = np.array([_latencies(one)[0] for one in entries]) if entries else np.empty(0)
        _add(table.now, places, 0, fields[:, :1])
        _add(table.now, places, 1, np.zeros((len(entries), 2)))
        _add(table.now, places, 3, arrived)
        _add(table.now, places, 5, np.zeros((len(entries), 1)))
        _raise(table.now, places, 4, latencies[:, None])
        for key, one in zip(names, entries, strict=True):
            if one.get("paused") is True:
                self.paused.add(key)
            archive = archive_of(one)
            if archive is not None and (archive["waiting_segments"] or archive["error"]):
                parts.archives[key[0]] = archive
            if gone := number(one, "corrupt_messages") + number(one, "dropped_count"):
                self.lost[key] = self.lost.get(key, 0) + gone
        return np.concatenate([fields[:, :1], arrived], axis=1)

    def _take_channels(
        self,
        entries: Sequence[Mapping[str, Any]],
        names: list[Key],
        owners: list[int],
        parts: Parts,
        before: Parts,
        elapsed_s: float,
    ) -> Array:
        """Returns gauges and rates of each channel."""
        table = self._channels
        is_same = names == before.channels
        parts.channels = before.channels if is_same else names
        parts.channel_places = places = before.channel_places if is_same else table.places(names)
        parts.channel_topics = parts.topic_places[owners] if owners else _no_places()
        table.see(places)
        fields = _matrix(entries, _CHANNEL_FIELDS)
        held = fields[:, :3].sum(axis=1, keepdims=True)
        parts.channel_counts = np.concatenate([fields[:, 4:], held], axis=1)
        known = before.channel_counts if is_same else _aligned(names, before.channels, before.channel_counts)
        rates = _rates(parts.channel_counts[:, :3], known[:, :3], elapsed_s)
        grown = (held - known[:, 3:]) / elapsed_s
        # Messages that came in and are no longer there were finished. Emptying looks the same.
        left = np.maximum(rates[:, :1] - np.nan_to_num(grown), 0.0)
        values = np.concatenate([fields[:, :4], rates[:, :1], left, rates[:, 1:]], axis=1)
        _add(table.now, places, 0, values)
        _raise(table.now, places, 8, np.array([_latencies(one) for one in entries]).reshape(-1, 2))
        ages = np.array([_age(one) for one in entries])
        _raise(table.now, places, 10, ages.reshape(-1, 1))
        np.fmax.at(self._topics.now[:, 6], parts.channel_topics, ages)
        for column, values_of_all in ((1, fields[:, 0]), (2, fields[:, 1]), (5, fields[:, 2])):
            sums = np.bincount(parts.channel_topics, values_of_all, minlength=len(self._topics.now))
            self._topics.now[:, column] += sums
        self.paused.update(key for key, one in zip(names, entries, strict=True) if one.get("paused") is True)
        return values

    def _take_clients(
        self,
        node: str,
        entries: Sequence[Mapping[str, Any]],
        names: list[Key],
        parts: Parts,
        before: Parts,
        elapsed_s: float,
    ) -> None:
        for key, channel in zip(names, entries, strict=True):
            if not channel.get("clients"):
                continue
            for client in objects(channel, "clients"):
                name = (*key, node, text(client, "remote_address"))
                parts.client_names[name] = tuple(text(client, one) for one in CLIENT_NAMES)
                in_flight, ready, *counts = (float(number(client, one)) for one in _CLIENT_FIELDS)
                finished, requeued = parts.clients[name] = (counts[0], counts[1])
                known = before.clients.get(name, (finished, requeued))
                rates = [
                    max(0.0, now - then) / elapsed_s
                    for now, then in zip((finished, requeued), known, strict=True)
                ]
                self._clients.put(name, [in_flight, ready, *rates])


def _matrix(entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Array:
    """A row for each object, a column for each field. A field that is not a number counts as 0."""
    if not entries:
        return np.empty((0, len(names)))
    try:
        found = np.array([*map(itemgetter(*names), entries)], dtype=np.float64)
        # A list in place of a number adds a dimension.
        if found.ndim == 2 and (np.abs(found) <= MAX_NUMBER).all():
            return found
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    return np.array([[number(one, name) for name in names] for one in entries], dtype=np.float64)


def _aligned(names: Iterable[Key], known: Sequence[Key], values: Array) -> Array:
    """The rows of these names; NaN for new names."""
    index = {key: row for row, key in enumerate(known)}
    rows = np.fromiter((index.get(name, -1) for name in names), dtype=np.intp)
    found = np.full((len(rows), values.shape[1]), np.nan)
    found[rows >= 0] = values[rows[rows >= 0]]
    return found


def _rates(now: Array, then: Array, elapsed_s: float) -> Array:
    """A counter that is lower than before was reset by a restart. A new counter has rate 0. After
    the first answer of an nsqd all rates are unknown."""
    if elapsed_s == math.inf:
        return np.full(now.shape, math.nan)
    grown = np.where(now >= then, now - then, now)
    return np.where(np.isnan(then), 0.0, grown) / elapsed_s


def _add(table: Array, places: Places, column: int, values: Array) -> None:
    """Add to the values of other nsqds."""
    columns = slice(column, column + values.shape[1])
    table[places, columns] = np.nan_to_num(table[places, columns]) + values


def _raise(table: Array, places: Places, column: int, values: Array) -> None:
    """Keep the higher of these values and those of other nsqds."""
    columns = slice(column, column + values.shape[1])
    table[places, columns] = np.fmax(table[places, columns], values)


def _age(entry: Mapping[str, Any]) -> float:
    """NaN if nsqd does not know it; NSQ's own nsqd never does."""
    age_s = real(entry, OLDEST_AGE)
    return math.nan if age_s is None else max(0.0, age_s)


_NO_LATENCY: Final = (math.nan, math.nan)


def _latencies(entry: Mapping[str, Any]) -> tuple[float, float]:
    """The highest and the lowest percentile, in seconds; NaN if nsqd counts none."""
    latency = entry.get("e2e_processing_latency")
    if not isinstance(latency, dict) or not latency.get("count") or not latency.get("percentiles"):
        return _NO_LATENCY
    found = sorted(
        (quantile, number(one, "value") / 1e9)
        for one in objects(latency, "percentiles")
        if (quantile := real(one, "quantile")) is not None
    )
    return (found[-1][1], found[0][1]) if found else _NO_LATENCY
