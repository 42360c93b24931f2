"""Prints the children's lines with their names in front, coloured on a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import Final, TextIO

__all__ = ["LEVELS", "UP", "Output"]

UP: Final = "up"
"""The name in front of our own lines."""
LEVELS: Final = ("debug", "info", "warn", "error", "fatal")
_LOGGED: Final = {"DEBUG": 0, "INFO": 1, "WARNING": 2, "ERROR": 3, "FATAL": 4}
_LEVEL: Final = re.compile(r"(?:\d{4}/\d\d/\d\d )?[\d:.]+ (DEBUG|INFO|WARNING|ERROR|FATAL): ")
_COLOURS: Final = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
"""Terminal colour codes for the names, in turn."""
_RED, _BOLD, _PLAIN = "\x1b[31m", "\x1b[1m", "\x1b[0m"


class Output:
    """Writes to `stream`. Leaves out log lines below `level`; other lines are always shown."""

    def __init__(
        self, *, level: str = "info", stream: TextIO | None = None, is_coloured: bool | None = None
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._least = LEVELS.index(level)
        is_terminal = self._stream.isatty() and "NO_COLOR" not in os.environ
        self._is_coloured = is_terminal if is_coloured is None else is_coloured
        self._width = len("nsqlookupd")
        """Length of the longest name so far."""
        self._colours: dict[str, int] = {}

    def expect(self, names: Iterable[str]) -> None:
        """Names that will come, so that all lines have the same margin."""
        self._width = max(self._width, *map(len, names))

    def line(self, name: str, text: str) -> None:
        """A line of a child."""
        found = _LEVEL.match(text)
        if found is not None and _LOGGED[found[1]] < self._least:
            return
        head = self._head(name)
        if self._is_coloured:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            head = f"\x1b[{colour}m{head}{_PLAIN}"
            if found is not None and _LOGGED[found[1]] >= _LOGGED["ERROR"]:
                text = f"{_RED}{text}{_PLAIN}"
        self._write(head + text)

    def say(self, text: str) -> None:
        """A line of our own, always shown."""
        for one in text.splitlines():
            line = self._head(UP) + one
            self._write(f"{_BOLD}{line}{_PLAIN}" if self._is_coloured else line)

    def _head(self, name: str) -> str:
        self._width = max(self._width, len(name))
        return f"{name:<{self._width}} | "

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except OSError:
            # Nobody reads the output any more. The daemons go on.
            pass
