"""The archive of one log: uploads segments, commits manifests, and removes what no manifest names.

Everything here waits for the store and runs in a thread, one call at a time.
docs/internals/archive.md has the rules, and why a second writer can do no harm.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Final

from crc32c import crc32c

from nsparq.archive.store import PART_SIZE, Store
from nsparq.errors import ArchiveUnavailable, StorageError
from nsparq.storage.log_range import FileReader
from nsparq.storage.manifest import (
    BadManifest,
    Manifest,
    SegmentEntry,
    index_key,
    latest_number,
    manifest_key,
    manifest_prefix,
    number_of,
    segment_key,
    segment_prefix,
)
from nsparq.storage.segment import Segment

logger = logging.getLogger(__name__)

UNKNOWN_S: Final = 24 * 3600.0
REPLACED_S: Final = 3600.0

_COMMIT_ATTEMPTS: Final = 10


class Replaced(StorageError):
    """Another nsqd archives this log now."""


class Pace:
    """Bounds the rate of uploads, and ends them when nsqd stops."""

    def __init__(self, bytes_per_second: int = 0) -> None:
        """0 means no limit."""
        self._rate = bytes_per_second
        self._free_at = 0.0
        self.stopped = Event()

    def spend(self, size: int) -> None:
        """Wait until `size` more bytes may be sent."""
        now = time.monotonic()
        wait = max(0.0, self._free_at - now)
        if self._rate:
            self._free_at = max(now, self._free_at) + size / self._rate
        if self.stopped.wait(wait) if wait else self.stopped.is_set():
            raise ArchiveUnavailable("nsqd stops")


@dataclass(frozen=True, slots=True)
class Sealed:
    """A sealed segment that is to be uploaded. Its file stays open."""

    reader: FileReader
    index: bytes
    base: int
    end: int
    size: int
    first_ns: int
    last_ns: int
    deferred: int

    @classmethod
    def of(cls, segment: Segment) -> Sealed:
        """Raises OSError."""
        return cls(
            FileReader(segment.files, segment.path),
            segment.encode_index(),
            segment.base,
            segment.end,
            segment.size,
            segment.first_ns,
            segment.last_ns,
            len(segment.index.deferred) // 2,
        )

    def parts(self) -> Iterator[bytes]:
        for position in range(0, self.size, PART_SIZE):
            wanted = min(PART_SIZE, self.size - position)
            part = self.reader.read(wanted, position)
            if len(part) < wanted:
                raise OSError(f"{self.reader.path}: the file is shorter than it was")
            yield part

    def entry(self) -> SegmentEntry:
        """Reads the whole segment, for its checksum."""
        crc = 0
        for part in self.parts():
            crc = crc32c(part, crc)
        return SegmentEntry(self.base, self.end, self.size, self.first_ns, self.last_ns, self.deferred, crc)


class TopicArchive:
    """Writes the archive of one log."""

    def __init__(
        self,
        store: Store,
        known: Manifest,
        *,
        writer: str,
        node: int = 0,
        wall_ns: Callable[[], int] = time.time_ns,
        unknown_s: float = UNKNOWN_S,
        replaced_s: float = REPLACED_S,
    ) -> None:
        """`known` is the last manifest that this log has seen, perhaps an empty one. `writer` names
        the run of nsqd. `unknown_s` is the age at which a segment that no manifest names is
        removed, `replaced_s` that of a manifest that a later one has replaced."""
        self.manifest = known
        self.is_replaced = False
        """Whether another nsqd has taken over."""
        self._store = store
        self._place = known.place
        self._writer = writer
        self._node = node
        self._wall_ns = wall_ns
        self._unknown_s, self._replaced_s = unknown_s, replaced_s
        self.is_owner = False
        """Whether this run has committed a manifest."""

    # uploading

    def upload(self, sealed: Sealed, pace: Pace) -> SegmentEntry:
        """Upload a segment and its index, unless the store has them."""
        entry = sealed.entry()
        key = segment_key(self._place, entry)
        if self._store.size(key) != entry.size:
            self._store.put(key, _paced(sealed.parts(), pace))
        key = index_key(self._place, entry)
        if self._store.size(key) != len(sealed.index):
            self._store.put(key, _paced(iter([sealed.index]), pace))
        return entry

    # committing

    def commit(
        self,
        add: Sequence[SegmentEntry],
        drop: Sequence[SegmentEntry] = (),
        *,
        gaps: Sequence[tuple[int, int]] = (),
        channels: Mapping[str, int] | None = None,
        settings: Mapping[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Commit a manifest with these changes. Raises Replaced, or what `check` raises if nothing
        may be committed any more."""
        for _ in range(_COMMIT_ATTEMPTS):
            if not self.is_owner:
                self.refresh()
            # After refresh(): if it has found a manifest of the next run, this one is over already.
            check()
            wanted = replace(
                self.manifest.changed(add, drop),
                number=self.manifest.number + 1,
                writer=self._writer,
                node=self._node,
                written_ns=self._wall_ns(),
                gaps=tuple(gaps),
                channels=dict(channels or {}),
                settings=dict(settings or {}),
            )
            if self._put(wanted) and self._latest_after(wanted.number) == wanted.number:
                self.manifest = wanted
                self.is_owner = True
                return wanted
            self.refresh()
            self._check_owner()
        raise ArchiveUnavailable(f"{self._place}: other writers were faster {_COMMIT_ATTEMPTS} times")

    def _put(self, manifest: Manifest) -> bool:
        key = manifest_key(self._place, manifest.number)
        if self._store.put_new(key, manifest.encode()):
            return True
        # An earlier try of the same put may have arrived, and its answer was lost.
        return self._read(manifest.number) == manifest

    def _latest_after(self, number: int) -> int:
        """The highest number from this one on."""
        keys = self._store.list(manifest_prefix(self._place), manifest_key(self._place, number))
        return max(number, latest_number(found.key for found in keys))

    def _read(self, number: int) -> Manifest | None:
        raw = self._store.get(manifest_key(self._place, number))
        try:
            return None if raw is None else Manifest.decode(raw)
        except BadManifest as error:
            raise ArchiveUnavailable(f"{manifest_key(self._place, number)}: {error}") from error

    def refresh(self) -> None:
        """Read the latest manifest, if there is one that is not known."""
        number = self._latest_after(self.manifest.number)
        latest = self.manifest
        if number > latest.number:
            listed = self._read(number)
            if listed is None:
                raise ArchiveUnavailable(f"{self._place}: manifest {number} is gone")
            latest = listed
        # Some stores list an object late. Asking for it by its name always finds it.
        while (following := self._read(latest.number + 1)) is not None:
            latest = following
        self.manifest = latest

    def _check_owner(self) -> None:
        if self.is_owner and self.manifest.writer != self._writer:
            self.is_replaced = True
            raise Replaced(f"{self._place}: another nsqd, or another run of this one, archives this log")

    # removing

    def collect(self, now_s: float) -> list[str]:
        """Remove objects that no manifest names, once they are old enough. Gives their keys."""
        if not self.is_owner:
            return []
        self.refresh()
        self._check_owner()
        place, latest = self._place, self.manifest
        named = {name(place, entry) for entry in latest.segments for name in (segment_key, index_key)}
        unknown = [
            found.key
            for found in self._store.list(segment_prefix(place))
            if found.key not in named and found.modified_s < now_s - self._unknown_s
        ]
        unknown += [
            found.key
            for found in self._store.list(manifest_prefix(place))
            if number_of(found.key) < latest.number and found.modified_s < now_s - self._replaced_s
        ]
        self._store.delete(unknown)
        if unknown:
            logger.info("archive: removed %d objects of %s that no manifest names", len(unknown), place)
        return unknown


def latest_manifest(store: Store, topic: str, incarnation: str) -> Manifest:
    """The manifest of a log; an empty one if the store has none."""
    archive = TopicArchive(store, Manifest(topic=topic, incarnation=incarnation), writer="")
    archive.refresh()
    return archive.manifest


def _paced(parts: Iterator[bytes], pace: Pace) -> Iterator[bytes]:
    for part in parts:
        pace.spend(len(part))
        yield part
