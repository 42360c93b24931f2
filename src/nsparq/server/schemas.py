"""The shapes of nsqd's JSON answers, for its OpenAPI description."""

from __future__ import annotations

from typing import Any, Final


def obj(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these properties; further ones may come with later versions."""
    return {"type": "object", "required": [*required], "properties": required | (optional or {})}


def listed(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


NAME: Final = {"type": "string", "pattern": "^[.a-zA-Z0-9_-]+(#ephemeral)?$", "maxLength": 64}
"""Of a topic or channel."""
SEQUENCE: Final = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
INT: Final = {"type": "integer"}
COUNT: Final = {"type": "integer", "minimum": 0}
TEXT: Final = {"type": "string"}
YES_NO: Final = {"type": "boolean"}

INFO: Final = obj(
    {
        "version": TEXT,
        "broadcast_address": TEXT,
        "hostname": TEXT,
        "http_port": INT,
        "tcp_port": INT,
        "start_time": INT,
        "max_heartbeat_interval": INT,
        "max_output_buffer_size": INT,
        "max_output_buffer_timeout": INT,
        "max_deflate_level": INT,
        "topology_zone": TEXT,
        "topology_region": TEXT,
    }
)

LATENCY: Final = obj(
    {
        "count": COUNT,
        "percentiles": {
            "type": ["array", "null"],
            "items": obj({"quantile": {"type": "number"}, "value": {"type": "number"}}),
        },
    }
)

CLIENT: Final = obj(
    {
        "client_id": TEXT,
        "hostname": TEXT,
        "version": TEXT,
        "remote_address": TEXT,
        "state": INT,
        "ready_count": COUNT,
        "in_flight_count": COUNT,
        "message_count": COUNT,
        "finish_count": COUNT,
        "requeue_count": COUNT,
        "connect_ts": INT,
        "sample_rate": COUNT,
        "deflate": YES_NO,
        "snappy": YES_NO,
        "user_agent": TEXT,
        "topology_zone": TEXT,
        "topology_region": TEXT,
        "tls": YES_NO,
        "tls_cipher_suite": TEXT,
        "tls_version": TEXT,
        "tls_negotiated_protocol": TEXT,
        "tls_negotiated_protocol_is_mutual": YES_NO,
    },
    {
        "authed": YES_NO,
        "auth_identity": TEXT,
        "auth_identity_url": TEXT,
        "pub_counts": listed(obj({"topic": TEXT, "count": COUNT})),
    },
)

CHANNEL: Final = obj(
    {
        "channel_name": TEXT,
        "depth": COUNT,
        "backend_depth": COUNT,
        "in_flight_count": COUNT,
        "deferred_count": COUNT,
        "message_count": COUNT,
        "requeue_count": COUNT,
        "timeout_count": COUNT,
        "client_count": COUNT,
        "clients": {"type": ["array", "null"], "items": CLIENT},
        "paused": YES_NO,
        "e2e_processing_latency": LATENCY,
        "dropped_count": COUNT,
        "owner": TEXT,
    }
)

TOPIC: Final = obj(
    {
        "topic_name": TEXT,
        "channels": listed(CHANNEL),
        "depth": COUNT,
        "backend_depth": COUNT,
        "message_count": COUNT,
        "message_bytes": COUNT,
        "paused": YES_NO,
        "e2e_processing_latency": LATENCY,
        "dropped_count": COUNT,
        "corrupt_batches": COUNT,
        "corrupt_messages": COUNT,
        "corrupt_files": COUNT,
        "log_bytes": COUNT,
    }
)

STATS: Final = obj(
    {
        "version": TEXT,
        "health": TEXT,
        "start_time": INT,
        "corrupt_files": COUNT,
        "topics": {"type": ["array", "null"], "items": TOPIC},
        "producers": {"type": ["array", "null"], "items": CLIENT},
    },
    {"memory": {"type": "object"}},
)
