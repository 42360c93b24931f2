"""Reading a topic's log in ranges, against plain reading of the same files.

No server: what finding the ranges costs on top of reading the bytes. Both sides read pieces of the
same size from files that the system has in memory, in turns; the ratio is what counts. Besides,
what a reader then spends on checking and cutting the batches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.macro.report import describe_machine
from nsparq.storage.batch import BatchCache
from nsparq.storage.disk_log import DiskLog
from nsparq.storage.files import Files
from nsparq.storage.log import LogSettings
from nsparq.storage.opening import open_log
from nsparq.storage.raw_batch import iter_batches

MIB = 1 << 20


def fill(directory: Path, batch: int, size: int, mebibytes: int) -> DiskLog:
    """A log of `mebibytes` on disk, published `batch` messages at a time."""
    log = DiskLog(Files(), directory, BatchCache(64 * MIB), LogSettings(), floor=1)
    open_log(log, clean_end=1, epoch=1)
    bodies = [b"x" * size] * batch
    while log.size_bytes < mebibytes * MIB:
        for _ in range(1000):
            log.append([(bodies, 0)], time.time_ns())
            if log.size_bytes >= mebibytes * MIB:
                break
    log.sync_now()
    return log


def read_files(directory: Path, piece: int) -> int:
    total = 0
    for path in sorted(directory.glob("*.log")):
        fd = os.open(path, os.O_RDONLY)
        try:
            position = 0
            while data := os.pread(fd, piece, position):
                position += len(data)
            total += position
        finally:
            os.close(fd)
    return total


def read_ranges(log: DiskLog, piece: int, look: Callable[[bytes], object] = len) -> int:
    total, sequence = 0, log.start
    while (found := log.locate(sequence, piece)).size:
        look(found.read())
        total += found.size
        sequence = found.next
    assert sequence == log.end
    return total


def read_verified(log: DiskLog, piece: int) -> int:
    total, sequence = 0, log.start
    while (found := log.locate(sequence, piece)).size:
        verified = found.read_verified()
        assert not verified.lost
        total += len(verified.data)
        sequence = found.next
    return total


def count_messages(data: bytes) -> int:
    return sum(len(batch.lengths) for batch in iter_batches(data))


def rate(work: Callable[[], int]) -> float:
    """MiB a second."""
    started = time.perf_counter()
    size = work()
    return size / MIB / (time.perf_counter() - started)


def measure(batch: int, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="range-read-", dir=options.data_dir) as name:
        directory = Path(name)
        log = fill(directory, batch, options.size, options.mebibytes)
        piece = options.piece
        works: dict[str, Callable[[], int]] = {
            "plain files": lambda: read_files(directory, piece),
            "ranges": lambda: read_ranges(log, piece),
            "ranges, decoded": lambda: read_ranges(log, piece, count_messages),
            "ranges, verified": lambda: read_verified(log, piece),
        }
        assert len({work() for work in works.values()}) == 1, "all of them read all of it"
        rates: dict[str, list[float]] = {what: [] for what in works}
        for number in range(options.rounds):
            order = [*works] if number % 2 == 0 else [*reversed(works)]
            for what in order:
                rates[what].append(rate(works[what]))
        messages = log.end - log.start
        size_mib = log.size_bytes / MIB
        print(f"\n{messages:,} messages, {batch} to a batch, {size_mib:.0f} MiB, {piece >> 10} KiB to a read")
        plain = statistics.median(rates["plain files"])
        for what, values in rates.items():
            median = statistics.median(values)
            print(
                f"  {what:<17} best {max(values):>8,.0f} MiB/s, median {median:>8,.0f} MiB/s, "
                f"{median / plain:5.2f} x plain, {median / size_mib * messages / 1e6:6.1f} M messages/s"
            )
        log.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.macro.range_read", description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=128, metavar="N", help="size of a log (%(default)s)")
    parser.add_argument("--size", type=int, default=100, metavar="N", help="bytes in a message (%(default)s)")
    parser.add_argument("--piece", type=int, default=MIB, metavar="N", help="bytes in a read (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each kind (%(default)s)")
    parser.add_argument(
        "--batch", type=int, action="append", metavar="N", help="messages in a publish (1, then 200)"
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the logs are made")
    options = parser.parse_args(arguments)
    for name, value in describe_machine({}).items():
        print(f"{name}: {value}")
    for batch in options.batch or [1, 200]:
        measure(batch, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
