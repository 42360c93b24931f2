"""Headers in front of the bodies of messages, as the publish commands take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nsparq.headers import encode_headers
from nsparq.wire.client import with_headers

__all__ = ["Headers", "HeadersOfMany", "add_headers"]

Headers = Mapping[str, str]
HeadersOfMany = Headers | Iterable[Headers | None]
"""The same headers for all messages, or those of each."""


def add_headers(bodies: list[bytes], headers: HeadersOfMany) -> list[bytes]:
    """The messages with their headers: a mapping for all, or one for each. Empty if no message has
    any: then the command is NSQ's own. Raises ValueError, TypeError."""
    if not all(bodies):
        raise ValueError("there must be messages, and none of them empty")
    if isinstance(headers, Mapping):
        prefix = with_headers(encode_headers(headers), b"")
        return [prefix + body for body in bodies] if headers else []
    blocks = [encode_headers(one) if one else b"" for one in headers]
    if len(blocks) != len(bodies):
        raise ValueError(f"{len(bodies)} messages, but {len(blocks)} headers")
    return [*map(with_headers, blocks, bodies)] if any(blocks) else []
