"""The client's side of a V2 conversation, without I/O: commands into bytes, bytes into frames.

Needs nothing but the standard library: a program that only talks to a broker installs nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nsparq import kernel
from nsparq.errors import NsparqError
from nsparq.headers import Headers, HeadersOfMany, encode_headers, without_origin
from nsparq.wire.frames import ERROR, MESSAGE, MESSAGE_WITH_HEADERS, RESPONSE

MAGIC: Final = b"  V2"
NOP: Final = b"NOP\n"
CLS: Final = b"CLS\n"
HEARTBEAT: Final = b"_heartbeat_"
OK: Final = b"OK"
CLOSE_WAIT: Final = b"CLOSE_WAIT"
WITH_HEADERS: Final = b" headers"
"""Ends the line of a publish command whose messages begin with their headers."""

_SIZE = struct.Struct(">i")
_pack_size = _SIZE.pack
_HEAD = struct.Struct(">ii")
_FRAME_HEAD = 8
_MESSAGE = struct.Struct(">iiqH16s")
_OK_FRAME = _HEAD.pack(4 + len(OK), RESPONSE) + OK
_KINDS = (RESPONSE, ERROR, MESSAGE, MESSAGE_WITH_HEADERS)
_MAX_INT = (1 << 31) - 1
_HTTP = 0x48545450
"""The letters HTTP where the size of a frame should be."""


class BadFrame(NsparqError):
    """Bytes that are not frames of an nsqd."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.frames: list[Frame] = []
        """The frames before the bad one. They are good."""


class Response(NamedTuple):
    data: bytes


class Error(NamedTuple):
    text: str
    """As the server wrote it: code, blank, description."""


Received = tuple[int, int, bytes, bytes, bytes]
"""A message as nsqd sent it: time of its publication in ns, attempts, id, body, header block. A
plain tuple, because that is made fastest."""
Frame = Response | Error | list[Received]
"""Messages that arrive behind each other are one list."""


class FrameDecoder:
    """Puts frames together, wherever the bytes are cut."""

    def __init__(self, max_size: int = 0) -> None:
        """`max_size` bounds a frame, in bytes; 0 means no bound."""
        self._max_size = max_size or _MAX_INT
        self._buffer = b""
        self._chunks: list[bytes] = []
        self._missing = 0
        """Bytes that must arrive before it makes sense to look again."""

    def receive_oks(self, data: bytes) -> int:
        """The number of OKs, if the bytes are nothing else: that is what a busy producer gets most
        of the time. For anything else 0, and nothing is received."""
        if self._buffer or not data.startswith(_OK_FRAME):
            return 0
        count, rest = divmod(len(data), len(_OK_FRAME))
        return count if not rest and data == _OK_FRAME * count else 0

    def receive_data(self, data: bytes, most: int = 0) -> list[Frame]:
        """The frames that are complete now, at most `most` of them if that is given: the bytes
        behind them may belong to a layer that is about to be added. Raises BadFrame."""
        if len(data) < self._missing:
            self._missing -= len(data)
            self._chunks.append(data)
            return []
        if self._chunks:
            self._chunks.append(data)
            data = b"".join(self._chunks)
            self._chunks.clear()
        buffer = self._buffer + data if self._buffer else data
        frames: list[Frame] = []
        try:
            position = self._decode(buffer, frames, most)
        except BadFrame as error:
            error.frames = frames
            raise
        self._buffer = buffer[position:] if position else buffer
        return frames

    def _decode(self, buffer: bytes, frames: list[Frame], most: int) -> int:
        position, available = 0, len(buffer)
        self._missing = 0
        while available - position >= _FRAME_HEAD:
            size, kind = _HEAD.unpack_from(buffer, position)
            end = position + 4 + size
            # Check before waiting for its bytes: nothing is kept of what is not a frame.
            if size < 4 or size > self._max_size or kind not in _KINDS:
                raise self._bad_head(size, kind)
            if end > available:
                self._missing = end - available
                break
            if kind == RESPONSE:
                frames.append(Response(buffer[position + _FRAME_HEAD : end]))
            elif kind == ERROR:
                frames.append(Error(buffer[position + _FRAME_HEAD : end].decode("utf-8", "replace")))
            else:
                messages, end = decode_messages(buffer, position, self._max_size)
                if not messages:
                    raise BadFrame(f"a message frame of {size} bytes: its parts do not fit")
                frames.append(messages)
            position = end
            if most and len(frames) >= most:
                break
        return position

    def _bad_head(self, size: int, kind: int) -> BadFrame:
        if size == _HTTP:
            return BadFrame("unexpected HTTP response, a nsqd TCP endpoint is required")
        if size < 4:
            return BadFrame(f"a frame of {size} bytes")
        if size > self._max_size:
            return BadFrame(f"a frame of {size} bytes is longer than {self._max_size}")
        return BadFrame(f"a frame of type {kind}")

    def take_rest(self) -> bytes:
        """Bytes that were not read. They belong to the layer that IDENTIFY has switched on."""
        rest = self._buffer + b"".join(self._chunks)
        self._buffer = b""
        self._chunks.clear()
        self._missing = 0
        return rest


def decode_messages(buffer: bytes, position: int, max_size: int) -> tuple[list[Received], int]:
    """The messages from `position` on, up to a frame that is not whole, too long or not a message;
    and the position of that frame."""
    if kernel.decode_messages is not None:
        return kernel.decode_messages(buffer, position, max_size)
    messages: list[Received] = []
    available = len(buffer)
    append, unpack_message, unpack_block_size = messages.append, _MESSAGE.unpack_from, _SIZE.unpack_from
    while available - position >= _MESSAGE.size:
        size, kind, timestamp_ns, attempts, message_id = unpack_message(buffer, position)
        start, end = position + _MESSAGE.size, position + 4 + size
        if not start <= end <= available or size > max_size:
            break
        block = b""
        if kind == MESSAGE_WITH_HEADERS and end - start >= _SIZE.size:
            block_start = start + 4
            start = block_start + unpack_block_size(buffer, start)[0]
            if not block_start <= start <= end:
                break
            block = buffer[block_start:start]
        elif kind != MESSAGE:
            break
        append((timestamp_ns, attempts, message_id, buffer[start:end], block))
        position = end
    return messages, position


# Commands


def sized(body: bytes) -> bytes:
    return _pack_size(len(body)) + body


def identify(body: bytes) -> bytes:
    return b"IDENTIFY\n" + sized(body)


def auth(secret: bytes) -> bytes:
    return b"AUTH\n" + sized(secret)


def sub(topic: str, channel: str) -> bytes:
    return f"SUB {topic} {channel}\n".encode()


def rdy(count: int) -> bytes:
    return b"RDY %d\n" % count


def fin(message_id: bytes) -> bytes:
    return b"FIN " + message_id + b"\n"


def fin_all(message_ids: Sequence[bytes]) -> bytes:
    """One command for each message."""
    return b"FIN " + b"\nFIN ".join(message_ids) + b"\n"


def req(message_id: bytes, delay_ms: int) -> bytes:
    return b"REQ %b %d\n" % (message_id, delay_ms)


def touch(message_id: bytes) -> bytes:
    return b"TOUCH " + message_id + b"\n"


# Publish commands. `line` is the first line of the command, without its end.


def pub_line(topic: bytes) -> bytes:
    return b"PUB " + topic


def dpub_line(pub_line: bytes, delay_ms: int) -> bytes:
    return b"D%b %d" % (pub_line, delay_ms)


def mpub_line(pub_line: bytes) -> bytes:
    return b"M" + pub_line


def pub(line: bytes, body: bytes) -> bytes:
    """PUB or DPUB."""
    return b"%b\n%b%b" % (line, _pack_size(len(body)), body)


def pub_with_headers(line: bytes, body: bytes, headers: Headers) -> tuple[bytes, bool]:
    """As pub(), and whether the message has headers: otherwise the command is NSQ's own. The number
    of an idempotent producer is left out. Raises TypeError for a value that is not a text."""
    if kernel.encode_with_headers is not None:
        encoded = kernel.encode_with_headers(line, body, headers)
        if encoded is not None:
            return encoded, True
    headers = without_origin(headers)
    if not headers:
        return pub(line, body), False
    return pub(line + WITH_HEADERS, with_headers(encode_headers(headers), body)), True


def with_headers(block: bytes, body: bytes) -> bytes:
    """The message of a publish command that ends with WITH_HEADERS."""
    return b"%b%b%b" % (_pack_size(len(block)), block, body)


def mpub_with_headers(
    line: bytes, bodies: Any, headers: HeadersOfMany, encode: Callable[[Any], Sequence[bytes]]
) -> tuple[bytes, bool]:
    """As pub_with_headers(), for several messages."""
    if kernel.encode_with_headers is not None:
        encoded = kernel.encode_with_headers(line, bodies, headers)
        if encoded is not None:
            return encoded, True
    bodies = encode(bodies)
    if isinstance(headers, Mapping):
        blocks = [encode_headers(without_origin(headers))] * len(bodies)
    else:
        blocks = [encode_headers(without_origin(one)) if one else b"" for one in headers]
    if len(blocks) != len(bodies):
        raise ValueError(f"{len(bodies)} messages, but {len(blocks)} headers")
    if not any(blocks) or not all(bodies):
        return mpub(line, bodies), False
    return mpub(line + WITH_HEADERS, [*map(with_headers, blocks, bodies)]), True


def mpub(line: bytes, bodies: Any, encode: Callable[[Any], Sequence[bytes]] | None = None) -> bytes:
    """`bodies` are bytes, unless `encode` makes them so. Raises ValueError if there is no message,
    or an empty one."""
    if kernel.encode_mpub is not None:
        encoded = kernel.encode_mpub(line, bodies)
        if encoded is not None:
            return encoded
    if encode is not None:
        bodies = encode(bodies)
    pack, count = _pack_size, len(bodies)
    sizes = [*map(len, bodies)]
    if not count or not all(sizes):
        raise ValueError("there must be messages, and none of them empty")
    total = 4 * count + sum(sizes)
    head = b"%b\n%b%b" % (line, pack(4 + total), pack(count))
    # Sizes and bodies alternate. Slices fill them in without a Python loop.
    if sizes.count(sizes[0]) == count:
        command = pack(sizes[0]).join([head, *bodies])
    else:
        parts = [head] * (1 + 2 * count)
        parts[1::2] = map(pack, sizes)
        parts[2::2] = bodies
        command = b"".join(parts)
    if len(command) != len(head) + total:
        raise TypeError("a message whose length is not its number of bytes")
    return command
