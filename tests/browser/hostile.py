"""An nsqd and a pipeline runner whose names, errors and bodies are hostile markup.

HostileNode()       listens on a port of its own until close(); a context manager
    address         for --nsqd-http-address and --pipeline-http-address
NAME, IN_PATH        what its clients, states, errors … are; what its topics and channels are called
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from tests.support.web import HandlerServer

# Tries to leave attributes, elements, texts, scripts and templates, each in its own way.
NAME = (
    "'\"></script></pre></textarea></title><script>alert('name')</script><img src=x onerror=alert('img')>"
    "<svg onload=alert('svg')>{{7*7}}${7*7}<a href=javascript:alert('a')>x</a><!--"
)
# A slash would end the name in the path of a page; the rest is the same.
IN_PATH = NAME.replace("/", "")
PATHS = ("/topic/peek", "/channel/peek", "/channel/seek", "/topic/positions", "/metrics", NAME)
NS = 10**9
NOW = 1_800_000_000


def channel() -> dict[str, Any]:
    counts = ("depth", "in_flight_count", "deferred_count", "requeue_count", "timeout_count", "message_count")
    return {
        "channel_name": IN_PATH,
        **dict.fromkeys(counts, 5),
        "backend_depth": NAME,
        "client_count": 1,
        "clients": [
            {
                **dict.fromkeys(("client_id", "hostname", "user_agent", "version", "auth_identity"), NAME),
                **dict.fromkeys(
                    ("topology_region", "topology_zone", "tls_version", "tls_cipher_suite"), NAME
                ),
                "remote_address": f"{IN_PATH}:1",
                "connect_ts": 1,
                "authed": True,
                "tls": True,
                "sample_rate": NAME,
            }
        ],
        "paused": True,
        "e2e_processing_latency": {"count": 1, "percentiles": [{"quantile": 0.5, "value": NAME}]},
    }


def message(**more: Any) -> dict[str, Any]:
    body = json.dumps({"topic": NAME, "channel": NAME, "error": NAME, "text": NAME})
    return {
        "id": NAME,
        "sequence": 1,
        "timestamp": NOW * NS,
        "attempts": 3,
        "state": NAME,
        "size": 1000,
        "client": NAME,
        "body": body,
        "headers": {NAME: NAME},
        **more,
    }


STATS = {
    "version": NAME,
    "health": f"NOK - {NAME}",
    "start_time": NOW,
    "topics": [
        {
            "topic_name": IN_PATH,
            "depth": 5,
            "backend_depth": 0,
            "message_count": 5,
            "paused": True,
            "channels": [channel()],
        }
    ],
}
PIPELINE = {
    **dict.fromkeys(("topics", "channel", "sink", "error"), NAME),
    "name": IN_PATH,
    "state": "failed",
    "lag": NAME,
    "rows": 7,
    "rows_per_second": 1e400,
}


class HostileNode:
    def __init__(self) -> None:
        self._server = HandlerServer(self._handler())
        self.address = self._server.address

    def _answers(self) -> dict[str, Any]:
        return {
            "/info": {"broadcast_address": IN_PATH, "hostname": NAME, "http_port": 1, "version": NAME},
            "/stats": STATS,
            "/openapi.json": {"paths": dict.fromkeys(PATHS, {})},
            "/topic/peek": {"messages": [message(), message(id="2", body=NAME)]},
            "/channel/peek": {"messages": [message()]},
            "/topic/positions": {"messages": NAME, "bytes": NAME, "first_timestamp": NAME, NAME: 1},
            "/status": {"file": NAME, "ui": "javascript:alert('ui')", "pipelines": [PIPELINE]},
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answers = {path: json.dumps(answer).encode() for path, answer in self._answers().items()}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                found = answers.get(urlsplit(self.path).path)
                self._answer(404 if found is None else 200, found or json.dumps({"message": NAME}).encode())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._answer(400, json.dumps({"message": NAME}).encode())

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        return Handler

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> HostileNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
