"""Files that are made once and used by many processes: launchers, links, archives.

The name of each depends on its content, which never changes, so no lock is needed: a process that
finds it missing makes it under another name and renames it. If two do so, the second drops its own.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["cache_directory", "digest", "make_once"]


def cache_directory() -> Path:
    """A writable directory of this user: by the XDG rules, or below the temporary directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    home = Path(base) if base.startswith("/") else Path(os.path.expanduser("~")) / ".cache"
    for candidate in (home / "nsparq", Path(tempfile.gettempdir()) / f"nsparq-{os.getuid()}"):
        try:
            candidate.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if _is_ours(candidate):
            return candidate
    # Neither can be used: make one for this process only.
    return Path(tempfile.mkdtemp(prefix="nsparq-"))


def _is_ours(directory: Path) -> bool:
    """Whether only we can write there: its files are executed."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    return not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(directory, os.W_OK | os.X_OK)


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def make_once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, which `make` creates under another name if it is missing."""
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        made = aside / path.name
        make(made)
        try:
            os.rename(made, path)
        except OSError as error:
            # Another process was faster; its directory is the same.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return path
