"""Group N: nsqlookupd, and nsqd together with it.

NSPARQ_TEST_NSQLOOKUPD=/path/to/nsqlookupd runs these against another one; what is ours alone is
then skipped.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support import REFERENCE, TestBroker, unique_name, wait_until
from tests.support.http import JSON, NSQ_HEADER, TEXT, Answer
from tests.support.lookupd import (
    NSQD,
    REFERENCE_LOOKUPD,
    LookupdConnection,
    TestLookupd,
    start_lookupd,
    start_lookupd_process,
)

INACTIVE, LIFETIME = 3.0, 2.0
TOPOLOGY = {"topology_zone", "topology_region"}

Peer = Callable[..., LookupdConnection]

ours_only = pytest.mark.skipif(bool(REFERENCE_LOOKUPD), reason="differs from NSQ on purpose")


@pytest.fixture(scope="module")
def lookupd() -> Iterator[TestLookupd]:
    with start_lookupd() as lookupd:
        yield lookupd


@pytest.fixture(scope="module")
def brief_lookupd() -> Iterator[TestLookupd]:
    """An nsqlookupd on which producers become inactive and tombstones end soon."""
    with start_lookupd(inactive_producer_timeout=INACTIVE, tombstone_lifetime=LIFETIME) as lookupd:
        yield lookupd


@pytest.fixture
def peer() -> Iterator[Callable[..., LookupdConnection]]:
    """peer(lookupd, **fields): a connection that has identified itself."""
    with ExitStack() as stack:
        yield lambda lookupd, **fields: stack.enter_context(lookupd.peer(**fields))


@pytest.fixture
def host() -> str:
    """A broadcast address that no other test uses."""
    return unique_name("host")


def addresses(lookupd: TestLookupd, topic: str) -> list[str]:
    """Broadcast addresses of the topic's producers."""
    return [producer["broadcast_address"] for producer in lookupd.lookup(topic)["producers"]]


def node(lookupd: TestLookupd, host: str) -> dict[str, Any] | None:
    found = [node for node in lookupd.nodes() if node["broadcast_address"] == host]
    assert len(found) < 2, found
    return found[0] if found else None


def is_error(answer: Answer, status: int, code: str) -> bool:
    assert answer.header("Content-Type") == JSON
    assert answer.header("X-NSQ-Content-Type") == NSQ_HEADER
    return (answer.status, answer.json()) == (status, {"message": code})


# Producers


def test_case_178_a_registered_topic_and_channel_are_found(
    lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connection = peer(
        lookupd, broadcast_address=host, topology_zone="z", topology_region="r", remote_address="1.2.3.4:5"
    )
    connection.register(topic, "c")
    found = lookupd.lookup(topic)
    (producer,) = found["producers"]
    expected = {
        "remote_address": connection.local_address,
        "hostname": "host1",
        "broadcast_address": host,
        "tcp_port": 4150,
        "http_port": 4151,
        "version": "1.3.0",
        "topology_zone": "z",
        "topology_region": "r",
    }
    if REFERENCE_LOOKUPD and not TOPOLOGY & {*producer}:  # releases differ in these
        expected = {name: value for name, value in expected.items() if name not in TOPOLOGY}
    assert list(found) == ["channels", "producers"] and found["channels"] == ["c"]
    assert producer == expected and list(producer) == list(expected)
    assert topic in lookupd.topics()
    assert lookupd.channels(topic) == ["c"]
    whole = node(lookupd, host)
    assert whole == {**expected, "tombstones": [False], "topics": [topic]}
    assert list(whole) == [*expected, "tombstones", "topics"]


def test_case_178_the_reply_to_identify_tells_how_to_reach_nsqlookupd(lookupd: TestLookupd) -> None:
    with lookupd.connect() as connection:
        reply = connection.identify()
    assert list(reply) == ["broadcast_address", "hostname", "http_port", "tcp_port", "version"]
    assert lookupd.http_address is not None
    assert (reply["tcp_port"], reply["http_port"]) == (lookupd.address[1], lookupd.http_address[1])
    assert reply["broadcast_address"] == "127.0.0.1"
    assert reply["hostname"]
    assert reply["version"].count(".") == 2


def test_case_178_a_topic_alone_has_no_channels(lookupd: TestLookupd, peer: Peer, topic: str) -> None:
    peer(lookupd).register(topic)
    found = lookupd.lookup(topic)
    assert (found["channels"], len(found["producers"])) == ([], 1)


def test_case_179_names_outlive_their_producers(lookupd: TestLookupd, peer: Peer, topic: str) -> None:
    connection = peer(lookupd)
    connection.register(topic, "c")
    connection.register(topic, "d#ephemeral")
    connection.close()
    wait_until(lambda: not lookupd.lookup(topic)["producers"])
    assert sorted(lookupd.lookup(topic)["channels"]) == ["c", "d#ephemeral"]
    assert sorted(lookupd.channels(topic)) == ["c", "d#ephemeral"]
    assert topic in lookupd.topics()


def test_case_180_an_unregistered_channel_stays_listed_and_the_topic_produced(
    lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connection = peer(lookupd, broadcast_address=host)
    connection.register(topic, "c")
    connection.unregister(topic, "c")
    assert lookupd.channels(topic) == ["c"]
    assert addresses(lookupd, topic) == [host]
    assert f"channel:{topic}:c" not in lookupd.debug()


def test_case_180_an_unregistered_topic_has_no_producers_nor_have_its_channels(
    lookupd: TestLookupd, peer: Peer, topic: str
) -> None:
    connection = peer(lookupd)
    connection.register(topic, "c")
    connection.unregister(topic)
    assert lookupd.lookup(topic) == {"channels": ["c"], "producers": []}
    assert not {f"topic:{topic}:", f"channel:{topic}:c"} & {*lookupd.debug()}


def test_case_180_ephemeral_names_go_when_they_are_unregistered(
    lookupd: TestLookupd, peer: Peer, topic: str
) -> None:
    name = topic + "#ephemeral"
    first, second = peer(lookupd), peer(lookupd)
    for connection in (first, second):
        connection.register(name, "c#ephemeral")
        connection.register(name, "d")
    first.unregister(name, "c#ephemeral")
    assert sorted(lookupd.channels(name)) == ["c#ephemeral", "d"]
    second.unregister(name, "c#ephemeral")
    assert lookupd.channels(name) == ["d"]
    first.unregister(name)
    assert name in lookupd.topics()
    second.unregister(name)
    assert name not in lookupd.topics()
    assert is_error(lookupd.request("GET", f"/lookup?topic={topic}%23ephemeral"), 404, "TOPIC_NOT_FOUND")
    assert lookupd.channels(name) == ["d"]


# Tombstones and time


def test_case_181_a_tombstone_hides_a_producer_of_one_topic_for_a_while(
    brief_lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connection = peer(brief_lookupd, broadcast_address=host)
    connection.register(topic, "c")
    connection.register(topic + "_other")
    brief_lookupd.post("/topic/tombstone", topic=topic, node=f"{host}:4151")
    assert brief_lookupd.lookup(topic) == {"channels": ["c"], "producers": []}
    assert addresses(brief_lookupd, topic + "_other") == [host]
    connection.register(topic, "c")  # nothing new: the tombstone stays
    assert addresses(brief_lookupd, topic) == []

    def is_back() -> bool:
        connection.ping()
        return addresses(brief_lookupd, topic) == [host]

    wait_until(is_back)


@pytest.mark.parametrize("wrong", ["{host}", "{host}:4150", "other:4151", ""])
def test_case_181_a_tombstone_is_for_the_broadcast_address_and_http_port(
    lookupd: TestLookupd, peer: Peer, topic: str, host: str, wrong: str
) -> None:
    peer(lookupd, broadcast_address=host).register(topic)
    lookupd.post("/topic/tombstone", topic=topic, node=wrong.format(host=host))
    assert addresses(lookupd, topic) == [host]


def test_case_182_a_tombstoned_producer_that_unregisters_stays_away(
    brief_lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connection = peer(brief_lookupd, broadcast_address=host)
    connection.register(topic)
    brief_lookupd.post("/topic/tombstone", topic=topic, node=f"{host}:4151")
    connection.unregister(topic)
    end = time.monotonic() + LIFETIME + 0.2
    while time.monotonic() < end:
        connection.ping()
        assert addresses(brief_lookupd, topic) == []
        time.sleep(0.05)


def test_case_182_registering_after_that_starts_without_a_tombstone(
    lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connection = peer(lookupd, broadcast_address=host)
    connection.register(topic)
    lookupd.post("/topic/tombstone", topic=topic, node=f"{host}:4151")
    connection.unregister(topic)
    connection.register(topic)
    assert addresses(lookupd, topic) == [host]


def test_case_183_nodes_keep_tombstoned_producers_with_a_mark_for_the_topic(
    brief_lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connection = peer(brief_lookupd, broadcast_address=host)
    other = topic + "_other"
    connection.register(topic, "c")
    connection.register(other)

    def marks() -> dict[str, bool]:
        connection.ping()
        found = node(brief_lookupd, host)
        assert found is not None
        assert len(found["topics"]) == len(found["tombstones"])
        return dict(zip(found["topics"], found["tombstones"], strict=True))

    assert marks() == {topic: False, other: False}
    brief_lookupd.post("/topic/tombstone", topic=topic, node=f"{host}:4151")
    assert marks() == {topic: True, other: False}
    wait_until(lambda: marks() == {topic: False, other: False})


def test_case_184_a_silent_nsqd_is_no_longer_listed(
    brief_lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connection = peer(brief_lookupd, broadcast_address=host)
    started = time.monotonic()
    connection.register(topic, "c")
    assert node(brief_lookupd, host) is not None
    wait_until(lambda: node(brief_lookupd, host) is None)
    assert time.monotonic() - started > INACTIVE * 0.9
    assert brief_lookupd.lookup(topic) == {"channels": ["c"], "producers": []}
    connection.register(topic + "_more")  # no sign of life
    assert node(brief_lookupd, host) is None
    connection.ping()
    found = node(brief_lookupd, host)
    assert found is not None and sorted(found["topics"]) == [topic, topic + "_more"]
    assert addresses(brief_lookupd, topic) == [host]


def test_case_185_pings_keep_an_nsqd_listed(
    brief_lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connection = peer(brief_lookupd, broadcast_address=host)
    connection.register(topic)
    end = time.monotonic() + 1.5 * INACTIVE
    while time.monotonic() < end:
        connection.ping()
        assert addresses(brief_lookupd, topic) == [host]
        assert node(brief_lookupd, host) is not None
        time.sleep(0.1)


def test_case_185_ping_is_answered_before_identify(lookupd: TestLookupd) -> None:
    with lookupd.connect() as connection:
        connection.ping()
        connection.ping()
        connection.identify()
        connection.ping()


# Errors on the wire


@pytest.mark.parametrize(
    ("line", "shown"), [(b"ping x", b"ping"), (b"  \t ", b""), (b"\xff\xfe", b"\xff\xfe")]
)
def test_case_186_an_invalid_command_is_named_and_ends_the_connection(
    lookupd: TestLookupd, line: bytes, shown: bytes
) -> None:
    with lookupd.connect() as connection:
        connection.send(line + b"\n")
        connection.expect_fatal(b"E_INVALID invalid command " + shown)


@pytest.mark.parametrize("line", [b"PING\r\n", b"  PING  \n", b"PING extra words\n", b"\tPING\r\n"])
def test_case_186_blanks_around_a_line_and_further_parameters_do_not_matter(
    lookupd: TestLookupd, line: bytes
) -> None:
    with lookupd.connect() as connection:
        connection.send(line)
        connection.expect_ok()


def test_case_187_identify_with_a_body_that_does_not_decode(lookupd: TestLookupd) -> None:
    for body in (b"[]", b'{"tcp_port":"4150"}', b"{} x"):
        with lookupd.connect() as connection:
            connection.command("IDENTIFY", body=body)
            connection.expect_fatal("E_BAD_BODY IDENTIFY failed to decode JSON body")


MISSING = [
    *({name: None} for name in ("broadcast_address", "tcp_port", "http_port", "version")),
    *({name: ""} for name in ("broadcast_address", "version")),
    *({name: 0} for name in ("tcp_port", "http_port")),
]


def test_case_187_identify_without_required_fields(lookupd: TestLookupd) -> None:
    for change in MISSING:
        fields = {name: value for name, value in {**NSQD, **change}.items() if value is not None}
        with lookupd.connect() as connection:
            connection.command("IDENTIFY", body=json.dumps(fields).encode())
            connection.expect_fatal("E_BAD_BODY IDENTIFY missing fields")


def test_case_187_a_hostname_is_not_needed(lookupd: TestLookupd, peer: Peer, topic: str) -> None:
    peer(lookupd, hostname=None).register(topic)
    assert lookupd.lookup(topic)["producers"][0]["hostname"] == ""


def test_case_187_identify_twice(lookupd: TestLookupd, peer: Peer) -> None:
    connection = peer(lookupd)
    connection.command("IDENTIFY", body=json.dumps(NSQD).encode())
    connection.expect_fatal("E_INVALID cannot IDENTIFY again")


@pytest.mark.parametrize(
    ("sent", "missing"), [(b"", "body size"), (b"\0\0", "body size"), (b"\0\0\0\x05{}", "body")]
)
def test_case_187_identify_cut_off(lookupd: TestLookupd, sent: bytes, missing: str) -> None:
    with lookupd.connect() as connection:
        connection.send(b"IDENTIFY\n" + sent)
        connection.end_of_stream()
        connection.expect_fatal(f"E_BAD_BODY IDENTIFY failed to read {missing}")


@ours_only
@pytest.mark.parametrize("size", [-1, -(2**31), 2**31 - 1])
def test_case_188_a_negative_or_huge_identify_is_refused_and_harmless(
    lookupd: TestLookupd, size: int
) -> None:
    with lookupd.connect() as connection:
        connection.send(b"IDENTIFY\n" + struct.pack(">i", size))
        connection.expect_fatal(f"E_BAD_BODY IDENTIFY invalid body size {size}")
    assert lookupd.get("/ping") == b"OK"


@pytest.mark.parametrize("magic", [b"  V2", b"  V3", b"GET ", b"    "])
def test_case_189_another_magic_is_refused(lookupd: TestLookupd, magic: bytes) -> None:
    with lookupd.connect(magic=magic) as connection:
        connection.expect_fatal("E_BAD_PROTOCOL")


@pytest.mark.parametrize("magic", [b"", b"  V"])
def test_case_189_the_end_of_the_stream_within_the_magic_is_not_answered(
    lookupd: TestLookupd, magic: bytes
) -> None:
    with lookupd.connect(magic=magic) as connection:
        connection.end_of_stream()
        connection.expect_closed()


@pytest.mark.parametrize("verb", ["REGISTER", "UNREGISTER"])
def test_case_190_register_needs_identify(lookupd: TestLookupd, verb: str) -> None:
    with lookupd.connect() as connection:
        connection.command(verb, "t")
        connection.expect_fatal("E_INVALID client must IDENTIFY")


WRONG_NAMES = [
    (b"", "E_INVALID {verb} insufficient number of params"),
    (b" bad!", "E_BAD_TOPIC {verb} topic name 'bad!' is not valid"),
    (b" " + b"t" * 65, "E_BAD_TOPIC {verb} topic name '" + "t" * 65 + "' is not valid"),
    (b"  c", "E_BAD_TOPIC {verb} topic name '' is not valid"),
    (b" t c!", "E_BAD_CHANNEL {verb} channel name 'c!' is not valid"),
    (b" t *", "E_BAD_CHANNEL {verb} channel name '*' is not valid"),
    (b" *", "E_BAD_TOPIC {verb} topic name '*' is not valid"),
]


@pytest.mark.parametrize("verb", ["REGISTER", "UNREGISTER"])
def test_case_190_names_are_checked(lookupd: TestLookupd, peer: Peer, verb: str) -> None:
    for params, text in WRONG_NAMES:
        connection = peer(lookupd)
        connection.send(verb.encode() + params + b"\n")
        connection.expect_fatal(text.format(verb=verb))


def test_case_190_an_empty_channel_counts_as_none(lookupd: TestLookupd, peer: Peer, topic: str) -> None:
    connection = peer(lookupd)
    connection.send(f"REGISTER {topic}  ignored\n".encode())
    connection.expect_ok()
    assert lookupd.channels(topic) == []


# HTTP


def test_case_191_topic_create_and_delete(lookupd: TestLookupd, topic: str) -> None:
    for query, code in (
        ("", "MISSING_ARG_TOPIC"),
        ("?topic=", "INVALID_ARG_TOPIC"),
        ("?topic=bad!", "INVALID_ARG_TOPIC"),
        ("?topic=*", "INVALID_ARG_TOPIC"),
        (f"?topic={'t' * 65}", "INVALID_ARG_TOPIC"),
        ("?topic=a;b", "INVALID_REQUEST"),
        ("?topic=%zz", "INVALID_REQUEST"),
    ):
        assert is_error(lookupd.request("POST", f"/topic/create{query}"), 400, code)
    for _ in range(2):
        answer = lookupd.request("POST", f"/topic/create?topic={topic}")
        assert (answer.status, answer.body, answer.header("Content-Type")) == (200, b"", None)
    assert topic in lookupd.topics()
    assert lookupd.lookup(topic) == {"channels": [], "producers": []}

    assert is_error(lookupd.request("POST", "/topic/delete"), 400, "MISSING_ARG_TOPIC")
    for name in (topic, topic, "", "bad!"):
        answer = lookupd.request("POST", f"/topic/delete?topic={name}")
        assert (answer.status, answer.body) == (200, b"")
    assert topic not in lookupd.topics()


def test_case_191_deleting_a_topic_forgets_its_channels_and_producers(
    lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connection = peer(lookupd, broadcast_address=host)
    connection.register(topic, "c")
    connection.register(topic + "_other")
    lookupd.post("/topic/delete", topic=topic)
    assert is_error(lookupd.request("GET", f"/lookup?topic={topic}"), 404, "TOPIC_NOT_FOUND")
    assert lookupd.channels(topic) == []
    found = node(lookupd, host)
    assert found is not None and (found["topics"], found["tombstones"]) == ([topic + "_other"], [False])
    connection.register(topic)
    assert lookupd.lookup(topic)["channels"] == [] and addresses(lookupd, topic) == [host]


def test_case_191_tombstone_needs_a_topic_and_a_node(lookupd: TestLookupd) -> None:
    assert is_error(lookupd.request("POST", "/topic/tombstone?node=a:1"), 400, "MISSING_ARG_TOPIC")
    assert is_error(lookupd.request("POST", "/topic/tombstone?topic=t"), 400, "MISSING_ARG_NODE")
    answer = lookupd.request("POST", "/topic/tombstone?topic=no_such_topic&node=a:1")
    assert (answer.status, answer.body) == (200, b"")


@ours_only
def test_case_191_a_star_is_not_a_topic(lookupd: TestLookupd, peer: Peer, topic: str, host: str) -> None:
    peer(lookupd, broadcast_address=host).register(topic, "c")
    for method, target in (
        ("GET", "/lookup?topic=*"),
        ("GET", "/channels?topic=%2A"),
        ("POST", "/topic/delete?topic=*"),
        ("POST", f"/topic/tombstone?topic=*&node={host}:4151"),
        ("POST", "/channel/create?topic=*&channel=c"),
        ("POST", "/channel/delete?topic=*&channel=c"),
    ):
        assert is_error(lookupd.request(method, target), 400, "INVALID_ARG_TOPIC"), target
    assert addresses(lookupd, topic) == [host]


def test_case_192_channels_of_a_topic(lookupd: TestLookupd, topic: str) -> None:
    assert is_error(lookupd.request("GET", "/channels"), 400, "MISSING_ARG_TOPIC")
    assert lookupd.request("GET", f"/channels?topic={topic}").json() == {"channels": []}
    lookupd.post("/channel/create", topic=topic, channel="ch")
    assert lookupd.channels(topic) == ["ch"]
    assert topic in lookupd.topics()
    assert lookupd.lookup(topic) == {"channels": ["ch"], "producers": []}


@pytest.mark.parametrize("action", ["create", "delete"])
def test_case_193_channel_create_and_delete_check_their_parameters(lookupd: TestLookupd, action: str) -> None:
    for query, code in (
        ("", "MISSING_ARG_TOPIC"),
        ("?channel=c", "MISSING_ARG_TOPIC"),
        ("?topic=bad!&channel=bad!", "INVALID_ARG_TOPIC"),
        ("?topic=bad!", "INVALID_ARG_TOPIC"),
        ("?topic=t", "MISSING_ARG_CHANNEL"),
        ("?topic=t&channel=", "INVALID_ARG_CHANNEL"),
        ("?topic=t&channel=bad!", "INVALID_ARG_CHANNEL"),
        ("?topic=t&channel=%zz", "INVALID_REQUEST"),
    ):
        assert is_error(lookupd.request("POST", f"/channel/{action}{query}"), 400, code), query


def test_case_193_a_channel_is_created_and_deleted(
    lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    target = f"/channel/delete?topic={topic}&channel=c"
    assert is_error(lookupd.request("POST", target), 404, "CHANNEL_NOT_FOUND")
    for _ in range(2):
        answer = lookupd.request("POST", f"/channel/create?topic={topic}&channel=c")
        assert (answer.status, answer.body) == (200, b"")
    peer(lookupd, broadcast_address=host).register(topic, "c")
    answer = lookupd.request("POST", target)
    assert (answer.status, answer.body) == (200, b"")
    assert lookupd.channels(topic) == []
    assert addresses(lookupd, topic) == [host]
    assert is_error(lookupd.request("POST", target), 404, "CHANNEL_NOT_FOUND")


def test_case_194_lookup_of_nothing_and_of_the_unknown(lookupd: TestLookupd, topic: str) -> None:
    assert is_error(lookupd.request("GET", "/lookup"), 400, "MISSING_ARG_TOPIC")
    for name in (topic, "", "bad!"):
        assert is_error(lookupd.request("GET", f"/lookup?topic={name}"), 404, "TOPIC_NOT_FOUND")


@pytest.mark.parametrize("path", ["/lookup?topic={}", "/topics", "/channels?topic={}", "/nodes", "/debug"])
def test_case_194_lists_are_json_in_the_present_format(lookupd: TestLookupd, path: str, topic: str) -> None:
    lookupd.post("/topic/create", topic=topic)
    answer = lookupd.request("GET", path.format(topic))
    assert answer.status == 200
    assert answer.header("Content-Type") == JSON
    assert answer.header("X-NSQ-Content-Type") == NSQ_HEADER
    assert answer.body == json.dumps(answer.json(), separators=(",", ":")).encode()


def test_case_194_debug_tells_everything(lookupd: TestLookupd, peer: Peer, topic: str, host: str) -> None:
    before = time.time_ns()
    connection = peer(lookupd, broadcast_address=host)
    connection.register(topic, "c")
    lookupd.post("/topic/create", topic=topic + "_unused")
    lookupd.post("/topic/tombstone", topic=topic, node=f"{host}:4151")
    after = time.time_ns()
    found = lookupd.debug()
    assert f"topic:{topic}_unused:" not in found
    (of_topic,), (of_channel,) = found[f"topic:{topic}:"], found[f"channel:{topic}:c"]
    assert of_channel in found["client::"]
    assert list(of_topic) == sorted(of_topic)
    assert {name: of_channel[name] for name in NSQD} == {**NSQD, "broadcast_address": host}
    assert of_channel["id"] == connection.local_address
    assert before <= of_channel["last_update"] <= after
    assert (of_channel["tombstoned"], of_channel["tombstoned_at"]) == (False, -6795364578871345152)
    assert of_topic["tombstoned"] is True and before <= of_topic["tombstoned_at"] <= after
    assert {*of_channel} - TOPOLOGY == {*NSQD, "id", "last_update", "tombstoned", "tombstoned_at"}


def test_case_195_ping_and_info(lookupd: TestLookupd) -> None:
    ping = lookupd.request("GET", "/ping")
    assert (ping.status, ping.body, ping.header("Content-Type")) == (200, b"OK", TEXT)
    assert ping.header("X-NSQ-Content-Type") is None
    info = lookupd.request("GET", "/info").json()
    assert list(info) == ["version"] and info["version"].startswith("1.")


def test_case_195_what_there_is_not(lookupd: TestLookupd) -> None:
    assert is_error(lookupd.request("GET", "/no/such/path"), 404, "NOT_FOUND")
    assert is_error(lookupd.request("GET", "/topic/create?topic=t"), 405, "METHOD_NOT_ALLOWED")
    assert is_error(lookupd.request("POST", "/lookup?topic=t"), 405, "METHOD_NOT_ALLOWED")
    for old in ("/create_topic", "/delete_topic", "/tombstone_topic_producer", "/create_channel"):
        assert is_error(lookupd.request("POST", f"{old}?topic=t"), 404, "NOT_FOUND")


def test_case_196_registering_again_does_not_duplicate(
    lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connection = peer(lookupd, broadcast_address=host)
    for _ in range(3):
        connection.register(topic, "c")
        connection.register(topic)
    assert addresses(lookupd, topic) == [host]
    assert lookupd.channels(topic) == ["c"]
    found = node(lookupd, host)
    assert found is not None and found["topics"] == [topic]
    assert [len(lookupd.debug()[key]) for key in (f"topic:{topic}:", f"channel:{topic}:c")] == [1, 1]


def test_case_196_each_connection_is_a_producer_of_its_own(
    lookupd: TestLookupd, peer: Peer, topic: str, host: str
) -> None:
    connections = [peer(lookupd, broadcast_address=f"{host}_{number}") for number in range(3)]
    for connection in connections:
        connection.register(topic, "c")
    assert sorted(addresses(lookupd, topic)) == [f"{host}_{number}" for number in range(3)]
    lookupd.post("/topic/tombstone", topic=topic, node=f"{host}_1:4151")
    assert sorted(addresses(lookupd, topic)) == [f"{host}_0", f"{host}_2"]
    connections[0].unregister(topic)
    assert addresses(lookupd, topic) == [f"{host}_2"]
    connections[2].close()
    wait_until(lambda: addresses(lookupd, topic) == [])
    connections[0].register(topic)
    assert addresses(lookupd, topic) == [f"{host}_0"]


def test_case_196_unregistering_what_was_not_registered_is_answered_ok(
    lookupd: TestLookupd, peer: Peer, topic: str
) -> None:
    connection = peer(lookupd)
    connection.unregister(topic, "c")
    connection.unregister(topic)
    assert topic not in lookupd.topics()


def test_commands_may_be_sent_together_and_in_pieces(lookupd: TestLookupd, topic: str) -> None:
    body = json.dumps(NSQD).encode()
    conversation = b"PING\nIDENTIFY\n" + struct.pack(">i", len(body)) + body
    conversation += f"REGISTER {topic} c\r\nPING\nUNREGISTER {topic} c\nPING\n".encode() * 200
    for size in (len(conversation), 7):
        with lookupd.connect() as connection:
            for start in range(0, len(conversation), size):
                connection.send(conversation[start : start + size])
            connection.expect_ok()
            assert json.loads(connection.read_reply())["version"]
            for _ in range(800):
                connection.expect_ok()


# nsqd and nsqlookupd together


@pytest.fixture
def nsqd(lookupd: TestLookupd, own_process: Callable[..., Any], host: str) -> TestBroker:
    """An nsqd that has identified itself."""
    started = own_process(**nsqd_flags(lookupd, host))
    wait_until(lambda: node(lookupd, host), what="the nsqd among the nodes")
    return started


def soon(fact: Callable[[], Any]) -> None:
    """NSQ's tests allow 350 ms; a busy machine needs more."""
    wait_until(fact)


def nsqd_flags(lookupd: TestLookupd, host: str) -> dict[str, Any]:
    address = "{}:{}".format(*lookupd.address)
    return {"broadcast_address": host, "lookupd_tcp_address": (address,), "log_level": "debug"}


def test_case_177_an_ephemeral_channel_is_announced_and_withdrawn(
    lookupd: TestLookupd, nsqd: TestBroker, topic: str
) -> None:
    with nsqd.connect() as connection:
        connection.identify()
        connection.sub(topic, "c#ephemeral")
        soon(lambda: lookupd.channels(topic) == ["c#ephemeral"])
    soon(lambda: lookupd.channels(topic) == [])
    with nsqd.connect() as connection:
        connection.identify()
        connection.sub(topic + "#ephemeral", "c#ephemeral")
        soon(lambda: topic + "#ephemeral" in lookupd.topics())
    soon(lambda: topic + "#ephemeral" not in lookupd.topics())


def test_case_197_topics_and_channels_of_an_nsqd_appear_and_disappear(
    lookupd: TestLookupd, nsqd: Any, topic: str, host: str
) -> None:
    nsqd.http("POST", "/topic/create", topic=topic)
    soon(lambda: topic in lookupd.topics())
    (producer,) = lookupd.lookup(topic)["producers"]
    assert producer["broadcast_address"] == host
    assert producer["hostname"]
    assert (producer["tcp_port"], producer["http_port"]) == (nsqd.address[1], nsqd.http_address[1])
    assert producer["version"].startswith("1.")
    nsqd.http("POST", "/channel/create", topic=topic, channel="ch")
    soon(lambda: lookupd.channels(topic) == ["ch"])
    assert {f"topic:{topic}:", f"channel:{topic}:ch"} <= {*lookupd.debug()}
    found = node(lookupd, host)
    assert found is not None and found["topics"] == [topic]

    nsqd.http("POST", "/channel/delete", topic=topic, channel="ch")
    soon(lambda: f"channel:{topic}:ch" not in lookupd.debug())
    nsqd.http("POST", "/topic/delete", topic=topic)
    soon(lambda: f"topic:{topic}:" not in lookupd.debug())
    assert lookupd.lookup(topic)["producers"] == []


def test_case_197_an_nsqd_that_stops_is_gone(lookupd: TestLookupd, nsqd: Any, topic: str, host: str) -> None:
    nsqd.publish(topic, b"x")
    soon(lambda: addresses(lookupd, topic) == [host])
    nsqd.stop()
    wait_until(lambda: node(lookupd, host) is None)
    assert addresses(lookupd, topic) == []


def test_case_198_channels_known_to_nsqlookupd_are_there_before_the_first_message(
    lookupd: TestLookupd, nsqd: Any, topic: str
) -> None:
    for channel in ("a", "b", "c#ephemeral"):
        lookupd.post("/channel/create", topic=topic, channel=channel)
    nsqd.publish(topic, b"first")
    wait_until(lambda: (nsqd.topic_stats(topic) or {"channels": []})["channels"])
    channels = {found["channel_name"] for found in nsqd.topic_stats(topic)["channels"]}
    assert channels == {"a", "b"}
    with nsqd.connect() as connection:
        connection.identify()
        connection.sub(topic, "b", rdy=1)
        assert connection.read_message().body == b"first"


def test_case_199_an_nsqd_registers_again_after_nsqlookupd_was_away(
    own_process: Callable[..., Any], topic: str, host: str
) -> None:
    with start_lookupd_process() as lookupd:
        lookupd.flags["tcp_address"] = "{}:{}".format(*lookupd.address)
        nsqd = own_process(**nsqd_flags(lookupd, host))
        nsqd.http("POST", "/topic/create", topic=topic)
        nsqd.http("POST", "/channel/create", topic=topic, channel="ch")
        wait_until(lambda: lookupd.channels(topic) == ["ch"])
        lookupd.restart()
        nsqd.publish(topic, b"goes on meanwhile")
        # NSQ's nsqd notices at its next ping and reconnects at the one after that.
        wait_until(lambda: node(lookupd, host), 40 if REFERENCE else 15)
        wait_until(lambda: topic in lookupd.topics())
        assert addresses(lookupd, topic) == [host]
        wait_until(lambda: lookupd.channels(topic) == ["ch"])
