"""`format("nsq")`, the class that Spark loads: makes the reader or writer for each use.

Each of Spark's processes imports this module, so it imports readers and writers only when needed.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from nsparq.spark.columns import SCHEMA, chosen
from nsparq.spark.options import NsqOptions, OptionError, Use, mode_of

__all__ = ["SCHEMA", "NsqDataSource"]


class NsqDataSource(DataSource):
    """NSQ topics, for reading and writing."""

    @classmethod
    def name(cls) -> str:
        return "nsq"

    def schema(self) -> StructType:
        return chosen(self.options.get("columns") or "")

    def reader(self, schema: StructType) -> DataSourceReader:
        if mode_of(self.options) == "queue":
            raise OptionError("option mode: queue works only with readStream; a batch reads the log")
        from nsparq.spark.source.batch import FilteredBatchReader, LogBatchReader

        options = self._parsed(schema, Use.LOG_BATCH)
        return (FilteredBatchReader if options.push_filters else LogBatchReader)(schema, options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if mode_of(self.options) == "queue":
            from nsparq.spark.queue.reader import QueueStreamReader

            return QueueStreamReader(schema, self._parsed(schema, Use.QUEUE_STREAM))
        from nsparq.spark.source.stream import LogStreamReader

        return LogStreamReader(schema, self._parsed(schema, Use.LOG_STREAM))

    def _parsed(self, schema: StructType, use: Use) -> NsqOptions:
        options = NsqOptions.parse(self.options, use)
        if options.columns and chosen(options.columns).names != schema.names:
            raise OptionError(
                "option columns cannot be combined with a schema: the schema names the columns too"
            )
        return options

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from nsparq.spark.sink.writers import NsqWriter

        return NsqWriter(schema, NsqOptions.parse(self.options, Use.SINK_BATCH), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from nsparq.spark.sink.writers import NsqStreamWriter

        options = NsqOptions.parse(self.options, Use.SINK_STREAM)
        return NsqStreamWriter(schema, options, overwrite, self.options.get("checkpointLocation", ""))
