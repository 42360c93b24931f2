"""A follower's data path: makes the changes of its primary there, one after the other. Syncs that
need not be made in order are left to the caller.

A follower that has made the first n changes has the data path that the primary had after them: what
a kill of the primary at that moment would have left. So a follower can be opened as nsqd after any
change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from nsparq.replication.changes import BadChange, Change, Kind
from nsparq.replication.joining import Joining
from nsparq.replication.recording import IN_ORDER
from nsparq.replication.syncing import Sync
from nsparq.storage.files import Files, Work
from nsparq.storage.zeros import zeros


class Applier:
    """Makes changes below `root`. Raises BadChange for a change that cannot follow the others, and
    OSError if the disk refuses."""

    def __init__(self, root: Path, files: Files | None = None, joining: Joining | None = None) -> None:
        """`joining` is needed for a snapshot."""
        self._root = root
        self.joining = joining
        self._files = files or Files()
        self._open: dict[int, int] = {}
        """Descriptors by file number."""
        self._syncs: deque[Sync] = deque()
        self._number = 0
        """Of the present change."""

    def apply(self, change: Change, number: int = 0) -> None:
        """Make the change with this number."""
        self._number = number
        _APPLY[change.kind](self, change)

    def take_syncs(self) -> list[Sync]:
        """Syncs that the caller has to make, or to cancel. Another thread than that of apply() may
        call this."""
        return [self._syncs.popleft() for _ in range(len(self._syncs))]

    def close(self) -> None:
        """Close all files. No change may follow."""
        for sync in self.take_syncs():
            sync.cancel()
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

    def _apply_zeros(self, change: Change) -> None:
        self._files.write(self._fd(change), zeros(change.size), change.number)

    def _apply_truncate(self, change: Change) -> None:
        self._files.truncate(self._fd(change), change.number)

    def _sync(self, change: Change, key: int | str, run: Work, cancel: Work = lambda: None) -> None:
        if change.number == IN_ORDER:
            run()
        else:
            self._syncs.append(Sync(self._number, key, run, cancel))

    def _apply_sync(self, change: Change) -> None:
        # The file may be closed before it is synced.
        fd = self._files.duplicate(self._fd(change))

        def sync() -> None:
            try:
                self._files.sync(fd)
            finally:
                self._files.close(fd)

        self._sync(change, change.file, sync, lambda: self._files.close(fd))

    def _apply_sync_named(self, change: Change) -> None:
        path = self._path(change.name)

        def sync() -> None:
            # Meanwhile another file may have got its place. That one is synced by itself.
            with suppress(FileNotFoundError), self._files.opened(path, read_only=True) as fd:
                self._files.sync(fd)

        self._sync(change, change.name, sync)

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

    def _apply_keep(self, change: Change) -> None:
        self._path(change.name)
        if self.joining is None:
            raise BadChange("KEEP after the snapshot")
        self.joining.keep(change.name, change.number)

    def _apply_make_directory(self, change: Change) -> None:
        if self.joining is not None:
            self.joining.add_directory(change.name)
        self._files.make_directory(self._path(change.name))

    def _apply_remove_tree(self, change: Change) -> None:
        self._files.remove_tree(self._path(change.name))

    def _apply_sync_directory(self, change: Change) -> None:
        path = self._path(change.name)

        def sync() -> None:
            with suppress(FileNotFoundError):
                self._files.sync_directory(path)

        self._sync(change, f"{change.name}/", sync)


_APPLY: Final[dict[Kind, Callable[[Applier, Change], None]]] = {
    kind: getattr(Applier, f"_apply_{kind.name.lower()}") for kind in Kind
}
