"""A follower that has made the first n changes of its primary can take over from there."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nsparq.replication.applying import Applier
from nsparq.replication.changes import BadChange, Change, Kind, decode_changes
from nsparq.replication.joining import LINKS, Joining
from nsparq.replication.mark import MARK
from nsparq.replication.recording import PrimaryFiles
from nsparq.replication.snapshot import Snapshot, remove_left_links
from nsparq.storage.files import Buffer, Files
from nsparq.storage.segment import Segment
from tests.broker.rig import Clock
from tests.faults.power_cut import DURABILITIES, Life, QuickFiles, compare, drop


class Primary(PrimaryFiles):
    """Files that keep their changes."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self.changes: list[Change] = []
        self.times: list[int] = []
        self._clock = clock
        super().__init__(root, self._keep)

    def _keep(self, pieces: list[bytes]) -> int:
        self.changes += decode_changes(b"".join(pieces))
        self.times.append(self._clock())
        return len(self.changes)

    def now(self) -> int:
        return len(self.changes)


class ReplicatedLife(Life):
    def new_files(self) -> Any:
        return Primary(self.path, self.clock)


def follow(changes: list[Change], target: Path) -> None:
    target.mkdir()
    files = QuickFiles()
    applier = Applier(target, files, Joining(files, target, keeps_former=False))
    sent = b"".join(change.encode() for change in changes)
    for change in decode_changes(sent):
        applier.apply(change)
    applier.close()


def content(path: Path) -> dict[str, bytes | None]:
    """Names below a directory, with the bytes of files. Each node has a mark of its own."""
    return {
        one.relative_to(path).as_posix(): one.read_bytes() if one.is_file() else None
        for one in path.rglob("*")
        if one.name != MARK
    }


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_follower_can_take_over_after_any_change(tmp_path: Path, durability: str) -> None:
    for number in range(4):
        name = f"{durability}-{number}"
        chance = random.Random(name)
        life = ReplicatedLife(tmp_path / name, durability, chance)
        life.live(60)
        changes = life.files.changes
        for moment in [*sorted(chance.sample(range(1, len(changes)), 20)), len(changes)]:
            target = tmp_path / f"{name}-{moment}"
            follow(changes[:moment], target)
            if moment == len(changes):
                assert content(target) == content(life.path)
            assert [*compare(life, moment, target, is_power_cut=False)] == [], f"{name} after {moment}"


def test_a_follower_can_join_while_the_primary_works(tmp_path: Path) -> None:
    for number in range(6):
        chance = random.Random(number)
        life = ReplicatedLife(tmp_path / f"{number}", "os", chance)
        life.step(40)
        snapshot = Snapshot(life.files, life.path)
        if number % 3:
            snapshot.link()
            life.step(number)
        with life.files.frozen() as open_files:
            snapshot.take(open_files)
            joined = life.files.now()
        life.step(5)
        sent = []
        for change in snapshot.changes({}):
            sent.append(change)
            if chance.random() < 0.3:
                life.step(1)
        snapshot.close()
        read = life.files.now()
        life.live(10)
        end = life.files.now()
        for moment in {read, chance.randint(read, end), end}:
            target = tmp_path / f"{number}-{moment}"
            follow(sent + life.files.changes[joined:moment], target)
            if moment == end:
                assert content(target) == content(life.path)
            assert [*compare(life, moment, target, is_power_cut=False)] == [], f"{number} after {moment}"


def test_snapshots_do_not_meet_and_a_later_run_removes_what_was_left(tmp_path: Path) -> None:
    life = ReplicatedLife(tmp_path / "life", "os", random.Random(1))
    life.step(10)
    first, second = (Snapshot(life.files, life.path) for _ in range(2))
    first.link()
    with life.files.frozen() as open_files:
        first.take(open_files)
        second.take(open_files)
    follow([*second.changes({})], tmp_path / "follower")
    first.close()
    assert content(tmp_path / "follower") == {
        name: data for name, data in content(life.path).items() if not name.startswith(LINKS)
    }
    remove_left_links(life.path)
    assert content(tmp_path / "follower") == content(life.path)
    drop(life.broker)


def test_while_the_primary_stands_still_only_what_has_changed_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "primary"
    (root / "below").mkdir(parents=True)
    for name in ("kept", "replaced", "renamed", "removed", "below/kept"):
        (root / name).write_text(name)
    files = Primary(root, Clock())
    snapshot = Snapshot(files, root)
    snapshot.link()
    link, linked = os.link, []

    def noting_link(source: str, target: str) -> None:
        linked.append(Path(source).relative_to(root).as_posix())
        link(source, target)

    monkeypatch.setattr("os.link", noting_link)
    (root / "new").write_text("new")
    (root / "new").rename(root / "replaced")
    (root / "renamed").rename(root / "other name")
    (root / "removed").unlink()
    (root / "below" / "new").write_text("below/new")
    with files.frozen() as open_files:
        snapshot.take(open_files)
    follow([*snapshot.changes({})], tmp_path / "follower")
    snapshot.close()
    assert content(tmp_path / "follower") == content(root)
    assert sorted(linked) == ["below/new", "other name", "replaced"]


def test_zeros_ahead_of_a_segment_are_on_both_sides_and_are_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "primary"
    path.mkdir()
    files = Primary(path, Clock())
    segment = Segment(files, path, 1)
    for number in range(50):
        segment.append([b"head", bytes([number]) * 40_000], 40_004)
    follow(files.changes, tmp_path / "follower")
    assert content(tmp_path / "follower") == content(path)
    assert files.size(segment.fd) > segment.size
    assert sum(len(change.encode()) for change in files.changes) < segment.size + 5_000
    segment.release()
    follow(files.changes, tmp_path / "later")
    assert content(tmp_path / "later") == content(path)


def test_a_failed_write_leaves_the_same_bytes_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes a part of it, as a full one does."""
    write = Files.write

    def write_a_part(files: Files, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        write(files, fd, [b"".join(buffers)[:4]], position)
        raise OSError("no space")

    path = tmp_path / "primary"
    path.mkdir()
    files = Primary(path, Clock())
    with files.opened(path / "file") as fd, monkeypatch.context() as patch:
        patch.setattr(Files, "write", write_a_part)
        with pytest.raises(OSError, match="no space"):
            files.write(fd, [b"abc", b"def"], 0)
    follow(files.changes, tmp_path / "follower")
    assert content(tmp_path / "follower") == content(path) == {"file": b"abcd"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([Change.of_name(Kind.OPEN, "../outside", file=1)], "not below the data path"),
        ([Change.of_name(Kind.UNLINK, "/etc/hosts")], "not below the data path"),
        ([Change.rename("a", "b/../../c")], "not below the data path"),
        ([Change(Kind.WRITE, 7, 0, b"x")], "WRITE of a file that is not open"),
        ([Change.of_name(Kind.OPEN, "a", file=1)] * 2, "number of a file that is open"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(tmp_path: Path, changes: list[Change], reason: str) -> None:
    with pytest.raises(BadChange, match=reason):
        follow(changes, tmp_path / "follower")


@pytest.mark.parametrize("cut", [1, 16, 18])
def test_bytes_that_are_no_change_are_refused(cut: int) -> None:
    whole = Change(Kind.WRITE, 1, 2, b"abc").encode()
    assert [*decode_changes(whole)] == [Change(Kind.WRITE, 1, 2, b"abc")]
    with pytest.raises(BadChange, match="cut off at byte 20"):
        [*decode_changes(whole + whole[:cut])]
    with pytest.raises(BadChange, match="no change at byte 0"):
        [*decode_changes(b"\0\0\0\0\xff" + whole[5:])]
