"""Fields of JSON that is not trusted. A field that is missing or of the wrong type counts as empty,
so that the results can safely be added up, shown, and put into a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MAX_NUMBER: Final = 1 << 63
"""Larger numbers in an answer are nonsense and count as missing."""


def as_object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def objects(fields: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = fields.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def texts(fields: Mapping[str, Any], name: str) -> list[str]:
    found = fields.get(name)
    return [_encodable(one) for one in found if isinstance(one, str)] if isinstance(found, list) else []


def text(fields: Mapping[str, Any], name: str) -> str:
    found = fields.get(name)
    return _encodable(found) if isinstance(found, str) else ""


def number(fields: Mapping[str, Any], name: str) -> int:
    # Most counters are 0, and a page may read 100,000 of them.
    return int(real(fields, name) or 0) if fields.get(name) else 0


def real(fields: Mapping[str, Any], name: str) -> float | None:
    """None if it is not a number, or too large a number."""
    found = fields.get(name)
    if type(found) is not int and type(found) is not float:
        return None
    return found if -MAX_NUMBER <= found <= MAX_NUMBER else None


def _encodable(text: str) -> str:
    """Without lone surrogates, which JSON can hold and UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def flag(fields: Mapping[str, Any], name: str) -> bool:
    return fields.get(name) is True
