"""Messages in flight are kept by delivery rather than by message: consecutive messages delivered
together are one Run.

Clients mostly answer them in order, so a run notes what is answered as "everything below `low`, and
these few above". A run of several messages is looked up among the latest few, where it mostly is,
and then by the blocks of sequence numbers that it touches. No step takes time proportional to the
messages in flight: delivering and answering a run in order costs the same for one message as for a
thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Final

from nsparq.broker.client import Client
from nsparq.storage.batch import Timestamps

_SHORT_BITS: Final = 6
"""Short runs are registered for each block of 64 numbers that they touch, so that a block has few
runs."""
_LONG_BITS: Final = 11
"""Long runs are registered for each block of 2048, so that a run has few entries."""
_LONG: Final = 256
"""A run of at least this many messages is long."""
_LATEST: Final = 8
"""The latest runs, this many, are not registered: most are answered before others come."""


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


class LongerRuns(dict[Run, None]):
    """Runs of several messages, in the order of their delivery."""

    def __init__(self) -> None:
        super().__init__()
        self._latest: list[Run] = []
        self._short: dict[int, list[Run]] = {}
        self._long: dict[int, list[Run]] = {}
        """All but the latest, by each block of numbers that they touch."""

    def add(self, run: Run) -> None:
        self[run] = None
        latest = self._latest
        latest.append(run)
        if len(latest) > _LATEST:
            run = latest.pop(0)
            blocks, touched = self._blocks_of(run)
            for block in touched:
                touching = blocks.get(block)
                if touching is None:
                    blocks[block] = [run]
                else:
                    touching.append(run)

    def _blocks_of(self, run: Run) -> tuple[dict[int, list[Run]], range]:
        """Where a run is registered."""
        last = run.end - 1
        if run.end - run.first >= _LONG:
            return self._long, range(run.first >> _LONG_BITS, (last >> _LONG_BITS) + 1)
        return self._short, range(run.first >> _SHORT_BITS, (last >> _SHORT_BITS) + 1)

    def find(self, sequence: int) -> Run | None:
        """The run that holds a message."""
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

    def remove(self, run: Run) -> None:
        del self[run]
        if run in self._latest:
            self._latest.remove(run)
            return
        blocks, touched = self._blocks_of(run)
        for block in touched:
            touching = blocks[block]
            if len(touching) == 1:
                del blocks[block]
            else:
                touching.remove(run)

    def clear(self) -> None:
        super().clear()
        self._latest.clear()
        self._short.clear()
        self._long.clear()
