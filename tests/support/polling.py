"""Waiting for a fact instead of sleeping, and names that no other test uses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_numbers = itertools.count(1)


def wait_until(
    fact: Callable[[], T], timeout: float = 20.0, *, interval: float = 0.01, what: object = ""
) -> T:
    """Poll until fact() is truthy and return that value; AssertionError with the last value otherwise."""
    deadline = time.monotonic() + timeout
    while True:
        value = fact()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout} s: {what or fact}, last value {value!r}")
        time.sleep(interval)


def unique_name(prefix: str = "t") -> str:
    """A topic or channel name that is fresh within this test process."""
    return f"{prefix}_{next(_numbers)}"
