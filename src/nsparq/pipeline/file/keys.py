"""TOML tables as frozen dataclasses: a field made with `key()` is a key of the file. Needs no
Spark.

`read_table` reads a whole table and reports every problem in it, with the table, the key and, after
a typing error, the name that was probably meant. The functions below it each read one kind of
value.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, Final, TypeVar

from nsparq.spark.option_fields import COUNT, DURATION, NAME, Kind

T = TypeVar("T")
Read = Callable[[Any], T]

REQUIRED: Final[Any] = MISSING


class Problems:
    """Everything that is wrong with a file, each problem with its place."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, table: str, key: str, text: str) -> None:
        place = f"[{table}] {key}" if table and key else f"[{table}]" if table else key
        self.found.append(f"{place}: {text}" if place else text)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A hint for a name that does not exist: the nearest known name, or all of them."""
    by_name = {_plain(one): one for one in known}
    near = difflib.get_close_matches(_plain(given), by_name, 1)
    near = near or [one for one in by_name if one.startswith(_plain(given))]
    return f"did you mean {by_name[near[0]]!r}?" if near else f"there are {', '.join(by_name.values())}"


def _plain(given: str) -> str:
    return given.lower().replace("_", "").replace("-", "")


def key(
    default: Any, read: Read[Any], help: str, *, name: str = "", shown: str = "", is_secret: bool = False
) -> Any:
    """A dataclass field that is a key of the file.

    A class as `default` is called. `name` is the key if it cannot be the field's name. `shown` is
    the default in the documentation.
    """
    metadata = {"read": read, "help": help, "name": name, "shown": shown, "is_secret": is_secret}
    if default is REQUIRED:
        return field(metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def keys(table: type) -> dict[str, Field[Any]]:
    """The keys of a table, in the order of the class."""
    return {one.metadata["name"] or one.name: one for one in fields(table) if "read" in one.metadata}


def read_table(
    table: type[T], given: Mapping[str, Any], place: str, problems: Problems, **more: Any
) -> T | None:
    """A `table`, or None if problems were added. `more` are fields that are not keys."""
    known = keys(table)
    before = len(problems.found)
    values: dict[str, Any] = {}
    for one, value in given.items():
        if one not in known:
            problems.add(place, one, f"unknown key; {did_you_mean(one, known)}")
            continue
        metadata = known[one].metadata
        try:
            values[known[one].name] = metadata["read"](value)
        except ValueError as error:
            problems.add(place, one, f"{error}{'' if metadata['is_secret'] else _not(value)}")
    for one, declared in known.items():
        is_required = declared.default is MISSING and declared.default_factory is MISSING
        if is_required and one not in given:
            problems.add(place, one, "is missing")
    return table(**values, **more) if len(problems.found) == before else None


def _not(value: Any) -> str:
    shown = repr(value)
    return f", not {shown}" if len(shown) <= 60 and not isinstance(value, dict | list) else ""


# values


def string(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a string")
    return expand(value)


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


def is_identifier(value: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) is not None


def identifier(value: Any) -> str:
    if not isinstance(value, str) or not is_identifier(value):
        raise ValueError("must be a name that SQL can use: letters, digits, _")
    return value


def identifiers(value: Any) -> tuple[str, ...]:
    """One name, or an array of names."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise ValueError("must be a name or an array of names")
    return tuple(identifier(expand(one) if isinstance(one, str) else one) for one in items)


def output_name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", value):
        raise ValueError("must be a name of letters, digits, _ and -")
    return value


def sql_query(value: Any) -> str:
    # Environment variables are not expanded: $ may be part of the query.
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a SQL query")
    return value.strip().rstrip(";")


def function_name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError("must name a function as module:function")
    return value


def _of_kind(kind: Kind[T]) -> Read[T]:
    """Reads a value as an option of format("nsq") is read."""

    def read(value: Any) -> T:
        if isinstance(value, bool | list | dict | float):
            raise ValueError(f"must be a {kind.name}")
        return kind.parse(expand(str(value)))

    return read


count: Final = _of_kind(COUNT)
duration: Final = _of_kind(DURATION)
topic_name: Final = _of_kind(NAME)


def settings(value: Any) -> dict[str, str]:
    """A table of plain values, as strings, because Spark takes options as strings."""
    if not isinstance(value, dict):
        raise ValueError("must be a table")
    found = {}
    for one, given in value.items():
        if isinstance(given, list | dict):
            raise ValueError(f"{one!r} must be a string, a number, or true or false")
        found[one] = str(given).lower() if isinstance(given, bool) else expand(str(given))
    return found


_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def expand(given: str) -> str:
    """Replaces `${NAME}` and `${NAME:-default}` by environment variables, for secrets."""

    def replace(found: re.Match[str]) -> str:
        value = os.environ.get(found[1], found[2])
        if value is None:
            raise ValueError(f"the environment variable {found[1]} is not set")
        return value

    return _VARIABLE.sub(replace, given)


def unread(value: Any) -> Any:
    """For a key whose value was read before its table."""
    return value


def shorthand(key: str, value: Any) -> Mapping[str, Any]:
    """A table that may also be written as one string, which is then the value of `key`."""
    if isinstance(value, str):
        return {key: value}
    if not isinstance(value, dict):
        raise ValueError("must be a string or a table")
    return value


def is_local(path: str) -> bool:
    """Whether a path is on this machine or mounted here, and not a URL."""
    return "://" not in path
