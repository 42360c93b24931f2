"""Memory of the process: how much freed memory it keeps, and NSQ's memory statistics.

The statistics are the nearest that CPython has. They are cheap: nothing here walks the objects.

NSQ reports Go's heap: spans in use, idle, and returned to the system. Here they come from the
operating system: in use is private memory that is resident, idle is memory that is mapped and not
resident. All of the idle memory counts as released, because other processes can use it.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

from nsparq.malloc import keep_freed

__all__ = ["keep_freed_memory", "memory_stats", "watch_collector"]

KEPT_BYTES: Final = 16 << 20
"""Limit on freed memory that the process keeps."""
LARGE_BYTES: Final = 4 << 20
"""Blocks of this size go back to the system when they are freed. A publish of the largest size is
one."""

_STATM: Final = Path("/proc/self/statm")
_PAGE: Final = resource.getpagesize()


class _Pauses:
    """Duration of the last collections, as many as Go remembers."""

    def __init__(self) -> None:
        self.last_ns: deque[int] = deque(maxlen=256)
        self._started_ns = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_ns = time.perf_counter_ns()
        elif self._started_ns:
            self.last_ns.append(time.perf_counter_ns() - self._started_ns)

    def percentiles_usec(self, *percentiles: int) -> list[int]:
        ordered = sorted(self.last_ns)
        if not ordered:
            return [0] * len(percentiles)
        last = len(ordered) - 1
        return [ordered[min(int(p / 100 * len(ordered) + 0.5), last)] // 1000 for p in percentiles]


_pauses: Final = _Pauses()


def keep_freed_memory() -> None:
    """Have the C library keep some freed memory. A busy broker allocates and frees buffers of
    hundreds of kilobytes all the time. Without this, returning them to the system takes a tenth of
    its time."""
    keep_freed(KEPT_BYTES, LARGE_BYTES)


def watch_collector() -> None:
    """Time the garbage collector's pauses from now on. Calling it again does nothing."""
    if _pauses not in gc.callbacks:
        gc.callbacks.append(_pauses)


def memory_stats() -> dict[str, int]:
    """The `memory` object of /stats. Starts to time the collector, if that is not done."""
    watch_collector()
    objects = sys.getallocatedblocks()
    in_use, idle = _resident_and_idle()
    # Python collects after a number of new objects, not of bytes: count them at the average size.
    until_next = max(gc.get_threshold()[0] - gc.get_count()[0], 0) if gc.isenabled() else 0
    pause_100, pause_99, pause_95 = _pauses.percentiles_usec(100, 99, 95)
    return {
        "heap_objects": objects,
        "heap_idle_bytes": idle,
        "heap_in_use_bytes": in_use,
        "heap_released_bytes": idle,
        "gc_pause_usec_100": pause_100,
        "gc_pause_usec_99": pause_99,
        "gc_pause_usec_95": pause_95,
        "next_gc_bytes": in_use + until_next * in_use // max(objects, 1),
        "gc_total_runs": sum(generation["collections"] for generation in gc.get_stats()),
    }


def _resident_and_idle() -> tuple[int, int]:
    """Bytes of private memory that are resident, and that are mapped and not resident."""
    try:
        _, resident, shared, _, _, data, _ = map(int, _STATM.read_bytes().split())
    except OSError:
        # No /proc: the peak is the one figure that every Unix gives, in bytes on macOS and else in
        # KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024, 0
    return (resident - shared) * _PAGE, max(data - (resident - shared), 0) * _PAGE
