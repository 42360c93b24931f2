"""An HTTP server: accepts connections, encodes responses, and ends slow connections."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from nsparq.http import limits
from nsparq.http.api import OK, Api, Request, Response
from nsparq.http.connection import HttpConnection, Layer
from nsparq.http.reading import Head
from nsparq.listening import Address, bound_address, listen_on, serve_on

__all__ = ["HttpServer", "Layer"]

NSQ_HEADER: Final = b"X-NSQ-Content-Type: nsq; version=1.0\r\n"


class HttpServer:
    def __init__(
        self, api: Api, *, layer: Callable[[], Layer] | None = None, refuse_all: Response | None = None
    ) -> None:
        """`refuse_all` is the response that every request gets, if there is one."""
        self.api = api
        self.layer = layer
        self.refuse_all = refuse_all
        self.connections: set[HttpConnection] = set()
        self.gathered = 0
        """Bytes of bodies in memory: arriving, queued, or with a handler."""
        self.slow: set[HttpConnection] = set()
        """Connections with a full write buffer."""
        self.date = b""
        self._date_s = 0
        self._ok = b""
        """The encoded OK that most publishers get."""
        self.heads: dict[bytes, Head] = {}
        """Parsed heads by their bytes: a publisher sends the same head with every request."""
        self._servers: list[asyncio.AbstractServer] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._all_gone = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop

    async def listen(self, address: Address) -> Address:
        """Serve on host and port, or on a Unix socket. Gives the bound address. Raises OSError."""
        sockets = listen_on(address)
        bound = bound_address(sockets)
        await self.serve(sockets)
        return bound

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on listening sockets. The server closes them."""
        self._loop = asyncio.get_running_loop()
        self._servers = await serve_on(sockets, lambda: HttpConnection(self))

    def close_listener(self) -> None:
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    async def close(self) -> None:
        """Stop accepting, answer the requests under way, and end the connections."""
        self.close_listener()
        for connection in [*self.connections]:
            connection.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.DRAIN_S if self.connections else 0):
                await self._all_gone.wait()
        for connection in [*self.connections]:
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def opened(self, connection: HttpConnection) -> None:
        self.connections.add(connection)
        self._all_gone.clear()
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(limits.SWEEP_S, self._sweep)

    def closed(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()

    @property
    def is_overloaded(self) -> bool:
        return bool(self.slow) and sum(connection.unread for connection in self.slow) > limits.MAX_UNREAD

    def _sweep(self) -> None:
        """End the connections whose deadline has passed. One timer for all of them is cheaper."""
        now = self._loop.time()
        for connection in [c for c in self.connections if c.deadline < now]:
            connection.expire()
        self._sweeper = self._loop.call_later(limits.SWEEP_S, self._sweep) if self.connections else None

    def encode(self, response: Response, request: Request, keep_alive: bool) -> bytes:
        """The bytes of a response, without a large body, which the caller writes itself."""
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s = now_s
            self.date = b"Date: " + formatdate(now_s, usegmt=True).encode() + b"\r\n"
            self._ok = b""
        is_plain_ok = response is OK and keep_alive and not request.is_http_1_0 and request.method != "HEAD"
        if is_plain_ok and self._ok:
            return self._ok
        status = response.status
        parts = [_STATUS_LINES.get(status) or _status_line(status)]
        if response.content_type:
            parts.append(b"Content-Type: %b\r\n" % response.content_type.encode("latin-1"))
        if response.nsq_header:
            parts.append(NSQ_HEADER)
        for name, value in response.headers:
            parts.append(f"{name}: {value}\r\n".encode("latin-1", "replace"))
        parts.append(self.date)
        if not keep_alive:
            parts.append(b"Connection: close\r\n")
        elif request.is_http_1_0:
            parts.append(b"Connection: keep-alive\r\n")
        parts.append(b"Content-Length: %d\r\n\r\n" % len(response.body))
        if request.method != "HEAD" and len(response.body) < limits.LARGE:
            parts.append(response.body)
        encoded = b"".join(parts)
        if is_plain_ok:
            self._ok = encoded
        return encoded


def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()


_STATUS_LINES: Final = {status: _status_line(status) for status in (200, 400, 404)}
