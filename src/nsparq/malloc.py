"""What the C library does with freed memory: how much of it the process keeps."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Final

__all__ = ["keep_freed"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_TOP_PAD: Final = 1 << 20


def keep_freed(kept_bytes: int, large_bytes: int) -> None:
    """Keep up to `kept_bytes`, and of blocks smaller than `large_bytes` only. By itself glibc gives buffers
    of hundreds of kilobytes back to the system as they are freed, and asks for them again, page by page.
    Whoever has set its variables is not interfered with."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)
        mallopt(_M_TOP_PAD, _TOP_PAD)
        mallopt(_M_MMAP_THRESHOLD, large_bytes)
