"""Fsyncs of one log: what is safe on disk, and what must be synced next."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field
from pathlib import Path

from nsparq.storage.files import Files
from nsparq.storage.segment import Segment

logger = logging.getLogger(__name__)

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(slots=True, eq=False)
class Sync:
    """One fsync of everything a log had written when it began."""

    _files: Files
    _opened: list[tuple[int, Segment]]
    _directory: Path
    """The log's directory. The names of new segments in it are synced as well."""
    end: int
    count: int
    """Number of messages to be synced."""
    _is_awaited: bool
    """Whether publishers wait for this. Then new states of the topic and its channels are synced
    too: a message that is acknowledged must find them after a power cut."""
    failed: list[Segment] = field(default_factory=list)
    """Segments whose fsync failed."""
    error: OSError | None = None
    """The disk refused: a power cut may lose these messages."""
    obstacle: OSError | None = None
    """The fsync could not be tried. Nothing is known to be wrong; it has to be repeated."""

    def run(self) -> None:
        sync = self._files.sync if self._is_awaited else self._files.sync_unawaited
        for fd, segment in self._opened:
            try:
                sync(fd)
            except Exception as error:
                self.error = as_os_error(error)
                self.failed.append(segment)
            finally:
                self._files.close(fd)
        try:
            if self._is_awaited:
                self._files.sync_written(self._directory)
            else:
                self._files.sync_names(self._directory)
        except Exception as error:
            found = as_os_error(error)
            if found.errno in _OUT_OF_DESCRIPTORS:
                self.obstacle = found
            else:
                self.error = found


class SyncState:
    """How far a log is synced."""

    def __init__(self, files: Files, directory: Path, committed: int) -> None:
        self._files = files
        self._directory = directory
        self.committed = committed
        """End of the messages known to be on disk. The messages of a failed fsync count as
        committed with the next fsync that works: they are in a doubtful segment."""
        self.is_running = False
        self._sealed: list[tuple[int, Segment]] = []
        """Sealed segments not yet synced, with an open descriptor each."""

    def add_sealed(self, segment: Segment) -> None:
        """Have the next fsync include a segment that was just sealed."""
        if segment.is_doubtful:
            segment.close()
        else:
            self._sealed.append((segment.detach(), segment))

    def is_needed(self, stable: int) -> bool:
        return bool(self._sealed) or self.committed < stable

    def begin(self, active: Segment | None, stable: int, count: int, *, is_awaited: bool) -> Sync:
        """An fsync of everything before `stable`: `count` messages. Raises OSError."""
        opened = []
        if active is not None and not active.is_doubtful:
            opened.append((self._duplicate(active), active))
        opened, self._sealed = self._sealed + opened, []
        self.is_running = True
        return Sync(self._files, opened, self._directory, stable, count, is_awaited)

    def _duplicate(self, segment: Segment) -> int:
        """A descriptor of the segment that the fsync can use and close in its thread."""
        try:
            return self._files.duplicate(segment.fd)
        except OSError as error:
            if error.errno not in _OUT_OF_DESCRIPTORS:
                raise
            # Take the segment's own descriptor. The segment opens its file again when needed.
            return segment.detach()

    def end(self, sync: Sync) -> bool:
        """Note the outcome. False if it failed: it must be repeated, and segments whose fsync
        failed become doubtful."""
        self.is_running = False
        if sync.error is None and sync.obstacle is None:
            self.committed = max(self.committed, sync.end)
            return True
        for segment in sync.failed:
            segment.doubt()
        return False

    def close_descriptors(self) -> None:
        """Forget sealed segments that were not synced."""
        for fd, _ in self._sealed:
            self._files.close(fd)
        self._sealed.clear()


def as_os_error(error: Exception) -> OSError:
    """Any error of work on the disk. Whatever went wrong, nobody must be told that it was done."""
    if isinstance(error, OSError):
        return error
    logger.error("internal error in work on the disk", exc_info=error)
    return OSError(f"internal error: {error!r}")
