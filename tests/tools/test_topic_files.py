"""The files of a topic: names, rotation, moves, and recovery after a crash."""

from __future__ import annotations

import fcntl
import gzip
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsparq.tools.topic_files import FileNames, FileRules, TopicFiles, format_time, make_directories

# 2026-01-31 09:05:07, local time wherever the test runs.
NOON = time.mktime((2026, 1, 31, 9, 5, 7, 0, 0, -1))
HOUR = 3600.0
DEFAULT = "<TOPIC>.<HOST><REV>.<DATETIME>.log"


class Clock:
    def __init__(self, now: float = NOON) -> None:
        self.now = now

        self.was_set = 0.0
        """How far the clock was set."""

    def __call__(self) -> float:
        return self.now + self.was_set

    def monotonic(self) -> float:
        return self.now - NOON + 5000.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def descriptors_closed() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    new = [Path("/proc/self/fd", name) for name in set(os.listdir("/proc/self/fd")) - before]
    left = [os.readlink(link) for link in new if link.exists()]
    assert not [path for path in left if path.endswith((".log", ".gz"))]


def make(root: Path, clock: Clock, template: str = DEFAULT, topic: str = "t", **rules: Any) -> TopicFiles:
    work = root / "work" if rules.pop("moves", False) else root / "out"
    made = FileRules(output_dir=root / "out", work_dir=work, **rules)
    names = FileNames(
        template,
        "%Y-%m-%d_%H",
        topic=topic,
        host="h",
        is_gzip=bool(made.gzip_level),
        has_revisions=made.need_revisions,
    )
    return TopicFiles(made, names, clock, clock.monotonic)


def tree(path: Path) -> dict[str, bytes]:
    """Name and decompressed content of every file."""
    found = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            data = file.read_bytes()
            found[file.relative_to(path).as_posix()] = gzip.decompress(data) if file.suffix == ".gz" else data
    return found


# Names


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("%Y-%m-%d_%H", "2026-01-31_09"),
        ("%y%m%d %H:%M:%S", "260131 09:05:07"),
        ("%B %b %A %a %I %p", "January Jan Saturday Sat 09 AM"),
        ("100%% 2006 January", "100% 2006 January"),
        ("%j %e %q %", "%j %e %q %"),
        ("%%Y", "%Y"),
    ],
)
def test_codes_of_strftime_are_replaced_and_anything_else_stays(text: str, result: str) -> None:
    assert format_time(text, NOON) == result


def test_zone_codes_are_those_of_the_machine() -> None:
    assert format_time("%Z%z", NOON) == time.strftime("%Z%z", time.localtime(NOON))


def names(
    template: str = DEFAULT, *, topic: str = "t", gz: bool = False, revisions: bool = False
) -> FileNames:
    return FileNames(template, "%H", topic=topic, host="h", is_gzip=gz, has_revisions=revisions)


def test_placeholders_are_replaced() -> None:
    pid = os.getpid()
    assert names().at(NOON) == "t.h.09.log"
    assert names(revisions=True).at(NOON) == "t.h<REV>.09.log"
    assert names("<PID>/<TOPIC>-<TOPIC>").at(NOON) == f"{pid}/t-t"
    assert names("a.log", gz=True).at(NOON) == "a.log.gz"
    assert names("a.gz", gz=True).at(NOON) == "a.gz"


@pytest.mark.parametrize(
    ("template", "topic"), [("<TOPIC>/x", ".."), ("../x", "t"), ("/x", "t"), ("a/<TOPIC>", "..")]
)
def test_no_name_leads_out_of_the_directory(template: str, topic: str) -> None:
    with pytest.raises(ValueError, match="is not a name within the directory"):
        names(template, topic=topic)
    assert names("<TOPIC>.log", topic="..").at(NOON) == "...log"


def test_the_pattern_matches_exactly_the_names_of_the_topic() -> None:
    fits = FileNames(
        "<TOPIC>/<HOST>.<PID><REV>.<DATETIME>.log",
        "%Y-%b-%d %A %p%z%%",
        topic="t.x",
        host="h",
        is_gzip=True,
        has_revisions=True,
    ).pattern()
    found = fits.fullmatch("t.x/h.123-000042.1999-Dec-31 Friday PM+0530%.log.gz")
    assert found and found[1] == "t.x/h.123" and found[2] == ".1999-Dec-31 Friday PM+0530%.log.gz"
    for other in (
        "t_x/h.123-000042.1999-Dec-31 Friday PM+0530%.log.gz",
        "t.x/h.123-42.1999-Dec-31 Friday PM+0530%.log.gz",
        "t.x/h.123-000042.1999-12-31 Friday PM+0530%.log.gz",
        "t.x/h.123-000042.1999-Dec-31 Friday PM+0530%.log",
        "t.x/h.x-000042.1999-Dec-31 Friday PM+0530%.log.gz",
    ):
        assert fits.fullmatch(other) is None


# Writing


def test_a_message_is_a_line_and_an_existing_file_is_appended_to(tmp_path: Path, clock: Clock) -> None:
    for bodies in ([b"one", b"two\nlines"], [b"three"]):
        files = make(tmp_path, clock)
        assert files.store(bodies) is False
        assert files.store([], sync=True) is True
        files.close()
    assert tree(tmp_path / "out") == {"t.h.2026-01-31_09.log": b"one\ntwo\nlines\nthree\n"}


def test_written_messages_can_be_read_before_the_sync(tmp_path: Path, clock: Clock) -> None:
    files = make(tmp_path, clock)
    files.store([b"one"])
    assert list(tree(tmp_path / "out").values()) == [b"one\n"]
    files.close()


def test_the_next_hour_has_the_next_file_and_a_message_is_in_one_file_only(
    tmp_path: Path, clock: Clock
) -> None:
    files = make(tmp_path, clock)
    files.store([b"one"])
    clock.now += HOUR
    # The first file is closed, so everything so far is on disk.
    assert files.store([b"two"]) is True
    files.close()
    assert tree(tmp_path / "out") == {"t.h.2026-01-31_09.log": b"one\n", "t.h.2026-01-31_10.log": b"two\n"}


def test_a_file_is_larger_than_the_size_by_one_message_at_the_most(tmp_path: Path, clock: Clock) -> None:
    files = make(tmp_path, clock, rotate_size=10)
    files.store([b"12345", b"1234", b"x" * 50, b"y", b"z"])
    files.close()
    again = make(tmp_path, clock, rotate_size=10)
    again.store([b"more"])
    again.close()
    assert tree(tmp_path / "out") == {
        "t.h-000000.2026-01-31_09.log": b"12345\n1234\n",
        "t.h-000001.2026-01-31_09.log": b"x" * 50 + b"\n",
        # Small enough to be appended to.
        "t.h-000002.2026-01-31_09.log": b"y\nz\nmore\n",
    }


def test_after_the_interval_there_is_a_new_file_and_none_is_appended_to(tmp_path: Path, clock: Clock) -> None:
    for _ in range(2):
        files = make(tmp_path, clock, rotate_interval=60.0)
        files.store([b"one"])
        clock.now += 59
        files.store([b"two"])
        clock.now += 1
        files.store([b"three"])
        files.close()
    assert [*tree(tmp_path / "out").values()] == [b"one\ntwo\n", b"three\n"] * 2


@pytest.mark.parametrize("was_set", [-HOUR, HOUR])
def test_the_interval_does_not_depend_on_how_the_clock_is_set(
    tmp_path: Path, clock: Clock, was_set: float
) -> None:
    files = make(tmp_path, clock, "<TOPIC><REV>.log", rotate_interval=60.0)
    files.store([b"one"])
    clock.was_set = was_set
    clock.now += 59
    files.store([b"two"])
    clock.now += 1
    files.store([b"three"])
    files.close()
    assert [*tree(tmp_path / "out").values()] == [b"one\ntwo\n", b"three\n"]


def test_at_a_tick_an_idle_topic_rotates_too(tmp_path: Path, clock: Clock) -> None:
    files = make(tmp_path, clock)
    files.store([], tick=True)
    assert tree(tmp_path / "out") == {"t.h.2026-01-31_09.log": b""}
    clock.now += HOUR
    files.store([], tick=True)
    clock.now += 1
    files.store([], tick=True)
    files.close()
    assert tree(tmp_path / "out") == {"t.h.2026-01-31_09.log": b"", "t.h.2026-01-31_10.log": b""}


def test_at_a_tick_the_file_is_only_closed_if_empty_files_are_skipped(tmp_path: Path, clock: Clock) -> None:
    files = make(tmp_path, clock, skip_empty_files=True)
    files.store([], tick=True)
    assert tree(tmp_path) == {} and files.path is None
    files.store([b"one"], tick=True)
    assert files.path is not None
    clock.now += HOUR
    files.store([], tick=True)
    assert tree(tmp_path / "out") == {"t.h.2026-01-31_09.log": b"one\n"} and files.path is None


def test_compressed_files_can_be_read_after_every_sync(tmp_path: Path, clock: Clock) -> None:
    files = make(tmp_path, clock, gzip_level=9)
    files.store([b"one" * 1000, b"two"], sync=True)
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == "t.h-000000.2026-01-31_09.log.gz"
    assert gzip.decompress(path.read_bytes()) == b"one" * 1000 + b"\ntwo\n"
    assert path.stat().st_size < 200
    files.store([b"three"])
    size = path.stat().st_size
    files.sync()
    assert path.stat().st_size > size
    assert gzip.decompress(path.read_bytes()).endswith(b"two\nthree\n")
    size = path.stat().st_size
    files.sync()
    files.close()
    assert path.stat().st_size == size  # nothing new, no empty member
    # A second run never touches it.
    again = make(tmp_path, clock, gzip_level=1)
    again.store([b"four"])
    again.close()
    assert [*tree(tmp_path / "out")] == [path.name, "t.h-000001.2026-01-31_09.log.gz"]


def test_size_counts_before_compression(tmp_path: Path, clock: Clock) -> None:
    files = make(tmp_path, clock, gzip_level=6, rotate_size=1000)
    files.store([b"x" * 999, b"x" * 999, b"x"])
    files.close()
    assert [len(content) for content in tree(tmp_path / "out").values()] == [2000, 2]


def test_directories_of_files_are_created(tmp_path: Path, clock: Clock) -> None:
    files = make(tmp_path, clock, "<TOPIC>/<DATETIME>/<HOST><REV>.log", moves=True)
    files.store([b"one"])
    assert tree(tmp_path / "work") == {"t/2026-01-31_09/h-000000.log": b"one\n"}
    assert (tmp_path / "work" / "t").stat().st_mode & 0o777 == 0o770 & ~_umask()
    files.close()
    assert tree(tmp_path / "work") == {}
    assert tree(tmp_path / "out") == {"t/2026-01-31_09/h-000000.log": b"one\n"}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Moving


def test_a_file_appears_in_its_place_when_it_is_complete(tmp_path: Path, clock: Clock) -> None:
    files = make(tmp_path, clock, moves=True, gzip_level=6)
    files.store([b"one"], sync=True)
    assert tree(tmp_path / "out") == {}
    assert tree(tmp_path / "work") == {"t.h-000000.2026-01-31_09.log.gz": b"one\n"}
    files.close()
    files.store([b"two"])
    files.close()
    assert tree(tmp_path / "work") == {}
    assert tree(tmp_path / "out") == {
        "t.h-000000.2026-01-31_09.log.gz": b"one\n",
        "t.h-000001.2026-01-31_09.log.gz": b"two\n",
    }


def test_nothing_is_overwritten_by_a_move(tmp_path: Path, clock: Clock) -> None:
    files = make(tmp_path, clock, moves=True)
    files.store([b"one"])
    for revision in (0, 1):
        make_directories(tmp_path / "out")
        (tmp_path / "out" / f"t.h-00000{revision}.2026-01-31_09.log").write_bytes(b"theirs")
    files.close()
    files.store([b"two"])
    files.close()
    assert [*tree(tmp_path / "out").values()] == [b"theirs", b"theirs", b"one\n", b"two\n"]


def test_two_writers_do_not_disturb_each_other(tmp_path: Path, clock: Clock) -> None:
    one = make(tmp_path, clock, moves=True)
    one.store([b"one"])
    two = make(tmp_path, clock, moves=True)
    two.recover()
    two.store([b"two"])
    one.store([b"one again"])
    two.close()
    one.close()
    assert sorted(tree(tmp_path / "out").values()) == [b"one\none again\n", b"two\n"]
    assert tree(tmp_path / "work") == {}


def test_without_revisions_two_append_to_the_same_file(tmp_path: Path, clock: Clock) -> None:
    one, two = make(tmp_path, clock), make(tmp_path, clock)
    one.store([b"one"])
    two.store([b"two"])
    one.store([b"three"])
    one.close()
    two.close()
    assert [*tree(tmp_path / "out").values()] == [b"one\ntwo\nthree\n"]


# Syncing, in the right order


def test_directories_are_synced_before_messages_are_reported_as_synced(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    files = make(tmp_path, clock, moves=True)
    files.store([b"one"])
    assert synced == ["."]  # where the directory was made
    synced.clear()
    name = "t.h-000000.2026-01-31_09.log"
    files.store([], sync=True)
    assert synced == [f"work/{name}", "work"]
    synced.clear()
    files.store([b"two"], sync=True)
    files.store([], sync=True)
    assert synced == [f"work/{name}"]
    synced.clear()
    files.close()
    assert synced == [".", "out", "work"]


def test_a_failing_disk_is_an_error(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    files = make(tmp_path, clock)
    files.store([b"one"])
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            files.sync()
    files.close()


# After a crash


def leave(root: Path, clock: Clock, *batches: list[bytes], **rules: Any) -> tuple[Path, bytes]:
    """The state after a process synced these and was killed."""
    files = make(root, clock, moves=True, **rules)
    for batch in batches:
        files.store(batch, sync=True)
    path = files.path
    assert path is not None
    copy = path.read_bytes()
    files.close()
    for moved in (root / "out").rglob("*.*"):
        moved.unlink()
    path.write_bytes(copy)
    return path, copy


@pytest.mark.parametrize("level", [0, 6])
def test_a_crash_at_any_byte_leaves_what_was_synced_before_it(
    tmp_path: Path, clock: Clock, level: int
) -> None:
    batches = [[b"one", b"two"], [b"three"], [b"four" * 10]]
    path, whole = leave(tmp_path, clock, *batches, gzip_level=level)
    target = tmp_path / "out" / path.name
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        make(tmp_path, clock, moves=True, gzip_level=level).recover()
        assert not path.exists()
        found = target.read_bytes() if target.exists() else b""
        assert whole.startswith(found)
        if level:
            ends = [0, *_member_ends(whole)]
            assert len(found) == max(end for end in ends if end <= cut)
        else:
            assert found == whole[: whole[:cut].rfind(b"\n") + 1]
        target.unlink(missing_ok=True)


def test_files_that_another_process_recovers_meanwhile_are_left_to_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_directories(tmp_path / "work")
    for hour in range(3):
        (tmp_path / "work" / f"t.h-000000.2026-01-31_0{hour}.log").write_bytes(b"%d\n" % hour)
    real = os.open

    def opened(path: Any, *arguments: Any) -> int:
        if Path(path).name.endswith("_01.log"):
            # Between the listing and this call.
            monkeypatch.setattr(os, "open", real)
            make(tmp_path, clock, moves=True).recover()
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", opened)
    make(tmp_path, clock, moves=True).recover()
    assert [*tree(tmp_path / "out").values()] == [b"0\n", b"1\n", b"2\n"]
    assert tree(tmp_path / "work") == {}


def _member_ends(data: bytes) -> list[int]:
    ends, rest = [], data
    while rest:
        member = zlib.decompressobj(31)
        member.decompress(rest)
        rest = member.unused_data
        ends.append(len(data) - len(rest))
    return ends


def test_bytes_that_were_not_written_are_cut_off(tmp_path: Path, clock: Clock) -> None:
    path, whole = leave(tmp_path, clock, [b"one"], [b"two"], gzip_level=6)
    path.write_bytes(whole + bytes(100))
    make(tmp_path, clock, moves=True, gzip_level=6).recover()
    assert tree(tmp_path / "out") == {path.name: b"one\ntwo\n"}


def test_large_files_are_completed_too(tmp_path: Path, clock: Clock) -> None:
    noise = os.urandom(300_000)
    path, whole = leave(tmp_path, clock, [noise], [b"x" * 3_000_000], [b"end"], gzip_level=1)
    path.write_bytes(whole + whole[:1000])
    make(tmp_path, clock, moves=True, gzip_level=1).recover()
    assert tree(tmp_path / "out") == {path.name: noise + b"\n" + b"x" * 3_000_000 + b"\nend\n"}


def test_a_long_line_without_an_end_is_cut_off_whole(tmp_path: Path, clock: Clock) -> None:
    path, whole = leave(tmp_path, clock, [b"one"])
    path.write_bytes(whole + b"x" * 200_000)
    make(tmp_path, clock, moves=True).recover()
    assert tree(tmp_path / "out") == {path.name: b"one\n"}


def test_a_half_done_move_is_not_repeated(tmp_path: Path, clock: Clock) -> None:
    path, _ = leave(tmp_path, clock, [b"one"])
    (tmp_path / "out" / path.name).write_bytes(b"theirs")
    os.link(path, tmp_path / "out" / path.name.replace("-000000", "-000001"))
    make(tmp_path, clock, moves=True).recover()
    assert not path.exists()
    assert sorted(tree(tmp_path / "out").values()) == [b"one\n", b"theirs"]


def test_a_foreign_link_does_not_hide_a_file(tmp_path: Path, clock: Clock) -> None:
    path, _ = leave(tmp_path, clock, [b"one"])
    os.link(path, tmp_path / "backup")
    make(tmp_path, clock, moves=True).recover()
    assert tree(tmp_path / "out") == {path.name: b"one\n"} and not path.exists()


def test_files_of_others_and_files_in_use_are_left_alone(tmp_path: Path, clock: Clock) -> None:
    path, _ = leave(tmp_path, clock, [b"one"])
    others = ["u.h-000000.2026-01-31_09.log", "t.g-000000.2026-01-31_09.log", "notes.txt", ".hidden"]
    for name in others:
        (tmp_path / "work" / name).write_bytes(b"half a li")
    with path.open("rb+") as in_use:
        fcntl.flock(in_use, fcntl.LOCK_EX)
        make(tmp_path, clock, moves=True).recover()
        assert sorted(tree(tmp_path / "work")) == sorted([*others, path.name])
    make(tmp_path, clock, moves=True).recover()
    assert sorted(tree(tmp_path / "work")) == sorted(others)


def test_without_a_work_directory_there_is_nothing_to_recover(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "t.h.2026-01-31_09.log"
    path.write_bytes(b"one\nhalf a li")
    files = make(tmp_path, clock)
    files.recover()
    assert path.read_bytes() == b"one\nhalf a li"
    # It may belong to another program: nothing is cut off, but a message starts on a new line.
    files.store([b"two"])
    files.close()
    assert path.read_bytes() == b"one\nhalf a li\ntwo\n"


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "out").write_bytes(b"a file")
    with pytest.raises(OSError):
        make(tmp_path, clock).store([b"one"])
