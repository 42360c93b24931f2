"""The one door to the disk: every system call of the storage layer, so that faults can be injected.

What a power cut leaves, and which call decides it:

- The bytes of a file are safe after sync() of a descriptor of it.
- A name that was created, renamed or removed is safe after sync_names() of its directory. That includes the
  names of the directories above, as far as they are new.
- replace() and add_version() with `sync` do both before they return.
- Without `sync` they leave both to sync_pending(), which nsqd calls in a thread, often enough for what
  `--sync-timeout` promises. Until then a power cut leaves the older content, never a torn or an empty file
  in its place; a file that is new may be empty or missing.

Every call that changes a name notes its directory, so no caller has to remember which names are new.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock

from nsparq.errors import StartError

Buffer = bytes | bytearray | memoryview

_MAX_BUFFERS = 512
"""Below the system's limit for one vectored write."""

_MAX_VERSIONS = 4
_SMALL = 16 << 10
"""A file of versions is written anew when it has this many times the size of one, and this size at least."""


class Files:
    """Plain POSIX files. Tests subclass it to fail, tear or delay any call."""

    def __init__(self) -> None:
        self._scratch = bytearray(256 << 10)
        self._changes = count()
        self._lock = Lock()
        self._changed_directories: dict[Path, int] = {}
        """Directories with names that are not synced, and the number of the last change to each."""
        self._unsynced_files: dict[Path, int] = {}
        """The same for files that were written without `sync`."""

    def open(self, path: Path) -> int:
        """For reading and writing; created if it is not there."""
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
        """The bytes if the system has them in memory; None where reading would wait for the disk.

        They stand in a buffer that the next call overwrites: a fresh one for each read would cost more,
        in page faults, than the reading.
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

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def unlink(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)
            self._mark_name(path)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)
        self._mark_name(source)
        self._mark_name(target)

    def make_directory(self, path: Path) -> None:
        """With the directories above it that are missing. All of them are for the owner only."""
        missing = [directory for directory in (path, *path.parents) if not directory.exists()]
        for directory in reversed(missing):
            directory.mkdir(mode=0o700, exist_ok=True)
            self._mark_name(directory)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)
        self._mark_name(path)

    def list_directory(self, path: Path) -> list[str]:
        """Names in the directory, sorted; none when it does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def read_whole(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    # small files: see the top of this module for what survives a power cut

    def replace(self, path: Path, content: bytes, *, sync: bool) -> None:
        """Put `content` at `path` so that a reader, or a restart, sees the old bytes or the new."""
        temporary = path.with_name(path.name + ".tmp")
        # A power cut may leave the new name with none of the bytes: the old ones must not be lost to that.
        is_synced = sync or path.exists()
        fd = self.open(temporary)
        try:
            self.truncate(fd, 0)
            self.write(fd, [content], 0)
            if is_synced:
                self.sync(fd)
        finally:
            self.close(fd)
        self.rename(temporary, path)
        if sync:
            self.sync_names(path.parent)
        elif not is_synced:
            self._mark(self._unsynced_files, path)

    def add_version(self, path: Path, content: bytes, *, sync: bool) -> None:
        """Write `content` behind the older versions in the file. A reader takes the last version that is
        whole, so that nothing need be synced for the older ones to be safe."""
        fd = self.open(path)
        try:
            size = self.size(fd)
            is_large = size > max(_SMALL, _MAX_VERSIONS * len(content))
            if not is_large:
                self._append(fd, content, size)
                if sync:
                    self.sync(fd)
        finally:
            self.close(fd)
        if is_large:
            self.replace(path, content, sync=True)
        elif sync:
            self.sync_names(path.parent)
        else:
            self._mark(self._unsynced_files, path)

    def _append(self, fd: int, content: bytes, size: int) -> None:
        try:
            self.write(fd, [content], size)
        except OSError:
            with suppress(OSError):
                self.truncate(fd, size)
            raise

    # names

    def sync_names(self, directory: Path) -> None:
        """Have the names in a directory on disk, and those of the directories above it."""
        for path in (directory, *directory.parents):
            number = self._changed_directories.get(path)
            if number is not None:
                self.sync_directory(path)
                self._forget(self._changed_directories, path, number)

    def allocate(self, path: Path, size: int) -> None:
        """Have a file take `size` bytes of the disk, whatever they hold."""
        fd = self.open(path)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            self.close(fd)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_pending(self) -> None:
        """Have everything on disk that was written without `sync`: files, then names. May be called in any
        thread. Raises OSError when all of it has been tried; what failed is tried again the next time."""
        failure: OSError | None = None
        with self._lock:
            files, directories = [*self._unsynced_files.items()], [*self._changed_directories.items()]
        for path, number in files:
            try:
                self._sync_file(path)
            except OSError as error:
                failure = error
            else:
                self._forget(self._unsynced_files, path, number)
        for directory, number in directories:
            try:
                with suppress(FileNotFoundError):  # removed since, with all that was in it
                    self.sync_directory(directory)
            except OSError as error:
                failure = error
            else:
                self._forget(self._changed_directories, directory, number)
        if failure is not None:
            raise failure

    def sync_later(self, path: Path) -> None:
        """Have sync_pending() sync a file that was written through a descriptor."""
        self._mark(self._unsynced_files, path)

    @property
    def has_pending(self) -> bool:
        """Whether sync_pending() has anything to do."""
        return bool(self._unsynced_files or self._changed_directories)

    def _sync_file(self, path: Path) -> None:
        try:
            fd = self.open_read(path)
        except FileNotFoundError:
            return
        try:
            self.sync(fd)
        finally:
            self.close(fd)

    def _mark_name(self, path: Path) -> None:
        """Called behind the change: a sync between the two then costs one sync more, and is not missed."""
        self._mark(self._changed_directories, path.parent)

    def _mark(self, changed: dict[Path, int], path: Path) -> None:
        with self._lock:
            changed[path] = next(self._changes)

    def _forget(self, changed: dict[Path, int], path: Path, number: int) -> None:
        """It has been synced, unless it has changed again meanwhile."""
        with self._lock:
            if changed.get(path) == number:
                del changed[path]

    def lock_directory(self, path: Path) -> int:
        """Take the data path for this process, with NSQ's words when another has it."""
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
