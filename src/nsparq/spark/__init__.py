"""NSQ topics as Spark tables and streams: format("nsq"), and a session to use it in.

Everything is loaded when it is first asked for: each of Spark's worker processes imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nsparq.spark.session.quiet import hush, in_spark_process

if TYPE_CHECKING:
    from nsparq.spark.datasource import NsqDataSource as NsqDataSource
    from nsparq.spark.session.build import build_session as build_session
    from nsparq.spark.session.build import configure as configure
    from nsparq.spark.session.build import register as register
    from nsparq.spark.session.build import session_environment as session_environment

__all__ = ["NsqDataSource", "build_session", "configure", "register", "session_environment"]

_HOME = {
    "NsqDataSource": "datasource",
    "build_session": "session.build",
    "configure": "session.build",
    "register": "session.build",
    "session_environment": "session.build",
}


if in_spark_process():
    hush()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
