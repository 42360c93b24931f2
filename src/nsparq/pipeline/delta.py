"""A Delta table as a sink, through the package deltalake: no JAR, and each micro-batch is one transaction.

Tasks write Parquet files to where they are to stay; nobody sees them until the driver adds them to the
table's log, together with the query and the number of the batch. A batch whose number is there already is not
added again; its files stay behind unseen until `vacuum`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import StructType

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.files import write_parts
from nsparq.pipeline.parts import Part, PartWriter, split
from nsparq.spark.checkpoint import LENGTH, check_batch

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["DeltaFiles", "is_installed"]

COMPRESSION: Final = "zstd"


def is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("deltalake") is not None


class DeltaFiles:
    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns = path, columns

    def write(self, batches: Iterator[pa.RecordBatch], query: str, batch: int) -> list[Part]:
        writer = PartWriter(self._path, COMPRESSION, suffix=".parquet", by_value=True)
        return write_parts(writer, (piece for one in batches for piece in split(one, self._columns)))

    def commit(
        self, query: str, batch: int, parts: Sequence[Part], schema: StructType, planned: str = ""
    ) -> None:
        from deltalake import CommitProperties, DeltaTable, Transaction
        from deltalake.transaction import AddAction, RemoveAction
        from pyspark.sql.pandas.types import to_arrow_schema

        columns = to_arrow_schema(schema, timezone="UTC")
        if not DeltaTable.is_deltatable(str(self._path)):
            if not parts:
                return
            DeltaTable.create(str(self._path), columns, mode="ignore", partition_by=[*self._columns])
        table = DeltaTable(str(self._path))
        if check_batch(f"the table {self._path}", batch, planned, *_last(table, query)) or not parts:
            return
        self._check(table)
        now = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(
                path=Path(part.path).relative_to(self._path).as_posix(),
                size=part.size,
                partition_values=dict(part.values),
                modification_time=now,
                data_change=True,
                stats=json.dumps({"numRecords": part.rows}),
            )
            for part in parts
        ]
        table.create_write_transaction(
            actions,
            "append",
            columns,
            partition_by=[*self._columns],
            commit_properties=CommitProperties(
                app_transactions=[
                    Transaction(query, batch),
                    Transaction(f"{query}/planned", int(planned or "0", 16)),
                ]
            ),
        )

    def _check(self, table: Any) -> None:
        found = table.metadata().partition_columns
        if found != [*self._columns]:
            raise PipelineError(
                f"the table {self._path} is partitioned by {found or 'nothing'}, and the pipeline by "
                f"{[*self._columns] or 'nothing'}"
            )

    def abort(self, query: str, batch: int, parts: Sequence[Part]) -> None:
        """Nothing: whether a failed commit has come to be is not certain, and nobody sees the files."""


def _last(table: Any, query: str) -> tuple[int, str]:
    """The number of the query's last batch, -1 if there is none, and its fingerprint, empty if it was written
    before there were any. Both are transaction versions, which Delta keeps by application id."""
    last, planned = table.transaction_version(query), table.transaction_version(f"{query}/planned")
    return (-1 if last is None else last), (f"{planned:0{LENGTH}x}" if planned else "")
