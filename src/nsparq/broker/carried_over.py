"""Carried-over messages: unfinished messages that a channel keeps outside of the log.

One stuck message must not pin its segment forever. When all cursors have passed several segments,
each channel copies its unfinished messages out of them, and the segments can be removed. Channels
with a file copy in a thread; channels of ephemeral topics keep the copies in memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from nsparq.storage.batch import Batch, mark_of
from nsparq.storage.carried import CARRY_SUFFIX, CarriedFile, CarriedInMemory, Places
from nsparq.storage.log import Log
from nsparq.storage.log_range import LogRange, OffsetGone
from nsparq.storage.log_sync import as_os_error
from nsparq.storage.raw_batch import find_batch, iter_batches
from nsparq.storage.segment import Segment
from nsparq.storage.state_files import ChannelState

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel
    from nsparq.broker.letters import Letter
    from nsparq.broker.redrive_choice import Columns

MAX_SHARE: Final = 8
"""Messages are carried over if they are at most one in so many of their segment."""
FILE_SLICE: Final = 1000
"""Messages that a thread copies at a time."""
MEMORY_SLICE: Final = 500
"""Messages that the event loop copies at a time, for ephemeral topics."""


@dataclass(slots=True, eq=False)
class CarryJob:
    """Work on the file of carried-over messages. run() it in a thread, then CarriedOver.end()."""

    _write: Callable[[], Places]
    _accept: Callable[[Places], None]
    before: int = 0
    """After this, all unfinished messages below this number are carried over."""
    error: OSError | None = None
    _places: Places = field(default_factory=dict)

    def run(self) -> None:
        try:
            self._places = self._write()
        except Exception as error:
            self.error = as_os_error(error)

    def accept(self) -> None:
        try:
            if self.error is None:
                self._accept(self._places)
        except OSError as error:
            self.error = error


def _read(chosen: list[tuple[LogRange, list[int]]]) -> Iterator[Batch]:
    for place, sequences in chosen:
        batches = [*iter_batches(place.read_verified().data)]
        for sequence in sequences:
            batch = find_batch(batches, sequence)
            # A missing message is lost to damage. Delivery counts it.
            if batch is not None:
                single = batch.between(sequence, sequence + 1)
                yield Batch.single(
                    sequence, single.timestamp_ns, bytes(single.data), single.blocks()[0], single.tag
                )


class CarriedOver:
    """The carried-over messages of one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.is_running = False
        """Whether a thread is writing the file."""
        self.before = 0
        """All unfinished messages below this number are carried over."""
        self._named: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        """Messages that the checkpoint on disk names. Carried-over ones stay until it does not name
        them: so a message that it names and that is nowhere is certainly lost."""
        self._to_carry: list[int] = []
        """In memory: messages still to be copied, the oldest last. Some may be finished meanwhile;
        drop_finished() removes those."""
        self._to_carry_end = 0
        """Nothing else is to be copied below this number."""
        topic = channel.topic
        self.store: CarriedFile | CarriedInMemory
        if channel.is_durable and topic.directory is not None:
            path = topic.directory / (channel.name + CARRY_SUFFIX)
            self.store = CarriedFile(topic.broker.files, path, mark_of(topic.incarnation))
        else:
            self.store = CarriedInMemory(topic.log.hold)

    def only_in_log(self) -> Iterator[int]:
        """Unfinished messages that are not carried over. There may be very many, so this runs no
        Python code for each."""
        return filterfalse(self.store.kept.__contains__, self._channel.unfinished)

    def note_named(self, state: ChannelState) -> None:
        """Note the messages that the checkpoint on disk names."""
        # A copy: after a restart it would keep the whole state file in memory.
        self._named = state.sequences.copy()

    def begin(self, segments: list[Segment]) -> CarryJob | None:
        """Choose messages of these segments to be copied: some at a time, and none of a segment
        with many unfinished ones. None if there is nothing to do now."""
        store, channel = self.store, self._channel
        if not segments or not isinstance(store, CarriedFile) or self.is_running:
            return None
        waiting = sorted(self.only_in_log())
        cursor = channel.cursor.position
        number = before = 0
        for segment in segments:
            below = bisect_left(waiting, segment.end)
            if cursor < segment.end or (below - number) * MAX_SHARE > segment.end - segment.base:
                break
            number = below
            before = segment.end
        if number > FILE_SLICE:
            number = FILE_SLICE
            before = waiting[number]
        chosen: list[tuple[LogRange, list[int]]] = []
        for sequence in waiting[:number]:
            if not chosen or sequence >= chosen[-1][0].next:
                try:
                    chosen.append((channel.topic.log.locate(sequence, 1), []))
                except OffsetGone:
                    # It was finished or lost long ago. Delivery drops it.
                    continue
            chosen[-1][1].append(sequence)
        if not chosen:
            return None
        self.is_running = True
        return CarryJob(lambda: store.write(_read(chosen)), store.accept, before)

    def begin_redrive(self, letters: list[Letter], columns: Columns) -> CarryJob:
        """Take over messages that were dead letters and that the log does not have any more.
        Nothing may be running, and the channel must have a file."""
        store = self.store
        assert isinstance(store, CarriedFile)
        assert not self.is_running
        self.is_running = True
        return CarryJob(
            lambda: store.write_singles(
                columns.sequences,
                columns.timestamps_ns,
                [one.body for one in letters],
                [one.block for one in letters],
            ),
            store.accept,
        )

    def end(self, done: CarryJob) -> None:
        channel = self._channel
        self.is_running = False
        if channel.topic.channels.get(channel.name) is not channel:
            # The channel was deleted meanwhile, and its file with it.
            done.error = None
            return
        done.accept()
        if done.error is None and done.before:
            self.before = max(self.before, done.before)
            channel.mark_changed()

    def drop_finished(self) -> CarryJob | None:
        """Forget carried-over messages that are finished and that the checkpoint on disk does not
        name. Gives a job if the file should become smaller."""
        store, unfinished = self.store, self._channel.unfinished
        if store.kept:
            finished = store.kept.keys() - unfinished.deferred.due_ns.keys()
            finished.difference_update(unfinished.requeued, unfinished.parked)
            finished.difference_update(unfinished.in_flight, unfinished.given_up, unfinished.redriven)
            if finished:
                finished.difference_update(self._named.tolist())
            store.drop(finished)
        if not isinstance(store, CarriedFile) or self.is_running:
            return None
        if store.is_empty:
            store.remove()
        elif store.is_wasteful:
            self.is_running = True
            return CarryJob(partial(store.copy, store.kept.copy()), store.accept_copy)
        return None

    # in memory

    def carry_over(self, log: Log, before: int) -> int:
        """Copy unfinished messages below `before`, some at a time. Gives the first number that is
        still needed in the log."""
        if not self._to_carry:
            waiting = sorted(self.only_in_log())
            self._to_carry = waiting[: bisect_left(waiting, before)][::-1]
            self._to_carry_end = before
        chosen = self._to_carry[: -MEMORY_SLICE - 1 : -1]
        del self._to_carry[-MEMORY_SLICE:]
        messages: list[Batch] = []
        batch: Batch | None = None
        for sequence in chosen:
            if batch is None or sequence >= batch.end:
                batch = log.read(sequence)
                if batch is None:
                    break
            if sequence < batch.base:
                # The log has dropped it to save memory.
                continue
            messages.append(batch.only(sequence - batch.base))
        self.store.add(messages)
        return min(before, self._to_carry[-1] if self._to_carry else self._to_carry_end)

    def sizes(self) -> list[tuple[int, int]]:
        """Sequence number and size in memory of each message; none for a file."""
        store = self.store
        return [(s, b.size) for s, b in store.kept.items()] if isinstance(store, CarriedInMemory) else []

    def give_up(self, before: int) -> None:
        self.store.drop([sequence for sequence in self.store.kept if sequence < before])

    def clear_plans(self) -> None:
        """The channel was emptied: nothing is to be copied any more."""
        self._to_carry.clear()
