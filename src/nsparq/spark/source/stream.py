"""Log mode's side of Spark's API: the reader of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.types import StructType

from nsparq.spark.cluster.http_client import Refused
from nsparq.spark.errors import DataLoss, NoAnswer
from nsparq.spark.options import NsqOptions
from nsparq.spark.source.batch import LogPartition, LogReader
from nsparq.spark.source.plan import RANGE_COST
from nsparq.spark.source.positions import decode, encode
from nsparq.spark.source.range_reader import LogRange, read_range
from nsparq.spark.stream_api import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from nsparq.spark.trigger import Limit

__all__ = ["LogPartition", "LogStreamReader"]

SMALL_BYTES: Final = 4 * RANGE_COST
"""The driver reads a micro-batch up to this size. Each range counts with its RANGE_COST."""


class LogStreamReader(LogReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream`. One instance runs in the driver; each task has a copy.

    A small micro-batch is read in the driver, while it is planned: a task in a Python process costs
    more than reading a few rows. Spark has a way to take rows from the driver, and it is for
    readers of one class alone (SimpleDataSourceStreamReader's wrapper). So this reader passes for
    one, but only from the end of partitions() until Spark has fetched the rows. If the rows are
    lost, or this reader has none, Spark starts a task as usual.
    """

    def __init__(self, schema: StructType, options: NsqOptions) -> None:
        super().__init__(schema, options)
        self._initial: dict[str, Any] | None = None
        self._rows: list[pa.RecordBatch] | None = None
        """Rows of the micro-batch that was planned last, until Spark fetches them."""

    @property  # type: ignore[misc]  # the class of an object can be set, ours cannot
    def __class__(self) -> type:
        return type(self) if self._rows is None else _SimpleStreamReaderWrapper

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_rows_per_trigger is not None:
            return ReadMaxRows(self._options.max_rows_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        if self._options.min_rows_per_trigger is not None:
            return ReadMinRows(self._options.min_rows_per_trigger)
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        # Spark asks twice and must get the same answer.
        if self._initial is None:
            self._initial = encode(self._source.initial())
        return self._initial

    def prepareForTriggerAvailableNow(self) -> None:
        self._source.prepare_available_now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return encode(self._source.latest(decode(start), self._limit(limit)))

    def _limit(self, limit: ReadLimit) -> Limit:
        """Spark passes our default limit or, with trigger `once`, ReadAllAvailable."""
        if isinstance(limit, ReadMaxRows):
            return Limit(limit.max_rows, self._options.max_bytes_per_trigger)
        if isinstance(limit, ReadMaxBytes):
            return Limit(self._options.max_rows_per_trigger, limit.max_bytes)
        return Limit(is_everything=limit != self.getDefaultReadLimit())

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Spark shows it as the source's `latestOffset` in a query's progress."""
        return {"behind": self._source.behind()._asdict(), **encode(self._source.report())}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        tasks = self._source.tasks(decode(start), decode(end))
        self._rows = self._read_here(tasks[0]) if len(tasks) == 1 else None
        return [LogPartition(work) for work in tasks]

    def _read_here(self, work: tuple[LogRange, ...]) -> list[pa.RecordBatch] | None:
        """The rows of a task, if it is small. None if there is any trouble: the task deals with
        it."""
        if sum(one.size_bytes + RANGE_COST for one in work) > SMALL_BYTES:
            return None
        options = replace(self._options, retry_for=0.0)
        try:
            return [rows for one in work for rows in read_range(one, options, self._schema)]
        except (DataLoss, NoAnswer, Refused):
            return None

    def getCache(self, _start: dict[str, Any], _end: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """Spark fetches the rows of the micro-batch that it has just planned."""
        rows, self._rows = self._rows, None
        assert rows is not None
        return iter(rows)

    def commit(self, end: dict[str, Any]) -> None:
        self._source.committed(decode(end))

    def stop(self) -> None:
        if self._open_source is not None:
            self._open_source.close()
