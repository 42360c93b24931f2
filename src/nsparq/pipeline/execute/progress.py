"""How a pipeline is doing, in figures: made of what Spark reports about each micro-batch. Needs no Spark."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from functools import reduce
from typing import Any, Final

from nsparq.pipeline.file.spec import MESSAGES
from nsparq.spark.source.positions import BadOffset, Offsets, decode

__all__ = ["DECODED", "WRITTEN", "Figures", "OutputFigures", "State", "decoded_name", "lag_of"]

DECODED: Final = "nsparq_decoded"
"""Name of the observation that counts the `rows` of the only source, and `bad` ones among them."""
WRITTEN: Final = "nsparq_written"
"""Name of the observation that counts the messages where what Spark sees are files; see `direct`."""


class State(StrEnum):
    """What a pipeline is about."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """It has failed, and will be started again."""
    FINISHED = "finished"
    """All that was there has been read."""
    STOPPED = "stopped"
    FAILED = "failed"


def decoded_name(source: str) -> str:
    """The same for a source of this name."""
    return DECODED if source == MESSAGES else f"{DECODED}_{source}"


@dataclass
class OutputFigures:
    """Of the query of one output."""

    name: str = ""
    sink: str = ""
    rows: int = 0
    """Messages read."""
    rows_written: int = 0
    """By sinks that say so."""
    late: int = 0
    """What came behind the watermark, and was dropped by Spark: rows or, where an aggregation has put rows
    together before, groups of them."""
    rows_per_second: float = 0.0
    """Of the last micro-batch with rows, or 0 when nothing comes."""
    lag: int | None = None
    """Messages published and not yet read. None while nobody knows: before the first report of the source,
    after a failure, and where nsqd does not say."""
    batches: int = 0
    """Micro-batches with rows that are done."""
    batch: int | None = None
    """Number of the last one."""
    batch_seconds: float = 0.0
    last_batch: float | None = None
    """When the last one with rows ended, in Unix seconds."""

    def __post_init__(self) -> None:
        self._read: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()

    def add(self, progress: Mapping[str, Any]) -> None:
        """A micro-batch."""
        files = _observed(progress, WRITTEN)
        rows = _number(progress.get("numInputRows") if files is None else files.get("rows"))
        self.batch = int(progress["batchId"])
        self.rows += rows
        self.lag = lag_of(progress)
        operators = progress.get("stateOperators") or ()
        self.late += sum(_number(one.get("numRowsDroppedByWatermark")) for one in operators)
        # A window that closes gives rows in a batch that has none of its own.
        self.rows_written += _written(progress) if files is None else rows
        seconds = _number(progress.get("batchDuration")) / 1000
        if not rows:
            self.rows_per_second = 0.0
            return
        self.batches += 1
        self.batch_seconds = seconds
        self.rows_per_second = rows / seconds if seconds else 0.0
        began = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00"))
        self.last_batch = began.timestamp() + seconds
        self._count_sources(progress, rows)

    def _count_sources(self, progress: Mapping[str, Any], rows: int) -> None:
        observed = {
            name: found
            for name, found in (progress.get("observedMetrics") or {}).items()
            if name.startswith(DECODED)
        }
        for name, found in observed.items():
            self._bad[name] += _number(found.get("bad"))
        # Spark counts a message as often as its source stands in the query, as in a join with itself.
        found_rows = {name: _number(found.get("rows")) for name, found in observed.items()}
        self._read.update(found_rows or {DECODED: rows})

    def quiet(self) -> None:
        """Nothing has come for a while."""
        self.rows_per_second = 0.0

    def as_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass
class Figures:
    """Of a pipeline, since the runner was started; restarts of the pipeline included.

    With several outputs: a message counts once, however many read it; the rate, the lag and the duration of a
    micro-batch are the highest of all outputs, and the number of the last batch is the lowest.
    """

    name: str
    topics: str = ""
    sink: str = ""
    state: State = State.STARTING
    rows: int = 0
    """Messages read, by the output that has read most of them."""
    rows_written: int = 0
    """By sinks that say so."""
    undecodable: int = 0
    """Messages that did not decode; with dead letters they are there, or soon will be."""
    dead_letters: int = 0
    late: int = 0
    rows_per_second: float = 0.0
    lag: int | None = None
    batches: int = 0
    batch: int | None = None
    batch_seconds: float = 0.0
    last_batch: float | None = None
    failures: int = 0
    restarts: int = 0
    error: str = ""
    """Of the last failure."""
    channel: str = ""
    """By which it reads; the first, if there are several."""
    channels: Mapping[str, str] = field(default_factory=dict)
    """All of them, and the topics that are read by each."""
    outputs: list[OutputFigures] = field(default_factory=list)

    def add_rows(self, progress: Mapping[str, Any], output: str = "") -> None:
        """A micro-batch of the query for an output."""
        if not any(one.name == output for one in self.outputs):
            self.outputs.append(OutputFigures(output))
        next(one for one in self.outputs if one.name == output).add(progress)
        self._sum_up()

    def add_letters(self, progress: Mapping[str, Any]) -> None:
        """A micro-batch of a query for dead letters."""
        self.dead_letters += _written(progress)

    def quiet(self) -> None:
        """Nothing has come for a while."""
        for one in self.outputs:
            one.quiet()
        self.rows_per_second = 0.0

    def failed(self, error: str) -> None:
        self.failures += 1
        self.error = error
        self.quiet()
        # Messages come while it does not run.
        self.forget_lag()

    def forget_lag(self) -> None:
        for one in self.outputs:
            one.lag = None
        self.lag = None

    def _sum_up(self) -> None:
        outputs = self.outputs
        # A union of counters has the highest count of each.
        self.rows = sum(reduce(Counter.__or__, (one._read for one in outputs)).values())
        self.undecodable = sum(reduce(Counter.__or__, (one._bad for one in outputs)).values())
        self.rows_written = sum(one.rows_written for one in outputs)
        self.late = sum(one.late for one in outputs)
        self.batches = sum(one.batches for one in outputs)
        self.rows_per_second = max(one.rows_per_second for one in outputs)
        self.batch_seconds = max(one.batch_seconds for one in outputs)
        self.batch = min((one.batch for one in outputs if one.batch is not None), default=None)
        self.last_batch = max((one.last_batch for one in outputs if one.last_batch is not None), default=None)
        lags = [one.lag for one in outputs]
        self.lag = None if None in lags else max(one for one in lags if one is not None)

    def as_json(self) -> dict[str, Any]:
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**found, "state": str(self.state), "outputs": [one.as_json() for one in self.outputs]}


def _observed(progress: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = (progress.get("observedMetrics") or {}).get(name)
    return found


def _written(progress: Mapping[str, Any]) -> int:
    """-1 stands for a sink that does not count."""
    return max(0, _number((progress.get("sink") or {}).get("numOutputRows")))


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0


def lag_of(progress: Mapping[str, Any]) -> int | None:
    """Messages that were there when the micro-batch was planned and are in none yet; None if nobody knows."""
    sources: Iterable[Mapping[str, Any]] = progress.get("sources") or []
    lags = [_lag(source) for source in sources]
    known = [one for one in lags if one is not None]
    # What is behind in one of several sources may be anything.
    return sum(known) if known and len(known) == len(lags) else None


def _lag(source: Mapping[str, Any]) -> int | None:
    latest, end = _offsets(source.get("latestOffset")), _offsets(source.get("endOffset"))
    if latest is None or end is None:
        return None
    ends: dict[tuple[str, str], int] = {}
    for topic, _, place in latest.items_flat():
        # A log may have been seen under two names.
        log = topic, place.incarnation
        ends[log] = max(place.sequence, ends.get(log, 0))
    lag = 0
    for topic, _, read in end.items_flat():
        last = ends.pop((topic, read.incarnation), None)
        if last is None:
            # The query reads this log, and its nsqd has not answered yet.
            return None
        lag += max(0, last - read.sequence)
    # A log that the query has not entered yet is not read at all, and may hold anything.
    return None if ends else lag


def _offsets(value: Any) -> Offsets | None:
    """Spark gives them as JSON, or as what the JSON says."""
    try:
        return decode(json.loads(value) if isinstance(value, str) else value)
    except (BadOffset, ValueError):
        return None
