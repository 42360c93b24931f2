"""TOML tables as frozen dataclasses: a field made with `key()` is a key, with how to read it and its meaning.

Everything wrong in a file is found in one go, and said with table, key and, for a slip of the pen, what was
meant.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, Final, TypeVar

from nsparq.spark.option_fields import COUNT, DURATION, NAME, Kind

__all__ = [
    "REQUIRED",
    "Problems",
    "choice",
    "count",
    "did_you_mean",
    "duration",
    "expand",
    "flag",
    "key",
    "keys",
    "read_table",
    "settings",
    "shorthand",
    "strings",
    "text",
    "topic_name",
    "unread",
    "whole",
]

T = TypeVar("T")
Read = Callable[[Any], T]

REQUIRED: Final[Any] = MISSING


class Problems:
    """What is wrong, each with its place in the file."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, table: str, key: str, text: str) -> None:
        place = f"[{table}] {key}" if table and key else f"[{table}]" if table else key
        self.found.append(f"{place}: {text}" if place else text)

    def unknown(self, table: str, key: str, known: Iterable[str]) -> None:
        known = list(known)
        hint = did_you_mean(key, known) or f"there are {', '.join(known)}"
        self.add(table, key, f"there is no such key; {hint}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question, or nothing when nothing is near."""
    by_name = {_plain(one): one for one in known}
    near = difflib.get_close_matches(_plain(given), by_name, 1)
    near = near or [one for one in by_name if one.startswith(_plain(given))]
    return f"did you mean {by_name[near[0]]!r}?" if near else ""


def _plain(given: str) -> str:
    return given.lower().replace("_", "").replace("-", "")


# tables


def key(default: Any, read: Read[Any], help: str, *, name: str = "", shown: str = "") -> Any:
    """A dataclass field that is a key. A class as default is called; `name` is the key where that cannot be
    the field's name; `shown` says what the default depends on."""
    metadata = {"read": read, "help": help, "name": name, "shown": shown}
    if default is REQUIRED:
        return field(metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def keys(table: type) -> dict[str, Field[Any]]:
    """By name, in the order of the class."""
    return {one.metadata["name"] or one.name: one for one in fields(table) if "read" in one.metadata}


def read_table(
    table: type[T], given: Mapping[str, Any], place: str, problems: Problems, **more: Any
) -> T | None:
    """An instance, or None after problems were added. `more` are values of fields that are no keys."""
    known = keys(table)
    before = len(problems.found)
    values: dict[str, Any] = {}
    for one, value in given.items():
        if one not in known:
            problems.unknown(place, one, known)
            continue
        try:
            values[known[one].name] = known[one].metadata["read"](value)
        except ValueError as error:
            problems.add(place, one, f"{error}{_not(value)}")
    for one, declared in known.items():
        is_required = declared.default is MISSING and declared.default_factory is MISSING
        if is_required and one not in given:
            problems.add(place, one, "is missing")
    return table(**values, **more) if len(problems.found) == before else None


def _not(value: Any) -> str:
    shown = repr(value)
    return f", not {shown}" if len(shown) <= 60 and not isinstance(value, dict | list) else ""


# values


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text")
    return expand(value)


def strings(value: Any) -> tuple[str, ...]:
    """One, or an array of them."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(one, str) and one for one in items):
        raise ValueError("must be a text or an array of texts")
    return tuple(map(expand, items))


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("must be a whole number, 0 or more")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def choice(*names: str) -> Read[str]:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return str(value)

    return read


def of_kind(kind: Kind[T]) -> Read[T]:
    """As the options of format("nsq") are read."""

    def read(value: Any) -> T:
        if isinstance(value, bool | list | dict | float):
            raise ValueError(f"must be a {kind.name}")
        return kind.parse(expand(str(value)))

    return read


count: Final = of_kind(COUNT)
duration: Final = of_kind(DURATION)
topic_name: Final = of_kind(NAME)


def settings(value: Any) -> dict[str, str]:
    """A table of plain values, as Spark wants its options: all of them texts."""
    if not isinstance(value, dict):
        raise ValueError("must be a table")
    found = {}
    for one, given in value.items():
        if isinstance(given, list | dict):
            raise ValueError(f"{one!r} must be a text, a number, or true or false")
        found[one] = str(given).lower() if isinstance(given, bool) else expand(str(given))
    return found


_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def expand(given: str) -> str:
    """`${NAME}` is the environment variable, `${NAME:-text}` has a default: no secret need be in the file."""

    def replace(found: re.Match[str]) -> str:
        value = os.environ.get(found[1], found[2])
        if value is None:
            raise ValueError(f"needs the environment variable {found[1]}")
        return value

    return _VARIABLE.sub(replace, given)


def unread(value: Any) -> Any:
    """For a key that was read before its table."""
    return value


def shorthand(key: str, value: Any) -> Mapping[str, Any]:
    """A table that may also be written as one text, which stands for this key of it."""
    if isinstance(value, str):
        return {key: value}
    if not isinstance(value, dict):
        raise ValueError("must be a text or a table")
    return value
