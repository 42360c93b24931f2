"""Values of /config, for all daemons."""

from __future__ import annotations

import json
from typing import Final

from nsparq.http.api import ApiError

LOG_LEVELS: Final = ("debug", "info", "warn", "error", "fatal")


def parse_log_level(body: bytes) -> str:
    """Raises ApiError."""
    level = body.decode("utf-8", "replace").lower()
    if level not in LOG_LEVELS:
        raise ApiError(400, "INVALID_VALUE")
    return level


def parse_addresses(body: bytes) -> tuple[str, ...]:
    """A JSON array of strings, or null for an empty one. Raises ApiError."""
    try:
        wanted = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "INVALID_VALUE") from None
    if wanted is None:
        return ()
    if not isinstance(wanted, list) or not all(isinstance(address, str) for address in wanted):
        raise ApiError(400, "INVALID_VALUE")
    return tuple(wanted)
