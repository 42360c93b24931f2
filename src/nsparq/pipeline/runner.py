"""Runs the pipelines of a file in one Spark session: starts them, watches them, starts again what has failed,
stops them.

All of it happens in the thread that calls `run()`; Spark has threads of its own.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nsparq.errors import NsparqError
from nsparq.flags import format_duration
from nsparq.pipeline import queries
from nsparq.pipeline.decode import DECODED
from nsparq.pipeline.errors import PipelineError, in_words
from nsparq.pipeline.progress import Figures, State
from nsparq.pipeline.queries import ROWS
from nsparq.pipeline.spec import Pipeline, PipelineFile, Run, describe, is_local
from nsparq.pipeline.status import Endpoint, Status, write_status

__all__ = ["RunningPipeline", "build_session", "run"]

logger = logging.getLogger(__name__)

POLL_S: Final = 0.25
STATUS_S: Final = 2.0
"""Between two writes of the status file."""
QUIET_S: Final = 3.0
"""Without a micro-batch for so long, the rate is 0."""
Watch = Callable[[Status], None]


def build_session(
    file: PipelineFile, master: str = "", conf: Mapping[str, str] | None = None
) -> SparkSession:
    """A session for the pipelines of a file. Times are UTC unless the file says otherwise."""
    from nsparq.spark.session import build_session

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
    """Until all pipelines have ended, or `stop` is set. `watch` is told a few times a second.

    A pipeline that has failed for good does not end the others, unless `fail_fast`. Raises StartError and
    PipelineError for what cannot be started at all.
    """
    queries.register(spark)
    _ship(spark, file)
    running = [RunningPipeline(spark, file, pipeline) for pipeline in file.pipelines]
    status = Status(
        file=str(file.path),
        pipelines=[one.figures for one in running],
        started=time.time(),
        ui=spark.sparkContext.uiWebUrl or "",
    )
    with _only_runner(file), _served(file, status):
        try:
            _run(running, file, status, stop, watch, fail_fast)
        finally:
            for one in running:
                one.stop(file.run.stop_grace)
            status.is_running = False
            _write(file, status)
            watch(status)
    return status


def _run(
    running: Sequence[RunningPipeline],
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
        watch(status)
        if time.monotonic() - written >= STATUS_S:
            _write(file, status)
            written = time.monotonic()
        if all(one.is_over for one in running):
            return
        if fail_fast and any(one.figures.state is State.FAILED for one in running):
            return
        stop.wait(POLL_S)


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
    endpoint = Endpoint(file.run.metrics_address, status)
    status.address = endpoint.address
    logger.info("metrics: listening on %s", endpoint.address)
    try:
        yield
    finally:
        endpoint.close()


@contextmanager
def _only_runner(file: PipelineFile) -> Iterator[None]:
    """Two of them would ruin each other's checkpoints."""
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


def _ship(spark: SparkSession, file: PipelineFile) -> None:
    """The user's modules, to where the tasks are."""
    names = {step.python.partition(":")[0].partition(".")[0] for one in file.pipelines for step in one.steps}
    for name in sorted(names - {""}):
        module, package = file.path.parent / f"{name}.py", file.path.parent / name
        if module.is_file():
            spark.sparkContext.addPyFile(str(module))
        elif package.is_dir():
            spark.sparkContext.addPyFile(str(_zipped(package)))


def _zipped(package: Path) -> Path:
    """In the cache: executors may ask for it as long as the session lasts."""
    from nsparq.spark.cache import cache_directory, digest, make_once

    stamps = [(str(path), path.stat().st_mtime_ns) for path in sorted(package.rglob("*.py"))]

    def make(path: Path) -> None:
        made = shutil.make_archive(str(path), "zip", package.parent, package.name)
        os.replace(made, path)

    return make_once(cache_directory() / f"{package.name}-{digest(*stamps)}.zip", make)


class RunningPipeline:
    """One pipeline: its queries, its figures, and when it is to be started again."""

    def __init__(self, spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> None:
        self._spark, self._file, self.pipeline = spark, file, pipeline
        self.figures = Figures(
            pipeline.name,
            pipeline.source.topics,
            describe(pipeline.sink),
            channel=pipeline.source.options["channel"],
        )
        self._queries: dict[str, StreamingQuery] = {}
        self._seen: dict[str, tuple[str, int]] = {}
        """The last progress of each role that was counted: run and batch."""
        self._next_start = 0.0
        self._failed_in_a_row = 0
        self._last_rows = 0.0

    @property
    def is_over(self) -> bool:
        return self.figures.state in (State.FINISHED, State.FAILED, State.STOPPED)

    def look(self, now: float) -> None:
        """See what has happened, and do what is due."""
        if self.is_over:
            return
        if not self._queries:
            if now >= self._next_start:
                self._start(now)
            return
        for role, query in self._queries.items():
            self._count(role, query, now)
        if now - self._last_rows > QUIET_S:
            self.figures.quiet()
        ended = {role: query for role, query in self._queries.items() if not query.isActive}
        for role, query in ended.items():
            # What came between the last look and the end.
            self._count(role, query, now, everything=True)
            error = query.exception()
            if error is not None:
                self._fail(in_words(error), now)
                return
        if len(ended) == len(self._queries):
            self._queries = {}
            self.figures.state = State.FINISHED if self.pipeline.trigger.ends else State.STOPPED
            logger.info("%s: %s", self.pipeline.name, self.figures.state)

    def _start(self, now: float) -> None:
        if self.figures.failures:
            self.figures.restarts += 1
        try:
            self._queries = queries.start(self._spark, self._file, self.pipeline)
        except NsparqError as error:
            self._fail(str(error), now)
            return
        except PySparkException as error:
            self._fail(in_words(error), now)
            return
        self.figures.state = State.RUNNING
        logger.info("%s: started, %s -> %s", self.pipeline.name, self.figures.topics, self.figures.sink)

    def _fail(self, text: str, now: float) -> None:
        self.figures.failures += 1
        self.figures.error = text
        self.figures.quiet()
        self._failed_in_a_row += 1
        self._stop_queries()
        settings: Run = self._file.run
        retries = settings.retries if self.pipeline.retries is None else self.pipeline.retries
        if self._failed_in_a_row > retries:
            self.figures.state = State.FAILED
            logger.error("%s: failed: %s", self.pipeline.name, text)
            return
        delay = min(settings.retry_delay * 2 ** (self._failed_in_a_row - 1), settings.retry_max_delay)
        self._next_start = now + delay
        self.figures.state = State.WAITING
        logger.warning(
            "%s: failed, and will be started again in %s: %s",
            self.pipeline.name,
            format_duration(delay),
            text,
        )

    def _count(self, role: str, query: StreamingQuery, now: float, *, everything: bool = False) -> None:
        last = query.lastProgress
        if last is None:
            return
        run, seen = str(query.runId), self._seen.get(role, ("", -1))
        is_next = seen[0] == run and last.batchId <= seen[1] + 1
        reports = [last] if is_next and not everything else query.recentProgress
        for report in reports:
            # While nothing comes there are reports of a batch that has not begun.
            is_done = "addBatch" in report.durationMs
            if is_done and seen[0] == run and report.batchId <= seen[1]:
                continue
            progress: dict[str, Any] = json.loads(report.json)
            if role == ROWS:
                self.figures.add_rows(progress, DECODED)
            else:
                self.figures.add_letters(progress)
            if is_done:
                seen = (run, report.batchId)
                self._failed_in_a_row = 0
            if report.numInputRows:
                self._last_rows = now
        self._seen[role] = seen

    def stop(self, grace: float) -> None:
        """Let a micro-batch under way end, if it does so in time, and stop. Twice is safe."""
        deadline = time.monotonic() + grace
        if self._queries and not self.is_over:
            self._let_end(deadline)
            for role, query in self._queries.items():
                try:
                    self._count(role, query, time.monotonic(), everything=True)
                except Exception as error:  # Spark may be gone, in more than one way
                    logger.debug("%s: no last figures: %s", self.pipeline.name, error)
            self._stop_queries()
        if not self.is_over:
            self.figures.state = State.STOPPED
            logger.info("%s: stopped", self.pipeline.name)

    def _let_end(self, deadline: float) -> None:
        """A batch that is cut off is run again later, which costs time and, with some sinks, duplicates."""
        try:
            before = {role: _batch(query) for role, query in self._queries.items()}
            for role, query in self._queries.items():
                while time.monotonic() < deadline and query.isActive and query.status["isTriggerActive"]:
                    if _batch(query) != before[role]:
                        break
                    time.sleep(0.02)
        except Exception as error:  # Spark may be gone, in more than one way
            logger.warning("%s: Spark is gone: %s", self.pipeline.name, in_words(error))

    def _stop_queries(self) -> None:
        for query in self._queries.values():
            try:
                query.stop()
            except Exception as error:  # Spark may be gone, in more than one way
                logger.warning("%s: %s", self.pipeline.name, in_words(error))
        self._queries = {}


def _batch(query: StreamingQuery) -> int:
    last = query.lastProgress
    return -1 if last is None else int(last.batchId)
