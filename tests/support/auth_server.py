"""An auth server in a thread, with answers that the test chooses.

with AuthServer() as server:        AuthServer(tls=context) speaks HTTPS
    server.grant(entry("^t$", "publish"), ttl=60, identity="me")
                                    the answer to all further queries
    server.answer(b"no", status=500)
                                    any other answer
    server.address, server.url      for --auth-http-address
    server.queries                  the queries: Query(method, path, fields, headers, body)
    server.stalled.set()            accept connections, but do not answer until it is cleared
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit


class Query(NamedTuple):
    method: str
    path: str
    """With the query string, not decoded."""
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the query, by GET or POST."""
        listed = json.loads(self.body) if self.body else parse_qs(urlsplit(self.path).query, True)
        assert all(len(values) == 1 for values in listed.values()), listed
        return {name: values[0] for name, values in listed.items()}


def entry(topic: str, *permissions: str, channels: tuple[str, ...] = (".*",)) -> dict[str, Any]:
    """One authorization."""
    return {"topic": topic, "channels": list(channels), "permissions": list(permissions)}


class AuthServer:
    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.queries: list[Query] = []
        self.stalled = threading.Event()
        self._closing = threading.Event()
        self._status, self._body = 500, b""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def handle_query(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                owner.queries.append(Query(self.command, self.path, headers, self.rfile.read(length)))
                while owner.stalled.is_set() and not owner._closing.wait(0.01):
                    pass
                self.send_response(owner._status)
                self.send_header("Content-Length", str(len(owner._body)))
                self.end_headers()
                self.wfile.write(owner._body)

            do_GET = do_POST = handle_query

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = False

            def handle_error(self, request: object, client_address: object) -> None:
                """A client has disconnected. Ignored."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        if tls is not None:
            # The handshake runs in the thread of the request: otherwise a client without TLS would
            # block all others.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"{'https' if tls else 'http'}://{self.address}/auth"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self) -> AuthServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, body: bytes | object, status: int = 200) -> None:
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._status = status

    def grant(self, *entries: dict[str, Any], ttl: int = 3600, **more: object) -> None:
        self.answer({"ttl": ttl, "authorizations": list(entries), **more})


def unused_port() -> int:
    """A port on which nothing listens at present."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
