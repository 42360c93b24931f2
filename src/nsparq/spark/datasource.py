"""`format("nsq")`: what Spark asks for by that name, handed on to whoever does it.

Each of Spark's processes imports this module, so the readers and writers are imported when they are wanted.
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

from nsparq.spark.columns import SCHEMA
from nsparq.spark.options import NsqOptions, OptionError, Use, mode_of

__all__ = ["SCHEMA", "NsqDataSource"]


class NsqDataSource(DataSource):
    """NSQ topics, read and written."""

    @classmethod
    def name(cls) -> str:
        return "nsq"

    def schema(self) -> StructType:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        if mode_of(self.options) == "queue":
            raise OptionError("option mode: queue is for streams only; a batch reads the log")
        from nsparq.spark.log_batch import LogBatchReader

        return LogBatchReader(schema, NsqOptions.parse(self.options, Use.LOG_BATCH))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if mode_of(self.options) == "queue":
            from nsparq.spark.queue_reader import QueueStreamReader

            return QueueStreamReader(schema, NsqOptions.parse(self.options, Use.QUEUE_STREAM))
        from nsparq.spark.log_reader import LogStreamReader

        return LogStreamReader(schema, NsqOptions.parse(self.options, Use.LOG_STREAM))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from nsparq.spark.sink import NsqWriter

        return NsqWriter(schema, NsqOptions.parse(self.options, Use.SINK_BATCH), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from nsparq.spark.sink import NsqStreamWriter

        options = NsqOptions.parse(self.options, Use.SINK_STREAM)
        return NsqStreamWriter(schema, options, overwrite, self.options.get("checkpointLocation", ""))
