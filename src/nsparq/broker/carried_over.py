"""Unfinished messages that a channel keeps outside of the log.

One stuck message must not pin its segment for ever. When segments pile up that all cursors have passed, each
channel copies its unfinished messages of them into a small file of its own, and the log can let go of the
segments. Channels of ephemeral topics do the same in memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import filterfalse
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from nsparq.storage.batch import Batch, mark_of
from nsparq.storage.carried import CARRY_SUFFIX, Carried, CarriedFile, CarriedInMemory
from nsparq.storage.log import Log
from nsparq.storage.log_range import LogRange, OffsetGone
from nsparq.storage.raw_batch import iter_batches
from nsparq.storage.segment import Segment
from nsparq.storage.state_files import ChannelState

if TYPE_CHECKING:
    from nsparq.broker.channel import Channel

MAX_SHARE: Final = 8
"""Messages are carried over when they are less than one part in this of their segment."""
FILE_SLICE: Final = 1000
"""Messages that are carried over at a time."""
MEMORY_SLICE: Final = 500
"""The same in memory, where all of it is done on the event loop."""


class CopyFromLog:
    """Messages to be copied out of the log. run() it in a thread, then CarriedOver.end()."""

    def __init__(self, carried: CarriedFile, chosen: list[tuple[LogRange, list[int]]], before: int) -> None:
        self.error: OSError | None = None
        self.before = before
        """When this is done, what is unfinished below this has been carried over."""
        self._carried = carried
        self._chosen = chosen
        self._places: dict[int, tuple[int, int]] = {}

    def run(self) -> None:
        try:
            self._places = self._carried.write(self._read())
        except OSError as error:
            self.error = error

    def _read(self) -> Iterator[Carried]:
        for place, sequences in self._chosen:
            batches = [*iter_batches(place.read_verified().data)]
            for sequence in sequences:
                entry = bisect_right(batches, sequence, key=attrgetter("base")) - 1
                # One that is not there is lost to a damaged disk, and is counted when it is to be sent.
                if entry >= 0 and sequence < batches[entry].end:
                    single = batches[entry].between(sequence, sequence + 1)
                    yield sequence, single.timestamp_ns, bytes(single.data)

    def accept(self) -> None:
        if self.error is None:
            self._carried.accept(self._places)


class Compaction:
    """What a channel carries, to be copied into a smaller file. run() it in a thread, then end()."""

    def __init__(self, carried: CarriedFile) -> None:
        self.error: OSError | None = None
        self._carried = carried
        self._kept = carried.kept.copy()
        self._places: dict[int, tuple[int, int]] = {}

    def run(self) -> None:
        try:
            self._places = self._carried.copy(self._kept)
        except OSError as error:
            self.error = error

    def accept(self) -> None:
        try:
            if self.error is None:
                self._carried.accept_copy(self._places)
        except OSError as error:
            self.error = error


class CarriedOver:
    """What one channel carries."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.is_running = False
        """Whether a thread writes the file."""
        self.before = 0
        """What is unfinished below this has been carried over."""
        self._named: set[int] = set()
        """Carried messages that the state on disk names. They stay until it does not: a message that it names
        and that is nowhere is then lost for certain."""
        self._to_carry: list[int] = []
        """In memory: unfinished messages to be carried over, the oldest last. Some may be finished by then;
        those go with the next drop_finished()."""
        self._to_carry_end = 0
        """There is nothing else to be carried over below this."""
        topic = channel.topic
        self.store: CarriedFile | CarriedInMemory
        if channel.is_durable and topic.directory is not None:
            path = topic.directory / (channel.name + CARRY_SUFFIX)
            self.store = CarriedFile(topic.broker.files, path, mark_of(topic.incarnation))
        else:
            self.store = CarriedInMemory(topic.log.hold)

    def only_in_log(self) -> Iterator[int]:
        """Unfinished messages that are not carried. Nothing is done here message by message in Python: there
        may be very many."""
        return filterfalse(self.store.kept.__contains__, self._channel.unfinished)

    def note_named(self, state: ChannelState) -> None:
        """This is the state on disk."""
        kept = self.store.kept
        self._named = kept.keys() & state.sequences.tolist() if kept else set()

    def begin(self, segments: list[Segment]) -> CopyFromLog | None:
        """Choose messages of these segments to be copied, so that the log can let go of them: some at a time,
        and none of a segment in which they are many. None if nothing is to be done now."""
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
                    # It was finished, or lost, long ago. It will be dropped when its turn comes.
                    continue
            chosen[-1][1].append(sequence)
        if not chosen:
            return None
        self.is_running = True
        return CopyFromLog(store, chosen, before)

    def end(self, done: CopyFromLog | Compaction) -> None:
        channel = self._channel
        self.is_running = False
        if channel.topic.is_exiting or channel.topic.channels.get(channel.name) is channel:
            done.accept()
            if done.error is None and isinstance(done, CopyFromLog):
                self.before = max(self.before, done.before)
                channel.mark_changed()
        else:
            # The channel was deleted meanwhile, and this has brought the file back.
            self.store.remove()

    def drop_finished(self) -> Compaction | None:
        """Let go of carried messages that have been finished, and that the state on disk does not name. Gives
        the work of making the file smaller if that is due."""
        store, unfinished = self.store, self._channel.unfinished
        if store.kept:
            finished = store.kept.keys() - unfinished.deferred.due_ns.keys()
            finished.difference_update(unfinished.requeued)
            finished.difference_update(unfinished.in_flight, self._named)
            store.drop(finished)
        if not isinstance(store, CarriedFile) or self.is_running:
            return None
        if store.is_empty:
            store.remove()
        elif store.is_wasteful:
            self.is_running = True
            return Compaction(store)
        return None

    # in memory

    def carry_over(self, log: Log, before: int) -> int:
        """Copy what is unfinished of the log before `before`, some of it at a time. Gives from where on the
        log is still needed."""
        if not self._to_carry:
            waiting = sorted(self.only_in_log())
            self._to_carry = waiting[: bisect_left(waiting, before)][::-1]
            self._to_carry_end = before
        chosen = self._to_carry[: -MEMORY_SLICE - 1 : -1]
        del self._to_carry[-MEMORY_SLICE:]
        messages: list[Carried] = []
        batch: Batch | None = None
        ends: list[int] = []
        for sequence in chosen:
            if batch is None or sequence >= batch.end:
                batch = log.read(sequence)
                if batch is None:
                    break
                ends = np.cumsum(np.frombuffer(batch.lengths, np.uint32), dtype=np.int64).tolist()
            if sequence < batch.base:
                # It has been given up.
                continue
            index = sequence - batch.base
            body = batch.data[ends[index] - batch.lengths[index] : ends[index]]
            messages.append((sequence, batch.timestamp_of(index), body))
        self.store.add(messages)
        return min(before, self._to_carry[-1] if self._to_carry else self._to_carry_end)

    def sizes(self) -> list[tuple[int, int]]:
        """The sequence number and the bytes in memory of each message."""
        store = self.store
        return [(s, b.size) for s, b in store.kept.items()] if isinstance(store, CarriedInMemory) else []

    def give_up(self, before: int) -> None:
        self.store.drop([sequence for sequence in self.store.kept if sequence < before])

    def clear_plans(self) -> None:
        """Nothing is unfinished any more."""
        self._to_carry.clear()
