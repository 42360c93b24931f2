"""Segments whose fsync failed: see Segment.is_doubtful. Only a new file can be known to be on
disk."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from nsparq.errors import CorruptBatch
from nsparq.storage.recovery import Damage, scan
from nsparq.storage.segment import COPY_SUFFIX, Segment

logger = logging.getLogger(__name__)

_COPY_SIZE: Final = 1 << 20


def sync_each(segments: Iterable[Segment]) -> None:
    """Sync segments of an earlier run, and wait for it. Those whose fsync fails become doubtful."""
    for segment in segments:
        try:
            with segment.files.opened(segment.path, read_only=True) as fd:
                segment.files.sync(fd)
        except OSError as error:
            segment.doubt()
            logger.error("%s: fsync failed: %s", segment.path, error)


def replace_by_copy(segment: Segment) -> None:
    """Replace the file by a synced copy. Nothing may be appended any more. A thread may call this;
    Segment.copied() then makes the segment usable again. Raises OSError, with the file as it
    was."""
    copy, files = segment.path.with_suffix(COPY_SUFFIX), segment.files
    with files.opened(segment.path, read_only=True) as source, files.opened(copy) as target:
        files.truncate(target, 0)
        for position in range(0, segment.size, _COPY_SIZE):
            size = min(_COPY_SIZE, segment.size - position)
            files.write(target, [files.read(source, size, position)], position)
        files.sync(target)
        _log_new_damage(segment, target)
    files.rename(copy, segment.path)
    files.sync_names(segment.path.parent)


def _log_new_damage(segment: Segment, fd: int) -> None:
    """Report messages that the system dropped because it could not write them."""

    def read(size: int, position: int) -> bytes:
        return segment.files.read(fd, size, position)

    for item in scan(read, segment.size, first=segment.base):
        if isinstance(item, Damage) and item.position not in segment.damage:
            reason = "messages are lost to a failed fsync"
            logger.error("%s", CorruptBatch(segment.path, item.position, reason))
