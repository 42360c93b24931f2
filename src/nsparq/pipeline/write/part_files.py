"""Writes rows into Parquet files, one for each combination of partition values. Runs in the tasks.

Each file is a *part* until the driver commits it. Row groups have a fixed size, whatever the size
of the batches that arrive.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GROUP_ROWS: Final = 131_072
GROUP_BYTES: Final = 32 << 20
"""A row group is written when it has this many rows or, before compression, this many bytes."""
MAX_OPEN: Final = 64
"""Files that one task has open. Beyond it, the least recently used file is closed."""
SMALLEST: Final = 64 << 10
"""All files up to this size are in one size class."""
MAX_TEXT: Final = 64
"""Statistics leave out longer texts."""
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
    stats: str = ""
    """Statistics as a Delta table has them: `numRecords`, and the ranges of some columns."""


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
        values = tuple((name, text_of(batch.column(name)[int(row)])) for name in columns)
        if len(found) == 1:
            yield values, kept
        else:
            yield values, kept.take(pa.array(np.flatnonzero(place == number)))


def text_of(value: Any) -> str | None:
    """A partition value; None for null."""
    if not value.is_valid:
        return None
    try:
        text = str(value.as_py())
    except (OverflowError, ValueError):
        return _far_text(value)
    return text.lower() if pa.types.is_boolean(value.type) else text


def _far_text(value: Any) -> str:
    """A date or a time in a year that Python does not know, in the form that Spark writes."""
    of_date = pa.types.is_date32(value.type)
    shown = str(np.datetime_as_string(np.datetime64(value.value, "D" if of_date else value.type.unit)))
    day, _, time = shown.partition("T")
    year, rest = int(day[:-6]), day[-6:]
    sign = "-" if year < 0 else "+" if year > 9999 else ""
    zone = "+00:00" if time and value.type.tz else ""
    return f"{sign}{abs(year):04d}{rest}" + (f" {time}{zone}" if time else "")


class NewFile(Protocol):
    """A file that is being written: on a disk, or an object of a store."""

    path: str
    """As the table names it."""
    target: Any
    """What ParquetWriter takes."""

    def written(self) -> None:
        """Called after each row group."""

    def close(self) -> int:
        """Called after the last byte. The file survives a power cut then. Returns its size."""

    def remove(self) -> None:
        """Removes the file, in any state."""


class DiskFile:
    """A file of a local or mounted file system. Its directory is created."""

    def __init__(self, path: Path, name: str = "") -> None:
        """`name` is the path as the table names it, if that is another."""
        self.path, self.target = name or str(path), str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o666)

    def written(self) -> None:
        if hasattr(os, "posix_fadvise"):
            # Starts writing to disk now, so that the final fsync is short.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> int:
        os.fsync(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        os.close(self._descriptor)
        return size

    def remove(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)
        Path(self.target).unlink(missing_ok=True)


class PartWriter:
    """Writes the rows of one task into files that `create` makes, one for each combination of
    partition values."""

    def __init__(
        self,
        create: Callable[[Values], NewFile],
        compression: str,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings` are more arguments for ParquetWriter."""
        self._create = create
        self._settings = {"compression": compression, **(settings or {})}
        self._encoder = Encoder()
        self._open: dict[Values, PartFile] = {}
        self._closed: list[PartFile] = []
        self._parts: list[Part] = []

    def write(self, values: Values, rows: pa.RecordBatch) -> None:
        """Writes rows with these partition values and without the partition columns."""
        file = self._open.pop(values, None)
        if file is None:
            if len(self._open) >= MAX_OPEN:
                self._close(next(iter(self._open)))
            file = PartFile(self._create(values), rows.schema, self._settings, self._encoder)
        self._open[values] = file
        file.write(rows)

    def _close(self, values: Values) -> None:
        file = self._open[values]
        size = file.close()
        del self._open[values]
        self._closed.append(file)
        self._parts.append(Part(file.path, values, file.rows, size, file.stats))

    def finish(self) -> list[Part]:
        """Closes and syncs all files, and returns them."""
        for values in list(self._open):
            self._close(values)
        self._encoder.stop()
        return self._parts

    def drop(self) -> None:
        """Removes all files after a failure."""
        self._encoder.stop()
        for file in (*self._open.values(), *self._closed):
            file.drop()


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

    def __init__(
        self, file: NewFile, schema: pa.Schema, settings: Mapping[str, Any], encoder: Encoder
    ) -> None:
        self.path = file.path
        self.rows = 0
        self.stats = ""
        """Known after close()."""
        self._file, self._encoder = file, encoder
        self._metadata: list[pq.FileMetaData] = []
        self._writer = pq.ParquetWriter(file.target, schema, metadata_collector=self._metadata, **settings)
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
        self._file.written()

    def close(self) -> int:
        """Syncs the file, and returns its size."""
        self._encoder.wait()
        if self._waiting:
            self._encode(self._waiting)
        self._writer.close()
        self.stats = statistics_of(self._metadata[0])
        return self._file.close()

    def drop(self) -> None:
        """Removes the file, in any state."""
        with suppress(OSError, pa.ArrowException):
            self._writer.close()
        self._file.remove()


def size_class(size: int, fan_in: int) -> int:
    """Files of one class are joined, so that a row is rewritten only when its file grows by
    `fan_in`."""
    return 0 if size <= SMALLEST else 1 + int(math.log(size / SMALLEST, max(2, fan_in)))


def settings_of(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Arguments for ParquetWriter, to write a file in the way that this one is written."""
    if not metadata.num_row_groups or not metadata.num_columns:
        return {"compression": "zstd"}
    group = metadata.row_group(0)
    columns = {one.path_in_schema: one for one in map(group.column, range(group.num_columns))}
    dictionary = [name for name, one in columns.items() if "RLE_DICTIONARY" in one.encodings]
    packed = "DELTA_BINARY_PACKED"
    compression = str(group.column(0).compression).lower()
    return {
        "compression": "none" if compression == "uncompressed" else compression,
        "use_dictionary": dictionary,
        "column_encoding": {name: packed for name, one in columns.items() if packed in one.encodings},
        "write_statistics": [name for name, one in columns.items() if one.is_stats_set],
    }


def statistics_of(metadata: pq.FileMetaData) -> str:
    """The number of rows, and the ranges of numbers, times and short texts, as a Delta table has
    them."""
    found: dict[str, list[Any]] = {}
    unknown: set[str] = set()
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            name, values = column.path_in_schema, column.statistics
            if values is None or not values.has_min_max or "." in name:
                unknown.add(name)
                continue
            try:
                ends = values.min, values.max
            except (OverflowError, ValueError):
                # A date or a time in a year that Python does not know.
                unknown.add(name)
                continue
            found.setdefault(name, []).append(ends)
    lowest, highest = {}, {}
    for name, ranges in found.items():
        low, high = min(one for one, _ in ranges), max(one for _, one in ranges)
        if name not in unknown and (shown := _shown(low)) is not None and _shown(high) is not None:
            lowest[name], highest[name] = shown, _shown(high)
    stats: dict[str, Any] = {"numRecords": metadata.num_rows}
    if lowest:
        stats |= {"minValues": lowest, "maxValues": highest}
    return json.dumps(stats)


def _shown(value: Any) -> Any:
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return text if value.tzinfo is None else f"{text}Z"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else None
    return value if isinstance(value, int) else None


def write_parts(writer: PartWriter, pieces: Iterable[tuple[Values, pa.RecordBatch]]) -> list[Part]:
    """Writes all pieces, or leaves no file behind."""
    try:
        for values, rows in pieces:
            writer.write(values, rows)
        return writer.finish()
    except BaseException:
        writer.drop()
        raise
