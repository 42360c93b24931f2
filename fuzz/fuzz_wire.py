"""Send garbage to a broker's TCP port for as long as you like: python fuzz/fuzz_wire.py --seconds
60

Starts an nsqd of its own, plays seeded cases from several processes, and stops at the first problem
that a seed brings to light. `--seed N --count 1` plays that case again. See README.md.
"""

from __future__ import annotations

import sys

import engine  # puts the project on the path

from tests.faults import fuzzing

if __name__ == "__main__":
    sys.exit(engine.main(__doc__ or "", fuzzing.run, lambda broker: broker.address))
