"""The segments of one log, oldest first. Messages are appended to the last one, the active
segment."""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from nsparq.errors import StartError
from nsparq.storage.archived import ArchivedSegment, RecentIndexes, SegmentSource
from nsparq.storage.files import Files
from nsparq.storage.log import LogSettings
from nsparq.storage.manifest import SegmentEntry
from nsparq.storage.segment import COPY_SUFFIX, Segment

logger = logging.getLogger(__name__)

IDLE_ROLL_SIZE: Final = 8 << 20
"""An active segment of this size is removed as well, once all channels have passed it."""

READ_AHEAD: Final = 2
"""Segments that are fetched from the archive before somebody needs them."""
ARCHIVE_FILE: Final = "archive.json"
"""The manifest of the segments that the archive has confirmed, beside the segments."""

_SEGMENT_NAME = re.compile(r"[0-9]{20}\.log")
_INDEX_NAME = re.compile(r"[0-9]{20}\.index")
_MAX_KNOWN: Final = 64


def read_marks(files: Files, directory: Path) -> list[int]:
    """The marks of the segments in a directory, except damaged segments and those without a
    mark."""
    marks = []
    for name in files.list_directory(directory):
        if _SEGMENT_NAME.fullmatch(name):
            segment = Segment(files, directory, int(name[:-4]))
            marks.append(segment.read_mark())
            segment.close()
    return [mark for mark in marks if mark]


class SegmentList(list[Segment]):
    """Finds segments, and takes out those that are not needed."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        mark: int,
        source: SegmentSource | None = None,
    ) -> None:
        """`mark` names the log, see batch.mark_of. `source` has the segments that are only in an
        archive."""
        super().__init__()
        self.mark = mark
        self._files = files
        self._directory = directory
        self._known: dict[int, tuple[Segment, int]] = {}
        """Position of the batch after one that was just read, by its sequence number; bounded."""
        self.expired: list[SegmentEntry] = []
        """Segments that the log has dropped and that the archive must drop as well."""
        self._source = source
        self._indexes = RecentIndexes(files, mark)

    @property
    def active(self) -> Segment | None:
        return self[-1] if self and self[-1].is_local else None

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return sum(segment.size for segment in self if segment.is_local)

    # opening

    def bases_on_disk(self) -> dict[int, bool]:
        """The first sequence number of every segment or index file, in order, and whether there is
        a segment. Removes copies that were not finished."""
        names = self._files.list_directory(self._directory)
        for name in names:
            if name.endswith(COPY_SUFFIX):
                self._files.unlink(self._directory / name)
        bases = {int(name[:-4]) for name in names if _SEGMENT_NAME.fullmatch(name)}
        indexed = {int(name[:-6]) for name in names if _INDEX_NAME.fullmatch(name)}
        return {base: base in bases for base in sorted(bases | indexed)}

    def new(self, base: int) -> Segment:
        """A segment that is not in the list yet."""
        return Segment(self._files, self._directory, base, self.mark)

    def add(self, segment: Segment) -> None:
        """Add a segment that was found on disk."""
        assert not self or self[-1].end <= segment.base
        segment.close()
        self.append(segment)

    def archived(self, entry: SegmentEntry) -> ArchivedSegment:
        """A segment that is only in the archive. Raises StartError without one."""
        if self._source is None:
            raise StartError(
                f"{self._directory.name}: messages from {entry.base} on are in an archive: start nsqd with "
                f"--archive, or remove {ARCHIVE_FILE} to give them up"
            )
        return ArchivedSegment(self._files, self._directory, entry, self._source, self._indexes, self.mark)

    def confirm(self, entries: Iterable[SegmentEntry]) -> None:
        """The archive has these segments, and the local manifest names them."""
        known = {entry.base: entry for entry in entries}
        for segment in self:
            if segment.base in known:
                entry = known[segment.base]
                if (segment.end, segment.size) == (entry.end, entry.size):
                    segment.entry = entry

    def unarchived(self, committed: int) -> list[Segment]:
        """Sealed segments that are safe on disk and not in the archive, oldest first."""
        return [
            segment
            for segment in self[:-1]
            if segment.entry is None and segment.end <= committed and not segment.is_doubtful
        ]

    # finding

    def find(self, sequence: int) -> Segment | None:
        """The segment that holds `sequence`, or else the first one after it."""
        number = max(0, bisect_right(self, sequence, key=lambda s: s.base) - 1)
        while number < len(self) and self[number].end <= sequence:
            number += 1
        return self[number] if number < len(self) else None

    def prefetch_after(self, segment: Segment) -> None:
        """Somebody reads an archived segment: have the next ones at hand."""
        number = bisect_right(self, segment.base, key=lambda s: s.base)
        for following in self[number : number + READ_AHEAD]:
            if isinstance(following, ArchivedSegment):
                following.prefetch()

    def remember(self, sequence: int, segment: Segment, position: int) -> None:
        """Note where the batch that begins with `sequence` stands, or will stand."""
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[sequence] = (segment, position)

    def recall(self, sequence: int) -> tuple[Segment, int] | None:
        return self._known.get(sequence)

    def deferred_since(self, sequence: int, due_after: int) -> list[tuple[int, int]]:
        """Sequence number and due time of deferred messages: see Log.deferred_since."""
        found: list[tuple[int, int]] = []
        for segment in self:
            has_none = segment.entry is not None and not segment.entry.deferred
            if segment.end <= sequence or has_none:
                continue
            deferred = segment.index.deferred
            if deferred:
                pairs = np.array(deferred, np.int64).reshape(-1, 2)
                found += map(tuple, pairs[(pairs[:, 0] >= sequence) & (pairs[:, 1] > due_after)].tolist())
        return found

    # removing

    def trim(self, low: int, now_s: float, settings: LogSettings, start_low: int) -> list[Segment]:
        """Take out the segments before `low` that retention does not keep. See Log.trim."""
        if settings.is_archived:
            return self._expire(low, now_s, settings) + self._leave_disk(low, now_s, settings, start_low)
        number = 0
        for segment in self:
            is_small = segment is self.active and segment.size < IDLE_ROLL_SIZE
            # A copy of a doubtful segment may be running, and would bring the file back.
            if segment.end > low or is_small or segment.is_doubtful:
                break
            if _is_retained(self[number:], now_s, settings.retention_s, settings.retention_bytes):
                break
            number += 1
        return self._take(number)

    def _take(self, number: int) -> list[Segment]:
        """Take out the first segments."""
        taken = self[:number]
        if taken:
            del self[:number]
            self._known.clear()
        return taken

    def _expire(self, low: int, now_s: float, settings: LogSettings) -> list[Segment]:
        """Take out archived segments before `low` that the archive need not keep."""
        age_s, limit = settings.archive_retention_s, settings.archive_retention_bytes
        number = 0
        if age_s or limit:
            for segment in self:
                if segment.is_local or segment.end > low or _is_retained(self[number:], now_s, age_s, limit):
                    break
                number += 1
        taken = self._take(number)
        self.expired += [segment.entry for segment in taken if segment.entry is not None]
        return taken

    def _leave_disk(self, low: int, now_s: float, settings: LogSettings, start_low: int) -> list[Segment]:
        """Let archived segments leave the disk, if no channel needs them and local retention allows
        it, or if they take too much space. The log keeps them."""
        limit, size = settings.archive_local_bytes, self.size_bytes
        left: list[Segment] = []
        for number, segment in enumerate(self):
            if not segment.is_local:
                continue
            if segment.entry is None or segment is self.active or segment.is_doubtful:
                break
            if segment.end > start_low:
                break
            is_needed = segment.end > low or _is_retained(
                self[number:], now_s, settings.retention_s, settings.retention_bytes
            )
            if is_needed and not (limit and size > limit):
                break
            size -= segment.size
            segment.keeps_index = True
            self._indexes.add(segment.index_path, segment.index)
            self[number] = self.archived(segment.entry)
            left.append(segment)
        if left:
            self._known.clear()
        return left


def _is_retained(segments: list[Segment], now_s: float, age_s: float, max_bytes: int) -> bool:
    """Whether retention keeps the first of these segments, and so all of them."""
    if not age_s and not max_bytes:
        return False
    # A time in the future is wrong. Such a segment is at least as old as the next one.
    times_s = (segment.last_ns / 1e9 for segment in segments)
    last_s = next((time_s for time_s in times_s if time_s <= now_s), now_s)
    is_young = not age_s or last_s > now_s - age_s
    return is_young and (not max_bytes or sum(segment.size for segment in segments) <= max_bytes)


def write_index(segment: Segment) -> None:
    """A segment without an index is only slower to open, so a failure is just logged."""
    try:
        segment.write_index()
    except OSError as error:
        logger.warning(
            "%s: cannot write its index, so the next start will read the whole segment: %s",
            segment.path.name,
            error,
        )
