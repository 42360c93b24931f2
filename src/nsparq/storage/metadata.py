"""nsqd.dat: the topics, channels and pause flags in NSQ's own format, one line of JSON.

One key is ours: "crc", a checksum of the topics. NSQ's nsqd ignores it and does not write it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from nsparq.storage.checked_json import crc_of
from nsparq.storage.files import Files

FILE_NAME = "nsqd.dat"
BAD_FILE_NAME = "nsqd.dat.bad"
"""New name of an nsqd.dat that cannot be parsed."""


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
    """Whether nsparq wrote it. Then each channel in it had a file of its own."""


def encode_metadata(topics: list[TopicEntry], version: str) -> bytes:
    listed = [
        {
            "name": topic.name,
            "paused": topic.paused,
            "channels": [{"name": channel.name, "paused": channel.paused} for channel in topic.channels],
        }
        for topic in topics
    ]
    content = {"topics": listed, "version": version, "crc": crc_of(listed)}
    return json.dumps(content, separators=(",", ":")).encode()


def read_metadata(files: Files, data_path: Path) -> Metadata:
    """What nsqd.dat lists; nothing if there is no such file. NSQ may write null for a list. Raises
    ValueError if the file cannot be parsed or has a wrong checksum."""
    raw = files.read_whole(data_path / FILE_NAME)
    if raw is None:
        return Metadata([])
    try:
        content = json.loads(raw)
        listed = content.get("topics") or []
        if "crc" in content and content["crc"] != crc_of(listed):
            raise ValueError("checksum mismatch")
        return Metadata([_topic(entry) for entry in listed], "crc" in content)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not what NSQ writes: {error!r}") from error


def _topic(entry: dict[str, Any]) -> TopicEntry:
    channels = [ChannelEntry(str(c["name"]), bool(c.get("paused"))) for c in entry.get("channels") or []]
    return TopicEntry(str(entry["name"]), bool(entry.get("paused")), channels)
