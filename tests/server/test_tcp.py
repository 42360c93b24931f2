"""Answers in order, back-pressure, and the last word of a connection."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event

from nsparq.options import NsqdOptions
from nsparq.server.daemon import Nsqd
from nsparq.server.tcp import MAX_UNANSWERED
from nsparq.storage.files import Files
from nsparq.wire.frames import ERROR, OK, encode_frame

PUB = b"PUB t\n" + struct.pack(">i", 1) + b"x"
DEADLINE_S = 10


class HeldFiles(Files):
    """A disk whose fsyncs wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event()

    def sync(self, fd: int) -> None:
        assert self.go.wait(DEADLINE_S)
        super().sync(fd)


@asynccontextmanager
async def running(tmp_path: Path, files: Files) -> AsyncIterator[Nsqd]:
    nsqd = Nsqd(
        NsqdOptions(tcp_address="127.0.0.1:0", data_path=str(tmp_path), durability="fsync"), files=files
    )
    async with asyncio.timeout(DEADLINE_S):
        await nsqd.start()
        try:
            yield nsqd
        finally:
            await nsqd.stop()


def test_an_ok_waits_for_the_disk_and_what_comes_after_it_waits_too(tmp_path: Path) -> None:
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


def test_a_fatal_error_comes_after_the_answers_to_what_was_said_before_it(tmp_path: Path) -> None:
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


def test_a_publisher_far_ahead_of_the_disk_is_not_read_from_until_it_catches_up(tmp_path: Path) -> None:
    files = HeldFiles()
    count = 4 * MAX_UNANSWERED

    async def scenario() -> None:
        async with running(tmp_path, files) as nsqd:
            reader, writer = await asyncio.open_connection(*nsqd.tcp_address)
            writer.write(b"  V2" + PUB * count)
            (connection,) = nsqd.connections
            while connection._is_reading:  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.01)
            # One read of the loop's may go beyond the limit; the rest stays with the sender.
            assert len(connection._replies) < MAX_UNANSWERED + (256 << 10) // len(PUB)
            files.go.set()
            assert await reader.readexactly(count * len(OK)) == OK * count
            writer.close()
            await writer.wait_closed()

    asyncio.run(scenario())
