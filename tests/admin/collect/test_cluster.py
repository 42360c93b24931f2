"""Asking and merging, without daemons: shapes, versions, answers that are wrong or slow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nsparq.admin.change.operations import BadTarget, parse_target
from nsparq.admin.collect.cluster import Cluster, NotFound, Unreachable
from nsparq.admin.collect.merge import Node, mark_out_of_date, node_channel
from nsparq.admin.collect.messages import read_letter, readable
from nsparq.admin.collect.upstream import IDLE_S, RequestFailed, Upstream
from nsparq.admin.routing import AdminApi, path_values
from nsparq.http.api import Endpoint, Request
from tests.support.aio import run
from tests.support.auth_server import AuthServer


def asking(work: Callable[[Cluster], Awaitable[Any]], *lookupds: str, nsqds: tuple[str, ...] = ()) -> Any:
    async def main() -> Any:
        upstream = Upstream(connect_timeout=1.0, request_timeout=0.5)
        try:
            return await work(Cluster(upstream, lookupds=lookupds, nsqds=nsqds))
        finally:
            await upstream.close()

    return run(main())


def test_answers_that_are_not_nsq_are_errors() -> None:
    with AuthServer() as server:
        for body in (b"nonsense", b"[]", b"5", b"[" * 100_000):
            server.answer(body, 200)
            with pytest.raises(Unreachable, match="failed to query any nsqlookupd: "):
                asking(lambda cluster: cluster.topics(), server.address)
        server.answer({"topics": ["a", 5, None, {"b": 1}]})
        assert asking(lambda cluster: cluster.topics(), server.address).value == ["a"]


def test_the_envelope_of_nsq_before_1_0_is_removed() -> None:
    with AuthServer() as server:
        server.answer({"status_code": 200, "status_txt": "OK", "data": {"topics": ["old"]}})
        assert asking(lambda cluster: cluster.topics(), server.address).value == ["old"]


def test_a_slow_nsqlookupd_is_an_error_and_delays_no_other() -> None:
    with AuthServer() as slow, AuthServer() as quick:
        slow.stalled.set()
        quick.answer({"topics": ["a"]})
        found = asking(lambda cluster: cluster.topics(), slow.address, quick.address)
        assert found.value == ["a"]
        assert found.message.startswith("WARNING: ") and "timed out" in found.message


def test_a_topic_that_no_nsqlookupd_knows_is_not_found() -> None:
    with AuthServer() as server:
        server.answer({"message": "TOPIC_NOT_FOUND"}, 404)
        with pytest.raises(NotFound, match="TOPIC_NOT_FOUND"):
            asking(lambda cluster: cluster.producers("t"), server.address)
        with pytest.raises(Unreachable):
            asking(lambda cluster: cluster.producers("t"), server.address, "127.0.0.1:1")


def test_nothing_is_called_missing_while_a_node_that_may_have_it_does_not_answer() -> None:
    with AuthServer() as server:
        host, port = server.address.split(":")
        nodes = [
            {"broadcast_address": host, "tcp_port": 1, "http_port": int(port)},
            {"broadcast_address": host, "tcp_port": 2, "http_port": 1},
        ]
        # The answer to /lookup and /nodes, and to the /stats of the node that does answer.
        server.answer({"producers": nodes, "topics": []})
        for work in (
            lambda cluster: cluster.topic("t"),
            lambda cluster: cluster.channel("t", "c"),
        ):
            with pytest.raises(Unreachable, match=f"{host}:1"):
                asking(work, server.address)
        server.answer({"producers": nodes[:1], "topics": []})
        with pytest.raises(NotFound, match="CHANNEL_NOT_FOUND"):
            asking(lambda cluster: cluster.channel("t", "c"), server.address)
        with pytest.raises(NotFound, match="NODE_NOT_FOUND"):
            asking(lambda cluster: cluster.node("other:1"), server.address)
        with pytest.raises(Unreachable):
            asking(lambda cluster: cluster.node("other:1"), server.address, "127.0.0.1:1")
        server.answer({"producers": []})
        with pytest.raises(NotFound, match="NO_PRODUCERS"):
            asking(lambda cluster: cluster.topic("t"), server.address)
        with pytest.raises(Unreachable):
            asking(lambda cluster: cluster.topic("t"), server.address, "127.0.0.1:1")


def test_two_nsqds_that_announce_one_address_are_reported() -> None:
    with AuthServer() as first, AuthServer() as second:
        info = {"broadcast_address": "db", "hostname": "db", "tcp_port": 4150, "http_port": 4151}
        for start_time, count in ((5, 0), (6, 1)):
            first.answer(info | {"start_time": 5})
            second.answer(info | {"start_time": start_time})
            found = asking(lambda cluster: cluster.nodes(), nsqds=(first.address, second.address))
            assert ([node.address for node in found.value], len(found.errors)) == (["db:4151"], count)
        assert f"{first.address} and {second.address} both announce db:4151" in found.errors[0]


def test_two_nsqds_that_announce_one_address_to_nsqlookupd_are_reported() -> None:
    with AuthServer() as server:
        info = {"broadcast_address": "localhost", "tcp_port": 4150, "http_port": 4151}
        for other, count in (("a", 0), ("b", 1)):
            server.answer({"producers": [info | {"hostname": "a"}, info | {"hostname": other}]})
            found = asking(lambda cluster: cluster.nodes(), server.address)
            assert (len(found.value), len(found.errors)) == (1, count)
        assert "a and b both announce localhost:4150" in found.errors[0]


def test_errors_show_no_password() -> None:
    async def main() -> None:
        upstream = Upstream(connect_timeout=1.0, request_timeout=1.0)
        with pytest.raises(RequestFailed) as caught:
            await upstream.ask("GET", "http://me:secret@127.0.0.1:1/x?token=hidden")
        assert "secret" not in str(caught.value) and "hidden" not in str(caught.value)
        await upstream.close()

    run(main())


def test_connections_are_kept_and_a_dead_one_is_replaced() -> None:
    async def main() -> None:
        accepted = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal accepted
            accepted += 1
            for _ in range(2):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        upstream = Upstream(connect_timeout=1.0, request_timeout=1.0)
        for _ in range(4):
            assert await upstream.get_json(f"http://127.0.0.1:{port}/x") == {}
        assert accepted == 2
        await upstream.close()
        server.close()
        await asyncio.sleep(0.01)

    run(main())


def test_nodes_of_a_lower_version_are_out_of_date() -> None:
    versions = ["1.3.0", "1.2.1", "1.3.0-rc.1", "v1.3.0", "nonsense"]
    nodes = [Node(f"h{place}", "h", 1, 2, version) for place, version in enumerate(versions)]
    assert [node.out_of_date for node in mark_out_of_date(nodes)] == [False, True, True, False, True]


def test_ipv6_addresses_stand_in_brackets() -> None:
    node = Node("fd4a:622f::1", "h", 4150, 4151, "1.3.0")
    assert (node.address, node.tcp_address) == ("[fd4a:622f::1]:4151", "[fd4a:622f::1]:4150")


def test_topology_counts_are_left_out_when_nothing_is_known_of_them() -> None:
    node = Node("h", "h", 1, 2, "1.3.0")
    assert "delivery_msg_count" not in node_channel(node, "t", {"channel_name": "c"}, 0.0, clients=False)
    counted = {"channel_name": "c", "zone_local_msg_count": 3, "global_msg_count": 2}
    found = node_channel(node, "t", counted, 0.0, clients=False)
    assert (found["delivery_msg_count"], found["zone_local_msg_count"]) == (5, 3)
    assert "region_local_msg_count" not in found


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b'{"a":1}', "json"), (b"[1", "text"), (b"plain", "text"), (b"\xff", "binary"), (b"a\x00b", "binary")],
)
def test_bodies_are_shown_by_their_kind(body: bytes, kind: str) -> None:
    assert readable(body)[0] == kind


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"topic":"t","error":"e"}', b'{"topic":5,"error":""}'])
def test_other_bodies_are_not_taken_for_dead_letters(body: bytes) -> None:
    assert read_letter(body, {"key": "value"}) is None


def test_a_dead_letter_returns_the_original_bytes() -> None:
    found = read_letter(b'{"topic":"t","channel":"c","error":"e","text":null,"base64":"/wA="}', {})
    assert found is not None and (found.topic, found.body) == ("t", b"\xff\x00")


def test_a_dead_letter_of_nsqd_has_its_origin_in_headers() -> None:
    origin = {"nsq-dead-topic": "t", "nsq-dead-channel": "c", "nsq-dead-attempts": "4", "own": "x"}
    found = read_letter(b"\xff", origin | {"nsq-dead-reason": "timed out"})
    assert found is not None and (found.topic, found.channel, found.attempts) == ("t", "c", 4)
    assert (found.error, found.body, found.headers) == ("timed out", b"\xff", {"own": "x"})


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("90m", {"time": "4600.000"}),
        ("1794745843.5", {"time": "1794745843.5"}),
        ("2026-01-31 12:00", {"time": "2026-01-31T12:00:00+00:00"}),
        ("2026-01-31T12:00:00+02:00", {"time": "2026-01-31T12:00:00+02:00"}),
    ],
)
def test_times_of_a_replay(when: str, expected: dict[str, str]) -> None:
    assert parse_target("time", when, now_s=10_000.0) == expected


@pytest.mark.parametrize(("to", "when"), [("", ""), ("time", ""), ("time", "yesterday"), ("away", "1h")])
def test_an_invalid_replay_target_is_refused(to: str, when: str) -> None:
    with pytest.raises(BadTarget):
        parse_target(to, when)


def test_paths_with_several_names_find_their_endpoint() -> None:
    paths = ["/", "/t", "/t/{a}", "/t/{a}/{b}", "/t/fixed", "/t/fixed/{b}"]
    table = [Endpoint(method="GET", path=path, handler=lambda _: None, summary="") for path in paths]
    api = AdminApi(title="", version="", endpoints=table, base="/base")

    def routed(path: str) -> tuple[str, list[str]]:
        asked = Request("GET", path, "", [])
        assert api.route(asked) is None and asked.endpoint is not None, path
        return asked.endpoint.path, path_values(asked)

    assert routed("/base") == ("/base", [""])
    assert routed("/base/t/x") == ("/base/t/{a}", ["x"])
    assert routed("/base/t/x/y%23z") == ("/base/t/{a}/{b}", ["x", "y#z"])
    assert routed("/base/t/fixed") == ("/base/t/fixed", [""])
    assert routed("/base/t/fixed/y") == ("/base/t/fixed/{b}", ["y"])
    for path in ("/t", "/base/t//y", "/base/t/x/y/z"):
        answer = api.route(Request("GET", path, "", []))
        assert answer is not None and answer.status == 404


def test_idle_connections_are_closed_after_a_while() -> None:
    async def main() -> None:
        upstream = Upstream(connect_timeout=5, request_timeout=5)
        upstream._sweep(asyncio.get_running_loop().time())
        with AuthServer() as gone, AuthServer() as there:
            for server in (gone, there):
                server.answer({}, 200)
                await upstream.get_json(f"http://{server.address}/nodes")
            now = asyncio.get_running_loop().time()
            assert len(upstream._idle) == 2
            upstream._sweep(now + IDLE_S)
            assert not upstream._idle
            await upstream.get_json(f"http://{there.address}/nodes")
        await upstream.close()

    run(main())
