"""Parquet files written directly by the tasks that read the log, for pipelines that do not change
messages.

`layout_of` says which pipelines these are. Spark has nothing to compute for them, so the rows need
not pass through the JVM, which would take longer than everything else. To Spark the source is a
table of files, with a row for each file that a task has written. The sink (`file_sink`) gets these
few rows and commits the files as usual. So offsets, checkpoints, retries and exactly-once work as
they do for rows.

If the row of a task attempt does not reach the sink, its files are unused. They have unique names.
In a directory of Parquet files they are removed with the batch, in a Delta table when old versions
expire.

All messages of a log range have one topic and one node. So a range is cut into directories only
where the date or the hour changes, without looking at each row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import DateType, IntegerType, LongType, StringType, StructField, StructType

from nsparq.pipeline.decode.formats import HEADERS, undecoded_columns
from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.file.sinks import Delta, Parquet
from nsparq.pipeline.file.spec import Pipeline
from nsparq.pipeline.write import delta
from nsparq.spark.columns import SCHEMA
from nsparq.spark.options import NsqOptions, Use
from nsparq.spark.source.range_reader import LogRange, read_range
from nsparq.spark.source.stream import LogStreamReader
from nsparq.spark.worker import prepare_worker

if TYPE_CHECKING:
    import pyarrow as pa

    from nsparq.pipeline.write.part_files import Part, Values

FORMAT: Final = "nsparq_direct"
LAYOUT: Final = "layout"
STORAGE: Final = "storagesecrets"
"""Options beside those of format("nsq"): a Layout, and deltalake's options for an object store as
JSON. Spark hides options with such a name."""
DESCRIBED: Final = (
    StructType()
    .add("path", StringType(), False)
    .add("partition", StringType(), False)
    .add("rows", LongType(), False)
    .add("size", LongType(), False)
    .add("stats", StringType(), False)
)
"""The columns of this source: the fields of Part."""
CHUNK: Final = 16 << 20
"""Bytes that a task requests at a time: nsqd's maximum, because a busy nsqd answers slowly."""
_SAME_IN_A_RANGE: Final = ("topic", "node")
_LENGTH_US: Final = {"date": 86_400_000_000, "hour": 3_600_000_000}
_MADE: Final = {"date": DateType(), "hour": IntegerType()}


@dataclass(frozen=True, slots=True)
class Layout:
    """How messages are stored in files. Sent to the tasks as text."""

    path: str
    compression: str
    partition_by: tuple[str, ...]
    columns: Mapping[str, str]
    """Names of the columns in the files, and the columns of the source."""
    fixed: Mapping[str, str]
    """The same for the columns that are directories."""
    is_delta: bool = False
    """A Delta table, and not a directory of Parquet files."""

    @property
    def schema(self) -> StructType:
        """The columns of the table, in the order that Spark would give them."""
        sources = {**self.columns, **self.fixed}
        order = [field.name for field in SCHEMA.fields]
        named = sorted(sources, key=lambda name: order.index(sources[name]))
        found = StructType([StructField(name, SCHEMA[sources[name]].dataType) for name in named])
        for name in self.partition_by:
            if name not in sources:
                found.add(name, _MADE[name])
        return found

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Layout:
        found: dict[str, Any] = json.loads(text)
        return cls(**{**found, "partition_by": tuple(found["partition_by"])})

    @property
    def encodings(self) -> dict[str, Any]:
        """Arguments for ParquetWriter: dictionaries for columns that rarely change, differences for
        numbers that count up, and no statistics for bodies and headers, because nobody searches by
        them."""
        of = {source: name for name, source in self.columns.items()}
        packed = {of[name]: "DELTA_BINARY_PACKED" for name in ("offset", "timestamp") if name in of}
        return {
            "use_dictionary": [of[name] for name in ("topic", "node", "attempts") if name in of],
            "column_encoding": packed,
            "write_statistics": [name for name, of in self.columns.items() if of not in ("body", HEADERS)],
        }

    def pieces(self, batch: pa.RecordBatch, topic: str, node: str) -> Iterator[tuple[Values, pa.RecordBatch]]:
        """Messages of one range, with the columns of the source, split by directory."""
        if not batch.num_rows:
            return
        renamed = batch.select([*self.columns.values()]).rename_columns([*self.columns])
        times = batch.column("timestamp").view("int64").to_numpy()
        length = min((_LENGTH_US[name] for name in self.partition_by if name in _LENGTH_US), default=0)
        if not length or times.min() // length == times.max() // length:
            yield self._values(topic, node, int(times[0])), renamed
            return
        changes = np.flatnonzero(np.diff(times // length)) + 1
        borders = [0, *changes.tolist(), batch.num_rows]
        for low, high in zip(borders, borders[1:], strict=False):
            yield self._values(topic, node, int(times[low])), renamed.slice(low, high - low)

    def _values(self, topic: str, node: str, time_us: int) -> Values:
        moment = datetime.fromtimestamp(time_us // 1_000_000, UTC)
        known = {"topic": topic, "node": node}
        made = {"date": moment.date().isoformat(), "hour": str(moment.hour)}
        return tuple(
            (name, known[self.fixed[name]] if name in self.fixed else made[name])
            for name in self.partition_by
        )


def layout_of(pipeline: Pipeline) -> Layout | None:
    """None if the rows must pass through Spark."""
    if len(pipeline.sources) > 1 or len(pipeline.outputs) > 1 or pipeline.steps:
        return None
    source, sink = pipeline.sources[0], pipeline.outputs[0].sink
    names = undecoded_columns(source.decode.format, source.decode.headers)
    if not isinstance(sink, Parquet | Delta) or names is None:
        return None
    if sink.key_columns if isinstance(sink, Delta) else sink.is_written_by_spark:
        return None
    if source.watermark is not None or source.is_queue:
        return None
    fixed = {name: names[name] for name in sink.partition_by if names.get(name) in _SAME_IN_A_RANGE}
    made = {name for name in sink.partition_by if name in _LENGTH_US and name not in names}
    if made and names.get(sink.date_from) != "timestamp":
        return None
    if len(fixed) + len(made) < len(sink.partition_by):
        return None
    columns = {name: source for name, source in names.items() if name not in fixed}
    compression = delta.COMPRESSION if isinstance(sink, Delta) else sink.compression
    return Layout(sink.path, compression, sink.partition_by, columns, fixed, isinstance(sink, Delta))


class DirectDataSource(DataSource):
    """Can only be read, as a stream."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return DESCRIBED

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        given = dict(self.options)
        layout, storage = Layout.loads(given.pop(LAYOUT)), json.loads(given.pop(STORAGE, "{}"))
        return DirectReader(NsqOptions.parse(given, Use.LOG_STREAM), layout, storage)


class DirectReader(LogStreamReader):
    def __init__(self, options: NsqOptions, layout: Layout, storage: Mapping[str, str] | None = None) -> None:
        self._layout, self._storage = layout, storage
        wanted = {*layout.columns.values(), "timestamp"}
        super().__init__(StructType([field for field in SCHEMA.fields if field.name in wanted]), options)

    def _read_here(self, work: tuple[LogRange, ...]) -> None:
        """Only tasks write files."""

    # tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # If there are no partitions, Spark makes an empty one.
        if partition.value is not None:
            prepare_worker()
            yield described(self._write(partition.value))

    def _write(self, ranges: tuple[LogRange, ...]) -> list[Part]:
        from nsparq.pipeline.write.parquet_table import ParquetDirectory
        from nsparq.pipeline.write.part_files import PartWriter, write_parts
        from nsparq.spark.sink.writers import Task

        task, layout = Task.current(), self._layout
        if task.query_id is None:
            raise PipelineError("Spark did not tell the task which query it belongs to")
        if layout.is_delta:
            create = delta.creator(layout.path, self._storage)
        else:
            suffix = f"-{task.partition}-{task.attempt}.part"
            create = ParquetDirectory(layout.path).creator(task.query_id, task.batch_id, suffix)
        writer = PartWriter(create, layout.compression, layout.encodings)
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
    """The parts as rows of this source."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    columns = [
        [part.path for part in parts],
        [json.dumps(part.values) for part in parts],
        [part.rows for part in parts],
        [part.size for part in parts],
        [part.stats for part in parts],
    ]
    schema = to_arrow_schema(DESCRIBED, timezone="UTC")
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def parts_of(batches: Iterable[pa.RecordBatch]) -> list[Part]:
    """The parts that the rows of this source describe."""
    from nsparq.pipeline.write.part_files import Part

    return [
        Part(
            row["path"],
            tuple((name, value) for name, value in json.loads(row["partition"])),
            row["rows"],
            row["size"],
            row["stats"],
        )
        for batch in batches
        for row in batch.to_pylist()
    ]
