"""What Spark reads from the archive itself: which parts of a log are there, and their bytes.

The driver reads the manifest of a log and cuts ranges at the borders of archived segments. A task
gets the segment's entry in the manifest, whose name stands for one content. So what a task reads
does not depend on what is archived or removed after planning. What the store does not give is read
from nsqd.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import ceil
from typing import Final, NamedTuple

from nsparq.archive.store import Store
from nsparq.archive.topic_archive import latest_manifest
from nsparq.errors import ArchiveUnavailable, StartError
from nsparq.spark.cluster.api import LogChunk
from nsparq.spark.options import NsqOptions, OptionError
from nsparq.spark.source.plan import split
from nsparq.storage.batch import decode_head
from nsparq.storage.gaps import Gaps
from nsparq.storage.manifest import Manifest, SegmentEntry, index_key, place_of, segment_key
from nsparq.storage.segment_index import SegmentIndex

__all__ = ["ArchivedLogs", "ArchivedSegment", "Part", "cut_evenly", "open_store", "parts", "time_bounds"]

logger = logging.getLogger(__name__)

FRESH_S: Final = 30.0
"""Age at which the manifest of a log is read again."""
FRESH_AT_END_S: Final = 300.0
"""The same for a query that has passed everything that was archived."""
THREADS: Final = 16
"""Manifests that are read at the same time."""


class Part(NamedTuple):
    """A range of numbers, all in one archived segment or none."""

    start: int
    end: int
    entry: SegmentEntry | None
    """None if nsqd has to be asked."""

    @property
    def size_bytes(self) -> int:
        """An estimate; 0 if the part is not archived."""
        if self.entry is None:
            return 0
        return self.entry.size * (self.end - self.start) // (self.entry.end - self.entry.base)


def parts(manifest: Manifest, start: int, end: int, gaps: Gaps) -> list[Part]:
    """Cut the numbers from `start` to before `end` at the borders of archived segments. Parts
    without a message are left out."""
    found: list[Part] = []
    at = start
    for entry in manifest.between(start, end):
        found.append(Part(at, max(at, entry.base), None))
        at = min(end, entry.end)
        found.append(Part(max(start, entry.base), at, entry))
    found.append(Part(at, end, None))
    return [part for part in found if gaps.count_messages(part.start, part.end)]


def cut_evenly(part: Part, size: int) -> list[Part]:
    """An archived part, cut into pieces of about `size` bytes."""
    numbers = part.end - part.start
    count = max(1, ceil(size * numbers / max(1, part.size_bytes)))
    return [Part(low, high, part.entry) for low, high in split(part.start, part.end, count)]


def time_bounds(manifest: Manifest, earliest: int, time_ns: int) -> tuple[int, SegmentEntry | None]:
    """The first archived segment that has a message published at or after a time, and the end of
    the segment before it: archived messages before that are older."""
    low, gaps = earliest, Gaps([*manifest.gaps])
    for entry in manifest.segments:
        if entry.end > earliest:
            if entry.last_ns >= time_ns:
                return min(gaps.skip(low), entry.base), entry
            low = entry.end
    return low, None


@cache
def open_store(url: str) -> Store:
    """Raises OptionError. Each process keeps its connections to the store for further tasks."""
    try:
        return Store(url)
    except StartError as error:
        raise OptionError(f"option archive: {str(error).removeprefix('--archive ')}") from error


class ArchivedLogs:
    """The manifests of the logs that a query reads."""

    def __init__(self, options: NsqOptions, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OptionError."""
        self._store = open_store(options.archive) if options.archive else None
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[float, Manifest | None]] = {}
        """By topic and incarnation: when the store was asked, and what it has."""

    def prepare(self, logs: Iterable[tuple[str, str, int]]) -> None:
        """Ask for the manifests of many logs at the same time: topic, incarnation and start."""
        if self._store is not None and (wanted := [one for one in logs if self._is_due(*one)]):
            with ThreadPoolExecutor(min(THREADS, len(wanted)), "nsq-archive") as threads:
                for future in [threads.submit(self.manifest, *one) for one in wanted]:
                    future.result()

    def manifest(self, topic: str, incarnation: str, start: int = 0) -> Manifest | None:
        """What is archived of a log from `start` on, perhaps as it was FRESH_S ago. None if there
        is nothing, or the store does not answer."""
        if self._store is None:
            return None
        if self._is_due(topic, incarnation, start):
            found = None
            try:
                found = latest_manifest(self._store, topic, incarnation)
            except ArchiveUnavailable as error:
                logger.warning("topic %s is read from nsqd alone: %s", topic, error)
            self._known[topic, incarnation] = self._clock(), found
        known = self._known[topic, incarnation][1]
        return known if known is not None and known.end > start else None

    def _is_due(self, topic: str, incarnation: str, start: int) -> bool:
        if (topic, incarnation) not in self._known:
            return True
        asked_at, known = self._known[topic, incarnation]
        is_at_end = known is not None and known.end <= start
        return self._clock() - asked_at >= (FRESH_AT_END_S if is_at_end else FRESH_S)

    def search_time(self, manifest: Manifest, entry: SegmentEntry, time_ns: int) -> int:
        """The first message of a segment that was published at or after a time; the segment's end
        if there is none. Raises ArchiveUnavailable."""
        assert self._store is not None
        return ArchivedSegment(self._store, manifest.place, entry).search_time(time_ns)


class ArchivedSegment:
    """A segment in the store, read in pieces. All methods raise ArchiveUnavailable."""

    def __init__(self, store: Store, place: str, entry: SegmentEntry) -> None:
        self._store = store
        self._place = place
        self._entry = entry
        self._loaded: SegmentIndex | None = None

    @classmethod
    def of_log(cls, store: Store, topic: str, incarnation: str, entry: SegmentEntry) -> ArchivedSegment:
        return cls(store, place_of(topic, incarnation), entry)

    def chunk(self, at: int, max_bytes: int, gaps: Sequence[tuple[int, int]] = ()) -> LogChunk:
        """Whole batches from a number on."""
        position, first = self._index().before(at) or (0, self._entry.base)
        stop, following = self._index().after(position, max_bytes) or (self._entry.size, self._entry.end)
        data = self._read(position, stop)
        return LogChunk(bytes(data), first, following, self._entry.end, [*gaps], lost=0)

    def search_time(self, time_ns: int) -> int:
        (position, _), following = self._index().around(time_ns)
        stop, end = following or (self._entry.size, self._entry.end)
        data, at = self._read(position, stop), 0
        while (head := decode_head(data, at)) is not None:
            if head.timestamp_ns >= time_ns:
                return head.base
            at += head.size
        return end

    def _index(self) -> SegmentIndex:
        if self._loaded is None:
            key = index_key(self._place, self._entry)
            raw = self._store.get(key)
            try:
                found = SegmentIndex.decode(raw or b"", 0)
            except ValueError as error:
                raise ArchiveUnavailable(f"{key} in {self._store.url} is unusable: {error}") from error
            if found is None or found[0].size != self._entry.size:
                raise ArchiveUnavailable(f"{key} in {self._store.url} is gone or of an older format")
            self._loaded = found[1]
        return self._loaded

    def _read(self, position: int, stop: int) -> memoryview:
        key = segment_key(self._place, self._entry)
        data = self._store.read(key, position, stop - position)
        if len(data) < stop - position:
            raise ArchiveUnavailable(f"{key} in {self._store.url} is shorter than {stop} bytes")
        return data
