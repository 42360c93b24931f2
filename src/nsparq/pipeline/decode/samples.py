"""Infers the columns of messages from samples, as a schema for Spark. Needs no Spark.

Types get wider: a column with integers and fractions is DOUBLE, one with numbers and strings is
STRING. A column that is always null is STRING too, because its type is unknown.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:?\d\d)?")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Keywords of the DDL parser.
_RESERVED: Final = {"not", "null", "comment", "default", "generated", "collate"}
# Python's int() and float() read more than Spark: 1_000, nan, infinity.
_WHOLE: Final = re.compile(r"[+-]?\d+", re.ASCII)
_REAL: Final = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|Infinity)|-?Inf|NaN", re.ASCII)
_DEEPEST: Final = 50
"""Columns in columns. What is deeper is a text."""
_LONG: Final = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A message with the columns of the source."""

    topic: str
    body: bytes
    timestamp: datetime
    node: str = "127.0.0.1:4151"
    offset: int = 0
    attempts: int = 0
    id: str = "0" * 16
    headers: Mapping[str, str] | None = None


@dataclass
class _Type:
    """The types of values seen in one column."""

    names: set[str] = field(default_factory=set)
    """BOOLEAN, BIGINT, DOUBLE, TIMESTAMP, STRING"""
    fields: dict[str, _Type] | None = None
    items: _Type | None = None

    def add(self, value: Any, depth: int = 0) -> None:
        if value is None:
            return
        if depth == _DEEPEST:
            self.names.add("STRING")
        elif isinstance(value, dict):
            self.fields = {} if self.fields is None else self.fields
            for name, item in value.items():
                if _can_be_column(name):
                    self.fields.setdefault(name, _Type()).add(item, depth + 1)
        elif isinstance(value, list):
            self.items = self.items or _Type()
            for item in value:
                self.items.add(item, depth + 1)
        else:
            self.names.add(_name(value))

    def ddl(self) -> str:
        kinds = bool(self.names) + (self.fields is not None) + (self.items is not None)
        if kinds > 1 or (self.fields is not None and not self.fields):
            return "STRING"
        if self.fields is not None:
            inner = ", ".join(f"{quoted(name)}: {one.ddl()}" for name, one in self.fields.items())
            return f"STRUCT<{inner}>"
        if self.items is not None:
            return f"ARRAY<{self.items.ddl()}>"
        if self.names == {"BIGINT", "DOUBLE"}:
            return "DOUBLE"
        return next(iter(self.names)) if len(self.names) == 1 else "STRING"


def _can_be_column(name: str) -> bool:
    """Not an empty name, nor one with half of a surrogate pair."""
    return bool(name) and not any("\ud800" <= one <= "\udfff" for one in name)


def _name(value: Any) -> str:
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, int):
        return "BIGINT" if value in _LONG else "DOUBLE"
    if isinstance(value, float):
        return "DOUBLE"
    return "TIMESTAMP" if _TIME.fullmatch(value) else "STRING"


def quoted(name: str) -> str:
    """A name, quoted if a schema and SQL need it."""
    if _PLAIN_NAME.fullmatch(name) and name.lower() not in _RESERVED:
        return name
    return "`" + name.replace("`", "``") + "`"


def infer_json(bodies: Iterable[bytes]) -> str:
    """The schema of the messages that are JSON objects. Empty if none has a field."""
    found = _Type()
    for body in bodies:
        value = _object(body)
        if value is not None:
            found.add(value)
    return ", ".join(f"{quoted(name)} {one.ddl()}" for name, one in (found.fields or {}).items())


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def infer_csv(bodies: Iterable[bytes], separator: str = ",") -> str:
    """The schema of CSV lines: columns c1, c2, …, as many as most messages have."""
    rows = [row for body in bodies for row in _rows(body, separator) if row]
    if not rows:
        return ""
    widths = [len(row) for row in rows]
    width = max(set(widths), key=widths.count)
    columns = [_Type() for _ in range(width)]
    for row in rows:
        if len(row) == width:
            for column, value in zip(columns, row, strict=True):
                column.add(_value(value))
    return ", ".join(f"c{number} {column.ddl()}" for number, column in enumerate(columns, 1))


def _rows(body: bytes, separator: str) -> list[list[str]]:
    try:
        return [*csv.reader([_text(body)], delimiter=separator)]
    except csv.Error:
        # For example a field of more than 128 KiB.
        return []


def _text(body: bytes) -> str:
    return body.decode(errors="replace").replace("\n", " ").replace("\r", " ")


def _value(text: str) -> Any:
    """A value of the type that a CSV field looks like. None if it is empty."""
    text = text.strip()
    if not text:
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _WHOLE.fullmatch(text) and len(text) <= 20:
        return int(text)
    return 0.0 if _REAL.fullmatch(text) else text


def guess_format(bodies: Sequence[bytes]) -> str:
    """json if most messages are JSON objects, else text or raw."""
    objects = sum(_object(body) is not None for body in bodies)
    if bodies and objects * 2 > len(bodies):
        return "json"
    try:
        for body in bodies:
            body.decode()
    except UnicodeDecodeError:
        return "raw"
    return "text"
