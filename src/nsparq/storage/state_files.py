"""What is kept beside a topic's log: the topic's own state, and where each of its channels stands.

A channel's file, little endian:

 +-------+------+-------------+------+----------------------+----------------+--------------+
 | magic | crc  | JSON length | JSON | sequences  count×u64 | due  count×i64 | attempts u16 |
 +-------+------+-------------+------+----------------------+----------------+--------------+
  "NQC2"  crc32c of all behind it     unfinished messages behind the cursor, or deferred ahead of it

A checkpoint is written behind the earlier ones, and the last that is whole counts: see Files.add_version. So
neither a crash nor a power cut while one is written costs those before it. The topic's own state is kept in
the same way, a line of JSON for each version.

Checkpoints that begin with "NQC1" hold message ids in place of sequence numbers: the ten highest bits are the
node id that wrote them. They still open, under any node id.
"""

from __future__ import annotations

import json
import logging
import operator
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from nsparq.storage.files import Files

logger = logging.getLogger(__name__)

TOPIC_FILE = "topic.json"
CHANNEL_SUFFIX = ".channel"

_CHANNEL = struct.Struct("<4sII")
_MAGIC = b"NQC2"
_MAGIC_OF_IDS = b"NQC1"
_SEQUENCE_IN_ID = np.uint64((1 << 54) - 1)
"""The bits of a message id in an "NQC1" file that are the sequence number."""


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
    reserved: int = 0
    """No sequence number from here on has been used; 0 in files of before, where the clock alone says so."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Sequence numbers emptied while the log still held them."""
    import_start: int = -1
    """Where taking over another nsqd's messages began; -1 unless it was broken off, and then nothing from
    here on counts."""
    name: str = ""
    """The topic's; empty in files of before."""
    disk_end: int = 0
    """The end of what the log had on disk; 0 if nothing, or in files of before."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Where the topic departs from the daemon's flags; see broker.settings."""
    discovery_start: int = -1
    """Where channels begin that nsqlookupd knows of, if it has still to be asked for them; else -1."""

    def write(self, files: Files, directory: Path) -> None:
        """Does not wait for the disk."""
        fields = asdict(self)
        if not self.settings:
            del fields["settings"]
        if self.discovery_start < 0:
            del fields["discovery_start"]
        # Lines begin with a break as well: the one before may be torn.
        files.add_version(directory / TOPIC_FILE, b"\n" + _encode_json(fields) + b"\n")


def write_json(files: Files, path: Path, fields: Mapping[str, Any], *, sync: bool) -> None:
    """An object with its checksum."""
    files.replace(path, _encode_json(fields), sync=sync)


def _encode_json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({**fields, "crc": _crc_of(fields)}).encode()


def read_json(files: Files, path: Path) -> dict[str, Any] | None:
    """What write_json() has written, the last whole line where there are several; None if there is nothing.
    Raises ValueError if it is something else."""
    raw = files.read_whole(path)
    if raw is None:
        return None
    lines = raw.split(b"\n")
    while True:
        try:
            return _decode_json(lines.pop())
        except ValueError:
            if not any(lines):
                raise


def _decode_json(line: bytes) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(line)
        if fields.pop("crc") != _crc_of(fields):
            raise ValueError("checksum mismatch")
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("not what was written") from error
    return fields


def _crc_of(fields: Mapping[str, Any]) -> int:
    crc: int = crc32c(json.dumps(fields, sort_keys=True).encode())
    return crc


def read_topic_state(files: Files, directory: Path) -> TopicState | None:
    """The topic's state; None when there is none, or none that can be understood."""
    path = directory / TOPIC_FILE
    try:
        fields = read_json(files, path)
        if fields is None:
            logger.error("%s is missing: the log is kept, from its start", path)
            return None
        fields["gaps"] = [(int(a), int(b)) for a, b in fields["gaps"]]
        return TopicState(**fields)
    except (ValueError, TypeError, KeyError) as error:
        logger.error("%s cannot be understood (%s): the log is kept, from its start", path, error)
        return None


@dataclass(slots=True, kw_only=True)
class ChannelState:
    cursor: int
    """The next sequence number never delivered."""
    seen: int
    """Deferred messages published before this are among the unfinished, or finished."""
    paused: bool = False
    written_ns: int = 0
    """The wall time when it was taken; 0 if that is not known."""
    sequences: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    due_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Wall time; 0 for a message that may be delivered at once."""
    attempts: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))
    skips: list[tuple[int, int]] = field(default_factory=list)
    """Sequence numbers ahead of the cursor that it passes by; see Backlog.skips."""
    replay: tuple[int, int] = (0, 0)
    """Deferred messages ahead of the cursor that are the cursor's to deliver; see Backlog.replay."""
    carried_before: int = 0
    """Unfinished messages numbered below this are in the channel's carry file."""
    incarnation: str = ""
    """The log's, and the channel's name: a file that has got to another place is not believed. Empty in files
    of before."""
    channel: str = ""
    disk_end: int = 0
    """As in TopicState."""
    owner: str = ""
    """Who alone may commit: see Channel.claim. Empty for nobody, and in files of before."""
    owned_since_ns: int = 0
    """Wall time of the claim."""

    def drop_from(self, sequence: int) -> None:
        """Forget the unfinished messages from this sequence number on."""
        kept = self.sequences < np.uint64(sequence)
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
        for name in ("carried_before", "incarnation", "channel", "disk_end", "owner", "owned_since_ns"):
            if value := getattr(self, name):
                fields[name] = value
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


class StateFile:
    """Where a channel's state is kept. Checkpoints are written in threads and may come late: each is numbered
    when it is taken, and one that has been overtaken is not written any more."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._writing = Lock()
        self._version = 0

    def next_version(self) -> int:
        with self._writing:
            self._version += 1
            return self._version

    def write(self, content: bytes, version: int, *, sync: bool) -> bool:
        """Write a state down unless a later one has been numbered since; with `sync`, have it on disk. Gives
        whether it is there. May be called in any thread, with `sync` in any but the event loop's."""
        with self._writing:
            if version != self._version:
                return False
            self._files.add_version(self._path, content)
        if sync:
            # Not while others wait to write: the event loop may be one of them.
            self._files.sync_file(self._path)
        return True

    def remove(self) -> None:
        self.next_version()
        self._files.unlink(self._path)


def decode_channel_state(raw: bytes) -> ChannelState:
    """Raises ValueError for anything but a whole, unharmed state."""
    if len(raw) < _CHANNEL.size:
        raise ValueError("too short")
    magic, crc, length = _CHANNEL.unpack_from(raw)
    body = memoryview(raw)[_CHANNEL.size :]
    is_known = magic in (_MAGIC, _MAGIC_OF_IDS)
    if not is_known or crc32c(body, crc32c(length.to_bytes(4, "little"))) != crc:
        raise ValueError("checksum mismatch")
    try:
        state = _channel_state(json.loads(bytes(body[:length])), body, length)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a field is missing or not what it should be: {error}") from error
    if magic == _MAGIC_OF_IDS:
        state.sequences = state.sequences & _SEQUENCE_IN_ID
    return state


def _channel_state(fields: dict[str, Any], body: memoryview, length: int) -> ChannelState:
    count = fields["count"]
    if len(body) != length + 18 * count:
        raise ValueError("the count does not fit the size")
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
        carried_before=operator.index(fields.get("carried_before", 0)),
        incarnation=str(fields.get("incarnation", "")),
        channel=str(fields.get("channel", "")),
        disk_end=operator.index(fields.get("disk_end", 0)),
        owner=str(fields.get("owner", "")),
        owned_since_ns=operator.index(fields.get("owned_since_ns", 0)),
    )


def read_channel_state(files: Files, path: Path) -> ChannelState | None:
    """The channel's state; None when it is missing or damaged, and then the channel starts over."""
    raw = files.read_whole(path)
    state, error = _last_version(b"" if raw is None else raw)
    if state is not None and state.channel not in ("", path.name.removesuffix(CHANNEL_SUFFIX)):
        error = ValueError(f"it is of the channel {state.channel}")
        state = None
    if state is None:
        reason = "missing" if raw is None else error
        logger.error("%s is damaged (%s): the channel starts again at the oldest message kept", path, reason)
    elif error is not None:
        logger.warning(
            "%s: the last checkpoint was not written whole (%s): an earlier one counts", path, error
        )
    return state


def _last_version(raw: bytes) -> tuple[ChannelState | None, ValueError | None]:
    """The last state in the file that is whole, and what is wrong behind it."""
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
    """The size of the version that begins there, by what it says itself."""
    if len(raw) - position < _CHANNEL.size:
        raise ValueError("too short")
    _, _, length = _CHANNEL.unpack_from(raw, position)
    start = position + _CHANNEL.size
    try:
        count = int(json.loads(raw[start : start + length])["count"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"a field is missing or not what it should be: {error}") from error
    size: int = _CHANNEL.size + length + 18 * max(0, count)
    return size
