"""What is kept beside a topic's log: the topic's own state, and where each of its channels stands.

A channel's file, little endian:

 +-------+------+-------------+------+----------------+----------------+-------------+
 | magic | crc  | JSON length | JSON | ids  count×u64 | due  count×i64 | attempts u16|
 +-------+------+-------------+------+----------------+----------------+-------------+
  "NQC1"  crc32c of all behind it     unfinished messages behind the cursor, or deferred ahead of it
"""

from __future__ import annotations

import json
import logging
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from nsparq.storage.files import Files

logger = logging.getLogger(__name__)

TOPIC_FILE = "topic.json"
CHANNEL_SUFFIX = ".channel"

_CHANNEL = struct.Struct("<4sII")
_MAGIC = b"NQC1"


@dataclass(slots=True, kw_only=True)
class TopicState:
    incarnation: str
    """Names this log: a topic deleted and created again gets another."""
    origin: int
    """Where the first channel starts."""
    paused: bool = False
    pause_position: int = -1
    clean_end: int = -1
    """The log's end at a clean stop; -1 while the topic is in use."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Sequence numbers emptied while the log still held them."""

    def write(self, files: Files, directory: Path, *, sync: bool) -> None:
        files.replace(directory / TOPIC_FILE, json.dumps(asdict(self)).encode(), sync=sync)


def read_topic_state(files: Files, directory: Path) -> TopicState | None:
    """The topic's state; None when there is none, or none that can be understood."""
    raw = files.read_whole(directory / TOPIC_FILE)
    if raw is None:
        return None
    try:
        parsed = json.loads(raw)
        parsed["gaps"] = [(int(a), int(b)) for a, b in parsed["gaps"]]
        return TopicState(**parsed)
    except (ValueError, TypeError, KeyError) as error:
        logger.error(
            "%s cannot be understood (%s): the log is kept, from its start", directory / TOPIC_FILE, error
        )
        return None


@dataclass(slots=True, kw_only=True)
class ChannelState:
    cursor: int
    """The next sequence number never delivered."""
    seen: int
    """Deferred messages published before this are among the unfinished, or finished."""
    paused: bool = False
    ids: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    due_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """0 for a message that may be delivered at once."""
    attempts: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))

    def encode(self) -> bytes:
        fields = {"cursor": self.cursor, "seen": self.seen, "paused": self.paused, "count": len(self.ids)}
        text = json.dumps(fields).encode()
        body = b"".join(
            (
                text,
                self.ids.astype("<u8").tobytes(),
                self.due_ns.astype("<i8").tobytes(),
                self.attempts.astype("<u2").tobytes(),
            )
        )
        length = len(text).to_bytes(4, "little")
        return _CHANNEL.pack(_MAGIC, crc32c(body, crc32c(length)), len(text)) + body


def decode_channel_state(raw: bytes) -> ChannelState:
    """Raises ValueError for anything but a whole, unharmed state."""
    if len(raw) < _CHANNEL.size:
        raise ValueError("too short")
    magic, crc, length = _CHANNEL.unpack_from(raw)
    body = memoryview(raw)[_CHANNEL.size :]
    if magic != _MAGIC or crc32c(body, crc32c(length.to_bytes(4, "little"))) != crc:
        raise ValueError("checksum mismatch")
    fields: dict[str, Any] = json.loads(bytes(body[:length]))
    count = fields["count"]
    return ChannelState(
        cursor=fields["cursor"],
        seen=fields["seen"],
        paused=fields["paused"],
        ids=np.frombuffer(body, "<u8", count, length),
        due_ns=np.frombuffer(body, "<i8", count, length + 8 * count),
        attempts=np.frombuffer(body, "<u2", count, length + 16 * count),
    )


def read_channel_state(files: Files, path: Path) -> ChannelState | None:
    """The channel's state; None when it is missing or damaged, and then the channel starts over."""
    raw = files.read_whole(path)
    if raw is None:
        return None
    try:
        return decode_channel_state(raw)
    except (ValueError, KeyError) as error:
        logger.error("%s is damaged (%s): the channel starts again at the oldest message kept", path, error)
        return None
