"""A command in a pseudo-terminal, as a person sees it and types into it.

Terminal("main", "top", ...)    a context manager, which ends it
    wait_for(text)              until the text has been on the screen
    type(keys)
    text()                      all that was written so far, without escape sequences
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Mapping

from tests.support import wait_until

from .processes import command, environment

ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]|\x1b\][^\x07]*\x07")


class Terminal:
    def __init__(
        self,
        *arguments: str,
        rows: int = 30,
        columns: int = 140,
        program: list[str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`arguments` begin with the name of a module of the tools, unless `program` is given."""
        self._main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        started = [*command(arguments[0]), *arguments[1:]] if program is None else [*program, *arguments]
        self.process = subprocess.Popen(
            started,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            # Shells need it for job control.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            # The size of our own terminal may be in the environment.
            env=environment(
                TERM="xterm-256color", LINES=str(rows), COLUMNS=str(columns), **(variables or {})
            ),
        )
        os.close(terminal)
        self._written = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)

    def type(self, keys: bytes) -> None:
        os.write(self._main, keys)

    def _read(self) -> None:
        while select.select([self._main], [], [], 0)[0]:
            try:
                found = os.read(self._main, 1 << 16)
            except OSError:  # the program has ended
                return
            if not found:
                return
            self._written += found

    def raw(self) -> bytes:
        self._read()
        return self._written

    def text(self) -> str:
        return ESCAPES.sub(b"", self.raw()).decode(errors="replace")

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text(), what=f"{text!r} on the terminal")

    def forget(self) -> None:
        """Look only at what is written from now on."""
        self._read()
        self._written = b""
