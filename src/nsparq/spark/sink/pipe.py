"""Pipelined POST requests to one nsqd: several are under way on one connection, answered in order.

The next request leaves before the last one is answered (HTTP/1.1 pipelining), so a task encodes
rows while nsqd works, and nsqd gets the requests in the order in which they were sent. A pipe never
sends a request again.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import BinaryIO, Final
from urllib.parse import urlsplit

from nsparq.addresses import join_address
from nsparq.fetch import without_secrets
from nsparq.spark.cluster.http_client import CONNECT_S, Access, Answer

__all__ = ["Buffer", "Pipe"]

MAX_LINE: Final = 64 << 10
MAX_BODY: Final = 1 << 20

Buffer = bytes | memoryview


class Pipe:
    """One connection. Raises OSError for any failure, and cannot be used after that."""

    def __init__(self, url: str, access: Access) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self.shown = without_secrets(url)
        self._head = _head({"Host": join_address(host, port), **access.headers(url)})
        connection = socket.create_connection((host, port), CONNECT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if parts.scheme == "https":
                connection = access.context().wrap_socket(connection, server_hostname=host)
            connection.settimeout(access.timeout or None)
            self._answers: BinaryIO = connection.makefile("rb")
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def close(self) -> None:
        try:
            self._answers.close()
        finally:
            self._connection.close()

    def send(self, target: str, body: Sequence[Buffer]) -> None:
        size = sum(map(len, body))
        head = f"POST {target} HTTP/1.1\r\n{self._head}Content-Length: {size}\r\n\r\n"
        buffers: list[Buffer] = [head.encode(), *body]
        if isinstance(self._connection, ssl.SSLSocket):
            # It takes one buffer at a time and would make a TLS record of each.
            self._connection.sendall(b"".join(buffers))
            return
        sent = self._connection.sendmsg(buffers)
        for buffer in buffers:
            if sent < len(buffer):
                self._connection.sendall(memoryview(buffer)[sent:])
                sent = 0
            else:
                sent -= len(buffer)

    def receive(self) -> Answer:
        """The answer to the oldest unanswered request."""
        try:
            status = self._status()
            while status == 100:
                self._headers()
                status = self._status()
            length = self._headers()
            body = self._answers.read(length)
        except ValueError as error:
            raise OSError(f"not an answer of nsqd: {error}") from error
        if len(body) != length:
            raise ConnectionResetError("the answer is cut off")
        return Answer(status, body)

    def _status(self) -> int:
        line = self._answers.readline(MAX_LINE)
        if not line:
            raise ConnectionResetError("the connection was closed")
        version, _, rest = line.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not line.endswith(b"\n"):
            raise ValueError(repr(line[:50]))
        return int(rest[:3])

    def _headers(self) -> int:
        """Reads the headers. Returns the length of the body."""
        length = 0
        while (line := self._answers.readline(MAX_LINE)) not in (b"\r\n", b"\n"):
            if not line.endswith(b"\n"):
                raise ConnectionResetError("the answer is cut off")
            name, _, value = line.partition(b":")
            match name.strip().lower():
                case b"content-length":
                    length = int(value)
                    if not 0 <= length <= MAX_BODY:
                        raise ValueError(f"{length} bytes")
                case b"transfer-encoding":
                    # No nsqd answers a publish in chunks.
                    raise ValueError("an answer in chunks")
        return length


def _head(headers: dict[str, str]) -> str:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if any("\n" in line or "\r" in line for line in lines):
        raise ValueError("a line break in an address or a token")
    return "".join(f"{line}\r\n" for line in (*lines, "Content-Type: application/octet-stream"))
