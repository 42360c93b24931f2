"""`nsparq pipeline archive` with a broker that gets messages as fast as it can take them.

    python -m benchmarks.spark.archive                      full rate, MPUBs of 200
    python -m benchmarks.spark.archive --batch 1            full rate, one PUB for each message
    python -m benchmarks.spark.archive --rate 200000        messages a second

Every second the lag (the depth of the pipeline's channel) and the memory of both are looked at; in
the end the rows in the Parquet files are counted. Broker, publisher and Spark share the machine.
Processor time is that of whole processes, for each message: with Spark it is the JVM and all Python
processes, from the moment that the first message was archived.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from benchmarks.macro.brokers import OURS
from benchmarks.macro.http import HttpBroker
from benchmarks.macro.report import describe_machine, print_facts
from benchmarks.macro.roles import Replies
from benchmarks.macro.wire import Address
from nsparq.addresses import join_address
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access

TOPIC, CHANNEL = "feed", "archive"
WINDOW = 8
"""Unanswered publishes at a time."""
PAYLOADS = 128
"""Different ones, so that files do not shrink to nothing."""
WIDTH = 50
HELP = {
    "seconds": "of publishing",
    "rate": "messages a second; 0: as many as the broker takes",
    "size": "bytes in a body",
    "batch": "messages in a publish",
    "interval": "how often the pipeline writes files",
    "cores": "of the local master",
    "patience": "seconds that the pipeline may take for the rest, once nothing more is published",
}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Everything that shapes the load; printed before any figure. Each is a flag of the same
    name."""

    seconds: float = 60.0
    rate: int = 0
    size: int = 200
    batch: int = 200
    interval: str = "2s"
    cores: int = 2
    patience: float = 600.0


class Sample(NamedTuple):
    at: float
    """Seconds since publishing began."""
    published: int
    lag: int
    broker_mib: float
    spark_mib: float
    broker_cpu: float
    """Seconds of processor time."""
    spark_cpu: float
    feed_cpu: float


def feed(address: Address, parameters: Parameters) -> None:
    """A process of its own, which publishes for a while."""
    letters = random.Random(5)
    size, batch = parameters.size, parameters.batch
    payloads = []
    for _ in range(PAYLOADS):
        bodies = [letters.randbytes(size // 2).hex().ljust(size, ".").encode() for _ in range(batch)]
        if batch == 1:
            payloads.append(b"PUB %b\n" % TOPIC.encode() + struct.pack(">I", size) + bodies[0])
        else:
            packed = struct.pack(">I", batch) + b"".join(struct.pack(">I", size) + body for body in bodies)
            payloads.append(b"MPUB %b\n" % TOPIC.encode() + struct.pack(">I", len(packed)) + packed)
    # Single ones are sent many at a time, as a publisher does that does not wait for answers.
    group = 1 if batch > 1 else PAYLOADS
    joined = [b"".join(payloads[i : i + group]) for i in range(0, PAYLOADS, group)]
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"  V2")
        began = time.monotonic()
        sent = answered = 0
        replies = Replies()
        while (now := time.monotonic()) < began + parameters.seconds:
            if parameters.rate and sent * batch > (now - began) * parameters.rate:
                time.sleep(0.001)
                continue
            connection.sendall(joined[sent // group % len(joined)])
            sent += group
            while sent - answered > WINDOW * group:
                answered += replies.receive_from(connection)
        while answered < sent:
            answered += replies.receive_from(connection)


# watching


def memory_mib(pid: int) -> float:
    """Proportional set size: what processes share counts once."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


TICKS = os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Seconds of a process, and of those below it that have ended."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return 0.0
    return sum(map(int, times)) / TICKS


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], ())
    return found


class Bench:
    def __init__(self, parameters: Parameters, broker: HttpBroker, folder: Path) -> None:
        self.parameters, self.broker, self.folder = parameters, broker, folder
        self.output = folder / "archive"
        self.samples: list[Sample] = []
        self._feeder = 0
        self._client = Client(join_address(*broker.http_address), Access())

    def run(self) -> bool:
        """Whether the counts agree."""
        self._client.create_channel(TOPIC, CHANNEL)
        archive = self._start_archive()
        try:
            self._await_archive(archive)
            feeder = get_context("spawn").Process(target=feed, args=(self.broker.address, self.parameters))
            self.samples.append(self._sample(archive.pid, 0.0))
            began = time.monotonic()
            feeder.start()
            self._feeder = feeder.pid or 0
            self._watch(archive, began, lambda: not feeder.is_alive())
            feeder.join()
            assert feeder.exitcode == 0, "the publisher has failed"
            stopped = time.monotonic()
            self._watch(archive, began, lambda: self.samples[-1].lag == 0)
            drained = time.monotonic()
        finally:
            archive.send_signal(signal.SIGTERM)
            status = archive.wait(60)
        rows = sum(pq.read_metadata(path).num_rows for path in self._files())
        published = self.samples[-1].published
        self._print(stopped - began, drained - stopped, published, rows)
        if status != 0:
            print(f"the pipeline has ended with status {status}:\n{self._log()[-3000:]}")
        return rows == published and status == 0

    def _start_archive(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "nsparq.tools.main", "pipeline", "archive", f"--topic={TOPIC}"]
        words += [f"--nsqd-http-address={join_address(*self.broker.http_address)}", f"--channel={CHANNEL}"]
        words += [f"--output-dir={self.output}", f"--interval={self.parameters.interval}", "--plain"]
        words += [f"--master=local[{self.parameters.cores}]", "--conf=spark.ui.enabled=false"]
        with (self.folder / "archive.log").open("wb") as log:
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _log(self) -> str:
        return (self.folder / "archive.log").read_text(errors="replace")

    def _await_archive(self, archive: subprocess.Popen[bytes]) -> None:
        """Wait until it has archived a message."""
        self._client.post("/pub", b"first", topic=TOPIC)
        deadline = time.monotonic() + 120
        while not [*self._files()]:
            if archive.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the pipeline does not start:\n{self._log()[-3000:]}")
            time.sleep(0.2)

    def _files(self) -> list[Path]:
        return [path for path in self.output.glob("topic=*/date=*/*.parquet") if path.stat().st_size]

    def _watch(self, archive: subprocess.Popen[bytes], began: float, is_over: object) -> None:
        assert callable(is_over)
        deadline = time.monotonic() + self.parameters.seconds + self.parameters.patience
        while True:
            self.samples.append(self._sample(archive.pid, time.monotonic() - began))
            if is_over():
                return
            if archive.poll() is not None:
                raise RuntimeError(f"the pipeline has ended:\n{self._log()[-3000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the pipeline does not catch up:\n{self._log()[-3000:]}")
            time.sleep(1)

    def _sample(self, pid: int, at: float) -> Sample:
        (topic,) = self._client.stats(TOPIC)
        lag = sum(one["depth"] for one in topic["channels"] if one["channel_name"] == CHANNEL)
        spark, broker = family(pid), self.broker.pid
        return Sample(
            at,
            topic["message_count"],
            lag,
            memory_mib(broker),
            sum(map(memory_mib, spark)),
            processor_s(broker),
            sum(map(processor_s, spark)),
            processor_s(self._feeder),
        )

    def _print(self, seconds: float, rest: float, published: int, rows: int) -> None:
        step = max(1, len(self.samples) // 20)
        highest = max(sample.lag for sample in self.samples) or 1
        print(f"{'s':>6} {'published':>12} {'archived':>12} {'lag':>12} {'broker MiB':>11} {'Spark MiB':>10}")
        for sample in [*self.samples[:-1:step], self.samples[-1]]:
            numbers = (sample.published, sample.published - sample.lag, sample.lag)
            shown = " ".join(f"{number:>12,}" for number in numbers)
            memory = f"{sample.broker_mib:>11,.0f} {sample.spark_mib:>10,.0f}"
            print(f"{sample.at:>6.0f} {shown} {memory}  {'#' * round(WIDTH * sample.lag / highest)}")
        files = self._files()
        first, last = self.samples[0], self.samples[-1]
        each = 1e6 / max(1, published)
        print_facts(
            [
                ("published", published),
                ("rows archived", rows),
                ("published /s", round(published / seconds)),
                ("archived /s", round(rows / (seconds + rest))),
                ("highest lag", highest),
                ("... in seconds", f"{highest / (rows / (seconds + rest)):.1f}"),
                ("caught up after", f"{rest:.1f} s"),
                ("broker MiB", round(max(sample.broker_mib for sample in self.samples))),
                ("Spark MiB", round(max(sample.spark_mib for sample in self.samples))),
                ("Spark us/message", f"{(last.spark_cpu - first.spark_cpu) * each:.2f}"),
                ("broker us/message", f"{(last.broker_cpu - first.broker_cpu) * each:.2f}"),
                ("publisher us/message", f"{max(one.feed_cpu for one in self.samples) * each:.2f}"),
                ("files", len(files)),
                ("MiB of them", sum(path.stat().st_size for path in files) >> 20),
            ]
        )
        print("the counts agree" if published == rows else "THE COUNTS DO NOT AGREE")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spark.archive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for one in fields(Parameters):
        text = f"{HELP[one.name]} ({one.default})"
        parser.add_argument(f"--{one.name}", type=type(one.default), default=one.default, help=text)
    parser.add_argument(
        "--data-dir", type=Path, help="where everything is made; a minute at full rate is gigabytes"
    )
    given = vars(parser.parse_args(arguments))
    data_dir = given.pop("data_dir")
    parameters = Parameters(**given)
    print_facts([*describe_machine({}).items(), *vars(parameters).items()])
    folder = Path(tempfile.mkdtemp(prefix="bench-archive-", dir=data_dir))
    try:
        with HttpBroker(OURS, ["--broadcast-address=127.0.0.1"], folder) as broker:
            return 0 if Bench(parameters, broker, folder).run() else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
