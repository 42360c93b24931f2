"""nsq -> Spark -> Parquet and nsq -> Spark -> nsq while processes of each kind are killed: a short run of
tests.soak.exactly_once, which knows more kinds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from tests.soak.exactly_once import Options, Run

VICTIMS = ("driver", "executor", "nsqd", "nsqlookupd")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_message_is_in_the_result_once_whoever_is_killed(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    options = Options(
        sinks=("parquet", "topic"),
        kills=len(VICTIMS),
        victims=VICTIMS,
        workers=1,
        rate=400.0,
        waits_s=(0.0, 0.3),
        outages_s=(0.5, 1.0),
        hurry=0.3,
        progress=1,
        seed=seed,
    )
    report = Run(options, tmp_path, print).run()
    assert report.is_exact, f"{report}\nseed {seed}"
    assert set(report.kills) == set(VICTIMS)
    assert not report.left_over
