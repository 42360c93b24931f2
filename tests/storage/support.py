"""A disk that fails on demand, and helpers to fill and read a log."""

from __future__ import annotations

import errno
import os
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nsparq.storage import opening
from nsparq.storage.batch import Batch, BatchCache, encode_head, lengths_of
from nsparq.storage.disk_log import DiskLog
from nsparq.storage.files import Buffer, Files
from nsparq.storage.log import Durability, LogSettings
from nsparq.storage.recovery import Read
from nsparq.storage.segment import Segment

FLOOR = 1_000
"""First sequence number of the logs in these tests."""

NOW_NS = 1_700_000_000_000_000_000


class _Fault:
    def __init__(self, code: int, after: int, times: int | None, torn: int) -> None:
        self.code, self.after, self.times, self.torn = code, after, times, torn

    def error(self) -> OSError:
        return OSError(self.code, os.strerror(self.code))


class FaultyFiles(Files):
    """The real disk without fsyncs. Any call can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.synced_directories: list[Path] = []
        self._faults: dict[str, _Fault] = {}
        self._buffer = bytearray()
        self._is_replacing = False
        """The calls inside replace() are not counted, and do not fail by themselves."""

    def fail(
        self, call: str, code: int = errno.ENOSPC, *, after: int = 0, times: int | None = 1, torn: int = 0
    ) -> None:
        """Let `call` fail `times` times (None: until healed), after it has worked `after` times. A
        torn write leaves its first bytes on disk, but never all of them."""
        self._faults[call] = _Fault(code, after, times, torn)

    def heal(self) -> None:
        self._faults.clear()

    def _due(self, call: str) -> _Fault | None:
        if self._is_replacing and call != "write":
            return None
        self.calls[call] += 1
        fault = self._faults.get(call)
        if fault is None or fault.times == 0:
            return None
        if fault.after:
            fault.after -= 1
            return None
        if fault.times is not None:
            fault.times -= 1
        return fault

    def _check(self, call: str) -> None:
        if (fault := self._due(call)) is not None:
            raise fault.error()

    def open(self, path: Path) -> int:
        self._check("open")
        return super().open(path)

    def duplicate(self, fd: int) -> int:
        self._check("duplicate")
        return super().duplicate(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        if (fault := self._due("write")) is not None:
            whole = b"".join(buffers)
            os.pwrite(fd, whole[: min(fault.torn, len(whole) - 1)], position)
            raise fault.error()
        super().write(fd, buffers, position)

    def read(self, fd: int, size: int, position: int) -> bytes:
        self._check("read")
        return super().read(fd, size, position)

    def read_cached(self, fd: int, size: int, position: int) -> memoryview | None:
        """Replaces RWF_NOWAIT, which not every file system has. Its fault is that nothing is
        cached. As in the real call, the next call overwrites the buffer."""
        if self._due("read_cached") is not None:
            return None
        data = super().read(fd, size, position)
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[: len(data)]
        view[:] = data
        return view

    def truncate(self, fd: int, size: int) -> None:
        self._check("truncate")
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._check("sync")
        os.fstat(fd)

    def unlink(self, path: Path) -> None:
        self._check("unlink")
        super().unlink(path)

    def replace(self, path: Path, content: bytes, *, sync: bool) -> None:
        if (fault := self._due("rename")) is not None:
            path.with_name(path.name + ".tmp").write_bytes(content)
            raise fault.error()
        if sync:
            self._check("sync")
        self._is_replacing = True
        try:
            super().replace(path, content, sync=sync)
        finally:
            self._is_replacing = False

    def sync_directory(self, path: Path) -> None:
        self._check("sync_directory")
        self.synced_directories.append(path)


SMALL: dict[str, Any] = {"segment_bytes": 500, "memory_messages": 5}
"""Settings with which a few messages fill a segment and the memory queue."""

ALL_MODES = [*Durability]
ON_DISK = [Durability.OS, Durability.FSYNC]
in_all_modes = pytest.mark.parametrize("durability", ALL_MODES)
in_disk_modes = pytest.mark.parametrize("durability", ON_DISK)


class Message(NamedTuple):
    sequence: int
    body: bytes
    timestamp_ns: int
    due_ns: int = 0


def open_log(
    directory: Path,
    *,
    files: Files | None = None,
    cache_bytes: int = 1 << 30,
    cache: BatchCache | None = None,
    clean_end: int = -1,
    epoch: int = FLOOR,
    **settings: Any,
) -> DiskLog:
    log = DiskLog(
        FaultyFiles() if files is None else files,
        directory,
        BatchCache(cache_bytes) if cache is None else cache,
        LogSettings(**settings),
        floor=epoch,
    )
    opening.open_log(log, clean_end=clean_end, epoch=epoch)
    return log


def crash(log: DiskLog) -> None:
    """Like kill -9: the files stay as they are, and descriptors are closed."""
    log.discard()


def stop(log: DiskLog) -> int:
    """A clean stop; gives the end that the topic's state would name."""
    log.close()
    return log.end


def append(log: DiskLog, *bodies: bytes, due_ns: int = 0, now_ns: int = NOW_NS) -> list[Message]:
    """Append one batch."""
    return messages_of(log.append([([*bodies], due_ns)], now_ns))


def messages_of(batches: list[Batch]) -> list[Message]:
    return [
        Message(batch.base + i, body, batch.timestamp_of(i), batch.due_ns)
        for batch in batches
        for i, body in enumerate(batch.bodies())
    ]


def read_all(log: Any, sequence: int | None = None, *, wait: bool = True) -> list[Message]:
    """Everything from `sequence` on, as a channel would read it."""
    sequence = log.start if sequence is None else sequence
    found: list[Message] = []
    while (batch := log.read(sequence, wait=wait)) is not None:
        assert batch.end > sequence, "reading must get on"
        found += [message for message in messages_of([batch]) if message.sequence >= sequence]
        sequence = batch.end
    return found


def fill(log: DiskLog, batches: int, per_batch: int = 3, size: int = 20) -> list[Message]:
    """Batches of different bodies and times."""
    written = []
    for number in range(batches):
        bodies = [b"%d/%d/" % (number, i) + b"x" * size for i in range(per_batch)]
        written += append(log, *bodies, now_ns=NOW_NS + number)
    return written


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


class Place(NamedTuple):
    """Place of a batch in a file."""

    path: Path
    position: int
    end: int
    sequences: range


def places(path: Path) -> list[Place]:
    """The batches of an undamaged segment, by their headers; prepared zeros may follow."""
    content, position, found = path.read_bytes(), 0, []
    while any(content[position:]):
        (size,) = struct.unpack_from("<I", content, position + 8)
        (base,) = struct.unpack_from("<Q", content, position + 16)
        (count,) = struct.unpack_from("<I", content, position + 40)
        found.append(Place(path, position, position + size, range(base, base + count)))
        position += size
    assert position <= len(content)
    return found


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def encoded(base: int, *bodies: bytes, timestamp_ns: int = NOW_NS, due_ns: int = 0) -> bytes:
    """The bytes of a batch on disk."""
    data = b"".join(bodies)
    return encode_head(base, timestamp_ns, due_ns, lengths_of([*bodies]), data) + data


def reader(content: bytes) -> Read:
    """The bytes as a file to scan."""
    return lambda size, at: content[at : at + size]


def write_segment(directory: Path, base: int, content: bytes) -> Segment:
    """A segment file with this content, opened."""
    (directory / f"{base:020d}.log").write_bytes(content)
    segment = Segment(FaultyFiles(), directory, base)
    segment.open(last=False)
    return segment
