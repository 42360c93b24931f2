"""The data directory of an nsqd: its lock, the mark of a clean stop, and the disk space for one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from nsparq.broker.health import Health
from nsparq.errors import StartError
from nsparq.storage.files import Files, RunEach

logger = logging.getLogger(__name__)

TOPICS: Final = "topics"
TOPIC_SUFFIX: Final = ".topic"
TRASH_SUFFIX: Final = ".deleted"
CLEAN_STOP: Final = "clean-stop"
"""A clean stop leaves this file, and the next start removes it. Without it, the last run may have
used sequence numbers that no file names."""
NEED_PREFIX: Final = "!"
"""A file in the directory of topics whose name begins so says what a version must know to read this
data path; it ends as a topic's directory. Versions that do not look for such files take it for a
topic. It sorts before all topics, so they fail there, and their error shows its name."""
NEEDS_HEADERS: Final = "!messages-with-headers-need-a-newer-nsparq" + TOPIC_SUFFIX
_KNOWN: Final = (NEEDS_HEADERS,)
RESERVE_NAME: Final = "reserve"
RESERVE_BYTES: Final = 1 << 20
"""Disk space reserved for a clean stop. Files are replaced a few at a time, so this is enough for
any number of channels, unless they have tens of thousands of unfinished messages each."""


class DataDirectory:
    """The directory that belongs to one running nsqd."""

    def __init__(self, path: Path, files: Files, health: Health) -> None:
        self.path = path
        self.topics = path / TOPICS
        self._files = files
        self._health = health
        self._lock_fd = -1
        self._has_reserve = False
        self.needs_headers = False
        """Whether the directory says that messages have headers."""

    @property
    def is_locked(self) -> bool:
        return self._lock_fd >= 0

    def lock(self) -> None:
        """Changes nothing else. Raises StartError."""
        self._lock_fd = self._files.lock_directory(self.path)

    def read_names(self) -> list[str]:
        """Names of the topics' directories, and of those that are to be removed. Changes nothing.
        Raises StartError if one must know more than this version to read them."""
        names = self._files.list_directory(self.topics)
        needs = [name for name in names if name.startswith(NEED_PREFIX)]
        for name in needs:
            if name not in _KNOWN:
                text = name.removeprefix(NEED_PREFIX).removesuffix(TOPIC_SUFFIX)
                raise StartError(f"data-path {self.path} was used by a newer version of nsparq: {text}")
        self.needs_headers = NEEDS_HEADERS in needs
        return names[len(needs) :]

    def need_headers(self) -> None:
        """Note that a version without headers cannot read this directory any more: it would take
        messages with headers for damage. Raises OSError."""
        self._files.make_directory(self.topics)
        # No temporary file: it would be a name that nobody knows, if nsqd is killed before the
        # rename.
        with self._files.opened(self.topics / NEEDS_HEADERS):
            pass
        self.needs_headers = True

    def unlock(self) -> None:
        self._files.close(self._lock_fd)
        self._lock_fd = -1

    def topic_directory(self, name: str) -> Path:
        return self.topics / (name + TOPIC_SUFFIX)

    def trash_of(self, name: str, incarnation: str) -> Path:
        """New name of a topic's directory before it is removed."""
        return self.topics / f"{name}.{incarnation}{TRASH_SUFFIX}"

    def remove_trash(self, trash: Path) -> None:
        # If a power cut undoes the move, the topic must still be complete.
        self._files.sync_names(trash.parent)
        self._files.remove_tree(trash)

    def take_clean_stop(self) -> bool:
        """Whether the last run stopped cleanly. Removes the mark from the disk, before this run
        uses any sequence number."""
        mark = self.path / CLEAN_STOP
        was_clean = self._files.read_whole(mark) is not None
        self._files.unlink(mark)
        self._files.sync_names(self.path)
        return was_clean

    def leave_clean_stop(self, run_each: RunEach) -> bool:
        """Mark a clean stop for the next start. False if that failed."""
        try:
            self._files.sync_pending(run_each)
            self._files.replace(self.path / CLEAN_STOP, b"", sync=True)
        except OSError as error:
            logger.warning("cannot write %s: %s", CLEAN_STOP, error)
            return False
        return True

    def keep_reserve(self) -> None:
        """Reserve disk space for a clean stop when the disk is full."""
        if self._has_reserve:
            return
        try:
            self._files.allocate(self.path / RESERVE_NAME, RESERVE_BYTES)
        except OSError as error:
            reason = error.strerror or str(error)
            self._health.set(f"cannot reserve disk space for a clean stop: {reason}", "reserve")
        else:
            self._has_reserve = True
            self._health.set(None, "reserve")

    def use_reserve(self) -> None:
        try:
            self._files.unlink(self.path / RESERVE_NAME)
        except OSError as error:
            logger.warning("cannot remove %s: %s", RESERVE_NAME, error)


def topic_of_trash(name: str) -> str:
    """The topic of a directory that trash_of() named."""
    return name.removesuffix(TRASH_SUFFIX).rpartition(".")[0]
