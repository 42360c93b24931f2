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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

from crc32c import crc32c

from nsparq.errors import NsparqError
from nsparq.storage.files import Buffer

VERSION: Final = 4
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
_CHANGES: Final = struct.Struct(">BQ")
"""How the content of a CHANGES frame begins."""
_CONFIRM: Final = struct.Struct(">BQQ")
"""The content of a CONFIRM frame."""


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


@dataclass(slots=True)
class Frame:
    kind: FrameKind
    data: Buffer = b""
    """A view of what was received, in a frame that was."""

    def encode(self) -> bytes:
        kind = bytes((self.kind,))
        return b"".join([_HEAD.pack(1 + len(self.data), crc32c(self.data, crc32c(kind))), kind, self.data])

    @classmethod
    def of_number(cls, kind: FrameKind, number: int, data: bytes = b"") -> Frame:
        return cls(kind, _NUMBER.pack(number) + data)

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
    def text(self) -> str:
        return bytes(self.data).decode(errors="replace")

    @property
    def rest(self) -> Buffer:
        """What follows the number."""
        return self.data[_NUMBER.size :]

    def fields(self, **types: type) -> list[Any]:
        """These fields of JSON data. Raises BadFrame if one is missing or has another type."""
        with self.reading():
            found = json.loads(bytes(self.data))
            values = [found[name] for name in types]
            for value, expected in zip(values, types.values(), strict=True):
                if not isinstance(value, expected):
                    raise TypeError
                if isinstance(value, str):
                    # Half a surrogate pair could not be written anywhere.
                    value.encode()
        return values

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raises BadFrame if the peer's data leads to an error in the block."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise BadFrame(f"{self.kind.name} cannot be understood") from error


def encode_confirm(made: int, synced: int) -> bytes:
    """A CONFIRM frame. There is one for each turn of a busy primary."""
    content = _CONFIRM.pack(FrameKind.CONFIRM, made, synced)
    return _HEAD.pack(len(content), crc32c(content)) + content


def encode_changes(first: int, pieces: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """A CHANGES frame, in pieces, without a copy of the changes; and its size."""
    head = _CHANGES.pack(FrameKind.CHANGES, first)
    crc, size = crc32c(head), len(head)
    for piece in pieces:
        crc = crc32c(piece, crc)
        size += len(piece)
    return [_HEAD.pack(size, crc) + head, *pieces], _HEAD.size + size


class FrameReader:
    """Cuts received bytes into frames. `limit` is the largest frame that is accepted."""

    def __init__(self) -> None:
        self.limit = MAX_GREETING
        self._begun = bytearray()
        """The beginning of a frame."""
        self._wanted = 0
        """Bytes of it that are needed to go on."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete. Their data is not copied. Raises BadFrame."""
        received: Buffer = data
        if self._begun:
            self._begun += data
            if len(self._begun) < self._wanted:
                return
            received, self._begun = self._begun, bytearray()
        view, start, end = memoryview(received), 0, len(received)
        while start < end:
            self._wanted = _HEAD.size
            if end - start >= _HEAD.size:
                size, crc = _HEAD.unpack_from(view, start)
                if not 0 < size <= self.limit:
                    raise BadFrame(f"a frame of {size} bytes")
                self._wanted += size
            if end - start < self._wanted:
                self._begun += view[start:]
                return
            content = view[start + _HEAD.size : start + self._wanted]
            start += self._wanted
            if crc32c(content) != crc:
                raise BadFrame("checksum mismatch")
            kind = _KINDS.get(content[0])
            if kind is None:
                raise BadFrame(f"a frame of the unknown kind {content[0]}")
            yield Frame(kind, content[1:])


_KINDS: Final = {int(kind): kind for kind in FrameKind}


class Writer(Protocol):
    """A connection that frames are sent to."""

    def is_closing(self) -> bool: ...
    def write(self, data: bytes) -> None: ...


def send_frame(writer: Writer, frame: Frame) -> None:
    """Does nothing if the connection has ended: whoever reads from it notices. uvloop would raise
    RuntimeError."""
    if not writer.is_closing():
        writer.write(frame.encode())


async def send_pings(writer: Writer) -> None:
    while True:
        await asyncio.sleep(PING_S)
        send_frame(writer, Frame(FrameKind.PING))


def proof(secret: bytes, side: str, challenge: bytes, name: str) -> str:
    """What only a node with the secret can answer to a challenge. `side` keeps one side's answer
    from being used by the other."""
    return hmac.new(secret, b"\0".join([side.encode(), challenge, name.encode()]), "sha256").hexdigest()


def is_proof(given: str, secret: bytes, side: str, challenge: bytes, name: str) -> bool:
    return hmac.compare_digest(given.encode(), proof(secret, side, challenge, name).encode())
