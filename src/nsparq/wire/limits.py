"""Limits that commands and IDENTIFY fields are checked against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_LINE: Final = 16_384
"""A command line with its LF must fit NSQ's read buffer."""

MAX_IDENTIFY_BODY: Final = 65_536
"""Bytes of an IDENTIFY. A connection keeps its texts, and decoding a long one would hold up the
event loop. NSQ has only the limit for all bodies."""

DEFAULT_HEARTBEAT_MS: Final = 30_000
DEFAULT_OUTPUT_BUFFER_SIZE: Final = 16_384
MIN_OUTPUT_BUFFER_SIZE: Final = 64
MIN_HEARTBEAT_MS: Final = 1_000
MIN_MSG_TIMEOUT_MS: Final = 1_000
DEFAULT_DEFLATE_LEVEL: Final = 6


UNCOUNTED: Final = MAX_LINE
"""Bytes of an unfinished command that do not count as unfinished. Each connection may hold as many,
so that small commands are always accepted."""


class Unfinished:
    """Counts the bytes of commands that have arrived in part, over all connections that share this
    object."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times in milliseconds, sizes in bytes. The names are those of nsqd's flags."""

    version: str = "1.3.0"
    max_msg_size: int = 1_048_576
    max_body_size: int = 5_242_880
    max_rdy_count: int = 2_500
    max_req_timeout_ms: int = 3_600_000
    msg_timeout_ms: int = 60_000
    max_msg_timeout_ms: int = 900_000
    max_heartbeat_interval_ms: int = 60_000
    max_output_buffer_size: int = 65_536
    output_buffer_timeout_ms: int = 250
    min_output_buffer_timeout_ms: int = 25
    max_output_buffer_timeout_ms: int = 30_000
    max_deflate_level: int = 6
    topology_region: str = ""
    topology_zone: str = ""
    auth_required: bool = False
    tls_available: bool = False
    tls_required: bool = False
    deflate_allowed: bool = True
    snappy_allowed: bool = True

    @property
    def max_mpub_count(self) -> int:
        """An MPUB body spends 4 bytes on its count and at least 5 on each message."""
        return (self.max_body_size - 4) // 5
