"""`nsparq up` as a process, as in a terminal.

Up(directory, "--nsqd=2")       a context manager: starts it on free ports; kills what is left
    wait_until_ready()          then address("nsqd-1", "tcp"), address("nsqadmin", "http") …
    children()                  pids of its child processes
    child("nsqd-1")             the one with this in its command line
    out() err()                 what was printed so far
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import DEADLINE, wait_until

SOURCE = Path(__file__).resolve().parents[2] / "src"


def is_alive(pid: int) -> bool:
    """A process that has ended and waits to be noticed is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def group(pid: int) -> list[int]:
    """The living processes of a session: a child leads one, and its grandchildren are in it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == pid and is_alive(int(entry.name)):
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return found


class Up:
    module = "nsparq.tools.main"
    command: tuple[str, ...] = ("up",)

    def __init__(self, directory: Path, *arguments: str, ports: str = "--port-base=0", **more: str) -> None:
        self.directory = directory
        self._out, self._err = directory / "out", directory / "err"
        self._seen: set[int] = set()
        paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", self.module, *self.command, ports, *arguments],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more},
            )

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        left = [pid for child in {*self._seen, *self.children()} for pid in group(child)]
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        sys.stderr.write(self.err()[-10_000:])

    def out(self) -> str:
        return self._out.read_text()

    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, fact: Callable[[], Any], what: str, timeout: float = DEADLINE) -> None:
        wait_until(lambda: fact() or self.process.poll() is not None, timeout, what=what)
        assert fact(), f"ended with {self.process.returncode} before: {what}\n{self.err()}"

    def wait_until_ready(self, timeout: float = DEADLINE) -> None:
        self.wait_for(lambda: "Ctrl-C stops it." in self.out(), "it is ready", timeout)
        self.children()

    def wait(self, timeout: float = DEADLINE) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.err()}") from None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def address(self, name: str, kind: str) -> str:
        """`host:port`, as printed."""
        found = re.search(rf"(?m)^  {name} .*\b{kind} +(?:http://)?([\w.]+:\d+)", self.out())
        assert found is not None, self.out()
        return found[1]

    def children(self) -> set[int]:
        found = set()
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            try:
                found |= set(map(int, task.read_text().split()))
            except FileNotFoundError:
                continue
        self._seen |= found
        return {pid for pid in found if is_alive(pid)}

    def child(self, text: str) -> int:
        """The pid of the child with this in its command line."""
        (found,) = (pid for pid in self.children() if text in Path(f"/proc/{pid}/cmdline").read_text())
        return found


def wait_until_gone(pids: set[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), what=f"{pids} are gone")
