"""A topic: its log, the channels that read it, and its management.

`publishing` appends to the log, and `checkpoint` keeps the topic's state on disk.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nsparq.broker.channel import Channel
from nsparq.broker.dead_letters import DeadLetters
from nsparq.broker.ephemeral import EphemeralBound
from nsparq.broker.idempotence import Idempotence, load_producers
from nsparq.broker.importer import let_import_count, undo_import
from nsparq.broker.observing import OBSERVED, channel_deleted
from nsparq.broker.retries import refuse_cycle
from nsparq.broker.settings import TopicSettings
from nsparq.broker.topic_checkpoint import TopicCheckpoint
from nsparq.broker.topic_files import archived_entries, find_topic
from nsparq.broker.turn import Publishing
from nsparq.errors import Exiting
from nsparq.names import is_ephemeral
from nsparq.storage.batch import mark_of
from nsparq.storage.disk_log import DiskLog
from nsparq.storage.log import Durability, Log, LogSettings, TopicPositions
from nsparq.storage.memory_log import MemoryLog
from nsparq.storage.metadata import TopicEntry
from nsparq.storage.opening import open_log
from nsparq.storage.state_files import ChannelState

if TYPE_CHECKING:
    from nsparq.broker.broker import Broker

logger = logging.getLogger(__name__)

DISCOVERY = "discovery"
"""The hold on the messages of a new topic, for channels that nsqlookupd may know of."""


class Topic:
    """One named stream of messages.

    More than 30 methods and 20 attributes: beside its parts it has what /stats shows and what HTTP
    manages.
    """

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.directory: Path | None = None if self.is_ephemeral else broker.data_path.topic_directory(name)
        self.first_id = broker.first_id
        """The node's bits: a message id is this plus the sequence number."""
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
        self.checkpoint = TopicCheckpoint(self)
        self.idempotence: Idempotence | None = None
        """Knows messages that are published again; None until one has a number."""
        self.bound: EphemeralBound | None = None
        """Bounds the memory of an ephemeral topic."""
        self.origin = 0
        """Where the first channel starts. Without a channel, messages from here on are kept."""
        self.holds: dict[object, int] = {}
        """Owners of holds, with a sequence number each: messages from there on are kept."""
        self.discovery_start = -1
        """Where channels start that nsqlookupd knows of; -1 once it has been asked for them."""
        self.deleted_in_discovery: set[str] = set()
        """Channels deleted meanwhile. An older answer of nsqlookupd must not create them."""
        self.settings = TopicSettings()
        self.is_synchronous = False
        """Whether publishers wait for an fsync."""
        self._apply(self.settings)
        self.visible_end = 0
        """Channels see no further: the log's end, or its end when the topic was paused."""
        self.held_back: list[tuple[int, int]] = []
        """Deferred messages that no channel has seen: sequence number and due time (monotonic)."""
        self._deleted: dict[str, Channel] = {}
        """Deleted channels whose files are still there."""
        self.import_start = -1
        """Where messages of another nsqd begin, while they are being imported; otherwise -1."""
        self._low = (0, 0)
        self.given_up_before = 0
        """An ephemeral topic has dropped the messages below this to save memory. Those in flight
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
            self.log = disk_log = self._new_log(self.directory, epoch)
            open_log(disk_log, clean_end=epoch, epoch=epoch)
        self.origin = self.visible_end = self.log.end
        if self.broker.asks_for_channels():
            self._hold_for_discovery(self.log.end)
        self.checkpoint.write()

    def load(self, listed: TopicEntry | None = None) -> None:
        """A topic of an earlier run. `listed` is its entry in nsqd.dat: it tells of channels that
        have lost their files, and whether those were paused."""
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
        entries = archived_entries(self.broker, self.directory, self.name, self.incarnation)
        open_log(log, clean_end=clean_end, epoch=epoch, needed=found.needed, archived=entries)
        self.log = log
        self.origin = log.start
        self.visible_end = log.end
        if state is not None:
            if state.discovery_start >= 0:
                self._hold_for_discovery(state.discovery_start)
            self.origin = max(state.origin, log.start)
            self.paused = state.paused
            if self.paused:
                self.visible_end = state.pause_position
            if state.import_start >= 0:
                undo_import(self, log, state.import_start, found.known_channels)
        elif listed is not None and listed.paused:
            self.paused = True
            self.visible_end = max((known.seen for known in found.known_channels), default=log.start)
        paused = {entry.name for entry in listed.channels if entry.paused} if listed is not None else set()
        for name, channel_state in channel_states.items():
            channel = Channel(self, name, log.start)
            channel.paused = name in paused
            channel.checkpoint.restore(channel_state)
            self.channels[name] = channel
        if state is not None and state.import_start >= 0:
            let_import_count(self)
        self.checkpoint.is_clean = state is not None and clean_end == log.end and state.import_start < 0
        load_producers(self)
        since = self.visible_end if self.channels else self.origin
        due_at = self.broker.due_times()
        self.held_back = [(sequence, due_at(due_ns)) for sequence, due_ns in log.deferred_since(since)]

    def _new_log(self, directory: Path, floor: int) -> DiskLog:
        settings = self.settings.applied_to(self.broker.log_settings)
        mark, archive = mark_of(self.incarnation), self.broker.archive
        source = None if archive is None else archive.source_of(self.name, self.incarnation)
        log = DiskLog(
            self.broker.files, directory, self.broker.cache, settings, floor=floor, mark=mark, source=source
        )
        log.reader_low = self._recent_low
        log.on_lost = self._lost
        return log

    def _lost(self, start: int, end: int) -> None:
        for channel in self.channels.values():
            channel.cursor.lost(start, end)

    def _hold_for_discovery(self, start: int) -> None:
        """Keep all messages from here on for channels that nsqlookupd may know of. The topic's
        state on disk says so: if nsqd stops before it has asked, its next run asks."""
        self.discovery_start = self.holds[DISCOVERY] = start

    def end_discovery(self) -> None:
        """The topic's channels are known. The next round of upkeep writes that to disk; after a
        crash before that, nsqlookupd is asked once more."""
        self.discovery_start = -1
        self.deleted_in_discovery.clear()
        self.holds.pop(DISCOVERY, None)
        if not self.is_exiting:
            self.checkpoint.is_stale = True
            self.broker.upkeep.note_changed(self)

    def end_clients(self) -> None:
        """The daemon stops: close the connections of all clients."""
        self.is_exiting = True
        for channel in self.channels.values():
            channel.close()

    # what channels see

    def _show(self, before: int) -> None:
        """Let the channels see what lies between `before` and the visible end."""
        if self.paused:
            return
        self.publishing.show_deferred()
        count = self.log.count(before, self.visible_end)
        for channel in self.channels.values():
            channel.delivery.appended(count)

    def drop_held_back_before(self, sequence: int) -> None:
        self.held_back = [held for held in self.held_back if held[0] >= sequence]

    # channels

    def get_channel(self, name: str, start: int | None = None) -> Channel:
        """The channel, created if need be. The first one starts at the messages that the topic has
        kept, any other at the end. With `start` it starts there, or where the log begins."""
        channel = self.channels.get(name)
        if channel is not None:
            return channel
        if self.is_exiting:
            raise Exiting
        if name in self._deleted:
            self._remove_files(name, self._deleted[name])
        is_first = not self.channels
        start = self.holds.get(OBSERVED) if start is None else start
        channel = Channel(self, name, self.origin if is_first else self.visible_end)
        channel.retries.policy_changed()
        held_back = self.held_back
        self.channels[name] = channel
        if start is not None:
            self._start_at(channel, start, is_first)
        elif is_first:
            self._show(self.origin)
        try:
            with self.broker.changes.creating(f"channel {channel}"):
                self.save_channel(channel)
        except OSError:
            # The disk refuses. There is no channel, and the topic keeps its messages.
            channel.is_exiting, self.held_back = True, held_back
            self._deleted[name] = self.channels.pop(name)
            self._remove_files(name, channel)
            self.broker.upkeep.forget_channel(channel)
            raise
        self.holds.pop(OBSERVED, None)
        self.broker.channel_created(channel)
        return channel

    def _start_at(self, channel: Channel, start: int, is_first: bool) -> None:
        start = min(max(start, self.log.start), self.visible_end)
        if is_first and not self.paused:
            # The channel finds them in the log.
            self.held_back = []
        channel.checkpoint.resume(channel.checkpoint.state_at(start))
        channel.delivery.appended(self.log.count(start, self.visible_end))
        self.low_fell()

    def delete_channel(self, name: str) -> None:
        """Raises KeyError. An ephemeral topic goes with its last channel."""
        channel = self.channels[name]
        if self.discovery_start >= 0:
            self.deleted_in_discovery.add(name)
        self._end_channel(channel)
        channel_deleted(self)
        # After the metadata: a channel in nsqd.dat without a file counts as damaged.
        self._deleted[name] = channel
        self.broker.changes.when_durable(lambda _: self._remove_files(name, channel))
        if self.is_ephemeral and not self.channels and not self.is_exiting:
            self.broker.delete_topic(self.name)

    def _remove_files(self, name: str, channel: Channel) -> None:
        """Remove the files of a deleted channel, unless that has been done."""
        if self._deleted.get(name) is not channel:
            return
        del self._deleted[name]
        try:
            channel.checkpoint.remove_files()
            if self.is_synchronous and self.directory is not None:
                self.broker.changes.sync_soon(self.directory)
        except OSError as error:
            logger.error(
                "%s: cannot remove its files, so the next start will find it again: %s", channel, error
            )

    def _end_channel(self, channel: Channel) -> None:
        del self.channels[channel.name]
        channel.close()
        self.broker.channel_deleted(channel)

    def save_channel(self, channel: Channel, state: ChannelState | None = None) -> None:
        """Write the channel's state now: after a crash, messages acknowledged from now on find the
        channel. With fsync it is on disk before such a message is acknowledged; when_durable()
        tells when. `state` is the state to write, if it is not the present one."""
        if channel.is_durable:
            if self.log.end > self.checkpoint.reserve_at:
                self.checkpoint.write()
            channel.checkpoint.save(sync=False, state=state)
            if self.is_synchronous and self.directory is not None:
                self.broker.changes.sync_soon(self.directory)

    # management

    def pause(self) -> None:
        """Raises OSError, and then changes nothing."""
        is_empty = not self.paused and not self.channels
        self._set_paused(True, self.origin if is_empty else self.visible_end)

    def unpause(self) -> None:
        """Raises OSError, and then changes nothing."""
        was_paused, before = self.paused, self.visible_end
        self._set_paused(False, self.log.end if was_paused else before)
        if was_paused:
            self._show(before)

    def _set_paused(self, paused: bool, visible_end: int) -> None:
        before = self.paused, self.visible_end
        self.paused, self.visible_end = paused, visible_end
        try:
            self.checkpoint.write()
        except OSError:
            self.paused, self.visible_end = before
            raise
        self.broker.topic_changed(self)

    def empty(self) -> None:
        """Drop the messages that no channel has seen."""
        if not self.channels:
            self.origin = self.log.end
        elif self.paused:
            self.log.gaps.add(self.visible_end, self.log.end)
        self.holds |= {OBSERVED: self.log.end} if OBSERVED in self.holds else {}
        self.visible_end = self.log.end
        self.held_back.clear()
        self.checkpoint.write()
        self.broker.upkeep.note_used(self)

    def positions(self) -> TopicPositions:
        """How far the log reaches."""
        found = self.log.positions()
        messages = self.log.count(found.earliest, found.latest)
        return TopicPositions(self.incarnation, *found, messages)

    def checked_settings(self, changes: Mapping[str, object]) -> TopicSettings:
        """The settings with these changes. Raises ValueError."""
        if self.directory is None:
            raise ValueError(f"{self} is ephemeral: it is not kept on disk, and has no settings for that")
        settings = self.settings.changed(changes, self.name)
        settings.check(self.broker.options)
        if settings.policy is not None:
            refuse_cycle(self, settings.policy)
        return settings

    def change_settings(self, changes: Mapping[str, object]) -> TopicSettings:
        """Replace some of the daemon's flags for this topic, or go back to them (None). On disk
        when DurableChanges.when_durable() says so. Raises ValueError, WriteFailed or OSError, with
        nothing changed."""
        before, settings = self.settings, self.checked_settings(changes)
        self.log.change_settings(settings.applied_to(self.broker.log_settings))
        self._apply(settings)
        try:
            if self.is_synchronous or settings.policy != before.policy:
                # Their states must be on disk, too: with a policy they have a position among the
                # dead letters.
                for channel in self.channels.values():
                    self.save_channel(channel)
            self.checkpoint.write(sync=True)
        except OSError:
            self.log.change_settings(self._apply(before))
            raise
        for channel in self.channels.values():
            channel.retries.policy_changed()
            self.broker.next_turn.add_channel(channel)
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
        if self.broker.options.replication_cluster and stored.get("durability") == Durability.MEMORY.value:
            logger.warning("%s: durability memory does not work in a cluster, so the flag applies", self)
            stored = {**stored, "durability": None}
        try:
            self._apply(self.settings.changed(stored, self.name))
        except ValueError as error:
            logger.error("%s: its settings are invalid, so the flags apply: %s", self, error)

    def delete(self) -> None:
        """Delete the topic with its channels and messages."""
        self.is_exiting = True
        for channel in [*self._deleted.values(), *self.channels.values()]:
            # A checkpoint in progress must not be written any more.
            channel.checkpoint.remove_files()
        self._deleted.clear()
        for channel in [*self.channels.values()]:
            self._end_channel(channel)
        self.publishing.refuse_all()
        if self.idempotence is not None:
            self.idempotence.topic_deleted()
        self.log.discard()

    # how far back the log is needed

    def low(self) -> int:
        """The oldest sequence number that a channel or a hold still needs."""
        lowest = min((channel.low() for channel in self.channels.values()), default=self.origin)
        return min(lowest, *self.holds.values()) if self.holds else lowest

    def start_low(self) -> int:
        """The oldest sequence number that the next start has to read. It must not have to wait for
        an archive."""
        readers = DeadLetters | Idempotence
        return min(
            (at for owner, at in self.holds.items() if isinstance(owner, readers)), default=sys.maxsize
        )

    def low_fell(self) -> None:
        """A channel has gone back in the log: low() must be computed again."""
        self._low = (0, 0)

    def _recent_low(self) -> int:
        """low() as of 20 ms ago at most, because each batch that leaves memory asks for it."""
        now_ns = self.broker.monotonic_ns()
        if now_ns - self._low[0] > 20_000_000:
            self._low = (now_ns, self.low())
        return self._low[1]

    @property
    def depth(self) -> int:
        """Messages that no channel has seen, except those of observers."""
        return self.log.count(self.unseen_from, self.log.end)

    @property
    def unseen_from(self) -> int:
        return self.holds.get(OBSERVED, self.visible_end) if self.channels else self.origin

    @property
    def backend_depth(self) -> int:
        start, memory_start = self.unseen_from, self.log.memory_start
        return min(self.depth, self.log.count(start, max(start, memory_start)))

    def __str__(self) -> str:
        return self.name
