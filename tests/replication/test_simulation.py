"""Clusters under a seeded scheduler keep their promises, and planted mistakes are found.

`python -m tests.soak.simulation --seeds 10000` runs more of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from nsparq.replication.acknowledging import Acknowledging, Done
from nsparq.replication.changes import Change, Kind, decode_changes
from nsparq.replication.coordinator import Found, State
from nsparq.replication.follower import Follower
from nsparq.replication.joining import Joining, WaitingChanges
from nsparq.replication.mark import read_mark
from nsparq.replication.membership import Membership
from nsparq.replication.node import Node
from nsparq.replication.snapshot import Snapshot
from tests.replication.sim_parts import Record
from tests.replication.simulation import Violation, run_seed

SEEDS = 50
"""In each of the two tests that look for mistakes of our own."""


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """It would have thousands of lines, and pytest keeps them."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", [0, SEEDS])
def test_the_promises_hold_whatever_fails(tmp_path: Path, first: int) -> None:
    acknowledged = takeovers = commits = 0
    faults: Counter[str] = Counter()
    for seed in range(first, first + SEEDS):
        try:
            outcome = run_seed(seed, tmp_path / str(seed))
        except Violation as violation:
            raise AssertionError(f"seed {seed}") from violation
        acknowledged += outcome.acknowledged
        takeovers += outcome.takeovers
        commits += outcome.commits
        faults += outcome.faults
    # The simulation does something.
    assert acknowledged > 20 * SEEDS and takeovers > SEEDS / 2 and commits > SEEDS / 4 and len(faults) == 7


# planted mistakes


def acknowledge_at_once(self: Acknowledging, done: Done) -> None:
    done(self._error)


compare_and_set = Record.compare_and_set


def set_without_comparing(self: Record, version: int, wanted: Membership) -> Found | None:
    """But not to take over."""
    if self.found is not None and wanted.epoch <= self.found.membership.epoch:
        version = self.found.version
    return compare_and_set(self, version, wanted)


should_take_over = Node._should_take_over


def elect_from_a_stale_set(self: Node, state: State) -> bool:
    """Nodes that have left the set are still in it."""
    mark = read_mark(self._files, self.settings.root)
    if state.found is not None and mark is not None and mark.copies:
        copies = {**dict.fromkeys("abc", ""), self.settings.name: mark.copies[0]}
        state = State(Found(state.found.membership.with_copies(copies), state.found.version), state.alive)
    return should_take_over(self, state)


def keep_all(self: Joining, name: str, size: int) -> None:
    self._names.add(name)


snapshot_changes = Snapshot.changes


def tear_the_last_write(self: Snapshot, inventory: Any) -> Iterator[Change]:
    for change in snapshot_changes(self, inventory):
        if change.kind is Kind.WRITE and len(change.data) > 100:
            change = change._replace(data=change.data[:-50])
        yield change


def apply_waiting_without_writes(self: Follower, waiting: WaitingChanges) -> None:
    """The snapshot is taken for newer than it is."""
    while not waiting.is_empty:
        first, data = waiting.take()
        changes = [*decode_changes(data)]
        assert self._applier is not None
        for number, change in enumerate(changes, first + 1):
            if change.kind is not Kind.WRITE:
                self._applier.apply(change, number)
        self.number += len(changes)


BUGS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "acknowledges before the follower wrote": [(Acknowledging, "when_safe", acknowledge_at_once)],
    "shrinks the set without compare-and-set": [(Record, "compare_and_set", set_without_comparing)],
    "elects from a stale set": [(Node, "_should_take_over", elect_from_a_stale_set)],
    "does not cut the tail": [(Joining, "keep", keep_all), (Joining, "remove_others", lambda self: None)],
    "a torn record at joining": [(Snapshot, "changes", tear_the_last_write)],
    "appending while the snapshot runs": [(Follower, "_apply_waiting", apply_waiting_without_writes)],
}
FIRST = {"does not cut the tail": 131}
"""Seeds near one that shows the mistake, to save time."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_mistake_is_found(tmp_path: Path, bug: str) -> None:
    with ExitStack() as stack:
        for owner, name, mistake in BUGS[bug]:
            stack.enter_context(patch.object(owner, name, mistake))
        with pytest.raises(Violation):
            for seed in range(FIRST.get(bug, 0), 1000):
                run_seed(seed, tmp_path / str(seed))
