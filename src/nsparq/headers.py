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
from collections.abc import Mapping
from typing import Final

MAX_BLOCK: Final = 65_535
"""Most bytes that the headers of one message may have together."""

_NAME = re.compile(r"[a-z0-9._-]{1,255}")
_VALUE_SIZE = struct.Struct(">H")
_MOST_NAMES = 1000
_encoded_names: dict[str, bytes] = {}
"""Size and name, for names that were used before: programs use few."""
_decoded_names: dict[bytes, str] = {}


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """The block of a message's headers. Raises ValueError and TypeError with a text for the user."""
    parts: list[bytes] = []
    for name, value in headers.items():
        if not isinstance(value, str):
            raise TypeError(f"the header {name!r} is a {type(value).__name__}, not a text")
        encoded = value.encode()
        size = len(encoded)
        if size > MAX_BLOCK:
            raise _too_large()
        parts += (_encoded_names.get(name) or _encode_name(name), _VALUE_SIZE.pack(size), encoded)
    if len({*parts[::3]}) < len(headers):
        raise ValueError(f"a header occurs twice: {', '.join(headers)}; upper and lower case are the same")
    block = b"".join(parts)
    if len(block) > MAX_BLOCK:
        raise _too_large()
    return block


def _encode_name(name: str) -> bytes:
    lower = name.lower()
    if not _NAME.fullmatch(lower):
        raise ValueError(f"not a header name: {name!r}; use 1 to 255 letters, digits, '-', '_' and '.'")
    if len(_encoded_names) >= _MOST_NAMES:
        _encoded_names.clear()
    encoded = _encoded_names[name] = bytes((len(lower),)) + lower.encode()
    return encoded


def _too_large() -> ValueError:
    return ValueError(f"the headers of a message must not exceed {MAX_BLOCK} bytes")


def decode_headers(block: bytes | memoryview) -> dict[str, str]:
    """The headers of a block. Raises ValueError if it is not one."""
    data = bytes(block)
    headers: dict[str, str] = {}
    position = 0
    try:
        while position < len(data):
            name_end = position + 1 + data[position]
            value_start = name_end + 2
            value_end = value_start + _VALUE_SIZE.unpack_from(data, name_end)[0]
            encoded = data[position + 1 : name_end]
            name = _decoded_names.get(encoded) or _decode_name(encoded)
            if name in headers or value_end > len(data):
                raise ValueError(f"bad header at byte {position}")
            headers[name] = data[value_start:value_end].decode()
            position = value_end
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"bad header at byte {position}") from error
    return headers


def _decode_name(encoded: bytes) -> str:
    name = encoded.decode("ascii")
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a header name: {name!r}")
    if len(_decoded_names) >= _MOST_NAMES:
        _decoded_names.clear()
    _decoded_names[encoded] = name
    return name
