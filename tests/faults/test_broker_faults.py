"""A short run of tests.soak.broker_faults: one fault of each kind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.soak.broker_faults import FAULTS, Options, Run
from tests.support import REFERENCE


@pytest.mark.skipif(bool(REFERENCE), reason="the reference loses what it holds in memory")
def test_after_any_fault_nothing_is_lost_and_nothing_comes_twice(tmp_path: Path) -> None:
    options = Options(trials=len(FAULTS), waits_s=(0.0, 0.2), seed=random.randrange(1 << 32))
    report = Run(options, tmp_path, print).run()
    assert report.is_good, f"{report}\nseed {options.seed}"
    assert set(report.trials) == set(FAULTS)
