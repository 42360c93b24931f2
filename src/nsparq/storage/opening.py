"""Opening a log after a restart: which segments there are, and which messages are missing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsparq.storage.manifest import SegmentEntry

if TYPE_CHECKING:
    from nsparq.storage.disk_log import DiskLog

logger = logging.getLogger(__name__)


def open_log(
    log: DiskLog,
    *,
    clean_end: int,
    epoch: int,
    needed: tuple[int, int] = (0, 0),
    archived: Sequence[SegmentEntry] = (),
) -> None:
    """Read what is on disk. `archived` are the segments that are in an archive.

    `clean_end` is the log's end at the last clean stop, -1 after a crash. No number from `epoch` on
    was used. `needed` are the first number that a reader needs and the end of the messages on disk,
    as other files tell.
    """
    segments = log.segments
    on_disk = segments.bases_on_disk()
    last = max((base for base, has_segment in on_disk.items() if has_segment), default=0)
    known = {entry.base: entry for entry in archived}
    for base in sorted({*on_disk, *known}):
        has_segment = on_disk.get(base, False)
        segment = segments.new(base)
        if base in known and not has_segment:
            if segments and segments[-1].end > base:
                continue  # the log has these messages in another segment
            segment = segments.archived(known[base])
        elif not has_segment:
            _lose(log, base, segment.load_index_end(), f"{segment.path} is missing")
        elif segment.is_foreign():
            text = f"{segment.path} is another segment, and kept as {segment.set_aside().name}"
            _lose(log, base, max(base + 1, segment.load_index_end()), text)
        else:
            log.corrupt_batches += len(segment.open(last=base == last))
            _lose(log, segment.end, segment.index_end, f"{segment.path} is shorter than it was")
        if segment.size == 0:
            segment.remove()
            continue
        if segments:
            log.gaps.add(segments[-1].end, base)
        segments.add(segment)
    segments.confirm(archived)
    low, disk_end = needed
    _lose(log, max(low, log.disk_end), disk_end, f"{log.directory}: the log's end is missing")
    end = log.end
    if segments:
        end = log.disk_end
    elif clean_end >= 0:
        end = clean_end
    if end != clean_end:
        start = max(end, clean_end, epoch)
        # Without a segment the end of the used numbers is unknown: no message of them is left.
        log.gaps.add(end if segments else 0, start)
        end = start
    log.begin_at(end)


def _lose(log: DiskLog, start: int, end: int, reason: str) -> None:
    """Note that messages which were on disk are missing: none if `end` is not after `start`."""
    if start >= end:
        return
    count = log.count(start, end)
    log.corrupt_batches += 1
    log.corrupt_messages += count
    log.gaps.add(start, end)
    log.lost.add(start, end)
    logger.error("%s: %d messages are lost", reason, count)
