"""Common parts of `nsparq pipeline` commands: options, signals, the session, running a file."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from nsparq import logs
from nsparq.pipeline.execute.progress import State
from nsparq.pipeline.execute.view import LogView, TerminalView, View
from nsparq.pipeline.file.keys import did_you_mean
from nsparq.pipeline.file.sinks import Console
from nsparq.pipeline.file.spec import Pipeline, PipelineFile, SpecError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

OK, FAILED, WRONG = 0, 1, 2
END_S: Final = 5.0
"""How long Spark may take to end after a signal, in addition to `stop_grace`."""
POLL_S: Final = 0.1
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def configure_logs() -> None:
    logs.configure("info", "[pipeline] ")
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        # They print tracebacks of errors that we report ourselves.
        logging.getLogger(name).disabled = True
    logging.getLogger("py4j").setLevel(logging.WARNING)


def add_spark(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--master", default="", help="where Spark runs, such as local[4] or spark://host:7077"
    )
    command.add_argument(
        "--conf",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="a Spark setting; repeatable",
    )


def add_running(command: argparse.ArgumentParser) -> None:
    add_spark(command)
    command.add_argument(
        "--metrics-address", metavar="HOST:PORT", help="serve /metrics and /status on this address"
    )
    command.add_argument("--plain", action="store_true", help="print log lines on a terminal, too")


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError("must be NAME=VALUE")
    return name, value


def chosen(file: PipelineFile, only: Sequence[str]) -> list[Pipeline]:
    """The pipelines with these names, or all. Raises SpecError."""
    known = {one.name: one for one in file.pipelines}
    for name in only:
        if name not in known:
            raise SpecError(str(file.path), [f"there is no pipeline {name!r}; {did_you_mean(name, known)}"])
    return [one for one in file.pipelines if not only or one.name in only]


def small_session(file: PipelineFile, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A session on this machine for a few messages or none, even if the file names a cluster."""
    from nsparq.pipeline.execute import runner

    return runner.build_session(replace(file, spark=replace(file.spark, ui_port=0)), "local[1]", conf)


class Stopping:
    """SIGTERM and SIGINT set `event`. A second SIGINT ends the process at once.

    The process also ends `limit` seconds after the first signal, because a start of Spark or a
    query may hang without looking at the event. Checkpoints make that safe.
    """

    def __init__(self, limit: float) -> None:
        self.event = threading.Event()
        self._limit = limit
        self.install()

    def install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.event.is_set():
            if number == signal.SIGINT:
                os._exit(130)
            return
        self.event.set()
        why = f"still running {self._limit:g} s after the signal: exiting now"
        timer = threading.Timer(self._limit, self.leave, [why])
        timer.daemon = True
        timer.start()

    def leave(self, why: str) -> NoReturn:
        """Ends the process at once. Spark's JVM ends with it."""
        logger.warning("%s", why)
        logging.shutdown()
        os._exit(OK)


@contextlib.contextmanager
def session(file: PipelineFile, arguments: argparse.Namespace, stopping: Stopping) -> Iterator[SparkSession]:
    from nsparq.spark.session.build import activate, is_connect

    spark = _started(file, arguments, stopping)
    if not is_connect(spark):
        activate(spark)
    try:
        yield spark
    finally:
        spark.stop()


def _started(file: PipelineFile, arguments: argparse.Namespace, stopping: Stopping) -> SparkSession:
    """Builds the session in a thread, so that a signal need not wait for it, and Spark does not
    replace our handler of SIGINT."""
    from nsparq.pipeline.execute import runner

    logger.info("starting Spark (%s)", arguments.master or file.spark.master)
    built: Future[SparkSession] = Future()

    def build() -> None:
        try:
            built.set_result(runner.build_session(file, arguments.master, dict(arguments.conf)))
        except BaseException as error:
            built.set_exception(error)

    threading.Thread(target=build, daemon=True).start()
    while not built.done():
        wait([built], POLL_S)
        if stopping.event.is_set() and not built.done():
            stopping.leave("stopped while Spark was starting")
    return built.result()


def run_file(file: PipelineFile, arguments: argparse.Namespace, *, fail_fast: bool = False) -> int:
    """Runs the pipelines, and returns the exit status of the command."""
    if arguments.metrics_address:
        file = replace(file, run=replace(file.run, metrics_address=arguments.metrics_address))
    stopping = Stopping(file.run.stop_grace + END_S)
    with session(file, arguments, stopping) as spark:
        from nsparq.pipeline.execute import runner

        with _view(file, arguments.plain) as view:
            done = runner.run(spark, file, stopping.event, watch=view.show, fail_fast=fail_fast)
    return FAILED if any(one.state is State.FAILED for one in done.pipelines) else OK


def _view(file: PipelineFile, plain: bool) -> View:
    shows_rows = any(isinstance(one.sink, Console) for each in file.pipelines for one in each.outputs)
    if sys.stderr.isatty() and not plain and not shows_rows:
        try:
            return _LoggingTerminalView()
        except ModuleNotFoundError:
            pass
    return LogView()


class _LoggingTerminalView(TerminalView):
    """Prints log lines above the table."""

    def __enter__(self) -> _LoggingTerminalView:
        super().__enter__()
        configure_logs()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        configure_logs()
