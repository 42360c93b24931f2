"""Messages carried over: what a channel has not finished of segments that could otherwise go.

One stuck message must not pin a hundred megabytes. Its channel copies it into a small file of its own,
batches of one message each, and the segment is free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from weakref import ref

from nsparq.errors import CorruptBatch
from nsparq.storage.batch import (
    Batch,
    checksum_holds,
    data_range,
    decode_head,
    decode_lengths,
    encode_head,
    lengths_of,
)
from nsparq.storage.files import Files
from nsparq.storage.ranges import Handle, Range, memory_range
from nsparq.storage.recovery import Damage, scan

logger = logging.getLogger(__name__)

CARRY_SUFFIX = ".carry"
_WORTH_REWRITING = 1 << 20


class CarryFile:
    """Single messages by sequence number, on disk; only their places are in memory."""

    def __init__(self, files: Files, path: Path, mark: int = 0) -> None:
        """`mark` is the log's; see storage.batch.mark_of."""
        self._files = files
        self._path = path
        self._mark = mark
        self._places: dict[int, tuple[int, int]] = {}
        """Sequence number to position and size."""
        self._size = 0
        self._live = 0
        self._handle: ref[Handle] | None = None
        """Of the file as it is now, while somebody reads it."""
        self.is_damaged = False
        """Whether load() found anything but whole messages."""

    def load(self) -> list[int]:
        """Find what an earlier run left; gives the sequence numbers."""
        raw = self._files.read_whole(self._path)
        if raw is None:
            return []
        self._size = len(raw)
        if not raw:
            self._note_damage(0, "the file is empty")
        for item in scan(lambda size, at: raw[at : at + size], len(raw), first=None):
            if isinstance(item, Damage):
                self._note_damage(item.position, "messages carried over are unreadable")
            elif item.head.mark not in (0, self._mark):
                self._note_damage(item.position, "a message of another log")
            else:
                self._places[item.head.base] = (item.position, item.head.size)
                self._live += item.head.size
        return [*self._places]

    def _note_damage(self, position: int, reason: str) -> None:
        self.is_damaged = True
        logger.error("%s", CorruptBatch(self._path, position, reason))

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, messages: Iterable[tuple[int, int, bytes]]) -> None:
        """Keep messages, each as (sequence number, publish time, body)."""
        pieces = []
        places = {}
        position = self._size
        for sequence, timestamp_ns, body in messages:
            head = encode_head(sequence, timestamp_ns, 0, lengths_of([body]), body, mark=self._mark)
            places[sequence] = (position, len(head) + len(body))
            position += len(head) + len(body)
            pieces += [head, body]
        fd = self._files.open(self._path)
        try:
            self._files.write(fd, [b"".join(pieces)], self._size)
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        # Only now: a message counts as carried, and its segment may go, when the disk has it.
        self._places |= places
        self._live += position - self._size
        self._size = position

    def read(self, sequence: int) -> Batch | None:
        """The message as a batch of one; None if its bytes have gone bad."""
        position, size = self._places[sequence]
        fd = self._files.open(self._path)
        try:
            raw = self._files.read(fd, size, position)
        finally:
            self._files.close(fd)
        head = decode_head(raw)
        if head is None or not checksum_holds(head, raw):
            return None
        start, end = data_range(head)
        return Batch(head.base, head.timestamp_ns, 0, decode_lengths(head, raw), raw[start:end])

    def locate(self, sequence: int) -> Range:
        """Where the message lies, for reading it in a thread."""
        position, size = self._places[sequence]
        handle = self._handle() if self._handle is not None else None
        if handle is None:
            handle = Handle(self._files, self._path)
            self._handle = ref(handle)
        return Range(sequence, sequence + 1, size, position=position, handle=handle)

    def keep_only(self, wanted: Iterable[int]) -> None:
        """Let go of what has been finished; the file shrinks when most of it is dead."""
        kept = {sequence: self._places[sequence] for sequence in wanted if sequence in self._places}
        self._places = kept
        self._live = sum(size for _, size in kept.values())
        if not kept:
            if self._size:
                self.remove()
        elif self._size - self._live > max(self._live, _WORTH_REWRITING):
            self._rewrite()

    def _rewrite(self) -> None:
        raw = self._files.read_whole(self._path) or b""
        pieces, places, position = [], {}, 0
        for sequence, (start, size) in self._places.items():
            pieces.append(raw[start : start + size])
            places[sequence] = (position, size)
            position += size
        self._handle = None
        self._files.replace(self._path, b"".join(pieces), sync=True)
        self._places, self._size, self._live = places, position, position

    def remove(self) -> None:
        self._handle = None
        self._files.unlink(self._path)
        self._places.clear()
        self._size = self._live = 0


class MemoryCarry:
    """The same for a channel that keeps nothing on disk."""

    is_damaged = False

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}

    def load(self) -> list[int]:
        return []

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._batches

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, messages: Iterable[tuple[int, int, bytes]]) -> None:
        for sequence, timestamp_ns, body in messages:
            self._batches[sequence] = Batch.single(sequence, timestamp_ns, body)

    def read(self, sequence: int) -> Batch | None:
        return self._batches.get(sequence)

    def locate(self, sequence: int) -> Range:
        found = memory_range([self._batches[sequence]], 1, ())
        assert found is not None
        return found

    def keep_only(self, wanted: Iterable[int]) -> None:
        self._batches = {s: self._batches[s] for s in wanted if s in self._batches}

    def remove(self) -> None:
        self._batches.clear()
