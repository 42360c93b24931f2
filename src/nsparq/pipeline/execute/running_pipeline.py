"""One running pipeline: starts its queries, counts what they do, restarts it after a failure, stops
it.

Starting and stopping may take long, because Spark waits for an nsqd that does not answer. Each has
its own thread. All other calls come from the runner's thread.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nsparq.flags import format_duration
from nsparq.pipeline.errors import in_words, retry_helps
from nsparq.pipeline.execute import queries
from nsparq.pipeline.execute.progress import Figures, OutputFigures, State
from nsparq.pipeline.file.sinks import describe
from nsparq.pipeline.file.spec import Pipeline, PipelineFile, Run
from nsparq.pipeline.pipeline_json import Abandoned

logger = logging.getLogger(__name__)

QUIET_S: Final = 3.0
"""After this time without a micro-batch, the rate is 0."""
STOP_S: Final = 3.0
"""How long Spark may take to stop a query. It waits for a source that waits for nsqd."""


def in_thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    """Runs `work` in a thread that does not keep the process alive."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


class _Start:
    """Starts the queries of a pipeline in its own thread."""

    def __init__(self, spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> None:
        self._spark, self._file, self._pipeline = spark, file, pipeline
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self._queries: dict[str, StreamingQuery] = {}
        self._error: Exception | None = None
        self._thread = in_thread(self._run)

    def wait(self, seconds: float) -> bool:
        """Whether the start is over."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> dict[str, StreamingQuery]:
        """The running queries. Raises the error of the start."""
        if self._error is not None:
            raise self._error
        return self._queries

    def abandon(self) -> None:
        """Gives up the start. Queries that are running, or will be, are stopped."""
        with self._lock:
            self._abandoned.set()
            unwanted, self._queries = self._queries, {}
        _stop_queries(self._pipeline.name, unwanted)

    def _run(self) -> None:
        try:
            # Each thread has its own active session.
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
    """The queries of one pipeline, its figures, and the time of the next restart."""

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
        """Stops the queries of a failed run. The next run needs their checkpoint."""
        self._queries: dict[str, StreamingQuery] = {}
        self._stopped: dict[str, StreamingQuery] = {}
        """Queries that were stopped, until their last progress has been counted."""
        self._seen: dict[str, tuple[str, int]] = {}
        """The last progress that was counted for each role: run and batch."""
        self._next_start = 0.0
        self._failed_in_a_row = 0
        self._failing: str | None = None
        """The role that failed. Only a micro-batch of this role resets the count of failures."""
        self._last_rows = 0.0

    @property
    def is_over(self) -> bool:
        return self.figures.state in (State.FINISHED, State.FAILED, State.STOPPED)

    def look(self, now: float) -> None:
        """Counts what has happened, and starts or restarts the queries if it is time."""
        if self.is_over:
            return
        if self._starting is not None:
            if self._starting.wait(0.0):
                self._take_start(now)
            return
        if not self._queries:
            self._count_stopped(now)
            if now >= self._next_start and not self._is_stopping:
                self.figures.restarts += bool(self.figures.failures)
                self.figures.state = State.STARTING
                self._starting = _Start(self._spark, self._file, self.pipeline)
            return
        for role, query in self._queries.items():
            self._count(role, query, now)
        if now - self._last_rows > QUIET_S:
            self.figures.quiet()
        ended = {role: query for role, query in self._queries.items() if not query.isActive}
        for role, query in ended.items():
            # Micro-batches between the last look and the end.
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

    def wait_for_threads(self, seconds: float) -> None:
        """Waits for a start or a stop in progress, at most this long."""
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
        # 2.0 ** 1024 would be too large, and a pipeline may fail that often.
        doubled = settings.retry_delay * 2.0 ** min(self._failed_in_a_row - 1, 1000)
        delay = min(doubled, settings.retry_max_delay)
        self._next_start = now + delay
        self.figures.state = State.WAITING
        logger.warning(
            "%s: failed, restarting in %s: %s",
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
            # An idle query reports a batch that has not started.
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
        """Stops the queries, up to `grace` seconds later to let a micro-batch end. Twice is
        safe."""
        deadline = time.monotonic() + grace
        if self._starting is not None:
            self._starting.abandon()
            self._starting = None
        if self._queries and not self.is_over:
            self._wait_for_batches(deadline)
            self._stop_queries()
            self.wait_for_threads(STOP_S)
            if self._is_stopping:
                logger.warning("%s: not stopped in time; it ends with the session", self.pipeline.name)
        self._count_stopped(time.monotonic(), anyway=True)
        if not self.is_over:
            self.figures.state = State.STOPPED
            logger.info("%s: stopped", self.pipeline.name)

    @property
    def _is_stopping(self) -> bool:
        return self._stopping is not None and self._stopping.is_alive()

    def _count_stopped(self, now: float, *, anyway: bool = False) -> None:
        """Counts the last micro-batches of stopped queries. `anyway`: even while they stop."""
        if not self._stopped or (self._is_stopping and not anyway):
            return
        lag = self.figures.lag
        for role, query in self._stopped.items():
            try:
                self._count(role, query, now, everything=True)
            except Exception as error:  # of many kinds if Spark is gone
                logger.debug("%s: cannot read the last progress: %s", self.pipeline.name, error)
        self._stopped = {}
        if lag is None:
            self.figures.forget_lag()

    def _wait_for_batches(self, deadline: float) -> None:
        """An interrupted batch runs again later, and some sinks then get duplicates."""
        try:
            before = {role: _batch(query) for role, query in self._queries.items()}
            for role, query in self._queries.items():
                while time.monotonic() < deadline and query.isActive and _has_batch(query):
                    if _batch(query) != before[role]:
                        break
                    time.sleep(0.02)
        except Exception as error:  # of many kinds if Spark is gone
            logger.warning("%s: Spark does not answer: %s", self.pipeline.name, in_words(error))

    def _stop_queries(self) -> None:
        self._stopping = in_thread(_stop_queries, self.pipeline.name, self._queries)
        self._stopped, self._queries = self._queries, {}


def _channels(pipeline: Pipeline) -> dict[str, str]:
    """All channels of a pipeline, with their topics."""
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
        except Exception as error:  # of many kinds if Spark is gone
            logger.warning("%s: cannot stop a query: %s", pipeline, in_words(error))


def _has_batch(query: StreamingQuery) -> bool:
    """Whether a micro-batch is running. Asking the source for offsets does not count."""
    status = query.status
    is_asking = status["message"].startswith(("Getting offsets", "Initializing", "Waiting"))
    return bool(status["isTriggerActive"]) and not is_asking


def _batch(query: StreamingQuery) -> int:
    last = query.lastProgress
    return -1 if last is None else int(last.batchId)
