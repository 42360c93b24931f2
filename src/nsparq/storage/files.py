"""The one door to the disk: every system call of the storage layer, so that faults can be injected."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from nsparq.errors import StartError

Buffer = bytes | bytearray | memoryview

_MAX_BUFFERS = 512
"""Below the system's limit for one vectored write."""


class Files:
    """Plain POSIX files. Tests subclass it to fail, tear or delay any call."""

    def __init__(self) -> None:
        self._scratch = bytearray(256 << 10)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

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
        path.unlink(missing_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def make_directory(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            # mkdir(parents=True) would make the parents readable for every user of the machine.
            self.make_directory(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

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

    def replace(self, path: Path, content: bytes, *, sync: bool) -> None:
        """Put `content` at `path` so that a reader, or a restart, sees the old bytes or the new."""
        temporary = path.with_name(path.name + ".tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self.write(fd, [content], 0)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        if sync:
            # A rename outlives a power cut only once its directory is synced too.
            self.sync_directory(path.parent)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

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
