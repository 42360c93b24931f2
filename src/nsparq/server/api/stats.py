"""GET /ping, /info and /stats."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from nsparq.broker.stats import stats_in_slices
from nsparq.http.api import JSON_TYPE, TEXT_TYPE, Endpoint, Param, Request, Response, Result, encode_json
from nsparq.options import NsqdOptions
from nsparq.server.api.parameters import BOOLEAN, COUNT, INT, TEXT, fields, listed, obj
from nsparq.server.api.stats_text import render_stats
from nsparq.server.memory import memory_stats
from nsparq.version import NSQ_VERSION

if TYPE_CHECKING:
    from nsparq.server.daemon import Nsqd

SLICE_SIZE: Final = 64 << 10
"""Bytes of /stats to encode before the event loop runs other work."""

_LATENCY: Final = obj(
    {
        "count": COUNT,
        "percentiles": {
            "type": ["array", "null"],
            "items": obj({"quantile": {"type": "number"}, "value": {"type": "number"}}),
        },
    }
)
_CLIENT: Final = obj(
    fields(TEXT, "client_id", "hostname", "version", "remote_address", "user_agent")
    | fields(TEXT, "topology_zone", "topology_region")
    | fields(TEXT, "tls_cipher_suite", "tls_version", "tls_negotiated_protocol")
    | fields(INT, "state", "connect_ts")
    | fields(COUNT, "ready_count", "in_flight_count", "message_count", "finish_count", "requeue_count")
    | fields(COUNT, "sample_rate")
    | fields(BOOLEAN, "deflate", "snappy", "tls", "tls_negotiated_protocol_is_mutual"),
    fields(TEXT, "auth_identity", "auth_identity_url")
    | {"authed": BOOLEAN, "pub_counts": listed(obj({"topic": TEXT, "count": COUNT}))},
)
_CLIENTS: Final = {"type": ["array", "null"], "items": _CLIENT}
_CHANNEL: Final = obj(
    fields(TEXT, "channel_name", "owner", "ordered_by")
    | fields(COUNT, "depth", "backend_depth", "in_flight_count", "deferred_count", "message_count")
    | fields(COUNT, "requeue_count", "timeout_count", "client_count", "dropped_count")
    | fields(COUNT, "dead_letter_count", "expired_count", "parked_count")
    | {"clients": _CLIENTS, "paused": BOOLEAN, "e2e_processing_latency": _LATENCY}
    | fields({"type": ["number", "null"]}, "oldest_message_age_s", "drain_rate", "drain_time_s")
)
_ARCHIVE: Final = obj(
    fields(BOOLEAN, "enabled", "replaced")
    | fields(COUNT, "segments", "bytes", "waiting_segments", "waiting_bytes")
    | {"oldest_waiting_age_s": {"type": "number"}, "error": TEXT}
    | fields({"type": ["integer", "null"]}, "first_ns", "missing_after_ns")
)
_TOPIC: Final = obj(
    fields(COUNT, "depth", "backend_depth", "message_count", "message_bytes", "dropped_count")
    | fields(COUNT, "corrupt_batches", "corrupt_messages", "corrupt_files", "log_bytes", "repeated_count")
    | {"topic_name": TEXT, "channels": listed(_CHANNEL), "paused": BOOLEAN}
    | {"e2e_processing_latency": _LATENCY, "archive": {"anyOf": [_ARCHIVE, {"type": "null"}]}}
)
_STATS: Final = obj(
    fields(TEXT, "version", "health")
    | {
        "start_time": INT,
        "corrupt_files": COUNT,
        "warnings": listed(TEXT),
        "topics": {"type": ["array", "null"], "items": _TOPIC},
        "producers": _CLIENTS,
    },
    fields({"type": "object"}, "memory", "replication"),
)
_INFO: Final = obj(
    fields(TEXT, "version", "broadcast_address", "hostname", "topology_zone", "topology_region")
    | fields(INT, "http_port", "tcp_port", "start_time", "max_heartbeat_interval")
    | fields(INT, "max_output_buffer_size", "max_output_buffer_timeout", "max_deflate_level")
    | fields(BOOLEAN, "headers"),
    {"replication": {"type": "object"}},
)


class StatsApi:
    def __init__(self, nsqd: Nsqd) -> None:
        self._nsqd = nsqd
        self._broker = nsqd.broker

    @Endpoint(
        method="GET",
        path="/ping",
        summary="Check the daemon's health.",
        details="500 and `NOK - <reason>`, as plain text, while the disk reports an error, or while too few "
        "nodes of a cluster are in sync. A node that is not the primary of its cluster answers 503 and "
        "`NOK`: load balancers pass it over.",
        permission="read",
        success="`OK`",
        success_type=TEXT_TYPE,
        success_schema={"type": "string", "const": "OK"},
        errors=((500, "NOK - …"), (503, "NOK - …")),
    )
    def ping(self, request: Request) -> Response:
        error = self._broker.health.error
        if error is None:
            return Response(body=b"OK", content_type=TEXT_TYPE, nsq_header=False)
        text = f"NOK - {error}".encode("utf-8", "replace")
        return Response(status=500, body=text, content_type=TEXT_TYPE, nsq_header=False)

    @Endpoint(
        method="GET",
        path="/info",
        summary="Get the daemon's version, addresses and limits. Durations are in nanoseconds.",
        details="`headers` says that it knows [message headers](headers.md); NSQ's own nsqd has no such key. "
        "`replication` is there with `--replication-cluster`: see `/replication`.",
        permission="read",
        success="an object",
        success_schema=_INFO,
    )
    def info(self, request: Request) -> Result:
        nsqd = self._nsqd
        info = describe(nsqd.options, nsqd.tcp_port, nsqd.http_port, self._broker.start_s)
        if nsqd.replication is not None:
            info["replication"] = nsqd.replication.state.summary
        return info

    @Endpoint(
        method="GET",
        path="/stats",
        summary="Get the figures of topics, channels, clients and producers.",
        details='For an unknown `topic` the answer has `"topics":null`. Topics without the given '
        "`channel` are left out. Of each channel, `oldest_message_age_s` is the time since the oldest "
        "waiting message was published, `drain_rate` the messages per second by which the depth falls, and "
        "`drain_time_s` the time until nothing waits at that rate. They are 0 if nothing waits and null if "
        "unknown; `drain_time_s` is also null if the rate is not positive. "
        "[Exact definitions](../how-to/monitoring.md#lag-as-time). `warnings` are errors that keep nobody "
        "from publishing. With `topic`, `health` and `warnings` name no error of another topic. "
        "`archive` of a topic is null without `--archive`; its `first_ns` is the publish "
        "time of the oldest archived message, and `missing_after_ns` that of the last message that a start "
        "with `--restore` brought back, else null.",
        params=(
            Param(name="format", help="`json`; any other value gives text"),
            Param(name="topic", help="only this topic"),
            Param(name="channel", help="only this channel"),
            Param(name="include_clients", help="list the clients: `true` (default) or `false`"),
            Param(name="include_mem", help="add memory figures: `true` (default) or `false`"),
        ),
        permission="read",
        success="the figures, as text or as an object",
        success_schema=_STATS,
        other_types=(TEXT_TYPE,),
    )
    async def stats(self, request: Request) -> Response:
        """In slices: the figures of ten thousand topics take long."""
        parameters = request.parameters
        stats: dict[str, Any] = {}
        for _ in stats_in_slices(
            self._broker,
            stats,
            parameters.get("topic", ""),
            parameters.get("channel", ""),
            request.flag("include_clients", default=True),
        ):
            await asyncio.sleep(0)
        if self._nsqd.replication is not None:
            stats["replication"] = self._nsqd.replication.state.status()
        if request.flag("include_mem", default=True):
            last = {name: stats.pop(name) for name in ("producers", "corrupt_files", "warnings")}
            stats |= {"memory": memory_stats(), **last}
        if parameters.get("format") == "json":
            return Response(body=await _join_in_slices(_json_pieces(stats)), content_type=JSON_TYPE)
        text = render_stats(stats, self._broker.wall_ns() / 1e9)
        pieces = (piece.encode("utf-8", "replace") for piece in text)
        return Response(body=await _join_in_slices(pieces), content_type=TEXT_TYPE)


def describe(options: NsqdOptions, tcp_port: int, http_port: int, start_s: int) -> dict[str, Any]:
    """What /info says of a daemon."""
    return {
        "version": NSQ_VERSION,
        "broadcast_address": options.broadcast_address,
        "hostname": socket.gethostname(),
        "http_port": http_port,
        "tcp_port": tcp_port,
        "start_time": start_s,
        "max_heartbeat_interval": round(options.max_heartbeat_interval * 1e9),
        "max_output_buffer_size": options.max_output_buffer_size,
        "max_output_buffer_timeout": round(options.max_output_buffer_timeout * 1e9),
        "max_deflate_level": options.max_deflate_level,
        "topology_zone": options.topology_zone,
        "topology_region": options.topology_region,
        "headers": True,
    }


def _json_pieces(stats: Mapping[str, Any]) -> Iterator[bytes]:
    """An object as JSON. Each entry of its lists is a piece."""
    for number, (name, value) in enumerate(stats.items()):
        yield b"%b%b:" % (b"," if number else b"{", encode_json(name))
        if not isinstance(value, list):
            yield encode_json(value)
            continue
        yield b"["
        for place, entry in enumerate(value):
            yield b"," + encode_json(entry) if place else encode_json(entry)
        yield b"]"
    yield b"}"


async def _join_in_slices(pieces: Iterable[bytes]) -> bytes:
    whole = bytearray()
    pause_at = SLICE_SIZE
    for piece in pieces:
        whole += piece
        if len(whole) >= pause_at:
            pause_at = len(whole) + SLICE_SIZE
            await asyncio.sleep(0)
    return bytes(whole)
