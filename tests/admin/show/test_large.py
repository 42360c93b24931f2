"""The pages of a large cluster: 1,000 topics and 10,000 channels. How much each page asks and shows
is counted; `python -m benchmarks.macro.admin --browser` measures the time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from nsparq.admin.collect import merge
from tests.admin.support import REFERENCE_ADMIN, AdminThread
from tests.support.web import HandlerServer

pytestmark = pytest.mark.skipif(bool(REFERENCE_ADMIN), reason="ours only")

TOPICS, CHANNELS = 1000, 10
MAX_ROWS = 250
MAX_BYTES = 120_000


def channel(topic: int, number: int) -> dict[str, Any]:
    counts = ("in_flight_count", "deferred_count", "requeue_count", "timeout_count", "message_count")
    return {
        "channel_name": f"consumer_{number:02}",
        "depth": topic,
        "backend_depth": 0,
        **dict.fromkeys(counts, 3),
        "client_count": 0,
        "clients": [],
        "paused": False,
    }


class LargeNode:
    """An nsqd that answers as NSQ's does."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        topics = [
            {
                "topic_name": f"events.of.service_{number:04}",
                "depth": 0,
                "backend_depth": 0,
                "message_count": number,
                "paused": False,
                "channels": [channel(number, one) for one in range(CHANNELS)],
            }
            for number in range(TOPICS)
        ]
        info = {"broadcast_address": "127.0.0.1", "hostname": "large", "version": "1.3.0", "tcp_port": 1}
        stats = {"version": "1.3.0", "health": "OK", "start_time": 1, "topics": topics}
        answers = {"/info": info, "/stats": stats}
        bodies = {path: json.dumps(answer).encode() for path, answer in answers.items()}
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
                body = bodies.get(path, b"{}")
                if "topic" in query:
                    named = [topic for topic in topics if topic["topic_name"] == query["topic"][0]]
                    body = json.dumps({**stats, "topics": named}).encode()
                owner.asked.append(f"{path}?topic" if "topic" in query else path)
                self.send_response(200 if path in bodies else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = HandlerServer(Handler)
        self.address = self._server.address
        info["http_port"] = self._server.port
        bodies["/info"] = json.dumps(info).encode()

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def large() -> Iterator[tuple[LargeNode, AdminThread]]:
    node = LargeNode()
    try:
        with AdminThread(nsqd_http_address=(node.address,), poll_interval=3600.0) as admin:
            assert admin.get("/api/overview")["channels"] == TOPICS * CHANNELS
            # The stats are by far the largest answer: a poll asks for them once.
            assert sorted(node.asked) == ["/info", "/openapi.json", "/stats"]
            yield node, admin
    finally:
        node.close()


@pytest.mark.parametrize(
    ("path", "requests"),
    [
        ("/", 0),
        ("/topics", 0),
        ("/topics?live=1&sort=-backlog", 0),
        ("/nodes", 0),
        ("/nodes/{node}", 20),
        ("/nodes/{node}?live=1&sort=-depth", 20),
        ("/search?q=service", 0),
        ("/counter", 0),
        ("/api/overview", 0),
        ("/api/history", 0),
    ],
)
def test_a_page_asks_little_and_shows_a_part(
    large: tuple[LargeNode, AdminThread], path: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, admin = large
    node.asked.clear()
    merged: list[str] = []
    original = merge.node_channel

    def node_channel(*arguments: Any, **options: Any) -> dict[str, Any]:
        merged.append(arguments[1])
        return original(*arguments, **options)

    monkeypatch.setattr(merge, "node_channel", node_channel)
    answer = admin.call("GET", path.format(node=quote(node.address)))
    assert answer.status == 200
    assert len(node.asked) <= requests and "/stats" not in node.asked, node.asked
    assert len(re.findall(rb"<tr|<li", answer.body)) <= MAX_ROWS
    assert len(answer.body) <= MAX_BYTES, len(answer.body)
    assert len(merged) <= MAX_ROWS, "channels are merged that the page does not show"


def test_an_answer_about_all_channels_asks_for_the_stats_once(large: tuple[LargeNode, AdminThread]) -> None:
    node, admin = large
    for path in (f"/api/nodes/{quote(node.address)}", "/api/counter", "/api/nodes"):
        node.asked.clear()
        found = admin.get(path)
        assert sorted(node.asked) == ["/info", "/stats"], path
    assert len(found["nodes"][0]["topics"]) == TOPICS


def test_every_topic_is_on_one_page_of_the_table(large: tuple[LargeNode, AdminThread]) -> None:
    _, admin = large
    found: list[str] = []
    path: str | None = "/topics?sort=-backlog"
    while path:
        shown = admin.page(path)
        found += re.findall(r'id="topic-(events[^"]+)"', shown)
        following = re.search(r'href="(\?[^"]*)" id="next-page"', shown)
        path = "/topics" + following[1].replace("&amp;", "&") if following else None
    assert len(found) == TOPICS and found[0].endswith("0999") and found[-1].endswith("0000")
    assert "Showing" not in shown and "801–1,000 of 1,000 topics" in shown
