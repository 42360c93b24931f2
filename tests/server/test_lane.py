"""Lanes: publishers that wait for each OK are read together, with the same results as alone."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from nsparq import kernel
from nsparq.busy_poll import MAX_SKIPPED
from nsparq.options import NsqdOptions
from nsparq.server import lane as module
from nsparq.server.daemon import Nsqd
from nsparq.server.lane import FILL_S, JOIN_AFTER, Lane, Lanes
from nsparq.storage.files import Buffer, Files
from nsparq.wire.frames import ERROR, HEARTBEAT, OK, encode_frame
from tests.support.connection import header_block, sized, with_headers

DEADLINE_S = 20
pytestmark = pytest.mark.skipif(kernel.read_publishes is None, reason="without compiled code there are none")


def pub(body: bytes, topic: bytes = b"t") -> bytes:
    return b"PUB " + topic + b"\n" + struct.pack(">i", len(body)) + body


class Disk(Files):
    """A disk that can be full."""

    is_full = False

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, buffers, position)


class Peer:
    """A client of the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def hear(self, expected: bytes) -> None:
        assert await self.reader.readexactly(len(expected)) == expected

    async def publish(self, body: bytes, topic: bytes = b"t") -> None:
        self.send(pub(body, topic))
        await self.hear(OK)


class LaneRig:
    """A running nsqd and its clients."""

    def __init__(self, nsqd: Nsqd, disk: Disk, stack: AsyncExitStack) -> None:
        self.nsqd, self.disk, self._stack = nsqd, disk, stack

    async def connect(self) -> Peer:
        peer = Peer(*await asyncio.open_connection(*self.nsqd.tcp_address))
        self._stack.push_async_callback(self._hang_up, peer)
        peer.send(b"  V2")
        return peer

    async def _hang_up(self, peer: Peer) -> None:
        peer.writer.close()

    async def in_lane_with_headers(self, count: int) -> list[Peer]:
        peers = [await self.connect() for _ in range(count)]
        for peer in peers:
            peer.send(b"IDENTIFY\n" + sized(b'{"feature_negotiation":true,"headers":true}'))
            (size,) = struct.unpack(">i", await peer.reader.readexactly(4))
            await peer.reader.readexactly(size)
        for number in range(JOIN_AFTER + 2):
            for peer in peers:
                await peer.publish(with_headers(b"%d" % number, {"a": "b"}), b"t headers")
        found = self.nsqd.lanes.of(self.nsqd.broker.topics["t"], has_headers=True)
        assert found is not None and len(found) == count
        return peers

    async def in_lane(self, count: int = 1, topic: bytes = b"t") -> list[Peer]:
        """Clients that have published until they were in a lane."""
        peers = [await self.connect() for _ in range(count)]
        for number in range(JOIN_AFTER + 2):
            for peer in peers:
                await peer.publish(b"%d" % number, topic)
        assert len(self.lane(topic.decode())) >= count
        return peers

    def lane(self, topic: str = "t") -> Lane:
        lane = self.nsqd.lanes.of(self.nsqd.broker.topics[topic])
        assert lane is not None
        return lane

    def bodies(self, topic: str = "t") -> list[bytes]:
        log = self.nsqd.broker.topics[topic].log
        found: list[bytes] = []
        sequence = log.start
        while (batch := log.read(sequence)) is not None:
            found += batch.bodies()
            sequence = batch.end
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def rig(directory: Path, **options: Any) -> AsyncIterator[LaneRig]:
    disk = Disk()
    nsqd = Nsqd(
        NsqdOptions(
            tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", data_path=str(directory), **options
        ),
        files=disk,
    )
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        await nsqd.start()
        stack.push_async_callback(nsqd.stop)
        yield LaneRig(nsqd, disk, stack)


Run = Callable[[Callable[[LaneRig], Awaitable[None]]], None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a coroutine on the daemon's event loop."""

    def run_scenario(scenario: Callable[[LaneRig], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with rig(tmp_path) as stage:
                await scenario(stage)

        uvloop.run(whole())

    return run_scenario


def test_all_messages_of_a_lane_arrive_in_order_and_are_counted(run: Run) -> None:
    async def scenario(stage: LaneRig) -> None:
        async def work(name: int) -> None:
            peer = await stage.connect()
            for number in range(200):
                await peer.publish(b"%d %d" % (name, number))

        await asyncio.gather(*(work(name) for name in range(8)))
        found: dict[bytes, list[int]] = {}
        for body in stage.bodies():
            name, number = body.split()
            found.setdefault(name, []).append(int(number))
        assert found == {b"%d" % name: [*range(200)] for name in range(8)}
        counts = [client.publish_counts["t"] for client in stage.nsqd.broker.clients]
        assert counts == [200] * 8
        assert stage.nsqd.broker.topics["t"].message_count == 1600
        assert len(stage.lane()) == 8

    run(scenario)


def test_messages_with_headers_have_a_lane_of_their_own(run: Run) -> None:
    async def scenario(stage: LaneRig) -> None:
        (plain,) = await stage.in_lane()
        good, bad = await stage.in_lane_with_headers(2)
        assert len(stage.nsqd.lanes) == 2
        before = len(stage.bodies())
        block = header_block({"b": "c"})
        await plain.publish(b"plain")
        await good.publish(with_headers(b"good", {"b": "c"}), b"t headers")
        # Both are read at once; only one of them breaks a rule.
        good.send(pub(with_headers(b"again", {"b": "c"}), b"t headers"))
        bad.send(pub(with_headers(b"bad", {"B": "c"}), b"t headers"))
        await good.hear(OK)
        await bad.hear(encode_frame(ERROR, b"E_BAD_MESSAGE PUB bad header at byte 0"))
        assert await bad.reader.read() == b""
        assert stage.bodies()[before:] == [b"plain", b"good", b"again"]
        log = stage.nsqd.broker.topics["t"].log
        batch = log.read(log.end - 1)
        assert batch is not None and batch.headers is not None and batch.headers[-1] == block

    run(scenario)


def test_a_number_that_is_refused_ends_only_its_publisher(run: Run) -> None:
    def numbered(number: int, epoch: int) -> bytes:
        names = {"nsq-producer": "p", "nsq-epoch": str(epoch), "nsq-number": str(number)}
        return pub(with_headers(b"%d" % number, names), b"t headers")

    async def scenario(stage: LaneRig) -> None:
        good, bad, plain = await stage.in_lane_with_headers(3)
        good.send(numbered(1, epoch=2))
        await good.hear(OK)
        before = len(stage.bodies())
        # All are read at once.
        good.send(numbered(2, epoch=2))
        bad.send(numbered(3, epoch=1))
        plain.send(pub(with_headers(b"plain", {"a": "b"}), b"t headers"))
        await good.hear(OK)
        await plain.hear(OK)
        assert b"E_FENCED PUB epoch 1 of producer p is over" in await bad.reader.read()
        assert sorted(stage.bodies()[before:]) == [b"2", b"plain"]

    run(scenario)


def test_a_publisher_that_disconnects_does_not_affect_the_others_in_its_lane(run: Run) -> None:
    async def scenario(stage: LaneRig) -> None:
        first, second, third = await stage.in_lane(3)
        first.writer.close()
        second.writer.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        second.writer.transport.abort()
        await stage.until(lambda: len(stage.nsqd.connections) == 1)
        assert len(stage.lane()) == 1
        await third.publish(b"last")
        assert stage.bodies()[-1] == b"last"
        third.writer.close()
        await stage.until(lambda: not stage.nsqd.connections)
        assert len(stage.nsqd.lanes) == 0

    run(scenario)


@pytest.mark.parametrize(
    ("said", "answer", "published"),
    [
        (b"NOP\n" + pub(b"a"), OK, [b"a"]),
        (pub(b"a") + pub(b"b"), OK * 2, [b"a", b"b"]),
        (pub(b"a" * 5000), OK, [b"a" * 5000]),
        (pub(b"a" * 20_000) + pub(b"b"), OK * 2, [b"a" * 20_000, b"b"]),
        (b"MPUB t\n" + struct.pack(">iiib", 9, 1, 1, 65), OK, [b"A"]),
        (pub(b"a") + pub(b"elsewhere", b"u") + pub(b"b"), OK * 3, [b"a", b"b"]),
    ],
    ids=["NOP", "two", "large", "larger", "MPUB", "another topic"],
)
def test_other_commands_of_a_lane_member_are_answered_as_usual(
    run: Run, said: bytes, answer: bytes, published: list[bytes]
) -> None:
    async def scenario(stage: LaneRig) -> None:
        peer, other = await stage.in_lane(2)
        before = len(stage.bodies())
        peer.send(said)
        await peer.hear(answer)
        assert stage.bodies()[before:] == published
        await other.publish(b"other")
        await peer.publish(b"again")
        assert len(stage.lane()) == 1
        for _ in range(2 * JOIN_AFTER + 2):
            await peer.publish(b"and again")
        assert len(stage.lane()) == 2, "in time it is trusted once more"

    run(scenario)


def test_a_message_in_a_lane_may_arrive_in_pieces(run: Run) -> None:
    async def scenario(stage: LaneRig) -> None:
        (peer,) = await stage.in_lane()
        whole = pub(b"in pieces")
        for position in range(len(whole)):
            peer.send(whole[position : position + 1])
            await asyncio.sleep(0.001)
        await peer.hear(OK)
        assert stage.bodies()[-1] == b"in pieces"

    run(scenario)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"BLA\n", b"E_INVALID invalid command BLA"),
        (b"PUB t\n" + bytes(4), b"E_BAD_MESSAGE PUB invalid message body size 0"),
        (pub(b"x", b"bad!"), b"E_BAD_TOPIC"),
    ],
)
def test_an_error_of_one_lane_member_does_not_affect_the_others(run: Run, said: bytes, error: bytes) -> None:
    async def scenario(stage: LaneRig) -> None:
        peer, other = await stage.in_lane(2)
        peer.send(said)
        assert error in await peer.reader.read()
        await other.publish(b"unharmed")
        assert stage.bodies()[-1] == b"unharmed"

    run(scenario)


def test_a_lane_member_may_subscribe(run: Run) -> None:
    async def scenario(stage: LaneRig) -> None:
        (peer,) = await stage.in_lane()
        peer.send(b"SUB t c\nRDY 1\n")
        await peer.hear(OK)
        size, kind = struct.unpack(">ii", await peer.reader.readexactly(8))
        assert kind == 2
        assert (await peer.reader.readexactly(size - 4))[26:] == b"0"
        for number in range(3 * JOIN_AFTER):
            peer.send(pub(b"%d" % number))
            await peer.hear(OK)
        assert len(stage.nsqd.lanes) == 0, "whoever gets messages is not only a publisher"

    run(scenario)


def test_heartbeats_work_in_a_lane(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as stage:
            peer = await stage.connect()
            body = b'{"heartbeat_interval": 1000}'
            peer.send(b"IDENTIFY\n" + struct.pack(">i", len(body)) + body)
            await peer.hear(OK)
            silent = await stage.connect()
            for each in (peer, silent):
                for _ in range(JOIN_AFTER + 2):
                    await each.publish(b"x")
            assert len(stage.lane()) == 2
            await peer.hear(HEARTBEAT)
            peer.send(b"NOP\n")
            await peer.publish(b"alive")
            assert stage.bodies()[-1] == b"alive"
            assert HEARTBEAT in await peer.reader.read(), "and who says nothing any more is cut off"
            assert len(stage.lane()) == 1

    asyncio.run(scenario())


def test_a_lane_continues_after_its_topic_is_deleted(run: Run) -> None:
    async def scenario(stage: LaneRig) -> None:
        peers = await stage.in_lane(2)
        stage.nsqd.broker.delete_topic("t")
        for peer in peers:
            await peer.publish(b"new")
        assert stage.bodies() == [b"new", b"new"]
        for _ in range(2 * JOIN_AFTER + 2):
            await peers[0].publish(b"x")
        assert len(stage.lane()) == 1

    run(scenario)


def test_with_fsync_there_are_no_lanes(run: Run) -> None:
    async def scenario(stage: LaneRig) -> None:
        peers = await stage.in_lane(2)
        topic = stage.nsqd.broker.topics["t"]
        topic.change_settings({"durability": "fsync"})
        for peer in peers:
            await peer.publish(b"durable")
            assert topic.log.committed == topic.log.end
        for _ in range(3 * JOIN_AFTER):
            await peers[0].publish(b"x")
        assert len(stage.nsqd.lanes) == 0

    run(scenario)


def test_each_member_of_a_lane_gets_the_error_of_a_full_disk(run: Run) -> None:
    async def scenario(stage: LaneRig) -> None:
        peers = await stage.in_lane(3)
        before = stage.bodies()
        stage.disk.is_full = True
        for peer in peers:
            peer.send(pub(b"no room"))
        for peer in peers:
            assert b"E_PUB_FAILED PUB failed No space left on device" in await peer.reader.read()
        stage.disk.is_full = False
        assert stage.bodies() == before
        assert len(stage.nsqd.lanes) == 0
        (peer,) = await stage.in_lane()
        await peer.publish(b"room")

    run(scenario)


class FarReplicas:
    """They confirm when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[Exception | None], None]] = []

    def when_safe(self, done: Callable[[Exception | None], None]) -> None:
        self.waiting.append(done)

    def check(self) -> None:
        pass

    def confirm(self, error: Exception | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        for done in waiting:
            done(error)


@pytest.mark.parametrize("said", [b"", b"NOP\n"], ids=["stays", "says something else"])
def test_a_lane_answers_when_the_replicas_have_confirmed(run: Run, said: bytes) -> None:
    async def scenario(stage: LaneRig) -> None:
        peer, other = await stage.in_lane(2)
        stage.nsqd.broker.replicas = replicas = FarReplicas()
        peer.send(pub(b"first"))
        await stage.until(lambda: len(replicas.waiting) == 1)
        peer.send(said)
        await stage.until(lambda: len(stage.lane()) == (1 if said else 2))
        other.send(pub(b"second"))
        await stage.until(lambda: len(replicas.waiting) == 2)
        # Nobody has an answer yet, so the first that each of them hears is this one.
        assert stage.bodies()[-2:] == [b"first", b"second"]
        assert not peer.reader._buffer and not other.reader._buffer  # type: ignore[attr-defined]
        replicas.confirm()
        await peer.hear(OK)
        await other.hear(OK)
        for one in (peer, other):
            one.send(pub(b"refused"))
        await stage.until(lambda: stage.bodies().count(b"refused") == 2)
        replicas.confirm(OSError(errno.EIO, "another node has taken over"))
        for one in (peer, other):
            assert b"E_PUB_FAILED" in await one.reader.read()
        stage.nsqd.broker.replicas = None

    run(scenario)


@pytest.mark.parametrize("said", [b"NOP\n", b""], ids=["says something else", "hangs up"])
def test_a_publisher_that_leaves_the_lane_gets_its_pending_ok_once(run: Run, said: bytes) -> None:
    async def scenario(stage: LaneRig) -> None:
        peer, other = await stage.in_lane(2)
        is_over = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage.nsqd.broker.next_turn, "should_wait", lambda: not is_over)
            peer.send(pub(b"due"))
            other.send(pub(b"due too"))
            await stage.until(lambda: stage.lane().waiting == 2)
            peer.send(said) if said else peer.writer.write_eof()
            await stage.until(lambda: len(stage.lane()) == 1)
            is_over = True
            await peer.hear(OK)
            await other.hear(OK)
        assert {*stage.bodies()[-2:]} == {b"due", b"due too"}
        assert stage.lane().waiting == 0
        if said:
            await peer.publish(b"next")
        else:
            assert await peer.reader.read() == b""
        await other.publish(b"next")

    run(scenario)


def test_an_ok_that_was_sent_in_part_is_completed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    send_each = kernel.send_each
    assert send_each is not None

    def half(descriptors: list[int], data: bytes, ring: object) -> list[tuple[int, int]]:
        assert send_each(descriptors, data[:3], ring) == []
        return [(index, 3) for index in range(len(descriptors))]

    async def scenario(stage: LaneRig) -> None:
        peers = await stage.in_lane(2)
        monkeypatch.setattr(kernel, "send_each", half)
        for peer in peers:
            await peer.publish(b"slow")
        await stage.until(lambda: len(stage.nsqd.lanes) == 0)
        monkeypatch.setattr(kernel, "send_each", send_each)
        for peer in peers:
            await peer.publish(b"fast")

    run(scenario)


def test_after_an_internal_error_every_publisher_is_answered(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stage: LaneRig) -> None:
        peers = await stage.in_lane(2)

        def fail(*arguments: object) -> None:
            raise ZeroDivisionError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage.nsqd.broker.topics["t"].publishing, "publish", fail)
            peers[0].send(pub(b"x"))
            for peer in peers:
                assert await peer.reader.read() == b""
        assert "internal error while reading publishes" in caplog.text
        assert len(stage.nsqd.lanes) == 0
        (peer,) = await stage.in_lane()
        await peer.publish(b"y")

    caplog.set_level(logging.ERROR)
    run(scenario)


def test_a_daemon_stops_with_publishers_in_a_lane(run: Run) -> None:
    async def scenario(stage: LaneRig) -> None:
        peers = await stage.in_lane(3)
        await stage.nsqd.stop()
        for peer in peers:
            assert await peer.reader.read() == b""
        assert len(stage.nsqd.lanes) == 0

    run(scenario)


def test_the_number_of_lanes_is_limited(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: LaneRig) -> None:
        for number in range(3):
            (peer,) = await stage.in_lane(1, b"t%d" % number)
            await peer.publish(b"x", b"t%d" % number)
        peer = await stage.connect()
        for _ in range(3 * JOIN_AFTER):
            await peer.publish(b"x", b"one-too-many")
        assert len(stage.nsqd.lanes) == 3

    monkeypatch.setattr(module, "MOST_LANES", 3)
    run(scenario)


@pytest.mark.parametrize("call", ["epoll", "register"])
def test_without_free_descriptors_publishers_work_without_a_lane(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    class NoRoom:
        def __init__(self) -> None:
            self.real = real()
            self.fileno, self.close = self.real.fileno, self.real.close

        register = fail

    async def scenario(stage: LaneRig) -> None:
        peer = await stage.connect()
        for _ in range(3 * JOIN_AFTER):
            await peer.publish(b"x")
        assert len(stage.nsqd.lanes) == 0
        assert "t: reading from publishers one by one: [Errno 24] Too many open files" in caplog.text

    real = select.epoll

    class Broken:
        EPOLLIN = select.EPOLLIN
        epoll = staticmethod(fail) if call == "epoll" else NoRoom

    monkeypatch.setattr(module, "select", Broken)
    run(scenario)


# when to append


class FakeLane:
    def __init__(self, waiting: int, active: int) -> None:
        self.waiting, self.active = waiting, active


class WaitingLanes:
    """Lanes with their own clock, which shows how long the turn would wait."""

    def __init__(self, cores: int = 2) -> None:
        self.now = 100.0
        self.lanes = Lanes(None, lambda: self.now, cores=cores)  # type: ignore[arg-type]
        self.lane = FakeLane(0, 0)
        self.lanes._lanes = {None: self.lane}  # type: ignore[dict-item]

    def filled_for(self, waiting: int, active: int, reached_after: float = 1.0) -> float:
        """Seconds by which the end of the turn is postponed, if half of the publishers have sent
        after a while."""
        self.lane.waiting, self.lane.active = waiting, active
        start = self.now
        while self.lanes.are_filling():
            self.now += FILL_S / 10
            if self.now - start >= reached_after:
                self.lane.waiting = active
            assert self.now - start < 1
        return self.now - start


def test_the_turn_waits_for_half_of_the_publishers() -> None:
    moments = WaitingLanes()
    assert moments.filled_for(0, 16) == 0
    assert moments.filled_for(8, 16) == 0
    assert moments.filled_for(1, 1) == moments.filled_for(1, 2) == 0, "a lone one never waits"
    for _ in range(5):
        assert moments.filled_for(2, 16, FILL_S / 2) == pytest.approx(FILL_S / 2, rel=0.3)


def test_on_a_single_core_the_turn_waits_for_nobody() -> None:
    moments = WaitingLanes(cores=1)
    assert not any(moments.filled_for(1, 16, FILL_S / 2) for _ in range(100))


def test_the_turn_waits_for_a_short_time_and_less_often_after_failures() -> None:
    moments = WaitingLanes()
    waits = [moments.filled_for(1, 16) for _ in range(1000)]
    assert max(waits) <= 1.2 * FILL_S
    assert sum(wait > 0 for wait in waits[500:]) <= 500 / MAX_SKIPPED
    assert any(wait > 0 for wait in waits[500:]), "but now and then"


def test_the_turn_does_not_wait_for_publishers_that_have_stopped(run: Run) -> None:
    async def scenario(stage: LaneRig) -> None:
        peers = await stage.in_lane(6)
        for number in range(100):
            await peers[number % 2].publish(b"x")
        assert stage.lane().active == 2
        assert len(stage.lane()) == 6

    run(scenario)
