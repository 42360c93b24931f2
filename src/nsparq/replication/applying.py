"""A follower's data path: makes the changes of its primary there, one after the other.

A follower that has made the first n changes has the data path that the primary had after them: what
a kill of the primary at that moment would have left. So a follower can be opened as nsqd after any
change.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from nsparq.replication.changes import BadChange, Change, Kind
from nsparq.storage.files import Files


class Applier:
    """Makes changes below `root`. Raises BadChange for a change that cannot follow the others, and
    OSError if the disk refuses."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self._root = root
        self._files = files or Files()
        self._open: dict[int, int] = {}
        """Descriptors by file number."""

    def apply(self, change: Change) -> None:
        _APPLY[change.kind](self, change)

    def close(self) -> None:
        """Close all files. No change may follow."""
        while self._open:
            self._files.close(self._open.popitem()[1])

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if ".." in parts or name.startswith("/"):
            raise BadChange(f"{name!r} is not below the data path")
        return self._root.joinpath(*parts)

    def _fd(self, change: Change) -> int:
        fd = self._open.get(change.file)
        if fd is None:
            raise BadChange(f"{change.kind.name} of a file that is not open")
        return fd

    def _apply_open(self, change: Change) -> None:
        if change.file in self._open:
            raise BadChange(f"{change.name} gets the number of a file that is open")
        self._open[change.file] = self._files.open(self._path(change.name))

    def _apply_write(self, change: Change) -> None:
        self._files.write(self._fd(change), [change.data], change.number)

    def _apply_truncate(self, change: Change) -> None:
        self._files.truncate(self._fd(change), change.number)

    def _apply_sync(self, change: Change) -> None:
        self._files.sync(self._fd(change))

    def _apply_sync_named(self, change: Change) -> None:
        # Meanwhile another file may have got its place. That one is synced by itself.
        with suppress(FileNotFoundError), self._files.opened(self._path(change.name), read_only=True) as fd:
            self._files.sync(fd)

    def _apply_close(self, change: Change) -> None:
        self._files.close(self._fd(change))
        del self._open[change.file]

    def _apply_allocate(self, change: Change) -> None:
        self._files.allocate(self._path(change.name), change.number)

    def _apply_unlink(self, change: Change) -> None:
        self._files.unlink(self._path(change.name))

    def _apply_rename(self, change: Change) -> None:
        source, target = change.names
        self._files.rename(self._path(source), self._path(target))

    def _apply_make_directory(self, change: Change) -> None:
        self._files.make_directory(self._path(change.name))

    def _apply_remove_tree(self, change: Change) -> None:
        self._files.remove_tree(self._path(change.name))

    def _apply_sync_directory(self, change: Change) -> None:
        with suppress(FileNotFoundError):
            self._files.sync_directory(self._path(change.name))


_APPLY: Final[dict[Kind, Callable[[Applier, Change], None]]] = {
    kind: getattr(Applier, f"_apply_{kind.name.lower()}") for kind in Kind
}
