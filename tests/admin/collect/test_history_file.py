"""The history on disk: what is read back, and what a damaged file leads to."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import zipfile
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from nsparq.admin.collect import history_file
from nsparq.admin.collect.history import BLOCK, RANGES, Table
from nsparq.admin.collect.history_file import HistoryFile
from nsparq.errors import StartError
from tests.support.aio import run, until
from tests.support.polling import DEADLINE

STEP_S = 5.0


def table(*figures: str, poll_s: float = STEP_S) -> Table:
    return Table(figures or ("a", "b"), poll_s=poll_s, max_bytes=1 << 26, peaks=("b",))


def polled(count: int = 400, series: int = 3, until_s: float | None = None) -> Table:
    """A table after some polls. The last series appears half-way."""
    found = table()
    end_s = (time.time() if until_s is None else until_s) // STEP_S * STEP_S
    for number in range(count):
        found.begin(end_s - (count - 1 - number) * STEP_S)
        for one in range(series - (number < count // 2)):
            found.put(("t", f"s{one}"), (number, one))
        found.commit()
    return found


def save(path: Path, kept: Table, more: Any = None) -> HistoryFile:
    async def write() -> HistoryFile:
        file = HistoryFile(path, {"one": kept}, lambda: more)
        await file.save()
        return file

    return asyncio.run(write())


def load(path: Path, into: Table) -> Any:
    async def read() -> Any:
        return HistoryFile(path, {"one": into}, lambda: None).load()

    return asyncio.run(read())


def same(one: Table, other: Table, key: tuple[str, str]) -> bool:
    for resolution in range(len(RANGES)):
        left, right = one.points(key, resolution), other.points(key, resolution)
        if left.times != right.times or not np.array_equal(left.values, right.values, equal_nan=True):
            return False
    return True


def test_all_series_are_read_back_at_every_resolution(tmp_path: Path) -> None:
    path, kept = tmp_path / "history", polled(series=BLOCK + 5)
    save(path, kept, {"x": 1})
    back = table()
    assert load(path, back) == {"x": 1}
    assert len(back) == len(kept) == BLOCK + 5
    for key in (("t", "s0"), ("t", f"s{BLOCK}"), ("t", f"s{BLOCK + 4}")):
        assert kept.points(key).times and same(kept, back, key)
    # The next poll goes on where the last one was.
    now_s = kept.points(("t", "s0")).times[-1] + STEP_S
    for one in (kept, back):
        one.begin(now_s)
        one.put(("t", "s0"), (7, 7))
        one.commit()
    assert same(kept, back, ("t", "s0"))
    # Only what is there takes space.
    assert path.stat().st_size < 2 * len(kept) * kept.bytes_per_series
    assert [*tmp_path.iterdir()] == [path]


def test_other_figures_and_another_poll_interval_keep_what_they_can(tmp_path: Path) -> None:
    path, kept = tmp_path / "history", polled()
    save(path, kept)
    back = table("b", "c", poll_s=10.0)
    load(path, back)
    assert not back.points(("t", "s1")).times
    old, new = kept.points(("t", "s1"), 1), back.points(("t", "s1"), 1)
    assert new.times == old.times
    assert new.values[:, 0].tolist() == old.values[:, 1].tolist()
    assert np.isnan(new.values[:, 1]).all()


def test_points_of_a_clock_that_was_ahead_are_left_out(tmp_path: Path) -> None:
    path, kept = tmp_path / "history", polled(until_s=time.time() + 600)
    save(path, kept)
    back = table()
    load(path, back)
    now_s = time.time()
    back.begin(now_s)
    back.put(("t", "s0"), (1, 1))
    back.commit()
    times = back.points(("t", "s0")).times
    assert len(times) > 100 and times[-1] <= now_s


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_newer(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("about.json", json.dumps({"format": 2}))


def make_nonsense(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("about.json", json.dumps({"format": 1, "saved": 1, "tables": [1]}))


def change_method(path: Path) -> None:
    """One bit in the directory of the ZIP file: a member counts as compressed."""
    content = bytearray(path.read_bytes())
    place = content.rfind(b"PK\x01\x02") + 10
    assert content[place] == zipfile.ZIP_STORED
    content[place] = zipfile.ZIP_DEFLATED
    path.write_bytes(content)


def make_lzma(path: Path) -> None:
    change_method(path)
    content = bytearray(path.read_bytes())
    content[content.rfind(b"PK\x01\x02") + 10] = zipfile.ZIP_LZMA
    path.write_bytes(content)


def make_huge(path: Path) -> None:
    """More elements in an array than there is memory. Its checksum is looked at later."""
    content = path.read_bytes()
    shown, huge = b"'shape': (240,), }       ", b"'shape': (70000000000,), }"
    shown = shown.ljust(len(huge))
    assert content.count(shown) == 1
    path.write_bytes(content.replace(shown, huge))


@pytest.mark.parametrize(
    "harm", [cut, flip, empty, make_newer, make_nonsense, change_method, make_lzma, make_huge]
)
def test_a_damaged_file_is_said_and_the_history_begins_anew(
    tmp_path: Path, harm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path, kept = tmp_path / "history", polled()
    save(path, kept)
    harm(path)
    back = table()
    assert load(path, back) is None
    assert len(back) == 0
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "so the charts start empty" in record.getMessage()
    save(path, kept)
    load(path, back)
    assert same(kept, back, ("t", "s0"))


def test_a_failed_save_keeps_the_last_file_and_is_said(tmp_path: Path) -> None:
    path, kept = tmp_path / "history", polled()
    save(path, kept)
    before = path.read_bytes()
    (tmp_path / "history.new").mkdir()
    file = save(path, kept)
    assert (file.failures, file.error) == (1, "Is a directory")
    assert path.read_bytes() == before


def test_a_directory_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--history-path: the directory .* cannot be written to"):
        load(tmp_path / "nowhere" / "history", table())


def test_a_save_that_fails_for_another_reason_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A ZIP file has no dates before 1980."""
    monkeypatch.setattr("nsparq.admin.collect.history_file.SAVE_S", 0.01)

    async def scenario() -> None:
        file = HistoryFile(tmp_path / "history", {"one": polled()}, lambda: None)
        with monkeypatch.context() as patch:
            patch.setattr(time, "localtime", lambda *_: time.gmtime(0))
            file.start()
            await until(lambda: file.failures > 1)
        assert "before 1980" in file.error
        await until(lambda: file.saved_s)
        assert file.error == ""
        await file.close()

    run(scenario())
    assert "cannot write" in caplog.text
    back = table()
    load(tmp_path / "history", back)
    assert len(back)


def test_what_comes_during_a_save_is_saved_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsparq.admin.collect.history_file.SAVE_S", 0.01)
    more, began, may_end = ["one"], Event(), Event()
    write = history_file._write_piece

    def slow_write(*arguments: Any) -> None:
        began.set()
        assert may_end.wait(DEADLINE)
        write(*arguments)

    monkeypatch.setattr("nsparq.admin.collect.history_file._write_piece", slow_write)

    async def scenario() -> None:
        file = HistoryFile(tmp_path / "history", {"one": polled()}, lambda: [*more])
        file.start()
        await until(began.is_set)
        more.append("two")
        closing = asyncio.create_task(file.close())
        await until(file._closing.is_set)
        may_end.set()
        await closing

    run(scenario())
    assert load(tmp_path / "history", table()) == ["one", "two"]
