"""Status over HTTP, for programs that have no HTTP server otherwise: probes and Prometheus ask
them.

The standard library's server is enough for a probe and a scrape every few seconds. It runs in
threads.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

from nsparq.addresses import join_address
from nsparq.errors import StartError
from nsparq.listening import bound_address, listen_on
from nsparq.version import __version__

__all__ = ["Answer", "StatusServer"]

logger = logging.getLogger(__name__)

SILENT_S: Final = 5.0
"""How long a client may say nothing."""


class Answer(NamedTuple):
    """Status, content type and body."""

    status: int
    content_type: str
    body: bytes


class StatusServer:
    """Serves until close()."""

    def __init__(self, address: tuple[str, int], answer: Callable[[str], Answer]) -> None:
        """`answer` is called with the path of a request, in a thread. Raises StartError."""
        try:
            sockets = listen_on(address)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", "") or error
            raise StartError(f"cannot listen on {join_address(*address)}: {reason}") from error
        bound = bound_address(sockets)
        self.address = bound if isinstance(bound, str) else join_address(*bound)
        self._servers = [_Server(sock, answer) for sock in sockets]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop listening. Waits for no request."""
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, sock: socket.socket, answer: Callable[[str], Answer]) -> None:
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        self.answer = answer

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that has gone is no error of ours.
        if not isinstance(sys.exception(), OSError):
            logger.exception("cannot read a request for the status")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SILENT_S
    server_version = f"nsparq/{__version__}"

    def do_GET(self) -> None:  # http.server's name
        try:
            status, content_type, body = self.server.answer(self.path.partition("?")[0])
        except Exception:
            logger.exception("cannot answer a request for the status")
            status, content_type, body = Answer(500, "text/plain", b"internal error; see the log\n")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: they are not logged."""
