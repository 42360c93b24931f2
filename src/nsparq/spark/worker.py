"""What a task of ours does to the Python process that it runs in."""

from __future__ import annotations

import gc
import os

from pyspark import TaskContext

__all__ = ["spare_collections"]


_spared_in: int | None = None
"""The process that has done it. (Python counts what is frozen by walking through it, at every question.)"""


def spare_collections() -> None:
    """Once in each of Spark's worker processes: let the garbage collector pass by what is there now.

    Spark collects all garbage after each task. With the modules that it loads itself that takes longer than
    the rest of a short task, and finds nothing.
    """
    global _spared_in
    if _spared_in != os.getpid() and TaskContext.get() is not None:
        _spared_in = os.getpid()
        gc.collect()
        gc.freeze()
