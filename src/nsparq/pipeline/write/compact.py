"""Small Parquet files joined to larger ones, without a reader ever seeing a row twice or not at all.

A directory is changed as a whole: beside it another one is made, with the joined file and links to the files
that stay, and the two exchange their names in one step of the file system (renameat2 with RENAME_EXCHANGE).
Whoever lists the directory sees the files before or those after. Whoever has a file open reads on. Who has
listed before and opens after gets "no such file", and has to list again: an error, never a wrong result.
The replaced directory stays whole for a while, out of sight: a reader may have opened it and not listed it
yet. A later compaction removes it. Where the system cannot exchange directories, nothing is joined.

Only a directory that holds nothing but files is exchanged: what lies deeper would go with it. So the files of
a table without partition columns are not joined, because they lie beside `_nsparq`.

Files are joined with those of about their size, so that a row is written again only as often as its file
grows by the factor `fan_in`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from nsparq.errors import NsparqError
from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.write.commits import Directory, sync_directory
from nsparq.pipeline.write.parts import GROUP_BYTES, GROUP_ROWS, sync

__all__ = ["CannotExchange", "Joined", "compact", "exchange"]

logger = logging.getLogger(__name__)

LARGE: Final = 32 << 20
"""Files of at least so many bytes are left alone: to join them would save little, and cost as much as to
write them did."""
SMALLEST: Final = 64 << 10
"""Files up to this size are all of one class."""

KEEP_REPLACED_S: Final = 60.0
"""How long a replaced directory stays, for readers that are about to list it."""

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class CannotExchange(NsparqError):
    """A directory cannot be exchanged with another in one step."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What was done in one directory."""

    directory: Path
    files: int
    """That many became one."""
    rows: int


def compact(table: Directory, directories: Iterable[Path] | None = None, *, fan_in: int = 2) -> list[Joined]:
    """Join the files of these directories, or of all, where there are at least `fan_in` of about the same
    size. Raises CannotExchange; PipelineError before anything is joined if the table's files are not all
    partitioned by the same columns."""
    done: list[Joined] = []
    with table.lock():
        table.clear_scratch(KEEP_REPLACED_S)
        columns = table.layout()
        chosen = table.partitions() if directories is None else [*directories]
        for directory in chosen:
            if table.columns_of(directory) != columns:
                raise PipelineError(
                    f"{directory} holds files, and is none of the directories of {table.path}: move it away"
                )
        for directory in chosen:
            while group := _group(directory, fan_in):
                if not done:
                    table.settle()
                done.append(_join(table, directory, group))
    return done


def _group(directory: Path, fan_in: int) -> list[Path]:
    """Files to be joined: the smallest class that has enough of them."""
    classes: defaultdict[tuple[int, bytes], list[Path]] = defaultdict(list)
    for path in sorted(directory.glob("*.parquet")):
        size = path.stat().st_size
        if size < LARGE:
            # Rows of another shape stay apart.
            shape = pq.read_schema(path).remove_metadata().serialize().to_pybytes()
            classes[(_class(size, fan_in), shape)].append(path)
    for _, paths in sorted(classes.items(), key=lambda one: one[0][0]):
        if len(paths) >= max(2, fan_in):
            return paths
    return []


def _class(size: int, fan_in: int) -> int:
    return 0 if size <= SMALLEST else 1 + int(math.log(size / SMALLEST, max(2, fan_in)))


def _join(table: Directory, directory: Path, group: list[Path]) -> Joined:
    """The lock is held."""
    if directory == table.path:
        raise CannotExchange(
            f"the files of {directory} lie beside _nsparq, and only a directory below the table's own can be "
            "replaced in one step: a table that is to be compacted needs partition_by"
        )
    for path in directory.iterdir():
        if not path.is_file():
            raise CannotExchange(f"{path} is no file, and would go with the directory that is replaced")
    name = uuid4().hex
    twin = table.scratch(name)
    joined = twin / f"joined-{name}.parquet"
    rows = _concatenate(group, joined)
    leaving = {path.name for path in group}
    for path in directory.iterdir():
        if path.name not in leaving:
            os.link(path, twin / path.name)
    sync_directory(twin)
    exchange(twin, directory)
    sync_directory(directory.parent)
    logger.info("%s: %d files joined, %d rows", directory, len(group), rows)
    return Joined(directory, len(group), rows)


def _concatenate(paths: list[Path], target: Path) -> int:
    """A file with the rows of the others, in their order. How many there are."""
    expected: int = sum(pq.read_metadata(path).num_rows for path in paths)
    schema = pq.read_schema(paths[0]).remove_metadata()
    compression = _compression(paths[0])
    waiting: list[pa.RecordBatch] = []
    waiting_rows = waiting_bytes = 0
    with pq.ParquetWriter(str(target), schema, compression=compression) as writer:

        def flush() -> None:
            if waiting:
                table = pa.Table.from_batches(waiting, schema)
                writer.write_table(table, row_group_size=max(1, table.num_rows))
                waiting.clear()

        for path in paths:
            with pq.ParquetFile(str(path)) as file:
                for batch in file.iter_batches(GROUP_ROWS // 8):
                    waiting.append(batch.replace_schema_metadata(None))
                    waiting_rows += batch.num_rows
                    waiting_bytes += batch.nbytes
                    if waiting_rows >= GROUP_ROWS or waiting_bytes >= GROUP_BYTES:
                        flush()
                        waiting_rows = waiting_bytes = 0
        flush()
    sync(target)
    found = pq.read_metadata(target).num_rows
    if found != expected:
        raise NsparqError(f"{target} has {found} rows, where there should be {expected}; nothing was changed")
    return expected


def _compression(path: Path) -> str:
    metadata = pq.read_metadata(path)
    if not metadata.num_row_groups or not metadata.num_columns:
        return "zstd"
    name = str(metadata.row_group(0).column(0).compression).lower()
    return "none" if name == "uncompressed" else name


def exchange(one: Path, other: Path) -> None:
    """The two directories have each other's name afterwards, in one step. Raises CannotExchange."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise CannotExchange("this system cannot exchange two directories (renameat2)") from None
    arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    if renameat2(*arguments) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise CannotExchange(f"the file system of {other} cannot exchange two directories")
    raise OSError(number, os.strerror(number), str(other))
