"""Brings the topics of a lost nsqd back from the archive, into an empty data path.

The messages stay in the archive. The data path gets what a start needs: manifests, indexes, and the
states of topics and channels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from nsparq.archive.store import Store
from nsparq.archive.topic_archive import latest_manifest
from nsparq.errors import StartError
from nsparq.storage.files import Files
from nsparq.storage.manifest import ROOT, Manifest, index_key
from nsparq.storage.segment_list import ARCHIVE_FILE
from nsparq.storage.state_files import CHANNEL_SUFFIX, ChannelState, TopicState

logger = logging.getLogger(__name__)

UNFINISHED: Final = "restore-unfinished"
"""This file is in the data path while a restore runs. After a crash the next one begins again."""


class Restored(NamedTuple):
    """What came back of a topic."""

    messages: int
    end: int
    """Messages from this sequence number on are missing, if there were any."""
    last_ns: int
    """Publish time of the last message that came back."""

    @property
    def text(self) -> str:
        last = datetime.fromtimestamp(self.last_ns / 1e9, UTC).isoformat(timespec="milliseconds")
        return f"{self.messages} messages; those published after {last} are missing"


def restore(
    store: Store, files: Files, data_path: Path, directory_of: Callable[[str], Path], node: int
) -> dict[str, Restored]:
    """Write the files of all topics that the archive has of this node. Does nothing if the data
    path has topics. Raises StartError, or OSError if the store or the disk fails."""
    mark = data_path / UNFINISHED
    topics = directory_of("x").parent
    if files.read_whole(mark) is not None:
        files.remove_tree(topics)
    elif files.list_directory(topics):
        logger.warning("--restore: %s has topics, nothing is restored", data_path)
        return {}
    manifests = find_manifests(store)
    own = {one.topic: one for one in sorted(manifests, key=_age) if one.node == node and one.segments}
    if not own and manifests:
        nodes = ", ".join(str(number) for number in sorted({one.node for one in manifests}))
        raise StartError(
            f"--restore: {store.url} has no topics of node {node}, but of {nodes}: give --node-id"
        )
    files.replace(mark, b"", sync=True)
    restored = {}
    for topic, manifest in own.items():
        restored[topic] = _write(store, files, directory_of(topic), manifest)
        logger.warning("TOPIC(%s): restored from the archive: %s", topic, restored[topic].text)
    files.sync_pending()
    files.unlink(mark)
    files.sync_names(data_path)
    if not own:
        logger.warning("--restore: %s has no topics", store.url)
    return restored


def find_manifests(store: Store) -> list[Manifest]:
    """The latest manifest of every log in the archive."""
    found = []
    for topic in store.directories(ROOT):
        for place in store.directories(topic):
            name, incarnation = place.split("/")[-2:]
            manifest = latest_manifest(store, name, incarnation)
            if manifest.number:
                found.append(manifest)
    return found


def _age(manifest: Manifest) -> int:
    """The latest incarnation of a topic wins: an earlier one was deleted."""
    return manifest.written_ns


def _write(store: Store, files: Files, directory: Path, manifest: Manifest) -> Restored:
    files.make_directory(directory)
    for entry in manifest.segments:
        index = store.get(index_key(manifest.place, entry))
        if index is None:
            logger.warning("archive: %s is missing", index_key(manifest.place, entry))
        else:
            files.replace(directory / f"{entry.base:020d}.index", index, sync=False)
    files.replace(directory / ARCHIVE_FILE, manifest.encode(), sync=False)
    start, end = manifest.segments[0].base, manifest.end
    for name, needed in manifest.channels.items():
        position = min(max(needed, start), end)
        state = ChannelState(
            cursor=position, seen=position, incarnation=manifest.incarnation, channel=name, disk_end=end
        )
        files.add_version(directory / (name + CHANNEL_SUFFIX), state.encode())
    state_of_topic = TopicState(
        incarnation=manifest.incarnation,
        origin=start,
        reserved=end,
        gaps=[*manifest.gaps],
        name=manifest.topic,
        disk_end=end,
        settings=manifest.settings,
    )
    state_of_topic.write(files, directory)
    count = sum(entry.end - entry.base for entry in manifest.segments)
    last_ns = max(entry.last_ns for entry in manifest.segments)
    return Restored(count, end, last_ns)
