"""Changes that must be on disk before nsqd answers: new channels, pauses, seeks, settings,
deletions.

The event loop writes such a change without a sync, and adds its directory here. A thread then syncs
the changed directories and writes nsqd.dat. Changes made meanwhile share the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nsparq.storage.metadata import FILE_NAME, ChannelEntry, TopicEntry, encode_metadata
from nsparq.version import NSQ_VERSION

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.topic import Topic

Durable = Callable[[OSError | None], None]
"""Called with None once a change is on disk, or with the error."""


class DurableChanges:
    """Syncs the changes that somebody waits for, one round at a time."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.is_metadata_stale = False
        """Whether nsqd.dat is out of date."""
        self._is_metadata_wanted = False
        """Whether somebody waits for nsqd.dat to be written."""
        self._unsynced: set[Path] = set()
        """Directories that the next round syncs."""
        self._syncing: set[Path] = set()
        """Directories that the present round syncs."""
        self._is_round_running = False
        self._await_round: list[Durable] = []
        """Called when the present round ends."""
        self._await_next_round: list[Durable] = []

    def write_metadata(self) -> None:
        """Write nsqd.dat in the next round."""
        if not self._broker.is_loading:
            self.is_metadata_stale = self._is_metadata_wanted = True
            self.start_round()

    def sync_soon(self, directory: Path) -> None:
        """Sync a directory in the next round."""
        if self._broker.is_loading:
            self._broker.files.sync_written(directory)
        else:
            self._unsynced.add(directory)

    def are_on_disk(self, topic: Topic) -> bool:
        """Whether no change of the topic waits for a sync."""
        return topic.directory not in self._unsynced and topic.directory not in self._syncing

    def when_durable(self, done: Durable) -> None:
        """Call `done` once all changes so far are on disk. A failure to write nsqd.dat shows in
        health, but is no error for `done`: the directories of the topics have all that is
        needed."""
        self.start_round()
        if not self._is_round_running:
            done(None)
        elif self._is_metadata_wanted or self._unsynced:
            self._await_next_round.append(done)
        else:
            self._await_round.append(done)

    def start_round(self) -> None:
        """Start a thread that writes and syncs, unless one is running."""
        if self._is_round_running or not (self._is_metadata_wanted or self._unsynced):
            return
        self._is_round_running = True
        self._await_round, self._await_next_round = self._await_next_round, []
        directories = self._syncing = self._unsynced
        self._unsynced = set()
        metadata = self._encode_metadata() if self._is_metadata_wanted else None
        if metadata is not None:
            self.is_metadata_stale = self._is_metadata_wanted = False
        sync_errors: list[OSError] = []
        metadata_errors: list[OSError] = []

        def work() -> None:
            for directory in directories:
                try:
                    self._broker.files.sync_written(directory)
                except OSError as error:
                    sync_errors.append(error)
            if metadata is not None:
                try:
                    self._replace_metadata(metadata)
                except OSError as error:
                    metadata_errors.append(error)

        def worked() -> None:
            if metadata is not None:
                self._note_metadata(next(iter(metadata_errors), None))
            self._end_round(next(iter(sync_errors), None))

        self._broker.in_background(work, worked)

    def _end_round(self, error: OSError | None) -> None:
        self._is_round_running = False
        self._syncing = set()
        if error is not None:
            # The next round of Upkeep.sync_pending() syncs these directories again.
            self._broker.upkeep.note_pending(error)
        waiting, self._await_round = self._await_round, []
        for number, done in enumerate(waiting, 1):
            done(error)
            if self._unsynced:
                # `done` has changed something. The callbacks after it wait for that as well.
                self._await_next_round[:0] = waiting[number:]
                break
        self.start_round()

    def write_metadata_now(self) -> OSError | None:
        """Write nsqd.dat at once. Gives the error, if any."""
        try:
            self._replace_metadata(self._encode_metadata())
        except OSError as error:
            self._note_metadata(error)
            return error
        self.is_metadata_stale = False
        self._note_metadata(None)
        return None

    def _replace_metadata(self, content: bytes) -> None:
        self._broker.files.replace(self._broker.data_path.path / FILE_NAME, content, sync=True)

    def _note_metadata(self, error: OSError | None) -> None:
        self.is_metadata_stale |= error is not None
        self._broker.health.set(
            None if error is None else f"failed to persist metadata - {error}", "metadata"
        )

    @contextmanager
    def creating(self, what: str) -> Iterator[None]:
        """Shows in health that the disk refuses a new topic or channel. Upkeep then writes nsqd.dat
        until that works: nobody may ever try to create the same again."""
        try:
            yield
        except OSError as error:
            self.is_metadata_stale = True
            self._broker.health.set(f"failed to create {what} - {error}", "metadata")
            raise

    def _encode_metadata(self) -> bytes:
        return encode_metadata(_entries(self._broker.topics.values()), NSQ_VERSION)


def _entries(topics: Iterable[Topic]) -> list[TopicEntry]:
    return [
        TopicEntry(
            topic.name,
            topic.paused,
            [ChannelEntry(one.name, one.paused) for one in topic.channels.values() if one.is_durable],
        )
        for topic in topics
        if not topic.is_ephemeral
    ]
