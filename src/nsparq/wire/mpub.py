"""Message bodies on the wire: the rule for their size, and the messages of an MPUB.

4        4         4        size
+--------+---------+--------+--------+--------+--------+-
| body   | message | size   | bytes  | size   | bytes  |  …
| size   | count   |        |        |        |        |
+--------+---------+--------+--------+--------+--------+-
"""

from __future__ import annotations

import struct
from array import array
from itertools import accumulate
from typing import Final

from nsparq import kernel
from nsparq.errors import FatalClientError
from nsparq.packed import PackedBodies
from nsparq.wire.header_blocks import take_headers
from nsparq.wire.limits import MAX_IDENTIFY_BODY, Limits

SIZE: Final = struct.Struct(">i")
_MAX_PARTS: Final = 64
"""Parts of an MPUB that arrives in small pieces are joined when there are this many."""


def bad_body(description: str) -> FatalClientError:
    return FatalClientError("E_BAD_BODY", description)


def bad_message(description: str) -> FatalClientError:
    return FatalClientError("E_BAD_MESSAGE", description)


def check_message_size(size: int, limits: Limits, verb: str, name: str = "message") -> None:
    """The rule for the size of one message. The compiled loops stop where it would raise."""
    if size <= 0:
        raise bad_message(f"{verb} invalid {name} body size {size}")
    if size > limits.max_msg_size:
        raise bad_message(f"{verb} message too big {size} > {limits.max_msg_size}")


def check_body_size(size: int, limits: Limits, verb: str) -> None:
    """The rule for the size of everything behind the line of an IDENTIFY, AUTH or MPUB."""
    if size <= 0:
        raise bad_body(f"{verb} invalid body size {size}")
    most = limits.max_body_size
    if verb == "IDENTIFY":
        most = min(most, MAX_IDENTIFY_BODY)
    if size > most:
        raise bad_body(f"{verb} body too big {size} > {most}")


class MessageReader:
    """Takes the messages of one MPUB out of a buffer, as they arrive.

    The declared body size does not end an MPUB: NSQ reads `count` messages whatever they add up to.
    So does this, up to `max_bytes`.
    """

    def __init__(self, count: int, limits: Limits, max_bytes: int) -> None:
        if not 1 <= count <= limits.max_mpub_count:
            raise bad_body(f"MPUB invalid message count {count}")
        self.missing = 4
        """Bytes needed behind the position before the next message is whole; 0 when all are
        taken."""
        self.unread = "MPUB failed to read message(0) body size"
        """NSQ's error text if the stream ends now."""
        self.held = 0
        """Bytes of the messages taken so far, with their sizes."""
        self._count = count
        self._limits = limits
        self._max_bytes = max_bytes
        self._parts: list[PackedBodies] = []
        self._found = 0
        self._data_size = 0

    def take(self, buffer: bytes, position: int) -> int:
        """Take all whole messages from `position` on. Gives the position behind them."""
        if kernel.pack_messages is not None:
            left = self._count - self._found
            sizes, data, position = kernel.pack_messages(buffer, position, left, self._limits.max_msg_size)
            if sizes:
                self._add(PackedBodies(array("I", sizes), data))
        bodies: list[bytes] = []
        available = len(buffer)
        self.missing = 0
        try:
            for number in range(self._found, self._count):
                if available - position < 4:
                    self.missing, self.unread = 4, f"MPUB failed to read message({number}) body size"
                    break
                (size,) = SIZE.unpack_from(buffer, position)
                check_message_size(size, self._limits, "MPUB", f"message({number})")
                end = position + 4 + size
                if end > available:
                    self.missing, self.unread = 4 + size, "MPUB failed to read message body"
                    break
                bodies.append(buffer[position + 4 : end])
                position = end
        finally:
            if bodies:
                self._add(PackedBodies.of(bodies))
            if self._data_size > self._max_bytes:
                raise self._too_big() from None
        return position

    def _add(self, part: PackedBodies) -> None:
        self._parts.append(part)
        self._found += len(part.lengths)
        self._data_size += len(part.data)
        self.held = self._data_size + 4 * self._found
        if len(self._parts) >= _MAX_PARTS:
            self._parts = [PackedBodies.join(self._parts)]

    def _too_big(self) -> FatalClientError:
        """The client declared a smaller body than it sends. The error names the first size
        beyond."""
        limit = self._max_bytes
        held = next(total for total in accumulate(self.bodies().lengths) if total > limit)
        return bad_body(f"MPUB body too big {held} > {limit}")

    def bodies(self) -> PackedBodies:
        return PackedBodies.join(self._parts)


def decode_multiple(body: bytes, limits: Limits, *, has_headers: bool = False) -> PackedBodies:
    """The messages of an MPUB's body without its leading size, which is what /mpub takes in binary
    form. `has_headers` says that each begins with a header block. Raises FatalClientError."""
    if len(body) < 4:
        raise bad_body("MPUB failed to read message count")
    reader = MessageReader(SIZE.unpack_from(body)[0], limits, max_bytes=len(body))
    reader.take(body, 4)
    if reader.missing:
        raise bad_message(reader.unread)
    return take_headers(reader.bodies(), "MPUB") if has_headers else reader.bodies()
