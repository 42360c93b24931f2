"""A topic: the log, the channels that read it, and publishing into it.

Publishes are gathered and appended together when the event loop's turn ends (see Broker.turn): one write
for all of them, whatever their number, and whatever the number of channels.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nsparq.broker.carried_over import CarryJob
from nsparq.broker.channel import Channel
from nsparq.broker.ephemeral import EphemeralBound
from nsparq.broker.importer import let_import_count, undo_import
from nsparq.broker.latency import summarize
from nsparq.broker.publishing import Publishing
from nsparq.broker.settings import TopicSettings
from nsparq.broker.topic_files import find_topic
from nsparq.errors import Exiting, StorageError
from nsparq.names import is_ephemeral
from nsparq.packed import PackedBodies
from nsparq.storage.batch import mark_of
from nsparq.storage.disk_log import DiskLog
from nsparq.storage.log import Durability, Log, LogSettings
from nsparq.storage.memory_log import MemoryLog
from nsparq.storage.metadata import TopicEntry
from nsparq.storage.segment import Segment
from nsparq.storage.state_files import (
    ChannelState,
    TopicState,
)

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker

logger = logging.getLogger(__name__)

PINNED_SEGMENTS = 2
"""Segments that all cursors have passed may wait for their last messages before those are carried over."""

RESERVED_NUMBERS = 1 << 26
"""Sequence numbers that a topic may use before it must write down that it has. Many, because that is a file;
but no more than the clock passes in 16 s, so that crashes do not carry a topic far ahead of the clock."""

DISCOVERY = "discovery"
"""Who holds the messages of a topic that is new, for channels that are to be discovered."""


class TopicPositions(NamedTuple):
    """How far a topic's log reaches."""

    incarnation: str
    """Names the log: a topic deleted and created again has another, and its numbers mean other messages."""
    earliest: int
    """The first sequence number that can be read."""
    latest: int
    """The one that the next message gets."""
    first_ns: int
    """When the earliest message was published; 0 if there is none."""
    last_ns: int
    """The latest publish time; 0 if there is no message."""
    messages: int
    size_bytes: int
    """On disk."""


class Topic:
    """One named stream of messages."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.directory: Path | None = None if self.is_ephemeral else broker.data_path.topic_directory(name)
        self.first_id = broker.first_id
        """Added to a sequence number it gives the id that clients see: the node's bits."""
        self.channels: dict[str, Channel] = {}
        self.paused = False
        self.is_exiting = False
        self.message_count = 0
        self.message_bytes = 0
        self.dropped_count = 0
        self.corrupt_files = 0
        """Files beside the log, the topic's and its channels', that were damaged or missing."""
        self.incarnation = uuid.uuid4().hex
        self.log: Log
        self.publishing = Publishing(self)
        self.bound: EphemeralBound | None = None
        """Bounds the memory of an ephemeral topic."""
        self.origin = 0
        """Where the first channel starts: what comes after it is kept while there is no channel."""
        self.holds: dict[object, int] = {}
        """Who needs everything from a sequence number on for a while: nothing behind that is let go."""
        self.discovery_start = -1
        """Where channels begin that nsqlookupd knows of, while it has still to be asked for them; else -1."""
        self.deleted_in_discovery: set[str] = set()
        """Channels deleted since then: an answer of nsqlookupd from before must not bring them back."""
        self.settings = TopicSettings()
        self.is_synchronous = False
        """Whether publishers wait for an fsync."""
        self._apply(self.settings)
        self.pause_position = -1
        self.held_back: list[tuple[int, int]] = []
        """Deferred messages, sequence number and due time (monotonic), that no channel may see yet."""
        self._reserve_at = -1
        """Half of the numbers that this run has reserved: before it goes beyond this it reserves more. Below
        the log's end while the state on disk is still that of a clean stop."""
        self._deleted: dict[str, Channel] = {}
        """Channels that were deleted, while their files are still there."""
        self._is_state_stale = False
        """Whether the state on disk has still to be replaced by the present one."""
        self._is_clean = False
        """Whether the state on disk is that of a clean stop, and nothing has changed since."""
        self._handed_out = -1
        self.import_start = -1
        """Where the messages of another nsqd begin, while they are being taken over."""
        self._low = (0, 0)
        self.given_up_before = 0
        """An ephemeral topic has given up the messages below this, for want of memory: those still in flight
        cannot be sent again."""
        self.synced_ns = 0
        """When the log was last asked to sync."""
        self.copy_after_ns = 0
        """A segment whose fsync failed is not copied before this."""

    # opening and closing

    def create(self) -> None:
        """A topic that was not there before."""
        epoch = self.broker.epoch()
        if self.directory is None:
            log = MemoryLog(floor=epoch, memory=self.broker.ephemeral_memory)
            self.bound = EphemeralBound(self, log)
            self.log = log
        else:
            self.broker.files.make_directory(self.directory)
            self.log = self._new_log(self.directory, epoch)
            self.log.open(clean_end=epoch, epoch=epoch)
        self.origin = self.log.end
        if self.broker.asks_for_channels():
            self._hold_for_discovery(self.log.end)
        self.write_state(clean=False)

    def load(self, listed: TopicEntry | None = None) -> None:
        """A topic whose directory an earlier run has left. `listed` is what that run wrote of it in nsqd.dat:
        channels that have lost their files, and whether those were paused, are known from there."""
        assert self.directory is not None
        found = find_topic(self.broker.files, self.directory, self.name, listed)
        state, channel_states = found.state, found.channels
        self.incarnation = found.incarnation
        self.corrupt_files += found.corrupt_files
        # If the clock has been set back, the files still know which numbers have been used.
        epoch = max(self.broker.epoch(), found.highest_used)
        clean_end = -1
        if state is not None:
            self._restore_settings(state.settings)
            if self.broker.was_stopped_cleanly:
                clean_end = state.clean_end
        log = self._new_log(self.directory, epoch)
        if state is not None:
            for start, end in state.gaps:
                log.gaps.add(start, end)
        log.open(clean_end=clean_end, epoch=epoch, needed=found.needed)
        self.log = log
        self.origin = log.start
        if state is not None:
            if state.discovery_start >= 0:
                self._hold_for_discovery(state.discovery_start)
            self.origin = max(state.origin, log.start)
            self.paused = state.paused
            self.pause_position = state.pause_position
            if state.import_start >= 0:
                undo_import(self, log, state.import_start, found.known_channels)
        elif listed is not None and listed.paused:
            self.paused = True
            self.pause_position = max((known.seen for known in found.known_channels), default=log.start)
        paused = {entry.name for entry in listed.channels if entry.paused} if listed is not None else set()
        for name, channel_state in channel_states.items():
            channel = Channel(self, name, log.start)
            channel.paused = name in paused
            channel.checkpoint.restore(channel_state)
            self.channels[name] = channel
        if state is not None and state.import_start >= 0:
            let_import_count(self)
        self._is_clean = state is not None and clean_end == log.end and state.import_start < 0
        since = self.visible_end if self.channels else self.origin
        due_at = self.broker.due_times()
        self.held_back = [(sequence, due_at(due_ns)) for sequence, due_ns in log.deferred_since(since)]

    def _new_log(self, directory: Path, floor: int) -> DiskLog:
        settings = self.settings.applied_to(self.broker.log_settings)
        mark = mark_of(self.incarnation)
        log = DiskLog(self.broker.files, directory, self.broker.cache, settings, floor=floor, mark=mark)
        log.reader_low = self._recent_low
        log.on_lost = self._lost
        return log

    def _lost(self, start: int, end: int) -> None:
        for channel in self.channels.values():
            channel.cursor.lost(start, end)

    def write_state(self, *, clean: bool, sync: bool = False) -> None:
        if self.directory is None:
            return
        state = TopicState(
            incarnation=self.incarnation,
            origin=self.visible_end if self.channels else self.origin,
            paused=self.paused,
            pause_position=self.pause_position,
            clean_end=self.log.end if clean else -1,
            reserved=self.log.end + (0 if clean else RESERVED_NUMBERS),
            gaps=self.log.gaps.ranges,
            import_start=self.import_start,
            name=self.name,
            disk_end=self.log.disk_end,
            settings=self.settings.stored(),
            discovery_start=self.discovery_start,
        )
        self._is_clean = False
        state.write(self.broker.files, self.directory)
        if clean:
            self.broker.files.sync_written(self.directory)
        elif sync or self.is_synchronous:
            self.broker.changes.sync_soon(self.directory)
        self._reserve_at = state.reserved - RESERVED_NUMBERS // 2
        self._is_clean = clean

    def _hold_for_discovery(self, start: int) -> None:
        """Keep everything from here on for channels that nsqlookupd may know of. The topic's state says so,
        too: should nsqd stop before it has asked, its next run does."""
        self.discovery_start = self.holds[DISCOVERY] = start

    def end_discovery(self) -> None:
        """Nobody has to be asked for this topic's channels any more. The next round of maintenance writes
        that down; after a crash before that they are asked once more."""
        self.discovery_start = -1
        self.deleted_in_discovery.clear()
        self.holds.pop(DISCOVERY, None)
        if not self.is_exiting:
            self._is_state_stale = True
            self.broker.upkeep.note_changed(self)

    def end_clients(self) -> None:
        """The daemon stops: take leave of the clients."""
        self.is_exiting = True
        for channel in self.channels.values():
            channel.close()

    def persist(self, *, states_first: bool = False) -> list[tuple[str, Exception]]:
        """Write down what has changed, in an order in which a crash on the way loses nothing. Gives what
        could not be kept, and why; it may be called again then. May be called in a thread, after
        end_clients().

        With `states_first`, the states of the channels have what room there is.
        """
        if self.directory is None:
            return []
        steps: list[tuple[str, Callable[[], None]]] = [
            (f"{self}: messages not yet on disk", self.log.persist)
        ]
        # A channel's state also says how far the topic had come, should the topic's own be lost.
        changed = [c for c in self.channels.values() if c.checkpoint.is_stale or not self._is_clean]
        steps += [
            (f"{c}: which messages are finished", partial(c.checkpoint.save, sync=True)) for c in changed
        ]
        if states_first:
            steps.reverse()
        failed: list[tuple[str, Exception]] = []
        for what, write in steps:
            try:
                write()
            except Exception as error:
                failed.append((what, error))
        if not failed and not self._is_clean:
            try:
                self.write_state(clean=True)
            except OSError as error:
                failed.append((f"{self}: that it was stopped cleanly", error))
        return failed

    # publishing

    @property
    def visible_end(self) -> int:
        """Channels see no further than this."""
        return self.pause_position if self.paused else self.log.end

    def append(self, groups: list[tuple[PackedBodies, int]], tag: int = 0) -> None:
        """Append each group, (bodies, delay or 0), as one batch. Raises with nothing appended. Nothing here
        may raise once the log has the messages: they would be refused, and delivered all the same."""
        before = self.log.end
        wall_ns = self.broker.wall_ns()
        due_groups = [(bodies, wall_ns + defer_ns if defer_ns else 0) for bodies, defer_ns in groups]
        try:
            if self.is_exiting:
                raise Exiting
            self._mark_used()
            batches = self.log.append(due_groups, wall_ns, tag)
        except (StorageError, OSError) as error:
            self.broker.health.set(str(error))
            raise
        if self.broker.health.error is not None and not self.is_ephemeral:
            self.broker.health.set(None)
        self.message_count += self.log.end - before
        for batch in batches:
            self.message_bytes += len(batch.data)
            if batch.due_ns:
                due_ns = self.broker.monotonic_ns() + batch.due_ns - wall_ns
                self.held_back.append((batch.base, due_ns))
        if self.is_ephemeral:
            self.broker.next_turn.add_topic(self)
        if self.channels:
            self._show(before)
        self.broker.upkeep.note_used(self)

    def _mark_used(self) -> None:
        """Before an append: a crash from here on must not look like a clean stop, and the next start must not
        use the same numbers."""
        if self.log.end > self._reserve_at:
            self.write_state(clean=False)

    def _show(self, before: int) -> None:
        """Let the channels see what lies between `before` and the visible end."""
        if self.paused or not self.channels:
            return
        held_back, self.held_back = self.held_back, []
        count = self.log.count(before, self.log.end)
        for channel in self.channels.values():
            for sequence, due_ns in held_back:
                channel.defer_published(sequence, due_ns)
            channel.appended(count)

    def drop_held_back_before(self, sequence: int) -> None:
        self.held_back = [held for held in self.held_back if held[0] >= sequence]

    # channels

    def get_channel(self, name: str, start: int | None = None) -> Channel:
        """The channel, created if need be. The first one starts where the topic has kept its messages, any
        other at the end; or all of them at `start`, as far as the log reaches back."""
        channel = self.channels.get(name)
        if channel is not None:
            return channel
        if self.is_exiting:
            raise Exiting
        if name in self._deleted:
            self._remove_files(name, self._deleted[name])
        is_first = not self.channels
        channel = Channel(self, name, self.origin if is_first else self.visible_end)
        held_back = self.held_back
        self.channels[name] = channel
        if start is not None:
            self._start_at(channel, start, is_first)
        elif is_first:
            self._show(self.origin)
        try:
            self.save_channel(channel)
        except OSError:
            # The disk refuses: there is no channel, and the topic keeps what it had for it.
            channel.is_exiting = True
            del self.channels[name]
            self.held_back = held_back
            raise
        self.broker.channel_created(channel)
        return channel

    def _start_at(self, channel: Channel, start: int, is_first: bool) -> None:
        start = min(max(start, self.log.start), self.visible_end)
        if is_first and not self.paused:
            # The channel finds them in the log.
            self.held_back = []
        channel.checkpoint.resume(channel.checkpoint.state_at(start))
        channel.appended(self.log.count(start, self.visible_end))
        self.low_fell()

    def delete_channel(self, name: str) -> None:
        """Raises KeyError. An ephemeral topic goes with its last channel."""
        channel = self.channels[name]
        if self.discovery_start >= 0:
            self.deleted_in_discovery.add(name)
        self._end_channel(channel)
        if not self.channels:
            self.origin = self.visible_end
            self.drop_held_back_before(self.origin)
            self._is_state_stale = True
            self.write_stale_state()
        # Behind the metadata: a channel that nsqd.dat names and that has no file is taken for a damaged one.
        self._deleted[name] = channel
        self.broker.changes.when_durable(lambda _: self._remove_files(name, channel))
        if self.is_ephemeral and not self.channels and not self.is_exiting:
            self.broker.delete_topic(self.name)

    def _remove_files(self, name: str, channel: Channel) -> None:
        """Of a channel that was deleted, unless that has been done."""
        if self._deleted.get(name) is not channel:
            return
        del self._deleted[name]
        try:
            channel.checkpoint.remove_files()
            if self.is_synchronous and self.directory is not None:
                self.broker.changes.sync_soon(self.directory)
        except OSError as error:
            logger.error("%s: its files stay, and the next start finds it again: %s", channel, error)

    def _end_channel(self, channel: Channel) -> None:
        del self.channels[channel.name]
        channel.close()
        self.broker.channel_deleted(channel)

    def write_stale_state(self) -> None:
        """Write the topic's state if an earlier attempt failed. If this one does, it is tried again later."""
        if not self._is_state_stale:
            return
        try:
            self.write_state(clean=False)
        except OSError as error:
            self.broker.health.set(f"{self}: cannot write its state: {error}", f"state {self}")
            self.broker.upkeep.note_changed(self)
        else:
            self._is_state_stale = False
            self.broker.health.set(None, f"state {self}")

    def save_channel(self, channel: Channel, state: ChannelState | None = None) -> None:
        """Write the channel's state now: a message acknowledged after this finds it after a crash. With fsync
        it is on disk before that message is acknowledged, or whoever asks when_durable() is told. `state` is
        what it is about to be, if not what it is."""
        if channel.is_durable:
            self._mark_used()
            channel.checkpoint.save(sync=False, state=state)
            if self.is_synchronous and self.directory is not None:
                self.broker.changes.sync_soon(self.directory)

    # management

    def pause(self) -> None:
        if not self.paused:
            self.pause_position = self.log.end if self.channels else self.origin
            self.paused = True
        self.write_state(clean=False)
        self.broker.topic_changed(self)

    def unpause(self) -> None:
        if self.paused:
            before = self.pause_position
            self.paused = False
            self.pause_position = -1
            self._show(before)
        self.write_state(clean=False)
        self.broker.topic_changed(self)

    def empty(self) -> None:
        """Drop what the topic itself holds: its messages not yet seen by any channel."""
        if not self.channels:
            self.origin = self.log.end
            if self.paused:
                self.pause_position = self.log.end
        elif self.paused:
            self.log.gaps.add(self.pause_position, self.log.end)
            self.pause_position = self.log.end
        self.held_back.clear()
        self.write_state(clean=False)
        self.broker.upkeep.note_used(self)

    def positions(self) -> TopicPositions:
        """How far the log reaches."""
        found = self.log.positions()
        messages = self.log.count(found.earliest, found.latest)
        return TopicPositions(self.incarnation, *found, messages, self.log.size_bytes)

    def change_settings(self, changes: Mapping[str, object]) -> TopicSettings:
        """Depart from the daemon's flags, or go back to them (None). On disk when
        DurableChanges.when_durable() says so. Raises ValueError, WriteFailed or OSError, with nothing
        changed."""
        if self.directory is None:
            raise ValueError(f"{self} is ephemeral: it is not kept on disk, and has no settings for that")
        before = self.settings
        settings = before.changed(changes)
        self.log.change_settings(settings.applied_to(self.broker.log_settings))
        self._apply(settings)
        try:
            if self.is_synchronous:
                # As if it had been so from the start.
                for channel in self.channels.values():
                    self.save_channel(channel)
            self.write_state(clean=False, sync=True)
        except OSError:
            self.log.change_settings(self._apply(before))
            raise
        self.low_fell()
        self.broker.upkeep.note_used(self)
        if self.is_synchronous and self.log.unsynced:
            self.broker.upkeep.request_sync(self)
        return settings

    def _apply(self, settings: TopicSettings) -> LogSettings:
        self.settings = settings
        applied = settings.applied_to(self.broker.log_settings)
        self.is_synchronous = applied.durability is Durability.FSYNC
        return applied

    def _restore_settings(self, stored: Mapping[str, object]) -> None:
        try:
            self._apply(self.settings.changed(stored))
        except ValueError as error:
            logger.error("%s: its settings cannot be understood, the flags apply: %s", self, error)

    def delete(self) -> None:
        """The end of the topic, its channels and its messages."""
        self.is_exiting = True
        self._deleted.clear()
        for channel in [*self.channels.values()]:
            # A checkpoint that is late must not be written any more.
            channel.checkpoint.remove_files()
            self._end_channel(channel)
        self.publishing.refuse_all()
        self.log.discard()

    # upkeep

    def checkpoint(self) -> None:
        """Without a durable channel the topic itself must remember what has been handed out."""
        self.write_stale_state()
        if self.directory is None or not self.channels or any(c.is_durable for c in self.channels.values()):
            return
        if self._handed_out != self.visible_end:
            self._handed_out = self.visible_end
            self._is_state_stale = True
            self.write_stale_state()

    def low(self) -> int:
        """The oldest sequence number that anyone still needs."""
        lowest = min((channel.low() for channel in self.channels.values()), default=self.origin)
        return min(lowest, *self.holds.values()) if self.holds else lowest

    def low_fell(self) -> None:
        """Somebody has gone back in the log: what was known of low() does not hold any more."""
        self._low = (0, 0)

    def _recent_low(self) -> int:
        """low() as of a moment ago: asked for each batch that leaves memory, and costly to work out."""
        now_ns = self.broker.monotonic_ns()
        if now_ns - self._low[0] > 20_000_000:
            self._low = (now_ns, self.low())
        return self._low[1]

    def reclaim(self, age_ns: int) -> list[Segment]:
        """Let go of what no channel needs; gives the segments to be removed. It is `age_ns` now."""
        for channel in self.channels.values():
            channel.cursor.step_over()
        if self.bound is not None:
            for channel in self.channels.values():
                channel.carried_over.drop_finished()
            self.bound.reclaim()
            return []
        cursor = min((channel.cursor.position for channel in self.channels.values()), default=self.origin)
        passed = [segment for segment in self.log.sealed_segments() if segment.end <= cursor]
        pinned = passed[:-PINNED_SEGMENTS]
        for channel in self.channels.values():
            try:
                job = channel.carried_over.drop_finished() or channel.carried_over.begin(pinned)
            except OSError as error:
                self._note_carry(channel, error)
            else:
                self._do_carry(channel, job)
        return self.log.trim(self.low(), age_ns / 1e9)

    def _do_carry(self, channel: Channel, job: CarryJob | None) -> None:
        if job is None:
            if not channel.carried_over.is_running:
                # What could not be carried over before has been finished since.
                self.broker.health.set(None, f"carry {channel}")
            return

        def done() -> None:
            channel.carried_over.end(job)
            if not channel.is_exiting:
                self._note_carry(channel, job.error)

        self.broker.in_background(job.run, done)

    def _note_carry(self, channel: Channel, error: OSError | None) -> None:
        text = None if error is None else f"{channel}: cannot carry messages over: {error}"
        self.broker.health.set(text, f"carry {channel}")
        # There may be more, or this has to be tried again.
        self.broker.upkeep.note_changed(self)

    @property
    def depth(self) -> int:
        """Messages that the topic itself holds."""
        if not self.channels:
            return self.log.count(self.origin, self.log.end)
        return self.log.count(self.pause_position, self.log.end) if self.paused else 0

    @property
    def backend_depth(self) -> int:
        start = self.origin if not self.channels else self.visible_end
        return min(self.depth, self.log.count(start, max(start, self.log.memory_start)))

    def stats(self, channel: str, include_clients: bool, now_ns: int) -> dict[str, Any]:
        names = sorted(self.channels) if not channel else [channel]
        percentiles = self.broker.options.e2e_processing_latency_percentile
        parts = [part for c in self.channels.values() for part in c.latency_parts(now_ns)]
        return {
            "topic_name": self.name,
            "channels": [self.channels[name].stats(include_clients, now_ns) for name in names],
            "depth": self.depth,
            "backend_depth": self.backend_depth,
            "message_count": self.message_count,
            "message_bytes": self.message_bytes,
            "paused": self.paused,
            "e2e_processing_latency": summarize(percentiles, parts),
            "dropped_count": self.dropped_count,
            "corrupt_batches": self.log.corrupt_batches,
            "corrupt_messages": self.log.corrupt_messages,
            "corrupt_files": self.corrupt_files,
            "log_bytes": self.log.size_bytes,
        }

    def __str__(self) -> str:
        return self.name
