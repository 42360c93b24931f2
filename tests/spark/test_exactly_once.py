"""A Spark cluster on which processes of each kind are killed while queries run: nsq -> Spark ->
Parquet and nsq -> Spark -> nsq. A short run of tests.soak.exactly_once, which knows more."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyspark

from tests.soak.exactly_once import Options, Run
from tests.support.forked_workers import python_for_spark

PACKAGES = Path(pyspark.__file__).parents[1]
VICTIMS = ("driver", "executor", "nsqd", "nsqlookupd")


@pytest.fixture
def python_without_nsparq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tasks' Python has everything but nsparq, which has to be sent there."""
    plain = tmp_path / "plain-python"
    plain.write_text(f'#!/bin/sh\nPYTHONPATH={PACKAGES}:$PYTHONPATH exec {sys.executable} -S "$@"\n')
    plain.chmod(0o755)
    with python_for_spark(tmp_path, str(plain)) as python:
        for command in (["-c", "import pyspark; import nsparq"], ["-m", "nsparq"]):
            tried = subprocess.run([python, *command], capture_output=True, text=True)
            assert re.search("No module named '?nsparq", tried.stderr)
        monkeypatch.setenv("PYSPARK_PYTHON", str(python))
        yield


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
