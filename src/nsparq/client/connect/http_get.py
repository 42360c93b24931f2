"""One HTTP GET on the event loop, for nsqlookupd. Not in a thread: a consumer that stops must not
have to wait for an nsqlookupd that does not answer."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import ssl
from collections.abc import Callable, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from nsparq.client.errors import reason_of
from nsparq.errors import NsparqError

__all__ = ["GetFailed", "get", "login_of"]

_PIECE: Final = 1 << 16
_BLANK_LINE: Final = b"\r\n\r\n"


class GetFailed(NsparqError):
    """No answer; the text says why."""


async def get(
    url: str,
    headers: Mapping[str, str],
    *,
    connect_timeout: float | None,
    request_timeout: float,
    max_bytes: int,
    make_context: Callable[[], ssl.SSLContext] = ssl.create_default_context,
) -> tuple[int, bytes]:
    """Status and body. `request_timeout` is for the whole request. Redirects are not followed: the
    request may carry a secret. Raises GetFailed."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(request_timeout):
            data = await _exchange(parts, _request(parts, headers), connect_timeout, max_bytes, make_context)
        return _parse(data)
    except TimeoutError as error:
        raise GetFailed("timed out") from error
    except OSError as error:
        raise GetFailed(reason_of(error)) from error
    except (HTTPException, ValueError, OverflowError) as error:
        raise GetFailed(str(error) or type(error).__name__) from error


def _request(parts: SplitResult, headers: Mapping[str, str]) -> bytes:
    sent = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close", **headers}
    if login := login_of(parts):
        sent["Authorization"] = login
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("line break in a header or URL")
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def login_of(parts: SplitResult) -> str:
    """The Authorization header for a user name and password in the URL; empty without them."""
    if parts.username is None:
        return ""
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(login.encode()).decode()


async def _exchange(
    parts: SplitResult,
    request: bytes,
    connect_timeout: float | None,
    max_bytes: int,
    make_context: Callable[[], ssl.SSLContext],
) -> bytes:
    """All bytes of the answer, head and body."""
    is_https = parts.scheme == "https"
    context = await asyncio.to_thread(make_context) if is_https else None
    async with asyncio.timeout(connect_timeout):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=context)
    try:
        writer.write(request)
        data = bytearray()
        head_end, end = -1, math.inf
        while len(data) < end and (piece := await reader.read(_PIECE)):
            searched = max(0, len(data) - len(_BLANK_LINE) + 1)
            data += piece
            if len(data) > max_bytes:
                raise ValueError(f"the answer has more than {max_bytes} bytes")
            if head_end < 0:
                head_end = data.find(_BLANK_LINE, searched)
                if head_end >= 0:
                    end = _end(data[:head_end])
        return bytes(data)
    finally:
        writer.transport.abort()


def _end(head: bytearray) -> float:
    """Length of the whole answer, from its Content-Length; infinite without one."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(head) + len(_BLANK_LINE) + int(line.partition(b":")[2])
    return math.inf


class _Source(io.BytesIO):
    """Looks like a socket to http.client."""

    def makefile(self, mode: str) -> io.BytesIO:
        return self


def _parse(data: bytes) -> tuple[int, bytes]:
    if not data:
        raise ValueError("closed without an answer")
    response = HTTPResponse(_Source(data))  # type: ignore[arg-type]  # it only reads a file from it
    try:
        response.begin()
        return response.status, response.read()
    finally:
        response.close()
