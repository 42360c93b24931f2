"""A backlog of many times the local limit, from the archive and from disk: `python -m
benchmarks.macro.archive --help`.

One ordinary consumer takes a backlog that was published before: once from an nsqd that has all of
it on disk, and once from an nsqd with an archive and a small --archive-local-bytes. The order of
the messages is checked. Without --archive the store is a directory on the same machine. With --s3
it is moto's S3 server, a Python process that uses the same cores. Rounds of the two kinds
alternate. In the table, "ours" is the archive and "peer" the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from benchmarks.macro.brokers import OURS
from benchmarks.macro.http import HttpBroker
from benchmarks.macro.loads import Figure, Figures
from benchmarks.macro.redrive import ask, wait
from benchmarks.macro.report import Results, describe_machine, print_facts, print_table
from benchmarks.macro.roles import Consumer
from benchmarks.macro.wire import create_channel
from tests.support.s3 import run_s3

DEADLINE_S = 600.0
BATCH = 1000
FROM_DISK, FROM_ARCHIVE = "from disk", "from the archive"


def measure(options: argparse.Namespace, kind: str, number: int) -> Figures:
    flags = [f"--max-bytes-per-file={options.segment}"]
    directory = Path(tempfile.mkdtemp(prefix="bench-archive-"))
    if kind == FROM_ARCHIVE:
        url = f"{options.archive}/{number}" if options.archive else directory.as_uri()
        flags += [f"--archive={url}", f"--archive-local-bytes={options.limit}", "--archive-bandwidth=0"]
        flags += [f"--archive-cache-bytes={options.limit}"]
    try:
        with HttpBroker(OURS, flags, None) as nsqd:
            return _consume(options, kind, nsqd)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _consume(options: argparse.Namespace, kind: str, nsqd: HttpBroker) -> Figures:
    create_channel(nsqd.address, "t", "c")
    body = b"\n".join([b"x" * options.size] * BATCH)
    count = options.times * options.limit // (options.size * BATCH) * BATCH
    for _ in range(count // BATCH):
        ask(nsqd, "POST", "/mpub?topic=t", body)
    # Half a segment of the local limit is the one that messages are appended to.
    limit = options.limit + options.segment if kind == FROM_ARCHIVE else options.times * options.limit * 2
    wait("archive", lambda: _local_bytes(nsqd) <= limit)
    used = nsqd.cpu_seconds()
    consumer = Consumer(nsqd.address, [("t", "c")], options.size, 2500, count, 0, DEADLINE_S)
    span = consumer.run([0])
    used = nsqd.cpu_seconds() - used
    ids = span.ids["t/c"].byteswap().astype(np.int64)
    if len(ids) != count or (np.diff(ids) != 1).any():
        raise AssertionError(f"{kind}: {len(ids)} of {count} messages, or they are out of order")
    rate = count / (span.last_ns - span.first_ns) * 1e9
    return {
        "consume": Figure(rate, "msg/s"),
        "consume, broker CPU": Figure(used / count * 1e6, "us"),
    }


def _local_bytes(nsqd: HttpBroker) -> int:
    """The size of the topic's log files on disk."""
    total = 0
    for path in (nsqd.data / "data" / "topics" / "t.topic").glob("*.log"):
        with suppress(FileNotFoundError):  # it has just left the disk
            total += path.stat().st_size
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.macro.archive", description=__doc__)
    parser.add_argument("--limit", type=int, default=8 << 20, metavar="BYTES", help="on disk (%(default)s)")
    parser.add_argument("--times", type=int, default=20, metavar="N", help="backlog / limit (%(default)s)")
    parser.add_argument("--segment", type=int, default=2 << 20, metavar="BYTES", help="(%(default)s)")
    parser.add_argument("--size", type=int, default=200, metavar="BYTES", help="of a body (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each kind (%(default)s)")
    parser.add_argument("--archive", default="", metavar="URL", help="another store")
    parser.add_argument("--s3", action="store_true", help="moto's S3 server, started for this run")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.s3:
            os.environ.update(stack.enter_context(run_s3("bench")))
            options.archive = "s3://bench/archive"
        compare(options)
    return 0


def compare(options: argparse.Namespace) -> None:
    facts = [
        ("local limit", options.limit),
        ("backlog", options.times * options.limit),
        ("bytes of a segment", options.segment),
        ("bytes of a body", options.size),
        ("store", options.archive or "a directory"),
    ]
    print_facts([*facts, *describe_machine({}).items()])
    results = Results()
    for number in range(options.rounds):
        for side, kind in (("peer", FROM_DISK), ("ours", FROM_ARCHIVE)):
            results.add(side, measure(options, kind, number))
    print_table(results)


if __name__ == "__main__":
    raise SystemExit(main())
