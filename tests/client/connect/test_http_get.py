"""One GET request on the event loop: all kinds of answers, and none."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nsparq.client.connect import http_get
from nsparq.client.connect.http_get import GetFailed, get
from tests.support.aio import run, until
from tests.support.certificates import certificates


class Server:
    """Sends the same answer to every request, in the given pieces, and records the requests."""

    def __init__(self, pieces: list[bytes], *, stays_open: bool) -> None:
        self.requests: list[bytes] = []
        self.url = ""
        self.ended_count = 0
        self._pieces, self._stays_open = pieces, stays_open

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            for piece in self._pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.005)
            if self._stays_open:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.ended_count += 1
            writer.transport.abort() if self._stays_open else writer.close()


@asynccontextmanager
async def server(
    *pieces: bytes, stays_open: bool = False, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    made = Server([*pieces], stays_open=stays_open)
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls) as listener:
        scheme = "https" if tls else "http"
        made.url = f"{scheme}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield made
        await until(lambda: made.ended_count == len(made.requests))


async def ask(url: str, headers: dict[str, str] | None = None, **options: Any) -> tuple[int, bytes]:
    limits = {"connect_timeout": 1.0, "request_timeout": 1.0, "max_bytes": 10_000}
    return await get(url, headers or {}, **{**limits, **options})


async def failure(url: str, **options: Any) -> str:
    with pytest.raises(GetFailed) as caught:
        await ask(url, **options)
    return str(caught.value)


ANSWERS = {
    "with a length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",),
    "with a length, in pieces": (b"HTTP/1.1 20", b"0 OK\r\nCONTENT-LENGTH:5\r", b"\n\r\nhel", b"lo"),
    "to the end of the connection": (b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo"),
    "in chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n",
        b"2\r\nlo\r\n0\r\n\r\n",
    ),
}


@pytest.mark.parametrize("pieces", ANSWERS.values(), ids=ANSWERS)
def test_the_body_is_found_however_its_end_is_told(pieces: tuple[bytes, ...]) -> None:
    async def main() -> None:
        async with server(*pieces) as one:
            assert await ask(f"{one.url}/lookup?topic=t") == (200, b"hello")
            assert one.requests[0].startswith(b"GET /lookup?topic=t HTTP/1.1\r\nHost: 127.0.0.1:")

    run(main())


def test_a_body_of_known_length_is_not_waited_for_any_longer() -> None:
    async def main() -> None:
        async with server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", stays_open=True) as one:
            assert await ask(one.url) == (200, b"ok")

    run(main())


@pytest.mark.parametrize("cut", range(1, 4))
def test_the_head_is_looked_for_in_each_byte_once(monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    """Also if its end comes in two pieces."""
    read_headers = http_get._end
    head, read = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", []

    def counted(data: bytearray) -> float:
        read.append(len(data))
        return read_headers(data)

    monkeypatch.setattr(http_get, "_end", counted)

    async def main() -> None:
        async with server(head[:-cut], head[-cut:], *[b"x" * 100] * 10) as one:
            assert await ask(one.url) == (200, b"x" * 1000)

    run(main())
    assert sum(read) <= len(head), "the body is not searched"


@pytest.mark.parametrize("status", [204, 301, 404, 500])
def test_any_status_is_an_answer(status: int) -> None:
    async def main() -> None:
        head = f"HTTP/1.1 {status} x\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
        async with server(head.encode()) as one:
            assert await ask(one.url) == (status, b"")
            assert len(one.requests) == 1

    run(main())


def test_headers_and_a_login_in_the_address_are_sent() -> None:
    async def main() -> None:
        async with server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as one:
            await ask(one.url.replace("//", "//me:p%40ss@"), {"Accept": "x", "Authorization": "Bearer no"})
            lines = one.requests[0].decode().split("\r\n")
            assert "Accept: x" in lines and "Connection: close" in lines
            assert [line for line in lines if line.startswith("Authorization")] == [
                "Authorization: Basic bWU6cEBzcw=="
            ]
            assert "@" not in lines[1]

    run(main())


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ((), "closed without an answer"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel",), "IncompleteRead"),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",), "IncompleteRead"),
        ((b"SSH-2.0\r\n\r\n",), "SSH-2.0"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",), "invalid literal"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % 10**30,), "index-sized integer"),
        (
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n",),
            "index-sized integer",
        ),
        ((b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 10_001,), "the answer has more than 10000 bytes"),
    ],
)
def test_an_invalid_answer_is_an_error(pieces: tuple[bytes, ...], text: str) -> None:
    async def main() -> None:
        async with server(*pieces) as one:
            assert text in await failure(one.url)

    run(main())


def test_silence_ends_with_the_request_timeout() -> None:
    async def main() -> None:
        async with server(b"HTTP/1.1 200 OK\r\n", stays_open=True) as one:
            assert await failure(one.url, request_timeout=0.1) == "timed out"

    run(main())


def test_a_cancelled_request_leaves_nothing_open() -> None:
    async def main() -> None:
        async with server(stays_open=True) as one:
            asking = asyncio.create_task(ask(one.url))
            await until(lambda: one.requests)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    run(main())


def test_a_refused_connection_is_a_failure() -> None:
    assert "Connection refused" in run(failure("http://127.0.0.1:1"))


def test_a_line_break_in_a_header_is_refused() -> None:
    async def main() -> None:
        async with server() as one:
            with pytest.raises(GetFailed, match="line break in a header or URL"):
                await ask(one.url, {"Authorization": "Bearer x\r\nHost: elsewhere"})
            assert one.requests == []

    run(main())


def test_https_is_checked() -> None:
    async def main() -> None:
        found = certificates()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(found.server.cert, found.server.key)
        async with server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", tls=tls) as one:
            assert "unable to get local issuer certificate" in await failure(one.url)
            assert await ask(one.url, make_context=found.client_context) == (200, b"ok")

    run(main())
