"""What commands print: tables for people, JSON for programs. Figures and times are readable."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

__all__ = [
    "Column",
    "age",
    "amount",
    "moment",
    "print_json",
    "print_rows",
    "printable",
    "size",
    "text_table",
]

Row = Mapping[str, Any]


class Column(NamedTuple):
    """A column of a table: a key of the rows, its heading, and how a value is shown."""

    key: str
    heading: str
    show: Callable[[Any], str] = str
    left: bool = False

    def cell(self, row: Row) -> str:
        value = row.get(self.key)
        return "-" if value is None else printable(self.show(value))


def printable(text: str, keep: str = "") -> str:
    """A terminal must not obey what a message, a client or another daemon says: control characters
    are escaped, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text
    )


def print_json(value: object) -> None:
    """One line, so that programs can read it as it comes."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_rows(rows: Iterable[Row], columns: Sequence[Column]) -> None:
    sys.stdout.write("\n".join(table_of(rows, columns)) + "\n")


def table_of(rows: Iterable[Row], columns: Sequence[Column]) -> list[str]:
    """The lines of a table, with its headings."""
    cells = [[column.heading for column in columns]]
    cells += ([column.cell(row) for column in columns] for row in rows)
    return text_table(cells, left=sum(column.left for column in columns))


def text_table(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Lines with aligned columns. The first `left` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [f"{'<' if at < left else '>'}{width}" for at, width in enumerate(widths)]
    return ["  ".join(map(format, row, aligned)).rstrip() for row in rows]


def amount(value: float) -> str:
    """A count or a rate, short: 950, 12.3k, 1.2M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 10 else f"{value:.1f}"


def size(value: float) -> str:
    """Bytes: 950 B, 12.3 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age(seconds: float) -> str:
    """A duration in its two largest units: 45s, 3m10s, 2h05m, 4d06h."""
    if seconds < 1:
        return "0s" if seconds <= 0 else "<1s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def moment(timestamp_ns: int) -> str:
    """A time in this machine's time zone, to the millisecond."""
    at = datetime.fromtimestamp(timestamp_ns // 1_000_000_000).astimezone()
    return f"{at:%Y-%m-%d %H:%M:%S}.{timestamp_ns // 1_000_000 % 1000:03d}{at:%z}"
