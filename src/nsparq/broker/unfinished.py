"""The messages of a channel that its cursor has passed and that are not finished.

Each is in exactly one place: in flight (sent and not answered), requeued (waiting to be sent
again), deferred (not due yet), given up (about to become a dead letter), redriven (was a dead
letter, and waits for the checkpoint that says so), or parked (waiting for an earlier message with
the same key: see broker.ordering). Messages are named by their sequence numbers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nsparq.broker.deferred import Deferred
from nsparq.broker.delivery import InFlight

if TYPE_CHECKING:
    from nsparq.broker.client import Client
    from nsparq.broker.dead_letters import GivenUp
    from nsparq.broker.ordering import KeyQueues


class Exceptions(NamedTuple):
    """Unfinished messages as they are kept on disk, in the order in which they will be sent
    again."""

    sequences: np.ndarray
    attempts: np.ndarray
    due_ns: np.ndarray
    """Monotonic time; 0 for messages that are not deferred."""
    failures: np.ndarray
    """Failed attempts, where a policy counts them."""


class Unfinished:
    """All unfinished messages of one channel."""

    def __init__(self) -> None:
        self.in_flight = InFlight()
        self.requeued: deque[int] = deque()
        """In the order in which they came back."""
        self.deferred = Deferred()
        self.given_up: dict[int, GivenUp] = {}
        self.redriven: list[int] = []
        self.parked: dict[int, None] = {}
        """In the order in which they were parked."""
        self.keys: KeyQueues | None = None
        """For a channel that is ordered by keys."""
        self.failures: dict[int, int] = {}
        """Failed attempts of any of these, where a policy counts them."""
        self._attempts: dict[int, int] = {}
        """Deliveries so far of messages that are requeued, deferred or parked."""

    def __iter__(self) -> Iterator[int]:
        return chain(
            self.in_flight, self.requeued, self.deferred.due_ns, self.given_up, self.redriven, self.parked
        )

    def attempts_of(self, sequence: int) -> int:
        """Deliveries so far of a message that is requeued, deferred or parked."""
        return self._attempts.get(sequence, 0)

    def lowest(self) -> int | None:
        lows = (
            self.in_flight.lowest(), self.deferred.lowest(),
            min(self.requeued, default=None), min(self.given_up, default=None),
            min(self.redriven, default=None), min(self.parked, default=None),
        )  # fmt: skip
        return min((low for low in lows if low is not None), default=None)

    # changes

    def requeue(self, sequences: Iterable[int], attempts: int = 0) -> None:
        """Have messages sent again. `attempts` is how often each has been delivered."""
        sequences = [*sequences]
        if attempts:
            for sequence in sequences:
                self._attempts[sequence] = attempts
        self.requeued.extend(sequences)

    def defer(self, sequence: int, due_ns: int, attempts: int = 0) -> None:
        if attempts:
            self._attempts[sequence] = attempts
        self.deferred.add(sequence, due_ns)

    def requeue_due(self, now_ns: int) -> bool:
        """Requeue a message that is due. False if there is none."""
        sequence = self.deferred.pop_due(now_ns)
        if sequence is None:
            return False
        self.requeued.append(sequence)
        return True

    def release_redriven(self) -> None:
        """A checkpoint says which dead letters were put back: their messages may be sent."""
        self.requeued.extend(self.redriven)
        self.redriven.clear()

    def take_requeued(self) -> tuple[int, int]:
        """Take out the message to be sent again next; its number, and its deliveries so far."""
        sequence = self.requeued.popleft()
        return sequence, self._attempts.pop(sequence, 0)

    def park(self, sequence: int, attempts: int) -> None:
        """A message that was taken out has to wait for its key."""
        if attempts:
            self._attempts[sequence] = attempts
        self.parked[sequence] = None

    def unpark(self, sequence: int) -> None:
        del self.parked[sequence]
        self.requeued.append(sequence)

    def forget(self, sequence: int) -> None:
        """A message that was taken out is not sent again."""
        self.failures.pop(sequence, None)
        if self.keys is not None:
            self.keys.leave(sequence)

    def discard(self, sequences: set[int]) -> set[int]:
        """Drop waiting messages. Gives those that are not among them."""
        found = sequences & {*self.requeued, *self.deferred.due_ns, *self.given_up, *self.parked}
        self.requeued = deque(one for one in self.requeued if one not in found)
        for sequence in found:
            self.deferred.discard(sequence)
            self.given_up.pop(sequence, None)
            self.parked.pop(sequence, None)
            self._attempts.pop(sequence, None)
        for sequence in found:
            self.forget(sequence)
        return sequences - found

    def drop_waiting_below(self, limit: int) -> int:
        """Drop messages below a sequence number that are not in flight. Gives how many."""
        dropped = self.deferred.drop_below(limit)
        for waiting in (self.given_up, self.parked):
            below = [one for one in waiting if one < limit]
            for sequence in below:
                del waiting[sequence]
            dropped += below
        if min(self.redriven, default=limit) < limit:
            dropped += [one for one in self.redriven if one < limit]
            self.redriven = [one for one in self.redriven if one >= limit]
        if min(self.requeued, default=limit) < limit:
            dropped += [one for one in self.requeued if one < limit]
            self.requeued = deque(one for one in self.requeued if one >= limit)
        for sequence in dropped:
            self._attempts.pop(sequence, None)
            if self.keys is not None:
                self.keys.leave(sequence)
        if self.failures:
            self.failures = {one: number for one, number in self.failures.items() if one >= limit}
        return len(dropped)

    def drop_oldest(self, count: int) -> int:
        """Drop up to `count` messages that wait to be sent. Gives how many."""
        dropped = {*islice(self.requeued, count)}
        if len(dropped) < count and self.parked:
            dropped.update(nsmallest(count - len(dropped), self.parked))
        if dropped:
            self.discard(dropped)
        return len(dropped)

    def drop_below(self, limit: int) -> Counter[Client]:
        """Drop all messages below a sequence number. Gives how many each client had in flight."""
        self.drop_waiting_below(limit)
        dropped = self.in_flight.drop_below(limit)
        if self.keys is not None:
            self.keys.leave_below(limit)
        return dropped

    def count_below(self, sequence: int) -> int:
        waiting = chain(self.requeued, self.deferred.due_ns, self.given_up, self.redriven, self.parked)
        return self.in_flight.count_below(sequence) + sum(1 for one in waiting if one < sequence)

    def clear(self) -> None:
        self.in_flight.clear()
        self.requeued.clear()
        self.deferred.clear()
        self.given_up.clear()
        self.redriven.clear()
        self.parked.clear()
        if self.keys is not None:
            self.keys.clear()
        self.failures.clear()
        self._attempts.clear()

    # on disk

    def capture(self) -> Callable[[], Exceptions]:
        """Copies what is needed, quickly, and gives a function that makes arrays of it in a
        thread."""
        singles = self.in_flight.singles.copy()
        longer = [(run.attempts, [*run.unanswered()]) for run in self.in_flight.longer]
        requeued = [*self.requeued, *self.redriven, *self.given_up, *self.parked]
        if self.keys is not None:
            requeued = self.keys.in_order(requeued)
        attempts = self._attempts.copy()
        attempts.update((sequence, one.attempts) for sequence, one in self.given_up.items())
        failures = self.failures.copy()
        deferred, due_ns = [*self.deferred.due_ns], [*self.deferred.due_ns.values()]

        def build() -> Exceptions:
            waiting = requeued + deferred
            flying = [*singles, *chain.from_iterable(sequences for _, sequences in longer)]
            numbers = [run.attempts for run in singles.values()]
            numbers += [number for number, sequences in longer for _ in sequences]
            sequences = flying + waiting
            # After a redrive very many wait, none of them with attempts.
            tried = np.zeros(len(sequences), np.uint16)
            tried[: len(flying)] = numbers
            if attempts:
                tried[len(flying) :] = [*map(attempts.get, waiting, repeat(0))]
            due = np.zeros(len(sequences), np.int64)
            due[len(sequences) - len(due_ns) :] = due_ns
            failed = np.array([failures.get(one, 0) for one in sequences] if failures else (), np.uint16)
            return Exceptions(np.fromiter(sequences, np.uint64, len(sequences)), tried, due, failed)

        return build
