"""The broker: all topics of an nsqd, from opening the data path to closing it.

`turn` has the end of each turn of the event loop, `upkeep` what happens about once a second.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nsparq.broker.channel import Channel
from nsparq.broker.client import Client
from nsparq.broker.clocks import AgeClock
from nsparq.broker.data_directory import TOPIC_SUFFIX, TRASH_SUFFIX, DataDirectory, topic_of_trash
from nsparq.broker.dead_letters import settle
from nsparq.broker.durable_changes import DurableChanges
from nsparq.broker.health import Health
from nsparq.broker.importer import import_queues
from nsparq.broker.lag import PublishTimes
from nsparq.broker.observing import channel_for
from nsparq.broker.redrive import Redrives
from nsparq.broker.scan import QueueScan
from nsparq.broker.topic import Topic
from nsparq.broker.transactions import Transactions
from nsparq.broker.turn import Turn
from nsparq.broker.upkeep import Upkeep
from nsparq.errors import StartError
from nsparq.names import is_valid_name
from nsparq.options import NsqdOptions
from nsparq.storage.archived import SegmentSource
from nsparq.storage.batch import BatchCache
from nsparq.storage.files import Files, RunEach, Work, run_one_by_one
from nsparq.storage.log import EPOCH_BITS, Durability, LogSettings
from nsparq.storage.log_sync import as_os_error
from nsparq.storage.manifest import Manifest
from nsparq.storage.memory_log import EphemeralMemory
from nsparq.storage.metadata import BAD_FILE_NAME, FILE_NAME, Metadata, TopicEntry, read_metadata
from nsparq.wire.message import SEQUENCE_BITS

logger = logging.getLogger(__name__)

UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors that make a data path unusable. A full disk is not one of them: it may have room again."""

Background = Callable[[Work, Work], None]
"""Runs the first in a thread, then the second in the broker's thread."""
Announce = Callable[[str, str, str], None]
"""Called with REGISTER or UNREGISTER, the topic, and the channel or nothing, when one comes or
goes."""


class Replicas(Protocol):
    """The other copies of the data path."""

    def when_safe(self, done: Callable[[Exception | None], None]) -> None:
        """Call `done` with None once every node that may take over has all changes so far, or with
        the error."""

    def check(self) -> None:
        """Raises TooFewReplicas if nothing may be published now."""


class Archive(Protocol):
    """Where the past of topics is kept."""

    def source_of(self, topic: str, incarnation: str) -> SegmentSource:
        """The archived segments of a log."""

    def recover(self, topic: str, incarnation: str) -> Manifest:
        """Ask the archive what it has of a log. Waits for it. Raises OSError."""

    def look_at(self, topic: Topic) -> None:
        """About once a second, for topics that are used: archive what is to be archived."""

    def forget(self, topic: Topic) -> None:
        """The topic was deleted."""

    def in_background(self, work: Work, then: Work) -> None:
        """Run `work`, which may wait for the archive for long, in a thread of its own kind."""

    def stats_of(self, topic: Topic) -> dict[str, Any]: ...


def run_inline(work: Work, then: Work) -> None:
    """Without threads: for tests and at shutdown."""
    work()
    then()


class Broker:
    """All state of an nsqd. Everything here runs in one thread.

    More than 20 attributes: it holds the parts, the clocks and the callbacks that all topics share.
    """

    def __init__(
        self,
        options: NsqdOptions,
        *,
        files: Files | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        wake: Callable[[], None] = lambda: None,
        background: Background = run_inline,
        announce: Announce = lambda verb, topic, channel: None,
        discovers_channels: Callable[[], bool] = lambda: False,
        replicas: Replicas | None = None,
        archive: Archive | None = None,
    ) -> None:
        self.options = options
        self.replicas = replicas
        """None if this is the only copy."""
        self.archive = archive
        """None if there is none."""
        self.files = files or Files()
        self.health = Health()
        self.data_path = DataDirectory(Path(options.data_path or "."), self.files, self.health)
        self.wall_ns = wall_ns
        """The time of day: for publish times, sequence numbers, and all times on disk. It may be
        set back."""
        self.monotonic_ns = monotonic_ns
        """For intervals and timeouts. It is never set back, and means nothing to the next run."""
        self.first_id = options.node_id << SEQUENCE_BITS
        self.start_s = wall_ns() // 1_000_000_000
        self.log_settings = LogSettings(
            Durability(options.durability), options.max_bytes_per_file, options.mem_queue_size,
            options.retention_age, options.retention_bytes, archive is not None, archive is not None,
            options.archive_local_bytes, options.archive_retention_age, options.archive_retention_bytes,
        )  # fmt: skip
        self.cache = BatchCache(options.mem_queue_bytes)
        self.ephemeral_memory = EphemeralMemory(options.mem_queue_bytes)
        self.topics: dict[str, Topic] = {}
        self.clients: set[Client] = set()
        self.scan = QueueScan(options.queue_scan_selection_count, options.queue_scan_worker_pool_max)
        self.transactions = Transactions(self)
        self.next_turn = Turn(self, wake)
        self.changes = DurableChanges(self)
        self.upkeep = Upkeep(self)
        self.redrives = Redrives(self)
        self.stamps = PublishTimes(self)
        self.channel_count = 0
        self.corrupt_files = 0
        """Damaged files that belong to no topic: nsqd.dat, and those of transactions."""
        self.was_stopped_cleanly = False
        """Whether the previous run ended with a clean stop."""
        self.is_loading = True
        """Until all of nsqd.dat has been read, it must not be written."""
        self._background = background
        self._announce = announce
        self._discovers_channels = discovers_channels
        self._deleted_end = 0
        """Deleted topics have used no sequence numbers from here on."""
        self._age_clock = AgeClock(wall_ns(), wall_ns(), monotonic_ns())

    # opening and closing

    def open(self) -> None:
        """Lock the data path, unless that is done, and load it. Raises StartError."""
        if not self.data_path.is_locked:
            self.data_path.lock()
        try:
            self._load()
        except BaseException as error:
            for topic in self.topics.values():
                topic.log.discard()
            self.data_path.unlock()
            if isinstance(error, OSError):
                raise StartError(f"failed to load data-path {self.data_path.path}: {error}") from error
            raise

    def _load(self) -> None:
        names = self.data_path.read_names()
        self.was_stopped_cleanly = self.data_path.take_clean_stop()
        metadata = self._read_metadata()
        ours = {entry.name: entry for entry in metadata.topics} if metadata.is_ours else {}
        trash: list[str] = []
        for name in names:
            if name.endswith(TRASH_SUFFIX):
                trash.append(name)
            elif name.endswith(TOPIC_SUFFIX):
                topic = Topic(self, name.removesuffix(TOPIC_SUFFIX))
                topic.load(ours.get(topic.name))
                self.topics[topic.name] = topic
                self.channel_count += len(topic.channels)
                self.upkeep.note_changed(topic)
        # Where a deletion was interrupted, nsqd.dat may still list the topic.
        deleted = {topic_of_trash(name) for name in trash} if metadata.is_ours else set()
        for entry in metadata.topics:
            if entry.name in self.topics or entry.name not in deleted:
                self._restore(entry)
        import_queues(self)
        settle(self)
        self.redrives.load()
        self.transactions.load()
        newest_ns = max((topic.positions().last_ns for topic in self.topics.values()), default=0)
        wall_ns = self.wall_ns()
        self._age_clock = AgeClock(newest_ns or wall_ns, wall_ns, self.monotonic_ns())
        self.is_loading = False
        error = self.changes.write_metadata_now()
        if error is not None and error.errno in UNWRITABLE:
            raise StartError(f"failed to persist metadata - {error}") from error
        for name in trash:
            self.files.remove_tree(self.data_path.topics / name)
        self.data_path.keep_reserve()

    def _read_metadata(self) -> Metadata:
        path = self.data_path.path / FILE_NAME
        try:
            return read_metadata(self.files, self.data_path.path)
        except ValueError as error:
            self.corrupt_files += 1
            self.files.rename(path, path.with_name(BAD_FILE_NAME))
            logger.error(
                "cannot parse %s (%s): it is kept as %s, and the directories of the topics are used instead",
                path, error, BAD_FILE_NAME,
            )  # fmt: skip
            return Metadata([])

    def _restore(self, entry: TopicEntry) -> None:
        """A topic that nsqd.dat lists: its directory may be missing, if another nsqd or a crash
        left the file."""
        if not _is_valid(entry.name):
            logger.warning("skipping creation of invalid topic %r in %s", entry.name, FILE_NAME)
            return
        is_new = entry.name not in self.topics
        topic = self.get_topic(entry.name)
        for channel_entry in entry.channels:
            if not _is_valid(channel_entry.name):
                logger.warning("skipping creation of invalid channel %r in %s", channel_entry.name, FILE_NAME)
                continue
            channel = topic.get_channel(channel_entry.name)
            if is_new and channel_entry.paused:
                channel.pause()
        if is_new and entry.paused:
            topic.pause()

    def close(self, run_each: RunEach = run_one_by_one) -> list[str]:
        """Persist everything and unlock the data path. Gives what could not be kept. `run_each`
        runs one piece of work for each topic, and may do so in threads."""
        if not self.data_path.is_locked:
            return []
        if self.is_loading:
            self.data_path.unlock()
            return []
        self._background = run_inline
        self.turn()
        for topic in self.topics.values():
            try:
                topic.end_clients()
            except Exception:
                logger.exception("%s: internal error while closing its clients", topic)
        failed = self._persist([*self.topics.values()], run_each)
        if failed:
            # Most likely the disk is full.
            self._make_room()
            failed = self._persist([*failed], run_each, states_first=True)
        self.changes.write_metadata_now()
        if not failed and not self.data_path.leave_clean_stop(run_each):
            self._make_room()
            if not self.data_path.leave_clean_stop(run_each):
                logger.error("the next start will treat this stop as a crash")
        lost = [f"{what} ({error})" for failures in failed.values() for what, error in failures]
        for line in lost:
            logger.error("not kept: %s", line)
        for topic in self.topics.values():
            topic.log.discard()
        self.data_path.unlock()
        return lost

    def _persist(
        self, topics: list[Topic], run_each: RunEach, *, states_first: bool = False
    ) -> dict[Topic, list[tuple[str, Exception]]]:
        """Gives the topics that could not be persisted, with what could not be kept and why."""
        failed: dict[Topic, list[tuple[str, Exception]]] = {}

        def persist(topic: Topic) -> None:
            failures = topic.checkpoint.persist(states_first=states_first)
            if failures:
                failed[topic] = failures

        run_each([partial(persist, topic) for topic in topics])
        return failed

    def _make_room(self) -> None:
        """Free disk space that is not needed."""
        for topic in self.topics.values():
            try:
                dropped = topic.log.trim(topic.low(), self.age_ns() / 1e9, topic.start_low())
                self.upkeep.remove_segments(dropped)
            except OSError as error:
                logger.warning("%s: cannot remove segments that no channel needs: %s", topic, error)
        self.data_path.use_reserve()

    def epoch(self) -> int:
        """A sequence number that no topic of this name can have reached: see
        storage.log.EPOCH_BITS."""
        return max(self.wall_ns() // 1_000_000 << EPOCH_BITS, self._deleted_end)

    # time

    def wall_of(self, monotonic_ns: int) -> int:
        """The wall time of a moment of the monotonic clock, as the wall clock is set now."""
        return monotonic_ns + self.wall_ns() - self.monotonic_ns()

    def due_times(self, written_ns: int = 0) -> Callable[[int], int]:
        """A function from due times on disk, which are wall time, to those of the monotonic clock.

        `written_ns` is the wall time at which they were written: it cannot be earlier now, whatever
        the wall clock says. And no delay is longer than the longest that a client can ask for.
        """
        now_ns, wall_ns = self.monotonic_ns(), max(self.wall_ns(), written_ns)
        latest_ns = now_ns + round(self.options.max_req_timeout * 1e9)
        return lambda due_ns: min(now_ns + due_ns - wall_ns, latest_ns)

    def age_ns(self) -> int:
        """The wall time to measure ages by: see AgeClock."""
        return self._age_clock.read(self.wall_ns(), self.monotonic_ns())

    # topics

    def get_topic(self, name: str) -> Topic:
        """The topic, created if need be. Raises OSError."""
        topic = self.topics.get(name)
        if topic is None:
            topic = Topic(self, name)
            with self.changes.creating(f"topic {name}"):
                topic.create()
            self.topics[name] = topic
            self.changes.is_metadata_stale |= not topic.is_ephemeral
            logger.info("TOPIC(%s): created", name)
            if not self.is_loading:
                self._announce("REGISTER", name, "")
        return topic

    def asks_for_channels(self) -> bool:
        """Whether nsqlookupd is to be asked for the channels of a new topic."""
        return self._discovers_channels() and not self.is_loading

    def delete_topic(self, name: str) -> None:
        """Raises KeyError, or OSError with nothing changed."""
        topic = self.topics[name]
        trash: Path | None = None
        if topic.directory is not None:
            trash = self.data_path.trash_of(name, topic.incarnation)
            self.files.rename(topic.directory, trash)
            if topic.is_synchronous:
                self.changes.sync_soon(trash.parent)
        self._deleted_end = max(self._deleted_end, topic.log.end)
        topic.delete()
        del self.topics[name]
        self.next_turn.forget_topic(topic)
        self.upkeep.forget_topic(topic)
        for client in self.clients:
            client.publish_counts.pop(name, None)
        if trash is not None:
            remove = partial(self.upkeep.remove, trash.name, partial(self.data_path.remove_trash, trash))
            self.changes.write_metadata()
            # While nsqd.dat lists the topic, the trash tells the next start that it was deleted.
            self.changes.when_durable(lambda _: remove())
        self._announce("UNREGISTER", name, "")
        logger.info("TOPIC(%s): deleted", name)

    def topic_changed(self, topic: Topic) -> None:
        """A pause flag has changed: it is on disk before the caller is answered."""
        if not topic.is_ephemeral:
            self.changes.write_metadata()

    def channel_created(self, channel: Channel) -> None:
        self.channel_count += 1
        self.changes.is_metadata_stale |= channel.is_durable
        self.upkeep.note_changed(channel.topic)
        if not self.is_loading:
            self._announce("REGISTER", channel.topic.name, channel.name)
        logger.info("TOPIC(%s): new channel(%s)", channel.topic.name, channel.name)

    def channel_deleted(self, channel: Channel) -> None:
        self.channel_count -= 1
        self.next_turn.forget_channel(channel)
        self.upkeep.forget_channel(channel)
        self.upkeep.note_changed(channel.topic)
        if channel.is_durable and not channel.topic.is_exiting:
            self.changes.write_metadata()
        self._announce("UNREGISTER", channel.topic.name, channel.name)
        logger.info("TOPIC(%s): deleting channel %s", channel.topic.name, channel.name)

    def channel_changed(self, channel: Channel) -> None:
        channel.topic.save_channel(channel)
        if channel.is_durable:
            self.changes.write_metadata()

    def subscribe(self, client: Client, topic_name: str, channel_name: str) -> None:
        """Raises Exiting or SubscribeRefused."""
        topic = self.get_topic(topic_name)
        channel_for(topic, channel_name, client.identity.observe).add_client(client)

    def turn(self) -> None:
        """End the present turn now: append, answer the publishers, deliver, flush."""
        self.next_turn.run()

    def maintain(self) -> None:
        """A whole round of upkeep."""
        self.upkeep.run()

    # threads

    def in_background(self, work: Work, then: Work = lambda: None) -> None:
        """Run `work` in a thread, and then `then` in the broker's own thread."""
        self._background(work, then)

    def try_in_background(
        self,
        work: Callable[[], object],
        done: Callable[[OSError | None], None],
        run: Background | None = None,
    ) -> None:
        """Run `work` in a thread. `done` is then told the OSError that it raised, or None, in the
        broker's own thread. Any other error is logged, and `done` is told of one, too."""
        errors: list[OSError] = []

        def attempt() -> None:
            try:
                work()
            except Exception as error:
                errors.append(as_os_error(error))

        (run or self._background)(attempt, lambda: done(next(iter(errors), None)))


def _is_valid(name: str) -> bool:
    return is_valid_name(name.encode("utf-8", "replace"))
