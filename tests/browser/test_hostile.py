"""No foreign text becomes markup or script, and no foreign page makes a browser change anything.

A script that ran would open a dialog or log an error, and the visitor records both as complaints.
The Content-Security-Policy forbids the rest, and the browser logs each violation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.admin.support import AdminProcess, Cluster
from tests.browser.hostile import IN_PATH, NAME, HostileNode
from tests.browser.visitor import Visitor
from tests.support import unique_name, wait_until
from tests.support.web import HandlerServer

OURS = {"theme.js", "times.js", "charts.js", "admin.js", "messages.js"}


def is_harmless(visitor: Visitor) -> None:
    """The page has no element but those that its templates have."""
    found = visitor.page.evaluate(
        """() => ({
          scripts: [...document.scripts].map((one) => one.src.split("/").pop().split("?")[0]),
          foreign: [...document.querySelectorAll(
              "img, iframe, object, embed, style, [onload], [onerror], main svg:not(.plot svg)")]
            .map((one) => one.outerHTML),
          links: [...document.querySelectorAll("a[href]")].map((one) => one.href)
            .filter((one) => !one.startsWith(location.origin + "/")),
        })"""
    )
    assert {*found.pop("scripts")} <= OURS
    assert found == {"foreign": [], "links": []}, visitor.page.url


@pytest.fixture(scope="module")
def hostile() -> Iterator[AdminProcess]:
    with (
        HostileNode() as node,
        AdminProcess(
            nsqd_http_address=(node.address,), pipeline_http_address=(node.address,), poll_interval=0.3
        ) as admin,
    ):
        yield admin


def test_text_from_a_hostile_node_stays_text(hostile: AdminProcess, visit: Callable[..., Visitor]) -> None:
    visitor = visit(hostile)
    wait_until(lambda: hostile.get("/api/pipelines")["pipelines"])
    name = quote(IN_PATH, safe="")
    node = quote(f"[{IN_PATH}]:1", safe="")
    places = ["/", "/topics", "/nodes", "/lookup", "/counter", "/pipelines", f"/nodes/{node}"]
    places += [f"/topics/{name}", f"/topics/{name}/{name}", f"/messages/{name}", f"/messages/{name}/{name}"]
    places += [
        f"/replay/{name}/{name}?to=start",
        f"/topics?q={name}",
        f"/search?q={name}",
        f"/messages/{name}?q={name}&node={name}",
    ]
    for path in places:
        visitor.go(path)
        is_harmless(visitor)
        if path != "/counter" and path != "/lookup":
            assert "alert(" in visitor.text("main") or "alert(" in visitor.page.content(), path
    visitor.go(f"/topics/{name}/{name}")
    assert visitor.text("#channel-name") == IN_PATH
    visitor.sees("#clients-table", NAME)
    # The script handles names too: the chart of a consumer, the filter, the confirmation.
    visitor.find("#clients-table tbody a").click()
    visitor.sees("#chart-client figcaption", "alert(")
    assert visitor.confirm("delete", IN_PATH).startswith("Failed: UPSTREAM_ERROR")
    is_harmless(visitor)
    visitor.go("/topics")
    visitor.find("#filter").fill(IN_PATH)
    expect(visitor.find("#topic-rows tr:visible")).to_have_count(1)


def test_messages_and_clients_of_a_real_node_stay_text(
    visitor: Visitor, cluster: Cluster, admin: AdminProcess
) -> None:
    topic = unique_name("evil.-_")
    cluster.add(topic, "c#ephemeral")
    nsqd = cluster.nsqds[0]
    letter = json.dumps({"topic": NAME, "channel": NAME, "error": NAME, "text": NAME})
    bodies = [NAME, json.dumps({NAME: NAME}), letter, f"\x00{NAME}"]
    nsqd.publish(topic, *(body.encode() for body in bodies))
    with nsqd.connect() as client:
        client.identify(client_id=NAME, hostname=NAME, user_agent=NAME)
        client.sub(topic, "c#ephemeral", rdy=2)
        client.read_messages(2)
        for path in ("/messages/{}", "/messages/{}/c%23ephemeral", "/topics/{}/c%23ephemeral"):
            visitor.go(path.format(topic))
            is_harmless(visitor)
            visitor.sees("main", NAME)
        visitor.go(f"/messages/{topic}")
        assert visitor.find("#message-list pre").last.text_content() == NAME
        visitor.go(f"/nodes/{cluster.addresses[0]}")
        is_harmless(visitor)
        visitor.go(f"/messages/{topic}")
        visitor.find("#copy-open").click()
        visitor.find("#copy-to").fill("<script>alert(1)</script>")
        visitor.find("#message-list [type=checkbox]").first.check()
        assert visitor.act("#copy-do") == "Failed: not a valid topic name"
        is_harmless(visitor)


@pytest.mark.parametrize(
    "path",
    [
        "/topics/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
        "/nodes/%22%3E%3Cimg%20src=x%20onerror=alert(1)%3E",
        "/replay/orders/c?to=time&time=%3Csvg%20onload=alert(1)%3E",
        "/topics?q=%22%3E%3Cscript%3Ealert(1)%3C/script%3E&note=%3Cscript%3E",
    ],
)
def test_text_in_a_url_stays_text(visitor: Visitor, cluster: Cluster, path: str) -> None:
    cluster.add("orders", "c")
    visitor.allowed.append("status of 404")
    visitor.page.goto(visitor.site + path)
    visitor.wait_for_script()
    is_harmless(visitor)


# Foreign pages


class ForeignSite:
    """A page on another port: another origin of the same site, so the browser sends our cookies."""

    def __init__(self, target: str, topic: str) -> None:
        page = f"""<!doctype html><title>evil</title>
            <form method="post" action="{target}/act" id="form">
            <input name="action" value="pause"><input name="topic" value="{topic}"></form>
            <script>
              const form = "application/x-www-form-urlencoded";
              const send = (method, path, body, mode, type) => fetch("{target}" + path, {{
                method, body, mode, credentials: "include", headers: {{ "Content-Type": type }},
              }}).catch(() => 0);
              window.done = Promise.all([
                send("POST", "/api/topics/{topic}", '{{"action":"pause"}}', "no-cors", "text/plain"),
                send("POST", "/api/topics/{topic}", '{{"action":"pause"}}', "cors", "application/json"),
                send("DELETE", "/api/topics/{topic}", null, "cors", "text/plain"),
                send("POST", "/act", "action=pause&topic={topic}", "no-cors", form),
              ]);
            </script>""".encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = HandlerServer(Handler)
        self.url = f"http://127.0.0.1:{self._server.port}/"

    def __enter__(self) -> ForeignSite:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


def test_a_foreign_page_can_change_nothing_with_the_cookies_of_a_visitor(
    visitor: Visitor, cluster: Cluster, admin: AdminProcess
) -> None:
    topic = unique_name("guarded")
    cluster.add(topic)
    visitor.go(f"/topics/{topic}")  # has the cookies now
    visitor.allowed += ["console", "request to another host"]
    with ForeignSite(visitor.site, topic) as foreign:
        visitor.page.goto(foreign.url)
        visitor.page.evaluate("window.done")
        with visitor.page.expect_navigation():
            visitor.page.evaluate("document.getElementById('form').submit()")
        visitor.sees("#error-title", "You are not allowed to do this")
        framed = visitor.page.evaluate(
            """(address) => new Promise((resolve) => {
              const frame = document.createElement("iframe");
              frame.onload = () => resolve(frame.contentDocument === null);
              frame.src = address;
              document.body.append(frame);
            })""",
            visitor.site + "/",
        )
    assert framed
    assert [nsqd.topic_stats(topic)["paused"] for nsqd in cluster.nsqds] == [False, False]  # type: ignore[index]
    refused = [line for line in admin.stderr_text().splitlines() if "AUDIT: " in line and "refused" in line]
    assert len(refused) >= 3 and all("another site" in line for line in refused)
