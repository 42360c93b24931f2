"""Pipelined requests: what is sent, and what counts as an answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nsparq.spark.cluster.http_client import Access, Answer
from nsparq.spark.sink.pipe import Pipe
from tests.support.polling import DEADLINE

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"


class Scripted:
    """Says what it is told to, whatever it hears, and ends the connection."""

    def __init__(self, answer: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self.heard = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.port = self._listener.getsockname()[1]

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.sendall(self._answer)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                self.heard += piece

    def close(self) -> None:
        self._thread.join(DEADLINE)
        self._listener.close()


@contextmanager
def pipe_to(answer: bytes, user: str = "", access: Access | None = None) -> Iterator[tuple[Pipe, Scripted]]:
    server = Scripted(answer)
    pipe = Pipe(f"http://{user}127.0.0.1:{server.port}", access or Access(timeout=DEADLINE))
    try:
        yield pipe, server
    finally:
        pipe.close()
        server.close()


def test_answers_come_in_the_order_of_the_requests() -> None:
    refusal = b'HTTP/1.1 413 x\r\ncontent-length: 23\r\nX: y\r\n\r\n{"message":"TOO_BIG!!"}'
    with pipe_to(OK + refusal + OK) as (pipe, server):
        for body in (b"1", b"22", b"333"):
            pipe.send("/pub?topic=t", [body])
        assert pipe.receive() == Answer(200, b"OK")
        refused = pipe.receive()
        assert (refused.status, refused.code) == (413, "TOO_BIG!!")
        assert pipe.receive().status == 200
    heads = server.heard.split(b"POST /pub?topic=t HTTP/1.1\r\n")[1:]
    assert [head.rpartition(b"\r\n\r\n")[2] for head in heads] == [b"1", b"22", b"333"]
    assert b"\r\nContent-Length: 3\r\n\r\n" in heads[2]


def test_a_body_may_be_in_many_and_large_pieces() -> None:
    pieces = [memoryview(bytes([index]) * 100_000) for index in range(100)]
    with pipe_to(OK) as (pipe, server):
        pipe.send("/", [b"head", *pieces])
        pipe.receive()
    assert server.heard.partition(b"\r\n\r\n")[2] == b"head" + b"".join(pieces)


def test_a_server_that_wants_to_see_more_first_is_understood() -> None:
    with pipe_to(b"HTTP/1.1 100 Continue\r\n\r\n" + OK) as (pipe, _):
        pipe.send("/", [b"x"])
        assert pipe.receive().status == 200


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nOK",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nOK",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\nOK",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"\0\0\0\6\0\0\0\0OK",
        b"HTTP/1.1 200",
    ],
)
def test_an_invalid_answer_is_an_error_of_the_connection(answer: bytes) -> None:
    with pipe_to(answer) as (pipe, _):
        pipe.send("/", [b"x"])
        with pytest.raises(OSError):
            pipe.receive()


@pytest.mark.parametrize(
    ("user", "token", "expected"),
    [
        ("", None, None),
        ("", "secret", b"Bearer secret"),
        ("me:p%40ss@", "secret", b"Basic bWU6cEBzcw=="),
    ],
)
def test_requests_carry_the_credentials(user: str, token: str | None, expected: bytes | None) -> None:
    with pipe_to(OK, user, Access(token=token, timeout=DEADLINE)) as (pipe, server):
        assert pipe.shown == f"http://127.0.0.1:{server.port}"
        pipe.send("/", [b"x"])
        pipe.receive()
    lines = [line for line in server.heard.split(b"\r\n") if line.startswith(b"Authorization")]
    assert lines == ([] if expected is None else [b"Authorization: " + expected])


def test_a_line_break_in_a_token_never_becomes_a_header() -> None:
    with pytest.raises(ValueError, match="a line break"):
        Pipe("http://127.0.0.1:1", Access(token="a\r\nX: y"))
