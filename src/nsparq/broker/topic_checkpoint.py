"""The state of a topic on disk, `topic.json`, and the order in which a topic is persisted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nsparq.storage.state_files import TopicState

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic

RESERVED_NUMBERS = 1 << 26
"""Sequence numbers that a topic may use before it must reserve more on disk. Many, because that
writes a file; but no more than the clock passes in 16 s, so that crashes do not carry a topic far
ahead of it."""


class TopicCheckpoint:
    """Writes the state of one topic. Ephemeral topics have none."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self.reserve_at = -1
        """Half of the numbers that this run has reserved: before the log goes beyond this, more are
        reserved. Below the log's end while the state on disk is still that of a clean stop."""
        self.is_stale = False
        """Whether the state on disk has still to be replaced by the present one."""
        self.is_clean = False
        """Whether the state on disk is that of a clean stop, and nothing has changed since."""
        self._handed_out = -1
        """The end of what channels have seen, as far as the state on disk says so."""

    def write(self, *, clean: bool = False, sync: bool = False) -> None:
        """Raises OSError."""
        topic, broker, log = self._topic, self._topic.broker, self._topic.log
        if topic.directory is None:
            return
        state = TopicState(
            incarnation=topic.incarnation,
            origin=topic.unseen_from,
            paused=topic.paused,
            pause_position=topic.visible_end if topic.paused else -1,
            clean_end=log.end if clean else -1,
            reserved=log.end + (0 if clean else RESERVED_NUMBERS),
            gaps=log.gaps.ranges,
            import_start=topic.import_start,
            name=topic.name,
            disk_end=log.disk_end,
            settings=topic.settings.stored(),
            discovery_start=topic.discovery_start,
        )
        self.is_clean = False
        state.write(broker.files, topic.directory)
        if clean:
            broker.files.sync_written(topic.directory)
        elif sync or topic.is_synchronous:
            broker.changes.sync_soon(topic.directory)
        self.reserve_at = state.reserved - RESERVED_NUMBERS // 2
        self.is_clean = clean

    def write_if_stale(self) -> None:
        """If this fails, it is tried again later."""
        if not self.is_stale:
            return
        topic, broker = self._topic, self._topic.broker
        try:
            self.write()
        except OSError as error:
            broker.health.set(f"{topic}: cannot write its state: {error}", f"state {topic}")
            broker.upkeep.note_changed(topic)
        else:
            self.is_stale = False
            broker.health.set(None, f"state {topic}")

    def update(self) -> None:
        """A round of upkeep. Without a durable channel the topic's state must say how far channels
        have come."""
        self.write_if_stale()
        topic = self._topic
        has_durable = any(channel.is_durable for channel in topic.channels.values())
        if topic.directory is None or not topic.channels or has_durable:
            return
        if self._handed_out != topic.visible_end:
            self._handed_out = topic.visible_end
            self.is_stale = True
            self.write_if_stale()

    def persist(self, *, states_first: bool = False) -> list[tuple[str, Exception]]:
        """Persist the topic at a stop, in an order in which a crash on the way loses nothing. Gives
        what could not be kept, and why; it may be called again then. May be called in a thread,
        after Topic.end_clients().

        With `states_first`, the channels' states are written before the messages: they are small,
        and the disk may be nearly full.
        """
        topic = self._topic
        if topic.directory is None:
            return []
        steps: list[tuple[str, Callable[[], None]]] = [
            (f"{topic}: messages not yet on disk", topic.log.persist)
        ]
        # A channel's state also says how far the topic had come, in case the topic's own is lost.
        changed = [c for c in topic.channels.values() if c.checkpoint.is_stale or not self.is_clean]
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
        if not failed and not self.is_clean:
            try:
                if topic.idempotence is not None:
                    topic.idempotence.save()
                self.write(clean=True)
            except OSError as error:
                failed.append((f"{topic}: that it was stopped cleanly", error))
        return failed
