"""The argparse parser of commands that have commands of their own: short errors with a
suggestion."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """A wrong command line gets two or three lines, not the whole usage."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if found := re.match(r"unrecognized arguments: (--?[\w-]+)", message):
            message = f"there is no flag {found[1]}"
            similar = difflib.get_close_matches(found[1], [*_flags(self)], 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
        elif found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", found[2])
            message = f"there is no command {found[1]!r}"
            similar = difflib.get_close_matches(found[1], known, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else f"; it is one of {', '.join(known)}"
        self.exit(2, f"{self.prog}: {message}{hint}\n`{self.prog} --help` explains it\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own hides that the help cannot be written."""
        (file or sys.stderr).write(message)


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The flags of a parser and of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _flags(one)
