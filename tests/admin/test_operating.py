"""nsqadmin as an operator uses it, with real daemons: lag, metrics, webhooks, a restart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.admin.support import REFERENCE_ADMIN, AdminThread, Cluster
from tests.support import start_broker, unique_name, wait_until
from tests.support.auth_server import AuthServer
from tests.tools.processes import WebServer

pytestmark = pytest.mark.skipif(bool(REFERENCE_ADMIN), reason="ours only")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nsqds=2) as cluster:
        yield cluster


def start(cluster: Cluster, **flags: Any) -> AdminThread:
    return AdminThread(lookupd_http_address=(cluster.lookupd_address,), poll_interval=0.1, **flags)


def metrics(text: str) -> dict[tuple[str, str], float]:
    """By name and the first label's value."""
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(one.name, next(iter(one.labels.values()), "")): one.value for one in found}


def test_lag_is_shown_for_a_topic_and_a_channel_and_in_total(cluster: Cluster) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    cluster.nsqds[0].publish(topic, b"x")
    with start(cluster) as admin:
        wait_until(lambda: (admin.daemon.watch.topics.latest((topic,)) or {}).get("age", 0) > 0)
        channel = admin.get(f"/api/topics/{topic}/c")
        assert channel["oldest_message_age_s"] > 0
        assert channel["oldest_message_age_s"] == max(one["oldest_message_age_s"] for one in channel["nodes"])
        # It takes a minute until a rate is known.
        assert (channel["drain_rate"], channel["drain_time_s"]) == (None, None)
        assert admin.get(f"/api/topics/{topic}")["channels"][0]["oldest_message_age_s"] > 0
        assert admin.get("/api/overview")["totals"]["age"] > 0
        assert admin.get(f"/api/history/topics/{topic}/c")["values"]["age"][-1] > 0
        for path, name in ((f"/topics/{topic}/c", "channel"), (f"/topics/{topic}", "topic"), ("/", "total")):
            assert re.search(rf'id="{name}-age">\d', admin.page(path)), path


def test_the_lag_of_each_channel_and_node_has_its_columns(cluster: Cluster) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    cluster.nsqds[0].publish(topic, b"x")

    def columns(page: str, table: str) -> list[dict[str, str]]:
        """By heading, for each row."""
        text = page[page.index(f'id="{table}"') :].partition("</table>")[0]
        head, _, body = text.partition("</thead>")
        names = [re.sub("<.*?>| [▲▼↕]", "", one).strip() for one in re.findall(r"<th\b.*?</th>", head)]
        rows = [re.findall(r"<t[hd]\b.*?</t[hd]>", row) for row in body.split("<tr")[1:]]
        cells = [[re.sub("<.*?>", "", one).strip() for one in row] for row in rows]
        return [dict(zip(names, row, strict=True)) for row in cells]

    with start(cluster) as admin:
        wait_until(lambda: (admin.daemon.watch.topics.latest((topic,)) or {}).get("age", 0) > 0)
        # It takes a minute until a rate is known.
        admin.daemon.watch.add_drain = lambda channel: channel.update(drain_rate=2.0, drain_time_s=90.0)
        (row,) = columns(admin.page(f"/topics/{topic}"), "channels-table")
        assert re.match(r"\d", row["Oldest waiting"]) and row["Drains in"] == "90 s"
        *nodes, total = columns(admin.page(f"/topics/{topic}/c"), "nodes-table")
        assert re.match(r"\d", total["Oldest waiting"]) and total["Drains in"] == "90 s"
        assert len(nodes) == 2
        (of_topic,) = admin.get(f"/api/topics/{topic}")["channels"]
        of_channel = admin.get(f"/api/topics/{topic}/c")
        assert of_topic["drain_time_s"] == of_channel["drain_time_s"] == 90


def test_deferred_messages_are_on_the_overview_and_beside_their_topic(cluster: Cluster) -> None:
    topic = unique_name("t")
    cluster.clear()
    cluster.add(topic, "c")
    for nsqd in cluster.nsqds:
        nsqd.request("POST", f"/pub?topic={topic}&defer=3600000", b"x").expect_ok()
    with start(cluster) as admin:
        wait_until(lambda: (admin.daemon.watch.totals.latest(()) or {}).get("deferred") == 2)
        assert admin.get("/api/overview")["totals"]["deferred"] == 2
        assert '<dd id="total-deferred">2</dd>' in admin.page("/")
        page = admin.page("/topics")
        cells = ["", *re.findall(r'<td class="num">(.*?)</td>', page)]
        assert dict(zip(re.findall(r'id="sort-(\w+)"', page), cells, strict=True))["deferred"] == "2"


def test_nodes_with_the_same_disk_are_one_entry_when_it_is_full(cluster: Cluster) -> None:
    with start(cluster) as admin:
        nodes = admin.daemon.watch.nodes
        wait_until(lambda: len(nodes) == 2 and all(node.disk_size for node in nodes.values()))
        for node in nodes.values():
            node.disk_free = node.disk_size // 100
        (problem,) = wait_until(
            lambda: [one for one in admin.get("/api/overview")["problems"] if one["kind"] == "disk"]
        )
        assert all(address in problem["detail"] for address in cluster.addresses)


def test_nsqadmin_and_nsqlookupd_have_metrics(cluster: Cluster) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    cluster.nsqds[0].publish(topic, b"x")
    found = metrics(cluster.lookupd.request("GET", "/metrics").body.decode())
    assert found["nsqlookupd_producers", ""] == found["nsqlookupd_active_producers", ""] == 2
    assert found["nsqlookupd_connections", ""] >= 2
    assert found["nsqlookupd_topics", ""] >= 1 and found["nsqlookupd_channels", ""] >= 1
    assert found["nsqlookupd_registrations", ""] >= 4
    with start(cluster) as admin:
        wait_until(lambda: admin.daemon.problems())
        answer = admin.call("GET", "/metrics")
        assert answer.header("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
        found = metrics(answer.body.decode())
        assert found["nsqadmin_nodes", ""] == 2 and found["nsqadmin_unreachable_nodes", ""] == 0
        assert found["nsqadmin_topics", ""] >= 1 and found["nsqadmin_polls_total", ""] >= 1
        assert found["nsqadmin_problems", "notice"] >= 1
        assert found["nsqadmin_webhook_sent_total", ""] == 0


def test_findings_are_posted_and_history_outlives_a_restart(cluster: Cluster, tmp_path: Path) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    cluster.nsqds[0].publish(topic, b"x")
    finding = f"no consumers/{topic}/c"
    with WebServer(500) as server:
        flags = {"webhook_url": (server.url,), "webhook_secret": "s", "history_path": str(tmp_path / "h")}

        def sent() -> list[str]:
            return [json.loads(one.body)["finding"]["id"] for one in server.requests]

        with start(cluster, **flags) as admin:
            wait_until(lambda: "webhook fails" in admin.page("/"), what="the failure on the page")
            server.statuses[:] = [200]
            wait_until(lambda: sent().count(finding) >= 1 and not admin.daemon.webhooks[0].waiting)
            points = admin.get(f"/api/history/topics/{topic}/c")["times"]
            assert points
            found = metrics(admin.call("GET", "/metrics").body.decode())
            assert found["nsqadmin_webhook_failures_total", ""] >= 1
            assert found["nsqadmin_webhook_sent_total", ""] >= 1
            # The secret is not shown.
            assert admin.call("GET", "/config/webhook_secret").status == 400
        count = len(server.requests)
        with start(cluster, **flags) as admin:
            times = admin.get(f"/api/history/topics/{topic}/c")["times"]
            assert times[: len(points) - 1] == points[: len(points) - 1]
            wait_until(lambda: admin.daemon.watch.number > 3)
            assert not admin.daemon.webhooks[0].waiting
        # What was sent before is not sent again.
        assert finding not in sent()[count:]


def test_a_topic_stays_visible_when_its_node_is_no_longer_registered() -> None:
    """nsqlookupd forgets an nsqd as soon as their connection is lost, as on a very busy machine."""
    topic = unique_name("t")
    with AuthServer() as lookupd, start_broker() as nsqd:
        nsqd.publish(topic, b"x", b"y")
        nsqd.control("create", topic, "c")
        (host, port), tcp_port = nsqd.http_address, nsqd.address[1]
        node = {"broadcast_address": host, "tcp_port": tcp_port, "http_port": port, "topics": [topic]}
        lookupd.answer({"producers": [node]})
        with AdminThread(lookupd_http_address=(lookupd.address,), poll_interval=0.1) as admin:
            pages = ["/topics/" + topic, f"/topics/{topic}/c", f"/nodes/{host}:{port}", f"/messages/{topic}"]
            wait_until(lambda: topic in admin.daemon.watch.channels_of)
            assert not [page for page in pages if "no nsqlookupd lists" in admin.page(page)]

            for answer, status in (({"producers": []}, 200), ({"message": "TOPIC_NOT_FOUND"}, 404)):
                lookupd.answer(answer, status)
                assert "no nsqlookupd lists it" in admin.get(f"/api/topics/{topic}")["message"]
                assert [page for page in pages[:2] if "no nsqlookupd lists" in admin.page(page)] == pages[:2]
            lookupd.answer({"producers": []})
            wait_until(lambda: "node is not registered" in admin.page("/"))
            assert all(admin.page(page) for page in pages) and topic in admin.page("/topics")
            assert "not registered" in admin.page("/nodes")

            nsqd.stop()
            wait_until(lambda: "node has left" in admin.page("/"))
            (problem,) = admin.get("/api/overview")["problems"]
            assert (problem["kind"], problem["severity"]) == ("left", "critical")
            assert "with 2 unfinished messages" in problem["detail"]
            assert "Connection refused" in admin.page(pages.pop())
            for page in pages:
                found = admin.call("GET", page)
                assert (found.status, b"Unknown: a daemon does not answer" in found.body) == (502, True), page
            assert admin.call("GET", f"/topics/{unique_name('t')}").status == 404


def test_a_former_primary_has_not_left() -> None:
    """It follows the new primary, which has its messages."""
    with AuthServer() as lookupd, AuthServer() as nsqd:
        host, _, port = nsqd.address.partition(":")
        node = {"broadcast_address": host, "tcp_port": 1, "http_port": int(port), "topics": ["t"]}
        lookupd.answer({"producers": [node]})
        nsqd.answer({"topics": [{"topic_name": "t", "depth": 5, "message_count": 5, "channels": []}]})
        with AdminThread(lookupd_http_address=(lookupd.address,), poll_interval=0.1) as admin:
            wait_until(lambda: "t" in admin.daemon.watch.channels_of)
            nsqd.answer({"message": "NOT_PRIMARY"}, 503)
            lookupd.answer({"producers": []})
            wait_until(lambda: not admin.daemon.watch.nodes)
            assert admin.get("/api/overview")["problems"] == []
