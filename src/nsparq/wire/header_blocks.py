"""Messages with headers on the wire.

4          size           the rest
+----------+------ … -----+------ … -----+
| block    | header block | body         |     nsparq.headers describes the block; big endian
| size     |              |              |
+----------+------ … -----+------ … -----+
"""

from __future__ import annotations

import struct
from array import array
from typing import Final

from nsparq import kernel
from nsparq.errors import FatalClientError
from nsparq.headers import MAX_BLOCK, decode_headers
from nsparq.packed import PackedBodies

BLOCK_SIZE: Final = struct.Struct(">I")


def split_headers(messages: PackedBodies) -> PackedBodies:
    """The bodies of messages, with their header blocks beside them. Stops before the first message
    that breaks a rule."""
    if kernel.split_headers is not None:
        lengths, data, sizes, joined, has_numbers = kernel.split_headers(messages.lengths, messages.data)
        bodies, blocks = PackedBodies(array("I", lengths), data), PackedBodies(array("I", sizes), joined)
        blocks.has_numbers = has_numbers
        return bodies.with_blocks(blocks)
    pairs = []
    for message in messages[:]:
        try:
            pairs.append(_split_one(message))
        except ValueError:
            break
    bodies = PackedBodies.of([body for _, body in pairs])
    return bodies.with_blocks(PackedBodies.of([block for block, _ in pairs]))


def take_headers(messages: PackedBodies, verb: str) -> PackedBodies:
    """The same for all messages. Raises FatalClientError if one breaks a rule."""
    found = split_headers(messages)
    if len(found.lengths) < len(messages.lengths):
        try:
            _split_one(messages[len(found.lengths)])
        except ValueError as error:
            raise FatalClientError("E_BAD_MESSAGE", f"{verb} {error}") from error
    return found


def _split_one(message: bytes) -> tuple[bytes, bytes]:
    """Header block and body of a message. Raises ValueError with a text for the client."""
    if len(message) < BLOCK_SIZE.size:
        raise ValueError("message has no header block")
    (size,) = BLOCK_SIZE.unpack_from(message)
    if size > MAX_BLOCK:
        raise ValueError(f"message headers too big {size} > {MAX_BLOCK}")
    block, body = message[BLOCK_SIZE.size : BLOCK_SIZE.size + size], message[BLOCK_SIZE.size + size :]
    if not body:
        raise ValueError("message has no body behind its headers")
    decode_headers(block)
    return block, body
