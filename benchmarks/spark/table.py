"""`nsparq pipeline table` while messages are published at a given rate.

    python -m benchmarks.spark.table                        300,000 messages a second, in a directory
    python -m benchmarks.spark.table --rate 50000 --store s3

Every second the table is read as any reader sees it: the rows of its files, by its log. The lag of
a row is the time from its publishing until the table had as many rows as were published then. In
the end the rows of the files themselves are counted, and their sizes shown, after the pipeline has
joined small ones in the background, and once more after `nsparq pipeline compact`. Broker,
publisher, Spark and, with `--store s3`, the S3 server share the machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable

from benchmarks.macro.brokers import OURS
from benchmarks.macro.http import HttpBroker
from benchmarks.macro.report import print_facts
from benchmarks.spark import archive
from benchmarks.spark.archive import family, memory_mib, processor_s
from benchmarks.spark.command import run_command
from nsparq.addresses import join_address
from nsparq.pipeline.write.delta_upkeep import LARGE
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access

TOPIC, CHANNEL = archive.TOPIC, "table"
LOOK_S = 0.5
HELP = {
    "seconds": "of publishing",
    "rate": "messages a second; 0: as many as the broker takes",
    "size": "bytes in a body",
    "batch": "messages in a publish",
    "interval": "how often the pipeline commits",
    "cores": "of the local master",
    "patience": "seconds that the pipeline may take for the rest",
    "store": "`disk`, or `s3`: moto's server on this machine",
    "visible": "seconds within which rows must be visible; 0: any",
}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    seconds: float = 60.0
    rate: int = 300_000
    size: int = 200
    batch: int = 200
    interval: str = "2s"
    cores: int = 2
    patience: float = 300.0
    store: str = "disk"
    visible: float = 10.0


class Sample(NamedTuple):
    at: float
    """Seconds since publishing began."""
    published: int
    visible: int
    files: int


class Bench:
    def __init__(self, given: Parameters, broker: HttpBroker, folder: Path, storage: dict[str, str]) -> None:
        self.given, self.broker, self.folder, self.storage = given, broker, folder, storage
        self.uri = "s3://lake/feed" if storage else str(folder / "table")
        self.samples: list[Sample] = []
        self._client = Client(join_address(*broker.http_address), Access())
        self._table: DeltaTable | None = None

    def run(self) -> bool:
        """Whether counts and lag are as promised."""
        self._client.create_channel(TOPIC, CHANNEL)
        pipeline = self._start("table", f"--topic={TOPIC}", f"--channel={CHANNEL}", *self._flags(), self.uri)
        try:
            self._await(pipeline)
            load = archive.Parameters(
                seconds=self.given.seconds, rate=self.given.rate, size=self.given.size, batch=self.given.batch
            )
            feeder = get_context("spawn").Process(target=archive.feed, args=(self.broker.address, load))
            used = self._processor(pipeline.pid)
            began = time.monotonic()
            feeder.start()
            while feeder.is_alive():
                self._look(pipeline, began)
            assert feeder.exitcode == 0, "the publisher has failed"
            published_for = time.monotonic() - began
            deadline = time.monotonic() + self.given.patience
            while self.samples[-1].visible < self.samples[-1].published:
                assert time.monotonic() < deadline, "the pipeline does not catch up"
                self._look(pipeline, began)
            spark_s = self._processor(pipeline.pid) - used
            memory = sum(map(memory_mib, family(pipeline.pid)))
        finally:
            pipeline.send_signal(signal.SIGTERM)
            status = pipeline.wait(60)
        published, lags = self.samples[-1].published, self._lags()
        rows = self._rows()
        print_facts(
            [
                ("published", published),
                ("rows in the files", rows),
                ("published /s", round(published / published_for)),
                ("visible after, median", f"{statistics.median(lags):.1f} s"),
                ("... at most", f"{max(lags):.1f} s"),
                ("Spark us/message, with upkeep", f"{spark_s * 1e6 / published:.2f}"),
                ("Spark MiB", round(memory)),
                ("files", self._sizes()),
                ("status of the pipeline", status),
            ]
        )
        joining = self._start("compact", self.uri)
        assert joining.wait(600) == 0, self._log("compact")
        print_facts([("files after compact", self._sizes()), ("rows then", self._rows())])
        agree = published == rows == self._rows()
        in_time = not self.given.visible or max(lags) <= self.given.visible
        print("the counts agree" if agree else "THE COUNTS DO NOT AGREE")
        print("rows were visible in time" if in_time else "ROWS WERE NOT VISIBLE IN TIME")
        return agree and in_time and status == 0

    def _flags(self) -> list[str]:
        return [
            f"--nsqd-http-address={join_address(*self.broker.http_address)}",
            f"--interval={self.given.interval}",
            f"--master=local[{self.given.cores}]",
            f"--checkpoint={self.folder / 'checkpoint'}",
            "--conf=spark.ui.enabled=false",
            "--plain",
        ]

    def _start(self, command: str, *flags: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "nsparq.tools.main", "pipeline", command, *flags]
        with (self.folder / f"{command}.log").open("wb") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.storage},
                cwd=self.folder,
            )

    def _log(self, command: str) -> str:
        return (self.folder / f"{command}.log").read_text(errors="replace")[-3000:]

    def _await(self, pipeline: subprocess.Popen[bytes]) -> None:
        """Wait until it has written a message."""
        self._client.post("/pub", b"first", topic=TOPIC)
        deadline = time.monotonic() + 120
        while not self._visible()[0]:
            if pipeline.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the pipeline does not start:\n{self._log('table')}")
            time.sleep(LOOK_S)

    def _look(self, pipeline: subprocess.Popen[bytes], began: float) -> None:
        if pipeline.poll() is not None:
            raise RuntimeError(f"the pipeline has ended:\n{self._log('table')}")
        (topic,) = self._client.stats(TOPIC)
        # Counted before the table is read, so the lag is not shown too short.
        published = topic["message_count"]
        visible, files = self._visible()
        self.samples.append(Sample(time.monotonic() - began, published, visible, files))
        time.sleep(LOOK_S)

    def _open(self) -> DeltaTable | None:
        if self._table is None and DeltaTable.is_deltatable(self.uri, self.storage or None):
            self._table = DeltaTable(self.uri, storage_options=self.storage or None)
        if self._table is not None:
            self._table.update_incremental()
        return self._table

    def _visible(self) -> tuple[int, int]:
        """Rows and files, as the log has them."""
        table = self._open()
        if table is None:
            return 0, 0
        found = pa.table(table.get_add_actions())["num_records"].to_pylist()
        return sum(found), len(found)

    def _rows(self) -> int:
        """Rows, as the files have them."""
        table = self._open()
        assert table is not None
        return sum(fragment.count_rows() for fragment in table.to_pyarrow_dataset().get_fragments())

    def _lags(self) -> list[float]:
        found = []
        for sample in self.samples:
            seen = next((one.at for one in self.samples if one.visible >= sample.published), None)
            assert seen is not None
            found.append(max(0.0, seen - sample.at))
        return found

    def _sizes(self) -> str:
        table = self._open()
        assert table is not None
        sizes = pa.table(table.get_add_actions())["size_bytes"].to_pylist()
        large = [size for size in sizes if size >= LARGE]
        small = [size for size in sizes if size < LARGE]
        return (
            f"{len(large)} of 128 MiB and more with {sum(large) >> 20} MiB, "
            f"{len(small)} smaller with {sum(small) >> 20} MiB"
        )

    def _processor(self, pid: int) -> float:
        return sum(map(processor_s, family(pid)))


@contextlib.contextmanager
def _store(kind: str) -> Iterator[dict[str, str]]:
    if kind == "disk":
        yield {}
        return
    from tests.support.s3 import run_s3

    with run_s3("lake") as storage:
        yield storage


def run(given: Any, folder: Path) -> int:
    flags = ["--broadcast-address=127.0.0.1"]
    with _store(given.store) as storage, HttpBroker(OURS, flags, folder) as broker:
        return 0 if Bench(given, broker, folder, storage).run() else 1


def main(arguments: list[str] | None = None) -> int:
    return run_command("table", __doc__, Parameters, HELP, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
