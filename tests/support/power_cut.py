"""Records every call to the disk, and builds the states that a power cut may leave.

RecordedFiles works on a real directory and records writes, changes of names and syncs. cut()
builds, in another directory, one of the states that may be found after a power cut. With POSIX
alone (STRICT):

- Synced bytes of a file are kept. Later writes may be kept or lost: whole, torn, or page by page in
  any order.
- Names are as they were when their directory was synced. Later changes may be kept or lost, in any
  order. If the name of a directory is lost, so is its content.

A file system like ext4 (JOURNAL) guarantees more: names change in one order for the whole disk,
every sync makes all earlier changes durable, and a rename over another file also syncs the bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from nsparq.storage.files import Buffer, Files

STRICT = "strict"
JOURNAL = "journal"
MODELS = (STRICT, JOURNAL)

_PAGE = 4096

Change = list[tuple[str, "Node | None"]]
"""Names in a directory and their new nodes; None for a removed name. They change together."""


class File:
    """The writes to one file, with the number of each call."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, int, bytes | None]] = []
        """Number, position and bytes; None if the file was truncated at the position."""
        self.syncs: list[int] = []
        self.replaced: list[int] = []
        """Numbers of the renames of this file over another one."""


class Directory:
    def __init__(self) -> None:
        self.names: dict[str, Node] = {}
        """At present."""
        self.changes: list[tuple[int, Change]] = []
        self.syncs: list[int] = []


Node = File | Directory


class RecordedFiles(Files):
    """The files of a running nsqd. Syncs are only recorded, to save time."""

    def __init__(self, root: Path, clock: Callable[[], int]) -> None:
        super().__init__()
        self.root = root
        self.tree = Directory()
        self.times: list[int] = []
        """The time of each call."""
        self._clock = clock
        self._open: dict[int, File] = {}

    def now(self) -> int:
        """The number of calls so far."""
        return len(self.times)

    def _tick(self) -> int:
        self.times.append(self._clock())
        return len(self.times)

    def _directory(self, path: Path) -> Directory | None:
        """None for a path outside of the root."""
        if path != self.root and self.root not in path.parents:
            return None
        node: Node = self.tree
        for name in path.relative_to(self.root).parts:
            assert isinstance(node, Directory)
            node = node.names[name]
        assert isinstance(node, Directory)
        return node

    def _change(self, directory: Directory, change: Change) -> None:
        directory.changes.append((self._tick(), change))
        for name, node in change:
            if node is None:
                directory.names.pop(name, None)
            else:
                directory.names[name] = node

    def _find(self, path: Path) -> File:
        directory = self._directory(path.parent)
        assert directory is not None
        node = directory.names.get(path.name)
        if node is None:
            node = File()
            self._change(directory, [(path.name, node)])
        assert isinstance(node, File)
        return node

    def open(self, path: Path) -> int:
        fd = super().open(path)
        self._open[fd] = self._find(path)
        return fd

    def open_read(self, path: Path) -> int:
        fd = super().open_read(path)
        self._open[fd] = self._find(path)
        return fd

    def duplicate(self, fd: int) -> int:
        copy = super().duplicate(fd)
        self._open[copy] = self._open[fd]
        return copy

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        super().close(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        super().write(fd, buffers, position)
        self._open[fd].writes.append((self._tick(), position, b"".join(buffers)))

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._open[fd].writes.append((self._tick(), size, None))

    def sync(self, fd: int) -> None:
        self._open[fd].syncs.append(self._tick())

    def sync_directory(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(path)
        directory = self._directory(path)
        if directory is not None:
            directory.syncs.append(self._tick())

    def unlink(self, path: Path) -> None:
        is_there = path.exists()
        super().unlink(path)
        directory = self._directory(path.parent) if is_there else None
        if directory is not None:
            self._change(directory, [(path.name, None)])

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        above, below = self._directory(source.parent), self._directory(target.parent)
        assert above is not None and below is not None
        node = above.names[source.name]
        is_replacing = target.name in below.names
        if above is below:
            self._change(above, [(source.name, None), (target.name, node)])
        else:
            self._change(below, [(target.name, node)])
            self._change(above, [(source.name, None)])
        if is_replacing and isinstance(node, File):
            node.replaced.append(self.now())

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        if self.root not in path.parents:
            return
        if path.parent != self.root:
            self.make_directory(path.parent)
        above = self._directory(path.parent)
        assert above is not None
        if path.name not in above.names:
            self._change(above, [(path.name, Directory())])

    def remove_tree(self, path: Path) -> None:
        super().remove_tree(path)
        above = self._directory(path.parent)
        assert above is not None
        node = above.names[path.name]
        assert isinstance(node, Directory)
        self._remove_all(node)
        self._change(above, [(path.name, None)])

    def _remove_all(self, directory: Directory) -> None:
        for name, node in [*directory.names.items()]:
            if isinstance(node, Directory):
                self._remove_all(node)
            self._change(directory, [(name, None)])


class Cut:
    """One state of the disk after a power cut."""

    def __init__(self, record: RecordedFiles, moment: int, model: str, chance: random.Random) -> None:
        self._record = record
        self._moment = moment
        """The last call that was made."""
        self._model = model
        self._chance = chance
        self._journal = moment
        if model == JOURNAL:
            synced = max((n for n in _all_syncs(record.tree) if n <= moment), default=0)
            self._journal = chance.choice([synced, moment, chance.randint(synced, moment)])

    def write(self, target: Path) -> None:
        self._write(self._record.tree, target)

    def _write(self, directory: Directory, target: Path) -> None:
        target.mkdir(exist_ok=True)
        for name, node in self._names(directory).items():
            if isinstance(node, Directory):
                self._write(node, target / name)
            else:
                (target / name).write_bytes(self._content(node))

    def _names(self, directory: Directory) -> dict[str, Node]:
        synced = max((n for n in directory.syncs if n <= self._moment), default=0)
        made = [change for number, change in directory.changes if number <= synced]
        pending = [
            (number, change) for number, change in directory.changes if synced < number <= self._moment
        ]
        if self._model == JOURNAL:
            made += [change for number, change in pending if number <= self._journal]
        else:
            made += self._some([change for _, change in pending])
        names: dict[str, Node] = {}
        for change in made:
            for name, node in change:
                if node is None:
                    names.pop(name, None)
                else:
                    names[name] = node
        return names

    def _some(self, changes: list[Change]) -> list[Change]:
        """None, all, the first, or any of them."""
        match self._chance.randrange(4):
            case 0:
                return []
            case 1:
                return changes
            case 2:
                return changes[: self._chance.randint(0, len(changes))]
        return [change for change in changes if self._chance.random() < 0.5]

    def _content(self, file: File) -> bytes:
        kept = [*file.syncs]
        if self._model == JOURNAL:
            kept += [number for number in file.replaced if number <= self._journal]
        synced = max((n for n in kept if n <= self._moment), default=0)
        content = bytearray()
        for number, position, data in file.writes:
            if number <= synced:
                _put(content, position, data)
        pending = [(at, data) for number, at, data in file.writes if synced < number <= self._moment]
        match self._chance.randrange(4):
            case 0:
                pass
            case 1:
                for position, data in pending:
                    _put(content, position, data)
            case 2:
                self._put_torn(content, pending)
            case 3:
                self._put_pages(content, pending)
        return bytes(content)

    def _put_torn(self, content: bytearray, pending: list[tuple[int, bytes | None]]) -> None:
        """The first writes, and the beginning of the next one."""
        count = self._chance.randint(0, len(pending))
        for position, data in pending[:count]:
            _put(content, position, data)
        if count < len(pending):
            position, torn = pending[count]
            if torn:
                _put(content, position, torn[: self._chance.randrange(len(torn))])

    def _put_pages(self, content: bytearray, pending: list[tuple[int, bytes | None]]) -> None:
        """Some of the pages; the others are unchanged, or zero."""
        for position, data in pending:
            if data is None:
                if self._chance.random() < 0.5:
                    _put(content, position, None)
                continue
            start = position
            while start < position + len(data):
                end = min((start // _PAGE + 1) * _PAGE, position + len(data))
                if self._chance.random() < 0.5:
                    _put(content, start, data[start - position : end - position])
                start = end


def _put(content: bytearray, position: int, data: bytes | None) -> None:
    if data is None:
        del content[position:]
    if len(content) < position:
        content.extend(bytes(position - len(content)))
    if data is not None:
        content[position : position + len(data)] = data


def _all_syncs(directory: Directory) -> list[int]:
    """Of all files and directories that ever existed."""
    found, seen, waiting = [], set(), [directory]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found += one.syncs
        for _, change in one.changes:
            for _, node in change:
                if isinstance(node, Directory):
                    waiting.append(node)
                elif node is not None:
                    found += node.syncs
    return found


def cut(record: RecordedFiles, moment: int, model: str, chance: random.Random, target: Path) -> None:
    """Build at `target` a state that a power cut after the call number `moment` may leave."""
    Cut(record, moment, model, chance).write(target)
