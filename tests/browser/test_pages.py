"""Every page in a real browser: content, live updates, phone, dark mode, keyboard, accessibility.
The visitor checks in every test that nothing is fetched from other hosts and no script fails."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from playwright.sync_api import expect

from nsparq.pipeline.execute.progress import Figures, State
from nsparq.pipeline.execute.status import Status, serve
from tests.admin.support import AdminProcess, Cluster
from tests.browser.visitor import Visitor
from tests.support import RawConnection, unique_name, wait_until

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
PAGES = {
    "overview": "/",
    "topics": "/topics",
    "topic": "/topics/orders",
    "channel": "/topics/orders/emails",
    "nodes": "/nodes",
    "node": "/nodes/{node}",
    "messages": "/messages/orders",
    "messages of a channel": "/messages/orders/billing",
    "replay": "/replay/orders/billing?to=start",
    "pipelines": "/pipelines",
    "lookup": "/lookup",
    "counter": "/counter",
    "search": "/search?q=e",
    "not there": "/topics/nowhere",
}


@pytest.fixture(scope="module")
def consumer(cluster: Cluster, admin: AdminProcess) -> Iterator[RawConnection]:
    """A consumer of orders / emails. orders / billing has none, and idle.topic is inactive. Topics
    of other tests are deleted: long pages take seconds to check."""
    cluster.clear()
    cluster.add("orders", "billing", "emails")
    cluster.lookupd.post("/channel/create", topic="idle.topic", channel="c")
    cluster.nsqds[0].publish(
        "orders", b'{"order": 17, "items": ["tea", "milk"]}', b"\x00\xff\x10binary", b"text"
    )
    with cluster.nsqds[0].connect() as consumer:
        about = {"client_id": "mailer", "hostname": "mail-1", "user_agent": "mailer/2.0"}
        # Nobody reads here while the tests go on.
        consumer.identify(**about, heartbeat_interval=600_000, msg_timeout=600_000)
        consumer.sub("orders", "emails", rdy=1)
        wait_until(lambda: len(admin.get("/api/history/topics/orders/emails")["times"]) > 3)
        yield consumer


@pytest.fixture
def place(consumer: RawConnection, cluster: Cluster) -> Callable[[str], str]:
    return lambda name: PAGES[name].format(node=cluster.addresses[0])


def is_too_wide(visitor: Visitor) -> str:
    """The element that makes the page scroll sideways, if one does."""
    found: str = visitor.page.evaluate(
        """() => {
          const width = document.documentElement.clientWidth;
          if (document.documentElement.scrollWidth <= width) return "";
          const wide = [...document.querySelectorAll("main *, header *, footer *")].filter(
            (one) => !one.closest(".scroll") && one.getBoundingClientRect().right > width + 1);
          return wide.map((one) => one.outerHTML.slice(0, 120)).slice(0, 3).join("\\n") || "the page";
        }"""
    )
    return found


def is_too_tall(visitor: Visitor) -> str:
    """A row of a table that is mostly empty, because a cell outside of the screen has many
    lines."""
    found: str = visitor.page.evaluate(
        """() => {
          const rows = [...document.querySelectorAll("table.data tbody tr:not(:has(details[open]))")];
          return rows.filter((one) => one.offsetHeight > 130).map((one) => one.innerText).join("\\n");
        }"""
    )
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_in_light_and_dark_and_on_a_phone(
    visitor: Visitor, place: Callable[[str], str], name: str
) -> None:
    if name == "not there":
        visitor.allowed.append("status of 404")
    visitor.go(place(name), status=404 if name == "not there" else 200)
    # Everything that is folded, but one chart's values are like another's.
    visitor.page.evaluate(
        """document.querySelectorAll(
               "details.confirm, details.help, .message details, .chart:first-child details")
             .forEach((one) => (one.open = true))"""
    )
    assert visitor.axe() == []
    light = visitor.page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor")
    visitor.page.emulate_media(color_scheme="dark")
    dark = visitor.page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor")
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(18, 22, 28)")
    assert visitor.axe("color-contrast") == []
    visitor.page.set_viewport_size({"width": 360, "height": 740})
    assert is_too_wide(visitor) == ""
    assert is_too_tall(visitor) == ""
    assert visitor.axe("target-size", "scrollable-region-focusable") == []


# What stands on them


def test_the_overview_says_what_needs_attention(visitor: Visitor, place: Callable[[str], str]) -> None:
    visitor.go(place("overview"))
    assert visitor.number("#total-nodes") == 2
    problem = visitor.page.locator(".problem", has_text="orders / billing")
    expect(problem).to_contain_text("no consumers")
    expect(problem).to_contain_text("3 waiting")
    problem.get_by_role("link").click()
    visitor.sees("#channel-name", "billing")


def test_a_node_that_hangs_comes_first_on_the_overview_and_goes_when_it_is_back(
    visit: Callable[..., Visitor], cluster: Cluster, place: Callable[[str], str]
) -> None:
    admin = cluster.admin(poll_interval=0.2, http_client_request_timeout=0.3)
    visitor = visit(admin)
    nsqd = cluster.nsqds[1]
    nsqd.signal(signal.SIGSTOP)  # type: ignore[attr-defined]  # a process
    try:
        visitor.go(place("overview"))
        visitor.sees(".problem.critical", "node does not answer")
        assert cluster.addresses[1] in visitor.text(".problem:first-child")
        severities = visitor.find(".severity").all_inner_texts()
        order = ["critical", "warning", "notice"]
        assert [one.lower() for one in severities] == sorted(
            (one.lower() for one in severities), key=order.index
        )
        expect(visitor.find("#problem-badge")).to_have_text("1")
        expect(visitor.page).to_have_title("(1) Overview · nsqadmin")
    finally:
        nsqd.signal(signal.SIGCONT)  # type: ignore[attr-defined]
    expect(visitor.find(".problem.critical")).to_have_count(0)
    expect(visitor.find("#problem-badge")).to_be_hidden()


def test_the_pages_of_nsq_show_what_nsq_shows(
    visitor: Visitor, cluster: Cluster, place: Callable[[str], str]
) -> None:
    visitor.go(place("topics"))
    visitor.find("#topic-orders").click()
    visitor.sees("#topic-name", "orders")
    assert visitor.find("#nodes-table tbody tr").count() == 2
    assert visitor.number("#topic-messages") == 3
    visitor.find("#channel-emails").click()
    visitor.sees("#clients-table", "mailer/2.0")
    visitor.sees("#clients-table", "mail-1")
    assert visitor.number("#channel-clients") == 1
    visitor.go(place("nodes"))
    assert visitor.find("#node-rows tr").count() == 2
    visitor.go(place("node"))
    visitor.sees("#node-table", "emails")
    visitor.sees("#node-table", "mailer/2.0")
    visitor.go(place("lookup"))
    visitor.sees("#daemons", cluster.lookupd_address)
    visitor.sees("#inactive", "idle.topic")
    visitor.go(place("counter"))
    assert visitor.number("#counter") >= 6


def test_pipelines_are_shown_with_their_figures_charts_and_errors(
    visit: Callable[..., Visitor], cluster: Cluster, consumer: RawConnection
) -> None:
    """As `nsparq pipeline run` tells them at its `metrics_address`."""
    daily = Figures("daily", "orders", "parquet /data", State.RUNNING, rows=1200, lag=7, channel="billing")
    broken = Figures("broken", "orders", "noop", State.FAILED, failures=2, error="no such <b>column</b>")
    status = Status("p.toml", [daily, broken], started=0.0)
    with closing(serve("127.0.0.1:0", status)) as endpoint:
        visitor = visit(cluster.admin(poll_interval=0.2, pipeline_http_address=(endpoint.address,)))
        visitor.go("/")
        visitor.sees(".problem.critical", "no such <b>column</b>")
        # It reads the channel, though nsqd counts no consumer.
        expect(visitor.page.locator(".problem", has_text="orders / billing")).to_have_count(0)
        visitor.find(".problem.critical a").click()
        visitor.sees("#pipelines-table", "parquet /data")
        expect(visitor.find(".chart[id$=daily-lag]")).to_have_attribute("data-drawn", "yes")
        daily.lag, daily.rows, daily.catch_up_seconds = 4321, 5000, 7200.0
        visitor.sees("#pipelines-table", "4,3212 h")
        assert visitor.axe() == []
        visitor.page.get_by_role("link", name="orders / billing").click()
        visitor.sees("#channel-name", "billing")
        visitor.wait_for_script()


# Live


def test_a_page_updates_itself_and_says_when_it_cannot(
    visitor: Visitor, cluster: Cluster, admin: AdminProcess
) -> None:
    topic = unique_name("live")
    cluster.add(topic, "c")
    visitor.go(f"/topics/{topic}/c")
    visitor.sees("#live-state", "live")
    visitor.page.evaluate("window.wasHere = true")
    cluster.nsqds[0].publish(topic, *[b"x"] * 41)
    expect(visitor.find("#channel-depth")).to_have_text("41")
    visitor.page.keyboard.press(".")
    visitor.sees("#live-state", "stopped")
    visitor.page.keyboard.press(".")
    visitor.sees("#live-state", "live")
    visitor.allowed.append("net::ERR_")
    visitor.page.context.set_offline(True)
    visitor.page.keyboard.press("r")
    visitor.sees("#live-state", "not up to date")
    visitor.page.context.set_offline(False)
    visitor.page.keyboard.press("r")
    expect(visitor.find("#live-state")).to_have_text("live")
    assert visitor.page.evaluate("window.wasHere"), "the page was loaded anew"


def test_an_update_keeps_focus_and_input(visitor: Visitor, cluster: Cluster) -> None:
    topic = unique_name("live")
    cluster.add(topic, "c")
    visitor.go(f"/topics/{topic}")
    visitor.find("#delete-open").click()
    visitor.find("#delete-name").fill(topic[:3])
    visitor.find("#channel-c").focus()
    cluster.nsqds[0].publish(topic, b"x")
    expect(visitor.find("#channels-table td").first).to_have_text("1")
    expect(visitor.find("#channel-c")).to_be_focused()
    expect(visitor.find("#delete-name")).to_have_value(topic[:3])


def test_topics_are_filtered_while_typing_and_updates_keep_the_filter(
    visitor: Visitor, cluster: Cluster, place: Callable[[str], str]
) -> None:
    other = unique_name("other")
    visitor.go(place("topics"))
    visitor.page.keyboard.press("/")
    visitor.page.keyboard.type("ORD")
    expect(visitor.find("#topic-rows tr")).to_have_count(1)
    expect(visitor.page).to_have_url(re.compile(r"\?q=ORD$"))
    cluster.add(other, "ord")
    visitor.page.keyboard.type("ERS")
    expect(visitor.page).to_have_url(re.compile(r"\?q=ORDERS$"))
    visitor.page.reload()
    expect(visitor.find("#topic-rows tr")).to_have_count(1)
    expect(visitor.find("#filter")).to_have_value("ORDERS")
    visitor.find("#filter").fill(other)
    visitor.sees("#topic-rows tr", other)


# Charts


def test_charts_are_drawn_and_read_by_mouse_by_keyboard_and_as_a_table(
    visitor: Visitor, cluster: Cluster, consumer: RawConnection, place: Callable[[str], str]
) -> None:
    visitor.go(place("channel"))
    depth = visitor.find("#chart-depth")
    expect(depth).to_have_attribute("data-drawn", "yes")
    expect(depth.locator("svg path.line")).to_have_attribute("d", re.compile(r"^M[\d. ]+(L[\d. ]+){2,}"))
    marks = depth.locator("svg text.axis").all_text_contents()
    # How many round times there are between the first poll and the last depends on the moment.
    assert sum(":" in one for one in marks) >= 1 and sum(":" not in one for one in marks) >= 3, marks
    expect(depth.locator("[data-legend]")).to_contain_text(re.compile(r"waiting \d"))
    box = depth.locator("svg").bounding_box()
    assert box and box["width"] > 200 and box["height"] > 60
    visitor.point_at(depth.locator("svg"), 0.9, 20)
    expect(depth.locator("[data-legend]")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d"))
    visitor.page.mouse.move(0, 0)
    picture = depth.locator("svg")
    picture.focus()
    visitor.page.keyboard.press("End")
    last = picture.get_attribute("aria-label") or ""
    visitor.page.keyboard.press("Home")
    first = picture.get_attribute("aria-label") or ""
    assert re.match(r"\d\d:\d\d:\d\d: waiting \d", first) and first != last
    # The first is gone as soon as the chart is full; this one stays for long.
    visitor.page.keyboard.press("End")
    visitor.page.keyboard.press("ArrowLeft")
    chosen = picture.get_attribute("aria-label") or ""
    drawn = picture.element_handle()
    visitor.page.wait_for_function("one => !one.isConnected", arg=drawn)
    expect(picture).to_be_focused()
    expect(picture).to_have_attribute("aria-label", chosen)
    depth.locator("summary").click()
    expect(depth.locator("tbody tr").nth(3)).to_be_attached()


def test_the_range_of_the_charts_is_chosen_and_kept(visitor: Visitor, place: Callable[[str], str]) -> None:
    visitor.go(place("overview"))
    expect(visitor.find("#chart-rates")).to_have_attribute("data-drawn", "yes")
    with visitor.page.expect_response(lambda answer: "range=week" in answer.url):
        visitor.find("#range-week").click()
    expect(visitor.page).to_have_url(re.compile("range=week"))
    visitor.go(place("topic"))
    expect(visitor.find("#range-week")).to_have_attribute("aria-pressed", "true")
    visitor.go(place("topic") + "?range=day")
    expect(visitor.find("#range-day")).to_have_attribute("aria-pressed", "true")


def test_a_consumer_has_its_own_charts(visitor: Visitor, place: Callable[[str], str]) -> None:
    visitor.go(place("channel"))
    visitor.find("#clients-table tbody a").click()
    expect(visitor.find("#chart-client")).to_have_attribute("data-drawn", "yes")
    visitor.sees("#chart-client figcaption", "mail-1")
    visitor.sees("#chart-client [data-legend]", "in flight 1")


# By keyboard, on a phone, in the dark


def test_everything_can_be_reached_by_keyboard(
    visitor: Visitor, cluster: Cluster, place: Callable[[str], str]
) -> None:
    topic = unique_name("keys")
    cluster.add(topic, "c")
    keyboard = visitor.page.keyboard
    visitor.go(place("overview"))
    keyboard.press("Tab")
    expect(visitor.find("#skip-link")).to_be_focused()
    keyboard.press("?")
    expect(visitor.find("#help")).to_be_visible()
    keyboard.press("Escape")
    expect(visitor.find("#help")).to_be_hidden()
    for key, path in (
        ("n", "/nodes"),
        ("l", "/lookup"),
        ("p", "/pipelines"),
        ("c", "/counter"),
        ("t", "/topics"),
    ):
        keyboard.press("g")
        keyboard.press(key)
        visitor.page.wait_for_url(visitor.site + path)
        visitor.wait_for_script()
    keyboard.press("/")
    keyboard.type(topic)
    keyboard.press("Escape")
    keyboard.press("j")
    expect(visitor.find(f"#topic-{topic}")).to_be_focused()
    keyboard.press("Enter")
    visitor.sees("#topic-name", topic)
    visitor.wait_for_script()
    visitor.find("#delete-open").focus()
    keyboard.press("Enter")
    expect(visitor.find("#delete-name")).to_be_focused()
    keyboard.press("Escape")
    expect(visitor.find("#delete-open")).to_be_focused()
    keyboard.press("Enter")
    expect(visitor.find("#delete-name")).to_be_focused()
    keyboard.type(topic)
    with visitor.next_page():
        keyboard.press("Enter")
    visitor.sees("#note", f"Deleted {topic}.")


def test_on_a_phone_an_action_is_a_few_taps(
    visit: Callable[..., Visitor], admin: AdminProcess, cluster: Cluster
) -> None:
    topic = unique_name("phone")
    cluster.add(topic, "c")
    visitor = visit(admin, **PHONE)
    visitor.go(f"/topics/{topic}/c")
    assert is_too_wide(visitor) == ""
    for name in ("#pause", "#empty-open", "#nav-topics"):
        box = visitor.find(name).bounding_box()
        assert box and box["height"] >= 32, name
    with visitor.next_page():
        visitor.find("#pause").tap()
    visitor.sees("#note", "Paused.")
    visitor.sees("#paused-note", "Paused")


def test_light_and_dark_are_chosen_and_kept(visitor: Visitor) -> None:
    visitor.page.emulate_media(color_scheme="dark")
    visitor.go("/")
    colour = "getComputedStyle(document.documentElement).colorScheme"
    assert visitor.page.evaluate(colour) == "dark"
    button = visitor.find("#theme-button")
    button.click()
    expect(button).to_have_text("Theme: light")
    assert visitor.page.evaluate(colour) == "light"
    visitor.go("/topics")
    assert visitor.page.evaluate(colour) == "light"
    button.click()
    button.click()
    expect(button).to_have_text("Theme: system")
    assert visitor.page.evaluate(colour) == "dark"


def test_pages_and_forms_work_without_scripts(visitor: Visitor, cluster: Cluster) -> None:
    topic = unique_name("plain")
    cluster.add(topic, "c")
    visitor.switch_scripts_off()
    visitor.page.goto(f"{visitor.site}/topics/{topic}/c")
    visitor.find("#pause").click()
    visitor.sees("#note", "Paused.")
    visitor.find("#delete-open").click()
    visitor.find("#delete-name").fill("wrong")
    visitor.find("#delete-do").click()
    visitor.sees("#note", "Not confirmed: type c exactly.")
    visitor.find("#delete-open").click()
    visitor.find("#delete-name").fill("c")
    visitor.find("#delete-do").click()
    visitor.sees("#note", "Deleted c.")
