"""Requests to other daemons."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import uvloop

from nsparq.admin.collect import upstream as module
from nsparq.admin.collect.upstream import RequestFailed, TlsFiles, Upstream
from tests.support import DEADLINE
from tests.support.aio import run
from tests.support.certificates import certificates


@contextmanager
def mute_tls_server() -> Iterator[int]:
    """Accepts one connection, does the handshake, and says nothing more, not even at the end."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates().server.cert, certificates().server.key)
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE)

        def serve() -> None:
            accepted, _ = server.accept()
            accepted.settimeout(DEADLINE)
            # The client may end the connection before the handshake has ended here.
            with suppress(OSError), context.wrap_socket(accepted, server_side=True):
                is_over.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            is_over.set()
            thread.join()


def test_a_connection_that_is_cancelled_when_it_is_made_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop that closes with an open connection warns, and warnings are errors."""
    request: asyncio.Future[object]

    class Cancelled(module._Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            request.cancel()

    async def ask(port: int) -> None:
        nonlocal request
        upstream = Upstream(connect_timeout=60, request_timeout=60)
        upstream.use_tls(TlsFiles(ca_file=str(certificates().ca.cert)))
        request = asyncio.ensure_future(upstream.ask("GET", f"https://127.0.0.1:{port}/"))
        with pytest.raises(asyncio.CancelledError):
            await request
        await upstream.close()

    monkeypatch.setattr(module, "_Connection", Cancelled)
    with mute_tls_server() as port:
        uvloop.run(ask(port))


CUT = "the connection ended in the middle of the answer"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"HTTP/1.0 200 OK\r\nServer: small\r\n\r\n", (200, b"")),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall", (200, b"all")),
        (b"HTTP/1.0 200 OK\r\nServer: sm", CUT),
        (b"HTTP/1.1 100 Continue\r\n\r\n", CUT),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nall", CUT),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nall\r\n", CUT),
    ],
)
def test_an_answer_without_a_length_ends_with_its_connection(
    sent: bytes, expected: tuple[int, bytes] | str
) -> None:
    """Receivers of webhooks are often small: without a body and a length they answer like that."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        writer.close()

    async def main() -> None:
        upstream = Upstream(connect_timeout=DEADLINE, request_timeout=DEADLINE)
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            asking = upstream.exchange("POST", f"http://127.0.0.1:{port}/")
            if isinstance(expected, str):
                with pytest.raises(RequestFailed, match=expected):
                    await asking
            else:
                found = await asking
                assert (found.status, found.body) == expected
        await upstream.close()

    run(main())
