"""The regular expressions of permissions: Go's syntax, matched in time proportional to the name.

Who writes the patterns has an nsqd in mind that is written in Go, so Go's syntax decides: `[[:alpha:]]` means
something, look-ahead does not. And a client chooses the names that they are matched against, on the event
loop of a broker that others use: Python's `re` needs hours for `(\\w+\\.?)+$` and a well-chosen name. RE2 is
what Go's own package was made after. It is loaded with the first pattern: most daemons have none.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, Final

from nsparq.errors import NsparqError

__all__ = ["BadPattern", "Pattern", "compile_pattern"]

MAX_LENGTH: Final = 64 << 10


@cache
def _engine() -> tuple[Any, Any]:
    import re2

    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    return re2, options


class BadPattern(NsparqError):
    """Not a regular expression that Go would take; the text says why."""


class Pattern:
    """A compiled pattern. Compares equal to another with the same text."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_LENGTH:
            raise BadPattern(f"longer than {MAX_LENGTH} characters: {text[:200]!r}")
        re2, options = _engine()
        try:
            self._compiled = re2.compile(text, options)
        except (re2.error, ValueError) as error:
            reason = error.args[0] if error.args else "not a pattern"
            shown = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
            raise BadPattern(f"{shown[:200]} in {text[:200]!r}") from error

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def search(self, name: str) -> bool:
        """Whether the pattern matches somewhere in the name, or in the empty string."""
        return self._compiled.search(name) is not None


@lru_cache(1024)
def compile_pattern(text: str) -> Pattern:
    """The pattern of this text, shared by all who use it. Raises BadPattern."""
    return Pattern(text)
