"""From published to a row in the result topic: nsq -> Spark -> nsq, with the default trigger.

    python -m benchmarks.spark.latency

A process publishes at a steady rate, one PUB for each message, which carries the time at which it
was due. Spark (local[2], the settings of build_session) copies the topic into another one, in
transactions; when nsqd has appended a message there is in that topic's log. Broker, publisher and
Spark share the machine.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.macro.brokers import OURS
from benchmarks.macro.http import HttpBroker
from benchmarks.macro.wire import Address
from benchmarks.spark.command import run_command
from nsparq.addresses import join_address
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access
from nsparq.spark.session.build import build_session
from nsparq.storage.raw_batch import iter_batches

DIGITS = 20
HELP = {
    "rates": "messages a second, separated by commas",
    "size": "bytes in a body",
    "seconds": "that are measured, for each rate",
    "warm_up": "seconds before that",
    "cores": "of the local master",
}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Everything that shapes the loads; printed before any figure. Each is a flag of the same
    name."""

    rates: str = "100,10000"
    size: int = 200
    seconds: float = 20.0
    warm_up: float = 20.0
    cores: int = 2


class Figures(NamedTuple):
    """Of one rate; times in milliseconds."""

    rate: int
    messages: int
    percentiles: tuple[float, ...]
    batches: int
    batch_ms: float
    batch_rows: float


# publishing


def publish(address: Address, topic: str, rate: int, size: int, seconds: float) -> None:
    """A process of its own. Each message carries when it was due, so that a delay here counts as
    well."""
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"  V2")
    threading.Thread(target=_drain, args=(connection,), daemon=True).start()
    head = b"PUB %b\n" % topic.encode() + struct.pack(">I", size)
    pad = b"." * (size - DIGITS)
    began = time.time_ns()
    sent, count = 0, int(rate * seconds)
    while sent < count:
        due = min(count, (time.time_ns() - began) * rate // 1_000_000_000 + 1)
        if due > sent:
            times = (began + i * 1_000_000_000 // rate for i in range(sent, due))
            connection.sendall(b"".join(head + b"%0*d" % (DIGITS, at) + pad for at in times))
            sent = due
        time.sleep(max(0.001, 0.2 / rate))
    # The answers to the last of them.
    time.sleep(0.5)
    connection.close()


def _drain(connection: socket.socket) -> None:
    try:
        while connection.recv(1 << 16):
            pass
    except OSError:
        pass


# what came out of it


def read_latencies(client: Client, topic: str, start: int) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """When messages were due, and when they were appended to the log of the result."""
    positions = client.positions(topic)
    at = max(start, positions.earliest)
    while at < positions.latest:
        chunk = client.read(topic, at, 4 << 20, positions.incarnation)
        for batch in iter_batches(chunk.data):
            bodies = batch.between(at, positions.latest).bodies()
            yield np.array([int(bytes(body[:DIGITS])) for body in bodies], np.int64), batch.timestamp_ns
        at = chunk.next


def percentiles(latencies: npt.NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.percentile(latencies, (50, 90, 99, 100)))


class Bench:
    def __init__(
        self, spark: SparkSession, broker: HttpBroker, client: Client, parameters: Parameters
    ) -> None:
        self.spark, self.broker, self.client, self.parameters = spark, broker, client, parameters

    def run(self, rate: int, folder: Path) -> Figures:
        source, result = f"source-{rate}", f"result-{rate}"
        # The channel keeps the result.
        self.client.create_channel(result, "keep")
        query = self._start(source, result, folder)
        parameters = self.parameters
        seconds = parameters.warm_up + parameters.seconds
        try:
            start = self._first(query, source, result)
            began = time.time_ns()
            work = (self.broker.address, source, rate, parameters.size, seconds)
            process = get_context("spawn").Process(target=publish, args=work)
            process.start()
            while process.is_alive():
                process.join(1)
                self._check(query)
            self._await(query, source)
            progress: list[Any] = [one for one in query.recentProgress if one["numInputRows"]]
        finally:
            query.stop()
        found = [(due, at) for due, at in read_latencies(self.client, result, start)]
        due = np.concatenate([due for due, _ in found])
        latencies = np.concatenate([(at - due) / 1e6 for due, at in found])
        assert len(due) == int(rate * seconds), f"{len(due)} of {int(rate * seconds)} messages came out"
        assert len(np.unique(due)) == len(due), "some came out twice"
        is_measured = due >= due.min() + parameters.warm_up * 1e9
        measured = [one for one in progress if _started_ns(one) >= began + parameters.warm_up * 1e9]
        return Figures(
            rate,
            int(is_measured.sum()),
            percentiles(latencies[is_measured]),
            len(measured),
            float(np.median([one["batchDuration"] for one in measured])),
            float(np.median([one["numInputRows"] for one in measured])),
        )

    def _start(self, source: str, result: str, folder: Path) -> StreamingQuery:
        nsqd = join_address(*self.broker.http_address)
        rows = self.spark.readStream.format("nsq").option("nsqd", nsqd).option("topic", source)
        return (
            rows.option("channel", "spark")
            .load()
            .select("body")
            .writeStream.format("nsq")
            .option("nsqd", nsqd)
            .option("topic", result)
            .option("delivery", "exactly-once")
            .option("checkpointLocation", str(folder / result))
            .start()
        )

    def _first(self, query: StreamingQuery, source: str, result: str) -> int:
        """Let a message through, so that the query is up; where the result goes on then."""
        self.client.post("/pub", b"first", topic=source)
        deadline = time.monotonic() + 120
        while not (positions := self.client.positions(result)).messages:
            self._check(query)
            if time.monotonic() > deadline:
                raise TimeoutError("the query does not start")
            time.sleep(0.1)
        return positions.latest

    def _check(self, query: StreamingQuery) -> None:
        failure = query.exception()
        if failure is not None:
            raise failure

    def _await(self, query: StreamingQuery, source: str) -> None:
        """Until the channel, which stands behind what is in the result, has nothing left."""
        deadline = time.monotonic() + 60
        while True:
            self._check(query)
            channels = [one for topic in self.client.stats(source) for one in topic["channels"]]
            if channels and channels[0]["depth"] == 0:
                return
            if time.monotonic() > deadline:
                raise TimeoutError("the query does not catch up")
            time.sleep(0.1)


def _started_ns(progress: Any) -> float:
    return np.datetime64(progress["timestamp"].rstrip("Z"), "ns").astype(np.int64).item()


def print_table(rows: list[Figures]) -> None:
    heads = ("msg/s", "messages", "p50 ms", "p90 ms", "p99 ms", "max ms", "batches", "batch ms", "rows/batch")
    print("  ".join(f"{head:>10}" for head in heads))
    for row in rows:
        values = (*row[:2], *row.percentiles, *row[3:])
        print("  ".join(f"{value:>10,.0f}" for value in values))


def run(parameters: Parameters, folder: Path) -> int:
    with HttpBroker(OURS, ["--broadcast-address=127.0.0.1"], folder) as broker:
        spark = build_session("latency benchmark", master=f"local[{parameters.cores}]", ui_port=None)
        spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "10000")
        try:
            with Client(join_address(*broker.http_address), Access()) as client:
                bench = Bench(spark, broker, client, parameters)
                print_table([bench.run(int(rate), folder) for rate in parameters.rates.split(",")])
        finally:
            spark.stop()
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_command("latency", __doc__, Parameters, HELP, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
