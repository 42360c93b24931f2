"""One stream over thousands of topics: its cost while idle, and the time of one poll.

    python -m benchmarks.spark.many_topics

Idle: the processor time of Spark with its Python processes and of nsqd, as a share of one core,
while a stream waits for messages of all topics. A poll: the driver's part without Spark, which
finds the one topic with new messages; its elapsed time, and the processor time of driver and nsqd.
Processor time does not depend on what else the machine does.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.macro.brokers import OURS
from benchmarks.macro.http import HttpBroker
from benchmarks.spark.command import run_command
from benchmarks.spark.source import tree_seconds
from nsparq.addresses import join_address
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access
from nsparq.spark.options import NsqOptions, Use
from nsparq.spark.session.build import build_session
from nsparq.spark.source.driver import LogSource
from nsparq.spark.trigger import Limit

HELP = {
    "topics": "that the stream reads",
    "seconds": "during which nothing happens",
    "warm_up": "seconds before that",
    "looks": "of which the median counts",
    "cores": "of the local master",
}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Everything that shapes the loads; printed before any figure. Each is a flag of the same
    name."""

    topics: int = 2000
    seconds: float = 30.0
    warm_up: float = 20.0
    looks: int = 20
    cores: int = 2


class Look(NamedTuple):
    """Seconds."""

    wall: float
    driver: float
    broker: float


def topic(number: int) -> str:
    return f"many-{number:05}"


class Bench:
    def __init__(self, broker: HttpBroker, client: Client, parameters: Parameters) -> None:
        self.broker, self.client, self.parameters = broker, client, parameters

    def options(self, channel: str) -> dict[str, str]:
        return {"nsqd": self.client.url, "topicsPattern": "many-.*", "channel": channel}

    def create(self) -> None:
        for number in range(self.parameters.topics):
            self.client.post("/topic/create", topic=topic(number))

    # the driver alone

    def looks(self) -> list[Look]:
        source = LogSource(NsqOptions.parse(self.options("looks"), Use.LOG_STREAM))
        try:
            began = time.perf_counter()
            at = source.initial()
            print(f"start, with all channels created: {time.perf_counter() - began:.2f} s")
            looks = []
            for number in range(self.parameters.looks):
                self.client.post("/pub", b"x", topic=topic(number))
                before = time.perf_counter(), time.process_time(), self.broker.cpu_seconds()
                end = source.latest(at, Limit())
                after = time.perf_counter(), time.process_time(), self.broker.cpu_seconds()
                assert end != at
                tasks = source.tasks(at, end)
                assert len(tasks) == 1
                looks.append(Look(*(late - early for late, early in zip(after, before, strict=True))))
                at = end
            for number in range(self.parameters.topics):
                self.client.post("/pub", b"x", topic=topic(number))
            end = source.latest(at, Limit())
            print(f"tasks of a batch with a message of each topic: {len(source.tasks(at, end))}")
            return looks
        finally:
            source.close()

    # with Spark

    def idle(self, spark: SparkSession, folder: Path) -> tuple[float, float]:
        """Processor time of Spark and of nsqd, as shares of a core."""
        writer = spark.readStream.format("nsq").options(**self.options("idle")).load().writeStream
        query = writer.format("noop").option("checkpointLocation", str(folder / "checkpoint")).start()
        try:
            self._await(query)
            time.sleep(self.parameters.warm_up)
            began, all_before, broker_before = time.monotonic(), self._seconds(), self.broker.cpu_seconds()
            time.sleep(self.parameters.seconds)
            took = time.monotonic() - began
            broker = (self.broker.cpu_seconds() - broker_before) / took
            return (self._seconds() - all_before) / took - broker, broker
        finally:
            query.stop()

    def _seconds(self) -> float:
        return tree_seconds(os.getpid())

    def _await(self, query: StreamingQuery) -> None:
        """Until the stream has read everything."""
        deadline = time.monotonic() + 300
        while True:
            failure = query.exception()
            if failure is not None:
                raise failure
            depths = [one["depth"] for found in self.client.stats("", "idle") for one in found["channels"]]
            if len(depths) == self.parameters.topics and not any(depths):
                return
            if time.monotonic() > deadline:
                raise TimeoutError("the query does not catch up")
            time.sleep(1)


def run(parameters: Parameters, folder: Path) -> int:
    with HttpBroker(OURS, ["--broadcast-address=127.0.0.1"], folder) as broker:
        with Client(join_address(*broker.http_address), Access()) as client:
            bench = Bench(broker, client, parameters)
            bench.create()
            looks = bench.looks()
            wall, driver, nsqd = (statistics.median(one) for one in zip(*looks, strict=True))
            print(
                f"a look: {wall * 1000:.0f} ms; processor time: {driver * 1000:.0f} ms of the driver, "
                f"{nsqd * 1000:.0f} ms of nsqd"
            )
            session = build_session("many topics", master=f"local[{parameters.cores}]", ui_port=None)
            try:
                spark, nsqd = bench.idle(session, folder)
                print(f"idle: {spark + nsqd:.3f} of a core ({spark:.3f} Spark, {nsqd:.3f} nsqd)")
            finally:
                session.stop()
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_command("many_topics", __doc__, Parameters, HELP, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
