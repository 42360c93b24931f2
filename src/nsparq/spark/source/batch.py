"""Log mode's side of Spark's API: the tasks of all readers, and the reader of a batch.

The reader of a stream is in stream.py, which needs Spark 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from nsparq.spark.columns import arrow_schema
from nsparq.spark.options import NsqOptions
from nsparq.spark.source.driver import LogSource
from nsparq.spark.source.filters import Filters
from nsparq.spark.source.range_reader import LogRange, read_range
from nsparq.spark.worker import prepare_worker

__all__ = ["FilteredBatchReader", "LogBatchReader", "LogPartition", "LogReader"]


class LogPartition(InputPartition):
    """The work of one task."""

    value: tuple[LogRange, ...]

    def __init__(self, work: tuple[LogRange, ...]) -> None:
        super().__init__(work)


class LogReader:
    """Common part of the readers. Spark pickles it for the tasks."""

    def __init__(self, schema: StructType, options: NsqOptions) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._open_source: LogSource | None = self._new_source()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open_source": None}

    @property
    def _source(self) -> LogSource:
        if self._open_source is None:
            self._open_source = self._new_source()
        return self._open_source

    def _new_source(self) -> LogSource:
        return LogSource(self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without partitions Spark passes one with the value None.
        if partition.value is not None:
            prepare_worker()
            for work in partition.value:
                yield from read_range(work, self._options, self._schema)


class LogBatchReader(LogReader, DataSourceReader):
    """`spark.read`."""

    def __init__(self, schema: StructType, options: NsqOptions) -> None:
        super().__init__(schema, options)
        self._filters = Filters()

    def partitions(self) -> Sequence[InputPartition]:
        source = self._source
        try:
            return [LogPartition(work) for work in source.tasks(*source.batch(self._filters))]
        finally:
            source.close()


class FilteredBatchReader(LogBatchReader):
    """The reader with option pushFilters. A class of its own, because Spark rejects a reader that
    has this method unless its setting for filter push-down is on."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        return [one for one in filters if not self._filters.take(one)]
