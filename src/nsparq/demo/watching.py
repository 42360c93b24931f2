"""The progress of the demo, asked from the daemons as an operator would."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nsparq.fetch import FetchError, fetch
from nsparq.up.members import Cluster

__all__ = [
    "ACTIVITY",
    "DEAD",
    "EVENTS",
    "DemoFailed",
    "Now",
    "Series",
    "look",
    "pipelines_on_the_page",
    "topic_count",
]

EVENTS, DEAD, ACTIVITY = "shop.events", "shop.dead", "shop.activity"
"""Topics, as in shop.toml."""
ASK_S: Final = 20.0


class DemoFailed(Exception):
    """The demo failed; the text says why."""


@dataclass(frozen=True, slots=True)
class Now:
    """The counts at one moment."""

    written: int = 0
    """Events in Parquet."""
    read: int = 0
    """Messages that both pipelines have read."""
    letters: int = 0
    results: int = 0
    lag: int | None = None
    """Messages that the slowest pipeline has not read yet; None if unknown."""
    errors: str = ""
    """Errors of failed pipelines."""


@dataclass
class Series:
    """The counts over time, for the chart."""

    began: float = field(default_factory=time.monotonic)
    seconds: list[float] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def add(self, published: int, written: int) -> None:
        self.seconds.append(time.monotonic() - self.began)
        self.published.append(published)
        self.written.append(written)


async def look(cluster: Cluster) -> Now:
    """Raises DemoFailed for a daemon that does not answer."""
    return await asyncio.to_thread(_look, cluster)


def _look(cluster: Cluster) -> Now:
    status = _get(f"http://{cluster.pipelines[0].address('metrics')}/status")
    found: dict[str, Mapping[str, Any]] = {one["name"]: one for one in status["pipelines"]}
    events, activity = found["events"], found["activity"]
    failed = [f"{one['name']}: {one['error']}" for one in found.values() if one["state"] == "failed"]
    return Now(
        written=events["rows"] - events["undecodable"],
        read=min(events["rows"], activity["rows"]),
        letters=topic_count(cluster, DEAD),
        results=topic_count(cluster, ACTIVITY),
        lag=_worst(one["lag"] for one in found.values()),
        errors="; ".join(failed),
    )


def _worst(lags: Iterable[int | None]) -> int | None:
    known = [one for one in lags if one is not None]
    return max(known) if known else None


def topic_count(cluster: Cluster, topic: str) -> int:
    """Messages published to a topic, on all nsqds. Raises DemoFailed."""
    count = 0
    for nsqd in cluster.nsqds:
        stats = _get(f"http://{nsqd.address('HTTP')}/stats?format=json&topic={topic}")
        count += sum(one["message_count"] for one in stats["topics"] or ())
    return count


async def pipelines_on_the_page(cluster: Cluster) -> dict[str, str]:
    """The states of the pipelines as nsqadmin shows them, by name. Raises DemoFailed."""
    answer = await asyncio.to_thread(_get, f"http://{cluster.admin.address('HTTP')}/api/pipelines")
    return {one["name"]: one.get("state", "") for one in answer["pipelines"]}


def _get(url: str) -> Any:
    try:
        answer = fetch(url, connect_timeout=ASK_S, request_timeout=ASK_S)
        if answer.status != 200:
            raise DemoFailed(f"{url} answers {answer.status}")
        return json.loads(answer.body)
    except (FetchError, ValueError) as error:
        raise DemoFailed(f"{url}: {error}") from error
