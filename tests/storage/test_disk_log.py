"""The log on disk: appending, memory, reading back, syncing, reclaiming, closing."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nsparq.errors import WriteFailed
from nsparq.storage.batch import BatchCache
from nsparq.storage.disk_log import DiskLog
from nsparq.storage.doubtful import replace_by_copy
from nsparq.storage.files import Buffer, Files
from nsparq.storage.log import Durability
from nsparq.storage.log_range import Lost
from nsparq.storage.segment import Cold

from .support import (
    FLOOR,
    NOW_NS,
    SMALL,
    FaultyFiles,
    Message,
    append,
    crash,
    fill,
    flip,
    in_all_modes,
    in_disk_modes,
    messages_of,
    open_log,
    places,
    read_all,
    segment_files,
    stop,
)

MEMORY = Durability.MEMORY


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


def assert_in_order(log: DiskLog) -> None:
    assert log.committed <= log.stable <= log.end
    assert log.start <= log.memory_start <= log.end


# appending


@in_all_modes
def test_appended_messages_can_be_read(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability)
    assert log.end == log.start == FLOOR
    assert log.read(FLOOR) is None
    written = append(log, b"a", b"bb", now_ns=1) + append(log, b"", due_ns=7, now_ns=2)
    assert [message.sequence for message in written] == [FLOOR, FLOOR + 1, FLOOR + 2]
    assert read_all(log, wait=False) == written
    assert log.end == FLOOR + 3
    assert_in_order(log)
    crash(log)


@in_all_modes
def test_groups_become_batches_one_after_the_other(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability)
    batches = log.append([([b"a", b"b"], 0), ([b"later"], 9), ([b"c"], 0)], NOW_NS)
    assert [(batch.base, batch.count, batch.due_ns) for batch in batches] == [
        (FLOOR, 2, 0),
        (FLOOR + 2, 1, 9),
        (FLOOR + 3, 1, 0),
    ]
    assert read_all(log) == messages_of(batches)
    crash(log)


@in_disk_modes
def test_all_groups_of_an_append_are_one_write(
    tmp_path: Path, files: FaultyFiles, durability: Durability
) -> None:
    log = open_log(tmp_path, files=files, durability=durability)
    log.append([([b"a"] * 10, 0)] * 5, NOW_NS)
    assert files.calls["write"] == 1
    assert log.stable == log.end
    assert log.unsynced == 50
    crash(log)


def test_memory_mode_writes_nothing_while_memory_has_room(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, durability=MEMORY, memory_messages=10)
    fill(log, 5, 2)
    assert files.calls["write"] == 0
    assert (log.stable, log.unsynced) == (FLOOR, 0)
    assert segment_files(tmp_path) == []
    crash(log)


@in_all_modes
def test_segments_roll_before_they_grow_too_large(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, **SMALL)
    written = fill(log, 30)
    log.close()
    paths = segment_files(tmp_path)
    assert len(paths) > 5
    assert all(path.stat().st_size <= 500 for path in paths)
    assert log.size_bytes == sum(path.stat().st_size for path in paths)
    assert read_all(log) == written
    assert [path.with_suffix(".index").exists() for path in paths] == [True] * len(paths)


@in_all_modes
def test_an_append_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, **SMALL)
    written = append(log, b"a") + append(log, *[b"x" * 400] * 4) + append(log, b"b")
    log.close()
    assert [path.stat().st_size > 500 for path in segment_files(tmp_path)] == [False, True, False]
    assert read_all(log) == written


# failures to append


@in_disk_modes
@pytest.mark.parametrize("torn", [0, 1, 50, 130, 10_000])
@pytest.mark.parametrize("batches", [0, 1, 4])
def test_after_a_failed_append_the_log_is_as_before(
    tmp_path: Path, files: FaultyFiles, durability: Durability, torn: int, batches: int
) -> None:
    log = open_log(tmp_path, files=files, durability=durability, **SMALL)
    written = fill(log, batches)
    figures = (log.start, log.end, log.stable, log.memory_start, log.size_bytes, log.unsynced)
    files.fail("write", torn=torn, times=None)
    for _ in range(3):
        with pytest.raises(WriteFailed, match=f"{tmp_path.name}: No space left on device"):
            log.append([([b"refused"], 0), ([b"refused too"], 8), ([b"x" * 100], 0)], NOW_NS)
    assert (log.start, log.end, log.stable, log.memory_start, log.size_bytes, log.unsynced) == figures
    assert read_all(log) == written
    files.heal()
    written += append(log, b"accepted")
    assert [message.sequence for message in written] == [*range(FLOOR, log.end)]
    assert read_all(log) == written
    crash(log)
    log = open_log(tmp_path, durability=durability)
    assert read_all(log) == written
    assert log.corrupt_batches == 0
    crash(log)


REFUSING_CALLS = ["open", "write"]
HARMLESS_CALLS = ["rename", "duplicate", "truncate"]
"""A segment without its index, or longer than necessary, is still good."""


@in_disk_modes
@pytest.mark.parametrize("call", REFUSING_CALLS + HARMLESS_CALLS)
def test_a_failure_while_rolling_leaves_the_log_as_before(
    tmp_path: Path, files: FaultyFiles, durability: Durability, call: str
) -> None:
    """Any call may fail, at any of its uses while a segment is sealed and the next one begins."""
    log = open_log(tmp_path, files=files, durability=durability, **SMALL)
    written: list[Message] = []
    for number in range(40):
        files.fail(call, errno.EIO, after=number % 3)
        end = log.end
        try:
            written += append(log, b"%d" % number * 20, now_ns=NOW_NS + number)
        except WriteFailed:
            assert log.end == end
        files.heal()
        assert read_all(log, FLOOR) == written
    assert len(written) == 40 if call in HARMLESS_CALLS else 0 < len(written) < 40
    crash(log)
    log = open_log(tmp_path, durability=durability)
    assert read_all(log) == written
    assert log.corrupt_batches == 0
    crash(log)


@in_all_modes
def test_a_limit_on_the_size_of_files_ends_a_segment_early(tmp_path: Path, durability: Durability) -> None:
    """`ulimit -f` below the segment size: the system writes what fits, then raises EFBIG."""

    class Limited(FaultyFiles):
        def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
            whole = b"".join(buffers)
            if position + len(whole) > 3_000:
                super().write(fd, [whole[: max(0, 3_000 - position)]], position)
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            super().write(fd, buffers, position)

    log = open_log(tmp_path, files=Limited(), durability=durability, memory_messages=5)
    written: list[Message] = []
    for number in range(40):
        written += append(log, b"%d" % number * 200)
    assert read_all(log) == written
    with pytest.raises(WriteFailed, match="File too large"):
        append(log, b"x" * 4_000)
        log.sync_now() if durability is not MEMORY else log.close()
    if durability is not MEMORY:
        written += append(log, b"goes on")
        log.close()
        log = open_log(tmp_path)
        assert read_all(log) == written
    assert all(path.stat().st_size <= 3_000 for path in segment_files(tmp_path))
    crash(log)


def test_a_failed_append_that_could_not_be_cut_off_is_not_read_later(
    tmp_path: Path, files: FaultyFiles
) -> None:
    """Some of its batches may be whole in the file; none of them was acknowledged."""
    for torn in range(0, 400, 7):
        directory = tmp_path / str(torn)
        directory.mkdir()
        log = open_log(directory, files=files)
        written = append(log, b"first")
        files.fail("write", errno.EIO, torn=torn)
        files.fail("truncate", errno.EIO)
        with pytest.raises(WriteFailed):
            log.append([([b"refused" * 5], 0), ([b"refused"], 0), ([b"refused", b"refused"], 0)], NOW_NS)
        files.heal()
        assert read_all(log) == written
        written += append(log, b"second")
        assert read_all(log) == written
        crash(log)
        log = open_log(directory)
        assert read_all(log) == written, f"torn after {torn} bytes"
        crash(log)


def test_a_failed_append_that_could_not_be_cut_off_does_not_count_as_damage(
    tmp_path: Path, files: FaultyFiles
) -> None:
    """The segment is sealed with the rest of a failed write after its last batch."""
    log = open_log(tmp_path, files=files, segment_bytes=200)
    written = append(log, b"first")
    files.fail("write", errno.EIO, torn=60)
    files.fail("truncate", errno.EIO)
    with pytest.raises(WriteFailed):
        append(log, b"x" * 50)
    files.heal()
    written += append(log, b"y" * 200)
    clean_end = stop(log)
    log = open_log(tmp_path, clean_end=clean_end)
    assert read_all(log) == written
    assert log.corrupt_batches == 0
    crash(log)


def test_an_oversized_append_that_failed_once_does_not_lose_the_segment_later(
    tmp_path: Path, files: FaultyFiles
) -> None:
    log = open_log(tmp_path, files=files, segment_bytes=100)
    files.fail("write")
    with pytest.raises(WriteFailed):
        append(log, b"x" * 500)
    written = append(log, b"x" * 500)
    for segment in log.trim(FLOOR, 0.0):
        segment.remove()
    assert log.start == FLOOR
    crash(log)
    log = open_log(tmp_path)
    assert read_all(log) == written
    crash(log)


# memory mode and a full disk


def test_memory_mode_with_a_full_disk_rejects_rather_than_loses(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, durability=MEMORY, memory_messages=10)
    written = fill(log, 5, 2)
    files.fail("write", times=None, torn=30)
    for _ in range(3):
        with pytest.raises(WriteFailed):
            append(log, b"refused")
    assert log.end == FLOOR + 10
    assert read_all(log) == written
    files.heal()
    written += append(log, b"accepted")
    assert read_all(log) == written
    clean_end = stop(log)
    log = open_log(tmp_path, durability=MEMORY, clean_end=clean_end)
    assert read_all(log) == written
    crash(log)


def test_memory_mode_writes_out_no_more_than_must_leave_memory(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, durability=MEMORY, memory_messages=10)
    written = fill(log, 8, 2)
    assert log.stable == FLOOR + 6
    assert log.memory_start == FLOOR + 6
    assert read_all(log) == written
    crash(log)
    log = open_log(tmp_path, durability=MEMORY, epoch=FLOOR + 1000)
    assert read_all(log) == written[:6]
    crash(log)


def test_memory_mode_does_not_write_what_nobody_needs(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, durability=MEMORY, memory_messages=4)
    log.reader_low = lambda: log.end
    fill(log, 10, 2)
    assert files.calls["write"] == 0
    assert log.stable == FLOOR + 16
    log.reader_low = lambda: FLOOR + 17
    written = read_all(log, FLOOR + 16)
    clean_end = stop(log)
    assert files.calls["write"] > 0
    log = open_log(tmp_path, durability=MEMORY, clean_end=clean_end)
    assert log.end == clean_end
    assert log.start == FLOOR + 16
    assert read_all(log) == written
    crash(log)


def test_memory_mode_removes_an_empty_segment_before_a_gap(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, durability=MEMORY, memory_messages=2)
    fill(log, 1, 2)
    files.fail("write")
    with pytest.raises(WriteFailed):
        append(log, b"refused", b"refused too")
    assert [int(path.stem) for path in segment_files(tmp_path)] == [FLOOR]
    log.reader_low = lambda: FLOOR + 2
    written = fill(log, 2, 2)
    assert [int(path.stem) for path in segment_files(tmp_path)] == [FLOOR + 2]
    assert read_all(log, FLOOR + 2) == written
    crash(log)


def test_memory_mode_skips_messages_that_were_not_written(tmp_path: Path) -> None:
    """Some messages in the middle were not written, because nobody needed them. A reader of them
    gets the next ones."""
    log = open_log(tmp_path, durability=MEMORY, memory_messages=2)
    low = FLOOR
    log.reader_low = lambda: low
    written = fill(log, 2, 2)
    low = FLOOR + 4
    written += fill(log, 1, 2)
    low = FLOOR
    written += fill(log, 4, 2)
    del written[2:4]
    found = read_all(log, FLOOR)
    assert found == written
    assert log.count(FLOOR, log.end) == len(found)
    assert log.corrupt_batches == log.corrupt_messages == 0
    clean_end = stop(log)
    log = open_log(tmp_path, clean_end=clean_end)
    assert read_all(log) == found
    crash(log)


def test_memory_mode_reads_on_from_memory_after_damage_on_disk(tmp_path: Path) -> None:
    log = open_log(tmp_path, durability=MEMORY, memory_messages=4)
    written = fill(log, 6, 2)
    assert log.memory_start == FLOOR + 8
    (path,) = segment_files(tmp_path)
    flip(path, path.stat().st_size - 1)
    assert read_all(log) == written[:6] + written[8:]
    assert (log.corrupt_batches, log.corrupt_messages) == (1, 2)
    crash(log)


def test_memory_mode_respects_the_byte_limit_even_when_the_disk_is_full(
    tmp_path: Path, files: FaultyFiles
) -> None:
    """Messages may be large, so appends are rejected by bytes, not only by the number of
    messages."""
    cache = BatchCache(10_000)
    log = open_log(tmp_path, files=files, cache=cache, durability=MEMORY, memory_messages=1000)
    files.fail("write", times=None)
    written: list[Message] = []
    for number in range(100):
        try:
            written += append(log, b"%d" % number * 500)
        except WriteFailed:
            break
    assert cache.size_bytes <= 10_000 + 4_000
    assert read_all(log) == written
    crash(log)


def test_reading_back_is_bounded_even_when_memory_cannot_be_written_out(
    tmp_path: Path, files: FaultyFiles
) -> None:
    """Consumers continue while the disk is full, and what they read is not kept."""
    cache = BatchCache(20_000)
    log = open_log(tmp_path, files=files, cache=cache, durability=MEMORY, memory_messages=4)
    written = []
    for number in range(60):
        # Large enough not to be joined when read back.
        written += append(log, b"%03d" % number * 40_000)
    files.fail("write", times=None)
    cache.limit_bytes = 1_000_000
    assert read_all(log) == written
    assert cache.size_bytes <= 1_000_000 + 300_000
    crash(log)


def test_a_batch_that_cannot_be_written_out_stays_and_is_reported(
    tmp_path: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BatchCache(1 << 20)
    log = open_log(tmp_path, files=files, cache=cache, durability=MEMORY, memory_messages=100)
    written = fill(log, 3, 2)
    files.fail("write", times=None)
    batch = log.read(FLOOR)
    assert batch is not None
    assert not log.forget(batch)
    assert "keeping messages in memory" in caplog.text
    assert read_all(log) == written
    files.heal()
    assert log.forget(batch)
    assert read_all(log) == written
    crash(log)


def test_one_append_larger_than_the_memory_queue_goes_through(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, durability=MEMORY, memory_messages=4)
    written = messages_of(log.append([([b"%d" % i] * 3, 0) for i in range(5)], NOW_NS))
    assert log.end - log.memory_start <= 4
    assert read_all(log) == written
    written += append(log, *[b"y"] * 50)
    assert log.memory_start == FLOOR + 15, "the newest batch stays"
    assert read_all(log) == written
    crash(log)


def test_one_append_larger_than_the_memory_queue_is_kept_when_the_disk_is_full(
    tmp_path: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(tmp_path, files=files, durability=MEMORY, memory_messages=4)
    files.fail("write", times=None)
    written = messages_of(log.append([([b"%d" % i] * 3, 0) for i in range(5)], NOW_NS))
    assert read_all(log) == written
    assert "keeping messages in memory" in caplog.text
    with pytest.raises(WriteFailed):
        append(log, b"refused")
    assert read_all(log) == written
    crash(log)


def test_a_stop_that_cannot_write_raises_and_can_be_repeated(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, durability=MEMORY)
    written = fill(log, 5)
    files.fail("write", after=2)
    with pytest.raises(WriteFailed):
        log.close()
    assert read_all(log) == written
    clean_end = stop(log)
    log = open_log(tmp_path, clean_end=clean_end)
    assert read_all(log) == written
    crash(log)


# the bounds of memory


@in_all_modes
@pytest.mark.parametrize("limit", [1, 5, 7, 100])
def test_memory_holds_no_more_messages_than_the_queue_s_size(
    tmp_path: Path, durability: Durability, limit: int
) -> None:
    cache = BatchCache(1 << 30)
    log = open_log(tmp_path, cache=cache, durability=durability, memory_messages=limit)
    for number in range(50):
        append(log, *[b"x"] * (number % 4 + 1))
        assert log.end - log.memory_start <= max(limit, number % 4 + 1)
        assert cache.size_bytes == (log.end - log.memory_start) * 50
        assert_in_order(log)
    crash(log)
    assert cache.size_bytes == 0


@in_all_modes
def test_memory_holds_no_more_bytes_than_the_cache_allows(tmp_path: Path, durability: Durability) -> None:
    cache = BatchCache(2_000)
    first = open_log(tmp_path / "first", files=Directories(), cache=cache, durability=durability)
    second = open_log(tmp_path / "second", files=Directories(), cache=cache, durability=durability)
    written: dict[DiskLog, list[Message]] = {first: [], second: []}
    for number in range(60):
        for log in (first, second) if number % 3 else (first,):
            written[log] += append(log, b"%d" % number * 50, b"y")
            assert cache.size_bytes <= 2_000
            assert_in_order(log)
    for log in (first, second):
        assert read_all(log) == written[log]
        assert cache.size_bytes <= 2_000 or log.end - log.memory_start <= 2
    append(first, b"x" * 5_000)
    assert first.memory_start == first.end - 1, "the newest batch stays"
    assert second.memory_start == second.end, "and the other log has nothing left in memory"
    assert read_all(second) == written[second]
    written[second] += append(second, b"z")
    assert read_all(second) == written[second]
    crash(first)
    crash(second)
    assert cache.size_bytes == 0


class Directories(FaultyFiles):
    """Makes the directory of a log with its first file."""

    def open(self, path: Path) -> int:
        path.parent.mkdir(exist_ok=True)
        return super().open(path)


def test_batches_read_back_stay_for_the_next_reader(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, memory_messages=5)
    written = fill(log, 20)
    assert read_all(log) == written
    files.calls.clear()
    assert read_all(log) == written
    assert files.calls["read"] == 0
    crash(log)


def test_a_batch_read_again_stays_longer_than_one_that_is_not(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, memory_messages=1)
    for number in range(20):
        append(log, b"%02d" % number * 60_000)
    crash(log)
    log = open_log(tmp_path, files=files, cache_bytes=4 * 240_100)
    for sequence in (FLOOR, FLOOR + 1, FLOOR + 2, FLOOR, FLOOR + 3, FLOOR, FLOOR + 4, FLOOR):
        log.read(sequence, wait=True)
    files.calls.clear()
    log.read(FLOOR, wait=True)
    assert files.calls["read"] == 0
    log.read(FLOOR + 1, wait=True)
    assert files.calls["read"] > 0
    crash(log)


# reading


@in_all_modes
def test_reading_begins_at_any_number(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, **SMALL)
    written = fill(log, 20)
    for memory in ("as written", "read back"):
        for message in written:
            batch = log.read(message.sequence, wait=True)
            assert batch is not None
            assert batch.base <= message.sequence < batch.end, memory
            assert message in messages_of([batch])
    batch = log.read(0, wait=True)
    assert batch is not None
    assert batch.base == FLOOR, "before the start, the first there is"
    assert log.read(log.end) is None
    assert log.read(log.end + 5) is None
    crash(log)


def test_messages_read_from_disk_equal_the_appended_ones_with_their_times(tmp_path: Path) -> None:
    """Written in batches of every size, read back in joined ones."""
    log = open_log(tmp_path, segment_bytes=400_000, memory_messages=1)
    written: list[Message] = []
    for number in range(400):
        bodies = [b"%d.%d" % (number, i) * (number % 7) for i in range(number % 9 + 1)]
        if number % 50 == 17:
            bodies = [b"big" * 50_000]
        due_ns = NOW_NS + 5 if number % 40 == 3 else 0
        written += append(log, *bodies[: 1 if due_ns else None], due_ns=due_ns, now_ns=NOW_NS + number)
    assert read_all(log) == written
    for message in written[::13]:
        batch = log.read(message.sequence, wait=True)
        assert batch is not None
        assert message in messages_of([batch])
    clean_end = stop(log)
    assert len(segment_files(tmp_path)) > 2
    log = open_log(tmp_path, clean_end=clean_end)
    assert read_all(log) == written
    batch = log.read(FLOOR + 20, wait=True)
    assert batch is not None
    assert batch.count > 9, "small batches come joined"
    crash(log)


def test_more_readers_than_remembered_positions_all_get_everything(tmp_path: Path) -> None:
    log = open_log(tmp_path, cache_bytes=0, memory_messages=1)
    written = [message for n in range(100) for message in append(log, b"%03d" % n * 40_000)]
    for order in (reversed(written), written, written[::2]):
        for message in order:
            batch = log.read(message.sequence, wait=True)
            assert batch is not None
            assert messages_of([batch]) == [message]
    crash(log)


@in_all_modes
def test_many_readers_at_different_places_all_get_everything(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, cache_bytes=3_000, **SMALL)
    written = fill(log, 60)
    cursors = [FLOOR + 2 * i for i in range(90)]
    expected = [written[cursor - FLOOR :] for cursor in cursors]
    found: list[list[Message]] = [[] for _ in cursors]
    for _ in range(200):
        for number, cursor in enumerate(cursors):
            batch = log.read(cursor, wait=True)
            if batch is not None:
                found[number] += [m for m in messages_of([batch]) if m.sequence >= cursor]
                cursors[number] = batch.end
    assert found == expected
    crash(log)


def test_reading_without_waiting_raises_cold_if_the_disk_must_be_read(
    tmp_path: Path, files: FaultyFiles
) -> None:
    log = open_log(tmp_path, files=files, memory_messages=5)
    written = fill(log, 20)
    files.fail("read_cached", times=None)
    with pytest.raises(Cold):
        log.read(FLOOR)
    assert read_all(log, log.memory_start, wait=False) == written[log.memory_start - FLOOR :]
    files.heal()
    assert read_all(log, wait=False) == written
    crash(log)


def test_after_a_read_error_everything_can_still_be_read(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, **SMALL)
    written = fill(log, 20)
    for after in range(4):
        crash(log)
        log = open_log(tmp_path, files=files, **SMALL)
        files.fail("read", errno.EIO, after=after)
        files.fail("open", errno.EMFILE, after=after + 2)
        sequence, found = log.start, list[Message]()
        for _ in range(200):
            try:
                batch = log.read(sequence, wait=True)
            except OSError:
                continue
            if batch is None:
                break
            found += [message for message in messages_of([batch]) if message.sequence >= sequence]
            sequence = batch.end
        files.heal()
        assert found == written
        assert log.corrupt_batches == 0
    crash(log)


def test_a_read_error_while_opening_is_not_taken_for_damage(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, **SMALL)
    written = fill(log, 20)
    crash(log)
    sizes = [path.stat().st_size for path in segment_files(tmp_path)]
    for after in range(5):
        for path in tmp_path.glob("*.index"):
            path.unlink()
        files.fail("read", errno.EIO, after=after)
        with pytest.raises(OSError, match="Input/output error"):
            open_log(tmp_path, files=files)
        files.heal()
    assert [path.stat().st_size for path in segment_files(tmp_path)] == sizes
    log = open_log(tmp_path, files=files)
    assert read_all(log) == written
    crash(log)


# damage


def damaged_log(
    tmp_path: Path, *, has_index: bool, batches: list[int]
) -> tuple[DiskLog, list[list[Message]]]:
    log = open_log(tmp_path, segment_bytes=600)
    written = [append(log, b"%d" % i * 20, b"second", now_ns=NOW_NS + i) for i in range(20)]
    stop(log) if has_index else crash(log)
    if not has_index:
        for path in tmp_path.glob("*.index"):
            path.unlink()
    found = [place for path in segment_files(tmp_path) for place in places(path)]
    for number in batches:
        flip(found[number].path, found[number].position + 60)
    log = open_log(tmp_path, segment_bytes=600, clean_end=log.end, epoch=log.end)
    return log, written


@pytest.mark.parametrize("has_index", [True, False])
def test_damage_loses_only_the_batches_it_hit_and_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_index: bool
) -> None:
    damaged = [0, 4, 5, 9, 14]
    log, written = damaged_log(tmp_path, has_index=has_index, batches=damaged)
    expected = [m for number, batch in enumerate(written) if number not in damaged for m in batch]
    assert read_all(log, FLOOR) == expected
    assert 4 <= log.corrupt_batches <= 5, "neighbours may count as one"
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert 4 <= len(errors) <= 5
    assert read_all(log, FLOOR) == expected
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == len(errors)
    crash(log)


@pytest.mark.parametrize("has_index", [True, False])
def test_messages_lost_to_damage_are_counted_and_not_part_of_the_depth(
    tmp_path: Path, has_index: bool
) -> None:
    damaged = [0, 4, 5, 9, 14]
    log, _ = damaged_log(tmp_path, has_index=has_index, batches=damaged)
    read_all(log, FLOOR)
    assert log.count(FLOOR, log.end) == 30
    assert log.corrupt_messages == 10
    read_all(log, FLOOR)
    assert log.corrupt_messages == 10
    crash(log)


def test_damage_is_counted_wherever_reading_begins(tmp_path: Path) -> None:
    log, written = damaged_log(tmp_path, has_index=True, batches=[3])
    assert read_all(log, FLOOR + 7) == [m for batch in written[4:] for m in batch]
    assert log.corrupt_messages == 1
    assert read_all(log, FLOOR) == [m for batch in written[:3] + written[4:] for m in batch]
    assert (log.corrupt_batches, log.corrupt_messages) == (1, 2)
    crash(log)


def test_a_segment_cut_while_in_use_loses_only_what_was_cut(tmp_path: Path) -> None:
    """The number of reads is limited, because the possible fault is an endless loop."""

    class Impatient(FaultyFiles):
        def read(self, fd: int, size: int, position: int) -> bytes:
            assert self.calls["read"] < 1000, "reading the same bytes again and again"
            return super().read(fd, size, position)

    log = open_log(tmp_path, files=Impatient(), memory_messages=1, segment_bytes=600)
    written = [append(log, b"%d" % i * 20, b"second", now_ns=NOW_NS + i) for i in range(20)]
    place = places(segment_files(tmp_path)[1])[2]
    os.truncate(place.path, place.position + 30)
    lost = {m.sequence for m in read_all(log, FLOOR)} ^ {m.sequence for batch in written for m in batch}
    assert lost == {s for later in places_behind(tmp_path, place, written) for s in later}
    assert log.corrupt_batches == 1
    crash(log)


def places_behind(directory: Path, cut: Any, written: list[list[Message]]) -> list[range]:
    """Sequence numbers from the cut batch to the end of its segment."""
    following = int(segment_files(directory)[2].stem)
    return [range(cut.sequences.start, following)]


def test_other_files_beside_the_segments_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.log").write_text("by an operator")
    log = open_log(tmp_path)
    written = append(log, b"a")
    crash(log)
    log = open_log(tmp_path)
    assert read_all(log) == written
    assert (tmp_path / "notes.log").exists()
    crash(log)


# closing


def test_closing_twice_is_safe_and_a_closed_log_still_reads(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = fill(log, 3)
    log.close()
    log.close()
    assert read_all(log) == written
    crash(log)


def test_files_of_an_idle_log_are_closed_and_opened_again(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files)
    written = fill(log, 3)
    before = open_descriptors()
    assert not log.release_files(), "not while there is something to sync"
    sync = log.begin_sync()
    assert not log.release_files(), "not while it is being synced"
    sync.run()
    log.end_sync(sync)
    assert log.release_files()
    assert open_descriptors() == before - 1
    written += append(log, b"again")
    assert read_all(log) == written
    crash(log)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@in_all_modes
def test_no_descriptor_is_left_open(tmp_path: Path, durability: Durability) -> None:
    before = open_descriptors()
    log = open_log(tmp_path, durability=durability, **SMALL)
    fill(log, 20)
    read_all(log)
    log.close()
    assert open_descriptors() == before
    read_all(log)
    log.discard()
    assert open_descriptors() == before
    log = open_log(tmp_path, durability=durability, **SMALL)
    assert open_descriptors() == before, "opening reads, and lets go"
    fill(log, 20)
    log.discard()
    assert open_descriptors() == before


def test_discarding_writes_nothing(tmp_path: Path, files: FaultyFiles) -> None:
    cache = BatchCache(1 << 20)
    log = open_log(tmp_path, files=files, cache=cache, durability=MEMORY)
    fill(log, 5)
    log.discard()
    assert files.calls["write"] == 0
    assert cache.size_bytes == 0


# syncing


@in_all_modes
def test_a_sync_commits_what_was_stable_when_it_began(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, **SMALL)
    fill(log, 10)
    stable = log.stable
    assert (log.committed, log.unsynced > 0) == (FLOOR, True)
    sync = log.begin_sync()
    assert (log.is_syncing, log.unsynced) == (True, 0)
    fill(log, 10)
    assert log.committed == FLOOR
    sync.run()
    log.end_sync(sync)
    assert (log.is_syncing, log.committed) == (False, stable)
    assert log.unsynced > 0
    log.sync_now()
    assert log.committed == log.stable > stable
    assert_in_order(log)
    crash(log)


def test_every_segment_written_to_is_synced(tmp_path: Path) -> None:
    class Recording(FaultyFiles):
        def __init__(self) -> None:
            super().__init__()
            self.synced: set[str] = set()

        def sync(self, fd: int) -> None:
            super().sync(fd)
            self.synced.add(os.readlink(f"/proc/self/fd/{fd}"))

    files = Recording()
    log = open_log(tmp_path, files=files, durability=Durability.FSYNC, **SMALL)
    fill(log, 20)
    log.sync_now()
    assert files.synced == {str(path) for path in segment_files(tmp_path)}
    files.synced.clear()
    log.sync_now()
    assert files.synced == set(), "nothing is synced twice"
    crash(log)


def test_the_name_of_a_new_segment_is_synced_before_its_messages_count_as_committed(
    tmp_path: Path, files: FaultyFiles
) -> None:
    """A file survives a power cut only after its directory is synced too."""
    log = open_log(tmp_path, files=files, durability=Durability.FSYNC, **SMALL)
    append(log, b"a")
    log.sync_now()
    assert files.synced_directories == [tmp_path]
    append(log, b"b")
    log.sync_now()
    assert files.synced_directories == [tmp_path], "once is enough"
    append(log, b"x" * 500)
    log.sync_now()
    assert files.synced_directories == [tmp_path] * 2
    crash(log)


@pytest.mark.parametrize(("code", "is_obstacle"), [(errno.EIO, False), (errno.EMFILE, True)])
def test_a_sync_whose_directory_cannot_be_synced_is_repeated(
    tmp_path: Path, files: FaultyFiles, code: int, is_obstacle: bool
) -> None:
    log = open_log(tmp_path, files=files)
    fill(log, 2)
    files.fail("sync_directory", code)
    sync = log.begin_sync()
    sync.run()
    log.end_sync(sync)
    found = sync.obstacle if is_obstacle else sync.error
    assert found is not None and found.errno == code
    assert (log.committed, log.unsynced, log.doubtful) == (FLOOR, 6, [])
    log.sync_now()
    assert (log.committed, log.unsynced) == (log.end, 0)
    crash(log)


def test_a_failed_sync_commits_nothing_and_keeps_the_error(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files, durability=Durability.FSYNC)
    written = fill(log, 3)
    files.fail("sync", errno.EIO)
    sync = log.begin_sync()
    sync.run()
    assert sync.error is not None
    assert sync.error.errno == errno.EIO
    log.end_sync(sync)
    assert (log.committed, log.is_syncing) == (FLOOR, False)
    assert read_all(log) == written
    files.fail("sync", errno.EIO)
    append(log, b"more")
    with pytest.raises(WriteFailed, match="Input/output error"):
        log.sync_now()
    assert log.committed == FLOOR
    crash(log)


class Syncs(FaultyFiles):
    """Knows which segments have been synced, by inode: a copy is another file."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def sync(self, fd: int) -> None:
        if not self._is_replacing:
            self.asked.append(os.fstat(fd).st_ino)
        super().sync(fd)


def test_a_file_whose_sync_failed_is_neither_written_to_nor_synced_again(tmp_path: Path) -> None:
    """The system may have dropped what it could not write; a second fsync does not tell."""
    files = Syncs()
    log = open_log(tmp_path, files=files, durability=Durability.FSYNC)
    written = append(log, b"before")
    log.sync_now()
    written += append(log, b"in doubt")
    files.fail("sync", errno.EIO)
    with pytest.raises(WriteFailed):
        log.sync_now()
    (doubtful,) = log.doubtful
    (inode,) = {*files.asked}
    files.asked.clear()
    written += append(log, b"after")
    log.sync_now()
    assert log.committed == log.stable
    assert files.asked == [segment_files(tmp_path)[1].stat().st_ino]
    assert log.doubtful == [doubtful]
    assert doubtful.path.stat().st_ino == inode
    assert read_all(log) == written
    assert log.trim(log.end, 0) == [], "it may be about to be copied"
    crash(log)


def test_a_doubtful_segment_is_copied(tmp_path: Path) -> None:
    files = Syncs()
    log = open_log(tmp_path, files=files)
    written = fill(log, 200, size=20_000)
    files.fail("sync", errno.EIO)
    with pytest.raises(WriteFailed):
        log.sync_now()
    (segment,) = log.doubtful
    files.fail("sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        replace_by_copy(segment)
    files.asked.clear()
    inode = segment.path.stat().st_ino
    replace_by_copy(segment)
    segment.copied()
    assert log.doubtful == []
    assert files.asked == [segment.path.stat().st_ino] != [inode]
    assert files.synced_directories[-1] == tmp_path
    written += append(log, b"goes on")
    assert len(segment_files(tmp_path)) == 1
    assert read_all(log) == written
    crash(log)
    log = open_log(tmp_path)
    assert read_all(log) == written
    crash(log)


def test_an_empty_segment_is_not_doubtful(tmp_path: Path) -> None:
    """The next append begins another segment of its name: a copy would take the place of that."""
    files = Syncs()
    log = open_log(tmp_path, files=files, segment_bytes=100)
    append(log, b"x" * 100)
    files.fail("write", times=2)
    with pytest.raises(WriteFailed):
        append(log, b"refused")
    assert log.segments[-1].size == 0
    files.fail("sync", errno.EIO, after=1)
    sync = log.begin_sync()
    sync.run()
    log.end_sync(sync)
    assert sync.error is not None
    assert log.doubtful == []
    crash(log)


def test_whatever_a_sync_raises_the_messages_do_not_count_as_synced(tmp_path: Path) -> None:
    class Broken(FaultyFiles):
        def sync(self, fd: int) -> None:
            raise MemoryError

    log = open_log(tmp_path, files=Broken())
    append(log, b"one")
    sync = log.begin_sync()
    sync.run()
    log.end_sync(sync)
    assert "MemoryError" in str(sync.error)
    assert (log.committed, log.unsynced, len(log.doubtful)) == (FLOOR, 1, 1)
    crash(log)


def test_damage_that_a_range_finds_in_the_file_before_its_copy_is_not_damage_of_the_copy(
    tmp_path: Path,
) -> None:
    files = Syncs()
    log = open_log(tmp_path, files=files)
    written = fill(log, 10)
    files.fail("sync", errno.EIO)
    with pytest.raises(WriteFailed):
        log.sync_now()
    (segment,) = log.doubtful
    old = log.locate(FLOOR, 1 << 20)
    replace_by_copy(segment)
    segment.copied()
    log.note_lost(old, [Lost(0, 100, FLOOR, FLOOR + 3)])
    assert log.corrupt_batches == 0
    assert log.locate(FLOOR, 1 << 20).reader is not old.reader
    assert read_all(log) == written
    crash(log)


def test_an_interrupted_copy_is_removed_at_the_next_start(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    written = fill(log, 3)
    (path,) = segment_files(tmp_path)
    crash(log)
    path.with_suffix(".log.copy").write_bytes(b"half of it")
    log = open_log(tmp_path)
    assert read_all(log) == written
    assert not path.with_suffix(".log.copy").exists()
    crash(log)


def test_a_copy_reports_messages_that_the_system_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(tmp_path)
    written = fill(log, 3)
    (path,) = segment_files(tmp_path)
    (segment,) = log.segments
    with path.open("r+b") as file:
        file.seek(places(path)[1].position + 50)
        file.write(b"not what was written")
    replace_by_copy(segment)
    assert "lost to a failed fsync" in caplog.text
    crash(log)
    log = open_log(tmp_path)
    assert read_all(log) == written[:3] + written[6:]
    crash(log)


def test_a_stop_copies_what_an_earlier_sync_could_not_save(tmp_path: Path) -> None:
    files = Syncs()
    log = open_log(tmp_path, files=files)
    written = fill(log, 3)
    files.fail("sync", errno.EIO)
    sync = log.begin_sync()
    sync.run()
    log.end_sync(sync)
    files.asked.clear()
    log.close()
    assert log.committed == log.end
    assert files.asked == [segment_files(tmp_path)[0].stat().st_ino]
    assert read_all(log) == written
    log.discard()


def test_a_sync_without_a_spare_descriptor_takes_the_segment_s_own_and_frees_it(
    tmp_path: Path, files: FaultyFiles
) -> None:
    """Otherwise topics that wait for a sync would keep the descriptors that the sync needs."""
    before = open_descriptors()
    log = open_log(tmp_path, files=files)
    written = fill(log, 10)
    files.fail("duplicate", errno.EMFILE)
    log.sync_now()
    assert log.committed == log.stable
    assert open_descriptors() == before
    written += fill(log, 1)
    assert read_all(log) == written
    log.discard()
    assert open_descriptors() == before


def test_a_sync_that_cannot_begin_loses_no_descriptor(tmp_path: Path, files: FaultyFiles) -> None:
    before = open_descriptors()
    log = open_log(tmp_path, files=files, **SMALL)
    fill(log, 10)
    files.fail("duplicate", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        log.sync_now()
    log.sync_now()
    assert log.committed == log.stable
    log.discard()
    assert open_descriptors() == before


@in_all_modes
def test_a_stop_syncs_everything(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, **SMALL)
    fill(log, 10)
    log.close()
    assert log.committed == log.stable == log.end


def test_a_stop_that_cannot_sync_raises(tmp_path: Path, files: FaultyFiles) -> None:
    log = open_log(tmp_path, files=files)
    written = fill(log, 3)
    files.fail("sync", errno.EIO)
    with pytest.raises(WriteFailed):
        log.close()
    log.discard()
    log = open_log(tmp_path)
    assert read_all(log) == written
    crash(log)


# reclaiming


def remove(log: DiskLog, low: int, now_s: float = NOW_NS / 1e9) -> int:
    """Trim as the broker does; gives the number of removed segments."""
    dropped = log.trim(low, now_s)
    for segment in dropped:
        segment.remove()
    return len(dropped)


@in_disk_modes
def test_segments_that_nobody_needs_are_removed(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, **SMALL)
    written = fill(log, 30)
    assert [segment.base for segment in log.sealed_segments()] == [
        int(path.stem) for path in segment_files(tmp_path)[:-1]
    ]
    for low in (FLOOR, FLOOR + 5, FLOOR + 50, log.end - 1):
        remove(log, low)
        assert log.low == low
        assert log.start <= low
        assert read_all(log, low) == written[low - FLOOR :]
        assert [int(path.stem) for path in segment_files(tmp_path)][0] == log.start
    assert remove(log, log.end) <= 1
    assert len(segment_files(tmp_path)) == len([*tmp_path.glob("*.log")]) == 1
    written = read_all(log, log.start) + append(log, b"next")
    assert read_all(log) == written
    crash(log)
    log = open_log(tmp_path)
    assert read_all(log) == written
    crash(log)


def test_a_segment_still_needed_keeps_all_after_it(tmp_path: Path) -> None:
    log = open_log(tmp_path, **SMALL)
    fill(log, 30)
    second = log.sealed_segments()[1]
    assert remove(log, second.end - 1) == 1
    assert log.start == second.base
    assert remove(log, second.end) == 1
    crash(log)


def test_the_active_segment_stays_while_it_is_small(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 5)
    assert remove(log, log.end) == 0
    crash(log)


def test_a_large_active_segment_that_all_have_passed_is_removed(tmp_path: Path) -> None:
    log = open_log(tmp_path, memory_messages=2)
    append(log, *[b"x" * (1 << 20)] * 8)
    assert remove(log, log.end - 1) == 0
    assert remove(log, log.end) == 1
    assert segment_files(tmp_path) == []
    assert log.size_bytes == 0
    log.sync_now()
    written = append(log, b"next")
    assert read_all(log, log.end - 1) == written
    clean_end = stop(log)
    log = open_log(tmp_path, clean_end=clean_end)
    assert read_all(log) == written
    crash(log)


@in_all_modes
def test_an_emptied_log_remembers_its_end(tmp_path: Path, durability: Durability) -> None:
    log = open_log(tmp_path, durability=durability, segment_bytes=1 << 30)
    append(log, *[b"x" * (1 << 20)] * 9)
    append(log, b"x")
    assert remove(log, log.end) == (0 if durability is MEMORY else 1)
    clean_end = stop(log)
    assert clean_end == FLOOR + 10
    log = open_log(tmp_path, clean_end=clean_end, epoch=10**9)
    assert log.end == log.start == clean_end
    crash(log)
    log = open_log(tmp_path, clean_end=-1, epoch=10**9)
    assert log.end == log.start == 10**9
    crash(log)


def test_gaps_before_the_log_are_forgotten(tmp_path: Path) -> None:
    log = open_log(tmp_path, **SMALL)
    fill(log, 30)
    log.gaps.add(FLOOR + 1, FLOOR + 3)
    log.gaps.add(FLOOR + 60, FLOOR + 63)
    remove(log, FLOOR + 50)
    assert log.gaps.ranges == [(FLOOR + 60, FLOOR + 63)]
    crash(log)


def test_retention_by_age_keeps_young_segments(tmp_path: Path) -> None:
    log = open_log(tmp_path, retention_s=100, **SMALL)
    bases = []
    for number in range(30):
        append(log, b"x" * 200, now_ns=(1000 + 10 * number) * 1_000_000_000)
        bases.append(int(segment_files(tmp_path)[-1].stem))
    assert remove(log, log.end, 1099) == 0
    assert remove(log, log.end, 1200) > 0
    kept = segment_files(tmp_path)[0]
    assert all(1000 + 10 * n >= 1100 for n, base in enumerate(bases) if base > int(kept.stem))
    assert remove(log, FLOOR, 10_000) == 0, "what is needed stays however old"
    assert remove(log, log.end, 10_000) > 0
    assert len(segment_files(tmp_path)) == 1
    crash(log)


def test_a_publish_time_in_the_future_does_not_keep_segments(tmp_path: Path) -> None:
    """The segment with that time counts as old as the next one."""
    log = open_log(tmp_path, retention_s=100, **SMALL)
    for number in range(30):
        now_s = 10_000_000 if number == 3 else 1000 + 10 * number
        append(log, b"x" * 200, now_ns=now_s * 1_000_000_000)
    assert remove(log, log.end, 1099) == 0
    assert remove(log, log.end, 1300) > 10
    assert log.positions().first_ns >= 1180 * 1_000_000_000
    crash(log)


def test_retention_by_bytes_keeps_the_newest(tmp_path: Path) -> None:
    log = open_log(tmp_path, retention_bytes=2_000, **SMALL)
    fill(log, 30)
    assert log.size_bytes > 3_000
    assert remove(log, FLOOR) == 0
    assert remove(log, log.end) > 0
    assert 1_500 <= log.size_bytes <= 2_000
    assert remove(log, log.end) == 0
    crash(log)


def test_retention_by_age_and_bytes_removes_at_whichever_limit_comes_first(tmp_path: Path) -> None:
    log = open_log(tmp_path, retention_s=100, retention_bytes=2_000, **SMALL)
    fill(log, 30)
    now_s = NOW_NS / 1e9
    assert remove(log, log.end, now_s) > 0
    assert 1_500 <= log.size_bytes <= 2_000
    assert remove(log, log.end, now_s + 99) == 0
    assert remove(log, log.end, now_s + 101) > 0
    assert len(segment_files(tmp_path)) == 1
    crash(log)


def test_retention_works_on_segments_of_an_earlier_run(tmp_path: Path) -> None:
    log = open_log(tmp_path, **SMALL)
    fill(log, 30)
    clean_end = stop(log)
    log = open_log(tmp_path, clean_end=clean_end, retention_s=100, **SMALL)
    now_s = NOW_NS / 1e9
    assert remove(log, log.end, now_s + 99) == 0
    assert remove(log, log.end, now_s + 101) > 0
    crash(log)


def test_a_removed_segment_is_not_read_any_more(tmp_path: Path) -> None:
    log = open_log(tmp_path, cache_bytes=0, **SMALL)
    written = fill(log, 30)
    first = log.read(FLOOR, wait=True)
    assert first is not None
    low = log.sealed_segments()[3].end
    remove(log, low)
    assert log.read(first.end, wait=True) is not None
    assert read_all(log, FLOOR) == written[low - FLOOR :]
    assert log.corrupt_batches == 0
    crash(log)


# figures


def test_count_leaves_gaps_out(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 10)
    assert log.count(FLOOR, log.end) == 30
    assert log.count(log.end, FLOOR) == 0
    log.gaps.add(FLOOR + 5, FLOOR + 10)
    assert log.count(FLOOR, log.end) == 25
    assert log.count(FLOOR + 7, FLOOR + 12) == 2
    crash(log)


def test_a_log_works_on_the_real_disk(tmp_path: Path) -> None:
    log = open_log(tmp_path, files=Files(), durability=Durability.FSYNC, **SMALL)
    written = fill(log, 10)
    log.sync_now()
    assert read_all(log) == written
    clean_end = stop(log)
    log = open_log(tmp_path, files=Files(), clean_end=clean_end)
    assert read_all(log, wait=True) == written
    crash(log)


# a disk that refuses, in memory mode


@pytest.mark.parametrize("refusals", range(1, 8))
def test_after_refused_writes_memory_and_disk_together_still_hold_everything(
    tmp_path: Path, files: FaultyFiles, refusals: int
) -> None:
    """When writes work again, the batches from before are written as well."""
    log = open_log(tmp_path, files=files, durability=MEMORY, cache_bytes=1200, memory_messages=1000)
    log.reader_low = lambda: FLOOR
    files.fail("write", times=refusals)
    written = []
    for number in range(30):
        try:
            written += append(log, b"%02d" % number + b"x" * 100)
        except WriteFailed:
            pass
        assert read_all(log, FLOOR) == written
    assert len(written) >= 30 - refusals
    log.close()
    log.discard()
