"""A proxy in front of an nsqd's HTTP API that fails on demand.

with FaultyNsqd(nsqd) as faulty:            nsqd is a real one, see tests.support
    faulty.address                          for --nsqd-http-address
    faulty.fail("/mpub", "before", on=2)    the second request for that path never reaches nsqd …
    faulty.fail("/mpub", "after")           … or it does, and its answer never comes back
    faulty.cut_off("/openapi.json")         no request for that path reaches nsqd
    faulty.do("/channel/peek", function)    call this before the next request with `state=ready`
    faulty.hide("/openapi.json")            answer as if there were no such path
    faulty.seen                             paths that were asked for, in order
"""

from __future__ import annotations

import http.client
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from tests.support import TestBroker
from tests.support.web import HandlerServer


class FaultyNsqd:
    def __init__(self, nsqd: TestBroker) -> None:
        self._nsqd = nsqd
        self._faults: dict[str, tuple[str, int]] = {}
        self._deeds: dict[str, Callable[[], None]] = {}
        self._hidden: set[str] = set()
        self._cut_off: set[str] = set()
        self.seen: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner._pass_on(self)

            def do_POST(self) -> None:
                owner._pass_on(self)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = HandlerServer(Handler)
        self.address = self._server.address

    def fail(self, path: str, when: str, *, on: int = 1) -> None:
        self._faults[path] = (when, on)

    def cut_off(self, path: str) -> None:
        self._cut_off.add(path)

    def do(self, path: str, deed: Callable[[], None]) -> None:
        self._deeds[path] = deed

    def hide(self, *paths: str) -> None:
        self._hidden |= {*paths}

    def heal(self) -> None:
        self._faults = {}
        self._cut_off = set()

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        path = urlsplit(handler.path).path
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.seen.append(path)
        when, left = self._faults.get(path, ("", 0))
        if when:
            self._faults[path] = (when, left - 1)
        fails = "before" if path in self._cut_off else when if left == 1 else ""
        if (path in self._deeds) and "state=ready" in handler.path:
            self._deeds.pop(path)()
        if fails != "before":
            host, port = self._nsqd.http_address  # type: ignore[misc]  # not a Unix socket
            connection = http.client.HTTPConnection(host, port, timeout=10)
            target = "/nowhere" if path in self._hidden else handler.path
            connection.request(handler.command, target, body or None)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
        if fails:
            handler.close_connection = True
            handler.connection.close()
            return
        handler.send_response(answer.status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def __enter__(self) -> FaultyNsqd:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
