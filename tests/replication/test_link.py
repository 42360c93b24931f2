"""A primary and its followers over TCP: the data paths become and stay equal."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest
import uvloop

from nsparq.broker.broker import Broker
from nsparq.options import NsqdOptions
from nsparq.replication.acknowledging import Fenced
from nsparq.replication.changes import Change, Kind
from nsparq.replication.feed import Feed
from nsparq.replication.follower import Follower, Refused
from nsparq.replication.frames import BadFrame, Frame, FrameKind, FrameReader, send_frame
from nsparq.replication.link import Link
from nsparq.replication.mark import read_mark
from nsparq.replication.membership import Membership
from nsparq.replication.primary import Primary
from nsparq.storage.files import Buffer, Files, Work
from tests.broker.rig import Receipt, publish
from tests.faults.power_cut import Life, QuickFiles, drop
from tests.replication.test_applying import content
from tests.support.aio import run, until

SECRET = b"the cluster's secret"
SILENCE_S = 4.0
"""How long a follower may be silent. On a busy machine a healthy one is, for a moment."""


class Cluster:
    """A primary with a broker. The coordinator grants every change of the set, when it is told
    to."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self.path = directory / "a"
        self.asked: list[Membership] = []
        self.primary = Primary(self.path, Membership(1, "a", {"a": "1"}), SECRET, self.asked.append, **more)
        self.port = 0
        primary = self.primary

        class OnPrimary(Life):
            def new_files(self) -> Any:
                files: Any = primary.files
                files.now, files.times = lambda: 0, [0]
                return files

        self.life = OnPrimary(self.path, "os", random.Random(1))

    def grant(self) -> None:
        while self.asked:
            self.asked.pop(0)
            self.primary.acknowledging.set_changed()

    @property
    def in_sync(self) -> str:
        return "".join(sorted(self.primary.acknowledging.membership.in_sync))

    async def is_safe(self) -> None:
        await is_safe(self.primary)


async def is_safe(primary: Primary) -> None:
    """Until everything so far is on all nodes of the set."""
    safe: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    primary.when_safe(lambda error: safe.set_result(None))
    await safe


@asynccontextmanager
async def cluster(directory: Path, **more: Any) -> AsyncIterator[Cluster]:
    made = Cluster(directory, **more)
    made.port = await made.primary.listen("127.0.0.1", 0)
    try:
        yield made
    finally:
        await made.primary.close()
        drop(made.life.broker)


@asynccontextmanager
async def following(follower: Follower, port: int) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(follower.follow("127.0.0.1", port))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await task


def new_follower(directory: Path, name: str = "b", secret: bytes = SECRET) -> Follower:
    path = directory / name
    path.mkdir(exist_ok=True)
    return Follower(path, "test", name, secret, QuickFiles())


def test_a_follower_joins_a_working_primary_and_goes_on_after_a_broken_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            made.life.step(30)
            follower = new_follower(tmp_path)
            async with following(follower, made.port):
                await until(lambda: made.asked)
                made.grant()
                assert made.in_sync == "ab"
                made.life.step(30)
                await made.is_safe()
                assert content(tmp_path / "b") == content(made.path)
            # Nothing is safe until the set is changed, or the follower is back.
            made.life.step(10)
            safe = asyncio.create_task(made.is_safe())
            await until(lambda: made.asked)
            assert not safe.done()
            joined = follower.number
            made.asked.clear()
            made.primary.acknowledging.set_unchanged(made.primary.acknowledging.membership)
            made.asked.clear()
            async with following(follower, made.port):
                await safe
                # It went on; a snapshot would have emptied it first.
                assert follower.number > joined
                assert content(tmp_path / "b") == content(made.path)
            await follower.close()

    run(scenario())


def test_a_node_of_the_set_is_not_emptied(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            made.life.step(10)
            follower = new_follower(tmp_path)
            async with following(follower, made.port):
                await until(lambda: made.asked)
                made.grant()
            await follower.close()
            kept = content(tmp_path / "b")
            again = new_follower(tmp_path)
            with pytest.raises(Refused, match="must leave that first"):
                await again.follow("127.0.0.1", made.port)
            assert content(tmp_path / "b") == kept
            await until(lambda: made.asked)
            made.grant()
            assert made.in_sync == "a"
            async with following(again, made.port):
                await until(lambda: made.asked)
            await again.close()

    run(scenario())


def test_two_followers_of_one_name(tmp_path: Path) -> None:
    def follower_named_b(path: str) -> Follower:
        (tmp_path / path).mkdir()
        return Follower(tmp_path / path, "test", "b", SECRET, QuickFiles())

    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            made.life.step(10)
            one, two = follower_named_b("one"), follower_named_b("two")
            async with following(one, made.port):
                await until(lambda: made.asked)
                made.grant()
                # The first one stays.
                with pytest.raises(Refused, match="another node with the name 'b' is connected, from 127"):
                    await two.follow("127.0.0.1", made.port)
                made.life.step(10)
                await made.is_safe()
                assert content(tmp_path / "one") == content(made.path)
            await until(lambda: made.asked)
            made.grant()
            async with following(two, made.port):
                await until(lambda: made.asked)
                made.grant()
                assert made.in_sync == "ab"
            await until(lambda: made.asked)
            # The record says that the copy of the second one may take over. So what the first one
            # confirms would count for nothing.
            with pytest.raises(Refused, match="must leave that first"):
                await one.follow("127.0.0.1", made.port)
            made.grant()
            async with following(one, made.port):
                await until(lambda: made.asked)
                made.grant()
            copies = [read_mark(Files(), tmp_path / path) for path in ("one", "two")]
            assert copies[0] is not None and copies[1] is not None
            known = made.primary.acknowledging.membership.copies["b"]
            assert known in copies[0].copies and known not in copies[1].copies
            await one.close()
            await two.close()

    run(scenario())


class SlowFiles(QuickFiles):
    """A disk whose syncs wait until the test lets them end."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = Event()
        self.may_end.set()
        self.begun = 0

    def sync(self, fd: int) -> None:
        self.begun += 1
        assert self.may_end.wait(60)

    def sync_directory(self, path: Path) -> None:
        self.sync(-1)


class Replicas:
    def __init__(self, primary: Primary) -> None:
        self.when_safe = primary.when_safe

    def check(self) -> None:
        pass


@asynccontextmanager
async def serving(primary: Primary, path: Path, durability: str) -> AsyncIterator[Broker]:
    """A broker with threads, as in nsqd."""
    loop = asyncio.get_running_loop()
    threads = ThreadPoolExecutor(4)

    def in_thread(work: Work, then: Work) -> None:
        threads.submit(work).add_done_callback(lambda _: loop.call_soon_threadsafe(then))

    broker = Broker(
        NsqdOptions(data_path=str(path), durability=durability, node_id=5),
        files=primary.files,
        background=in_thread,
        replicas=Replicas(primary),
    )
    broker.open()
    primary.serve(is_serving=True)
    try:
        yield broker
    finally:
        primary.serve(is_serving=False)
        primary.acknowledging.refuse(Fenced())
        await asyncio.to_thread(threads.shutdown)
        drop(broker)


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_only_what_promises_an_fsync_waits_for_a_follower_that_syncs_slowly(
    tmp_path: Path, durability: str
) -> None:
    async def scenario() -> None:
        (tmp_path / "a").mkdir()
        asked: list[Membership] = []
        primary = Primary(tmp_path / "a", Membership(1, "a", {"a": "1"}), SECRET, asked.append)
        port = await primary.listen("127.0.0.1", 0)
        disk = SlowFiles()
        (tmp_path / "b").mkdir()
        follower = Follower(tmp_path / "b", "test", "b", SECRET, disk)
        async with serving(primary, tmp_path / "a", durability) as broker, following(follower, port):
            await until(lambda: asked)
            primary.acknowledging.set_changed()
            disk.may_end.clear()
            before, receipts = disk.begun, []
            for number in range(5):
                receipts.append(Receipt())
                publish(broker, "t", [b"%d" % number], receipts[-1])
                broker.turn()
                broker.maintain()
                await until(lambda: receipts[-1].answers or durability == "fsync" and disk.begun > before)
                await is_safe(primary)
            assert [receipt.is_ok for receipt in receipts] == [durability == "os"] * 5
            await until(lambda: disk.begun > before)
            disk.may_end.set()
            await until(lambda: all(receipt.is_ok for receipt in receipts))
            await until(lambda: content(tmp_path / "b") == content(tmp_path / "a"))
        await follower.close()
        await primary.close()

    run(scenario())


def test_changes_that_waited_for_a_thread_do_not_need_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would make the next one wait, for as long as the primary is busy."""

    received: list[bytes] = []

    class NotingLink(Link):
        def data_received(self, data: bytes) -> None:
            received.append(data)
            super().data_received(data)

    class NotingFiles(QuickFiles):
        def __init__(self) -> None:
            super().__init__()
            self.may_open = Event()
            self.may_open.set()
            self.writers: list[int] = []

        def open(self, path: Path) -> int:
            assert self.may_open.wait(60)
            return super().open(path)

        def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
            self.writers.append(get_ident())
            super().write(fd, buffers, position)

    monkeypatch.setattr("nsparq.replication.follower.Link", NotingLink)

    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            disk = NotingFiles()
            (tmp_path / "b").mkdir()
            follower = Follower(tmp_path / "b", "test", "b", SECRET, disk)
            async with following(follower, made.port):
                await until(lambda: made.asked)
                made.grant()
                await made.is_safe()
                disk.may_open.clear()
                disk.writers.clear()
                files = made.primary.files
                with files.opened(made.path / "file") as fd:
                    # A frame for each.
                    for position in range(3):
                        await asyncio.sleep(0)
                        received.clear()
                        files.write(fd, [b"body"], position)
                        await until(lambda: any(b"body" in data for data in received))
                    disk.may_open.set()
                    await made.is_safe()
            assert disk.writers == [get_ident()] * 3
            await follower.close()

    run(scenario())


def test_a_follower_whose_sync_fails_joins_anew(tmp_path: Path) -> None:
    class FailingFiles(QuickFiles):
        is_failing = False

        def sync(self, fd: int) -> None:
            if self.is_failing:
                raise OSError("no sync")

    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            made.life.step(10)
            disk = FailingFiles()
            (tmp_path / "b").mkdir()
            follower = Follower(tmp_path / "b", "test", "b", SECRET, disk)
            async with following(follower, made.port) as task:
                await until(lambda: made.asked)
                made.grant()
                disk.is_failing = True
                made.primary.serve(is_serving=True)
                with made.primary.files.opened(made.path / "file") as fd:
                    synced = asyncio.create_task(asyncio.to_thread(made.primary.files.sync, fd))
                    await until(task.done)
                    await until(lambda: made.asked)
                    assert not synced.done()
                    made.grant()
                    await synced
                made.primary.serve(is_serving=False)
            assert made.in_sync == "a"
            disk.is_failing = False
            async with following(follower, made.port):
                await until(lambda: made.asked)
            await follower.close()

    run(scenario())


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_follower_whose_disk_stands_still_leaves_the_set_although_it_is_alive(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsparq.replication.frames.PING_S", 0.01)
    stalled, may_end = Event(), Event()

    def stall(self: QuickFiles, *arguments: Any) -> None:
        if stalled.is_set():
            assert may_end.wait(60)
        getattr(QuickFiles, call)(self, *arguments)

    async def scenario() -> None:
        async with cluster(tmp_path, silence=SILENCE_S) as made:
            follower = new_follower(tmp_path)
            follower._files = type("StalledFiles", (QuickFiles,), {call: stall})()
            async with following(follower, made.port):
                await until(lambda: made.asked)
                made.grant()
                assert made.in_sync == "ab"
                # Nothing is outstanding: it stays, however long that lasts.
                made.life.step(10)
                await made.is_safe()
                await asyncio.sleep(1.2 * SILENCE_S)
                assert not made.asked
                stalled.set()
                files = made.primary.files
                with files.opened(made.path / "another") as fd:
                    files.write(fd, [b"content"], 0)
                    files.sync(fd)
                await until(lambda: made.asked)
                made.grant()
                assert made.in_sync == "a"
                await made.is_safe()
                may_end.set()
            await follower.close()

    run(scenario())


def test_nobody_joins_without_the_secret(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            stranger = new_follower(tmp_path, secret=b"a guess")
            with pytest.raises(Refused, match="it has another secret than the primary"):
                await stranger.follow("127.0.0.1", made.port)
            # Nor does a follower accept such a primary: the proof of one side is none of the other.
            reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()
            assert not made.asked and content(tmp_path / "b") == {}

    run(scenario())


def test_a_follower_leaves_a_primary_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine may be gone, and nobody closes the connection. Found by the simulation."""
    monkeypatch.setattr("nsparq.replication.follower.SILENCE_S", 0.3)

    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            follower = new_follower(tmp_path)
            async with following(follower, made.port) as task:
                await until(lambda: made.asked)
                # It pings less often than that.
                with pytest.raises(TimeoutError, match="silence of 0.3 s"):
                    await task
            await follower.close()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        with pytest.raises(TimeoutError, match="silence of 0.3 s"):
            await new_follower(tmp_path, "c").follow("127.0.0.1", server.sockets[0].getsockname()[1])
        server.close()

    run(scenario())


def test_a_follower_refuses_a_primary_of_an_earlier_epoch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as made:
            follower = new_follower(tmp_path)
            follower.epoch = 2
            with pytest.raises(Refused, match="no longer primary"):
                await follower.follow("127.0.0.1", made.port)

    run(scenario())


def test_a_frame_for_a_connection_that_has_ended_is_dropped() -> None:
    """Not so by uvloop, which nsqd uses: there a write raises RuntimeError."""

    async def scenario() -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            send_frame(writer, Frame(FrameKind.PING))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_frames_are_checked() -> None:
    frame = Frame.of_number(FrameKind.CHANGES, 7, b"changes")
    reader = FrameReader()
    data = frame.encode()
    assert [*reader.feed(data[:9])] == []
    assert [*reader.feed(data[9:] + data)] == [frame, frame]
    assert (frame.number, frame.rest) == (7, b"changes")
    for bad, reason in (
        (data[:-1] + b"!", "checksum mismatch"),
        (b"\xff\xff\xff\xff" + data[4:], "a frame of 4294967295 bytes"),
        (Frame(FrameKind.PING).encode()[:4] + bytes(5), "checksum mismatch"),
    ):
        with pytest.raises(BadFrame, match=reason):
            [*FrameReader().feed(bad)]


def test_a_frame_in_pieces_is_whole_again() -> None:
    frames = [Frame.of_number(FrameKind.CHANGES, number, b"x" * number) for number in range(20)]
    data = b"".join(frame.encode() for frame in frames)
    for size in (1, 7, 100, len(data)):
        reader = FrameReader()
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


def test_changes_stay_in_memory_until_every_follower_has_them() -> None:
    feed = Feed(lambda: None, kept_bytes=1000)

    def record() -> None:
        feed.record([Change(Kind.WRITE, 1, 0, b"x" * 100).encode()])
        feed.flush()

    for _ in range(4):
        record()
    feed.confirmed("b", 1)
    feed.confirmed("c", 4)
    assert feed.since(0) is None
    assert [block.first for block in feed.since(1) or []] == [1, 2, 3]
    # Then b is lost. What it needs stays for as long as there is room.
    for number in range(5, 20):
        record()
        feed.confirmed("c", number)
    assert feed.since(1) is None
    assert feed.since(18) is None and feed.since(19) == []


def test_a_frame_does_not_overtake_one_that_waits() -> None:
    """A link hands frames over when they arrive, but only in order. On uvloop, as in nsqd."""
    ping, changes = Frame(FrameKind.PING), Frame.of_number(FrameKind.CHANGES, 1)
    at_once: list[Frame] = []

    def take_ping(frame: Frame) -> bool:
        if frame == ping:
            at_once.append(frame)
        return frame == ping

    def new_link() -> Link:
        link = Link()
        link.take_at_once = take_ping
        return link

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(frame.encode() for frame in (ping, changes, ping)))
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(send, "127.0.0.1", 0) as server:
            address = server.sockets[0].getsockname()
            _, link = await asyncio.get_running_loop().create_connection(new_link, *address)
            waited = [await link.take(FrameKind.CHANGES, FrameKind.PING) for _ in range(2)]
            assert (at_once, waited) == ([ping], [changes, ping])
            with pytest.raises(ConnectionResetError, match="has ended"):
                await link.take(FrameKind.PING)
            link.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
