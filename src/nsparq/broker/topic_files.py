"""Reads the files of a topic after a restart: which log this is, and the states of its channels.

Files may be damaged, lost, or belong to another log of the same name. They are compared: a file
that disagrees with the others counts as corrupt and is not used.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from nsparq.errors import StartError
from nsparq.storage.batch import mark_of
from nsparq.storage.carried import CARRY_SUFFIX
from nsparq.storage.files import Files
from nsparq.storage.manifest import BadManifest, Manifest, SegmentEntry
from nsparq.storage.metadata import TopicEntry
from nsparq.storage.segment_list import ARCHIVE_FILE, read_marks
from nsparq.storage.state_files import (
    CHANNEL_SUFFIX,
    TOPIC_FILE,
    ChannelState,
    TopicState,
    read_channel_state,
    read_topic_state,
)

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FoundTopic:
    """What an earlier run left of a topic."""

    incarnation: str
    """Name of the log."""
    state: TopicState | None
    """None if it is damaged, lost, or of another log."""
    channels: dict[str, ChannelState | None]
    """Every channel that any file names. None for one that has to start over."""
    corrupt_files: int

    @property
    def known_channels(self) -> list[ChannelState]:
        return [state for state in self.channels.values() if state is not None]

    @property
    def highest_used(self) -> int:
        """No sequence number from here on was used, as far as the files tell."""
        seen = [state.seen for state in self.known_channels]
        return max([*seen, self.state.reserved if self.state else 0])

    @property
    def needed(self) -> tuple[int, int]:
        """The first sequence number that a channel needs, and the log's end on disk."""
        known = self.known_channels
        ends = [one.disk_end for one in known] + ([self.state.disk_end] if self.state is not None else [])
        lows = [min([one.cursor, *one.sequences.tolist()]) for one in known]
        if not known and self.state is not None:
            lows = [self.state.origin]
        return min(lows, default=0), max(ends, default=0)


def find_topic(files: Files, directory: Path, name: str, listed: TopicEntry | None) -> FoundTopic:
    """Read the files in a topic's directory. `listed` is the topic's entry in nsqd.dat, which also
    names channels whose files are lost."""
    names = files.list_directory(directory)
    channels = _read_channels(files, directory, names, listed)
    found = FoundTopic(uuid.uuid4().hex, None, channels, 0)
    # An empty directory belongs to a topic whose creation was interrupted.
    if names:
        found.state = read_topic_state(files, directory)
        _compare(files, directory, name, found)
    return found


def archived_entries(broker: Broker, directory: Path, topic: str, incarnation: str) -> Sequence[SegmentEntry]:
    """The segments of a log that are in the archive, as its file in the directory says. If the file
    is damaged, the archive is asked. Raises StartError if that is not possible."""
    raw = broker.files.read_whole(directory / ARCHIVE_FILE)
    if raw is None:
        return ()
    try:
        found = Manifest.decode(raw)
        if found.incarnation == incarnation:
            return found.segments
        reason = "it belongs to another log"
    except BadManifest as error:
        reason = str(error)
    logger.error("%s cannot be used (%s): asking the archive", directory / ARCHIVE_FILE, reason)
    if broker.archive is None:
        raise StartError(f"{directory / ARCHIVE_FILE}: {reason}; start nsqd with --archive to repair it")
    try:
        return broker.archive.recover(topic, incarnation).segments
    except OSError as error:
        raise StartError(f"{directory / ARCHIVE_FILE}: {reason}, and {error}") from error


def _read_channels(
    files: Files, directory: Path, names: list[str], listed: TopicEntry | None
) -> dict[str, ChannelState | None]:
    suffixes = (CHANNEL_SUFFIX, CARRY_SUFFIX)
    known = {name.removesuffix(suffix) for name in names for suffix in suffixes if name.endswith(suffix)}
    if listed is not None:
        known.update(entry.name for entry in listed.channels)
    return {name: read_channel_state(files, directory / (name + CHANNEL_SUFFIX)) for name in sorted(known)}


def _compare(files: Files, directory: Path, name: str, found: FoundTopic) -> None:
    """Find out which log this is. Count damaged files and those of another log, and drop them."""
    found.incarnation = _find_incarnation(files, directory, name, found)
    for channel, state in found.channels.items():
        if state is not None and state.incarnation not in ("", found.incarnation):
            logger.error("%s:%s: its file belongs to another log: the channel starts over", name, channel)
            found.channels[channel] = None
    if found.state is not None and found.state.incarnation != found.incarnation:
        logger.error(
            "%s: %s belongs to another log: the topic starts with every message of its log", name, TOPIC_FILE
        )
        found.state = None
    found.corrupt_files += sum(state is None for state in found.channels.values())
    found.corrupt_files += found.state is None


def _find_incarnation(files: Files, directory: Path, name: str, found: FoundTopic) -> str:
    """The incarnation in the topic's file. If the channels' files disagree, the majority of all
    files and segments decides."""
    state = found.state
    named = [one.incarnation for one in found.known_channels if one.incarnation]
    is_own = state is not None and state.name in ("", name)
    if state is not None and is_own and {*named} <= {state.incarnation}:
        return state.incarnation
    known = {mark_of(incarnation): incarnation for incarnation in named}
    votes = Counter(map(mark_of, named))
    votes.update(read_marks(files, directory))
    if state is not None:
        known[mark_of(state.incarnation)] = state.incarnation
        votes[mark_of(state.incarnation)] += 2 if is_own else 0
    if not votes:
        return found.incarnation
    mark = max(votes, key=votes.__getitem__)
    # Segments have only the mark of an incarnation. If no file has the whole name, make up one with
    # the same mark.
    others = (uuid.uuid4().hex for _ in count())
    return known.get(mark) or next(other for other in others if mark_of(other) == mark)
