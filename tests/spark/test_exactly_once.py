"""A Spark cluster on which processes of each kind are killed while queries run: nsq -> Spark -> Parquet and
nsq -> Spark -> nsq. A short run of tests.soak.exactly_once, which knows more."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyspark

from tests.soak.exactly_once import Options, Run

PACKAGES = Path(pyspark.__file__).parents[1]
VICTIMS = ("driver", "executor", "nsqd", "nsqlookupd")


@pytest.fixture
def python_without_nsparq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tasks are run by has all that is installed, but for nsparq: that has to be sent there."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={PACKAGES}:$PYTHONPATH exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    tried = subprocess.run([python, "-c", "import pyspark; import nsparq"], capture_output=True, text=True)
    assert "No module named 'nsparq'" in tried.stderr
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("python_without_nsparq")
def test_every_message_is_in_the_result_once_whoever_is_killed(tmp_path: Path) -> None:
    options = Options(
        sinks=("parquet", "topic"),
        kills=len(VICTIMS),
        victims=VICTIMS,
        executors=1,
        rate=400.0,
        waits_s=(0.0, 0.3),
        outages_s=(0.5, 1.0),
        # The driver, which takes longest to come back, and whoever comes before or after it.
        hurry=0.5,
        progress=1,
        seed=random.randrange(1 << 32),
    )
    report = Run(options, tmp_path, print).run()
    assert report.is_exact, f"{report}\nseed {options.seed}"
    assert set(report.kills) == set(VICTIMS)
    assert not report.left_over
