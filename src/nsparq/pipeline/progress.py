"""How a pipeline is doing, in figures: made of what Spark reports about each micro-batch. Needs no Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from nsparq.spark.positions import BadOffset, Offsets, decode

__all__ = ["WRITTEN", "Figures", "State", "lag_of"]

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


@dataclass
class Figures:
    """Since the runner was started; restarts of the pipeline included."""

    name: str
    topics: str = ""
    sink: str = ""
    state: State = State.STARTING
    rows: int = 0
    """Messages read."""
    rows_written: int = 0
    """By sinks that say so."""
    undecodable: int = 0
    """Messages that did not decode; with dead letters they are there, or soon will be."""
    dead_letters: int = 0
    late: int = 0
    """What came behind the watermark, and was dropped by Spark: rows or, where an aggregation has put rows
    together before, groups of them."""
    rows_per_second: float = 0.0
    """Of the last micro-batch with rows, or 0 when nothing comes."""
    lag: int | None = None
    """Messages published and not yet read. None while nobody knows: before the first report of the source,
    after a failure, and where nsqd does not say."""
    batches: int = 0
    """Micro-batches of the rows that are done."""
    batch: int | None = None
    """Number of the last one."""
    batch_seconds: float = 0.0
    last_batch: float | None = None
    """When the last one with rows ended, in Unix seconds."""
    failures: int = 0
    restarts: int = 0
    error: str = ""
    """Of the last failure."""
    channel: str = ""
    """By which it reads; dead letters have another, with `.dead` behind the name."""

    def add_rows(self, progress: Mapping[str, Any], decoded: str) -> None:
        """A micro-batch of the query for the rows."""
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
        self.undecodable += _number((_observed(progress, decoded) or {}).get("bad"))

    def add_letters(self, progress: Mapping[str, Any]) -> None:
        """A micro-batch of the query for the dead letters."""
        self.dead_letters += _written(progress)

    def quiet(self) -> None:
        """Nothing has come for a while."""
        self.rows_per_second = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            name: value if not isinstance(value, State) else str(value) for name, value in vars(self).items()
        }


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
    found = [one for source in sources if (one := _lag(source)) is not None]
    return sum(found) if found else None


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
