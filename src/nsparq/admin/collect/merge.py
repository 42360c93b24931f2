"""Merges the /stats of single nsqds into the JSON of NSQ's nsqadmin. Knows no I/O.

The input is not trusted; fields.py reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from nsparq.addresses import join_address
from nsparq.admin.collect.fields import as_object, flag, number, objects, real, text, texts

__all__ = [
    "Node",
    "NodeStats",
    "archive_of",
    "channel_total",
    "mark_out_of_date",
    "node_topic",
    "node_total",
    "topic_total",
]

EVERY_NODE: Final = "*"
LOCAL_COUNTS: Final = ("zone_local_msg_count", "region_local_msg_count", "global_msg_count")
TOPIC_SUMS: Final = ("depth", "memory_depth", "backend_depth", "message_count")
CHANNEL_SUMS: Final = (
    "depth",
    "memory_depth",
    "backend_depth",
    "in_flight_count",
    "deferred_count",
    "requeue_count",
    "timeout_count",
    "message_count",
    "client_count",
)
OLDEST_AGE: Final = "oldest_message_age_s"
LAG: Final = (OLDEST_AGE, "drain_rate", "drain_time_s")
"""Figures of a channel that only nsparq's nsqds have."""
OWN_COUNTS: Final = ("dead_letter_count", "expired_count", "parked_count")
"""Messages that a delivery policy gave up, and those that wait for their keys. Unknown for NSQ's
own nsqds."""
ARCHIVE_COUNTS: Final = ("segments", "bytes", "waiting_segments", "waiting_bytes")
CLIENT_TEXTS: Final = ("remote_address", "version", "client_id", "hostname", "user_agent")
CLIENT_NUMBERS: Final = (
    "in_flight_count",
    "ready_count",
    "finish_count",
    "requeue_count",
    "message_count",
    "sample_rate",
)


@dataclass(frozen=True, slots=True)
class Node:
    """An nsqd, as it announces itself."""

    broadcast_address: str
    hostname: str
    tcp_port: int
    http_port: int
    version: str
    remote_address: str = ""
    remote_addresses: tuple[str, ...] = ()
    """`nsqlookupd's address/address of the connection`, one for each nsqlookupd."""
    topics: tuple[tuple[str, bool], ...] = ()
    """Names of its topics, and whether each is tombstoned."""
    topology_zone: str = ""
    topology_region: str = ""
    configured: str = ""
    """Its address in --nsqd-http-address, if any. It may be reachable only there."""
    out_of_date: bool = False
    start_time: int = 0
    """Unix seconds; 0 from an nsqlookupd, which does not know it."""

    @classmethod
    def parse(cls, fields: Mapping[str, Any], lookupd: str = "") -> Node:
        """From its own /info, or as an nsqlookupd describes it."""
        names = texts(fields, "topics")
        tombstones = fields.get("tombstones")
        dead = [one is True for one in tombstones] if isinstance(tombstones, list) else []
        dead += [False] * (len(names) - len(dead))
        remote = text(fields, "remote_address")
        return cls(
            # Very old nsqds report only `address`.
            broadcast_address=text(fields, "broadcast_address") or text(fields, "address"),
            hostname=text(fields, "hostname"),
            tcp_port=number(fields, "tcp_port"),
            http_port=number(fields, "http_port"),
            version=text(fields, "version"),
            remote_address=remote,
            remote_addresses=(f"{lookupd}/{remote}",) if lookupd else (),
            topics=tuple(sorted(zip(names, dead, strict=False))),
            topology_zone=text(fields, "topology_zone"),
            topology_region=text(fields, "topology_region"),
            start_time=number(fields, "start_time"),
        )

    def joined(self, other: Node) -> Node:
        """One nsqd as two nsqlookupds report it. A topic is tombstoned if either says so."""
        topics = dict(self.topics)
        for name, is_dead in other.topics:
            topics[name] = topics.get(name, False) or is_dead
        return replace(
            self,
            remote_addresses=self.remote_addresses + other.remote_addresses,
            topics=tuple(sorted(topics.items())),
        )

    @property
    def address(self) -> str:
        """Its name everywhere in nsqadmin."""
        return join_address(self.broadcast_address, self.http_port)

    @property
    def tcp_address(self) -> str:
        return join_address(self.broadcast_address, self.tcp_port)

    def as_json(self) -> dict[str, Any]:
        return {
            "remote_addresses": [*self.remote_addresses] or None,
            "remote_address": self.remote_address,
            "hostname": self.hostname,
            "broadcast_address": self.broadcast_address,
            "tcp_port": self.tcp_port,
            "http_port": self.http_port,
            "version": self.version,
            "topics": [{"topic": name, "tombstoned": dead} for name, dead in self.topics] or None,
            "out_of_date": self.out_of_date,
            "topology_zone": self.topology_zone,
            "topology_region": self.topology_region,
        }


@dataclass(frozen=True, slots=True)
class NodeStats:
    """The answer of an nsqd to /stats."""

    node: Node
    topics: Sequence[Mapping[str, Any]]
    health: str = "OK"
    start_time: int = 0
    replication: Mapping[str, Any] = field(default_factory=dict)
    """What a node of a cluster of copies says of it; see replicated.py."""

    @classmethod
    def parse(cls, node: Node, fields: Any) -> NodeStats:
        """A node that no nsqlookupd has described gets its topics from this answer."""
        found = as_object(fields)
        health, topics = text(found, "health") or "OK", objects(found, "topics")
        if node.configured:
            node = replace(node, topics=tuple((text(one, "topic_name"), False) for one in topics))
        return cls(node, topics, health, number(found, "start_time"), as_object(found.get("replication")))

    @property
    def message_count(self) -> int:
        return sum(number(topic, "message_count") for topic in self.topics)

    @property
    def client_count(self) -> int:
        return sum(_client_count(one) for topic in self.topics for one in objects(topic, "channels"))


# One nsqd


def node_total(stats: NodeStats, now_s: float) -> dict[str, Any]:
    """All topics of one nsqd."""
    topics = [node_topic(stats.node, topic, now_s, clients=True) for topic in stats.topics]
    return {
        "node": stats.node.address,
        "topics": topics or None,
        "total_messages": stats.message_count,
        "total_clients": stats.client_count,
    }


def node_topic(
    node: Node, fields: Mapping[str, Any], now_s: float, *, clients: bool = False
) -> dict[str, Any]:
    """A topic on one nsqd, with its channels there."""
    name = text(fields, "topic_name")
    channels = [node_channel(node, name, one, now_s, clients=clients) for one in objects(fields, "channels")]
    local = {key: sum(channel.get(key, 0) for channel in channels) for key in LOCAL_COUNTS}
    return {
        "node": node.address,
        "hostname": node.hostname,
        "topic_name": name,
        **_depths(fields),
        "message_count": number(fields, "message_count"),
        "delivery_msg_count": sum(local.values()),
        **{key: count for key, count in local.items() if count},
        "nodes": None,
        "channels": channels,
        "paused": flag(fields, "paused"),
        "e2e_processing_latency": _node_latency(fields),
        **({"archive": archive} if (archive := archive_of(fields)) else {}),
    }


def archive_of(topic: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an nsqd says of the archive of a topic. None without an archive."""
    found = topic.get("archive")
    if not isinstance(found, dict):
        return None
    return {
        **{name: flag(found, name) for name in ("enabled", "replaced")},
        **{name: number(found, name) for name in ARCHIVE_COUNTS},
        "first_ns": number(found, "first_ns") or None,
        "oldest_waiting_age_s": real(found, "oldest_waiting_age_s") or 0.0,
        "error": text(found, "error"),
    }


def node_channel(
    node: Node, topic: str, fields: Mapping[str, Any], now_s: float, *, clients: bool
) -> dict[str, Any]:
    connected = objects(fields, "clients")
    local = {key: count for key in LOCAL_COUNTS if (count := number(fields, key))}
    delivered = sum(local.values())
    return {
        "node": node.address,
        "hostname": node.hostname,
        "topic_name": topic,
        "channel_name": text(fields, "channel_name"),
        **_depths(fields),
        "in_flight_count": number(fields, "in_flight_count"),
        "deferred_count": number(fields, "deferred_count"),
        "requeue_count": number(fields, "requeue_count"),
        "timeout_count": number(fields, "timeout_count"),
        "message_count": number(fields, "message_count"),
        "client_count": _client_count(fields),
        **({"delivery_msg_count": delivered, **local} if delivered else {}),
        "nodes": None,
        "clients": [_client(node, one, now_s) for one in connected] if clients else None,
        "paused": flag(fields, "paused"),
        "e2e_processing_latency": _node_latency(fields),
        **{name: real(fields, name) for name in LAG},
        **{name: number(fields, name) if name in fields else None for name in OWN_COUNTS},
    }


def _client_count(fields: Mapping[str, Any]) -> int:
    """Of a channel. NSQ before 1.1 has no such count."""
    return number(fields, "client_count") if "client_count" in fields else len(objects(fields, "clients"))


def _depths(fields: Mapping[str, Any]) -> dict[str, int]:
    depth, backend = number(fields, "depth"), number(fields, "backend_depth")
    return {"depth": depth, "memory_depth": depth - backend, "backend_depth": backend}


def _client(node: Node, fields: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    connected_s = number(fields, "connect_ts")
    return {
        "node": node.address,
        **{name: text(fields, name) for name in CLIENT_TEXTS},
        "connect_ts": connected_s,
        "connected": max(0, int(now_s) - connected_s) * 1_000_000_000,
        **{name: number(fields, name) for name in CLIENT_NUMBERS},
        **{key: count for key in LOCAL_COUNTS if (count := number(fields, key))},
        "deflate": flag(fields, "deflate"),
        "snappy": flag(fields, "snappy"),
        "authed": flag(fields, "authed"),
        "auth_identity": text(fields, "auth_identity"),
        "auth_identity_url": text(fields, "auth_identity_url"),
        "topology_zone": text(fields, "topology_zone"),
        "topology_region": text(fields, "topology_region"),
        "node_topology_zone": node.topology_zone,
        "node_topology_region": node.topology_region,
        "tls": flag(fields, "tls"),
        "tls_cipher_suite": text(fields, "tls_cipher_suite"),
        "tls_version": text(fields, "tls_version"),
        "tls_negotiated_protocol": text(fields, "tls_negotiated_protocol"),
        "tls_negotiated_protocol_is_mutual": flag(fields, "tls_negotiated_protocol_is_mutual"),
    }


def _node_latency(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = as_object(fields.get("e2e_processing_latency"))
    count = number(found, "count")
    percentiles = [
        {
            "average": value,
            "count": count,
            "max": value,
            "min": value,
            "quantile": quantile,
            "value": value,
        }
        for entry in objects(found, "percentiles")
        if (quantile := real(entry, "quantile")) is not None
        for value in (number(entry, "value"),)
    ]
    return {"count": count, "percentiles": percentiles or None, "topic": "", "channel": "", "host": ""}


# Totals


def topic_total(name: str, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The topic over all nsqds. Each part is the topic on one nsqd."""
    nodes = sorted(parts, key=_by_hostname)
    by_channel: dict[str, list[dict[str, Any]]] = {}
    for part in nodes:
        for channel in part["channels"]:
            by_channel.setdefault(channel["channel_name"], []).append(channel)
    channels = [channel_total(name, channel, found) for channel, found in sorted(by_channel.items())]
    local = {key: sum(part.get(key, 0) for part in nodes) for key in LOCAL_COUNTS}
    return {
        "node": EVERY_NODE,
        "hostname": "",
        "topic_name": name,
        **_sums(nodes, TOPIC_SUMS),
        "delivery_msg_count": sum(local.values()),
        **{key: count for key, count in local.items() if count},
        "nodes": nodes,
        "channels": channels or None,
        "paused": any(part["paused"] for part in nodes),
        "e2e_processing_latency": _latency_total(nodes, name, ""),
    }


def channel_total(topic: str, name: str, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The channel over all nsqds. Each part is the channel on one nsqd."""
    nodes = sorted(parts, key=_by_hostname)
    local = {key: count for key in LOCAL_COUNTS if (count := sum(part.get(key, 0) for part in nodes))}
    delivered = sum(local.values())
    clients = [client for part in nodes for client in part["clients"] or ()]
    ages = [part[OLDEST_AGE] for part in nodes if part[OLDEST_AGE] is not None]
    return {
        "node": EVERY_NODE,
        "hostname": "",
        "topic_name": topic,
        "channel_name": name,
        **_sums(nodes, CHANNEL_SUMS),
        **({"delivery_msg_count": delivered, **local} if delivered else {}),
        "nodes": nodes,
        "clients": sorted(clients, key=_client_order) or None,
        "paused": any(part["paused"] for part in nodes),
        "e2e_processing_latency": _latency_total(nodes, topic, name),
        # Watch.add_drain() fills in how fast the sum of the depths falls.
        **dict.fromkeys(LAG),
        OLDEST_AGE: max(ages, default=None),
        **{name: _known_sum(part[name] for part in nodes) for name in OWN_COUNTS},
    }


def _known_sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _by_hostname(part: Mapping[str, Any]) -> tuple[str, str]:
    return part["hostname"], part["node"]


def _sums(parts: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, int]:
    return {name: sum(part[name] for part in parts) for name in names}


def _client_order(client: Mapping[str, Any]) -> tuple[str, int, str]:
    """By node; within a node, clients in its zone first, then those in its region."""
    region, zone = client["node_topology_region"], client["node_topology_zone"]
    in_region = bool(region) and client["topology_region"] == region
    in_zone = in_region and bool(zone) and client["topology_zone"] == zone
    return client["node"], 0 if in_zone else 1 if in_region else 2, client["remote_address"]


def _latency_total(parts: Sequence[Mapping[str, Any]], topic: str, channel: str) -> dict[str, Any]:
    found = [part["e2e_processing_latency"] for part in parts]
    by_quantile: dict[float, list[Mapping[str, Any]]] = {}
    for latency in found:
        for entry in latency["percentiles"] or ():
            by_quantile.setdefault(entry["quantile"], []).append(entry)
    return {
        "count": sum(latency["count"] for latency in found),
        "percentiles": [_percentile(quantile, entries) for quantile, entries in by_quantile.items()] or None,
        "topic": topic,
        "channel": channel,
        "host": EVERY_NODE,
    }


def _percentile(quantile: float, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Nsqds that finished nothing lately are left out."""
    entries = [entry for entry in entries if entry["count"]] or entries
    count = sum(entry["count"] for entry in entries)
    weighed = sum(entry["average"] * entry["count"] for entry in entries)
    average = weighed / count if count else 0.0
    return {
        "average": int(average) if average == int(average) else average,
        "count": count,
        "max": max(entry["max"] for entry in entries),
        "min": min(entry["min"] for entry in entries),
        "quantile": quantile,
    }


# Versions


def mark_out_of_date(nodes: Iterable[Node]) -> list[Node]:
    """Marks the nodes whose version is lower than the highest."""
    found = list(nodes)
    newest = max((_version(node.version) for node in found), default=())
    return [replace(node, out_of_date=True) if _version(node.version) < newest else node for node in found]


def _version(shown: str) -> tuple[int, ...]:
    """For comparing. A release is higher than its previews."""
    core, _, preview = shown.removeprefix("v").partition("-")
    parts = [part[:9] for part in core.split(".")[:3]]
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in parts]
    return (*numbers, *[0] * (3 - len(numbers)), 0 if preview else 1)
