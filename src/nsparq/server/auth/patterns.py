"""The regular expressions of permissions: Go's syntax, matched in time linear in the name's length.

Patterns are written for NSQ, so Go's syntax applies: `[[:alpha:]]` is valid, look-ahead is not.
Clients choose the names, and the matching runs on the event loop. Python's `re` needs hours for
`(\\w+\\.?)+$` and a hostile name; RE2, the model of Go's package, does not. It is loaded with the
first pattern, because most daemons have none.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, Final

from nsparq.errors import NsparqError

MAX_LENGTH: Final = 64 << 10


@cache
def _engine() -> tuple[Any, Any]:
    import re2

    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    return re2, options


class BadPattern(NsparqError):
    """Not a regular expression of Go. The text says why."""


class Pattern:
    """A compiled pattern. Two patterns with the same text are equal."""

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
        """Whether the pattern matches any part of the name, which may be empty."""
        return self._compiled.search(name.encode("utf-8", "replace")) is not None


@lru_cache(1024)
def compile_pattern(text: str) -> Pattern:
    """The pattern of a text, from a cache. Raises BadPattern."""
    return Pattern(text)
