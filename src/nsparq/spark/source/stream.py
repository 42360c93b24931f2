"""Log mode's side of Spark's API: the reader of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from nsparq.spark.options import NsqOptions
from nsparq.spark.source.batch import LogPartition, LogReader
from nsparq.spark.source.positions import decode, encode
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


class LogStreamReader(LogReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream`. One instance runs in the driver; each task has a copy."""

    def __init__(self, schema: StructType, options: NsqOptions) -> None:
        super().__init__(schema, options)
        self._initial: dict[str, Any] | None = None

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
        return [LogPartition(work) for work in self._source.tasks(decode(start), decode(end))]

    def commit(self, end: dict[str, Any]) -> None:
        self._source.committed(decode(end))

    def stop(self) -> None:
        if self._open_source is not None:
            self._open_source.close()
