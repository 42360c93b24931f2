"""Sorting and paging of tables, as the address of the page says: `?sort=-depth&page=2`.

It works without scripts: the heads of the columns are links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from nsparq.http.api import Request

__all__ = ["Order", "Paging", "address_of"]

T = TypeVar("T")


def address_of(request: Request, **changes: str) -> str:
    """The address of the same page with other parameters."""
    left = {name: value for name, value in request.parameters.items() if name not in ("live", "note")}
    query = {name: value for name, value in {**left, **changes}.items() if value}
    return f"?{urlencode(query)}" if query else request.path


class Order(Generic[T]):
    """Sorts the rows of a table by one of its columns."""

    def __init__(
        self, request: Request, columns: Mapping[str, Callable[[T], Any]], default: str = ""
    ) -> None:
        """`columns` has the value to sort by, for each column. `default`: a column, with a minus
        for the highest first; without one the rows stay as they are."""
        self._request = request
        self._columns = columns
        wanted = request.parameters.get("sort", "")
        self._wanted = wanted if wanted.removeprefix("-") in columns else default

    def sorted(self, rows: Iterable[T]) -> list[T]:
        """Unknown values come last, whatever the direction."""
        found = [*rows]
        name = self._wanted.removeprefix("-")
        if not name:
            return found
        value = self._columns[name]
        known = [row for row in found if not _is_unknown(value(row))]
        known.sort(key=value, reverse=self._wanted.startswith("-"))
        return known + [row for row in found if _is_unknown(value(row))]

    def link(self, name: str, *, is_number: bool = True) -> str:
        """Of a column's head. The first click shows the highest numbers, the second the lowest."""
        first, second = (f"-{name}", name) if is_number else (name, f"-{name}")
        return address_of(self._request, sort=second if self._wanted == first else first, page="")

    def direction(self, name: str) -> str:
        """For `aria-sort`."""
        if self._wanted.removeprefix("-") != name:
            return "none"
        return "descending" if self._wanted.startswith("-") else "ascending"


def _is_unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


class Paging(Generic[T]):
    """One page of rows."""

    def __init__(self, request: Request, rows: Sequence[T], size: int) -> None:
        asked = request.parameters.get("page", "")
        self.count = len(rows)
        self.pages = max(1, -(-len(rows) // size))
        wanted = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 7 else 1
        self.page = max(1, min(wanted, self.pages))
        self.first = (self.page - 1) * size
        self.rows = rows[self.first : self.first + size]
        self._request = request

    def link(self, page: int) -> str:
        return address_of(self._request, page=str(page) if page > 1 else "")
