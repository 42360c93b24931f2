"""Every endpoint that changes something writes a line to the log, whatever the outcome."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from nsparq.admin.security import CHANGES
from nsparq.admin.show.api.reference import describe
from tests.admin.support import REFERENCE_ADMIN, AdminThread, Cluster
from tests.support import unique_name

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
