"""The only door to the disk, tested on a real one."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsparq.errors import StartError
from nsparq.storage.files import _MAX_BUFFERS, _SMALL, Files
from tests.support.polling import DEADLINE


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def fd(files: Files, tmp_path: Path) -> Iterator[int]:
    fd = files.open(tmp_path / "file")
    yield fd
    files.close(fd)


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Checks that no descriptor is left open."""
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)


def content(tmp_path: Path) -> bytes:
    return (tmp_path / "file").read_bytes()


def test_a_file_is_made_for_the_owner_only_and_not_inherited(fd: int, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert not os.get_inheritable(fd)


def test_an_existing_file_is_opened_as_it_is(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    fd = files.open(tmp_path / "file")
    assert files.read(fd, 100, 0) == b"before"
    assert files.size(fd) == 6
    files.close(fd)


def test_a_file_opened_to_read_must_exist_and_cannot_be_written(files: Files, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.open_read(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"before")
    fd = files.open_read(tmp_path / "file")
    assert files.read(fd, 3, 2) == b"for"
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.write(fd, [b"x"], 0)
    files.close(fd)


def test_all_buffers_are_written_from_the_position_on(files: Files, fd: int, tmp_path: Path) -> None:
    files.write(fd, [b"0123456789"], 0)
    files.write(fd, [b"ab", bytearray(b"c"), memoryview(b"de"), b""], 5)
    assert content(tmp_path) == b"01234abcde"
    files.write(fd, [b"z"], 12)
    assert content(tmp_path) == b"01234abcde\0\0z"


def test_any_number_of_buffers_is_written(files: Files, fd: int, tmp_path: Path) -> None:
    for count in (_MAX_BUFFERS, _MAX_BUFFERS + 1, 5000):
        buffers = [b"%d," % n for n in range(count)]
        files.truncate(fd, 0)
        files.write(fd, buffers, 0)
        assert content(tmp_path) == b"".join(buffers)


@pytest.mark.parametrize("count", [3, _MAX_BUFFERS + 5])
def test_a_write_that_the_system_cuts_short_is_continued(
    files: Files, fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    pwritev, pwrite = os.pwritev, os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: pwritev(fd, [b"".join(buffers)[:5]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    buffers = [b"%04d" % n for n in range(count)]
    files.write(fd, buffers, 2)
    assert content(tmp_path) == b"\0\0" + b"".join(buffers)


def test_a_write_that_fails_half_way_raises(files: Files, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", lambda *_: 2)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(fd, [b"0123456789"], 0)


def test_reading_gives_what_is_there(files: Files, fd: int) -> None:
    files.write(fd, [b"0123456789"], 0)
    assert files.read(fd, 4, 3) == b"3456"
    assert files.read(fd, 100, 8) == b"89"
    assert files.read(fd, 100, 50) == b""


def test_a_cached_read_gives_the_same_bytes_or_none(files: Files, fd: int) -> None:
    files.write(fd, [b"0123456789"], 0)
    for size, position, expected in ((4, 3, b"3456"), (100, 8, b"89"), (100, 50, b""), (0, 3, b"")):
        assert files.read_cached(fd, size, position) in (expected, None)


def test_a_cached_read_is_valid_until_the_next_call(
    files: Files, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any size. Without RWF_NOWAIT, so that there is always an answer."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at, flags: preadv(fd, buffers, at))
    large = os.urandom(1 << 20)
    files.write(fd, [large], 0)
    for size in (10, 1 << 20, 300 << 10):
        view = files.read_cached(fd, size, 5)
        assert view == large[5 : 5 + size]


class Preadv:
    """Replaces os.preadv."""

    def __init__(self, result: int | bytes) -> None:
        self.result = result

    def __call__(self, fd: int, buffers: list[bytearray], position: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if isinstance(self.result, int):
            raise OSError(self.result, os.strerror(self.result))
        buffers[0][: len(self.result)] = self.result
        return len(self.result)


def test_a_cached_read_that_would_wait_gives_none(
    files: Files, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", Preadv(errno.EAGAIN))
    assert files.read_cached(fd, 4, 3) is None


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_cached_read_reads_normally_if_the_system_cannot_tell(
    files: Files, fd: int, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    files.write(fd, [b"0123456789"], 0)
    monkeypatch.setattr(os, "preadv", Preadv(code))
    assert files.read_cached(fd, 4, 3) == b"3456"


def test_an_error_of_a_cached_read_is_raised(files: Files, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", Preadv(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        files.read_cached(fd, 4, 3)


def test_a_cached_read_may_give_a_part(files: Files, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", Preadv(b"01"))
    assert files.read_cached(fd, 4, 0) == b"01"


def test_a_file_is_cut(files: Files, fd: int, tmp_path: Path) -> None:
    files.write(fd, [b"0123456789"], 0)
    files.truncate(fd, 4)
    assert content(tmp_path) == b"0123"
    assert files.size(fd) == 4


def test_a_duplicate_outlives_the_original(files: Files, tmp_path: Path) -> None:
    fd = files.open(tmp_path / "file")
    copy = files.duplicate(fd)
    files.close(fd)
    files.write(copy, [b"x"], 0)
    files.sync(copy)
    files.close(copy)
    assert not os.path.exists(f"/proc/self/fd/{copy}")
    assert content(tmp_path) == b"x"


def test_removing_a_missing_file_is_not_an_error(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files.unlink(tmp_path / "file")
    files.unlink(tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_directories_are_made_with_their_parents_listed_renamed_and_removed(
    files: Files, tmp_path: Path
) -> None:
    path = tmp_path / "a" / "b"
    files.make_directory(path)
    files.make_directory(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name in ("z", "a", "m"):
        (path / name).touch()
    assert files.list_directory(path) == ["a", "m", "z"]
    files.rename(path, tmp_path / "c")
    assert files.list_directory(path) == []
    assert files.list_directory(tmp_path / "c") == ["a", "m", "z"]
    files.remove_tree(tmp_path / "c")
    assert files.list_directory(tmp_path) == ["a"]


def test_a_file_is_read_whole_and_a_missing_one_is_none(files: Files, tmp_path: Path) -> None:
    assert files.read_whole(tmp_path / "file") is None
    (tmp_path / "file").write_bytes(b"content")
    assert files.read_whole(tmp_path / "file") == b"content"


@pytest.mark.parametrize("sync", [True, False])
def test_replacing_leaves_the_new_content_and_nothing_else(
    files: Files, tmp_path: Path, descriptors: None, sync: bool
) -> None:
    path = tmp_path / "file"
    for text in (b"first", b"second, and longer", b""):
        files.replace(path, text, sync=sync)
        assert path.read_bytes() == text
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_replacing_is_not_hindered_by_what_a_crash_left(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_bytes(b"half of something much longer than this")
    files.replace(tmp_path / "file", b"new", sync=False)
    assert (tmp_path / "file").read_bytes() == b"new"


class Order(Files):
    """Notes what is synced and renamed, by name, and syncs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def sync(self, fd: int) -> None:
        self.calls.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))

    def sync_directory(self, path: Path) -> None:
        if not path.is_dir():
            raise FileNotFoundError(path)
        self.calls.append(f"sync {path.name}/")

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.calls.append("rename")

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def order() -> Order:
    return Order()


def test_a_synced_replacement_is_on_disk_before_its_name_is(order: Order, tmp_path: Path) -> None:
    order.replace(tmp_path / "file", b"new", sync=True)
    assert order.take() == ["sync file.tmp", "rename", f"sync {tmp_path.name}/"]
    assert not order.has_pending


def test_a_replacement_is_synced_before_it_takes_the_place_of_anything(order: Order, tmp_path: Path) -> None:
    """Otherwise a power cut could leave an empty file in its place."""
    order.replace(tmp_path / "file", b"first", sync=False)
    assert order.take() == ["rename"]
    order.replace(tmp_path / "file", b"second", sync=False)
    assert order.take() == ["sync file.tmp", "rename"]


def test_files_written_without_a_sync_are_synced_later_before_their_names(
    order: Order, tmp_path: Path
) -> None:
    order.make_directory(tmp_path / "a" / "b")
    order.replace(tmp_path / "a" / "b" / "replaced", b"x", sync=False)
    order.add_version(tmp_path / "a" / "versions", b"x")
    order.unlink(tmp_path / "a" / "versions")
    order.take()
    assert order.has_pending
    order.sync_pending()
    first, *rest = order.take()
    assert (first, sorted(rest)) == ("sync replaced", ["sync a/", "sync b/", f"sync {tmp_path.name}/"])
    order.sync_pending()
    assert (order.take(), order.has_pending) == ([], False)


def test_removed_files_need_no_sync(order: Order, tmp_path: Path) -> None:
    order.make_directory(tmp_path / "a" / "b")
    order.replace(tmp_path / "a" / "b" / "file", b"x", sync=False)
    order.remove_tree(tmp_path / "a")
    order.take()
    order.sync_pending()
    assert (order.take(), order.has_pending) == ([f"sync {tmp_path.name}/"], False)


def test_a_sync_that_fails_is_repeated_and_does_not_stop_others(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order.replace(tmp_path / "file", b"x", sync=False)
    order.take()

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(order, "sync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            order.sync_pending()
    assert order.take() == [f"sync {tmp_path.name}/"]
    order.sync_pending()
    assert order.take() == ["sync file.tmp", "rename", f"sync {tmp_path.name}/"]


def test_names_are_synced_with_those_of_the_directories_above_that_are_new(
    order: Order, tmp_path: Path
) -> None:
    order.make_directory(tmp_path / "a" / "b")
    order.make_directory(tmp_path / "a" / "other")
    order.close(order.open(tmp_path / "a" / "b" / "file"))
    order.sync_names(tmp_path / "a" / "b")
    assert order.take() == ["sync b/", "sync a/", f"sync {tmp_path.name}/"]
    order.sync_names(tmp_path / "a" / "b")
    assert order.take() == [], "once is enough"
    order.close(order.open(tmp_path / "a" / "b" / "file"))
    order.sync_names(tmp_path / "a" / "b")
    assert order.take() == [], "no name has changed"
    order.rename(tmp_path / "a" / "b" / "file", tmp_path / "a" / "moved")
    order.take()
    order.sync_names(tmp_path / "a" / "b")
    assert order.take() == ["sync b/", "sync a/"]
    order.unlink(tmp_path / "a" / "moved")
    order.unlink(tmp_path / "a" / "b" / "nowhere")
    order.sync_names(tmp_path / "a" / "b")
    assert order.take() == ["sync a/"]


def test_a_name_that_changes_while_its_directory_is_synced_is_synced_again(tmp_path: Path) -> None:
    class Busy(Order):
        def sync_directory(self, path: Path) -> None:
            super().sync_directory(path)
            if len(self.calls) == 1:
                self.close(self.open(tmp_path / "late"))

    files = Busy()
    files.close(files.open(tmp_path / "file"))
    files.sync_names(tmp_path)
    assert files.has_pending
    files.sync_names(tmp_path)
    assert (len(files.calls), files.has_pending) == (2, False)


def test_versions_are_appended_until_they_are_many(order: Order, tmp_path: Path) -> None:
    path = tmp_path / "file"
    order.add_version(path, b"1")
    assert order.take() == [], "the disk is not waited for"
    order.sync_file(path)
    assert order.take() == ["sync file", f"sync {tmp_path.name}/"]
    order.add_version(path, b"2")
    order.add_version(path, b"3")
    order.sync_file(path)
    assert (path.read_bytes(), order.take()) == (b"123", ["sync file"])
    large = b"x" * (_SMALL + 1)
    order.add_version(path, large)
    order.add_version(path, b"4")
    assert (path.read_bytes(), order.take()) == (b"123" + large + b"4", [])
    order.sync_pending()
    assert path.read_bytes() == b"4"
    assert order.take() == ["sync file.tmp", "rename", f"sync {tmp_path.name}/"]


class Interrupted(Files):
    """Calls a function just before a rewritten file gets its name."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def sync(self, fd: int) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()


def test_a_version_added_while_the_file_is_rewritten_is_kept(tmp_path: Path) -> None:
    files, path = Interrupted(), tmp_path / "file"
    old = b"x" * (_SMALL + 1)
    files.add_version(path, old)
    files.add_version(path, b"1")
    files.meanwhile = lambda: files.add_version(path, b"2")
    files.sync_pending()
    assert path.read_bytes() == old + b"12"
    assert files.has_pending
    files.sync_pending()
    assert path.read_bytes() == b"2"
    assert [*tmp_path.iterdir()] == [path]
    assert not files.has_pending


def test_a_file_removed_while_it_is_rewritten_stays_removed(tmp_path: Path) -> None:
    files, path = Interrupted(), tmp_path / "file"
    files.add_version(path, b"x" * (_SMALL + 1))
    files.add_version(path, b"1")
    files.meanwhile = lambda: files.unlink(path)
    files.sync_pending()
    assert [*tmp_path.iterdir()] == []
    assert not files.has_pending


def test_a_file_of_versions_whose_sync_failed_is_rewritten(order: Order, tmp_path: Path) -> None:
    """The system may have dropped what it could not write; another sync would not tell."""
    path = tmp_path / "file"
    order.add_version(path, b"1")
    order.add_version(path, b"2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "sync", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                order.sync_written(tmp_path)
    order.take()
    order.sync_written(tmp_path)
    assert (path.read_bytes(), order.take()) == (b"2", ["sync file.tmp", "rename", f"sync {tmp_path.name}/"])


def refuse(fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


class Refusing(Interrupted):
    """The first sync fails."""

    meanwhile = staticmethod(lambda: refuse(-1))


def test_a_thread_that_needs_a_doubtful_file_waits_for_the_one_that_rewrites_it(tmp_path: Path) -> None:
    """It must not sync the old file, which the system would call successful."""
    files, path = Refusing(), tmp_path / "file"
    files.add_version(path, b"1")
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_pending()
    waited: list[bool] = []

    def need_it() -> None:
        files.sync_written(tmp_path)
        waited.append(is_rewritten.is_set())

    def rewrite() -> None:
        other.start()
        # It cannot be seen whether the other one waits already. If it does not, it returns.
        other.join(0.2)
        is_rewritten.set()

    is_rewritten, other = threading.Event(), threading.Thread(target=need_it)
    files.meanwhile = rewrite
    inode = path.stat().st_ino
    files.sync_pending()
    other.join(DEADLINE)
    assert waited == [True]
    assert path.stat().st_ino != inode


def test_a_doubtful_file_that_changes_while_it_is_rewritten_is_not_called_synced(tmp_path: Path) -> None:
    files, path = Refusing(), tmp_path / "file"
    files.add_version(path, b"1")
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_pending()
    files.meanwhile = lambda: files.add_version(path, b"2")
    with pytest.raises(OSError, match="changed since"):
        files.sync_written(tmp_path)
    assert (path.read_bytes(), files.has_pending) == (b"12", True)
    files.sync_written(tmp_path)
    assert (path.read_bytes(), files.has_pending) == (b"2", False)


def test_a_file_without_versions_whose_sync_failed_is_rewritten_whole(tmp_path: Path) -> None:
    files, path = Refusing(), tmp_path / "file"
    path.write_bytes(b"staged")
    inode = path.stat().st_ino
    files.sync_later(path)
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_file(path)
    files.sync_later(path)
    files.sync_file(path)
    assert path.read_bytes() == b"staged"
    assert path.stat().st_ino != inode


def test_a_file_does_not_come_back_to_a_directory_that_was_thrown_away(tmp_path: Path) -> None:
    files, directory = Interrupted(), tmp_path / "topic"

    def delete_and_create() -> None:
        files.rename(directory, tmp_path / "trash")
        files.make_directory(directory)
        (directory / "file.tmp").write_bytes(b"that of the other thread")

    files.make_directory(directory)
    files.add_version(directory / "file", b"x" * (_SMALL + 1))
    files.add_version(directory / "file", b"1")
    files.meanwhile = delete_and_create
    files.sync_written(directory)
    assert [*directory.iterdir()] == []


def test_other_changes_do_not_wait_for_a_slow_removal(files: Files, tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(b"")

    def slow(path: object) -> None:
        """The event loop adds a version meanwhile."""
        other = threading.Thread(target=files.add_version, args=(small, b"1"))
        other.start()
        other.join(DEADLINE)
        assert not other.is_alive()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", slow)
        files.unlink(large)
    assert small.read_bytes() == b"1"


def test_a_large_file_on_a_full_disk_is_synced_as_it_is(order: Order, tmp_path: Path) -> None:
    path = tmp_path / "file"
    order.add_version(path, b"x" * (_SMALL + 1))
    order.add_version(path, b"1")
    whole = path.read_bytes()

    def full(fd: int, buffers: object, position: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "write", full)
        order.sync_pending()
    assert path.read_bytes() == whole
    assert "sync file" in order.take()


def test_the_files_of_one_directory_are_synced_alone(order: Order, tmp_path: Path) -> None:
    for name in ("a", "b"):
        order.make_directory(tmp_path / name)
        order.add_version(tmp_path / name / f"in-{name}", b"x")
    order.take()
    order.sync_written(tmp_path / "a")
    assert order.take() == ["sync in-a", "sync a/", f"sync {tmp_path.name}/"]
    order.sync_written(tmp_path / "a")
    assert order.take() == []
    order.sync_pending()
    assert order.take() == ["sync in-b", "sync b/"]


def test_a_version_that_cannot_be_written_leaves_the_others(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None
) -> None:
    files.add_version(tmp_path / "file", b"old")
    pwritev = os.pwritev

    def full(fd: int, buffers: list[bytes], position: int) -> int:
        pwritev(fd, [buffers[0][:1]], position)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match="No space left"):
            files.add_version(tmp_path / "file", b"new")
    assert content(tmp_path) == b"old"


def test_a_first_version_that_cannot_be_written_leaves_no_file(files: Files, tmp_path: Path) -> None:
    """An empty one would look damaged."""

    def full(fd: int, buffers: object, position: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(files, "write", full)
        files.add_version(tmp_path / "file", b"1")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "replace"])
def test_a_replacement_that_fails_leaves_the_old_content(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None, call: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            files.replace(path, b"new", sync=True)
    assert path.read_bytes() == b"old"
    files.replace(path, b"new", sync=True)
    assert path.read_bytes() == b"new"


def test_a_missing_directory_cannot_be_synced(files: Files, tmp_path: Path) -> None:
    files.sync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.sync_directory(tmp_path / "nowhere")


LOCK = """
import sys
from pathlib import Path
from nsparq.errors import StartError
from nsparq.storage.files import Files
try:
    Files().lock_directory(Path(sys.argv[1]))
except StartError as error:
    sys.exit(str(error))
"""


def lock_elsewhere(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOCK, str(path)], capture_output=True, text=True, timeout=DEADLINE
    )


def test_a_data_path_is_for_one_process(files: Files, tmp_path: Path, descriptors: None) -> None:
    fd = files.lock_directory(tmp_path)
    with pytest.raises(StartError, match="possibly in use by another instance of nsqd"):
        files.lock_directory(tmp_path)
    other = lock_elsewhere(tmp_path)
    assert other.returncode == 1
    assert other.stderr.startswith(f"failed to lock data-path: cannot flock directory {tmp_path} - ")
    files.close(fd)
    assert lock_elsewhere(tmp_path).returncode == 0
    files.close(files.lock_directory(tmp_path))


def test_the_error_names_a_missing_data_path(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    with pytest.raises(StartError) as error:
        files.lock_directory(path)
    assert str(error.value) == f"failed to lock data-path: open {path}: no such file or directory"


def test_the_error_names_a_data_path_that_is_a_file(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="failed to lock data-path: open .*: not a directory"):
        files.lock_directory(tmp_path / "file")
