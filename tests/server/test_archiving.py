"""Segments go to the archive, leave the disk, and come back for readers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsparq.archive.store import StoredObject
from nsparq.archive.topic_archive import REPLACED_S, UNKNOWN_S, TopicArchive, latest_manifest
from nsparq.broker.idempotence import PRODUCERS_FILE
from nsparq.broker.stats import broker_stats
from nsparq.delivery_policy import parse_policy
from nsparq.errors import StartError
from nsparq.http.api import ApiError
from nsparq.packed import PackedBodies
from nsparq.server.committing import Committer
from nsparq.storage.manifest import Manifest
from nsparq.storage.raw_batch import iter_batches
from nsparq.storage.segment_list import ARCHIVE_FILE, READ_AHEAD
from tests.archive.rig import ArchiveRig, FaultyStore, Held, Killed, numbers
from tests.broker.rig import FakeClient, Later, Rig
from tests.broker.test_idempotence import publish as publish_numbers


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore.local(tmp_path / "store")


@pytest.fixture
def rig(tmp_path: Path, store: FaultyStore) -> ArchiveRig:
    """Every segment leaves the disk as soon as the archive has it."""
    return ArchiveRig(tmp_path / "data", store=store, archive_local_bytes=1)


def consume(rig: ArchiveRig, count: int, channel: str = "c") -> list[int]:
    """What a client gets that finishes each message."""
    client: FakeClient = rig.subscribe(channel=channel, rdy=5)
    found: list[int] = []
    for _ in range(10 * count + 10):
        taken = client.take()
        if not taken and len(found) >= count:
            break
        for message in taken:
            rig.finish(client, message)
        found += numbers(message.body for message in taken)
        rig.turn()
        rig.pass_time(1)
        rig.maintain()
    rig.channel(channel).remove_client(client)
    return found


# sending


def test_sealed_segments_are_archived_and_leave_the_disk(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(100)
    stats = broker_stats(rig.broker)["topics"][0]["archive"]
    assert stats["segments"] == len(rig.log.segments) - 1 > 5
    assert stats["waiting_segments"] == 0 and stats["error"] == ""
    assert len(rig.objects(".log")) == len(rig.objects(".index")) == stats["segments"]
    assert rig.local_bytes() == rig.log.segments[-1].size
    assert rig.log.size_bytes == rig.local_bytes()
    assert rig.topic().positions().size_bytes == rig.log.size_bytes + stats["bytes"]


def test_without_a_limit_segments_that_a_channel_needs_stay_on_disk(
    tmp_path: Path, store: FaultyStore
) -> None:
    rig = ArchiveRig(tmp_path / "data", store=store)
    rig.channel()
    rig.fill(50)
    assert len(rig.objects(".log")) == len(rig.log.segments) - 1
    assert all(segment.is_local for segment in rig.log.segments)
    assert consume(rig, 50) == [*range(50)]
    rig.settle()
    assert [segment.is_local for segment in rig.log.segments[-2:]] == [False, True]
    assert rig.log.positions().earliest == rig.log.segments[0].base


def test_a_topic_that_is_not_archived_is_as_before(rig: ArchiveRig) -> None:
    rig.channel()
    rig.topic().change_settings({"archive": False})
    rig.fill(50)
    assert rig.objects() == []
    assert rig.local_bytes() > 5000


def test_a_store_that_is_away_costs_disk_space_and_nothing_else(rig: ArchiveRig) -> None:
    rig.channel()
    rig.store.is_away = True
    rig.fill(50)
    assert consume(rig, 50) == [*range(50)]
    rig.settle()
    stats = broker_stats(rig.broker)
    archive = stats["topics"][0]["archive"]
    assert archive["waiting_segments"] == len(rig.log.segments) - 1
    assert archive["waiting_bytes"] > 3000 and archive["oldest_waiting_age_s"] > 0
    assert "the store is away" in archive["error"] and stats["warnings"] == [archive["error"]]
    assert stats["health"] == "OK"
    assert rig.local_bytes() > 5000
    rig.store.is_away = False
    rig.settle(60)
    archive = broker_stats(rig.broker)["topics"][0]["archive"]
    assert archive["waiting_segments"] == 0 and archive["error"] == ""
    assert broker_stats(rig.broker)["warnings"] == []
    assert rig.local_bytes() == rig.log.segments[-1].size


def test_a_segment_whose_fsync_ends_late_is_archived_though_nobody_uses_the_topic(
    rig: ArchiveRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[], None]] = []

    def begin(work: Callable[[], None], then: Callable[[], None] = lambda: None) -> None:
        late.extend((work, then))

    with monkeypatch.context() as patch:
        patch.setattr(rig.broker, "in_background", begin)
        for number in range(30):
            rig.publish("t", b"%d" % number + b"." * 90)
        rig.settle(10)
        assert rig.objects() == []
    for step in late:
        step()
    rig.settle()
    assert len(rig.objects(".log")) == len(rig.log.segments) - 1 > 2


def test_the_store_is_asked_less_and_less_often_while_it_is_away(rig: ArchiveRig) -> None:
    rig.channel()
    rig.store.is_away = True
    rig.fill(30)
    rig.settle(400)
    assert 15 < len(rig.store.calls) < 40


def test_after_an_unexpected_error_the_upload_is_tried_again_later(
    rig: ArchiveRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.channel()
    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "put", lambda key, parts: 1 / 0)
        rig.fill(20)
    (warning,) = rig.broker.health.warnings.values()
    assert "division by zero" in warning
    assert 1 <= sum("internal error" in one.message for one in caplog.records) <= 4
    rig.settle(60)
    assert rig.broker.health.warnings == {}
    assert rig.objects(".log")


def test_what_the_store_has_is_not_sent_again(rig: ArchiveRig) -> None:
    rig.channel()
    rig.store.kill_at(10_000)
    rig.fill(30)
    sent = rig.store.calls.count("put")
    (rig.topic().directory / ARCHIVE_FILE).unlink()
    rig.crash()
    rig.settle()
    assert rig.store.calls.count("put") == sent


# uploads that end late

MOMENTS = ("before it begins", "while the store answers", "while its manifest is synced")


def upload_with(
    rig: ArchiveRig, uploads: Held, monkeypatch: pytest.MonkeyPatch, moment: str, act: Callable[[], None]
) -> None:
    """Run the upload that waits, and do something else meanwhile."""
    acts = [act]

    def now() -> None:
        if acts:
            acts.pop()()

    store_list, sync = rig.store.list, rig.files.sync

    def list_slowly(prefix: str, after: str | None = None) -> Iterator[StoredObject]:
        found = store_list(prefix, after)
        if rig.objects(".json"):
            now()
        return found

    def sync_slowly(fd: int) -> None:
        if rig.files._paths[fd].endswith(ARCHIVE_FILE + ".tmp"):
            now()
        sync(fd)

    with monkeypatch.context() as patch:
        if moment == MOMENTS[0]:
            now()
        elif moment == MOMENTS[1]:
            patch.setattr(rig.store, "list", list_slowly)
        else:
            patch.setattr(rig.files, "sync", sync_slowly)
        assert uploads.run() == 1
    assert not acts


@pytest.fixture
def uploads() -> Held:
    return Held()


@pytest.fixture
def late(tmp_path: Path, store: FaultyStore, uploads: Held) -> ArchiveRig:
    """A rig whose uploads run when the test asks for it."""
    return ArchiveRig(tmp_path / "data", store=store, archive_local_bytes=1, uploader=uploads)


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_upload_of_a_deleted_topic_leaves_its_successor_alone(
    late: ArchiveRig, uploads: Held, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    late.channel()
    late.fill(30)

    def replace_topic() -> None:
        late.broker.delete_topic("t")
        late.channel()

    upload_with(late, uploads, monkeypatch, moment, replace_topic)
    assert late.names("*.json*") == ["topic.json"]
    late.fill(30, start=30)
    while uploads.run():
        late.settle()
    assert any(late.topic().incarnation in key for key in late.objects(".log"))
    assert late.local_bytes() == late.log.segments[-1].size
    assert consume(late, 30) == [*range(30, 60)]
    late.crash()
    assert late.log.corrupt_messages == 0


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_upload_that_outlasts_nsqd_leaves_the_manifest_alone(
    late: ArchiveRig, uploads: Held, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    late.channel()
    late.fill(50)
    uploads.run()
    path = late.topic_directory() / ARCHIVE_FILE
    late.settle()
    before = path.read_bytes()
    upload_with(late, uploads, monkeypatch, moment, late.archiving.stop)
    assert path.read_bytes() == before


def test_an_upload_that_outlasts_nsqd_does_not_take_the_archive_from_the_next_run(
    late: ArchiveRig, uploads: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    late.channel()
    late.fill(30)
    put_new = late.store.put_new

    def put_late(key: str, data: bytes) -> bool:
        monkeypatch.setattr(late.store, "put_new", put_new)
        late.archiving.stop()
        own = TopicArchive(late.store, Manifest.decode(data), writer="")
        following = TopicArchive(late.store, replace(own.manifest, number=0, segments=()), writer="next run")
        following.commit([])
        return put_new(key, data)

    monkeypatch.setattr(late.store, "put_new", put_late)
    uploads.run()
    topic = late.topic()
    assert latest_manifest(late.store, "t", topic.incarnation).writer == "next run"


def test_a_local_manifest_of_another_topic_is_not_used(late: ArchiveRig, uploads: Held) -> None:
    late.channel()
    incarnation = late.topic().incarnation
    other = Manifest(topic="t", incarnation="0" * 32, number=7)
    (late.topic_directory() / ARCHIVE_FILE).write_bytes(other.encode())
    late.fill(30)
    while uploads.run():
        late.settle()
    assert late.objects(".log") and all(incarnation in key for key in late.objects())


def test_a_deleted_topic_is_forgotten_though_its_upload_ends_later(late: ArchiveRig, uploads: Held) -> None:
    late.channel()
    late.fill(30)
    while uploads.run():
        late.settle()
    late.clock.advance(REPLACED_S)
    late.settle()
    late.broker.delete_topic("t")
    assert uploads.run() == 1
    assert late.archiving._collect_at == {}


# reading back


def test_a_channel_far_behind_gets_everything_in_order(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(200)
    assert rig.local_bytes() < 2000
    assert consume(rig, 200) == [*range(200)]


def test_a_channel_that_goes_back_reads_from_the_archive(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(60)
    consume(rig, 60)
    rig.settle()
    assert rig.topic().positions().messages == 60
    rig.channel().seek(rig.log.start)
    rig.turn()
    assert consume(rig, 60) == [*range(60)]


def test_ranges_and_times_are_found_in_the_archive(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(30)
    between_ns = rig.clock.wall()
    rig.clock.advance(1)
    rig.fill(30, start=30)
    found, sequence = [], rig.log.start
    while sequence < rig.log.end:
        place = rig.log.locate(sequence, 1)
        for batch in iter_batches(place.read_verified().data):
            found += batch.bodies()
        sequence = place.next
    assert numbers(found) == [*range(60)]
    assert rig.log.search_time(between_ns).run() == rig.log.start + 30


def test_deferred_messages_of_archived_segments_are_delivered(rig: ArchiveRig) -> None:
    rig.channel()
    rig.publish("t", b"0.", defer_ms=3_000_000)
    rig.fill(30, start=1)
    assert not rig.log.segments[0].is_local
    assert sorted(consume(rig, 30)) == [*range(1, 31)]
    rig.pass_time(3000)
    assert consume(rig, 1) == [0]


def test_a_store_that_is_away_delays_only_the_channel_that_needs_it(rig: ArchiveRig) -> None:
    rig.channel("behind")
    rig.fill(40)
    rig.store.is_away = True
    fresh, behind = rig.subscribe(channel="fresh", rdy=100), rig.subscribe(channel="behind", rdy=100)
    rig.publish("t", b"40.")
    assert numbers(fresh.take_bodies()) == [40]
    rig.settle()
    assert behind.take() == []
    stats = broker_stats(rig.broker)
    assert stats["health"] == "OK"
    assert any("t:behind: waits for the archive" in text for text in stats["warnings"])
    rig.store.is_away = False
    rig.settle(60)
    assert numbers(behind.take_bodies())[:41] == [*range(41)]
    assert broker_stats(rig.broker)["warnings"] == []


def test_a_channel_that_needs_the_archive_no_more_does_not_wait_for_it(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(40)
    rig.store.is_away = True
    rig.subscribe(rdy=100)
    rig.settle()
    assert [*rig.broker.health.warnings] == ["archive t:c"]
    rig.channel().empty()
    rig.settle()
    assert rig.broker.health.warnings == {}


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_start_after_a_crash_does_not_wait_for_archived_dead_letters(
    rig: ArchiveRig, has_checkpoint: bool
) -> None:
    """Not even for a channel whose last checkpoint is older than all of them. Letters that no
    checkpoint has settled stay on the disk."""
    policy = parse_policy({"max_attempts": 1}, "t")
    rig.channel("idle").change_policy(policy)
    rig.channel("idle").pause()
    rig.channel().change_policy(policy)
    client = rig.subscribe(rdy=100)
    rig.settle()
    if not has_checkpoint:
        rig.files.fail("replace", "c.channel")
    rig.fill(40)
    for message in client.take():
        rig.requeue(client, message)
    rig.settle(20)
    local = [segment.is_local for segment in rig.topic("t.dead").log.sealed_segments()]
    assert set(local) == {not has_checkpoint}
    rig.files.heal()
    rig.store.is_away = True
    rig.crash()
    assert rig.channel().depth == 0
    assert rig.topic("t.dead").positions().messages == 40


def test_a_commit_that_a_crash_interrupted_waits_for_the_archive_and_a_start_does_not(
    rig: ArchiveRig,
) -> None:
    rig.channel()
    staged = [b"%d" % number + b"." * 90 for number in range(30)]
    transactions = rig.broker.transactions
    for number in range(0, 30, 10):
        transactions.stage("p", 1, "w", "t", PackedBodies.of(staged[number : number + 10]))
    transaction = transactions.promise("p", 1, {"w": 30})
    transactions.decide(transaction)
    transaction.write_promise(sync=False)
    for chunk in transaction.chunks[:2]:
        transactions.apply(transaction, chunk, chunk.read(rig.files))
        rig.settle()
    rig.fill(20, start=100)
    rig.store.is_away = True
    rig.crash()

    async def work(read: Callable[[], Any], *, is_remote: bool = False) -> Any:
        return read()

    nsqd: Any = SimpleNamespace(broker=rig.broker, options=rig.options, in_disk_thread=work)
    committer = Committer(nsqd)
    with pytest.raises(ApiError, match="WRITE_FAILED"):
        asyncio.run(committer.commit("p", 1))
    rig.store.is_away = False
    rig.clock.advance(60)
    assert asyncio.run(committer.commit("p", 1))["messages"] == 30
    assert sorted(consume(rig, 50)) == [*range(30), *range(100, 120)]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_start_does_not_wait_for_archived_numbers_of_producers(rig: ArchiveRig, is_damaged: bool) -> None:
    rig.channel()
    publish_numbers(rig, 0)
    rig.fill(20, start=1)
    path = rig.topic_directory() / PRODUCERS_FILE
    rig.files.fail("replace", PRODUCERS_FILE)
    for number in range(30):
        publish_numbers(rig, 10 + number)
    rig.settle(20)
    rig.files.heal()
    if is_damaged:
        path.write_bytes(b"")
    rig.store.is_away = True
    rig.crash()
    before = rig.log.end
    assert publish_numbers(rig, *range(10, 40)).is_ok
    assert rig.log.end == before


def test_the_cache_is_bounded(tmp_path: Path, store: FaultyStore) -> None:
    rig = ArchiveRig(tmp_path / "data", store=store, archive_local_bytes=1, archive_cache_bytes=2500)
    rig.channel()
    rig.fill(100)
    sizes = []
    client = rig.subscribe(rdy=3)
    for _ in range(200):
        for message in client.take():
            rig.finish(client, message)
        rig.turn()
        sizes.append(sum(path.stat().st_size for path in (rig.data_path / "archive-cache").iterdir()))
    assert numbers(message.body for message in client.messages) == [*range(100)]
    assert 1000 < max(sizes) <= 2500


def test_the_next_segments_are_fetched_ahead(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(60)
    rig.store.calls.clear()
    client = rig.subscribe(rdy=1)
    assert numbers(client.take_bodies()) == [0]
    assert rig.store.calls.count("read") == 1 + READ_AHEAD


# carrying over


class Disk(Later):
    """The threads for the disk. Work runs at once."""

    is_working = False

    def __call__(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        self.is_working = True
        try:
            work()
        finally:
            self.is_working = False
        then()


def with_stuck_message(
    tmp_path: Path, store: FaultyStore, *, held: int = 1, **more: Any
) -> tuple[ArchiveRig, FakeClient]:
    """A rig with a client that holds on to the first messages, whose segment is only in the
    archive. All others are finished, and the last ones are in segments on disk."""
    flags = {"archive_local_bytes": 20_000, "max_bytes_per_file": 2000, "archive_cache_bytes": 1}
    rig = ArchiveRig(tmp_path / "data", store=store, msg_timeout=900.0, **flags, **more)
    rig.channel()
    for number in range(400):
        rig.publish("t", b"%d" % number + b"." * 20)
        if number % 50 == 0:
            rig.settle(1)
    client, other = rig.subscribe(rdy=held), rig.subscribe(rdy=0)
    rig.settle(10)
    assert not rig.log.segments[0].is_local and rig.log.segments[-5].is_local
    assert numbers(message.body for message in client.messages) == [*range(held)]
    rig.ready(other, 1000)
    while taken := other.take():
        rig.finish(other, *taken)
        rig.turn()
    rig.disconnect(other)
    return rig, client


def carried(rig: ArchiveRig) -> int:
    return len(rig.channel().carried_over.store.kept)


def test_messages_are_carried_over_from_the_archive_without_a_thread_for_the_disk(
    tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    rig, client = with_stuck_message(tmp_path, store, background=disk)
    read, readers = store.read, []

    def note_reader(key: str, start: int, length: int) -> memoryview:
        readers.append(disk.is_working)
        return read(key, start, length)

    monkeypatch.setattr(store, "read", note_reader)
    rig.settle(20)
    assert carried(rig) == 1
    assert {*readers} == {False}
    assert rig.channel().low() == rig.log.end
    (stuck,) = client.messages
    rig.requeue(client, stuck)
    rig.turn()
    assert numbers(message.body for message in client.messages) == [0, 0]


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_message_that_a_redrive_brought_back_is_carried_over_from_the_archive(
    tmp_path: Path, store: FaultyStore, has_copy: bool
) -> None:
    rig, _ = with_stuck_message(tmp_path, store)
    first = rig.log.segments[0]
    rig.channel().carried_over.before = first.end
    if has_copy:
        assert first.entry is not None
        rig.archiving.source_of("t", rig.topic().incarnation).fetch(first.entry)
    rig.settle(20)
    assert carried(rig) == 1
    assert rig.channel().low() == rig.log.end


def test_a_store_that_is_away_keeps_messages_from_being_carried_over_and_nobody_from_publishing(
    tmp_path: Path, store: FaultyStore
) -> None:
    rig, _ = with_stuck_message(tmp_path, store)
    store.is_away = True
    rig.settle(20)
    stats = broker_stats(rig.broker)
    assert stats["health"] == "OK"
    assert stats["warnings"] == ["t:c: cannot carry messages over: the store is away"]
    assert carried(rig) == 0
    store.is_away = False
    rig.settle(60)
    assert broker_stats(rig.broker)["warnings"] == []
    assert carried(rig) == 1


def test_one_thread_at_a_time_waits_for_a_message_that_is_to_be_carried_over(
    tmp_path: Path, store: FaultyStore
) -> None:
    rig, _ = with_stuck_message(tmp_path, store)
    fetches = rig.archiving._fetchers = Held()
    rig.settle(20)
    rig.topic().delete_channel("c")
    assert fetches.run() == 1
    assert broker_stats(rig.broker)["warnings"] == []


def test_a_segment_with_many_unfinished_messages_is_not_fetched_to_carry_them_over(
    tmp_path: Path, store: FaultyStore
) -> None:
    rig, _ = with_stuck_message(tmp_path, store, held=20)
    store.calls.clear()
    rig.settle(20)
    assert "read" not in store.calls
    assert carried(rig) == 0


# restarts


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_restart_needs_no_store(rig: ArchiveRig, is_clean: bool) -> None:
    rig.channel()
    rig.fill(60)
    rig.store.is_away = True
    earliest = rig.log.start
    rig.restart() if is_clean else rig.crash()
    assert rig.log.start == earliest
    assert (rig.log.corrupt_batches, rig.log.corrupt_messages) == (0, 0)
    assert rig.channel().depth == 60
    rig.store.is_away = False
    assert consume(rig, 60) == [*range(60)]


def test_without_the_flag_nsqd_does_not_start_on_a_log_that_is_partly_archived(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(60)
    rig.close()
    with pytest.raises(StartError, match="start nsqd with --archive"):
        Rig(rig.data_path)


def test_a_damaged_local_manifest_is_read_from_the_archive(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(60)
    path = rig.topic().directory / ARCHIVE_FILE
    path.write_bytes(path.read_bytes()[:-9])
    rig.crash()
    assert consume(rig, 60) == [*range(60)]


def test_a_missing_index_costs_only_time(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(60)
    for path in rig.data_path.glob("topics/*.topic/*.index"):
        path.unlink()
    rig.crash()
    assert consume(rig, 60) == [*range(60)]


# removing


def test_archive_retention_removes_what_no_channel_needs(tmp_path: Path, store: FaultyStore) -> None:
    rig = ArchiveRig(tmp_path / "data", store=store, archive_local_bytes=1, archive_retention_bytes=5000)
    rig.channel()
    rig.fill(100)
    assert rig.topic().positions().messages == 100
    consume(rig, 100)
    rig.settle()
    assert 30 < rig.topic().positions().messages < 60
    rig.clock.advance(UNKNOWN_S + REPLACED_S)
    rig.fill(1, start=100)
    rig.settle()
    kept = [segment for segment in rig.log.segments if segment.entry is not None]
    # The store's clock is the machine's: objects count as old only by the rig's clock.
    assert len(rig.objects(".log")) >= len(kept)


def test_unknown_objects_of_an_idle_topic_are_looked_for_once_an_hour(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(30)
    rig.store.calls.clear()
    rig.settle(10)
    assert rig.store.calls == []
    rig.clock.advance(REPLACED_S)
    rig.settle(30)
    # The latest manifest and the one behind it, then segments and manifests.
    assert rig.store.calls[:4] == ["list", "get", "list", "list"]
    assert rig.store.calls.count("put_new") == 0


def test_unknown_objects_go_also_if_nobody_publishes_after_a_restart(tmp_path: Path, rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(30)
    (kept, *_) = rig.objects(".log")
    stray = tmp_path / "store" / Path(kept).parent / "1-2-00000000.log"
    stray.write_bytes(b"an upload that no commit followed")
    os.utime(stray, (0, 0))
    rig.restart()
    rig.settle(10)
    assert stray.exists()
    rig.clock.advance(REPLACED_S)
    rig.settle(30)
    assert not stray.exists() and kept in rig.objects(".log")
    assert sorted(consume(rig, 30)) == [*range(30)]


def test_the_first_nsqd_notices_that_it_was_replaced(tmp_path: Path, rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(30)
    old, old_archiving = rig.broker, rig.archiving
    rig.fill(30, start=30)
    before = rig.objects(".json")
    # A second nsqd on a copy of the data path.
    archive = old_archiving._archives[old.topics["t"]]
    other = ArchiveRig(tmp_path / "other", store=rig.store)
    taken = other.archiving
    second = TopicArchive(rig.store, archive.manifest, writer="second")
    second.commit([], [])
    assert taken is not None and len(rig.objects(".json")) == len(before) + 1
    rig.fill(30, start=60)
    stats = broker_stats(rig.broker)["topics"][0]["archive"]
    assert stats["replaced"] and "another nsqd" in stats["error"]
    assert stats["waiting_segments"] > 0
    local = rig.local_bytes()
    assert local > 2000
    assert consume(rig, 90) == [*range(90)]
    assert len(rig.objects(".json")) == len(before) + 1


# restoring


def test_an_empty_data_path_gets_everything_back_that_is_archived(
    tmp_path: Path, rig: ArchiveRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.channel("done")
    rig.channel("behind")
    rig.topic().change_settings({"archive_retention_age": 86_400})
    rig.fill(40)
    consume(rig, 40, "done")
    rig.fill(20, start=40)
    archived = sum(segment.end - segment.base for segment in rig.log.segments if not segment.is_local)
    last_ns, end, incarnation = rig.log.segments[-2].last_ns, rig.log.end, rig.topic().incarnation
    rig.drop()
    new = ArchiveRig(tmp_path / "new", store=rig.store, restore=True, clock=rig.clock)
    assert new.topic().incarnation == incarnation
    assert new.topic().positions().messages == archived < 60
    assert (new.log.corrupt_messages, new.topic().corrupt_files) == (0, 0)
    assert new.log.end >= end
    assert new.topic().settings.archive_retention_age == 86_400
    assert broker_stats(new.broker)["topics"][0]["archive"]["missing_after_ns"] == last_ns
    assert "those published after 2023-11-14T" in caplog.text
    assert consume(new, archived, "behind") == [*range(archived)]
    assert set(consume(new, 0, "done")) <= {*range(30, archived)}
    new.fill(20, start=100)
    assert consume(new, 20, "behind") == [*range(100, 120)]
    new.crash()
    assert new.topic().positions().messages == archived + 20


def test_a_new_topic_misses_nothing_though_its_predecessor_was_restored(
    tmp_path: Path, rig: ArchiveRig
) -> None:
    rig.channel()
    rig.fill(40)
    rig.drop()
    new = ArchiveRig(tmp_path / "new", store=rig.store, restore=True, clock=rig.clock)
    new.broker.delete_topic("t")
    new.channel()
    assert broker_stats(new.broker)["topics"][0]["archive"]["missing_after_ns"] is None


def test_a_restore_that_is_killed_begins_again(tmp_path: Path, rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(40)
    rig.fill(40, topic="u")
    rig.drop()
    for number in range(1, 100):
        rig.store.kill_at(number)
        new = tmp_path / f"new-{number}"
        try:
            restored = ArchiveRig(new, store=rig.store, restore=True, clock=rig.clock)
        except Killed:
            rig.store.kill_at(0)
            restored = ArchiveRig(new, store=rig.store, restore=True, clock=rig.clock)
        else:
            break
        assert {name: topic.positions().messages for name, topic in restored.broker.topics.items()} == {
            "t": 36,
            "u": 36,
        }
        restored.drop()
    assert number > 5


def test_restore_leaves_a_data_path_with_topics_alone(rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(40)
    rig.restart(restore=True)
    assert rig.topic().positions().messages == 40


def test_restore_names_the_nodes_that_the_archive_has(tmp_path: Path, rig: ArchiveRig) -> None:
    rig.channel()
    rig.fill(40)
    with pytest.raises(StartError, match="no topics of node 6, but of 5"):
        ArchiveRig(tmp_path / "new", store=rig.store, restore=True, node_id=6)


# kills


def test_a_kill_at_any_call_to_the_store_loses_nothing(tmp_path: Path) -> None:
    """The last round has no kill: it shows that there are no more calls to kill at."""
    for after in (False, True):
        for number in range(1, 40):
            directory = tmp_path / f"{number}-{after}"
            directory.mkdir()
            store = FaultyStore.local(directory / "store")
            rig = ArchiveRig(directory / "data", store=store, archive_local_bytes=1)
            rig.channel()
            store.kill_at(number, after=after)
            was_killed = False
            published = 0
            try:
                for published in range(0, 20, 5):
                    rig.fill(5, start=published)
            except Killed:
                was_killed = True
                rig.crash()
            store.kill_at(0)
            rig.fill(20 - published - 5, start=published + 5)
            rig.settle(3)
            assert consume(rig, 20) == [*range(20)], number
            assert rig.log.corrupt_messages == 0
            named = {
                f"{kind.name}" for kind in (segment.entry for segment in rig.log.segments) if kind is not None
            }
            stored = {key.rpartition("/")[2].removesuffix(".log") for key in rig.objects(".log")}
            assert stored == named
            rig.drop()
            if not was_killed:
                break
        else:
            raise AssertionError("there were more calls than expected")
