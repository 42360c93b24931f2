"""The blocking HTTP client: complete answers or a clear error, within the time limit."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsparq.fetch import Answer, FetchError, fetch, without_secrets
from tests.support.auth_server import AuthServer, unused_port
from tests.support.polling import DEADLINE

certificates = pytest.importorskip("tests.support.certificates")


@contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Accept one connection, read its request, and let `serve` do the rest."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE)
                data = b""
                while b"\r\n\r\n" not in data:
                    data += connection.recv(4096)
                try:
                    serve(connection)
                except OSError:
                    pass  # the client has closed the connection

        thread = threading.Thread(target=run)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        thread.join()


def answering(*parts: bytes) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)

    return serve


def fails(url: str, **arguments: object) -> str:
    with pytest.raises(FetchError) as caught:
        fetch(url, **arguments)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_response_has_status_body_and_headers() -> None:
    reply = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nX-One: a\r\nx-one: b\r\n\r\nno and more"
    with server(answering(reply)) as url:
        found = fetch(url)
    assert found == Answer(404, b"no", {"content-length": "2", "x-one": "a, b"})


def test_a_body_may_come_in_chunks_or_end_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server(answering(head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")) as url:
        assert fetch(url).body == b"abcde"
    with server(answering(b"HTTP/1.0 200 OK\r\n\r\n", b"abc", b"de")) as url:
        assert fetch(url).body == b"abcde"


def test_method_headers_and_body_are_sent() -> None:
    with AuthServer() as auth:
        auth.answer(b"fine")
        answer = fetch(
            f"{auth.url}?a=b%20c", method="POST", body=b"[1]", headers=[("Accept", "application/vnd.nsq")]
        )
    query = auth.queries[0]
    assert (answer.status, answer.body) == (200, b"fine")
    assert (query.method, query.path, query.body) == ("POST", "/auth?a=b%20c", b"[1]")
    assert query.headers["accept"] == "application/vnd.nsq"
    assert query.headers["host"] == auth.address


def test_an_address_without_a_path_means_the_root() -> None:
    with AuthServer() as auth:
        auth.answer(b"")
        fetch(f"http://{auth.address}")
        fetch(f"http://{auth.address}?q=1")
    assert [query.path for query in auth.queries] == ["/", "/?q=1"]


def test_name_and_password_in_the_address_become_basic_credentials_and_stay_out_of_errors() -> None:
    with AuthServer() as auth:
        auth.answer(b"")
        fetch(f"http://me%40x:pass@{auth.address}/a")
    scheme, _, credentials = auth.queries[0].headers["authorization"].partition(" ")
    assert (scheme, base64.b64decode(credentials)) == ("Basic", b"me@x:pass")
    text = fails(f"http://me:pass@127.0.0.1:{unused_port()}/a?secret=hush")
    assert "127.0.0.1" in text and "pass" not in text and "hush" not in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h/a?b=c", "http://h/a"),
        ("http://u:p@h/a", "http://h/a"),
        ("http://u:p@x@h/a@b", "http://h/a@b"),
        ("h:1", "h:1"),
    ],
)
def test_urls_in_logs_have_no_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_a_refused_connection_is_an_error() -> None:
    url = f"http://127.0.0.1:{unused_port()}/x"
    assert fails(url) == f"GET {url}: Connection refused"


@pytest.mark.parametrize(
    "url",
    ["", "host:80", "ftp://host/", "http://", "http:///x", "http://host:x/", "http://a b/", "http://[/"],
)
def test_an_invalid_address_is_refused(url: str) -> None:
    assert fails(url).startswith(f"GET {url}: ")


def test_a_control_character_in_an_address_is_refused() -> None:
    with AuthServer() as auth:
        fails(f"http://{auth.address}/a b")
        fails(f"http://{auth.address}/a\x00x")
        fails(f"http://{auth.address}/ä")
    assert auth.queries == []


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
    ids=["nothing", "nonsense", "status", "short", "short chunk", "bad chunk", "many headers", "long header"],
)
def test_an_invalid_answer_is_an_error(reply: bytes) -> None:
    with server(answering(reply)) as url:
        assert fails(url).startswith(f"GET {url}: ")


def test_the_port_of_the_tcp_protocol_is_named() -> None:
    with server(answering(b"\x00\x00\x00\x16\x00\x00\x00\x01E_BAD_PROTOCOL")) as url:
        assert fails(url) == f"GET {url}: the answer is not HTTP; this is the port of NSQ's TCP protocol"


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n" + b"x" * 11,
        b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 11,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\n" + b"x" * 11 + b"\r\n0\r\n\r\n",
    ],
    ids=["length", "to the end", "chunked"],
)
def test_a_response_above_the_limit_is_refused(reply: bytes) -> None:
    with server(answering(reply)) as url:
        assert fails(url, max_bytes=10) == f"GET {url}: the response has more than 10 bytes"
    with server(answering(reply)) as url:
        assert fetch(url, max_bytes=11).body == b"x" * 11


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"]
)
def test_the_deadline_limits_the_whole_response(head: bytes) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(1000):
            connection.sendall(b"x")
            time.sleep(0.02)

    with server(drip) as url:
        begin = time.monotonic()
        assert fails(url, request_timeout=0.3) == f"GET {url}: timed out"
        assert time.monotonic() - begin > 0.25


def test_a_silent_host_takes_only_the_connect_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With a full accept queue, more connections hang.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for connection in waiting:
            connection.setblocking(False)
            connection.connect_ex(address)
        try:
            text = fails(f"http://127.0.0.1:{address[1]}/", connect_timeout=0.2, request_timeout=600.0)
            assert text.endswith("timed out")
        finally:
            for connection in waiting:
                connection.close()


def test_each_address_of_a_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with AuthServer() as auth:
        auth.answer(b"here")
        stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        found = [(*stream, ("127.0.0.1", unused_port())), (*stream, ("127.0.0.1", auth.port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert fetch("http://two.example/").body == b"here"
    assert auth.queries[0].headers["host"] == "two.example"


# HTTPS


@pytest.fixture
def secure_server() -> Iterator[AuthServer]:
    pair = certificates.certificates().server
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    with AuthServer(tls=context) as auth:
        auth.answer(b"safe")
        yield auth


def test_https_certificates_are_checked_with_the_given_authorities(secure_server: AuthServer) -> None:
    made = certificates.certificates()
    assert fetch(secure_server.url, ca_file=str(made.ca.cert)).body == b"safe"
    assert "certificate verify failed" in fails(secure_server.url)
    assert "certificate verify failed" in fails(secure_server.url, ca_file=str(made.foreign.cert))


def test_https_needs_a_certificate_for_this_host(
    secure_server: AuthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca_file = str(certificates.certificates().ca.cert)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", secure_server.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert fetch("https://localhost/", ca_file=ca_file).body == b"safe"
    assert "Hostname mismatch" in fails("https://other.example/", ca_file=ca_file)


def test_authorities_are_read_again_when_their_file_has_changed(
    secure_server: AuthServer, tmp_path: Path
) -> None:
    made = certificates.certificates()
    path = tmp_path / "ca.pem"
    assert fails(secure_server.url, ca_file=str(path)).endswith("No such file or directory")
    path.write_bytes(made.foreign.cert.read_bytes())
    assert "certificate verify failed" in fails(secure_server.url, ca_file=str(path))
    path.write_bytes(made.ca.cert.read_bytes())
    assert fetch(secure_server.url, ca_file=str(path)).body == b"safe"


def test_https_to_a_plain_server_is_an_error_within_the_deadline() -> None:
    with AuthServer() as auth:
        assert fails(f"https://{auth.address}/", request_timeout=1.0).startswith(
            f"GET https://{auth.address}/"
        )
