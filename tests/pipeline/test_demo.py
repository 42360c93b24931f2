"""A small run of the demo: the whole stack, with Spark in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.forked_workers import python_for_spark
from tests.support.spark import FAST_JAVA
from tests.up.support import SOURCE, group

pytest.importorskip("pyspark")

DONE_S = 220.0


def environment(temporary: Path) -> dict[str, str]:
    """One directory for temporary files, to see that none is left, and a Java that starts fast."""
    temporary.mkdir()
    return {"TMPDIR": str(temporary), "JDK_JAVA_OPTIONS": FAST_JAVA}


@pytest.fixture
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of Spark, which starts fast too."""
    with python_for_spark(tmp_path_factory.mktemp("python")) as path:
        yield path


def test_the_demo_ends_well_and_leaves_a_picture_and_nothing_else(tmp_path: Path, python: Path) -> None:
    variables = {**environment(tmp_path / "tmp"), "PYSPARK_PYTHON": str(python)}
    command = [sys.executable, "-m", "nsparq.demo", "--events=5000", "--rate=0", "--results=results"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **variables},
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=DONE_S)
        finally:
            # Its children go with it.
            process.kill()
    assert process.returncode == 0, said
    assert "OK: every message is in exactly one place, and every event is counted exactly once." in said
    assert "5,001" in said
    root = ElementTree.fromstring((tmp_path / "results" / "demo.svg").read_text())
    assert root.tag.endswith("svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "tmp"]
    assert not list((tmp_path / "tmp").glob("nsparq-*"))
    assert not group(process.pid)
