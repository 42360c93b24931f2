"""Whether what came out is what went in: every message in exactly one place, every event counted once."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from nsparq.demo.events import CLOSING, Expected
from nsparq.demo.results import Found

__all__ = ["problems"]

K = TypeVar("K")


def problems(expected: Expected, found: Found) -> list[str]:
    """Everything that is wrong, in words. Nothing at all, if all is well."""
    rows = found.rows.total()
    explained = found.windows.total() + found.twice + found.late + found.rows[CLOSING]
    pairs = [
        ("messages in Parquet and among the dead letters", rows + found.letters, expected.sent),
        ("different messages among these", found.places, expected.sent),
        ("dead letters", found.letters, expected.broken),
        ("events that came twice", found.twice, expected.twice),
        ("events that came too late", found.late, expected.late),
        ("rows that were counted, came twice or too late, or end the day", explained, rows),
        ("results", found.results, len(expected.windows)),
    ]
    wrong = [f"{what}: {is_:,} instead of {must:,}" for what, is_, must in pairs if is_ != must]
    wrong += _differences("rows of kind", found.rows, expected.rows)
    wrong += _differences("events in window", found.windows, expected.windows)
    wrong += _differences("cents in window", found.cents, expected.cents)
    return wrong


def _differences(what: str, found: Counter[K], expected: Counter[K], shown: int = 3) -> list[str]:
    keys = [key for key in {**expected, **found} if found[key] != expected[key]]
    wrong = [f"{what} {key}: {found[key]:,} instead of {expected[key]:,}" for key in keys[:shown]]
    if len(keys) > shown:
        wrong.append(f"{what} …: {len(keys) - shown:,} more of these")
    return wrong
