"""A directory of Parquet files as a table: adds the files of each micro-batch exactly once.

    table/topic=orders/date=2026-11-15/0000000012-3f2a91c0-0000.parquet       batch, query, number
    table/_nsparq/new/QUERY/12/….part                                         files that tasks write
    table/_nsparq/commits/QUERY/12.json                                       the files of batch 12
    table/_nsparq/commits/QUERY/12.done                                       the same, after the renames
    table/_nsparq/table.json                                                  version, partition columns
    table/_nsparq/lock                                                        held during renames

Tasks write below `_nsparq`, where readers do not look. A commit first writes the list of the
batch's files atomically, and then renames them into the table. If a batch runs again after a crash,
the list counts, not the files of the new run. So every file in the table is complete, and every row
is in exactly one file. Only during the renames of one batch a reader may see some of its files and
not yet the others.

All files of a table are equally deep, in directories of the same columns, which are in
`table.json`. Older tables have no `table.json`: their directories show the columns, and the next
commit writes the file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote
from uuid import uuid4

from nsparq.pipeline.durable import sync, write_json
from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.write.part_files import DiskFile, NewFile, Part, Values, directory_of
from nsparq.spark.checkpoint import check_batch

logger = logging.getLogger(__name__)

HIDDEN: Final = "_nsparq"
FORMAT: Final = 1
"""Version of the contents of `_nsparq`. Version 1 added `table.json`; older directories lack it."""


class ParquetDirectory:
    """A table of Parquet files, for the driver and the tasks."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._hidden = self.path / HIDDEN

    def new_files(self, query: str, batch: int) -> Path:
        """The directory in which the tasks of a batch write."""
        return self._hidden / "new" / query / str(batch)

    def creator(self, query: str, batch: int, suffix: str = ".part") -> Callable[[Values], NewFile]:
        """Makes files for the tasks of a batch."""
        directory = self.new_files(query, batch)
        return lambda values: DiskFile(directory / f"{uuid4().hex}{suffix}")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Only one process and thread at a time may change the table."""
        self._hidden.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._hidden / "lock", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def commit(self, query: str, batch: int, parts: Iterable[Part], planned: str = "") -> list[Path]:
        """Adds the files to the table. A second commit of the batch does nothing, even with other
        files. `planned` is the batch's fingerprint; see `nsparq.spark.checkpoint`.

        Returns the directories that have changed. Raises PipelineError, CheckpointBehind.
        """
        record = self._record(query, batch)
        parts = [*parts]
        with self.lock():
            self._write_layout(parts)
            if check_batch(str(self.path), batch, planned, *self._last(query)):
                logger.info("%s: this batch was committed before; keeping those files", record)
                moves = _recorded(record) or []
            else:
                moves = self._moves(query, batch, parts)
                if not moves:
                    return []
                # Once there is a record, the batch can only be completed.
                self._make_directories(moves)
                write_json(record, {"moves": moves, "planned": planned})
            changed = self._move(moves)
            if record.exists():
                os.rename(record, _done(record))
            self._remove_old(query, batch)
        return changed

    def layout(self) -> tuple[str, ...] | None:
        """The partition columns of the table. None if it has no files yet. Raises PipelineError if
        the files differ, or if a newer version wrote the table."""
        found = self._recorded_layout()
        for directory in self.partitions() if found is None else ():
            columns = self.columns_of(directory)
            if found is not None and found != columns:
                raise PipelineError(
                    f"{self.path} has files partitioned by {_shown(found)} and files partitioned by "
                    f"{_shown(columns)} ({directory.relative_to(self.path)}): move one kind to another "
                    "directory"
                )
            found = columns
        return found

    def check_layout(self, columns: Iterable[str]) -> None:
        """Raises PipelineError if the table is partitioned by other columns."""
        found, wanted = self.layout(), tuple(columns)
        if found is not None and found != wanted:
            raise PipelineError(
                f"the table {self.path} is partitioned by {_shown(found)}, and partition_by is "
                f"{_shown(wanted)}: the columns of a table cannot change. Restore partition_by, or write to "
                "another directory"
            )

    def columns_of(self, directory: Path) -> tuple[str, ...]:
        """The partition columns in the path of a directory."""
        return tuple(unquote(one.partition("=")[0]) for one in directory.relative_to(self.path).parts)

    def _recorded_layout(self) -> tuple[str, ...] | None:
        path = self._hidden / "table.json"
        try:
            found = json.loads(path.read_text())
            if found["format"] > FORMAT:
                raise PipelineError(
                    f"{path} has format {found['format']}, and this version of nsparq reads formats up to "
                    f"{FORMAT}. A newer nsparq wrote it: use that version"
                )
            return tuple(found["partition_by"])
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError) as error:
            raise PipelineError(f"{path} cannot be read: {error!r}") from error

    def _write_layout(self, parts: Iterable[Part]) -> None:
        for columns in {tuple(name for name, _ in part.values) for part in parts}:
            self.check_layout(columns)
            if self._recorded_layout() is None:
                write_json(self._hidden / "table.json", {"format": FORMAT, "partition_by": columns})

    def _last(self, query: str) -> tuple[int, str]:
        """Number of the query's last batch, or -1, and its fingerprint, which old batches lack."""
        records = [
            path for path in (self._hidden / "commits" / query).glob("*") if path.suffix in (".json", ".done")
        ]
        if not records:
            return -1, ""
        last = max(records, key=lambda path: int(path.stem))
        return int(last.stem), str(json.loads(last.read_text()).get("planned", ""))

    def _record(self, query: str, batch: int) -> Path:
        return self._hidden / "commits" / query / f"{batch}.json"

    def _moves(self, query: str, batch: int, parts: list[Part]) -> list[tuple[str, str]]:
        missing = [part.path for part in parts if not os.path.exists(part.path)]
        if missing:
            raise PipelineError(
                f"{missing[0]} was written by a task, but the driver does not see it: {self.path} must be on "
                "a file system that driver and executors share, and only one driver may write to it"
            )
        names = [f"{batch:010d}-{query[:8]}-{number:04d}.parquet" for number in range(len(parts))]
        return [
            (part.path, os.path.join(directory_of(part.values), name))
            for part, name in zip(parts, names, strict=True)
        ]

    def _make_directories(self, moves: list[tuple[str, str]]) -> None:
        for _, new in moves:
            try:
                (self.path / new).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                raise PipelineError(
                    f"{self.path} cannot have the partition {os.path.dirname(new)[:100]!r}…: the name is "
                    "longer than the file system allows. Shorten the values of partition_by in SQL"
                ) from None

    def _move(self, moves: list[tuple[str, str]]) -> list[Path]:
        changed: dict[Path, None] = {}
        for old, new in moves:
            target = self.path / new
            target.parent.mkdir(parents=True, exist_ok=True)
            changed[target.parent] = None
            try:
                os.rename(old, target)
            except FileNotFoundError:
                if not target.exists():
                    raise PipelineError(f"{old} is missing; it should become {target}") from None
        for directory in changed:
            sync(directory)
        return [*changed]

    def _remove_old(self, query: str, batch: int) -> None:
        """Removes records and files of older batches. Spark repeats only the last batch."""
        for record in (self._hidden / "commits" / query).glob("*"):
            if int(record.stem) < batch:
                record.unlink()
        for directory in (self._hidden / "new" / query).glob("*"):
            if int(directory.name) <= batch:
                shutil.rmtree(directory, ignore_errors=True)

    def abort(self, query: str, batch: int, parts: Iterable[Part]) -> None:
        """Removes the files, unless a commit has listed them already."""
        with self.lock():
            if _recorded(self._record(query, batch)) is not None:
                return
            for part in parts:
                Path(part.path).unlink(missing_ok=True)

    def clear_new_files(self, query: str) -> None:
        """Removes unused files of a query that is not running. A batch whose commit was interrupted
        keeps its files, because it will run again."""
        with self.lock():
            for directory in (self._hidden / "new" / query).glob("*"):
                if not _recorded(self._record(query, int(directory.name))):
                    # A task of the old run may still be writing.
                    shutil.rmtree(directory, ignore_errors=True)

    def settle(self) -> None:
        """Syncs the commit records. Must be called before files are joined, so that after a power
        cut no commit looks for files that are gone."""
        for directory in (self._hidden / "commits").glob("*"):
            sync(directory)

    def scratch(self, name: str) -> Path:
        """A new directory on the same file system that readers do not see."""
        path = self._hidden / "scratch" / name
        path.mkdir(parents=True)
        return path

    def clear_scratch(self, older_than_s: float) -> None:
        """Removes scratch directories older than this. The caller holds the lock."""
        limit = time.time() - older_than_s
        for path in (self._hidden / "scratch").glob("*"):
            if path.stat().st_ctime < limit:
                shutil.rmtree(path, ignore_errors=True)

    def partitions(self) -> list[Path]:
        """All directories with files. Like Spark, skips names that begin with a dot or, unless they
        are of a partition such as `_topic=orders`, with _."""
        found = []
        for directory, below, files in os.walk(self.path):
            below[:] = [name for name in below if name[0] != "." and (name[0] != "_" or "=" in name)]
            if any(name.endswith(".parquet") for name in files):
                found.append(Path(directory))
        return sorted(found)


def _shown(columns: tuple[str, ...]) -> str:
    return str([*columns]) if columns else "nothing"


def _done(record: Path) -> Path:
    return record.with_suffix(".done")


def _recorded(record: Path) -> list[tuple[str, str]] | None:
    """The renames of a commit: empty if they are done, None if there is no record."""
    if _done(record).exists():
        return []
    try:
        found = json.loads(record.read_text())
    except FileNotFoundError:
        return None
    return [(old, new) for old, new in found["moves"]]
