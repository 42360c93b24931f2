"""A raw HTTP/1.1 client: tests send bytes and read whole answers.

with HttpConnection(address) as connection:
                                    address: (host, port) or the path of a Unix socket
    connection.request("POST", "/pub?topic=t", b"body")
                                    -> Answer(status, reason, headers, body)
    connection.request("POST", "/pub?topic=t", [b"bo", b"dy"])
                                    a list of pieces is sent chunked
    connection.send(b"GET /ping HTTP/1.1\r\n")
                                    raw bytes, in any pieces
    connection.read_answer(), connection.expect_closed()

HttpConnection(address, tls=context) speaks TLS. Connections are kept alive by default. The client
shares no code with the package under test and corrects nothing. Every read has a deadline.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .connection import Address, ConnectionClosed, family_of, wait_readable
from .polling import DEADLINE

TEXT = "text/plain; charset=utf-8"
JSON = "application/json; charset=utf-8"
NSQ_HEADER = "nsq; version=1.0"


class Answer(NamedTuple):
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The value; None if the header is missing. A repeated header fails the test."""
        found = [value for known, value in self.headers if known.lower() == name.lower()]
        assert len(found) < 2, self.headers
        return found[0] if found else None

    def json(self) -> Any:
        assert self.header("Content-Type") == JSON, self
        return json.loads(self.body)

    def expect_error(self, status: int, code: str) -> None:
        """Exactly NSQ's JSON error, with its headers."""
        assert (self.status, self.body) == (status, b'{"message":"%b"}' % code.encode()), self
        assert self.header("Content-Type") == JSON
        assert self.header("X-NSQ-Content-Type") == NSQ_HEADER

    def expect_text(self, text: str) -> None:
        """Status 200 with exactly this text; an empty text has no Content-Type."""
        assert (self.status, self.body) == (200, text.encode()), self
        assert self.header("Content-Type") == (TEXT if text else None)
        assert self.body or self.header("Content-Length") == "0"
        assert self.header("X-NSQ-Content-Type") == NSQ_HEADER

    def expect_ok(self) -> None:
        self.expect_text("OK")

    def expect_empty(self) -> None:
        self.expect_text("")

    def expect_json(self) -> Any:
        """Status 200 with compact JSON; its value."""
        assert self.status == 200, self
        value = self.json()
        assert self.header("X-NSQ-Content-Type") == NSQ_HEADER
        assert not self.body.endswith(b"\n") and b'": ' not in self.body
        return value

    @property
    def says_close(self) -> bool:
        return (self.header("Connection") or "").lower() == "close"


def encode_request(
    method: str,
    target: str | bytes,
    body: bytes | Iterable[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """One request. Bytes are sent with Content-Length, a list of pieces is sent chunked. `headers`
    replace ours."""
    fields = {"Host": "test"}
    if isinstance(body, bytes):
        fields["Content-Length"] = str(len(body))
        content = body
    elif body is not None:
        fields["Transfer-Encoding"] = "chunked"
        content = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in body) + b"0\r\n\r\n"
    else:
        content = b""
        if method in ("POST", "PUT"):
            fields["Content-Length"] = "0"
    fields.update(headers or {})
    path = target if isinstance(target, bytes) else target.encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), path, lines.encode()) + content


class HttpConnection:
    """One blocking connection; see the module docstring."""

    def __init__(
        self,
        address: Address,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str = "localhost",
        timeout: float = DEADLINE,
    ) -> None:
        self.timeout = timeout
        self._input = bytearray()
        self.socket = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            self.socket.settimeout(timeout)
            self.socket.connect(address)
            if not isinstance(address, str):
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self.socket = tls.wrap_socket(self.socket, server_hostname=server_name)
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> HttpConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def abort(self) -> None:
        """Close with a reset, as a killed process may."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def end_of_stream(self) -> None:
        """Half close: the server sees the end of the stream, and we can still read its answers."""
        self.socket.shutdown(socket.SHUT_WR)

    # Sending

    def send(self, data: bytes) -> None:
        self.socket.settimeout(self.timeout)
        self.socket.sendall(data)

    def send_request(
        self,
        method: str,
        target: str | bytes,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.send(encode_request(method, target, body, headers))

    def request(
        self,
        method: str,
        target: str | bytes,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        self.send_request(method, target, body, headers)
        return self.read_answer(method=method)

    # Reading

    def read_answer(self, timeout: float | None = None, *, method: str = "GET") -> Answer:
        """The next answer, whole; 1xx ones are skipped. Raises TimeoutError or ConnectionClosed."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            head = self._take_until(b"\r\n\r\n", deadline).decode("latin-1")
            lines = head.split("\r\n")
            status_line = re.fullmatch(r"HTTP/1\.[01] (\d{3}) (.*)", lines[0])
            assert status_line, f"not a status line: {lines[0]!r}"
            status = int(status_line[1])
            if status >= 200:
                break
        headers = []
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            assert colon and re.fullmatch(r"[A-Za-z0-9-]+", name), f"not a header: {line!r}"
            headers.append((name, value.strip()))
        answer = Answer(status, status_line[2], headers, b"")
        if method == "HEAD" or status in (204, 304):
            return answer
        return answer._replace(body=self._read_body(answer, deadline))

    def _read_body(self, answer: Answer, deadline: float) -> bytes:
        length = answer.header("Content-Length")
        if answer.header("Transfer-Encoding") == "chunked":
            assert length is None, answer.headers
            parts = []
            while size := int(self._take_until(b"\r\n", deadline), 16):
                parts.append(self._take(size, deadline))
                assert self._take(2, deadline) == b"\r\n"
            assert self._take(2, deadline) == b"\r\n"
            return b"".join(parts)
        if length is not None:
            return self._take(int(length), deadline)
        assert answer.says_close, f"a body without an end: {answer.headers}"
        return self.read_to_end(max(0.0, deadline - time.monotonic()))

    def read_to_end(self, timeout: float | None = None) -> bytes:
        """All bytes until the server closes (or resets) the connection."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        try:
            while True:
                self._fill(len(self._input) + 1, deadline)
        except (ConnectionClosed, ConnectionResetError):
            found = bytes(self._input)
            self._input.clear()
            return found

    def expect_closed(self, timeout: float | None = None) -> None:
        """End of stream (or a reset) without another byte."""
        try:
            rest = self.read_to_end(timeout)
        except TimeoutError:
            raise AssertionError("the server kept the connection open") from None
        assert not rest, f"expected end of stream, got {rest[:200]!r}"

    def _take(self, count: int, deadline: float) -> bytes:
        self._fill(count, deadline)
        taken = bytes(self._input[:count])
        del self._input[:count]
        return taken

    def _take_until(self, end: bytes, deadline: float) -> bytes:
        """The bytes up to `end`, which is removed but not returned."""
        while (position := self._input.find(end)) < 0:
            self._fill(len(self._input) + 1, deadline)
        return self._take(position + len(end), deadline)[: -len(end)]

    def _fill(self, count: int, deadline: float) -> None:
        """Read at least `count` bytes of input. They are kept if the deadline passes."""
        while len(self._input) < count:
            remaining = max(0.0, deadline - time.monotonic())
            pending = isinstance(self.socket, ssl.SSLSocket) and self.socket.pending()
            if not pending and not wait_readable(self.socket, remaining):
                raise TimeoutError(f"waited for {count} bytes, have {bytes(self._input[:64])!r}")
            self.socket.settimeout(max(0.05, remaining))
            try:
                received = self.socket.recv(1 << 20)
            except ssl.SSLEOFError:  # the stream ended without close_notify
                received = b""
            if not received:
                raise ConnectionClosed(f"stream ended after {bytes(self._input[:200])!r}")
            self._input += received
