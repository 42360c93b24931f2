"""The data path of a primary at one moment, for a follower that is new or was away.

A snapshot holds the names of that moment by hard links, so files may be renamed and removed while
it is read. Most links are made before that moment, because the primary stands still in it. The
bytes are read later and may be newer. That does no harm: the follower makes all changes since that
moment, in order, and each writes its bytes at the same place again. So after those changes it has
what the primary has.

A snapshot consists of changes, too. The follower makes them like any others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Final, NamedTuple

from nsparq.replication.changes import Change, Kind
from nsparq.replication.joining import BLOCK, LINKS, NOTHING, Kept, walk
from nsparq.replication.recording import IN_ORDER, PrimaryFiles

_FIRST_NUMBER: Final = 1 << 31
"""The primary's own numbers of files do not reach this."""


class _Link(NamedTuple):
    inode: int
    """Of the file. No other file gets this number as long as there is the link."""
    modified_ns: int
    place: int
    """Name of the link."""


class Snapshot:
    """link() in a thread, then take(), then changes(). `close()` removes the links."""

    def __init__(self, files: PrimaryFiles, root: Path) -> None:
        self._files = files
        self._root = root
        self._links = Path(mkdtemp(prefix=LINKS, dir=root))
        self._linked: dict[str, _Link] = {}
        """By the names that the files had when they were linked."""
        self._places = count()
        self._directories: list[str] = []
        self._names: dict[str, _Link] = {}
        """Names of the files at the moment of the snapshot."""
        self._open: dict[int, int] = {}
        """Inodes of the files that the primary has open."""
        self.compared = 0
        """Bytes that were read and need not be sent."""

    def link(self, should_end: Callable[[], bool] = lambda: False) -> None:
        """Link files while the primary goes on: take() finds most of them linked."""
        for within, _, names in walk(self._root):
            for name in names:
                if should_end():
                    return
                self._link(within + name)

    def take(self, open_files: Mapping[int, int]) -> None:
        """Take the snapshot. Call it inside of `files.frozen()`, with what that gives. The caller
        notes there which changes the snapshot includes."""
        for within, directories, names in walk(self._root):
            self._directories += [within + one for one in directories]
            for one, inode in names.items():
                name = within + one
                link = self._linked.get(name)
                if link is None or link.inode != inode:
                    link = self._link(name)
                if link is not None:
                    self._names[name] = link
        self._open = {number: os.fstat(fd).st_ino for number, fd in open_files.items()}

    def _link(self, name: str) -> _Link | None:
        # A directory that is being removed loses its files meanwhile.
        with suppress(FileNotFoundError):
            place = next(self._places)
            os.link(f"{self._root}/{name}", f"{self._links}/{place}")
            status = os.stat(f"{self._links}/{place}")
            self._linked[name] = link = _Link(status.st_ino, status.st_mtime_ns, place)
            return link
        return None

    def changes(self, inventory: Mapping[str, Kept]) -> Iterator[Change]:
        """What makes a data path with these files equal to the snapshot, synced. Reads the files on
        the way."""
        for name in self._directories:
            yield Change.of_name(Kind.MAKE_DIRECTORY, name)
        # The oldest first: sealed segments do not change any more, and what changes is read late.
        for name, link in sorted(self._names.items(), key=_age):
            yield from self._file(link.place, name, inventory.get(name, NOTHING))
        # There are no hard links between file systems, so numbers of inodes are enough.
        by_inode = {link.inode: name for name, link in self._names.items()}
        for number, inode in self._open.items():
            open_name = by_inode.get(inode)
            yield Change.of_name(Kind.OPEN, open_name or LINKS, file=number)
            if open_name is None:
                # What the primary still writes there is seen by nobody.
                yield Change.of_name(Kind.UNLINK, LINKS)
        for name in ("", *self._directories):
            yield Change.of_name(Kind.SYNC_DIRECTORY, name, number=IN_ORDER)

    def _file(self, place: int, name: str, kept: Kept) -> Iterator[Change]:
        number, position, is_equal = _FIRST_NUMBER + place, 0, True
        with self._files.opened(self._links / str(place), read_only=True) as fd:
            while is_equal:
                data = self._files.read(fd, BLOCK, position)
                size = kept.has_block(position, data)
                is_equal = size > 0
                position += size
                self.compared += size
            yield Change.of_name(Kind.KEEP, name, number=position)
            yield Change.of_name(Kind.OPEN, name, file=number)
            while data := self._files.read(fd, BLOCK, position):
                yield Change(Kind.WRITE, number, position, data)
                position += len(data)
        yield Change(Kind.SYNC, number, IN_ORDER)
        yield Change(Kind.CLOSE, number)

    def close(self) -> None:
        rmtree(self._links)


def remove_left_links(root: Path) -> None:
    """Remove the links of snapshots that an earlier run did not close."""
    for path in root.glob(LINKS + "*"):
        rmtree(path)


def _age(item: tuple[str, _Link]) -> tuple[int, int]:
    return item[1].modified_ns, item[1].place
