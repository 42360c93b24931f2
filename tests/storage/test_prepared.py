"""Prepared zeros: a busy segment grows ahead, and the zeros are never taken for messages."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from nsparq.storage import batch
from nsparq.storage import segment as segment_module
from nsparq.storage.batch import PREPARE_FROM, PREPARE_SIZE
from nsparq.storage.segment import Segment

from .support import (
    FLOOR,
    NOW_NS,
    FaultyFiles,
    append,
    crash,
    encoded,
    open_log,
    read_all,
    segment_files,
    stop,
)

STEP = 1024


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PREPARE_FROM", 2 * STEP)
    for module in (batch, segment_module):
        monkeypatch.setattr(module, "PREPARE_SIZE", STEP)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def segment(tmp_path: Path, files: FaultyFiles) -> Segment:
    return Segment(files, tmp_path, 0)


def add(segment: Segment, size: int) -> bytes:
    """A batch of so many bytes."""
    base = segment.end
    raw = encoded(base, b"x" * (size - len(encoded(base, b""))))
    assert len(raw) == size
    segment.append([raw], size)
    segment.note(segment.size - size, base, base + 1, NOW_NS, 0)
    return raw


def on_disk(segment: Segment) -> int:
    return segment.path.stat().st_size


def busy(segment: Segment) -> bytes:
    """Fill the segment up to the size from which it grows ahead."""
    written = add(segment, 2 * STEP - 100) + add(segment, 100)
    assert on_disk(segment) == segment.size == 2 * STEP
    return written


def test_a_small_segment_is_as_large_as_its_batches(segment: Segment) -> None:
    for _ in range(10):
        add(segment, 100)
        assert on_disk(segment) == segment.size
    assert PREPARE_FROM >= PREPARE_SIZE, "an idle topic is to cost nobody its disk"
    segment.close()


def test_a_busy_segment_grows_in_steps_with_its_batches_in_the_usual_places(segment: Segment) -> None:
    written = busy(segment)
    sizes = set()
    for size in (100, 300, 600, 24 + STEP, 3 * STEP, 200, 824):
        written += add(segment, size)
        content = segment.path.read_bytes()
        assert content[: segment.size] == written
        assert not any(content[segment.size :])
        sizes.add(len(content))
    assert sizes == {3 * STEP, 4 * STEP, 7 * STEP, 8 * STEP}
    segment.close()


def test_most_appends_write_only_the_batch(segment: Segment, files: FaultyFiles) -> None:
    busy(segment)
    add(segment, 100)
    before = on_disk(segment)
    for _ in range(9):
        add(segment, 100)
    assert on_disk(segment) == before
    assert files.calls["write"] == 2 + 10
    segment.close()


@pytest.mark.parametrize("way", ["sealed", "idle"])
def test_prepared_zeros_are_cut_off_when_not_needed(segment: Segment, way: str) -> None:
    written = busy(segment) + add(segment, 100)
    assert on_disk(segment) > segment.size
    if way == "sealed":
        segment.write_index()
    else:
        segment.cut_to_size()
    assert segment.path.read_bytes() == written
    written += add(segment, 100)
    assert segment.path.read_bytes()[: segment.size] == written
    assert on_disk(segment) == 3 * STEP, "and made again when it is"
    segment.close()


def test_an_idle_log_cuts_off_prepared_zeros(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    log = open_log(tmp_path, files=files)
    append(log, b"x" * 2 * STEP)
    append(log, b"y")
    log.sync_now()
    (path,) = segment_files(tmp_path)
    assert path.stat().st_size > log.size_bytes
    files.fail("truncate", errno.EIO)
    assert log.release_files(), "a disk that refuses is no reason to keep the file open"
    assert "keeps more disk space than it needs" in caplog.text
    assert log.release_files()
    assert path.stat().st_size == log.size_bytes
    stop(log)


@pytest.mark.parametrize("is_last", [True, False])
def test_prepared_zeros_are_not_damage_after_a_crash(
    segment: Segment, files: FaultyFiles, caplog: pytest.LogCaptureFixture, is_last: bool
) -> None:
    written = busy(segment) + add(segment, 100)
    segment.close()
    assert on_disk(segment) == 3 * STEP
    fresh = Segment(files, segment.path.parent, 0)
    assert fresh.open(last=is_last) == []
    assert (fresh.size, fresh.end) == (segment.size, segment.end)
    assert fresh.path.read_bytes() == written
    assert not caplog.records
    fresh.close()


def test_a_batch_torn_over_prepared_zeros_is_cut_off_and_reported(
    segment: Segment, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    written = busy(segment) + add(segment, 100)
    add(segment, 200)
    segment.close()
    with segment.path.open("r+b") as file:
        file.seek(len(written) + 150)
        file.write(bytes(50))
    fresh = Segment(files, segment.path.parent, 0)
    assert fresh.open(last=True) == []
    assert (fresh.size, fresh.end) == (len(written), segment.end - 1)
    assert fresh.path.read_bytes() == written
    assert f"cut off {STEP - 100} bytes of an unfinished write at byte {len(written)}" in caplog.text
    fresh.close()


def test_more_zeros_than_are_ever_prepared_are_damage(segment: Segment, files: FaultyFiles) -> None:
    written = busy(segment)
    with segment.path.open("ab") as file:
        file.write(bytes(STEP))
    segment.close()
    fresh = Segment(files, segment.path.parent, 0)
    (damage,) = fresh.open(last=False)
    assert (damage.position, damage.end) == (len(written), len(written) + STEP)
    assert on_disk(fresh) == len(written) + STEP, "bytes that we have not made are not thrown away"
    fresh.close()


def test_without_room_for_zeros_the_batch_alone_is_written(segment: Segment, files: FaultyFiles) -> None:
    written = busy(segment)
    files.fail("write", torn=50)
    written += add(segment, 100)
    assert segment.path.read_bytes() == written
    written += add(segment, 100)
    assert segment.path.read_bytes() == written, "and it is not tried again"
    segment.close()


def test_without_room_for_the_batch_the_file_stays_as_it_was(segment: Segment, files: FaultyFiles) -> None:
    written = busy(segment)
    files.fail("write", torn=50, times=2)
    with pytest.raises(OSError, match="No space left"):
        add(segment, 100)
    assert segment.path.read_bytes() == written
    assert (segment.size, segment.end) == (len(written), 2)
    segment.close()


def test_an_error_over_zeros_leaves_no_part_of_the_batch(segment: Segment, files: FaultyFiles) -> None:
    written = busy(segment) + add(segment, 100)
    files.fail("write", errno.EIO, torn=50)
    with pytest.raises(OSError, match="Input/output error"):
        add(segment, 100)
    assert segment.path.read_bytes() == written
    written += add(segment, 200)
    assert segment.path.read_bytes()[: segment.size] == written
    segment.close()


def test_a_log_killed_over_and_over_has_everything_and_no_gaps_in_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = []
    log = open_log(tmp_path, segment_bytes=8 * STEP)
    for round_ in range(12):
        for number in range(round_):
            written += append(log, b"%d" % number * 300)
        crash(log)
        log = open_log(tmp_path, segment_bytes=8 * STEP, epoch=log.end)
        assert read_all(log, FLOOR) == written
    assert log.corrupt_batches == log.corrupt_messages == 0
    assert not caplog.records
    stop(log)
    assert sum(path.stat().st_size for path in segment_files(tmp_path)) == log.size_bytes
