"""Segments that are only in an archive: the log knows their numbers and times, and their bytes come
from a local copy that a thread fetches when somebody needs them.

The archive itself is behind `SegmentSource`. Nothing here knows which kind of store it is.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from nsparq.storage.files import Files
from nsparq.storage.log_range import FileReader, SharedReader
from nsparq.storage.manifest import SegmentEntry
from nsparq.storage.segment import Cold, Segment
from nsparq.storage.segment_index import SegmentIndex

logger = logging.getLogger(__name__)

RECENT_INDEXES: Final = 16
"""Indexes of archived segments that a log keeps in memory. An index takes 24 bytes per 64 KiB."""


class SegmentSource(Protocol):
    """The archived segments of one log. Any thread may call these."""

    def path(self, entry: SegmentEntry) -> Path:
        """Where the local copy of a segment is, or would be."""

    def cached(self, entry: SegmentEntry) -> FileReader | None:
        """The local copy, if there is one."""

    def fetch(self, entry: SegmentEntry) -> FileReader:
        """The local copy, fetched if need be. Waits for the archive. Raises OSError."""

    def prefetch(self, entry: SegmentEntry) -> None:
        """Fetch a segment that will probably be needed soon, in the background."""


class RecentIndexes:
    """Indexes of archived segments, read from disk when they are needed."""

    def __init__(self, files: Files, mark: int) -> None:
        self._files = files
        self._mark = mark
        self._recent: OrderedDict[Path, SegmentIndex] = OrderedDict()

    def add(self, path: Path, index: SegmentIndex) -> None:
        self._recent[path] = index
        self._recent.move_to_end(path)
        if len(self._recent) > RECENT_INDEXES:
            self._recent.popitem(last=False)

    def get(self, path: Path) -> SegmentIndex:
        """Without its index a segment can be read as a whole only."""
        index = self._recent.get(path)
        if index is None:
            index = self._read(path)
        self.add(path, index)
        return index

    def _read(self, path: Path) -> SegmentIndex:
        try:
            found = SegmentIndex.decode(self._files.read_whole(path) or b"", self._mark)
        except (ValueError, OSError) as error:
            logger.warning("%s cannot be used: %s", path, error)
            found = None
        return SegmentIndex() if found is None else found[1]


class RemoteReader(FileReader):
    """Reads a range of an archived segment; fetches the segment first if it has no local copy."""

    __slots__ = ("_entry", "_local", "_source")

    def __init__(self, source: SegmentSource, entry: SegmentEntry) -> None:
        self.path = source.path(entry)
        self.is_replaced = False
        self._source = source
        self._entry = entry
        self._local = source.cached(entry)

    @property
    def is_remote(self) -> bool:
        return self._local is None

    def read(self, size: int, position: int) -> bytes:
        """Raises OSError if the archive cannot be reached."""
        if self._local is None:
            self._local = self._source.fetch(self._entry)
        return self._local.read(size, position)


class _RemoteReaders(SharedReader):
    def __init__(self, make: Callable[[], FileReader]) -> None:
        self._make = make

    def get(self) -> FileReader:
        return self._make()


class ArchivedSegment(Segment):
    """A sealed segment without a file in the data path. Its index is still there."""

    is_local = False

    def __init__(
        self,
        files: Files,
        directory: Path,
        entry: SegmentEntry,
        source: SegmentSource,
        indexes: RecentIndexes,
        mark: int,
    ) -> None:
        self._indexes = indexes
        super().__init__(files, directory, entry.base, mark)
        self.entry = self._entry = entry
        self.path = source.path(entry)
        self.end, self.size = entry.end, entry.size
        self.first_ns, self.last_ns = entry.first_ns, entry.last_ns
        self.index_end = entry.end
        self.has_index = True
        self._source = source
        self._reader = _RemoteReaders(partial(RemoteReader, source, entry))

    @property
    def index(self) -> SegmentIndex:
        return self._indexes.get(self.index_path)

    @index.setter
    def index(self, index: SegmentIndex) -> None:
        """Segment sets an empty one. The one on disk counts."""

    def prefetch(self) -> None:
        """Somebody will probably need it soon."""
        self._source.prefetch(self._entry)

    def remove(self) -> None:
        """The log drops the segment: its index goes. The archive removes the objects."""
        self.files.unlink(self.index_path)

    def _local(self) -> FileReader:
        found = self._source.cached(self._entry)
        if found is None:
            raise Cold(self.path, 0, partial(self._source.fetch, self._entry))
        return found

    def _read_at(self, size: int, position: int) -> bytes:
        return self._local().read(size, position)

    def _block(self, position: int, size: int, wait: bool) -> memoryview:
        local = self._local()
        size = min(size, self.size - position)
        if wait:
            return memoryview(local.read(size, position))
        cached = local.read_cached(size, position)
        if cached is None or len(cached) < size:
            raise Cold(self.path, position)
        return cached
