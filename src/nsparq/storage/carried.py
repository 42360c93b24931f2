"""Carried-over messages: unfinished messages of a channel, copied out of old segments.

One stuck message must not pin a segment of a hundred megabytes. Its channel copies it into a small
file, as a batch of one message, and the segment can be removed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from threading import Lock

from nsparq.errors import CorruptBatch
from nsparq.storage.batch import (
    Batch,
    checksum_holds,
    data_range,
    decode_blocks,
    decode_head,
    decode_lengths,
    encode_batch,
    encode_singles,
)
from nsparq.storage.files import Files
from nsparq.storage.gaps import Gaps
from nsparq.storage.log_range import LogRange, SharedReader, range_in_memory
from nsparq.storage.number_ranges import Numbers
from nsparq.storage.recovery import Damage, scan

logger = logging.getLogger(__name__)

CARRY_SUFFIX = ".carry"
_WORTH_REWRITING = 1 << 20

Places = dict[int, tuple[int, int]]
"""Position and size by sequence number."""


class CarriedFile:
    """Carried-over messages on disk. Memory has only their places.

    Threads write the file and may be late: the channel may be deleted meanwhile, and another one of
    the same name may have a file there. After discard() a late thread gets FileNotFoundError.
    """

    def __init__(self, files: Files, path: Path, mark: int = 0) -> None:
        """`mark` is the mark of the log; see storage.batch.mark_of."""
        self._files = files
        self._path = path
        self._mark = mark
        self._copy_path = path.with_name(path.name + ".copy")
        self._naming = Lock()
        """Held while a file is opened to be written, or renamed; never while the disk syncs,
        because the event loop may wait for it."""
        self._is_discarded = False
        self.kept: Places = {}
        self._size = 0
        self._live = 0
        self._reader = SharedReader(files, path)
        self.is_damaged = False
        """Whether load() found anything but whole messages."""

    def load(self) -> list[int]:
        """Read what an earlier run left; gives the sequence numbers."""
        raw = self._files.read_whole(self._path)
        if raw is None:
            return []
        self._size = len(raw)
        if not raw:
            self._note_damage(0, "the file is empty")
        for item in scan(lambda size, at: raw[at : at + size], len(raw), first=None):
            if isinstance(item, Damage):
                self._note_damage(item.position, "carried-over messages are unreadable")
            elif item.head.mark not in (0, self._mark):
                self._note_damage(item.position, "a message of another log")
            else:
                self.kept[item.head.base] = (item.position, item.head.size)
                self._live += item.head.size
        return [*self.kept]

    def _note_damage(self, position: int, reason: str) -> None:
        self.is_damaged = True
        logger.error("%s", CorruptBatch(self._path, position, reason))

    def add(self, messages: Iterable[Batch]) -> None:
        self.accept(self.write(messages))

    def write(self, messages: Iterable[Batch]) -> Places:
        """Write and sync messages, each a batch of its own; gives their places for accept(). A
        thread may call this, one at a time."""
        listed = [*messages]
        encoded = [b"".join(encode_batch(message, self._mark)) for message in listed]
        numbers, sizes = [message.base for message in listed], [*map(len, encoded)]
        return self._write(numbers, b"".join(encoded), sizes)

    def write_singles(
        self, sequences: Numbers, timestamps_ns: Numbers, bodies: list[bytes], blocks: list[bytes]
    ) -> Places:
        """The same for messages in columns, and faster. An empty block means no headers."""
        content, sizes = encode_singles(sequences, timestamps_ns, bodies, blocks, self._mark)
        return self._write(sequences.tolist(), content, sizes)

    def _write(self, sequences: list[int], content: bytes, sizes: list[int]) -> Places:
        size = self._size
        if not content:
            # All were lost to damage. An empty file would look like more of it.
            return {}
        if size:
            with self._opened(self._path) as fd:
                try:
                    self._files.write(fd, [content], size)
                    self._files.sync(fd)
                except OSError:
                    # What it left would look like damage, or like messages that are still kept.
                    with suppress(OSError):
                        self._files.truncate(fd, size)
                    raise
        else:
            # A kill must not leave an empty file: load() would take it for damage.
            self._write_copy(content)
            self._use_copy()
            self._files.sync_names(self._path.parent)
        places = zip(accumulate(sizes, initial=size), sizes, strict=False)
        return dict(zip(sequences, places, strict=True))

    def _write_copy(self, content: bytes) -> None:
        with self._opened(self._copy_path) as fd:
            self._files.truncate(fd, 0)
            self._files.write(fd, [content], 0)
            self._files.sync(fd)

    def _use_copy(self) -> None:
        with self._naming:
            self._check()
            self._files.rename(self._copy_path, self._path)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        with self._naming:
            self._check()
            fd = self._files.open(path)
        try:
            yield fd
        finally:
            self._files.close(fd)

    def _check(self) -> None:
        if self._is_discarded:
            raise FileNotFoundError(errno.ENOENT, "its channel was deleted", str(self._path))

    def accept(self, places: Places) -> None:
        """Count messages as carried over: they are on disk, and their segments may be removed."""
        self.kept |= places
        written = sum([size for _, size in places.values()])
        self._live += written
        self._size += written

    def read(self, sequence: int) -> Batch | None:
        """The message as a batch of one; None if its bytes are damaged."""
        position, size = self.kept[sequence]
        with self._files.opened(self._path) as fd:
            raw = self._files.read(fd, size, position)
        head = decode_head(raw)
        if head is None or not checksum_holds(head, raw):
            return None
        start, end = data_range(head)
        lengths, headers = decode_lengths(head, raw), decode_blocks(head, raw)
        return Batch(head.base, head.timestamp_ns, 0, lengths, raw[start:end], head.tag, headers)

    def locate(self, sequence: int) -> LogRange:
        """The message, to be read in a thread."""
        position, size = self.kept[sequence]
        return LogRange(sequence, sequence + 1, size, position=position, reader=self._reader.get())

    def drop(self, finished: Iterable[int]) -> None:
        """Forget finished messages."""
        for sequence in finished:
            self._live -= self.kept.pop(sequence)[1]

    @property
    def is_wasteful(self) -> bool:
        """Whether most of the file is finished messages, so that it should be copied."""
        return self._size - self._live > max(self._live, _WORTH_REWRITING)

    @property
    def is_empty(self) -> bool:
        """Whether there is a file with finished messages alone."""
        return self._size > 0 and not self.kept

    def copy(self, kept: Places) -> Places:
        """Write these messages to a new file; gives their places in it for accept_copy(). A thread
        may call this."""
        raw = self._files.read_whole(self._path) or b""
        pieces, places, position = [], {}, 0
        for sequence, (start, size) in kept.items():
            pieces.append(raw[start : start + size])
            places[sequence] = (position, size)
            position += size
        self._write_copy(b"".join(pieces))
        return places

    def accept_copy(self, places: Places) -> None:
        """Use the copy from now on. If a power cut undoes the rename, the old file is as good."""
        self._use_copy()
        self._reader.forget()
        self._size = sum([size for _, size in places.values()])
        for finished in places.keys() - self.kept.keys():
            del places[finished]
        self.kept = places
        self._live = sum([size for _, size in places.values()])

    def remove(self) -> None:
        """Remove the file until there are messages again."""
        self._reader.forget()
        self._files.unlink(self._path)
        self.kept.clear()
        self._size = self._live = 0

    def discard(self) -> None:
        """The channel was deleted: remove the file for good."""
        with self._naming:
            self._is_discarded = True
        self._files.unlink(self._copy_path)
        self.remove()


class CarriedInMemory:
    """Carried-over messages of a channel that keeps nothing on disk."""

    is_damaged = False

    def __init__(self, hold: Callable[[int], None]) -> None:
        """`hold` is called with the bytes that were added to memory, negative for freed bytes."""
        self.kept: dict[int, Batch] = {}
        self._hold = hold

    def load(self) -> list[int]:
        return []

    def add(self, messages: Iterable[Batch]) -> None:
        for message in messages:
            self.kept[message.base] = message
            self._hold(message.size)

    def read(self, sequence: int) -> Batch | None:
        return self.kept.get(sequence)

    def locate(self, sequence: int) -> LogRange:
        found = range_in_memory([self.kept[sequence]], 1, Gaps())
        assert found is not None
        return found

    def drop(self, finished: Iterable[int]) -> None:
        for sequence in finished:
            self._hold(-self.kept.pop(sequence).size)

    def discard(self) -> None:
        self.drop([*self.kept])
