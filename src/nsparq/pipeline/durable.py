"""Writing files so that they survive a crash and a power cut."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Replaces the file in one step, and syncs it to disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1))
    sync(temporary)
    os.rename(temporary, path)
    # A rename survives a power cut only once its directory is synced too.
    sync(path.parent)


def sync(path: Path) -> None:
    """Syncs a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
