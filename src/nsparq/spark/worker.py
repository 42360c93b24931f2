"""What a task of ours does to the Python process that it runs in."""

from __future__ import annotations

import gc
import os
from typing import Final

from pyspark import TaskContext

from nsparq.malloc import keep_freed

__all__ = ["prepare_worker"]

KEPT_BYTES: Final = 64 << 20
"""Freed memory that a worker keeps, at most."""
LARGE_BYTES: Final = 32 << 20
"""What is as large as this goes back to the system when it is freed."""

_prepared: int | None = None
"""The process that has been prepared. (Python counts what is frozen by walking through it.)"""


def prepare_worker() -> None:
    """Once in each of Spark's worker processes: let the garbage collector pass by what is there now, and keep
    the memory of a piece of a log for the next one.

    Spark collects all garbage after each task. With the modules that it loads itself that takes longer than
    the rest of a short task, and finds nothing.
    """
    global _prepared
    if _prepared != os.getpid() and TaskContext.get() is not None:
        _prepared = os.getpid()
        keep_freed(KEPT_BYTES, LARGE_BYTES)
        gc.collect()
        gc.freeze()
