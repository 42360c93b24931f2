"""Where queue mode keeps the messages of a micro-batch before it finishes them: durably, and only until the
sink has them.

    <staging>/
        owner.json                whose it is; the identity is in every offset of the query's checkpoint
        lock                      held by the query that runs
        batch-7/                  one micro-batch: made by the driver, removed once the sink has it
            3-000000.arrow        chunk 0 of slot 3, which is what one task reads; the last says that it is
            3-000000.fin          nsqd has taken every FIN of that chunk
        done-6                    the last batch that was removed
        pending/6-3-000000.arrow  keys of messages of a removed batch whose FIN is not certain

A chunk appears whole and on disk, or not at all, under a name that one writer only can get: link(2) is atomic
and exclusive. So of several attempts at a task, wherever they run, each chunk has one winner; the others see
that they have lost before they finish anything. A batch is removed by renaming its directory: an attempt that
nobody waits for any more finds no place to put a chunk, and finishes nothing.
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

__all__ = ["CHUNK_SCHEMA", "Chunk", "Lost", "Slot", "Staging", "StagingError", "TooLate", "keys_of"]

logger = logging.getLogger(__name__)

CHUNK_SCHEMA: Final = pa.schema(
    [
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
    ]
)
"""Topic and node, which are the same for all rows of a chunk, are in the file's metadata."""

FORMAT: Final = 1
KEEP_PENDING_S: Final = 7 * 86400.0
"""How long keys are kept of messages whose FIN is not certain. They come back at the latest when nsqd has
worked off the backlog that was there before them."""
MOST_PENDING: Final = 200
"""Files of such keys. There are so many only where something keeps nsqd from answering at all."""
LOCK_S: Final = 30.0
"""How long a query waits for its predecessor, whose process may outlive the driver by a moment."""

_BATCH = re.compile(r"batch-(\d+)")
_DONE = re.compile(r"done-(\d+)")
_CHUNK = re.compile(r"(\d+)-(\d{6})\.arrow")
_ID_SIZE = 16


class StagingError(NsparqError):
    """The directory cannot be used, or not by this query. The text names the option."""


class Lost(NsparqError):
    """The batch is not there (any more): somebody else has brought it to its end."""


class TooLate(NsparqError):
    """It took so long that the messages may no longer be ours. Nothing was published."""


class Chunk(NamedTuple):
    rows: pa.RecordBatch
    """Of CHUNK_SCHEMA."""
    topic: str
    node: str
    is_last: bool


def keys_of(rows: pa.RecordBatch) -> list[bytes]:
    """What tells a message of a node's topic from all others: its id and its time, which redelivery does not
    change. Ids alone would not do: an nsqd that starts anew with an empty disk may issue them again."""
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
    """The directory of one query. The driver opens it; tasks only ask for their slots."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.identity = ""
        self._lock: int | None = None

    # the driver

    def open(self, about: dict[str, Any], *, wait: float = LOCK_S) -> None:
        """Take possession, for as long as this process lives; `about` is shown to whoever should not be here.
        Raises StagingError."""
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "pending").mkdir(exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._error(f"cannot be used: {error.strerror}") from error
        try:
            self._take(lock, wait)
            self.identity = self._owner(about)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        _sync_directory(self.path.parent)
        self._tidy()

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _take(self, lock: int, wait: float) -> None:
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
                    "is in use by a query that runs now; each query, and each source, needs its own"
                )
            time.sleep(0.05)

    def _owner(self, about: dict[str, Any]) -> str:
        """The identity in the directory; a new one if nobody has been here yet."""
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
                raise self._error(f"cannot hold linked files: {error.strerror}") from error
        try:
            owner = json.loads(path.read_bytes())
            identity, form = str(owner["identity"]), owner["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._error(f"has an owner.json that cannot be read: {error}") from error
        if form != FORMAT:
            raise self._error(f"is of another version of nsparq: format {form!r}, and not {FORMAT}")
        return identity

    def check(self, identity: str, batch: int) -> None:
        """Whether a query whose checkpoint has come to this point may go on here. Raises StagingError."""
        if identity != self.identity:
            raise self._error(
                "is not the one that belongs to this query's checkpoint: it is another query's, or the "
                "contents of the former one were not moved along. Messages that were finished, and are not "
                "in the result yet, may be there"
            )
        seen = max(self._numbers(_BATCH) + self._numbers(_DONE), default=0)
        if seen > batch:
            raise self._error(
                f"has been used up to batch {seen}, and the query's checkpoint knows {batch} only: that is "
                "new, or an old copy. Give a new query an empty directory of its own"
            )

    def begin(self, batch: int) -> None:
        """Make the place for a batch, which may be there from an earlier try; those before it are with the
        sink."""
        self.finish(batch - 1)
        if batch <= max(self._numbers(_DONE), default=0):
            raise self._error(
                f"is further than the query's checkpoint: batch {batch} has been removed already"
            )
        (self.path / f"batch-{batch}").mkdir(exist_ok=True)
        _sync_directory(self.path)

    def finish(self, batch: int) -> None:
        """The sink has this batch and all before it: remove them. Done again it changes nothing."""
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
        """How many rows that slot came to have; None if nobody can say any more."""
        place = Slot(self.path, batch, slot)
        if not place.directory.is_dir():
            return None
        return sum(len(chunk.rows) for chunk in place.chunks())

    def _keep_pending(self, batch: int) -> None:
        directory = self.path / f"batch-{batch}"
        for path in _unproven(directory):
            chunk = _read(path)
            if not len(chunk.rows):
                continue
            kept = chunk._replace(rows=chunk.rows.select(["timestamp", "id"]))
            try:
                _write_chunk(self.path / "pending" / f"{batch}-{path.name}", kept)
            except FileExistsError:
                pass
            self._forget_pending()

    def _tidy(self) -> None:
        """What a run that was killed has left."""
        for path in self.path.glob("trash-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in (*self.path.glob(".owner.json-*"), *(self.path / "pending").glob(".*")):
            path.unlink(missing_ok=True)
        self._forget_pending()

    def _forget_pending(self) -> None:
        """Keys that are so old, or so many, that they are not worth keeping."""
        paths = sorted((self.path / "pending").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        old = time.time() - KEEP_PENDING_S
        for place, path in enumerate(paths):
            if place >= MOST_PENDING or path.stat().st_mtime < old:
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
                f"has no batch-{batch} here. Either this attempt has long been overtaken, or executors see "
                "another directory than the driver: on a cluster it must be on a file system that they share"
            )
        return slot


class Slot:
    """What one task puts into, and takes out of, one batch."""

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
        """Those that are there, up to the last."""
        while (chunk := self.chunk(start)) is not None:
            yield chunk
            if chunk.is_last:
                return
            start += 1

    def publish(self, index: int, chunk: Chunk, *, until: float | None = None) -> bool:
        """Make it the chunk of that number, on disk for good; False if there is one already. Raises Lost, and
        TooLate if that would be after `until`, by time.monotonic()."""

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

    def prove(self, index: int) -> None:
        """Every FIN of that chunk has been taken. Not synced: to forget it costs nothing but care."""
        try:
            self._path(index).with_suffix(".fin").touch()
        except FileNotFoundError:
            pass

    def staged_keys(self, topic: str, node: str) -> set[bytes]:
        """Keys of messages that are staged, or were, and that nsqd may nevertheless deliver again."""
        paths = [*(self._staging / "pending").glob("[0-9]*.arrow")]
        for batch in self._staging.glob("batch-*"):
            paths += _unproven(batch)
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


def _unproven(directory: Path) -> list[Path]:
    """Chunks whose FINs are not certain."""
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
    """A file that is on disk, whole, when it gets its name; `check` may object at the last moment. Raises
    FileExistsError, and FileNotFoundError without the directory; what it began is removed."""
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
            # Over a network the answer to a link that succeeded may have been lost, and the repetition fails.
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
