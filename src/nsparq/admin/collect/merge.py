"""From what single nsqds say to figures of the whole cluster, in the shapes of NSQ's nsqadmin. Knows no I/O.

What comes in was said by others: a field that is missing or of the wrong type counts as empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nsparq.addresses import join_address

__all__ = ["Node", "NodeStats", "channel_total", "mark_out_of_date", "node_topic", "topic_total"]

EVERY_NODE: Final = "*"
MOST: Final = 1 << 63
"""The largest number that a daemon can mean."""
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
    """Of its connections to nsqlookupds, each behind that nsqlookupd's address and a slash."""
    topics: tuple[tuple[str, bool], ...] = ()
    """Its topics by name, and whether it is tombstoned for them."""
    topology_zone: str = ""
    topology_region: str = ""
    configured: str = ""
    """The address that we were given for it, if any; it may be reached there only."""
    out_of_date: bool = False

    @property
    def address(self) -> str:
        """What it is called everywhere."""
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
    """What an nsqd says in /stats."""

    node: Node
    topics: Sequence[Mapping[str, Any]]
    health: str = "OK"
    start_time: int = 0
    producers: Sequence[Mapping[str, Any]] = field(default=(), repr=False)

    @classmethod
    def parse(cls, node: Node, said: Any) -> NodeStats:
        found = said if isinstance(said, dict) else {}
        return cls(
            node,
            objects(found, "topics"),
            text(found, "health") or "OK",
            number(found, "start_time"),
            objects(found, "producers"),
        )


# Fields of what was said. Whatever comes out of these can be added up, shown, and put into a URL.


def objects(said: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = said.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def texts(said: Mapping[str, Any], name: str) -> list[str]:
    found = said.get(name)
    return [_whole(one) for one in found if isinstance(one, str)] if isinstance(found, list) else []


def text(said: Mapping[str, Any], name: str) -> str:
    found = said.get(name)
    return _whole(found) if isinstance(found, str) else ""


def number(said: Mapping[str, Any], name: str) -> int:
    return int(real(said, name) or 0)


def real(said: Mapping[str, Any], name: str) -> float | None:
    """None for what is no number, and for numbers that nothing in a cluster can have."""
    found = said.get(name)
    if type(found) is not int and type(found) is not float:
        return None
    return found if -MOST <= found <= MOST else None


def _whole(text: str) -> str:
    """Without halves of characters, which JSON can hold and UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def flag(said: Mapping[str, Any], name: str) -> bool:
    return said.get(name) is True


# One nsqd's part


def node_topic(node: Node, said: Mapping[str, Any], now_s: float, *, clients: bool = False) -> dict[str, Any]:
    """A topic on one nsqd, with its channels there."""
    name = text(said, "topic_name")
    channels = [node_channel(node, name, one, now_s, clients=clients) for one in objects(said, "channels")]
    local = {key: sum(channel.get(key, 0) for channel in channels) for key in LOCAL_COUNTS}
    return {
        "node": node.address,
        "hostname": node.hostname,
        "topic_name": name,
        **_depths(said),
        "message_count": number(said, "message_count"),
        "delivery_msg_count": sum(local.values()),
        **{key: count for key, count in local.items() if count},
        "nodes": None,
        "channels": channels,
        "paused": flag(said, "paused"),
        "e2e_processing_latency": _node_latency(said),
    }


def node_channel(
    node: Node, topic: str, said: Mapping[str, Any], now_s: float, *, clients: bool
) -> dict[str, Any]:
    connected = objects(said, "clients")
    local = {key: count for key in LOCAL_COUNTS if (count := number(said, key))}
    delivered = sum(local.values())
    return {
        "node": node.address,
        "hostname": node.hostname,
        "topic_name": topic,
        "channel_name": text(said, "channel_name"),
        **_depths(said),
        "in_flight_count": number(said, "in_flight_count"),
        "deferred_count": number(said, "deferred_count"),
        "requeue_count": number(said, "requeue_count"),
        "timeout_count": number(said, "timeout_count"),
        "message_count": number(said, "message_count"),
        # Before 1.1 an nsqd did not count them.
        "client_count": number(said, "client_count") if "client_count" in said else len(connected),
        **({"delivery_msg_count": delivered, **local} if delivered else {}),
        "nodes": None,
        "clients": [_client(node, one, now_s) for one in connected] if clients else None,
        "paused": flag(said, "paused"),
        "e2e_processing_latency": _node_latency(said),
    }


def _depths(said: Mapping[str, Any]) -> dict[str, int]:
    depth, backend = number(said, "depth"), number(said, "backend_depth")
    return {"depth": depth, "memory_depth": depth - backend, "backend_depth": backend}


def _client(node: Node, said: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    connected_s = number(said, "connect_ts")
    return {
        "node": node.address,
        **{name: text(said, name) for name in CLIENT_TEXTS},
        "connect_ts": connected_s,
        "connected": max(0, int(now_s) - connected_s) * 1_000_000_000,
        **{name: number(said, name) for name in CLIENT_NUMBERS},
        **{key: count for key in LOCAL_COUNTS if (count := number(said, key))},
        "deflate": flag(said, "deflate"),
        "snappy": flag(said, "snappy"),
        "authed": flag(said, "authed"),
        "auth_identity": text(said, "auth_identity"),
        "auth_identity_url": text(said, "auth_identity_url"),
        "topology_zone": text(said, "topology_zone"),
        "topology_region": text(said, "topology_region"),
        "node_topology_zone": node.topology_zone,
        "node_topology_region": node.topology_region,
        "tls": flag(said, "tls"),
        "tls_cipher_suite": text(said, "tls_cipher_suite"),
        "tls_version": text(said, "tls_version"),
        "tls_negotiated_protocol": text(said, "tls_negotiated_protocol"),
        "tls_negotiated_protocol_is_mutual": flag(said, "tls_negotiated_protocol_is_mutual"),
    }


def _node_latency(said: Mapping[str, Any]) -> dict[str, Any]:
    found = said.get("e2e_processing_latency")
    found = found if isinstance(found, dict) else {}
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
    """The topic over all nsqds; each part is its figures on one."""
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
    """The channel over all nsqds; each part is its figures on one."""
    nodes = sorted(parts, key=_by_hostname)
    local = {key: count for key in LOCAL_COUNTS if (count := sum(part.get(key, 0) for part in nodes))}
    delivered = sum(local.values())
    clients = [client for part in nodes for client in part["clients"] or ()]
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
    }


def _by_hostname(part: Mapping[str, Any]) -> tuple[str, str]:
    return part["hostname"], part["node"]


def _sums(parts: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, int]:
    return {name: sum(part[name] for part in parts) for name in names}


def _client_order(client: Mapping[str, Any]) -> tuple[str, int, str]:
    """By node; of those, clients in the node's own zone first, then in its region."""
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
    """An nsqd where nothing was finished lately has nothing to say about it."""
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
    """Those of a lower version than the highest among them."""
    found = list(nodes)
    newest = max((_version(node.version) for node in found), default=())
    return [_outdated(node) if _version(node.version) < newest else node for node in found]


def _outdated(node: Node) -> Node:
    fields = {name: getattr(node, name) for name in Node.__slots__}
    return Node(**{**fields, "out_of_date": True})


def _version(shown: str) -> tuple[int, ...]:
    """For comparing: numbers, and a release behind its own previews."""
    core, _, preview = shown.removeprefix("v").partition("-")
    parts = [part[:9] for part in core.split(".")[:3]]
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in parts]
    return (*numbers, *[0] * (3 - len(numbers)), 0 if preview else 1)
