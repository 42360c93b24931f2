"""The Spark data source "nsparq_files", for sinks of Parquet files and Delta tables.

Tasks write Parquet files from Arrow batches, and the driver commits them to the table. Options:
path, partitionBy, compression, compact, table (`parquet` or `delta`), retention, storageSecrets
(deltalake's options for an object store, as JSON; Spark hides options with such a name), and
described (the rows describe files that are written already, with these columns; see
`direct_parquet`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from nsparq.pipeline.errors import PipelineError
from nsparq.spark.checkpoint import fingerprint

if TYPE_CHECKING:
    import pyarrow as pa

    from nsparq.pipeline.write.part_files import Part

logger = logging.getLogger(__name__)

FORMAT: Final = "nsparq_files"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """The files that one task has written."""

    query: str
    parts: tuple[Part, ...]


class Table(Protocol):
    """A table of files: how tasks write files, and how the driver commits a batch of them."""

    def write(self, batches: Iterator[pa.RecordBatch], query: str, batch: int) -> list[Part]: ...
    def commit(
        self, query: str, batch: int, parts: Sequence[Part], schema: StructType, planned: str = ""
    ) -> None:
        """`planned` is the fingerprint of the batch. Raises CheckpointBehind."""

    def abort(self, query: str, batch: int, parts: Sequence[Part]) -> None: ...


class FilesDataSource(DataSource):
    """Can only be written, as a stream."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        if overwrite:
            raise PipelineError("files can only be appended to: set output_mode to append")
        return FilesWriter(schema, dict(self.options))


class FilesWriter(DataSourceStreamArrowWriter):
    def __init__(self, schema: StructType, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        described = self._options.get("described")
        self._schema = StructType.fromJson(json.loads(described)) if described else schema

    def _table(self) -> Table:
        options = self._options
        columns = tuple(filter(None, options.get("partitionby", "").split(",")))
        if options.get("table") == "delta":
            from nsparq.pipeline.write.delta import DeltaFiles

            storage = json.loads(options.get("storagesecrets", "{}"))
            return DeltaFiles(options["path"], columns, storage, float(options.get("retention", 0)))
        return ParquetFiles(
            Path(options["path"]), columns, options.get("compression", "zstd"), int(options.get("compact", 0))
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from nsparq.spark.sink.writers import Task

        task = Task.current()
        if task.query_id is None:
            raise PipelineError("Spark did not tell the task which query it belongs to")
        if self._options.get("described"):
            from nsparq.pipeline.write.direct_parquet import parts_of

            return Written(task.query_id, tuple(parts_of(iterator)))
        return Written(task.query_id, tuple(self._table().write(iterator, task.query_id, task.batch_id)))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        query, parts = _parts(messages)
        if query:
            planned = fingerprint(self._options.get("checkpointlocation", ""), batchId)
            self._table().commit(query, batchId, parts, self._schema, planned)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        query, parts = _parts(messages)
        if query:
            self._table().abort(query, batchId, parts)


def _parts(messages: Sequence[WriterCommitMessage | None]) -> tuple[str, list[Part]]:
    written = [message for message in messages if isinstance(message, Written)]
    return (written[0].query if written else ""), [part for one in written for part in one.parts]


class ParquetFiles:
    """A directory of Parquet files; see `parquet_table`."""

    def __init__(self, path: Path, columns: Sequence[str], compression: str, fan_in: int) -> None:
        from nsparq.pipeline.write.parquet_table import ParquetDirectory

        self._directory, self._columns = ParquetDirectory(path), columns
        self._compression, self._fan_in = compression, fan_in

    def write(self, batches: Iterator[pa.RecordBatch], query: str, batch: int) -> list[Part]:
        from nsparq.pipeline.write.part_files import PartWriter, split, write_parts

        writer = PartWriter(self._directory.creator(query, batch), self._compression)
        return write_parts(writer, (piece for one in batches for piece in split(one, self._columns)))

    def commit(
        self, query: str, batch: int, parts: Sequence[Part], schema: StructType, planned: str = ""
    ) -> None:
        changed = self._directory.commit(query, batch, parts, planned)
        if not self._fan_in:
            return
        from nsparq.pipeline.write.compact import CannotExchange, compact

        try:
            compact(self._directory, changed, fan_in=self._fan_in)
        except CannotExchange as error:
            logger.warning("cannot join small files: %s", error)

    def abort(self, query: str, batch: int, parts: Sequence[Part]) -> None:
        self._directory.abort(query, batch, parts)
