"""Frames between a primary and a follower.

 0      4      8      9                 8+size
 +------+------+------+------- … -------+
 | size | crc  | kind | data            |      size counts the kind and the data, the crc covers them;
 +------+------+------+------- … -------+      big endian

The follower connects. Both sides prove that they know the cluster's secret, then the follower says
what it has. It gets the changes behind that, or a snapshot first. It confirms what it has made.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from nsparq.errors import NsparqError

VERSION: Final = 3
PING_S: Final = 1.0
"""How often both sides show that they are alive."""
SILENCE_S: Final = 5.0
"""A peer that says nothing for so long counts as lost."""
MAX_FRAME: Final = 300 << 20
"""More than any frame has."""
MAX_GREETING: Final = 64 << 10
"""Limit on frames of a peer that has not proved anything."""

_HEAD: Final = struct.Struct(">II")
_NUMBER: Final = struct.Struct(">Q")
_NUMBERS: Final = struct.Struct(">QQ")


class FrameKind(IntEnum):
    CHALLENGE = 1  # to the follower: random bytes
    HELLO = 2  # to the primary: JSON with version, name, proof, nonce, process, and its epoch, number, copy
    WELCOME = 3  # to the follower: JSON with name, proof, epoch, copy, and whether it goes on where it was
    REFUSED = 4  # to the follower: the reason, as text
    SNAPSHOT = 5  # to the follower: changes that make its data path equal to a snapshot
    JOINED = 6  # to the follower: end of the snapshot; its bytes may have that many changes
    CHANGES = 7  # to the follower: number of changes before these, and changes
    CONFIRM = 8  # to the primary: number of changes that the follower has made, and has synced
    PING = 9  # in both directions: still there
    INVENTORY = 10  # to the primary: JSON with the files that a follower has; it gets the rest
    JOINING = 11  # to the follower: a snapshot follows, with the names after that many changes


class BadFrame(NsparqError):
    """The peer broke the protocol."""


class Frame(NamedTuple):
    kind: FrameKind
    data: bytes = b""

    def encode(self) -> bytes:
        kind = bytes((self.kind,))
        head = _HEAD.pack(1 + len(self.data), crc32c(self.data, crc32c(kind)))
        return b"".join((head, kind, self.data))

    @classmethod
    def of_number(cls, kind: FrameKind, number: int, data: bytes = b"") -> Frame:
        return cls(kind, _NUMBER.pack(number) + data)

    @classmethod
    def of_numbers(cls, kind: FrameKind, first: int, second: int) -> Frame:
        return cls(kind, _NUMBERS.pack(first, second))

    @classmethod
    def of_fields(cls, kind: FrameKind, fields: dict[str, Any]) -> Frame:
        return cls(kind, json.dumps(fields).encode())

    @property
    def number(self) -> int:
        if len(self.data) < _NUMBER.size:
            raise BadFrame(f"{self.kind.name} without a number")
        number: int = _NUMBER.unpack_from(self.data)[0]
        return number

    @property
    def numbers(self) -> tuple[int, int]:
        """Of a CONFIRM."""
        if len(self.data) != _NUMBERS.size:
            raise BadFrame(f"{self.kind.name} without two numbers")
        made, synced = _NUMBERS.unpack(self.data)
        return made, synced

    @property
    def rest(self) -> bytes:
        """What follows the number."""
        return self.data[_NUMBER.size :]

    def fields(self, *names: str) -> list[Any]:
        """These fields of JSON data. Raises BadFrame if one is missing."""
        try:
            found = json.loads(self.data)
            return [found[name] for name in names]
        except (ValueError, KeyError, TypeError) as error:
            raise BadFrame(f"{self.kind.name} cannot be understood") from error


class FrameReader:
    """Cuts received bytes into frames. `limit` is the largest frame that is accepted."""

    def __init__(self) -> None:
        self.limit = MAX_GREETING
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete. Raises BadFrame."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            size, crc = _HEAD.unpack_from(self._buffer)
            if not 0 < size <= self.limit:
                raise BadFrame(f"a frame of {size} bytes")
            end = _HEAD.size + size
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[_HEAD.size : end])
            if crc32c(content) != crc:
                raise BadFrame("checksum mismatch")
            if content[0] not in FrameKind.__members__.values():
                raise BadFrame(f"a frame of the unknown kind {content[0]}")
            del self._buffer[:end]
            yield Frame(FrameKind(content[0]), content[1:])


class FrameStream:
    """Frames from a stream, one by one."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self.reader = FrameReader()
        self._stream = stream
        self._ready: list[Frame] = []

    async def take_from(self, silence_s: float, *kinds: FrameKind) -> Frame:
        """The same from a peer that pings. Raises TimeoutError if it is silent."""
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    frame = await self.take(FrameKind.PING, *kinds)
            except TimeoutError as error:
                raise TimeoutError(f"silence of {silence_s:g} s") from error
            if frame.kind is not FrameKind.PING:
                return frame

    async def take(self, *kinds: FrameKind) -> Frame:
        """The next frame, which must be of one of these kinds. Raises BadFrame, OSError."""
        while not self._ready:
            data = await self._stream.read(256 << 10)
            if not data:
                raise ConnectionResetError("the connection has ended")
            self._ready = [*self.reader.feed(data)]
        frame = self._ready.pop(0)
        if frame.kind not in kinds:
            raise BadFrame(f"unexpected {frame.kind.name}")
        return frame


def send_frame(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Does nothing if the connection has ended: whoever reads from it notices. uvloop would raise
    RuntimeError."""
    if not writer.is_closing():
        writer.write(frame.encode())


async def send_pings(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(PING_S)
        send_frame(writer, Frame(FrameKind.PING))


def proof(secret: bytes, side: str, challenge: bytes, name: str) -> str:
    """What only a node with the secret can answer to a challenge. `side` keeps one side's answer
    from being used by the other."""
    return hmac.new(secret, b"\0".join([side.encode(), challenge, name.encode()]), "sha256").hexdigest()
