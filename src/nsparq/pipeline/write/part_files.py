"""Writes rows into Parquet files, one for each combination of partition values. Runs in the tasks.

Each file is a *part* until the driver commits it. Row groups have a fixed size, whatever the size
of the batches that arrive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GROUP_ROWS: Final = 131_072
GROUP_BYTES: Final = 32 << 20
"""A row group is written when it has this many rows or, before compression, this many bytes."""
MAX_OPEN: Final = 64
"""Files that one task has open. Beyond it, the least recently used file is closed."""
NULL_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED: Final = frozenset("\"#%'*/:=?\\\x7f{}[]^") | {chr(code) for code in range(32)}

Values = tuple[tuple[str, str | None], ...]
"""Partition columns and their values, as strings."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file that a task has written and the driver has not committed."""

    path: str
    values: Values
    rows: int
    size: int


def escaped(text: str) -> str:
    """A name or value as Hive and Spark write it in a directory name."""
    return "".join(f"%{ord(one):02X}" if one in _ESCAPED else one for one in text)


def directory_of(values: Values) -> str:
    """`topic=orders/date=2026-11-15`; empty without partition columns. An empty string is written
    like null, as Spark does, because Spark cannot read a directory `topic=`."""
    return "/".join(f"{escaped(name)}={escaped(value) if value else NULL_VALUE}" for name, value in values)


def split(batch: pa.RecordBatch, columns: Sequence[str]) -> Iterator[tuple[Values, pa.RecordBatch]]:
    """Splits the rows by the values of these columns, and removes the columns."""
    if not batch.num_rows:
        return
    if not columns:
        yield (), batch
        return
    kept = batch.select([name for name in batch.schema.names if name not in columns])
    encoded = [batch.column(name).dictionary_encode() for name in columns]
    codes = np.zeros(batch.num_rows, dtype=np.int64)
    for one in encoded:
        codes = codes * (len(one.dictionary) + 1) + one.indices.fill_null(len(one.dictionary)).to_numpy()
    found, first, place = np.unique(codes, return_index=True, return_inverse=True)
    for number, row in enumerate(first):
        values = tuple((name, _text(batch.column(name)[int(row)])) for name in columns)
        if len(found) == 1:
            yield values, kept
        else:
            yield values, kept.take(pa.array(np.flatnonzero(place == number)))


def _text(value: Any) -> str | None:
    if not value.is_valid:
        return None
    if pa.types.is_boolean(value.type):
        return str(value.as_py()).lower()
    return str(value.as_py())


class PartWriter:
    """Writes the rows of one task into files below `directory`, with unique names."""

    def __init__(
        self,
        directory: Path,
        compression: str,
        *,
        suffix: str,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings` are more arguments for ParquetWriter."""
        self._directory, self._suffix = directory, suffix
        self._settings = {"compression": compression, **(settings or {})}
        self._encoder = Encoder()
        self._open: dict[Values, PartFile] = {}
        self._parts: list[Part] = []

    def write(self, values: Values, rows: pa.RecordBatch) -> None:
        """Writes rows with these partition values and without the partition columns."""
        file = self._open.pop(values, None)
        if file is None:
            if len(self._open) >= MAX_OPEN:
                self._close(next(iter(self._open)))
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"{uuid4().hex}{self._suffix}"
            file = PartFile(path, rows.schema, self._settings, self._encoder)
        self._open[values] = file
        file.write(rows)

    def _close(self, values: Values) -> None:
        file = self._open[values]
        size = file.close()
        del self._open[values]
        self._parts.append(Part(str(file.path), values, file.rows, size))

    def finish(self) -> list[Part]:
        """Closes and syncs all files, and returns them."""
        for values in list(self._open):
            self._close(values)
        self._encoder.stop()
        return self._parts

    def drop(self) -> None:
        """Removes all files after a failure."""
        self._encoder.stop()
        for file in self._open.values():
            file.drop()
        for part in self._parts:
            Path(part.path).unlink(missing_ok=True)


class Encoder:
    """Encodes and compresses one row group in a thread while the next one is collected."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "parquet")
        self._busy: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Waits for the previous work, and raises its error."""
        self.wait()
        self._busy = self._pool.submit(work)

    def wait(self) -> None:
        busy, self._busy = self._busy, None
        if busy is not None:
            busy.result()

    def stop(self) -> None:
        self._pool.shutdown(wait=True)


class PartFile:
    """A Parquet file that is being written, one row group after the other."""

    def __init__(self, path: Path, schema: pa.Schema, settings: Mapping[str, Any], encoder: Encoder) -> None:
        self.path = path
        self.rows = 0
        self._encoder = encoder
        self._writer = pq.ParquetWriter(str(path), schema, **settings)
        self._descriptor = os.open(path, os.O_RDONLY)
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self.rows += batch.num_rows
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_rows >= GROUP_ROWS or self._waiting_bytes >= GROUP_BYTES:
            self._encoder.begin(partial(self._encode, self._waiting))
            self._waiting = []
            self._waiting_rows = self._waiting_bytes = 0

    def _encode(self, group: list[pa.RecordBatch]) -> None:
        table = pa.Table.from_batches(group)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        if hasattr(os, "posix_fadvise"):
            # Starts writing to disk now, so that the final fsync is short.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> int:
        """Syncs the file, and returns its size."""
        self._encoder.wait()
        if self._waiting:
            self._encode(self._waiting)
        self._writer.close()
        os.fsync(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        os.close(self._descriptor)
        return size

    def drop(self) -> None:
        """Removes the file, in any state."""
        with suppress(OSError, pa.ArrowException):
            self._writer.close()
        with suppress(OSError):
            os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


def write_parts(writer: PartWriter, pieces: Iterable[tuple[Values, pa.RecordBatch]]) -> list[Part]:
    """Writes all pieces, or leaves no file behind."""
    try:
        for values, rows in pieces:
            writer.write(values, rows)
        return writer.finish()
    except BaseException:
        writer.drop()
        raise
