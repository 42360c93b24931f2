"""Rows written by Spark to nsqd, compared with sinks that drop them; see --help.

The rows come from Parquet files, read by the JVM. They are written, in turns, to Spark's own sink
that drops everything (what reading costs), to a Python sink that drops everything (what handing
rows to Python costs, which no Python sink can beat), and to format("nsq") with each delivery
guarantee. Broker and Spark share the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from benchmarks.macro.brokers import OURS
from benchmarks.macro.http import HttpBroker
from benchmarks.macro.report import describe_machine, print_facts
from nsparq.spark.session.build import build_session

TARGET = 300_000
SMALL = 20
"""Triggers of one row that are measured, after as many that are not."""
HELP = {
    "rows": "rows of a batch write, and of one micro-batch",
    "size": "bytes in a body",
    "files": "files that they lie in, and partitions",
    "batches": "micro-batches of a stream; the first is left out",
    "rounds": "rounds of each load",
    "cores": "of the local master",
}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Everything that shapes the loads; printed before any figure. Each is a flag of the same
    name."""

    rows: int = 1_000_000
    size: int = 200
    files: int = 4
    batches: int = 4
    rounds: int = 3
    cores: int = 2


class Dropped(WriterCommitMessage):
    pass


class _DropBatch(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return Dropped()


class _DropStream(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return Dropped()


class PythonNoop(DataSource):
    """Takes every row as far as a Python sink gets it."""

    @classmethod
    def name(cls) -> str:
        return "python-noop"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _DropBatch()

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return _DropStream()


@dataclass(frozen=True)
class Load:
    """A format to write to."""

    name: str
    format: str
    options: Callable[[str], dict[str, str]] = lambda address: {}


LOADS = [
    Load("noop of the JVM", "noop"),
    Load("noop in Python", "python-noop"),
    Load("nsq exactly-once", "nsq", lambda address: _options(address, "exactly-once")),
    Load("nsq at-least-once", "nsq", lambda address: _options(address, "at-least-once")),
]


def _options(address: str, delivery: str) -> dict[str, str]:
    return {"nsqd": address, "topic": "rows", "delivery": delivery}


def write_rows(folder: Path, parameters: Parameters) -> None:
    """Bodies that do not compress away, and differ."""
    folder.mkdir()
    random = np.random.default_rng(5)
    count = parameters.rows // parameters.files
    for index in range(parameters.files):
        letters = random.integers(32, 127, count * parameters.size, dtype=np.uint8)
        offsets = np.arange(0, count * parameters.size + 1, parameters.size, dtype=np.int32)
        bodies = pa.Array.from_buffers(
            pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
        )
        table = pa.table({"body": bodies})
        pq.write_table(table, folder / f"{index}.parquet", use_dictionary=False, compression="none")


class Bench:
    def __init__(self, spark: SparkSession, folder: Path, parameters: Parameters) -> None:
        self.spark, self.folder, self.parameters = spark, folder, parameters

    def batch(self, load: Load, address: str) -> float:
        frame = self.spark.read.parquet(str(self.folder / "rows"))
        began = time.perf_counter()
        frame.write.format(load.format).options(**load.options(address)).mode("append").save()
        return self.parameters.rows / (time.perf_counter() - began)

    def stream(self, load: Load, address: str) -> float:
        """Rows per second of whole triggers, after the first."""
        source = self.folder / "stream"
        for index in range(self.parameters.batches):
            for path in sorted((self.folder / "rows").iterdir()):
                target = source / f"{index}-{path.name}"
                if not target.exists():
                    source.mkdir(exist_ok=True)
                    target.hardlink_to(path)
        frame = self.spark.readStream.schema("body binary").option(
            "maxFilesPerTrigger", self.parameters.files
        )
        query = (
            frame.parquet(str(source))
            .writeStream.format(load.format)
            .options(**load.options(address))
            .option("checkpointLocation", str(self.folder / f"checkpoint-{uuid4().hex}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        progress: list[Any] = [one for one in query.recentProgress if one["numInputRows"]]
        assert len(progress) == self.parameters.batches, len(progress)
        seconds = sum(one["durationMs"]["triggerExecution"] for one in progress[1:]) / 1000
        return int(sum(one["numInputRows"] for one in progress[1:])) / float(seconds)

    def small(self, load: Load, address: str) -> float:
        """Milliseconds of a trigger with one row, in the middle."""
        frame = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
        query = (
            frame.selectExpr("CAST(value AS STRING) AS body")
            .writeStream.format(load.format)
            .options(**load.options(address))
            .option("checkpointLocation", str(self.folder / f"checkpoint-{uuid4().hex}"))
            .start()
        )
        deadline = time.monotonic() + 120
        while (query.lastProgress or {"batchId": 0})["batchId"] < 2 * SMALL:
            assert query.isActive and time.monotonic() < deadline, query.exception()
            time.sleep(0.05)
        query.stop()
        return statistics.median(
            one["durationMs"]["triggerExecution"] for one in [*query.recentProgress][-SMALL:]
        )


def count_messages(broker: HttpBroker) -> int:
    host, port = broker.http_address
    with urllib.request.urlopen(f"http://{host}:{port}/stats?format=json&include_mem=false") as answer:
        topics = json.load(answer)["topics"]
    return sum(topic["message_count"] for topic in topics)


def run(parameters: Parameters, command: str, folder: Path) -> int:
    write_rows(folder / "rows", parameters)
    spark = build_session(
        "sink benchmark",
        master=f"local[{parameters.cores}]",
        ui_port=None,
        conf={"spark.driver.memory": "2g"},
    )
    try:
        spark.dataSource.register(PythonNoop)
        bench = Bench(spark, folder, parameters)
        kinds: dict[str, Callable[[Load, str], float]] = {"batch": bench.batch, "stream": bench.stream}
        figures: dict[tuple[str, str], list[float]] = {}
        for number in range(-1, parameters.rounds):
            for kind, measure in kinds.items():
                for load in LOADS:
                    with HttpBroker(command, [], folder) as broker:
                        host, port = broker.http_address
                        before = broker.cpu_seconds()
                        rate = measure(load, f"{host}:{port}")
                        cpu = broker.cpu_seconds() - before
                        written = parameters.rows * (parameters.batches if kind == "stream" else 1)
                        arrived = count_messages(broker)
                        if load.format == "nsq" and arrived != written:
                            print(f"{kind}, {load.name}: {arrived:,} of {written:,} messages arrived")
                            return 1
                    if number >= 0:
                        figures.setdefault((kind, load.name), []).append(rate)
                    print(
                        f"round {number + 1} {kind:>6} {load.name:<18} {rate:12,.0f} rows/s"
                        + (f"   broker {cpu / written * 1e6:.2f} us/row" if load.format == "nsq" else ""),
                        flush=True,
                    )
        print(f"\n{'trigger of one row':<28}{'median':>12}")
        for load in LOADS:
            with HttpBroker(command, [], folder) as broker:
                host, port = broker.http_address
                print(f"        {load.name:<20}{bench.small(load, f'{host}:{port}'):9.0f} ms", flush=True)
    finally:
        spark.stop()
    print(f"\n{'':28}{'best':>12}{'median':>12}   of Python noop")
    for (kind, name), values in figures.items():
        noop = statistics.median(figures[kind, "noop in Python"])
        middle = statistics.median(values)
        print(f"{kind:>6}  {name:<20}{max(values):12,.0f}{middle:12,.0f}   {middle / noop:.2f}")
    worst = min(max(values) for (_, name), values in figures.items() if name.startswith("nsq"))
    print(f"target {TARGET:,} rows/s: {'reached' if worst >= TARGET else 'missed'}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.spark.sink", description=__doc__)
    for one in fields(Parameters):
        parser.add_argument(f"--{one.name}", type=int, default=one.default, help=HELP[one.name])
    parser.add_argument("--command", default=OURS, help="the nsqd to write to")
    arguments = vars(parser.parse_args())
    command = arguments.pop("command")
    parameters = Parameters(**arguments)
    print_facts(describe_machine({"nsqd": command}).items())
    print_facts((one.name, getattr(parameters, one.name)) for one in fields(parameters))
    # So that Spark and the broker are ended then too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="bench-sink-"))
    try:
        return run(parameters, command, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
