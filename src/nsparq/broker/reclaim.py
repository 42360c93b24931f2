"""Giving back what no channel of a topic needs any more: memory, and segments on disk."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from nsparq.broker.carried_over import MAX_SHARE, CarryJob
from nsparq.errors import ArchiveUnavailable
from nsparq.storage.log_range import FileReader
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
        _carry(channel, partial(_begin, channel, sealed, pinned))
    return topic.log.trim(topic.low(), age_ns / 1e9, topic.start_low())


class _Fetch(NamedTuple):
    """A segment that has to come from the archive, before its messages can be carried over."""

    segment: Segment
    reader: FileReader


def _carry(channel: Channel, begin: Callable[[], CarryJob | _Fetch | None]) -> None:
    """Start what is to be done now with the carried-over messages."""
    try:
        step = channel.carried_over.drop_finished() or begin()
    except OSError as error:
        _note_carry(channel, error)
        return
    if isinstance(step, _Fetch):
        _fetch(channel, step)
    elif step is not None:
        _run(channel, step)
    elif not channel.carried_over.is_running:
        # Messages that could not be carried over before have been finished since.
        _show(channel, None)


def _begin(channel: Channel, sealed: list[Segment], pinned: list[Segment]) -> CarryJob | _Fetch | None:
    """Messages that are only in the archive come first, one segment at a time."""
    carried, log = channel.carried_over, channel.topic.log
    if not pinned or sealed[0].is_local or carried.is_running:
        return carried.begin(pinned)
    waiting = sorted(carried.only_in_log())
    number, passed = bisect_left(waiting, log.start), []
    while number < len(waiting) and waiting[number] < pinned[0].base:
        segment = sealed[bisect_right(sealed, waiting[number], key=attrgetter("end"))]
        below = bisect_left(waiting, segment.end)
        if (below - number) * MAX_SHARE > segment.end - segment.base:
            return None
        reader = log.locate(waiting[number], 1).reader
        if reader is not None and reader.is_remote:
            return _Fetch(segment, reader)
        if segment.end > carried.before:
            return carried.begin([segment])
        # A redrive brought them back, or they are lost to damage and cannot be carried over.
        passed.append(segment)
        number = below
    return carried.begin([*passed, *pinned])


def _fetch(channel: Channel, fetch: _Fetch) -> None:
    """Threads for the disk must not wait for the archive. The others must not write to the data
    path, because a stop does not wait for them."""
    broker, carried = channel.topic.broker, channel.carried_over
    carried.is_running = True

    def fetched(error: OSError | None) -> None:
        carried.is_running = False
        if channel.is_exiting:
            return
        if error is not None:
            _note_carry(channel, error)
        else:
            _carry(channel, partial(carried.begin, [fetch.segment]))

    assert broker.archive is not None
    broker.try_in_background(lambda: fetch.reader.read(0, 0), fetched, broker.archive.in_background)


def _run(channel: Channel, job: CarryJob) -> None:
    def done() -> None:
        channel.carried_over.end(job)
        if not channel.is_exiting:
            _note_carry(channel, job.error)

    channel.topic.broker.in_background(job.run, done)


def _note_carry(channel: Channel, error: OSError | None) -> None:
    _show(channel, error)
    # There may be more, or this has to be tried again.
    channel.topic.broker.upkeep.note_changed(channel.topic)


def _show(channel: Channel, error: OSError | None) -> None:
    health, source = channel.topic.broker.health, f"carry {channel}"
    text = None if error is None else f"{channel}: cannot carry messages over: {error}"
    is_away = isinstance(error, ArchiveUnavailable)
    health.set(None if is_away else text, source)
    health.warn(text if is_away else None, source)
