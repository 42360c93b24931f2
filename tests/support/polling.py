"""Waiting for a fact instead of sleeping, and names that no other test uses.

Tests judge by counts, by order, or by a clock that they pass in, not by elapsed time, because the
machine may be busy. Every wait has the same long DEADLINE as a safety net. `busy_s` is the
processor time of a thread, which does not include waiting for a processor.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_numbers = itertools.count(1)

DEADLINE = 60.0
"""Seconds until a test gives up waiting. Less than pytest's limit for a test, so that the test can
report what it waited for."""
SPARK_DEADLINE = 240.0
"""The same for what Spark does: it starts Java and Python processes, and compiles each query."""


def wait_until(
    fact: Callable[[], T], timeout: float = DEADLINE, *, interval: float = 0.01, what: object = ""
) -> T:
    """Poll until fact() is truthy and return its value. Otherwise raise AssertionError with the
    last value and `what`, which may be a function.

    The interval grows to a tenth of the time waited so far, up to 50 ms: a poll often asks a
    daemon, which costs processor time.
    """
    started = time.monotonic()
    while True:
        value = fact()
        if value:
            return value
        waited = time.monotonic() - started
        if waited >= timeout:
            shown = what() if callable(what) else what or fact
            raise AssertionError(f"not within {timeout} s: {shown}, last value {value!r}")
        time.sleep(max(interval, min(waited / 10, 0.05)))


def busy_s(pid: int | None = None, thread: int | None = None) -> float:
    """Processor time of a thread, by default the main thread of this process."""
    pid = pid or os.getpid()
    spent_ns = Path(f"/proc/{pid}/task/{thread or pid}/schedstat").read_text().split()[0]
    return int(spent_ns) / 1e9


def unique_name(prefix: str = "t") -> str:
    """A topic or channel name that is new in this test process."""
    return f"{prefix}_{next(_numbers)}"
