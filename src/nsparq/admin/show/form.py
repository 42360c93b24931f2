"""What a form sends: its fields, and the messages selected in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qs

from nsparq.http.api import ApiError

__all__ = ["Form", "chosen_message"]

MAX_FIELDS: Final = 2000


class Form:
    """The fields of a form. A repeated field has several values."""

    def __init__(self, body: bytes) -> None:
        try:
            self._fields: Mapping[str, list[str]] = parse_qs(
                body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS
            )
        except ValueError:
            raise ApiError(413, "TOO_MANY_FIELDS") from None

    def __getitem__(self, name: str) -> str:
        return self._fields.get(name, [""])[0]

    def all(self, name: str) -> list[str]:
        return self._fields.get(name, [])

    def number(self, name: str) -> int:
        value = self[name].strip()
        if not value:
            return 0
        if not (value.isascii() and value.isdigit()) or len(value) > 12:
            raise ApiError(400, f"{name} must be a number")
        return int(value)


def chosen_message(value: str) -> tuple[str, int]:
    """The node and the sequence number of a selected message: `17@10.0.0.1:4151`."""
    sequence, _, node = value.partition("@")
    if not (sequence.isascii() and sequence.isdigit()) or len(sequence) > 19:
        raise ApiError(400, "INVALID_MESSAGE")
    return node, int(sequence)
