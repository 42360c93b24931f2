"""Messages into files without a detour: the tasks that read a range of a log write it to Parquet themselves.

To Spark the source is a table of files: a row for each file that a task has written and nobody sees yet. The
sink, `files`, gets these few rows and makes the files part of the table, by the same commit as always. So
offsets, checkpoints, retries and exactly-once are what they are for rows, and only the rows themselves do not
pass through the JVM, which would take more time than all the rest.

An attempt of a task whose description does not reach the sink has written for nothing: its files have names
of their own, and are removed with the batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import LongType, StringType, StructType

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.write.layout import Layout
from nsparq.spark.columns import SCHEMA
from nsparq.spark.options import NsqOptions, Use
from nsparq.spark.source.driver import LogSource
from nsparq.spark.source.range_reader import LogRange, read_range
from nsparq.spark.source.stream import LogStreamReader
from nsparq.spark.worker import prepare_worker

if TYPE_CHECKING:
    import pyarrow as pa

    from nsparq.pipeline.write.parts import Part

__all__ = [
    "DESCRIBED",
    "FORMAT",
    "INTERVAL",
    "LAYOUT",
    "DirectDataSource",
    "DirectReader",
    "described",
    "parts_of",
]

FORMAT: Final = "nsparq_direct"
LAYOUT: Final = "layout"
INTERVAL: Final = "interval"
"""Options beside those of format("nsq"): a Layout, and the seconds between two batches that are not full."""
DESCRIBED: Final = (
    StructType()
    .add("path", StringType(), False)
    .add("partition", StringType(), False)
    .add("rows", LongType(), False)
    .add("size", LongType(), False)
)
"""The columns of this source: see Part."""
CHUNK: Final = 16 << 20
"""Bytes that a task asks for at a time: the most that nsqd gives, since one that is busy takes its time to
answer, however little it is asked for."""


class DirectDataSource(DataSource):
    """Read only, as a stream."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return DESCRIBED

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        given = dict(self.options)
        layout, interval = Layout.loads(given.pop(LAYOUT)), float(given.pop(INTERVAL))
        return DirectReader(NsqOptions.parse(given, Use.LOG_STREAM), layout, interval)


class DirectReader(LogStreamReader):
    def __init__(self, options: NsqOptions, layout: Layout, interval: float = 0.0) -> None:
        """A batch is due when its time has come, or as soon as it is full. Spark's own triggers know the
        first only: with a limit, they would let the rest wait for the next time, however much there is."""
        self._layout, self._interval = layout, interval
        wanted = {*layout.columns.values(), "timestamp"}
        super().__init__(StructType([field for field in SCHEMA.fields if field.name in wanted]), options)

    def _new_source(self) -> LogSource:
        return LogSource(self._options, interval=self._interval)

    # tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes up a partition, of nothing, where there is none.
        if partition.value is not None:
            prepare_worker()
            yield described(self._write(partition.value))

    def _write(self, ranges: tuple[LogRange, ...]) -> list[Part]:
        from nsparq.pipeline.write.commits import Directory
        from nsparq.pipeline.write.files import write_parts
        from nsparq.pipeline.write.parts import PartWriter
        from nsparq.spark.sink.writers import Task

        task, layout = Task.current(), self._layout
        if task.query_id is None:
            raise PipelineError("Spark does not say which query this is")
        writer = PartWriter(
            Directory(layout.path).new_files(task.query_id, task.batch_id),
            layout.compression,
            suffix=f"-{task.partition}-{task.attempt}.part",
            settings=layout.encodings,
        )
        return write_parts(
            writer,
            (
                piece
                for work in ranges
                for batch in read_range(work, self._options, self._schema, CHUNK)
                for piece in layout.pieces(batch, work.topic, work.node)
            ),
        )


def described(parts: Sequence[Part]) -> pa.RecordBatch:
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    columns = [
        [part.path for part in parts],
        [json.dumps(part.values) for part in parts],
        [part.rows for part in parts],
        [part.size for part in parts],
    ]
    schema = to_arrow_schema(DESCRIBED, timezone="UTC")
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def parts_of(batches: Iterable[pa.RecordBatch]) -> list[Part]:
    """What `described` says, after its way through Spark."""
    from nsparq.pipeline.write.parts import Part

    return [
        Part(
            row["path"],
            tuple((name, value) for name, value in json.loads(row["partition"])),
            row["rows"],
            row["size"],
        )
        for batch in batches
        for row in batch.to_pylist()
    ]
