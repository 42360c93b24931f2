"""The only door to the disk: every system call of the storage layer, so that tests can inject
faults.

What survives a power cut, and by which call:

- The bytes of a file are safe after sync() of a descriptor of it.
- A name that was created, renamed or removed is safe after sync_names() of its directory. That
  includes the new names of the directories above.
- replace() with `sync` does both before it returns.
- add_version(), and replace() without `sync`, leave both to sync_written(), for one directory, or
  sync_pending(), for all. nsqd calls these in threads: sync_written() before it answers a request,
  sync_pending() as often as `--sync-timeout` requires. Until then a power cut leaves the older
  content, never a torn or empty file in its place; a new file may be empty or missing.

Every call that changes a name notes its directory, so no caller has to remember which names are
new. add_version() never waits for the disk. The event loop calls it, and replace() only for names
that are new.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Condition, RLock
from typing import NamedTuple

from nsparq.errors import StartError

Buffer = bytes | bytearray | memoryview

Work = Callable[[], None]
RunEach = Callable[[Sequence[Work]], None]
"""Runs each work, and returns when all are done."""

_MAX_BUFFERS = 512
"""Below the system's limit for one vectored write."""

_MAX_VERSIONS = 4
_SMALL = 16 << 10
"""A file of versions is rewritten when it exceeds both this size and so many versions."""


class _Written(NamedTuple):
    """A file that was written without `sync`."""

    number: int
    """Number of the change; higher if the file was written again since."""
    start: int
    """Start of its last version; -1 for a file without versions."""


def run_one_by_one(works: Sequence[Work]) -> None:
    for work in works:
        work()


class Files:
    """Plain POSIX files. Tests subclass it to fail, tear or delay any call.

    It has more than 30 methods: one for each system call, and the pending syncs behind them.
    """

    def __init__(self) -> None:
        self._scratch = bytearray(256 << 10)
        self._changes = count()
        self._lock = RLock()
        self._changed_directories: dict[Path, int] = {}
        """Directories with unsynced names, and the number of the last change to each."""
        self._unsynced_files: dict[Path, dict[Path, _Written]] = {}
        """Files written without `sync`, by directory."""
        self._appending: set[Path] = set()
        """Files to which a version is being added."""
        self._rewritten = Condition(self._lock)
        self._rewriting: set[Path] = set()
        """Files that a thread rewrites."""
        self._large: set[Path] = set()
        """Files of versions that the next sync rewrites, if it can."""
        self._doubtful: set[Path] = set()
        """Files that the next sync must rewrite, because a sync failed: the system may have dropped
        what it could not write, and another sync of the same file would not tell."""

    def open(self, path: Path) -> int:
        """For reading and writing; created if it does not exist."""
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._mark_name(path)
            return fd

    def open_read(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def duplicate(self, fd: int) -> int:
        return os.dup(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    @contextmanager
    def opened(self, path: Path, *, read_only: bool = False) -> Iterator[int]:
        """A descriptor for as long as the block runs."""
        fd = self.open_read(path) if read_only else self.open(path)
        try:
            yield fd
        finally:
            self.close(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        """Write all of `buffers` from `position` on, or raise."""
        if len(buffers) > _MAX_BUFFERS:
            buffers = [b"".join(buffers)]
        written = os.pwritev(fd, buffers, position)
        if written != sum(map(len, buffers)):
            rest = memoryview(b"".join(buffers))
            while written < len(rest):
                written += os.pwrite(fd, rest[written:], position + written)

    def read(self, fd: int, size: int, position: int) -> bytes:
        return os.pread(fd, size, position)

    def read_cached(self, fd: int, size: int, position: int) -> memoryview | None:
        """The bytes, if the system has them in memory; None if reading would wait for the disk.

        The next call overwrites the buffer. A new buffer for each read would cost more in page
        faults than the reading.
        """
        if size > len(self._scratch):
            self._scratch = bytearray(size)
        view = memoryview(self._scratch)[:size]
        try:
            count = os.preadv(fd, [view], position, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return None
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return memoryview(self.read(fd, size, position))
            raise
        return view[:count]

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_unawaited(self, fd: int) -> None:
        """The same, if nothing that follows depends on it."""
        self.sync(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def unlink(self, path: Path) -> None:
        # A thread that rewrites the file must not bring it back.
        self._forget_file(path)
        with suppress(FileNotFoundError):
            os.unlink(path)
            self._mark_name(path)

    def rename(self, source: Path, target: Path) -> None:
        # The files of a directory that is thrown away must not come back, either.
        for path in [*self._unsynced_files.get(source, ())]:
            self._forget_file(path)
        os.replace(source, target)
        self._mark_name(source)
        self._mark_name(target)

    def make_directory(self, path: Path) -> None:
        """Make the directory and missing ones above it, for the owner only."""
        missing = [directory for directory in (path, *path.parents) if not directory.exists()]
        for directory in reversed(missing):
            directory.mkdir(mode=0o700, exist_ok=True)
            self._mark_name(directory)

    def remove_tree(self, path: Path) -> None:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if path.exists():
                raise
        self._mark_name(path)

    def list_directory(self, path: Path) -> list[str]:
        """Names in the directory, sorted; none if it does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def read_whole(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    # small files: the module docstring says what survives a power cut

    def replace(self, path: Path, content: bytes, *, sync: bool) -> None:
        """Replace a file so that a reader or a restart sees either the old bytes or the new
        ones."""
        # A power cut may leave the new name without its bytes. The old ones must survive that.
        is_synced = sync or path.exists()
        self.rename(self._write_temporary(path, content, sync=is_synced), path)
        if is_synced:
            self._forget_file(path)
        else:
            self._mark_file(path, -1)
        if sync:
            self.sync_names(path.parent)

    def _write_temporary(self, path: Path, content: bytes, *, sync: bool) -> Path:
        """Write the file that will be renamed to `path`; gives its name."""
        temporary = path.with_name(path.name + ".tmp")
        with self.opened(temporary) as fd:
            self.truncate(fd, 0)
            self.write(fd, [content], 0)
            if sync:
                self.sync(fd)
        return temporary

    def add_version(self, path: Path, content: bytes) -> None:
        """Append `content` to the older versions in the file, without waiting for the disk. A
        reader takes the last whole version, so older ones are safe without a sync. One call at a
        time for each file. The next sync rewrites a file that has become large."""
        with self._lock:
            self._appending.add(path)
        try:
            with self.opened(path) as fd:
                size = self.size(fd)
                self._append(path, fd, content, size)
            with self._lock:
                self._mark_file(path, size)
                if size > max(_SMALL, _MAX_VERSIONS * len(content)):
                    self._large.add(path)
        finally:
            with self._lock:
                self._appending.discard(path)

    def _append(self, path: Path, fd: int, content: bytes, size: int) -> None:
        try:
            self.write(fd, [content], size)
        except OSError:
            with suppress(OSError):
                # A new file goes: an empty one would look damaged at the next start.
                self.truncate(fd, size) if size else self.unlink(path)
            raise

    # names

    def sync_names(self, directory: Path) -> None:
        """Sync the names in a directory and in the directories above it."""
        for path in (directory, *directory.parents):
            number = self._changed_directories.get(path)
            if number is not None:
                self.sync_directory(path)
                self._forget_names(path, number)

    def allocate(self, path: Path, size: int) -> None:
        """Reserve `size` bytes of the disk for a file."""
        with self.opened(path) as fd:
            os.posix_fallocate(fd, 0, size)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_written(self, directory: Path) -> None:
        """Sync all files in a directory that were written without `sync`, and the names in it and
        above it. Any thread may call this."""
        with self._lock:
            files = [*self._unsynced_files.get(directory, {}).items()]
        for path, written in files:
            self._sync_file(path, written)
        with suppress(FileNotFoundError):  # the directory was removed since
            self.sync_names(directory)

    def sync_pending(self, run_each: RunEach = run_one_by_one) -> None:
        """The same for all directories. Tries everything, then raises OSError if something failed;
        the next call repeats that. `run_each` may use threads."""
        failures: list[OSError] = []

        def sync_files(files: dict[Path, _Written]) -> None:
            for path, written in files.items():
                try:
                    self._sync_file(path, written)
                except OSError as error:
                    failures.append(error)

        def sync_names(directory: Path, number: int) -> None:
            try:
                with suppress(FileNotFoundError):  # the directory was removed since
                    self.sync_directory(directory)
            except OSError as error:
                failures.append(error)
            else:
                self._forget_names(directory, number)

        with self._lock:
            files = [dict(found) for found in self._unsynced_files.values()]
        run_each([partial(sync_files, found) for found in files])
        # After the files: rewritten files have new names.
        with self._lock:
            directories = [*self._changed_directories.items()]
        run_each([partial(sync_names, *changed) for changed in directories])
        if failures:
            raise failures[0]

    def sync_later(self, path: Path) -> None:
        """Let sync_pending() sync a file that was written through a descriptor."""
        self._mark_file(path, -1)

    def never_sync(self, path: Path) -> None:
        """Do not sync this file: it is not needed after a power cut."""
        self._forget_file(path)

    @property
    def has_pending(self) -> bool:
        """Whether sync_pending() has work."""
        return bool(self._unsynced_files or self._changed_directories)

    def sync_file(self, path: Path) -> None:
        """Sync a file that was written without `sync`, and its name."""
        written = self._unsynced_files.get(path.parent, {}).get(path)
        if written is not None:
            self._sync_file(path, written)
        self.sync_names(path.parent)

    def _sync_file(self, path: Path, written: _Written) -> None:
        try:
            if not self._rewrite(path, written):
                self._sync_in_place(path)
        except FileNotFoundError:  # removed since
            pass
        with self._lock:
            if self._unsynced_files.get(path.parent, {}).get(path) == written:
                self._forget_file(path)

    def _sync_in_place(self, path: Path) -> None:
        with self.opened(path, read_only=True) as fd:
            try:
                self.sync(fd)
            except OSError:
                self._doubtful.add(path)
                raise

    def _rewrite(self, path: Path, written: _Written) -> bool:
        """Rewrite a file that has become large or doubtful, with its last version alone. False if
        it needs no rewriting, or could not be rewritten and is not doubtful. One thread at a time
        rewrites a file; others wait, because they must not call it synced before."""
        with self._rewritten:
            self._rewritten.wait_for(lambda: path not in self._rewriting)
            is_doubtful = path in self._doubtful
            if not is_doubtful and path not in self._large:
                return False
            self._rewriting.add(path)
        try:
            if self._replace_by_last_version(path, written):
                return True
        except OSError:
            if is_doubtful:
                raise
            # Most likely the disk is full. The file is good as it is.
        finally:
            with self._rewritten:
                self._rewriting.remove(path)
                self._rewritten.notify_all()
        if is_doubtful and self._is_unsynced(path):
            raise OSError(errno.EAGAIN, "a sync failed, and the file has changed since", str(path))
        return False

    def _replace_by_last_version(self, path: Path, written: _Written) -> bool:
        """False if the file was removed, or another thread adds a version."""
        start = max(written.start, 0)
        with self.opened(path, read_only=True) as fd:
            content = self.read(fd, self.size(fd) - start, start)
        temporary = self._write_temporary(path, content, sync=True)
        with self._lock:
            is_unchanged = self._unsynced_files.get(path.parent, {}).get(path) == written
            if is_unchanged and path not in self._appending:
                self.rename(temporary, path)
                self._large.discard(path)
                self._doubtful.discard(path)
                return True
        self.unlink(temporary)
        return False

    def _is_unsynced(self, path: Path) -> bool:
        return path in self._unsynced_files.get(path.parent, {})

    def _mark_name(self, path: Path) -> None:
        """Called after the change: a sync in between then costs one more sync, but none is
        missed."""
        with self._lock:
            self._changed_directories[path.parent] = next(self._changes)

    def _mark_file(self, path: Path, start: int) -> None:
        with self._lock:
            files = self._unsynced_files.setdefault(path.parent, {})
            files[path] = _Written(next(self._changes), start)

    def _forget_names(self, directory: Path, number: int) -> None:
        """The names in it were synced, unless they changed again meanwhile."""
        with self._lock:
            if self._changed_directories.get(directory) == number:
                del self._changed_directories[directory]

    def _forget_file(self, path: Path) -> None:
        """The file was synced, or is gone."""
        with self._lock:
            files = self._unsynced_files.get(path.parent, {})
            files.pop(path, None)
            if not files:
                self._unsynced_files.pop(path.parent, None)
            self._large.discard(path)
            self._doubtful.discard(path)

    def lock_directory(self, path: Path) -> int:
        """Lock the data path for this process. The error texts are NSQ's."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StartError(f"failed to lock data-path: open {path}: {_reason(error)}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise StartError(
                f"failed to lock data-path: cannot flock directory {path} - {_reason(error)} "
                "(possibly in use by another instance of nsqd)"
            ) from error
        return fd


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
