"""Replies in order, back-pressure, and the end of a connection."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from nsparq import kernel
from nsparq.options import NsqdOptions
from nsparq.server import connection as connection_module
from nsparq.server.daemon import Nsqd
from nsparq.server.outbox import FLUSH_SIZE, MAX_UNANSWERED, MAX_UNREAD
from nsparq.storage.files import Files
from nsparq.wire.frames import ERROR, OK, encode_frame
from tests.support import BrokerThread, wait_until
from tests.support.layered import LayeredConnection

PUB = b"PUB t\n" + struct.pack(">i", 1) + b"x"
MPUB = b"MPUB t\n" + struct.pack(">iiicic", 14, 2, 1, b"x", 1, b"y")
DEADLINE_S = 10


def is_log(fd: int) -> bool:
    """Whether a descriptor is that of a log. Small files are synced too, but no publisher waits for
    them."""
    return os.readlink(f"/proc/self/fd/{fd}").endswith(".log")


class HeldFiles(Files):
    """A disk whose fsyncs of logs wait until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event()

    def sync(self, fd: int) -> None:
        if is_log(fd):
            assert self.go.wait(DEADLINE_S)
        super().sync(fd)


@asynccontextmanager
async def running(tmp_path: Path, files: Files, durability: str = "fsync") -> AsyncIterator[Nsqd]:
    nsqd = Nsqd(
        NsqdOptions(
            tcp_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            data_path=str(tmp_path),
            durability=durability,
        ),
        files=files,
    )
    async with asyncio.timeout(DEADLINE_S):
        await nsqd.start()
        try:
            yield nsqd
        finally:
            await nsqd.stop()


class UnsyncedFiles(Files):
    """A disk whose fsyncs of logs fail."""

    is_broken = True

    def sync(self, fd: int) -> None:
        if self.is_broken and is_log(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_failed_fsync_has_its_own_error_over_tcp_and_http(tmp_path: Path) -> None:
    files = UnsyncedFiles()

    async def ask(address: tuple[str, int] | str, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def scenario() -> None:
        async with running(tmp_path, files) as nsqd:
            answer = await ask(nsqd.tcp_address, b"  V2" + PUB)
            assert b"E_PUB_FAILED PUB failed fsync failed: Input/output error; the message may be" in answer
            request = b"POST /pub?topic=t HTTP/1.0\r\nContent-Length: 1\r\n\r\nx"
            answer = await ask(nsqd.http_address, request)
            assert answer.split()[1] == b"503"
            assert b'{"message":"FSYNC_FAILED"}' in answer
            files.is_broken = False

    asyncio.run(scenario())


def test_ok_waits_for_the_disk_and_later_replies_wait_for_ok(tmp_path: Path) -> None:
    files = HeldFiles()

    async def scenario() -> None:
        async with running(tmp_path, files) as nsqd:
            reader, writer = await asyncio.open_connection(*nsqd.tcp_address)
            writer.write(b"  V2" + PUB + PUB + b"SUB t c\n")
            pending = asyncio.create_task(reader.readexactly(3 * len(OK)))
            await asyncio.sleep(0.05)
            assert not pending.done()
            files.go.set()
            assert await pending == OK * 3
            writer.close()
            await writer.wait_closed()

    asyncio.run(scenario())


def test_a_fatal_error_is_sent_after_all_earlier_replies(tmp_path: Path) -> None:
    files = HeldFiles()

    async def scenario() -> None:
        async with running(tmp_path, files) as nsqd:
            reader, writer = await asyncio.open_connection(*nsqd.tcp_address)
            writer.write(b"  V2" + PUB + PUB + b"NONSENSE\n" + PUB)
            pending = asyncio.create_task(reader.read(-1))
            await asyncio.sleep(0.05)
            assert not pending.done()
            files.go.set()
            assert await pending == OK * 2 + encode_frame(ERROR, b"E_INVALID invalid command NONSENSE")
            assert nsqd.broker.topics["t"].message_count == 2, "nothing is heard after the last word"
            writer.close()
            await writer.wait_closed()

    asyncio.run(scenario())


def test_a_publisher_with_too_many_unanswered_publishes_is_not_read_from(tmp_path: Path) -> None:
    files = HeldFiles()
    count = 4 * MAX_UNANSWERED

    async def scenario() -> None:
        async with running(tmp_path, files) as nsqd:
            reader, writer = await asyncio.open_connection(*nsqd.tcp_address)
            writer.write(b"  V2" + PUB * count)
            (connection,) = nsqd.connections
            while connection.is_reading:  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.01)
            # One read of the event loop may exceed the limit. The rest stays with the sender.
            assert connection.outbox.unanswered < MAX_UNANSWERED + (256 << 10) // len(PUB)
            files.go.set()
            assert await reader.readexactly(count * len(OK)) == OK * count
            writer.close()
            await writer.wait_closed()

    asyncio.run(scenario())


@asynccontextmanager
async def talking(nsqd: Nsqd) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*nsqd.tcp_address)
    writer.write(b"  V2")
    yield reader, writer
    writer.close()
    await writer.wait_closed()


def test_publishers_that_wait_for_each_ok_share_an_append(tmp_path: Path) -> None:
    """Each publisher gets its OKs, is counted, and its messages are in order, whatever else it
    sends."""

    async def publish(nsqd: Nsqd, name: bytes) -> None:
        async with talking(nsqd) as (reader, writer):
            for number in range(50):
                body = b"%b %d" % (name, number)
                commands = [b"PUB t\n" + struct.pack(">i", len(body)) + body]
                if number % 10 == 9:
                    commands.append(b"MPUB t\n" + struct.pack(">iii", 4 + 4 + 1, 1, 1) + b"x")
                for command in commands:
                    writer.write(command)
                    assert await reader.readexactly(len(OK)) == OK

    async def scenario() -> None:
        files = HeldFiles()
        files.go.set()
        async with running(tmp_path, files) as nsqd:
            await asyncio.gather(*(publish(nsqd, b"%d" % number) for number in range(8)))
            topic = nsqd.broker.topics["t"]
            assert topic.message_count == 8 * 55
            found: dict[bytes, list[int]] = {}
            sequence = topic.log.start
            while (batch := topic.log.read(sequence)) is not None:
                for body in batch.bodies():
                    if body != b"x":
                        name, number = body.split()
                        found.setdefault(name, []).append(int(number))
                sequence = batch.end
            assert found == {b"%d" % number: [*range(50)] for number in range(8)}

    asyncio.run(scenario())


def test_a_publisher_can_publish_on_after_its_topic_is_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        files = HeldFiles()
        files.go.set()
        async with running(tmp_path, files) as nsqd, talking(nsqd) as (reader, writer):
            for _ in range(2):
                for _ in range(4):
                    writer.write(PUB)
                    assert await reader.readexactly(len(OK)) == OK
                assert nsqd.broker.topics["t"].message_count == 4
                (client,) = nsqd.broker.clients
                assert client.publish_counts == {"t": 4}
                nsqd.broker.delete_topic("t")
                assert not client.publish_counts

    asyncio.run(scenario())


def in_halves(descriptors: list[int], data: bytes, ring: object) -> list[tuple[int, int]]:
    """A socket that takes only half of what it is given."""
    return [(index, os.write(file, data[: len(data) // 2])) for index, file in enumerate(descriptors)]


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize(
    "send_each", [kernel.send_each, in_halves, None], ids=["as built", "in halves", "pure"]
)
def test_each_of_several_mpubs_in_one_piece_gets_its_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, send_each: Any
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, Files(), durability) as nsqd:
            reader, writer = await asyncio.open_connection(*nsqd.tcp_address)
            writer.write(b"  V2" + MPUB)
            assert await reader.readexactly(len(OK)) == OK
            monkeypatch.setattr(kernel, "send_each", send_each)
            for count in (2, 5, 1, 3):
                writer.write(count * MPUB)
                assert await reader.readexactly(count * len(OK)) == count * OK
            # Single publishes before them, and another command after them.
            writer.write(PUB + 2 * MPUB + b"SUB t c\n" + 2 * MPUB)
            assert await reader.readexactly(6 * len(OK)) == 6 * OK
            assert nsqd.broker.topics["t"].message_count == 2 * (1 + 2 + 5 + 1 + 3 + 4) + 1
            writer.write(2 * MPUB + b"BOGUS\n")
            error = encode_frame(ERROR, b"E_INVALID invalid command BOGUS")
            assert await reader.read() == 2 * OK + error
            writer.close()
            await writer.wait_closed()

    asyncio.run(scenario())


@pytest.mark.parametrize("line", [b"NOP\n", b"RDY 1\n", b"TOUCH 0123456789abcdef\n"])
def test_many_commands_in_one_piece_are_executed_in_slices_and_in_order(
    tmp_path: Path, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "EXECUTE_S", 0.0)
    count = 20_000

    async def run() -> None:
        async with running(tmp_path, Files(), "os") as nsqd, talking(nsqd) as (reader, writer):
            writer.write(b"SUB t c\n")
            assert await reader.readexactly(len(OK)) == OK
            (connection,) = nsqd.connections
            before = connection.protocol.commands
            # What the event loop may read from one client before it looks at any other.
            for _ in range(2):
                connection.data_received(line * (count // 2))
            assert 0 < connection.protocol.commands - before < count / 10
            writer.write(PUB)
            answers = b""
            while not answers.endswith(OK):
                answers += await reader.read(1 << 20)
            assert connection.protocol.commands - before == count + 1
            assert answers.count(OK) == 1
            assert answers.count(b"E_TOUCH_FAILED") == (count if line.startswith(b"TOUCH") else 0)

    asyncio.run(run())


# A consumer that does not read


@contextmanager
def stalled_consumer(
    tmp_path: Path, **layers: bool
) -> Iterator[tuple[BrokerThread, LayeredConnection, list[bytes]]]:
    """A broker, a consumer that has read 100 messages and then nothing until its socket is full,
    and the ids of those messages. On a Unix socket, which buffers far less than TCP."""
    with (
        BrokerThread(tmp_path, tcp_address=str(tmp_path / "socket")) as broker,
        LayeredConnection(broker.address) as consumer,
    ):
        if layers:
            consumer.upgrade(**layers)
        consumer.sub("t", "c", rdy=2500)
        broker.publish("t", *[b"first"] * 100)
        ids = [message.id for message in consumer.read_messages(100)]
        broker.publish("t", *[os.urandom(10_000) for _ in range(200)])
        (channel,) = broker.nsqd.broker.topics["t"].channels.values()
        (client,) = channel.clients
        wait_until(lambda: not client.is_writable)
        yield broker, consumer, ids
        assert not channel.clients or not client.is_writable, "it was to be stalled all the time"


LAYERS = pytest.mark.parametrize("layers", [{}, {"snappy": True}, {"deflate": True}], ids=" ".join)


@LAYERS
def test_the_commands_of_a_consumer_that_does_not_read_are_executed(
    tmp_path: Path, layers: dict[str, bool]
) -> None:
    with stalled_consumer(tmp_path, **layers) as (broker, consumer, ids):
        consumer.send(b"".join(b"FIN %b\n" % message_id for message_id in ids[:99]))
        consumer.req(ids[99], 3_600_000)

        def answered() -> tuple[int, int]:
            stats = broker.channel_stats("t", "c")
            assert stats is not None
            return stats["clients"][0]["finish_count"], stats["deferred_count"]

        wait_until(lambda: answered() == (99, 1), what=answered)


@LAYERS
@pytest.mark.parametrize("is_reset", [False, True])
def test_fins_sent_before_a_disconnect_count_even_if_the_consumer_did_not_read(
    tmp_path: Path, layers: dict[str, bool], is_reset: bool
) -> None:
    with stalled_consumer(tmp_path, **layers) as (broker, consumer, ids):
        consumer.send(b"".join(b"FIN %b\n" % message_id for message_id in ids))
        consumer.abort() if is_reset else consumer.close()
        wait_until(lambda: not broker.nsqd.connections)
        with broker.connect() as other:
            other.sub("t", "c", rdy=2500)
            rest = other.read_messages(200, finish=True)
            assert all(message.body != b"first" for message in rest)
            other.barrier()
            stats = broker.channel_stats("t", "c")
            assert stats is not None
            assert (stats["depth"], stats["in_flight_count"]) == (0, 0)


@LAYERS
def test_a_consumer_that_does_not_read_is_read_from_until_too_many_replies_wait(
    tmp_path: Path, layers: dict[str, bool]
) -> None:
    refused, count = b"FIN 0123456789abcdef\n", 30_000
    refusal = encode_frame(ERROR, b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight")
    with stalled_consumer(tmp_path, **layers) as (broker, consumer, _):
        wait_until(lambda: len(broker.nsqd.connections) == 1)
        (connection,) = broker.nsqd.connections
        blocked_at = connection._transport.get_write_buffer_size()
        sender = Thread(target=consumer.send, args=(refused * count,), daemon=True)
        sender.start()
        wait_until(lambda: not connection.is_reading)
        # One read of the event loop may exceed the limit.
        most = MAX_UNREAD + FLUSH_SIZE + (256 << 10) * len(refusal) // len(refused)
        assert connection._transport.get_write_buffer_size() <= blocked_at + most
        # Once it reads, it gets all the answers.
        errors = 0
        while errors < count:
            kind, _ = consumer.read_raw_frame()
            errors += kind == ERROR
        sender.join()
        consumer.close()
        wait_until(lambda: not broker.nsqd.connections)
