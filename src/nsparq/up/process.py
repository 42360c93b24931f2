"""A child process in its own process group: started, read line by line, stopped or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from nsparq.up.child import GRACE_VARIABLE

__all__ = ["Process", "describe_status"]

TAIL: Final = 20
"""Last lines of output that are kept, to show them if it dies."""
MAX_LINE: Final = 32 * 1024
DRAIN_S: Final = 2.0
"""Time to read the rest of the output after the end; a grandchild may keep the pipe open."""


class Process:
    """`lines` gets each line of output. Ctrl-C does not reach it: the stack stops it in order."""

    def __init__(self, process: asyncio.subprocess.Process, lines: Callable[[str], None]) -> None:
        self._process, self._lines = process, lines
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._reader = asyncio.create_task(self._read())
        self.ended = asyncio.create_task(self._wait())
        """Ends after the last line was read. The result is the exit status."""

    @classmethod
    async def start(
        cls, module: str, arguments: Sequence[str], lines: Callable[[str], None], *, grace_s: float
    ) -> Process:
        """Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            # A user's file in this folder must not be imported in place of a module.
            "-P",
            "-m",
            "nsparq.up.child",
            module,
            *arguments,
            # It ends when the parent dies: see nsparq.up.child.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", GRACE_VARIABLE: str(grace_s)},
        )
        return cls(process, lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return not self.ended.done()

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL. Returns whether it stopped by itself. Twice is safe."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self.ended}, timeout=timeout_s)
        if done:
            return True
        self.kill()
        await asyncio.wait({self.ended})
        return False

    def kill(self) -> None:
        """The process and its children."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _wait(self) -> int:
        status = await self._process.wait()
        await asyncio.wait({self._reader}, timeout=DRAIN_S)
        self._reader.cancel()
        return status

    async def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        rest = b""
        while chunk := await stream.read(1 << 16):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                self._take(line)
            if len(rest) > MAX_LINE:
                self._take(rest)
                rest = b""
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.tail.append(text)
        self._lines(text)


def describe_status(status: int) -> str:
    """How a process has ended, in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
