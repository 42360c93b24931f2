"""IDENTIFY: the JSON body, its checks in NSQ's order, and the reply."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from nsparq.errors import FatalClientError
from nsparq.wire.go_json import BOOL, INT32, INT64, STRING, decode_object
from nsparq.wire.limits import (
    DEFAULT_DEFLATE_LEVEL,
    DEFAULT_HEARTBEAT_MS,
    DEFAULT_OUTPUT_BUFFER_SIZE,
    MIN_HEARTBEAT_MS,
    MIN_MSG_TIMEOUT_MS,
    MIN_OUTPUT_BUFFER_SIZE,
    Limits,
)

_STRINGS: Final = ("client_id", "hostname", "user_agent", "topology_region", "topology_zone")
_KINDS: Final = {
    **dict.fromkeys(_STRINGS, STRING),
    **dict.fromkeys(("feature_negotiation", "tls_v1", "snappy", "deflate", "observe", "headers"), BOOL),
    **dict.fromkeys(("heartbeat_interval", "output_buffer_size", "output_buffer_timeout"), INT64),
    **dict.fromkeys(("deflate_level", "msg_timeout"), INT64),
    "sample_rate": INT32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The settings of a client: effective values, after defaults and limits."""

    client_id: str = ""
    hostname: str = ""
    user_agent: str = ""
    topology_region: str = ""
    topology_zone: str = ""
    feature_negotiation: bool = False
    heartbeat_ms: int = DEFAULT_HEARTBEAT_MS
    """0 if the client asked for no heartbeats."""
    output_buffer_size: int = DEFAULT_OUTPUT_BUFFER_SIZE
    output_buffer_timeout_ms: int = 250
    sample_rate: int = 0
    msg_timeout_ms: int = 60_000
    tls: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = DEFAULT_DEFLATE_LEVEL
    observe: bool = False
    """It only looks: see broker.observing. Not in NSQ."""
    headers: bool = False
    """It knows message headers: docs/reference/headers.md. Not in NSQ."""

    def reply(self, limits: Limits) -> bytes:
        """The negotiation answer, keys in NSQ's order; a plain OK to a client that did not
        negotiate."""
        if not self.feature_negotiation:
            return b"OK"
        answer = {
            "max_rdy_count": limits.max_rdy_count,
            "version": limits.version,
            "max_msg_timeout": limits.max_msg_timeout_ms,
            "msg_timeout": self.msg_timeout_ms,
            "tls_v1": self.tls,
            "deflate": self.deflate,
            "deflate_level": self.deflate_level,
            "max_deflate_level": limits.max_deflate_level,
            "snappy": self.snappy,
            "sample_rate": self.sample_rate,
            "auth_required": limits.auth_required,
            "output_buffer_size": self.output_buffer_size,
            "output_buffer_timeout": self.output_buffer_timeout_ms,
            "topology_region": limits.topology_region,
            "topology_zone": limits.topology_zone,
        }
        if self.observe:
            answer["observe"] = True
        if self.headers:
            answer["headers"] = True
        return json.dumps(answer, separators=(",", ":")).encode()


def default_identity(limits: Limits, peer: str) -> Identity:
    """The settings of a client that has not sent IDENTIFY."""
    return Identity(
        client_id=peer,
        hostname=peer,
        output_buffer_timeout_ms=limits.output_buffer_timeout_ms,
        msg_timeout_ms=limits.msg_timeout_ms,
    )


def decode_identify(body: bytes, limits: Limits, current: Identity | None = None) -> Identity:
    """Parse and check an IDENTIFY body; the first bad field decides the error.

    Times and sizes that are absent or 0 stay as they are in `current`: the defaults, or what an
    earlier IDENTIFY said.
    """
    current = current or default_identity(limits, "")
    fields = _decode_fields(body)
    heartbeat_ms = _chosen(
        "heartbeat interval", fields.get("heartbeat_interval", 0),
        MIN_HEARTBEAT_MS, limits.max_heartbeat_interval_ms, current=current.heartbeat_ms,
    )  # fmt: skip
    timeout_ms = _chosen(
        "output buffer timeout", fields.get("output_buffer_timeout", 0),
        limits.min_output_buffer_timeout_ms, limits.max_output_buffer_timeout_ms,
        current=current.output_buffer_timeout_ms,
    )  # fmt: skip
    buffer_size = _chosen(
        "output buffer size", fields.get("output_buffer_size", 0),
        MIN_OUTPUT_BUFFER_SIZE, limits.max_output_buffer_size, current=current.output_buffer_size, off=1,
    )  # fmt: skip
    if fields.get("output_buffer_size") == -1:
        timeout_ms = 0
    sample_rate = fields.get("sample_rate", 0)
    if not 0 <= sample_rate <= 99:
        raise _invalid("sample rate", sample_rate)
    msg_timeout_ms = fields.get("msg_timeout", 0)
    if msg_timeout_ms != 0 and not MIN_MSG_TIMEOUT_MS <= msg_timeout_ms <= limits.max_msg_timeout_ms:
        raise _invalid("msg timeout", msg_timeout_ms)
    negotiates = fields.get("feature_negotiation", False)
    deflate = negotiates and limits.deflate_allowed and fields.get("deflate", False)
    snappy = negotiates and limits.snappy_allowed and fields.get("snappy", False)
    if deflate and snappy:
        raise FatalClientError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
    level = fields.get("deflate_level", 0) if deflate else 0
    return Identity(
        **{name: fields.get(name, "") for name in _STRINGS},
        feature_negotiation=negotiates,
        heartbeat_ms=heartbeat_ms,
        output_buffer_size=buffer_size,
        output_buffer_timeout_ms=timeout_ms,
        sample_rate=sample_rate,
        msg_timeout_ms=msg_timeout_ms or current.msg_timeout_ms,
        tls=negotiates and limits.tls_available and fields.get("tls_v1", False),
        snappy=snappy,
        deflate=deflate,
        deflate_level=min(level if level > 0 else DEFAULT_DEFLATE_LEVEL, limits.max_deflate_level),
        observe=negotiates and fields.get("observe", False),
        headers=negotiates and fields.get("headers", False),
    )


def _decode_fields(body: bytes) -> dict[str, Any]:
    """The known keys of the body, type-checked; absent where missing or null."""
    try:
        return decode_object(body, _KINDS)
    except ValueError as error:
        raise FatalClientError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from error


def _chosen(field: str, wanted: int, low: int, high: int, *, current: int, off: int = 0) -> int:
    """The value of a field: -1 switches it off, 0 leaves it as it is."""
    if wanted in (-1, 0):
        return off if wanted else current
    if not low <= wanted <= high:
        raise _invalid(field, wanted)
    return wanted


def _invalid(field: str, value: int) -> FatalClientError:
    return FatalClientError("E_BAD_BODY", f"IDENTIFY {field} ({value}) is invalid")
