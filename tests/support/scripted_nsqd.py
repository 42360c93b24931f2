"""A fake nsqd on the test's event loop. It replies as the test says and records all commands.

async with ScriptedNsqd() as nsqd:
    nsqd.address                    for the client
    nsqd.commands                   every command of every connection, in order: "IDENTIFY",
                                    "SUB t ch", "RDY 5", "FIN 000…1", "PUB t"; NOP is left out
    await nsqd.told("RDY 5", …)     wait until the next commands are exactly these
    peer = await nsqd.peer()        the first connection; peer(2) is the second one
    peer.send_message("m1", b"body", attempts=1)
                                    ids are padded to 16 characters, see message_id()
    peer.send_response(b"…"), peer.send_error("E_…"), peer.send_bytes(b"…")
    peer.commands, peer.bodies      of this connection; bodies of IDENTIFY, AUTH and publishes
    peer.is_reading = False         stop reading
    peer.close(), peer.abort()      end of stream; reset
    nsqd.refuse()                   refuse connections
    await nsqd.listen()             accept them again, on the same port

ScriptedNsqd(identify={…}, **replies)
    identify                        changed fields of the reply to IDENTIFY, or another reply
    sub, cls, publish, auth         the replies to these: bytes for a response, a text for an
                                    error, None for no reply, or a function of the command that
                                    returns one of them
    tls=context                     an SSL context: offered, and started after IDENTIFY
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any

from .aio import until
from .polling import DEADLINE

RESPONSE, ERROR, MESSAGE, MESSAGE_WITH_HEADERS = 0, 1, 2, 3
Reply = bytes | str | None | Callable[[str], "bytes | str | None"]
AGREED = {
    "max_rdy_count": 2500,
    "version": "1.3.0",
    "max_msg_timeout": 900_000,
    "msg_timeout": 60_000,
    "tls_v1": False,
    "deflate": False,
    "deflate_level": 0,
    "snappy": False,
    "sample_rate": 0,
    "auth_required": False,
    "output_buffer_size": 16384,
    "output_buffer_timeout": 250,
}


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">ii", len(data) + 4, kind) + data


def message_id(name: str) -> str:
    return name.rjust(16, "0")


def message_frame(
    name: str, body: bytes = b"body", attempts: int = 1, timestamp_ns: int = 1, block: bytes = b""
) -> bytes:
    """`block` is the message's header block."""
    head = struct.pack(">qH16s", timestamp_ns, attempts, message_id(name).encode())
    if block:
        return frame(MESSAGE_WITH_HEADERS, head + struct.pack(">i", len(block)) + block + body)
    return frame(MESSAGE, head + body)


class Peer:
    """One connection of a client."""

    def __init__(
        self, nsqd: ScriptedNsqd, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.commands: list[str] = []
        self.bodies: list[bytes] = []
        self.is_reading = True
        self.is_ended = False
        self.nop_count = 0
        self._nsqd, self._reader, self._writer = nsqd, reader, writer

    # to the client

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    def send_response(self, data: bytes) -> None:
        self.send_bytes(frame(RESPONSE, data))

    def send_error(self, text: str) -> None:
        self.send_bytes(frame(ERROR, text.encode()))

    def send_message(self, name: str, body: bytes = b"body", attempts: int = 1) -> None:
        self.send_bytes(message_frame(name, body, attempts))

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        if self.is_ended or self._writer.transport.is_closing():
            return
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def reply(self, reply: Reply, line: str) -> None:
        if callable(reply):
            reply = reply(line)
        if isinstance(reply, bytes):
            self.send_response(reply)
        elif isinstance(reply, str):
            self.send_error(reply)

    # from the client

    async def serve(self) -> None:
        nsqd = self._nsqd
        assert await self._reader.readexactly(4) == b"  V2"
        while True:
            while not self.is_reading:
                self._writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            line = (await self._reader.readuntil(b"\n"))[:-1].decode()
            verb = line.partition(" ")[0]
            if verb in ("IDENTIFY", "AUTH", "PUB", "DPUB", "MPUB"):
                (size,) = struct.unpack(">i", await self._reader.readexactly(4))
                self.bodies.append(await self._reader.readexactly(size))
            if verb == "NOP":
                self.nop_count += 1
                continue
            self.commands.append(line)
            nsqd.commands.append(line)
            if verb == "IDENTIFY":
                await self._identify()
            elif verb == "SUB":
                self.reply(nsqd.sub, line)
            elif verb == "CLS":
                self.reply(nsqd.cls, line)
            elif verb == "AUTH":
                self.reply(nsqd.auth, line)
            elif verb in ("PUB", "DPUB", "MPUB"):
                self.reply(nsqd.publish, line)

    async def _identify(self) -> None:
        nsqd = self._nsqd
        if not isinstance(nsqd.identify, dict):
            self.reply(nsqd.identify, "IDENTIFY")
            return
        has_tls = nsqd.tls is not None and json.loads(self.bodies[-1])["tls_v1"]
        self.send_response(json.dumps({**AGREED, "tls_v1": has_tls, **nsqd.identify}).encode())
        if has_tls:
            await self._writer.start_tls(nsqd.tls)
            self.send_response(b"OK")


class ScriptedNsqd:
    def __init__(
        self,
        identify: dict[str, Any] | Reply | None = None,
        *,
        sub: Reply = b"OK",
        cls: Reply = b"CLOSE_WAIT",
        auth: Reply = b"{}",
        publish: Reply = b"OK",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.identify = {} if identify is None else identify
        self.sub, self.cls, self.auth, self.publish, self.tls = sub, cls, auth, publish, tls
        self.commands: list[str] = []
        self.peers: list[Peer] = []
        self._told = 0
        self._port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ScriptedNsqd:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        # A connection that was just accepted is known after a few turns; until then keep the server
        # open.
        for _ in range(20):
            await asyncio.sleep(0)
        self.refuse()
        for peer in self.peers:
            peer.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"

    def refuse(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = Peer(self, reader, writer)
        self.peers.append(peer)
        try:
            await peer.serve()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError, asyncio.CancelledError):
            pass
        finally:
            peer.is_ended = True
            writer.transport.abort()
            self._tasks.discard(task)

    async def peer(self, number: int = 1, *, within: float = DEADLINE) -> Peer:
        """The connection of this number, once it has sent a command."""
        await until(lambda: len(self.peers) >= number, within=within, what=f"connection {number}")
        peer = self.peers[number - 1]
        await until(lambda: peer.commands, within=within, what=f"IDENTIFY of connection {number}")
        return peer

    async def told(self, *commands: str, within: float = DEADLINE) -> None:
        expected = list(commands)

        def new() -> list[str]:
            return self.commands[self._told :]

        try:
            await until(lambda: len(new()) >= len(expected), within=within)
        except AssertionError:
            raise AssertionError(f"expected {expected}, was told {new()}") from None
        assert new()[: len(expected)] == expected, f"expected {expected}, was told {new()}"
        self._told += len(expected)

    async def told_nothing_more(self, for_s: float = 0.05) -> None:
        await asyncio.sleep(for_s)
        assert self.commands[self._told :] == []
