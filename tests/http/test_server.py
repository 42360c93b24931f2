"""HTTP connections: order of responses, limits, closing, and a layer below."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from nsparq.errors import NsparqError
from nsparq.http import limits
from nsparq.http.api import LATER, Api, ApiError, Endpoint, Later, Request, Response
from nsparq.http.connection import HttpConnection
from nsparq.http.server import HttpServer
from tests.support import DEADLINE, Answer, encode_request
from tests.support.examples import examples

DEADLINE_S = 10
Scenario = Callable[[], Coroutine[Any, Any, None]]
Run = Callable[[Scenario], None]


@pytest.fixture
def run() -> Run:
    """On the daemons' event loop."""

    def bounded(scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await scenario()

        uvloop.run(main())

    return bounded


class Client:
    """A client that sends bytes and reads whole responses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *pieces: bytes) -> None:
        self.writer.write(b"".join(pieces))

    async def answer(self) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *fields = head.rstrip("\r\n").split("\r\n")
        _, status, reason = line.split(" ", 2)
        headers = [(name, value.strip()) for name, _, value in (field.partition(":") for field in fields)]
        answer = Answer(int(status), reason, headers, b"")
        if answer.status == 100:
            return answer
        return answer._replace(body=await self.reader.readexactly(int(answer.header("Content-Length") or 0)))

    async def ask(self, method: str, target: str, body: Any = None, **headers: str) -> Answer:
        self.send(encode_request(method, target, body, {k.replace("_", "-"): v for k, v in headers.items()}))
        return await self.answer()

    async def bodies(self, count: int) -> list[bytes]:
        return [(await self.answer()).body for _ in range(count)]

    async def ended(self) -> bool:
        """Wait for the end of the connection or for more bytes. True at the end."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionResetError:
            return True

    def half_close(self) -> None:
        self.writer.write_eof()

    def abort(self) -> None:
        """Reset the connection. After a plain close the client could still read."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def connected(address: Any) -> AsyncIterator[Client]:
    connecting = (
        asyncio.open_unix_connection(address)
        if isinstance(address, str)
        else asyncio.open_connection(*address)
    )
    reader, writer = await connecting
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def serving(server: HttpServer, address: Any = ("127.0.0.1", 0)) -> AsyncIterator[Any]:
    bound = await server.listen(address)
    try:
        yield bound
    finally:
        await server.close()
        await until(lambda: not server.connections)


@asynccontextmanager
async def conversation(server: HttpServer) -> AsyncIterator[Client]:
    async with serving(server) as address, connected(address) as client:
        yield client


async def until(fact: Callable[[], object]) -> None:
    """The scenario has the deadline."""
    while not fact():  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.001)


class Desk:
    """Handlers under the test's control, and a record of their requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.requests: list[Request] = []
        self.gate = asyncio.Event()
        self.cancelled = 0
        endpoints = [
            self.endpoint("/now", self.now),
            self.endpoint("/later", self.later),
            self.endpoint("/slow", self.slow),
            self.endpoint("/body", lambda request: request.body.decode("latin-1"), keeps_body=True),
            self.endpoint("/held", self.held, keeps_body=True),
            self.endpoint("/size", lambda request: len(request.body)),
            self.endpoint("/peer", lambda request: request.peer),
            self.endpoint("/secure", lambda request: type(request.secure).__name__),
            self.endpoint("/large", lambda _: Response(body=bytes(1 << 20))),
            self.endpoint("/headers", lambda request: {k.decode(): v.decode() for k, v in request.headers}),
            self.endpoint("/bug", self.bug),
            self.endpoint("/refused", self.refused),
            self.endpoint("/twice", self.twice),
            self.endpoint("/teapot", lambda _: Response(status=418, body=b"x", headers=(("A", "b\u2028"),))),
        ]
        self.api = Api(title="", version="", endpoints=endpoints)

    def endpoint(self, path: str, handler: Callable[[Request], Any], **more: Any) -> Endpoint:
        def noted(request: Request) -> Any:
            self.asked.append(path)
            self.requests.append(request)
            return handler(request)

        return Endpoint(method="POST", path=path, handler=noted, summary="", max_body=1 << 20, **more)

    def now(self, request: Request) -> str:
        return f"now{request.query}"

    def later(self, request: Request) -> Later:
        asyncio.get_running_loop().call_soon(request.answer, f"later{request.query}")
        return LATER

    async def slow(self, request: Request) -> str:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return f"slow{request.query}"

    def held(self, request: Request) -> Later:
        """The test answers it."""
        return LATER

    def bug(self, request: Request) -> str:
        raise RuntimeError("secret detail")

    async def refused(self, request: Request) -> str:
        raise ApiError(409, "BUSY", (("Retry-After", "1"),), wait=1)

    def twice(self, request: Request) -> Later:
        loop = asyncio.get_running_loop()
        loop.call_soon(request.answer, "once")
        loop.call_later(0.02, request.answer, "twice")
        return LATER


def post(path: str, body: Any = b"", **headers: str) -> bytes:
    return encode_request("POST", path, body, headers)


# Order


def test_pipelined_requests_are_answered_in_order(run: Run) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with conversation(HttpServer(desk.api)) as client:
            kinds = ["slow", "now", "later", "slow", "later", "now", "nope"]
            client.send(*(post(f"/{kind}?{number}") for number, kind in enumerate(kinds)))
            await until(lambda: desk.asked)
            assert desk.asked == ["/slow"], "the others wait for the first"
            desk.gate.set()
            found = await client.bodies(len(kinds))
            assert found[:-1] == [f"{kind}{number}".encode() for number, kind in enumerate(kinds[:-1])]
            assert found[-1] == b'{"message":"NOT_FOUND"}'
            assert (await client.ask("POST", "/now?z")).body == b"nowz"

    run(scenario)


def test_a_long_pipeline_does_not_block_others_and_keeps_its_order(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PUMP_S", 1e-5)
    monkeypatch.setattr(limits, "MAX_QUEUED", 10_000)

    async def scenario() -> None:
        desk = Desk()
        async with serving(HttpServer(desk.api)) as address:
            async with connected(address) as busy, connected(address) as other:
                count = 500
                busy.send(*(post(f"/now?{number}") for number in range(count)))
                await until(lambda: desk.asked)
                await other.ask("POST", "/teapot")
                assert desk.asked.index("/teapot") < count
                assert await busy.bodies(count) == [b"now%d" % number for number in range(count)]

    run(scenario)


@pytest.mark.parametrize("kind", ["now", "later", "slow"])
def test_a_client_that_has_closed_its_side_gets_all_its_responses(run: Run, kind: str) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with conversation(HttpServer(desk.api)) as client:
            client.send(*(post(f"/{kind}?{number}") for number in range(5)))
            client.half_close()
            await until(lambda: desk.asked)
            await asyncio.sleep(0.01)
            desk.gate.set()
            answers = [await client.answer() for _ in range(5)]
            assert [answer.body for answer in answers] == [b"%b%d" % (kind.encode(), n) for n in range(5)]
            assert await client.ended()

    run(scenario)


@pytest.mark.parametrize("kind", ["now", "later", "slow"])
def test_an_error_comes_after_the_responses_to_earlier_requests(run: Run, kind: str) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with conversation(HttpServer(desk.api)) as client:
            client.send(
                *(post(f"/{kind}?{number}") for number in range(3)), b"nonsense\r\n\r\n", post("/now?x")
            )
            await until(lambda: desk.asked)
            desk.gate.set()
            assert await client.bodies(3) == [b"%b%d" % (kind.encode(), n) for n in range(3)]
            refusal = await client.answer()
            assert (refusal.status, refusal.says_close) == (400, True)
            assert await client.ended()
            assert "/now" not in desk.asked[3:], "nothing is looked at behind it"

    run(scenario)


def test_requests_after_the_last_one_of_a_connection_are_ignored(run: Run) -> None:
    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        async with conversation(server) as client:
            client.send(post("/later?1"), post("/later?2", Connection="close"), post("/now?3", b"abc"))
            first, second = await client.answer(), await client.answer()
            assert (first.body, first.says_close) == (b"later1", False)
            assert (second.body, second.says_close) == (b"later2", True)
            assert await client.ended()
            assert desk.asked == ["/later", "/later"] and server.gathered == 0

    run(scenario)


def test_a_second_answer_is_not_used_for_the_next_request(run: Run) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with conversation(HttpServer(desk.api)) as client:
            client.send(post("/twice"), post("/slow?1"))
            assert (await client.answer()).body == b"once"
            await asyncio.sleep(0.04)
            desk.gate.set()
            assert (await client.answer()).body == b"slow1"

    run(scenario)


# Handlers that fail


def test_a_bug_is_logged_and_not_shown_to_the_client(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with conversation(HttpServer(Desk().api)) as client:
            answer = await client.ask("POST", "/bug?topic=t")
            answer.expect_error(500, "INTERNAL_ERROR")
            assert not answer.says_close
            assert (await client.ask("POST", "/now")).status == 200

    run(scenario)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == "POST /bug failed"
    assert record.exc_info is not None and "secret detail" in str(record.exc_info[1])


def test_an_api_error_has_its_headers_and_further_keys(run: Run) -> None:
    async def scenario() -> None:
        async with conversation(HttpServer(Desk().api)) as client:
            answer = await client.ask("POST", "/refused")
            assert (answer.status, answer.json()) == (409, {"message": "BUSY", "wait": 1})
            assert answer.header("Retry-After") == "1"

    run(scenario)


def test_a_handler_is_cancelled_when_its_client_disconnects(run: Run) -> None:
    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        async with serving(server) as address:
            async with connected(address) as client:
                client.send(post("/slow"), post("/now"))
                await until(lambda: desk.asked)
                client.abort()
                await until(lambda: desk.cancelled)
            await until(lambda: not server.connections)
            assert desk.asked == ["/slow"]
            # A late answer does no harm.
            async with connected(address) as client:
                client.send(post("/held", b"x" * 1000))
                await until(lambda: "/held" in desk.asked)
                client.abort()
            await until(lambda: not server.connections)
            assert server.gathered == 0
            desk.requests[-1].answer("too late")
            desk.requests[-1].answer(RuntimeError("too late"))
            assert server.gathered == 0

    run(scenario)


# Limits on memory


def test_a_client_with_too_many_queued_requests_is_not_read_from(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED", 4)
    one = post("/now?x", X="y" * 1000)
    count = 5_000

    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        async with conversation(server) as client:
            client.send(post("/slow?"), one * count)
            await until(lambda: server.connections)
            (connection,) = server.connections
            await until(lambda: not connection._is_reading)
            # One read may exceed the limit. The rest stays with the sender.
            assert 4 <= len(connection._queue) <= 4 + (256 << 10) // len(one)
            desk.gate.set()
            assert await client.bodies(1 + count) == [b"slow", *[b"nowx"] * count]

    run(scenario)


def test_a_client_with_too_many_queued_bytes_is_not_read_from(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_BYTES", 100_000)
    body = b"x" * 60_000
    count = 100

    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        async with conversation(server) as client:
            client.send(post("/slow?"), post("/body", body) * count)
            await until(lambda: server.connections)
            (connection,) = server.connections
            await until(lambda: not connection._is_reading)
            assert server.gathered <= 100_000 + (256 << 10) + len(body)
            desk.gate.set()
            assert await client.bodies(1 + count) == [b"slow", *[body] * count]
            assert server.gathered == connection._queued_bytes == 0

    run(scenario)


def test_every_gathered_byte_is_released_again(run: Run) -> None:
    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        part = post("/body", b"x" * 5000)[:-2000]
        async with serving(server) as address:
            ways: list[Callable[[Client], None]] = [Client.abort, Client.half_close]
            for leave in ways:
                # In the middle of a body, while one request is handled and others are queued.
                async with connected(address) as client:
                    client.send(part)
                    await until(lambda: server.gathered == 3000)
                    leave(client)
                    await until(lambda: server.gathered == 0)
                async with connected(address) as client:
                    desk.requests.clear()
                    client.send(post("/held", b"x" * 1000), post("/held", b"y" * 100), part)
                    await until(lambda: desk.requests and server.gathered == 4100)
                    client.abort()
                    await until(lambda: server.gathered == 0)
            async with connected(address) as client:
                client.send(post("/body", [b"x" * 1000, b"y" * 1000]))
                assert len((await client.answer()).body) == 2000
                assert server.gathered == 0
                # These bodies are dropped.
                for path in ("/size", "/nope", "/now"):
                    client.send(post(path, b"x" * 5000)[:-1])
                    await asyncio.sleep(0.01)
                    assert server.gathered == 0
                    client.send(b"x")
                    await client.answer()
                # Too long, but without a declared length.
                client.send(post("/body", [b"x" * 700_000, b"y" * 700_000]))
                (await client.answer()).expect_error(413, "BODY_TOO_BIG")
                assert server.gathered == 0
        assert server.gathered == 0

    run(scenario)


def test_bodies_above_the_total_limit_are_refused_and_others_are_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_GATHERED", 10_000)

    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        async with serving(server) as address:
            async with connected(address) as first, connected(address) as second, connected(address) as third:
                first.send(post("/body", b"x" * 9_000)[:-1])
                await until(lambda: server.gathered == 8_999)
                # With and without a declared length.
                for body in (b"y" * 2_000, [b"y" * 2_000]):
                    async with connected(address) as refused:
                        answer = await refused.ask("POST", "/body", body)
                        answer.expect_error(503, "OVERLOADED")
                        assert answer.says_close
                assert (await second.ask("POST", "/body", b"z" * 500)).status == 200
                assert (await third.ask("POST", "/size", b"z" * 5_000)).body == b"0"
                assert (await third.ask("POST", "/now")).status == 200
                first.send(b"x")
                assert len((await first.answer()).body) == 9_000
                assert (await second.ask("POST", "/body", b"y" * 2_000)).status == 200

    run(scenario)


def test_while_too_many_responses_are_unread_requests_get_503(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD", 4 << 20)
    monkeypatch.setattr(limits, "MAX_QUEUED", 1000)
    count = 32

    async def scenario() -> None:
        server = HttpServer(Desk().api)
        async with serving(server) as address, connected(address) as other:
            readers = [await asyncio.open_connection(*address, limit=1) for _ in range(16)]
            for _, writer in readers:
                writer.write(post("/large") * count)
            await until(lambda: server.is_overloaded)
            (await other.ask("POST", "/now")).expect_error(503, "OVERLOADED")
            assert sum(connection.unread for connection in server.slow) < 16 * (3 << 20)
            for _, writer in readers:
                writer.transport.abort()
            await until(lambda: not server.slow)
            assert (await other.ask("POST", "/now")).status == 200
            for _, writer in readers:
                with suppress(ConnectionError):
                    await writer.wait_closed()

    run(scenario)


def test_a_slow_reader_gets_everything(run: Run) -> None:
    async def scenario() -> None:
        server = HttpServer(Desk().api)
        async with conversation(server) as client:
            client.send(post("/large") * 20)
            await until(lambda: server.slow)
            assert {len(body) for body in await client.bodies(20)} == {1 << 20}
            assert not server.slow

    run(scenario)


# Time


def test_a_handler_may_take_longer_than_a_client_may(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_S", "BODY_S", "IDLE_S"):
        monkeypatch.setattr(limits, name, 0.2)
    monkeypatch.setattr(limits, "SWEEP_S", 0.02)

    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        async with serving(server) as address:
            async with connected(address) as client, connected(address) as idle:
                client.send(post("/slow?"))
                await until(lambda: desk.asked)
                assert await idle.ended()
                await asyncio.sleep(0.3)
                desk.gate.set()
                assert (await client.answer()).body == b"slow"
                assert await client.ended()

    run(scenario)


def test_the_sweeper_stops_while_there_are_no_connections(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SWEEP_S", 0.01)

    async def scenario() -> None:
        server = HttpServer(Desk().api)
        async with serving(server) as address:
            for _ in range(2):
                assert server._sweeper is None
                async with connected(address) as client:
                    await client.ask("POST", "/now")
                    assert server._sweeper is not None
                await until(lambda: server._sweeper is None)

    run(scenario)


# Bytes on the wire


@pytest.mark.parametrize("body", [b"hello", [b"he", b"", b"llo"][::2], [b"h", b"e", b"l", b"l", b"o"]])
def test_a_body_may_arrive_in_any_pieces(run: Run, body: Any) -> None:
    async def scenario() -> None:
        async with conversation(HttpServer(Desk().api)) as client:
            assert (await client.ask("POST", "/body", body)).body == b"hello"
            for byte in post("/body", body):
                client.send(bytes([byte]))
                await asyncio.sleep(0)
            assert (await client.answer()).body == b"hello"

    run(scenario)


def test_a_response_has_a_status_a_date_and_its_length(run: Run) -> None:
    async def scenario() -> None:
        async with conversation(HttpServer(Desk().api)) as client:
            answer = await client.ask("POST", "/teapot")
            assert (answer.status, answer.reason, answer.body) == (418, "I'm a Teapot", b"x")
            assert answer.header("A") == "b?", "what no header can hold"
            assert answer.header("Content-Type") is None
            assert (answer.header("Date") or "").endswith(" GMT")

    run(scenario)


def test_trailers_are_ignored(run: Run) -> None:
    async def scenario() -> None:
        async with conversation(HttpServer(Desk().api)) as client:
            head = b"POST /headers HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.send(head, b"1\r\nx\r\n0\r\nAuthorization: Bearer s\r\n\r\n")
            answer = await client.answer()
            assert answer.json() == {"Host": "h", "Transfer-Encoding": "chunked"}
            # The next request has no trailers.
            assert (await client.ask("POST", "/headers")).json() == {"Host": "test", "Content-Length": "0"}

    run(scenario)


def test_expect_continue_is_answered_only_if_the_body_is_wanted(run: Run) -> None:
    expect = {"Expect": "100-continue"}

    def head(path: str, length: int = 5) -> bytes:
        return encode_request("POST", path, None, {"Content-Length": str(length), **expect})

    async def scenario() -> None:
        desk = Desk()
        async with serving(HttpServer(desk.api)) as address:
            async with connected(address) as client:
                client.send(head("/body"))
                assert (await client.answer()).status == 100
                client.send(b"hello")
                assert (await client.answer()).body == b"hello"
                # A pending response goes first.
                client.send(post("/slow?"), head("/body"))
                await until(lambda: "/slow" in desk.asked)
                desk.gate.set()
                assert (await client.answer()).body == b"slow"
                client.send(b"hello")
                assert (await client.answer()).body == b"hello"
            for path, length, status in (("/nope", 5, 404), ("/body", 2 << 20, 413)):
                async with connected(address) as client:
                    client.send(head(path, length), b"hello" if status == 404 else b"")
                    assert (await client.answer()).status == status

    run(scenario)


# Known heads


def test_a_request_with_a_known_head_has_its_own_body(run: Run) -> None:
    """Only the head is the same: body, connection and time differ."""

    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        async with serving(server) as address:
            for _ in range(2):
                async with connected(address) as client:
                    for body in (b"hello", b"again", b"third"):
                        assert (await client.ask("POST", "/body", body)).body == body
                    assert (await client.ask("POST", "/body", b"longer body")).body == b"longer body"
                    assert (await client.ask("POST", "/size", b"hello")).body == b"0"
                    assert server.gathered == 0
            assert len(server.heads) == 3
            async with connected(address) as client:
                # In any pieces, several at once, or with blank lines before it.
                one = post("/body", b"hello")
                for cut in range(1, len(one)):
                    client.send(one[:cut])
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    client.send(one[cut:])
                    assert (await client.answer()).body == b"hello"
                client.send(one, post("/body", b"again"), one[:-1])
                assert await client.bodies(2) == [b"hello", b"again"]
                client.send(b"o", b"\r\n\r\n", one)
                assert await client.bodies(2) == [b"hello", b"hello"]
                # Behind a slow one, too.
                client.send(post("/slow?"))
                await until(lambda: "/slow" in desk.asked)
                for _ in range(3):
                    client.send(one)
                    await asyncio.sleep(0.001)
                assert server.gathered == 15
                desk.gate.set()
                assert await client.bodies(4) == [b"slow", *[b"hello"] * 3]
                assert server.gathered == 0

    run(scenario)


@pytest.mark.parametrize(
    "request_bytes",
    [
        post("/body", b"hello", Connection="close"),
        post("/body", b"hello", Expect="100-continue"),
        post("/body", [b"hello"]),
        post("/body", b"hello", X="y" * 2000),
        post("/nope", b"hello"),
        post("/body", b"hello").replace(b"HTTP/1.1", b"HTTP/1.0"),
        encode_request("GET", "/body", b"hello"),
        encode_request("OPTIONS", "/body"),
        b"nonsense\r\n\r\n",
    ],
    ids=lambda data: repr(data[:30]),
)
def test_only_plain_heads_are_remembered(run: Run, request_bytes: bytes) -> None:
    async def scenario() -> None:
        server = HttpServer(Desk().api)
        async with serving(server) as address:
            found = []
            for _ in range(2):
                async with connected(address) as client:
                    client.send(request_bytes)
                    answer = await client.answer()
                    while answer.status == 100:
                        answer = await client.answer()
                    found.append((answer.status, answer.body))
            assert found[0] == found[1] and not server.heads

    run(scenario)


def test_the_number_of_remembered_heads_is_limited(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HEADS", 10)

    async def scenario() -> None:
        server = HttpServer(Desk().api)
        async with conversation(server) as client:
            for i in range(35):
                assert (await client.ask("POST", f"/now?{i}")).body == b"now%d" % i
                assert len(server.heads) <= 10

    run(scenario)


def test_refuse_all_also_refuses_requests_with_known_heads(run: Run) -> None:
    async def scenario() -> None:
        server = HttpServer(Desk().api)
        async with conversation(server) as client:
            for _ in range(2):
                assert (await client.ask("POST", "/now")).status == 200
            server.refuse_all = Response(status=403)
            assert (await client.ask("POST", "/now")).status == 403
            server.refuse_all = None
            assert (await client.ask("POST", "/now")).status == 200

    run(scenario)


def test_the_guard_checks_every_request(run: Run) -> None:
    allowed = {"Authorization": "Bearer yes"}
    known = {b"Bearer yes"}

    def guard(request: Request, endpoint: Endpoint) -> None:
        if request.header("Authorization").encode() not in known:
            raise ApiError(403, "NO")

    async def scenario() -> None:
        desk = Desk()
        desk.api.guard = guard
        async with conversation(HttpServer(desk.api)) as client:
            for _ in range(2):
                assert (await client.ask("POST", "/now", **allowed)).status == 200
                assert (await client.ask("POST", "/now")).status == 403
            known.clear()
            assert (await client.ask("POST", "/now", **allowed)).status == 403

    run(scenario)


REQUESTS = [
    post("/body", b"hello"),
    post("/body", b"\r\n\r\n!"),
    post("/body", b""),
    post("/body", [b"he", b"llo"]),
    post("/later?a=1"),
    post("/size", b"hello"),
    post("/nope", b"hello"),
    post("/body", b"POST /body HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\nhello"),
    encode_request("GET", "/now"),
    b"\r\n" + post("/now"),
    post("/body", b"hello").replace(b"\r\n", b"\n"),
    post("/body", b"hello").replace(b"Content-Length", b"content-length"),
    post("/body", b"hello").replace(b"Content-Length: 5", b"Content-Length: 05"),
]


@settings(max_examples=examples(60))
@given(
    wanted=st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
)
def test_requests_are_answered_the_same_with_and_without_known_heads(
    wanted: list[bytes], cuts: list[int]
) -> None:
    """For any bytes in any pieces, the responses equal those of a server without memory."""
    stream = b"".join(wanted)
    places = sorted({0, *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in zip(places, [*places[1:], len(stream)], strict=True)]

    async def answers(*, remembers: bool) -> list[bytes]:
        server = HttpServer(Desk().api)
        server._loop = asyncio.get_running_loop()
        found = b""
        for round_ in range(2):
            transport = RecordingTransport()
            connection = HttpConnection(server)
            connection.connection_made(transport)
            for piece in wanted if round_ == 0 else pieces:
                if not remembers:
                    server.heads.clear()
                connection.data_received(piece)
                for _ in range(4):
                    await asyncio.sleep(0)
            for _ in range(4 * len(wanted)):
                await asyncio.sleep(0)
            connection.connection_lost(None)
            found += b"--" + transport.written
        await server.close()
        assert server.gathered == 0
        return [line for line in found.split(b"\r\n") if not line.startswith(b"Date: ")]

    assert asyncio.run(answers(remembers=True)) == asyncio.run(answers(remembers=False))


class RecordingTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def write_eof(self) -> None:
        self.written += b"<end>"

    abort = close
    pause_reading = resume_reading = lambda self: None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


# Upgrade offers


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_upgrade_offer_is_ignored(run: Run, protocol: str) -> None:
    """Some clients offer an upgrade with the first request of each connection."""
    offer = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": protocol,
        "HTTP2-Settings": "AAEAAEAAAAIAAAAA",
    }

    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        async with conversation(server) as client:
            for body in (b"hello", [b"he", b"llo"], b""):
                whole = encode_request("POST", "/body", body, offer)
                for cut in (0, len(whole) // 2, len(whole) - 2):
                    client.send(whole[:cut])
                    await asyncio.sleep(0)
                    client.send(whole[cut:])
                    assert (await client.answer()).body == (b"hello" if body else b"")
            client.send(encode_request("POST", "/body", b"one", offer), post("/body", b"two"))
            assert await client.bodies(2) == [b"one", b"two"]
            (await client.ask("GET", "/body")).expect_error(405, "METHOD_NOT_ALLOWED")
            client.send(encode_request("POST", "/body", b"x" * (2 << 20), offer))
            (await client.answer()).expect_error(413, "BODY_TOO_BIG")
            assert server.gathered == 0

    run(scenario)


def test_connect_is_refused(run: Run) -> None:
    async def scenario() -> None:
        async with conversation(HttpServer(Desk().api)) as client:
            client.send(b"CONNECT example.com:80 HTTP/1.1\r\nHost: h\r\n\r\n", post("/now"))
            assert (await client.answer()).status in (400, 404, 405)
            assert await client.ended()

    run(scenario)


def test_the_peer_is_the_host_without_the_port(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        for address, peer in ((("127.0.0.1", 0), b"127.0.0.1"), (str(tmp_path / "http.sock"), b"")):
            async with serving(HttpServer(Desk().api), address) as bound, connected(bound) as client:
                assert (await client.ask("POST", "/peer")).body == peer

    run(scenario)


def test_refuse_all_answers_every_request(run: Run) -> None:
    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api, refuse_all=Response(status=403, body=b"no"))
        async with conversation(server) as client:
            for path in ("/now", "/body", "/nope"):
                assert (await client.ask("POST", path, b"body")).status == 403
            assert not desk.asked and server.gathered == 0
            server.refuse_all = None
            assert (await client.ask("POST", "/body", b"body")).body == b"body"

    run(scenario)


# Closing


def test_requests_under_way_are_answered_before_the_server_closes(run: Run) -> None:
    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        address = await server.listen(("127.0.0.1", 0))
        async with connected(address) as busy, connected(address) as idle, connected(address) as half:
            busy.send(post("/slow?1"), post("/now?2"))
            half.send(post("/body", b"hello")[:-1])
            await idle.ask("POST", "/now")
            await until(lambda: "/slow" in desk.asked and server.gathered == 4)
            closing = asyncio.ensure_future(server.close())
            assert await idle.ended() and await half.ended()
            with pytest.raises(OSError):
                await asyncio.open_connection(*address)
            assert not closing.done()
            busy.send(post("/now?3"))
            await asyncio.sleep(0.01)
            desk.gate.set()
            assert await busy.bodies(2) == [b"slow1", b"now2"]
            assert await busy.ended()
            await closing
            assert not server.connections and server.gathered == 0
            await server.close()

    run(scenario)


def test_closing_does_not_wait_for_ever(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DRAIN_S", 0.05)

    async def scenario() -> None:
        desk = Desk()
        server = HttpServer(desk.api)
        address = await server.listen(("127.0.0.1", 0))
        async with connected(address) as stuck:
            stuck.send(post("/slow"), post("/now"))
            await until(lambda: desk.asked)
            await server.close()
            assert await stuck.ended()
            await until(lambda: desk.cancelled and not server.connections)

    run(scenario)


def test_an_unused_server_closes_at_once(run: Run) -> None:
    async def scenario() -> None:
        await HttpServer(Desk().api).close()
        server = HttpServer(Desk().api)
        await server.listen(("127.0.0.1", 0))
        server.close_listener()
        server.close_listener()
        async with asyncio.timeout(DEADLINE):
            await server.close()

    run(scenario)


# A layer below HTTP


class LayerFailed(NsparqError):
    pass


class Mirror:
    """A layer that inverts every byte. Both sides begin with HELLO and end with BYE."""

    def __init__(self) -> None:
        self.is_ended = False
        self.is_closed = False
        self._greeting = b""
        self._output: list[bytes] = []

    @staticmethod
    def turn(data: bytes) -> bytes:
        return bytes(255 - byte for byte in data)

    def receive(self, data: bytes) -> Iterator[bytes]:
        if len(self._greeting) < 5:
            missing = 5 - len(self._greeting)
            self._greeting, data = self._greeting + data[:missing], data[missing:]
            if not b"HELLO".startswith(self._greeting):
                self._output.append(b"WHAT?")
                raise LayerFailed("no hello")
            if self._greeting == b"HELLO":
                self._output.append(b"HELLO")
        if data.endswith(b"\0BYE"):
            data, self.is_ended = data[:-4], True
        for start in range(0, len(data), 7):
            yield self.turn(data[start : start + 7])

    def send(self, data: bytes) -> bytes:
        return self.turn(data)

    def take_output(self) -> bytes:
        output, self._output = b"".join(self._output), []
        return output

    def close(self) -> None:
        self.is_closed = True
        self._output.append(b"BYE")


@asynccontextmanager
async def mirrored(desk: Desk) -> AsyncIterator[tuple[Client, list[Mirror], HttpServer]]:
    made: list[Mirror] = []

    def make() -> Mirror:
        made.append(Mirror())
        return made[-1]

    server = HttpServer(desk.api, layer=make)
    async with conversation(server) as client:
        yield client, made, server


async def plain(client: Client, size: int) -> bytes:
    return Mirror.turn(await client.reader.readexactly(size))


def test_everything_goes_through_the_layer(run: Run) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with mirrored(desk) as (client, made, _):
            client.send(b"HELLO")
            assert await client.reader.readexactly(5) == b"HELLO", "also what nobody has asked for"
            client.send(Mirror.turn(post("/later?1") + post("/slow?2") + post("/secure")))
            await until(lambda: "/slow" in desk.asked)
            desk.gate.set()
            found = b""
            while found.count(b"\r\n\r\n") < 3 or not found.endswith(b"Mirror"):
                found += Mirror.turn(await client.reader.read(1000))
            assert found.index(b"later1") < found.index(b"slow2") < found.index(b"Mirror")
            assert not made[0].is_closed

    run(scenario)


def test_the_layer_is_closed_when_the_connection_ends(run: Run) -> None:
    async def scenario() -> None:
        async with mirrored(Desk()) as (client, made, _):
            client.send(b"HELLO", Mirror.turn(post("/now?", Connection="close")))
            rest = await client.reader.read(-1)
            assert rest.startswith(b"HELLO") and rest.endswith(b"BYE")
            assert Mirror.turn(rest[5:-3]).endswith(b"now") and made[0].is_closed

    run(scenario)


@pytest.mark.parametrize("kind", ["now", "slow"])
def test_closing_the_layer_is_an_end_of_stream(run: Run, kind: str) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with mirrored(desk) as (client, _, server):
            client.send(b"HELLO", Mirror.turn(post(f"/{kind}?")) + b"\0BYE")
            await until(lambda: desk.asked)
            desk.gate.set()
            rest = await client.reader.read(-1)
            assert rest.startswith(b"HELLO") and rest.endswith(b"BYE")
            assert Mirror.turn(rest[5:-3]).endswith(kind.encode())
            await until(lambda: not server.connections)

    run(scenario)


def test_bytes_that_the_layer_cannot_decode_end_the_connection(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        desk = Desk()
        async with mirrored(desk) as (client, _, server):
            client.send(post("/now"))
            assert (await client.reader.read(-1)).startswith(b"WHAT?")
            await until(lambda: not server.connections)
            assert not desk.asked

    run(scenario)
    assert "HTTPS client(127.0.0.1): no hello" in caplog.text
