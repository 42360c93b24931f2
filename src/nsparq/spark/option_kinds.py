"""The sorts of values that options have: how each is read from the text that Spark passes, and shown."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from nsparq.client.connect.lookup import lookup_url
from nsparq.flags import MAX_DURATION_S, format_duration, parse_duration
from nsparq.names import is_valid_name
from nsparq.secret_scope import SecretScope

__all__ = [
    "ADDRESSES",
    "BOOL",
    "COUNT",
    "DIRECTORY",
    "DURATION",
    "FILE",
    "NAME",
    "NAMES",
    "PATTERNS",
    "PATTERN",
    "PRODUCER",
    "SEQUENCE",
    "SIZE",
    "TEXT",
    "Kind",
    "choice",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One of them."""

    name: str
    parse: Callable[[str], T]
    """Raises ValueError with what it must be."""
    show: Callable[[T], str] = str


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 63):
        raise ValueError("must be a whole number, at least 1")
    return int(text)


_UNITS: Final = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})\s*([kmgt]?)(?:i?b)?", text.lower().strip(), re.ASCII)
    if found is None or not int(found[1]):
        raise ValueError("must be a size such as 1048576, 512k, 64m or 1g")
    return int(found[1]) << _UNITS[found[2]]


def _show_size(size: int) -> str:
    for unit in "tgmk":
        if size and size % (1 << _UNITS[unit]) == 0:
            return f"{size >> _UNITS[unit]}{unit}"
    return str(size)


def _duration(text: str) -> float:
    try:
        seconds = int(text) / 1000 if text.isascii() and text.isdigit() else parse_duration(text)
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds <= MAX_DURATION_S:
        raise ValueError("must be a duration such as 250ms, 5s or 1m, or a number of milliseconds")
    return seconds


def _name(text: str) -> str:
    if not is_valid_name(text.encode()):
        raise ValueError(
            "must be a name of NSQ: 1 to 64 of the characters A-Z a-z 0-9 . _ - and perhaps #ephemeral"
        )
    return text


def _patterns(text: str) -> tuple[str, ...]:
    return SecretScope(_listed(text)).patterns


def _listed(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ValueError("must name at least one, separated by commas")
    return [*dict.fromkeys(items)]


def _names(text: str) -> tuple[str, ...]:
    return tuple(_name(item) for item in _listed(text))


def _addresses(text: str) -> tuple[str, ...]:
    """`host:port` or URLs, as given; see api.base_url()."""
    for item in (items := _listed(text)):
        try:
            lookup_url(item, "/")
        except ValueError:
            raise ValueError(f"must be host:port or http://host:port, and {item!r} is not") from None
    return tuple(items)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None


def _producer(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", text):
        raise ValueError("must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -")
    return text


def _sequence(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 63):
        raise ValueError("must be a whole number, at least 0")
    return int(text)


def _directory(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        text = unquote(parts.path)
    elif "://" in text:
        raise ValueError("must be a directory, such as /data/staging: object stores cannot sync and link")
    return os.path.abspath(text)


BOOL: Final[Kind[bool]] = Kind("true or false", _bool, lambda value: str(value).lower())
COUNT: Final[Kind[int]] = Kind("number", _count)
SIZE: Final[Kind[int]] = Kind("size", _size, _show_size)
DURATION: Final[Kind[float]] = Kind("duration", _duration, format_duration)
TEXT: Final[Kind[str]] = Kind("text", str)
NAME: Final[Kind[str]] = Kind("name", _name)
PATTERNS: Final[Kind[tuple[str, ...]]] = Kind("patterns of addresses", _patterns, ", ".join)
NAMES: Final[Kind[tuple[str, ...]]] = Kind("names", _names, ", ".join)
ADDRESSES: Final[Kind[tuple[str, ...]]] = Kind("addresses", _addresses, ", ".join)
PATTERN: Final[Kind[re.Pattern[str]]] = Kind("regular expression", _pattern, lambda pattern: pattern.pattern)
FILE: Final[Kind[str]] = Kind("file", str)
DIRECTORY: Final[Kind[str]] = Kind("directory", _directory)
PRODUCER: Final[Kind[str]] = Kind("name", _producer)
SEQUENCE: Final[Kind[int]] = Kind("number", _sequence)


def choice(*names: str) -> Kind[str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return text.lower()

    return Kind(" or ".join(f"`{name}`" for name in names), parse)
