"""What others ask a supervisor: /ready, /live and /metrics over HTTP; and what it tells systemd.

The standard library's server is enough: a probe and a scrape every few seconds. It runs in threads;
answers are made on the supervisor's event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

from nsparq.addresses import join_address
from nsparq.errors import StartError
from nsparq.listening import bound_address, listen_on

__all__ = ["Answer", "StatusServer", "notify_systemd"]

ANSWER_S: Final = 5.0


class Answer(NamedTuple):
    """Status, content type and body."""

    status: int
    content_type: str
    body: bytes


class StatusServer:
    """Serves the paths for which `answer` has an Answer; others are 404."""

    def __init__(self, address: tuple[str, int], answer: Callable[[str], Answer | None]) -> None:
        """Raises StartError."""
        try:
            sockets = listen_on(address)
        except (OSError, OverflowError) as error:
            raise StartError(f"cannot listen on {join_address(*address)}: {error}") from error
        bound = bound_address(sockets)
        self.address = bound if isinstance(bound, str) else join_address(*bound)
        self._servers = [_Server(sock, answer) for sock in sockets]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop listening. It must not be called on the event loop that answers."""
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, sock: socket.socket, answer: Callable[[str], Answer | None]) -> None:
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        self._answer, self._loop = answer, asyncio.get_running_loop()

    def answer(self, path: str) -> Answer | None:
        """Raises TimeoutError, or RuntimeError once the loop has ended."""

        async def work() -> Answer | None:
            return self._answer(path)

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(ANSWER_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = ANSWER_S
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:  # http.server's name
        try:
            found = self.server.answer(self.path.partition("?")[0])
        except (TimeoutError, RuntimeError):
            found = Answer(503, "text/plain", b"the supervisor does not answer\n")
        status, content_type, body = found or Answer(404, "text/plain", b"not found\n")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: they are not logged."""


def notify_systemd(state: str) -> None:
    """Tell systemd, if it started us with Type=notify."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        sock.send(state.encode())
