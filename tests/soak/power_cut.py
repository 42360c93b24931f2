"""Power cuts for as long as you like: `python -m tests.soak.power_cut --trials 10000`.

Every trial cuts the power at a random call of a random life (see tests/faults/power_cut.py), starts
nsqd's broker on what is left, and compares. Prints each violation with the seed that shows it
again, and the counts.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from tests.faults.power_cut import DURABILITIES, campaign

CUTS = 50
"""In each life."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first life")
    parser.add_argument("--durability", choices=DURABILITIES, action="append")
    arguments = parser.parse_args()
    # What is damaged is logged, and most states here are.
    logging.disable()
    found = 0
    for durability in arguments.durability or DURABILITIES:
        trials = violations = 0
        with tempfile.TemporaryDirectory() as directory:
            lives = -(-arguments.trials // CUTS)
            for wrong in campaign(Path(directory), durability, arguments.seed, lives=lives, cuts=CUTS):
                trials += 1
                violations += bool(wrong)
                for line in wrong:
                    say(line)
        say(f"{durability}: {trials} trials, {violations} with violations")
        found += violations
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
