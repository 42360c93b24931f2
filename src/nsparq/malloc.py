"""How much freed memory the C library keeps."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Final

__all__ = ["keep_freed"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_TOP_PAD: Final = 1 << 20


def keep_freed(kept_bytes: int, large_bytes: int) -> None:
    """Keep up to `kept_bytes` of freed memory, from blocks smaller than `large_bytes`.

    By default glibc returns buffers of hundreds of kilobytes to the system when they are freed, and
    then gets them back page by page. Does nothing if the user has set glibc's own variables.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(OSError, AttributeError):  # the C library is not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)
        mallopt(_M_TOP_PAD, _TOP_PAD)
        mallopt(_M_MMAP_THRESHOLD, large_bytes)
