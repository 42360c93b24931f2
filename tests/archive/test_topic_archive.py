"""Uploads, commits, and what a second writer can do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsparq.archive.store import PART_SIZE, Store
from nsparq.archive.topic_archive import (
    REPLACED_S,
    UNKNOWN_S,
    Pace,
    Replaced,
    Sealed,
    TopicArchive,
    latest_manifest,
)
from nsparq.errors import ArchiveUnavailable
from nsparq.storage.files import Files
from nsparq.storage.log_range import FileReader
from nsparq.storage.manifest import Manifest, SegmentEntry, index_key, segment_key
from tests.archive.rig import FaultyStore

EMPTY = Manifest(topic="t", incarnation="i")


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore.local(tmp_path / "store")


def writer(store: Store, name: str, known: Manifest = EMPTY) -> TopicArchive:
    return TopicArchive(store, known, writer=name)


def entry(number: int) -> SegmentEntry:
    return SegmentEntry(10 * number, 10 * number + 10, 100, 1, 1, 0, number)


def sealed(tmp_path: Path, data: bytes, index: bytes = b"index") -> Sealed:
    path = tmp_path / "segment"
    path.write_bytes(data)
    return Sealed(FileReader(Files(), path), index, 5, 9, len(data), 1, 2, 0)


def bases(manifest: Manifest) -> list[int]:
    return [one.base // 10 for one in manifest.segments]


def test_a_segment_is_uploaded_in_parts_and_only_once(tmp_path: Path, store: FaultyStore) -> None:
    data = bytes(range(256)) * (PART_SIZE // 256) + b"rest"
    archive = writer(store, "a")
    found = archive.upload(sealed(tmp_path, data), Pace())
    assert store.get(segment_key("topics/t/i", found)) == data
    assert store.get(index_key("topics/t/i", found)) == b"index"
    store.calls.clear()
    assert archive.upload(sealed(tmp_path, data), Pace()) == found
    assert store.calls == ["size", "size"]


def test_another_content_has_another_name(tmp_path: Path, store: FaultyStore) -> None:
    archive = writer(store, "a")
    first = archive.upload(sealed(tmp_path, b"one"), Pace())
    second = archive.upload(sealed(tmp_path, b"two"), Pace())
    assert first.name != second.name
    assert store.get(segment_key("topics/t/i", first)) == b"one"


def test_a_file_that_has_become_shorter_is_not_archived(tmp_path: Path, store: FaultyStore) -> None:
    one = sealed(tmp_path, b"x" * 100)
    (tmp_path / "segment").write_bytes(b"x" * 50)
    with pytest.raises(OSError, match="shorter than it was"):
        writer(store, "a").upload(one, Pace())


def test_uploads_keep_to_the_bandwidth_and_end_when_nsqd_stops() -> None:
    pace = Pace(1000)
    started = time.monotonic()
    for _ in range(3):
        pace.spend(50)
    assert time.monotonic() - started >= 0.1
    pace.stopped.set()
    with pytest.raises(ArchiveUnavailable, match="nsqd stops"):
        pace.spend(1)


def test_the_latest_manifest_has_all_commits(store: FaultyStore) -> None:
    archive = writer(store, "a")
    archive.commit([entry(1)], channels={"c": 7}, gaps=[(3, 4)])
    last = archive.commit([entry(2)], drop=[entry(1)])
    assert last.number == 2
    assert latest_manifest(store, "t", "i") == last
    assert bases(last) == [2]
    assert latest_manifest(store, "t", "other").number == 0


def test_a_commit_whose_answer_was_lost_counts_once(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = writer(store, "a")
    really = FaultyStore.put_new

    def twice(self: FaultyStore, key: str, data: bytes) -> bool:
        really(self, key, data)
        return really(self, key, data)

    monkeypatch.setattr(FaultyStore, "put_new", twice)
    assert archive.commit([entry(1)]).number == 1
    assert archive.commit([entry(2)]).number == 2


def test_the_run_that_started_last_wins(store: FaultyStore) -> None:
    old = writer(store, "old")
    known = old.commit([entry(1)])
    new = writer(store, "new", known)
    assert bases(new.commit([entry(2)])) == [1, 2]
    with pytest.raises(Replaced):
        old.commit([entry(3)])
    assert old.is_replaced
    with pytest.raises(Replaced):
        old.collect(time.time() + 10 * UNKNOWN_S)
    assert bases(latest_manifest(store, "t", "i")) == [1, 2]


def before_put(store: FaultyStore, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """The next commit stalls before its put; `work` happens meanwhile."""
    really, is_done = FaultyStore.put_new, False

    def stalled(self: FaultyStore, key: str, data: bytes) -> bool:
        nonlocal is_done
        if not is_done:
            is_done = True
            work()
        return really(self, key, data)

    monkeypatch.setattr(FaultyStore, "put_new", stalled)


def test_a_stalled_writer_whose_number_is_free_again_does_not_commit(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next writer uses the number and removes its manifest; then the first one's put
    arrives."""
    old = writer(store, "old")
    known = old.commit([entry(1)])
    new = writer(store, "new", known)

    def meanwhile() -> None:
        for number in range(2, 6):
            new.commit([entry(number)])
        new.collect(time.time() + 2 * REPLACED_S)

    before_put(store, monkeypatch, meanwhile)
    with pytest.raises(Replaced):
        old.commit([entry(9)])
    assert bases(latest_manifest(store, "t", "i")) == [1, 2, 3, 4, 5]


def test_unknown_objects_go_when_they_are_old_and_no_others(tmp_path: Path, store: FaultyStore) -> None:
    archive = writer(store, "a")
    kept = archive.upload(sealed(tmp_path, b"kept"), Pace())
    archive.commit([kept])
    unknown = archive.upload(sealed(tmp_path, b"unknown"), Pace())
    archive.commit([])
    now = time.time()
    assert archive.collect(now + REPLACED_S - 60) == []
    assert len(archive.collect(now + REPLACED_S + 60)) == 1  # the first manifest
    removed = archive.collect(now + UNKNOWN_S + 60)
    assert {*removed} == {segment_key("topics/t/i", unknown), index_key("topics/t/i", unknown)}
    assert store.get(segment_key("topics/t/i", kept)) == b"kept"
    assert latest_manifest(store, "t", "i").segments == (kept,)


STEPS = st.lists(
    st.tuples(st.sampled_from(["commit", "start", "collect", "drop"]), st.integers(0, 2)), max_size=25
)


@given(STEPS)
@settings(deadline=None, max_examples=60)
def test_what_a_writer_has_committed_is_in_the_manifest_unless_a_later_one_dropped_it(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Three nsqds with the same log, in any order."""
    store = FaultyStore.local(tmp_path_factory.mktemp("store"))
    writers = [writer(store, str(number)) for number in range(3)]
    committed: dict[int, SegmentEntry] = {}
    for step, (what, who) in enumerate(steps, 1):
        one = writers[who]
        try:
            if what == "start":
                writers[who] = writer(store, f"{who}-{step}", one.manifest)
            elif what == "commit":
                one.commit([entry(step)])
                committed[step] = entry(step)
            elif what == "drop" and committed:
                number = min(committed)
                one.commit([], [committed[number]])
                del committed[number]
            elif what == "collect":
                one.collect(time.time() + 10 * UNKNOWN_S)
        except Replaced:
            assert one.is_replaced
        assert [*latest_manifest(store, "t", "i").segments] == [committed[key] for key in sorted(committed)]
