"""A problem, and the order in which a person should look at problems.

Each problem has a title, the figures, and a hint about the usual cause. What may be intended, such
as a queue that grows at night and is empty by noon, is only a notice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

__all__ = ["Problem", "Severity", "duration", "in_order"]

FIRST: Final = (
    "unhealthy",
    "unreachable",
    "left",
    "replication",
    "lookupd",
    "not registered",
    "disk",
    "archive",
    "pipeline",
)
"""Kinds that come before others of the same severity, in this order: they are the cause of much
else. Problems of channels follow, those with the most messages first."""
LAST: Final = ("slow client", "webhook", "lost", "history", "version", "more")
"""Kinds that come after them: nobody can bring back what is lost."""
MAX_PER_KIND: Final = 100
"""Further problems of a kind are counted, not listed: ten thousand usually have one cause."""
PLACES: Final = ("topic", "channel", "node", "client", "pipeline")


class Severity(IntEnum):
    """How urgent a problem is."""

    CRITICAL = 3
    """Data is lost or will be soon, or a node or a channel gets nothing done."""
    WARNING = 2
    """It gets worse unless somebody acts."""
    NOTICE = 1
    """It may be intended."""


@dataclass(frozen=True, slots=True)
class Problem:
    kind: str
    severity: Severity
    title: str
    """A few words, without names."""
    detail: str
    """The figures."""
    hint: str
    """The usual cause, or what to do."""
    topic: str = ""
    channel: str = ""
    node: str = ""
    client: str = ""
    pipeline: str = ""
    weight: float = 0.0
    """Orders problems of the same severity and rank, the heaviest first."""

    @property
    def key(self) -> tuple[str, ...]:
        """The same problem has the same key at each poll, whatever its figures are."""
        places = tuple(getattr(self, name) for name in PLACES)
        if any(places):
            return (self.kind, *places)
        # Only the text of an error names the nsqlookupd.
        return (self.kind, self.detail if self.kind == "lookupd" else self.title)

    def as_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("kind", "title", "detail", "hint")}
        found |= {name: value for name in PLACES if (value := getattr(self, name))}
        return {"severity": self.severity.name.lower(), **found}

    @classmethod
    def from_json(cls, found: Any) -> Problem:
        """Raises KeyError, TypeError or ValueError for anything but the value of as_json()."""
        texts = {name: str(found[name]) for name in ("kind", "title", "detail", "hint")}
        texts |= {name: str(found[name]) for name in PLACES if name in found}
        return cls(severity=Severity[found["severity"].upper()], **texts)  # type: ignore[arg-type]  # texts


def in_order(found: list[Problem]) -> list[Problem]:
    """What a person should do first comes first; at most MAX_PER_KIND of a kind."""
    found.sort(
        key=lambda one: (-one.severity, _rank(one.kind), -one.weight, one.topic, one.channel, one.node)
    )
    counts: dict[str, int] = {}
    kept = []
    for one in found:
        counts[one.kind] = counts.get(one.kind, 0) + 1
        if counts[one.kind] <= MAX_PER_KIND:
            kept.append(one)
    for kind, count in counts.items():
        if count > MAX_PER_KIND:
            text = f"{count - MAX_PER_KIND:,} more are not listed"
            kept.append(Problem("more", Severity.NOTICE, f"{kind}: more of the same kind", text, ""))
    return kept


def _rank(kind: str) -> int:
    if kind in FIRST:
        return FIRST.index(kind)
    return len(FIRST) + (1 + LAST.index(kind) if kind in LAST else 0)


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "a long time"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
