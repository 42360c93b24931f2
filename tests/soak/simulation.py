"""Simulated clusters for as long as you like: `python -m tests.soak.simulation --seeds 10000`.

Every seed is the life of one cluster (see tests/replication/simulation.py): real brokers, storage
and replication, with a network, a coordinator, disks and clocks that fail. Prints each broken
promise with its seed, and the counts. The order of a set may differ between two runs of a seed, so
a rare find may need several runs of its seed.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.replication.simulation import Violation, run_seed

SHOWN_EVERY = 500


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    logging.disable()
    counts: Counter[str] = Counter()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            path = Path(directory) / str(seed)
            counts["seeds"] += 1
            try:
                outcome = run_seed(seed, path)
                counts["acknowledged"] += outcome.acknowledged
                counts["take-overs"] += outcome.takeovers
                counts["commits"] += outcome.commits
                counts["faults"] += outcome.faults.total()
            except Violation as violation:
                counts["violations"] += 1
                say(f"seed {seed}: {violation}")
            shutil.rmtree(path)
            if counts["seeds"] % SHOWN_EVERY == 0:
                say(_line(counts))
    say(_line(counts))
    return 1 if counts["violations"] else 0


def _line(counts: Counter[str]) -> str:
    names = "seeds", "faults", "take-overs", "acknowledged", "commits", "violations"
    return ", ".join(f"{counts[name]} {name}" for name in names)


if __name__ == "__main__":
    sys.exit(main())
