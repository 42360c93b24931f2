"""Which Python files have changed, by size and time of modification."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

__all__ = ["FileWatch"]

_SKIPPED: Final = {"__pycache__", "node_modules", "site-packages"}


class FileWatch:
    """Looks at every Python file below some folders, hidden ones and virtual environments aside."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._seen = self._look()

    def changed(self) -> list[Path]:
        """The files that were changed, added or removed since the last call."""
        before, self._seen = self._seen, self._look()
        return sorted(path for path, _ in before.items() ^ self._seen.items())

    def _look(self) -> dict[Path, tuple[int, int]]:
        found = {}
        for path in self._files():
            try:
                status = path.stat()
            except OSError:
                # Removed in the meantime.
                continue
            found[path] = (status.st_mtime_ns, status.st_size)
        return found

    def _files(self) -> Iterator[Path]:
        for folder in self._folders:
            for place, folders, files in os.walk(folder):
                folders[:] = [
                    name
                    for name in folders
                    if name not in _SKIPPED
                    and not name.startswith(".")
                    and not os.path.exists(os.path.join(place, name, "pyvenv.cfg"))
                ]
                yield from (Path(place, name) for name in files if name.endswith(".py"))
