"""The files of one topic of nsq_to_file: names, rotation, compression, and the move to their
directory.

No event loop and no NSQ: plain blocking calls, from one thread at a time. A file is

    opened     in the work directory (which may be the output directory), under an unused name
    appended   message by message, each followed by a line feed; with gzip, in whole members synced
    after which everything written so far survives a power cut closed     and, if the two
    directories differ, moved to the output directory, overwriting nothing

A crash can leave a file in a separate work directory. recover() cuts off an incomplete message at
its end and moves the file. What it cuts off was not finished, so nsqd sends it again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["REV", "FileNames", "FileRules", "TopicFiles", "make_directories"]

logger = logging.getLogger(__name__)

BLOCK: Final = 64 << 10
GZIP_FORMAT: Final = 31
"""zlib's `wbits` for a member with gzip's header and checksum."""

# Patterns of the supported strftime codes. Other codes are not replaced.
CODES: Final = {
    **dict.fromkeys("mdHIMSy", r"\d\d"),
    **dict.fromkeys("BbAa", r"[^\W\d]+"),
    "Y": r"\d{4}",
    "p": "[AP]M",
    "Z": r"[\w+-]*",
    "z": r"[+-]\d{4}",
    "%": "%",
}
_CODE: Final = re.compile(f"%([{''.join(CODES)}])")
REV: Final = "<REV>"


def format_time(text: str, seconds: float) -> str:
    """The text with its codes replaced, in local time."""
    moment = time.localtime(seconds)
    return _CODE.sub(lambda code: time.strftime(code[0], moment), text)


class FileNames:
    """The names of one topic's files, relative to their directory."""

    def __init__(
        self,
        template: str,
        datetime_format: str,
        *,
        topic: str,
        host: str,
        is_gzip: bool,
        has_revisions: bool,
    ) -> None:
        """`template` has placeholders <TOPIC>, <HOST>, <PID>, <DATETIME> and <REV>. Without
        revisions, <REV> is removed. Raises ValueError if the names lead out of the directory."""
        self._datetime_format = datetime_format
        if is_gzip and not template.endswith(".gz"):
            template += ".gz"
        if not has_revisions:
            template = template.replace(REV, "")
        self.has_revisions = has_revisions
        self._template = template.replace("<TOPIC>", topic).replace("<HOST>", host)
        if ".." in self._template.split("/") or self._template.startswith("/"):
            raise ValueError(f"{self._template} is not a name within the directory")
        self._own = self._template.replace("<PID>", str(os.getpid()))
        self._second = -1
        self._name = ""

    def at(self, now: float) -> str:
        """The name at this time, still with <REV>."""
        if int(now) != self._second:
            self._second = int(now)
            self._name = self._own.replace("<DATETIME>", format_time(self._datetime_format, now))
        return self._name

    def pattern(self) -> re.Pattern[str]:
        """Matches every name that the topic's files can have, at any time and in any process. The
        groups are the parts before and after the revision."""
        parts = {
            "<PID>": r"\d+",
            "<DATETIME>": "".join(
                CODES[part] if place % 2 else re.escape(part)
                for place, part in enumerate(_CODE.split(self._datetime_format))
            ),
            REV: r")-\d{6,}(",
        }
        split = re.split("(<PID>|<DATETIME>|<REV>)", self._template)
        return re.compile("(" + "".join(parts.get(part, re.escape(part)) for part in split) + ")")


def with_revision(name: str, revision: int) -> str:
    return name.replace(REV, f"-{revision:06d}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRules:
    """Settings for the files of all topics."""

    output_dir: Path
    work_dir: Path
    gzip_level: int = 0
    """0: no compression."""
    rotate_size: int = 0
    rotate_interval: float = 0.0
    skip_empty_files: bool = False

    @property
    def moves(self) -> bool:
        return self.work_dir != self.output_dir

    @property
    def is_exclusive(self) -> bool:
        """Whether an existing file is never appended to."""
        return bool(self.gzip_level or self.rotate_interval)

    @property
    def need_revisions(self) -> bool:
        return self.moves or self.is_exclusive or bool(self.rotate_size)


class TopicFiles:
    """Writes one file at a time. It cannot be used any more after an OSError."""

    def __init__(
        self,
        rules: FileRules,
        names: FileNames,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """The wall clock names the files; the monotonic clock limits their time."""
        self._rules, self._names = rules, names
        self._wall, self._monotonic = wall, monotonic
        self._descriptor: int | None = None
        self._name = ""
        """Name of the current or last file, still with <REV>."""
        self._revision = -1
        self._path = Path()
        self._opened = 0.0
        self._size = 0
        """Bytes before compression."""
        self._lines: list[bytes] = []
        """Lines not yet written."""
        self._member: zlib._Compress | None = None
        self._is_synced = True
        self._is_directory_synced = True
        """Whether the directory was synced after the file was created."""

    @property
    def path(self) -> Path | None:
        """The current file."""
        return self._path if self._descriptor is not None else None

    # writing

    def store(self, bodies: Sequence[bytes], *, sync: bool = False, tick: bool = False) -> bool:
        """Write messages. True if all messages so far are synced: with `sync`, or when a file was
        closed. A tick also closes a file whose time is over when no messages arrive."""
        has_rotated = False
        for body in bodies:
            now = self._wall()
            if self._must_rotate(now):
                has_rotated = has_rotated or self._descriptor is not None
                self.close()
                self._open(now)
            self._lines.append(body)
            self._lines.append(b"\n")
            self._size += len(body) + 1
        self._write_lines()
        if tick and self._must_rotate(now := self._wall()):
            has_rotated = has_rotated or self._descriptor is not None
            self.close()
            if not self._rules.skip_empty_files:
                self._open(now)
        if sync or has_rotated:
            self.sync()
        return sync or has_rotated

    def _must_rotate(self, now: float) -> bool:
        rules = self._rules
        return (
            self._descriptor is None
            or self._names.at(now) != self._name
            or (rules.rotate_interval > 0 and self._monotonic() - self._opened >= rules.rotate_interval)
            or (rules.rotate_size > 0 and self._size > rules.rotate_size)
        )

    def _write_lines(self) -> None:
        if not self._lines:
            return
        data = b"".join(self._lines)
        self._lines = []
        if self._rules.gzip_level:
            if self._member is None:
                self._member = zlib.compressobj(self._rules.gzip_level, zlib.DEFLATED, GZIP_FORMAT)
            data = self._member.compress(data)
        self._write(data)

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        self._is_synced = False
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        """Fsync everything. Ends the gzip member, so that the file can be decompressed."""
        self._write_lines()
        if self._descriptor is None:
            return
        if self._member is not None:
            member, self._member = self._member, None
            self._write(member.flush())
        if not self._is_synced:
            os.fsync(self._descriptor)
            self._is_synced = True
        if not self._is_directory_synced:
            # A new file outlives a power cut only once its directory is synced too.
            sync_directory(self._path.parent)
            self._is_directory_synced = True

    def close(self) -> None:
        """Sync, close and move the file, if there is one."""
        if self._descriptor is None:
            return
        self.sync()
        if self._rules.moves:
            self._revision = self._move(self._path, self._name, self._revision)
        # Closed last: until then the lock shows that the file is in use.
        os.close(self._descriptor)
        self._descriptor = None

    # opening

    def _open(self, now: float) -> None:
        name = self._names.at(now)
        revision = self._revision + 1 if name == self._name else 0
        while (descriptor := self._try(with_revision(name, revision))) is None:
            revision += 1
        self._descriptor = descriptor
        self._name, self._revision, self._opened = name, revision, self._monotonic()
        logger.info("opened %s", self._path)

    def _try(self, name: str) -> int | None:
        """Open a file; None if it must not be written to."""
        rules = self._rules
        path = rules.work_dir / name
        if rules.moves and (rules.output_dir / name).exists():
            return None
        make_directories(path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags | (os.O_EXCL if rules.is_exclusive else 0), 0o666)
        except FileExistsError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            is_ours = not rules.moves or _lock(descriptor, path)
            if not is_ours or (rules.rotate_size and size > rules.rotate_size):
                os.close(descriptor)
                return None
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # A crash may have cut a message, or another program wrote it: do not truncate.
                size += os.write(descriptor, b"\n")
        except BaseException:
            os.close(descriptor)
            raise
        self._path, self._size = path, size
        self._is_directory_synced = self._is_synced = False
        return descriptor

    def _move(self, path: Path, name: str, revision: int) -> int:
        """Move a file to the output directory, under the first free revision, which is returned."""
        while True:
            target = self._rules.output_dir / with_revision(name, revision)
            make_directories(target.parent)
            try:
                os.link(path, target)
                break
            except FileExistsError:
                revision += 1
        sync_directory(target.parent)
        os.unlink(path)
        sync_directory(path.parent)
        logger.info("moved %s to %s", path, target)
        return revision

    # after a crash

    def recover(self) -> None:
        """Complete files of earlier runs in the work directory, unless another process has them."""
        if not self._rules.moves:
            return
        pattern = self._names.pattern()
        for path in sorted(path for path in self._rules.work_dir.rglob("*") if not path.is_dir()):
            found = pattern.fullmatch(path.relative_to(self._rules.work_dir).as_posix())
            if found is None:
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                # Another process has just recovered it.
                continue
            try:
                if _lock(descriptor, path):
                    self._complete(descriptor, path, found)
            finally:
                os.close(descriptor)

    def _complete(self, descriptor: int, path: Path, found: re.Match[str]) -> None:
        name = found[1] + REV + found[2]
        revision = int(found[0][len(found[1]) + 1 : len(found[0]) - len(found[2])])
        if self._is_moved(descriptor, name, revision):
            os.unlink(path)
            return
        size = os.fstat(descriptor).st_size
        end = _end_of_members(descriptor) if self._rules.gzip_level else _end_of_lines(descriptor, size)
        if end < size:
            logger.warning("%s: removed %d bytes of an incomplete message", path, size - end)
            os.ftruncate(descriptor, end)
        if not end:
            os.unlink(path)
            return
        os.fsync(descriptor)
        self._move(path, name, revision)

    def _is_moved(self, descriptor: int, name: str, revision: int) -> bool:
        """Whether the file was already moved and only its old name is left."""
        own = os.fstat(descriptor)
        if own.st_nlink == 1:
            return False
        while True:
            try:
                other = os.stat(self._rules.output_dir / with_revision(name, revision))
            except FileNotFoundError:
                return False
            if os.path.samestat(own, other):
                return True
            revision += 1


def _lock(descriptor: int, path: Path) -> bool:
    """Lock a file; False if another process has it, or if the path no longer leads to it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def _end_of_lines(descriptor: int, size: int) -> int:
    """Where the last whole line ends."""
    end = size
    while end:
        start = max(end - BLOCK, 0)
        place = os.pread(descriptor, end - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


def _end_of_members(descriptor: int) -> int:
    """Where the last whole gzip member ends."""
    end = position = 0
    member = zlib.decompressobj(GZIP_FORMAT)
    while block := os.pread(descriptor, BLOCK, position):
        position += len(block)
        while block:
            try:
                member.decompress(block)
            except zlib.error:
                return end
            block = member.unused_data
            if member.eof:
                end = position - len(block)
                member = zlib.decompressobj(GZIP_FORMAT)
    return end


def make_directories(path: Path) -> None:
    """Create missing directories, synced."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(mode=0o770, exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
