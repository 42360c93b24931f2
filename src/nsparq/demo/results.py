"""What came out of the stack, read from the Parquet files and the topics; and whether it is right.

It is right if every message is in exactly one place, and every event is counted exactly once.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from nsparq.client import Consumer, Message
from nsparq.demo.events import CLOSING, Expected
from nsparq.demo.watching import ACTIVITY, DEAD, DemoFailed, topic_count
from nsparq.up.members import Cluster

__all__ = ["Found", "find", "problems"]

K = TypeVar("K")

CHANNEL: Final = "demo"
PATIENCE_S: Final = 30.0


@dataclass
class Found:
    """The result of a run."""

    rows: Counter[str] = field(default_factory=Counter)
    """Rows in Parquet, by kind."""
    twice: int = 0
    """Rows that repeat the id of an earlier row."""
    late: int = 0
    """Distinct ids of rows that are marked as too late."""
    places: int = 0
    """Distinct messages in Parquet and among the dead letters, by their offsets in the log."""
    letters: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Errors of the dead letters, by the beginning of the text."""
    results: int = 0
    """Messages in the topic of results."""
    windows: Counter[tuple[int, str]] = field(default_factory=Counter)
    cents: Counter[tuple[int, str]] = field(default_factory=Counter)
    files: int = 0
    bytes: int = 0
    latencies_s: tuple[float, float] = (0.0, 0.0)
    """From publishing a message to the end of its file: median and 95th percentile."""


async def find(cluster: Cluster, directory: Path) -> Found:
    """Raises DemoFailed."""
    found = Found()
    places = await asyncio.to_thread(_read_files, directory, found)

    def letter(body: bytes) -> None:
        content = json.loads(body)
        places[content["node"]].append([content["offset"]])
        found.letters += 1
        found.reasons[content["error"].partition(":")[0]] += 1

    def result(body: bytes) -> None:
        content = json.loads(body)
        window = (content["window"], content["kind"])
        found.results += 1
        found.windows[window] += content["events"]
        found.cents[window] += content["cents"]

    await _consume(cluster, DEAD, letter)
    await _consume(cluster, ACTIVITY, result)
    found.places = sum(_count_distinct(offsets) for offsets in places.values())
    return found


def _read_files(directory: Path, found: Found) -> defaultdict[str, list[Any]]:
    """Returns the log offsets of the rows by node; everything else goes to `found`."""
    import numpy
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    places: defaultdict[str, list[Any]] = defaultdict(list)
    ids: list[Any] = []
    late: list[Any] = []
    waits: list[Any] = []
    for path in sorted(directory.rglob("*.parquet")):
        if path.relative_to(directory).parts[0].startswith("_"):
            continue
        table = parquet.ParquetFile(path).read(columns=["id", "kind", "late", "node", "offset", "published"])
        for one in compute.value_counts(table["kind"]).to_pylist():
            found.rows[one["values"]] += one["counts"]
        for node in compute.unique(table["node"]).to_pylist():
            places[node].append(table.filter(compute.equal(table["node"], node))["offset"].to_numpy())
        ids.append(table["id"].to_numpy())
        published_s = table["published"].cast("timestamp[us]").to_numpy().astype("int64") / 1e6
        waits.append(path.stat().st_mtime - published_s)
        late.append(table.filter(table["late"])["id"].to_numpy())
        found.files += 1
        found.bytes += path.stat().st_size
    found.twice = found.rows.total() - _count_distinct(ids)
    found.late = _count_distinct(late)
    if waits:
        median, most = numpy.percentile(numpy.concatenate(waits), [50, 95])
        found.latencies_s = (float(median), float(most))
    return places


def _count_distinct(numbers: list[Any]) -> int:
    import numpy

    return len(numpy.unique(numpy.concatenate(numbers))) if numbers else 0


async def _consume(cluster: Cluster, topic: str, take: Callable[[bytes], None]) -> None:
    """All messages of a topic that gets no more. Raises DemoFailed."""
    expected = await asyncio.to_thread(topic_count, cluster, topic)
    taken, all_taken = 0, asyncio.Event()
    if not expected:
        return

    async def handle(message: Message) -> None:
        nonlocal taken
        take(message.body)
        taken += 1
        if taken >= expected:
            all_taken.set()

    lookupd = cluster.lookupd.address("HTTP")
    async with Consumer(topic, CHANNEL, handle, nsqlookupd=[lookupd], max_in_flight=500):
        try:
            async with asyncio.timeout(PATIENCE_S):
                await all_taken.wait()
        except TimeoutError:
            text = f"{topic}: {taken:,} of {expected:,} messages arrived within {PATIENCE_S:.0f} s"
            raise DemoFailed(text) from None


# Checks


def problems(expected: Expected, found: Found) -> list[str]:
    """Each difference in words; none if the result is right."""
    rows = found.rows.total()
    explained = found.windows.total() + found.twice + found.late + found.rows[CLOSING]
    pairs = [
        ("messages in Parquet and dead letters", rows + found.letters, expected.sent),
        ("distinct messages among these", found.places, expected.sent),
        ("dead letters", found.letters, expected.broken),
        ("duplicate events", found.twice, expected.twice),
        ("events that were too late", found.late, expected.late),
        ("rows that were counted, duplicate, too late, or the end of the day", explained, rows),
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
