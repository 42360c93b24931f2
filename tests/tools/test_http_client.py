"""The HTTP client of nsq_to_http against a server that answers any bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nsparq.tools.http_client import MAX_BODY, HttpClient, RequestFailed, _encode, parse_target
from tests.support.polling import DEADLINE

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Test = Callable[["Server", HttpClient], Awaitable[None]]


class Server:
    """Answers the n-th request with the n-th of `answers`; None ends the connection before it."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.tasks: set[asyncio.Task[Any]] = set()
        self.stalls = False
        self.close_after = False

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
                if self.stalls:
                    await reader.read()
                if self.close_after:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def serve(test: Test, *answers: bytes | None, timeout: float = 5.0, **settings: Any) -> Server:
    server = Server(*answers)
    vars(server).update(settings)

    async def run() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.url = "http://127.0.0.1:{}".format(*listening.sockets[0].getsockname()[1:])  # type: ignore[attr-defined]
        client = HttpClient(1.0, timeout)
        try:
            await test(server, client)
        finally:
            await client.close()
            listening.close()
            await asyncio.wait(server.tasks, timeout=DEADLINE)

    asyncio.run(run())
    return server


async def ask(server: Any, client: HttpClient, body: bytes = b"body", **headers: str) -> int:
    return await client.request("POST", parse_target(server.url + "/path?x=1"), headers, body)


def test_a_request_has_the_given_method_headers_and_body() -> None:
    async def test(server: Any, client: HttpClient) -> None:
        assert await ask(server, client, User="me") == 200
        assert await client.request("GET", parse_target(server.url), {}) == 404

    server = serve(test, OK, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    host = server.url.removeprefix("http://")  # type: ignore[attr-defined]
    assert server.requests == [
        f"POST /path?x=1 HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\nUser: me\r\n\r\nbody".encode(),
        f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(),
    ]
    assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "status", "keeps"),
    [
        (OK, 200, True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, True),
        (b"HTTP/1.1 201 C\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0;x=y\r\nT: t\r\n\r\n", 201, True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", 200, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", 200, False),
        (b"HTTP/1.1 500 No\nContent-Length: 1\n\nx", 500, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nx" % (MAX_BODY + 1), 200, False),
        (b"HTTP/1.1 302 Found\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n", 302, True),
    ],
)
def test_only_the_status_counts_and_a_short_body_is_read(answer: bytes, status: int, keeps: bool) -> None:
    async def test(server: Any, client: HttpClient) -> None:
        assert await ask(server, client) == status
        assert await ask(server, client) == 200

    assert serve(test, answer, OK).connections == (1 if keeps else 2)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def test(server: Any, client: HttpClient) -> None:
        assert await ask(server, client) == 200
        assert await ask(server, client) == 200

    server = serve(test, b"HTTP/1.1 200 OK\r\n\r\nabc", OK, close_after=True)
    assert server.connections == 2


def test_an_idle_connection_that_the_server_closed_is_not_a_failure() -> None:
    async def test(server: Any, client: HttpClient) -> None:
        assert await ask(server, client) == 200
        assert await ask(server, client) == 200

    server = serve(test, OK, None, OK)
    assert (server.connections, len(server.requests)) == (2, 3)


def test_a_new_connection_that_ends_without_an_answer_is_a_failure() -> None:
    async def test(server: Any, client: HttpClient) -> None:
        with pytest.raises(RequestFailed):
            await ask(server, client)

    assert len(serve(test, None).requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Le",
    ],
    ids=["another protocol", "no status", "long header", "many headers", "bad chunk", "cut off"],
)
def test_an_invalid_answer_is_a_failure(answer: bytes) -> None:
    async def test(server: Any, client: HttpClient) -> None:
        with pytest.raises(RequestFailed):
            await ask(server, client)
        assert await ask(server, client) == 200

    assert serve(test, answer, OK, close_after=True).connections == 2


def test_a_body_that_is_cut_off_does_not_change_the_status() -> None:
    async def test(server: Any, client: HttpClient) -> None:
        assert await ask(server, client) == 200
        assert await ask(server, client) == 200

    assert (
        serve(test, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", OK, close_after=True).connections == 2
    )


def test_everything_ends_at_the_timeout() -> None:
    async def test(server: Any, client: HttpClient) -> None:
        with pytest.raises(RequestFailed, match="timed out"):
            await ask(server, client)

    serve(test, b"HTTP/1.1 200 OK\r\n", timeout=0.1, stalls=True)


def test_a_refused_connection_is_a_failure_with_its_reason() -> None:
    async def run() -> None:
        client = HttpClient(1.0, 1.0)
        with pytest.raises(RequestFailed, match=r"(?i)connect"):
            await client.request("GET", parse_target("http://127.0.0.1:1/"), {})
        await client.close()

    asyncio.run(run())


def test_parallel_requests_use_separate_connections_that_are_reused() -> None:
    async def test(server: Any, client: HttpClient) -> None:
        for _ in range(3):
            statuses = await asyncio.gather(*(ask(server, client) for _ in range(5)))
            assert statuses == [200] * 5

    assert serve(test, *[OK] * 15).connections == 5


def test_a_waiting_request_takes_the_first_free_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a short accept queue: one connection now, the others much later."""

    async def test(server: Any, client: HttpClient) -> None:
        connect, dialled = client._connect, 0

        async def accept_one(target: Any) -> Any:
            nonlocal dialled
            dialled += 1
            return await (connect(target) if dialled == 1 else asyncio.Event().wait())

        monkeypatch.setattr(client, "_connect", accept_one)
        assert await asyncio.gather(*(ask(server, client) for _ in range(100))) == [200] * 100
        assert (server.connections, dialled) == (1, 100)
        assert await ask(server, client) == 200

    server = serve(test, *[OK] * 101, timeout=DEADLINE)
    assert len(server.requests) == 101


def test_a_connection_that_comes_too_late_serves_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Any, client: HttpClient) -> None:
        connect, is_open = client._connect, asyncio.Event()
        dialled = 0

        async def open_later(target: Any) -> Any:
            nonlocal dialled
            dialled += 1
            if dialled > 1:
                await is_open.wait()
            return await connect(target)

        monkeypatch.setattr(client, "_connect", open_later)
        await asyncio.gather(ask(server, client), ask(server, client))
        assert server.connections == 1
        is_open.set()
        (pool,) = client._pools.values()
        await asyncio.wait([*pool._dialing], timeout=DEADLINE)
        await asyncio.sleep(0)
        assert len(pool.idle) == 2
        await asyncio.gather(ask(server, client), ask(server, client))
        assert (server.connections, dialled) == (2, 2)

    serve(test, *[OK] * 4)


def test_a_request_that_is_given_up_leaves_nothing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Any, client: HttpClient) -> None:
        monkeypatch.setattr(client, "_connect", lambda target: asyncio.Event().wait())
        given_up = asyncio.create_task(ask(server, client))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        monkeypatch.undo()
        assert await ask(server, client) == 200
        (pool,) = client._pools.values()
        assert (len(pool.idle), len(pool._waiting)) == (1, 0)

    serve(test, OK)


def test_a_name_and_password_in_the_address_are_sent_as_such() -> None:
    target = parse_target("https://me:p%40ss@[::1]:8443/a?b")
    assert (target.host, target.port, target.is_tls) == ("::1", 8443, True)
    assert (target.host_header, target.path) == ("[::1]:8443", "/a?b")
    assert target.authorization == "Basic bWU6cEBzcw=="
    assert parse_target("http://host").port == 80


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://host", "http://", "http://a b/", "http://a/\r\nX: y", "http://a:x/"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        parse_target(url)


def test_a_header_replaces_the_usual_one_in_any_case() -> None:
    """Servers refuse a request with two Host headers."""
    target = parse_target("http://user:word@one.example/")
    request = _encode("POST", target, {"host": "two.example", "AUTHORIZATION": "Bearer abc"}, b"x")
    names = [line.partition(b":")[0].lower() for line in request.split(b"\r\n")[1:-2]]
    assert sorted(names) == [b"authorization", b"content-length", b"host"]
    assert b"two.example" in request and b"Bearer abc" in request
