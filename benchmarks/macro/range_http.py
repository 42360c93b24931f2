"""Reading a whole topic over HTTP, against plain reading of the same files: see --help for the
parameters.

One kept connection follows GET /topic/read from the first message to the last. Against it: reading
the segment files, and a process that sends them through a bare socket and does nothing else, which
no server can beat. Where a copy goes counts for as much as where it comes from, so there are three
ways to read, in turns:

- reused: into one small buffer, again and again, with the files in the system's memory;
- kept: into new memory that holds all of it in the end, as a program does that works with what it
reads;
- cold: reused, with the files on the disk.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import re
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.macro.brokers import OURS
from benchmarks.macro.crew import Crew
from benchmarks.macro.http import HttpBroker
from benchmarks.macro.report import describe_machine, print_facts
from benchmarks.macro.wire import Address
from nsparq.storage.batch import HEADER_SIZE
from nsparq.storage.raw_batch import iter_batches

MIB = 1 << 20
PLAIN_PIECE = MIB
READ_SIZES_MIB = (4, 16)
BEYOND = 2 * MIB
"""How far batches may go beyond the size asked for."""
HEAD_ROOM = 1 << 14
TOPIC = "range"
DEADLINE_S = 120.0
TARGET = 0.5
LENGTH = re.compile(rb"(?i)\r\ncontent-length: (\d+)")
NEXT = re.compile(rb"(?i)\r\nx-nsparq-next: (\d+)")
DECODE = "GET and decode"


class ReadFailed(Exception):
    """Not everything that was published came back."""


class Pass(NamedTuple):
    """The topic read once, from end to end."""

    size: int
    seconds: float
    messages: int = 0
    decode_seconds: float = 0.0


class Reader:
    """A client of GET /topic/read on one connection."""

    def __init__(self, address: Address, read_size: int) -> None:
        self.socket = socket.create_connection(address, timeout=DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.read_size = read_size
        self.head = bytearray(HEAD_ROOM)
        self.buffer = memoryview(bytearray(read_size + BEYOND))

    def get(self, target: str, into: memoryview) -> tuple[bytes, memoryview]:
        """Head and body of one answer, the body at the beginning of `into`."""
        self.socket.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        filled = 0
        while (end := self.head.find(b"\r\n\r\n", 0, filled)) < 0:
            filled += self._receive(memoryview(self.head)[filled:])
        head = bytes(self.head[:end])
        length = LENGTH.search(head)
        if not head.startswith(b"HTTP/1.1 200 ") or length is None:
            raise ReadFailed(f"not what was expected: {bytes(self.head[:filled])!r}")
        body = into[: int(length[1])]
        if len(body) != int(length[1]):
            raise ReadFailed(f"{int(length[1])} bytes are more than there is room for")
        # What came with the head is but a few kilobytes.
        filled -= end + 4
        body[:filled] = self.head[end + 4 : end + 4 + filled]
        while filled < len(body):
            filled += self._receive(body[filled:])
        return head, body

    def _receive(self, view: memoryview) -> int:
        received = self.socket.recv_into(view)
        if not received:
            raise ReadFailed("the broker closed the connection")
        return received

    def positions(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(bytes(self.get(f"/topic/positions?topic={TOPIC}", self.buffer)[1]))
        return found

    def read_topic(self, into: memoryview | None = None, decode: bool = False) -> Pass:
        """All of it, one range after the other into `into`; without that, each over the last
        one."""
        where = self.positions()
        sequence, size, messages, decode_seconds = where["earliest"], 0, 0, 0.0
        started = time.perf_counter()
        while sequence < where["latest"]:
            target = f"/topic/read?topic={TOPIC}&from={sequence}&max_bytes={self.read_size}"
            head, body = self.get(target, self.buffer if into is None else into[size:])
            following = NEXT.search(head)
            if following is None or not body:
                raise ReadFailed(f"nothing at {sequence}: {head!r}")
            sequence = int(following[1])
            size += len(body)
            if decode:
                decode_started = time.perf_counter()
                messages += decode_range(body)
                decode_seconds += time.perf_counter() - decode_started
        return Pass(size, time.perf_counter() - started, messages, decode_seconds)


def decode_range(data: memoryview) -> int:
    """Check every batch and find where each message begins: what a reader does before it looks at
    bodies."""
    return sum(len(batch.offsets()) - 1 for batch in iter_batches(data))


def read_files(files: list[Path], into: memoryview | None = None) -> Pass:
    piece = memoryview(bytearray(PLAIN_PIECE))
    size = 0
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece if into is None else into[size : size + PLAIN_PIECE]):
                size += count
    return Pass(size, time.perf_counter() - started)


def receive_files(address: Address, into: memoryview, keep: bool = False) -> Pass:
    """What the process below sends."""
    size = 0
    with socket.create_connection(address, timeout=DEADLINE_S) as connection:
        started = time.perf_counter()
        while count := connection.recv_into(into[size:] if keep else into):
            size += count
        return Pass(size, time.perf_counter() - started)


def send_files(listener: socket.socket, files: list[Path]) -> None:
    """A process that sends the files to whoever connects."""
    view = memoryview(bytearray(PLAIN_PIECE))
    while True:
        connection, _ = listener.accept()
        with connection:
            for path in files:
                with path.open("rb", buffering=0) as file:
                    while count := file.readinto(view):
                        connection.sendall(view[:count])


def new_memory(size: int) -> memoryview:
    """Memory that the system has yet to find pages for."""
    return memoryview(mmap.mmap(-1, size))


def drop_cache(files: list[Path]) -> None:
    """Have the system forget what it holds of them."""
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(broker: HttpBroker, crew: Crew, batch: int, size: int, mebibytes: int) -> int:
    """Publish until the log has about that size; gives the number of messages."""
    count = int(mebibytes * MIB // (size + 4 + HEADER_SIZE / batch)) // batch * batch
    arguments = {
        "address": broker.address,
        "topic": TOPIC,
        "count": count,
        "size": size,
        "batch": batch,
        # Publishes that arrive together become one batch: where each is to be one, none is sent
        # ahead.
        "window": 1 if batch == 1 else 8,
        "encode": False,
        "deadline": DEADLINE_S,
    }
    crew.work([("Publisher", arguments)], DEADLINE_S)
    return count


def ways_to_read(
    broker: HttpBroker, files: list[Path], bare: Address
) -> dict[str, dict[str, Callable[[], Pass]]]:
    """By what the ratio is of: the first of each group is plain reading."""
    size = sum(path.stat().st_size for path in files)
    readers = {mib: Reader(broker.http_address, mib * MIB) for mib in READ_SIZES_MIB}
    usual = readers[READ_SIZES_MIB[0]]

    def cold(read: Callable[[], Pass]) -> Callable[[], Pass]:
        def run() -> Pass:
            drop_cache(files)
            return read()

        return run

    return {
        "reused": {
            "plain files": lambda: read_files(files),
            "bare socket": lambda: receive_files(bare, usual.buffer),
            **{f"GET of {mib} MiB": reader.read_topic for mib, reader in readers.items()},
            DECODE: lambda: usual.read_topic(decode=True),
        },
        "kept": {
            "plain files": lambda: read_files(files, new_memory(size + PLAIN_PIECE)),
            "bare socket": lambda: receive_files(bare, new_memory(size + PLAIN_PIECE), keep=True),
            f"GET of {READ_SIZES_MIB[0]} MiB": lambda: usual.read_topic(new_memory(size + PLAIN_PIECE)),
        },
        "cold": {
            "plain files": cold(lambda: read_files(files)),
            "bare socket": cold(lambda: receive_files(bare, usual.buffer)),
            f"GET of {READ_SIZES_MIB[0]} MiB": cold(usual.read_topic),
        },
    }


def measure(batch: int, mebibytes: int, options: argparse.Namespace) -> dict[str, float]:
    """Print the figures of one log; gives the lowest ratio of a GET to plain reading, by way of
    reading."""
    with Crew() as crew, HttpBroker(options.ours_command, [], options.data_dir) as broker:
        count = fill(broker, crew, batch, options.size, mebibytes)
        crew.dismiss()
        files = sorted((broker.data / "data").rglob("*.log"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # Forked, so that it has the listener; this process has no threads.
            sender = multiprocessing.get_context("fork").Process(
                target=send_files, args=(listener, files), daemon=True
            )
            sender.start()
            try:
                ways = ways_to_read(broker, files, listener.getsockname())
                passes, cpu = run_rounds(ways, broker, options.rounds)
            finally:
                sender.kill()
                sender.join()
    check(passes, count)
    size_mib = next(iter(passes.values()))[0].size / MIB
    print(f"\n{count:,} messages of {options.size} bytes, {batch} to a publish: {size_mib:,.0f} MiB")
    return {way: print_figures(way, list(reads), passes, cpu, size_mib) for way, reads in ways.items()}


Key = tuple[str, str]


def run_rounds(
    ways: dict[str, dict[str, Callable[[], Pass]]], broker: HttpBroker, rounds: int
) -> tuple[dict[Key, list[Pass]], dict[Key, float]]:
    """Every pass of each kind, and the processor time of the broker over all of them."""
    works = {(way, name): work for way, reads in ways.items() for name, work in reads.items()}
    for work in works.values():
        work()
    passes: dict[Key, list[Pass]] = {key: [] for key in works}
    cpu = dict.fromkeys(works, 0.0)
    for number in range(rounds):
        for key in [*works] if number % 2 == 0 else [*reversed(works)]:
            before = broker.cpu_seconds()
            passes[key].append(works[key]())
            cpu[key] += broker.cpu_seconds() - before
    return passes, cpu


def check(passes: dict[Key, list[Pass]], count: int) -> None:
    sizes = {done.size for kind in passes.values() for done in kind}
    decoded = {done.messages for done in passes["reused", DECODE]}
    if len(sizes) != 1 or decoded != {count}:
        raise ReadFailed(f"sizes {sizes}, messages {decoded} of {count}")


def print_figures(
    way: str, names: list[str], passes: dict[Key, list[Pass]], cpu: dict[Key, float], size_mib: float
) -> float:
    """One group; gives the lowest ratio of a GET that is not decoded."""
    rates = {name: [size_mib / done.seconds for done in passes[way, name]] for name in names}
    if DECODE in names:
        rates["decode alone"] = [size_mib / done.decode_seconds for done in passes[way, DECODE]]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    plain, lowest = medians[names[0]], float("inf")
    for name, values in rates.items():
        line = f"  {way:<7} {name:<15} best {max(values):>7,.0f}  median {medians[name]:>7,.0f} MiB/s"
        if name != names[0]:
            line += f"  {medians[name] / plain:5.2f} x plain"
        if name.startswith("GET"):
            spent = cpu[way, name] / (len(values) * size_mib / 1024)
            line += f"  broker: {spent:.2f} s of CPU per GiB"
        if name.startswith("GET of"):
            lowest = min(lowest, medians[name] / plain)
        print(line)
    return lowest


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.macro.range_http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mib", type=int, default=512, metavar="N", help="size of the log (%(default)s)")
    parser.add_argument(
        "--single-mib", type=int, default=32, metavar="N", help="the same with one message to a publish"
    )
    parser.add_argument(
        "--batch", type=int, default=200, metavar="N", help="messages in an MPUB (%(default)s)"
    )
    parser.add_argument("--size", type=int, default=100, metavar="N", help="bytes in a message (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="passes of each kind (%(default)s)"
    )
    parser.add_argument("--ours-command", metavar="COMMAND", default=OURS, help="what to measure (our nsqd)")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where data paths are made")
    options = parser.parse_args(arguments)
    # Ended from outside: still stop what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shown = ("mib", "single_mib", "batch", "size", "rounds")
    machine = describe_machine({"ours": options.ours_command})
    print_facts([*machine.items(), *((name, getattr(options, name)) for name in shown)])
    several = measure(options.batch, options.mib, options)
    single = measure(1, options.single_mib, options)
    print(f"\nslowest GET, times plain reading (target: {TARGET}):")
    for way in several:
        print(f"  {way:<7} {several[way]:.2f}; with one message to a publish {single[way]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
