"""Status over HTTP: probes and Prometheus ask programs that have no HTTP server otherwise."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from nsparq.addresses import split_address
from nsparq.errors import StartError
from nsparq.status_server import Answer, StatusServer, _Server
from tests.support.polling import DEADLINE


def answer(path: str) -> Answer:
    if path == "/broken":
        raise ZeroDivisionError
    if path == "/unreadable":
        raise PermissionError
    return Answer(200 if path == "/there" else 404, "text/plain", f"this is {path}".encode())


@pytest.fixture
def server() -> Iterator[StatusServer]:
    server = StatusServer(("127.0.0.1", 0), answer)
    yield server
    server.close()


def place_of(server: StatusServer) -> tuple[str, int]:
    place = split_address(server.address)
    assert place is not None
    return place


def ask(server: StatusServer, path: str, method: str = "GET") -> tuple[int, bytes, str | None]:
    connection = HTTPConnection(*place_of(server), timeout=DEADLINE)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read(), response.getheader("Content-Length")
    finally:
        connection.close()


def test_the_answer_depends_on_the_path_without_its_query(server: StatusServer) -> None:
    assert ask(server, "/there?at=once") == (200, b"this is /there", "14")
    assert ask(server, "/elsewhere") == (404, b"this is /elsewhere", "18")


def test_a_head_has_the_size_and_no_body(server: StatusServer) -> None:
    assert ask(server, "/there", "HEAD") == (200, b"", "14")


@pytest.mark.parametrize("path", ["/broken", "/unreadable"])
def test_an_error_of_ours_is_logged_and_answered(
    server: StatusServer, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with caplog.at_level(logging.ERROR):
        assert ask(server, path)[:2] == (500, b"internal error; see the log\n")
    assert "cannot answer a request for the status" in caplog.text
    assert ("ZeroDivisionError" if path == "/broken" else "PermissionError") in caplog.text


def test_a_client_that_has_gone_is_no_error(
    server: StatusServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = threading.Event()
    handle_error = _Server.handle_error

    def note(*arguments: Any) -> None:
        handle_error(*arguments)
        handled.set()

    monkeypatch.setattr(_Server, "handle_error", note)
    with caplog.at_level(logging.ERROR):
        with socket.create_connection(place_of(server)) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            gone.sendall(b"GET /there HTTP/1.0\r\n")
        assert handled.wait(DEADLINE)
    assert not caplog.text


def test_an_address_in_use_is_refused(server: StatusServer) -> None:
    with pytest.raises(StartError, match=f"cannot listen on {server.address}: Address already in use"):
        StatusServer(place_of(server), answer)


def test_nobody_listens_after_the_end() -> None:
    server = StatusServer(("127.0.0.1", 0), answer)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        ask(server, "/there")
