"""Grants, auth servers and the cache of tokens."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import pytest

from nsparq.server.auth.grants import AuthChain, AuthFailed, Authorization, Grant, Permission, Validity
from nsparq.server.auth.patterns import compile_pattern
from nsparq.server.auth.servers import MAX_SECRET, AuthServers
from nsparq.server.auth.tokens import FAILURE_S, TokenCache, secret_from_header
from tests.support import wait_until
from tests.support.auth_server import AuthServer, entry, unused_port

T = TypeVar("T")
PUBLISH, SUBSCRIBE, READ, ADMIN = Permission
ALL = entry(".*", "publish", "subscribe")


def authorization(topic: str, *permissions: Permission, channels: tuple[str, ...] = (".*",)) -> Authorization:
    return Authorization(
        compile_pattern(topic), tuple(map(compile_pattern, channels)), frozenset(permissions)
    )


def grant(*authorizations: Authorization, **more: Any) -> Grant:
    return Grant("me", "http://u", authorizations, **more)


# Grants


def test_patterns_match_any_part_of_the_name() -> None:
    found = grant(authorization("ill", SUBSCRIBE, channels=("^c$",)))
    assert found.allows(SUBSCRIBE, "billing", "c")
    assert not found.allows(SUBSCRIBE, "billing", "cc")
    assert not found.allows(SUBSCRIBE, "orders", "c")


def test_no_permission_includes_another() -> None:
    for given in Permission:
        found = grant(authorization(".*", given))
        assert [wanted for wanted in Permission if found.allows(wanted, "t", "c")] == [given]


def test_publishing_needs_a_channel_pattern_that_matches_the_empty_name() -> None:
    assert grant(authorization("t", PUBLISH, channels=("^c$", ".*"))).allows(PUBLISH, "t")
    assert not grant(authorization("t", PUBLISH, channels=("^c$",))).allows(PUBLISH, "t")
    assert not grant(authorization("t", PUBLISH, channels=())).allows(PUBLISH, "t")


def test_the_whole_daemon_is_the_empty_topic() -> None:
    assert grant(authorization(".*", READ)).allows(READ)
    narrow = grant(authorization("^billing", READ, ADMIN))
    assert narrow.allows(READ, "billing") and narrow.allows(ADMIN, "billing.eu")
    assert not narrow.allows(READ) and not narrow.allows(ADMIN)


def test_one_authorization_must_allow_the_whole_action() -> None:
    found = grant(
        authorization("^a$", SUBSCRIBE, channels=("^x$",)), authorization("^b$", SUBSCRIBE, channels=("^y$",))
    )
    allowed = [
        (topic, channel) for topic in "ab" for channel in "xy" if found.allows(SUBSCRIBE, topic, channel)
    ]
    assert allowed == [("a", "x"), ("b", "y")]
    assert not grant().allows(PUBLISH, "t")


def test_the_number_of_cached_decisions_is_limited() -> None:
    found = grant(authorization("^t1", PUBLISH))
    for _ in range(2):
        assert sum(found.allows(PUBLISH, f"t{number}") for number in range(3000)) == 1111
    assert len(found._answers) <= 1024
    assert found == grant(authorization("^t1", PUBLISH))


def test_no_decision_about_a_text_too_long_for_a_name_is_kept() -> None:
    found = grant(authorization("t", PUBLISH))
    for texts in (("t" * 65, ""), ("t", "c" * 65)):
        assert found.allows(PUBLISH, *texts)
    assert found._answers == {}
    assert found.allows(PUBLISH, "t" * 64, "c" * 64)
    assert len(found._answers) == 1


def test_a_grant_ends_with_its_time_or_with_its_policy() -> None:
    found = grant(expires=10.0)
    assert not found.is_expired(9.9) and found.is_expired(10.0)
    validity = Validity()
    found = grant(validity=validity)
    assert not found.is_expired(1e18)
    validity.is_over = True
    assert found.is_expired(0.0)


def test_the_reply_has_nsqs_keys_order_and_escapes() -> None:
    found = Grant("i<&>é\u2028", "", (authorization("t"),) * 3)
    expected = '{"identity":"i\\u003c\\u0026\\u003eé\\u2028","identity_url":"","permission_count":3}'
    assert found.reply() == expected.encode()
    assert Grant("\ud800", "", ()).reply().isascii()


# Auth servers


@pytest.fixture
def server() -> Iterator[AuthServer]:
    with AuthServer() as server:
        yield server


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def ask(servers: AuthServers, secret: bytes = b"s", **more: Any) -> Grant:
    client = {"remote_ip": "10.1.2.3", "tls": False, "common_name": ""}
    return asyncio.run(servers.authenticate(secret, **{**client, **more}))


def test_get_sends_the_fields_in_the_query(server: AuthServer, threads: ThreadPoolExecutor) -> None:
    server.grant(ALL)
    ask(AuthServers([server.address], threads), "s&c +é/".encode() + b"\xff", tls=True, common_name="a=b")
    query = server.queries[0]
    assert query.method == "GET"
    expected = "/auth?common_name=a%3Db&remote_ip=10.1.2.3&secret=s%26c+%2B%C3%A9%2F%FF&tls=true"
    assert query.path == expected
    assert query.headers["accept"] == "application/vnd.nsq; version=1.0"


def test_post_sends_the_fields_as_json_lists(server: AuthServer, threads: ThreadPoolExecutor) -> None:
    server.grant(ALL)
    ask(AuthServers([server.address], threads, method="post"), b"s\xff")
    query = server.queries[0]
    assert (query.method, query.path) == ("POST", "/auth")
    assert query.headers["content-type"] == "application/json"
    assert query.headers["accept"] == "application/vnd.nsq; version=1.0"
    assert json.loads(query.body) == {
        "common_name": [""],
        "remote_ip": ["10.1.2.3"],
        "secret": ["s\ufffd"],
        "tls": ["false"],
    }
    assert list(json.loads(query.body)) == ["common_name", "remote_ip", "secret", "tls"]


def test_an_address_may_be_a_url_with_a_query(server: AuthServer, threads: ThreadPoolExecutor) -> None:
    server.grant(ALL)
    ask(AuthServers([f"http://{server.address}/x/y?a=b"], threads))
    parts = urlsplit(server.queries[0].path)
    assert parts.path == "/x/y"
    assert [name for name, _ in parse_qsl(parts.query, True)] == [
        "a",
        "common_name",
        "remote_ip",
        "secret",
        "tls",
    ]


def test_the_response_becomes_a_grant_until_its_ttl_ends(
    server: AuthServer, threads: ThreadPoolExecutor
) -> None:
    server.grant(
        entry("^t$", "publish", "subscribe", channels=("^c$", ".*")),
        ttl=60,
        identity="me",
        identity_url="http://u",
    )
    found = ask(AuthServers([server.address], threads, clock=lambda: 1000.0))
    channels = ("^c$", ".*")
    assert found == grant(authorization("^t$", PUBLISH, SUBSCRIBE, channels=channels), expires=1060.0)


@pytest.mark.parametrize(
    "answer",
    [
        {"ttl": 5},
        {"ttl": 5, "authorizations": None, "identity": None, "identity_url": None},
        {"TTL": 5, "Identity": "", "more": [1]},
        {"ttl": (1 << 63) - 1, "authorizations": []},
    ],
)
def test_missing_or_null_fields_are_empty_and_keys_ignore_case(
    answer: dict[str, Any], server: AuthServer, threads: ThreadPoolExecutor
) -> None:
    server.answer(answer)
    found = ask(AuthServers([server.address], threads))
    assert (found.identity, found.identity_url, found.authorizations) == ("", "", ())


def test_an_auth_server_may_grant_our_own_permissions(
    server: AuthServer, threads: ThreadPoolExecutor
) -> None:
    server.grant(entry(".*", "read", "admin"))
    assert ask(AuthServers([server.address], threads)).allows(ADMIN)


USABLE = {"ttl": 5, "authorizations": [ALL]}


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (USABLE, 201, "status 201"),
        (b"", 200, "not JSON"),
        (b"\xff", 200, "not JSON"),
        (b"[" * 100_000, 200, "not JSON"),
        (b"null", 200, "ttl 0 is out of range"),
        (b"[]", 200, "not a JSON object"),
        ({"ttl": 0}, 200, "ttl 0 is out of range"),
        (b'{"ttl":9223372036854775808}', 200, "ttl 9.22e+18 is out of range"),
        ({"ttl": 1.5}, 200, "ttl has the wrong type"),
        ({"ttl": True}, 200, "ttl has the wrong type"),
        ({"ttl": 5, "identity": 1}, 200, "identity has the wrong type"),
        ({"ttl": 5, "authorizations": {}}, 200, "authorizations has the wrong type"),
        ({"ttl": 5, "authorizations": [1]}, 200, "not a JSON object"),
        ({"ttl": 5, "authorizations": [{**ALL, "topic": 5}]}, 200, "topic has the wrong type"),
        ({"ttl": 5, "authorizations": [{**ALL, "topic": "("}]}, 200, "missing )"),
        ({"ttl": 5, "authorizations": [{**ALL, "channels": ["["]}]}, 200, "missing ]"),
        ({"ttl": 5, "authorizations": [{**ALL, "channels": [5]}]}, 200, "channels must be a list of strings"),
        ({"ttl": 5, "authorizations": [{**ALL, "permissions": ["fly"]}]}, 200, "'fly'"),
        (b" " * (2 << 20), 200, "more than 1048576 bytes"),
        (b"no", 403, "not JSON"),
        ({"https_port": "443"}, 403, "403 without an https_port"),
        ({"https_port": 65536}, 403, "403 without an https_port"),
    ],
)
def test_an_invalid_response_is_logged_and_fails(
    answer: object,
    status: int,
    reason: str,
    server: AuthServer,
    threads: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.answer(answer, status)
    with pytest.raises(AuthFailed, match="no auth server gave a usable response"):
        ask(AuthServers([server.address], threads), b"hush")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage() and server.address in record.getMessage()
    assert "hush" not in record.getMessage()


def test_all_servers_are_asked_in_turn_until_one_answers(
    server: AuthServer, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    server.grant(ALL)
    with AuthServer() as broken:
        servers = AuthServers([f"127.0.0.1:{unused_port()}", broken.address, server.address], threads)
        for _ in range(20):
            assert ask(servers).authorizations
        assert len(server.queries) == 20
        assert 0 < len(broken.queries) < 20  # it is not always the first
    assert "Connection refused" in caplog.text and "status 500" in caplog.text


def test_the_first_server_is_chosen_at_random(threads: ThreadPoolExecutor) -> None:
    with AuthServer() as one, AuthServer() as two:
        one.grant(ALL)
        two.grant(ALL)
        servers = AuthServers([one.address, two.address], threads)
        for _ in range(40):
            ask(servers)
        assert one.queries and two.queries


def test_a_silent_server_is_abandoned_at_the_deadline(
    server: AuthServer, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    server.stalled.set()
    with pytest.raises(AuthFailed):
        ask(AuthServers([server.address], threads, request_timeout=0.2))
    assert "timed out" in caplog.text


def test_a_403_over_http_is_repeated_over_https(
    server: AuthServer, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    made = pytest.importorskip("tests.support.certificates").certificates()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server.cert, made.server.key)
    with AuthServer(tls=context) as secure:
        secure.grant(ALL, identity="safe")
        server.answer({"message": "TLS_REQUIRED", "https_port": secure.port}, 403)
        servers = AuthServers([server.address], threads, ca_file=str(made.ca.cert))
        assert ask(servers, b"x y").identity == "safe"
        assert [query.path for query in server.queries] == [query.path for query in secure.queries]
        with pytest.raises(AuthFailed):
            ask(AuthServers([server.address], threads))
        assert "certificate verify failed" in caplog.text
        secure.answer({"https_port": server.port}, 403)
        with pytest.raises(AuthFailed):  # a 403 over HTTPS is final
            ask(servers)


@pytest.mark.parametrize("secret", [b"", b"x" * (MAX_SECRET + 1)])
def test_an_empty_or_huge_secret_fails_without_a_request(
    secret: bytes, server: AuthServer, threads: ThreadPoolExecutor
) -> None:
    with pytest.raises(AuthFailed, match=f"the secret has {len(secret)} bytes"):
        ask(AuthServers([server.address], threads), secret)
    assert server.queries == []


def test_a_cancelled_query_takes_no_thread(server: AuthServer) -> None:
    server.stalled.set()
    server.grant(ALL)

    async def scenario() -> None:
        client = {"remote_ip": "", "tls": False, "common_name": ""}
        with ThreadPoolExecutor(1) as threads:
            servers = AuthServers([server.address], threads)
            first = asyncio.create_task(servers.authenticate(b"1", **client))
            await asyncio.to_thread(wait_until, lambda: server.queries)
            gone = asyncio.create_task(servers.authenticate(b"2", **client))
            last = asyncio.create_task(servers.authenticate(b"3", **client))
            await asyncio.sleep(0)
            gone.cancel()
            # Cancel it before the thread is free.
            await asyncio.wait({gone})
            server.stalled.clear()
            await asyncio.gather(first, last)

    asyncio.run(scenario())
    assert [query.fields["secret"] for query in server.queries] == ["1", "3"]


# Several authenticators


class Table:
    """An authenticator that knows some secrets and counts its calls."""

    def __init__(self, grants: dict[bytes, Grant], anonymous: Grant | None = None) -> None:
        self.grants, self.anonymous = grants, anonymous
        self.asked: list[bytes] = []
        self.reloads = 0
        self.gate: asyncio.Event | None = None

    async def authenticate(self, secret: bytes, *, remote_ip: str, tls: bool, common_name: str) -> Grant:
        self.asked.append(secret)
        if self.gate is not None:
            await self.gate.wait()
        if secret not in self.grants:
            raise AuthFailed(f"{len(self.grants)} do not know it")
        return self.grants[secret]

    def reload(self) -> None:
        self.reloads += 1


CLIENT: dict[str, Any] = {"remote_ip": "1.2.3.4", "tls": False, "common_name": ""}


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def scenario() -> T:
        return await work()

    return asyncio.run(scenario())


def test_the_first_authenticator_that_knows_a_secret_decides() -> None:
    one, two = grant(), grant(authorization("t"))
    first, second = Table({b"a": one}), Table({b"a": two, b"b": two})
    chain = AuthChain([first, second])
    assert run(lambda: chain.authenticate(b"a", **CLIENT)) is one
    assert second.asked == []
    assert run(lambda: chain.authenticate(b"b", **CLIENT)) is two
    with pytest.raises(AuthFailed, match="1 do not know it; 2 do not know it"):
        run(lambda: chain.authenticate(b"c", **CLIENT))


def test_the_first_anonymous_grant_counts() -> None:
    one = grant()
    assert AuthChain([Table({}), Table({}, one), Table({}, grant(authorization("x")))]).anonymous is one
    assert AuthChain([Table({})]).anonymous is None


def test_a_reload_reaches_all_authenticators() -> None:
    tables = [Table({}), Table({})]
    AuthChain(tables).reload()
    assert [table.reloads for table in tables] == [1, 1]


# Tokens of HTTP requests


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_token_is_looked_up_once_while_its_grant_lasts() -> None:
    table, clock = Table({b"t": grant(expires=1010.0)}), Clock()
    cache = TokenCache(table, clock=clock)

    async def scenario() -> None:
        assert cache.known(b"t", **CLIENT) is None
        first = await cache.grant(b"t", **CLIENT)
        assert cache.known(b"t", **CLIENT) is first is await cache.grant(b"t", **CLIENT)
        assert table.asked == [b"t"]
        clock.now = 1010.0
        assert cache.known(b"t", **CLIENT) is None
        table.grants[b"t"] = grant(expires=2000.0)
        assert (await cache.grant(b"t", **CLIENT)).expires == 2000.0
        assert table.asked == [b"t", b"t"]

    asyncio.run(scenario())


@pytest.mark.parametrize("other", [{"remote_ip": "5.6.7.8"}, {"tls": True}, {"common_name": "x"}])
def test_the_same_token_from_another_address_is_looked_up_again(other: dict[str, Any]) -> None:
    table = Table({b"t": grant()})
    cache = TokenCache(table)

    async def scenario() -> None:
        await cache.grant(b"t", **CLIENT)
        assert cache.known(b"t", **{**CLIENT, **other}) is None
        await cache.grant(b"t", **{**CLIENT, **other})

    asyncio.run(scenario())
    assert len(table.asked) == 2


def test_a_wrong_token_is_refused_for_a_moment_without_lookups() -> None:
    table, clock = Table({}), Clock()
    cache = TokenCache(table, clock=clock)

    async def scenario() -> None:
        for _ in range(3):
            with pytest.raises(AuthFailed):
                await cache.grant(b"t", **CLIENT)
        assert table.asked == [b"t"]
        clock.now += FAILURE_S
        table.grants[b"t"] = grant()
        await cache.grant(b"t", **CLIENT)

    asyncio.run(scenario())


def test_requests_with_the_same_token_share_one_lookup_even_if_one_ends() -> None:
    table = Table({b"t": grant()})
    cache = TokenCache(table)

    async def scenario() -> None:
        table.gate = asyncio.Event()
        tasks = [asyncio.create_task(cache.grant(b"t", **CLIENT)) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        table.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(found is table.grants[b"t"] for found in results[1:])

    asyncio.run(scenario())
    assert table.asked == [b"t"]


def test_a_failure_that_nobody_waits_for_is_not_an_error() -> None:
    table = Table({})
    cache = TokenCache(table)

    async def scenario() -> None:
        table.gate = asyncio.Event()
        task = asyncio.create_task(cache.grant(b"t", **CLIENT))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        table.gate.set()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())


def test_closing_cancels_lookups() -> None:
    table = Table({})
    cache = TokenCache(table)

    async def scenario() -> None:
        table.gate = asyncio.Event()
        task = asyncio.create_task(cache.grant(b"t", **CLIENT))
        await asyncio.sleep(0)
        await cache.close()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        assert cache._lookups == {}

    asyncio.run(scenario())


def test_the_number_of_tokens_is_limited_and_wrong_ones_do_not_displace_right_ones() -> None:
    table = Table({b"%d" % number: grant() for number in range(20)})
    cache = TokenCache(table, capacity=10)

    async def scenario() -> None:
        for number in range(20):
            await cache.grant(b"%d" % number, **CLIENT)
        for number in range(50):
            with pytest.raises(AuthFailed):
                await cache.grant(b"wrong %d" % number, **CLIENT)
        assert [number for number in range(20) if cache.known(b"%d" % number, **CLIENT)] == [*range(10, 20)]
        assert len(cache._failures) == 10

    asyncio.run(scenario())


def test_without_a_token_the_anonymous_grant_counts_if_there_is_one() -> None:
    table = Table({})
    cache = TokenCache(table)
    assert cache.known(b"", **CLIENT) is None
    with pytest.raises(AuthFailed, match="no secret was sent"):
        run(lambda: cache.grant(b"", **CLIENT))
    table.anonymous = grant()
    assert cache.known(b"", **CLIENT) is table.anonymous
    assert run(lambda: cache.grant(b"", **CLIENT)) is table.anonymous
    assert table.asked == []


def test_the_cache_keeps_no_secret() -> None:
    cache = TokenCache(Table({b"hush-hush": grant()}))

    async def scenario() -> None:
        await cache.grant(b"hush-hush", **CLIENT)
        with pytest.raises(AuthFailed):
            await cache.grant(b"hush-too", **CLIENT)

    asyncio.run(scenario())
    assert "hush" not in repr((cache._grants, cache._failures, cache._lookups))


@pytest.mark.parametrize(
    ("header", "secret"),
    [
        ("Bearer abc", b"abc"),
        (b"bearer  name:pass word ", b"name:pass word"),
        (b"Bearer caf\xc3\xa9", b"caf\xc3\xa9"),
        ("Basic bmFtZTpwYXNz", b"name:pass"),
        ("basic OnRva2Vu", b"token"),
        ("", b""),
        (b"", b""),
    ],
)
def test_the_secret_in_a_header(header: str | bytes, secret: bytes) -> None:
    assert secret_from_header(header) == secret


@pytest.mark.parametrize(
    "header", [" ", "Bearer", "Bearer ", "abc", "Digest x", "Basic ?", "Basic Og==", b"\xff"]
)
def test_a_header_without_a_secret_is_not_an_anonymous_request(header: str | bytes) -> None:
    with pytest.raises(AuthFailed):
        secret_from_header(header)
