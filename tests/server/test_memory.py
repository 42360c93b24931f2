"""NSQ's memory figures: plausible values, and their cost."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsparq.server import memory
from nsparq.server.memory import memory_stats, watch_collector


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    yield
    if memory._pauses in gc.callbacks:
        gc.callbacks.remove(memory._pauses)
    memory._pauses.last_ns.clear()


def test_all_figures_are_integers_and_not_negative() -> None:
    """tests/conformance/test_k_stats.py has the keys."""
    stats = memory_stats()
    assert all(type(value) is int and value >= 0 for value in stats.values())


GROW = """
from nsparq.server.memory import memory_stats
before = memory_stats()
held = [bytearray(4096) for _ in range(20_000)]
after = memory_stats()
assert after["heap_objects"] - before["heap_objects"] > 10_000
assert after["heap_in_use_bytes"] - before["heap_in_use_bytes"] > 40_000_000
assert after["next_gc_bytes"] >= after["heap_in_use_bytes"]
assert after["heap_released_bytes"] <= after["heap_idle_bytes"]
assert len(held) == 20_000
"""


def test_the_figures_follow_what_is_allocated() -> None:
    # In a process of its own: one that has been large before takes what it needs from what it has.
    subprocess.run([sys.executable, "-c", GROW], check=True)


def test_collections_are_counted_and_their_pauses_timed() -> None:
    watch_collector()
    watch_collector()
    assert gc.callbacks.count(memory._pauses) == 1
    before = memory_stats()["gc_total_runs"]
    started = time.perf_counter_ns()
    gc.collect()
    took_usec = (time.perf_counter_ns() - started) // 1000
    stats = memory_stats()
    assert stats["gc_total_runs"] > before
    assert 0 < stats["gc_pause_usec_100"] <= took_usec
    assert stats["gc_pause_usec_95"] <= stats["gc_pause_usec_99"] <= stats["gc_pause_usec_100"]


def test_percentiles_of_pauses_are_taken_as_go_takes_them() -> None:
    pauses = memory._Pauses()
    assert pauses.percentiles_usec(100, 99, 95) == [0, 0, 0]
    pauses.last_ns.extend(number * 1000 for number in range(1, 101))
    assert pauses.percentiles_usec(100, 99, 95) == [100, 100, 96]
    pauses.last_ns.extend([0] * 1000)
    assert len(pauses.last_ns) == 256, "only the last ones are kept"


def test_a_collection_under_way_when_watching_begins_is_not_timed() -> None:
    pauses = memory._Pauses()
    pauses("stop", {})
    assert not pauses.last_ns


def test_without_proc_the_peak_is_shown_as_memory_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_STATM", tmp_path / "absent")
    stats = memory_stats()
    unit = 1 if sys.platform == "darwin" else 1024
    assert stats["heap_in_use_bytes"] <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert (stats["heap_idle_bytes"], stats["heap_released_bytes"]) == (0, 0)


def test_reading_the_figures_is_cheap_with_many_objects() -> None:
    held = [[number] for number in range(1_000_000)]
    best = min(_cost() for _ in range(5))
    assert best < 0.01, f"{best * 1000:.1f} ms with {len(held)} objects"


def _cost() -> float:
    started = time.thread_time()
    memory_stats()
    return time.thread_time() - started


BUSY = """
import resource, sys
from nsparq.server.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def use():
    kept = [b"x" * 300_000 for _ in range(8)]
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(way: str, **environment: str) -> int:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", BUSY, way]
    return int(subprocess.check_output(command, env=plain | environment, text=True))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_buffers_that_come_and_go_are_not_fetched_from_the_system_each_time() -> None:
    assert page_faults("keep") < 1000 < page_faults("leave")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_settings_of_the_c_library_in_the_environment_take_precedence() -> None:
    assert page_faults("keep", MALLOC_TRIM_THRESHOLD_="4096", MALLOC_MMAP_THRESHOLD_="4096") > 1000


def test_nsqd_keeps_freed_memory() -> None:
    from nsparq.server import main as command

    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "keep_freed_memory", lambda: calls.append(1))
        command.load()
    assert calls
