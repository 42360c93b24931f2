"""nsqd.dat: the topics, channels and pause flags in NSQ's own format, one line of JSON.

One key is ours: "crc", a checksum of the topics. NSQ's nsqd ignores it, and writes files without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from crc32c import crc32c

from nsparq.storage.files import Files

FILE_NAME = "nsqd.dat"
BAD_FILE_NAME = "nsqd.dat.bad"
"""Where a file goes that cannot be understood."""


class ChannelEntry(NamedTuple):
    name: str
    paused: bool


class TopicEntry(NamedTuple):
    name: str
    paused: bool
    channels: list[ChannelEntry]


class Metadata(NamedTuple):
    topics: list[TopicEntry]
    is_ours: bool = False
    """Whether nsparq wrote it, so that a channel in it had a file of its own."""


def encode_metadata(topics: list[TopicEntry], version: str) -> bytes:
    listed = [
        {
            "name": topic.name,
            "paused": topic.paused,
            "channels": [{"name": channel.name, "paused": channel.paused} for channel in topic.channels],
        }
        for topic in topics
    ]
    content = {"topics": listed, "version": version, "crc": _crc_of(listed)}
    return json.dumps(content, separators=(",", ":")).encode()


def read_metadata(files: Files, data_path: Path) -> Metadata:
    """What nsqd.dat lists; nothing when there is no such file. Lists may be null, as NSQ writes them. Raises
    ValueError when it cannot be understood, or is not what was written."""
    raw = files.read_whole(data_path / FILE_NAME)
    if raw is None:
        return Metadata([])
    try:
        content = json.loads(raw)
        listed = content.get("topics") or []
        if "crc" in content and content["crc"] != _crc_of(listed):
            raise ValueError("checksum mismatch")
        return Metadata([_topic(entry) for entry in listed], "crc" in content)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not what NSQ writes: {error!r}") from error


def _crc_of(listed: list[Any]) -> int:
    crc: int = crc32c(json.dumps(listed, sort_keys=True).encode())
    return crc


def _topic(entry: dict[str, Any]) -> TopicEntry:
    channels = [ChannelEntry(str(c["name"]), bool(c.get("paused"))) for c in entry.get("channels") or []]
    return TopicEntry(str(entry["name"]), bool(entry.get("paused")), channels)
