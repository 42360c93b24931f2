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


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """The block of a message's headers. Raises ValueError with a text for the user."""
    parts = []
    for name, value in headers.items():
        lower = name.lower()
        if not _NAME.fullmatch(lower):
            raise ValueError(f"not a header name: {name!r}; use 1 to 255 letters, digits, '-', '_' and '.'")
        encoded = value.encode()
        if len(encoded) > MAX_BLOCK:
            raise ValueError(f"the headers of a message must not exceed {MAX_BLOCK} bytes")
        parts += [bytes((len(lower),)), lower.encode(), _VALUE_SIZE.pack(len(encoded)), encoded]
    block = b"".join(parts)
    if len(block) > MAX_BLOCK:
        raise ValueError(f"the headers of a message must not exceed {MAX_BLOCK} bytes")
    return block


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
            name = data[position + 1 : name_end].decode("ascii")
            if not _NAME.fullmatch(name) or name in headers or value_end > len(data):
                raise ValueError(f"bad header at byte {position}")
            headers[name] = data[value_start:value_end].decode()
            position = value_end
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"bad header at byte {position}") from error
    return headers
