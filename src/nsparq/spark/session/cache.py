"""Files that are made once and used by many processes: launchers, links, archives.

Each is named after what it was made from and never changes, so nobody needs a lock: whoever finds it missing
makes one aside and moves it into place, and whoever comes second with that throws its own away.
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
    """A directory of this user's that can be written: by the XDG rules, else among the temporary files."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A path that is not absolute is to be ignored, says the XDG specification.
    home = Path(base) if base.startswith("/") else Path(os.path.expanduser("~")) / ".cache"
    for candidate in (home / "nsparq", Path(tempfile.gettempdir()) / f"nsparq-{os.getuid()}"):
        try:
            candidate.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if _is_ours(candidate):
            return candidate
    # Neither will do: for this process only.
    return Path(tempfile.mkdtemp(prefix="nsparq-"))


def _is_ours(directory: Path) -> bool:
    """What is in there gets executed: in a directory that others can write to, it may not be what we made."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    return not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(directory, os.W_OK | os.X_OK)


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def make_once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made by `make` (as a file or a directory, under another name) unless it is there already."""
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
            # Another process was faster, and its directory is as good as ours.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return path
