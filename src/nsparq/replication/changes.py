"""Changes to a data path, as records: the calls of storage.files that change something, in order.

 0           4      5      9        17
 +-----------+------+------+--------+------ … ------+
 | data size | kind | file | number | data          |      little endian
 +-----------+------+------+--------+------ … ------+

Files are known by numbers, as a process knows them by descriptors: a file that is renamed or
removed while it is open keeps its number. Names are paths below the data path.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from nsparq.errors import NsparqError
from nsparq.storage.files import Buffer

_HEAD: Final = struct.Struct("<IBIQ")
_SIZE: Final = struct.Struct("<Q")
MAX_DATA: Final = 256 << 20
"""More than any change has. A larger size is no record."""


class Kind(IntEnum):
    """What is changed. The comment has what a record holds besides its kind."""

    OPEN = 1  # file, data: name. Creates the file if there is none
    WRITE = 2  # file, number: position, data: bytes
    TRUNCATE = 3  # file, number: size
    SYNC = 4  # file, number: 1 to sync before the next change, 0 beside it
    CLOSE = 5  # file
    UNLINK = 6  # data: name
    RENAME = 7  # number: size of the first name, data: both names
    MAKE_DIRECTORY = 8  # data: name
    REMOVE_TREE = 9  # data: name
    SYNC_DIRECTORY = 10  # number: as SYNC, data: name
    ALLOCATE = 11  # number: size, data: name
    SYNC_NAMED = 12  # number: as SYNC, data: name
    KEEP = 13  # number: bytes, data: name. Of a snapshot: keep this beginning of a file
    ZEROS = 14  # file, number: position, data: how many zeros to write, 8 bytes


_KINDS: Final = {int(kind): kind for kind in Kind}
_WRITE: Final = int(Kind.WRITE)


class BadChange(NsparqError):
    """These bytes are not a change."""


@dataclass(slots=True)
class Change:
    kind: Kind
    file: int = 0
    number: int = 0
    data: Buffer = b""

    @classmethod
    def of_name(cls, kind: Kind, name: str, *, file: int = 0, number: int = 0) -> Change:
        return cls(kind, file, number, name.encode())

    @classmethod
    def rename(cls, source: str, target: str) -> Change:
        first = source.encode()
        return cls(Kind.RENAME, 0, len(first), first + target.encode())

    @classmethod
    def zeros(cls, file: int, position: int, size: int) -> Change:
        return cls(Kind.ZEROS, file, position, _SIZE.pack(size))

    @property
    def size(self) -> int:
        """Of ZEROS."""
        if len(self.data) != _SIZE.size or (size := _SIZE.unpack(self.data)[0]) > MAX_DATA:
            raise BadChange("a bad number of zeros")
        return int(size)

    @property
    def name(self) -> str:
        return bytes(self.data).decode()

    @property
    def names(self) -> tuple[str, str]:
        """Of a RENAME."""
        data = bytes(self.data)
        return data[: self.number].decode(), data[self.number :].decode()

    def encode(self) -> bytes:
        return _HEAD.pack(len(self.data), self.kind, self.file, self.number) + self.data


def encode_write(file: int, position: int, buffers: Sequence[Buffer]) -> list[bytes]:
    """A WRITE in pieces: to join them costs more than the rest of their way. What may change is
    copied."""
    pieces, size = [b""], 0
    for buffer in buffers:
        piece = buffer if type(buffer) is bytes else bytes(buffer)
        pieces.append(piece)
        size += len(piece)
    pieces[0] = _HEAD.pack(size, _WRITE, file, position)
    return pieces


def decode_changes(data: Buffer) -> Iterator[Change]:
    """The changes in these bytes, which must be complete. Their data is not copied. Raises
    BadChange."""
    data = memoryview(data)
    position = 0
    while position < len(data):
        if len(data) - position < _HEAD.size:
            raise BadChange(f"a change is cut off at byte {position}")
        size, kind, file, number = _HEAD.unpack_from(data, position)
        start = position + _HEAD.size
        if size > MAX_DATA or kind not in _KINDS:
            raise BadChange(f"no change at byte {position}")
        if start + size > len(data):
            raise BadChange(f"a change is cut off at byte {position}")
        yield Change(_KINDS[kind], file, number, data[start : start + size])
        position = start + size
