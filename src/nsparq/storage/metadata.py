"""nsqd.dat: the topics, channels and pause flags in NSQ's own format, one line of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from nsparq.errors import StartError
from nsparq.storage.files import Files

FILE_NAME = "nsqd.dat"


class ChannelEntry(NamedTuple):
    name: str
    paused: bool


class TopicEntry(NamedTuple):
    name: str
    paused: bool
    channels: list[ChannelEntry]


def encode_metadata(topics: list[TopicEntry], version: str) -> bytes:
    content = {
        "topics": [
            {
                "name": topic.name,
                "paused": topic.paused,
                "channels": [{"name": channel.name, "paused": channel.paused} for channel in topic.channels],
            }
            for topic in topics
        ],
        "version": version,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def read_metadata(files: Files, data_path: Path) -> list[TopicEntry]:
    """What nsqd.dat lists; nothing when there is no such file. Lists may be null, as NSQ writes them."""
    path = data_path / FILE_NAME
    raw = files.read_whole(path)
    if raw is None:
        return []
    try:
        content = json.loads(raw)
        return [_topic(entry) for entry in content.get("topics") or []]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StartError(f"failed to load metadata - failed to parse metadata in {path} - {error}") from error


def _topic(entry: dict[str, Any]) -> TopicEntry:
    channels = [ChannelEntry(str(c["name"]), bool(c.get("paused"))) for c in entry.get("channels") or []]
    return TopicEntry(str(entry["name"]), bool(entry.get("paused")), channels)
