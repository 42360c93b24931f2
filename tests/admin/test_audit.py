"""Every endpoint that changes something writes a line to the log, whatever the outcome."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from nsparq.admin.security import CHANGES
from nsparq.admin.show.api.reference import describe
from tests.admin.support import REFERENCE_ADMIN, AdminThread, Cluster, start_admin
from tests.support import unique_name, wait_until
from tests.support.polling import DEADLINE

pytestmark = pytest.mark.skipif(bool(REFERENCE_ADMIN), reason="ours only")

TABLE = [(one.method, one.path) for one in describe().endpoints if one.method in CHANGES]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> AdminThread:
    return cluster.admin(admin_user=("ada",))  # type: ignore[return-value]  # ours


def request_for(cluster: Cluster, admin: AdminThread, method: str, path: str) -> tuple[str, Any]:
    """The path and the body of a request that should work."""
    topic = unique_name("t")
    cluster.add(topic, "c")
    cluster.nsqds[0].publish(topic, b"x")
    node = cluster.addresses[0]
    headers = {"X-Forwarded-User": "ada"}
    (message,) = admin.call("GET", f"/api/messages/{topic}", headers=headers).json()["messages"]
    bodies: dict[str, Any] = {
        "/api/topics": {"topic": topic, "channel": "d"},
        "/api/messages/{topic}": {"body": "x"},
        "/api/copy/{topic}": {
            "messages": [{"node": node, "sequence": message["sequence"]}],
            "to": "elsewhere",
        },
        "/api/move/{topic}/{channel}": {"to": "elsewhere"},
        "/api/replay/{topic}/{channel}": {"to": "start", "dry_run": False},
        "/api/nodes/{node}": {"topic": topic, "action": "switch_over"},
        "/api/settings/{topic}": {"durability": "os"},
        "/api/policy/{topic}": {"policy": {}},
        "/api/policy/{topic}/{channel}": {"policy": None},
        "/api/order/{topic}/{channel}": {"ordered_by": "/k"},
        "/download/{topic}": urlencode({"message": f"{message['sequence']}@{node}"}).encode(),
        "/config/{key}": b"info",
        "/act": urlencode({"action": "pause", "topic": topic}).encode(),
    }
    body = (
        None if method == "DELETE" and path != "/api/nodes/{node}" else bodies.get(path, {"action": "pause"})
    )
    values = {"topic": topic, "channel": "c", "node": quote(node), "key": "log_level"}
    return path.format(**values), body


@pytest.mark.parametrize(("method", "path"), TABLE)
def test_every_change_is_logged_whether_made_or_refused(
    cluster: Cluster, admin: AdminThread, caplog: pytest.LogCaptureFixture, method: str, path: str
) -> None:
    caplog.set_level("INFO")
    target, body = request_for(cluster, admin, method, path)
    # These nodes have no followers.
    other = {"POST /act": 303, "POST /api/nodes/{node}": 409}.get(f"{method} {path}", 200)
    for user, status in (("eve", 403), ("ada", other)):
        caplog.clear()
        answer = admin.call(method, target, body, {"X-Forwarded-User": user})
        assert answer.status == status, answer
        lines = [text for record in caplog.records if (text := record.getMessage()).startswith("AUDIT: ")]
        assert lines
        line = lines[0]
        assert f'user="{user}" from="127.0.0.1:' in line
        said = {403: "refused", 409: "failed - NOT_REPLICATED"}.get(status, "done")
        assert [one for one in ("refused", "failed", "done") if one in line] == [said.split()[0]], line
        assert said in line


def test_a_change_whose_client_leaves_is_finished_and_logged(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    begun, left = threading.Event(), threading.Event()
    with start_admin(lookupd_http_address=(cluster.lookupd_address,), poll_interval=60.0) as admin:
        daemon = admin.daemon  # type: ignore[union-attr]  # ours
        post = daemon.cluster.post_to_nodes

        async def slow_post(*arguments: Any, **query: str) -> Any:
            begun.set()
            await asyncio.to_thread(left.wait, DEADLINE)
            return await post(*arguments, **query)

        monkeypatch.setattr(daemon.cluster, "post_to_nodes", slow_post)
        caplog.set_level("INFO")
        with socket.create_connection(admin.http_address) as client:
            # A reset at the end. One that only has sent everything still gets its answer.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            body = b'{"action": "pause"}'
            head = (
                f"POST /api/topics/{topic} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            assert begun.wait(DEADLINE)
        wait_until(lambda: not daemon._http.connections)
        left.set()
        wait_until(lambda: any("AUDIT: pause_topic" in text for text in caplog.messages))
    for nsqd in cluster.nsqds:
        (found,) = nsqd.stats(topic)["topics"]
        assert found["paused"]
