"""JSON pointers (RFC 6901), such as `/customer/id`."""

from __future__ import annotations

import re
from typing import Any, Final

_BAD_ESCAPE: Final = re.compile("~(?![01])")
_INDEX: Final = re.compile("0|[1-9][0-9]{0,17}")


def parse_pointer(text: str) -> tuple[str, ...]:
    """The steps of a pointer. Raises ValueError with a text for the user."""
    if not text.startswith("/"):
        raise ValueError(f"a JSON pointer begins with /, such as /customer/id; {text!r} does not")
    if _BAD_ESCAPE.search(text):
        raise ValueError(f"in a JSON pointer ~0 stands for ~ and ~1 for /; {text!r} has another ~")
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in text[1:].split("/"))


def find_value(value: Any, steps: tuple[str, ...]) -> Any:
    """The value that a pointer names in a JSON value. Raises LookupError if there is none."""
    for step in steps:
        if isinstance(value, dict):
            value = value[step]
        elif isinstance(value, list) and _INDEX.fullmatch(step):
            value = value[int(step)]
        else:
            raise LookupError(step)
    return value
