"""A small HTTP/1.1 client for asyncio that reuses connections and returns only the status of an
answer.

It does not follow redirects: one that turns a POST into a GET would lose the message.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from nsparq.addresses import join_address
from nsparq.client.connect.http_get import login_of
from nsparq.client.errors import reason_of
from nsparq.errors import NsparqError
from nsparq.tasks import cancel_all

__all__ = ["HttpClient", "RequestFailed", "Target", "parse_target"]

MAX_HEAD: Final = 64 << 10
MAX_BODY: Final = 1 << 20
"""A longer answer is not read to its end: a new connection is cheaper."""
PIECE: Final = 64 << 10


class RequestFailed(NsparqError):
    """There was no answer."""


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL that a request needs."""

    host: str
    port: int
    is_tls: bool
    host_header: str
    path: str
    authorization: str


def parse_target(url: str) -> Target:
    """Raises ValueError for an invalid URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url}: not an http or https URL")
    if any(character <= " " or character == "\x7f" for character in url):
        raise ValueError(f"{url}: write blanks in a URL as %20")
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host_header = parts.netloc.rpartition("@")[2]
    return Target(parts.hostname, port, is_tls, host_header, path, login_of(parts))


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.has_answered = False
        """Whether a part of the answer to the current request has arrived."""

    async def exchange(self, request: bytes) -> tuple[int, bool]:
        """The status, and whether the connection can be reused."""
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
        """Read and drop the body. False if the connection cannot be reused after it."""
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
        # Not close(): with TLS it would wait for the peer.
        self._writer.transport.abort()


class _Pool:
    """The connections to one server. A request takes the first that is free: a connection that
    another request returns, or a new one. So a server that is slow to accept does not delay a
    request while other connections become free."""

    def __init__(self) -> None:
        self.idle: list[_Connection] = []
        self._waiting: deque[asyncio.Future[_Connection]] = deque()
        """Requests that wait for a connection, the oldest first."""
        self._dialing: set[asyncio.Task[_Connection]] = set()

    def take_idle(self) -> _Connection | None:
        while self.idle:
            connection = self.idle.pop()
            if not connection.is_stale:
                return connection
            connection.close()
        return None

    async def get(self, dial: Callable[[], Coroutine[Any, Any, _Connection]]) -> tuple[_Connection, bool]:
        """A connection, and whether it has never been used. Raises what `dial` raises."""
        if (connection := self.take_idle()) is not None:
            return connection, False
        freed: asyncio.Future[_Connection] = asyncio.get_running_loop().create_future()
        dialing = asyncio.create_task(dial())
        self._dialing.add(dialing)
        self._waiting.append(freed)
        try:
            ends: set[asyncio.Future[_Connection]] = {freed, dialing}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            if freed.done():
                self.put_back(freed.result())
            else:
                self._waiting.remove(freed)
            dialing.cancel()
            dialing.add_done_callback(self._dialled)
            raise
        if freed.done():
            # The connection that was dialled for this request goes to another one, or becomes idle.
            dialing.add_done_callback(self._dialled)
            return freed.result(), False
        self._waiting.remove(freed)
        self._dialing.discard(dialing)
        return dialing.result(), True

    def put_back(self, connection: _Connection) -> None:
        """Give the connection to the request that has waited longest, or keep it."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(connection)
                return
        self.idle.append(connection)

    def _dialled(self, task: asyncio.Task[_Connection]) -> None:
        self._dialing.discard(task)
        if not task.cancelled() and task.exception() is None:
            self.put_back(task.result())

    async def close(self) -> None:
        await cancel_all(self._dialing)
        for connection in self.idle:
            connection.close()
        self.idle.clear()


class HttpClient:
    """Opens at most as many connections as there are requests at a time."""

    def __init__(self, connect_timeout: float, request_timeout: float) -> None:
        self._connect_timeout, self._request_timeout = connect_timeout, request_timeout
        self._pools: defaultdict[tuple[str, int, bool], _Pool] = defaultdict(_Pool)
        self._context: ssl.SSLContext | None = None

    async def request(
        self, method: str, target: Target, headers: Mapping[str, str], body: bytes = b""
    ) -> int:
        """The status of the answer. Raises RequestFailed."""
        request = _encode(method, target, headers, body)
        pool = self._pools[target.host, target.port, target.is_tls]
        try:
            async with asyncio.timeout(self._request_timeout):
                while True:
                    connection, is_new = await pool.get(lambda: self._connect(target))
                    keeps = False
                    try:
                        status, keeps = await connection.exchange(request)
                        return status
                    except (OSError, EOFError):
                        # The server may have just closed an idle connection. Try another one.
                        if is_new or connection.has_answered:
                            raise
                    finally:
                        if keeps:
                            pool.put_back(connection)
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
        for pool in self._pools.values():
            await pool.close()
        self._pools.clear()
        # The event loop closes the sockets in its next turn.
        await asyncio.sleep(0)


def _encode(method: str, target: Target, headers: Mapping[str, str], body: bytes) -> bytes:
    given = {"Host": target.host_header or join_address(target.host, target.port)}
    if target.authorization:
        given["Authorization"] = target.authorization
    if body:
        given["Content-Length"] = str(len(body))
    replaced = {name.lower() for name in headers}
    given = {name: value for name, value in given.items() if name.lower() not in replaced} | {**headers}
    lines = [f"{method} {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8") + body
