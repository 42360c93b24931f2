"""Ranges of a log: whole batches, in a file or in memory, for readers that take many at once.

Log.locate() finds a LogRange by the index alone, on the event loop. A thread then reads the bytes
through a descriptor of its own, even if the segment is removed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from weakref import ref

from nsparq.errors import CorruptBatch, StorageError
from nsparq.storage.batch import HEADER_SIZE, Batch, encode_batch
from nsparq.storage.batch_list import BatchList
from nsparq.storage.files import Files
from nsparq.storage.gaps import Gaps
from nsparq.storage.recovery import Damage, scan

MAX_BATCHES: Final = 4096
"""Limit on the batches of a range in memory, because each costs time on the event loop."""


class OffsetGone(StorageError):
    """The log no longer holds this sequence number."""

    def __init__(self, sequence: int, earliest: int) -> None:
        super().__init__(f"{sequence} is gone, the log begins at {earliest}")
        self.sequence, self.earliest = sequence, earliest


class OffsetAhead(StorageError):
    """The log has not reached this sequence number yet."""

    def __init__(self, sequence: int, latest: int) -> None:
        super().__init__(f"{sequence} is not there yet, the log ends before {latest}")
        self.sequence, self.latest = sequence, latest


class _OpenFile:
    """Closes its descriptor when it goes.

    Not the work of FileReader itself: Python runs __del__ before it clears weak references. While
    one thread closed the file, SharedReader could give the reader to another.
    """

    __slots__ = ("_files", "fd")

    def __init__(self, files: Files, fd: int) -> None:
        self._files = files
        self.fd = fd

    def __del__(self) -> None:
        self._files.close(self.fd)


class FileReader:
    """A file that stays open while anything refers to this object."""

    __slots__ = ("__weakref__", "_file", "_files", "is_replaced", "path")

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self.path = path
        self.is_replaced = False
        """Whether the path names another file now."""
        self._file = _OpenFile(files, files.open_read(path))

    def read(self, size: int, position: int) -> bytes:
        return self._files.read(self._file.fd, size, position)

    @property
    def is_remote(self) -> bool:
        """Whether read() has to fetch the file from an archive first."""
        return False

    def read_cached(self, size: int, position: int) -> memoryview | None:
        """For the event loop: see Files.read_cached."""
        return self._files.read_cached(self._file.fd, size, position)


class SharedReader:
    """Gives all ranges of a file the same FileReader, while any of them is in use."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._reader: ref[FileReader] | None = None

    def get(self) -> FileReader:
        reader = self._reader() if self._reader is not None else None
        if reader is None:
            reader = FileReader(self._files, self._path)
            self._reader = ref(reader)
        return reader

    def forget(self) -> None:
        """The path names another file from now on."""
        reader = self._reader() if self._reader is not None else None
        if reader is not None:
            reader.is_replaced = True
        self._reader = None


class Lost(NamedTuple):
    """Damage in a range: its bytes in the file, and the sequence numbers that were there."""

    position: int
    end: int
    first: int
    next: int


class Verified(NamedTuple):
    """Whole batches of a range, each with a correct checksum."""

    data: bytes
    lost: list[Lost]
    """Damage that was left out; pass it to Log.note_lost()."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """Whole batches of a log, one after the other."""

    first: int
    """Sequence number of the first message. It may be lower than the one asked for, because
    batches are not split. If it is higher, the numbers in between have no message."""
    next: int
    """The sequence number after the last message."""
    size: int
    """Bytes."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of sequence numbers without a message. If the bytes have one there, it was
    emptied and must not be used."""
    position: int = 0
    """Where the bytes begin in the file."""
    reader: FileReader | None = None
    """None if the batches are in memory."""
    batches: tuple[Batch, ...] = ()

    @property
    def is_remote(self) -> bool:
        """Whether reading waits for an archive, which may take long."""
        return self.reader is not None and self.reader.is_remote

    def read(self) -> bytes:
        """The bytes, unchecked. Any thread may call this."""
        if self.reader is None:
            return b"".join([piece for batch in self.batches for piece in encode_batch(batch)])
        data = self.reader.read(self.size, self.position)
        if len(data) < self.size:
            raise CorruptBatch(self.reader.path, self.position + len(data), "the file is shorter than it was")
        return data

    def read_verified(self) -> Verified:
        """The bytes without damaged batches. Any thread may call this. Reads every batch."""
        if self.reader is None:
            return Verified(self.read(), [])
        data = self.reader.read(self.size, self.position)
        kept: list[memoryview] = []
        lost: list[Lost] = []
        damage: Damage | None = None
        expected = self.first
        for item in scan(lambda size, at: data[at : at + size], len(data), first=self.first):
            if isinstance(item, Damage):
                damage = item
                continue
            if damage is not None:
                lost.append(self._lost(damage, expected, item.head.base))
                damage = None
            kept.append(memoryview(data)[item.position : item.position + item.head.size])
            expected = item.head.end
        if damage is not None or len(data) < self.size:
            start = len(data) if damage is None else damage.position
            lost.append(self._lost(Damage(start, self.size), expected, self.next))
        return Verified(b"".join(kept) if lost else data, lost)

    def _lost(self, damage: Damage, first: int, following: int) -> Lost:
        return Lost(self.position + damage.position, self.position + damage.end, first, following)


@dataclass(frozen=True, slots=True)
class TimeSearch:
    """Finds the first message published at or after a time. Any thread may call run()."""

    _timestamp_ns: int
    _otherwise: int
    """The answer if the range has no such message."""
    _range: LogRange | None = None

    @property
    def is_remote(self) -> bool:
        """Whether run() waits for an archive, which may take long."""
        return self._range is not None and self._range.is_remote

    def run(self) -> int:
        """Its sequence number; the log's end if there is none."""
        if self._range is not None and self._range.reader is not None:
            data = self._range.reader.read(self._range.size, self._range.position)
            for item in scan(lambda size, at: data[at : at + size], len(data), first=self._range.first):
                if not isinstance(item, Damage) and item.head.timestamp_ns >= self._timestamp_ns:
                    return item.head.base
        return self._otherwise


def range_in_memory(batches: Iterable[Batch], max_bytes: int, gaps: Gaps) -> LogRange | None:
    """The first of these batches that follow each other, up to about `max_bytes`, at least one."""
    chosen: list[Batch] = []
    size = 0
    for batch in batches:
        encoded = HEADER_SIZE + 4 * batch.count + len(batch.data)
        if batch.headers is not None:
            encoded += 4 * batch.count + len(batch.headers.data)
        if chosen and (
            size + encoded > max_bytes or batch.base != chosen[-1].end or len(chosen) == MAX_BATCHES
        ):
            break
        chosen.append(batch)
        size += encoded
    if not chosen:
        return None
    first, following = chosen[0].base, chosen[-1].end
    return LogRange(first, following, size, gaps.inside(first, following), batches=tuple(chosen))


def locate_in_memory(batches: BatchList, sequence: int, max_bytes: int, gaps: Gaps) -> LogRange | None:
    """Batches from the one at or after `sequence` on, up to about `max_bytes`."""
    found = batches.at_or_after(sequence)
    return None if found is None else range_in_memory(batches.since(found.base), max_bytes, gaps)
