"""The cache: whose it is, and several processes that make the same thing at once."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nsparq.spark.session.cache import cache_directory, digest, make_once
from tests.support.polling import DEADLINE


def test_the_xdg_directory_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_directory() == tmp_path / "x" / "nsparq"
    assert (tmp_path / "x" / "nsparq").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("given", [None, "", "relative/path"])
def test_otherwise_it_is_in_the_home_directory(
    given: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert cache_directory() == tmp_path / ".cache" / "nsparq"


def test_what_cannot_be_written_is_replaced_by_a_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    found = cache_directory()
    assert found.parent == tmp_path / "t" and found == cache_directory()


def test_a_directory_that_others_may_write_to_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    for base in ("cache", "elsewhere"):
        (tmp_path / base).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "nsparq").mkdir()
    (tmp_path / "cache" / "nsparq").chmod(0o777)
    fallback = cache_directory()
    assert fallback.parent == tmp_path / "t"
    # Nor one that somebody has put in its place.
    fallback.rmdir()
    fallback.symlink_to(tmp_path / "elsewhere")
    assert cache_directory() not in (fallback, tmp_path / "cache" / "nsparq")


def test_a_thing_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_text("x")

    assert make_once(tmp_path / "a" / "thing", make) == make_once(tmp_path / "a" / "thing", make)
    assert len(made) == 1 and (tmp_path / "a" / "thing").read_text() == "x"


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_once(tmp_path / "thing", fail)
    assert list(tmp_path.iterdir()) == []


def test_processes_that_make_the_same_directory_at_once_all_get_a_whole_one(tmp_path: Path) -> None:
    code = """
import pathlib, sys
from nsparq.spark.session.cache import make_once
def make(path):
    path.mkdir()
    (path / "one").write_text("1")
    print("made", flush=True)
    sys.stdin.readline()  # until all the others have come this far
    (path / "two").write_text("2")
path = make_once(pathlib.Path(sys.argv[1]), make)
print(sorted(entry.name for entry in path.iterdir()))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "thing")]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "made\n"
    for process in processes:
        assert process.communicate("\n", timeout=DEADLINE)[0] == "['one', 'two']\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing"]


def test_a_digest_depends_on_every_part_and_its_place() -> None:
    assert len({digest("a", "b"), digest("b", "a"), digest("ab"), digest("a"), digest("a", 1)}) == 5
