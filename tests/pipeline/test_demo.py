"""The demo and `make up`, small, as they are run: with Spark in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from xml.etree import ElementTree

import pytest

from tests.support.spark import FAST_JAVA
from tests.up.support import SOURCE, Up, group, wait_until_gone

pytest.importorskip("pyspark")

pytestmark = pytest.mark.timeout(240)
READY_S, DONE_S = 120.0, 220.0


def environment(temporary: Path) -> dict[str, str]:
    """All temporary files in one place, to see that none is left; and a Java that starts fast."""
    temporary.mkdir()
    return {"TMPDIR": str(temporary), "JDK_JAVA_OPTIONS": FAST_JAVA}


def test_the_demo_ends_well_and_leaves_a_picture_and_nothing_else(tmp_path: Path) -> None:
    variables = environment(tmp_path / "tmp")
    command = [sys.executable, "-m", "nsparq.demo", "--events=20000", "--rate=0", "--results=results"]
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
    assert "Every message is in exactly one place, and every event was counted exactly once." in said
    assert "20,001" in said
    root = ElementTree.fromstring((tmp_path / "results" / "demo.svg").read_text())
    assert root.tag.endswith("svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "tmp"]
    assert not list((tmp_path / "tmp").glob("nsparq-*"))
    assert not group(process.pid)


class Live(Up):
    module = "nsparq.demo"
    command = ("up",)


def test_the_pipelines_of_a_stack_are_on_the_page_and_do_not_outlive_it(tmp_path: Path) -> None:
    with Live(tmp_path, **environment(tmp_path / "tmp")) as up:
        up.wait_until_ready(READY_S)

        def pipelines() -> Any:
            with urlopen(f"http://{up.address('nsqadmin', 'http')}/api/pipelines", timeout=5) as answer:
                return json.loads(answer.read())["pipelines"]

        def are_running() -> bool:
            return [one.get("state") for one in pipelines()] == ["running", "running"]

        up.wait_for(are_running, "both pipelines are on the page", 30.0)
        runner = up.child("nsparq.up.pipelines")
        processes = {pid for child in up.children() for pid in group(child)}
        assert len(group(runner)) >= 2, "a JVM, and who started it"
        up.signal(signal.SIGKILL)
        up.wait()
        wait_until_gone(processes, 30.0)
