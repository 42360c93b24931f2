"""How many examples a property is tried with: few in an ordinary run, since each run draws others, and all of
them with NSPARQ_THOROUGH=1 in the environment, for whoever has changed the code behind a property."""

from __future__ import annotations

import os

IS_THOROUGH = os.environ.get("NSPARQ_THOROUGH", "") not in ("", "0")
SHARE = 3
"""One example in so many is tried in an ordinary run."""


def examples(count: int) -> int:
    return count if IS_THOROUGH else count // SHARE
