"""A TCP proxy between a client and its broker that simulates network faults.

    with FaultProxy(broker.tcp_address) as proxy:
        client = Producer(proxy.address)
        proxy.stall()           # the client gets no more data
        proxy.heal()

It runs on a loop in its own thread, so tests of blocking and of asyncio code use it the same way. A
fault affects open and new connections until heal().
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
from nsparq.tasks import cancel_all

__all__ = ["FaultProxy"]

Direction = Literal["both", "to_broker", "to_client"]

CHUNK: Final = 64 << 10
PIECES_PER_S: Final = 50
"""How often a throttled direction passes data on."""
MAX_BUFFERED: Final = 1 << 20
"""Bytes that a direction buffers."""
DIAL_S: Final = 5.0
PATIENCE_S: Final = 5.0
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 seconds: close() then resets the connection."""


class FaultProxy:
    """Listens on `address`, and passes data to and from the target, subject to the current
    faults."""

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
        """Stop listening and end all connections. Twice is safe."""
        self._thread.stop()

    # faults

    def stall(self, direction: Direction = "both") -> None:
        """Read and write nothing: data piles up at its sender. Connections stay open."""
        self._set(direction, "is_stalled", True)

    def drop(self, direction: Direction = "both") -> None:
        """Read all data and discard it."""
        self._set(direction, "is_dropping", True)

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Pass all data on later by this time, in order."""
        self._set(direction, "delay", seconds)

    def throttle(self, bytes_per_second: float, direction: Direction = "both") -> None:
        """Limit the rate of each connection."""
        if bytes_per_second <= 0:
            raise ValueError("bytes_per_second must be positive; use stall() to pass nothing")
        self._set(direction, "bytes_per_second", bytes_per_second)

    def cut_after(self, count: int, direction: Direction = "to_client", *, reset: bool = True) -> None:
        """End each connection after `count` more bytes in this direction, with a reset or a clean
        close."""
        self._set(direction, "cut_after", count)
        self._set(direction, "cut_resets", reset)

    def refuse(self) -> None:
        """Refuse new connections. Open ones stay."""
        self._call(self._proxy.refuse)

    def reset(self) -> None:
        """Reset all connections now. New ones are accepted."""
        self._call(self._proxy.end_all, True)

    def disconnect(self) -> None:
        """Close all connections cleanly now. New ones are accepted."""
        self._call(self._proxy.end_all, False)

    def heal(self) -> None:
        """End all faults. Delayed data is passed on; dropped data stays lost."""
        self._call(self._proxy.heal)

    # connections

    @property
    def connection_count(self) -> int:
        """Open connections of clients."""
        return len(self._proxy.links)

    @property
    def accepted_count(self) -> int:
        """Connections of clients accepted so far."""
        return self._proxy.accepted_count

    def passed_bytes(self, direction: Literal["to_broker", "to_client"]) -> int:
        """Bytes passed on so far, over all connections."""
        return self._proxy.faults[direction].passed_bytes

    def wait_connections(self, count: int, timeout: float = PATIENCE_S) -> None:
        """Wait until `count` are open. Raises AssertionError after the timeout."""
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
    """The faults of one direction."""

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
    """The proxy on its loop. It uses plain sockets: streams would read ahead while stalled."""

    def __init__(self, host: str, port: int) -> None:
        self.target = host, port
        self.bound: tuple[str, int]
        self.links: set[_Link] = set()
        self.accepted_count = 0
        self.faults = {"to_broker": _Faults(), "to_client": _Faults()}
        self._socket = _bind(("127.0.0.1", 0))
        """Listens, or only reserves the port while connections are refused."""
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
    """A client's connection and the one to the broker."""

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
                tasks += (asyncio.create_task(pipe.receive()), asyncio.create_task(pipe.send_on()))
            await self._ended.wait()
        except OSError:
            # No connection to the broker: the client must not believe that it has one.
            self._with_reset = True
        finally:
            await cancel_all(tasks)
            for one in (self._client, self._broker):
                _close(one, self._with_reset)
            self._proxy.links.discard(self)

    def end(self, with_reset: bool) -> None:
        """Start to end it; `task` is done when it has ended."""
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
        self._buffer: deque[tuple[float, bytes]] = deque()
        """Data read, and when. Empty data is the end of the stream."""
        self._buffered_bytes = 0
        self._cut_left = faults.cut_after
        self._change = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.is_ended = False

    def changed(self, name: str) -> None:
        """A fault was set or healed."""
        if name == "cut_after":
            self._cut_left = self._faults.cut_after
        self._change.set()

    async def _until_change(self, within: float | None = None) -> None:
        self._change.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._change.wait()

    async def receive(self) -> None:
        data = b"x"
        while data:
            while self._faults.is_stalled or self._buffered_bytes > MAX_BUFFERED:
                await self._until_change()
            try:
                data = await self._loop.sock_recv(self._source, CHUNK)
            except OSError:
                self._link.end(True)
                return
            self._buffer.append((self._loop.time(), data))
            self._buffered_bytes += len(data)
            self._change.set()

    async def send_on(self) -> None:
        faults = self._faults
        while not self.is_ended:
            if self._cut_left is not None and self._cut_left <= 0:
                self._link.end(faults.cut_resets)
                return
            if faults.is_stalled or not self._buffer:
                await self._until_change()
                continue
            arrived, data = self._buffer[0]
            early = arrived + faults.delay - self._loop.time()
            if early > 0:
                await self._until_change(early)
                continue
            self._buffer.popleft()
            if faults.is_dropping:
                self._sent_on(data)
                self.is_ended = not data
                continue
            most = len(data) if self._cut_left is None else self._cut_left
            if faults.bytes_per_second:
                most = min(most, max(1, int(faults.bytes_per_second / PIECES_PER_S)))
            if len(data) > most:
                self._buffer.appendleft((arrived, data[most:]))
                data = data[:most]
            try:
                await self._send(data)
            except OSError:
                self._link.end(True)
                return
            self._sent_on(data)
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

    def _sent_on(self, data: bytes) -> None:
        self._buffered_bytes -= len(data)
        self._change.set()


def _bind(address: tuple[str, int]) -> socket.socket:
    """A socket with a port that does not listen yet: connections to it are refused."""
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
            # Unread data would turn the close into a reset.
            while connection.recv(CHUNK):
                pass
    connection.close()
