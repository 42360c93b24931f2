"""A network that misbehaves on demand: a TCP proxy to put between a client and its broker.

    with FaultProxy(broker.tcp_address) as proxy:
        client = Producer(proxy.address)
        proxy.stall()           # and the client hears nothing any more
        proxy.heal()

It runs on a loop in a thread of its own, so that tests of blocking and of asyncio code use it the same way.
A fault holds for connections that are there and for those that come, until heal().
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Literal

from nsparq.addresses import join_address, split_address
from nsparq.client.loop_thread import LoopThread

__all__ = ["FaultProxy"]

Direction = Literal["both", "to_broker", "to_client"]

CHUNK: Final = 64 << 10
PIECES_PER_S: Final = 50
"""How often a throttled direction lets something through."""
HELD_BYTES: Final = 1 << 20
"""What a direction takes in ahead of what it lets out."""
DIAL_S: Final = 5.0
PATIENCE_S: Final = 5.0
_RESET: Final = struct.pack("ii", 1, 0)
"""Linger for no time: closing then resets."""


class FaultProxy:
    """Listens on `address`, and passes on to and from the target what the faults of the moment let by."""

    def __init__(self, target: str) -> None:
        """`target` is `host:port`."""
        found = split_address(target)
        if found is None:
            raise ValueError(f"{target!r} is not of the form host:port")
        self._thread: LoopThread[_Proxy] = LoopThread(lambda: _Proxy(*found), name="nsq-fault-proxy")
        self._proxy = self._thread.resource
        self.address: str = join_address(*self._proxy.bound)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and listen no more. Twice is safe."""
        self._thread.stop()

    # faults

    def stall(self, direction: Direction = "both") -> None:
        """Take nothing in and let nothing out: what is sent piles up with its sender. Nobody sees an end."""
        self._set(direction, "is_stalled", True)

    def drop(self, direction: Direction = "both") -> None:
        """Take everything in and let nothing of it out."""
        self._set(direction, "is_dropping", True)

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Let everything out so much later, in order."""
        self._set(direction, "delay", seconds)

    def throttle(self, bytes_per_second: float, direction: Direction = "both") -> None:
        """Let out no more than this, on each connection."""
        if bytes_per_second <= 0:
            raise ValueError("a throttle lets something through; stall() does not")
        self._set(direction, "bytes_per_second", bytes_per_second)

    def cut_after(self, count: int, direction: Direction = "to_client", *, reset: bool = True) -> None:
        """End every connection once it has let out `count` more bytes in this direction: with a reset, or in
        order."""
        self._set(direction, "cut_after", count)
        self._set(direction, "cut_resets", reset)

    def refuse(self) -> None:
        """Refuse new connections. Those that are there stay."""
        self._call(self._proxy.refuse)

    def reset(self) -> None:
        """Reset every connection, now. New ones are taken."""
        self._call(self._proxy.end_all, True)

    def disconnect(self) -> None:
        """End every connection in order, now. New ones are taken."""
        self._call(self._proxy.end_all, False)

    def heal(self) -> None:
        """No faults any more: what was held back flows on, what was dropped stays lost."""
        self._call(self._proxy.heal)

    # what is there

    @property
    def connection_count(self) -> int:
        """Connections of clients that are open."""
        return len(self._proxy.links)

    @property
    def accepted_count(self) -> int:
        """Connections of clients that have ever been taken."""
        return self._proxy.accepted_count

    def passed_bytes(self, direction: Literal["to_broker", "to_client"]) -> int:
        """Let out so far, over all connections."""
        return self._proxy.faults[direction].passed_bytes

    def wait_connections(self, count: int, timeout: float = PATIENCE_S) -> None:
        """Until so many are open. Raises AssertionError."""
        deadline = time.monotonic() + timeout
        while self.connection_count != count:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"after {timeout:g} s {self.connection_count} connections are open, not {count}"
                )
            time.sleep(0.002)

    def _set(self, direction: Direction, name: str, value: Any) -> None:
        directions = ("to_broker", "to_client") if direction == "both" else (direction,)
        self._call(self._proxy.set_fault, directions, name, value)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._thread.call(function, *arguments)


class _Faults:
    """What is wrong with one direction."""

    def __init__(self) -> None:
        self.passed_bytes = 0
        self.heal()

    def heal(self) -> None:
        self.is_stalled = False
        self.is_dropping = False
        self.delay = 0.0
        self.bytes_per_second = 0.0
        self.cut_after: int | None = None
        self.cut_resets = True


class _Proxy:
    """All of it, on the loop. Sockets without streams over them: what is stalled is not read ahead."""

    def __init__(self, host: str, port: int) -> None:
        self.target = host, port
        self.bound: tuple[str, int]
        self.links: set[_Link] = set()
        self.accepted_count = 0
        self.faults = {"to_broker": _Faults(), "to_client": _Faults()}
        self._socket = _bind(("127.0.0.1", 0))
        """Listens, or only keeps the port while connections are refused."""
        self._accepting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Proxy:
        self.bound = self._socket.getsockname()[:2]
        self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop_accepting()
        self._socket.close()
        await self.end_all(True)

    def _listen(self) -> None:
        self._socket.listen(128)
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._socket)
            self.accepted_count += 1
            link = _Link(self, client)
            self.links.add(link)
            link.task = asyncio.create_task(link.run())

    async def _stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._accepting = None

    # faults

    def set_fault(self, directions: tuple[str, ...], name: str, value: Any) -> None:
        for direction in directions:
            setattr(self.faults[direction], name, value)
            for link in self.links:
                link.pipes[direction].changed(name)

    def heal(self) -> None:
        for faults in self.faults.values():
            faults.heal()
        for link in self.links:
            for pipe in link.pipes.values():
                pipe.changed("cut_after")
        if self._accepting is None:
            self._listen()

    async def refuse(self) -> None:
        if self._accepting is not None:
            await self._stop_accepting()
            self._socket.close()
            self._socket = _bind(self.bound)

    async def end_all(self, with_reset: bool) -> None:
        links = [*self.links]
        for link in links:
            link.end(with_reset)
        if links:
            await asyncio.wait([link.task for link in links])


class _Link:
    """A client's connection and its counterpart to the broker."""

    task: asyncio.Task[None]

    def __init__(self, proxy: _Proxy, client: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._broker = socket.socket()
        for one in (client, self._broker):
            one.setblocking(False)
        faults = proxy.faults
        self.pipes = {
            "to_broker": _Pipe(self, client, self._broker, faults["to_broker"]),
            "to_client": _Pipe(self, self._broker, client, faults["to_client"]),
        }
        self._ended = asyncio.Event()
        self._with_reset = False

    async def run(self) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(DIAL_S):
                await asyncio.get_running_loop().sock_connect(self._broker, self._proxy.target)
            for pipe in self.pipes.values():
                tasks += (asyncio.create_task(pipe.take_in()), asyncio.create_task(pipe.let_out()))
            await self._ended.wait()
        except OSError:
            # There is no broker: the client's connection must not seem to be one.
            self._with_reset = True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in (self._client, self._broker):
                _close(one, self._with_reset)
            self._proxy.links.discard(self)

    def end(self, with_reset: bool) -> None:
        """Have it ended; `task` is done when it is."""
        if not self._ended.is_set():
            self._with_reset = with_reset
            self._ended.set()

    def pipe_ended(self) -> None:
        if all(pipe.is_ended for pipe in self.pipes.values()):
            self.end(False)


class _Pipe:
    """One direction of a link."""

    def __init__(self, link: _Link, source: socket.socket, sink: socket.socket, faults: _Faults) -> None:
        self._link = link
        self._source, self._sink = source, sink
        self._faults = faults
        self._held: deque[tuple[float, bytes]] = deque()
        """What was taken in and when. Nothing, in the place of bytes, is the end."""
        self._held_bytes = 0
        self._cut_left = faults.cut_after
        self._change = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.is_ended = False

    def changed(self, name: str) -> None:
        """A fault came or went."""
        if name == "cut_after":
            self._cut_left = self._faults.cut_after
        self._change.set()

    async def _until_change(self, within: float | None = None) -> None:
        self._change.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._change.wait()

    async def take_in(self) -> None:
        data = b"x"
        while data:
            while self._faults.is_stalled or self._held_bytes > HELD_BYTES:
                await self._until_change()
            try:
                data = await self._loop.sock_recv(self._source, CHUNK)
            except OSError:
                self._link.end(True)
                return
            self._held.append((self._loop.time(), data))
            self._held_bytes += len(data)
            self._change.set()

    async def let_out(self) -> None:
        faults = self._faults
        while not self.is_ended:
            if self._cut_left is not None and self._cut_left <= 0:
                self._link.end(faults.cut_resets)
                return
            if faults.is_stalled or not self._held:
                await self._until_change()
                continue
            arrived, data = self._held[0]
            early = arrived + faults.delay - self._loop.time()
            if early > 0:
                await self._until_change(early)
                continue
            self._held.popleft()
            if faults.is_dropping:
                self._took_out(data)
                self.is_ended = not data
                continue
            most = len(data) if self._cut_left is None else self._cut_left
            if faults.bytes_per_second:
                most = min(most, max(1, int(faults.bytes_per_second / PIECES_PER_S)))
            if len(data) > most:
                self._held.appendleft((arrived, data[most:]))
                data = data[:most]
            try:
                await self._send(data)
            except OSError:
                self._link.end(True)
                return
            self._took_out(data)
            if faults.bytes_per_second:
                await asyncio.sleep(len(data) / faults.bytes_per_second)
        self._link.pipe_ended()

    async def _send(self, data: bytes) -> None:
        if not data:
            self.is_ended = True
            self._sink.shutdown(socket.SHUT_WR)
            return
        await self._loop.sock_sendall(self._sink, data)
        self._faults.passed_bytes += len(data)
        if self._cut_left is not None:
            self._cut_left -= len(data)

    def _took_out(self, data: bytes) -> None:
        self._held_bytes -= len(data)
        self._change.set()


def _bind(address: tuple[str, int]) -> socket.socket:
    """A socket that has its port and does not listen yet: connecting to it is refused."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setblocking(False)
    bound.bind(address)
    return bound


def _close(connection: socket.socket, with_reset: bool) -> None:
    with suppress(OSError):
        if with_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            connection.shutdown(socket.SHUT_WR)
            # What is not read would turn the end into a reset.
            while connection.recv(CHUNK):
                pass
    connection.close()
