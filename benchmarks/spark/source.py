"""Reading a topic with Spark, against Spark's own stream of Parquet files with the same rows.

    python -m benchmarks.spark.source

One run, local[2], the broker on the same cores. Both sides take turns, several rounds; the ratio is
what counts. Processor time, of Spark with its Python processes and of the broker, is given too; it
includes the start of a query. A second topic has messages of the same size, of which two headers
are a part; its ratio is to the topic without.

Then the fixed cost of a trigger: with one row, with none, when only the offsets change, and, to
tell Spark's own part of it, with one row of Spark's stream of files. The figures are of a stream
that runs: Java compiles its code during the first 200 triggers (`--warm-up`), and the 100 after
them count. The median of the first 40 is printed too. The end of a trigger is seen in the
checkpoint, because asking Spark for its progress takes as much processor time as a trigger.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.listener import StreamingQueryProgress

from benchmarks.macro.brokers import OURS, TICKS_PER_SECOND, Spawned
from benchmarks.macro.loads import Figure
from benchmarks.macro.report import Results, describe_machine
from nsparq.headers import encode_headers
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access
from nsparq.spark.session.build import build_session

TOPIC = "bench"
WITH_HEADERS = "bench-headers"
HEADERS_TARGET = 0.85
TRIGGER_TARGET_MS = 80
EARLY_TRIGGERS = 40
EMPTY_TRIGGERS = 40


def body_of(number: int, size: int, chance: random.Random) -> bytes:
    """JSON as messages often are: names that repeat, values that do not."""
    customer, amount = f"{chance.getrandbits(64):016x}", f"{chance.random():.6f}"
    text = f'{{"order": {number}, "customer": "{customer}", "amount": {amount}, "note": "'
    return (text + chance.randbytes(size // 2).hex())[: size - 2].encode() + b'"}'


def block_of(chance: random.Random) -> bytes:
    """Headers as messages often have them: the trace, and the type of the body."""
    trace = f"00-{chance.getrandbits(128):032x}-{chance.getrandbits(64):016x}-01"
    block = encode_headers({"traceparent": trace, "content-type": "application/json"})
    return len(block).to_bytes(4, "big") + block


def publish(client: Client, first: int, count: int, size: int, batch: int, *, headers: bool = False) -> None:
    chance, trace = random.Random(first), random.Random(first)
    topic, more = (WITH_HEADERS, {"headers": "true"}) if headers else (TOPIC, {})
    for start in range(first, first + count, batch):
        bodies = []
        for number in range(start, min(start + batch, first + count)):
            block = block_of(trace) if headers else b""
            bodies.append(block + body_of(number, size - len(block), chance))
        sized = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
        client.post("/mpub", len(bodies).to_bytes(4, "big") + sized, topic=topic, binary="true", **more)


@contextmanager
def broker(data_dir: Path | None) -> Iterator[Client]:
    with Spawned(OURS, ["--broadcast-address=127.0.0.1"], data_dir) as spawned:
        found: list[str] = []
        while not found:
            time.sleep(0.01)
            found = spawned.log.read_text().partition("HTTP: listening on ")[2].split()
        with Client(found[0], Access()) as client:
            yield client


def tree_seconds(root: int) -> float:
    """Processor time of a process and all below it, those included that have ended."""
    parents: dict[int, int] = {}
    times: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
            times[int(stat.parent.name)] = sum(map(int, fields[11:15])) / TICKS_PER_SECOND
    members = {root}
    while grown := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= grown
    return sum(times.get(pid, 0.0) for pid in members)


class Run(NamedTuple):
    seconds: float
    """Of the micro-batches that had rows."""
    cpu_seconds: float
    """Of everything, starting the query included."""
    rows: int
    parts: dict[str, int]
    """Where the time went, in milliseconds."""


class Bench:
    def __init__(self, spark: SparkSession, client: Client, options: argparse.Namespace, work: Path) -> None:
        self.spark, self.client, self.options, self.work = spark, client, options, work
        self.parquet = work / "parquet"
        self.runs = 0
        self.results = Results()
        """For `--json`. The other side is Spark's stream of files; with headers, the topic
        without."""

    def add(self, name: str, unit: str, ours: list[float], peer: list[float]) -> None:
        for side, values in (("ours", ours), ("peer", peer)):
            for value in values:
                self.results.add(side, {name: Figure(value, unit)})

    def source(self, topic: str | None = TOPIC, **more: str) -> DataFrame:
        options = {"topic": topic, "nsqd": self.client.url, "channel": f"run-{self.runs}", **more}
        if self.options.partition_bytes:
            options["partitionBytes"] = self.options.partition_bytes
        return self.spark.readStream.format("nsq").options(**options).load()

    def files(self) -> DataFrame:
        schema = self.spark.read.parquet(str(self.parquet)).schema
        return self.spark.readStream.schema(schema).parquet(str(self.parquet))

    def run(self, frame: DataFrame, sink: str) -> Run:
        self.runs += 1
        before = tree_seconds(os.getpid())
        here = self.work / f"run-{self.runs}"
        writer = frame.writeStream.format(sink).option("checkpointLocation", str(here / "checkpoint"))
        query = writer.option("path", str(here / "out")).trigger(availableNow=True).start()
        query.awaitTermination()
        progress = [json.loads(one.json) for one in query.recentProgress if one.numInputRows > 0]
        shutil.rmtree(here, ignore_errors=True)
        parts = {
            name: sum(p["durationMs"].get(name, 0) for p in progress) for name in progress[0]["durationMs"]
        }
        return Run(
            sum(p["batchDuration"] for p in progress) / 1000,
            tree_seconds(os.getpid()) - before,
            sum(p["numInputRows"] for p in progress),
            parts,
        )


def throughput(bench: Bench) -> None:
    options = bench.options
    for sink, called, target in (("noop", "nothing", 0.85), ("parquet", "Parquet", 0.8)):
        sides: dict[str, Callable[[], DataFrame]] = {
            "nsq": bench.source,
            "headers": lambda: bench.source(WITH_HEADERS),
            "files": bench.files,
        }
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        for number in range(options.rounds + 1):
            for name in [*sides] if number % 2 == 0 else [*reversed(sides)]:
                run = bench.run(sides[name](), sink)
                assert run.rows == options.rows, f"{run.rows} rows"
                if number:
                    # The first round warms up.
                    runs[name].append(run)
                if options.verbose:
                    print(
                        f"    {name}: {run.rows / run.seconds:,.0f} rows/s, {run.cpu_seconds:.1f} s",
                        run.parts,
                    )
        print(f"into {sink}:")
        rates = {name: [run.rows / run.seconds for run in some] for name, some in runs.items()}
        costs = {name: [run.cpu_seconds * 1e6 / run.rows for run in some] for name, some in runs.items()}
        bench.add(f"into {called}", "rows/s", rates["nsq"], rates["files"])
        bench.add(f"into {called}, CPU per row", "us", costs["nsq"], costs["files"])
        bench.add(f"into {called}, headers", "rows/s", rates["headers"], rates["nsq"])
        for name in sides:
            print(
                f"  {name:<7} {statistics.median(rates[name]):>9,.0f} rows/s, "
                f"best {max(rates[name]):>9,.0f}; "
                f"processor {statistics.median(costs[name]):.2f} us a row, best {min(costs[name]):.2f}"
            )
        ratio = statistics.median(rates["nsq"]) / statistics.median(rates["files"])
        best = max(rates["nsq"]) / max(rates["files"])
        print(f"  nsq to files: {ratio:.2f}, of the best {best:.2f} (wanted: {target})")
        ratio = statistics.median(rates["headers"]) / statistics.median(rates["nsq"])
        best = max(rates["headers"]) / max(rates["nsq"])
        print(f"  with headers to without: {ratio:.2f}, of the best {best:.2f} (wanted: {HEADERS_TARGET})")


class Stream(NamedTuple):
    query: StreamingQuery
    commits: Path
    """Spark's log of the micro-batches that are done."""

    def last_batch(self) -> int:
        return max((int(name) for name in os.listdir(self.commits) if name.isdigit()), default=-1)

    def trigger(self, cause: Callable[[], object]) -> None:
        """Gives the stream something to do, and waits until it is done."""
        before = self.last_batch()
        cause()
        wait_for(lambda: self.last_batch() > before)

    def triggers(self, options: argparse.Namespace, cause: Callable[[int], object]) -> float:
        """Many of them. The processor time of one, in milliseconds, after those that warm up."""
        used = 0.0
        for number in range(options.warm_up + options.triggers):
            if number == options.warm_up:
                used = tree_seconds(os.getpid())
            self.trigger(lambda number=number: cause(number))
        return 1000 * (tree_seconds(os.getpid()) - used) / options.triggers

    def batches(self) -> list[StreamingQueryProgress]:
        """The micro-batches so far, those without rows included."""
        wait_for(lambda: last_progress(self.query) >= self.last_batch())
        return [one for one in self.query.recentProgress if "addBatch" in one.durationMs]


def fixed_cost(bench: Bench) -> None:
    """Triggers one after the other, each with a single row, each with a new topic that is empty, or
    each with a new file of a single row."""
    options = bench.options
    name = "empty-0"
    bench.client.post("/topic/create", topic=name)
    with running(
        bench, bench.source(topic=None, topicsPattern="empty-.*", discoveryInterval="10ms")
    ) as stream:
        ours_cpu = stream.triggers(options, lambda _: bench.client.post("/pub", b"x", topic=name))
        ours = show("one row", [p for p in stream.batches() if p.numInputRows == 1], options)
        first = stream.last_batch() + 1
        for number in range(EMPTY_TRIGGERS):
            stream.trigger(
                lambda number=number: bench.client.post("/topic/create", topic=f"empty-{number + 1}")
            )
        empty = [p for p in stream.batches() if p.batchId >= first and p.numInputRows == 0]
        bench.add("trigger of none", "ms", show("no row", empty), [])
    files = bench.work / "one-row-files"
    files.mkdir()
    bench.spark.range(1).coalesce(1).write.parquet(str(bench.work / "one-row"))
    (row,) = (bench.work / "one-row").glob("part-*")

    def add_file(number: int) -> None:
        # A name that begins with _ is hidden from Spark until the file is complete.
        shutil.copy(row, files / "_next")
        (files / "_next").rename(files / f"{number}.parquet")

    with running(bench, bench.spark.readStream.schema("id long").parquet(str(files))) as stream:
        other_cpu = stream.triggers(options, add_file)
        other = show("one row of a file", [p for p in stream.batches() if p.numInputRows == 1], options)
    print(f"processor time of a trigger with one row: {ours_cpu:.0f} ms, of a file {other_cpu:.0f} ms")
    bench.add("trigger of one row", "ms", ours, other)
    bench.add("trigger of one row, CPU", "ms", [ours_cpu], [other_cpu])


@contextmanager
def running(bench: Bench, frame: DataFrame) -> Iterator[Stream]:
    bench.runs += 1
    checkpoint = bench.work / f"run-{bench.runs}"
    query = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        wait_for(lambda: query.lastProgress is not None)
        yield Stream(query, checkpoint / "commits")
    finally:
        query.stop()


def last_progress(query: StreamingQuery) -> int:
    progress = query.lastProgress
    return -1 if progress is None else progress.batchId


def show(
    what: str, batches: list[StreamingQueryProgress], options: argparse.Namespace | None = None
) -> list[float]:
    """Milliseconds, without latestOffset, in which the source waits for something to come."""
    times: list[float] = [p.batchDuration - p.durationMs["latestOffset"] for p in batches]
    if options is not None:
        early = statistics.median(times[:EARLY_TRIGGERS])
        print(f"the first {EARLY_TRIGGERS} triggers with {what}: {early:.0f} ms")
        batches, times = batches[options.warm_up :], times[options.warm_up :]
    parts = {
        name: statistics.median(p.durationMs.get(name, 0) for p in batches) for name in batches[0].durationMs
    }
    wanted = f" (wanted: {TRIGGER_TARGET_MS})" if what == "one row" else ""
    middle = statistics.median(times)
    print(f"trigger with {what}: {middle:.0f} ms, best {min(times):.0f} ms, of {len(times)}{wanted}")
    print("  " + ", ".join(f"{name} {value:.0f}" for name, value in parts.items()))
    return times


def wait_for(fact: Callable[[], object], timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.005)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark.source", description=__doc__)
    parser.add_argument("--rows", type=int, default=800_000, metavar="N", help="messages (%(default)s)")
    parser.add_argument("--size", type=int, default=200, metavar="N", help="bytes in a message (%(default)s)")
    parser.add_argument(
        "--batch", type=int, default=200, metavar="N", help="messages in a publish (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each side (%(default)s)")
    parser.add_argument("--triggers", type=int, default=100, metavar="N", help="with one row (%(default)s)")
    parser.add_argument(
        "--warm-up", type=int, default=200, metavar="N", help="triggers before them (%(default)s)"
    )
    parser.add_argument("--files", type=int, default=8, metavar="N", help="of Parquet (%(default)s)")
    parser.add_argument("--partition-bytes", metavar="SIZE", help="the option of the source")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where everything is made")
    parser.add_argument("--verbose", action="store_true", help="each run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="bench-source-", dir=options.data_dir))
    try:
        with broker(options.data_dir) as client:
            for topic in (TOPIC, WITH_HEADERS):
                client.post("/topic/create", topic=topic)
                client.post("/channel/create", topic=topic, channel="keep")
                publish(client, 0, options.rows, options.size, options.batch, headers=topic == WITH_HEADERS)
            kept = str(2 * (options.warm_up + options.triggers + EMPTY_TRIGGERS))
            conf = {"spark.sql.streaming.numRecentProgressUpdates": kept}
            spark = build_session("bench-source", master="local[2]", ui_port=None, conf=conf)
            try:
                bench = Bench(spark, client, options, work)
                rows = spark.read.format("nsq").options(topic=TOPIC, nsqd=client.url).load()
                rows.repartition(options.files).write.parquet(str(bench.parquet))
                throughput(bench)
                fixed_cost(bench)
                if options.json:
                    names = ("rows", "size", "batch", "rounds", "triggers", "warm_up", "files")
                    parameters: dict[str, object] = {name: getattr(options, name) for name in names}
                    bench.results.write_json(options.json, parameters, describe_machine({}))
            finally:
                spark.stop()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
