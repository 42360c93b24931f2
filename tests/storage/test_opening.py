"""Opening a log after a stop or a crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nsparq.storage.log import Durability

from .support import (
    FLOOR,
    NOW_NS,
    SMALL,
    Message,
    append,
    crash,
    fill,
    in_all_modes,
    in_disk_modes,
    open_log,
    read_all,
    segment_files,
    stop,
)

MEMORY = Durability.MEMORY


@in_all_modes
def test_a_clean_stop_loses_nothing_and_continues_with_the_next_number(
    tmp_path: Path, durability: Durability
) -> None:
    log = open_log(tmp_path, durability=durability, **SMALL)
    written = fill(log, 10)
    for _ in range(3):
        clean_end = stop(log)
        log = open_log(tmp_path, durability=durability, clean_end=clean_end, epoch=10**9, **SMALL)
        assert (log.start, log.end) == (FLOOR, clean_end)
        assert log.stable == log.committed == log.memory_start == log.end
        assert log.gaps.ranges == []
        assert read_all(log) == written
        written += append(log, b"next")
        assert written[-1].sequence == clean_end
    crash(log)


def test_a_log_that_was_never_used_closes_and_opens(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    clean_end = stop(log)
    assert [*tmp_path.iterdir()] == []
    log = open_log(tmp_path, clean_end=clean_end, epoch=10**9)
    assert (log.start, log.end) == (FLOOR, FLOOR)
    crash(log)


@in_disk_modes
def test_a_crash_loses_nothing_and_continues_at_the_epoch(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, **SMALL)
    written = fill(log, 10)
    crash(log)
    log = open_log(tmp_path, durability=durability, epoch=5000, **SMALL)
    assert read_all(log) == written
    assert log.end == 5000
    assert log.count(log.start, log.end) == 30
    written += append(log, b"next")
    assert written[-1].sequence == 5000
    assert read_all(log) == written
    for epoch in (4000, 9000):
        crash(log)
        log = open_log(tmp_path, durability=durability, epoch=epoch, **SMALL)
        assert read_all(log) == written
        assert log.count(log.start, log.end) == 31
        assert log.end == max(5001, epoch)
    crash(log)


def test_a_stop_that_the_log_contradicts_counts_as_a_crash(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = fill(log, 4)
    clean_end = stop(log)
    (path,) = segment_files(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    log = open_log(tmp_path, clean_end=clean_end, epoch=FLOOR)
    assert read_all(log) == written[:9]
    assert log.end == clean_end
    crash(log)
    log = open_log(tmp_path, clean_end=clean_end, epoch=9000)
    assert log.end == 9000
    crash(log)


def test_an_empty_segment_file_is_removed(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = fill(log, 2)
    crash(log)
    empty = tmp_path / f"{log.end:020d}.log"
    empty.touch()
    log = open_log(tmp_path)
    assert not empty.exists()
    assert read_all(log) == written
    crash(log)


def test_only_the_last_segment_is_cut(tmp_path: Path) -> None:
    log = open_log(tmp_path, **SMALL)
    written = fill(log, 20)
    clean_end = stop(log)
    paths = segment_files(tmp_path)
    for path in (paths[1], paths[-1]):
        path.write_bytes(path.read_bytes() + b"torn")
    sizes = [path.stat().st_size for path in paths]
    log = open_log(tmp_path, clean_end=clean_end)
    assert [path.stat().st_size for path in paths] == [*sizes[:-1], sizes[-1] - 4]
    assert read_all(log) == written
    assert log.corrupt_batches == 1
    crash(log)


def test_segment_bytes_may_change_between_runs(tmp_path: Path) -> None:
    written: list[Message] = []
    clean_end = -1
    for segment_bytes in (500, 5_000, 100, 1 << 20, 300):
        log = open_log(tmp_path, clean_end=clean_end, segment_bytes=segment_bytes, memory_messages=5)
        assert read_all(log) == written
        written += fill(log, 10)
        assert read_all(log) == written
        clean_end = stop(log)
    log = open_log(tmp_path, clean_end=clean_end)
    assert read_all(log) == written
    crash(log)


def test_durability_may_change_between_runs(tmp_path: Path) -> None:
    written: list[Message] = []
    clean_end = -1
    for durability in (MEMORY, Durability.OS, MEMORY, Durability.FSYNC, MEMORY, MEMORY):
        log = open_log(tmp_path, clean_end=clean_end, durability=durability, **SMALL)
        written += fill(log, 6)
        assert read_all(log) == written
        clean_end = stop(log)
    log = open_log(tmp_path, clean_end=clean_end)
    assert read_all(log) == written
    crash(log)


@pytest.mark.parametrize("is_clean", [True, False])
def test_deferred_messages_are_known_after_a_restart(tmp_path: Path, is_clean: bool) -> None:
    log = open_log(tmp_path, **SMALL)
    for number in range(12):
        append(log, b"now", b"x" * 100)
        append(log, b"later", due_ns=NOW_NS + number)
    expected = [(FLOOR + 3 * number + 2, NOW_NS + number) for number in range(12)]
    assert [*log.deferred_since(0)] == expected
    stop(log) if is_clean else crash(log)
    log = open_log(tmp_path, **SMALL)
    assert [*log.deferred_since(0)] == expected
    assert [*log.deferred_since(expected[5][0])] == expected[5:]
    assert [*log.deferred_since(expected[5][0] + 1)] == expected[6:]
    assert [*log.deferred_since(log.end)] == []
    crash(log)
