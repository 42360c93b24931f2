"""Send garbage to a broker's HTTP port for as long as you like: python fuzz/fuzz_http.py --seconds
60

Starts an nsqd of its own, plays seeded cases from several processes, and stops at the first problem
that a seed brings to light. `--seed N --count 1` plays that case again. See README.md.
"""

from __future__ import annotations

import sys

import engine  # puts the project on the path

from tests.faults import fuzzing_http

if __name__ == "__main__":
    sys.exit(engine.main(__doc__ or "", fuzzing_http.run, lambda broker: broker.http_address))
