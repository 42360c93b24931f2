"""How a node joins: what it has already, what it puts aside, and the changes that have to wait.

A node that was away has most of the files. It names them with checksums of their blocks, and gets
only what differs: a file is kept up to its first block that differs, which suits logs. The primary
goes on meanwhile. Its changes wait in a file until the snapshot is complete.

A data path that was primary may have what nobody acknowledged. So what would be cut off or removed
from it goes to a directory first: see tail.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from nsparq.replication.mark import MARK
from nsparq.storage.files import Buffer, Files

BLOCK: Final = 1 << 20
LINKS: Final = ".joining"
"""How the directories of a primary's snapshots begin."""
FORMER: Final = ".former"
"""The directory of what the node had and the primary has not."""
WAITING: Final = ".changes"
"""The file of changes that wait for the snapshot."""
SET_ASIDE: Final = "set-aside"
"""The directory of messages that were never acknowledged."""
_OWN: Final = frozenset([MARK, FORMER, WAITING, SET_ASIDE])

_HEAD: Final = struct.Struct(">QI")


class Kept(NamedTuple):
    """A file that a node has."""

    size: int
    digests: str
    """Of all blocks, in hexadecimal digits."""

    def has_block(self, position: int, data: bytes) -> int:
        """How many of these bytes the file has at this position: all of a block, or nothing."""
        size = min(BLOCK, self.size - position)
        if position % BLOCK or not 0 < size <= len(data):
            return 0
        start = position // BLOCK * _DIGITS
        return size if self.digests[start : start + _DIGITS] == _digest(data[:size]) else 0


NOTHING: Final = Kept(0, "")
_DIGITS: Final = 32


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_DIGITS // 2).hexdigest()


def walk(root: Path) -> Iterator[tuple[str, list[str], dict[str, int]]]:
    """Every directory of the copy, with the names in it, and the inode numbers of files. Each node
    has some names of its own, which are left out. Raises OSError."""
    waiting = [""]
    while waiting:
        within = waiting.pop()
        directories: list[str] = []
        below: list[str] = []
        names: dict[str, int] = {}
        # A directory that is being removed may be gone.
        with suppress(FileNotFoundError), os.scandir(f"{root}/{within}") as entries:
            for entry in sorted(entries, key=attrgetter("name")):
                if not within and (entry.name in _OWN or entry.name.startswith(LINKS)):
                    continue
                if not entry.is_dir():
                    names[entry.name] = entry.inode()
                    continue
                directories.append(entry.name)
                if not entry.is_symlink():
                    below.append(f"{within}{entry.name}/")
        yield within, directories, names
        waiting += reversed(below)


def inventory(files: Files, root: Path) -> dict[str, Kept]:
    """All files of the data path. Reads them."""
    found: dict[str, Kept] = {}
    for within, _, names in walk(root):
        for name in names:
            digests: list[str] = []
            size = 0
            with files.opened(root / (within + name), read_only=True) as fd:
                while data := files.read(fd, BLOCK, size):
                    size += len(data)
                    digests.append(_digest(data))
            found[within + name] = Kept(size, "".join(digests))
    return found


class Joining:
    """A data path while its node joins."""

    def __init__(self, files: Files, root: Path, *, keeps_former: bool) -> None:
        self._files = files
        self._root = root
        self._keeps_former = keeps_former
        """Whether what the primary has not is put aside, and not removed."""
        self._names: set[str] = set()
        """Files of the snapshot."""
        self._directories: set[str] = set()

    def add_directory(self, name: str) -> None:
        self._directories.add(name)

    def keep(self, name: str, size: int) -> None:
        """The snapshot has this file, and it begins with so many bytes that are here."""
        self._names.add(name)
        path, files = self._root / name, self._files
        if not path.exists():
            return
        with files.opened(path) as fd:
            if files.size(fd) == size:
                return
            if not self._should_put_aside(name):
                files.truncate(fd, size)
                return
            copy = path.with_name(path.name + ".kept")
            with files.opened(copy) as target:
                files.truncate(target, 0)
                for position in range(0, size, BLOCK):
                    data = files.read(fd, min(BLOCK, size - position), position)
                    files.write(target, [data], position)
        self._put_aside(name)
        files.rename(copy, path)

    def remove_others(self) -> None:
        """Remove what the snapshot does not have."""
        gone: list[str] = []
        for within, directories, names in walk(self._root):
            for name in (within + one for one in names):
                if name not in self._names:
                    if self._should_put_aside(name):
                        self._put_aside(name)
                    else:
                        self._files.unlink(self._root / name)
            gone += [within + one for one in directories if within + one not in self._directories]
        for name in gone:
            self._files.remove_tree(self._root / name)

    def _should_put_aside(self, name: str) -> bool:
        # The first one that was put aside is what this node had. Later ones come from the primary.
        return self._keeps_former and not (self._root / FORMER / name).exists()

    def _put_aside(self, name: str) -> None:
        target = self._root / FORMER / name
        self._files.make_directory(target.parent)
        self._files.rename(self._root / name, target)


class WaitingChanges:
    """Blocks of changes in a file, first in, first out. Its caller uses one thread at a time."""

    def __init__(self, files: Files, root: Path) -> None:
        self._files = files
        self._path = root / WAITING
        self._fd = files.open(self._path)
        files.truncate(self._fd, 0)
        files.never_sync(self._path)
        self._read = self._end = 0

    @property
    def is_empty(self) -> bool:
        return self._read == self._end

    def add(self, first: int, data: Buffer) -> None:
        """A block with the number of changes before it."""
        self._files.write(self._fd, [_HEAD.pack(first, len(data)), data], self._end)
        self._end += _HEAD.size + len(data)

    def take(self) -> tuple[int, bytes]:
        """The first block."""
        first, size = _HEAD.unpack(self._files.read(self._fd, _HEAD.size, self._read))
        data = self._files.read(self._fd, size, self._read + _HEAD.size)
        self._read += _HEAD.size + size
        return first, data

    def close(self) -> None:
        """Remove the file."""
        self._files.close(self._fd)
        self._files.unlink(self._path)
