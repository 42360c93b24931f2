"""The staging directory of queue mode: nothing incomplete is ever visible."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from nsparq.spark.columns import SCHEMA, arrow_schema
from nsparq.spark.header_columns import MAPS
from nsparq.spark.queue.staging import (
    CHUNK_SCHEMA,
    KEEP_PENDING_S,
    NO_ROWS,
    Chunk,
    Lost,
    Staging,
    StagingError,
    TooLate,
    keys_of,
)
from nsparq.spark.queue.task import rows_of
from tests.spark.queue.support import Crash

ABOUT = {"topics": ["t"], "channel": "c"}


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    found = Staging(tmp_path / "staging")
    found.open(ABOUT)
    yield found
    found.close()


def rows(*numbers: int, time_us: int = 1_700_000_000_000_000) -> pa.RecordBatch:
    count = len(numbers)
    columns = [
        pa.array([time_us] * count, pa.int64()).cast(pa.timestamp("us", "UTC")),
        pa.array([1] * count, pa.int32()),
        pa.array([f"{number:016x}" for number in numbers], pa.string()),
        pa.array([b"%d" % number for number in numbers], pa.binary()),
        pa.array([[("number", str(number))] for number in numbers], MAPS),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHUNK_SCHEMA)


def chunk(*numbers: int, last: bool = False, topic: str = "t", node: str = "n:1") -> Chunk:
    return Chunk(rows(*numbers), topic, node, last)


def bodies(found: Chunk | None) -> list[bytes]:
    assert found is not None
    return found.rows.column("body").to_pylist()


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory))


def reopened(path: Path) -> Staging:
    found = Staging(path)
    found.open(ABOUT, wait=0)
    return found


# chunks


def test_a_chunk_reads_as_it_was_written(staging: Staging) -> None:
    staging.begin(1)
    slot = staging.slot(1, 0)
    assert slot.publish(0, chunk(1, 2))
    assert slot.publish(1, chunk(3, last=True, node="m:2"))
    first, second = slot.chunks()
    assert first.rows.equals(rows(1, 2)) and (first.topic, first.node, first.is_last) == ("t", "n:1", False)
    assert bodies(second) == [b"3"] and (second.node, second.is_last) == ("m:2", True)
    assert first.rows.schema.equals(CHUNK_SCHEMA, check_metadata=True)


def test_a_batch_that_an_earlier_version_began_is_read_with_what_was_added(staging: Staging) -> None:
    staging.begin(1)
    slot = staging.slot(1, 0)
    # It knew no headers.
    slot.publish(0, Chunk(rows(1).select(["timestamp", "attempts", "id", "body"]), "t", "n:1", False))
    slot.publish(1, chunk(2, last=True))
    found = [row for batch in rows_of(slot, arrow_schema(SCHEMA)) for row in batch.to_pylist()]
    assert [(row["body"], row["headers"]) for row in found] == [(b"1", None), (b"2", [("number", "2")])]
    staging.finish(1)
    staging.begin(2)
    assert staging.slot(2, 0).staged_keys("t", "n:1") == {*keys_of(rows(1, 2))}


def test_chunks_end_with_the_last_or_where_one_is_missing(staging: Staging) -> None:
    staging.begin(1)
    slot = staging.slot(1, 0)
    assert [*slot.chunks()] == []
    slot.publish(0, chunk(1))
    slot.publish(2, chunk(3))
    assert [bodies(one) for one in slot.chunks()] == [[b"1"]]
    slot.publish(1, Chunk(NO_ROWS, "t", "n:1", True))
    assert [one.is_last for one in slot.chunks()] == [False, True]


def test_of_two_writers_of_a_chunk_one_wins(staging: Staging) -> None:
    staging.begin(1)
    assert staging.slot(1, 0).publish(0, chunk(1))
    assert not staging.slot(1, 0).publish(0, chunk(2))
    assert bodies(staging.slot(1, 0).chunk(0)) == [b"1"]
    assert names(staging.path / "batch-1") == {"0-000000.arrow"}


def test_a_link_counts_even_if_its_answer_was_lost(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    # Over NFS the request may be repeated, and the repetition says that the name is taken.
    staging.begin(1)
    link = os.link

    def link_twice(source: Any, target: Any) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    assert staging.slot(1, 0).publish(0, chunk(1))


def test_a_crash_before_the_link_leaves_no_chunk(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    staging.begin(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", _crash)
        # As when the process is gone: nobody tidies up either.
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        with pytest.raises(Crash):
            staging.slot(1, 0).publish(0, chunk(1))
    assert len(names(staging.path / "batch-1")) == 1
    slot = staging.slot(1, 0)
    assert slot.chunk(0) is None and slot.staged_keys("t", "n:1") == set()
    assert slot.publish(0, chunk(2))
    staging.finish(1)
    assert not (staging.path / "batch-1").exists()


def _crash(*_: object, **__: object) -> None:
    raise Crash


def test_data_and_name_are_on_disk_before_publish_returns(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging.begin(1)
    order: list[str] = []
    sync, link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        order.append("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "data")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", lambda a, b: (order.append("link"), link(a, b)))
    staging.slot(1, 0).publish(0, chunk(1))
    assert order == ["data", "link", "directory"]


def test_what_is_staged_too_late_is_not_published(staging: Staging) -> None:
    staging.begin(1)
    slot = staging.slot(1, 0)
    with pytest.raises(TooLate):
        slot.publish(0, chunk(1), until=time.monotonic() - 0.001)
    assert names(staging.path / "batch-1") == set()
    assert slot.publish(0, chunk(1), until=time.monotonic() + 60)


def test_an_attempt_that_was_overtaken_can_publish_nothing(staging: Staging) -> None:
    staging.begin(1)
    zombie = staging.slot(1, 0)
    staging.slot(1, 0).publish(0, chunk(1, last=True))
    staging.finish(1)
    with pytest.raises(Lost):
        zombie.publish(0, chunk(2))
    with pytest.raises(Lost):
        zombie.publish(1, chunk(2))
    zombie.mark_finished(0)
    assert names(staging.path) == {"lock", "owner.json", "pending", "done-1"}


def test_a_batch_that_the_executor_does_not_see_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match=r"option staging: .*no batch-7.*share"):
        Staging(tmp_path).slot(7, 0)


def test_damage_is_named(staging: Staging) -> None:
    staging.begin(1)
    slot = staging.slot(1, 0)
    slot.publish(0, chunk(*range(100)))
    path = staging.path / "batch-1" / "0-000000.arrow"
    whole = path.read_bytes()
    for cut in (0, 1, 100, len(whole) // 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(StagingError, match=r"0-000000\.arrow is damaged"):
            slot.chunk(0)


# what was finished for certain, and what was not


def test_keys_tell_times_apart_and_not_attempts() -> None:
    (key,) = keys_of(rows(1))
    again = rows(1).set_column(1, "attempts", pa.array([7], pa.int32()))
    assert keys_of(again) == [key]
    assert keys_of(rows(1, time_us=5)) != [key] and keys_of(rows(2)) != [key]
    assert keys_of(rows(0, 1, 2).slice(1, 1)) == [key]
    assert keys_of(NO_ROWS) == []


def test_only_unconfirmed_chunks_count_as_staged(staging: Staging) -> None:
    staging.begin(1)
    slot = staging.slot(1, 0)
    slot.publish(0, chunk(1))
    slot.publish(1, chunk(2))
    slot.mark_finished(0)
    # Another slot of the same node; nsqd may give to it what was staged here.
    assert staging.slot(1, 1).staged_keys("t", "n:1") == {*keys_of(rows(2))}


def test_equal_ids_of_two_nodes_or_topics_are_different_messages(staging: Staging) -> None:
    staging.begin(1)
    staging.slot(1, 0).publish(0, chunk(1))
    staging.slot(1, 1).publish(0, chunk(2, topic="u"))
    slot = staging.slot(1, 2)
    assert slot.staged_keys("t", "n:2") == set()
    assert slot.staged_keys("t", "n:1") == {*keys_of(rows(1))}
    assert slot.staged_keys("u", "n:1") == {*keys_of(rows(2))}


def test_staged_keys_see_what_was_staged_since(staging: Staging) -> None:
    staging.begin(1)
    slot = staging.slot(1, 0)
    assert slot.staged_keys("t", "n:1") == set()
    slot.publish(0, chunk(1))
    assert slot.staged_keys("t", "n:1") == {*keys_of(rows(1))}
    slot.mark_finished(0)
    assert slot.staged_keys("t", "n:1") == set()


def test_unconfirmed_keys_outlive_their_batch(staging: Staging) -> None:
    staging.begin(1)
    slot = staging.slot(1, 3)
    for index in range(3):
        slot.publish(index, chunk(index))
    slot.publish(3, Chunk(NO_ROWS, "t", "n:1", True))
    slot.mark_finished(1)
    staging.finish(1)
    assert names(staging.path / "pending") == {"1-3-000000.arrow", "1-3-000002.arrow"}
    staging.begin(2)
    assert staging.slot(2, 0).staged_keys("t", "n:1") == {*keys_of(rows(0, 2))}


def test_keys_are_dropped_when_they_are_old(staging: Staging) -> None:
    staging.begin(1)
    staging.slot(1, 0).publish(0, chunk(1))
    staging.slot(1, 1).publish(0, chunk(2))
    staging.finish(1)
    old = time.time() - KEEP_PENDING_S - 10
    os.utime(staging.path / "pending" / "1-0-000000.arrow", (old, old))
    staging.close()
    again = reopened(staging.path)
    assert names(staging.path / "pending") == {"1-1-000000.arrow"}
    again.close()


def test_no_more_keys_are_kept_than_are_worth_it(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsparq.spark.queue.staging.MAX_PENDING", 3)
    for batch in range(1, 7):
        staging.begin(batch)
        staging.slot(batch, 0).publish(0, chunk(batch))
        staging.finish(batch)
        path = staging.path / "pending" / f"{batch}-0-000000.arrow"
        os.utime(path, (time.time() - 100 + batch,) * 2)
    assert names(staging.path / "pending") == {f"{batch}-0-000000.arrow" for batch in (4, 5, 6)}


# batches come and go


def test_a_batch_may_begin_again_with_what_it_has(staging: Staging) -> None:
    staging.begin(1)
    staging.slot(1, 0).publish(0, chunk(1))
    staging.begin(1)
    assert bodies(staging.slot(1, 0).chunk(0)) == [b"1"]


def test_a_new_batch_removes_those_before_it(staging: Staging) -> None:
    # commit() may never have been called for them.
    staging.begin(1)
    staging.begin(2)
    staging.begin(4)
    assert names(staging.path) == {"lock", "owner.json", "pending", "batch-4", "done-2"}


def test_finishing_again_changes_nothing(staging: Staging) -> None:
    staging.begin(1)
    staging.finish(1)
    before = names(staging.path)
    staging.finish(1)
    staging.finish(0)
    assert names(staging.path) == before


@pytest.mark.parametrize("point", ["rename", "rmtree", "link"])
def test_a_removal_that_crashed_is_completed_later(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    staging.begin(1)
    staging.slot(1, 0).publish(0, chunk(1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil if point == "rmtree" else os, point, _crash)
        with pytest.raises(Crash):
            staging.finish(1)
    staging.close()
    again = reopened(staging.path)
    again.begin(2)
    assert names(staging.path) == {"lock", "owner.json", "pending", "batch-2", "done-1"}
    assert again.slot(2, 0).staged_keys("t", "n:1") == {*keys_of(rows(1))}
    again.close()


def test_how_many_rows_a_slot_has_is_known_until_its_batch_is_removed(staging: Staging) -> None:
    staging.begin(1)
    staging.slot(1, 0).publish(0, chunk(1, 2))
    staging.slot(1, 0).publish(1, chunk(3, last=True))
    staging.slot(1, 1).publish(0, Chunk(NO_ROWS, "t", "n:1", True))
    assert [staging.rows(1, slot) for slot in range(3)] == [3, 0, 0]
    staging.finish(1)
    assert staging.rows(1, 0) is None


# whose directory it is


def test_a_query_finds_its_directory_again(staging: Staging) -> None:
    staging.begin(3)
    staging.close()
    again = reopened(staging.path)
    assert again.identity == staging.identity
    again.check(staging.identity, 3)
    again.close()


def test_the_directory_of_another_query_is_refused(staging: Staging) -> None:
    with pytest.raises(StagingError, match=r"option staging: .* belongs to another query"):
        staging.check("somebody else", 0)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_new_checkpoint_cannot_go_on_in_a_used_directory(staging: Staging, is_finished: bool) -> None:
    staging.begin(1)
    if is_finished:
        staging.finish(1)
    with pytest.raises(StagingError, match="used up to batch 1"):
        staging.check(staging.identity, 0)
    staging.check(staging.identity, 1)


def test_a_batch_that_was_removed_cannot_begin_again(staging: Staging) -> None:
    # An old copy of the checkpoint: the messages of its batches are gone.
    staging.begin(5)
    staging.finish(5)
    with pytest.raises(StagingError, match="batch 5 was removed"):
        staging.begin(5)


def test_two_queries_at_a_time_are_refused(staging: Staging) -> None:
    other = Staging(staging.path)
    with pytest.raises(StagingError, match="in use by a running query"):
        other.open(ABOUT, wait=0.1)
    staging.close()
    other.open(ABOUT, wait=0)
    other.close()


def test_a_directory_without_batches_may_be_used_by_any_query(staging: Staging) -> None:
    # The first start may have crashed before Spark wrote its first offset.
    staging.close()
    again = reopened(staging.path)
    again.check(staging.identity, 0)
    again.close()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "unreadable"), (b"{}", "unreadable"), (b'{"format": 9, "identity": "x"}', "format 9")],
)
def test_an_invalid_owner_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "owner.json").write_bytes(content)
    with pytest.raises(StagingError, match=reason):
        Staging(tmp_path).open(ABOUT)


def test_batches_without_an_owner_are_refused(tmp_path: Path) -> None:
    (tmp_path / "batch-3").mkdir()
    with pytest.raises(StagingError, match=r"owner\.json is missing"):
        Staging(tmp_path).open(ABOUT)


def test_a_place_that_cannot_be_a_directory_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StagingError, match="option staging: .*cannot be used"):
        Staging(tmp_path / "file" / "staging").open(ABOUT)


def test_a_file_system_without_links_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(StagingError, match="option staging: .*does not support hard links"):
        Staging(tmp_path).open(ABOUT)
