"""Checkpoints of a channel: writing its state, and continuing from it after a restart or a seek."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsparq.broker.dead_letters import GivenUp
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
        """Whether the channel has changed since the last checkpoint."""
        self.file: StateFile | None = None
        """None for a channel that is not kept on disk."""
        self.letters_seen = ("", 0)
        """The dead-letter topic, and the position from which on it may have letters of the last run
        that the resumed state does not know. Empty if there are none."""
        topic = channel.topic
        if channel.is_durable and topic.directory is not None:
            self.file = StateFile(topic.broker.files, topic.directory / (channel.name + CHANNEL_SUFFIX))

    # writing

    def capture(self) -> Callable[[], ChannelState]:
        """Copies the channel's state, quickly. Gives a function that completes it in a thread."""
        channel = self._channel
        topic, cursor = channel.topic, channel.cursor
        build_exceptions = channel.unfinished.capture()
        written_ns = topic.broker.wall_ns()
        ahead_ns = written_ns - topic.broker.monotonic_ns()
        state = self._state(
            cursor=cursor.position,
            seen=topic.visible_end,
            written_ns=written_ns,
            skips=[*cursor.skips.ranges],
            replay=cursor.replay if cursor.position < cursor.replay[0] else (0, 0),
            # What the log has dropped is finished or carried over, also after a redrive.
            carried_before=max(channel.carried_over.before, topic.log.start),
            disk_end=topic.log.disk_end,
        )

        def build() -> ChannelState:
            state.sequences, state.attempts, due_ns, state.failures = build_exceptions()
            # Due times on disk are wall time.
            due_ns[due_ns != 0] += ahead_ns
            state.due_ns = due_ns
            return state

        return build

    def state_at(self, sequence: int) -> ChannelState:
        """The state of the channel after a seek: everything from `sequence` on is to be
        delivered."""
        topic = self._channel.topic
        replay = topic.visible_end, topic.broker.wall_ns()
        return self._state(cursor=sequence, seen=sequence, replay=replay, is_anew=True)

    def _state(self, *, is_anew: bool = False, **place: Any) -> ChannelState:
        """State of the channel. `place` has the fields that depend on the position."""
        channel = self._channel
        state = ChannelState(
            paused=channel.paused,
            incarnation=channel.topic.incarnation,
            channel=channel.name,
            owner=channel.owner,
            owned_since_ns=channel.owned_since_ns,
            policy=channel.retries.stored(),
            ordered_by=channel.ordering.ordered_by,
            **place,
        )
        channel.dead_letters.note_in(state, is_anew=is_anew)
        return state

    def save(self, *, sync: bool, state: ChannelState | None = None) -> None:
        """Write the channel's state, or `state`, which it is about to have. Raises OSError."""
        if self.file is None:
            return
        state = state or self.capture()()
        self.is_stale = False
        try:
            self.file.write(state.encode(), self.file.next_version(), sync=sync)
        except OSError:
            # A running checkpoint is older than this one, and is not written either.
            self._channel.mark_changed()
            raise
        self.written(state)

    def written(self, state: ChannelState) -> None:
        """This state is on disk now. Clears the error of an earlier checkpoint."""
        self._channel.carried_over.note_named(state)
        self._channel.dead_letters.state_written(state)
        self._channel.topic.broker.health.set(None, f"checkpoint {self._channel}")

    def remove_files(self) -> None:
        # The state file goes last: a channel exists as long as it has one.
        self._channel.carried_over.store.discard()
        if self.file is not None:
            self.file.remove()
        self._channel.dead_letters.files_removed()

    # reading

    def restore(self, state: ChannelState | None) -> None:
        """Continue where an earlier run stopped. Without its state, send all messages again."""
        channel, carried_over = self._channel, self._channel.carried_over
        carried = carried_over.store.load()
        if carried_over.store.is_damaged:
            channel.topic.corrupt_files += 1
        self.is_stale = False
        if state is None:
            channel.mark_changed()
            # Carried-over messages lie before the log's start, and are requeued below.
            state = ChannelState(cursor=0, seen=0, paused=channel.paused)
        unfinished = self.resume(state)
        # Requeue messages that were delivered and carried over after the checkpoint. The cursor
        # finds those that the log still has.
        reached = channel.cursor.position
        later = sorted(s for s in carried if state.cursor <= s < reached and s not in unfinished)
        channel.unfinished.requeue(later)
        channel.ordering.expect(later)
        carried_over.note_named(state)
        carried_over.drop_finished()

    def resume(self, state: ChannelState) -> set[int]:
        """Take over `state`. Gives the unfinished messages that it names and that still exist."""
        channel = self._channel
        cursor, unfinished, carried_over = channel.cursor, channel.unfinished, channel.carried_over
        topic, log = channel.topic, channel.topic.log
        cursor.position = max(state.cursor, log.start)
        cursor.skips = Gaps(state.skips)
        cursor.replay = state.replay
        channel.paused = state.paused
        channel.owner, channel.owned_since_ns = state.owner, state.owned_since_ns
        channel.retries.restore(state.policy)
        channel.dead_letters.redriven, channel.dead_letters.noted = state.redriven, state.letters_topic
        channel.ordering.restore(state.ordered_by)
        if state.are_letters_pending or not topic.broker.was_stopped_cleanly:
            self.letters_seen = state.letters_topic, state.letters_position
        carried_over.before = state.carried_before
        # A damaged file does not tell which messages were carried over.
        carried_before = log.start if carried_over.store.is_damaged else state.carried_before
        failures = dict(zip(state.sequences.tolist(), state.failures.tolist(), strict=False))
        found = set()
        missing = 0
        due_at = topic.broker.due_times(state.written_ns)
        due_in_log = topic.broker.due_times()
        for sequence, due_ns, attempts in zip(
            state.sequences.tolist(), state.due_ns.tolist(), state.attempts.tolist(), strict=True
        ):
            # The log drops only messages that are finished or carried over. So this one was
            # finished after the checkpoint, unless the carried-over file or a lost segment should
            # have it.
            if sequence < log.start and sequence not in carried_over.store.kept:
                missing += sequence < carried_before or log.lost.skip(sequence) > sequence
                continue
            found.add(sequence)
            if failed := failures.get(sequence, 0):
                unfinished.failures[sequence] = failed
            if channel.retries.are_used_up(failed):
                unfinished.given_up[sequence] = GivenUp(attempts, "no attempts left at a restart", "")
            elif due_ns:
                channel.defer(sequence, due_at(due_ns), attempts)
            else:
                unfinished.requeue((sequence,), attempts)
        channel.ordering.expect(sequence for sequence in state.sequences.tolist() if sequence in found)
        if unfinished.given_up:
            topic.broker.upkeep.retry(channel)
        # Skip replayed messages here already: a replay may cover years of them.
        replay_end, replay_due_ns = state.replay
        due_after = replay_due_ns if replay_end >= topic.visible_end else 0
        for sequence, due_ns in log.deferred_since(cursor.position, due_after):
            if sequence >= topic.visible_end or cursor.delivers_deferred(sequence, due_ns):
                continue
            cursor.deferred_ahead.append(sequence)
            if sequence >= state.seen:
                # Published after the checkpoint, so the checkpoint's clock does not apply.
                channel.defer(sequence, due_in_log(due_ns))
        if missing:
            channel.dropped_count += missing
            logger.error("%s: %d unfinished messages are lost", channel, missing)
        return found
