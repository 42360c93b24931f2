"""Replay: a channel moved to another place in its topic's log, and what that does, said before it is done."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from nsparq.admin.collect.cluster import Cluster
from nsparq.admin.collect.merge import Node, number
from nsparq.admin.collect.upstream import AskFailed, Refused
from nsparq.errors import NsparqError
from nsparq.flags import parse_duration

__all__ = ["BadTarget", "Plan", "parse_target", "seek"]


class BadTarget(NsparqError):
    """Not a place to go to; the text is for the person who named it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What it does to the channel on one node."""

    node: str
    again: int = 0
    """Messages that are delivered again."""
    skipped: int = 0
    """Messages that are not delivered, though they would have been."""
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"node": self.node, "again": self.again, "skipped": self.skipped, "error": self.error}


def parse_target(to: str, when: str = "", *, now_s: float | None = None) -> dict[str, str]:
    """What nsqd is told: the start, the end, or a time. A time is an RFC 3339 one, `YYYY-MM-DD HH:MM` in UTC,
    Unix seconds, or a duration ago, such as 90m. Raises BadTarget."""
    if to in ("start", "end"):
        return {"to": to}
    if to != "time":
        raise BadTarget("go to the start, to the end, or to a time")
    wanted = when.strip()
    if not wanted:
        raise BadTarget("which time?")
    if re.fullmatch(r"[0-9]{9,10}(\.[0-9]+)?", wanted):
        return {"time": wanted}
    try:
        ago_s = parse_duration(wanted)
        return {"time": f"{(time.time() if now_s is None else now_s) - abs(ago_s):.3f}"}
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(wanted.removesuffix("UTC").strip())
    except ValueError:
        raise BadTarget(f"{wanted!r} is no time such as 2026-01-31 12:00 or 90m") from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return {"time": found.isoformat()}


async def seek(
    cluster: Cluster,
    nodes: Iterable[Node],
    topic: str,
    channel: str,
    target: dict[str, str],
    *,
    dry_run: bool,
) -> list[Plan]:
    """Move the channel on each of the nodes, or only say what that would do."""
    query = {"topic": topic, "channel": channel, **target}
    if dry_run:
        query["dry_run"] = "true"
    found = []
    for node in nodes:
        try:
            said = (await cluster.ask(node, "POST", "/channel/seek", **query)).json()
        except Refused as refused:
            missing = {"CHANNEL_NOT_FOUND": "has no such channel", "NOT_FOUND": "cannot do this"}
            found.append(Plan(node.address, error=missing.get(refused.code, refused.code or str(refused))))
        except AskFailed as error:
            found.append(Plan(node.address, error=str(error)))
        else:
            said = said if isinstance(said, dict) else {}
            found.append(Plan(node.address, number(said, "again"), number(said, "skipped")))
    return found
