"""What a channel keeps on disk: writing it down, and going on from it after a restart or a seek."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsparq.storage.gaps import Gaps
from nsparq.storage.state_files import CHANNEL_SUFFIX, ChannelState, StateFile

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel

logger = logging.getLogger(__name__)


class Checkpoint:
    """The state of one channel on disk."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.is_stale = True
        """Whether a checkpoint would differ from the last one."""
        self.file: StateFile | None = None
        """None for a channel that is not kept on disk."""
        topic = channel.topic
        if channel.is_durable and topic.directory is not None:
            self.file = StateFile(topic.broker.files, topic.directory / (channel.name + CHANNEL_SUFFIX))

    # writing

    def capture(self) -> Callable[[], ChannelState]:
        """Copies the channel's state, quickly, and gives a function that puts it together in a thread."""
        channel = self._channel
        topic, cursor = channel.topic, channel.cursor
        build_exceptions = channel.unfinished.capture()
        written_ns = topic.broker.wall_ns()
        ahead_ns = written_ns - topic.broker.monotonic_ns()
        state = ChannelState(
            cursor=cursor.position,
            seen=topic.visible_end,
            written_ns=written_ns,
            paused=channel.paused,
            skips=[*cursor.skips.ranges],
            replay=cursor.replay if cursor.position < cursor.replay[0] else (0, 0),
            carried_before=channel.carried_over.before,
            incarnation=topic.incarnation,
            channel=channel.name,
            disk_end=topic.log.disk_end,
            owner=channel.owner,
            owned_since_ns=channel.owned_since_ns,
        )

        def build() -> ChannelState:
            state.sequences, state.attempts, due_ns = build_exceptions()
            # On disk a due time is wall time.
            due_ns[due_ns != 0] += ahead_ns
            state.due_ns = due_ns
            return state

        return build

    def state_at(self, sequence: int) -> ChannelState:
        """Standing at a number of the log, with everything from there on still to be delivered."""
        channel = self._channel
        topic = channel.topic
        return ChannelState(
            cursor=sequence,
            seen=sequence,
            paused=channel.paused,
            replay=(topic.visible_end, topic.broker.wall_ns()),
            incarnation=topic.incarnation,
            channel=channel.name,
            owner=channel.owner,
            owned_since_ns=channel.owned_since_ns,
        )

    def save(self, *, sync: bool, state: ChannelState | None = None) -> None:
        """Write down where the channel stands, or is about to stand. Raises OSError."""
        if self.file is None:
            return
        state = state or self.capture()()
        self.is_stale = False
        try:
            self.file.write(state.encode(), self.file.next_version(), sync=sync)
        except OSError:
            # A checkpoint under way has been overtaken by this one, and is not written either.
            self._channel.mark_changed()
            raise
        self.written(state)

    def written(self, state: ChannelState) -> None:
        """This state is on disk now. That also ends the trouble of an earlier checkpoint."""
        self._channel.carried_over.note_named(state)
        self._channel.topic.broker.health.set(None, f"checkpoint {self._channel}")

    def remove_files(self) -> None:
        # The file that a channel is known by goes last.
        self._channel.carried_over.store.remove()
        if self.file is not None:
            self.file.remove()

    # reading

    def restore(self, state: ChannelState | None) -> None:
        """Go on where an earlier run stood. Without its state, everything that is kept is sent again."""
        channel, carried_over = self._channel, self._channel.carried_over
        carried = carried_over.store.load()
        if carried_over.store.is_damaged:
            channel.topic.corrupt_files += 1
        self.is_stale = False
        if state is None:
            channel.mark_changed()
            # Whatever has been carried over lies before the log's start, and is among the late ones below.
            state = ChannelState(cursor=0, seen=0, paused=channel.paused)
        unfinished = self.resume(state)
        # Delivered and carried over after the checkpoint. What the log still has, the cursor finds.
        reached = channel.cursor.position
        channel.unfinished.requeue(s for s in carried if state.cursor <= s < reached and s not in unfinished)
        carried_over.note_named(state)
        carried_over.drop_finished()

    def resume(self, state: ChannelState) -> set[int]:
        """Stand where `state` says. Gives the sequence numbers that it names as unfinished, and are here."""
        channel = self._channel
        cursor, unfinished, carried_over = channel.cursor, channel.unfinished, channel.carried_over
        topic, log = channel.topic, channel.topic.log
        cursor.position = max(state.cursor, log.start)
        cursor.skips = Gaps(state.skips)
        cursor.replay = state.replay
        channel.paused = state.paused
        channel.owner, channel.owned_since_ns = state.owner, state.owned_since_ns
        carried_over.before = state.carried_before
        # Files of before do not say which messages had been carried over.
        carried_before = log.start if carried_over.store.is_damaged else state.carried_before
        found = set()
        missing = 0
        due_at = topic.broker.due_times(state.written_ns)
        due_in_log = topic.broker.due_times()
        for sequence, due_ns, attempts in zip(
            state.sequences.tolist(), state.due_ns.tolist(), state.attempts.tolist(), strict=True
        ):
            # The log lets go only of what is finished or carried: this one was finished after the checkpoint,
            # unless the carry file should have it, or a segment that is gone.
            if sequence < log.start and sequence not in carried_over.store:
                missing += sequence < carried_before or log.lost.skip(sequence) > sequence
                continue
            found.add(sequence)
            if due_ns:
                channel.defer(sequence, due_at(due_ns), attempts)
            else:
                unfinished.requeue((sequence,), attempts)
        # What is replayed is left out below, too; but a replay of years need not be looked at one by one.
        replay_end, replay_due_ns = state.replay
        due_after = replay_due_ns if replay_end >= topic.visible_end else 0
        for sequence, due_ns in log.deferred_since(cursor.position, due_after):
            if sequence >= topic.visible_end or cursor.delivers_deferred(sequence, due_ns):
                continue
            cursor.deferred_ahead.append(sequence)
            if sequence >= state.seen:
                # Published after the checkpoint: the wall clock may have been set back in between.
                channel.defer(sequence, due_in_log(due_ns))
        if missing:
            channel.dropped_count += missing
            logger.error("%s: %d messages are lost that were not finished", channel, missing)
        return found
