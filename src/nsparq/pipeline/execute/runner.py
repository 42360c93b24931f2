"""Runs the pipelines of a file in one Spark session: starts them, watches them, starts again what has failed,
stops them.

The thread that calls `run()` only asks Spark about running queries. What may take long has a thread of its
own: a start, which waits for an nsqd that is away, and a stop.
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

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nsparq.flags import format_duration
from nsparq.pipeline.errors import PipelineError, in_words, retry_helps
from nsparq.pipeline.execute import queries
from nsparq.pipeline.execute.progress import Figures, OutputFigures, State
from nsparq.pipeline.execute.queries import Abandoned
from nsparq.pipeline.execute.status import Endpoint, Status, write_status
from nsparq.pipeline.file.spec import Pipeline, PipelineFile, Python, Run, describe, is_local
from nsparq.spark.session.build import is_connect

__all__ = ["RunningPipeline", "build_session", "prepare", "run"]

logger = logging.getLogger(__name__)

POLL_S: Final = 0.25
STATUS_S: Final = 2.0
"""Between two writes of the status file."""
QUIET_S: Final = 3.0
"""Without a micro-batch for so long, the rate is 0."""
STOP_S: Final = 3.0
"""How long Spark may take to stop a query. It waits for a source that waits for nsqd."""
Watch = Callable[[Status], None]


def build_session(
    file: PipelineFile, master: str = "", conf: Mapping[str, str] | None = None
) -> SparkSession:
    """A session for the pipelines of a file. Times are UTC unless the file says otherwise."""
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
    """Until all pipelines have ended, or `stop` is set. `watch` is told a few times a second.

    A pipeline that has failed for good does not end the others, unless `fail_fast`. Raises StartError and
    PipelineError for what cannot be started at all.
    """
    prepare(spark, file)
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
            _stop(running, file.run.stop_grace)
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


def _stop(running: Sequence[RunningPipeline], grace: float) -> None:
    """All at the same time: each has the whole of its grace."""
    threads = [_in_thread(one.stop, grace) for one in running]
    for thread in threads:
        thread.join()


def _in_thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    """One that does not keep the process from ending."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


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


def prepare(spark: SparkSession, file: PipelineFile) -> None:
    """What the pipelines of a file need in a session: our sources and sinks, and the user's modules where
    the tasks are. Raises PipelineError."""
    if is_connect(spark):
        raise PipelineError(
            "pipelines need a Spark session of this process, not one of Spark Connect: unset SPARK_REMOTE, "
            "and name the cluster by [spark] master"
        )
    queries.register(spark)
    steps = (step.python for one in file.pipelines for step in one.steps)
    sinks = (output.sink for one in file.pipelines for output in one.outputs)
    functions = [*steps, *(sink.function for sink in sinks if isinstance(sink, Python))]
    for name in sorted({function.partition(":")[0].partition(".")[0] for function in functions} - {""}):
        module, package = file.path.parent / f"{name}.py", file.path.parent / name
        if module.is_file():
            spark.sparkContext.addPyFile(str(module))
        elif package.is_dir():
            spark.sparkContext.addPyFile(str(_zipped(package)))


def _zipped(package: Path) -> Path:
    """In the cache: executors may ask for it as long as the session lasts."""
    from nsparq.spark.session.cache import cache_directory, digest, make_once

    stamps = [(str(path), path.stat().st_mtime_ns) for path in sorted(package.rglob("*.py"))]

    def make(path: Path) -> None:
        made = shutil.make_archive(str(path), "zip", package.parent, package.name)
        os.replace(made, path)

    return make_once(cache_directory() / f"{package.name}-{digest(*stamps)}.zip", make)


class _Start:
    """The start of a pipeline's queries, in a thread of its own."""

    def __init__(self, spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> None:
        self._spark, self._file, self._pipeline = spark, file, pipeline
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._queries: dict[str, StreamingQuery] = {}
        self._error: Exception | None = None
        self._thread = _in_thread(self._run)

    def wait(self, seconds: float) -> bool:
        """Whether it is over."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> dict[str, StreamingQuery]:
        """The queries. Raises what went wrong."""
        if self._error is not None:
            raise self._error
        return self._queries

    def abandon(self) -> None:
        """Nobody wants the queries any more. They are stopped as soon as they have been started."""
        with self._lock:
            self._abandoned.set()
            unwanted, self._queries = self._queries, {}
        _stop_queries(self._pipeline.name, unwanted)

    # in its thread

    def _run(self) -> None:
        try:
            # A thread has its own active session.
            queries.register(self._spark)
            started = queries.start(self._spark, self._file, self._pipeline, self._abandoned)
        except Abandoned:
            return
        except Exception as error:
            self._error = error
            return
        with self._lock:
            if not self._abandoned.is_set():
                self._queries = started
                return
        _stop_queries(self._pipeline.name, started)


class RunningPipeline:
    """One pipeline: its queries, its figures, and when it is to be started again."""

    def __init__(self, spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> None:
        self._spark, self._file, self.pipeline = spark, file, pipeline
        self.figures = Figures(
            pipeline.name,
            pipeline.topics,
            pipeline.sinks,
            channel=pipeline.sources[0].channel(pipeline.outputs[0].name),
            channels=_channels(pipeline),
            outputs=[OutputFigures(one.name, describe(one.sink)) for one in pipeline.outputs],
        )
        self._output_of = {one.role: one.name for one in pipeline.outputs}
        self._starting: _Start | None = None
        self._stopping: threading.Thread | None = None
        """Stops the queries of a failed run. The next one needs the same checkpoint."""
        self._queries: dict[str, StreamingQuery] = {}
        self._stopped: dict[str, StreamingQuery] = {}
        """Those that were stopped, until their last figures have been counted."""
        self._seen: dict[str, tuple[str, int]] = {}
        """The last progress of each role that was counted: run and batch."""
        self._next_start = 0.0
        self._failed_in_a_row = 0
        self._failing: str | None = None
        """The role that has failed, until it has done a micro-batch: those of others are no success of it."""
        self._last_rows = 0.0

    @property
    def is_over(self) -> bool:
        return self.figures.state in (State.FINISHED, State.FAILED, State.STOPPED)

    def look(self, now: float) -> None:
        """See what has happened, and do what is due."""
        if self.is_over:
            return
        if self._starting is not None:
            if self._starting.wait(0.0):
                self._take_start(now)
            return
        if not self._queries:
            self._count_stopped(now)
            if now >= self._next_start and not self._is_stopping:
                self._start()
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
                self._failing = role
                self._fail(error, now)
                return
        if len(ended) == len(self._queries):
            self._queries = {}
            self.figures.state = State.FINISHED if self.pipeline.trigger.ends else State.STOPPED
            logger.info("%s: %s", self.pipeline.name, self.figures.state)

    def _start(self) -> None:
        if self.figures.failures:
            self.figures.restarts += 1
        self.figures.state = State.STARTING
        self._starting = _Start(self._spark, self._file, self.pipeline)

    def wait_for_threads(self, seconds: float) -> None:
        """Until a start or a stop that is under way is over, if it ends in time."""
        if self._starting is not None:
            self._starting.wait(seconds)
        if self._stopping is not None:
            self._stopping.join(seconds)

    def _take_start(self, now: float) -> None:
        assert self._starting is not None
        starting, self._starting = self._starting, None
        try:
            self._queries = starting.result()
        except Exception as error:
            self._failing = None
            self._fail(error, now)
            return
        self.figures.state = State.RUNNING
        logger.info("%s: started, %s -> %s", self.pipeline.name, self.figures.topics, self.figures.sink)

    def _fail(self, error: Exception, now: float) -> None:
        text = in_words(error)
        self.figures.failed(text)
        self._failed_in_a_row += 1
        self._stop_queries()
        settings: Run = self._file.run
        retries = settings.retries if self.pipeline.retries is None else self.pipeline.retries
        if self._failed_in_a_row > retries or not retry_helps(error):
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
            if role in self._output_of:
                self.figures.add_rows(progress, self._output_of[role])
            else:
                self.figures.add_letters(progress)
            if is_done:
                seen = (run, report.batchId)
                if self._failing in (None, role):
                    self._failing, self._failed_in_a_row = None, 0
            if report.numInputRows:
                self._last_rows = now
        self._seen[role] = seen

    def stop(self, grace: float) -> None:
        """Let a micro-batch under way end, if it does so in time, and stop. Twice is safe."""
        deadline = time.monotonic() + grace
        if self._starting is not None:
            self._starting.abandon()
            self._starting = None
        if self._queries and not self.is_over:
            self._let_end(deadline)
            self._stop_queries()
            self.wait_for_threads(STOP_S)
            if self._is_stopping:
                logger.warning("%s: does not stop in time, and ends with the session", self.pipeline.name)
        self._count_stopped(time.monotonic(), anyway=True)
        if not self.is_over:
            self.figures.state = State.STOPPED
            logger.info("%s: stopped", self.pipeline.name)

    @property
    def _is_stopping(self) -> bool:
        return self._stopping is not None and self._stopping.is_alive()

    def _count_stopped(self, now: float, *, anyway: bool = False) -> None:
        """Micro-batches that ended between the last look and the stop; `anyway` also of what still stops."""
        if not self._stopped or (self._is_stopping and not anyway):
            return
        lag = self.figures.lag
        for role, query in self._stopped.items():
            try:
                self._count(role, query, now, everything=True)
            except Exception as error:  # Spark may be gone, in more than one way
                logger.debug("%s: no last figures: %s", self.pipeline.name, error)
        self._stopped = {}
        if lag is None:
            self.figures.forget_lag()

    def _let_end(self, deadline: float) -> None:
        """A batch that is cut off is run again later, which costs time and, with some sinks, duplicates."""
        try:
            before = {role: _batch(query) for role, query in self._queries.items()}
            for role, query in self._queries.items():
                while time.monotonic() < deadline and query.isActive and _has_batch(query):
                    if _batch(query) != before[role]:
                        break
                    time.sleep(0.02)
        except Exception as error:  # Spark may be gone, in more than one way
            logger.warning("%s: Spark is gone: %s", self.pipeline.name, in_words(error))

    def _stop_queries(self) -> None:
        self._stopping = _in_thread(_stop_queries, self.pipeline.name, self._queries)
        self._stopped, self._queries = self._queries, {}


def _channels(pipeline: Pipeline) -> dict[str, str]:
    """By which it may read, and the topics of each."""
    found = {
        source.channel(output.name): source.topics
        for output in pipeline.outputs
        for source in pipeline.sources
    }
    letters = {one.letters_channel: one.topics for one in pipeline.sources if one.dead_letters}
    return {**found, **letters}


def _stop_queries(pipeline: str, stopped: Mapping[str, StreamingQuery]) -> None:
    for query in stopped.values():
        try:
            query.stop()
        except Exception as error:  # Spark may be gone, in more than one way
            logger.warning("%s: %s", pipeline, in_words(error))


def _has_batch(query: StreamingQuery) -> bool:
    """Whether a micro-batch is under way. To ask the source for offsets is none, and may take long."""
    status = query.status
    is_asking = status["message"].startswith(("Getting offsets", "Initializing", "Waiting"))
    return bool(status["isTriggerActive"]) and not is_asking


def _batch(query: StreamingQuery) -> int:
    last = query.lastProgress
    return -1 if last is None else int(last.batchId)
