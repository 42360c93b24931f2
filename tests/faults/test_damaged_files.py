"""A short run of tests.soak.corruption: one file of a data path is damaged at random."""

from __future__ import annotations

from pathlib import Path

from tests.soak.corruption import run


def test_a_damaged_file_loses_no_undamaged_message_and_is_counted(tmp_path: Path) -> None:
    outcomes = run(tmp_path, seed=15, trials=60)
    assert sum(outcome.damaged for outcome in outcomes.values()) > 0
    assert {number: (o.what, o.problems) for number, o in outcomes.items() if o.problems} == {}
