"""Adjustments to the Python processes that Spark starts: quiet at the end, fast between tasks.

Imports nothing of Spark: `nsparq.spark` loads this module, also where Spark is not installed.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from types import TracebackType
from typing import Any, Final

from nsparq.malloc import keep_freed

__all__ = ["hide_lost_jvm_tracebacks", "in_spark_process", "prepare_worker"]

KEPT_BYTES: Final = 64 << 20
"""Limit on freed memory that a worker keeps."""
LARGE_BYTES: Final = 32 << 20
"""Allocations of this size or more go back to the system as soon as they are freed."""
LOST_JVM: Final = (BrokenPipeError, ConnectionResetError, EOFError)

_print_exc = traceback.print_exc

_prepared: int | None = None
"""Id of the process that prepare_worker() has prepared."""


def in_spark_process() -> bool:
    """Whether Spark started this process, rather than a user."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith(("pyspark.", "nsparq.spark.session.daemon"))


def hide_lost_jvm_tracebacks() -> None:
    """Print no traceback for a connection to the JVM that has ended. All other exceptions are
    shown.

    With Unix sockets every query and session ends this way.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, LOST_JVM):
            sys.__excepthook__(kind, error, trace)

    def print_exc(*arguments: Any, **options: Any) -> None:
        if not isinstance(sys.exc_info()[1], LOST_JVM):
            _print_exc(*arguments, **options)

    sys.excepthook = hook
    traceback.print_exc = print_exc


def prepare_worker() -> None:
    """Tune a worker process, once: freeze the loaded modules for the garbage collector, keep freed
    memory.

    Spark runs a full garbage collection after each task. With all of Spark's modules loaded, that
    takes longer than the rest of a short task and finds nothing.
    """
    from pyspark import TaskContext

    global _prepared
    if _prepared != os.getpid() and TaskContext.get() is not None:
        _prepared = os.getpid()
        keep_freed(KEPT_BYTES, LARGE_BYTES)
        gc.collect()
        gc.freeze()
