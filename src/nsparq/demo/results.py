"""What came out: read from the Parquet files and the topics themselves, not from what anybody counted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nsparq.client import Consumer, Message
from nsparq.demo.watching import ACTIVITY, DEAD, DemoFailed, topic_count
from nsparq.up.members import Cluster

__all__ = ["Found", "find"]

CHANNEL: Final = "demo"
PATIENCE_S: Final = 30.0


@dataclass
class Found:
    """The result of a run."""

    rows: Counter[str] = field(default_factory=Counter)
    """Rows in Parquet, by kind."""
    twice: int = 0
    """Rows whose id is in another row too, without the first of each."""
    late: int = 0
    """Different ids of rows that are marked as too late."""
    places: int = 0
    """Different messages in Parquet and among the dead letters: each has its own offset in the log."""
    letters: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why they are dead, by the beginning of the text."""
    results: int = 0
    """Messages in the topic of results."""
    windows: Counter[tuple[int, str]] = field(default_factory=Counter)
    cents: Counter[tuple[int, str]] = field(default_factory=Counter)
    files: int = 0
    bytes: int = 0
    latencies_s: tuple[float, float] = (0.0, 0.0)
    """From publishing to the end of the file that has it: median, and 95 of 100."""


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
    found.places = sum(_different(offsets) for offsets in places.values())
    return found


def _read_files(directory: Path, found: Found) -> defaultdict[str, list[Any]]:
    """The offsets of the rows in the logs of the nodes; everything else goes to `found`."""
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
    found.twice = found.rows.total() - _different(ids)
    found.late = _different(late)
    if waits:
        median, most = numpy.percentile(numpy.concatenate(waits), [50, 95])
        found.latencies_s = (float(median), float(most))
    return places


def _different(numbers: list[Any]) -> int:
    import numpy

    return len(numpy.unique(numpy.concatenate(numbers))) if numbers else 0


async def _consume(cluster: Cluster, topic: str, take: Callable[[bytes], None]) -> None:
    """All messages of a topic that nobody publishes to any more. Raises DemoFailed."""
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
            text = f"{topic}: {taken:,} of {expected:,} messages came within {PATIENCE_S:.0f} s"
            raise DemoFailed(text) from None
