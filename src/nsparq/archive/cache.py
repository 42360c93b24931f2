"""Local copies of archived segments: a bounded directory, filled by threads when readers need it.

The least recently used copy goes first. A copy that is being read stays readable after it has
gone, because its file is open. After a failed fetch nobody asks the store for a while: readers get
the error at once.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Lock, RLock
from typing import Final

from crc32c import crc32c

from nsparq.archive.store import PART_SIZE, Store
from nsparq.errors import ArchiveUnavailable
from nsparq.storage.files import Files
from nsparq.storage.log_range import FileReader
from nsparq.storage.manifest import SegmentEntry, segment_key

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 30.0
ROOM_FOR: Final = 4
"""Segments that must have room in the cache for read-ahead: one that is read, two that come next,
and one that was read before. A smaller cache would lose segments before they are read."""

_SUFFIX: Final = ".segment"
_TEMPORARY: Final = ".fetching"

Submit = Callable[[Callable[[], None]], None]
"""Runs work in a thread."""


class SegmentCache:
    """All local copies. Any thread may use it."""

    def __init__(
        self,
        store: Store,
        directory: Path,
        limit_bytes: int,
        *,
        files: Files | None = None,
        submit: Submit = lambda work: work(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`files` are for reading the copies."""
        self.directory = directory
        self.error = ""
        """Why the last fetch failed; empty if it did not."""
        self.fetched_bytes = 0
        self.fetched_segments = 0
        self.size_bytes = 0
        self._store = store
        self._limit = limit_bytes
        self._files = files or Files()
        self._own_files = Files()
        """For writing. Not those of the data path: the cache is not replicated."""
        self._submit = submit
        self._clock = clock
        self._naming = RLock()
        """Held while a copy gets its name, and while an evicted one loses it. Taken before
        `_lock`."""
        self._lock = Lock()
        self._copies: OrderedDict[str, tuple[FileReader, int]] = OrderedDict()
        """By name: the open copy and its size. The least recently used comes first."""
        self._fetching: dict[str, Future[FileReader]] = {}
        self._ahead: set[str] = set()
        """Segments whose read-ahead waits for a thread. Readers ask for it again and again, and a
        late repeat would fetch a segment that everybody has read."""
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = 0.0

    def open(self) -> None:
        """Make the directory, and remove the copies of an earlier run: a power cut may have damaged
        them. Raises OSError."""
        self._own_files.make_directory(self.directory)
        for name in self._own_files.list_directory(self.directory):
            if name.endswith((_SUFFIX, _TEMPORARY)):
                self._own_files.unlink(self.directory / name)

    def path(self, place: str, entry: SegmentEntry) -> Path:
        """The incarnation in `place` is unique among all topics."""
        return self.directory / f"{place.rpartition('/')[2]}-{entry.name}{_SUFFIX}"

    def cached(self, path: Path) -> FileReader | None:
        """The copy, if there is one."""
        with self._lock:
            found = self._copies.get(path.name)
            if found is None:
                return None
            self._copies.move_to_end(path.name)
            return found[0]

    def fetch(self, place: str, entry: SegmentEntry) -> FileReader:
        """The copy, fetched if need be. Readers of the same segment share one fetch. Raises
        ArchiveUnavailable, or OSError if the disk refuses the copy."""
        path = self.path(place, entry)
        with self._lock:
            found = self._copies.get(path.name)
            if found is not None:
                return found[0]
            if self._clock() < self._retry_at:
                raise ArchiveUnavailable(self.error)
            running = self._fetching.get(path.name)
            if running is None:
                mine = self._fetching[path.name] = Future()
        if running is not None:
            return running.result()
        try:
            reader = self._download(path, segment_key(place, entry), entry)
        except BaseException as error:
            with self._lock:
                del self._fetching[path.name]
                self.error = str(error)
                self._retry_at = self._clock() + self._backoff_s
                self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            mine.set_exception(error)
            raise
        mine.set_result(reader)
        self._evict()
        return reader

    def prefetch(self, place: str, entry: SegmentEntry) -> None:
        """Fetch a segment in the background, unless it is here or on its way, or the cache is too
        small for it beside the one that is read. An error is told to those who read it."""
        path = self.path(place, entry)
        with self._lock:
            is_known = path.name in self._copies or path.name in self._fetching or path.name in self._ahead
            is_large = ROOM_FOR * entry.size > self._limit
            if is_known or is_large or self._clock() < self._retry_at:
                return
            self._ahead.add(path.name)

        def work() -> None:
            with self._lock:
                self._ahead.discard(path.name)
            try:
                self.fetch(place, entry)
            except OSError as error:
                logger.debug("read-ahead of %s failed: %s", path.name, error)

        self._submit(work)

    def close(self) -> None:
        """Close the copies. The next start removes them."""
        with self._lock:
            self._copies.clear()

    # details

    def _download(self, path: Path, key: str, entry: SegmentEntry) -> FileReader:
        temporary = path.with_suffix(_TEMPORARY)
        try:
            is_same = self._copy(temporary, key, entry) == entry.crc
            if not is_same:
                logger.warning("archive: %s has another checksum; fetching it again", key)
                is_same = self._copy(temporary, key, entry) == entry.crc
            if not is_same:
                # Each batch has its own checksum. Readers skip and count those that are damaged.
                logger.error("archive: %s is damaged; messages that are still whole are delivered", key)
            with self._naming:
                self._own_files.rename(temporary, path)
                reader = FileReader(self._files, path)
                self._keep(path.name, reader, entry.size)
            return reader
        except BaseException:
            self._own_files.unlink(temporary)
            raise

    def _copy(self, temporary: Path, key: str, entry: SegmentEntry) -> int:
        """Gives the checksum. Holds PART_SIZE bytes in memory."""
        crc = 0
        with self._own_files.opened(temporary) as fd:
            for position in range(0, entry.size, PART_SIZE):
                wanted = min(PART_SIZE, entry.size - position)
                part = self._store.read(key, position, wanted)
                if len(part) != wanted:
                    raise ArchiveUnavailable(f"{key} is shorter than it was")
                self._own_files.write(fd, [part], position)
                crc = crc32c(part, crc)
        return crc

    def _keep(self, name: str, reader: FileReader, size: int) -> None:
        with self._lock:
            del self._fetching[name]
            self.error = ""
            self._backoff_s, self._retry_at = FIRST_BACKOFF_S, 0.0
            self.fetched_segments += 1
            self.fetched_bytes += size
            self._copies[name] = (reader, size)
            self.size_bytes += size

    def _evict(self) -> None:
        """Remove the least recently used copies beyond the limit."""
        gone: list[str] = []
        with self._lock:
            while self.size_bytes > self._limit and len(self._copies) > 1:
                name, (_, old_size) = self._copies.popitem(last=False)
                self.size_bytes -= old_size
                gone.append(name)
        for name in gone:
            with self._naming:
                if name in self._copies:
                    continue  # fetched again meanwhile
                try:
                    self._own_files.unlink(self.directory / name)
                except OSError as error:
                    logger.warning("archive: cannot remove %s: %s", self.directory / name, error)


class CachedSource:
    """The archived segments of one log: storage.archived.SegmentSource."""

    def __init__(self, cache: SegmentCache, place: str) -> None:
        self.path: Callable[[SegmentEntry], Path] = partial(cache.path, place)
        self.fetch: Callable[[SegmentEntry], FileReader] = partial(cache.fetch, place)
        self.prefetch: Callable[[SegmentEntry], None] = partial(cache.prefetch, place)
        self._cache = cache

    def cached(self, entry: SegmentEntry) -> FileReader | None:
        return self._cache.cached(self.path(entry))
