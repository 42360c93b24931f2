"""What is in flight on a channel, by delivery rather than by message.

Consecutive messages delivered together are one Run, and clients mostly answer them in order, so a run knows
what is answered as "everything below `low`, and these few above". A run is looked for among the latest few,
where it mostly is, and then through the blocks of sequence numbers that it touches. Nothing here is linear in
what is in flight: delivering and answering a run in order costs the same for one message as for a thousand,
and an answered run stays in the heap of deadlines until the heap is half dead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, count, filterfalse
from operator import attrgetter

from nsparq.broker.client import Client
from nsparq.storage.batch import Timestamps

_SHORT_BITS = 6
"""Short runs are registered for each 64 numbers that they touch, so that they have few neighbours."""
_LONG_BITS = 11
"""Long ones for each 2048, so that they have few entries."""
_LONG = 256
"""From so many messages on a run is long."""
_LATEST = 8
"""So many runs are not registered at all: most are answered before others come."""

_order = count()


class Run:
    """Messages numbered from `first` to before `end`, sent to one client in one go."""

    __slots__ = (
        "attempts",
        "client",
        "deadline_ns",
        "delivered_ns",
        "end",
        "first",
        "holes",
        "is_registered",
        "low",
        "timestamps_ns",
    )

    def __init__(
        self,
        client: Client,
        first: int,
        end: int,
        now_ns: int,
        deadline_ns: int,
        attempts: int,
        timestamps_ns: Timestamps,
    ) -> None:
        self.client = client
        self.first = first
        self.end = end
        self.low = first
        """Everything before this is answered."""
        self.holes: set[int] = set()
        """Those beyond `low` that are answered."""
        self.is_registered = False
        self.delivered_ns = now_ns
        self.deadline_ns = deadline_ns
        self.attempts = attempts
        self.timestamps_ns = timestamps_ns
        """When they were published: one time for all, or one each. 0 where nobody wants to know."""

    def holds(self, sequence: int) -> bool:
        """Whether the message is part of this run and unanswered."""
        return self.low <= sequence < self.end and sequence not in self.holes

    def answer(self, sequence: int, most: int) -> int:
        """Count a held message as answered, and up to `most` with those behind it. Gives the number."""
        if sequence != self.low:
            self.holes.add(sequence)
            return 1
        if self.holes:
            self.low += 1
            while self.low in self.holes:
                self.holes.remove(self.low)
                self.low += 1
            return 1
        number = min(most, self.end - sequence)
        self.low += number
        return number

    def unanswered(self) -> Iterator[int]:
        """No Python runs for each message: there may be very many."""
        held = range(self.low, self.end)
        return filterfalse(self.holes.__contains__, held) if self.holes else iter(held)

    def count_below(self, sequence: int) -> int:
        """How many of those with smaller numbers are unanswered."""
        end = min(self.end, sequence)
        if end == self.end or not self.holes:
            return max(0, end - self.low) - len(self.holes)
        return max(0, end - self.low) - sum(hole < end for hole in self.holes)

    def answer_below(self, sequence: int) -> int:
        """Count everything with a smaller number as answered. Gives the number of those that were not."""
        number = self.count_below(sequence)
        self.low = max(self.low, min(self.end, sequence))
        self.holes = {hole for hole in self.holes if hole >= self.low}
        while self.low in self.holes:
            self.holes.remove(self.low)
            self.low += 1
        return number

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
        """Runs of several, in the order of their delivery, like the others: they are sent again in that order
        after a restart."""
        self._latest: list[Run] = []
        """The latest few of these."""
        self._short: dict[int, list[Run]] = {}
        self._long: dict[int, list[Run]] = {}
        """The others of them, by each block of numbers that they touch."""
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
        """Take out a message that `run` holds, and up to `most` with those behind it. Gives the number."""
        number = run.answer(sequence, most)
        self._count -= number
        if run.low == run.end:
            self._settle(run)
        return number

    def _settle(self, run: Run) -> None:
        """The last message of the run has been answered."""
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
            number = run.answer_below(sequence)
            dropped[run.client] += number
            self._count -= number
            if run.low == run.end:
                self._settle(run)
        return dropped

    def next_deadline(self) -> int | None:
        heap = self._heap
        while heap and heap[0][2].low == heap[0][2].end:
            heappop(heap)
            self._dead -= 1
        return heap[0][0] if heap else None

    def first_expired(self, now_ns: int) -> Run | None:
        """A run whose deadline has passed; it comes up again until its messages have been taken out."""
        while (deadline := self.next_deadline()) is not None and deadline <= now_ns:
            run = self._heap[0][2]
            if run.deadline_ns <= now_ns:
                return run
            # Touched: the entry was early.
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
