"""Starting, watching and ending the brokers under test. What they are is only known to their
command line."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from benchmarks.macro.wire import Address

LISTENING = re.compile(rb"TCP: listening on (\S+):(\d+)\s")
HTTP_LISTENING = re.compile(rb" HTTP: listening on (\S+):(\d+)\s")
OURS = f"{shlex.quote(sys.executable)} -m nsparq.server.main"
ANY_PORT = "127.0.0.1:0"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class BrokerFailed(Exception):
    """The broker did not start, or ended when it should not have."""


def expand_command(template: str, data: Path, extra: list[str]) -> list[str]:
    """The command line for one start, with NSQ's flag for each placeholder that the template does
    not use."""
    values = {"{data}": str(data), "{tcp}": ANY_PORT, "{http}": ANY_PORT}
    flags = {
        "{data}": "--data-path={data}",
        "{tcp}": "--tcp-address={tcp}",
        "{http}": "--http-address={http}",
    }
    words = shlex.split(template) + [flag for name, flag in flags.items() if name not in template]
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    return words + extra


def cpu_seconds(pid: int) -> float:
    """Processor time, its own and the system's for it, that a process has used so far."""
    # Linux: the clock of a process is made of its id. /proc has only hundredths of a second.
    return time.clock_gettime((~pid << 3) | 2)


class External:
    """A broker that somebody else runs: it has an address, and nothing else that we may touch."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class Spawned:
    """A broker process that is ours to start, measure and end; its data path goes with it."""

    def __init__(self, template: str, extra: list[str], parent: Path | None) -> None:
        self.template, self.extra = template, extra
        self.data = Path(tempfile.mkdtemp(prefix="bench-broker-", dir=parent))
        self.log = self.data / "stderr.log"
        self.address: Address = ("", 0)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Nothing of it is kept, so there is no point in a clean stop, which may have to write out a
        # queue.
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, timeout: float = 120.0) -> float:
        """Start, and give the seconds until it said that it listens."""
        storage = self.data / "data"
        storage.mkdir(exist_ok=True)
        command = expand_command(self.template, storage, self.extra)
        began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while True:
            found = LISTENING.search(self.log.read_bytes())
            if found:
                self.address = (found[1].decode().strip("[]"), int(found[2]))
                return time.monotonic() - began
            if self.process.poll() is not None:
                raise BrokerFailed(
                    f"{shlex.join(command)} ended ({self.process.returncode}):\n{self.last_words()}"
                )
            if time.monotonic() - began > timeout:
                raise BrokerFailed(
                    f"{shlex.join(command)} does not listen after {timeout:.0f} s:\n{self.last_words()}"
                )
            time.sleep(0.002)

    @property
    def http_address(self) -> Address:
        # A busy machine may have stopped it between the lines for TCP and for HTTP.
        give_up = time.monotonic() + 30.0
        while (found := HTTP_LISTENING.search(self.log.read_bytes())) is None:
            if time.monotonic() > give_up:
                raise BrokerFailed("it does not say where its HTTP API is")
            time.sleep(0.002)
        return found[1].decode().strip("[]"), int(found[2])

    def stop(self, timeout: float = 120.0) -> float:
        """A clean stop; gives the seconds it took."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise BrokerFailed(f"still there {timeout:.0f} s after SIGTERM:\n{self.last_words()}") from error
        return time.monotonic() - began

    def kill(self) -> None:
        """kill -9: the broker gets no chance to write anything out."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def memory_mib(self) -> dict[str, float]:
        """VmRSS (resident now), VmHWM (its peak) and RssAnon (resident without mapped files)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return {name: int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM", "RssAnon")}

    def last_words(self) -> str:
        return b"\n".join(self.log.read_bytes().splitlines()[-15:]).decode(errors="replace")


Broker = External | Spawned


def launcher(
    *, external: Address | None = None, template: str = "", parent: Path | None = None
) -> Callable[[list[str]], Broker]:
    """What gives a broker for each round: always the same external one, or a fresh process."""
    if external is not None:
        return lambda _extra: External(external)
    return lambda extra: Spawned(template, extra, parent)
