"""What is in flight on a channel: a dictionary by message id, a heap of deadlines by delivery.

Consecutive messages delivered together share one Run, so the heap holds deliveries, not messages. Nothing
here is linear in what is in flight: an answered run stays in the heap until the heap is half dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from nsparq.broker.client import Client
from nsparq.storage.batch import Timestamps

_order = count()


class Run:
    """Messages with ids from `first` to before `end`, sent to one client in one go."""

    __slots__ = (
        "attempts",
        "client",
        "deadline_ns",
        "delivered_ns",
        "end",
        "first",
        "remaining",
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
        self.delivered_ns = now_ns
        self.deadline_ns = deadline_ns
        self.attempts = attempts
        self.remaining = end - first
        """Messages not answered yet."""
        self.timestamps_ns = timestamps_ns
        """When they were published: one time for all, or one each."""

    def timestamp_of(self, message_id: int) -> int:
        stamps = self.timestamps_ns
        return stamps if isinstance(stamps, int) else int(stamps[message_id - self.first])


class InFlight:
    """All unanswered deliveries of a channel."""

    def __init__(self) -> None:
        self.runs: dict[int, Run] = {}
        """By message id."""
        self._heap: list[tuple[int, int, Run]] = []
        self._dead = 0

    def __len__(self) -> int:
        return len(self.runs)

    def add(self, run: Run) -> None:
        if run.remaining == 1:
            self.runs[run.first] = run
        else:
            self.runs.update(dict.fromkeys(range(run.first, run.end), run))
        heappush(self._heap, (run.deadline_ns, next(_order), run))
        run.client.runs.add(run)

    def settle(self, run: Run) -> None:
        """Call when the last message of `run` has been answered."""
        run.client.runs.discard(run)
        self._dead += 1
        if self._dead > 64 and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].remaining]
            heapify(self._heap)
            self._dead = 0

    def take(self, message_id: int) -> Run:
        """Remove one message that is in flight."""
        run = self.runs.pop(message_id)
        run.remaining -= 1
        if not run.remaining:
            self.settle(run)
        return run

    def unanswered(self, run: Run) -> Iterator[int]:
        """The ids of a run that are still in flight with it."""
        runs = self.runs
        return (message_id for message_id in range(run.first, run.end) if runs.get(message_id) is run)

    def next_deadline(self) -> int | None:
        heap = self._heap
        while heap and not heap[0][2].remaining:
            heappop(heap)
            self._dead -= 1
        return heap[0][0] if heap else None

    def pop_expired(self, now_ns: int) -> Run | None:
        """A run whose deadline has passed; it stays in flight until its messages are taken."""
        while (deadline := self.next_deadline()) is not None and deadline <= now_ns:
            run = self._heap[0][2]
            heappop(self._heap)
            if run.deadline_ns <= now_ns:
                # Its messages are taken next, and the last of them counts the run as dead in the heap.
                self._dead -= 1
                return run
            heappush(self._heap, (run.deadline_ns, next(_order), run))
        return None

    def push_back(self, run: Run) -> None:
        """A popped run of which not everything was taken."""
        heappush(self._heap, (run.deadline_ns, next(_order), run))
        self._dead += 1

    def clear(self) -> None:
        for run in set(self.runs.values()):
            run.remaining = 0
            run.client.runs.discard(run)
        self.runs.clear()
        self._heap.clear()
        self._dead = 0
