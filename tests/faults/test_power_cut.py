"""After a power cut at any moment the promises of docs/guarantees.md hold."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.power_cut import DURABILITIES, Life, campaign, drop, violations
from tests.support.power_cut import STRICT


@pytest.mark.parametrize("durability", DURABILITIES)
def test_the_guarantees_hold_after_a_power_cut(tmp_path: Path, durability: str) -> None:
    outcomes = [*campaign(tmp_path, durability, 0, lives=6, cuts=30)]
    assert len(outcomes) == 180
    assert [line for lines in outcomes for line in lines] == []


def test_no_id_is_used_twice_after_a_cut_before_the_first_sync_of_a_run(tmp_path: Path) -> None:
    """The disk may then show nothing of the run, and a clean stop of the one before."""
    life = Life(tmp_path / "life", "os", random.Random(1))
    life.create_channel()
    life.publish()
    life.stop_and_start()
    before = len(life.facts)
    fresh: set[bytes] = set()
    while not fresh & {one.body for one in life.seen}:
        life.publish()
        life.consume()
        fresh = {body for fact in life.facts[before:] if fact.kind == "publish" for body in fact.bodies}
    for seed in range(40):
        chance, target = random.Random(seed), tmp_path / str(seed)
        assert [*violations(life, life.files.now(), STRICT, chance, target)] == []
    drop(life.broker)
