"""Headers of an HTTP request that become headers of the published messages: docs/reference/headers.md
has the table."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote_to_bytes

from nsparq.headers import decode_headers, encode_headers
from nsparq.http.api import ApiError, Request
from nsparq.packed import PackedBodies

_PREFIX: Final = b"x-nsq-header-"
_CLOUD_EVENT: Final = b"ce-"
_TRACE: Final = frozenset((b"traceparent", b"tracestate", b"baggage"))
_BEGINNINGS: Final = frozenset(b"xXtTbBcC")
"""First letters of the names that count here."""


def block_of(request: Request) -> bytes:
    """The header block for the messages of a request; empty if it names no headers. Raises
    ApiError."""
    found: dict[bytes, list[bytes]] = {}
    for raw_name, value in request.headers:
        if raw_name[0] not in _BEGINNINGS:
            continue
        name = raw_name.lower()
        if name.startswith(_PREFIX):
            found.setdefault(name.removeprefix(_PREFIX), []).append(value)
        elif name.startswith(_CLOUD_EVENT):
            # CloudEvents' HTTP binding has other characters than printable ASCII as %xx.
            found.setdefault(name, []).append(unquote_to_bytes(value))
        elif name in _TRACE:
            found.setdefault(name, []).append(value)
    if not found:
        return b""
    if b"ce-specversion" in found and (content_type := request.header("Content-Type")):
        found[b"content-type"] = [content_type.encode("latin-1")]
    try:
        # A field that a client sends in several lines counts as one, as in HTTP.
        return encode_headers({name.decode(): b",".join(values).decode() for name, values in found.items()})
    except ValueError as error:
        raise ApiError(400, "INVALID_HEADERS", reason=str(error)) from error


def with_headers(bodies: PackedBodies, block: bytes, max_size: int) -> PackedBodies:
    """The same messages, each with this header block. Raises ApiError if one is too big then."""
    if not block or not bodies.lengths:
        return bodies
    if max(bodies.lengths) + 4 + len(block) > max_size:
        raise ApiError(413, "MSG_TOO_BIG")
    return bodies.with_blocks(PackedBodies.of(_blocks(block, len(bodies.lengths))))


def _blocks(block: bytes, count: int) -> list[bytes]:
    """A block for each of the messages. The number of a producer is that of the first message."""
    number = decode_headers(block).get("nsq-number", "") if count > 1 else ""
    if not number.isdecimal():
        return [block] * count
    headers = decode_headers(block)
    return [encode_headers(headers | {"nsq-number": str(int(number) + index)}) for index in range(count)]
