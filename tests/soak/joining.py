"""A follower of a large data path catches up under load: `python -m tests.soak.joining --gib 2`.

The primary writes 5 MB each second meanwhile. Prints the time, the memory of both sides, and the
longest time that the primary's event loop stood still.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from nsparq.replication.follower import Follower
from nsparq.replication.joining import BLOCK
from nsparq.replication.membership import Membership
from nsparq.replication.primary import Primary

SECRET = b"the cluster's secret"
SEGMENT_BLOCKS = 100
WRITE, INTERVAL_S = 50_000, 0.01
LIMIT_S = 600


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def follow(port: int, root: str) -> None:
    async def main() -> None:
        with suppress(OSError):
            await Follower(Path(root), "soak", "b", SECRET).follow("127.0.0.1", port)

    asyncio.run(main())
    say(f"follower: at most {peak_mib()} MiB of memory")


async def run(directory: Path, gib: float) -> int:
    root, copy = directory / "a", directory / "b"
    root.mkdir()
    copy.mkdir()
    block = random.Random(1).randbytes(BLOCK)
    for number in range(round(gib * 1024)):
        with (root / f"segment-{number // SEGMENT_BLOCKS}").open("ab") as file:
            file.write(number.to_bytes(4) + block[4:])
    asked: list[Membership] = []
    primary = Primary(root, Membership(1, "a", {"a": "1"}), SECRET, asked.append)
    port = await primary.listen("127.0.0.1", 0)
    before = peak_mib()
    process = multiprocessing.get_context("spawn").Process(target=follow, args=(port, str(copy)))
    process.start()
    started, written, longest = time.monotonic(), 0, 0.0
    with primary.files.opened(root / "active") as fd:
        while not asked and time.monotonic() - started < LIMIT_S:
            turn = time.monotonic()
            primary.files.write(fd, [block[:WRITE]], written)
            written += WRITE
            await asyncio.sleep(INTERVAL_S)
            longest = max(longest, time.monotonic() - turn - INTERVAL_S)
    took = time.monotonic() - started
    await primary.close()
    await asyncio.to_thread(process.join, 60)
    say(f"primary: {before} MiB of memory before, at most {peak_mib()} MiB; stood still for {longest:.3f} s")
    say(f"{gib} GiB: {'caught up' if asked else 'NOT caught up'} after {took:.1f} s, {written} bytes later")
    return 0 if asked else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(run(Path(directory), arguments.gib))


if __name__ == "__main__":
    sys.exit(main())
