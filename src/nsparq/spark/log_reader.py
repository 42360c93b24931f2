"""Log mode as Spark sees it: the methods that it calls, and what travels to the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from nsparq.spark.columns import arrow_schema
from nsparq.spark.log_source import Limit, LogSource
from nsparq.spark.options import NsqOptions
from nsparq.spark.positions import decode, encode
from nsparq.spark.range_reader import LogRange, read_range
from nsparq.spark.worker import spare_collections

__all__ = ["LogBatchReader", "LogPartition", "LogStreamReader"]


class LogPartition(InputPartition):
    """The work of one task."""

    value: tuple[LogRange, ...]

    def __init__(self, work: tuple[LogRange, ...]) -> None:
        super().__init__(work)


class _LogReader:
    """What both have in common: a task's part. Of the driver's part nothing goes with it."""

    def __init__(self, schema: StructType, options: NsqOptions) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._open_source: LogSource | None = LogSource(options)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open_source": None}

    @property
    def _source(self) -> LogSource:
        if self._open_source is None:
            self._open_source = LogSource(self._options)
        return self._open_source

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes up a partition where there is none.
        if isinstance(partition, LogPartition):
            spare_collections()
            for work in partition.value:
                yield from read_range(work, self._options, self._schema)


class LogBatchReader(_LogReader, DataSourceReader):
    """`spark.read`"""

    def partitions(self) -> Sequence[InputPartition]:
        source = self._source
        try:
            return [LogPartition(work) for work in source.tasks(*source.batch())]
        finally:
            source.close()


class LogStreamReader(_LogReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream`. The driver's instance lives as long as a run of the query; tasks have copies."""

    def __init__(self, schema: StructType, options: NsqOptions) -> None:
        super().__init__(schema, options)
        self._initial: dict[str, Any] | None = None

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_rows_per_trigger is not None:
            return ReadMaxRows(self._options.max_rows_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        # Spark asks twice, and must get the same.
        if self._initial is None:
            self._initial = encode(self._source.initial())
        return self._initial

    def prepareForTriggerAvailableNow(self) -> None:
        self._source.prepare_available_now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return encode(self._source.latest(decode(start), self._limit(limit)))

    def _limit(self, limit: ReadLimit) -> Limit:
        """Spark passes one of the two; both hold."""
        if isinstance(limit, ReadMaxRows):
            return Limit(limit.max_rows, self._options.max_bytes_per_trigger)
        if isinstance(limit, ReadMaxBytes):
            return Limit(self._options.max_rows_per_trigger, limit.max_bytes)
        return Limit()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return encode(self._source.report())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [LogPartition(work) for work in self._source.tasks(decode(start), decode(end))]

    def commit(self, end: dict[str, Any]) -> None:
        self._source.committed(decode(end))

    def stop(self) -> None:
        if self._open_source is not None:
            self._open_source.close()
