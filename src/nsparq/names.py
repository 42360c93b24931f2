"""Topic and channel names: which are valid, which are ephemeral, and how to quote an invalid
one."""

from __future__ import annotations

import re

MAX_NAME_LENGTH = 64
EPHEMERAL_SUFFIX = "#ephemeral"
VALID_NAME = "1 to 64 of the characters A-Z a-z 0-9 . _ - and optionally #ephemeral"
"""The rule, for error texts."""

_VALID = re.compile(rb"[.a-zA-Z0-9_-]+(#ephemeral)?")
_ESCAPES = {7: r"\a", 8: r"\b", 9: r"\t", 10: r"\n", 11: r"\v", 12: r"\f", 13: r"\r", 34: r"\"", 92: r"\\"}


def is_valid_name(name: bytes) -> bool:
    """The rule for topics and channels; the `#ephemeral` suffix counts towards the length."""
    return len(name) <= MAX_NAME_LENGTH and _VALID.fullmatch(name) is not None


def is_ephemeral(name: str) -> bool:
    return name.endswith(EPHEMERAL_SUFFIX)


def quote(raw: bytes) -> str:
    """`raw` in double quotes, as Go's %q prints it: clients compare these texts."""
    out = ['"']
    position = 0
    while position < len(raw):
        character, width = _decode_one(raw, position)
        if character is None:
            out.append(f"\\x{raw[position]:02x}")
        else:
            out.append(_quote_character(character))
        position += width
    out.append('"')
    return "".join(out)


def _decode_one(raw: bytes, position: int) -> tuple[str | None, int]:
    """The character at `position` and its width in bytes, or None and 1 for an invalid byte."""
    for width in range(1, 5):
        try:
            return raw[position : position + width].decode(), width
        except UnicodeDecodeError:
            continue
    return None, 1


def _quote_character(character: str) -> str:
    code = ord(character)
    if code in _ESCAPES:
        return _ESCAPES[code]
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02x}"
    if character.isprintable():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
