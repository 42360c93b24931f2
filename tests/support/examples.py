"""How many examples a property test tries: a third in an ordinary run, because each run draws
others, and all with NSPARQ_THOROUGH=1 in the environment, after a change of the code under test."""

from __future__ import annotations

import os

IS_THOROUGH = os.environ.get("NSPARQ_THOROUGH", "") not in ("", "0")
SHARE = 3
"""An ordinary run tries one example in this many."""


def examples(count: int) -> int:
    return count if IS_THOROUGH else count // SHARE
