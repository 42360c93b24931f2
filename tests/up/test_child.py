"""A child process and its own children do not outlive the parent, even if they ignore SIGTERM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nsparq.up.child import GRACE_VARIABLE
from tests.support import wait_until
from tests.support.polling import DEADLINE
from tests.up.support import SOURCE, group

MODULE = """
import signal, subprocess, sys, time

def main(arguments):
    if arguments == ["stubborn"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "60"])
    if arguments == ["curious"]:
        print(repr(sys.stdin.read()), flush=True)
        return 3
    print("running", flush=True)
    time.sleep(60)
"""


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    (directory / "some_daemon.py").write_text(MODULE)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "nsparq.up.child", "some_daemon", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}:{directory}", GRACE_VARIABLE: "0.2"},
    )


def test_a_child_stops_when_its_parent_dies(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "running\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(DEADLINE) == -15


def test_a_child_that_does_not_stop_is_killed_with_its_children(tmp_path: Path) -> None:
    with start(tmp_path, "stubborn") as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "running\n"
        assert len(group(process.pid)) == 2
        process.stdin.close()
        assert process.wait(DEADLINE) == -9
        wait_until(lambda: not group(process.pid), what="the grandchild is gone")


def test_its_standard_input_is_empty_and_its_status_is_that_of_the_daemon(tmp_path: Path) -> None:
    with start(tmp_path, "curious") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "''\n"
        assert process.wait(DEADLINE) == 3
