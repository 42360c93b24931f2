"""Writes data directories in the format of NSQ's nsqd: nsqd.dat and disk queues.

queue = GoQueue(path, "topic", "channel")
queue.write(GoMessage(b"one"), GoMessage(b"two", attempts=3), max_bytes=100)    rolls like NSQ
queue.consume(1)            moves the read position, and removes files that were read to the end
queue.save()                writes the state, like a clean stop
write_metadata(path, {"topic": ["channel"]}, paused=["topic:channel"])
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

GO_TIME_NS = 1_500_000_000_123_456_789
_ids = itertools.count(0x0D1E_5000_0000_0000)


class GoMessage(NamedTuple):
    body: bytes
    attempts: int = 0
    timestamp_ns: int = GO_TIME_NS

    def encode(self, message_id: bytes | None = None) -> bytes:
        """The record: length, timestamp, attempts, id, body."""
        content = struct.pack(">qH16s", self.timestamp_ns, self.attempts, message_id or b"%016x" % next(_ids))
        return struct.pack(">i", len(content) + len(self.body)) + content + self.body


def go_messages(count: int, prefix: str = "", attempts: int = 0, start: int = 0) -> list[GoMessage]:
    """Different bodies and times."""
    return [
        GoMessage(f"{prefix}{number}".encode(), attempts, GO_TIME_NS + 1000 * number)
        for number in range(start, start + count)
    ]


class GoQueue:
    """Writes one queue the way NSQ does."""

    def __init__(self, directory: Path, topic: str, channel: str = "") -> None:
        self._directory = directory
        self._name = f"{topic}:{channel}" if channel else topic
        self.depth = 0
        self.read_side = (0, 0)
        self.write_side = (0, 0)
        self._ends: list[tuple[int, int]] = []
        """The position after each record that is not consumed."""

    def data_path(self, number: int) -> Path:
        return self._directory / f"{self._name}.diskqueue.{number:06d}.dat"

    @property
    def meta_path(self) -> Path:
        return self._directory / f"{self._name}.diskqueue.meta.dat"

    def write(self, *messages: GoMessage, max_bytes: int = 100 << 20) -> GoQueue:
        for message in messages:
            number, position = self.write_side
            record = message.encode()
            if position and position + len(record) > max_bytes:
                number, position = number + 1, 0
            with self.data_path(number).open("r+b" if self.data_path(number).exists() else "w+b") as file:
                file.seek(position)
                file.write(record)
            self.write_side = (number, position + len(record))
            self._ends.append(self.write_side)
            self.depth += 1
        return self

    def consume(self, count: int) -> GoQueue:
        for _ in range(count):
            number, position = self._ends.pop(0)
            if number < self.write_side[0] and position == self.data_path(number).stat().st_size:
                self.data_path(number).unlink()
                number, position = number + 1, 0
            self.read_side = (number, position)
            self.depth -= 1
        return self

    def save(self) -> GoQueue:
        sides = "".join(f"{number},{position}\n" for number, position in (self.read_side, self.write_side))
        self.meta_path.write_text(f"{self.depth}\n{sides}")
        return self


def write_metadata(directory: Path, topics: Mapping[str, Iterable[str]], paused: Iterable[str] = ()) -> None:
    """nsqd.dat: topics with their channels; `paused` names topics, and channels as
    topic:channel."""
    content = {
        "topics": [
            {
                "name": topic,
                "paused": topic in paused,
                "channels": [
                    {"name": channel, "paused": f"{topic}:{channel}" in paused} for channel in channels
                ]
                or None,
            }
            for topic, channels in topics.items()
        ],
        "version": "1.3.0",
    }
    (directory / "nsqd.dat").write_text(json.dumps(content, separators=(",", ":")))
