"""A topic: the log, the channels that read it, and publishing into it.

Publishes are gathered and appended together when the event loop's turn ends (see Broker.turn): one write
for all of them, whatever their number, and whatever the number of channels.
"""

from __future__ import annotations

import logging
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nsparq.broker.backlog import CarryCopy, CarryOver
from nsparq.broker.channel import Channel
from nsparq.broker.latency import summarize
from nsparq.broker.settings import TopicSettings
from nsparq.errors import Exiting, StorageError, SyncFailed
from nsparq.names import is_ephemeral
from nsparq.packed import PackedBodies
from nsparq.storage.batch import mark_of
from nsparq.storage.carry import CARRY_SUFFIX
from nsparq.storage.log import Durability, Log, LogSettings, read_marks
from nsparq.storage.memory import MemoryLog
from nsparq.storage.metadata import TopicEntry
from nsparq.storage.segment import Segment
from nsparq.storage.state import (
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

MAX_BATCH = 2500
"""Messages in one batch; a larger publish becomes several. What is read from a publisher in one go, 256 KiB,
is usually less: taking it apart would mean to copy it."""

ENOUGH = 1024
"""Messages that are appended at once though more are on their way."""

EAGER_BATCH = 64
"""A publish of this many messages is appended at once: it gains nothing by waiting for company, and its
publisher can prepare the next while we serve the others."""

MANY_CHANNELS = 4
"""With so many it does gain: what is appended together is also delivered together, to each of them."""

EAGER_BYTES = 64 << 10
"""So is a message of this size, which bounds the size of a batch."""

PINNED_SEGMENTS = 2
"""Segments that all cursors have passed may wait for their last messages before those are carried over."""

RESERVED_NUMBERS = 1 << 26
"""Sequence numbers that a topic may use before it must write down that it has. Many, because that is a file;
but no more than the clock passes in 16 s, so that crashes do not carry a topic far ahead of the clock."""

DISCOVERY = "discovery"
"""Who holds the messages of a topic that is new, for channels that are to be discovered."""

Done = Callable[[str, Exception | None], None]
"""Told the publisher's verb and None once its messages are as durable as configured, or the failure."""


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
        self.directory: Path | None = None if self.is_ephemeral else broker.topic_directory(name)
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
        self.log: Log | MemoryLog
        self.origin = 0
        """Where the first channel starts: what comes after it is kept while there is no channel."""
        self.holds: dict[object, int] = {}
        """Who needs everything from a sequence number on for a while: nothing behind that is let go."""
        self.discovery_start = -1
        """Where channels begin that nsqlookupd knows of, while it has still to be asked for them; else -1."""
        self.settings = TopicSettings()
        self.is_synchronous = False
        """Whether publishers wait for an fsync."""
        self._apply(self.settings)
        self._pause_position = -1
        self._published: list[PackedBodies] = []
        """Published in this turn, to be appended at its end."""
        self._singles: list[bytes] = []
        """Single messages published after those."""
        self._gathered = 0
        """Messages among them."""
        self._deferred: list[tuple[PackedBodies, int]] = []
        self._waiting: list[tuple[Done, str]] = []
        self._uncommitted: list[tuple[int, list[tuple[Done, str]]]] = []
        """Publishers who wait for an fsync, with the log's end that it must reach."""
        self._held_back: list[tuple[int, int]] = []
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
        self._import_start = -1
        """Where the messages of another nsqd begin, while they are being taken over."""
        self._low = (0, 0)
        self.given_up_before = 0
        """An ephemeral topic has given up the messages below this, for want of memory: those still in flight
        cannot be sent again."""
        self._has_more_to_carry = False
        """Whether an ephemeral topic has stopped in the middle of carrying messages over."""
        self._reclaim_from = 0
        """An ephemeral log that holds more messages than this is reclaimed without waiting for upkeep."""
        self.synced_ns = 0
        """When the log was last asked to sync."""
        self.copy_after_ns = 0
        """A segment whose fsync failed is not copied before this."""

    # opening and closing

    def create(self) -> None:
        """A topic that was not there before."""
        epoch = self.broker.epoch()
        if self.directory is None:
            self.log = MemoryLog(floor=epoch, memory=self.broker.ephemeral_memory)
        else:
            self.broker.files.make_directory(self.directory)
            self.log = self._new_log(self.directory, epoch)
            self.log.open(clean_end=epoch, epoch=epoch)
        self.origin = self.log.end
        if self.broker.asks_for_channels():
            self._hold_for_discovery(self.log.end)
        self._write_state(clean=False)

    def load(self, listed: TopicEntry | None = None) -> None:
        """A topic whose directory an earlier run has left. `listed` is what that run wrote of it in nsqd.dat:
        channels that have lost their files, and whether those were paused, are known from there."""
        assert self.directory is not None
        files = self.broker.files
        names = files.list_directory(self.directory)
        channel_states = self._read_channels(names, listed)
        # A directory without any file is that of a topic whose creation was broken off.
        state = self._own_state(read_topic_state(files, self.directory), channel_states) if names else None
        # Should the clock have been set back, these still know what has been used.
        known = [known.seen for known in channel_states.values() if known]
        epoch = max(self.broker.epoch(), *known, state.reserved if state else 0)
        clean_end = -1
        if state is not None:
            self._restore_settings(state.settings)
            if self.broker.was_stopped_cleanly:
                clean_end = state.clean_end
        log = self._new_log(self.directory, epoch)
        if state is not None:
            for start, end in state.gaps:
                log.gaps.add(start, end)
        needed = self._needed(state, [known for known in channel_states.values() if known])
        log.open(clean_end=clean_end, epoch=epoch, needed=needed)
        self.log = log
        self.origin = log.start
        if state is not None:
            if state.discovery_start >= 0:
                self._hold_for_discovery(state.discovery_start)
            self.origin = max(state.origin, log.start)
            self.paused = state.paused
            self._pause_position = state.pause_position
            if state.import_start >= 0:
                self._undo_import(state.import_start, log, channel_states.values())
        elif listed is not None and listed.paused:
            self.paused = True
            self._pause_position = max(
                (known.seen for known in channel_states.values() if known), default=log.start
            )
        paused = {entry.name for entry in listed.channels if entry.paused} if listed is not None else set()
        for name, channel_state in channel_states.items():
            channel = Channel(self, name, log.start)
            channel.paused = name in paused
            channel.restore(channel_state)
            self.channels[name] = channel
        if state is not None and state.import_start >= 0:
            self._end_import()
        self._is_clean = state is not None and clean_end == log.end and state.import_start < 0
        since = self.visible_end if self.channels else self.origin
        due_at = self.broker.due_times()
        self._held_back = [(sequence, due_at(due_ns)) for sequence, due_ns in log.deferred_since(since)]

    def _read_channels(self, names: list[str], listed: TopicEntry | None) -> dict[str, ChannelState | None]:
        """The state of every channel that anything tells of; None for one that has to start over."""
        assert self.directory is not None
        known = {
            name.removesuffix(s) for name in names for s in (CHANNEL_SUFFIX, CARRY_SUFFIX) if name.endswith(s)
        }
        if listed is not None:
            known.update(entry.name for entry in listed.channels)
        files = self.broker.files
        return {
            name: read_channel_state(files, self.directory / (name + CHANNEL_SUFFIX))
            for name in sorted(known)
        }

    def _own_state(
        self, state: TopicState | None, channel_states: dict[str, ChannelState | None]
    ) -> TopicState | None:
        """Find out which log this is, by what the topic's file and its channels' say. Files that are damaged,
        or of another log, are counted, and not used. Gives the topic's state unless it is one of them."""
        said = [known.incarnation for known in channel_states.values() if known and known.incarnation]
        self.incarnation = self._find_incarnation(state, said)
        for name, known in channel_states.items():
            if known is not None and known.incarnation not in ("", self.incarnation):
                logger.error("%s:%s: its file is of another log: the channel starts over", self, name)
                channel_states[name] = None
        if state is not None and state.incarnation != self.incarnation:
            logger.error("%s: %s is of another log: the log is kept, from its start", self, TOPIC_FILE)
            state = None
        self.corrupt_files += sum(known is None for known in channel_states.values())
        self.corrupt_files += state is None
        return state

    def _find_incarnation(self, state: TopicState | None, said: list[str]) -> str:
        """What the topic's file says; where others do not agree, by the votes of that, the channels' files,
        and the segments."""
        assert self.directory is not None
        is_own = state is not None and state.name in ("", self.name)
        if state is not None and is_own and {*said} <= {state.incarnation}:
            return state.incarnation
        marks = read_marks(self.broker.files, self.directory)
        known = {mark_of(incarnation): incarnation for incarnation in said}
        votes = Counter(map(mark_of, said))
        votes.update(marks)
        if state is not None:
            known[mark_of(state.incarnation)] = state.incarnation
            votes[mark_of(state.incarnation)] += 2 if is_own else 0
        if not votes:
            return self.incarnation
        mark = max(votes, key=votes.__getitem__)
        # Nobody knows its name any more: it gets another that its batches go with.
        others = (uuid.uuid4().hex for _ in count())
        return known.get(mark) or next(other for other in others if mark_of(other) == mark)

    def _needed(self, state: TopicState | None, known: list[ChannelState]) -> tuple[int, int]:
        """The first number that any channel has to read, and where the log ended on disk, by what the files
        beside it say."""
        ends = [one.disk_end for one in known] + ([state.disk_end] if state is not None else [])
        lows = [min([one.cursor, *one.sequences.tolist()]) for one in known]
        if not known and state is not None:
            lows = [state.origin]
        return min(lows, default=0), max(ends, default=0)

    def _new_log(self, directory: Path, floor: int) -> Log:
        settings = self.settings.applied_to(self.broker.log_settings)
        log = Log(self.broker.files, directory, self.broker.cache, settings, floor=floor)
        log.reader_low = self._recent_low
        log.on_lost = self._lost
        log.mark = mark_of(self.incarnation)
        return log

    def _lost(self, start: int, end: int) -> None:
        for channel in self.channels.values():
            channel.lost(start, end)

    def _write_state(self, *, clean: bool, sync: bool = False) -> None:
        if self.directory is None:
            return
        state = TopicState(
            incarnation=self.incarnation,
            origin=self.visible_end if self.channels else self.origin,
            paused=self.paused,
            pause_position=self._pause_position,
            clean_end=self.log.end if clean else -1,
            reserved=self.log.end + (0 if clean else RESERVED_NUMBERS),
            gaps=self.log.gaps.ranges,
            import_start=self._import_start,
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
        if self.directory is None or not isinstance(self.log, Log):
            return []
        steps: list[tuple[str, Callable[[], None]]] = [
            (f"{self}: messages not yet on disk", self.log.persist)
        ]
        # A channel's state also says how far the topic had come, should the topic's own be lost.
        changed = [c for c in self.channels.values() if c.is_changed or not self._is_clean]
        steps += [(f"{c}: which messages are finished", partial(c.save, sync=True)) for c in changed]
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
                self._write_state(clean=True)
            except OSError as error:
                failed.append((f"{self}: that it was stopped cleanly", error))
        return failed

    # taking over what another nsqd has left: see broker.importer

    def begin_import(self) -> None:
        """Whatever is appended from here on is as if it had never been, until end_import()."""
        self._import_start = self.log.end
        self._write_state(clean=False, sync=True)

    def show_imported(self) -> None:
        """What has been appended so far was with the channels already: a paused topic does not hold it up."""
        if self.paused and self.channels and not self.log.count(self._pause_position, self._import_start):
            self._pause_position = self.log.end

    def end_import(self) -> None:
        """Have all of it on disk, with where the channels stand, and let it count."""
        assert isinstance(self.log, Log)
        self.log.close()
        self._end_import()

    def _end_import(self) -> None:
        """The channels' states first: they speak of the messages that the topic's state is about to let
        count, or no longer of those that it is about to forget."""
        for channel in self.channels.values():
            channel.step_over()
            channel.save(sync=True)
        self._import_start = -1
        self._write_state(clean=False, sync=True)

    def _undo_import(self, start: int, log: Log, states: Iterable[ChannelState | None]) -> None:
        """It was broken off and will begin anew: no channel may see the first part of it."""
        logger.warning("%s: taking over another nsqd's messages was broken off, and begins anew", self)
        log.gaps.add(start, log.end)
        for state in states:
            if state is not None:
                state.drop_from(start)

    # publishing

    @property
    def visible_end(self) -> int:
        """Channels see no further than this."""
        return self._pause_position if self.paused else self.log.end

    def publish(
        self, bodies: Sequence[bytes], defer_ns: int, done: Done, verb: str, *, has_company: bool = False
    ) -> None:
        """Append at the end of this turn; `done` is called then, or when the disk has it. With company, more
        is about to be published by the same client."""
        if self.is_exiting:
            raise Exiting
        packed = PackedBodies.of(bodies)
        self._waiting.append((done, verb))
        if defer_ns:
            # One batch each: a deferred batch is known by its first sequence number alone.
            self._deferred += ((single, defer_ns) for single in packed.split(1))
        else:
            self._pack_singles()
            self._published.append(packed)
            self._gathered += len(packed.lengths)
        gains = has_company or len(self.channels) >= MANY_CHANNELS
        enough = ENOUGH if gains else EAGER_BATCH
        if self._gathered >= enough or len(packed.data) >= EAGER_BYTES:
            self.flush()
        else:
            self.broker.next_turn.add_topic(self)

    def publish_singles(self, bodies: list[bytes], publisher: tuple[Done, str]) -> None:
        """Append one message each of several publishers at the end of this turn; they are told together. The
        topic is not exiting."""
        self._waiting.append(publisher)
        self._singles += bodies
        self._gathered += len(bodies)
        if self._gathered >= EAGER_BATCH:
            self.flush()
        else:
            self.broker.next_turn.add_topic(self)

    def _pack_singles(self) -> None:
        if self._singles:
            self._published.append(PackedBodies.of(self._singles))
            self._singles = []

    def flush(self) -> None:
        """Append what was published in this turn and let the channels see it."""
        waiting = self._waiting
        if not waiting:
            return
        self._pack_singles()
        published, groups = self._published, self._deferred
        self._published, self._deferred, self._waiting, self._gathered = [], [], [], 0
        if published:
            groups = [(part, 0) for part in PackedBodies.join(published).split(MAX_BATCH)] + groups
        try:
            self._append(groups)
        except Exception as error:
            if not isinstance(error, StorageError | Exiting | OSError):
                logger.exception("%s: internal error while appending", self)
            self._tell(waiting, error)
            return
        self._await_commit(waiting)

    def append_tagged(self, bodies: PackedBodies, defer_ns: int, tag: int) -> None:
        """Append at once, behind what has been published before. Raises StorageError, OSError or Exiting,
        with nothing appended."""
        self.flush()
        # One batch each, if deferred: as in publish().
        self._append([(part, defer_ns) for part in bodies.split(1 if defer_ns else MAX_BATCH)], tag)

    def when_committed(self, done: Done, verb: str) -> None:
        """Have `done` called once all that has been appended is as durable as configured, or is known not to
        be."""
        if self.is_synchronous and isinstance(self.log, Log) and self.log.doubtful:
            self._tell([(done, verb)], SyncFailed("an earlier one did"))
        else:
            self._await_commit([(done, verb)])

    def _await_commit(self, waiting: list[tuple[Done, str]]) -> None:
        if self.is_synchronous and isinstance(self.log, Log):
            self._uncommitted.append((self.log.end, waiting))
            self.broker.upkeep.request_sync(self)
            return
        self._tell(waiting, None)

    def _tell(self, waiting: list[tuple[Done, str]], error: Exception | None) -> None:
        """Answer publishers. One whose callback fails does not cost the others their answer."""
        for done, verb in waiting:
            try:
                done(verb, error)
            except Exception:
                logger.exception("%s: internal error while answering a publisher", self)

    def _append(self, groups: list[tuple[PackedBodies, int]], tag: int = 0) -> None:
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
                self._held_back.append((batch.base, due_ns))
        if self.is_ephemeral:
            self.broker.next_turn.add_topic(self)
        if self.channels:
            self._show(before)
        self.broker.upkeep.note_used(self)

    def _mark_used(self) -> None:
        """Before an append: a crash from here on must not look like a clean stop, and the next start must not
        use the same numbers."""
        if self.log.end > self._reserve_at:
            self._write_state(clean=False)

    def _show(self, before: int) -> None:
        """Let the channels see what lies between `before` and the visible end."""
        if self.paused or not self.channels:
            return
        held_back, self._held_back = self._held_back, []
        count = self.log.count(before, self.log.end)
        for channel in self.channels.values():
            for sequence, due_ns in held_back:
                channel.defer_published(sequence, due_ns)
            channel.appended(count)

    def committed(self, error: Exception | None) -> None:
        """An fsync has ended."""
        assert isinstance(self.log, Log)
        uncommitted, reached = self._uncommitted, self.log.committed
        # Those who have waited longest come first.
        number = len(uncommitted) if error is not None else bisect_right(uncommitted, reached, key=_position)
        self._uncommitted = uncommitted[number:]
        for _, waiting in uncommitted[:number]:
            self._tell(waiting, error)
        if self._uncommitted:
            self.broker.upkeep.request_sync(self)

    @property
    def awaits_sync(self) -> bool:
        """Whether publishers wait for an fsync."""
        return bool(self._uncommitted)

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
        held_back = self._held_back
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
            self._held_back = held_back
            raise
        self.broker.channel_created(channel)
        return channel

    def _start_at(self, channel: Channel, start: int, is_first: bool) -> None:
        start = min(max(start, self.log.start), self.visible_end)
        if is_first and not self.paused:
            # The channel finds them in the log.
            self._held_back = []
        channel.resume(channel.state_at(start))
        channel.appended(self.log.count(start, self.visible_end))
        self.low_fell()

    def delete_channel(self, name: str) -> None:
        """Raises KeyError. An ephemeral topic goes with its last channel."""
        channel = self.channels[name]
        self._end_channel(channel)
        if not self.channels:
            self.origin = self.visible_end
            self._held_back = [held for held in self._held_back if held[0] >= self.origin]
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
            channel.remove_files()
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
            self._write_state(clean=False)
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
            channel.save(sync=False, state=state)
            if self.is_synchronous and self.directory is not None:
                self.broker.changes.sync_soon(self.directory)

    # management

    def pause(self) -> None:
        if not self.paused:
            self._pause_position = self.log.end if self.channels else self.origin
            self.paused = True
        self._write_state(clean=False)
        self.broker.topic_changed(self)

    def unpause(self) -> None:
        if self.paused:
            before = self._pause_position
            self.paused = False
            self._pause_position = -1
            self._show(before)
        self._write_state(clean=False)
        self.broker.topic_changed(self)

    def empty(self) -> None:
        """Drop what the topic itself holds: its messages not yet seen by any channel."""
        if not self.channels:
            self.origin = self.log.end
            if self.paused:
                self._pause_position = self.log.end
        elif self.paused:
            self.log.gaps.add(self._pause_position, self.log.end)
            self._pause_position = self.log.end
        self._held_back.clear()
        self._write_state(clean=False)
        self.broker.upkeep.note_used(self)

    def positions(self) -> TopicPositions:
        """How far the log reaches."""
        found = self.log.positions()
        messages = self.log.count(found.earliest, found.latest)
        return TopicPositions(self.incarnation, *found, messages, self.log.size_bytes)

    def change_settings(self, changes: Mapping[str, object]) -> TopicSettings:
        """Depart from the daemon's flags, or go back to them (None). On disk when Broker.when_durable() says
        so. Raises ValueError, or WriteFailed or OSError, with nothing changed."""
        if not isinstance(self.log, Log) or self.directory is None:
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
            self._write_state(clean=False, sync=True)
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
            channel.remove_files()
            self._end_channel(channel)
        unanswered = [self._waiting, *(waiting for _, waiting in self._uncommitted)]
        self._waiting, self._uncommitted = [], []
        for waiting in unanswered:
            self._tell(waiting, Exiting())
        self.log.delete()

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
            channel.step_over()
        if isinstance(self.log, MemoryLog):
            for channel in self.channels.values():
                channel.drop_carried()
            self._reclaim_memory(self.log)
            return []
        cursor = min((channel.cursor for channel in self.channels.values()), default=self.origin)
        passed = [segment for segment in self.log.sealed_segments() if segment.end <= cursor]
        pinned = passed[:-PINNED_SEGMENTS]
        for channel in self.channels.values():
            try:
                job = channel.drop_carried() or channel.begin_carry(pinned)
            except OSError as error:
                self._note_carry(channel, error)
            else:
                self._do_carry(channel, job)
        return self.log.trim(self.low(), age_ns / 1e9)

    def _do_carry(self, channel: Channel, job: CarryOver | CarryCopy | None) -> None:
        if job is None:
            if not channel.is_carrying:
                # What could not be carried over before has been finished since.
                self.broker.health.set(None, f"carry {channel}")
            return

        def done() -> None:
            channel.end_carry(job)
            if not channel.is_exiting:
                self._note_carry(channel, job.error)

        self.broker.in_background(job.run, done)

    def _note_carry(self, channel: Channel, error: OSError | None) -> None:
        text = None if error is None else f"{channel}: cannot carry messages over: {error}"
        self.broker.health.set(text, f"carry {channel}")
        # There may be more, or this has to be tried again.
        self.broker.upkeep.note_changed(self)

    def bound(self) -> None:
        """Keep an ephemeral topic within the memory queue's size."""
        log, limit = self.log, self.broker.options.mem_queue_size
        if not isinstance(log, MemoryLog):
            return
        is_well_beyond = log.end - log.start > max(2 * limit, self._reclaim_from)
        is_full = not self.channels or (self.paused and self.depth > limit)
        if is_full or is_well_beyond or self._has_more_to_carry:
            self._reclaim_memory(log)

    def _reclaim_memory(self, log: MemoryLog) -> None:
        """Let go of what nobody needs, or as much of it as can be done in one step; the next turn goes on."""
        limit = self.broker.options.mem_queue_size
        if not self.channels:
            surplus = log.count(self.origin, log.end) - limit
            if surplus > 0:
                self.dropped_count += surplus
                self.origin += surplus
                self._held_back = [held for held in self._held_back if held[0] >= self.origin]
            if self.paused:
                self._pause_position = self.origin
            log.trim(self.origin)
            return
        if self.paused and (dropped := log.discard_oldest(self._pause_position, limit)):
            self.dropped_count += dropped
            self._held_back = [held for held in self._held_back if log.gaps.skip(held[0]) == held[0]]
        cursor = min(channel.cursor for channel in self.channels.values())
        needed = min([channel.carry_over(log, cursor) for channel in self.channels.values()])
        self._has_more_to_carry = needed < cursor
        if self._has_more_to_carry:
            self.broker.next_turn.add_topic(self)
        if self.holds:
            needed = min(needed, max(min(self.holds.values()), log.end - limit))
        log.trim(needed)
        self._reclaim_from = 2 * (log.end - log.start)

    def give_up(self, size_bytes: int) -> None:
        """Let go of so many bytes or more of an ephemeral topic: of what nobody needs, and then of the oldest
        messages. Those that were still to be sent are counted as dropped."""
        log = self.log
        assert isinstance(log, MemoryLog)
        enough = log.held_bytes - size_bytes
        self._reclaim_memory(log)
        while self._has_more_to_carry and log.held_bytes > enough:
            self._reclaim_memory(log)
        if log.held_bytes > enough:
            self._give_up_oldest(log, log.held_bytes - enough)

    def _give_up_oldest(self, log: MemoryLog, size_bytes: int) -> None:
        before = 0
        # What channels have carried over is older than the log.
        carried = [held for channel in self.channels.values() for held in channel.carried_sizes()]
        for sequence, size in sorted(carried):
            if size_bytes <= 0 or sequence >= log.start:
                break
            size_bytes -= size
            before = sequence + 1
        if size_bytes > 0:
            before = max(before, log.end_of_oldest(size_bytes))
        self.given_up_before = max(self.given_up_before, before)
        if self.depth:
            held_from = self._pause_position if self.channels else self.origin
            self.dropped_count += log.count(held_from, before)
            self._held_back = [held for held in self._held_back if held[0] >= before]
        if not self.channels:
            self.origin = max(self.origin, before)
            if self.paused:
                self._pause_position = self.origin
        for channel in self.channels.values():
            channel.give_up(before)
        log.trim(before)
        if self.channels and self.paused:
            log.gaps.add(self._pause_position, before)

    @property
    def depth(self) -> int:
        """Messages that the topic itself holds."""
        if not self.channels:
            return self.log.count(self.origin, self.log.end)
        return self.log.count(self._pause_position, self.log.end) if self.paused else 0

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


def _position(uncommitted: tuple[int, list[tuple[Done, str]]]) -> int:
    return uncommitted[0]
