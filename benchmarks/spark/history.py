"""Spark reads the history of a topic from the archive, against Parquet files of the same rows in
the same store, and against a read through nsqd.

    python -m benchmarks.spark.history

The store is a local directory. All but the newest log file have left nsqd's disk. The sides take
turns; the first round warms up, and with it nsqd's own cache. The processor time of nsqd shows what
reading history costs it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame

from benchmarks.macro.brokers import OURS, Spawned
from benchmarks.spark.command import run_command
from benchmarks.spark.source import TOPIC, publish, tree_seconds, wait_for
from nsparq.addresses import join_address
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access
from nsparq.spark.session.build import build_session

HELP = {
    "rows": "messages",
    "size": "bytes in a message",
    "batch": "messages in a publish",
    "segment": "bytes in a log file of nsqd",
    "files": "of Parquet",
    "rounds": "of each side",
    "cores": "of the local master",
}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    rows: int = 2_000_000
    size: int = 200
    batch: int = 200
    segment: int = 100 << 20
    files: int = 8
    rounds: int = 3
    cores: int = 2


def run(given: Parameters, folder: Path) -> int:
    store = (folder / "store").as_uri()
    flags = ["--broadcast-address=127.0.0.1", f"--archive={store}", "--archive-local-bytes=1"]
    flags += [f"--max-bytes-per-file={given.segment}", "--mem-queue-size=1"]
    with Spawned(OURS, flags, folder) as nsqd, Client(join_address(*nsqd.http_address), Access()) as client:
        publish(client, 0, given.rows, given.size, given.batch)
        wait_for(lambda: len([*nsqd.data.rglob("topics/*/*.log")]) == 1)
        spark = build_session("bench-history", master=f"local[{given.cores}]", ui_port=None)
        try:

            def topic(**more: str) -> DataFrame:
                return spark.read.format("nsq").options(topic=TOPIC, nsqd=client.url, **more).load()

            parquet = f"{store}/parquet"
            topic(archive=store).repartition(given.files).write.parquet(parquet)
            sides: dict[str, Callable[[], DataFrame]] = {
                "archive": lambda: topic(archive=store),
                "Parquet": lambda: spark.read.parquet(parquet),
                "nsqd": topic,
            }
            measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
            for number in range(given.rounds + 1):
                for name in [*sides] if number % 2 == 0 else [*reversed(sides)]:
                    frame = sides[name]()
                    began, spark_cpu, nsqd_cpu = time.monotonic(), tree_seconds(os.getpid()), cpu(nsqd)
                    frame.write.format("noop").mode("overwrite").save()
                    nsqd_used = cpu(nsqd) - nsqd_cpu
                    spark_used = tree_seconds(os.getpid()) - spark_cpu - nsqd_used
                    if number:
                        measured[name].append((time.monotonic() - began, spark_used, nsqd_used))
            assert topic(archive=store).count() == given.rows
        finally:
            spark.stop()
    show(measured, given.rows)
    return 0


def cpu(nsqd: Spawned) -> float:
    return tree_seconds(nsqd.pid)


def show(measured: dict[str, list[tuple[float, float, float]]], rows: int) -> None:
    base = [statistics.median(column) for column in zip(*measured["Parquet"], strict=True)]
    for name, runs in measured.items():
        seconds, spark_used, nsqd_used = (statistics.median(column) for column in zip(*runs, strict=True))
        print(
            f"{name:<8} {rows / seconds:>10,.0f} rows/s, {base[0] / seconds:.2f} x Parquet; processor a row: "
            f"Spark {spark_used * 1e6 / rows:.2f} us, nsqd {nsqd_used * 1e6 / rows:.3f} us"
        )


def main(arguments: list[str] | None = None) -> int:
    return run_command("history", __doc__, Parameters, HELP, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
