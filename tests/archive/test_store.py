"""The store, as a directory and as S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nsparq.archive.store import PART_SIZE, PROBE, Store, check_url
from nsparq.errors import ArchiveUnavailable, StartError
from tests.support.s3 import run_s3
from tests.support.s3_front import S3Front


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    pytest.importorskip("moto")
    with run_s3("lake") as settings:
        yield settings


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "file":
        return Store((tmp_path / "store").as_uri())
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    return Store(f"s3://lake/{tmp_path.name}")


def test_what_is_written_can_be_read_listed_and_removed(store: Store) -> None:
    assert store.get("a/1") is None
    assert store.size("a/1") is None
    store.put("a/1", [b"one"])
    store.put("a/2", [b"x" * PART_SIZE, b"y"])
    store.put("b/c/3", [b"three"])
    assert store.get("a/1") == b"one"
    assert store.size("a/2") == PART_SIZE + 1
    assert store.read("a/2", PART_SIZE - 1, 2) == b"xy"
    assert sorted((found.key, found.size) for found in store.list("a/")) == [
        ("a/1", 3),
        ("a/2", PART_SIZE + 1),
    ]
    assert [found.key for found in store.list("a/", "a/1")] == ["a/2"]
    assert [*store.directories("b")] == ["b/c"]
    store.delete(["a/1", "a/9"])
    assert [found.key for found in store.list("a/")] == ["a/2"]
    with pytest.raises(ArchiveUnavailable, match="cannot read a/9"):
        store.read("a/9", 0, 1)


def test_only_the_first_put_of_a_new_object_counts(store: Store) -> None:
    assert store.put_new("m/1", b"first")
    assert not store.put_new("m/1", b"second")
    assert store.get("m/1") == b"first"


def test_a_store_that_overwrites_is_refused(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Front(s3["AWS_ENDPOINT_URL"]) as front:
        for name, value in (s3 | {"AWS_ENDPOINT_URL": front.url}).items():
            monkeypatch.setenv(name, value)
        store = Store("s3://lake/overwritten")
        front.ignore_conditions()
        for write in (lambda: store.put_new("m/1", b"x"), lambda: store.put("s/1", [b"x"])) * 2:
            with pytest.raises(ArchiveUnavailable, match="overwritten overwrites objects"):
                write()
        assert [found.key for found in store.list("")] == [PROBE]
        front.heal()
        assert store.put_new("m/1", b"first") and not store.put_new("m/1", b"second")
        # Once is enough, and another process asks once.
        front.counts.clear()
        store.put("s/1", [b"x"])
        Store("s3://lake/overwritten").put("s/2", [b"x"])
        assert front.counts["PutObject"] == 3


def test_a_store_that_cannot_be_reached_is_one_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with pytest.raises(ArchiveUnavailable, match="cannot look for a in s3://lake/x: .*") as caught:
        Store("s3://lake/x").size("a")
    assert "\n" not in str(caught.value)


def test_a_missing_bucket_is_named(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    store = Store("s3://no-such-bucket/nsq")
    for write in (lambda: store.put_new("a", b"x"), lambda: store.put("a", [b"x" * PART_SIZE, b"y"])):
        with pytest.raises(ArchiveUnavailable, match="in s3://no-such-bucket/nsq: there is no such bucket"):
            write()


@pytest.mark.parametrize("url", ["http://host/x", "s3:bucket", "s3:///x", "file://x/y", "file:///", "bucket"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(StartError, match="--archive"):
        Store(url)


def test_the_directory_of_a_file_url() -> None:
    assert check_url("file:///mnt/my%20share/nsq") == Path("/mnt/my share/nsq")
    assert check_url("s3://bucket/prefix") is None
