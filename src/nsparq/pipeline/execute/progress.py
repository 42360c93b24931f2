"""The figures of a pipeline, from Spark's progress report of each micro-batch. Needs no Spark."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from functools import reduce
from typing import Any, Final, TypeVar

from nsparq.pipeline.decode.formats import DECODED
from nsparq.pipeline.file.spec import MESSAGES
from nsparq.spark.source.positions import BadOffset, Offsets, decode

WRITTEN: Final = "nsparq_written"
"""Name of the observation that counts messages if Spark only sees files; see
`write.direct_parquet`."""

RECENT: Final = 10
"""Micro-batches that an estimate is made from."""

Number = TypeVar("Number", int, float)


class State(StrEnum):
    """The state of a pipeline."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """It has failed and will be restarted."""
    FINISHED = "finished"
    """It has read all messages that existed when it started."""
    STOPPED = "stopped"
    FAILED = "failed"


def decoded_name(source: str) -> str:
    """Name of that observation for a named source."""
    return DECODED if source == MESSAGES else f"{DECODED}_{source}"


class CatchUp:
    """Estimates from the last micro-batches when a query will have read everything."""

    def __init__(self) -> None:
        self._behind: deque[tuple[float, int]] = deque(maxlen=RECENT)
        """When micro-batches were planned, and the messages that they left."""
        self._estimate: float | None = None

    def estimate(self, now: float, rows: int, lag: int | None) -> float | None:
        """Seconds after the end of a micro-batch, which was planned `now` and leaves `lag`
        messages."""
        if lag is None or lag <= rows:
            self._behind.clear()
            self._estimate = None if lag is None else 0.0
        elif rows:
            self._behind.append((now, lag))
            since, before = self._behind[0]
            passed = now - since
            # The lag shrinks by what is read and grows by what is published.
            is_shrinking = passed > 0 and lag < before
            self._estimate = lag * passed / (before - lag) if is_shrinking else None
        return self._estimate


@dataclass
class OutputFigures:
    """Figures of the query of one output."""

    name: str = ""
    sink: str = ""
    rows: int = 0
    """Messages read."""
    rows_written: int = 0
    """Rows written, for sinks that count them."""
    late: int = 0
    """Rows, or after an aggregation groups of rows, that Spark dropped as later than the
    watermark."""
    rows_per_second: float = 0.0
    """Rate of the last micro-batch with rows. 0 when no messages come."""
    lag: int | None = None
    """Messages published and not yet read. None if unknown: before the first report of the source,
    after a failure, and if an nsqd does not answer."""
    catch_up_seconds: float | None = None
    """How long it will take to read what is published and not yet read; 0 if it takes one
    micro-batch. None if unknown, and while more is published than read."""
    batches: int = 0
    """Completed micro-batches with rows."""
    batch: int | None = None
    """Number of the last micro-batch."""
    batch_seconds: float = 0.0
    last_batch: float | None = None
    """When the last micro-batch with rows ended, in Unix seconds."""

    def __post_init__(self) -> None:
        self._read: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._catch_up = CatchUp()

    def add(self, progress: Mapping[str, Any]) -> None:
        """Adds the progress report of a micro-batch."""
        files = (progress.get("observedMetrics") or {}).get(WRITTEN)
        rows = _number(progress.get("numInputRows") if files is None else files.get("rows"))
        self.batch = int(progress["batchId"])
        self.rows += rows
        self.lag = lag_of(progress)
        began = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).timestamp()
        self.catch_up_seconds = self._catch_up.estimate(began, rows, self.lag)
        operators = progress.get("stateOperators") or ()
        self.late += sum(_number(one.get("numRowsDroppedByWatermark")) for one in operators)
        # A batch without messages can write rows: those of a window that closes.
        self.rows_written += _written(progress) if files is None else rows
        seconds = _number(progress.get("batchDuration")) / 1000
        if not rows:
            self.rows_per_second = 0.0
            return
        self.batches += 1
        self.batch_seconds = seconds
        self.rows_per_second = rows / seconds if seconds else 0.0
        self.last_batch = began + seconds
        self._count_sources(progress, rows)

    def forget_lag(self) -> None:
        self.lag = None
        self.catch_up_seconds = self._catch_up.estimate(0.0, 0, None)

    def _count_sources(self, progress: Mapping[str, Any], rows: int) -> None:
        observed = {
            name: found
            for name, found in (progress.get("observedMetrics") or {}).items()
            if name.startswith(DECODED)
        }
        for name, found in observed.items():
            self._bad[name] += _number(found.get("bad"))
        # Spark counts a message once for each use of its source, for example twice in a self-join.
        found_rows = {name: _number(found.get("rows")) for name, found in observed.items()}
        self._read.update(found_rows or {DECODED: rows})

    def as_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass
class Figures:
    """Figures of a pipeline since the runner started, including restarts of the pipeline.

    With several outputs, a message counts once. The rate, the lag and the duration of a micro-batch
    are the highest of all outputs, and the number of the last batch is the lowest.
    """

    name: str
    topics: str = ""
    sink: str = ""
    state: State = State.STARTING
    rows: int = 0
    """Messages read by the output that has read most."""
    rows_written: int = 0
    """Rows written, for sinks that count them."""
    undecodable: int = 0
    """Messages that did not decode, including those that become dead letters."""
    dead_letters: int = 0
    late: int = 0
    rows_per_second: float = 0.0
    lag: int | None = None
    catch_up_seconds: float | None = None
    batches: int = 0
    batch: int | None = None
    batch_seconds: float = 0.0
    last_batch: float | None = None
    failures: int = 0
    restarts: int = 0
    error: str = ""
    """Text of the last failure."""
    channel: str = ""
    """Its channel, or the first of several."""
    channels: Mapping[str, str] = field(default_factory=dict)
    """All its channels, with the topics of each."""
    outputs: list[OutputFigures] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.state is State.RUNNING

    def add_rows(self, progress: Mapping[str, Any], output: str = "") -> None:
        """Adds a progress report of the query for an output."""
        if not any(one.name == output for one in self.outputs):
            self.outputs.append(OutputFigures(output))
        next(one for one in self.outputs if one.name == output).add(progress)
        self._sum_up()

    def add_letters(self, progress: Mapping[str, Any]) -> None:
        """Adds a progress report of a query for dead letters."""
        self.dead_letters += _written(progress)

    def quiet(self) -> None:
        """Sets the rate to 0, because no messages have come for a while."""
        for one in self.outputs:
            one.rows_per_second = 0.0
        self.rows_per_second = 0.0

    def failed(self, error: str) -> None:
        self.failures += 1
        self.error = error
        self.quiet()
        # Messages are published while the pipeline does not run.
        self.forget_lag()

    def forget_lag(self) -> None:
        for one in self.outputs:
            one.forget_lag()
        self.lag = self.catch_up_seconds = None

    def _sum_up(self) -> None:
        outputs = self.outputs
        # The union of counters takes the highest count of each source.
        self.rows = sum(reduce(Counter.__or__, (one._read for one in outputs)).values())
        self.undecodable = sum(reduce(Counter.__or__, (one._bad for one in outputs)).values())
        self.rows_written = sum(one.rows_written for one in outputs)
        self.late = sum(one.late for one in outputs)
        self.batches = sum(one.batches for one in outputs)
        self.rows_per_second = max(one.rows_per_second for one in outputs)
        self.batch_seconds = max(one.batch_seconds for one in outputs)
        self.batch = min((one.batch for one in outputs if one.batch is not None), default=None)
        self.last_batch = max((one.last_batch for one in outputs if one.last_batch is not None), default=None)
        self.lag = _worst([one.lag for one in outputs])
        self.catch_up_seconds = _worst([one.catch_up_seconds for one in outputs])

    def as_json(self) -> dict[str, Any]:
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**found, "state": str(self.state), "outputs": [one.as_json() for one in self.outputs]}


def _worst(found: Sequence[Number | None]) -> Number | None:
    """The highest figure; None if one is unknown."""
    known = [one for one in found if one is not None]
    return max(known) if len(known) == len(found) else None


def _written(progress: Mapping[str, Any]) -> int:
    """Rows written. Spark reports -1 for a sink that does not count."""
    return max(0, _number((progress.get("sink") or {}).get("numOutputRows")))


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0


def lag_of(progress: Mapping[str, Any]) -> int | None:
    """Messages that are in no batch yet, when the micro-batch was planned. None if unknown."""
    sources: Iterable[Mapping[str, Any]] = progress.get("sources") or []
    lags = [_lag(source) for source in sources]
    known = [one for one in lags if one is not None]
    # If the lag of one source is unknown, the sum is unknown.
    return sum(known) if known and len(known) == len(lags) else None


def _lag(source: Mapping[str, Any]) -> int | None:
    latest, end = _offsets(source.get("latestOffset")), _offsets(source.get("endOffset"))
    if latest is None or end is None:
        return None
    ends: dict[tuple[str, str], int] = {}
    for topic, _, place in latest.items_flat():
        # The same log may appear under two node names.
        log = topic, place.incarnation
        ends[log] = max(place.sequence, ends.get(log, 0))
    lag = 0
    for topic, _, read in end.items_flat():
        last = ends.pop((topic, read.incarnation), None)
        if last is None:
            # The query reads this log, but its nsqd has not answered yet.
            return None
        lag += max(0, last - read.sequence)
    # A log without a position in the query has not been read at all, and its size is unknown.
    if ends:
        return None
    # The source knows more of gaps in the numbers than their difference does.
    known = _parsed(source["latestOffset"]).get("behind", {}).get("rows")
    return lag if known is None else min(lag, _number(known))


def _offsets(value: Any) -> Offsets | None:
    """Offsets, which Spark gives as JSON text or as parsed JSON."""
    try:
        return decode(_parsed(value))
    except (BadOffset, ValueError):
        return None


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value
