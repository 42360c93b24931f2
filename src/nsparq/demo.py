"""`make demo`: a broker, a stream of events through it, a look at the result. Leaves nothing behind.

It starts a real nsqd in a temporary folder, publishes with one connection, consumes with two, kills nothing
and checks its own counts: every event that went in must have come out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

TOPIC, CHANNEL = "events", "demo"
BATCH = 200
READY = 2500
PATIENCE_S = 60.0
FRAME = struct.Struct(">ii")
MESSAGE_BODY = 26


@dataclass
class Tally:
    """What the consumers have seen."""

    received: int = 0
    redelivered: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)
    latencies_ms: list[float] = field(default_factory=list)


def events(count: int) -> Iterator[bytes]:
    """Made-up events of a shop, numbered."""
    source = random.Random(7)
    kinds = ("view", "view", "view", "search", "basket", "order")
    for number in range(count):
        event = {
            "number": number,
            "kind": source.choice(kinds),
            "user": source.randrange(10_000),
            "amount": source.randrange(100, 20_000) / 100,
        }
        yield json.dumps(event).encode()


async def read_frame(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, bytes]:
    """The next frame that is not a heartbeat; those are answered here."""
    while True:
        size, kind = FRAME.unpack(await reader.readexactly(FRAME.size))
        data = await reader.readexactly(size - 4)
        if kind == 1:
            raise RuntimeError(f"the broker refused: {data.decode(errors='replace')}")
        if data != b"_heartbeat_":
            return kind, data
        writer.write(b"NOP\n")


async def publish(address: tuple[str, int], count: int, progress: Progress, task: TaskID) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"  V2")
    batch: list[bytes] = []
    for body in events(count):
        batch.append(body)
        if len(batch) == BATCH:
            await publish_batch(reader, writer, batch)
            progress.advance(task, len(batch))
            batch = []
    if batch:
        await publish_batch(reader, writer, batch)
        progress.advance(task, len(batch))
    writer.close()
    await writer.wait_closed()


async def publish_batch(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bodies: list[bytes]
) -> None:
    packed = b"".join(struct.pack(">i", len(body)) + body for body in bodies)
    writer.write(f"MPUB {TOPIC}\n".encode() + struct.pack(">ii", len(packed) + 4, len(bodies)) + packed)
    await writer.drain()
    await read_frame(reader, writer)


async def consume(
    address: tuple[str, int], count: int, tally: Tally, progress: Progress, task: TaskID
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"  V2SUB {TOPIC} {CHANNEL}\n".encode())
    await read_frame(reader, writer)
    writer.write(f"RDY {READY}\n".encode())
    while len(tally.seen) < count:
        try:
            async with asyncio.timeout(0.5):
                kind, data = await read_frame(reader, writer)
        except TimeoutError:
            continue
        if kind != 2:
            continue
        timestamp_ns, attempts = struct.unpack_from(">qH", data)
        event = json.loads(data[MESSAGE_BODY:])
        tally.received += 1
        tally.redelivered += attempts > 1
        tally.kinds[event["kind"]] += event["number"] not in tally.seen
        tally.seen.add(event["number"])
        if tally.received % 100 == 0:
            tally.latencies_ms.append((time.time_ns() - timestamp_ns) / 1e6)
        writer.write(b"FIN " + data[10:26] + b"\n")
        progress.advance(task)
    writer.close()
    await writer.wait_closed()


async def start_broker(folder: Path) -> tuple[asyncio.subprocess.Process, tuple[str, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nsparq.server.main", "--tcp-address=127.0.0.1:0", f"--data-path={folder}",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    while line := (await process.stderr.readline()).decode():
        said.append(line)
        found = re.search(r"TCP: listening on (\S+):(\d+)", line)
        if found:
            return process, (found[1], int(found[2]))
    raise RuntimeError("nsqd did not start:\n" + "".join(said))


async def run(count: int, console: Console) -> bool:
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="nsparq-demo-") as folder:
        process, address = await start_broker(Path(folder))
        console.print(f"nsqd listens on {address[0]}:{address[1]}, its data is in {folder}")
        assert process.stderr is not None
        drain = asyncio.create_task(process.stderr.read())
        started = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await stream(address, count, tally, console)
        finally:
            seconds = time.perf_counter() - started
            process.terminate()
            status = await process.wait()
            await drain
        size = log_size(Path(folder))
    show(console, count, tally, seconds, size)
    return len(tally.seen) == count and status == 0


def log_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.log"))


async def stream(address: tuple[str, int], count: int, tally: Tally, console: Console) -> None:
    columns = (TextColumn("{task.description:>9}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        published = progress.add_task("published", total=count)
        consumed = progress.add_task("consumed", total=count)
        async with asyncio.TaskGroup() as group:
            group.create_task(publish(address, count, progress, published))
            for _ in range(2):
                group.create_task(consume(address, count, tally, progress, consumed))


def show(console: Console, count: int, tally: Tally, seconds: float, log_bytes: int) -> None:
    table = Table(title="What went through")
    table.add_column("figure")
    table.add_column("value", justify="right")
    latencies = sorted(tally.latencies_ms) or [0.0]
    table.add_row("events published and acknowledged", f"{count:,}")
    table.add_row("events consumed and finished", f"{len(tally.seen):,}")
    table.add_row("delivered more than once", f"{tally.redelivered:,}")
    table.add_row("seconds", f"{seconds:.2f}")
    table.add_row("events per second, through a Python client", f"{count / seconds:,.0f}")
    table.add_row("latency, median", f"{latencies[len(latencies) // 2]:.1f} ms")
    table.add_row("log left on disk", f"{log_bytes / 1e6:.1f} MB")
    for kind, number in tally.kinds.most_common():
        table.add_row(f"  of kind {kind}", f"{number:,}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m nsparq.demo", description=__doc__)
    parser.add_argument("--events", type=int, default=200_000, help="how many to push through")
    count = parser.parse_args().events
    console = Console()
    complete = asyncio.run(run(count, console))
    console.print("every event came out" if complete else "events are missing")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
