"""Files of a micro-batch into a directory of Parquet, exactly once, whoever dies in between.

    table/topic=orders/date=2026-11-15/0000000012-3f2a91c0-0000.parquet       batch, query, number
    table/_nsparq/new/QUERY/12/….part                                         what tasks write
    table/_nsparq/commits/QUERY/12.json                                       what batch 12 consists of
    table/_nsparq/commits/QUERY/12.done                                       the same, once it is in place
    table/_nsparq/table.json                                                  version, partition columns
    table/_nsparq/lock                                                        held while names change

Tasks write below `_nsparq`, where no reader looks. The commit first writes down which files the batch
consists of, atomically, and then gives them their names in the table. When a batch is run again after a
crash, what was written down counts, and not what the new run has made. So every file in the table is whole,
and every row is in one of them; only while the names of one batch change may a reader see some of its files
and not yet the others.

All files of a table lie equally deep, in directories of the same columns: `table.json` says which. A table of
before has no `table.json`. Its directories show the columns, and the next commit writes them down.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.write.parts import Part, directory_of
from nsparq.spark.checkpoint import check_batch

__all__ = ["HIDDEN", "Directory", "sync_directory"]

logger = logging.getLogger(__name__)

HIDDEN: Final = "_nsparq"
FORMAT: Final = 1
"""Version of what `_nsparq` holds. Version 1 added `table.json`; a directory without it is of before."""


class Directory:
    """A table of Parquet files, as the driver and the tasks know it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._hidden = self.path / HIDDEN

    def new_files(self, query: str, batch: int) -> Path:
        """Where the tasks of a batch write."""
        return self._hidden / "new" / query / str(batch)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One at a time changes what is in the table, over all processes."""
        self._hidden.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._hidden / "lock", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def commit(self, query: str, batch: int, parts: Iterable[Part], planned: str = "") -> list[Path]:
        """Make the files part of the table. Doing it again does nothing, whatever the files are then.
        `planned` is the batch's fingerprint; see `nsparq.spark.checkpoint`.

        Returns the directories in which something has changed. Raises PipelineError, CheckpointBehind.
        """
        record = self._record(query, batch)
        parts = [*parts]
        with self.lock():
            self._write_layout(parts)
            if check_batch(str(self.path), batch, planned, *self._last(query)):
                logger.info("%s: the batch has been written before; what was written then stays", record)
                moves = _recorded(record) or []
            else:
                moves = self._moves(query, batch, parts)
                if not moves:
                    return []
                _write(record, {"moves": moves, "planned": planned})
            changed = self._move(moves)
            if record.exists():
                os.rename(record, _done(record))
            self._forget(query, batch)
        return changed

    def layout(self) -> tuple[str, ...] | None:
        """The partition columns of the table's files; None if there are no files yet. Raises PipelineError
        if the files disagree, or a later version has written the table."""
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
        """Raises PipelineError if the table's files are partitioned by other columns than these."""
        found, wanted = self.layout(), tuple(columns)
        if found is not None and found != wanted:
            raise PipelineError(
                f"the table {self.path} is partitioned by {_shown(found)}, and the pipeline by "
                f"{_shown(wanted)}: a table keeps its columns. Set partition_by to what it was, or write to "
                "another directory"
            )

    def columns_of(self, directory: Path) -> tuple[str, ...]:
        """The partition columns that the names of a directory and of those above it show."""
        return tuple(unquote(one.partition("=")[0]) for one in directory.relative_to(self.path).parts)

    def _recorded_layout(self) -> tuple[str, ...] | None:
        path = self._hidden / "table.json"
        try:
            found = json.loads(path.read_text())
            if found["format"] > FORMAT:
                raise PipelineError(
                    f"{path} has format version {found['format']}, and this nsparq knows {FORMAT}: a later "
                    "nsparq has written it"
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
                _write(self._hidden / "table.json", {"format": FORMAT, "partition_by": columns})

    def _last(self, query: str) -> tuple[int, str]:
        """The number of the query's last batch, -1 if there is none, and its fingerprint, empty if it was
        written before there were any."""
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
                f"{missing[0]} was written by a task and is not here: {self.path} must be on a file "
                "system that driver and executors share, and one driver at a time writes to it"
            )
        names = [f"{batch:010d}-{query[:8]}-{number:04d}.parquet" for number in range(len(parts))]
        return [
            (part.path, os.path.join(directory_of(part.values), name))
            for part, name in zip(parts, names, strict=True)
        ]

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
                    raise PipelineError(f"{old}, which belongs to {target}, is gone") from None
        for directory in changed:
            sync_directory(directory)
        return [*changed]

    def _forget(self, query: str, batch: int) -> None:
        """What can no longer be of use: Spark repeats no batch but the last."""
        for record in (self._hidden / "commits" / query).glob("*"):
            if int(record.stem) < batch:
                record.unlink()
        for directory in (self._hidden / "new" / query).glob("*"):
            if int(directory.name) <= batch:
                shutil.rmtree(directory, ignore_errors=True)

    def abort(self, query: str, batch: int, parts: Iterable[Part]) -> None:
        """Drop the files, unless it has been decided that they belong to the table."""
        with self.lock():
            if _recorded(self._record(query, batch)) is not None:
                return
            for part in parts:
                Path(part.path).unlink(missing_ok=True)

    def clear_new_files(self, query: str) -> None:
        """What tasks of a query that does not run have written for nothing. A batch that was being committed
        keeps its files: it will be run again."""
        with self.lock():
            for directory in (self._hidden / "new" / query).glob("*"):
                if not _recorded(self._record(query, int(directory.name))):
                    # A task that does not know yet that it is over may still write.
                    shutil.rmtree(directory, ignore_errors=True)

    def settle(self) -> None:
        """Before files of the table change: batches that are in place are so for good, also after a power
        cut, and their files are not looked for any more."""
        for directory in (self._hidden / "commits").glob("*"):
            sync_directory(directory)

    def scratch(self, name: str) -> Path:
        """A directory of the same file system that readers do not see."""
        path = self._hidden / "scratch" / name
        path.mkdir(parents=True)
        return path

    def clear_scratch(self, older_than_s: float) -> None:
        """Remove scratch directories that nobody has touched for so long; the lock is held."""
        limit = time.time() - older_than_s
        for path in (self._hidden / "scratch").glob("*"):
            if path.stat().st_ctime < limit:
                shutil.rmtree(path, ignore_errors=True)

    def partitions(self) -> list[Path]:
        """All directories that hold files. Readers, and we, pass over names that begin with _ or a dot."""
        found = []
        for directory, below, files in os.walk(self.path):
            below[:] = [name for name in below if not name.startswith(("_", "."))]
            if any(name.endswith(".parquet") for name in files):
                found.append(Path(directory))
        return sorted(found)


def _shown(columns: tuple[str, ...]) -> str:
    return str([*columns]) if columns else "nothing"


def _done(record: Path) -> Path:
    return record.with_suffix(".done")


def _recorded(record: Path) -> list[tuple[str, str]] | None:
    """What has to be moved, which is nothing if it is in place; None if nothing was written down."""
    if _done(record).exists():
        return []
    try:
        found = json.loads(record.read_text())
    except FileNotFoundError:
        return None
    return [(old, new) for old, new in found["moves"]]


def _write(path: Path, content: object) -> None:
    """All of it, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = path.with_suffix(".tmp")
    with waiting.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(waiting, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Names are on the disk afterwards."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
