"""Which Python files have changed, by size and time of modification."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

__all__ = ["FileWatch"]

_SKIPPED: Final = {"__pycache__", "node_modules", "site-packages"}


class FileWatch:
    """Looks at every Python file below some folders, hidden ones and virtual environments aside."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._seen: dict[Path, tuple[int, int]] = {}
        self._seen = self._look()

    def changed(self) -> list[Path]:
        """The files that were changed, added or removed since the last call."""
        before, self._seen = self._seen, self._look()
        return sorted(path for path, _ in before.items() ^ self._seen.items())

    def _look(self) -> dict[Path, tuple[int, int]]:
        found = {}
        unread: set[Path] = set()

        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                unread.add(Path(error.filename))

        for path in self._files(failed):
            try:
                status = path.stat()
            except OSError as error:
                failed(error)
                continue
            found[path] = (status.st_mtime_ns, status.st_size)
        if unread:
            # Without a free descriptor, no folder can be read. Its files are not removed.
            kept = (path for path in self._seen if not unread.isdisjoint((path, *path.parents)))
            found |= {path: self._seen[path] for path in kept if path not in found}
        return found

    def _files(self, on_error: Callable[[OSError], None]) -> Iterator[Path]:
        for folder in self._folders:
            for place, folders, files in os.walk(folder, onerror=on_error):
                folders[:] = [
                    name
                    for name in folders
                    if name not in _SKIPPED
                    and not name.startswith(".")
                    and not os.path.exists(os.path.join(place, name, "pyvenv.cfg"))
                ]
                yield from (Path(place, name) for name in files if name.endswith(".py"))
