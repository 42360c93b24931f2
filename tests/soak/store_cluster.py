"""Exactly once on a cluster without a common file system, under kills.

    python -m tests.soak.store_cluster --kills 10

Runs an S3 server, an nsqd with an archive there, and a standalone Spark cluster of two workers that
do not see the driver's directory. A pipeline keeps a topic as a Delta table; checkpoint, table and
archive are in the store. While numbered messages are published, drivers and executors are killed
with SIGKILL at random moments. Each new driver starts with an empty directory, as on another
machine. In the end every number must be in the table exactly once. Exit status 1 if not. Needs
root, for workers that see other files.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from deltalake import DeltaTable

from nsparq.pipeline.file import ready_made
from tests.soak.support import clock, environment_variable, table
from tests.support import BrokerProcess, wait_until
from tests.support.s3 import run_s3
from tests.support.spark_cluster import SparkCluster

TOPIC = "numbers"
TABLE, CHECKPOINT, ARCHIVE = "s3://lake/numbers", "s3://lake/checkpoint", "s3://lake/log"
MPUB = 500
PATIENCE_S = 300.0


class Publisher(threading.Thread):
    """Publishes numbers until it is stopped."""

    def __init__(self, nsqd: BrokerProcess, rate: float) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self._nsqd, self._rate, self._stop_now = nsqd, rate, threading.Event()
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        while not self._stop_now.is_set():
            if self.count > (time.monotonic() - began) * self._rate:
                self._stop_now.wait(0.01)
                continue
            numbers = range(self.count, self.count + MPUB)
            self._nsqd.publish(TOPIC, *(b"%d" % number + b"." * 90 for number in numbers))
            self.count += MPUB

    def stop(self) -> None:
        self._stop_now.set()
        self.join()


class Driver:
    """`nsparq pipeline run`, each time in an empty directory."""

    def __init__(self, directory: Path, nsqd: BrokerProcess, cluster: SparkCluster) -> None:
        assert nsqd.http_address is not None
        self._directory, self._cluster = directory, cluster
        host, port = nsqd.http_address
        topics = ready_made.Topics(nsq={"nsqd": [f"{host}:{port}"]}, topics=[TOPIC])
        text = ready_made.table(topics, TABLE, CHECKPOINT, trigger="1s", compact=4)
        self._text = text.replace('channel = "table"', f'channel = "table", archive = "{ARCHIVE}"')
        assert ARCHIVE in self._text
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.starts += 1
        home = self._directory / f"driver-{self.starts}"
        home.mkdir()
        (home / "table.toml").write_text(self._text)
        command = [sys.executable, "-m", "nsparq.tools.main", "pipeline", "run", "table.toml", "--plain"]
        conf = {**self._cluster.conf, "spark.cores.max": "2"}
        command += [
            f"--master={self._cluster.url}",
            *(f"--conf={name}={text}" for name, text in conf.items()),
        ]
        with (home / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": str(home)},
                start_new_session=True,
            )

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def last_words(self) -> str:
        return (self._directory / f"driver-{self.starts}" / "log").read_text(errors="replace")[-3000:]


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def version(storage: dict[str, str]) -> int:
    """Commits of the table so far."""
    if not DeltaTable.is_deltatable(TABLE, storage):
        return -1
    return DeltaTable(TABLE, storage_options=storage).version()


def run(kills: int, rate: float, seed: int, directory: Path) -> bool:
    chance, killed = random.Random(seed), Counter[str]()
    hidden = directory / "driver's"
    hidden.mkdir()
    (directory / "cluster").mkdir()
    with ExitStack() as stack:
        storage = stack.enter_context(run_s3("lake"))
        for name, value in storage.items():
            stack.enter_context(environment_variable(name, value))
        nsqd = BrokerProcess(
            broadcast_address="127.0.0.1",
            archive=ARCHIVE,
            archive_local_bytes=1,
            max_bytes_per_file=5_000_000,
            mem_queue_size=1000,
        )
        stack.callback(nsqd.close)
        cluster = SparkCluster(directory / "cluster", executors=1, workers=2, hidden=hidden)
        stack.enter_context(cluster)
        driver = Driver(hidden, nsqd, cluster)
        driver.start()
        publisher = Publisher(nsqd, rate)
        try:
            for number in range(kills):
                seen = version(storage)
                wait_until(
                    lambda seen=seen: version(storage) > seen + 1 or not driver.is_alive,  # type: ignore[misc]
                    PATIENCE_S,
                    interval=0.2,
                    what=lambda: driver.last_words() + cluster.logs(),
                )
                assert driver.is_alive, driver.last_words()
                time.sleep(chance.uniform(0.0, 2.0))
                executors = cluster.executors()
                if executors and chance.random() < 0.4:
                    os.kill(chance.choice(executors), signal.SIGKILL)
                    killed["executor"] += 1
                else:
                    driver.kill()
                    driver.start()
                    killed["driver"] += 1
                say(f"{clock()} kill {number + 1} of {kills}, {publisher.count:,} published")
        finally:
            publisher.stop()

        def rows() -> int:
            found = DeltaTable(TABLE, storage_options=storage)
            return sum(found.get_add_actions().column("num_records").to_pylist())

        try:
            wait_until(lambda: rows() >= publisher.count, PATIENCE_S, interval=0.5, what=driver.last_words)
        finally:
            status = driver.stop()
        archived = len([*nsqd.data_path.rglob("*.log")])
        found = DeltaTable(TABLE, storage_options=storage)
        bodies = found.to_pyarrow_table(columns=["body"])["body"].to_pylist()
        counts = Counter(int(body.partition(b".")[0]) for body in bodies)
        missing = publisher.count - len(counts)
        doubled = sum(count > 1 for count in counts.values())
        # Nothing of the table or the checkpoint is on a disk of a worker.
        strayed = [*(directory / "cluster").rglob("*.parquet")]
    say(
        table(
            [
                ("published", publisher.count),
                ("rows", len(bodies)),
                ("missing", missing),
                ("more than once", doubled),
                *((f"kills of the {victim}", count) for victim, count in killed.items()),
                ("starts of the driver", driver.starts),
                ("versions of the table", found.version()),
                ("files of the table", len(found.file_uris())),
                ("log files left on nsqd's disk", archived),
                ("files on workers' disks", len(strayed)),
                ("status of the pipeline", status),
            ]
        )
    )
    return not (missing or doubled or strayed or status) and len(bodies) == publisher.count


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.store_cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rate", type=float, default=5000.0, help="messages a second (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="store-cluster-") as directory:
        return 0 if run(given.kills, given.rate, given.seed, Path(directory)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
