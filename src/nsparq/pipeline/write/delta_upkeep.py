"""Upkeep of a Delta table: joins small files, and removes old versions and unused files.

Both are commits of the table, or remove what no version needs. So readers, the pipeline and a
second upkeep may work at the same time: of two that join the same file one is refused, and its new
file is unused.

A row is rewritten when its file is joined: with files of about the same size, as in `compact`, or
as soon as all small files of a partition have LARGE bytes together. The result of the latter is no
longer small. So at a high rate each row is rewritten once.

A running pipeline has a process for it (`Upkeep`): deltalake may hold Python's lock while it waits
for a store, and the driver must not wait. The process ends with its standard input.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from nsparq.errors import NsparqError
from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.file.sinks import Delta
from nsparq.pipeline.file.spec import PipelineFile
from nsparq.pipeline.write.delta import added, creator, retention_properties, storage_of, values_in
from nsparq.pipeline.write.part_files import (
    GROUP_ROWS,
    Encoder,
    Part,
    PartFile,
    Values,
    settings_of,
    size_class,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

logger = logging.getLogger(__name__)

LARGE: Final = 128 << 20
"""Larger files are not joined."""
EVERY_S: Final = 10.0
"""Pause between two looks at a table."""
ATTEMPTS: Final = 20
"""To commit, while others do."""
EXPIRE_EVERY_S: Final = 3600.0
STOP_S: Final = 5.0
"""How long the process may take to end. Killing it does no harm."""
NICE: Final = 5
_HARMLESS: Final = {"timestampNtz"}
"""Features of tables that do not change how a file is read."""


class Stopped(NsparqError):
    """The upkeep was told to end."""


@dataclass(frozen=True, slots=True)
class Tended:
    """A table, and what to do with it."""

    uri: str
    storage: Mapping[str, str] = field(default_factory=dict)
    fan_in: int = 0
    """Join this many files of about the same size. 0: none. 1: all small ones."""
    retention: float = 0.0
    """Seconds to keep old versions. 0: for ever."""

    def open(self) -> DeltaTable | None:
        from deltalake import DeltaTable

        storage = dict(self.storage) or None
        if not DeltaTable.is_deltatable(self.uri, storage):
            return None
        return DeltaTable(self.uri, storage_options=storage)


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    values: Values
    size: int
    modified: int


# joining files


def compact(tended: Tended, is_over: Callable[[], bool] = lambda: False) -> Iterator[tuple[int, Part]]:
    """Joins files until there is nothing to join. Each time, yields how many became which one.
    Raises PipelineError, Stopped."""
    table = tended.open()
    if table is None:
        return
    features = {*(table.protocol().reader_features or ())} - _HARMLESS
    if table.protocol().min_reader_version == 2 or features:
        shown = ", ".join(sorted(features)) or "column mapping"
        raise PipelineError(f"{tended.uri} uses {shown}: only its own writer can join its files")
    while group := _group(_files(table), tended.fan_in):
        joined = _join(table, tended, group, is_over)
        if joined is None:
            return
        yield len(group), joined
        table.update_incremental()


def _files(table: DeltaTable) -> Iterator[_File]:
    import pyarrow as pa

    columns = table.metadata().partition_columns
    found = pa.table(table.get_add_actions()).select(["path", "size_bytes", "modification_time"])
    for row in found.to_pylist():
        # The log escapes paths like a URL.
        path = unquote(row["path"])
        values = values_in(path)
        if [name for name, _ in values] == columns:
            # Other writers may use other paths. Those files stay as they are.
            yield _File(path, values, row["size_bytes"], row["modification_time"])


def _group(files: Iterable[_File], fan_in: int) -> list[_File]:
    """Files of one partition to join: the oldest if all small ones have LARGE bytes, otherwise
    those of the smallest size class with enough files."""
    partitions: defaultdict[Values, list[_File]] = defaultdict(list)
    for one in sorted(files, key=lambda one: (one.modified, one.path)):
        if one.size < LARGE:
            partitions[one.values].append(one)
    for small in partitions.values():
        if len(small) > 1 and (fan_in == 1 or sum(one.size for one in small) >= LARGE):
            return _until_large(small)
        classes: defaultdict[int, list[_File]] = defaultdict(list)
        for one in small:
            classes[size_class(one.size, fan_in)].append(one)
        for _, same in sorted(classes.items()):
            if len(same) >= max(2, fan_in):
                return _until_large(same)
    return []


def _until_large(files: Sequence[_File]) -> list[_File]:
    total = 0
    for number, one in enumerate(files, 1):
        total += one.size
        if total >= LARGE and number > 1:
            return [*files[:number]]
    return [*files]


def _join(table: DeltaTable, tended: Tended, group: list[_File], is_over: Callable[[], bool]) -> Part | None:
    """None if somebody else has removed one of the files."""
    part, file = _concatenate(tended, group, is_over)
    try:
        if _replace(table, group, part):
            return part
    except BaseException:
        # The commit may have succeeded despite its error, so the file stays.
        logger.warning("%s: it is not known whether %s is part of the table", tended.uri, part.path)
        raise
    file.drop()
    return None


def _replace(table: DeltaTable, group: list[_File], part: Part) -> bool:
    """Replaces the files in one commit. False if one of them is no longer in the table.

    deltalake lets a commit that appends follow any other, even one that has removed the same files.
    So it may not look for the next free version itself: the commit is the one after the version in
    which the files were seen, or it fails.
    """
    from deltalake import CommitProperties
    from deltalake.exceptions import CommitFailedError
    from deltalake.transaction import AddAction, RemoveAction

    now = int(time.time() * 1000)
    removed = [RemoveAction(one.path, False, now, one.size, dict(one.values)) for one in group]
    actions: list[AddAction | RemoveAction] = [added(part, data_change=False), *removed]
    leaving = {one.path for one in group}
    for attempt in range(ATTEMPTS + 1):
        table.update_incremental()
        present = {one.path for one in _files(table)}
        if part.path in present:
            # The store had taken a commit, and its answer was lost.
            return True
        if leaving - present or attempt == ATTEMPTS:
            logger.info("another writer has changed the files that were to be joined")
            return False
        try:
            table.create_write_transaction(
                actions,
                "append",
                table.schema(),
                partition_by=table.metadata().partition_columns,
                commit_properties=CommitProperties(max_commit_retries=0),
            )
            return True
        except CommitFailedError as error:
            logger.debug("the next version is taken: %s", error)
    raise AssertionError("the last attempt returns")


def _concatenate(tended: Tended, group: list[_File], is_over: Callable[[], bool]) -> tuple[Part, PartFile]:
    """Writes the rows of all files to a new one, in order. A column that a file lacks is null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files, values = storage_of(tended.uri, tended.storage), group[0].values
    footers: list[pq.FileMetaData] = []
    for one in group:
        with files.open_input_file(one.path) as opened:
            footers.append(pq.read_metadata(opened))
    shapes = [one.schema.to_arrow_schema().remove_metadata() for one in footers]
    try:
        schema = pa.unify_schemas(shapes)
    except pa.ArrowException as error:
        raise PipelineError(f"the files of {tended.uri} have different types: {error}") from error
    encoder = Encoder()
    file = PartFile(creator(tended.uri, tended.storage)(values), schema, settings_of(footers[-1]), encoder)
    try:
        for one in group:
            with files.open_input_file(one.path) as opened, pq.ParquetFile(opened, pre_buffer=True) as source:
                # Threads would take more processor time than they save, beside a busy pipeline.
                for batch in source.iter_batches(GROUP_ROWS // 8, use_threads=False):
                    if is_over():
                        raise Stopped("the upkeep was stopped")
                    file.write(_with_all_columns(batch, schema))
        size, expected = file.close(), sum(one.num_rows for one in footers)
        if file.rows != expected:
            raise PipelineError(
                f"{file.path} has {file.rows} rows instead of {expected}; nothing was changed"
            )
    except BaseException:
        file.drop()
        raise
    finally:
        encoder.stop()
    return Part(file.path, values, file.rows, size, file.stats), file


def _with_all_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    names = {*batch.schema.names}
    columns = [
        batch.column(one.name) if one.name in names else pa.nulls(batch.num_rows, one.type) for one in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# old versions


def expire(tended: Tended) -> int:
    """Removes versions that are older than the table's retention, and files that no version needs.
    Returns the number of files."""
    table = tended.open()
    if table is None:
        return 0
    wanted = retention_properties(tended.retention)
    if wanted.items() - table.metadata().configuration.items():
        table.alter.set_table_properties(wanted)
    # Not only files that were removed from the table, also those of failed tasks.
    removed = table.vacuum(dry_run=False, full=True)
    table.create_checkpoint()
    table.cleanup_metadata()
    return len(removed)


# the process


class Upkeep:
    """The process that tends the tables of a pipeline file while it runs."""

    def __init__(self, file: PipelineFile) -> None:
        sinks = [output.sink for one in file.pipelines for output in one.outputs]
        self._tables = [
            Tended(one.path, one.storage_options, one.compact and max(2, one.compact), one.retention)
            for one in sinks
            if isinstance(one, Delta) and (one.compact or one.retention)
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._next_start = 0.0

    def look(self, now: float) -> None:
        """Starts the process, also again if it has died."""
        if not self._next_start:
            self._next_start = now + EVERY_S
        if not self._tables or now < self._next_start:
            return
        if self._process is None or self._process.poll() is not None:
            if self._process is not None:
                logger.warning("the upkeep of tables ended with status %s", self._process.returncode)
            self._next_start = now + 60.0
            self._process = self._start(once=False)

    def finish(self, is_over: Callable[[], bool]) -> None:
        """Does what is due now, until it is done or `is_over`."""
        self.stop()
        if not self._tables or is_over():
            return
        self._process = self._start(once=True)
        while self._process.poll() is None and not is_over():
            time.sleep(0.1)
        self.stop()

    def stop(self) -> None:
        """Twice is safe."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self, *, once: bool) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # A signal for the terminal's foreground must not end it in the middle of a commit.
        process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert process.stdin is not None
        given = {"once": once, "tables": [asdict(one) for one in self._tables]}
        process.stdin.write(json.dumps(given).encode() + b"\n")
        process.stdin.flush()
        return process


def main() -> None:
    from nsparq import logs

    logs.configure("warn" if sys.stderr.isatty() else "info", "[upkeep] ")
    os.nice(NICE)
    given = json.loads(sys.stdin.buffer.readline())
    tables = [Tended(**one) for one in given["tables"]]
    next_expiry = 0.0
    while True:
        is_due = time.monotonic() >= next_expiry
        if is_due:
            next_expiry = time.monotonic() + EXPIRE_EVERY_S
        for one in tables:
            try:
                _tend(one, is_due)
            except Stopped:
                return
            except Exception as error:  # deltalake's errors have no class in common
                logger.warning("%s: %s", one.uri, error)
        if given["once"] or _is_over(EVERY_S):
            return


def _tend(tended: Tended, is_due: bool) -> None:
    if tended.fan_in:
        for files, part in compact(tended, _is_over):
            logger.info("%s: %d files became one with %d rows", tended.uri, files, part.rows)
            if _is_over():
                raise Stopped("the upkeep was stopped")
    if tended.retention and is_due and (removed := expire(tended)):
        logger.info("%s: %d unused files were removed", tended.uri, removed)


def _is_over(seconds: float = 0.0) -> bool:
    """Whether standard input has ended."""
    readable: list[Any]
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable)


if __name__ == "__main__":
    main()
