"""Requests to one nsqd on one connection, several on their way at a time, answered in their order.

HTTP/1.1 pipelining: the next request leaves before the last one is answered, so that a task encodes while
nsqd works, and what a task sends arrives in the order in which it was sent. Nothing is sent again here.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
from collections.abc import Sequence
from typing import Any, BinaryIO, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from nsparq.addresses import join_address
from nsparq.fetch import without_secrets
from nsparq.spark.cluster.http_client import CONNECT_S, Access
from nsparq.version import __version__

__all__ = ["Pipe", "Reply"]

MAX_LINE: Final = 64 << 10
MAX_REPLY: Final = 1 << 20

Buffer = bytes | memoryview


class Reply(NamedTuple):
    status: int
    body: bytes

    def details(self) -> dict[str, Any]:
        """What it says as JSON; nothing, if it is none."""
        try:
            content = json.loads(self.body)
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def code(self) -> str:
        """nsqd's word for an error."""
        return str(self.details().get("message") or self.body[:200].decode("utf-8", "replace").strip())


class Pipe:
    """One connection. Raises OSError for whatever happens to it, and is of no use after that."""

    def __init__(self, url: str, access: Access) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self.shown = without_secrets(url)
        self._head = _head(join_address(host, port), access.token_of(url), parts.username, parts.password)
        connection = socket.create_connection((host, port), CONNECT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if parts.scheme == "https":
                connection = access.context().wrap_socket(connection, server_hostname=host)
            connection.settimeout(access.timeout or None)
            self._replies: BinaryIO = connection.makefile("rb")
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def close(self) -> None:
        try:
            self._replies.close()
        finally:
            self._connection.close()

    def send(self, target: str, body: Sequence[Buffer]) -> None:
        size = sum(map(len, body))
        head = f"POST {target} HTTP/1.1\r\n{self._head}Content-Length: {size}\r\n\r\n"
        buffers: list[Buffer] = [head.encode(), *body]
        if isinstance(self._connection, ssl.SSLSocket):
            # It takes one buffer at a time, and each would be a record of its own.
            self._connection.sendall(b"".join(buffers))
            return
        sent = self._connection.sendmsg(buffers)
        for buffer in buffers:
            if sent < len(buffer):
                self._connection.sendall(memoryview(buffer)[sent:])
                sent = 0
            else:
                sent -= len(buffer)

    def receive(self) -> Reply:
        """The answer to the oldest request that has none yet."""
        try:
            status = self._status()
            while status == 100:
                self._headers()
                status = self._status()
            length = self._headers()
            body = self._replies.read(length)
        except ValueError as error:
            raise OSError(f"not an answer of nsqd: {error}") from error
        if len(body) != length:
            raise ConnectionResetError("the answer is cut off")
        return Reply(status, body)

    def _status(self) -> int:
        line = self._replies.readline(MAX_LINE)
        if not line:
            raise ConnectionResetError("the connection was closed")
        version, _, rest = line.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not line.endswith(b"\n"):
            raise ValueError(repr(line[:50]))
        return int(rest[:3])

    def _headers(self) -> int:
        """Bytes of the body that follows."""
        length = 0
        while (line := self._replies.readline(MAX_LINE)) not in (b"\r\n", b"\n"):
            if not line.endswith(b"\n"):
                raise ConnectionResetError("the answer is cut off")
            name, _, value = line.partition(b":")
            match name.strip().lower():
                case b"content-length":
                    length = int(value)
                    if not 0 <= length <= MAX_REPLY:
                        raise ValueError(f"{length} bytes")
                case b"transfer-encoding":
                    # Neither nsqd does that where it answers a publish.
                    raise ValueError("an answer in chunks")
        return length


def _head(host: str, token: str | None, user: str | None, password: str | None) -> str:
    lines = [
        f"Host: {host}",
        "Accept: application/vnd.nsq; version=1.0",
        f"User-Agent: nsparq-spark/{__version__}",
        "Content-Type: application/octet-stream",
    ]
    if user is not None:
        login = f"{unquote(user)}:{unquote(password or '')}"
        lines.append(f"Authorization: Basic {base64.b64encode(login.encode()).decode()}")
    elif token:
        lines.append(f"Authorization: Bearer {token}")
    if any("\n" in line or "\r" in line for line in lines):
        raise ValueError("a line break in an address or a token")
    return "".join(f"{line}\r\n" for line in lines)
