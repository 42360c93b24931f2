"""Queries to nsqlookupd: URLs, headers, good and bad answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

import pytest

from nsparq.client.config import Config
from nsparq.client.connect.lookup import Lookup, LookupFailed, lookup_url
from tests.support.aio import run, until
from tests.support.auth_server import AuthServer, unused_port


def producer(host: object = "127.0.0.1", port: object = 4150) -> dict[str, Any]:
    return {"broadcast_address": host, "tcp_port": port, "http_port": 4151}


def ask(*servers: AuthServer | str, topic: str = "t", **options: Any) -> list[str]:
    """The addresses that are known once every server has answered or failed."""
    addresses = [one if isinstance(one, str) else one.address for one in servers]
    return run(last(Lookup(addresses, Config(**options)).producers(topic)))


async def last(answers: AsyncIterator[list[str] | None]) -> list[str]:
    found = [answer async for answer in answers][-1]
    assert found is not None
    return found


# URLs


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:4161", "http://127.0.0.1:4161/lookup?topic=t"),
        ("[::1]:4161", "http://[::1]:4161/lookup?topic=t"),
        ("http://h:4161", "http://h:4161/lookup?topic=t"),
        ("http://h:4161/", "http://h:4161/lookup?topic=t"),
        ("https://h:4161/nsq/lookup", "https://h:4161/nsq/lookup?topic=t"),
        ("http://h:4161/other/path?a=1&b=", "http://h:4161/other/path?a=1&b=&topic=t"),
        ("h:4161/path?x=y", "http://h:4161/path?x=y&topic=t"),
    ],
)
def test_an_address_may_be_a_url_with_a_path_and_parameters(address: str, url: str) -> None:
    assert lookup_url(address, "/lookup", topic="t") == url


def test_other_queries_use_a_path_beside_that_of_lookups() -> None:
    assert lookup_url("http://h:1/nsq/lookup", "/nodes") == "http://h:1/nsq/nodes"
    assert lookup_url("h:1", "/nodes") == "http://h:1/nodes"


def test_the_topic_is_quoted() -> None:
    assert lookup_url("h:1", "/lookup", topic="a#ephemeral") == "http://h:1/lookup?topic=a%23ephemeral"


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "http://h", "", "h:many", "ftp://h:1", "http://:1", "h:99999"]
)
def test_an_invalid_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError):
        Lookup([address], Config())


# Answers


def test_producers_become_addresses() -> None:
    with AuthServer() as server:
        server.answer({"channels": [], "producers": [producer("a", 1), producer("::1", 2)]})
        assert ask(server) == ["a:1", "[::1]:2"]
        (query,) = server.queries
        assert (query.method, query.path) == ("GET", "/lookup?topic=t")
        assert query.headers["accept"] == "application/vnd.nsq; version=1.0"
        assert query.headers["user-agent"].startswith("nsparq/")


def test_before_1_0_the_result_was_wrapped() -> None:
    with AuthServer() as server:
        server.answer({"status_code": 200, "data": {"producers": [producer()]}})
        assert ask(server) == ["127.0.0.1:4150"]


def test_nodes_have_their_own_query() -> None:
    with AuthServer() as server:
        server.answer({"producers": [producer("n", 9)]})
        assert run(last(Lookup([server.address], Config()).nodes())) == ["n:9"]
        assert server.queries[0].path == "/nodes"


def test_all_are_asked_and_their_answers_are_joined() -> None:
    with AuthServer() as one, AuthServer() as other:
        one.answer({"producers": [producer("a"), producer("b")]})
        other.answer({"producers": [producer("b"), producer("c")]})
        assert ask(one, other) == ["a:4150", "b:4150", "c:4150"]


def test_a_topic_that_is_not_known_has_no_producers() -> None:
    with AuthServer() as server:
        server.answer({"message": "TOPIC_NOT_FOUND"}, status=404)
        assert ask(server) == []


def test_one_that_answers_is_enough() -> None:
    with AuthServer() as bad, AuthServer() as good:
        bad.answer(b"oops", status=500)
        good.answer({"producers": [producer("a")]})
        assert ask(bad, f"127.0.0.1:{unused_port()}", good) == ["a:4150"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 200),
        (b"not json", 200),
        (b"[]", 200),
        (b'{"producers": 7}', 200),
        (b'{"producers": ["x"]}', 200),
        (b"{}", 200),
        (b'{"data": null}', 200),
        (b"[" * 200_000, 200),
        (b'{"producers": [{"tcp_port": %s}]}' % (b"1" * 5000), 200),
        (b"{}", 500),
        (b"{}", 301),
    ],
)
def test_an_unusable_answer_counts_as_none(body: bytes, status: int) -> None:
    with AuthServer() as server:
        server.answer(body, status=status)
        with pytest.raises(LookupFailed, match=f"none of {server.address} answered"):
            ask(server)


@pytest.mark.parametrize(
    "bad",
    [
        producer(""),
        producer("a..b"),
        producer("x@h"),
        producer("h", True),
        producer(None),
        producer("h", 0),
        producer("h", "4150"),
        producer("h", 70_000),
        {},
    ],
)
def test_a_producer_with_an_invalid_address_is_left_out(bad: dict[str, Any]) -> None:
    with AuthServer() as server:
        server.answer({"producers": [bad, producer("good")]})
        assert ask(server) == ["good:4150"]


# Authorization


def test_nsqlookupd_gets_the_secret_unless_disabled() -> None:
    with AuthServer() as server:
        server.answer({"producers": []})
        ask(server, auth_secret="xyzzy")
        ask(server, auth_secret="xyzzy", lookupd_authorization=False)
        ask(server)
        sent = [query.headers.get("authorization") for query in server.queries]
        assert sent == ["Bearer xyzzy", None, None]


def test_a_secret_without_tls_is_warned_of_or_withheld(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Another test may have warned about a server with the same port.
    monkeypatch.setattr("nsparq.client.connect.secret._warned_of", set())
    with AuthServer() as server:
        server.answer({"producers": []})
        ask(server, auth_secret="xyzzy", auth_requires_tls=True)
        monkeypatch.setattr("nsparq.client.connect.secret._is_local", lambda host: False)
        ask(server, auth_secret="xyzzy", auth_requires_tls=True)
        ask(server, auth_secret="xyzzy")
        ask(server, auth_secret="xyzzy")
        sent = [query.headers.get("authorization") for query in server.queries]
        assert sent == ["Bearer xyzzy", None, "Bearer xyzzy", "Bearer xyzzy"]
        warned = [record.getMessage() for record in caplog.records if "secret" in record.getMessage()]
        assert warned == [
            f"{server.address}: the auth secret is sent without TLS and can be read on the network"
        ]


# The filter


def test_a_filter_decides_which_addresses_are_used() -> None:
    def local(addresses: list[str]) -> Iterable[str]:
        return (f"127.0.0.1:{address.rpartition(':')[2]}" for address in addresses if "a" in address)

    with AuthServer() as server:
        server.answer({"producers": [producer("a", 1), producer("b", 2), producer("aa", 3)]})
        assert ask(server, discovery_filter=local) == ["127.0.0.1:1", "127.0.0.1:3"]
        assert ask(server, discovery_filter=lambda _: []) == []


@pytest.mark.parametrize("broken", [lambda _: 1 / 0, lambda _: None, lambda _: ["nowhere"]])
def test_a_failing_filter_counts_as_no_answer(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    with AuthServer() as server:
        server.answer({"producers": [producer("a", 1)]})
        with pytest.raises(LookupFailed, match="the discovery_filter failed"):
            ask(server, discovery_filter=broken)
        assert "Traceback" in caplog.text


# Silent servers


def test_a_stalled_nsqlookupd_times_out_without_a_thread() -> None:
    with AuthServer() as server:
        server.stalled.set()
        threads = threading.active_count()

        async def main() -> None:
            lookup = Lookup([server.address], Config(lookupd_poll_timeout=0.2))
            asking = asyncio.create_task(last(lookup.producers("t")))
            await until(lambda: server.queries)
            # Only the server's thread for the request.
            assert threading.active_count() == threads + 1
            with pytest.raises(LookupFailed):
                await asking

        run(main())


@pytest.mark.parametrize("turn", [1, -1], ids=["silent first", "silent last"])
def test_a_silent_nsqlookupd_does_not_hold_back_the_others(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsparq.client.connect.lookup.PATIENCE_S", 0.01)
    given: list[list[str]] = []

    def spy(addresses: list[str]) -> list[str]:
        given.append(addresses)
        return addresses

    async def main(silent: AuthServer, good: AuthServer) -> None:
        addresses = [silent.address, good.address][::turn]
        async with aclosing(Lookup(addresses, Config(discovery_filter=spy)).producers("t")) as answers:
            # A busy machine may need longer than the patience: None, then the answer.
            found = await anext(answers) or await anext(answers)
            assert found == ["a:4150", "b:4150"]
            silent.stalled.clear()
            assert await anext(answers) == ["a:4150", "b:4150", "c:4150"]
            assert [answer async for answer in answers] == []
        assert given == [["a:4150", "b:4150"], ["a:4150", "b:4150", "c:4150"]], "all that is known"

    with AuthServer() as silent, AuthServer() as good:
        silent.stalled.set()
        silent.answer({"producers": [producer("b"), producer("c")]})
        good.answer({"producers": [producer("a"), producer("b")]})
        run(main(silent, good))


def test_nobody_has_answered_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is something else than an empty answer."""
    monkeypatch.setattr("nsparq.client.connect.lookup.PATIENCE_S", 0.01)

    async def main(silent: AuthServer) -> None:
        async with aclosing(Lookup([silent.address], Config()).producers("t")) as answers:
            assert await anext(answers) is None
            silent.stalled.clear()
            assert await anext(answers) == []

    with AuthServer() as silent:
        silent.stalled.set()
        silent.answer({"producers": []})
        run(main(silent))


def test_no_request_outlives_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsparq.client.connect.lookup.PATIENCE_S", 0.01)

    async def main(silent: AuthServer) -> None:
        before = asyncio.all_tasks()
        async with aclosing(Lookup([silent.address], Config()).producers("t")) as answers:
            assert await anext(answers) is None
        assert asyncio.all_tasks() == before

    with AuthServer() as silent:
        silent.stalled.set()
        run(main(silent))


def test_a_login_in_the_address_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LookupFailed) as caught:
        ask(f"http://me:secret@127.0.0.1:{unused_port()}")
    assert "secret" not in caplog.text + str(caught.value)
    assert "127.0.0.1" in caplog.text
