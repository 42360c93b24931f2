"""A clean stop: what it writes, on a full disk too, and what it reports as lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nsparq.broker.data_directory import RESERVE_NAME
from nsparq.errors import StartError
from tests.broker.rig import Rig, TestFiles, bodies

MakeRig = Callable[..., Rig]


class FullDisk(TestFiles):
    """A disk without room for another file while the reserve takes the rest."""

    is_full = False

    def _check(self, path: Path) -> None:
        if self.is_full and list(path.parent.glob(RESERVE_NAME)) + list(path.parents[2].glob(RESERVE_NAME)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def replace(self, path: Path, content: bytes, *, sync: bool) -> None:
        self._check(path)
        super().replace(path, content, sync=sync)

    def add_version(self, path: Path, content: bytes) -> None:
        self._check(path)
        super().add_version(path, content)


def finish_all(rig: Rig, topic: str, count: int = 3) -> None:
    rig.channel("c", topic)
    rig.publish(topic, *bodies(count))
    client = rig.subscribe(topic, rdy=count)
    rig.finish(client, *client.take())


@pytest.mark.parametrize("durability", ["os", "fsync", "memory"])
def test_a_stop_on_a_full_disk_keeps_what_was_finished(make_rig: MakeRig, durability: str):
    files = FullDisk()
    rig = make_rig(files=files, durability=durability)
    for name in ("a", "b"):
        finish_all(rig, name)
    rig.publish("a", b"not finished")
    files.is_full = True
    assert rig.broker.close() == []
    files.is_full = False
    rig.start()
    assert [rig.channel("c", name).depth for name in ("a", "b")] == [1, 0]
    assert (rig.data_path / RESERVE_NAME).stat().st_blocks > 0, "for the next time"


def test_a_stop_reports_what_it_could_not_keep(rig: Rig, caplog: pytest.LogCaptureFixture):
    for name in ("a", "b"):
        finish_all(rig, name)
    rig.files.fail("replace", "a.topic/c.channel")
    (lost,) = rig.broker.close()
    assert lost == "a:c: which messages are finished ([Errno 28] No space left on device)"
    assert f"not kept: {lost}" in caplog.text
    rig.files.heal()
    rig.start()
    assert [rig.channel("c", name).depth for name in ("a", "b")] == [3, 0]


def test_a_log_that_cannot_be_synced_does_not_lose_the_states_of_its_channels(rig: Rig):
    finish_all(rig, "t")
    rig.files.fail("sync", ".log", errno.EIO)
    rig.files.fail("sync", ".copy", errno.EIO)
    (lost,) = rig.broker.close()
    assert lost.startswith("t: messages not yet on disk")
    rig.files.heal()
    rig.clock.advance(1)
    rig.start()
    assert rig.channel("c").depth == 0


def test_a_disk_without_room_for_the_reserve_shows_in_health(make_rig: MakeRig):
    class NoRoom(TestFiles):
        is_full = True

        def allocate(self, path: Path, size: int) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().allocate(path, size)

    files = NoRoom()
    rig = make_rig(files=files)
    assert "reserve" in rig.broker.health.error
    files.is_full = False
    rig.maintain()
    assert rig.broker.health.error is None


def test_a_stop_writes_nothing_for_topics_that_have_not_changed(rig: Rig):
    for name in ("a", "b", "c"):
        finish_all(rig, name)
    rig.restart()
    finish_all(rig, "b")
    rig.maintain()
    written: list[str] = []
    replace = rig.files.replace

    def record(path: Path, content: bytes, *, sync: bool) -> None:
        written.append(str(path.relative_to(rig.data_path)))
        replace(path, content, sync=sync)

    rig.files.replace = record
    rig.files.calls.clear()
    rig.close()
    assert {name.split("/")[1] for name in written if "/" in name} == {"b.topic"}
    rig.files.replace = replace
    rig.start()
    assert [rig.channel("c", name).depth for name in ("a", "b", "c")] == [0, 0, 0]


def test_finishing_messages_of_an_old_topic_is_a_change(rig: Rig):
    rig.channel("c")
    rig.publish("t", *bodies(3))
    rig.restart()
    client = rig.subscribe("t", rdy=3)
    rig.finish(client, *client.take())
    rig.maintain()
    rig.restart()
    assert rig.channel("c").depth == 0


def test_topics_are_persisted_in_threads(rig: Rig):
    names = [f"t{number}" for number in range(20)]
    for name in names:
        finish_all(rig, name)
        rig.publish(name, b"left")
    counts: list[int] = []

    def in_threads(works: Sequence[Callable[[], None]]) -> None:
        counts.append(len(works))
        with ThreadPoolExecutor(8) as threads:
            assert [*threads.map(lambda work: work(), works)] == [None] * len(works)

    assert rig.broker.close(in_threads) == []
    assert counts == [20, 0, 0]
    rig.start()
    assert {rig.channel("c", name).depth for name in names} == {1}


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_data_path_that_cannot_be_written_is_refused(rig: Rig, error: int):
    rig.publish("t", b"x")
    rig.close()
    rig.files.fail("replace", "nsqd.dat", error)
    with pytest.raises(
        StartError, match="failed to persist metadata - .*nsqd.dat|failed to persist metadata"
    ):
        rig.start()
    assert rig.broker.data_path._lock_fd == -1
    rig.files.heal()
    rig.start()
    assert rig.topic().depth == 1


def test_a_full_data_path_still_starts(rig: Rig):
    rig.publish("t", b"x")
    rig.close()
    rig.files.fail("replace", "nsqd.dat", errno.ENOSPC)
    rig.start()
    assert "failed to persist metadata" in rig.broker.health.error


class CountedSyncs(TestFiles):
    """Counts every sync, of files and of directories."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0

    def sync(self, fd: int) -> None:
        self.syncs += 1

    def sync_directory(self, path: Path) -> None:
        self.syncs += 1


def syncs_of_a_stop(rig: Rig, files: CountedSyncs) -> int:
    files.syncs = 0
    assert rig.broker.close() == []
    rig.start()
    return files.syncs


@pytest.mark.parametrize("durability", ["os", "fsync", "memory"])
def test_a_stop_syncs_a_few_files_of_each_changed_topic_and_none_of_the_others(
    make_rig: MakeRig, durability: str
):
    """On a slow disk each sync takes long, and Kubernetes kills after 30 s."""
    files = CountedSyncs()
    rig = make_rig(files=files, durability=durability)
    unchanged = syncs_of_a_stop(rig, files)
    for number in range(10):
        finish_all(rig, f"t{number}")
    # The log and its name, the channel, the topic, the directory; and two directories above all of
    # them.
    assert syncs_of_a_stop(rig, files) <= unchanged + 10 * 5 + 2
    assert syncs_of_a_stop(rig, files) == unchanged
