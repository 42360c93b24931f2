"""The data path of a primary at one moment, for a follower that is new or was away.

A snapshot holds the names of that moment by hard links, so files may be renamed and removed while
it is read. Their bytes are read later and may be newer. That does no harm: the follower makes all
changes since that moment, in order, and each writes its bytes at the same place again. So after
those changes it has what the primary has.

A snapshot consists of changes, too. The follower makes them like any others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Final

from nsparq.replication.changes import Change, Kind
from nsparq.replication.joining import BLOCK, LINKS, NOTHING, Kept, walk
from nsparq.replication.recording import IN_ORDER, PrimaryFiles

_FIRST_NUMBER: Final = 1 << 31
"""The primary's own numbers of files do not reach this."""


class Snapshot:
    """Takes the snapshot when it is made. `close()` removes the links.

    The caller notes in `frozen()` of the same files which changes the snapshot includes.
    """

    def __init__(self, files: PrimaryFiles, root: Path, open_files: dict[int, int]) -> None:
        """Call it inside of `files.frozen()`, with what that gives."""
        self._files = files
        self._links = Path(mkdtemp(prefix=LINKS, dir=root))
        self._directories: list[str] = []
        self._names: list[tuple[int, str]]
        """Names of links and of their files. The oldest is first: sealed segments do not change any
        more, and what changes is read late."""
        self._open: dict[int, str | None] = {}
        """Files that the primary has open. None for a file without a name."""
        self.compared = 0
        """Bytes that were read and need not be sent."""
        names: dict[tuple[int, int], str] = {}
        ages: list[tuple[int, int, str]] = []
        for within, directories, found in walk(root):
            self._directories += [within + one for one in directories]
            for name in (within + one for one in found):
                # A directory that is being removed loses its files meanwhile.
                with suppress(FileNotFoundError):
                    link = self._links / str(len(ages))
                    os.link(root / name, link)
                    status = os.stat(link)
                    names[_identity(status)] = name
                    ages.append((status.st_mtime_ns, len(ages), name))
        self._names = [(place, name) for _, place, name in sorted(ages)]
        for number, fd in open_files.items():
            self._open[number] = names.get(_identity(os.fstat(fd)))

    def changes(self, inventory: Mapping[str, Kept]) -> Iterator[Change]:
        """What makes a data path with these files equal to the snapshot, synced. Reads the files on
        the way."""
        for name in self._directories:
            yield Change.of_name(Kind.MAKE_DIRECTORY, name)
        for place, name in self._names:
            yield from self._file(place, name, inventory.get(name, NOTHING))
        for number, open_name in self._open.items():
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


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
