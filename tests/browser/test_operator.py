"""What an operator does with the pages, at a desk and on a phone: find messages, see how far back a
topic goes and keep more, sort, search, read charts, begin with an empty cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import ViewportSize, expect

from tests.admin.support import AdminProcess, Cluster
from tests.browser.conftest import POLL_S
from tests.browser.test_pages import is_too_wide
from tests.browser.visitor import Visitor
from tests.support import TestBroker, unique_name, wait_until

DESK: ViewportSize = {"width": 1440, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
COUNT = 130
HOSTILE = "</dd></pre><b>bold</b><script>alert(1)</script>"


@pytest.fixture(params=[DESK, PHONE], ids=["desk", "phone"])
def operator(request: pytest.FixtureRequest, visitor: Visitor) -> Visitor:
    visitor.page.set_viewport_size(request.param)
    return visitor


@pytest.fixture(scope="module")
def events(cluster: Cluster) -> Iterator[str]:
    """A topic with messages 0 to COUNT - 1, in this order, on both nodes in turn."""
    cluster.clear()
    topic = unique_name("events")
    cluster.add(topic, "work")
    for number in range(COUNT):
        body = {"number": number, "customer": {"id": number % 10}, "note": f"event {number}"}
        cluster.nsqds[number % 2].publish(topic, json.dumps(body).encode())
    yield topic


def numbers(visitor: Visitor) -> list[int]:
    return [json.loads(text)["number"] for text in visitor.find("#message-list pre").all_text_contents()]


# Messages


def test_a_whole_topic_is_paged_filtered_and_entered_at_a_place(operator: Visitor, events: str) -> None:
    operator.go(f"/messages/{events}")
    seen = numbers(operator)
    assert len(seen) == 50
    # Rows are compact: the page was 28,000 pixels high.
    height = operator.page.evaluate("document.querySelector('#message-list').clientHeight")
    assert height < 50 * 70
    row = operator.find("#message-list li").first
    expect(row.locator("pre")).to_be_hidden()
    row.locator("summary").click()
    expect(row.locator("pre")).to_be_visible()
    assert is_too_wide(operator) == ""
    assert operator.axe() == []
    while operator.find("#older-top").count():
        operator.follow("#older-top")
        seen += numbers(operator)
    assert seen == [*reversed(range(COUNT))]
    operator.follow("#newer-top")
    assert numbers(operator) == [*reversed(range(30, 80))]
    operator.follow("#oldest-top")
    assert numbers(operator) == [*reversed(range(50))]
    operator.find("#search").fill("customer.id=7 number>20 event")
    operator.follow("#peek-do")
    assert numbers(operator) == [*range(127, 20, -10)]
    operator.sees("#scanned", f"11 of {COUNT} messages match")
    assert "q=customer.id" in operator.page.url
    operator.find("#search").fill("number>many")
    operator.follow("#peek-do")
    operator.sees("#bad-query", "needs a number")


def test_a_topic_is_entered_at_a_time_and_at_an_offset(
    visitor: Visitor, cluster: Cluster, admin: AdminProcess, events: str
) -> None:
    found = admin.get(f"/api/messages/{events}?count=1000")["messages"]
    middle = next(one for one in found if json.loads(one["body"])["number"] == 100)
    visitor.go(f"/messages/{events}")
    at = middle["timestamp"]
    visitor.find("#time").fill(f"{at // 10**9}.{at % 10**9:09}")
    visitor.follow("#peek-do")
    assert numbers(visitor) == [*reversed(range(100, COUNT))]
    visitor.follow("#older-top")
    assert numbers(visitor) == [*reversed(range(50, 100))]
    visitor.go(f"/messages/{events}")
    visitor.find("#from").fill(str(middle["sequence"]))
    visitor.find("#peek-node").select_option(middle["node"])
    visitor.follow("#peek-do")
    assert numbers(visitor) == [*range(128, 99, -2)]


def test_a_channel_is_paged_in_the_order_of_delivery(visitor: Visitor, events: str) -> None:
    visitor.go(f"/messages/{events}/work")
    seen = numbers(visitor)
    while visitor.find("#newer-top").count():
        visitor.follow("#newer-top")
        seen += numbers(visitor) if visitor.find("#message-list").count() else []
    assert seen == [*range(COUNT)]


def test_live_tail_shows_new_messages_and_keeps_what_is_open_and_selected(
    visitor: Visitor, cluster: Cluster
) -> None:
    topic = unique_name("tail")
    cluster.add(topic, "c")
    cluster.nsqds[0].publish(topic, b'{"number": 1}')
    visitor.go(f"/messages/{topic}")
    visitor.follow("#tail")
    visitor.find("#message-list summary").click()
    visitor.find("#message-list [type=checkbox]").check()
    cluster.nsqds[1].publish(topic, b'{"number": 2}')
    expect(visitor.find("#message-list li")).to_have_count(2)
    assert numbers(visitor) == [2, 1]
    assert visitor.find("#message-list details[open]").count() == 1
    visitor.sees("#selected-count", "1 of 2 selected")
    visitor.follow("#stop-tail")
    expect(visitor.find("[data-live]")).to_have_count(0)


def test_messages_are_selected_copied_and_downloaded(
    visit: Callable[..., Visitor], admin: AdminProcess, cluster: Cluster, tmp_path: Path
) -> None:
    topic = unique_name("large")
    cluster.add(topic, "c")
    large = b'{"text": "%s"}' % (b"x" * 100_000)
    cluster.nsqds[0].publish(topic, large, b"two", b"\xff")
    visitor = visit(admin, permissions=["clipboard-read", "clipboard-write"])
    visitor.go(f"/messages/{topic}/c")
    expect(visitor.find("#download")).to_be_disabled()
    visitor.find("#select-all").check()
    visitor.sees("#selected-count", "3 of 3 selected")
    with visitor.page.expect_download() as waiting:
        visitor.find("#download").click()
    waiting.value.save_as(tmp_path / "found")
    lines = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert waiting.value.suggested_filename == f"{topic}.jsonl"
    bodies = {line.get("body", "").encode() or line["body_base64"] for line in lines}
    assert bodies == {large, b"two", "/w=="}, "not the whole bodies"
    for box in visitor.find("#message-list [type=checkbox]").all()[::2]:
        box.uncheck()
    visitor.find("#copy-text").click()
    visitor.sees("#selected-count", "Copied 1")
    assert visitor.page.evaluate("navigator.clipboard.readText()") == "two"


def publish_with_headers(nsqd: TestBroker, topic: str, body: bytes, **headers: str) -> None:
    named = {f"X-Nsq-Header-{name}": value for name, value in headers.items()}
    nsqd.request("POST", f"/pub?topic={topic}", body, named).expect_ok()


def test_headers_are_shown_filtered_copied_and_downloaded(
    visit: Callable[..., Visitor], admin: AdminProcess, cluster: Cluster, tmp_path: Path
) -> None:
    topic = unique_name("headers")
    cluster.add(topic, "c")
    nsqd = cluster.nsqds[0]
    nsqd.publish(topic, b'{"number": 1}')
    publish_with_headers(nsqd, topic, b'{"number": 2}', tenant="acme", priority="12")
    publish_with_headers(nsqd, topic, b'{"number": 3}', tenant=HOSTILE, traceparent="y" * 3000)
    visitor = visit(admin, permissions=["clipboard-read", "clipboard-write"])
    for size in (DESK, PHONE):
        visitor.page.set_viewport_size(size)
        for path in (f"/messages/{topic}", f"/messages/{topic}/c", f"/messages/{topic}?tail=1"):
            visitor.go(path)
            assert visitor.find("#message-list .headers").count() == 2
            expect(visitor.find("#message-list summary").filter(has_text="2 headers")).to_have_count(2)
            visitor.find("#open-all").click()
            visitor.sees("#message-list", "acme")
            visitor.sees("#message-list", HOSTILE)
            assert visitor.find("#message-list b").count() == 0
            assert is_too_wide(visitor) == ""
            assert visitor.axe() == []
    for words, found in (
        ("@header.tenant=acme", [2]),
        ("@header.Priority>9", [2]),
        ("@header.tenant!=acme", [3, 1]),
        ("acme", [2]),
    ):
        visitor.go(f"/messages/{topic}?{urlencode({'q': words})}")
        assert numbers(visitor) == found, words
    visitor.go(f"/messages/{topic}?q=number<3")
    visitor.find("#select-all").check()
    with visitor.page.expect_download() as waiting:
        visitor.find("#download").click()
    waiting.value.save_as(tmp_path / "found")
    lines = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert [line.get("headers") for line in lines] == [None, {"tenant": "acme", "priority": "12"}]
    visitor.find("#copy-headers").click()
    visitor.sees("#selected-count", "Copied 2")
    copied = 'tenant: acme\npriority: 12\n\n{\n  "number": 2\n}\n\n\n{\n  "number": 1\n}\n'
    assert visitor.page.evaluate("navigator.clipboard.readText()") == copied
    visitor.find("#copy-text").click()
    assert "acme" not in visitor.page.evaluate("navigator.clipboard.readText()")


def test_dead_letters_are_grouped_by_reason(operator: Visitor, cluster: Cluster) -> None:
    topic = unique_name("dead")
    cluster.add(topic, "review")
    for number in range(70):
        error = f"Timeout: no answer after {number} ms" if number % 7 else 'ValueError: "amount" is null'
        said = {"topic": "payments", "channel": "ledger", "id": "0" * 16, "attempts": 5, "error": error}
        letter = json.dumps({**said, "text": json.dumps({"number": number}), "base64": None})
        cluster.nsqds[number % 2].publish(topic, letter.encode())
    operator.go(f"/messages/{topic}/review")
    rows = operator.find("#reasons tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("Timeout: no answer after # ms")
    expect(rows.nth(0).locator(".num")).to_have_text("60")
    with operator.next_page():
        rows.nth(1).get_by_role("link").click()
    operator.sees("#scanned", "10 of 70 messages match")
    assert numbers(operator) == [*range(0, 70, 7)]
    assert operator.axe() == []


# Settings


def test_retention_is_shown_explained_and_changed(operator: Visitor, cluster: Cluster) -> None:
    topic = unique_name("kept")
    cluster.add(topic, "c")
    operator.go(f"/replay/{topic}/c")
    operator.sees("#keeps-nothing", "does not keep finished messages")
    operator.sees("#positions", "Retention is off")
    operator.find("#keep-open").click()
    operator.find("#keep-age").fill("3d")
    assert operator.axe() == []
    assert operator.act("#keep-do") == "Settings changed. They apply from now on."
    operator.sees("#positions", "Finished messages stay for 3 d, up to 10.0 GB.")
    assert operator.find("#keeps-nothing").count() == 0
    operator.go(f"/topics/{topic}")
    operator.sees("#settings-table", "3 d set here")
    operator.sees("#settings-table", "os flag of nsqd")
    operator.find("#change-settings-open").click()
    operator.find("#retention-bytes").fill("lots")
    assert "is not a size" in operator.act("#settings-do")
    operator.find("#change-settings-open").click()
    operator.find("#retention-age").fill("")
    operator.find("#durability").select_option("fsync")
    assert operator.act("#settings-do") == "Settings changed. They apply from now on."
    operator.sees("#settings-table", "fsync set here")
    for nsqd in cluster.nsqds:
        found = json.loads(nsqd.http("GET", "/topic/settings", topic=topic))
        assert (found["retention_age"], found["retention_bytes"], found["durability"]) == (
            None,
            10 * 10**9,
            "fsync",
        )
    assert is_too_wide(operator) == ""


def test_the_archive_is_seen_changed_and_its_failure_needs_attention(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    flags = {"max_bytes_per_file": 100_000, "sync_timeout": 0.1, "checkpoint_interval": 0.1}
    with Cluster(as_processes=True, archive=store.as_uri(), **flags) as cluster:
        (nsqd,) = cluster.nsqds
        cluster.add("clicks", "c")
        for _ in range(30):
            nsqd.publish("clicks", b"x" * 10_000)
        visitor = visit(cluster.admin(poll_interval=POLL_S))
        wait_until(lambda: nsqd.stats("clicks")["topics"][0]["archive"]["segments"] > 1)
        for size in (DESK, PHONE):
            visitor.page.set_viewport_size(size)
            visitor.go("/topics/clicks")
            visitor.sees("#archive-table", re.compile("works[0-9]+ files, .* KB20"))
            visitor.sees("#archive-settings", "yes flag of nsqd")
            visitor.find("#change-settings-open").click()
            assert visitor.axe() == []
            assert is_too_wide(visitor) == ""
        visitor.find("#archive-age").fill("365d")
        visitor.find("#archive-local").fill("10GB")
        assert visitor.act("#settings-do") == "Settings changed. They apply from now on."
        visitor.sees("#archive-settings", "365 d set here")
        visitor.sees("#archive-settings", "10.0 GB set here")
        visitor.find("#change-settings-open").click()
        visitor.find("#archive-on").select_option("false")
        assert visitor.act("#settings-do") == "Settings changed. They apply from now on."
        visitor.sees("#archive-table", "off")
        visitor.find("#change-settings-open").click()
        visitor.find("#archive-on").select_option("true")
        assert visitor.act("#settings-do") == "Settings changed. They apply from now on."
        # The store is gone: a file is where its directory was.
        store.rename(tmp_path / "away")
        store.touch()
        for _ in range(30):
            nsqd.publish("clicks", b"x" * 10_000)
        wait_until(lambda: nsqd.stats("clicks")["topics"][0]["archive"]["error"])
        visitor.go("/")
        visitor.sees("#problems", "archive fails")
        visitor.sees("#problems", "cannot be archived")
        assert visitor.axe() == []
        visitor.page.goto("about:blank")


def test_a_policy_is_seen_set_changed_and_removed(operator: Visitor, cluster: Cluster) -> None:
    topic = unique_name("policy")
    cluster.add(topic, "billing")
    operator.go(f"/topics/{topic}")
    operator.sees("#policy-table", "as in NSQ")
    operator.find("#change-policy-open").click()
    operator.find("#policy-retry_delay").fill("5s")
    operator.find("#policy-expire_after").fill("7d")
    assert operator.axe() == []
    assert is_too_wide(operator) == ""
    assert operator.act("#policy-do") == "Policy set. It applies from now on."
    operator.sees("#policy-table", "4 failures")
    operator.sees("#policy-table", "after 5 s, ×2 up to 5 min, ±10%")
    operator.go(f"/topics/{topic}/billing")
    operator.sees("#policy-table", "the topic's")
    operator.sees("#channel-dead-letters", "0")
    operator.find("#change-policy-open").click()
    operator.find("#policy-max_attempts").fill("many")
    assert "is not a number" in operator.act("#policy-do")
    operator.find("#change-policy-open").click()
    operator.find("#policy-max_attempts").fill("9")
    operator.find("#policy-count").select_option("deliveries")
    assert operator.act("#policy-do") == "Policy set. It applies from now on."
    operator.sees("#policy-table", "9 deliveries")
    assert is_too_wide(operator) == ""
    assert operator.axe() == []
    # The form has what is set, so that one field can be changed.
    operator.find("#change-policy-open").click()
    operator.find("#policy-expired").select_option("drop")
    operator.find("#policy-expire_after").fill("60s")
    operator.act("#policy-do")
    found = json.loads(cluster.nsqds[1].http("GET", "/channel/settings", topic=topic, channel="billing"))
    assert (found["policy"]["max_attempts"], found["policy"]["expired"]) == (9, "drop")
    operator.go(f"/topics/{topic}")
    operator.sees("#policy-channels", "billing")
    operator.go(f"/topics/{topic}/billing")
    assert operator.act("#remove-policy") == "Policy removed."
    operator.sees("#policy-table", "the topic's")


def test_an_order_is_seen_set_changed_and_removed(operator: Visitor, cluster: Cluster) -> None:
    topic = unique_name("order")
    cluster.add(topic, "billing")
    operator.go(f"/topics/{topic}/billing")
    operator.sees("#order-table", "No fixed order")
    operator.find("#change-order-open").click()
    operator.find("#order-ordered_by").fill("customer")
    assert "ordered_by must be a JSON pointer" in operator.act("#order-do")
    operator.find("#change-order-open").click()
    operator.find("#order-ordered_by").fill("/customer/id")
    assert operator.axe() == []
    assert is_too_wide(operator) == ""
    assert operator.act("#order-do") == "Order set. It applies from now on."
    operator.sees("#order-table", "/customer/id")
    operator.sees("#order-table", "one after the other")
    assert is_too_wide(operator) == ""
    operator.find("#change-order-open").click()
    expect(operator.find("#order-ordered_by")).to_have_value("/customer/id")
    operator.find("#order-ordered_by").fill("header:customer")
    operator.act("#order-do")
    stats = [nsqd.channel_stats(topic, "billing") for nsqd in cluster.nsqds]
    assert [one and one["ordered_by"] for one in stats] == ["header:customer"] * 2
    assert operator.act("#remove-order") == "The channel has no order now."
    operator.sees("#order-table", "No fixed order")


# Tables, search, times, charts


def test_tables_sort_and_the_address_says_how(
    operator: Visitor, cluster: Cluster, admin: AdminProcess
) -> None:
    group = unique_name("sorted")
    few, many = f"{group}.a", f"{group}.b"
    cluster.add(few, "c")
    cluster.add(many, "c")
    cluster.nsqds[0].publish(few, b"1")
    cluster.nsqds[0].publish(many, *[b"1"] * 5)
    wait_until(lambda: (admin.get(f"/api/history/topics/{many}")["values"].get("backlog") or [0])[-1] == 5)
    operator.go(f"/topics?q={group}")
    first = operator.find("#topic-rows th").first
    expect(first).to_contain_text(few)
    operator.follow("#sort-backlog")
    expect(operator.find("th:has(#sort-backlog)")).to_have_attribute("aria-sort", "descending")
    expect(first).to_contain_text(many)
    # The live part keeps the order, and the filter.
    operator.page.keyboard.press("r")
    expect(first).to_contain_text(many)
    assert f"q={group}" in operator.page.url
    operator.follow("#sort-backlog")
    expect(operator.find("#topic-rows th").last).to_contain_text(many)
    # On a phone the important column is beside the name, without scrolling.
    box = operator.find("#topic-rows td").first.bounding_box()
    width = operator.page.viewport_size or {"width": 0}
    assert box and box["x"] + box["width"] <= width["width"]


def test_the_search_finds_topics_channels_nodes_and_consumers(
    operator: Visitor, cluster: Cluster, events: str
) -> None:
    name = unique_name("needle")
    cluster.add(f"{name}.topic", f"{name}.channel")
    with cluster.nsqds[0].connect() as consumer:
        consumer.identify(client_id="x", hostname=f"{name}-host", user_agent="agent/1")
        consumer.sub(f"{name}.topic", f"{name}.channel")
        operator.go("/")
        # The search needs no script. nsqadmin may know the topic before the consumer.
        wait_until(lambda: f"{name}-host" in _found(operator, name), what=name)
        operator.sees("#found-channels", f"{name}.topic / {name}.channel")
        operator.sees("#found-clients", f"{name}-host")
        assert operator.axe() == []
        assert is_too_wide(operator) == ""
        operator.find("#found-clients a").click()
        operator.sees("#channel-name", f"{name}.channel")
    assert cluster.addresses[0] in _found(operator, cluster.addresses[0].partition(":")[2])


def _found(visitor: Visitor, words: str) -> str:
    visitor.find("#find").fill(words)
    with visitor.next_page():
        visitor.find("#find").press("Enter")
    return visitor.text("main")


def test_all_times_are_in_one_zone_that_can_be_switched(
    visit: Callable[..., Visitor], admin: AdminProcess, events: str
) -> None:
    visitor = visit(admin, timezone_id="Asia/Kolkata")
    visitor.go(f"/messages/{events}")
    shown = visitor.find("#message-list time").first
    before = shown.inner_text()
    assert shown.get_attribute("datetime") == before.replace(" ", "T") + "Z"
    visitor.find("#zone-button").click()
    expect(visitor.find("#zone-button")).to_have_text("Time: UTC+05:30")
    assert shown.inner_text() != before
    # A time that is typed is one of the zone that is shown.
    visitor.find("#time").fill(visitor.find("#message-list time").last.inner_text())
    visitor.follow("#peek-do")
    assert numbers(visitor)[-1] <= COUNT - 50, "the time was taken for one in UTC"
    visitor.go("/")
    expect(visitor.find("#zone-button")).to_have_text("Time: UTC+05:30")


def test_charts_share_a_cursor_and_a_zoom_that_the_address_keeps(
    operator: Visitor, admin: AdminProcess, events: str
) -> None:
    wait_until(lambda: len(admin.get("/api/history")["times"]) > 8)
    operator.go("/")
    rates, depth = operator.find("#chart-rates svg"), operator.find("#chart-depth svg")
    rates.scroll_into_view_if_needed()
    box = rates.bounding_box()
    assert box
    mouse, high = operator.page.mouse, box["y"] + 60
    operator.point_at(rates, 0.6)
    for chart in (rates, depth):
        expect(chart.locator("line.cursor")).to_have_count(1)
    mouse.down()
    mouse.move(box["x"] + box["width"] * 0.9, high, steps=3)
    mouse.up()
    expect(operator.page).to_have_url(re.compile(r"zoom=\d+-\d+"))
    expect(operator.find("#unzoom")).to_be_visible()
    axis = depth.locator("text.axis").all_text_contents()
    operator.page.reload()
    operator.wait_for_script()
    assert depth.locator("text.axis").all_text_contents()[-1] == axis[-1]
    operator.find("#unzoom").click()
    expect(operator.page).not_to_have_url(re.compile("zoom="))
    depth.focus()
    operator.page.keyboard.press("+")
    expect(operator.find("#unzoom")).to_be_visible()
    operator.page.keyboard.press("0")
    expect(operator.find("#unzoom")).to_be_hidden()


def test_a_chart_of_what_is_switched_off_says_how_to_switch_it_on(visitor: Visitor, events: str) -> None:
    for path in (f"/topics/{events}", f"/topics/{events}/work"):
        visitor.go(path)
        visitor.sees("#chart-latency", "--e2e-processing-latency-percentile")


@pytest.fixture
def empty_cluster() -> Iterator[Cluster]:
    """Ends after the visit: a page asks its nsqadmin again and again."""
    with Cluster(nsqds=0, as_processes=True) as cluster:
        yield cluster


def test_an_empty_cluster_says_what_to_do_first(
    empty_cluster: Cluster, visit: Callable[..., Visitor]
) -> None:
    admin = empty_cluster.admin(poll_interval=0.2)
    assert isinstance(admin, AdminProcess)
    visitor = visit(admin, viewport=PHONE, is_mobile=True)
    visitor.go("/")
    visitor.sees("#first-steps", "nsqd --lookupd-tcp-address")
    assert visitor.axe() == []
    empty_cluster.start_nsqd()
    visitor.sees("#first-steps", f"{empty_cluster.addresses[0]}/pub?topic=test")
    assert is_too_wide(visitor) == ""
    empty_cluster.nsqds[0].publish("test", b"hello")
    expect(visitor.find("#first-steps")).to_have_count(0)


# Dead letters


def test_dead_letters_are_rehearsed_put_back_and_cancelled(operator: Visitor, cluster: Cluster) -> None:
    topic = unique_name("letters")
    cluster.add(topic, "c")
    for nsqd in cluster.nsqds:
        policy = b'{"policy": {"max_attempts": 1}}'
        nsqd.request("PUT", f"/channel/settings?topic={topic}&channel=c", policy).expect_json()
        with nsqd.connect() as consumer:
            consumer.sub(topic, "c", rdy=1)
            for number in range(4):
                publish_with_headers(nsqd, topic, json.dumps({"number": number}).encode(), tenant=HOSTILE)
                consumer.req(consumer.read_message().id)
            wait_until(lambda: nsqd.channel_stats(topic, "c")["dead_letter_count"] == 4)  # noqa: B023
    operator.go(f"/topics/{topic}.dead")
    operator.follow("#letters-link")
    operator.sees("#groups", f"{topic} / c")
    assert cells(operator) == ["8", "0"]
    operator.find("#groups summary").click()
    operator.sees("#groups pre", '{"number": 3}')
    operator.sees("#groups .headers", f"tenant{HOSTILE}")
    assert is_too_wide(operator) == ""
    assert operator.axe() == []
    operator.find("#field").fill("/number")
    operator.find("#value").fill("2")
    operator.follow("#rehearse")
    assert cells(operator) == ["2", "0"]
    operator.follow(f"#redrive-do-{topic}")
    expect(operator.find("#progress td").filter(has_text="finished")).to_have_count(len(cluster.nsqds))
    operator.go(operator.page.url.removeprefix(operator.site))
    assert [nsqd.channel_stats(topic, "c")["depth"] for nsqd in cluster.nsqds] == [1, 1]
    assert cells(operator) == ["6", "2"]
    operator.find(f"#rate-{topic}").fill("0.001")
    operator.follow(f"#redrive-do-{topic}")
    operator.sees("#progress", "running, 0.001 / s")
    assert operator.axe() == []
    operator.follow("#cancel-redrive")
    operator.sees("#progress", "cancelled")
    assert cells(operator) == ["6", "2"]
    operator.find("#since").fill("whenever")
    operator.follow("#rehearse")
    operator.sees("#bad-query", "is not a time")
    operator.go(f"/messages/{topic}.dead")
    expect(operator.find("#message-list summary").filter(has_text="1 header")).to_have_count(8)
    operator.find("#open-all").click()
    for shown in ("nsq-dead-reason", "requeued", HOSTILE):
        operator.sees("#message-list .headers", shown)
    assert operator.find("#message-list b").count() == 0
    assert is_too_wide(operator) == ""
    assert operator.axe() == []


def cells(visitor: Visitor) -> list[str]:
    """How many letters can be put back, and were put back before; and what the page warns of."""
    return visitor.find("#warning, #groups tbody tr td.num").all_text_contents()
