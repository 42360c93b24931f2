"""Upkeep: about once a second, checkpoint, sync and reclaim what has changed since the last round.

A round looks only at topics that were used, so idle topics cost nothing. Work that may block runs
in a thread. Failures show in health, and the next round tries again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from nsparq.broker.ephemeral import bound_memory
from nsparq.broker.reclaim import reclaim
from nsparq.errors import SyncFailed
from nsparq.storage.doubtful import replace_by_copy
from nsparq.storage.files import Work
from nsparq.storage.segment import Segment
from nsparq.storage.state_files import ChannelState, StateFile

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

logger = logging.getLogger(__name__)

MIN_SYNC_INTERVAL_NS: Final = 100_000_000
"""Time between two fsyncs of a log, unless publishers wait for them (`--durability=fsync`)."""
SLICE_NS: Final = 5_000_000
"""Longest time that upkeep or stats block the event loop; one topic may take longer."""
AGE_INTERVAL_NS: Final = 60_000_000_000
"""How often idle topics are checked for segments over the retention age."""
COPY_INTERVAL_NS: Final = 10_000_000_000
"""Time between attempts to copy a segment whose fsync failed."""
CHECKPOINT_SHARE: Final = 20
"""Encoding checkpoints of one channel takes at most this fraction, 1/20, of the time."""


class Upkeep:
    """Notes what has changed, and looks after it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.use_count = 0
        """Grows with every append, so that a long poll of many topics sees new messages."""
        self.changed: set[Topic] = set()
        """Topics that the next round looks at."""
        self._with_files: set[Topic] = set()
        """Topics whose log may have open files. A round closes those of idle topics."""
        self._aging: set[Topic] = set()
        """Topics with segments that are kept until they reach an age."""
        self._next_age_check_ns = 0
        self.expiring: set[Channel] = set()
        """Channels whose messages become too old to be delivered. Each round looks at them."""
        self._retried: set[Channel] = set()
        """Channels whose delivery failed. The next round tries again."""
        self._failed: set[Channel] = set()
        """Channels that the last round has tried again. Those that have not failed since, and do
        not read, have recovered."""
        self._not_removed: list[tuple[str, Work]] = []
        """Removals that failed: a description, and the work."""
        self._copying: set[Topic] = set()
        """Topics with a segment that is being copied because its fsync failed."""
        self._checkpointing: dict[Channel, int] = {}
        """Channels with a checkpoint that is being written, and its version. It replaces earlier
        ones that are still being written."""
        self._next_checkpoint_ns: dict[Channel, int] = {}
        """Channels with a costly checkpoint, and the earliest time for the next."""
        self._is_syncing_pending = False
        self._pending_synced_ns = 0
        """Start of the last round of syncs of small files and names."""

    # what to look at

    def note_changed(self, topic: Topic) -> None:
        """Let the next round look at the topic."""
        self.changed.add(topic)

    def note_used(self, topic: Topic) -> None:
        """The topic was emptied or got new settings. Publishing does the same for each append."""
        self.use_count += 1
        self.changed.add(topic)
        self.sync_soon(topic)

    def sync_soon(self, topic: Topic) -> None:
        """Keep `--sync-every`, though not more often than every MIN_SYNC_INTERVAL_NS."""
        now_ns = self._broker.monotonic_ns()
        if now_ns - topic.synced_ns < MIN_SYNC_INTERVAL_NS or topic.is_synchronous:
            return
        if topic.log.unsynced >= self._broker.options.sync_every:
            topic.synced_ns = now_ns
            self.request_sync(topic)

    def retry(self, channel: Channel) -> None:
        """Let the next round try to deliver again."""
        if not channel.is_exiting:
            self._retried.add(channel)

    def forget_topic(self, topic: Topic) -> None:
        """The topic was deleted."""
        for topics in (self.changed, self._with_files, self._aging):
            topics.discard(topic)
        if self._broker.archive is not None:
            self._broker.archive.forget(topic)
        for work in ("sync", "state", "producers", "redrive"):
            self._broker.health.set(None, f"{work} {topic}")

    def forget_channel(self, channel: Channel) -> None:
        """The channel was deleted."""
        self._retried.discard(channel)
        self._failed.discard(channel)
        self.expiring.discard(channel)
        self._next_checkpoint_ns.pop(channel, None)
        for work in ("read", "checkpoint", "carry", "dead letters"):
            self._broker.health.set(None, f"{work} {channel}")
        for work in ("archive", "carry"):
            self._broker.health.warn(None, f"{work} {channel}")

    # the round

    def run(self) -> None:
        """A whole round."""
        for _ in self.run_in_slices():
            pass

    def run_in_slices(self) -> Iterator[None]:
        """A round that yields whenever it has blocked the event loop for SLICE_NS."""
        broker = self._broker
        now_ns = broker.monotonic_ns()
        if broker.changes.is_metadata_stale:
            broker.changes.write_metadata()
        broker.changes.start_round()
        broker.data_path.keep_reserve()
        self._try_again()
        broker.redrives.continue_all()
        if now_ns >= self._next_age_check_ns:
            self._next_age_check_ns = now_ns + AGE_INTERVAL_NS
            self.changed |= self._aging
            self._aging = set()
        changed, self.changed = self.changed, set()
        idle = self._with_files - changed
        self._with_files.update(topic for topic in changed if not (topic.is_ephemeral or topic.is_exiting))
        stop_ns = now_ns + SLICE_NS
        try:
            while changed or idle:
                if changed:
                    self._look_after(changed.pop())
                else:
                    self._release_files(idle.pop())
                if broker.monotonic_ns() > stop_ns:
                    yield
                    stop_ns = broker.monotonic_ns() + SLICE_NS
        finally:
            # If the round was interrupted, the next one continues with these.
            self.changed |= changed
        broker.transactions.expire()
        broker.scan.resize(broker.channel_count)
        self._sync_pending()

    def _try_again(self) -> None:
        for channel in self._failed - self._retried:
            if channel.delivery.reading is None:
                self._failed.remove(channel)
                for activity in ("read", "dead letters"):
                    self._broker.health.set(None, f"{activity} {channel}")
                self._broker.health.warn(None, f"archive {channel}")
        self._failed |= self._retried
        self._retried.clear()
        for channel in self._failed:
            self._broker.next_turn.add_channel(channel)
        for channel in self.expiring:
            if channel.cursor.ahead:
                self._broker.next_turn.add_channel(channel)
        not_removed, self._not_removed = self._not_removed, []
        for what, work in not_removed:
            self.remove(what, work)

    def _look_after(self, topic: Topic) -> None:
        if topic.is_exiting:
            return
        try:
            self._checkpoint_channels(topic)
            self._sample_depths(topic)
            topic.checkpoint.update()
            if topic.idempotence is not None:
                topic.idempotence.upkeep()
            self._sync_in_time(topic)
            self._reclaim(topic)
            bound_memory(self._broker.topics, self._broker.ephemeral_memory)
        except Exception:
            # An error of one topic must not stop the checkpoints of others.
            logger.exception("%s: internal error in upkeep", topic)
            self.changed.add(topic)

    def _sample_depths(self, topic: Topic) -> None:
        now_ns = self._broker.monotonic_ns()
        for channel in topic.channels.values():
            channel.lag.sample(now_ns, channel.depth)

    # checkpoints

    def _checkpoint_channels(self, topic: Topic) -> None:
        for channel in topic.channels.values():
            if not channel.checkpoint.is_stale or channel.checkpoint.file is None:
                continue
            now_ns = self._broker.monotonic_ns()
            if channel in self._checkpointing or now_ns < self._next_checkpoint_ns.get(channel, 0):
                self.changed.add(topic)
                continue
            channel.checkpoint.is_stale = False
            self._checkpoint(channel, channel.checkpoint.file, now_ns)

    def checkpoint_now(self, channel: Channel, done: Callable[[bool], None]) -> None:
        """Write the state of a channel that is kept on disk, in a thread. `done` is told whether
        this state is on disk, as durable as configured."""
        assert channel.checkpoint.file is not None
        channel.checkpoint.is_stale = False
        self._checkpoint(channel, channel.checkpoint.file, self._broker.monotonic_ns(), done)

    def _checkpoint(
        self,
        channel: Channel,
        state_file: StateFile,
        began_ns: int,
        done: Callable[[bool], None] = lambda _: None,
    ) -> None:
        build = channel.checkpoint.capture()
        version = self._checkpointing[channel] = state_file.next_version()
        state: ChannelState | None = None
        is_latest = False
        encoded_ns = began_ns

        def write() -> None:
            nonlocal state, is_latest, encoded_ns
            state = build()
            content = state.encode()
            encoded_ns = self._broker.monotonic_ns()
            is_latest = state_file.write(content, version, sync=channel.topic.is_synchronous)

        def written(error: OSError | None) -> None:
            if self._checkpointing.get(channel) == version:
                del self._checkpointing[channel]
            if channel.is_exiting:
                done(False)
                return
            # Encoding a channel with a million deferred messages takes long, so do it less often.
            self._next_checkpoint_ns[channel] = began_ns + CHECKPOINT_SHARE * (encoded_ns - began_ns)
            if error is not None:
                channel.checkpoint.is_stale = True
                self.changed.add(channel.topic)
            if is_latest and state is not None and state_file.written_version == version:
                channel.checkpoint.written(state)
            text = None if error is None else f"failed to checkpoint {channel}: {error}"
            self._broker.health.set(text, f"checkpoint {channel}")
            done(is_latest and error is None)

        self._broker.try_in_background(write, written)

    # syncs

    def request_sync(self, topic: Topic) -> None:
        """fsync a topic's log in a thread, one at a time. Later publishers share the next fsync."""
        log = topic.log
        if log.is_syncing:
            return
        try:
            sync = log.begin_sync()
        except OSError as error:
            self._sync_later(topic, error)
            return
        if sync is None:
            return

        def synced() -> None:
            log.end_sync(sync)
            if topic.is_exiting:
                return
            if self._broker.archive is not None:
                # Segments that are safe on disk now can be archived, even if nobody uses the topic.
                self.changed.add(topic)
            if sync.obstacle is not None:
                self._sync_later(topic, sync.obstacle)
            else:
                self._note_sync(topic, sync.error)
                topic.publishing.synced(None if sync.error is None else SyncFailed(_reason(sync.error)))

        self._broker.in_background(sync.run, synced)

    def _sync_later(self, topic: Topic, error: OSError) -> None:
        """The fsync could not be tried, mostly because no file descriptor was free. Nothing is
        known to be lost, so publishers keep waiting, and the next round tries again."""
        self._broker.health.set(f"{topic}: cannot fsync now: {_reason(error)}", f"sync {topic}")
        self.changed.add(topic)

    def _note_sync(self, topic: Topic, error: OSError | None) -> None:
        """A failed fsync stays in health until the segment is copied. A later fsync that works
        proves nothing about the segment."""
        source = f"sync {topic}"
        if error is not None:
            self._broker.health.set(f"{topic}: fsync failed: {_reason(error)}", source)
            self.changed.add(topic)
        elif not topic.log.doubtful:
            self._broker.health.set(None, source)

    def _sync_in_time(self, topic: Topic) -> None:
        """Keep `--sync-timeout`, and copy segments whose fsync failed."""
        log, now_ns, options = topic.log, self._broker.monotonic_ns(), self._broker.options
        if log.unsynced:
            self.changed.add(topic)
            # Sync now if the next round would be too late.
            limit_s = options.sync_timeout - options.checkpoint_interval
            is_time = topic.publishing.awaits_sync or now_ns - topic.synced_ns >= limit_s * 1e9
            if is_time and not log.is_syncing:
                topic.synced_ns = now_ns
                self.request_sync(topic)
        if log.doubtful:
            self._copy_doubtful(topic, log.doubtful[0], now_ns)

    def _copy_doubtful(self, topic: Topic, segment: Segment, now_ns: int) -> None:
        """Copy a segment whose fsync failed. If that fails too, try again after
        COPY_INTERVAL_NS."""
        self.changed.add(topic)
        if topic in self._copying or now_ns < topic.copy_after_ns:
            return

        def copied(error: OSError | None) -> None:
            self._copying.discard(topic)
            if topic.is_exiting:
                return
            if error is not None:
                topic.copy_after_ns = self._broker.monotonic_ns() + COPY_INTERVAL_NS
            else:
                segment.copied()
            self._note_sync(topic, error)

        self._copying.add(topic)
        self._broker.try_in_background(partial(replace_by_copy, segment), copied)

    def _sync_pending(self) -> None:
        """Sync what was written without a sync: checkpoints, states of topics, names. Uses one
        thread, so that many topics on a slow disk leave the other threads free for reads."""
        now_ns = self._broker.monotonic_ns()
        is_early = now_ns - self._pending_synced_ns < self._broker.options.sync_timeout * 1e9 / 2
        if self._is_syncing_pending or is_early:
            return
        if not self._broker.files.has_pending:
            self.note_pending(None)
            return
        self._is_syncing_pending = True
        self._pending_synced_ns = now_ns

        def synced(error: OSError | None) -> None:
            self._is_syncing_pending = False
            self.note_pending(error)

        self._broker.try_in_background(self._broker.files.sync_pending, synced)

    def note_pending(self, error: OSError | None) -> None:
        text = None if error is None else f"cannot sync checkpoints, states and names: {_reason(error)}"
        self._broker.health.set(text, "sync pending")

    # removing

    def _reclaim(self, topic: Topic) -> None:
        if self._broker.archive is not None:
            self._broker.archive.look_at(topic)
        segments = reclaim(topic, self._broker.age_ns())
        if segments:
            self.remove(f"segments of {topic}", partial(self.remove_segments, segments))
        if topic.log.has_aging_segments:
            self._aging.add(topic)

    def remove_segments(self, segments: list[Segment]) -> None:
        # First sync the checkpoints and carried-over messages that make these segments removable.
        self._broker.files.sync_pending()
        for segment in segments:
            segment.remove()

    def remove(self, what: str, work: Work) -> None:
        """Run `work`, which removes files, in a thread. The next round repeats it if it fails."""

        def removed(error: OSError | None) -> None:
            if error is not None:
                self._not_removed.append((what, work))
            text = None if error is None else f"cannot remove {what}: {_reason(error)}"
            self._broker.health.set(text, f"remove {what}")

        self._broker.try_in_background(work, removed)

    def _release_files(self, topic: Topic) -> None:
        if topic.log.release_files():
            self._with_files.discard(topic)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
