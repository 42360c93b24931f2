"""A small HTTP/1.1 client for asyncio that keeps its connections. What is answered is read and dropped: only
the status counts. It follows no redirects: one that turns a POST into a GET would lose the message.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from nsparq.addresses import join_address
from nsparq.client.errors import reason_of
from nsparq.client.http import login_of
from nsparq.errors import NsparqError

__all__ = ["HttpClient", "RequestFailed", "Target", "parse_target"]

MAX_HEAD: Final = 64 << 10
MAX_BODY: Final = 1 << 20
"""A longer answer is not read to its end: another connection is cheaper."""
PIECE: Final = 64 << 10


class RequestFailed(NsparqError):
    """There was no answer."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes, taken from its URL."""

    host: str
    port: int
    is_tls: bool
    host_header: str
    path: str
    authorization: str


def parse_target(url: str) -> Target:
    """Raises ValueError for what is not the address of an HTTP server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url}: not an http or https address")
    if any(character <= " " or character == "\x7f" for character in url):
        raise ValueError(f"{url}: blanks in an address are to be written %20")
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host_header = parts.netloc.rpartition("@")[2]
    return Target(parts.hostname, port, is_tls, host_header, path, login_of(parts))


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.has_answered = False
        """Whether anything of the answer to the present request has come."""

    async def exchange(self, request: bytes) -> tuple[int, bool]:
        """The status, and whether the connection can be used again."""
        self.has_answered = False
        self._writer.write(request)
        await self._writer.drain()
        while True:
            status, version, headers = await self._read_head()
            if status >= 200:
                break
        keeps = headers.get("connection", "close" if version == b"HTTP/1.0" else "").lower() != "close"
        return status, await self._skip_body(status, headers) and keeps

    async def _read_head(self) -> tuple[int, bytes, dict[str, str]]:
        first = await self._reader.readuntil(b"\n")
        self.has_answered = True
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise RequestFailed(f"the answer is not HTTP: {first[:50]!r}")
        headers: dict[str, str] = {}
        size = 0
        while line := (await self._reader.readuntil(b"\n")).strip():
            size += len(line)
            if size > MAX_HEAD:
                raise RequestFailed("the head of the answer is too long")
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(rest[:3]), version, headers

    async def _skip_body(self, status: int, headers: Mapping[str, str]) -> bool:
        """Read what follows the head. False if its end is the end of the connection."""
        if status in (204, 304):
            return True
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return await self._skip_chunks()
        length = headers.get("content-length", "")
        return length.isdigit() and await self._skip(int(length))

    async def _skip_chunks(self) -> bool:
        total = 0
        while True:
            line = (await self._reader.readuntil(b"\n")).partition(b";")[0].strip()
            size = int(line, 16)
            total += size
            if size == 0:
                while (await self._reader.readuntil(b"\n")).strip():
                    pass
                return True
            if total > MAX_BODY or not await self._skip(size + 2):
                return False

    async def _skip(self, count: int) -> bool:
        if count > MAX_BODY:
            return False
        while count:
            piece = await self._reader.read(min(count, PIECE))
            if not piece:
                return False
            count -= len(piece)
        return True

    @property
    def is_stale(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        # Not close(): with TLS that would wait for the other side.
        self._writer.transport.abort()


class HttpClient:
    """Opens as many connections as there are requests at a time."""

    def __init__(self, connect_timeout: float, request_timeout: float) -> None:
        self._connect_timeout, self._request_timeout = connect_timeout, request_timeout
        self._idle: defaultdict[tuple[str, int, bool], list[_Connection]] = defaultdict(list)
        self._context: ssl.SSLContext | None = None

    async def request(
        self, method: str, target: Target, headers: Mapping[str, str], body: bytes = b""
    ) -> int:
        """The status of the answer. Raises RequestFailed."""
        request = _encode(method, target, headers, body)
        idle = self._idle[target.host, target.port, target.is_tls]
        try:
            async with asyncio.timeout(self._request_timeout):
                while True:
                    connection = _take(idle)
                    is_new = connection is None
                    if connection is None:
                        connection = await self._connect(target)
                    keeps = False
                    try:
                        status, keeps = await connection.exchange(request)
                        return status
                    except (OSError, EOFError):
                        # A kept connection may have been ended just now: that says nothing about the server.
                        if is_new or connection.has_answered:
                            raise
                    finally:
                        if keeps:
                            idle.append(connection)
                        else:
                            connection.close()
        except TimeoutError as error:
            raise RequestFailed("timed out") from error
        except OSError as error:
            raise RequestFailed(reason_of(error)) from error
        except (EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise RequestFailed(f"the answer is cut off or not HTTP: {error}") from error

    async def _connect(self, target: Target) -> _Connection:
        context = None
        if target.is_tls:
            self._context = context = self._context or ssl.create_default_context()
        async with asyncio.timeout(self._connect_timeout):
            streams = await asyncio.open_connection(target.host, target.port, ssl=context, limit=MAX_HEAD)
        return _Connection(*streams)

    async def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()
        # The loop has to come round once for the sockets to be gone.
        await asyncio.sleep(0)


def _take(idle: list[_Connection]) -> _Connection | None:
    while idle:
        connection = idle.pop()
        if not connection.is_stale:
            return connection
        connection.close()
    return None


def _encode(method: str, target: Target, headers: Mapping[str, str], body: bytes) -> bytes:
    given = {"Host": target.host_header or join_address(target.host, target.port)}
    if target.authorization:
        given["Authorization"] = target.authorization
    if body:
        given["Content-Length"] = str(len(body))
    given |= headers
    lines = [f"{method} {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8") + body
