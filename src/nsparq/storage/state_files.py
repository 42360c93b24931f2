"""The state of a topic and of its channels, in files beside the log.

A channel's file, little endian:

 +-------+------+-------------+------+----------------------+----------------+--------------+
 | magic | crc  | JSON length | JSON | sequences  count×u64 | due  count×i64 | attempts u16 |
 +-------+------+-------------+------+----------------------+----------------+--------------+
  "NQC2"  crc32c of the rest          unfinished messages before the cursor, or deferred ones after it

Each checkpoint is appended to the file, and the last whole one counts: see Files.add_version. So a
crash or a power cut during a write does not damage earlier checkpoints. The topic's own state is
kept in the same way, one line of JSON for each version.

Checkpoints that begin with "NQC1" have message ids instead of sequence numbers; the ten highest
bits are the node id. They still open, under any node id.
"""

from __future__ import annotations

import json
import logging
import operator
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from nsparq.storage.checked_json import encode_json, read_json
from nsparq.storage.files import Files
from nsparq.storage.number_ranges import NumberRanges

logger = logging.getLogger(__name__)

TOPIC_FILE = "topic.json"
CHANNEL_SUFFIX = ".channel"

_CHANNEL = struct.Struct("<4sII")
_MAGIC = b"NQC2"
_MAGIC_OF_IDS = b"NQC1"
_SEQUENCE_IN_ID = np.uint64((1 << 54) - 1)
"""The bits of a message id in an "NQC1" file that hold the sequence number."""


@dataclass(slots=True, kw_only=True)
class TopicState:
    incarnation: str
    """Name of this log. A topic that is deleted and created again gets another one."""
    origin: int
    """Start of the first channel."""
    paused: bool = False
    pause_position: int = -1
    clean_end: int = -1
    """The log's end at a clean stop; -1 while the topic is in use."""
    reserved: int = 0
    """No sequence number from here on was used. 0 in old files: there only the clock tells."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Sequence numbers emptied while the log still held them."""
    import_start: int = -1
    """Start of an import from another nsqd that was not finished: messages from here on do not
    count. -1 if there is none."""
    name: str = ""
    """Name of the topic; empty in old files."""
    disk_end: int = 0
    """End of the log's messages on disk; 0 if there are none, and in old files."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that override the daemon's flags; see broker.settings."""
    discovery_start: int = -1
    """Start of the channels that nsqlookupd must still be asked for; else -1."""

    def write(self, files: Files, directory: Path) -> None:
        """Does not wait for the disk."""
        fields = asdict(self)
        if not self.settings:
            del fields["settings"]
        if self.discovery_start < 0:
            del fields["discovery_start"]
        # Begin with a line break, too: the line before may be torn.
        files.add_version(directory / TOPIC_FILE, b"\n" + encode_json(fields) + b"\n")


def read_topic_state(files: Files, directory: Path) -> TopicState | None:
    """The topic's state; None if it is missing or damaged."""
    path = directory / TOPIC_FILE
    try:
        fields = read_json(files, path)
        if fields is None:
            logger.error("%s is missing: the topic starts with every message of its log", path)
            return None
        fields["gaps"] = [(int(a), int(b)) for a, b in fields["gaps"]]
        return TopicState(**fields)
    except (ValueError, TypeError, KeyError) as error:
        logger.error("%s is damaged (%s): the topic starts with every message of its log", path, error)
        return None


@dataclass(slots=True, kw_only=True)
class ChannelState:
    cursor: int
    """The next sequence number to deliver for the first time."""
    seen: int
    """Deferred messages published before this are finished, or among the unfinished."""
    paused: bool = False
    written_ns: int = 0
    """Wall time of the checkpoint; 0 if it is not known."""
    sequences: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    due_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Wall time; 0 for a message that is not deferred."""
    attempts: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))
    skips: list[tuple[int, int]] = field(default_factory=list)
    """Sequence numbers after the cursor that it skips; see Cursor.skips."""
    replay: tuple[int, int] = (0, 0)
    """Deferred messages that the cursor delivers like any other; see Cursor.replay."""
    carried_before: int = 0
    """Unfinished messages below this number are in the file of carried-over messages."""
    incarnation: str = ""
    """Names of the log and the channel, so that a misplaced file is not used. Empty in old
    files."""
    channel: str = ""
    disk_end: int = 0
    """As in TopicState."""
    owner: str = ""
    """The only client that may commit: see Channel.claim. Empty for none, and in old files."""
    owned_since_ns: int = 0
    """Wall time of the claim."""
    policy: dict[str, Any] | None = None
    """The channel's own delivery policy; None if it has none."""
    ordered_by: str = ""
    """Where the keys are by which the channel is ordered; empty if it is not."""
    failures: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))
    """Failed attempts of the messages in `sequences`; empty if there are none."""
    letters_topic: str = ""
    """The dead-letter topic, and the position there before which the channel knows of all its
    letters. Empty if no policy is in effect."""
    letters_position: int = 0
    are_letters_pending: bool = False
    """Whether letters behind that position were appended, and their messages not finished."""
    redriven: dict[str, NumberRanges] = field(default_factory=dict)
    """Dead letters of this channel that were put back into it: ranges of their numbers, by
    dead-letter topic. Letters of other channels in these ranges do not count."""

    def drop_from(self, sequence: int) -> None:
        """Drop the unfinished messages from this sequence number on."""
        kept = self.sequences < np.uint64(sequence)
        if len(self.failures):
            self.failures = self.failures[kept]
        self.sequences, self.due_ns, self.attempts = (
            self.sequences[kept], self.due_ns[kept], self.attempts[kept]
        )  # fmt: skip

    def encode(self) -> bytes:
        fields: dict[str, Any] = {
            "cursor": self.cursor,
            "seen": self.seen,
            "paused": self.paused,
            "written_ns": self.written_ns,
            "count": len(self.sequences),
        }
        if self.skips:
            fields["skips"] = self.skips
        if self.replay[0]:
            fields["replay"] = self.replay
        for name in _OPTIONAL:
            if value := getattr(self, name):
                fields[name] = value
        if self.policy is not None:
            fields["policy"] = self.policy
        if self.redriven:
            fields["redriven"] = {topic: ranges.encode() for topic, ranges in self.redriven.items()}
        if len(self.failures):
            fields["failures"] = b64encode(self.failures.astype("<u2").tobytes()).decode()
        text = json.dumps(fields).encode()
        body = b"".join(
            (
                text,
                self.sequences.astype("<u8").tobytes(),
                self.due_ns.astype("<i8").tobytes(),
                self.attempts.astype("<u2").tobytes(),
            )
        )
        length = len(text).to_bytes(4, "little")
        return _CHANNEL.pack(_MAGIC, crc32c(body, crc32c(length)), len(text)) + body


_OPTIONAL: Final[dict[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("carried_before", "disk_end", "owned_since_ns", "letters_position"), operator.index),
    **dict.fromkeys(("incarnation", "channel", "owner", "letters_topic", "ordered_by"), str),
    "are_letters_pending": bool,
}
"""Fields that are in the file unless they are 0 or empty, and how each is read."""


class StateFile:
    """The file of a channel's state. Threads write checkpoints and may be late, so each checkpoint
    has a number, and only the latest is written."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._writing = Lock()
        self._version = 0
        self.written_version = 0
        """The state on disk; 0 for one of an earlier run."""

    def next_version(self) -> int:
        with self._writing:
            self._version += 1
            return self._version

    def write(self, content: bytes, version: int, *, sync: bool) -> bool:
        """Write a state, unless there is a later one; `sync` waits for the disk. Gives whether it
        was written. Any thread may call this; the event loop only without `sync`."""
        with self._writing:
            if version != self._version:
                return False
            self._files.add_version(self._path, content)
            self.written_version = version
        if sync:
            # Outside the lock: the event loop may wait for it.
            self._files.sync_file(self._path)
        return True

    def remove(self) -> None:
        self.next_version()
        self._files.unlink(self._path)


def decode_channel_state(raw: bytes) -> ChannelState:
    """Raises ValueError for anything but a whole, undamaged state."""
    if len(raw) < _CHANNEL.size:
        raise ValueError("too short")
    magic, crc, length = _CHANNEL.unpack_from(raw)
    body = memoryview(raw)[_CHANNEL.size :]
    is_known = magic in (_MAGIC, _MAGIC_OF_IDS)
    if not is_known or crc32c(body, crc32c(length.to_bytes(4, "little"))) != crc:
        raise ValueError("checksum mismatch")
    try:
        state = _channel_state(json.loads(bytes(body[:length])), body, length)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or wrong: {error}") from error
    if magic == _MAGIC_OF_IDS:
        state.sequences = state.sequences & _SEQUENCE_IN_ID
    return state


def _channel_state(fields: dict[str, Any], body: memoryview, length: int) -> ChannelState:
    count = fields["count"]
    if len(body) != length + 18 * count:
        raise ValueError("the count does not match the size")
    replay = fields.get("replay", (0, 0))
    return ChannelState(
        cursor=operator.index(fields["cursor"]),
        seen=operator.index(fields["seen"]),
        paused=bool(fields["paused"]),
        written_ns=operator.index(fields.get("written_ns", 0)),
        sequences=np.frombuffer(body, "<u8", count, length),
        due_ns=np.frombuffer(body, "<i8", count, length + 8 * count),
        attempts=np.frombuffer(body, "<u2", count, length + 16 * count),
        skips=[(int(a), int(b)) for a, b in fields.get("skips", ())],
        replay=(int(replay[0]), int(replay[1])),
        policy=fields.get("policy"),
        failures=np.frombuffer(b64decode(fields.get("failures", "")), "<u2"),
        redriven={
            str(topic): NumberRanges.decode(text) for topic, text in fields.get("redriven", {}).items()
        },
        **{name: read(fields[name]) for name, read in _OPTIONAL.items() if name in fields},
    )


def read_channel_state(files: Files, path: Path) -> ChannelState | None:
    """The channel's state; None if it is missing or damaged: then the channel starts over."""
    raw = files.read_whole(path)
    state, error = _last_version(b"" if raw is None else raw)
    if state is not None and state.channel not in ("", path.name.removesuffix(CHANNEL_SUFFIX)):
        error = ValueError(f"it belongs to channel {state.channel}")
        state = None
    if state is None:
        reason = "missing" if raw is None else error
        logger.error("%s is damaged (%s): the channel starts again at the oldest message", path, reason)
    elif error is not None:
        logger.warning("%s: the last checkpoint is incomplete (%s): using an earlier one", path, error)
    return state


def _last_version(raw: bytes) -> tuple[ChannelState | None, ValueError | None]:
    """The last whole state in the file, and the error after it, if any."""
    state: ChannelState | None = None
    error: ValueError | None = None
    position = 0
    while position >= 0:
        try:
            end = position + _version_size(raw, position)
            state, error = decode_channel_state(raw[position:end]), None
            position = end if end < len(raw) else -1
        except ValueError as found:
            error = found
            following = (raw.find(magic, position + 1) for magic in (_MAGIC, _MAGIC_OF_IDS))
            position = min((place for place in following if place >= 0), default=-1)
    return state, error


def _version_size(raw: bytes, position: int) -> int:
    """Size of the version at `position`, according to its header."""
    if len(raw) - position < _CHANNEL.size:
        raise ValueError("too short")
    _, _, length = _CHANNEL.unpack_from(raw, position)
    start = position + _CHANNEL.size
    try:
        count = int(json.loads(raw[start : start + length])["count"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"a field is missing or wrong: {error}") from error
    size: int = _CHANNEL.size + length + 18 * max(0, count)
    return size
