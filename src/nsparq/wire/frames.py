"""Frames, server to client.

0        4          8                 4+size
+--------+----------+------- … -------+
| size   | type     | data            |      size counts the type and the data; big endian
+--------+----------+------- … -------+
"""

from __future__ import annotations

import struct
from typing import Final

RESPONSE: Final = 0
ERROR: Final = 1
MESSAGE: Final = 2
MESSAGE_WITH_HEADERS: Final = 3
"""For clients that asked for headers. Not in NSQ."""

_HEAD = struct.Struct(">ii")


def encode_frame(kind: int, data: bytes) -> bytes:
    return _HEAD.pack(len(data) + 4, kind) + data


OK: Final = encode_frame(RESPONSE, b"OK")
CLOSE_WAIT: Final = encode_frame(RESPONSE, b"CLOSE_WAIT")
HEARTBEAT: Final = encode_frame(RESPONSE, b"_heartbeat_")
