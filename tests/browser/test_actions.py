"""Every action on the pages, in a real browser: its effect on the daemons, and its line in the
log."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from nsparq.server.auth.policy_file import hash_generated
from tests.admin.support import AdminProcess, Cluster
from tests.browser.visitor import Visitor
from tests.support import TestBroker, unique_name, wait_until


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """With the channels c and d, on both nodes."""
    name = unique_name("acts")
    cluster.add(name, "c", "d")
    return name


def depth(cluster: Cluster, topic: str, channel: str = "c") -> int:
    found = [nsqd.channel_stats(topic, channel) for nsqd in cluster.nsqds]
    return sum(one["depth"] for one in found if one)


def is_paused(cluster: Cluster, topic: str, channel: str = "") -> set[bool]:
    found = [
        nsqd.channel_stats(topic, channel) if channel else nsqd.topic_stats(topic) for nsqd in cluster.nsqds
    ]
    return {one["paused"] for one in found if one}


def consume(nsqd: TestBroker, topic: str, count: int, channel: str = "c") -> None:
    with nsqd.connect() as client:
        client.identify()
        client.sub(topic, channel, rdy=10)
        client.read_messages(count, finish=True)
        client.barrier()


def letter(number: int, source: str = "source") -> bytes:
    """A dead letter as the client library writes them."""
    said = {"topic": source, "channel": "work", "id": "0" * 16, "attempts": 5, "error": "it <b>broke</b>"}
    return json.dumps({**said, "text": json.dumps({"n": number}), "base64": None}).encode()


def audited(admin: AdminProcess, topic: str) -> list[str]:
    """The actions that the log tells of this topic, each with what came of it."""
    lines = re.findall(r"AUDIT: (\w+) (.*?)user=.*?: (.*)", admin.stderr_text())
    return [f"{action}: {outcome}" for action, about, outcome in lines if f'topic="{topic}"' in about]


# Topics and channels


def test_topics_and_channels_are_created(visitor: Visitor, cluster: Cluster, admin: AdminProcess) -> None:
    topic = unique_name("made")
    visitor.go("/topics")
    visitor.find("#create-open").click()
    expect(visitor.find("#create-topic")).to_be_focused()
    visitor.find("#create-topic").fill("no such name")
    visitor.find("#create-do").click()
    assert visitor.page.evaluate("document.querySelector('#create-topic').validity.patternMismatch")
    visitor.find("#create-topic").fill(topic)
    visitor.find("#create-channel").fill("first")
    visitor.allowed.append("status of 404")  # no node has it until somebody publishes
    assert visitor.act("#create-do") == "Created."
    assert topic in cluster.lookupd.topics() and cluster.lookupd.channels(topic) == ["first"]
    cluster.add(topic)
    visitor.go(f"/topics/{topic}")
    visitor.find("#create-channel-name").fill("second#ephemeral")
    assert visitor.act("#create-channel-do") == "Created."
    visitor.sees("#channels-table", "second#ephemeral")
    assert cluster.nsqds[0].channel_stats(topic, "second#ephemeral")
    assert audited(admin, topic) == ["create_topic: done", "create_channel: done"] * 2


@pytest.mark.parametrize("channel", ["", "c"])
def test_pause_resume_empty_and_delete(
    visitor: Visitor, cluster: Cluster, admin: AdminProcess, topic: str, channel: str
) -> None:
    kind, name = ("channel", channel) if channel else ("topic", topic)
    visitor.go(f"/topics/{topic}" + (f"/{channel}" if channel else ""))
    assert visitor.act("#pause") == "Paused."
    assert is_paused(cluster, topic, channel) == {True}
    visitor.sees("#paused-note")
    for nsqd in cluster.nsqds:
        nsqd.publish(topic, b"x")
    visitor.find("#empty-open").click()
    button = visitor.find("#empty-do")
    for typed, is_ready in (("", False), (name[:-1], False), (name.upper(), False), (name, True)):
        visitor.find("#empty-name").fill(typed)
        assert button.is_enabled() is is_ready, typed
    assert visitor.act("#empty-do") == "Emptied."
    assert visitor.act("#unpause") == "Resumed."
    assert is_paused(cluster, topic, channel) == {False}
    assert depth(cluster, topic) == 0
    assert visitor.confirm("delete", name) == f"Deleted {name}."
    found = [
        nsqd.channel_stats(topic, channel) if channel else nsqd.topic_stats(topic) for nsqd in cluster.nsqds
    ]
    assert found == [None, None]
    expected = [f"{action}_{kind}: done" for action in ("pause", "empty", "unpause", "delete")]
    assert audited(admin, topic) == expected


def test_sending_a_form_ends_refreshes_under_way(visitor: Visitor, topic: str) -> None:
    """The form may delete the topic that a refresh asks for: its answer would be an error."""
    visitor.go(f"/topics/{topic}")
    visitor.page.evaluate(
        """() => {
            window.signals = [];
            const send = window.fetch;
            window.fetch = (url, options) => (signals.push(options.signal), send(url, options));
        }"""
    )
    visitor.page.keyboard.press("r")
    visitor.page.wait_for_function("signals.length > 1")
    were_aborted = visitor.page.evaluate(
        """() => {
            const before = signals.map((signal) => signal.aborted);
            const form = document.querySelector("form[method=post]");
            form.addEventListener("submit", (event) => event.preventDefault());
            form.requestSubmit();
            return [before, signals.map((signal) => signal.aborted)].map((all) => [...new Set(all)]);
        }"""
    )
    assert were_aborted == [[False], [True]]


@pytest.mark.parametrize("origin", ["topic", "node"])
def test_a_topic_is_removed_from_a_node(visitor: Visitor, cluster: Cluster, topic: str, origin: str) -> None:
    node = cluster.addresses[0]
    if origin == "topic":
        visitor.go(f"/topics/{topic}")
        opener = visitor.page.locator("summary", has_text=f"Remove from {node}")
        name = (opener.get_attribute("id") or "").removesuffix("-open")
        assert visitor.confirm(name, topic) == f"Removed {topic} from {node}."
    else:

        def is_listed() -> bool:
            """The page has the topics of the last poll."""
            visitor.go(f"/nodes/{node}")
            return topic in visitor.page.locator("#tombstone-topic option").all_text_contents()

        wait_until(is_listed)
        visitor.find("#tombstone-open").click()
        visitor.find("#tombstone-name").fill(topic)
        expect(visitor.find("#tombstone-do")).to_be_disabled()
        visitor.find("#tombstone-topic").select_option(topic)
        assert visitor.act("#tombstone-do") == f"Removed {topic} from {node}."
    assert [bool(nsqd.topic_stats(topic)) for nsqd in cluster.nsqds] == [False, True]


def test_inactive_topics_and_channels_are_deleted(visitor: Visitor, cluster: Cluster) -> None:
    topic = unique_name("gone")
    for channel in ("a", "b"):
        cluster.lookupd.post("/channel/create", topic=topic, channel=channel)
    visitor.go("/lookup")
    visitor.find(f"#delete-{topic}-a-open").scroll_into_view_if_needed()
    assert visitor.confirm(f"delete-{topic}-a", "a") == "Deleted a."
    assert cluster.lookupd.channels(topic) == ["b"]
    assert visitor.confirm(f"delete-{topic}", topic) == f"Deleted {topic}."
    assert topic not in cluster.lookupd.topics()


def test_a_failed_action_says_why(visitor: Visitor, cluster: Cluster, topic: str) -> None:
    visitor.go(f"/topics/{topic}/c")
    for nsqd in cluster.nsqds:
        nsqd.control("delete", topic, "c")
    visitor.allowed.append("status of 404")
    assert visitor.act("#pause") == "Failed: channel not found"
    visitor.sees("#error-title", "Channel not found")


# Messages


def test_messages_are_published_and_viewed(
    visitor: Visitor, cluster: Cluster, admin: AdminProcess, topic: str
) -> None:
    visitor.go(f"/topics/{topic}")
    visitor.find("#messages-link").click()
    visitor.sees("#no-messages")
    for body, node in (('{"fruit":"apple","price":[1,2]}', 0), ("line one\nline two", 1)):
        visitor.wait_for_script()
        visitor.find("#publish-open").click()
        visitor.find("#publish-body").fill(body)
        visitor.find("#publish-node").select_option(cluster.addresses[node])
        assert visitor.act("#publish-do") == f"Published to {cluster.addresses[node]}."
    visitor.find("#publish-open").click()
    visitor.find("#publish-body").fill("later")
    visitor.find("#publish-defer").fill("60000")
    assert visitor.act("#publish-do").startswith("Published to ")
    cluster.nsqds[0].publish(topic, bytes(range(256)))
    visitor.go(f"/messages/{topic}/c")
    bodies = visitor.find("#message-list pre").all_text_contents()
    assert '{\n  "fruit": "apple",\n  "price": [\n    1,\n    2\n  ]\n}' in bodies
    assert "line one\nline two" in bodies
    assert any(body.startswith("000000  00 01 02 03") for body in bodies)
    visitor.find("#peek-state").select_option("deferred")
    visitor.find("#peek-do").click()
    expect(visitor.find("#message-list > li")).to_have_count(1)
    visitor.find("#message-list summary").click()
    visitor.sees(".message", "due ")
    assert depth(cluster, topic) == 3, "looking has consumed something"
    assert [one.partition(",")[0] for one in audited(admin, topic)] == ["publish: done"] * 3


def test_opening_a_form_moves_the_focus_to_its_first_field(visitor: Visitor, topic: str) -> None:
    visitor.go(f"/messages/{topic}")
    visitor.find("#publish-open").click()
    expect(visitor.find("#publish-body")).to_be_focused()


def test_opening_a_form_does_not_move_the_focus_from_a_field(visitor: Visitor, topic: str) -> None:
    """The browser says late that the form is open. What was typed by then went to another field."""
    visitor.go(f"/messages/{topic}")
    visitor.page.evaluate(
        """() => new Promise((resolve) => {
            document.querySelector("#publish").addEventListener("toggle", () => resolve());
            document.querySelector("#publish-open").click();
            document.querySelector("#publish-headers").focus();
        })"""
    )
    expect(visitor.find("#publish-headers")).to_be_focused()


def test_an_impatient_click_publishes_once(visitor: Visitor, cluster: Cluster, topic: str) -> None:
    visitor.go(f"/messages/{topic}")
    visitor.find("#publish-open").click()
    visitor.find("#publish-body").fill("once")
    with visitor.next_page():
        visitor.find("#publish-do").dblclick()
    visitor.sees("#note", "Published")
    assert depth(cluster, topic) == 1


def test_dead_letters_are_published_again(
    visitor: Visitor, cluster: Cluster, admin: AdminProcess, topic: str
) -> None:
    source = unique_name("source")
    cluster.add(source, "work")
    cluster.nsqds[0].publish(topic, letter(1, source), letter(2, source), letter(3, source))
    visitor.go(f"/messages/{topic}/c")
    visitor.sees(".letter", f"from {source} / work, failed after 5 attempts: it <b>broke</b>")
    assert visitor.find("#message-list pre").first.text_content() == '{\n  "n": 1\n}'
    choices = visitor.find("#message-list [type=checkbox]")
    choices.nth(0).check()
    choices.nth(2).check()
    visitor.find("#copy-open").click()
    assert visitor.act("#copy-do") == "Messages published again: 2."
    bodies = [json.loads(one["body"])["n"] for one in admin.get(f"/api/messages/{source}")["messages"]]
    assert sorted(bodies) == [1, 3]
    assert depth(cluster, topic) == 3
    visitor.find("#copy-open").click()
    assert visitor.act("#copy-do") == "Failed: no messages are selected"
    assert audited(admin, topic) == ["copy_messages: done, 2 published"]


def test_dead_letters_are_moved_back_to_their_original_topic(
    visitor: Visitor, cluster: Cluster, admin: AdminProcess, topic: str
) -> None:
    source = unique_name("source")
    cluster.add(source, "work")
    for number, nsqd in enumerate(cluster.nsqds):
        nsqd.publish(topic, *(letter(10 * number + one, source) for one in range(5)))
    visitor.go(f"/messages/{topic}/c")
    visitor.find("#move-open").click()
    expect(visitor.find("#move-do")).to_be_disabled()
    visitor.find("#move-name").fill("c")
    assert visitor.act("#move-do") == "Messages moved: 10; left in the channel: 0."
    assert (depth(cluster, topic), depth(cluster, topic, "d")) == (0, 10)
    assert depth(cluster, source, "work") == 10
    assert is_paused(cluster, topic, "c") == {False}
    assert audited(admin, topic) == ["move_messages: done, 10 moved, 0 left"]


# Replay


def test_a_channel_is_replayed_after_a_preview(
    visitor: Visitor, cluster: Cluster, admin: AdminProcess, topic: str
) -> None:
    for nsqd in cluster.nsqds:
        nsqd.publish(topic, b"1", b"2")
    time.sleep(0.01)
    middle = time.time()
    cluster.nsqds[0].publish(topic, b"3", b"4", b"5")
    consume(cluster.nsqds[0], topic, 5)
    consume(cluster.nsqds[1], topic, 2)
    visitor.go(f"/topics/{topic}/c")
    visitor.find("#replay-link").click()
    visitor.sees("#positions", "5")
    visitor.wait_for_script()
    visitor.find("#time").fill("last tuesday")
    assert visitor.find("#to-time").is_checked()
    visitor.find("#plan-do").click()
    visitor.sees("#bad-target", "is not a time")
    visitor.find("#time").fill(f"{middle:.6f}")
    visitor.find("#plan-do").click()
    expect(visitor.find("#plan-again")).to_have_text("3")
    visitor.find("#to-start").check()
    visitor.find("#plan-do").click()
    expect(visitor.find("#plan-again")).to_have_text("7")
    assert depth(cluster, topic) == 0, "the preview has moved the channel"
    visitor.wait_for_script()
    expect(visitor.find("#seek-do")).to_be_disabled()
    visitor.find("#seek-name").fill("c")
    assert visitor.act("#seek-do") == "Channel moved. Messages delivered again: 7; skipped: 0."
    expect(visitor.find("#channel-depth")).to_have_text("7")
    assert depth(cluster, topic, "d") == 7
    visitor.go(f"/replay/{topic}/c?to=end")
    expect(visitor.find("#plan-skipped")).to_have_text("7")
    visitor.find("#seek-name").fill("c")
    assert visitor.act("#seek-do") == "Channel moved. Messages delivered again: 0; skipped: 7."
    assert audited(admin, topic) == [
        "seek_channel: done, 7 again, 0 skipped",
        "seek_channel: done, 0 again, 7 skipped",
    ]


# Logging in


@pytest.fixture
def guarded(cluster: Cluster, tmp_path: Path) -> Iterator[AdminProcess]:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f'[[identity]]\nname = "ada"\nsecret = "{hash_generated(b"ada-secret")}"\n'
        '[[identity.allow]]\ntopic = ".*"\npermissions = ["read", "admin", "subscribe", "publish"]\n'
        f'[[identity]]\nname = "eve"\nsecret = "{hash_generated(b"eve-secret")}"\n'
        '[[identity.allow]]\ntopic = ".*"\npermissions = ["read"]\n'
    )
    with AdminProcess(lookupd_http_address=(cluster.lookupd_address,), auth_policy_file=str(policy)) as admin:
        yield admin


def log_in(visitor: Visitor, secret: str) -> None:
    visitor.find("#login-password").fill(secret)
    visitor.follow("#login-do")


def test_users_log_in_see_what_they_may_do_and_log_out(
    cluster: Cluster, guarded: AdminProcess, visit: Callable[..., Visitor], topic: str
) -> None:
    visitor = visit(guarded)
    visitor.allowed.append("status of 401")
    visitor.go(f"/topics/{topic}")
    assert visitor.axe() == []
    assert visitor.find("#main-nav").count() == 0
    log_in(visitor, "wrong")
    visitor.sees("#login-failed", "Wrong name")
    log_in(visitor, "ada-secret")
    visitor.sees("#topic-name", topic)
    assert visitor.text("#user") == "ada"
    assert visitor.act("#pause") == "Paused."
    visitor.follow("#logout-button")
    visitor.sees("h1", "Log in")
    visitor.page.goto(f"{visitor.site}/topics/{topic}")
    visitor.sees("h1", "Log in")
    log_in(visitor, "eve-secret")
    visitor.sees("#topic-name", topic)
    for name in ("#unpause", "#delete-open", "#messages-link", "#create-channel"):
        assert visitor.find(name).count() == 0, name
    lines = re.findall(r'AUDIT: (\w+) .*?user="(\w*)" .*?: (\w+)', guarded.stderr_text())
    assert lines == [
        ("log_in", "", "failed"),
        ("log_in", "ada", "done"),
        ("pause_topic", "ada", "done"),
        ("log_out", "ada", "done"),
        ("log_in", "eve", "done"),
    ]


def test_a_page_left_open_says_when_the_login_has_ended(
    guarded: AdminProcess, visit: Callable[..., Visitor], topic: str
) -> None:
    visitor = visit(guarded)
    visitor.allowed.append("status of 401")
    visitor.go(f"/topics/{topic}")
    log_in(visitor, "ada-secret")
    visitor.page.context.clear_cookies(name="nsqadmin_session")
    visitor.page.keyboard.press("r")
    visitor.sees("#live-state", "you are no longer logged in")
    wait_until(lambda: visitor.text("#live-state").startswith("not up to date"))
