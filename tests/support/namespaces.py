"""Programs in namespaces of their own, as in a container: a network that nobody else uses, other
host names, and process number 1.

    with Pod(["nsqd"]) as pod, pod.start(["nsqd"], cwd=folder) as container:
        container.run(["curl", "http://nsqd:4151/ping"])
        assert container.stop() == 0
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.support.polling import DEADLINE, wait_until

LAUNCHER = Path(__file__).with_name("own_network.py")
UNSHARE = ("unshare", "--map-root-user", "--net", "--uts", "--mount")


@cache
def are_possible() -> bool:
    return bool(shutil.which("unshare") and shutil.which("nsenter")) and not subprocess.call(
        [*UNSHARE, "--pid", "--fork", "--mount-proc", "true"], stderr=subprocess.DEVNULL
    )


def in_own_network(*command: str, hosts: str = "") -> list[str]:
    """The command with a loopback interface of its own, and with this file as /etc/hosts."""
    return [*UNSHARE, sys.executable, "-P", str(LAUNCHER), hosts, *command]


class Pod:
    """A network of its own, in which containers run. A pause process keeps it."""

    def __init__(self, hosts: Iterable[str]) -> None:
        """`hosts` are names of this machine."""
        self._hosts = tempfile.NamedTemporaryFile("w", suffix=".hosts", delete=False)
        self._hosts.write("127.0.0.1 localhost " + " ".join(hosts) + "\n")
        self._hosts.close()
        self._pause = subprocess.Popen(
            in_own_network("sh", "-c", "echo; read line", hosts=self._hosts.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._pause.stdout
        assert self._pause.stdout.readline() == b"\n"

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *_: object) -> None:
        self._pause.communicate(timeout=DEADLINE)
        os.unlink(self._hosts.name)

    def start(self, command: Sequence[str], cwd: Path, **variables: str) -> Container:
        """The command as process 1, in this folder."""
        unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        return Container(_enter(self._pause.pid, "--net", cwd=cwd), [*unshare, *command], cwd, variables)


class Container:
    """A program that is process 1."""

    def __init__(
        self, enter: Sequence[str], command: Sequence[str], cwd: Path, variables: Mapping[str, str]
    ) -> None:
        self._cwd = cwd
        self._log = tempfile.TemporaryFile()
        self._environment = {**os.environ, **variables}
        # nsenter becomes unshare, which starts the program and returns its status.
        self._unshare = subprocess.Popen(
            [*enter, *command], stdout=self._log, stderr=subprocess.STDOUT, env=self._environment
        )
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self._first = int(
            wait_until(lambda: self._unshare.poll() is not None or children.read_text().strip())
        )
        assert self._unshare.poll() is None, self.log()

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        if self._unshare.poll() is None:
            # Its process 1 dies with it.
            self._unshare.kill()
            self._unshare.wait()
        self._log.close()

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """A second program in the container, as `docker exec` runs it."""
        return subprocess.run(
            [*_enter(self._first, "--net", "--pid", cwd=self._cwd), *command],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env=self._environment,
        )

    def stop(self) -> int:
        """SIGTERM to process 1. Returns its exit status."""
        os.kill(self._first, signal.SIGTERM)
        return self._unshare.wait(DEADLINE)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


def _enter(pid: int, *kinds: str, cwd: Path) -> list[str]:
    # Another mount namespace begins in its root.
    target = ["--target", str(pid), "--user", "--mount", *kinds, "--preserve-credentials"]
    return ["nsenter", *target, "env", f"--chdir={cwd}"]
