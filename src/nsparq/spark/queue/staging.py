"""Stores the messages of a micro-batch on disk before queue mode finishes them, until the sink has
them.

    <staging>/
        owner.json                the query; its identity is in every offset of the checkpoint
        lock                      held by the running query
        batch-7/                  one micro-batch: made by the driver, removed when the sink has it
            3-000000.arrow        chunk 0 of slot 3, which one task reads; the last chunk is marked
            3-000000.fin          nsqd has accepted every FIN of that chunk
        done-6                    the last batch that was removed
        pending/6-3-000000.arrow  keys of messages of a removed batch whose FIN may not have arrived

A chunk appears whole and synced, or not at all, and only one writer can get its name: link(2) is
atomic and exclusive. So of several attempts at a task, on any machine, one wins each chunk; the
others notice that before they finish a message. A batch is removed by renaming its directory: a
late attempt then cannot write a chunk, and finishes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from nsparq.errors import NsparqError
from nsparq.spark.header_columns import MAPS

__all__ = ["CHUNK_SCHEMA", "NO_ROWS", "Chunk", "Lost", "Slot", "Staging", "StagingError", "TooLate"]

logger = logging.getLogger(__name__)

CHUNK_SCHEMA: Final = pa.schema(
    [
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
        pa.field("headers", MAPS),
    ]
)
"""Topic and node, the same for all rows of a chunk, are in the file's metadata. A chunk of an
earlier version has no column `headers`."""
NO_ROWS: Final = pa.RecordBatch.from_pylist([], schema=CHUNK_SCHEMA)

FORMAT: Final = 1
KEEP_PENDING_S: Final = 7 * 86400.0
"""How long to keep the keys of messages whose FIN may not have arrived. nsqd delivers them again at
the latest when it has worked off the backlog before them."""
MAX_PENDING: Final = 200
"""Limit on files with such keys. There are that many only if nsqd never answers."""
LOCK_S: Final = 30.0
"""How long a query waits for its predecessor, whose process may outlive the driver a little."""

_BATCH = re.compile(r"batch-(\d+)")
_DONE = re.compile(r"done-(\d+)")
_CHUNK = re.compile(r"(\d+)-(\d{6})\.arrow")
_ID_SIZE = 16


class StagingError(NsparqError):
    """The directory cannot be used, or not by this query."""


class Lost(NsparqError):
    """The batch's directory is gone: another attempt has completed the batch."""


class TooLate(NsparqError):
    """Writing took so long that nsqd may have requeued the messages."""


class Chunk(NamedTuple):
    rows: pa.RecordBatch
    """With CHUNK_SCHEMA."""
    topic: str
    node: str
    is_last: bool


def keys_of(rows: pa.RecordBatch) -> list[bytes]:
    """Keys that identify messages of a node's topic: id and time, which a new delivery does not
    change. Ids alone are not enough: an nsqd with a new disk may use them again."""
    count = len(rows)
    if not count:
        return []
    key = np.empty((count, 8 + _ID_SIZE), np.uint8)
    times = rows.column("timestamp").cast(pa.int64()).to_numpy(zero_copy_only=False)
    key[:, :8] = np.ascontiguousarray(times).view(np.uint8).reshape(count, 8)
    ids = rows.column("id").cast(pa.binary()).cast(pa.binary(_ID_SIZE))
    start = ids.offset * _ID_SIZE
    data = np.frombuffer(ids.buffers()[1], np.uint8)[start : start + count * _ID_SIZE]
    key[:, 8:] = data.reshape(count, _ID_SIZE)
    found: list[bytes] = key.view(f"V{8 + _ID_SIZE}").ravel().tolist()
    return found


class Staging:
    """The directory of one query. The driver opens it; tasks only use their slots."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.identity = ""
        self._lock: int | None = None

    # the driver

    def open(self, about: dict[str, Any], *, wait: float = LOCK_S) -> None:
        """Lock the directory. `about` describes the query in owner.json. Raises StagingError."""
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "pending").mkdir(exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._error(f"cannot be used: {error.strerror}") from error
        try:
            self._acquire(lock, wait)
            self.identity = self._identity(about)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        _sync_directory(self.path.parent)
        self._remove_leftovers()

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _acquire(self, lock: int, wait: float) -> None:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    logger.warning("%s cannot be locked: %s", self.path, error.strerror)
                    return
            if time.monotonic() > deadline:
                raise self._error(
                    "is in use by a running query; each query, and each source of it, needs its own"
                )
            time.sleep(0.05)

    def _identity(self, about: dict[str, Any]) -> str:
        """The identity in owner.json, which is created in a new directory."""
        path = self.path / "owner.json"
        if not path.exists():
            if self._numbers(_BATCH) or self._numbers(_DONE):
                raise self._error("holds batches, but owner.json is missing")
            content = {"format": FORMAT, "identity": uuid.uuid4().hex, **about}
            data = json.dumps(content, indent=1).encode()
            try:
                _write_new(path, lambda file: file.write(data))
            except FileExistsError:
                pass
            except OSError as error:
                raise self._error(f"does not support hard links: {error.strerror}") from error
        try:
            owner = json.loads(path.read_bytes())
            identity, form = str(owner["identity"]), owner["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._error(f"has an unreadable owner.json: {error}") from error
        if form != FORMAT:
            raise self._error(f"was written by another version of nsparq: format {form!r}, not {FORMAT}")
        return identity

    def check(self, identity: str, batch: int) -> None:
        """Check that the directory fits the query's checkpoint. Raises StagingError."""
        if identity != self.identity:
            raise self._error(
                "does not belong to this query's checkpoint: it belongs to another query, or the contents of "
                "the former directory were not moved here. The former directory may have finished messages "
                "that are not in the result yet"
            )
        seen = max(self._numbers(_BATCH) + self._numbers(_DONE), default=0)
        if seen > batch:
            raise self._error(
                f"has been used up to batch {seen}, but the query's checkpoint only up to {batch}: the "
                "checkpoint is new, or an old copy. Give a new query an empty directory of its own"
            )

    def begin(self, batch: int) -> None:
        """Make a batch's directory, and remove earlier ones: the sink has them."""
        self.finish(batch - 1)
        if batch <= max(self._numbers(_DONE), default=0):
            raise self._error(f"is ahead of the query's checkpoint: batch {batch} was removed already")
        (self.path / f"batch-{batch}").mkdir(exist_ok=True)
        _sync_directory(self.path)

    def finish(self, batch: int) -> None:
        """The sink has this batch and all before it: remove them. A second call changes nothing."""
        numbers = [number for number in self._numbers(_BATCH) if number <= batch]
        if not numbers:
            return
        for number in numbers:
            self._keep_pending(number)
        done = max(numbers)
        (self.path / f"done-{done}").touch()
        for number in numbers:
            trash = self.path / f"trash-{number}-{uuid.uuid4().hex}"
            os.rename(self.path / f"batch-{number}", trash)
            shutil.rmtree(trash, ignore_errors=True)
        for number in self._numbers(_DONE):
            if number < done:
                (self.path / f"done-{number}").unlink(missing_ok=True)

    def rows(self, batch: int, slot: int) -> int | None:
        """Rows in a slot; None if the batch was removed."""
        place = Slot(self.path, batch, slot)
        if not place.directory.is_dir():
            return None
        return sum(len(chunk.rows) for chunk in place.chunks())

    def _keep_pending(self, batch: int) -> None:
        directory = self.path / f"batch-{batch}"
        for path in _unconfirmed(directory):
            chunk = _read(path)
            if not len(chunk.rows):
                continue
            kept = chunk._replace(rows=chunk.rows.select(["timestamp", "id"]))
            try:
                _write_chunk(self.path / "pending" / f"{batch}-{path.name}", kept)
            except FileExistsError:
                pass
            self._drop_old_pending()

    def _remove_leftovers(self) -> None:
        for path in self.path.glob("trash-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in (*self.path.glob(".owner.json-*"), *(self.path / "pending").glob(".*")):
            path.unlink(missing_ok=True)
        self._drop_old_pending()

    def _drop_old_pending(self) -> None:
        paths = sorted((self.path / "pending").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        old = time.time() - KEEP_PENDING_S
        for place, path in enumerate(paths):
            if place >= MAX_PENDING or path.stat().st_mtime < old:
                path.unlink(missing_ok=True)

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        return [int(found[1]) for name in os.listdir(self.path) if (found := pattern.fullmatch(name))]

    def _error(self, text: str) -> StagingError:
        return StagingError(f"option staging: {self.path} {text}")

    # tasks

    def slot(self, batch: int, number: int) -> Slot:
        """Raises StagingError if the batch is not there."""
        slot = Slot(self.path, batch, number)
        if not slot.directory.is_dir():
            raise self._error(
                f"has no batch-{batch} here. Either another attempt completed the batch long ago, or "
                "executors see another directory than the driver: on a cluster it must be on a shared file "
                "system"
            )
        return slot


class Slot:
    """One task's part of a batch."""

    def __init__(self, staging: Path, batch: int, number: int) -> None:
        self.directory = staging / f"batch-{batch}"
        self._staging = staging
        self._number = number
        self._known: dict[tuple[Path, str, str], frozenset[bytes]] = {}

    def chunk(self, index: int) -> Chunk | None:
        try:
            return _read(self._path(index))
        except FileNotFoundError:
            return None

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """The existing chunks, up to the last."""
        while (chunk := self.chunk(start)) is not None:
            yield chunk
            if chunk.is_last:
                return
            start += 1

    def publish(self, index: int, chunk: Chunk, *, until: float | None = None) -> bool:
        """Publish a chunk under a number, synced. Returns False if that number is taken. Raises
        Lost, and TooLate if it is after `until`, by time.monotonic()."""

        def check() -> None:
            if until is not None and time.monotonic() > until:
                raise TooLate("staging took too long")

        try:
            _write_chunk(self._path(index), chunk, check)
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            raise Lost(f"{self.directory} is gone") from error
        return True

    def mark_finished(self, index: int) -> None:
        """nsqd has accepted every FIN of that chunk. Not synced: if the mark is lost, its messages
        are only looked for among those that come again."""
        try:
            self._path(index).with_suffix(".fin").touch()
        except FileNotFoundError:
            pass

    def staged_keys(self, topic: str, node: str) -> set[bytes]:
        """Keys of messages that were staged and that nsqd may deliver again."""
        paths = [*(self._staging / "pending").glob("[0-9]*.arrow")]
        for batch in self._staging.glob("batch-*"):
            paths += _unconfirmed(batch)
        found: set[bytes] = set()
        for path in paths:
            wanted = (path, topic, node)
            if wanted not in self._known:
                try:
                    chunk = _read(path)
                except FileNotFoundError:
                    continue
                is_ours = (chunk.topic, chunk.node) == (topic, node)
                self._known[wanted] = frozenset(keys_of(chunk.rows)) if is_ours else frozenset()
            found |= self._known[wanted]
        return found

    def _path(self, index: int) -> Path:
        return self.directory / f"{self._number}-{index:06d}.arrow"


# files


def _unconfirmed(directory: Path) -> list[Path]:
    """Chunks whose FINs may not have arrived."""
    try:
        names = set(os.listdir(directory))
    except FileNotFoundError:
        return []
    return [
        directory / name
        for name in sorted(names)
        if _CHUNK.fullmatch(name) and f"{name.removesuffix('.arrow')}.fin" not in names
    ]


def _write_chunk(path: Path, chunk: Chunk, check: Callable[[], None] | None = None) -> None:
    about = {"topic": chunk.topic, "node": chunk.node, "last": "1" if chunk.is_last else ""}
    rows = chunk.rows.replace_schema_metadata(about)

    def write(file: Any) -> None:
        with pa.ipc.new_stream(file, rows.schema) as writer:
            writer.write_batch(rows)

    _write_new(path, write, check)


def _read(path: Path) -> Chunk:
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            rows = reader.read_next_batch()
    except FileNotFoundError:
        raise
    except (OSError, ValueError, StopIteration) as error:
        raise StagingError(f"option staging: {path} is damaged: {error}") from error
    about = rows.schema.metadata or {}
    return Chunk(
        rows.replace_schema_metadata(None),
        about.get(b"topic", b"").decode(),
        about.get(b"node", b"").decode(),
        bool(about.get(b"last")),
    )


def _write_new(path: Path, write: Callable[[Any], Any], check: Callable[[], None] | None = None) -> None:
    """Write and sync a file before it gets its name. `check` may raise just before that. Raises
    FileExistsError, and FileNotFoundError without the directory."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check()
        try:
            os.link(temporary, path)
        except FileExistsError:
            # Over a network the answer to a successful link may be lost; its repetition then fails.
            if os.stat(temporary).st_nlink != 2:
                raise
        # A name outlives a power cut only once its directory is synced too.
        _sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
