"""Reads the queues that NSQ's own nsqd keeps in its data path. Big endian.

 <topic>[:<channel>].diskqueue.meta.dat      depth, read side, write side: "3\\n0,76\\n1,38\\n"
 <topic>[:<channel>].diskqueue.000000.dat    records, one after the other; the next file has the next number

 0        4           12         14                30
 +--------+-----------+----------+-----------------+------ … ------+
 | length | timestamp | attempts | id, 16 hex      | body          |
 +--------+-----------+----------+-----------------+------ … ------+
  of the rest

There are no checksums. After a crash the state is older than the data, or missing: then there may
be whole records after the recorded end, and stale and half ones. Every plausible record is given.
Files named `.bad` were given up by the nsqd that wrote them, mostly after reading all of them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from nsparq.storage.files import Files

_NAME = re.compile(r"(?P<topic>[^:;]+)(?:[:;](?P<channel>.+))?\.diskqueue\.(?P<part>meta|\d{6,})\.dat")
"""A semicolon stands for the colon where file names cannot hold one."""
_STATE = re.compile(rb"(-?\d+)\n(\d+),(\d+)\n(\d+),(\d+)\n")
_HEAD = struct.Struct(">iqH16s")
_ID = re.compile(rb"[0-9a-f]{16}")

_LENGTH_SIZE: Final = 4
_SMALLEST: Final = _HEAD.size - _LENGTH_SIZE + 1
"""A message has a body."""
_LARGEST: Final = 128 << 20
"""Far above any sensible --max-msg-size."""
_WINDOW: Final = 1 << 20
"""Bytes of a file held at a time, unless one record is larger."""


class Record(NamedTuple):
    """A message in a queue."""

    timestamp_ns: int
    attempts: int
    body: bytes


class _State(NamedTuple):
    depth: int
    read_file: int
    read_position: int
    write_file: int
    write_position: int


class DiskQueue:
    """The queue of a topic; of one channel if `channel` is not empty."""

    def __init__(self, files: Files, topic: str, channel: str) -> None:
        self.topic = topic
        self.channel = channel
        self.meta_path: Path | None = None
        self.data_paths: dict[int, Path] = {}
        self.complaints: dict[str, str] = {}
        """What could not be read, by file name; complete after records() has ended."""
        self._files = files

    @property
    def paths(self) -> list[Path]:
        """All files, in an order in which they may be moved one by one. The state is last: without
        it, consumed messages would come back."""
        data = [self.data_paths[number] for number in sorted(self.data_paths)]
        return data if self.meta_path is None else [*data, self.meta_path]

    def has_records(self) -> bool:
        return next(self.records(), None) is not None

    def records(self) -> Iterator[Record]:
        """Every message that was not consumed. Raises OSError for a file that cannot be read."""
        state = self._read_state()
        numbers = sorted(number for number in self.data_paths if state is None or number >= state.read_file)
        count = 0
        for number in numbers:
            path = self.data_paths[number]
            start, trusted_to = 0, 0
            if state is not None:
                start = state.read_position if number == state.read_file else 0
                if number < state.write_file:
                    trusted_to = 1 << 63
                elif number == state.write_file:
                    trusted_to = state.write_position
            for record in self._read_file(path, start, trusted_to):
                count += 1
                yield record
        if state is not None:
            self._check(state, numbers, count)

    def _read_state(self) -> _State | None:
        raw = None if self.meta_path is None else self._files.read_whole(self.meta_path)
        if self.meta_path is None or raw is None:
            return None
        found = _STATE.fullmatch(raw)
        if found is None:
            self.complaints[self.meta_path.name] = "cannot be parsed; reading all messages"
            return None
        return _State(*map(int, found.groups()))

    def _check(self, state: _State, numbers: list[int], count: int) -> None:
        assert self.meta_path is not None
        # The write file exists once something has been written to it.
        end = state.write_file + (state.write_position > 0)
        is_pending = (state.read_file, state.read_position) < (state.write_file, state.write_position)
        missing = end - state.read_file - sum(number < end for number in numbers) if is_pending else 0
        if missing > 0:
            self.complaints[self.meta_path.name] = f"{missing} files that it names are missing"
        elif count < state.depth:
            self.complaints[self.meta_path.name] = f"it counts {state.depth} messages, but {count} were found"

    def _read_file(self, path: Path, position: int, trusted_to: int) -> Iterator[Record]:
        """Records from `position` to the end of the file, or to bytes that are not a record.

        After `trusted_to` the bytes may be stale, and any four of them can look like a length.
        There the id must look like an id, too.
        """
        with self._files.opened(path, read_only=True) as fd:
            size = self._files.size(fd)
            window, start = b"", position
            while position < size:
                offset = position - start
                if offset + _HEAD.size > len(window) and start + len(window) < size:
                    window, start, offset = self._files.read(fd, _WINDOW, position), position, 0
                if len(window) - offset < _HEAD.size:
                    self._complain(path, position, size, "the last record is incomplete")
                    return
                length, timestamp_ns, attempts, message_id = _HEAD.unpack_from(window, offset)
                end = offset + _LENGTH_SIZE + length
                if not _SMALLEST <= length <= _LARGEST:
                    self._complain(path, position, size, f"{length} is not the length of a record")
                    return
                if position >= trusted_to and _ID.fullmatch(message_id) is None:
                    self._complain(path, position, size, "no valid id")
                    return
                if end > len(window) and position + _LENGTH_SIZE + length <= size:
                    window = self._files.read(fd, max(_WINDOW, _LENGTH_SIZE + length), position)
                    start, offset, end = position, 0, _LENGTH_SIZE + length
                if end > len(window):
                    self._complain(path, position, size, "the last record is incomplete")
                    return
                yield Record(timestamp_ns, attempts, window[offset + _HEAD.size : end])
                position += _LENGTH_SIZE + length

    def _complain(self, path: Path, position: int, size: int, reason: str) -> None:
        self.complaints[path.name] = f"{size - position} bytes skipped from byte {position} on: {reason}"

    def __str__(self) -> str:
        return f"{self.topic}:{self.channel}" if self.channel else self.topic


def find_queues(files: Files, data_path: Path) -> list[DiskQueue]:
    """All queues that have files, whether nsqd.dat lists them or not."""
    queues: dict[tuple[str, str], DiskQueue] = {}
    for name in files.list_directory(data_path):
        found = _NAME.fullmatch(name)
        if found is None:
            continue
        key = (found["topic"], found["channel"] or "")
        queue = queues.setdefault(key, DiskQueue(files, *key))
        if found["part"] == "meta":
            queue.meta_path = data_path / name
        else:
            queue.data_paths[int(found["part"])] = data_path / name
    return list(queues.values())
