"""The pages over real daemons: what they show, what their forms do, that no data becomes markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from nsparq.admin.security import CONTENT_POLICY
from nsparq.admin.show.templating import address
from nsparq.server.auth.policy_file import hash_generated
from tests.admin.support import REFERENCE_ADMIN, AdminThread, Cluster, start_admin
from tests.support import Answer, unique_name, wait_until

pytestmark = pytest.mark.skipif(bool(REFERENCE_ADMIN), reason="ours only")

PAGES = ["/", "/topics", "/nodes", "/lookup", "/counter", "/pipelines"]
EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nsqds=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> AdminThread:
    return cluster.admin(poll_interval=0.2)  # type: ignore[return-value]  # ours, see above


class Browser:
    """Keeps cookies and sends the token of the last page, as a browser with our script would."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin
        self.cookies: dict[str, str] = {}
        self.token = ""

    def _headers(self) -> dict[str, str]:
        return {"Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}

    def _keep(self, answer: Answer) -> Answer:
        for name, value in answer.headers:
            if name.lower() == "set-cookie":
                key, _, rest = value.partition("=")
                self.cookies[key] = rest.partition(";")[0]
        if found := re.search(rb'name="csrf-token" content="(\w+)"', answer.body):
            self.token = found[1].decode()
        return answer

    def get(self, path: str) -> Answer:
        return self._keep(self._admin.call("GET", path, headers=self._headers()))

    def post(self, path: str, headers: dict[str, str] | None = None, /, **fields: str) -> Answer:
        body = urlencode({"csrf": self.token, **fields}).encode()
        sent = {
            **self._headers(),
            "Content-Type": "application/x-www-form-urlencoded",
            "Origin": "http://test",
            **(headers or {}),
        }
        return self._keep(self._admin.call("POST", path, body, sent))

    def act(self, **fields: str) -> str:
        """Fill in a form, and read the note on the page that follows."""
        answer = self.post("/act", **fields)
        assert answer.status == 303, answer
        shown = self.get(answer.header("Location") or "").body.decode()
        found = re.search(r'id="note">([^<]*)<', shown)
        return found[1] if found else ""


@pytest.fixture
def browser(admin: AdminThread) -> Browser:
    found = Browser(admin)
    found.get("/")
    return found


def known(admin: AdminThread, topic: str) -> None:
    wait_until(lambda: topic in admin.daemon.watch.channels_of, what=topic)


# Looking


def test_every_page_is_html_that_allows_no_foreign_script(cluster: Cluster, admin: AdminThread) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    node = cluster.addresses[0]
    places = [f"/topics/{topic}", f"/topics/{topic}/c", f"/nodes/{node}", f"/messages/{topic}"]
    places += [f"/messages/{topic}/c", f"/replay/{topic}/c", f"/replay/{topic}/c?to=start"]
    for path in PAGES + places:
        answer = admin.call("GET", path)
        assert answer.status == 200, (path, answer.body[:200])
        assert answer.header("Content-Security-Policy") == CONTENT_POLICY
        assert answer.header("X-Frame-Options") == "DENY"
        shown = answer.body.decode()
        assert shown.startswith("<!doctype html>") and "</html>" in shown
        assert not re.search(r"<script(?! src=)|<style|\son\w+=|style=|javascript:|https?://", shown), path
        ids = re.findall(r'\sid="([^"]+)"', shown)
        assert len(ids) == len(set(ids)), path


def test_the_live_part_has_an_etag_and_is_not_sent_twice(cluster: Cluster, admin: AdminThread) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    tags = [""]

    def is_unchanged() -> bool:
        """The first polls after the topic was created may change its page."""
        found = admin.call("GET", f"/topics/{topic}?live=1", headers={"If-None-Match": tags[-1]})
        if found.status == 200:
            assert b"<html" not in found.body and b"channels-table" in found.body
        tags.append(found.header("ETag") or "")
        return found.status == 304

    wait_until(is_unchanged)
    assert tags[-2]


def test_a_narrow_column_breaks_an_address_before_its_port() -> None:
    assert address("127.0.0.1:4151") == "127.0.0.1<wbr>:4151"
    assert address("[::1]:4151") == "[::1]<wbr>:4151"
    assert address("<b>") == "<wbr>&lt;b&gt;"


def test_topics_are_listed_and_filtered(cluster: Cluster, admin: AdminThread) -> None:
    topic, other = unique_name("findme"), unique_name("other")
    cluster.add(topic)
    cluster.add(other)
    known(admin, other)
    shown = admin.page(f"/topics?q={topic.upper()}")
    assert f">{topic}</a>" in shown and f">{other}</a>" not in shown


def test_a_missing_topic_has_an_error_page(cluster: Cluster, admin: AdminThread) -> None:
    answer = admin.call("GET", "/topics/nowhere")
    assert answer.status == 404 and b"Topic not found" in answer.body
    idle = unique_name("idle")
    cluster.lookupd.post("/topic/create", topic=idle)
    answer = admin.call("GET", f"/topics/{idle}")
    assert answer.status == 404 and b"No node has this topic" in answer.body
    assert idle in admin.page("/lookup")


def test_files_have_an_etag_and_are_cached_for_good_by_version(admin: AdminThread) -> None:
    shown = admin.page("/")
    (path,) = re.findall(r'href="(/static/admin\.css\?v=\w+)"', shown)
    answer = admin.call("GET", path)
    assert answer.status == 200 and "immutable" in (answer.header("Cache-Control") or "")
    again = admin.call("GET", path, headers={"If-None-Match": answer.header("ETag") or ""})
    assert again.status == 304
    missing = admin.call("GET", "/static/..%2fdaemon.py")
    assert missing.status == 404
    assert admin.call("GET", "/static/nowhere").body == b"NOT_FOUND"


def test_the_overview_and_the_history_are_json(cluster: Cluster, admin: AdminThread) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    cluster.nsqds[0].publish(topic, b"x")
    known(admin, topic)
    path = f"/api/history/topics/{topic}/c"
    found = wait_until(lambda: (f := admin.get(path)) and len(f["times"]) > 2 and f)
    assert found["values"]["depth"][-1] in (0, 1) and len(found["values"]["depth"]) == len(found["times"])
    assert admin.get("/api/overview")["nodes"] == 2
    admin.call("GET", f"{path}?range=ages").expect_error(400, "INVALID_ARG_RANGE")
    assert admin.get("/api/history/topics/nowhere")["times"] == []


# Forms


def test_forms_create_pause_empty_and_delete(cluster: Cluster, admin: AdminThread, browser: Browser) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    cluster.nsqds[0].publish(topic, b"x")
    assert browser.act(action="create", topic=topic, channel="d", page="topic") == "Created."
    assert browser.act(action="pause", topic=topic, channel="c") == "Paused."
    assert "paused-note" in admin.page(f"/topics/{topic}/c")
    assert browser.act(action="unpause", topic=topic, channel="c") == "Resumed."
    assert browser.act(action="empty", topic=topic, channel="c", confirm="c") == "Emptied."
    assert admin.get(f"/api/topics/{topic}/c")["depth"] == 0
    assert browser.act(action="delete", topic=topic, channel="c", confirm="c") == "Deleted c."
    assert browser.act(action="delete", topic=topic, confirm=topic) == f"Deleted {topic}."
    assert admin.call("GET", f"/api/topics/{topic}").status == 404


@pytest.mark.parametrize("action", ["delete", "empty", "tombstone", "seek", "move"])
def test_a_change_that_cannot_be_undone_needs_the_name(
    cluster: Cluster, admin: AdminThread, browser: Browser, action: str
) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    channel = {} if action == "tombstone" else {"channel": "c"}
    for confirm in ("", "wrong", "C"):
        note = browser.act(
            action=action, topic=topic, node=cluster.addresses[0], confirm=confirm, to="start", **channel
        )
        assert note.startswith("Not confirmed: type ")
    assert admin.get(f"/api/topics/{topic}/c")["channel_name"] == "c"


def test_messages_are_shown_published_and_searched(
    cluster: Cluster, admin: AdminThread, browser: Browser
) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    note = browser.act(action="publish", topic=topic, body='{"apple": 1}', node=cluster.addresses[1])
    assert note == f"Published to {cluster.addresses[1]}."
    cluster.nsqds[0].publish(topic, b"\xff\x00binary")
    shown = admin.page(f"/messages/{topic}/c")
    assert "&#34;apple&#34;: 1" in shown and "binary" in shown
    assert "apple" not in admin.page(f"/messages/{topic}/c?q=banana").replace("banana", "")
    found = admin.get(f"/api/messages/{topic}")
    assert {one["kind"] for one in found["messages"]} == {"json", "binary"}
    assert found["unable"] == []


def test_a_message_is_published_with_headers(cluster: Cluster, admin: AdminThread, browser: Browser) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    fields = {"action": "publish", "topic": topic, "node": cluster.addresses[0]}
    for headers, wrong in (
        ("tenant", "a header is a name, a colon and a value"),
        ("a: 1\nA: 2", "occurs twice"),
        ("two words: 1", "not a header name"),
    ):
        assert wrong in browser.act(**fields, body="x", headers=headers)
    browser.act(**fields, body="one", headers=" Tenant: äcme: 1\r\n\r\nempty:\r\n")
    browser.act(**fields, body="later", headers="tenant: b", defer_ms="60000")
    path = f"/api/messages/{topic}"
    message = {"body": "two", "node": cluster.addresses[0], "headers": {"line": "a\nb"}}
    admin.call("POST", path, message).expect_json()
    found = {one["body"]: one["headers"] for one in admin.get(path)["messages"]}
    assert found == {
        "one": {"tenant": "äcme: 1", "empty": ""}, "later": {"tenant": "b"}, "two": {"line": "a\nb"},
    }  # fmt: skip


def letter(number: int) -> bytes:
    return json.dumps(
        {
            "topic": "source",
            "channel": "work",
            "id": "0" * 16,
            "attempts": 5,
            "error": EVIL,
            "text": f'{{"n": {number}}}',
            "base64": None,
        }
    ).encode()


def test_dead_letters_are_copied_back_to_their_original_topic(
    cluster: Cluster, admin: AdminThread, browser: Browser
) -> None:
    topic, source = unique_name("dead"), unique_name("source")
    cluster.add(topic, "review")
    cluster.add(source, "work")
    cluster.nsqds[0].publish(topic, letter(1), letter(2))
    chosen = admin.get(f"/api/messages/{topic}")["messages"][0]
    value = f"{chosen['sequence']}@{chosen['node']}"
    note = browser.act(action="copy", topic=topic, message=value, to=source, unwrap="1")
    assert note == "Messages published again: 1."
    (copied,) = admin.get(f"/api/messages/{source}")["messages"]
    assert json.loads(copied["body"]) in ({"n": 1}, {"n": 2})
    assert admin.get(f"/api/topics/{topic}/review")["depth"] == 2


def test_the_messages_of_a_channel_are_moved_and_finished(
    cluster: Cluster, admin: AdminThread, browser: Browser
) -> None:
    topic, source = unique_name("dead"), unique_name("source")
    cluster.add(topic, "review")
    cluster.nsqds[0].publish(topic, *map(letter, range(30)))
    cluster.nsqds[1].publish(topic, letter(30))
    note = browser.act(action="move", topic=topic, channel="review", to=source, unwrap="1", confirm="review")
    assert note == "Messages moved: 31; left in the channel: 0."
    assert admin.get(f"/api/topics/{topic}/review")["depth"] == 0
    bodies = [json.loads(one["body"])["n"] for one in admin.get(f"/api/messages/{source}")["messages"]]
    assert sorted(bodies) == [*range(31)]


def test_a_channel_with_consumers_is_not_moved(cluster: Cluster, browser: Browser) -> None:
    topic = unique_name("dead")
    cluster.add(topic, "review")
    cluster.nsqds[0].publish(topic, letter(1))
    with cluster.nsqds[0].connect() as client:
        client.identify()
        client.sub(topic, "review")
        note = browser.act(action="move", topic=topic, channel="review", to="x", confirm="review")
    assert "the channel has consumers" in note


def test_the_channel_of_a_spark_query_is_not_moved(
    cluster: Cluster, admin: AdminThread, browser: Browser
) -> None:
    topic = unique_name("dead")
    cluster.add(topic, "review")
    cluster.nsqds[0].publish(topic, letter(1))
    where = f"topic={topic}&channel=review&sequence=0&owner=q"
    assert cluster.nsqds[0].request("POST", f"/channel/commit?{where}").status == 200
    note = browser.act(action="move", topic=topic, channel="review", to="x", confirm="review")
    assert "the channel belongs to the Spark query q" in note
    assert admin.get(f"/api/topics/{topic}/review")["depth"] == 1


def test_a_replay_is_previewed_and_then_done(cluster: Cluster, admin: AdminThread, browser: Browser) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c", "keeps")
    for nsqd in cluster.nsqds:
        nsqd.publish(topic, b"1", b"2", b"3")
        with nsqd.connect() as client:
            client.identify()
            client.sub(topic, "c", rdy=5)
            client.read_messages(3, finish=True)
            client.barrier()
    assert admin.get(f"/api/topics/{topic}/c")["depth"] == 0
    assert 'id="plan-again">6<' in admin.page(f"/replay/{topic}/c?to=start")
    assert "is not a time" in admin.page(f"/replay/{topic}/c?to=time&time=yesterday")
    planned = admin.call("POST", f"/api/replay/{topic}/c", {"to": "start"}).json()
    assert (planned["done"], sum(one["again"] for one in planned["nodes"])) == (False, 6)
    assert admin.get(f"/api/topics/{topic}/c")["depth"] == 0
    note = browser.act(action="seek", topic=topic, channel="c", to="start", confirm="c")
    assert note == "Channel moved. Messages delivered again: 6; skipped: 0."
    assert admin.get(f"/api/topics/{topic}/c")["depth"] == 6


# Markup


def test_bodies_client_names_and_errors_never_become_markup(cluster: Cluster, admin: AdminThread) -> None:
    topic = unique_name("t")
    cluster.add(topic, "c")
    nsqd = cluster.nsqds[0]
    nsqd.publish(topic, EVIL.encode(), json.dumps({EVIL: EVIL}).encode(), letter(1))
    with nsqd.connect() as client:
        client.identify(client_id=EVIL, hostname=EVIL, user_agent=EVIL)
        client.sub(topic, "c")
        places = [f"/messages/{topic}", f"/messages/{topic}/c", f"/topics/{topic}/c"]
        places += [f"/nodes/{cluster.addresses[0]}", f"/topics?{urlencode({'q': EVIL})}"]
        places += [f"/messages/{topic}?{urlencode({'q': EVIL, 'node': EVIL})}"]
        places += [
            f"/replay/{topic}/c?{urlencode({'to': 'time', 'time': EVIL})}",
            f"/topics/{topic}/c?live=1",
        ]
        for path in places:
            shown = admin.call("GET", path).body.decode()
            assert "<script>" not in shown and "<img" not in shown and 'alert(1)>"' not in shown, path
            assert "49" not in re.findall(r"&amp;(\d+)", shown)
        assert "&lt;script&gt;" in admin.page(f"/messages/{topic}")
        assert "&lt;script&gt;" in admin.page(f"/topics/{topic}/c")


def test_names_from_a_hostile_nsqlookupd_never_become_markup(cluster: Cluster) -> None:
    with cluster.lookupd.peer(broadcast_address=f"{EVIL}.test", hostname=EVIL, version=EVIL) as peer:
        peer.register("t_evil")
        admin = cluster.admin(poll_interval=0.2)
        wait_until(lambda: any(EVIL in name for name in admin.daemon.watch.nodes))  # type: ignore[union-attr]
        for path in ("/", "/nodes", "/nodes?live=1", "/api/overview"):
            answer = admin.call("GET", path)
            if "json" in (answer.header("Content-Type") or ""):
                continue
            shown = answer.body.decode()
            assert "<script>" not in shown and "<img" not in shown and "&lt;script&gt;" in shown, path


def test_an_error_page_does_not_echo_markup(admin: AdminThread) -> None:
    for path in ("/topics/%3Cscript%3E", "/nodes/%3Cimg%20src=x%3E", "/topics/a/%3Cscript%3E?note=%3Cb%3E"):
        shown = admin.call("GET", path).body.decode()
        assert "<script>" not in shown and "<img" not in shown and "<b>" not in shown


# Foreign pages


def test_a_foreign_page_cannot_make_a_browser_change_anything(
    cluster: Cluster, admin: AdminThread, browser: Browser
) -> None:
    topic = unique_name("t")
    cluster.add(topic)
    body = json.dumps({"action": "pause"}).encode()
    path = f"/api/topics/{topic}"
    for headers in (
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://test"},
        {"Origin": "http://test"},  # our own, but without the token
        {"Cookie": "nsqadmin_token=x"},
        {"Cookie": "nsqadmin_token=x", "X-CSRF-Token": "x"},
    ):
        answer = admin.call("POST", path, body, headers)
        assert (answer.status, answer.json()["message"]) == (403, "FORBIDDEN"), headers
    for origin in ("http://evil.test", "null"):
        assert browser.post("/act", {"Origin": origin}, action="pause", topic=topic).status == 403
    assert browser.post("/act", action="pause", topic=topic, csrf="wrong").status == 403
    assert admin.get(path)["paused"] is False
    token = {
        "Origin": "http://test",
        "Cookie": f"nsqadmin_token={browser.cookies['nsqadmin_token']}",
        "X-CSRF-Token": browser.token,
    }
    assert admin.call("POST", path, body, token).status == 200
    assert admin.call("POST", path, b'{"action": "unpause"}').status == 200  # a program


# Who may what


def test_users_who_are_not_admins_see_no_buttons_and_no_messages(cluster: Cluster) -> None:
    admin = cluster.admin(admin_user=("ada",))
    topic = unique_name("t")
    cluster.add(topic, "c")
    as_ada = admin.call("GET", f"/topics/{topic}", headers={"X-Forwarded-User": "ada"}).body
    assert b'id="delete"' in as_ada and b'id="delete"' not in admin.call("GET", f"/topics/{topic}").body
    assert admin.call("GET", f"/messages/{topic}").status == 403
    assert admin.call("GET", f"/api/messages/{topic}").status == 403
    assert admin.call("PUT", "/config/log_level", b"info").status == 403


@pytest.fixture
def guarded(cluster: Cluster, tmp_path: Path) -> Iterator[AdminThread]:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f'[[identity]]\nname = "ada"\nsecret = "{hash_generated(b"ada-secret")}"\n'
        '[[identity.allow]]\ntopic = ".*"\npermissions = ["read", "admin", "subscribe", "publish"]\n'
        f'[[identity]]\nname = "eve"\nsecret = "{hash_generated(b"eve-secret")}"\n'
        '[[identity.allow]]\ntopic = ".*"\npermissions = ["read"]\n'
        '[[identity.allow]]\ntopic = "^eve"\npermissions = ["admin"]\n'
    )
    with start_admin(lookupd_http_address=(cluster.lookupd_address,), auth_policy_file=str(policy)) as admin:
        yield admin  # type: ignore[misc]  # ours


def test_with_a_policy_file_pages_need_a_login(cluster: Cluster, guarded: AdminThread) -> None:
    topic = unique_name("t")
    cluster.add(topic)
    assert guarded.call("GET", "/api/topics").status == 401
    answer = guarded.call("GET", f"/topics/{topic}")
    assert (answer.status, answer.header("Location")) == (303, f"/login?next=%2Ftopics%2F{topic}")
    assert guarded.call("GET", "/ping").body == b"OK"
    user = Browser(guarded)
    user.get("/login")
    assert user.post("/login", name="", password="wrong").status == 401
    answer = user.post("/login", name="", password="ada-secret", next=f"/topics/{topic}")
    assert (answer.status, answer.header("Location")) == (303, f"/topics/{topic}")
    assert b'id="user">ada<' in user.get(f"/topics/{topic}").body
    assert user.act(action="pause", topic=topic) == "Paused."
    assert user.post("/logout").status == 303
    assert user.get(f"/topics/{topic}").status == 303


def test_a_login_leads_to_our_own_pages_only(guarded: AdminThread) -> None:
    for target in ("//evil.test/", "http://evil.test/", "/\\evil.test", "javascript:alert(1)", "x"):
        user = Browser(guarded)
        user.get("/login")
        answer = user.post("/login", name="", password="ada-secret", next=target)
        assert answer.header("Location") == "/", target


def test_permissions_are_those_of_the_policy(cluster: Cluster, guarded: AdminThread) -> None:
    mine, other = unique_name("eve"), unique_name("t")
    cluster.add(mine)
    cluster.add(other)
    eve = {"Authorization": "Bearer eve-secret"}
    pause = {"action": "pause"}
    assert guarded.call("GET", f"/api/topics/{other}", headers=eve).status == 200
    assert guarded.call("POST", f"/api/topics/{mine}", pause, eve).status == 200
    guarded.call("POST", f"/api/topics/{other}", pause, eve).expect_error(403, "FORBIDDEN")
    guarded.call("POST", "/api/topics", {"topic": other}, eve).expect_error(403, "FORBIDDEN")
    guarded.call("DELETE", f"/api/nodes/{cluster.addresses[0]}", {"topic": other}, eve).expect_error(
        403, "FORBIDDEN"
    )
    assert guarded.call("GET", f"/api/messages/{mine}", headers=eve).status == 403


def test_every_change_is_a_line_in_the_log(
    cluster: Cluster, admin: AdminThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    topic = unique_name("t")
    cluster.add(topic)
    admin.call("POST", f"/api/topics/{topic}", {"action": "pause"}, {"Authorization": "Basic Ym9iOng="})
    admin.call("POST", "/api/topics/nowhere%0aFAKE", {"action": "pause"})
    lines = [record.getMessage() for record in caplog.records if "AUDIT" in record.getMessage()]
    assert re.fullmatch(
        rf'AUDIT: pause_topic topic="{topic}" user="bob" from="127\.0\.0\.1:\d+": done', lines[0]
    )
    assert "\n" not in lines[1] and lines[1].endswith("failed - TOPIC_NOT_FOUND")
