"""Shared by the fuzzers: starts an nsqd, and processes that play seeded cases until the first
problem."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults.load import resident_mib
from tests.support import BrokerProcess, start_process

STRIDE = 1_000_000_000

Address = tuple[str, int]
Run = Callable[[Address, int, int], tuple[int, list[str]]]
"""Plays cases: address, first seed, number. Gives the number of cases played, and their
problems."""


def work(
    run: Run, address: Address, first: int, count: int, end: float, results: multiprocessing.Queue
) -> None:
    """Play cases, and report their number about once a second."""
    while count and time.monotonic() < end:
        played, problems = run(address, first, min(count, 200))
        results.put((played, problems))
        if problems or not played:
            return
        first += played
        count -= played


def main(description: str, run: Run, address_of: Callable[[BrokerProcess], Address]) -> int:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on (60)")
    parser.add_argument(
        "--seed", type=int, default=None, help="the first case; a new one each run by default"
    )
    parser.add_argument(
        "--count", type=int, default=1 << 40, help="how many cases each process plays at most"
    )
    parser.add_argument("--processes", type=int, default=2, help="how many send at the same time (2)")
    options = parser.parse_args()
    seed = time.time_ns() // 1_000_000 % STRIDE if options.seed is None else options.seed

    print(f"seed {seed}, {options.processes} processes, {options.seconds:g} s")
    results: multiprocessing.Queue = multiprocessing.Queue()
    started = time.monotonic()
    with start_process() as broker:
        first_mib = resident_mib(broker.pid)
        arguments = (options.count, started + options.seconds, results)
        address = address_of(broker)
        workers = [
            multiprocessing.Process(target=work, args=(run, address, seed + number * STRIDE, *arguments))
            for number in range(options.processes)
        ]
        for worker in workers:
            worker.start()
        cases, found = gather(workers, results)
        for worker in workers:
            worker.terminate()
            worker.join()
        if not broker.alive():
            found.append(f"the broker died with status {broker.wait()}")
        else:
            print(f"resident {first_mib:.0f} MiB before, {resident_mib(broker.pid):.0f} MiB after")
        if "Traceback" in broker.stderr_text():
            found.append("the broker logged a traceback")
        if found:
            print(*found, sep="\n")
            print(f"the log of the broker:\n{broker.stderr_text()[-5000:]}")
            broker.kill()
    print(f"{cases} cases in {time.monotonic() - started:.1f} s, {len(found)} problems")
    return 1 if found else 0


def gather(workers: list[multiprocessing.Process], results: multiprocessing.Queue) -> tuple[int, list[str]]:
    """Count cases until all workers are done, or one finds a problem."""
    cases = 0
    while any(worker.is_alive() for worker in workers) or not results.empty():
        try:
            played, problems = results.get(timeout=0.2)
        except multiprocessing.queues.Empty:
            continue
        cases += played
        if problems:
            return cases, problems
    return cases, []
