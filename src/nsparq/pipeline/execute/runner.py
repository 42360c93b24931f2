"""Runs the pipelines of a file in one Spark session, until they end or the caller stops them.

The thread that calls `run()` looks at each `RunningPipeline` a few times a second, and publishes
the status.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.execute import queries
from nsparq.pipeline.execute.progress import State
from nsparq.pipeline.execute.running_pipeline import RunningPipeline, in_thread
from nsparq.pipeline.execute.status import Status, serve, write_status
from nsparq.pipeline.execute.store_checkpoints import local_checkpoints
from nsparq.pipeline.file.keys import is_local
from nsparq.pipeline.file.spec import PipelineFile
from nsparq.pipeline.user_code import send_modules
from nsparq.pipeline.write.delta_upkeep import Upkeep
from nsparq.spark.session.build import is_connect

__all__ = ["build_session", "prepare", "run"]

logger = logging.getLogger(__name__)

POLL_S: Final = 0.25
STATUS_S: Final = 2.0
"""Between two writes of the status file."""
Watch = Callable[[Status], None]


def build_session(
    file: PipelineFile, master: str = "", conf: Mapping[str, str] | None = None
) -> SparkSession:
    """A session for the pipelines of a file. The time zone is UTC unless the file sets another."""
    from nsparq.spark.session.build import build_session

    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.numRecentProgressUpdates": "500",
        **file.spark.conf,
        **(conf or {}),
    }
    return build_session(
        file.spark.app_name,
        master=master or file.spark.master,
        ui_port=file.spark.ui_port or None,
        conf=settings,
    )


def run(
    spark: SparkSession,
    file: PipelineFile,
    stop: threading.Event,
    *,
    watch: Watch = lambda status: None,
    fail_fast: bool = False,
) -> Status:
    """Runs until all pipelines have ended or `stop` is set. Calls `watch` a few times a second.

    A pipeline that has failed permanently does not stop the others, unless `fail_fast`. Raises
    StartError and PipelineError if nothing can be started.
    """
    prepare(spark, file)
    with local_checkpoints(spark, file) as local:
        return _run_all(spark, local, stop, watch, fail_fast)


def _run_all(
    spark: SparkSession, file: PipelineFile, stop: threading.Event, watch: Watch, fail_fast: bool
) -> Status:
    running = [RunningPipeline(spark, file, pipeline) for pipeline in file.pipelines]
    status = Status(
        file=str(file.path),
        pipelines=[one.figures for one in running],
        started=time.time(),
        ui=spark.sparkContext.uiWebUrl or "",
    )
    upkeep = Upkeep(file)
    with _only_runner(file), _served(file, status):
        try:
            _run(running, upkeep, file, status, stop, watch, fail_fast)
        finally:
            _stop(running, file.run.stop_grace)
            upkeep.finish(stop.is_set)
            status.is_running = False
            _write(file, status)
            watch(status)
    return status


def _run(
    running: Sequence[RunningPipeline],
    upkeep: Upkeep,
    file: PipelineFile,
    status: Status,
    stop: threading.Event,
    watch: Watch,
    fail_fast: bool,
) -> None:
    written = 0.0
    while not stop.is_set():
        for one in running:
            one.look(time.monotonic())
            if stop.is_set():
                return
        upkeep.look(time.monotonic())
        watch(status)
        if time.monotonic() - written >= STATUS_S:
            _write(file, status)
            written = time.monotonic()
        if all(one.is_over for one in running):
            return
        if fail_fast and any(one.figures.state is State.FAILED for one in running):
            return
        stop.wait(POLL_S)


def _stop(running: Sequence[RunningPipeline], grace: float) -> None:
    """Stops all pipelines in parallel, so that each has the full grace period."""
    threads = [in_thread(one.stop, grace) for one in running]
    for thread in threads:
        thread.join()


def _write(file: PipelineFile, status: Status) -> None:
    if is_local(file.run.checkpoint):
        try:
            write_status(Path(file.run.checkpoint), status)
        except OSError as error:
            logger.warning("cannot write the status file: %s", error)


@contextmanager
def _served(file: PipelineFile, status: Status) -> Iterator[None]:
    if not file.run.metrics_address:
        yield
        return
    server = serve(file.run.metrics_address, status)
    status.address = server.address
    logger.info("metrics: listening on %s", server.address)
    try:
        yield
    finally:
        server.close()


@contextmanager
def _only_runner(file: PipelineFile) -> Iterator[None]:
    """Holds a lock, because two runners would destroy each other's checkpoints."""
    if not is_local(file.run.checkpoint):
        yield
        return
    directory = Path(file.run.checkpoint)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        raise PipelineError(f"[run] checkpoint: {error.filename}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(f"[run] checkpoint: {directory} is in use by another runner") from None
        yield
    finally:
        os.close(descriptor)


def prepare(spark: SparkSession, file: PipelineFile) -> None:
    """Registers our sources and sinks in a session, and sends the user's modules to the tasks.
    Raises PipelineError."""
    if is_connect(spark):
        raise PipelineError(
            "pipelines need a Spark session in this process, not one of Spark Connect: unset SPARK_REMOTE, "
            "and set the cluster in [spark] master"
        )
    queries.register(spark)
    send_modules(spark, file)
