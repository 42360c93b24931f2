"""The broker: all topics, and the two rhythms of the daemon.

Every turn of the event loop ends with turn(): what was published is appended, what can be sent is sent.
About every second maintain(): checkpoints, fsyncs, reclaiming. Both touch only what has changed.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

from nsparq.broker.channel import Channel
from nsparq.broker.client import Client
from nsparq.broker.clocks import AgeClock
from nsparq.broker.importer import import_queues
from nsparq.broker.scan import QueueScan
from nsparq.broker.topic import Topic
from nsparq.broker.transactions import Transactions
from nsparq.errors import StartError, SyncFailed
from nsparq.names import is_valid_name
from nsparq.options import NsqdOptions
from nsparq.storage.cache import BatchCache
from nsparq.storage.files import Files, RunEach, Work, run_one_by_one
from nsparq.storage.log import EPOCH_BITS, Durability, Log, LogSettings
from nsparq.storage.memory import EphemeralMemory, MemoryLog
from nsparq.storage.metadata import (
    BAD_FILE_NAME,
    FILE_NAME,
    ChannelEntry,
    Metadata,
    TopicEntry,
    encode_metadata,
    read_metadata,
)
from nsparq.storage.segment import READ_SIZE, Cold, Segment
from nsparq.storage.state import ChannelState, StateFile
from nsparq.version import NSQ_VERSION
from nsparq.wire.message import SEQUENCE_BITS

logger = logging.getLogger(__name__)

TOPICS = "topics"
TOPIC_SUFFIX = ".topic"
TRASH_SUFFIX = ".deleted"
CLEAN_STOP = "clean-stop"
"""A file that a clean stop leaves, and that the next start removes: without it numbers may have been handed
out that no file tells of."""

RESERVE_NAME = "reserve"
RESERVE_BYTES = 1 << 20
"""Room that is kept on the disk for a clean stop. Files are replaced a few at a time, so that this is enough
for any number of channels, unless they have tens of thousands of unfinished messages each."""
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
"""A data path with this error will not do; one that is full may have room again."""

SYNC_REST_NS = 100_000_000
"""Without `--durability=fsync` nobody waits for an fsync: a log has no more than ten of them a second."""
SLICE_NS = 5_000_000
"""How long maintenance, or gathering stats, may hold up the loop, give or take one topic."""
AGE_INTERVAL_NS = 60_000_000_000
"""How often logs are looked at that nobody uses, and whose segments grow too old."""
COPY_REST_NS = 10_000_000_000
"""Between attempts to copy a segment whose fsync has failed."""
TURN_MESSAGES = 500
TURN_PARTS = 4
"""When so many messages have been delivered in a turn, and one in so many channels has had its part, the
others have theirs in the next."""

Durable = Callable[[OSError | None], None]
"""Told None once what was promised is on disk, or why that is not known."""
Background = Callable[[Work, Work], None]
"""Runs the first in a thread, then the second where the broker lives."""


Announce = Callable[[str, str, str], None]
"""Told REGISTER or UNREGISTER, the topic, and the channel or nothing, as they come and go."""


def run_inline(work: Work, then: Work) -> None:
    """For tests and for shutting down: no threads."""
    work()
    then()


class Broker:
    """All state of an nsqd. Everything here runs in one thread."""

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
    ) -> None:
        self.options = options
        self.files = files or Files()
        self.wall_ns = wall_ns
        """The time of day: for stamps, sequence numbers, and every time on disk. It may be set."""
        self.monotonic_ns = monotonic_ns
        """For everything that paces or times out. It is never set, and means nothing to the next run."""
        self.data_path = Path(options.data_path or ".")
        self.first_id = options.node_id << SEQUENCE_BITS
        self.start_s = wall_ns() // 1_000_000_000
        self.log_settings = LogSettings(
            Durability(options.durability), options.max_bytes_per_file, options.mem_queue_size,
            options.retention_age, options.retention_bytes,
        )  # fmt: skip
        self.cache = BatchCache(options.mem_queue_bytes)
        self.ephemeral_memory = EphemeralMemory(options.mem_queue_bytes)
        self.topics: dict[str, Topic] = {}
        self.clients: set[Client] = set()
        self.scan = QueueScan(options.queue_scan_selection_count, options.queue_scan_worker_pool_max)
        self.transactions = Transactions(self)
        self._troubles: dict[str, str] = {}
        """The latest error of each source that has not worked since."""
        self._wake = wake
        self._background = background
        self._announce = announce
        self._discovers_channels = discovers_channels
        self._is_awake = False
        self._dirty_topics: dict[Topic, None] = {}
        self._dirty_channels: dict[Channel, None] = {}
        self.append_count = 0
        """Grows with whatever is appended to a topic: who waits for messages of many topics looks at it."""
        self._used: set[Topic] = set()
        """Topics to be looked at by the next maintain()."""
        self._with_files: set[Topic] = set()
        """Topics whose log may have files open; those of idle topics are closed."""
        self._aging: set[Topic] = set()
        """Topics with segments that are kept until they reach an age."""
        self._ages_at_ns = 0
        """When these are looked at next."""
        self._is_metadata_stale = False
        self._is_syncing_pending = False
        self._pending_synced_ns = 0
        """When the last round of syncs of small files and names began."""
        self.was_stopped_cleanly = False
        """Whether the run before this one has come to a clean end."""
        self._is_metadata_wanted = False
        """Whether somebody waits for nsqd.dat to be written again."""
        self._unsynced: set[Path] = set()
        """Directories in which something was written that has to be on disk before it is answered."""
        self._syncing: set[Path] = set()
        """Those that a thread syncs at present."""
        self._is_making_durable = False
        """Whether a thread writes nsqd.dat, or syncs such directories."""
        self._await_round: list[Durable] = []
        """Told when that has ended."""
        self._await_next_round: list[Durable] = []
        """The same for the round after it."""
        self._has_reserve = False
        self._is_loading = True
        """Until all of nsqd.dat has been taken in, it must not be written."""
        self._copying: set[Topic] = set()
        """Topics of which a segment is being copied, because its fsync failed."""
        self._checkpointing: set[Channel] = set()
        self._checkpoint_after: dict[Channel, int] = {}
        """Channels whose last checkpoint was costly: not again before this."""
        self._channel_count = 0
        self._stuck: set[Channel] = set()
        """Channels whose last read the disk refused."""
        self._unremoved: list[tuple[str, Work]] = []
        """Removals of files that failed: what is removed, and how."""
        self.corrupt_files = 0
        """Files that were damaged and belong to no topic: the metadata, and those of transactions."""
        self._lock_fd = -1
        self._deleted_end = 0
        """No topic that was deleted has used sequence numbers from here on."""
        self._age_clock = AgeClock(wall_ns(), wall_ns(), monotonic_ns())

    # opening and closing

    def lock(self) -> None:
        """Take the data path, and change nothing there. Raises StartError."""
        self._lock_fd = self.files.lock_directory(self.data_path)

    def open(self) -> None:
        """Take the data path, unless that is done, and load what is there. Raises StartError."""
        if self._lock_fd < 0:
            self.lock()
        try:
            self._load()
        except BaseException as error:
            for topic in self.topics.values():
                if isinstance(topic.log, Log):
                    topic.log.delete()  # only lets go of its files
            self._unlock()
            if isinstance(error, OSError):
                raise StartError(f"failed to load data-path {self.data_path}: {error}") from error
            raise

    def _load(self) -> None:
        self._take_up_clean_stop()
        metadata = self._read_metadata()
        ours = {entry.name: entry for entry in metadata.topics} if metadata.is_ours else {}
        root = self.data_path / TOPICS
        trash: list[str] = []
        for name in self.files.list_directory(root):
            if name.endswith(TRASH_SUFFIX):
                trash.append(name)
            elif name.endswith(TOPIC_SUFFIX):
                topic = Topic(self, name.removesuffix(TOPIC_SUFFIX))
                topic.load(ours.get(topic.name))
                self.topics[topic.name] = topic
                self._channel_count += len(topic.channels)
                self._used.add(topic)
        # Where a deletion was interrupted, nsqd.dat may still list the topic.
        deleted = {_topic_of_trash(name) for name in trash} if metadata.is_ours else set()
        for entry in metadata.topics:
            if entry.name in self.topics or entry.name not in deleted:
                self._restore(entry)
        import_queues(self)
        self.transactions.load()
        newest_ns = max((topic.positions().last_ns for topic in self.topics.values()), default=0)
        wall_ns = self.wall_ns()
        self._age_clock = AgeClock(newest_ns or wall_ns, wall_ns, self.monotonic_ns())
        self._is_loading = False
        error = self._write_metadata_now()
        if error is not None and error.errno in UNWRITABLE:
            raise StartError(f"failed to persist metadata - {error}") from error
        for name in trash:
            self.files.remove_tree(root / name)
        self._keep_reserve()

    def _read_metadata(self) -> Metadata:
        path = self.data_path / FILE_NAME
        try:
            return read_metadata(self.files, self.data_path)
        except ValueError as error:
            self.corrupt_files += 1
            self.files.rename(path, path.with_name(BAD_FILE_NAME))
            logger.error(
                "%s cannot be understood (%s): kept as %s; the directories of the topics say what there is",
                path, error, BAD_FILE_NAME,
            )  # fmt: skip
            return Metadata([])

    def _take_up_clean_stop(self) -> None:
        """From here on a stop is not clean, whatever happens: on disk before anything is handed out."""
        mark = self.data_path / CLEAN_STOP
        self.was_stopped_cleanly = self.files.read_whole(mark) is not None
        self.files.unlink(mark)
        self.files.sync_names(self.data_path)

    def _restore(self, entry: TopicEntry) -> None:
        """What nsqd.dat lists beyond the directories: another nsqd has been here, or one that crashed."""
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
        """Persist everything and let go of the data path. Gives what could not be kept. Each topic is
        persisted by one of the works that `run_each` is given; it may run them in threads."""
        if self._lock_fd < 0:
            return []
        if self._is_loading:
            self._unlock()
            return []
        self._background = run_inline
        self.turn()
        for topic in self.topics.values():
            try:
                topic.end_clients()
            except Exception:
                logger.exception("%s: internal error while taking leave of its clients", topic)
        failed = self._persist([*self.topics.values()], run_each)
        if failed:
            # Most likely the disk is full.
            self._make_room()
            failed = self._persist([*failed], run_each, states_first=True)
        self._write_metadata_now()
        if not failed and not self._leave_clean_stop(run_each):
            self._make_room()
            if not self._leave_clean_stop(run_each):
                logger.error("the next start takes this stop for a crash")
        lost = [f"{what} ({error})" for failures in failed.values() for what, error in failures]
        for line in lost:
            logger.error("not kept: %s", line)
        for topic in self.topics.values():
            if isinstance(topic.log, Log):
                topic.log.delete()  # only lets go of its files
        self._unlock()
        return lost

    def _unlock(self) -> None:
        self.files.close(self._lock_fd)
        self._lock_fd = -1

    def _leave_clean_stop(self, run_each: RunEach) -> bool:
        """Gives whether the next start will know that this was a clean stop."""
        try:
            self.files.sync_pending(run_each)
            self.files.replace(self.data_path / CLEAN_STOP, b"", sync=True)
        except OSError as error:
            logger.warning("cannot write %s: %s", CLEAN_STOP, error)
            return False
        return True

    def _persist(
        self, topics: list[Topic], run_each: RunEach, *, states_first: bool = False
    ) -> dict[Topic, list[tuple[str, Exception]]]:
        """Gives the topics that could not be persisted whole, with what could not be kept and why."""
        failed: dict[Topic, list[tuple[str, Exception]]] = {}

        def persist(topic: Topic) -> None:
            failures = topic.persist(states_first=states_first)
            if failures:
                failed[topic] = failures

        run_each([partial(persist, topic) for topic in topics])
        return failed

    def _make_room(self) -> None:
        """Give the disk back what can be spared."""
        for topic in self.topics.values():
            if isinstance(topic.log, Log):
                try:
                    self._remove_segments(topic.log.trim(topic.low(), self.age_ns() / 1e9))
                except OSError as error:
                    logger.warning("%s: cannot remove what nobody needs: %s", topic, error)
        try:
            self.files.unlink(self.data_path / RESERVE_NAME)
        except OSError as error:
            logger.warning("cannot remove %s: %s", RESERVE_NAME, error)

    def _keep_reserve(self) -> None:
        """Hold some room on the disk, for a clean stop when there is no other."""
        if self._has_reserve:
            return
        try:
            self.files.allocate(self.data_path / RESERVE_NAME, RESERVE_BYTES)
        except OSError as error:
            self.set_health(f"no room to keep in reserve for a clean stop: {_reason(error)}", "reserve")
        else:
            self._has_reserve = True
            self.set_health(None, "reserve")

    def topic_directory(self, name: str) -> Path:
        return self.data_path / TOPICS / (name + TOPIC_SUFFIX)

    def epoch(self) -> int:
        """A sequence number that no topic of this name can have reached: see storage.log.EPOCH_BITS."""
        return max(self.wall_ns() // 1_000_000 << EPOCH_BITS, self._deleted_end)

    # time

    def wall_of(self, monotonic_ns: int) -> int:
        """The wall time of a moment of the monotonic clock, as the wall clock is set now."""
        return monotonic_ns + self.wall_ns() - self.monotonic_ns()

    def due_times(self, written_ns: int = 0) -> Callable[[int], int]:
        """A function from due times on disk, which are wall time, to those of the monotonic clock.

        `written_ns` is the wall time at which they were written: it cannot be earlier now, whatever the wall
        clock says. And no delay is longer than the longest that a client can ask for.
        """
        now_ns, wall_ns = self.monotonic_ns(), max(self.wall_ns(), written_ns)
        latest_ns = now_ns + round(self.options.max_req_timeout * 1e9)
        return lambda due_ns: min(now_ns + due_ns - wall_ns, latest_ns)

    def age_ns(self) -> int:
        """The wall time to measure ages by: see AgeClock."""
        return self._age_clock.read(self.wall_ns(), self.monotonic_ns())

    # topics

    def get_topic(self, name: str) -> Topic:
        """The topic, created if need be."""
        topic = self.topics.get(name)
        if topic is None:
            topic = Topic(self, name)
            topic.create()
            self.topics[name] = topic
            self._is_metadata_stale |= not topic.is_ephemeral
            logger.info("TOPIC(%s): created", name)
            if not self._is_loading:
                self._announce("REGISTER", name, "")
        return topic

    def asks_for_channels(self) -> bool:
        """Whether somebody is to be asked which channels a new topic has elsewhere."""
        return self._discovers_channels() and not self._is_loading

    def delete_topic(self, name: str) -> None:
        """Raises KeyError, or OSError with nothing changed."""
        topic = self.topics[name]
        trash: Path | None = None
        if topic.directory is not None:
            trash = topic.directory.with_name(f"{name}.{topic.incarnation}{TRASH_SUFFIX}")
            self.files.rename(topic.directory, trash)
            if topic.is_synchronous:
                self.sync_soon(trash.parent)
        self._deleted_end = max(self._deleted_end, topic.log.end)
        topic.delete()
        del self.topics[name]
        self._dirty_topics.pop(topic, None)
        self._used.discard(topic)
        self._with_files.discard(topic)
        self._aging.discard(topic)
        for client in self.clients:
            client.publish_counts.pop(name, None)
        for work in ("sync", "state"):
            self.set_health(None, f"{work} {topic}")
        if trash is not None:
            removed = trash
            self.write_metadata()
            # Until nsqd.dat does not list the topic, this tells the next start that it was deleted.
            self.when_durable(lambda _: self.remove(removed.name, lambda: self._throw_away(removed)))
        self._announce("UNREGISTER", name, "")
        logger.info("TOPIC(%s): deleted", name)

    def _throw_away(self, trash: Path) -> None:
        # After a power cut the topic is to be there whole, if its new name is not.
        self.files.sync_names(trash.parent)
        self.files.remove_tree(trash)

    def topic_changed(self, topic: Topic) -> None:
        """A pause flag has changed: it is on disk before the caller is answered."""
        if not topic.is_ephemeral:
            self.write_metadata()

    def channel_created(self, channel: Channel) -> None:
        self._channel_count += 1
        self._is_metadata_stale |= channel.is_durable
        self._used.add(channel.topic)
        if not self._is_loading:
            self._announce("REGISTER", channel.topic.name, channel.name)
        logger.info("TOPIC(%s): new channel(%s)", channel.topic.name, channel.name)

    def channel_deleted(self, channel: Channel) -> None:
        self._channel_count -= 1
        self._dirty_channels.pop(channel, None)
        self._stuck.discard(channel)
        for work in ("read", "checkpoint", "carry"):
            self.set_health(None, f"{work} {channel}")
        self._checkpoint_after.pop(channel, None)
        self._used.add(channel.topic)
        if channel.is_durable and not channel.topic.is_exiting:
            self.write_metadata()
        self._announce("UNREGISTER", channel.topic.name, channel.name)
        logger.info("TOPIC(%s): deleting channel %s", channel.topic.name, channel.name)

    def channel_changed(self, channel: Channel) -> None:
        channel.topic.save_channel(channel)
        if channel.is_durable:
            self.write_metadata()

    def write_metadata(self) -> None:
        """Have nsqd.dat written, in a thread: see when_durable()."""
        if not self._is_loading:
            self._is_metadata_stale = self._is_metadata_wanted = True
            self._make_durable()

    def sync_soon(self, directory: Path) -> None:
        """Have what was written in a directory on disk before it is answered: see when_durable()."""
        if self._is_loading:
            self.files.sync_written(directory)
        else:
            self._unsynced.add(directory)

    def is_durable(self, topic: Topic) -> bool:
        """Whether all that was promised of a topic is on disk."""
        return topic.directory not in self._unsynced and topic.directory not in self._syncing

    def when_durable(self, done: Durable) -> None:
        """Have `done` called once everything that was changed so far is on disk as promised: nsqd.dat, and
        the directories given to sync_soon(). If nsqd.dat cannot be written, health says so, and it is called
        all the same: the directories of the topics know enough."""
        self._make_durable()
        if not self._is_making_durable:
            done(None)
        elif self._is_metadata_wanted or self._unsynced:
            self._await_next_round.append(done)
        else:
            self._await_round.append(done)

    def _make_durable(self) -> None:
        """Write and sync what waits for that, in a thread. What comes meanwhile is for the next round."""
        if self._is_making_durable or not (self._is_metadata_wanted or self._unsynced):
            return
        self._is_making_durable = True
        self._await_round, self._await_next_round = self._await_next_round, []
        directories = self._syncing = self._unsynced
        self._unsynced = set()
        content = self._encode_metadata() if self._is_metadata_wanted else None
        if content is not None:
            self._is_metadata_stale = self._is_metadata_wanted = False
        failures: list[OSError] = []
        unwritten: list[OSError] = []

        def work() -> None:
            for directory in directories:
                try:
                    self.files.sync_written(directory)
                except OSError as error:
                    failures.append(error)
            if content is not None:
                try:
                    self.files.replace(self.data_path / FILE_NAME, content, sync=True)
                except OSError as error:
                    unwritten.append(error)

        def worked() -> None:
            self._is_making_durable = False
            self._syncing = set()
            if content is not None:
                self._note_metadata(unwritten[0] if unwritten else None)
            error = failures[0] if failures else None
            if error is not None:
                # Synced again with all that is pending.
                self._note_pending(error)
            waiting, self._await_round = self._await_round, []
            for number, done in enumerate(waiting, 1):
                done(error)
                if self._unsynced:
                    # It has changed something more, and those behind it wait for that as well.
                    self._await_next_round[:0] = waiting[number:]
                    break
            self._make_durable()

        self._background(work, worked)

    def _write_metadata_now(self) -> OSError | None:
        """Gives the error, if there is one."""
        try:
            self.files.replace(self.data_path / FILE_NAME, self._encode_metadata(), sync=True)
        except OSError as error:
            self._note_metadata(error)
            return error
        self._is_metadata_stale = False
        self._note_metadata(None)
        return None

    def _note_metadata(self, error: OSError | None) -> None:
        self._is_metadata_stale |= error is not None
        self.set_health(None if error is None else f"failed to persist metadata - {error}", "metadata")

    def _encode_metadata(self) -> bytes:
        topics = [
            TopicEntry(
                t.name,
                t.paused,
                [ChannelEntry(c.name, c.paused) for c in t.channels.values() if c.is_durable],
            )
            for t in self.topics.values()
            if not t.is_ephemeral
        ]
        return encode_metadata(topics, NSQ_VERSION)

    # the turn

    def publish(
        self,
        topic_name: str,
        bodies: Sequence[bytes],
        defer_ms: int,
        done: Callable[[str, Exception | None], None],
        verb: str,
        *,
        has_company: bool = False,
    ) -> None:
        topic = self.topics.get(topic_name) or self.get_topic(topic_name)
        topic.publish(bodies, defer_ms * 1_000_000, done, verb, has_company=has_company)

    def subscribe(self, client: Client, topic_name: str, channel_name: str) -> None:
        """Raises Exiting or SubscribeRefused."""
        self.get_topic(topic_name).get_channel(channel_name).add_client(client)

    def schedule_topic(self, topic: Topic) -> None:
        self._dirty_topics[topic] = None
        self._wake_once()

    def schedule_channel(self, channel: Channel) -> None:
        self._dirty_channels[channel] = None
        self._wake_once()

    def _wake_once(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._wake()

    def turn(self) -> None:
        """The end of an event loop turn: append, answer the publishers, deliver."""
        self._is_awake = False
        flushed, self._dirty_topics = self._dirty_topics, {}
        for topic in flushed:
            topic.flush()
        self._pump(self.monotonic_ns())
        for topic in flushed:
            if topic.is_ephemeral:
                topic.bound()
        self._bound_ephemeral_memory()

    def _bound_ephemeral_memory(self) -> None:
        """Keep all ephemeral topics together within their bytes: the largest gives up its oldest messages. A
        sixteenth more than needed goes, so that this is not done for each message."""
        memory = self.ephemeral_memory
        if memory.size_bytes <= memory.limit_bytes:
            return
        enough = memory.limit_bytes - memory.limit_bytes // 16
        least = memory.limit_bytes // 64
        largest = [
            (-topic.log.held_bytes, name)
            for name, topic in self.topics.items()
            if isinstance(topic.log, MemoryLog)
        ]
        heapify(largest)
        while largest and (surplus := memory.size_bytes - enough) > 0:
            size, name = heappop(largest)
            following = largest[0][0] if largest else 0
            topic = self.topics[name]
            topic.give_up(min(surplus, max(following - size, least, 1)))
            assert isinstance(topic.log, MemoryLog)
            if topic.log.held_bytes < -size:
                heappush(largest, (-topic.log.held_bytes, name))

    def _pump(self, now_ns: int) -> None:
        """Deliver on the channels that have something to deliver. Where that is much, to a part of them: what
        is published and answered meanwhile then goes with what is left, and deliveries get larger and fewer
        as there is more to do."""
        channels, self._dirty_channels = self._dirty_channels, {}
        share = -(-len(channels) // TURN_PARTS)
        waiting = iter(channels)
        delivered = 0
        for number, channel in enumerate(waiting, 1):
            self._used.add(channel.topic)
            try:
                delivered += channel.pump(now_ns)
            except Exception:
                # An error in one channel must not hold up the others. It tries again with the next round of
                # maintenance.
                logger.exception("%s: internal error while delivering", channel)
                self._stuck.add(channel)
            if number >= share and delivered >= TURN_MESSAGES:
                break
        if left := dict.fromkeys(waiting):
            # First in line, before those that have just had their turn.
            self._dirty_channels = left | self._dirty_channels
            self._wake_once()

    def read_failed(self, channel: Channel, error: OSError) -> None:
        """A disk that does not read: the channel tries again at the next round of maintenance."""
        self.set_health(f"{channel}: cannot read the log: {error.strerror or error}", f"read {channel}")
        self._stuck.add(channel)

    def in_background(self, work: Work, then: Work = lambda: None) -> None:
        """Have something done in a thread, and then something where the broker lives."""
        self._background(work, then)

    def remove(self, what: str, work: Work) -> None:
        """Remove files in a thread. If `work` raises OSError, the next round of maintenance repeats it."""
        failure: list[OSError] = []

        def try_it() -> None:
            try:
                work()
            except OSError as error:
                failure.append(error)

        def tried() -> None:
            if failure:
                self._unremoved.append((what, work))
            error = f"cannot remove {what}: {_reason(failure[0])}" if failure else None
            self.set_health(error, f"remove {what}")

        self._background(try_it, tried)

    def warm(self, cold: Cold, then: Work) -> None:
        """Bring bytes from the disk into the system's memory without holding anybody up."""

        def read() -> None:
            try:
                fd = self.files.open_read(cold.path)
            except OSError:
                # The read that follows on the loop meets the same error, and reports it.
                logger.warning("cannot read ahead in %s", cold.path, exc_info=True)
                return
            try:
                self.files.read(fd, 4 * READ_SIZE, cold.position)
            except OSError:
                logger.warning("cannot read ahead in %s", cold.path, exc_info=True)
            finally:
                self.files.close(fd)

        self._background(read, then)

    # upkeep

    def note_changed(self, topic: Topic) -> None:
        self._used.add(topic)

    def note_used(self, topic: Topic) -> None:
        self.append_count += 1
        self._used.add(topic)
        now_ns = self.monotonic_ns()
        if now_ns - topic.synced_ns < SYNC_REST_NS or topic.is_synchronous:
            return
        log = topic.log
        if isinstance(log, Log) and log.unsynced >= self.options.sync_every:
            topic.synced_ns = now_ns
            self.request_sync(topic)

    def request_sync(self, topic: Topic) -> None:
        """fsync in a thread, one at a time for a log: publishers who come meanwhile share the next."""
        log = topic.log
        if not isinstance(log, Log) or log.is_syncing:
            return
        try:
            sync = log.begin_sync()
        except OSError as error:
            self._sync_later(topic, error)
            return

        def synced() -> None:
            log.end_sync(sync)
            if topic.is_exiting:
                log.close_descriptors()
            elif sync.obstacle is not None:
                self._sync_later(topic, sync.obstacle)
            else:
                self._note_sync(topic, sync.error)
                topic.committed(None if sync.error is None else SyncFailed(_reason(sync.error)))

        self._background(sync.run, synced)

    def _note_sync(self, topic: Topic, error: OSError | None) -> None:
        """Trouble with fsync is over when what it was about has been copied, not with the next fsync."""
        source = f"sync {topic}"
        if error is not None:
            self.set_health(f"{topic}: fsync failed: {_reason(error)}", source)
            self._used.add(topic)
        elif isinstance(topic.log, Log) and not topic.log.doubtful:
            self.set_health(None, source)

    def _copy_doubtful(self, topic: Topic, log: Log, now_ns: int) -> None:
        """Copy a segment whose fsync failed. If that fails too, try again after a while."""
        self._used.add(topic)
        if topic in self._copying or now_ns < topic.copy_after_ns:
            return
        segment = log.doubtful[0]
        failure: list[OSError] = []

        def copy() -> None:
            try:
                segment.copy_anew()
            except OSError as error:
                failure.append(error)

        def copied() -> None:
            self._copying.discard(topic)
            if topic.is_exiting:
                return
            if failure:
                topic.copy_after_ns = self.monotonic_ns() + COPY_REST_NS
            else:
                log.copied(segment)
            self._note_sync(topic, failure[0] if failure else None)

        self._copying.add(topic)
        self._background(copy, copied)

    def _sync_later(self, topic: Topic, error: OSError) -> None:
        """An fsync could not be tried, mostly for want of a descriptor: maintain() tries again. Nothing is
        known to have failed, so publishers who wait for it go on waiting."""
        self.set_health(f"{topic}: cannot fsync for now: {_reason(error)}", f"sync {topic}")
        self._used.add(topic)

    def maintain(self) -> None:
        """Checkpoint, sync and reclaim whatever has been used since the last time."""
        for _ in self.maintain_in_slices():
            pass

    def maintain_in_slices(self) -> Iterator[None]:
        """The same with a break wherever it has taken long, so that many topics do not hold up the loop."""
        now_ns = self.monotonic_ns()
        if self._is_metadata_stale:
            self.write_metadata()
        self._make_durable()
        self._keep_reserve()
        for channel in self._stuck:
            # If it fails again, it says so again.
            self.set_health(None, f"read {channel}")
            self.schedule_channel(channel)
        self._stuck.clear()
        unremoved, self._unremoved = self._unremoved, []
        for what, work in unremoved:
            self.remove(what, work)
        if now_ns >= self._ages_at_ns:
            self._ages_at_ns = now_ns + AGE_INTERVAL_NS
            self._used |= self._aging
            self._aging = set()
        used, self._used = self._used, set()
        idle = self._with_files - used
        self._with_files.update(topic for topic in used if not (topic.is_ephemeral or topic.is_exiting))
        stop_ns = now_ns + SLICE_NS
        try:
            while used or idle:
                if used:
                    self._maintain_topic(used.pop())
                else:
                    self._release_files(idle.pop())
                if self.monotonic_ns() > stop_ns:
                    yield
                    stop_ns = self.monotonic_ns() + SLICE_NS
        finally:
            # Broken off: the next round goes on with them.
            self._used |= used
        self.transactions.expire()
        self.scan.resize(self._channel_count)
        self._sync_pending()

    def _sync_pending(self) -> None:
        """Sync what was written without a sync: checkpoints, topics' states, names. One round at a time, in
        one thread: with many topics on a slow disk the others are left for those who read."""
        now_ns = self.monotonic_ns()
        is_early = now_ns - self._pending_synced_ns < self.options.sync_timeout * 1e9 / 2
        if self._is_syncing_pending or is_early:
            return
        if not self.files.has_pending:
            self._note_pending(None)
            return
        self._is_syncing_pending = True
        self._pending_synced_ns = now_ns
        failure: list[OSError] = []

        def sync() -> None:
            try:
                self.files.sync_pending()
            except OSError as error:
                failure.append(error)

        def synced() -> None:
            self._is_syncing_pending = False
            self._note_pending(failure[0] if failure else None)

        self._background(sync, synced)

    def _note_pending(self, error: OSError | None) -> None:
        text = None if error is None else f"cannot sync checkpoints, states and names: {_reason(error)}"
        self.set_health(text, "sync pending")

    def _release_files(self, topic: Topic) -> None:
        if isinstance(topic.log, Log) and topic.log.release_files():
            self._with_files.discard(topic)

    def _maintain_topic(self, topic: Topic) -> None:
        if topic.is_exiting:
            return
        try:
            self._checkpoint(topic)
            topic.checkpoint()
            self._sync_in_time(topic)
            self._reclaim(topic)
            self._bound_ephemeral_memory()
        except Exception:
            # One topic's trouble must not cost the others their checkpoints. The next round tries again.
            logger.exception("%s: maintenance failed", topic)
            self._used.add(topic)

    def _sync_in_time(self, topic: Topic) -> None:
        log, now_ns = topic.log, self.monotonic_ns()
        if isinstance(log, Log) and log.unsynced:
            self._used.add(topic)
            # In the next round it would be too late.
            limit_s = self.options.sync_timeout - self.options.checkpoint_interval
            is_time = topic.awaits_sync or now_ns - topic.synced_ns >= limit_s * 1e9
            if is_time and not log.is_syncing:
                topic.synced_ns = now_ns
                self.request_sync(topic)
        if isinstance(log, Log) and log.doubtful:
            self._copy_doubtful(topic, log, now_ns)

    def _reclaim(self, topic: Topic) -> None:
        dropped = topic.reclaim(self.age_ns())
        if dropped:
            self.remove(f"segments of {topic}", lambda: self._remove_segments(dropped))
        log = topic.log
        if isinstance(log, Log) and log.settings.retention_s and log.sealed_segments():
            self._aging.add(topic)

    def _remove_segments(self, segments: list[Segment]) -> None:
        # What was carried over, and the checkpoints that let go of these segments, are on disk first.
        self.files.sync_pending()
        for segment in segments:
            segment.remove()

    def _checkpoint(self, topic: Topic) -> None:
        for channel in topic.channels.values():
            if not channel.is_changed or channel.state_file is None:
                continue
            now_ns = self.monotonic_ns()
            if channel in self._checkpointing or now_ns < self._checkpoint_after.get(channel, 0):
                self._used.add(topic)
                continue
            channel.is_changed = False
            self._checkpointing.add(channel)
            self._write_checkpoint(channel, channel.state_file, channel.capture(), now_ns)

    def _write_checkpoint(
        self, channel: Channel, state_file: StateFile, build: Callable[[], ChannelState], began_ns: int
    ) -> None:
        failure: list[OSError] = []
        version = state_file.next_version()
        state: ChannelState | None = None
        is_latest = False
        encoded_ns = began_ns

        def write() -> None:
            nonlocal state, is_latest, encoded_ns
            state = build()
            content = state.encode()
            encoded_ns = self.monotonic_ns()
            try:
                is_latest = state_file.write(content, version, sync=channel.topic.is_synchronous)
            except OSError as error:
                failure.append(error)

        def written() -> None:
            self._checkpointing.discard(channel)
            if channel.is_exiting:
                return
            # A channel with a million deferred messages takes a while to write down: it is done less often.
            self._checkpoint_after[channel] = began_ns + 20 * (encoded_ns - began_ns)
            if failure:
                channel.is_changed = True
                self._used.add(channel.topic)
            if is_latest and state is not None:
                channel.checkpointed(state)
            error = f"failed to checkpoint {channel}: {failure[0]}" if failure else None
            self.set_health(error, f"checkpoint {channel}")

        self._background(write, written)

    def set_health(self, error: str | None, source: str = "publish") -> None:
        """Note the trouble of one source, or that it is over. Publishing is one; others are named after
        what they do and for whom."""
        known = self._troubles.get(source)
        if error is not None:
            if error != known:
                logger.error("%s", error)
            self._troubles[source] = error
        elif known is not None:
            logger.info("recovered from: %s", known)
            del self._troubles[source]

    @property
    def health(self) -> str | None:
        """What is wrong now; None when nothing is."""
        return next(iter(self._troubles.values())) if self._troubles else None

    # stats

    def stats(self, topic: str = "", channel: str = "", include_clients: bool = True) -> dict[str, Any]:
        """The shape of NSQ's /stats?format=json, with keys of ours added."""
        stats: dict[str, Any] = {}
        for _ in self.stats_in_slices(stats, topic, channel, include_clients):
            pass
        return stats

    def stats_in_slices(
        self, stats: dict[str, Any], topic: str, channel: str, include_clients: bool
    ) -> Iterator[None]:
        """Fill in stats(), with a break wherever it has taken long."""
        names = sorted(self.topics) if not topic else [topic] if topic in self.topics else []
        is_wanted = include_clients and bool(names or not topic)
        # Of one topic only those who publish to it: who may read it need not know the others.
        producers = [
            client.stats(topic)
            for client in self.clients
            if is_wanted and (topic in client.publish_counts if topic else client.publish_counts)
        ]
        topics: list[dict[str, Any]] = []
        stats |= {
            "version": NSQ_VERSION,
            "health": "OK" if self.health is None else f"NOK - {self.health}",
            "start_time": self.start_s,
            "topics": topics if names or not topic else None,
            "producers": producers or None,
            "corrupt_files": self.corrupt_files,
        }
        stop_ns = self.monotonic_ns() + SLICE_NS
        for name in names:
            shown = self.topics.get(name)
            if shown is None or (channel and channel not in shown.channels):
                continue
            topics.append(shown.stats(channel, include_clients, self.monotonic_ns()))
            if self.monotonic_ns() > stop_ns:
                yield
                stop_ns = self.monotonic_ns() + SLICE_NS


def _is_valid(name: str) -> bool:
    return is_valid_name(name.encode("utf-8", "replace"))


def _topic_of_trash(name: str) -> str:
    """Whose directory it was: see Broker.delete_topic()."""
    return name.removesuffix(TRASH_SUFFIX).rpartition(".")[0]


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
