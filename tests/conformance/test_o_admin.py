"""Group O: nsqadmin's JSON API, in front of nsqlookupd and nsqds.

NSPARQ_TEST_NSQADMIN=/path/to/nsqadmin runs these against another one; what is ours alone is then
skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nsparq.options import TlsRequired
from tests.admin.support import REFERENCE_ADMIN, Cluster, TestAdmin, join, start_admin
from tests.support import JSON, NSQ_HEADER, REFERENCE, Answer, start_broker, unique_name, wait_until
from tests.support.auth_server import AuthServer
from tests.support.certificates import certificates
from tests.support.polling import DEADLINE

ours_only = pytest.mark.skipif(bool(REFERENCE_ADMIN), reason="differs from NSQ on purpose")

TOPIC_KEYS = (
    "node hostname topic_name depth memory_depth backend_depth message_count nodes channels paused "
    "e2e_processing_latency"
).split()
CHANNEL_KEYS = (
    "node hostname topic_name channel_name depth memory_depth backend_depth in_flight_count deferred_count "
    "requeue_count timeout_count message_count client_count nodes clients paused e2e_processing_latency"
).split()
CLIENT_KEYS = (
    "node remote_address version client_id hostname user_agent connect_ts connected in_flight_count "
    "ready_count finish_count requeue_count message_count sample_rate deflate snappy authed auth_identity "
    "auth_identity_url tls tls_cipher_suite tls_version tls_negotiated_protocol "
    "tls_negotiated_protocol_is_mutual"
).split()
NODE_KEYS = (
    "remote_addresses remote_address hostname broadcast_address tcp_port http_port version topics out_of_date"
).split()
TOPOLOGY_KEYS = {"topology_zone", "topology_region", "node_topology_zone", "node_topology_region"}
LAG_KEYS = {"oldest_message_age_s", "drain_rate", "drain_time_s"}  # only ours has them
POLICY_KEYS = {"dead_letter_count", "expired_count", "parked_count"}  # likewise
LATER_KEYS = TOPOLOGY_KEYS | LAG_KEYS | POLICY_KEYS | {"delivery_msg_count"}  # releases differ in these
NO_LATENCY = {"count": 0, "percentiles": None, "topic": "", "channel": "", "host": ""}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nsqds=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> TestAdmin:
    return cluster.admin()


@pytest.fixture(scope="module")
def direct(cluster: Cluster) -> TestAdmin:
    """An nsqadmin with the addresses of nsqds, without nsqlookupd."""
    return cluster.admin(lookupd_http_address=(), nsqd_http_address=tuple(cluster.addresses))


@pytest.fixture(params=["admin", "direct"])
def either(request: pytest.FixtureRequest) -> TestAdmin:
    found: TestAdmin = request.getfixturevalue(request.param)
    return found


def has_keys(found: dict[str, Any], keys: list[str]) -> bool:
    return [key for key in found if key not in LATER_KEYS] == keys


def is_done(answer: Answer) -> bool:
    """Success without a warning."""
    assert answer.header("Content-Type") == JSON
    assert answer.header("X-NSQ-Content-Type") == NSQ_HEADER
    return (answer.status, answer.body) == (200, b'{"message":""}')


def publish(cluster: Cluster, topic: str, *bodies: bytes) -> None:
    for nsqd in cluster.nsqds:
        nsqd.publish(topic, *bodies)


def start_and_fail(*arguments: str) -> str:
    """Its error when it cannot start."""
    command = [REFERENCE_ADMIN] if REFERENCE_ADMIN else [sys.executable, "-m", "nsparq.admin.main"]
    result = subprocess.run(
        [*command, "--http-address=127.0.0.1:0", *arguments], capture_output=True, text=True, timeout=DEADLINE
    )
    assert result.returncode == 1
    return result.stderr


# Starting


def test_case_200_without_an_address_to_ask_it_does_not_start() -> None:
    expected = "failed to instantiate nsqadmin - --nsqd-http-address or --lookupd-http-address required\n"
    assert expected in start_and_fail()


def test_case_200_with_addresses_of_both_kinds_it_does_not_start() -> None:
    expected = "failed to instantiate nsqadmin - use --nsqd-http-address or --lookupd-http-address not both\n"
    said = start_and_fail("--nsqd-http-address=127.0.0.1:4151", "--lookupd-http-address=127.0.0.1:4161")
    assert expected in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--http-client-tls-cert=x",),
            "--http-client-tls-key must be specified with --http-client-tls-cert",
        ),
        (("--http-client-tls-key=x",), "--http-client-tls-cert must be specified with --http-client-tls-key"),
        (("--allow-config-from-cidr=x",), "failed to parse --allow-config-from-cidr (x) - "),
        (("--lookupd-http-address=nohost.invalid:1",), "failed to resolve --lookupd-http-address (nohost."),
        (("--lookupd-http-address=nowhere",), "failed to resolve --lookupd-http-address (nowhere) - "),
    ],
)
def test_case_200_what_cannot_work_is_refused_at_the_start(arguments: tuple[str, ...], expected: str) -> None:
    said = start_and_fail("--lookupd-http-address=127.0.0.1:4161", *arguments)
    assert f"failed to instantiate nsqadmin - {expected}" in said


# Reading


def test_case_201_ping(admin: TestAdmin) -> None:
    answer = admin.call("GET", "/ping")
    assert (answer.status, answer.body) == (200, b"OK")
    assert answer.header("X-NSQ-Content-Type") is None


def test_case_201_topics_are_listed_sorted(cluster: Cluster, either: TestAdmin) -> None:
    first, second = sorted([unique_name("b"), unique_name("a")])
    cluster.add(second)
    cluster.add(first)
    answer = either.call("GET", "/api/topics")
    found = answer.json()
    assert list(found) == ["topics", "message"] and found["message"] == ""
    assert [name for name in found["topics"] if name in (first, second)] == [first, second]
    assert answer.header("X-NSQ-Content-Type") == NSQ_HEADER


def test_case_201_no_topics_are_null() -> None:
    with Cluster() as cluster:
        for flags in ({}, {"lookupd_http_address": (), "nsqd_http_address": (cluster.addresses[0],)}):
            assert cluster.admin(**flags).call("GET", "/api/topics").body == b'{"topics":null,"message":""}'


def test_case_201_topics_without_producers_with_their_channels(
    cluster: Cluster, admin: TestAdmin, direct: TestAdmin
) -> None:
    produced, idle, bare = unique_name("p"), unique_name("i"), unique_name("b")
    cluster.add(produced)
    cluster.lookupd.post("/channel/create", topic=idle, channel="c")
    cluster.lookupd.post("/topic/create", topic=bare)
    found = admin.get("/api/topics", inactive="true")
    assert found["message"] == "" and produced not in found["topics"]
    assert (found["topics"][idle], found["topics"][bare]) == (["c"], None)
    assert direct.get("/api/topics", inactive="true") == {"topics": {}, "message": ""}


def test_case_201_a_topic_in_total_and_per_node(cluster: Cluster, either: TestAdmin, topic: str) -> None:
    cluster.add(topic, "c1", "c2")
    publish(cluster, topic, b"a", b"b", b"c")
    found = wait_until(lambda: _settled(either.get(f"/api/topics/{topic}"), 6))
    assert has_keys(found, [*TOPIC_KEYS, "message"])
    assert (found["node"], found["hostname"], found["topic_name"]) == ("*", "", topic)
    assert found["depth"] == found["memory_depth"] == found["backend_depth"] == 0
    assert (found["message_count"], found["paused"], found["message"]) == (6, False, "")
    assert found["e2e_processing_latency"] == {**NO_LATENCY, "topic": topic, "host": "*"}
    assert {node["node"] for node in found["nodes"]} == {*cluster.addresses}
    for node in found["nodes"]:
        assert has_keys(node, TOPIC_KEYS)
        assert (node["topic_name"], node["message_count"], node["nodes"]) == (topic, 3, None)
        assert node["hostname"] and node["e2e_processing_latency"] == NO_LATENCY
        assert [channel["channel_name"] for channel in node["channels"]] == ["c1", "c2"]
    assert [channel["channel_name"] for channel in found["channels"]] == ["c1", "c2"]
    for channel in found["channels"]:
        assert has_keys(channel, CHANNEL_KEYS)
        assert (channel["depth"], channel["message_count"], channel["clients"]) == (6, 6, None)


def _settled(found: dict[str, Any], count: int) -> dict[str, Any] | None:
    """After the messages have reached the channels, which takes a moment in NSQ."""
    channels = found["channels"] or []
    return found if channels and all(one["message_count"] == count for one in channels) else None


@ours_only
def test_case_201_the_total_of_a_channel_is_a_total_and_the_parts_are_parts(
    cluster: Cluster, admin: TestAdmin, topic: str
) -> None:
    """NSQ adds all figures to those of the first node, which are then wrong."""
    cluster.add(topic, "c")
    publish(cluster, topic, b"a")
    found = wait_until(lambda: _settled(admin.get(f"/api/topics/{topic}"), 2))
    (channel,) = found["channels"]
    assert (channel["node"], channel["depth"]) == ("*", 2)
    assert sorted(part["node"] for part in channel["nodes"]) == sorted(cluster.addresses)
    assert [part["depth"] for part in channel["nodes"]] == [1, 1]
    assert [node["channels"][0]["depth"] for node in found["nodes"]] == [1, 1]
    assert found["delivery_msg_count"] == 0


def test_case_201_a_channel_with_its_clients(
    cluster: Cluster, either: TestAdmin, topic: str, channel: str
) -> None:
    cluster.add(topic, channel)
    nsqd = cluster.nsqds[0]
    with nsqd.connect() as client:
        client.identify(client_id="me", hostname="here", user_agent="ua/1")
        client.sub(topic, channel, rdy=2)
        publish(cluster, topic, b"x")
        client.read_message()
        path = f"/api/topics/{topic}/{channel}"
        found = wait_until(lambda: (f := either.get(path))["message_count"] == 2 and f)
    assert has_keys(found, [*CHANNEL_KEYS, "message"])
    assert (found["node"], found["hostname"]) == ("*", "")
    assert (found["topic_name"], found["channel_name"]) == (topic, channel)
    assert (found["depth"], found["in_flight_count"], found["client_count"]) == (1, 1, 1)
    assert found["e2e_processing_latency"] == {**NO_LATENCY, "topic": topic, "channel": channel, "host": "*"}
    assert {part["node"]: part["client_count"] for part in found["nodes"]} == dict(
        zip(cluster.addresses, (1, 0), strict=True)
    )
    (shown,) = found["clients"]
    assert [key for key in shown if key not in TOPOLOGY_KEYS] == CLIENT_KEYS
    assert (shown["node"], shown["client_id"], shown["hostname"]) == (cluster.addresses[0], "me", "here")
    assert (shown["user_agent"], shown["ready_count"], shown["in_flight_count"]) == ("ua/1", 2, 1)
    assert shown["remote_address"].startswith("127.0.0.1:")
    assert 0 <= shown["connected"] <= 60_000_000_000


def test_case_201_latencies_are_merged_over_nodes(topic: str, channel: str) -> None:
    flags: dict[str, Any] = {"e2e_processing_latency_percentile": (0.99, 0.5)}
    flags["e2e_processing_latency_window_time"] = 60.0
    with Cluster(nsqds=2, **flags) as cluster:
        cluster.add(topic, channel)
        admin = cluster.admin()
        for count, nsqd in enumerate(cluster.nsqds, 1):
            nsqd.publish(topic, *[b"x"] * count)
            with nsqd.connect() as client:
                client.identify()
                client.sub(topic, channel, rdy=1)
                client.read_messages(count, finish=True)
                client.barrier()
        found = admin.get(f"/api/topics/{topic}/{channel}")
        total = found["e2e_processing_latency"]
        assert (total["count"], [one["quantile"] for one in total["percentiles"]]) == (3, [0.99, 0.5])
        by_node = {one["node"]: one["e2e_processing_latency"] for one in found["nodes"]}
        parts = [by_node[address]["percentiles"][0] for address in cluster.addresses]
        for part in parts:
            assert part["value"] == part["min"] == part["max"] == part["average"] > 0
        merged = total["percentiles"][0]
        assert list(merged) == ["average", "count", "max", "min", "quantile"]
        assert (merged["count"], merged["max"]) == (3, max(part["value"] for part in parts))
        if not admin.is_reference:  # NSQ's is the least only if the nodes answer in the right order
            assert merged["min"] == min(part["value"] for part in parts)
        weighed = (parts[0]["value"] + 2 * parts[1]["value"]) / 3
        assert merged["average"] == pytest.approx(weighed)


def test_case_201_nodes(cluster: Cluster, admin: TestAdmin, direct: TestAdmin, topic: str) -> None:
    cluster.add(topic)
    found = admin.get("/api/nodes")
    assert list(found) == ["nodes", "message"]
    ports = {nsqd.http_address[1]: nsqd.address[1] for nsqd in cluster.nsqds}  # type: ignore[index]
    assert {node["http_port"]: node["tcp_port"] for node in found["nodes"]} == ports
    for node in found["nodes"]:
        assert has_keys(node, NODE_KEYS)
        assert (node["broadcast_address"], node["out_of_date"]) == ("127.0.0.1", False)
        assert node["remote_addresses"] == [f"{cluster.lookupd_address}/{node['remote_address']}"]
        assert {"topic": topic, "tombstoned": False} in node["topics"]
    for node in direct.get("/api/nodes")["nodes"]:
        assert (node["remote_addresses"], node["remote_address"]) == (None, "")
        assert {"topic": topic, "tombstoned": False} in node["topics"]


def test_case_201_one_node(cluster: Cluster, either: TestAdmin, topic: str, channel: str) -> None:
    cluster.add(topic, channel)
    publish(cluster, topic, b"x")
    with cluster.nsqds[1].connect() as client:
        client.identify()
        client.sub(topic, channel)
        found = either.get(f"/api/nodes/{cluster.addresses[1]}")
        assert list(found) == ["node", "topics", "total_messages", "total_clients", "message"]
        assert found["node"] == cluster.addresses[1] and found["total_clients"] >= 1
        (mine,) = (one for one in found["topics"] if one["topic_name"] == topic)
        assert has_keys(mine, TOPIC_KEYS) and mine["message_count"] == 1
        assert found["total_messages"] == sum(one["message_count"] for one in found["topics"])
        assert len(mine["channels"][0]["clients"]) == 1
    either.call("GET", "/api/nodes/127.0.0.1:1").expect_error(404, "NODE_NOT_FOUND")


def test_case_201_the_counter(cluster: Cluster, either: TestAdmin, topic: str, channel: str) -> None:
    cluster.add(topic, channel)
    publish(cluster, topic, b"x", b"y")
    keys = {f"{topic}:{channel}:{address}": address for address in cluster.addresses}

    def counted() -> Any:
        found = either.get("/api/counter")
        return all(found["stats"][key]["message_count"] == 2 for key in keys) and found

    found = wait_until(counted)
    assert list(found) == ["stats", "message"] and found["message"] == ""
    for key, address in keys.items():
        expected = {"node": address, "topic_name": topic, "channel_name": channel, "message_count": 2}
        assert found["stats"][key] == expected


def test_case_201_some_daemons_away_is_a_warning_and_all_away_an_error(cluster: Cluster, topic: str) -> None:
    cluster.add(topic)
    half = cluster.admin(lookupd_http_address=(cluster.lookupd_address, "127.0.0.1:1"))
    for path in ("/api/topics", f"/api/topics/{topic}", "/api/nodes"):
        found = half.get(path)
        assert found["message"].startswith("WARNING: ") and "127.0.0.1:1" in found["message"]
    none = cluster.admin(lookupd_http_address=("127.0.0.1:1",))
    for path in ("/api/topics", f"/api/topics/{topic}", "/api/nodes", "/api/counter"):
        answer = none.call("GET", path)
        assert answer.status == 502
        assert answer.json()["message"].startswith("UPSTREAM_ERROR: failed to query any nsqlookupd: ")
    alone = cluster.admin(lookupd_http_address=(), nsqd_http_address=("127.0.0.1:1",))
    answer = alone.call("GET", "/api/topics")
    assert answer.status == 502
    assert answer.json()["message"].startswith("UPSTREAM_ERROR: failed to query any nsqd: ")


@ours_only
def test_case_201_a_missing_topic_channel_or_node_is_404(
    cluster: Cluster, admin: TestAdmin, direct: TestAdmin, topic: str
) -> None:
    """NSQ answers that the nsqlookupds have failed, or nothing."""
    cluster.add(topic)
    idle = unique_name("idle")
    cluster.lookupd.post("/topic/create", topic=idle)
    for one in (admin, direct):
        one.call("GET", "/api/topics/nowhere").expect_error(404, "TOPIC_NOT_FOUND")
        one.call("GET", f"/api/topics/{topic}/nowhere").expect_error(404, "CHANNEL_NOT_FOUND")
    admin.call("GET", f"/api/topics/{idle}").expect_error(404, "NO_PRODUCERS")


def test_case_201_routing_and_compression(cluster: Cluster, admin: TestAdmin) -> None:
    admin.call("GET", "/api/nowhere").expect_error(404, "NOT_FOUND")
    answer = admin.call("PUT", "/api/topics", b"")
    answer.expect_error(405, "METHOD_NOT_ALLOWED")
    assert answer.header("Allow") == "GET, OPTIONS, POST"
    assert admin.call("GET", "/api/topics/").status == 301
    for name in (unique_name("a_topic_with_a_long_name") for _ in range(40)):
        cluster.lookupd.post("/topic/create", topic=name)
    for encoding in ("gzip", "deflate"):
        squeezed = admin.call("GET", "/api/topics", headers={"Accept-Encoding": encoding})
        assert squeezed.header("Content-Encoding") == encoding
        assert squeezed.header("Vary") == "Accept-Encoding"
    assert admin.call("GET", "/api/topics").header("Content-Encoding") is None


def test_case_201_all_paths_are_below_the_base_path(cluster: Cluster) -> None:
    based = cluster.admin(base_path="some/place/")
    assert based.call("GET", "/some/place/ping").body == b"OK"
    assert based.call("GET", "/some/place/api/nodes").status == 200
    assert based.call("GET", "/config/base_path").status == 404
    based.call("GET", "/ping").expect_error(404, "NOT_FOUND")
    answer = based.call("GET", "/some/place/")
    assert (answer.status, answer.header("Location")) == (301, "/some/place")


# Creating, deleting, changing


def test_case_202_a_topic_is_created_at_nsqlookupd(cluster: Cluster, admin: TestAdmin, topic: str) -> None:
    assert is_done(admin.call("POST", "/api/topics", {"topic": topic}))
    assert topic in cluster.lookupd.topics()


def test_case_202_a_channel_is_created_at_nsqlookupd_and_where_the_topic_is(
    cluster: Cluster, admin: TestAdmin, topic: str, channel: str
) -> None:
    cluster.add(topic)
    assert is_done(admin.call("POST", "/api/topics", {"topic": topic, "channel": channel}))
    assert cluster.lookupd.channels(topic) == [channel]
    assert all(nsqd.channel_stats(topic, channel) for nsqd in cluster.nsqds)


def test_case_202_names_and_bodies_are_checked(admin: TestAdmin, topic: str) -> None:
    admin.call("POST", "/api/topics", {"topic": "bad name"}).expect_error(400, "INVALID_TOPIC")
    admin.call("POST", "/api/topics", {}).expect_error(400, "INVALID_TOPIC")
    bad = {"topic": topic, "channel": "bad name"}
    admin.call("POST", "/api/topics", bad).expect_error(400, "INVALID_CHANNEL")
    for body in (b"", b"{", b"[]", b'{"topic": 5}'):
        answer = admin.call("POST", "/api/topics", body)
        assert answer.status == 400 and answer.json()["message"]


@ours_only
def test_case_202_without_nsqlookupds_the_nsqds_create_it(
    cluster: Cluster, direct: TestAdmin, topic: str, channel: str
) -> None:
    """NSQ does nothing and reports success, or fails for the channel."""
    assert is_done(direct.call("POST", "/api/topics", {"topic": topic, "channel": channel}))
    assert all(nsqd.channel_stats(topic, channel) for nsqd in cluster.nsqds)


def test_case_203_a_topic_is_deleted_everywhere(cluster: Cluster, either: TestAdmin, topic: str) -> None:
    cluster.add(topic, "c")
    assert is_done(either.call("DELETE", f"/api/topics/{topic}"))
    assert not any(nsqd.topic_stats(topic) for nsqd in cluster.nsqds)
    if either.flags["lookupd_http_address"]:
        wait_until(lambda: topic not in cluster.lookupd.topics())


def test_case_203_a_topic_without_producers_is_deleted(
    cluster: Cluster, admin: TestAdmin, topic: str
) -> None:
    cluster.lookupd.post("/topic/create", topic=topic)
    assert is_done(admin.call("DELETE", f"/api/topics/{topic}"))
    assert topic not in cluster.lookupd.topics()


def test_case_203_a_channel_is_deleted_everywhere(cluster: Cluster, either: TestAdmin, topic: str) -> None:
    cluster.add(topic, "c", "d")
    assert is_done(either.call("DELETE", f"/api/topics/{topic}/c"))
    assert not any(nsqd.channel_stats(topic, "c") for nsqd in cluster.nsqds)
    assert all(nsqd.channel_stats(topic, "d") for nsqd in cluster.nsqds)


def test_case_203_deleting_a_missing_name_is_a_warning(
    cluster: Cluster, admin: TestAdmin, topic: str
) -> None:
    cluster.add(topic)
    answer = admin.call("DELETE", f"/api/topics/{topic}/nowhere")
    assert answer.status == 200
    assert answer.json()["message"].startswith("WARNING: got response 404 Not Found ")
    assert "CHANNEL_NOT_FOUND" in answer.json()["message"]


@pytest.mark.parametrize("channel", ["", "c"])
def test_case_203_pause_and_unpause(cluster: Cluster, either: TestAdmin, topic: str, channel: str) -> None:
    cluster.add(topic, "c")
    path = f"/api/topics/{topic}" + (f"/{channel}" if channel else "")
    for action, paused in (("pause", True), ("unpause", False)):
        assert is_done(either.call("POST", path, {"action": action}))
        assert either.get(path)["paused"] is paused
        for nsqd in cluster.nsqds:
            found = nsqd.channel_stats(topic, channel) if channel else nsqd.topic_stats(topic)
            assert found is not None and found["paused"] is paused


@pytest.mark.parametrize("channels", [(), ("c",)])
def test_case_203_empty(cluster: Cluster, either: TestAdmin, topic: str, channels: tuple[str, ...]) -> None:
    cluster.add(topic, *channels)
    publish(cluster, topic, b"x")
    path = "/".join(["/api/topics", topic, *channels])
    wait_until(lambda: either.get(path)["depth"] == 2)
    assert is_done(either.call("POST", path, {"action": "empty"}))
    assert either.get(path)["depth"] == 0


def test_case_203_actions_are_checked(cluster: Cluster, admin: TestAdmin, topic: str) -> None:
    cluster.add(topic, "c")
    for path in (f"/api/topics/{topic}", f"/api/topics/{topic}/c"):
        admin.call("POST", path, {"action": "nonsense"}).expect_error(400, "INVALID_ACTION")
        admin.call("POST", path, {}).expect_error(400, "INVALID_ACTION")
        answer = admin.call("POST", path, b"nonsense")
        assert answer.status == 400 and answer.json()["message"]


@ours_only
def test_case_203_changing_a_missing_name_is_404(cluster: Cluster, admin: TestAdmin, topic: str) -> None:
    """NSQ answers 502, or 200 with a warning."""
    cluster.add(topic)
    pause = {"action": "pause"}
    admin.call("POST", "/api/topics/nowhere", pause).expect_error(404, "TOPIC_NOT_FOUND")
    admin.call("POST", f"/api/topics/{topic}/nowhere", pause).expect_error(404, "CHANNEL_NOT_FOUND")
    admin.call("DELETE", "/api/topics/nowhere").expect_error(404, "TOPIC_NOT_FOUND")


# Tombstones


def test_case_204_a_node_is_tombstoned_for_a_topic(cluster: Cluster, admin: TestAdmin, topic: str) -> None:
    cluster.add(topic)
    node = cluster.addresses[0]
    assert is_done(admin.call("DELETE", f"/api/nodes/{node}", {"topic": topic}))
    assert cluster.nsqds[0].topic_stats(topic) is None
    assert cluster.nsqds[1].topic_stats(topic) is not None
    (left,) = cluster.lookupd.lookup(topic)["producers"]
    assert f"{left['broadcast_address']}:{left['http_port']}" == cluster.addresses[1]


def test_case_204_tombstone_bodies_are_checked(cluster: Cluster, admin: TestAdmin) -> None:
    path = f"/api/nodes/{cluster.addresses[0]}"
    admin.call("DELETE", path, b"{").expect_error(400, "INVALID_BODY")
    admin.call("DELETE", path, {"topic": "bad name"}).expect_error(400, "INVALID_TOPIC")


def test_case_204_a_tombstone_shows_among_the_nodes(cluster: Cluster, admin: TestAdmin, topic: str) -> None:
    with cluster.lookupd.peer(broadcast_address="elsewhere.test", http_port=4151) as peer:
        peer.register(topic)
        cluster.lookupd.post("/topic/tombstone", topic=topic, node="elsewhere.test:4151")
        nodes = admin.get("/api/nodes")["nodes"]
        (shown,) = (node for node in nodes if node["broadcast_address"] == "elsewhere.test")
        assert shown["topics"] == [{"topic": topic, "tombstoned": True}]
        assert topic in admin.get("/api/topics", inactive="true")["topics"]


# Configuration


def test_case_205_options_are_shown_by_file_key(cluster: Cluster) -> None:
    admin = cluster.admin(http_client_connect_timeout=1.5, admin_user=("me",), log_prefix="[x] ")
    for key, body in (
        ("log_level", b"2"),
        ("log_prefix", b"[x] "),
        ("nsqlookupd_http_addresses", json.dumps([cluster.lookupd_address]).encode()),
        ("nsqd_http_addresses", b"[]"),
        ("http_client_connect_timeout", b"1500000000"),
        ("statsd_interval", b"60000000000"),
        ("admin_users", b'["me"]'),
        ("proxy_graphite", b"false"),
        ("allow_config_from_cidr", b"127.0.0.1/8"),
    ):
        answer = admin.call("GET", f"/config/{key}")
        assert (answer.status, answer.body) == (200, body), key
    for key in ("nowhere", "config", "version", "lookupd_http_address"):
        admin.call("GET", f"/config/{key}").expect_error(400, "INVALID_OPTION")


def test_case_205_two_options_can_be_changed(cluster: Cluster, topic: str) -> None:
    admin = cluster.admin(lookupd_http_address=("127.0.0.1:1",))
    key = "/config/nsqlookupd_http_addresses"
    wanted = json.dumps([cluster.lookupd_address], separators=(",", ":")).encode()
    answer = admin.call("PUT", key, wanted)
    assert (answer.status, answer.body) == (200, wanted)
    cluster.add(topic)
    assert topic in admin.get("/api/topics")["topics"]
    answer = admin.call("PUT", "/config/log_level", b"INFO")
    assert (answer.status, answer.body) == (200, b"2")


def test_case_205_bad_values_are_refused(cluster: Cluster, admin: TestAdmin) -> None:
    admin.call("PUT", "/config/log_level", b"nonsense").expect_error(400, "INVALID_VALUE")
    admin.call("PUT", "/config/nsqlookupd_http_addresses", b"x").expect_error(400, "INVALID_VALUE")
    admin.call("PUT", "/config/base_path", b"/x").expect_error(400, "INVALID_OPTION")
    admin.call("PUT", "/config/log_level", b"").expect_error(413, "INVALID_VALUE")


def test_case_205_a_foreign_address_is_refused(cluster: Cluster) -> None:
    strict = cluster.admin(allow_config_from_cidr="10.0.0.0/8")
    strict.call("GET", "/config/log_level").expect_error(403, "FORBIDDEN")
    strict.call("PUT", "/config/log_level", b"debug").expect_error(403, "FORBIDDEN")
    assert cluster.admin(allow_config_from_cidr="").call("GET", "/config/log_level").status == 200


# Admin users


@pytest.mark.parametrize("header", ["X-Forwarded-User", "X-Who"])
def test_case_206_only_admin_users_change_things(cluster: Cluster, header: str) -> None:
    flags = {} if header == "X-Forwarded-User" else {"acl_http_header": header}
    admin = cluster.admin(admin_user=("ada", "bob"), **flags)
    topic = unique_name("t")
    cluster.add(topic, "c")
    for method, path, body in (
        ("POST", "/api/topics", {"topic": topic}),
        ("POST", f"/api/topics/{topic}", {"action": "pause"}),
        ("POST", f"/api/topics/{topic}/c", {"action": "pause"}),
        ("DELETE", f"/api/topics/{topic}/c", None),
        ("DELETE", f"/api/topics/{topic}", None),
        ("DELETE", f"/api/nodes/{cluster.addresses[0]}", {"topic": topic}),
    ):
        admin.call(method, path, body).expect_error(403, "FORBIDDEN")
        admin.call(method, path, body, {header: "eve"}).expect_error(403, "FORBIDDEN")
        admin.call(method, path, body, {header: "ADA"}).expect_error(403, "FORBIDDEN")
        admin.call(method, path, b"nonsense").expect_error(403, "FORBIDDEN")
    assert admin.get(f"/api/topics/{topic}")["topic_name"] == topic
    assert is_done(admin.call("POST", f"/api/topics/{topic}", {"action": "pause"}, {header: "bob"}))


# HTTPS


def test_case_207_an_nsqd_that_wants_tls_is_asked_over_https(topic: str) -> None:
    made = certificates()
    flags = made.server_flags(
        tls_required="true" if REFERENCE else TlsRequired.YES,
        tls_client_auth_policy="require-verify",
        tls_root_ca_file=str(made.ca.cert),
    )
    client = {
        "http_client_tls_root_ca_file": str(made.ca.cert),
        "http_client_tls_cert": str(made.client.cert),
        "http_client_tls_key": str(made.client.key),
    }
    with start_broker(**flags, broadcast_address="127.0.0.1") as nsqd:
        with nsqd.http_connect(https=True, tls=made.client_context(made.client)) as connection:
            connection.request("POST", f"/topic/create?topic={topic}")
        address = join(nsqd.http_address)
        with start_admin(nsqd_http_address=(address,), **client) as admin:
            assert admin.get("/api/topics") == {"topics": [topic], "message": ""}
            assert is_done(admin.call("POST", f"/api/topics/{topic}", {"action": "pause"}))
            assert admin.get(f"/api/topics/{topic}")["paused"] is True
        with start_admin(nsqd_http_address=(address,)) as bare:
            assert bare.call("GET", "/api/topics").status == 502


# Notifications


def test_case_208_every_change_is_notified(cluster: Cluster, topic: str) -> None:
    with AuthServer() as endpoint:
        endpoint.answer(b"", 200)
        admin = cluster.admin(notification_http_endpoint=f"http://{endpoint.address}/told")
        cluster.add(topic)
        node = cluster.addresses[0]
        path = f"/api/topics/{topic}"
        expected = []
        for method, target, body, actions in (
            ("POST", "/api/topics", {"topic": topic, "channel": "c"}, ["create_topic", "create_channel"]),
            ("POST", path, {"action": "pause"}, ["pause_topic"]),
            ("POST", path, {"action": "unpause"}, ["unpause_topic"]),
            ("POST", path, {"action": "empty"}, ["empty_topic"]),
            ("POST", f"{path}/c", {"action": "pause"}, ["pause_channel"]),
            ("POST", f"{path}/c", {"action": "unpause"}, ["unpause_channel"]),
            ("POST", f"{path}/c", {"action": "empty"}, ["empty_channel"]),
            ("DELETE", f"{path}/c", None, ["delete_channel"]),
            ("DELETE", f"/api/nodes/{node}", {"topic": topic}, ["tombstone_topic_producer"]),
            ("DELETE", path, None, ["delete_topic"]),
        ):
            headers = {"Host": "admin.test", "Authorization": "Basic Ym9iOng=", "User-Agent": "ua/1"}
            assert admin.call(method, target, body, headers).status == 200
            if method == "DELETE" and body:
                # The nsqd that lost the topic unregisters it a little later.
                wait_until(lambda: len(cluster.lookupd.lookup(topic)["producers"]) == 1)
            expected += [(action, target) for action in actions]
        queries = wait_until(lambda: len(endpoint.queries) >= len(expected) and endpoint.queries)
        told = [json.loads(query.body) for query in queries]
        assert [one["action"] for one in told] == [action for action, _ in expected]
        for one, query, (action, target) in zip(told, queries, expected, strict=True):
            assert (query.method, query.path) == ("POST", "/told")
            assert query.headers["content-type"] == "application/json"
            assert (one["topic"], one["user"], one["user_agent"]) == (topic, "bob", "ua/1")
            assert one["url"] == f"http://admin.test{target}"
            assert one["remote_ip"].startswith("127.0.0.1") and one["via"]
            assert isinstance(one["timestamp"], int)
            assert one.get("channel") == ("c" if action.endswith("_channel") else None)
            assert one.get("node") == (node if action.startswith("tombstone") else None)


@ours_only
def test_case_208_failures_are_not_notified_and_a_dead_endpoint_is_harmless(
    cluster: Cluster, topic: str
) -> None:
    """NSQ notifies before it tries, and exits if the endpoint cannot be reached."""
    cluster.add(topic)
    with AuthServer() as endpoint:
        endpoint.answer(b"", 500)
        admin = cluster.admin(notification_http_endpoint=f"http://{endpoint.address}/told")
        assert admin.call("POST", f"/api/topics/{topic}/nowhere", {"action": "pause"}).status == 404
        assert is_done(admin.call("POST", f"/api/topics/{topic}", {"action": "pause"}))
        assert is_done(admin.call("POST", f"/api/topics/{topic}", {"action": "unpause"}))
        queries = wait_until(lambda: len(endpoint.queries) >= 2 and endpoint.queries)
        assert [json.loads(one.body)["action"] for one in queries] == ["pause_topic", "unpause_topic"]
    assert is_done(admin.call("POST", f"/api/topics/{topic}", {"action": "pause"}))
    assert is_done(admin.call("POST", f"/api/topics/{topic}", {"action": "unpause"}))


# IPv6


def test_case_209_ipv6_addresses_are_in_brackets(cluster: Cluster, admin: TestAdmin, topic: str) -> None:
    with cluster.lookupd.peer(broadcast_address="::1", tcp_port=2, http_port=1) as peer:
        peer.register(topic)
        answer = admin.call("GET", "/api/nodes/[::1]:1")
        assert answer.status == 502 and "[::1]:1/" in answer.json()["message"]
        admin.call("GET", "/api/nodes/::1:1").expect_error(404, "NODE_NOT_FOUND")
