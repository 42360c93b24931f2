"""Joins small Parquet files into larger ones. No reader sees a row twice or misses one.

A directory is replaced as a whole. A second directory gets the joined file and links to the other
files, and then the two directories exchange their names in one step (renameat2 with
RENAME_EXCHANGE). A reader that lists the directory sees the old files or the new ones. A reader
with an open file continues. A reader that listed before and opens after gets "no such file" and
must list again: an error, never a wrong result. The replaced directory is kept for a while, hidden,
because a reader may have opened it without listing it yet. A later compaction removes it. If the
system cannot exchange directories, nothing is joined.

Only a directory that contains nothing but files is exchanged, because subdirectories would move
with it. So the files of a table without partition columns are not joined: they are beside
`_nsparq`.

Files are joined with files of about their size, so that a row is rewritten only when its file grows
by the factor `fan_in`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import pyarrow.parquet as pq

from nsparq.errors import NsparqError
from nsparq.pipeline.durable import sync
from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.write.parquet_table import ParquetDirectory
from nsparq.pipeline.write.part_files import GROUP_ROWS, DiskFile, Encoder, PartFile, settings_of, size_class

logger = logging.getLogger(__name__)

LARGE: Final = 32 << 20
"""Larger files are not joined: it would save little, and cost as much as writing them."""
KEEP_REPLACED_S: Final = 60.0
"""How long a replaced directory is kept, for readers that are about to list it."""

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class CannotExchange(NsparqError):
    """Two directories cannot be exchanged in one step."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Files of one directory that were joined into one."""

    directory: Path
    files: int
    rows: int


def compact(
    table: ParquetDirectory, directories: Iterable[Path] | None = None, *, fan_in: int = 2
) -> list[Joined]:
    """Joins files in these directories, or in all, if at least `fan_in` are of about the same size.
    Raises CannotExchange, and PipelineError, before it joins anything, if not all files are
    partitioned by the same columns."""
    done: list[Joined] = []
    with table.lock():
        table.clear_scratch(KEEP_REPLACED_S)
        columns = table.layout()
        chosen = table.partitions() if directories is None else [*directories]
        for directory in chosen:
            if table.columns_of(directory) != columns:
                raise PipelineError(
                    f"{directory} contains files, but does not belong to the table {table.path}: move it away"
                )
        for directory in chosen:
            while group := _group(directory, fan_in):
                if not done:
                    table.settle()
                done.append(_join(table, directory, group))
    return done


def _group(directory: Path, fan_in: int) -> list[Path]:
    """Files to join: those of the smallest size class with enough files."""
    classes: defaultdict[tuple[int, bytes], list[Path]] = defaultdict(list)
    for path in sorted(directory.glob("*.parquet")):
        size = path.stat().st_size
        if size < LARGE:
            # Files with different columns are not joined.
            shape = pq.read_schema(path).remove_metadata().serialize().to_pybytes()
            classes[(size_class(size, fan_in), shape)].append(path)
    for _, paths in sorted(classes.items(), key=lambda one: one[0][0]):
        if len(paths) >= max(2, fan_in):
            return paths
    return []


def _join(table: ParquetDirectory, directory: Path, group: list[Path]) -> Joined:
    """The caller holds the lock."""
    if directory == table.path:
        raise CannotExchange(
            f"the files of {directory} are beside _nsparq, and only a subdirectory of the table can be "
            "replaced in one step: a table needs partition_by to be compacted"
        )
    for path in directory.iterdir():
        if not path.is_file():
            raise CannotExchange(f"{path} is not a file, and would move with the directory that is replaced")
    name = uuid4().hex
    twin = table.scratch(name)
    joined = twin / f"joined-{name}.parquet"
    rows = _concatenate(group, joined)
    leaving = {path.name for path in group}
    for path in directory.iterdir():
        if path.name not in leaving:
            os.link(path, twin / path.name)
    sync(twin)
    exchange(twin, directory)
    sync(directory.parent)
    logger.info("%s: %d files joined, %d rows", directory, len(group), rows)
    return Joined(directory, len(group), rows)


def _concatenate(paths: list[Path], target: Path) -> int:
    """Writes the rows of all files to one file, in order. Returns their number."""
    expected: int = sum(pq.read_metadata(path).num_rows for path in paths)
    first = pq.read_metadata(paths[0])
    encoder = Encoder()
    file = PartFile(
        DiskFile(target), first.schema.to_arrow_schema().remove_metadata(), settings_of(first), encoder
    )
    try:
        for path in paths:
            with pq.ParquetFile(str(path)) as source:
                for batch in source.iter_batches(GROUP_ROWS // 8):
                    file.write(batch.replace_schema_metadata(None))
        file.close()
    except BaseException:
        file.drop()
        raise
    finally:
        encoder.stop()
    found = pq.read_metadata(target).num_rows
    if found != expected:
        raise NsparqError(f"{target} has {found} rows instead of {expected}; nothing was changed")
    return expected


def exchange(one: Path, other: Path) -> None:
    """Exchanges the names of two directories in one step. Raises CannotExchange."""
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
