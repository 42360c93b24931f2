"""A node joins: it keeps what it has, gets the rest, and can be cut off at any moment."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest

from nsparq.replication.follower import Follower
from nsparq.replication.joining import BLOCK, FORMER, LINKS, SET_ASIDE, WAITING, Kept, inventory
from nsparq.replication.mark import MARK, Mark, read_mark, write_mark
from nsparq.replication.membership import Membership
from nsparq.replication.primary import Primary
from nsparq.storage.checked_json import write_json
from nsparq.storage.files import Buffer, Files
from tests.broker.rig import Receipt, publish
from tests.faults.power_cut import QuickFiles
from tests.replication.test_applying import content
from tests.replication.test_link import SECRET, Cluster, cluster, following, new_follower
from tests.support.aio import run, until


def sent_and_had(caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
    """Of the last snapshot, in bytes."""
    (args,) = [one.args for one in caplog.records if "bytes of the snapshot" in one.msg][-1:]
    assert isinstance(args, tuple)
    _, sent, had = args
    assert isinstance(sent, int) and isinstance(had, int)
    return sent, had


async def join(made: Cluster, follower: Follower) -> None:
    # The primary may still be busy with the one before.
    await until(lambda: not made.primary.followers())
    async with following(follower, made.port) as task:
        await until(lambda: made.asked or task.done())
        if task.done():
            task.result()
        made.grant()
        made.life.step(5)
        safe = asyncio.create_task(made.is_safe())
        await until(lambda: made.grant() or safe.done())
        if task.done():
            task.result()
    await follower.close()
    await until(lambda: made.asked or made.in_sync == "a")
    made.grant()


def test_a_node_that_was_away_gets_only_what_it_has_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            (made.path / "sealed").write_bytes(random.Random(1).randbytes(3 * BLOCK + 100))
            (made.path / "growing").write_bytes(b"a" * (BLOCK + 10))
            await join(made, new_follower(tmp_path))
            with (made.path / "growing").open("ab") as file:
                file.write(b"b" * BLOCK)
            (tmp_path / "b" / "left over").write_bytes(b"")
            await join(made, new_follower(tmp_path))
            sent, had = sent_and_had(caplog)
            assert had >= 4 * BLOCK and BLOCK < sent < 2 * BLOCK
            assert content(tmp_path / "b") == content(made.path)

    with caplog.at_level("INFO"):
        run(scenario())


class EndingFiles(QuickFiles):
    """A disk whose process dies at a call: nothing more happens."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise OSError("the process has died")

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        self._count()
        super().write(fd, buffers, position)

    def truncate(self, fd: int, size: int) -> None:
        self._count()
        super().truncate(fd, size)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def remove_tree(self, path: Path) -> None:
        self._count()
        super().remove_tree(path)


def test_joining_can_be_cut_off_at_any_moment(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            path, cut_off = tmp_path / "b", 0
            for number in range(12):
                made.life.step(10)
                await join(made, new_follower(tmp_path))
                made.life.step(10)
                # As if this node had been primary, with changes of its own.
                (path / "own").write_bytes(b"own")
                write_mark(Files(), path, Mark("test", True, was_primary=True))
                with suppress(OSError):
                    await join(made, Follower(path, "test", "b", SECRET, EndingFiles(3 + 4 * number)))
                mark = read_mark(Files(), path)
                assert mark is not None
                cut_off += not mark.is_complete
                await join(made, new_follower(tmp_path))
                # A topic that was deleted since may have been set aside.
                shutil.rmtree(path / SET_ASIDE, ignore_errors=True)
                assert content(path) == content(made.path)
                mark = read_mark(Files(), path)
                assert mark is not None and mark[:3] == ("test", True, False) and len(mark.copies) == 1
                assert not (path / FORMER).exists() and not (path / WAITING).exists()
        assert cut_off > 6

    run(scenario())


def test_a_crash_while_the_first_mark_is_written_is_no_foreign_data(tmp_path: Path) -> None:
    """Found by the simulation."""

    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            follower = new_follower(tmp_path)
            (tmp_path / "b" / f"{MARK}.tmp").write_bytes(b'{"form')
            await join(made, follower)
            assert content(tmp_path / "b") == content(made.path)

    run(scenario())


def test_a_node_takes_over_only_with_all_changes_that_the_snapshot_may_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The primary goes on while files are read: what the follower has then is of no one moment."""

    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            made.life.step(20)
            made.primary._snapshot_rate = 4_000_000
            monkeypatch.setattr("nsparq.replication.primary.SNAPSHOT_BYTES", 500)
            follower = new_follower(tmp_path)
            seen: list[int] = []
            async with following(follower, made.port):
                while not made.asked:
                    made.life.step(1)
                    if not follower.is_complete:
                        assert read_mark(Files(), tmp_path / "b") in (None, Mark("test", False))
                        seen.append(made.primary._feed.recorded)
                    await asyncio.sleep(0.01)
                begun = made.primary.acknowledging.progress_of("b").made
                made.grant()
                await made.is_safe()
                assert content(tmp_path / "b") == content(made.path)
            assert len(seen) > 3 and begun > seen[0]
            await follower.close()

    run(scenario())


def test_a_join_makes_its_links_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand links take as long as a thousand publishes."""
    link, linkers = os.link, []

    def noting_link(*arguments: Any, **more: Any) -> None:
        linkers.append(get_ident())
        link(*arguments, **more)

    monkeypatch.setattr("os.link", noting_link)

    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            made.life.step(20)
            await join(made, new_follower(tmp_path))
            assert content(tmp_path / "b") == content(made.path)

    run(scenario())
    assert linkers and get_ident() not in linkers


def test_a_directory_that_cannot_be_read_ends_the_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of descriptors. The copy would count as complete without its files."""
    scan = os.scandir

    def failing_scan(path: Any) -> Any:
        if "/a/topics/" in f"{path}":
            raise OSError(errno.EMFILE, "Too many open files")
        return scan(path)

    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            made.life.step(20)
            with monkeypatch.context() as patch:
                patch.setattr("os.scandir", failing_scan)
                async with following(new_follower(tmp_path), made.port) as task:
                    await until(lambda: task.done() or made.asked)
                    assert not made.asked
                    assert isinstance(task.exception(), OSError)
            await until(lambda: not made.primary.followers())
            assert not [*made.path.glob(f"{LINKS}*")]
            await join(made, new_follower(tmp_path))
            assert content(tmp_path / "b") == content(made.path)

    run(scenario())
    assert "connection ended: [Errno 24] Too many open files" in caplog.text


def test_what_a_former_primary_never_acknowledged_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            made.life.step(20)
            await join(made, new_follower(tmp_path))
            broker = made.life.broker
            # Nobody follows any more, and these are never acknowledged.
            publish(broker, "a", [b"late", b"\xff"], Receipt())
            publish(broker, "new", [b"first"], Receipt())
            broker.turn()
        write_mark(Files(), made.path, Mark("test", True, was_primary=True))
        asked: list[Membership] = []
        primary = Primary(tmp_path / "b", Membership(2, "b", {"b": "1"}), SECRET, asked.append)
        port = await primary.listen("127.0.0.1", 0)
        follower = Follower(made.path, "test", "a", SECRET, QuickFiles())
        async with following(follower, port):
            await until(lambda: asked)
        await follower.close()
        await primary.close()

    run(scenario())
    former, present = content(tmp_path / "a"), content(tmp_path / "b")
    aside = {name: data for name, data in former.items() if name.startswith(SET_ASIDE)}
    assert {name: data for name, data in former.items() if name not in aside} == present
    lines = {name: [json.loads(line) for line in data.splitlines()] for name, data in aside.items() if data}
    bodies = {
        name: [line.get("body") or line["body_base64"] for line in found] for name, found in lines.items()
    }
    assert bodies == {"set-aside/a-2.jsonl": ["late", "/w=="], "set-aside/new-2.jsonl": ["first"]}
    assert "2 messages of topic a are not on the primary" in caplog.text


def test_blocks_are_compared_by_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a" * BLOCK + b"bcd")
    kept = inventory(Files(), tmp_path)["file"]
    assert kept.size == BLOCK + 3
    assert kept.has_block(0, b"a" * BLOCK) == BLOCK
    assert kept.has_block(0, b"a" * (BLOCK - 1)) == 0
    assert kept.has_block(0, b"a" * (BLOCK - 1) + b"b") == 0
    assert kept.has_block(BLOCK, b"bcdef") == 3
    assert kept.has_block(BLOCK + 3, b"ef") == 0
    assert Kept(0, "").has_block(0, b"a") == 0


def test_the_mark_and_the_record_of_a_time_before_copies_had_ids(tmp_path: Path) -> None:
    write_json(Files(), tmp_path / MARK, {"format": 1, "cluster": "test", "is_complete": True}, sync=True)
    record = {"epoch": 3, "primary": "a", "in_sync": ["a", "b"], "addresses": {}}
    mark, membership = read_mark(Files(), tmp_path), Membership.from_json(json.dumps(record).encode())
    assert mark is not None
    # The node may take over, once. It has an id then.
    assert membership.copies["b"] in mark.copies
    assert Membership.from_json(membership.taken_over_by("b", "id").to_json()).copies == {"b": "id"}


def test_a_record_of_a_newer_version_is_refused() -> None:
    with pytest.raises(ValueError, match="the record has format 3, and this version knows 2"):
        Membership.from_json(json.dumps({"format": 3, "members": []}).encode())
