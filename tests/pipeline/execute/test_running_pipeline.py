"""A running pipeline counts, restarts and ends its queries. The queries are fakes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import AnalysisException, StreamingQueryException

from nsparq.pipeline.errors import NothingYet, PipelineError, in_words, retry_helps
from nsparq.pipeline.execute import queries, runner, running_pipeline
from nsparq.pipeline.execute.progress import State
from nsparq.pipeline.execute.running_pipeline import RunningPipeline
from nsparq.pipeline.file.reading import parse
from nsparq.pipeline.file.spec import PipelineFile
from nsparq.spark.errors import DataLoss, NoAnswer
from tests.support.polling import DEADLINE, wait_until

TEXT = """
[run]
retries = 2
retry_delay = "1s"
retry_max_delay = "90s"
stop_grace = "5s"
[pipeline.p]
source = "orders"
decode = { format = "json", schema = "a INT" }
dead_letters = "dead"
sink = { topic = "out" }
"""


class Report:
    def __init__(self, batch: int, rows: int, *, is_done: bool = True) -> None:
        self.batchId, self.numInputRows = batch, rows
        self.durationMs = {"addBatch": 1} if is_done else {"latestOffset": 1}
        content = {
            "batchId": batch,
            "numInputRows": rows,
            "batchDuration": 100,
            "timestamp": "2026-11-15T12:00:00Z",
            "sink": {"numOutputRows": rows},
        }
        self.json = json.dumps(content)


class Query:
    """A fake streaming query."""

    def __init__(self, run_id: str = "run") -> None:
        self.runId = run_id
        self.isActive = True
        self.recentProgress: list[Report] = []
        self.status = {"isTriggerActive": False, "message": "Waiting for next trigger"}
        self.error: Exception | None = None

    @property
    def lastProgress(self) -> Report | None:
        return self.recentProgress[-1] if self.recentProgress else None

    def exception(self) -> Exception | None:
        return self.error

    def fail(self, text: str) -> None:
        self.isActive, self.error = False, RuntimeError(text)

    def stop(self) -> None:
        self.isActive = False


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str = TEXT) -> None:
        self.file: PipelineFile = parse(text)
        self.started: list[dict[str, Query]] = []
        self.refusal: Exception | None = None
        monkeypatch.setattr(queries, "start", self._start)
        monkeypatch.setattr(queries, "register", lambda spark: None)
        self.pipeline = RunningPipeline(None, self.file, self.file.pipelines[0])  # type: ignore[arg-type]
        self.figures = self.pipeline.figures

    def look(self, now: float) -> None:
        """Looks, and takes the result of a start."""
        self.pipeline.look(now)
        self.pipeline.wait_for_threads(DEADLINE)
        self.pipeline.look(now)

    def _start(self, *_: object) -> dict[str, Query]:
        if self.refusal is not None:
            raise self.refusal
        number = len(self.started)
        self.started.append({role: Query(f"{role}-{number}") for role in ("rows", "letters")})
        return self.started[-1]

    @property
    def rows(self) -> Query:
        return self.started[-1]["rows"]

    @property
    def letters(self) -> Query:
        return self.started[-1]["letters"]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(monkeypatch)
    rig.look(0.0)
    assert rig.figures.state is State.RUNNING
    return rig


def test_figures_say_what_is_read_and_by_which_channel(rig: Rig) -> None:
    assert (rig.figures.name, rig.figures.topics, rig.figures.channel) == ("p", "orders", "p")


def test_every_batch_is_counted_once(rig: Rig) -> None:
    rig.rows.recentProgress = [Report(0, 10), Report(1, 5), Report(2, 0, is_done=False)]
    rig.letters.recentProgress = [Report(0, 3)]
    for now in (1.0, 2.0):
        rig.look(now)
        assert (rig.figures.rows, rig.figures.dead_letters) == (15, 3)
    # Several have ended since the last look.
    rig.rows.recentProgress += [Report(number, 1) for number in range(2, 9)]
    rig.look(3.0)
    assert (rig.figures.rows, rig.figures.batch) == (22, 8)


def test_without_rows_for_a_while_there_is_no_rate(rig: Rig) -> None:
    rig.rows.recentProgress = [Report(0, 10)]
    rig.look(1.0)
    assert rig.figures.rows_per_second == 100
    rig.look(1.0 + running_pipeline.QUIET_S / 2)
    assert rig.figures.rows_per_second == 100
    rig.look(1.1 + running_pipeline.QUIET_S)
    assert rig.figures.rows_per_second == 0


def test_the_delay_before_a_restart_doubles(rig: Rig) -> None:
    first = rig.started[0]
    first["letters"].fail("no more letters")
    rig.look(10.0)
    assert (rig.figures.state, rig.figures.error) == (State.WAITING, "no more letters")
    # A pipeline needs both queries.
    assert not first["rows"].isActive
    rig.look(10.9)
    assert len(rig.started) == 1
    rig.look(11.0)
    assert (len(rig.started), rig.figures.state, rig.figures.restarts) == (2, State.RUNNING, 1)
    rig.rows.fail("again")
    rig.look(20.0)
    rig.look(21.9)
    assert len(rig.started) == 2
    rig.look(22.0)
    assert len(rig.started) == 3
    rig.rows.fail("for good")
    rig.look(30.0)
    assert (rig.figures.state, rig.figures.failures, rig.figures.restarts) == (State.FAILED, 3, 2)
    rig.look(1000.0)
    assert len(rig.started) == 3


def test_a_pipeline_may_fail_as_often_as_its_retries_say(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, TEXT.replace("retries = 2", "retries = 1_000_000"))
    rig.look(0.0)
    for failures in range(1, 1100):
        rig.rows.fail("away")
        rig.look(failures * 100.0)
        assert (rig.figures.state, rig.figures.failures) == (State.WAITING, failures)
        rig.look(failures * 100.0 + 90.0)


def test_a_successful_batch_resets_the_retries(rig: Rig) -> None:
    for turn in range(5):
        rig.rows.recentProgress = [Report(turn, 1)]
        rig.look(100.0 * turn)
        rig.rows.fail("now and then")
        rig.look(100.0 * turn + 1)
        assert rig.figures.state is State.WAITING
        rig.look(100.0 * turn + 2)
        assert rig.figures.state is State.RUNNING
    assert (rig.figures.rows, rig.figures.failures) == (5, 5)


def test_a_batch_of_another_query_does_not_reset_the_retries(rig: Rig) -> None:
    for turn in range(3):
        rig.letters.recentProgress = [Report(turn, 1)]
        rig.look(100.0 * turn)
        rig.rows.fail("each time")
        rig.look(100.0 * turn + 1)
        rig.look(100.0 * turn + 50)
    assert (rig.figures.state, rig.figures.failures) == (State.FAILED, 3)


def test_a_batch_that_ends_while_the_query_is_stopped_is_counted(rig: Rig) -> None:
    first = rig.started[0]
    first["letters"].fail("no more letters")
    rows, stop = first["rows"], first["rows"].stop

    def stop_late() -> None:
        rows.recentProgress.append(Report(0, 5))
        stop()

    rows.stop = stop_late  # type: ignore[method-assign]
    rig.look(10.0)
    rig.look(10.1)
    assert (rig.figures.state, rig.figures.rows, rig.figures.lag) == (State.WAITING, 5, None)


def test_the_last_batch_before_the_end_is_counted(rig: Rig) -> None:
    rig.rows.recentProgress = [Report(0, 4)]
    rig.look(1.0)
    rig.rows.recentProgress = [Report(0, 4), Report(1, 6)]
    rig.rows.isActive = rig.letters.isActive = False
    rig.look(2.0)
    assert (rig.figures.rows, rig.figures.state) == (10, State.STOPPED)


def test_a_pipeline_ends_when_both_its_queries_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, TEXT.replace("[pipeline.p]", '[pipeline.p]\ntrigger = "available-now"'))
    rig.look(0.0)
    rig.rows.isActive = False
    rig.look(1.0)
    assert rig.figures.state is State.RUNNING
    rig.letters.isActive = False
    rig.look(2.0)
    assert rig.figures.state is State.FINISHED


def test_a_failed_start_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.refusal = NoAnswer("nobody is there")
    rig.look(0.0)
    assert (rig.figures.state, rig.figures.error) == (State.WAITING, "nobody is there")
    rig.refusal = None
    rig.look(1.0)
    assert rig.figures.state is State.RUNNING


ANALYSIS = AnalysisException("[UNRESOLVED_COLUMN.WITHOUT_SUGGESTION] `a` cannot be resolved")


def through_spark(raised: str) -> StreamingQueryException:
    return StreamingQueryException(
        f"[PYTHON_ERROR] Failed: Traceback (most recent call last):\n  File x\n{raised}"
    )


def because(cause: Exception) -> PipelineError:
    error = PipelineError("a step cannot be done")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PipelineError("no such column"), False),
        (NothingYet("no messages yet"), True),
        (because(NoAnswer("away")), True),
        (because(DataLoss("gone")), False),
        (because(OSError("disk full")), True),
        (because(TypeError("of a user's function")), False),
        (because(ANALYSIS), False),
        (ANALYSIS, False),
        # Spark turns all errors of a data source during planning into AnalysisException.
        (AnalysisException("Traceback:\nnsparq.spark.errors.NoAnswer: no answer for 120 seconds"), True),
        (through_spark("nsparq.spark.errors.NoAnswer: away"), True),
        (through_spark("nsparq.spark.errors.DataLoss: gone"), False),
        (through_spark("nsparq.spark.errors.ChannelOwned: another query's"), False),
        (through_spark("nsparq.spark.checkpoint.CheckpointBehind: older"), False),
        (through_spark("nsparq.pipeline.errors.PipelineError: refused"), False),
        (
            through_spark(
                "nsparq.spark.cluster.http_client.Refused: 503\n\nnsparq.spark.options.OptionError: a token"
            ),
            False,
        ),
        (through_spark("nsparq.spark.cluster.http_client.Refused: 503"), True),
        (through_spark("nsparq.no_such_module.Error: x"), True),
        (through_spark("OSError: disk full"), True),
        (StreamingQueryException("[USER_RAISED_EXCEPTION] message 5 does not decode"), False),
        (StreamingQueryException("[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] x"), False),
        (StreamingQueryException("Python worker exited unexpectedly (crashed)"), True),
    ],
)  # fmt: skip
def test_only_errors_that_may_be_temporary_are_retried(rig: Rig, error: Exception, expected: bool) -> None:
    rig.rows.isActive, rig.rows.error = False, error
    rig.look(1.0)
    assert rig.figures.state is (State.WAITING if expected else State.FAILED)
    assert retry_helps(error) is expected


def test_lag_is_unknown_before_the_first_report_and_after_a_failure(rig: Rig) -> None:
    assert rig.figures.lag is None
    rig.figures.lag = 0
    rig.rows.fail("once")
    rig.look(1.0)
    assert (rig.figures.state, rig.figures.lag) == (State.WAITING, None)


class Stuck:
    """A call that waits for an unreachable nsqd."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.end.wait(DEADLINE)


def test_a_start_or_query_that_hangs_does_not_delay_others_or_the_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "\n".join(f'[pipeline.{name}]\nsource = "x"\nsink = "noop"' for name in ("a", "b", "c"))
    file = parse(f'[run]\nstop_grace = "1ms"\n{text}', tmp_path / "p.toml")
    made = {name: Query() for name in ("a", "b", "c")}
    start, end = Stuck(), Stuck()
    made["b"].stop = end  # type: ignore[method-assign]
    stop = threading.Event()

    def start_one(spark: Any, file: Any, pipeline: Any, abandoned: threading.Event) -> dict[str, Query]:
        if pipeline.name == "a":
            start()
            assert abandoned.is_set()
        return {"rows": made[pipeline.name]}

    class Session:
        class sparkContext:
            uiWebUrl = None

    def watch(status: Any) -> None:
        if [one.state for one in status.pipelines] == [State.STARTING, State.RUNNING, State.RUNNING]:
            stop.set()

    monkeypatch.setattr(queries, "start", start_one)
    monkeypatch.setattr(queries, "register", lambda spark: None)
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(running_pipeline, "STOP_S", 0.2)
    done = runner.run(Session, file, stop, watch=watch)  # type: ignore[arg-type]
    assert {one.state for one in done.pipelines} == {State.STOPPED}
    assert "b: not stopped in time; it ends with the session" in caplog.text
    assert not made["c"].isActive
    # A query that starts after the stop is stopped.
    assert made["a"].isActive
    start.end.set()
    end.end.set()
    wait_until(lambda: not made["a"].isActive)


def test_a_stop_waits_for_the_running_batch(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = 0

    def sleep(seconds: float) -> None:
        nonlocal waited
        waited += 1
        if waited == 3:
            rig.rows.recentProgress = [Report(0, 7)]

    monkeypatch.setattr(running_pipeline.time, "sleep", sleep)
    rig.rows.status = {"isTriggerActive": True, "message": "Processing new data"}
    rows = rig.rows
    rig.pipeline.stop(5.0)
    assert (waited, rows.isActive) == (3, False)
    assert (rig.figures.rows, rig.figures.state) == (7, State.STOPPED)
    rig.pipeline.stop(5.0)


def test_a_stop_does_not_wait_forever_or_for_a_dead_spark(rig: Rig) -> None:
    rig.rows.status = {"isTriggerActive": True, "message": "Processing new data"}

    def gone() -> None:
        raise ConnectionRefusedError("Spark is gone")

    rig.letters.stop = gone  # type: ignore[method-assign]
    rig.pipeline.stop(0.05)
    assert rig.figures.state is State.STOPPED


def test_a_failure_stops_other_pipelines_only_with_fail_fast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "\n".join(f'[pipeline.{name}]\nsource = "x"\nsink = "noop"' for name in ("bad", "good"))
    file = parse(text, tmp_path / "p.toml")
    good = Query()

    def start(spark: Any, file: PipelineFile, pipeline: Any, abandoned: Any) -> dict[str, Query]:
        if pipeline.name == "bad":
            raise PipelineError("no")
        return {"rows": good}

    class Session:
        class sparkContext:
            uiWebUrl = None

    monkeypatch.setattr(queries, "start", start)
    monkeypatch.setattr(queries, "register", lambda spark: None)
    monkeypatch.setattr(runner, "POLL_S", 0.0)
    stop, told = threading.Event(), 0

    def watch(status: Any) -> None:
        nonlocal told
        told += 1
        if told >= 5 and all(one.state is not State.STARTING for one in status.pipelines):
            stop.set()

    done = runner.run(Session, file, stop, watch=watch)  # type: ignore[arg-type]
    assert [one.state for one in done.pipelines] == [State.FAILED, State.STOPPED]
    assert told >= 5
    good.isActive = True
    done = runner.run(Session, file, threading.Event(), fail_fast=True)  # type: ignore[arg-type]
    assert [one.state for one in done.pipelines] == [State.FAILED, State.STOPPED]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[UNRESOLVED_COLUMN] no such column; line 1 pos 7;\n'Project ['nothing]\n+- Relation",
            "[UNRESOLVED_COLUMN] no such column; line 1 pos 7",
        ),
        (
            ("[PYTHON_ERROR] Failed: Traceback (most recent call last):\n  File \"x.py\", line 1, in f\n    "
            "g()\n"
            "OSError: disk full\n SQLSTATE: 38000"),
            "[PYTHON_ERROR] Failed: OSError: disk full",
        ),
        ("[USER_RAISED_EXCEPTION] message 5 is bad SQLSTATE: P0001\n=== Streaming Query", "message 5 is bad"),
        ("a problem\n\n\tat org.apache.spark\n", "a problem"),
        ("", "ValueError"),
    ],
)  # fmt: skip
def test_spark_errors_are_shown_without_plans_and_traces(text: str, expected: str) -> None:
    assert in_words(ValueError(text)) == expected
