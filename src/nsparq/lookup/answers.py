"""The JSON of nsqlookupd's responses, joined from parts that are already JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from nsparq.wire.lookup import PeerInfo

GO_ZERO_TIME_NS: Final = -6795364578871345152
"""Go's value of a time that is not set. NSQ shows it for an entry without a tombstone."""


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def producer(peer: PeerInfo) -> bytes:
    """An nsqd in /lookup."""
    return _encode(
        {
            "remote_address": peer.remote_address,
            "hostname": peer.hostname,
            "broadcast_address": peer.broadcast_address,
            "tcp_port": peer.tcp_port,
            "http_port": peer.http_port,
            "version": peer.version,
            "topology_zone": peer.topology_zone,
            "topology_region": peer.topology_region,
        }
    )


def node(producer_json: bytes, tombstones: Sequence[bool], topics: Sequence[str]) -> bytes:
    """An nsqd in /nodes: the same, with two parallel lists of its topics and their tombstones."""
    more = _encode({"tombstones": tombstones, "topics": topics})
    return producer_json[:-1] + b"," + more[1:]


def nodes(parts: Iterable[bytes]) -> bytes:
    return b'{"producers":[' + b",".join(parts) + b"]}"


def lookup(channels: Iterable[str], producers: Iterable[bytes]) -> bytes:
    return b'{"channels":' + _encode([*channels]) + b',"producers":[' + b",".join(producers) + b"]}"


def names(key: str, found: Iterable[str]) -> bytes:
    return _encode({key: [*found]})


def debug_producer(peer: PeerInfo, last_update_ns: int, tombstoned_ns: int) -> bytes:
    """A producer of one registration in /debug. `tombstoned_ns` is 0 without a tombstone."""
    return _encode(
        {
            "broadcast_address": peer.broadcast_address,
            "hostname": peer.hostname,
            "http_port": peer.http_port,
            "id": peer.remote_address,
            "last_update": last_update_ns,
            "tcp_port": peer.tcp_port,
            "tombstoned": tombstoned_ns != 0,
            "tombstoned_at": tombstoned_ns or GO_ZERO_TIME_NS,
            "topology_region": peer.topology_region,
            "topology_zone": peer.topology_zone,
            "version": peer.version,
        }
    )


def debug_entry(key: str, producers: Sequence[bytes]) -> bytes:
    """A registration in /debug, by `category:topic:channel`; empty without producers."""
    return _encode(key) + b":[" + b",".join(producers) + b"]" if producers else b""


def debug(entries: Iterable[bytes]) -> bytes:
    return b"{" + b",".join(filter(None, entries)) + b"}"
