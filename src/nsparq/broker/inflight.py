"""Messages in flight on a channel, kept by delivery rather than by message.

Consecutive messages delivered together are one Run. Clients mostly answer them in order, so a run
notes what is answered as "everything below `low`, and these few above". A run is looked up among
the latest few, where it mostly is, and then by the blocks of sequence numbers that it touches. No
step takes time proportional to the messages in flight: delivering and answering a run in order
costs the same for one message as for a thousand. An answered run stays in the heap of deadlines
until half of the heap is answered runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count, filterfalse
from operator import attrgetter

from nsparq.broker.client import Client
from nsparq.storage.batch import Timestamps

_SHORT_BITS = 6
"""Short runs are registered for each block of 64 numbers that they touch, so that a block has few
runs."""
_LONG_BITS = 11
"""Long runs are registered for each block of 2048, so that a run has few entries."""
_LONG = 256
"""A run of at least this many messages is long."""
_LATEST = 8
"""The latest runs, this many, are not registered: most are answered before others come."""

_order = count()


@dataclass(slots=True, eq=False)
class Run:
    """Messages numbered from `first` to before `end`, sent to one client in one go."""

    client: Client
    first: int
    end: int
    low: int
    """Everything before this is answered. It begins at `first`."""
    delivered_ns: int
    deadline_ns: int
    attempts: int
    timestamps_ns: Timestamps
    """Publish times: one for all messages, or one each. 0 where latencies are not recorded."""
    holes: set[int] = field(default_factory=set)
    """Messages beyond `low` that are answered."""
    is_registered: bool = False
    """Whether InFlight finds the run by the blocks that it touches."""

    def holds(self, sequence: int) -> bool:
        """Whether the message is part of this run and unanswered."""
        return self.low <= sequence < self.end and sequence not in self.holes

    def answer_out_of_order(self, sequence: int) -> None:
        """Count a held message as answered, where others have been answered out of order or this
        one is."""
        self.holes.add(sequence)
        while self.low in self.holes:
            self.holes.remove(self.low)
            self.low += 1

    def unanswered(self) -> Iterator[int]:
        """Numbers of the unanswered messages. Iterated in C, because there may be very many."""
        held = range(self.low, self.end)
        return filterfalse(self.holes.__contains__, held) if self.holes else iter(held)

    def count_below(self, sequence: int) -> int:
        """Unanswered messages with smaller numbers."""
        end = min(self.end, sequence)
        if end == self.end or not self.holes:
            return max(0, end - self.low) - len(self.holes)
        return max(0, end - self.low) - sum(hole < end for hole in self.holes)

    def timestamp_of(self, sequence: int) -> int:
        stamps = self.timestamps_ns
        return stamps if isinstance(stamps, int) else int(stamps[sequence - self.first])


class InFlight:
    """All unanswered deliveries of a channel."""

    def __init__(self) -> None:
        self._count = 0
        self.singles: dict[int, Run] = {}
        """Runs of one message, by its number."""
        self.longer: dict[Run, None] = {}
        """Runs of several messages. Both kinds are in the order of their delivery: after a restart
        they are sent again in that order."""
        self._latest: list[Run] = []
        """The latest few of the longer runs."""
        self._short: dict[int, list[Run]] = {}
        self._long: dict[int, list[Run]] = {}
        """The other longer runs, by each block of numbers that they touch."""
        self._heap: list[tuple[int, int, Run]] = []
        self._dead = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """The sequence numbers of all unanswered messages."""
        return chain(self.singles, chain.from_iterable(map(Run.unanswered, self.longer)))

    @property
    def runs(self) -> list[Run]:
        return [*self.singles.values(), *self.longer]

    def lowest(self) -> int | None:
        return min(chain(self.singles, map(attrgetter("low"), self.longer)), default=None)

    def add(self, run: Run) -> None:
        count = run.end - run.first
        if count == 1:
            self.singles[run.first] = run
        else:
            self.longer[run] = None
            latest = self._latest
            latest.append(run)
            if len(latest) > _LATEST:
                self._register(latest.pop(0))
        self._count += count
        run.client.runs.add(run)
        heappush(self._heap, (run.deadline_ns, next(_order), run))

    def _register(self, run: Run) -> None:
        run.is_registered = True
        blocks, touched = self._blocks_of(run)
        for block in touched:
            touching = blocks.get(block)
            if touching is None:
                blocks[block] = [run]
            else:
                touching.append(run)

    def _blocks_of(self, run: Run) -> tuple[dict[int, list[Run]], range]:
        """Where a run of several messages is registered."""
        last = run.end - 1
        if run.end - run.first >= _LONG:
            return self._long, range(run.first >> _LONG_BITS, (last >> _LONG_BITS) + 1)
        return self._short, range(run.first >> _SHORT_BITS, (last >> _SHORT_BITS) + 1)

    def find(self, sequence: int) -> Run | None:
        """The run in which the message is in flight."""
        run = self.singles.get(sequence)
        if run is not None:
            return run
        for run in self._latest:
            if run.holds(sequence):
                return run
        for run in self._long.get(sequence >> _LONG_BITS, ()):
            if run.holds(sequence):
                return run
        for run in self._short.get(sequence >> _SHORT_BITS, ()):
            if run.holds(sequence):
                return run
        return None

    def answer(self, run: Run, sequence: int, most: int = 1) -> int:
        """Take out a message that `run` holds, and up to `most` with those behind it. Gives the
        number."""
        number = 1
        if sequence == run.low and not run.holes:
            number = min(most, run.end - sequence)
            run.low += number
        else:
            run.answer_out_of_order(sequence)
        self._count -= number
        if run.low < run.end:
            return number
        # That was the last message of the run.
        run.client.runs.discard(run)
        if run.end - run.first == 1:
            del self.singles[run.first]
        else:
            del self.longer[run]
            self._unregister(run)
        self._dead += 1
        if self._dead > 64 and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].low < entry[2].end]
            heapify(self._heap)
            self._dead = 0
        return number

    def _unregister(self, run: Run) -> None:
        if not run.is_registered:
            self._latest.remove(run)
            return
        blocks, touched = self._blocks_of(run)
        for block in touched:
            touching = blocks[block]
            if len(touching) == 1:
                del blocks[block]
            else:
                touching.remove(run)

    def count_below(self, sequence: int) -> int:
        """How many messages with smaller numbers are in flight."""
        return sum(run.count_below(sequence) for run in self.runs)

    def drop_below(self, sequence: int) -> Counter[Client]:
        """Take out every message with a smaller number. Gives how many each client had of them."""
        dropped: Counter[Client] = Counter()
        for run in [run for run in self.runs if run.low < sequence]:
            while run.low < min(run.end, sequence):
                dropped[run.client] += self.answer(run, run.low, sequence - run.low)
        return dropped

    def next_deadline(self) -> int | None:
        heap = self._heap
        while heap and heap[0][2].low == heap[0][2].end:
            heappop(heap)
            self._dead -= 1
        return heap[0][0] if heap else None

    def first_expired(self, now_ns: int) -> Run | None:
        """A run whose deadline has passed. It is given again until its messages have been taken
        out."""
        while (deadline := self.next_deadline()) is not None and deadline <= now_ns:
            run = self._heap[0][2]
            if run.deadline_ns <= now_ns:
                return run
            # TOUCH has moved the deadline.
            heappop(self._heap)
            heappush(self._heap, (run.deadline_ns, next(_order), run))
        return None

    def clear(self) -> None:
        for run in self.runs:
            run.low = run.end
            run.client.runs.discard(run)
        self.singles.clear()
        self.longer.clear()
        self._latest.clear()
        self._short.clear()
        self._long.clear()
        self._heap.clear()
        self._count = self._dead = 0
