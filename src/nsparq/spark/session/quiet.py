"""Keeps Spark's Python processes from printing tracebacks when their JVM has gone.

With Unix sockets that is how a query and a session normally end. The traces would alarm people, and spoil a
terminal view.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import Any

__all__ = ["hush", "in_spark_process"]

GONE = (BrokenPipeError, ConnectionResetError, EOFError)

_print_exc = traceback.print_exc


def in_spark_process() -> bool:
    """Whether Spark started this process (to run our code in), rather than a user."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith(("pyspark.", "nsparq.spark.session.daemon"))


def hush() -> None:
    """Every other exception is shown as before."""
    sys.excepthook = _hook
    traceback.print_exc = _print


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, GONE):
        sys.__excepthook__(kind, error, trace)


def _print(*arguments: Any, **options: Any) -> None:
    if not isinstance(sys.exc_info()[1], GONE):
        _print_exc(*arguments, **options)
