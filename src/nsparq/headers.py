"""Message headers: names with values beside the body, as one block of bytes.

 0           1             1+n         3+n
 +-----------+------ … ----+-----------+------ … -----+
 | name size | name        | value size| value        |   … and so on for every header; big endian
 +-----------+------ … ----+-----------+------ … -----+

The block has this form on the wire and on disk. docs/reference/headers.md has the rules.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from nsparq import kernel

Headers = Mapping[str, str]
T = TypeVar("T")
HeadersOfMany = Headers | Iterable[Headers | None]
"""The same headers for all messages, or those of each."""

MAX_BLOCK: Final = 65_535
"""Most bytes that the headers of one message may have together."""

ORIGIN: Final = ("nsq-producer", "nsq-epoch", "nsq-number")
"""Name a message of an idempotent producer. nsqd reads them quickest if they come first, in this
order."""

_NAME = re.compile(r"[a-z0-9._-]{1,255}")
_ORIGIN = frozenset(ORIGIN)
_VALUE_SIZE = struct.Struct(">H")


def without_origin(headers: Headers) -> Headers:
    """The headers of a message that is published again: it is no repeat of the original."""
    if _ORIGIN.isdisjoint(headers):
        return headers
    return {name: value for name, value in headers.items() if name not in _ORIGIN}


def encode_headers(headers: Headers) -> bytes:
    """The block of a message's headers. Raises ValueError and TypeError with a text for the
    user."""
    if kernel.encode_headers is not None:
        made = kernel.encode_headers(headers)
        if made is not None:
            return made
    found: dict[bytes, bytes] = {}
    for name, value in headers.items():
        lower = name.lower()
        if not _NAME.fullmatch(lower):
            raise ValueError(f"not a header name: {name!r}; use 1 to 255 letters, digits, '-', '_' and '.'")
        if not isinstance(value, str):
            raise TypeError(f"the header {name!r} is a {type(value).__name__}, not a text")
        if lower.encode() in found:
            raise ValueError(f"the header {lower!r} occurs twice; upper and lower case are the same")
        found[lower.encode()] = value.encode()
    if sum(3 + len(name) + len(value) for name, value in found.items()) > MAX_BLOCK:
        raise ValueError(f"the headers of a message must not exceed {MAX_BLOCK} bytes")
    return b"".join(
        b"%c%b%b%b" % (len(name), name, _VALUE_SIZE.pack(len(value)), value) for name, value in found.items()
    )


def decode_headers(block: bytes | memoryview) -> dict[str, str]:
    """The headers of a block. Raises ValueError if it is not one."""
    if kernel.decode_headers is not None:
        found = kernel.decode_headers(block)
        if found is not None:
            return found
    data = bytes(block)
    headers: dict[str, str] = {}
    position = 0
    try:
        while position < len(data):
            name_end = position + 1 + data[position]
            value_start = name_end + 2
            value_end = value_start + _VALUE_SIZE.unpack_from(data, name_end)[0]
            name = data[position + 1 : name_end].decode("ascii")
            if not _NAME.fullmatch(name) or name in headers or value_end > len(data):
                raise ValueError(f"bad header at byte {position}")
            headers[name] = data[value_start:value_end].decode()
            position = value_end
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"bad header at byte {position}") from error
    return headers


def with_lazy_headers(cls: type[T]) -> type[T]:
    """Gives a class the attribute `headers`: those of the block in its slot `_headers`. They are
    decoded when somebody asks for them, and take the place of the block."""

    def headers(self: Any) -> Any:
        if isinstance(self._headers, bytes):
            self._headers = decode_headers(self._headers)
        return self._headers

    attribute: Any = property(headers)
    if kernel.lazy_headers is not None:
        # A consumer that reads headers needs a tenth less of its processor time.
        attribute = kernel.lazy_headers(cls._headers, decode_headers)  # type: ignore[attr-defined]
    cls.headers = attribute  # type: ignore[attr-defined]
    return cls
