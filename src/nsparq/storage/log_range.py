"""Ranges of a log as they lie on disk, for readers that take them whole: found by the index, read anywhere.

Log.locate() gives a LogRange on the event loop, without touching a message; what it names is then read in a
thread, through a descriptor of its own, whatever becomes of the segment meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from nsparq.errors import CorruptBatch, StorageError
from nsparq.storage.batch import HEADER_SIZE, Batch, encode_head
from nsparq.storage.files import Files
from nsparq.storage.recovery import Damage, scan

MAX_BATCHES: Final = 4096
"""Batches of a range that is still in memory alone: those are counted one by one."""


class OffsetGone(StorageError):
    """The log no longer holds this sequence number: retention, or nobody needed it any more."""

    def __init__(self, sequence: int, earliest: int) -> None:
        super().__init__(f"{sequence} is gone, the log begins at {earliest}")
        self.sequence, self.earliest = sequence, earliest


class OffsetAhead(StorageError):
    """The log has not reached this sequence number yet."""

    def __init__(self, sequence: int, latest: int) -> None:
        super().__init__(f"{sequence} is not there yet, the log ends before {latest}")
        self.sequence, self.latest = sequence, latest


class LogPositions(NamedTuple):
    """How far a log reaches."""

    earliest: int
    """The first sequence number that can be read."""
    latest: int
    """The one that the next message gets."""
    first_ns: int
    """When the earliest message was published; 0 if there is none."""
    last_ns: int
    """The latest publish time; 0 if there is no message."""


class Handle:
    """A file open for reading for as long as somebody refers to it; ranges of a segment share one."""

    __slots__ = ("__weakref__", "_fd", "_files", "path")

    def __init__(self, files: Files, path: Path) -> None:
        self._fd = -1
        self._files = files
        self.path = path
        self._fd = files.open_read(path)

    def read(self, size: int, position: int) -> bytes:
        return self._files.read(self._fd, size, position)

    def __del__(self) -> None:
        if self._fd >= 0:
            self._files.close(self._fd)


class Lost(NamedTuple):
    """Damage in a range: where it lies in the file, and the numbers that should have been there."""

    position: int
    end: int
    first: int
    next: int


class Verified(NamedTuple):
    """Whole batches of a range, each of them checked."""

    data: bytes
    lost: list[Lost]
    """What had to be left out; to be told to Log.note_lost()."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """Whole batches, in a file or still in memory. The file is let go with the range."""

    first: int
    """Sequence number that the first batch begins with. It may lie before the one asked for, as batches are
    not cut; if it lies behind it, there is nothing in between."""
    next: int
    """Where to go on."""
    size: int
    """Bytes."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of numbers in it that hold no message: if the bytes have one nevertheless, it has been
    emptied and is not to be used."""
    position: int = 0
    handle: Handle | None = None
    batches: tuple[Batch, ...] = ()
    """In memory alone, if there is no file."""

    def read(self) -> bytes:
        """The bytes as they are. May be called in any thread."""
        if self.handle is None:
            return b"".join([piece for batch in self.batches for piece in _encode(batch)])
        data = self.handle.read(self.size, self.position)
        if len(data) < self.size:
            raise CorruptBatch(self.handle.path, self.position + len(data), "the file is shorter than it was")
        return data

    def read_verified(self) -> Verified:
        """The same without what is damaged. May be called in any thread; walks the batches."""
        if self.handle is None:
            return Verified(self.read(), [])
        data = self.handle.read(self.size, self.position)
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


class TimeSearch:
    """Looks for the first message published at or after a time. run() may be called in any thread."""

    def __init__(self, timestamp_ns: int, answer: int, stretch: LogRange | None = None) -> None:
        self._timestamp_ns = timestamp_ns
        self._answer = answer
        """If the stretch does not have it."""
        self._stretch = stretch

    def run(self) -> int:
        """Its sequence number, or the log's end at the time of asking."""
        stretch = self._stretch
        if stretch is not None and stretch.handle is not None:
            data = stretch.handle.read(stretch.size, stretch.position)
            for item in scan(lambda size, at: data[at : at + size], len(data), first=stretch.first):
                if not isinstance(item, Damage) and item.head.timestamp_ns >= self._timestamp_ns:
                    return item.head.base
        return self._answer


def memory_range(
    batches: Iterable[Batch], max_bytes: int, gaps: Sequence[tuple[int, int]]
) -> LogRange | None:
    """The first of these neighbouring batches, up to about `max_bytes`; None if there are none."""
    chosen: list[Batch] = []
    size = 0
    for batch in batches:
        encoded = HEADER_SIZE + 4 * batch.count + len(batch.data)
        if chosen and (
            size + encoded > max_bytes or batch.base != chosen[-1].end or len(chosen) == MAX_BATCHES
        ):
            break
        chosen.append(batch)
        size += encoded
    if not chosen:
        return None
    first, following = chosen[0].base, chosen[-1].end
    return LogRange(first, following, size, inside(gaps, first, following), batches=tuple(chosen))


def inside(gaps: Iterable[tuple[int, int]], start: int, end: int) -> tuple[tuple[int, int], ...]:
    """The parts of the gaps that lie between two numbers."""
    return tuple((max(low, start), min(high, end)) for low, high in gaps if low < end and high > start)


def _encode(batch: Batch) -> tuple[bytes, bytes]:
    # A batch that is in memory alone has been published at one time.
    stamp_ns = batch.timestamp_of(0)
    head = encode_head(batch.base, stamp_ns, batch.due_ns, batch.lengths, batch.data, batch.tag)
    return head, batch.data
