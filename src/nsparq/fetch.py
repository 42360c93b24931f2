"""A small blocking HTTP client for threads: one request, one response, and one deadline.

For requests to auth servers and nsqlookupds. Uses only the standard library. Follows no redirects,
because a request may contain a secret. The deadline does not limit the system's name lookup.
"""

from __future__ import annotations

import base64
import http.client
import io
import os
import re
import socket
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from nsparq.errors import NsparqError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["Answer", "FetchError", "fetch", "without_secrets"]

NO_LIMIT_S: Final = 60.0
"""The meaning of a timeout of 0: no request may occupy a thread for ever."""


class FetchError(NsparqError):
    """No response. The text has method, address and reason, but no query and no password."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]
    """By lower-case name. Values of the same name are joined with commas."""


def fetch(
    url: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Iterable[tuple[str, str]] = (),
    connect_timeout: float = 2.0,
    request_timeout: float = 5.0,
    ca_file: str = "",
    max_bytes: int = 1 << 20,
) -> Answer:
    """Send a request and read the whole response, whatever its status. Raises FetchError.

    `request_timeout` limits everything from connecting to the last byte. HTTPS certificates are
    checked with `ca_file`, or with the system's certificate authorities.
    """
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not an http or https address")
        default_port = 443 if parts.scheme == "https" else 80
        port = default_port if parts.port is None else parts.port
        connection = _Connection(parts.hostname, port)
        connection.default_port = default_port
        connection.deadline = time.monotonic() + (request_timeout or NO_LIMIT_S)
        connection.connect_timeout = connect_timeout or NO_LIMIT_S
        connection.context = _context(ca_file) if parts.scheme == "https" else None
        sent = dict(headers)
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            sent["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request(method, target, body, sent)
            response = connection.getresponse()
            try:
                content = _read(response, max_bytes)
            finally:
                response.close()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchError(f"{method} {shown}: {_reason(error)}") from error
    found: dict[str, str] = {}
    for name, value in response.getheaders():
        name = name.lower()
        found[name] = f"{found[name]}, {value}" if name in found else value
    return Answer(response.status, content, found)


def without_secrets(url: str) -> str:
    """The address for a log: without query, name and password."""
    return re.sub(r"//[^/]*@", "//", url.partition("?")[0])


def _read(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    too_big = ValueError(f"the response has more than {max_bytes} bytes")
    if response.length is not None and response.length > max_bytes:
        raise too_big
    content = response.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise too_big
    if response.length:
        raise ValueError("the response ended too early")
    return content


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        is_nsq = "E_BAD_PROTOCOL" in str(error)
        return "the answer is not HTTP" + ("; this is the port of NSQ's TCP protocol" if is_nsq else "")
    return str(error) or type(error).__name__


class _Connection(http.client.HTTPConnection):
    """All steps share one deadline."""

    deadline: float
    connect_timeout: float
    context: ssl.SSLContext | None

    def connect(self) -> None:
        connection = self._dial(min(self.deadline, time.monotonic() + self.connect_timeout))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.context is not None:
                connection.settimeout(_remaining(self.deadline))
                connection = self.context.wrap_socket(connection, server_hostname=self.host)
        except BaseException:
            connection.close()
            raise
        self.sock = _TimedSocket(connection, self.deadline)

    def _dial(self, deadline: float) -> socket.socket:
        """Try all addresses of the host in turn, before the deadline."""
        failure: OSError = TimeoutError()
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM
        ):
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(_remaining(deadline))
                connection.connect(address)
                return connection
            except OSError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
        raise failure


class _TimedSocket:
    """The socket methods that http.client uses. Each call ends at the deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._connection.settimeout(_remaining(self._deadline))
        self._connection.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._connection, self._deadline))

    def close(self) -> None:
        self._connection.close()


class _TimedReader(io.RawIOBase):
    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        # Keeps the connection open after http.client has closed its socket.
        self._raw = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        self._connection.settimeout(_remaining(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _context(ca_file: str) -> ssl.SSLContext:
    return _load_context(ca_file, os.stat(ca_file).st_mtime_ns if ca_file else 0)


@lru_cache(4)
def _load_context(ca_file: str, changed_ns: int) -> ssl.SSLContext:
    """Cached: loading the system's authorities takes milliseconds. Reads a changed file again."""
    return ssl.create_default_context(cafile=ca_file or None)
