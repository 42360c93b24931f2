"""The file of carried-over messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from nsparq.storage.batch import Batch
from nsparq.storage.carried import _WORTH_REWRITING, CARRY_SUFFIX, CarriedFile

from .support import NOW_NS, FaultyFiles, Message, encoded, flip, messages_of

MESSAGES = [
    Batch.single(5, NOW_NS, b"five"),
    Batch.single(9, NOW_NS + 1, b""),
    Batch.single(100, NOW_NS + 2, b"hundred" * 20),
]


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ("c" + CARRY_SUFFIX)


@pytest.fixture
def carried(files: FaultyFiles, path: Path) -> CarriedFile:
    made = CarriedFile(files, path)
    made.add(MESSAGES)
    return made


def keep_only(made: CarriedFile, wanted: Iterable[int]) -> None:
    """Drop finished messages and compact the file, as a channel does."""
    made.drop(made.kept.keys() - {*wanted})
    if made.is_empty:
        made.remove()
    elif made.is_wasteful:
        made.accept_copy(made.copy(made.kept.copy()))


def contents(carried: CarriedFile, *sequences: int) -> list[Message | None]:
    found: list[Message | None] = []
    for sequence in sequences:
        batch = carried.read(sequence)
        found.append(None if batch is None else messages_of([batch])[0])
    return found


def expected(*numbers: int) -> list[Message]:
    return messages_of([MESSAGES[n] for n in numbers])


def test_a_new_file_has_no_messages(files: FaultyFiles, path: Path) -> None:
    made = CarriedFile(files, path)
    assert made.load() == []
    assert len(made.kept) == 0
    assert 5 not in made.kept
    keep_only(made, [])
    assert not path.exists()


def test_carried_messages_are_read_with_their_numbers_and_times(carried: CarriedFile) -> None:
    assert len(carried.kept) == 3
    assert 9 in carried.kept
    assert 10 not in carried.kept
    assert contents(carried, 100, 5, 9) == expected(2, 0, 1)


def test_carried_messages_survive_reopening(carried: CarriedFile, files: FaultyFiles, path: Path) -> None:
    carried.add([Batch.single(7, NOW_NS, b"seven")])
    again = CarriedFile(files, path)
    assert again.load() == [5, 9, 100, 7]
    assert contents(again, 5, 9, 100) == expected(0, 1, 2)
    again.add([Batch.single(8, NOW_NS, b"eight")])
    third = CarriedFile(files, path)
    assert third.load() == [5, 9, 100, 7, 8]
    assert contents(third, 5, 9, 100) == expected(0, 1, 2)
    assert contents(third, 8) == [Message(8, b"eight", NOW_NS)]


def test_messages_count_only_after_they_are_synced(files: FaultyFiles, path: Path) -> None:
    made = CarriedFile(files, path)
    made.add(MESSAGES)
    assert files.calls["sync"] == 1


@pytest.mark.parametrize(
    ("call", "torn"), [("open", 0), ("write", 0), ("write", 60), ("write", 120), ("write", 999), ("sync", 0)]
)
def test_messages_that_could_not_be_written_do_not_count(
    carried: CarriedFile, files: FaultyFiles, path: Path, call: str, torn: int
) -> None:
    files.fail(call, torn=torn)
    with pytest.raises(OSError, match="No space left"):
        carried.add([Batch.single(6, NOW_NS, b"six"), Batch.single(7, NOW_NS, b"seven")])
    assert 6 not in carried.kept
    assert 7 not in carried.kept
    assert contents(carried, 5, 9, 100) == expected(0, 1, 2)
    again = CarriedFile(files, path)
    assert again.load() == [5, 9, 100] and not again.is_damaged
    carried.add([Batch.single(8, NOW_NS, b"eight")])
    assert contents(carried, 5, 9, 100) == expected(0, 1, 2)
    assert contents(carried, 8) == [Message(8, b"eight", NOW_NS)]
    again = CarriedFile(files, path)
    assert again.load() == [5, 9, 100, 8] and not again.is_damaged
    assert contents(again, 5, 9, 100) == expected(0, 1, 2)
    assert contents(again, 8) == [Message(8, b"eight", NOW_NS)]


def test_finished_messages_are_forgotten(carried: CarriedFile, files: FaultyFiles, path: Path) -> None:
    size = path.stat().st_size
    keep_only(carried, [100, 5, 12345])
    assert len(carried.kept) == 2
    assert 9 not in carried.kept
    assert contents(carried, 5, 100) == expected(0, 2)
    assert path.stat().st_size == size, "not worth rewriting"


def test_the_file_is_removed_with_its_last_message(carried: CarriedFile, path: Path) -> None:
    keep_only(carried, [])
    assert not path.exists()
    assert len(carried.kept) == 0
    carried.add([Batch.single(7, NOW_NS, b"seven")])
    assert contents(carried, 7) == [Message(7, b"seven", NOW_NS)]


def test_the_file_shrinks_when_most_messages_are_finished(files: FaultyFiles, path: Path) -> None:
    made = CarriedFile(files, path)
    big = [Batch.single(n, NOW_NS + n, b"%02d" % n * 50_000) for n in range(30)]
    made.add(big)
    keep_only(made, range(20))
    assert path.stat().st_size > 3_000_000, "less than half is dead"
    keep_only(made, [3, 17])
    assert path.stat().st_size < 210_000
    assert contents(made, 17, 3) == [Message(n, b"%02d" % n * 50_000, NOW_NS + n) for n in (17, 3)]
    made.add([Batch.single(99, NOW_NS, b"more")])
    again = CarriedFile(files, path)
    assert sorted(again.load()) == [3, 17, 99]
    assert contents(again, 17, 99) == [Message(17, b"17" * 50_000, NOW_NS + 17), Message(99, b"more", NOW_NS)]


def test_a_few_finished_messages_do_not_cause_a_rewrite(files: FaultyFiles, path: Path) -> None:
    made = CarriedFile(files, path)
    made.add([Batch.single(1, NOW_NS, b"x" * (_WORTH_REWRITING - 100)), Batch.single(2, NOW_NS, b"small")])
    keep_only(made, [2])
    assert path.stat().st_size > _WORTH_REWRITING - 100


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_file_that_cannot_be_rewritten_stays_as_it_was(files: FaultyFiles, path: Path, call: str) -> None:
    made = CarriedFile(files, path)
    big = [Batch.single(n, NOW_NS + n, b"%02d" % n * 50_000) for n in range(30)]
    made.add(big)
    files.fail(call, torn=100)
    with pytest.raises(OSError, match="No space left"):
        keep_only(made, [3, 17])
    assert contents(made, 17, 3) == [Message(n, b"%02d" % n * 50_000, NOW_NS + n) for n in (17, 3)]
    made.add([Batch.single(99, NOW_NS, b"more")])
    assert contents(made, 99, 3) == [Message(99, b"more", NOW_NS), Message(3, b"03" * 50_000, NOW_NS + 3)]
    keep_only(made, [3, 99])
    assert path.stat().st_size < 210_000
    assert contents(made, 99, 3) == [Message(99, b"more", NOW_NS), Message(3, b"03" * 50_000, NOW_NS + 3)]


def test_a_torn_tail_loses_only_the_torn_message(
    carried: CarriedFile, files: FaultyFiles, path: Path
) -> None:
    whole = path.read_bytes()
    first = len(encoded(5, b"five"))
    second = first + len(encoded(9, b""))
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        again = CarriedFile(files, path)
        assert again.load() == [n for n, end in ((5, first), (9, second)) if end <= cut], f"cut at {cut}"
        again.add([Batch.single(7, NOW_NS, b"seven")])
        third = CarriedFile(files, path)
        assert 7 in third.load()
        assert contents(third, 7) == [Message(7, b"seven", NOW_NS)]


def test_a_damaged_message_is_lost_alone_and_reported(
    carried: CarriedFile, files: FaultyFiles, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its segment is gone, so the message is lost, and the operator must know."""
    flip(path, 50)
    again = CarriedFile(files, path)
    assert again.load() == [9, 100]
    assert contents(again, 9, 100) == expected(1, 2)
    assert str(path) in caplog.text


def test_a_message_damaged_after_loading_reads_as_none(carried: CarriedFile, path: Path) -> None:
    whole = path.read_bytes()
    for position in (0, 20, 50):
        path.write_bytes(whole)
        flip(path, position)
        assert contents(carried, 5, 9) == [None, *expected(1)]
    os.truncate(path, 10)
    assert contents(carried, 5) == [None]
    path.unlink()
    assert contents(carried, 5) == [None]


def test_a_read_error_is_not_taken_for_damage(carried: CarriedFile, files: FaultyFiles) -> None:
    files.fail("read", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        carried.read(5)
    assert contents(carried, 5) == expected(0)


def test_no_descriptor_is_left_open(carried: CarriedFile, files: FaultyFiles) -> None:
    before = len(os.listdir("/proc/self/fd"))
    carried.read(5)
    for call in ("read", "write"):
        files.fail(call)
        with pytest.raises(OSError, match="No space left"):
            carried.read(5) if call == "read" else carried.add(MESSAGES)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_removed_file_does_not_come_back(carried: CarriedFile, path: Path) -> None:
    carried.remove()
    assert not path.exists()
    assert len(carried.kept) == 0
    carried.remove()


@pytest.mark.parametrize(
    ("is_first", "write"),
    [
        (True, lambda old: old.add(MESSAGES[:1])),
        (False, lambda old: old.add(MESSAGES[:1])),
        (False, lambda old: old.accept_copy(old.copy(old.kept.copy()))),
    ],
    ids=["first write", "append", "copy"],
)
@pytest.mark.parametrize("moment", ["open", "sync"])
def test_a_late_write_of_a_discarded_file_does_not_touch_a_new_one(
    files: FaultyFiles,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_first: bool,
    write: Callable[[CarriedFile], None],
    moment: str,
) -> None:
    """The channel is deleted and created again while a thread writes."""
    old, new = CarriedFile(files, path), CarriedFile(files, path)
    if not is_first:
        old.add([Batch.single(n, NOW_NS, b"of the old channel") for n in range(100)])

    def replaced() -> None:
        monkeypatch.undo()
        old.discard()
        new.add(MESSAGES)

    if moment == "sync":
        monkeypatch.setattr(files, "sync", lambda _: replaced())
    else:
        replaced()
    with suppress(FileNotFoundError):
        write(old)
    assert os.listdir(path.parent) == [path.name]
    assert contents(new, 5, 9, 100) == expected(0, 1, 2)
    again = CarriedFile(files, path)
    assert again.load() == [5, 9, 100] and not again.is_damaged


def test_a_discarded_file_is_not_written_again(carried: CarriedFile, path: Path) -> None:
    carried.discard()
    with pytest.raises(FileNotFoundError):
        carried.add(MESSAGES)
    assert os.listdir(path.parent) == []


def test_messages_finished_during_a_copy_are_forgotten(files: FaultyFiles, path: Path) -> None:
    made = CarriedFile(files, path)
    made.add([Batch.single(n, NOW_NS + n, b"%02d" % n * 50_000) for n in range(30)])
    made.drop(range(5, 30))
    places = made.copy(made.kept.copy())
    assert contents(made, 3) == [Message(3, b"03" * 50_000, NOW_NS + 3)], "from the old file"
    made.drop([0, 4])
    made.accept_copy(places)
    assert sorted(made.kept) == [1, 2, 3]
    assert contents(made, 1, 3) == [Message(n, b"%02d" % n * 50_000, NOW_NS + n) for n in (1, 3)]
    made.add([Batch.single(99, NOW_NS, b"more")])
    again = CarriedFile(files, path)
    assert {1, 2, 3, 99} <= {*again.load()}
    assert contents(again, 99, 2) == [Message(99, b"more", NOW_NS), Message(2, b"02" * 50_000, NOW_NS + 2)]


def test_a_kill_amid_the_first_write_leaves_no_file(files: FaultyFiles, path: Path) -> None:
    """An empty file would look like damage at the next start."""
    made = CarriedFile(files, path)
    files.fail("write")
    with pytest.raises(OSError, match="No space"):
        made.add(MESSAGES)
    assert not path.exists()
    made.add(MESSAGES)
    again = CarriedFile(files, path)
    assert again.load() == [5, 9, 100] and not again.is_damaged
