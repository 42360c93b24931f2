"""What a task of ours does to the Python process that it runs in."""

from __future__ import annotations

import gc

from pyspark import TaskContext

__all__ = ["spare_collections"]


def spare_collections() -> None:
    """Once in each of Spark's worker processes: let the garbage collector pass by what is there now.

    Spark collects all garbage after each task. With the modules that it loads itself that takes longer than
    the rest of a short task, and finds nothing.
    """
    if TaskContext.get() is not None and not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
