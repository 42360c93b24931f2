"""Local copies of archived segments: checked, shared, bounded, and no call to a store that is
away."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import pytest
from crc32c import crc32c

from nsparq.archive.cache import CachedSource, SegmentCache
from nsparq.archive.store import PART_SIZE
from nsparq.errors import ArchiveUnavailable
from nsparq.storage.files import Files
from nsparq.storage.log_range import FileReader
from nsparq.storage.manifest import SegmentEntry, segment_key
from tests.archive.rig import FaultyStore

PLACE = "topics/t/i"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore.local(tmp_path / "store")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(tmp_path: Path, store: FaultyStore, clock: Clock) -> SegmentCache:
    cache = SegmentCache(store, tmp_path / "cache", 250, clock=clock)
    cache.open()
    return cache


def put(store: FaultyStore, number: int, data: bytes = b"x" * 100) -> SegmentEntry:
    entry = SegmentEntry(number, number + 1, len(data), 0, 0, 0, crc32c(data))
    store.put(segment_key(PLACE, entry), [data])
    return entry


def test_a_segment_is_fetched_once(cache: SegmentCache, store: FaultyStore) -> None:
    source, entry = CachedSource(cache, PLACE), put(store, 1, b"y" * 50)
    assert source.cached(entry) is None
    assert source.fetch(entry).read(10, 0) == b"y" * 10
    assert source.cached(entry) is source.fetch(entry)
    source.prefetch(entry)
    assert store.calls.count("read") == 1
    assert source.path(entry).read_bytes() == b"y" * 50


def test_a_large_segment_comes_in_parts(cache: SegmentCache, store: FaultyStore) -> None:
    data = b"a" * PART_SIZE + b"b"
    entry = put(store, 1, data)
    assert cache.fetch(PLACE, entry).read(2, PART_SIZE - 1) == b"ab"
    assert store.calls.count("read") == 2


def test_the_least_recently_used_copy_goes_first_and_stays_readable_while_it_is_read(
    cache: SegmentCache, store: FaultyStore
) -> None:
    first, second, third = (put(store, number) for number in range(3))
    reader = cache.fetch(PLACE, first)
    cache.fetch(PLACE, second)
    cache.cached(cache.path(PLACE, first))
    cache.fetch(PLACE, third)
    names = [cache.path(PLACE, one).name for one in (first, third)]
    assert sorted(path.name for path in cache.directory.iterdir()) == sorted(names)
    assert cache.size_bytes == 200
    cache.fetch(PLACE, put(store, 4, b"z" * 300))
    assert reader.read(1, 0) == b"x"
    assert len([*cache.directory.iterdir()]) == 1


class Hooked(Files):
    """Calls a function before a file is removed."""

    def __init__(self, before: Callable[[Path], None]) -> None:
        super().__init__()
        self._before = before

    def unlink(self, path: Path) -> None:
        self._before(path)
        super().unlink(path)


def test_a_copy_that_cannot_be_removed_holds_up_nobody(
    cache: SegmentCache,
    store: FaultyStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = put(store, 1), put(store, 2, b"y" * 200)
    cache.fetch(PLACE, first)
    waiting: list[Future[FileReader]] = []
    read = store.read

    def note_fetch(key: str, start: int, length: int) -> memoryview:
        waiting.extend(cache._fetching.values())
        return read(key, start, length)

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(store, "read", note_fetch)
    monkeypatch.setattr(cache, "_own_files", Hooked(refuse))
    found = cache.fetch(PLACE, second)
    assert found.read(1, 0) == b"y"
    assert [one.result(timeout=0) for one in waiting] == [found]
    assert "cannot remove" in caplog.text and cache.path(PLACE, first).name in caplog.text


def test_a_copy_that_is_fetched_again_while_it_is_evicted_stays(
    cache: SegmentCache, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, large = put(store, 1), put(store, 2), put(store, 3, b"z" * 240)
    cache.fetch(PLACE, first)
    cache.fetch(PLACE, second)

    def fetch_again(path: Path) -> None:
        if path == cache.path(PLACE, first):
            cache.fetch(PLACE, second)

    monkeypatch.setattr(cache, "_own_files", Hooked(fetch_again))
    cache.fetch(PLACE, large)
    assert [*cache.directory.iterdir()] == [cache.path(PLACE, second)]
    assert cache.cached(cache.path(PLACE, second)) is not None
    assert cache.size_bytes == 100


def test_a_start_removes_old_copies_and_nothing_else(cache: SegmentCache, store: FaultyStore) -> None:
    cache.fetch(PLACE, put(store, 1))
    (cache.directory / "notes.txt").write_text("mine")
    again = SegmentCache(store, cache.directory, 250)
    again.open()
    assert [path.name for path in cache.directory.iterdir()] == ["notes.txt"]


def test_after_an_error_nobody_asks_the_store_for_a_while(
    cache: SegmentCache, store: FaultyStore, clock: Clock
) -> None:
    entry = put(store, 1)
    store.is_away = True
    store.calls.clear()
    for now, calls in ((0, 1), (0.9, 1), (1.1, 2), (3.0, 2), (3.2, 3), (7.1, 3), (7.3, 4)):
        clock.now = now
        with pytest.raises(ArchiveUnavailable, match="the store is away"):
            cache.fetch(PLACE, entry)
        cache.prefetch(PLACE, entry)
        assert len(store.calls) == calls, now
    assert cache.error == "the store is away"
    store.is_away = False
    clock.now = 100
    cache.fetch(PLACE, entry)
    assert cache.error == ""


def test_an_object_that_is_too_short_is_an_error(cache: SegmentCache, store: FaultyStore) -> None:
    entry = put(store, 1)
    store.put(segment_key(PLACE, entry), [b"x" * 99])
    with pytest.raises(ArchiveUnavailable, match="shorter than it was"):
        cache.fetch(PLACE, entry)
    assert [*cache.directory.iterdir()] == []


def test_a_damaged_object_is_fetched_twice_and_then_used(
    cache: SegmentCache, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    entry = put(store, 1)
    store.put(segment_key(PLACE, entry), [b"x" * 99 + b"y"])
    store.calls.clear()
    assert cache.fetch(PLACE, entry).read(1, 99) == b"y"
    assert store.calls.count("read") == 2
    assert "is damaged; messages that are still whole are delivered" in caplog.text


def test_read_ahead_is_asked_for_once_and_never_with_a_small_cache(
    tmp_path: Path, store: FaultyStore
) -> None:
    work: list[Callable[[], None]] = []
    cache = SegmentCache(store, tmp_path / "cache", 500, submit=work.append)
    cache.open()
    entry, large = put(store, 1), put(store, 2, b"x" * 126)
    for _ in range(5):
        cache.prefetch(PLACE, entry)
        cache.prefetch(PLACE, large)
    assert len(work) == 1
    work.pop()()
    assert cache.cached(cache.path(PLACE, entry)) is not None
    cache.prefetch(PLACE, entry)
    assert work == []


def test_readers_of_one_segment_share_a_fetch(
    cache: SegmentCache, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = put(store, 1)
    found: list[bytes] = []
    threads = [Thread(target=lambda: found.append(cache.fetch(PLACE, entry).read(1, 0))) for _ in range(8)]
    really, store_read = FaultyStore.read, []

    def read(self: FaultyStore, key: str, start: int, length: int) -> memoryview:
        store_read.append(key)
        for thread in threads[1:]:
            if thread.ident is None:
                thread.start()
        return really(self, key, start, length)

    monkeypatch.setattr(FaultyStore, "read", read)
    threads[0].start()
    for thread in threads:
        while thread.ident is None:
            threads[0].join(0.01)
        thread.join()
    assert found == [b"x"] * 8
    assert len(store_read) == 1
