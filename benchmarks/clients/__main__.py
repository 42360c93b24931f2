"""Python clients for NSQ side by side, each in a process of its own, against the same broker.

    python -m benchmarks.clients [--messages 48000] [--rounds 5] [--only …] [--alone]
    [--loop uvloop] [--command …]

    publish N           single messages, N calls at a time, each acknowledged
    publish by N        batches of N (MPUB), 16 calls at a time; 4 where N is 200, unless it says 16
    consume             single messages to a handler that does nothing, from a full topic, 200 in
                        flight
    consume by 200      the same in batches, 400 in flight; compared to single ones, which is all
                        the others have
    …, headers          the same with two headers, a trace and a name, and shorter bodies: a message
                        has 100 bytes with its headers, and so a frame as long as one without. The
                        handler reads one of them. All messages have the same headers, unless it
                        says own headers: then each has its own trace

Rounds alternate over the libraries, each row of a round with a broker of its own; shown are
medians. Beside the rate stands the processor time per message of the client, and of the broker
while it served it. Where the broker is the limit the rates say little, and that of the client says
what is left for the program. Libraries on asyncio run on the --loop that is asked for; gnsq brings
its own.
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
from typing import NamedTuple

from benchmarks.clients.load import Load
from benchmarks.macro.brokers import OURS, Spawned
from nsparq.client import Producer

OTHERS = ("pynsq", "gnsq", "ansq")


class Row(NamedTuple):
    """One section of the table: the load, its parameters, and its number of messages."""

    what: str
    settings: dict[str, int]
    share: float
    others: tuple[str, ...] = OTHERS
    compared_to: str = ""
    """The row whose other libraries count."""
    without_headers: str = ""
    """The same row without headers."""


ROWS = {
    "publish 1": Row("publish", {"tasks": 1}, 0.25),
    "publish 16": Row("publish", {"tasks": 16}, 1),
    "publish 100": Row("publish", {"tasks": 100}, 1),
    "publish by 20": Row("publish_batches", {"batch": 20, "tasks": 16}, 10),
    "publish by 200": Row("publish_batches", {"batch": 200, "tasks": 4}, 40),
    "publish by 200, 16": Row("publish_batches", {"batch": 200, "tasks": 16}, 40),
    "consume": Row("consume", {}, 1),
    "consume by 200": Row("consume_batches", {"batch": 200, "in_flight": 400}, 2, (), "consume"),
}
WITH_HEADERS = {
    "publish 1, headers": ("publish 1", 2),
    "publish 100, headers": ("publish 100", 2),
    "publish by 200, headers": ("publish by 200", 1),
    "publish by 200, own headers": ("publish by 200", 2),
    "consume, headers": ("consume", 1),
    "consume, own headers": ("consume", 2),
    "consume by 200, headers": ("consume by 200", 1),
    "consume by 200, own headers": ("consume by 200", 2),
}
"""Rows that are compared with one without headers."""
ROWS |= {
    title: ROWS[plain]._replace(
        settings={**ROWS[plain].settings, "headers": headers},
        others=(),
        compared_to="",
        without_headers=plain,
    )
    for title, (plain, headers) in WITH_HEADERS.items()
}


class Figures(NamedTuple):
    rate: float
    client_us: float
    broker_us: float


async def fill(load: Load) -> None:
    """Fill the channel before the consumer starts."""
    batch, headers = [load.body] * 1000, load.batch_headers(1000)
    async with Producer(load.address) as producer:
        for _ in range(load.count // len(batch)):
            await producer.publish_many(load.topic, batch, headers=headers)


def run(library: str, load: Load, broker: Spawned) -> Figures:
    if load.what.startswith("consume"):
        asyncio.run(fill(load))
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.clients.load_{library}", load.to_argument()]
    before = broker.cpu_seconds()
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode != 0 or not result.stdout:
        sys.exit(f"{library} {load.what} failed:\n{result.stderr[-2000:]}")
    broker_us = (broker.cpu_seconds() - before) / load.count * 1e6
    taken = json.loads(result.stdout.splitlines()[-1])
    return Figures(load.count / taken["elapsed"], taken["cpu"] / load.count * 1e6, broker_us)


def median(runs: list[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*runs, strict=True)))


def show(title: str, medians: dict[str, Figures], others: dict[str, Figures], plain: Figures | None) -> None:
    print(f"\n{title}")
    for library, figures in medians.items():
        line = f"  {library:8}{figures.rate:>12,.0f} /s {figures.client_us:10.2f} us"
        line += f" {figures.broker_us:10.2f} us"
        if library == "nsparq" and others:
            rate = figures.rate / max(other.rate for other in others.values())
            cost = min(other.client_us for other in others.values()) / figures.client_us
            line += f"   {rate:4.1f} x the best other, for 1/{cost:.1f} of its processor time"
        if plain is not None:
            used, before = (one.client_us + one.broker_us for one in (figures, plain))
            line += f"   {figures.rate / plain.rate:4.2f} x the rate without headers"
            line += f", {used / before:4.2f} x the processor time"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=48_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--command", default=OURS, help="the broker; ours unless told otherwise")
    parser.add_argument(
        "--loop", choices=("asyncio", "uvloop"), default="asyncio", help="of those on asyncio"
    )
    parser.add_argument("--only", action="append", choices=sorted(ROWS))
    parser.add_argument("--alone", action="store_true", help="without the other libraries")
    arguments = parser.parse_args()
    rows = {title: row for title, row in ROWS.items() if not arguments.only or title in arguments.only}
    # Divisible by every number of calls and every batch size.
    count = max(arguments.messages // 16_000, 1) * 16_000
    print(f"{count:,} messages of 100 bytes, {arguments.rounds} rounds, broker: {arguments.command}")
    figures: dict[str, dict[str, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for number in range(arguments.rounds):
        for title, row in rows.items():
            # A new broker for each, so that unwritten data of the last one does not disturb the
            # next.
            with Spawned(arguments.command, [], None) as broker:
                address = f"{broker.address[0]}:{broker.address[1]}"
                for library in ("nsparq", *(() if arguments.alone else row.others)):
                    topic = f"{library}.{row.what}.{number}.{time.time_ns() % 10**9}"
                    load = Load(
                        row.what, address, topic, int(count * row.share), loop=arguments.loop, **row.settings
                    )
                    figures[title][library].append(run(library, load, broker))
    print(f"\n{'messages':>23} {'client':>11} {'broker':>13}  (processor time of each per message)")
    medians = {
        title: {library: median(runs) for library, runs in by_library.items()}
        for title, by_library in figures.items()
    }
    for title, by_library in medians.items():
        compared_to = medians.get(ROWS[title].compared_to or title, {})
        plain = medians.get(ROWS[title].without_headers, {}).get("nsparq")
        show(title, by_library, {name: compared_to[name] for name in OTHERS if name in compared_to}, plain)


if __name__ == "__main__":
    main()
