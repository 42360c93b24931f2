"""Python clients for NSQ side by side, each in a process of its own, against the same broker.

    python -m benchmarks.clients [--messages 50000] [--rounds 3] [--command 'nsqd …']

publish: single messages, 16 at a time, each acknowledged. consume: single messages to a handler that does
nothing, from a full topic, 200 in flight. The batches are of 200. Rounds alternate over the libraries; shown
are medians, the client's processor time per message, and the ratio to the best of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict

from benchmarks.clients.load import Load
from benchmarks.macro.brokers import OURS, Spawned
from nsparq.client import Producer

LIBRARIES = {
    "nsparq": ("publish", "consume", "publish_batches", "consume_batches"),
    "pynsq": ("publish", "consume", "publish_batches"),
    "gnsq": ("publish", "consume", "publish_batches"),
    "ansq": ("publish", "consume", "publish_batches"),
}
MORE_OF = {"publish_batches": 4, "consume_batches": 4}


async def fill(load: Load) -> None:
    """Have the channel full before the consumer comes."""
    async with Producer(load.address) as producer:
        for _ in range(load.count // 1000):
            await producer.publish_many(load.topic, [load.body] * 1000)


def run(library: str, load: Load) -> tuple[float, float]:
    """Messages per second, and the client's microseconds per message."""
    if load.what.startswith("consume"):
        asyncio.run(fill(load))
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.clients.load_{library}", load.to_argument()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode != 0 or not result.stdout:
        sys.exit(f"{library} {load.what} failed:\n{result.stderr[-2000:]}")
    figures = json.loads(result.stdout.splitlines()[-1])
    return load.count / figures["elapsed"], figures["cpu"] / load.count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--command", default=OURS, help="the broker; ours unless told otherwise")
    parser.add_argument("--only", action="append", choices=sorted(LIBRARIES))
    arguments = parser.parse_args()
    count = max(arguments.messages // 4000, 1) * 4000
    chosen = {
        name: loads for name, loads in LIBRARIES.items() if not arguments.only or name in arguments.only
    }
    print(f"{count:,} messages of 100 bytes, {arguments.rounds} rounds, broker: {arguments.command}")
    figures: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with Spawned(arguments.command, [], None) as broker:
        address = f"{broker.address[0]}:{broker.address[1]}"
        for number in range(arguments.rounds):
            for what in LIBRARIES["nsparq"]:
                for library, loads in chosen.items():
                    if what in loads:
                        topic = f"{library}.{what}.{number}.{time.time_ns() % 10**9}"
                        load = Load(what, address, topic, count * MORE_OF.get(what, 1))
                        figures[what][library].append(run(library, load))
    for what, by_library in figures.items():
        medians = {name: statistics.median(rate for rate, _ in runs) for name, runs in by_library.items()}
        others = [rate for name, rate in medians.items() if name != "nsparq"]
        print(f"\n{what.replace('_', ' in ')}")
        for name, runs in by_library.items():
            cpu = statistics.median(cost for _, cost in runs)
            note = (
                f"  {medians[name] / max(others):5.1f} x the best other"
                if name == "nsparq" and others
                else ""
            )
            print(
                f"  {name:8} {medians[name]:>10,.0f} messages/s  {cpu:7.2f} us of processor time each{note}"
            )


if __name__ == "__main__":
    main()
