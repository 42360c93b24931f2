"""A Delta table as a sink, with the package deltalake: no JAR, and each micro-batch is one
transaction.

Tasks write Parquet files to their final place with pyarrow, through deltalake's access to local
directories and object stores. Readers see a file only after the driver has added it to the table's
log, together with the query, the batch number and the batch's fingerprint. A batch that is in the
log is not added again; its new files stay unused until `delta_upkeep` removes them.

An upsert is deltalake's `merge`, which runs in the driver. It holds the batch in memory, reads the
files that may contain one of the keys, and rewrites those that do. The same commit contains the
batch number.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote
from uuid import uuid4

from pyspark.sql.types import StructType

from nsparq.pipeline.durable import sync
from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.file.keys import is_local
from nsparq.pipeline.write.part_files import (
    GROUP_ROWS,
    MAX_OPEN,
    NULL_VALUE,
    DiskFile,
    NewFile,
    Part,
    Values,
    directory_of,
    statistics_of,
    text_of,
)
from nsparq.spark.checkpoint import LENGTH, check_batch

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable, Field, Schema
    from deltalake.transaction import AddAction, RemoveAction
    from pyarrow.fs import FileSystem

    from nsparq.pipeline.write.upsert import Upsert

    Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)

logger = logging.getLogger(__name__)

COMPRESSION: Final = "zstd"
NEW, OLD = "batch", "present"
"""Names in SQL for the rows of the batch and the rows of the table."""
_DAYS: Final = (-719_162, 2_932_897)
"""The first day of the year 1, and that of the year 10000, counted from 1970."""
_DAY_US: Final = 86_400_000_000


def is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("deltalake") is not None


class StoreFile:
    """An object of a store that is being written. Nobody sees it before it is complete."""

    def __init__(self, files: FileSystem, path: str) -> None:
        self.path, self.target = path, files.open_output_stream(path, compression=None)
        self._files = files

    def written(self) -> None:
        """Parts are sent as they are full."""

    def close(self) -> int:
        size: int = self.target.tell()
        self.target.close()
        return size

    def remove(self) -> None:
        """An object that cannot be removed is unused, and expires with the others."""
        with suppress(OSError):
            self.target.close()
        with suppress(OSError):
            self._files.delete_file(self.path)


def storage_of(uri: str, storage: Mapping[str, str] | None = None) -> FileSystem:
    """The files of a table, by their paths in its log."""
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    return PyFileSystem(DeltaStorageHandler(uri, dict(storage or {}) or None))


def creator(uri: str, storage: Mapping[str, str] | None = None) -> Callable[[Values], NewFile]:
    """Makes new files at their final place."""

    def path(values: Values) -> str:
        return "/".join(filter(None, (directory_of(values), f"{uuid4().hex}.parquet")))

    if is_local(uri):
        return lambda values: DiskFile(Path(uri) / (name := path(values)), name)
    files = storage_of(uri, storage)
    return lambda values: StoreFile(files, path(values))


class DeltaFiles:
    def __init__(
        self,
        uri: str,
        columns: Sequence[str],
        storage: Mapping[str, str] | None = None,
        retention: float = 0.0,
    ) -> None:
        """`uri` is a directory or a URL: `s3://…`, `gs://…`, `az://…`, `abfss://…`. `columns`
        partition the table. `storage` are deltalake's options for an object store. `retention` is
        how many seconds old versions are kept; 0 leaves the table as it is."""
        self._uri, self._columns, self._storage = uri, [*columns], dict(storage or {})
        self._retention = retention

    def __str__(self) -> str:
        return f"the table {self._uri}"

    # tasks

    def write(self, batches: Iterator[pa.RecordBatch], query: str, batch: int) -> list[Part]:
        import pyarrow.dataset as ds

        if is_local(self._uri):
            Path(self._uri).mkdir(parents=True, exist_ok=True)
        rows = (self._partitionable(one) for one in batches if one.num_rows)
        first = next(rows, None)
        if first is None:
            return []
        by = first.select(self._columns).schema
        written: list[Any] = []
        ds.write_dataset(
            chain([first], rows),
            "",
            schema=first.schema,
            format="parquet",
            filesystem=storage_of(self._uri, self._storage),
            partitioning=ds.partitioning(by, flavor="hive") if self._columns else None,
            basename_template=f"{uuid4().hex}-{{i}}.parquet",
            file_options=ds.ParquetFileFormat().make_write_options(compression=COMPRESSION),
            file_visitor=written.append,
            existing_data_behavior="overwrite_or_ignore",
            use_threads=False,
            max_open_files=MAX_OPEN,
            min_rows_per_group=GROUP_ROWS,
            max_rows_per_group=GROUP_ROWS,
        )
        if is_local(self._uri):
            for one in written:
                sync(Path(self._uri) / one.path)
        return [
            Part(one.path, values_in(one.path), one.metadata.num_rows, one.size, statistics_of(one.metadata))
            for one in written
        ]

    def _partitionable(self, rows: Rows) -> Rows:
        """Replaces empty strings in partition columns by null, as Hive, Spark and Delta do. Raises
        PipelineError for years that Delta's readers do not know."""
        import pyarrow as pa
        import pyarrow.compute as pc

        for name in self._columns:
            column = rows.column(name)
            if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
                self._check_years(name, column)
            if pa.types.is_string(column.type):
                column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
                rows = rows.set_column(rows.schema.get_field_index(name), name, column)
        return rows

    def _check_years(self, name: str, column: pa.Array | pa.ChunkedArray) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        is_date = pa.types.is_date(column.type)
        numbers = column.cast(pa.int32() if is_date else pa.int64())
        low, high = (one if is_date else one * _DAY_US for one in _DAYS)
        wrong = pc.or_(pc.less(numbers, low), pc.greater_equal(numbers, high))
        if (at := pc.index(wrong, True).as_py()) >= 0:
            raise PipelineError(
                f"{self} has the years 1 to 9999 as partitions, and the column {name!r} has "
                f"{text_of(column[at])}, with which nobody could read the table again. Replace such dates in "
                "SQL, for example by null"
            )

    # the driver

    def check(self, schema: StructType) -> None:
        """Checks that the table, if it exists, can take such rows. Raises PipelineError."""
        table = self._open()
        if table is not None:
            self._new_columns(table, schema)

    def commit(
        self, query: str, batch: int, parts: Sequence[Part], schema: StructType, planned: str = ""
    ) -> None:
        table = self._ready(query, batch, planned, schema if parts else None)
        if table is None:
            return
        actions: list[AddAction | RemoveAction] = [added(part) for part in parts]
        with self._committing(table, query, batch, planned) as properties:
            table.create_write_transaction(
                actions, "append", table.schema(), partition_by=self._columns, commit_properties=properties
            )

    def has(self, query: str, batch: int, planned: str = "") -> bool:
        """Raises CheckpointBehind."""
        table = self._open()
        return table is not None and self._has(table, query, batch, planned)

    def merge(
        self, query: str, batch: int, rows: pa.Table, schema: StructType, upsert: Upsert, planned: str = ""
    ) -> None:
        """Upserts rows with unique keys, not null. Raises CheckpointBehind, PipelineError."""
        table = self._ready(query, batch, planned, schema if rows.num_rows else None)
        if table is None:
            return
        source = self._partitionable(rows.cast(_arrow_schema(schema)))
        columns = {_quoted(name): _new(name) for name in rows.column_names}
        others = {_quoted(name): _new(name) for name in rows.column_names if name not in upsert.key}
        with self._committing(table, query, batch, planned) as properties:
            merger = table.merge(
                source,
                " AND ".join(f"{_old(name)} = {_new(name)}" for name in upsert.key),
                source_alias=NEW,
                target_alias=OLD,
                # With rows in memory deltalake knows the range of the keys, and skips files outside
                # it.
                streamed_exec=False,
                commit_properties=properties,
            ).when_not_matched_insert(columns)
            if others:
                merger = merger.when_matched_update(others, upsert.is_later(_new, _old) or None)
            merger.execute()

    def _ready(self, query: str, batch: int, planned: str, schema: StructType | None) -> DeltaTable | None:
        """The table, with all columns of the schema. None if it has the batch already, or the batch
        has no rows and so no schema. Raises CheckpointBehind, PipelineError."""
        table = self._open()
        if table is None:
            if schema is None:
                return None
            table = self._create(schema)
        if self._has(table, query, batch, planned) or schema is None:
            return None
        columns = self._new_columns(table, schema)
        if columns:
            # A separate commit: after a crash the table has a column of nulls, and the batch runs
            # again.
            logger.info("%s: adding columns %s", self, ", ".join(one.name for one in columns))
            table.alter.add_columns(columns)
        known = table.metadata().configuration
        if self._retention and (wanted := retention_properties(self._retention)).items() - known.items():
            # A separate commit, too.
            table.alter.set_table_properties(wanted)
        return table

    @contextmanager
    def _committing(
        self, table: DeltaTable, query: str, batch: int, planned: str
    ) -> Iterator[CommitProperties]:
        """Marks a commit as this batch. Ignores its failure if the table has the batch."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        versions = [Transaction(query, batch), Transaction(f"{query}/planned", int(planned or "0", 16))]
        try:
            yield CommitProperties(app_transactions=versions)
        except CommitFailedError:
            # Delta accepts only one of two concurrent commits of the same query.
            table.update_incremental()
            if not self._has(table, query, batch, planned):
                raise

    def _open(self) -> DeltaTable | None:
        from deltalake import DeltaTable

        if not DeltaTable.is_deltatable(self._uri, self._storage or None):
            return None
        table = DeltaTable(self._uri, storage_options=self._storage or None)
        found = table.metadata().partition_columns
        if found != self._columns:
            raise PipelineError(
                f"{self} is partitioned by {found or 'nothing'}, and partition_by is "
                f"{self._columns or 'nothing'}: the columns of a table cannot change. Restore partition_by, "
                "or write to another table"
            )
        return table

    def _create(self, schema: StructType) -> DeltaTable:
        from deltalake import DeltaTable

        return DeltaTable.create(
            self._uri,
            _wanted(schema),
            mode="ignore",
            partition_by=self._columns,
            storage_options=self._storage or None,
            configuration=retention_properties(self._retention) if self._retention else None,
        )

    def _has(self, table: DeltaTable, query: str, batch: int, planned: str) -> bool:
        """Delta keeps a version for each application. We use two: the number of a query's last
        batch, and its fingerprint, which old batches lack. Raises CheckpointBehind."""
        last, last_planned = table.transaction_version(query), table.transaction_version(f"{query}/planned")
        known = f"{last_planned:0{LENGTH}x}" if last_planned else ""
        return check_batch(str(self), batch, planned, -1 if last is None else last, known)

    def _new_columns(self, table: DeltaTable, schema: StructType) -> list[Field]:
        """Columns that the table lacks. Raises PipelineError for rows that it cannot take."""
        known = {one.name: one for one in table.schema().fields}
        by_case = {name.lower(): name for name in known}
        can_be_null = {one.name for one in schema.fields if one.nullable}
        added = []
        for one in _wanted(schema).fields:
            has = known.pop(one.name, None)
            if has is None:
                other = by_case.get(one.name.lower())
                if other is not None:
                    raise PipelineError(
                        f"{self} has a column {other!r}, and the rows have {one.name!r}: use the same case"
                    )
                added.append(one)
            elif has.type != one.type:
                raise PipelineError(
                    f"the column {one.name!r} of {self} is {_shown(has)}, and that of the rows is "
                    f"{_shown(one)}: cast it to the type of the table, give it another name, or write to "
                    "another table"
                )
            elif not has.nullable and one.name in can_be_null:
                known[one.name] = has
        # Columns that the rows lack, or in which they may have null.
        for name, one in known.items():
            if not one.nullable:
                text = f"the column {name!r} of {self} is NOT NULL, but the rows may have null there"
                raise PipelineError(text)
        return added

    def abort(self, query: str, batch: int, parts: Sequence[Part]) -> None:
        """Keeps the files, which no reader sees: the commit may have succeeded despite its
        error."""


def added(part: Part, *, data_change: bool = True) -> AddAction:
    """The entry of a new file in the table's log. `data_change` is false if its rows are not
    new."""
    from deltalake.transaction import AddAction

    return AddAction(
        path=part.path,
        size=part.size,
        partition_values=dict(part.values),
        modification_time=int(time.time() * 1000),
        data_change=data_change,
        stats=part.stats,
    )


def retention_properties(seconds: float) -> dict[str, str]:
    """Properties of a table that keeps old versions this long."""
    interval = f"interval {max(1, round(seconds))} seconds"
    return {"delta.logRetentionDuration": interval, "delta.deletedFileRetentionDuration": interval}


def values_in(path: str) -> Values:
    """Partition values, from the directory names in a path."""
    pairs = (segment.partition("=") for segment in path.split("/")[:-1] if "=" in segment)
    return tuple((name, None if text == NULL_VALUE else unquote(text)) for name, _, text in pairs)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _new(name: str) -> str:
    return f"{NEW}.{_quoted(name)}"


def _old(name: str) -> str:
    return f"{OLD}.{_quoted(name)}"


def _wanted(schema: StructType) -> Schema:
    """The columns of a Delta table for rows of this schema."""
    from deltalake import Schema

    return Schema.from_arrow(_arrow_schema(schema))


def _arrow_schema(schema: StructType) -> pa.Schema:
    """All columns are nullable, as in tables that Spark writes."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    return pa.schema([one.with_nullable(True) for one in to_arrow_schema(schema, timezone="UTC")])


def _shown(field: Field) -> str:
    return str(json.loads(field.to_json())["type"]).upper()
