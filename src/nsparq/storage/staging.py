"""Messages staged until their transaction commits: one file for each part, chunks end to end.

 0       4       8      12      16      20      22
 +-------+-------+------+-------+-------+-------+-------+----------+--------+
 | magic | crc   | size | count | defer | topic | topic | lengths  | bodies |
 +-------+-------+------+-------+-------+-------+-------+----------+--------+
  "NQT1"  crc32c  whole  u32     ms      length          count×u32

Little endian; the crc covers everything after itself. A chunk holds the messages of one request. If
one of them has headers, the magic is "NQT2", and the lengths of the header blocks (count×u32) and
the blocks follow the bodies.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from nsparq.errors import CorruptBatch
from nsparq.packed import PackedBodies
from nsparq.storage.batch import lengths_from, table_bytes
from nsparq.storage.files import Files

_MAGIC: Final = b"NQT1"
_MAGIC_WITH_HEADERS: Final = b"NQT2"
_MAGICS: Final = (_MAGIC, _MAGIC_WITH_HEADERS)
_HEAD: Final = struct.Struct("<4sIIIIH")
_CHECKED_FROM: Final = 8


class Chunk(NamedTuple):
    """Place of some staged messages, with their topic and delay."""

    path: Path
    position: int
    size: int
    topic: str
    messages: int
    defer_ms: int

    def read(self, files: Files) -> PackedBodies:
        """The messages. Raises CorruptBatch or OSError."""
        with files.opened(self.path, read_only=True) as fd:
            raw = files.read(fd, self.size, self.position)
        name = self.topic.encode("ascii")
        if len(raw) < self.size:
            raise CorruptBatch(self.path, self.position, "the file is too short")
        magic, crc, *fields = _HEAD.unpack_from(raw)
        if magic not in _MAGICS or crc32c(memoryview(raw)[_CHECKED_FROM:]) != crc:
            raise CorruptBatch(self.path, self.position, "checksum mismatch")
        table = _HEAD.size + len(name)
        if fields != [self.size, self.messages, self.defer_ms, len(name)] or raw[_HEAD.size : table] != name:
            raise CorruptBatch(self.path, self.position, "not the chunk that was staged")
        bodies = table + 4 * self.messages
        lengths = lengths_from(raw[table:bodies])
        if magic == _MAGIC:
            return PackedBodies(lengths, raw[bodies:])
        behind = bodies + sum(lengths)
        blocks = behind + 4 * self.messages
        headers = PackedBodies(lengths_from(raw[behind:blocks]), raw[blocks:])
        return PackedBodies(lengths, raw[bodies:behind], headers)


class Part:
    """The messages that one writer staged. The file is open only while it is used."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self.path = path
        self.chunks: list[Chunk] = []
        self.messages = 0
        self.size = 0
        """Bytes of the file."""

    def load(self) -> None:
        """Read what an earlier run staged. A half-written chunk at the end is cut off: nobody got
        an answer for it."""
        with self._files.opened(self.path) as fd:
            for chunk in _chunks(self._files, fd, self.path):
                self._note(chunk)
            if self._files.size(fd) != self.size:
                self._files.truncate(fd, self.size)

    def restore(self, rows: Iterable[Sequence[Any]]) -> None:
        """Take the chunks from what rows() gave in an earlier run. Chunk.read() checks them."""
        for size, topic, messages, defer_ms in rows:
            self._note(Chunk(self.path, self.size, size, topic, messages, defer_ms))

    def rows(self) -> list[tuple[int, str, int, int]]:
        """Size, topic, messages and delay of each chunk."""
        return [(chunk.size, chunk.topic, chunk.messages, chunk.defer_ms) for chunk in self.chunks]

    def append(self, topic: str, bodies: PackedBodies, defer_ms: int) -> None:
        """Raises OSError, with nothing staged."""
        name, table = topic.encode("ascii"), table_bytes(bodies.lengths)
        magic, tail = _MAGIC, b""
        if bodies.headers is not None:
            magic, tail = _MAGIC_WITH_HEADERS, table_bytes(bodies.headers.lengths) + bodies.headers.data
        size = _HEAD.size + len(name) + len(table) + len(bodies.data) + len(tail)
        head = _HEAD.pack(magic, 0, size, len(bodies), defer_ms, len(name)) + name + table
        crc = crc32c(tail, crc32c(bodies.data, crc32c(head[_CHECKED_FROM:])))
        head = magic + crc.to_bytes(4, "little") + head[_CHECKED_FROM:]
        with self._files.opened(self.path) as fd:
            try:
                self._files.write(fd, [head, bodies.data, tail], self.size)
            except OSError:
                # What was written of it could be taken for a chunk later.
                self._files.truncate(fd, self.size)
                raise
        self._note(Chunk(self.path, self.size, size, topic, len(bodies), defer_ms))

    def _note(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.messages += chunk.messages
        self.size += chunk.size

    def sync(self, *, now: bool) -> None:
        """Sync the file now, or in the next round of syncs. Any thread may call this, while nothing
        is appended."""
        self._files.sync_later(self.path)
        if now:
            self._files.sync_file(self.path)


def _chunks(files: Files, fd: int, path: Path) -> Iterator[Chunk]:
    """The whole chunks at the beginning of a file."""
    position, size = 0, files.size(fd)
    while size - position >= _HEAD.size:
        magic, crc, whole, count, defer_ms, name_size = _HEAD.unpack(files.read(fd, _HEAD.size, position))
        if magic not in _MAGICS or whole < _HEAD.size + name_size + 4 * count or position + whole > size:
            return
        raw = files.read(fd, whole, position)
        if crc32c(memoryview(raw)[_CHECKED_FROM:]) != crc:
            return
        topic = raw[_HEAD.size : _HEAD.size + name_size].decode("ascii")
        yield Chunk(path, position, whole, topic, count, defer_ms)
        position += whole
