"""Giving back what no channel of a topic needs any more: memory, and segments on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nsparq.broker.carried_over import CarryJob
from nsparq.storage.segment import Segment

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.topic import Topic

PINNED_SEGMENTS: Final = 2
"""Segments that all cursors have passed and that unfinished messages keep. Beyond this number the
messages are carried over, so that the segments can go."""


def reclaim(topic: Topic, age_ns: int) -> list[Segment]:
    """Drop what no channel needs. Gives the segments to be removed. `age_ns` is the present time:
    see Broker.age_ns()."""
    for channel in topic.channels.values():
        channel.cursor.step_over()
    if topic.bound is not None:
        for channel in topic.channels.values():
            channel.carried_over.drop_finished()
        topic.bound.reclaim()
        return []
    cursor = min((channel.cursor.position for channel in topic.channels.values()), default=topic.origin)
    sealed = topic.log.sealed_segments()
    passed = [segment for segment in sealed if segment.end <= cursor and segment.is_local]
    pinned = passed[:-PINNED_SEGMENTS]
    for channel in topic.channels.values():
        try:
            job = channel.carried_over.drop_finished() or channel.carried_over.begin(pinned)
        except OSError as error:
            _note_carry(channel, error)
        else:
            _do_carry(channel, job)
    return topic.log.trim(topic.low(), age_ns / 1e9)


def _do_carry(channel: Channel, job: CarryJob | None) -> None:
    broker = channel.topic.broker
    if job is None:
        if not channel.carried_over.is_running:
            # Messages that could not be carried over before have been finished since.
            broker.health.set(None, f"carry {channel}")
        return

    def done() -> None:
        channel.carried_over.end(job)
        if not channel.is_exiting:
            _note_carry(channel, job.error)

    broker.in_background(job.run, done)


def _note_carry(channel: Channel, error: OSError | None) -> None:
    broker = channel.topic.broker
    text = None if error is None else f"{channel}: cannot carry messages over: {error}"
    broker.health.set(text, f"carry {channel}")
    # There may be more, or this has to be tried again.
    broker.upkeep.note_changed(channel.topic)
