"""`format("nsq")`: NSQ topics as Spark tables and streams, and a session to use it in.

    datasource.py   the entry: makes the readers and writers below
    options.py      all options, their help, the reference page (option_fields.py: how one is declared)
    source/         log mode: reads the log of nsparq's nsqd
    queue/          queue mode: consumes a channel of any nsqd
    sink/           writes rows to topics
    cluster/        asks nsqd and nsqlookupd over HTTP
    session/        starts Spark: finds Java, sets it up, checks it

Spark runs this code in four kinds of Python processes, and pickles readers and writers between
them:

    the user's      builds the session; calls spark.read, readStream, write
    planner         one call each: constructs a reader or writer, plans a batch, commits a write
    driver          one for each running stream: calls the methods of its reader, one at a time
    task            many, on the executors: read() and write()

A Spark read (`spark.read`): the planner calls `partitions`, which asks every nsqd for the extent of
its logs and cuts them into ranges; each task fetches its ranges and returns Arrow batches.

A micro-batch of a stream, in the order of calls:

    driver   latestOffset(start)    how far the batch may go; moves the channels to `start`
             (Spark writes the offsets to the checkpoint)
    driver   commit(start)          the last batch is in the sink
    driver   partitions(start, end) the work of each task
    task     read(partition)        the rows
    task     write(rows)            stages them in nsqd, if the sink is format("nsq")
    planner  commit(messages)       publishes all staged rows at once
             (Spark writes the commit to the checkpoint)

Everything is imported when it is first used, because each of these processes imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nsparq.spark.worker import hide_lost_jvm_tracebacks, in_spark_process

if TYPE_CHECKING:
    from nsparq.spark.datasource import NsqDataSource as NsqDataSource
    from nsparq.spark.session.build import build_session as build_session
    from nsparq.spark.session.build import configure as configure
    from nsparq.spark.session.build import register as register
    from nsparq.spark.session.build import session_environment as session_environment

__all__ = ["NsqDataSource", "build_session", "configure", "register", "session_environment"]

if in_spark_process():
    hide_lost_jvm_tracebacks()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "datasource" if name == "NsqDataSource" else "session.build"
    return getattr(import_module(f"{__name__}.{module}"), name)
