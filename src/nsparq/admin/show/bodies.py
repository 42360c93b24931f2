"""Bodies of messages, for people: JSON indented, bytes as a hex dump, dead letters opened. Knows no I/O."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Final

from nsparq.admin.collect.merge import number, text

__all__ = ["DeadLetter", "for_people", "read_letter"]

MAX_SHOWN: Final = 64 << 10
"""Characters of a body that are shown."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """What a dead letter of our client library or of a pipeline says about the message that it holds."""

    topic: str
    channel: str
    id: str
    attempts: int
    error: str
    body: bytes

    @property
    def kind(self) -> str:
        """`json`, `text` or `binary`."""
        return for_people(self.body)[0]

    @property
    def shown(self) -> str:
        """The message for people."""
        return for_people(self.body)[1]


def for_people(body: bytes) -> tuple[str, str]:
    """What kind of body it is, and how it is shown."""
    try:
        decoded = body.decode()
    except UnicodeDecodeError:
        return "binary", _hex_dump(body[:1024])
    if decoded[:1] in ("{", "["):
        try:
            value = json.loads(decoded)
            return "json", json.dumps(value, indent=2, ensure_ascii=False)[:MAX_SHOWN]
        except (ValueError, RecursionError):
            pass
    if any(character < " " and character not in "\t\r\n" for character in decoded[:1024]):
        return "binary", _hex_dump(body[:1024])
    return "text", decoded[:MAX_SHOWN]


def _hex_dump(body: bytes) -> str:
    lines = []
    for place in range(0, len(body), 16):
        row = body[place : place + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{place:06x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)


def read_letter(body: bytes) -> DeadLetter | None:
    """The message inside a dead letter; None for what is none, or is cut off."""
    if not body.startswith(b"{"):
        return None
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not {"topic", "error"} <= said.keys() or not text(said, "topic"):
        return None
    if isinstance(said.get("base64"), str):
        try:
            held = base64.b64decode(said["base64"], validate=True)
        except (binascii.Error, ValueError):
            return None
    elif isinstance(said.get("text"), str):
        held = said["text"].encode("utf-8", "surrogatepass")
    else:
        return None
    return DeadLetter(
        topic=text(said, "topic"),
        channel=text(said, "channel"),
        id=text(said, "id"),
        attempts=number(said, "attempts"),
        error=text(said, "error"),
        body=held,
    )
