"""The files of a primary: every change to the data path is made and written down, in one order.

A change is written down after it was made, under one lock, so that a follower makes the changes in
the order in which they took effect here. What takes long is written down first and made without the
lock: primary and followers then wait for their disks at the same time. That is possible for syncs,
and for the removal of a directory that nobody uses any more.

While a broker serves, followers make syncs beside the changes, so that a slow disk of theirs delays
nobody who does not wait for a sync. A sync here then returns when theirs are done, too: what this
node does after a sync, and only then, may depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

from nsparq.replication.changes import Change, Kind, encode_write
from nsparq.storage.files import Buffer, Files
from nsparq.storage.zeros import count_zeros

Record = Callable[[list[bytes]], int]
"""Takes the next change, encoded, in pieces, and gives its number. Several threads call it, one at
a time."""
IN_ORDER: Final = 1
"""A sync that a follower makes before it goes on with the next change."""


class PrimaryFiles(Files):
    """Files of the data path `root`. Changes outside of it are not recorded."""

    def __init__(self, root: Path, record: Record) -> None:
        super().__init__()
        self.await_synced: Callable[[int], None] | None = None
        """Waits until the followers have made their syncs up to the change with this number; None
        while they make syncs in order. Called by the thread that syncs."""
        self._root = root
        self._record = record
        self._numbers: dict[int, int] = {}
        """Numbers of files open for writing, by descriptor. Copies of a descriptor share one."""
        self._descriptors: Counter[int] = Counter()
        """How many descriptors each of these has."""
        self._read_names: dict[int, str] = {}
        """Names of files open for reading, by descriptor."""
        self._next_number = count(1)

    @contextmanager
    def frozen(self) -> Iterator[dict[int, int]]:
        """No change is made while the block runs, but the removal of a directory may go on. Gives
        the numbers of open files, with a descriptor of each."""
        with self._lock:
            yield {number: fd for fd, number in self._numbers.items()}

    def _name(self, path: Path) -> str | None:
        """The name below the data path; None if it is not there."""
        if path == self._root or self._root in path.parents:
            return path.relative_to(self._root).as_posix()
        return None

    def _add(self, change: Change) -> int:
        return self._record([change.encode()])

    def _record_name(self, kind: Kind, path: Path, number: int = 0) -> int:
        """Gives the number of the change; 0 if there is none."""
        name = self._name(path)
        return 0 if name is None else self._add(Change.of_name(kind, name, number=number))

    # files

    def open(self, path: Path) -> int:
        with self._lock:
            fd = super().open(path)
            name = self._name(path)
            if name is not None:
                self._numbers[fd] = number = next(self._next_number)
                self._descriptors[number] = 1
                self._add(Change.of_name(Kind.OPEN, name, file=number))
            return fd

    def open_read(self, path: Path) -> int:
        with self._lock:
            fd = super().open_read(path)
            name = self._name(path)
            if name is not None:
                self._read_names[fd] = name
            return fd

    def duplicate(self, fd: int) -> int:
        with self._lock:
            copy = super().duplicate(fd)
            number = self._numbers.get(fd)
            if number is not None:
                self._numbers[copy] = number
                self._descriptors[number] += 1
            return copy

    def close(self, fd: int) -> None:
        with self._lock:
            self._read_names.pop(fd, None)
            number = self._numbers.pop(fd, None)
            super().close(fd)
            if number is not None:
                self._descriptors[number] -= 1
                if not self._descriptors[number]:
                    del self._descriptors[number]
                    self._add(Change(Kind.CLOSE, number))

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        with self._lock:
            try:
                super().write(fd, buffers, position)
            except OSError:
                # A part may be written. The caller cuts it off, or leaves it for the next start.
                self._record_write(fd, [self.read(fd, sum(map(len, buffers)), position)], position)
                raise
            self._record_write(fd, buffers, position)

    def _record_write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        number = self._numbers.get(fd)
        if number is None:
            return
        # Zeros for what comes later are not sent.
        count = count_zeros(buffers)
        content = buffers[: len(buffers) - count] if count else buffers
        self._record(encode_write(number, position, content))
        if count:
            behind = position + sum(map(len, content))
            self._add(Change.zeros(number, behind, sum(map(len, buffers[-count:]))))

    def truncate(self, fd: int, size: int) -> None:
        with self._lock:
            super().truncate(fd, size)
            number = self._numbers.get(fd)
            if number is not None:
                self._add(Change(Kind.TRUNCATE, number, size))

    def sync(self, fd: int) -> None:
        self._sync(fd, self.await_synced)

    def sync_unawaited(self, fd: int) -> None:
        self._sync(fd, self.await_synced and _do_not_wait)

    def _sync(self, fd: int, wait: Callable[[int], None] | None) -> None:
        order = IN_ORDER if wait is None else 0
        with self._lock:
            number, name = self._numbers.get(fd), self._read_names.get(fd)
            recorded = 0
            if number is not None:
                recorded = self._add(Change(Kind.SYNC, number, order))
            elif name is not None:
                recorded = self._add(Change.of_name(Kind.SYNC_NAMED, name, number=order))
        super().sync(fd)
        if wait is not None and recorded:
            wait(recorded)

    def allocate(self, path: Path, size: int) -> None:
        with self._lock:
            super().allocate(path, size)
            self._record_name(Kind.ALLOCATE, path, size)

    # names

    def unlink(self, path: Path) -> None:
        with self._lock:
            super().unlink(path)
            self._record_name(Kind.UNLINK, path)

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            super().rename(source, target)
            first, second = self._name(source), self._name(target)
            assert first is not None and second is not None, "a name may not leave the data path"
            self._add(Change.rename(first, second))

    def make_directory(self, path: Path) -> None:
        with self._lock:
            super().make_directory(path)
            self._record_name(Kind.MAKE_DIRECTORY, path)

    def remove_tree(self, path: Path) -> None:
        with self._lock:
            self._record_name(Kind.REMOVE_TREE, path)
        super().remove_tree(path)

    def sync_directory(self, path: Path) -> None:
        wait = self.await_synced
        with self._lock:
            recorded = self._record_name(Kind.SYNC_DIRECTORY, path, IN_ORDER if wait is None else 0)
        super().sync_directory(path)
        if wait is not None and recorded:
            wait(recorded)


def _do_not_wait(number: int) -> None:
    pass
