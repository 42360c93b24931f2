"""Where a channel stands in its topic's log: the cursor, the exceptions to it, and keeping both on disk.

Every message before the cursor is finished unless it is in flight, waiting to be sent again, or deferred.
Messages are known here by their sequence numbers alone. The ids that clients see hold the node id too, which
may be another one after a restart. Nothing here knows how messages are sent.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, filterfalse
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nsparq.broker.deferred import Deferred
from nsparq.broker.inflight import InFlight
from nsparq.names import is_ephemeral
from nsparq.storage.batch import Batch, mark_of
from nsparq.storage.carry import CARRY_SUFFIX, Carried, CarryFile, MemoryCarry
from nsparq.storage.decode import iter_batches
from nsparq.storage.gaps import Gaps
from nsparq.storage.memory import MemoryLog
from nsparq.storage.ranges import OffsetGone, Range
from nsparq.storage.segment import Segment
from nsparq.storage.state import CHANNEL_SUFFIX, ChannelState, StateFile

if TYPE_CHECKING:
    from nsparq.broker.topic import Topic


logger = logging.getLogger(__name__)

CARRY_SHARE = 8
"""Stragglers are carried over when they are less than one part in this of their segment."""

CARRY_SLICE = 1000
"""Messages that are carried over at a time."""

MEMORY_SLICE = 500
"""The same in memory, where all of it is done on the event loop."""


class SeekPlan(NamedTuple):
    """What a seek does, or would do."""

    cursor: int
    """Where the channel stands before it."""
    target: int
    """Where it goes: what was asked for, as far as the log reaches."""
    again: int
    """Messages that the cursor had passed and meets again."""
    skipped: int
    """Messages not finished that count as done."""


class CarryOver:
    """Messages to be copied out of the log. run() it in a thread, then Backlog.end_carry()."""

    def __init__(self, carried: CarryFile, chosen: list[tuple[Range, list[int]]], before: int) -> None:
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


class CarryCopy:
    """What a channel carries, to be copied into a smaller file. run() it in a thread, then end_carry()."""

    def __init__(self, carried: CarryFile) -> None:
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


class Backlog(ABC):
    """What a channel has still to deliver."""

    def __init__(self, topic: Topic, name: str, cursor: int) -> None:
        self.topic = topic
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.is_durable = not self.is_ephemeral and topic.directory is not None
        """Whether its state is kept on disk."""
        self.cursor = cursor
        """The next sequence number never delivered."""
        self.skips = Gaps()
        """Messages of the log that the cursor passes by: taken over from another nsqd for one channel alone,
        or, with their attempts, among the requeued from the start."""
        self.replay = (0, 0)
        """Deferred messages numbered below the first and due by the second are the cursor's to deliver, like
        any other: their time had come when the channel went back to them."""
        self.paused = False
        self.owner = ""
        """Who alone may commit: the query of Spark that reads this topic. Empty for nobody."""
        self.owned_since_ns = 0
        """Wall time of the claim."""
        self.is_changed = True
        """Whether a checkpoint would differ from the last one."""
        self.in_flight = InFlight()
        self.deferred = Deferred()
        self.requeued: deque[int] = deque()
        """Sequence numbers to be sent again, in the order in which they came back."""
        self._attempts: dict[int, int] = {}
        """Deliveries so far of the messages requeued or deferred after one."""
        self._deferred_ahead: deque[int] = deque()
        """Sequence numbers of deferred messages that the cursor has still to step over."""
        self.dropped_count = 0
        """Messages given up: an ephemeral channel that fell too far behind, or bytes lost to a bad disk."""
        self._to_carry: list[int] = []
        """In memory: unfinished messages to be carried over, the oldest last. Some may be finished by then;
        those go with the next drop_carried()."""
        self._to_carry_end = 0
        """There is nothing else to be carried over below this."""
        self._carried_before = 0
        """What is unfinished below this has been carried over."""
        self._named: set[int] = set()
        """Carried messages that the state on disk names. They stay until it does not: a message that it names
        and that is nowhere is then lost for certain."""
        self.state_file: StateFile | None = None
        self.is_carrying = False
        """Whether the file of what is carried is being written in a thread."""
        hold = topic.log.hold if isinstance(topic.log, MemoryLog) else lambda size_bytes: None
        self._carried: CarryFile | MemoryCarry = MemoryCarry(hold)
        if self.is_durable and topic.directory is not None:
            files = topic.broker.files
            self.state_file = StateFile(files, topic.directory / (name + CHANNEL_SUFFIX))
            self._carried = CarryFile(
                files, topic.directory / (name + CARRY_SUFFIX), mark_of(topic.incarnation)
            )

    @abstractmethod
    def _watch(self, at_ns: int) -> None:
        """Have something look at what is due then."""

    def _mark_changed(self) -> None:
        """Have the next round of checkpoints include this channel."""
        self.is_changed = True
        self.topic.broker.upkeep.note_changed(self.topic)

    # what is there

    @property
    def depth(self) -> int:
        """Messages ready to be sent: neither in flight nor deferred."""
        return len(self.requeued) + self._ahead

    @property
    def backend_depth(self) -> int:
        """The part of the depth that is beyond the memory queue."""
        return min(self._ahead, self._count_to(min(self.topic.log.memory_start, self.topic.visible_end)))

    @property
    def _ahead(self) -> int:
        return self._count_to(self.topic.visible_end) - len(self._deferred_ahead)

    def _count_to(self, end: int) -> int:
        """Messages from the cursor to `end`, less those that it will pass by."""
        log = self.topic.log
        if not self.skips.ranges:
            return log.count(self.cursor, end)
        both = Gaps(self.skips.ranges)
        for start, stop in log.gaps.ranges:
            both.add(start, stop)
        return max(0, end - self.cursor) - both.count(self.cursor, end)

    def low(self) -> int:
        """The oldest sequence number that this channel may still have to read from the log."""
        cursor = self.cursor
        lows = (self.in_flight.lowest(), self.deferred.lowest(), min(self.requeued, default=None))
        lowest = min([cursor, *(low for low in lows if low is not None)])
        if lowest in self._carried:
            lowest = min(cursor, min(self._uncarried(), default=cursor))
        return lowest

    def _unfinished(self) -> Iterable[int]:
        return chain(self.in_flight, self.requeued, self.deferred.due_ns)

    def _uncarried(self) -> Iterator[int]:
        """What is unfinished and only in the log. Nothing here is done message by message in Python: there
        may be very many."""
        return filterfalse(self._carried.kept.__contains__, self._unfinished())

    def attempts_of(self, sequence: int) -> int:
        """Deliveries so far of a message that is requeued or deferred."""
        return self._attempts.get(sequence, 0)

    def ready(self, count: int) -> list[int]:
        """The next sequence numbers that the cursor will deliver, up to `count`."""
        gaps, skips, end = self.topic.log.gaps, self.skips, self.topic.visible_end
        deferred = iter(self._deferred_ahead)
        passed_by = next(deferred, end)
        found: list[int] = []
        sequence = self.cursor
        while len(found) < count:
            following = skips.skip(gaps.skip(sequence))
            if following > sequence:
                sequence = following
                continue
            if sequence >= end:
                break
            while passed_by < sequence:
                passed_by = next(deferred, end)
            if sequence != passed_by:
                found.append(sequence)
            sequence += 1
        return found

    def locate(self, sequence: int) -> Range:
        """Where an unfinished message can be read."""
        if sequence in self._carried:
            return self._carried.locate(sequence)
        return self.topic.log.locate(sequence, 1)

    # moving

    def step_over(self) -> None:
        """Move the cursor out of numbers that hold no message for this channel."""
        gaps, skips, ahead = self.topic.log.gaps, self.skips, self._deferred_ahead
        if not (gaps.ranges or skips.ranges or ahead):
            return
        end = self.topic.visible_end
        while self.cursor < end:
            following = skips.skip(gaps.skip(self.cursor))
            while ahead and ahead[0] <= following:
                following = max(following, ahead.popleft() + 1)
            if following == self.cursor:
                break
            self._jump(min(following, end))
        skips.drop_before(self.cursor)

    def _stretch_end(self) -> int:
        """How far the cursor may go before it must step over something. Batches that were read from disk
        come joined, so this may be inside one."""
        end = self.topic.visible_end
        if self._deferred_ahead:
            end = min(end, self._deferred_ahead[0])
        if not (self.topic.log.gaps.ranges or self.skips.ranges):
            return end
        for ranges in (self.topic.log.gaps.ranges, self.skips.ranges):
            for start, _ in ranges:
                if self.cursor < start < end:
                    end = start
        return end

    def _behind(self, count: int) -> int:
        """The sequence number that the cursor reaches when it passes `count` messages."""
        end = self.topic.visible_end
        reached = self.cursor + count
        while reached < end:
            deferred = sum(1 for sequence in self._deferred_ahead if sequence < reached)
            missing = count - (self._count_to(reached) - deferred)
            if missing <= 0:
                return reached
            reached += missing
        return end

    def _jump(self, sequence: int) -> None:
        """Move the cursor, and forget the deferred messages that it passes by."""
        self.cursor = sequence
        while self._deferred_ahead and self._deferred_ahead[0] < sequence:
            self._deferred_ahead.popleft()

    def lost(self, start: int, end: int) -> None:
        """The log has lost these numbers: a deferred message among them is none that the cursor passes by."""
        if any(start <= sequence < end for sequence in self._deferred_ahead):
            self._deferred_ahead = deque(s for s in self._deferred_ahead if not start <= s < end)

    def defer_published(self, sequence: int, due_ns: int) -> None:
        """A message published with a delay: it waits here from the start, and the cursor will pass it by."""
        self._deferred_ahead.append(sequence)
        self._defer(sequence, due_ns)

    def _defer(self, sequence: int, due_ns: int) -> None:
        self.deferred.add(sequence, due_ns)
        self._watch(due_ns)

    def _is_replayed(self, sequence: int, due_ns: int) -> bool:
        """Whether a deferred message is delivered by the cursor."""
        return sequence < self.replay[0] and due_ns <= self.replay[1]

    def plan_seek(self, sequence: int) -> SeekPlan:
        """What it would mean to go to this number."""
        log, end = self.topic.log, self.topic.visible_end
        target = min(max(sequence, log.start), end)
        waiting = chain(self.requeued, self.deferred.due_ns)
        skipped = self.in_flight.count_below(target) + sum(1 for s in waiting if s < target)
        if target > self.cursor:
            skipped += self._count_to(target) - sum(1 for s in self._deferred_ahead if s < target)
        return SeekPlan(self.cursor, target, log.count(target, self.cursor), skipped)

    def state_at(self, sequence: int) -> ChannelState:
        """Standing at a number of the log, with everything from there on still to be delivered."""
        replay = (self.topic.visible_end, self.topic.broker.wall_ns())
        return ChannelState(
            cursor=sequence,
            seen=sequence,
            paused=self.paused,
            replay=replay,
            incarnation=self.topic.incarnation,
            channel=self.name,
            owner=self.owner,
            owned_since_ns=self.owned_since_ns,
        )

    def _drop_all(self) -> None:
        """Count everything unfinished behind the cursor, and what is deferred, as done."""
        self._deferred_ahead.clear()
        self._to_carry.clear()
        self.in_flight.clear()
        self.deferred.clear()
        self.requeued.clear()
        self._attempts.clear()

    def _drop_below(self, limit: int) -> int:
        """Count everything unfinished below a sequence number, in flight aside, as done. Gives the number."""
        dropped = self.deferred.drop_below(limit)
        if min(self.requeued, default=limit) < limit:
            dropped += [s for s in self.requeued if s < limit]
            self.requeued = deque(s for s in self.requeued if s >= limit)
        for sequence in dropped:
            self._attempts.pop(sequence, None)
        return len(dropped)

    # state

    def snapshot(self) -> ChannelState:
        """Everything needed to go on after a restart."""
        return self.capture()()

    def capture(self) -> Callable[[], ChannelState]:
        """The same, to be put together in a thread. Here everything is only copied, which takes a small part
        of the time, however many messages are unfinished."""
        singles = self.in_flight.singles.copy()
        longer = [(run.attempts, [*run.unanswered()]) for run in self.in_flight.longer]
        requeued, attempts = [*self.requeued], self._attempts.copy()
        deferred, due_ns = [*self.deferred.due_ns], [*self.deferred.due_ns.values()]
        written_ns = self.topic.broker.wall_ns()
        ahead_ns = written_ns - self.topic.broker.monotonic_ns()
        state = ChannelState(
            cursor=self.cursor,
            seen=self.topic.visible_end,
            written_ns=written_ns,
            paused=self.paused,
            skips=[*self.skips.ranges],
            replay=self.replay if self.cursor < self.replay[0] else (0, 0),
            carried_before=self._carried_before,
            incarnation=self.topic.incarnation,
            channel=self.name,
            disk_end=self.topic.log.disk_end,
            owner=self.owner,
            owned_since_ns=self.owned_since_ns,
        )

        def build() -> ChannelState:
            waiting = requeued + deferred
            flying = [*singles, *chain.from_iterable(sequences for _, sequences in longer)]
            state.sequences = np.array(flying + waiting, np.uint64)
            numbers = [run.attempts for run in singles.values()]
            numbers += [number for number, sequences in longer for _ in sequences]
            numbers += [attempts.get(s, 0) for s in waiting]
            state.attempts = np.array(numbers, np.uint16)
            state.due_ns = np.zeros(len(numbers), np.int64)
            state.due_ns[len(numbers) - len(due_ns) :] = np.array(due_ns, np.int64) + ahead_ns
            return state

        return build

    def restore(self, state: ChannelState | None) -> None:
        """Go on where an earlier run stood. Without its state, everything that is kept is sent again."""
        carried = self._carried.load()
        if self._carried.is_damaged:
            self.topic.corrupt_files += 1
        self.is_changed = False
        if state is None:
            self._mark_changed()
            # Whatever has been carried over lies behind the log's start, and is among the late ones below.
            state = ChannelState(cursor=0, seen=0, paused=self.paused)
        unfinished = self.resume(state)
        # Delivered, and carried over, after the checkpoint; what the log still has, the cursor finds.
        late = (s for s in carried if state.cursor <= s < self.cursor and s not in unfinished)
        self.requeued.extend(late)
        self._note_named(state)
        self.drop_carried()

    def resume(self, state: ChannelState) -> set[int]:
        """Stand where `state` says. Gives the sequence numbers that it names as unfinished, and are here."""
        log = self.topic.log
        self.cursor = max(state.cursor, log.start)
        self.skips = Gaps(state.skips)
        self.replay = state.replay
        self.paused = state.paused
        self.owner, self.owned_since_ns = state.owner, state.owned_since_ns
        self._carried_before = state.carried_before
        # Files of before do not say which messages had been carried over.
        carried_before = log.start if self._carried.is_damaged else state.carried_before
        unfinished = set()
        missing = 0
        due_at = self.topic.broker.due_times(state.written_ns)
        due_in_log = self.topic.broker.due_times()
        for sequence, due_ns, attempts in zip(
            state.sequences.tolist(), state.due_ns.tolist(), state.attempts.tolist(), strict=True
        ):
            # The log lets go only of what is finished or carried: this one was finished after the checkpoint,
            # unless the carry file should have it, or a segment that is gone.
            if sequence < log.start and sequence not in self._carried:
                missing += sequence < carried_before or log.lost.skip(sequence) > sequence
                continue
            unfinished.add(sequence)
            if attempts:
                self._attempts[sequence] = attempts
            if due_ns:
                self._defer(sequence, due_at(due_ns))
            else:
                self.requeued.append(sequence)
        # What is replayed is left out below, too; but a replay of years need not be looked at one by one.
        replay_end, replay_due_ns = state.replay
        due_after = replay_due_ns if replay_end >= self.topic.visible_end else 0
        for sequence, due_ns in log.deferred_since(self.cursor, due_after):
            if sequence >= self.topic.visible_end or self._is_replayed(sequence, due_ns):
                continue
            self._deferred_ahead.append(sequence)
            if sequence >= state.seen:
                # Published after the checkpoint: the wall clock may have been set back in between.
                self._defer(sequence, due_in_log(due_ns))
        if missing:
            self.dropped_count += missing
            logger.error("%s: %d messages are lost that were not finished", self, missing)
        return unfinished

    def add_tried(self, sequence: int, attempts: list[int]) -> None:
        """Messages from `sequence` on that another nsqd has delivered before, so many times each: they wait
        to be sent again, and the cursor will pass them by."""
        tried = range(sequence, sequence + len(attempts))
        self.skips.add(tried.start, tried.stop)
        self.requeued.extend(tried)
        self._attempts.update(zip(tried, attempts, strict=True))

    def carry_over(self, log: MemoryLog, before: int) -> int:
        """In memory: copy what is unfinished of the log before `before` into the channel's own keeping, some
        of it at a time. Gives from where on the log is still needed."""
        if not self._to_carry:
            waiting = sorted(self._uncarried())
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
        self._carried.add(messages)
        return min(before, self._to_carry[-1] if self._to_carry else self._to_carry_end)

    def carried_sizes(self) -> list[tuple[int, int]]:
        """The sequence number and the bytes in memory of each message carried over."""
        carried = self._carried
        return [(s, b.size) for s, b in carried.kept.items()] if isinstance(carried, MemoryCarry) else []

    def give_up(self, before: int) -> None:
        """In memory: let go of all messages below a number. Those that wait are dropped, and counted; those
        in flight can only be finished."""
        ahead = self._ahead
        self.dropped_count += self._drop_below(before)
        if self.cursor < before:
            self._jump(min(before, self.topic.visible_end))
            self.dropped_count += ahead - self._ahead
        self._carried.drop([s for s in self._carried.kept if s < before])

    def checkpointed(self, state: ChannelState) -> None:
        """This state is on disk now. That ends the trouble of an earlier checkpoint, too."""
        self._note_named(state)
        self.topic.broker.health.set(None, f"checkpoint {self}")

    def _note_named(self, state: ChannelState) -> None:
        kept = self._carried.kept
        self._named = kept.keys() & state.sequences.tolist() if kept else set()

    def begin_carry(self, segments: list[Segment]) -> CarryOver | None:
        """Choose messages of these segments to be copied into the channel's own keeping, so that the log can
        let go of them: some at a time, and none of a segment in which they are many. None if nothing is to be
        done now."""
        carried = self._carried
        if not segments or not isinstance(carried, CarryFile) or self.is_carrying:
            return None
        waiting = sorted(self._uncarried())
        number = before = 0
        for segment in segments:
            below = bisect_left(waiting, segment.end)
            if self.cursor < segment.end or (below - number) * CARRY_SHARE > segment.end - segment.base:
                break
            number = below
            before = segment.end
        if number > CARRY_SLICE:
            number = CARRY_SLICE
            before = waiting[number]
        chosen: list[tuple[Range, list[int]]] = []
        for sequence in waiting[:number]:
            if not chosen or sequence >= chosen[-1][0].next:
                try:
                    chosen.append((self.topic.log.locate(sequence, 1), []))
                except OffsetGone:
                    # Finished, or lost, long since: it will be dropped when its turn comes.
                    continue
            chosen[-1][1].append(sequence)
        if not chosen:
            return None
        self.is_carrying = True
        return CarryOver(carried, chosen, before)

    def end_carry(self, done: CarryOver | CarryCopy) -> None:
        self.is_carrying = False
        if self.topic.is_exiting or self.topic.channels.get(self.name) is self:
            done.accept()
            if done.error is None and isinstance(done, CarryOver):
                self._carried_before = max(self._carried_before, done.before)
                self._mark_changed()
        else:
            # Deleted meanwhile: this has brought the file back.
            self._carried.remove()

    def drop_carried(self) -> CarryCopy | None:
        """Let go of carried messages that have been finished, and that the state on disk does not name. Gives
        the work of making the file smaller if that is due."""
        carried = self._carried
        if carried.kept:
            finished = carried.kept.keys() - self.deferred.due_ns.keys()
            finished.difference_update(self.requeued)
            finished.difference_update(self.in_flight, self._named)
            carried.drop(finished)
        if not isinstance(carried, CarryFile) or self.is_carrying:
            return None
        if carried.is_empty:
            carried.remove()
        elif carried.is_wasteful:
            self.is_carrying = True
            return CarryCopy(carried)
        return None

    def save(self, *, sync: bool, state: ChannelState | None = None) -> None:
        """Write down now where the channel stands, or is about to."""
        if self.state_file is None:
            return
        state = state or self.snapshot()
        self.is_changed = False
        try:
            self.state_file.write(state.encode(), self.state_file.next_version(), sync=sync)
        except OSError:
            # A checkpoint under way has been overtaken by this one, and is not written either.
            self._mark_changed()
            raise
        self.checkpointed(state)

    def remove_files(self) -> None:
        # Last of all the file that a channel is known by.
        self._carried.remove()
        if self.state_file is not None:
            self.state_file.remove()

    def __str__(self) -> str:
        return f"{self.topic.name}:{self.name}"
