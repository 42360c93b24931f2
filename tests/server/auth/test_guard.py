"""With a policy, every TCP command and every HTTP endpoint needs its permission.

The commands and endpoints to try are read from the code, so that no new one is forgotten.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from urllib.parse import urlencode

import pytest

from nsparq.broker.broker import Broker
from nsparq.errors import StartError
from nsparq.http.api import Endpoint
from nsparq.options import NsqdOptions
from nsparq.packed import PackedBodies
from nsparq.server.api.table import NsqdApi
from nsparq.server.auth.grants import Permission
from nsparq.server.auth.policy_file import hash_generated
from nsparq.wire import server as wire_server
from tests.support import Answer, BrokerThread, RawConnection, multi, unique_name, wait_until
from tests.support.auth_server import AuthServer, entry

MINE, THEIRS, OTHER = "mine", "theirs", "other"


def identity(name: str, *permissions: str, topic: str = ".*", channels: str = '[".*"]') -> str:
    """The secret is the name, reversed."""
    return f"""
[[identity]]
name = "{name}"
secret = "{hash_generated(name[::-1].encode())}"
[[identity.allow]]
topic = "{topic}"
channels = {channels}
permissions = {list(permissions)}
"""


ALL = [str(permission) for permission in Permission]
POLICY = "".join(
    [
        identity("everything", *ALL),
        *(identity(f"only-{name}", name) for name in ALL),
        *(identity(f"not-{name}", *(other for other in ALL if other != name)) for name in ALL),
        identity("owner", *ALL, topic=f"^{MINE}$"),
        identity("consumer", *ALL, topic=f"^{MINE}$", channels=f'["^{MINE}$"]'),
    ]
)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name[::-1]}"}


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(POLICY)
    return path


@pytest.fixture(scope="module")
def broker(policy_file: Path) -> Iterator[BrokerThread]:
    with BrokerThread(auth_policy_file=str(policy_file)) as broker:
        yield broker


# Endpoints

# Required parameters besides topic and channel.
NEEDED = {"from": "0", "sequence": "0", "to": "end", "seconds": "0.01", "producer": "p", "part": "a"}
NEEDED |= {"origin_topic": MINE}
BODIES = {
    "/config/{key}": b"info",
    "/topic/settings": b"{}",
    "/channel/settings": b'{"policy": null}',
    "/pub": b"x",
    "/mpub": b"x",
    "/transaction/stage": b"\0\0\0\1\0\0\0\1x",
    "/transaction/prepare": b'{"parts": {}}',
    "/transaction/commit": b'{"parts": {}}',
}
BODIES_BY_TOPIC = {
    "/topics/positions": b'{"topics": {"%b": null}}',
    "/channels/commit": b'{"topics": {"%b": ["0", 0]}}',
    "/channels/seek": b'{"topics": {"%b": ["0", 0]}}',
}
"""Bodies of endpoints whose topics are in the body."""


def endpoints() -> list[Endpoint]:
    """The table without a daemon."""

    class Nothing:
        options = NsqdOptions()

        def __getattr__(self, name: str) -> Nothing:
            return Nothing()

        def __call__(self, *_: object, **__: object) -> Nothing:
            return Nothing()

    return list(NsqdApi(Nothing()).endpoints)  # type: ignore[arg-type]


ENDPOINTS = [pytest.param(endpoint, id=f"{endpoint.method} {endpoint.path}") for endpoint in endpoints()]


REACHED = (200, 404, 409, 410, 416)
"""Statuses from handlers: done, or the named thing does not exist or is in another state."""


def takes(endpoint: Endpoint, name: str) -> bool:
    return any(param.name == name for param in endpoint.params)


def target(endpoint: Endpoint, **more: str) -> str:
    """A valid request, with topic and channel if the endpoint takes them."""
    query = {
        param.name: NEEDED[param.name]
        for param in endpoint.params
        if param.name in NEEDED and (param.required or param.name in ("to", "seconds"))
    }
    path = endpoint.path.replace("{key}", "log_level")
    path, _, _ = path.partition("{")
    return f"{path}?{urlencode(query | more)}"


def ask(broker: BrokerThread, endpoint: Endpoint, headers: dict[str, str], **query: str) -> Answer:
    body = BODIES.get(endpoint.path) if endpoint.keeps_body else None
    if endpoint.path in BODIES_BY_TOPIC:
        body = BODIES_BY_TOPIC[endpoint.path] % query.pop("of", MINE).encode()
    return broker.request(endpoint.method, target(endpoint, **query), body, headers)


def names(endpoint: Endpoint, topic: str = MINE, channel: str = MINE) -> dict[str, str]:
    given = {"topic": topic, "channel": channel}
    if endpoint.topics is not None:
        # A producer identifies a transaction, which has messages of one topic here: see below.
        given["producer"] = f"of-{topic}"
    found = {name: value for name, value in given.items() if takes(endpoint, name)}
    return found | {"of": topic} if endpoint.path in BODIES_BY_TOPIC else found


def stage_one_for_each(inner: Broker) -> None:
    inner.transactions.producers.clear()
    for topic in (MINE, THEIRS):
        inner.transactions.stage(f"of-{topic}", 0, "a", topic, PackedBodies.of([b"x"]))


@pytest.fixture
def topics(broker: BrokerThread) -> Iterator[None]:
    """Both topics with both channels. Refused requests change nothing."""
    for topic in (MINE, THEIRS):
        for channel in (MINE, OTHER):
            broker.control("create", topic, channel)
    broker.call(stage_one_for_each)
    yield
    for topic in {found["topic_name"] for found in broker.stats()["topics"]}:
        broker.control("delete", topic)


def snapshot(broker: BrokerThread) -> object:
    stats = broker.stats()
    found = [
        (
            topic["topic_name"],
            topic["message_count"],
            topic["paused"],
            channel["channel_name"],
            channel["paused"],
        )
        for topic in stats["topics"]
        for channel in topic["channels"]
    ]
    transactions = broker.request("GET", "/transactions", headers=bearer("everything")).body
    return found, broker.nsqd.options.log_level, len(stats["topics"]), transactions


@pytest.fixture
def unchanged(broker: BrokerThread, topics: None) -> Iterator[None]:
    before = snapshot(broker)
    yield
    assert snapshot(broker) == before


def assert_needs_secret(answer: Answer) -> None:
    answer.expect_error(401, "AUTH_REQUIRED")
    assert (answer.header("WWW-Authenticate") or "").startswith("Bearer")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_endpoint_is_reachable_without_its_permission(broker: BrokerThread, endpoint: Endpoint) -> None:
    assert_needs_secret(ask(broker, endpoint, {}, **names(endpoint)))
    assert_needs_secret(ask(broker, endpoint, {"Authorization": "Bearer wrong"}, **names(endpoint)))

    def refuses(who: str, **query: str) -> None:
        ask(broker, endpoint, bearer(who), **query).expect_error(403, "UNAUTHORIZED")

    refuses(f"not-{endpoint.permission}", **names(endpoint))
    # A permission for one topic or channel is not one for another.
    refuses("owner", **names(endpoint, THEIRS, MINE))
    refuses("consumer", **names(endpoint, THEIRS, MINE))
    refuses("consumer", **names(endpoint, MINE, OTHER))
    # A parameter that the endpoint does not read gives no permission.
    if not takes(endpoint, "channel"):
        refuses("consumer", **(names(endpoint) | {"channel": MINE}))
        if not takes(endpoint, "topic"):
            refuses("owner", **(names(endpoint, THEIRS) | {"topic": MINE}))


@pytest.mark.parametrize(
    "value", ["Bearer", "Basic d3Jvbmc6d3Jvbmc=", "gnihtyreve", "Bearer everything", "Digest gnihtyreve"]
)
def test_a_wrong_or_malformed_secret_is_refused(broker: BrokerThread, value: str) -> None:
    assert_needs_secret(broker.request("GET", "/stats", headers={"Authorization": value}))


@pytest.mark.usefixtures("unchanged")
def test_the_first_of_a_repeated_parameter_is_checked(broker: BrokerThread) -> None:
    first = f"/topic/empty?topic={THEIRS}"
    for twice in (f"{first}&topic={MINE}", f"{first}&TOPIC={MINE}", f"{first}&topic%00={MINE}"):
        broker.request("POST", twice, headers=bearer("owner")).expect_error(403, "UNAUTHORIZED")


@pytest.mark.usefixtures("unchanged")
def test_a_name_that_is_not_utf_8_is_checked_and_refused_as_any_other(broker: BrokerThread) -> None:
    path = f"/channel/empty?topic={MINE}&channel=%ff"
    broker.request("POST", path, headers=bearer("owner")).expect_error(400, "INVALID_ARG_CHANNEL")
    broker.request("POST", path, headers=bearer("consumer")).expect_error(403, "UNAUTHORIZED")
    broker.request("POST", "/topic/create?topic=%ff", headers=bearer("owner")).expect_error(
        403, "UNAUTHORIZED"
    )


@pytest.mark.usefixtures("topics")
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_endpoint_is_reachable_with_its_permission(broker: BrokerThread, endpoint: Endpoint) -> None:
    is_reached = {
        f"only-{endpoint.permission}": True,
        "everything": True,
        "owner": takes(endpoint, "topic") or endpoint.topics is not None,
        "consumer": takes(endpoint, "channel"),
    }
    for who in is_reached:
        broker.call(stage_one_for_each)  # so that producers have no owner yet
        answer = ask(broker, endpoint, bearer(who), **names(endpoint))
        if is_reached[who]:
            assert answer.status in REACHED, (who, answer)
            assert answer.body != b'{"message":"NOT_FOUND"}'
        else:
            answer.expect_error(403, "UNAUTHORIZED")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("path", ["/topic/delete", "/config/log_level", "/debug/pprof/profile"])
def test_other_spellings_and_methods_reach_nothing(broker: BrokerThread, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"):
        for spelling in (path, path + "/", "/" + path, path.upper(), path.replace("/", "//"), f"/x/..{path}"):
            answer = broker.request(method, f"{spelling}?topic={MINE}", headers={})
            assert answer.status in (301, 308, 401, 404, 405), (method, spelling, answer)


# Producers of transactions


def call_as(
    broker: BrokerThread, who: str, method: str, path: str, body: bytes = b"", **query: str
) -> Answer:
    return broker.request(method, f"{path}?{urlencode(query)}", body, bearer(who) if who else {})


OWNED = [endpoint for endpoint in endpoints() if endpoint.is_owner is not None]
VICTIM = identity("victim", "publish", "read") + identity("thief", "publish", "read")


def test_every_endpoint_with_a_producer_checks_its_owner() -> None:
    acting = {
        endpoint.path
        for endpoint in endpoints()
        if takes(endpoint, "producer") and endpoint.permission != "admin"
    }
    assert {endpoint.path for endpoint in OWNED} == acting
    assert len(acting) == 5


@pytest.mark.parametrize("anybody", ["thief", ""])
def test_nobody_can_use_the_producer_of_another_identity(tmp_path: Path, anybody: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(VICTIM + '[[anonymous.allow]]\ntopic = "^theirs$"\npermissions = ["publish"]\n')
    message = BODIES["/transaction/stage"]
    first, later = {"producer": "p", "sequence": "0"}, {"producer": "p", "sequence": "1"}
    where = {"part": "a", "topic": MINE}
    with BrokerThread(tmp_path, auth_policy_file=str(path)) as broker:
        call = partial(call_as, broker)
        assert call("victim", "POST", "/transaction/stage", message, **first, **where).status == 200
        for is_committed in (False, True):
            for which, endpoint in product((first, later), OWNED):
                theirs = {"part": "b", "topic": THEIRS} if takes(endpoint, "part") else {}
                body = BODIES.get(endpoint.path, b"")
                answer = call(anybody, endpoint.method, endpoint.path, body, **which, **theirs)
                if anybody:
                    answer.expect_error(403, "OWNED_BY_ANOTHER")
                else:
                    assert_needs_secret(answer)
            if not is_committed:
                broker.restart()
                answer = call("victim", "POST", "/transaction/commit", b'{"parts": {"a": 1}}', **first)
                assert answer.expect_json()["messages"] == 1
        broker.restart()
        assert call("victim", "POST", "/transaction/stage", message, **later, **where).status == 200
        answer = call("victim", "POST", "/transaction/commit", b'{"parts": {"a": 1}}', **later)
        assert answer.expect_json()["messages"] == 1


def test_an_admin_can_give_a_producers_name_to_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(VICTIM + identity("admin", "admin") + identity("owner", *ALL, topic=f"^{MINE}$"))
    which = {"producer": "p", "sequence": "0"}
    with BrokerThread(tmp_path, auth_policy_file=str(path)) as broker:
        call = partial(call_as, broker)
        commit = partial(call, method="POST", path="/transaction/commit", body=b'{"parts": {}}')
        assert commit("victim", **which).status == 200
        owners = call("thief", "GET", "/transactions").expect_json()["producers"]
        assert [producer["owner"] for producer in owners] == ["victim"]
        for who in ("owner", "victim"):
            answer = call(who, "POST", "/transaction/disown", producer="p")
            answer.expect_error(403, "UNAUTHORIZED")
        assert call("admin", "POST", "/transaction/disown", producer="p").status == 200
        assert commit("thief", **which | {"sequence": "1"}).status == 200
        commit("victim", **which | {"sequence": "2"}).expect_error(403, "OWNED_BY_ANOTHER")
        # An owner that cannot be read is unknown: the next client does not become the owner.
        broker.stop()
        (tmp_path / "transactions" / "p.producer" / "owner.json").write_bytes(bytes(20))
        broker.start()
        commit("thief", **which | {"sequence": "2"}).expect_error(403, "OWNED_BY_ANOTHER")
        assert call("admin", "POST", "/transaction/disown", producer="p").status == 200
        assert commit("thief", **which | {"sequence": "2"}).status == 200


def test_a_commit_needs_the_permission_for_every_topic_in_it(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(identity("me", "publish"))
    which = {"producer": "p", "sequence": "0"}
    with BrokerThread(tmp_path, auth_policy_file=str(path)) as broker:
        call = partial(call_as, broker, "me", "POST")
        for topic in (MINE, THEIRS):
            message = BODIES["/transaction/stage"]
            assert call("/transaction/stage", message, **which, part=topic, topic=topic).status == 200
        path.write_text(identity("me", "publish", topic=f"^{MINE}$"))
        reload(broker)
        answer = call("/transaction/commit", b'{"parts": {"mine": 1, "theirs": 1}}', **which)
        answer.expect_error(403, "UNAUTHORIZED")
        assert broker.topic_stats(MINE) is None


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "endpoint", [one for one in endpoints() if takes(one, "producer") and one.topics is not None]
)
def test_a_transaction_without_topics_needs_the_permission_for_some_topic(
    broker: BrokerThread, endpoint: Endpoint
) -> None:
    assert_needs_secret(ask(broker, endpoint, {}, producer="new"))
    answer = ask(broker, endpoint, bearer(f"not-{endpoint.permission}"), producer="new")
    answer.expect_error(403, "UNAUTHORIZED")


def test_the_figures_of_one_topic_show_no_other(broker: BrokerThread, topics: None) -> None:
    with broker.connect() as producer:
        authenticate(producer, "everything")
        for topic in (MINE, THEIRS):
            producer.pub(topic, b"x")
        for form in ("text", "json"):
            answer = broker.request("GET", f"/stats?topic={MINE}&format={form}", headers=bearer("owner"))
            assert answer.status == 200
            assert THEIRS.encode() not in answer.body


@pytest.mark.parametrize("topic", [MINE, THEIRS])
@pytest.mark.parametrize("source", ["publish", "sync {}", "checkpoint {}:channel"])
def test_the_figures_of_one_topic_show_no_error_of_another(
    broker: BrokerThread, topics: None, topic: str, source: str
) -> None:
    error = f"{topic}: no space left"

    def note(text: str | None) -> None:
        broker.nsqd.broker.health.set(text, source.format(topic))
        broker.nsqd.broker.health.warn(text, source.format(topic))

    def shown(who: str, asked: str) -> tuple[str, list[str]]:
        path = f"/stats?topic={asked}&format=json"
        stats = broker.request("GET", path, headers=bearer(who)).expect_json()
        return stats["health"], stats["warnings"]

    broker.call(lambda _: note(error))
    try:
        all_of_it = (f"NOK - {error}", [error])
        assert shown("everything", "") == all_of_it
        is_mine = topic == MINE
        assert shown("owner", MINE) == (
            all_of_it if is_mine else ("NOK - an error that is not of this topic", [])
        )
    finally:
        broker.call(lambda _: note(None))
    assert shown("owner", MINE) == ("OK", [])


def test_basic_credentials_work_too(broker: BrokerThread) -> None:
    for login in ("gnihtyreve", ":gnihtyreve"):
        encoded = base64.b64encode(login.encode()).decode()
        assert broker.request("GET", "/ping", headers={"Authorization": f"Basic {encoded}"}).status == 200


def test_each_request_of_a_connection_needs_a_secret(broker: BrokerThread) -> None:
    with broker.http_connect() as connection:
        assert connection.request("GET", "/ping", headers=bearer("everything")).status == 200
        assert connection.request("GET", "/ping").status == 401
        assert connection.request("GET", "/ping", headers=bearer("not-read")).status == 403
        assert connection.request("GET", "/ping", headers=bearer("only-read")).status == 200


# Commands

PUBLISH, SUBSCRIBE = "publish", "subscribe"
COMMANDS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "PUB": (PUBLISH, lambda topic: b"PUB %b\n\x00\x00\x00\x01x" % topic),
    "DPUB": (PUBLISH, lambda topic: b"DPUB %b 1\n\x00\x00\x00\x01x" % topic),
    "MPUB": (PUBLISH, lambda topic: b"MPUB %b\n\x00\x00\x00\x09" % topic + multi([b"x"])),
    "SUB": (SUBSCRIBE, lambda topic: b"SUB %b %b\n" % (topic, topic)),
}
SUBSCRIBED_ONLY = {
    "RDY": b"RDY 1\n",
    "FIN": b"FIN 0123456789abcdef\n",
    "REQ": b"REQ 0123456789abcdef 0\n",
    "TOUCH": b"TOUCH 0123456789abcdef\n",
    "CLS": b"CLS\n",
}
ALWAYS = {"IDENTIFY", "AUTH", "NOP"}


def authenticate(connection: RawConnection, name: str) -> None:
    connection.command("AUTH", body=name[::-1].encode())
    frame = connection.read_frame()
    assert b'"identity":"%b"' % name.encode() in frame.data, frame


def test_every_command_is_known_here() -> None:
    known = {*wire_server._PARSERS, *wire_server._VERBS_WITH_BODY}
    assert {name.decode() for name in known} == {*COMMANDS, *SUBSCRIBED_ONLY, *ALWAYS}


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("verb", COMMANDS)
def test_no_command_works_without_a_secret(broker: BrokerThread, verb: str) -> None:
    for topic in (MINE, "new"):
        with broker.connect() as connection:
            assert connection.identify()["auth_required"] is True
            connection.send(COMMANDS[verb][1](topic.encode()))
            connection.expect_fatal(f"E_AUTH_FIRST AUTH required before {verb}")
    with broker.connect() as connection:
        connection.send(b"AUTH\n\x00\x00\x00\x05wrong" + COMMANDS[verb][1](MINE.encode()))
        connection.expect_fatal("E_AUTH_FAILED AUTH failed")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("verb", COMMANDS)
def test_no_command_works_without_its_permission(broker: BrokerThread, verb: str) -> None:
    permission, command = COMMANDS[verb]
    without = f"not-{permission}"
    for who, topic in ((without, MINE), (without, "new"), ("owner", THEIRS), ("owner", "new")):
        with broker.connect() as connection:
            authenticate(connection, who)
            connection.send(command(topic.encode()))
            channel = topic if verb == "SUB" else ""
            connection.expect_fatal(f'E_UNAUTHORIZED AUTH failed for {verb} on "{topic}" "{channel}"')


@pytest.mark.usefixtures("topics")
@pytest.mark.parametrize("verb", COMMANDS)
def test_every_command_works_with_its_permission(broker: BrokerThread, verb: str) -> None:
    permission, command = COMMANDS[verb]
    for who in (f"only-{permission}", "everything", "owner"):
        with broker.connect() as connection:
            authenticate(connection, who)
            connection.send(command(MINE.encode()))
            connection.expect_ok()


def test_a_permission_is_not_cached_across_topics(broker: BrokerThread, topics: None) -> None:
    with broker.connect() as connection:
        authenticate(connection, "owner")
        for _ in range(3):  # the broker handles a known line on a fast path
            connection.pub(MINE, b"x")
        connection.command("PUB", THEIRS, body=b"x")
        connection.expect_fatal(f'E_UNAUTHORIZED AUTH failed for PUB on "{THEIRS}" ""')


# Without a secret


ANONYMOUS = '[[anonymous.allow]]\ntopic = ".*"\npermissions = ["read"]\n'


def test_anonymous_permissions_need_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        POLICY + ANONYMOUS + f'[[anonymous.allow]]\ntopic = "^{MINE}$"\npermissions = ["publish"]'
    )
    with BrokerThread(auth_policy_file=str(path)) as broker:
        assert broker.request("GET", "/ping").status == 200
        assert broker.request("POST", f"/pub?topic={MINE}", b"x").status == 200
        assert broker.request("POST", f"/pub?topic={THEIRS}", b"x").status in (401, 403)
        assert broker.request("POST", f"/topic/create?topic={THEIRS}").status in (401, 403)
        assert broker.request("GET", "/ping", headers={"Authorization": "Bearer wrong"}).status == 401
        with broker.connect() as connection:
            connection.pub(MINE, b"x")
            connection.command("SUB", MINE, MINE)
            connection.expect_fatal(f'E_UNAUTHORIZED AUTH failed for SUB on "{MINE}" "{MINE}"')


# Other listeners


def test_https_is_guarded_too(policy_file: Path) -> None:
    made = pytest.importorskip("tests.support.certificates").certificates()
    with BrokerThread(auth_policy_file=str(policy_file), **made.server_flags()) as broker:
        with broker.http_connect(https=True, tls=made.client_context()) as connection:
            assert_needs_secret(connection.request("GET", "/stats"))
            assert connection.request("GET", "/stats", headers=bearer("only-read")).status == 200


def test_unix_sockets_are_guarded_too(policy_file: Path, tmp_path: Path) -> None:
    flags = {"tcp_address": str(tmp_path / "t.sock"), "http_address": str(tmp_path / "h.sock")}
    with BrokerThread(auth_policy_file=str(policy_file), **flags) as broker:
        assert_needs_secret(broker.request("GET", "/stats"))
        assert broker.request("GET", "/stats", headers=bearer("only-read")).status == 200
        with broker.connect() as connection:
            connection.command("PUB", "t", body=b"x")
            connection.expect_fatal("E_AUTH_FIRST AUTH required before PUB")


# Auth servers


def test_an_auth_server_alone_leaves_http_open_as_in_nsq() -> None:
    with AuthServer() as server, BrokerThread(auth_http_address=(server.address,)) as broker:
        assert broker.request("GET", "/stats").status == 200
        with broker.connect() as connection:
            connection.command("PUB", "t", body=b"x")
            connection.expect_fatal("E_AUTH_FIRST AUTH required before PUB")


def test_with_both_the_policy_file_comes_first_and_http_is_guarded(policy_file: Path) -> None:
    with (
        AuthServer() as server,
        BrokerThread(auth_policy_file=str(policy_file), auth_http_address=(server.address,)) as broker,
    ):
        server.grant(entry("^theirs$", "publish", "read"), identity="remote")
        with broker.connect() as connection:
            authenticate(connection, "owner")
        assert broker.request("GET", "/stats", headers=bearer("everything")).status == 200
        assert server.queries == []
        with broker.connect() as connection:
            authenticate(connection, "remote")
            connection.pub(THEIRS, b"x")
        assert server.queries[-1].fields["secret"] == "etomer"
        before = len(server.queries)
        for _ in range(3):
            assert broker.request("GET", f"/stats?topic={THEIRS}", headers=bearer("remote")).status == 200
        assert broker.request("GET", "/stats", headers=bearer("remote")).status == 403
        assert len(server.queries) == before + 1  # a token is looked up once
        server.answer(b"", 500)
        assert_needs_secret(broker.request("GET", "/stats", headers=bearer("unknown")))


# Start and reload


def test_a_bad_policy_file_prevents_the_start(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    with pytest.raises(StartError, match="No such file"):
        BrokerThread(auth_policy_file=str(path))
    path.write_text("[[identity]]")
    with pytest.raises(StartError, match="identity 1: name must be"):
        BrokerThread(auth_policy_file=str(path))


def reload(broker: BrokerThread) -> None:
    broker.call(lambda _: broker.nsqd.reload())


def test_a_reload_removes_permissions_at_once(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    topic = unique_name("topic")
    with BrokerThread(auth_policy_file=str(path)) as broker:
        with broker.connect() as leaver, broker.connect() as stayer, broker.connect() as publisher:
            authenticate(leaver, "only-subscribe")
            leaver.sub(topic, "c", rdy=1)
            authenticate(stayer, "everything")
            stayer.sub(topic, "d", rdy=1)
            authenticate(publisher, "only-publish")
            publisher.pub(topic, b"x")
            assert broker.request("GET", "/ping", headers=bearer("only-read")).status == 200

            path.write_text(identity("everything", *ALL))
            reload(broker)
            assert_needs_secret(broker.request("GET", "/ping", headers=bearer("only-read")))
            assert broker.request("GET", "/ping", headers=bearer("everything")).status == 200
            publisher.command("PUB", topic, body=b"x")
            publisher.expect_fatal("E_AUTH_FAILED AUTH failed")
            leaver.read_message()
            leaver.expect_fatal("E_AUTH_FAILED AUTH failed")
            stayer.fin(stayer.read_message().id)
            stayer.pub(topic, b"still here")
            stayer.fin(stayer.read_message().id)
        wait_until(lambda: not broker.stats()["topics"][0]["channels"][0]["clients"])


def test_a_reload_that_removes_a_permission_ends_the_subscription(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(identity("me", *ALL))
    with BrokerThread(auth_policy_file=str(path)) as broker, broker.connect() as connection:
        authenticate(connection, "me")
        connection.sub(MINE, MINE)
        path.write_text(identity("me", "publish"))
        reload(broker)
        connection.expect_fatal(f'E_UNAUTHORIZED AUTH failed for SUB on "{MINE}" "{MINE}"')


def test_a_reload_asks_no_auth_server_about_those_who_consume() -> None:
    with AuthServer() as server, BrokerThread(auth_http_address=(server.address,)) as broker:
        server.grant(entry(".*", "subscribe"), identity="me")
        with broker.connect() as connection:
            authenticate(connection, "me")
            connection.sub(MINE, MINE, rdy=1)
            (served,) = broker.nsqd.connections
            assert served.auth._grant is not None
            served.auth._grant = replace(served.auth._grant, expires=0.0)
            server.answer(b"", 500)
            before = len(server.queries)
            reload(broker)
            broker.request("POST", f"/pub?topic={MINE}", b"x").expect_ok()
            assert connection.read_message().body == b"x"
            assert len(server.queries) == before


OPEN = """
[[anonymous.allow]]
topic = "{topic}"
permissions = ["publish", "subscribe"]
"""


@pytest.mark.parametrize(
    ("after", "refusal"),
    [
        (OPEN.format(topic="^public$"), "E_UNAUTHORIZED AUTH failed for {verb} on {names}"),
        (identity("someone", "read"), "E_AUTH_FIRST AUTH required before {verb}"),
    ],
    ids=["less is open", "nothing is open"],
)
def test_a_reload_removes_anonymous_permissions(tmp_path: Path, after: str, refusal: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(OPEN.format(topic=".*"))
    with (
        BrokerThread(auth_policy_file=str(path)) as broker,
        broker.connect() as consumer,
        broker.connect() as publisher,
        broker.connect() as allowed,
    ):
        consumer.sub("t", "c", rdy=10)
        allowed.sub("public", "c", rdy=10)
        for _ in range(30):
            publisher.pub("t", b"before")
        consumer.read_messages(10)
        path.write_text(after)
        reload(broker)
        consumer.expect_fatal(refusal.format(verb="SUB", names='"t" "c"'))
        publisher.command("PUB", "t", body=b"after")
        publisher.expect_fatal(refusal.format(verb="PUB", names='"t" ""'))
        if "public" in after:
            with broker.connect() as another:
                another.pub("public", b"still open")
            assert allowed.read_message().body == b"still open"
        else:
            allowed.expect_fatal(refusal.format(verb="SUB"))


def test_a_bad_file_at_reload_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    with BrokerThread(auth_policy_file=str(path)) as broker, broker.connect() as connection:
        authenticate(connection, "everything")
        path.write_text("")
        reload(broker)
        connection.pub("t", b"x")
        assert broker.request("GET", "/ping", headers=bearer("only-read")).status == 200
        assert_needs_secret(broker.request("GET", "/ping"))


@pytest.mark.parametrize("kind", ["topic", "channel"])
def test_a_policy_needs_the_permission_for_its_dead_letters(
    broker: BrokerThread, topics: None, kind: str
) -> None:
    """Otherwise anybody could write to any topic, by way of a message that fails."""

    def change(who: str, **policy: str) -> Answer:
        body = json.dumps({"policy": policy}).encode()
        return broker.request("PUT", f"/{kind}/settings?topic={MINE}&channel={MINE}", body, bearer(who))

    change("owner", dead_letters=THEIRS).expect_error(403, "UNAUTHORIZED")
    change("owner").expect_error(403, "UNAUTHORIZED")
    assert change("everything", dead_letters=THEIRS).status == 200


def test_dead_letters_are_contents_of_messages(broker: BrokerThread, topics: None) -> None:
    for who, status in (("only-read", 403), ("only-admin", 403), ("only-subscribe", 200)):
        answer = broker.request("GET", f"/dead_letters?topic={MINE}", headers=bearer(who))
        assert answer.status == status, who
