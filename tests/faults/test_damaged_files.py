"""One damaged file in a data path, at random: see tests.soak.corruption, of which this is a short run."""

from __future__ import annotations

from pathlib import Path

from tests.soak.corruption import run


def test_no_damaged_file_costs_an_undamaged_message_or_goes_uncounted(tmp_path: Path) -> None:
    outcomes = run(tmp_path, seed=15, trials=60)
    assert sum(outcome.damaged for outcome in outcomes.values()) > 0
    assert {number: (o.what, o.problems) for number, o in outcomes.items() if o.problems} == {}
