"""The rules of nsqlookupd's registry, with time passed in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nsparq.errors import FatalClientError
from nsparq.lookup import answers
from nsparq.lookup.answers import GO_ZERO_TIME_NS
from nsparq.lookup.registry import Producer, Registry
from nsparq.wire.lookup import PeerInfo

SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND
INACTIVE, LIFETIME = 300 * SECOND, 45 * SECOND


def make_registry(**changes: Any) -> Registry:
    settings: dict[str, Any] = {
        "inactive_timeout_ns": INACTIVE,
        "tombstone_lifetime_ns": LIFETIME,
        "max_registrations": 1000,
    }
    return Registry(**{**settings, **changes})


@pytest.fixture
def registry() -> Registry:
    return make_registry()


def nsqd(registry: Registry, number: int = 1, now_ns: int = NOW) -> Producer:
    peer = PeerInfo(
        remote_address=f"10.0.0.{number}:50000",
        hostname=f"host{number}",
        broadcast_address=f"b{number}",
        tcp_port=4150,
        http_port=4151,
        version="1.3.0",
        topology_zone="z",
        topology_region="r",
    )
    return registry.identify(peer, now_ns)


def hosts(registry: Registry, topic: str, now_ns: int = NOW) -> list[str] | None:
    """Hosts of the producers found. None if the topic is unknown."""
    found = registry.lookup_json(topic, now_ns)
    return None if found is None else [producer["hostname"] for producer in json.loads(found)["producers"]]


def topics(registry: Registry) -> list[str]:
    found: list[str] = json.loads(registry.topics_json())["topics"]
    return found


def channels(registry: Registry, topic: str) -> list[str]:
    found: list[str] = json.loads(registry.channels_json(topic))["channels"]
    return found


def nodes(registry: Registry, now_ns: int = NOW) -> dict[str, dict[str, bool]]:
    """Each node's topics with their tombstones, by host."""
    found = {}
    for node in json.loads(registry.nodes_json(now_ns))["producers"]:
        assert len(node["topics"]) == len(node["tombstones"])
        found[node["hostname"]] = dict(zip(node["topics"], node["tombstones"], strict=True))
    return found


# Registering


def test_a_topic_is_registered_without_its_channels(registry: Registry) -> None:
    registry.register(nsqd(registry), "t")
    assert hosts(registry, "t") == ["host1"]
    assert (topics(registry), channels(registry, "t")) == (["t"], [])


def test_a_channel_is_registered_with_its_topic(registry: Registry) -> None:
    registry.register(nsqd(registry), "t", "c")
    assert hosts(registry, "t") == ["host1"]
    assert (topics(registry), channels(registry, "t")) == (["t"], ["c"])


def test_registering_again_changes_nothing(registry: Registry) -> None:
    first = nsqd(registry)
    assert registry.register(first, "t", "c")
    registry.tombstone("t", "b1:4151", NOW)
    assert not registry.register(first, "t", "c")
    assert not registry.register(first, "t")
    assert hosts(registry, "t") == []
    assert first.registrations == 2


def test_a_lookup_finds_every_nsqd_of_a_topic(registry: Registry) -> None:
    for number in (1, 2, 3):
        registry.register(nsqd(registry, number), "t")
    assert hosts(registry, "t") == ["host1", "host2", "host3"]


def test_the_number_of_registrations_of_one_nsqd_is_limited() -> None:
    registry = make_registry(max_registrations=3)
    first, second = nsqd(registry, 1), nsqd(registry, 2)
    registry.register(first, "a", "c")
    registry.register(first, "b")
    for names in (("c", ""), ("a", "d")):
        with pytest.raises(FatalClientError, match="^E_INVALID REGISTER too many registrations$"):
            registry.register(first, *names)
    registry.register(first, "a", "c")  # nothing new
    registry.unregister(first, "b")
    registry.register(first, "c")
    registry.register(second, "d")
    assert topics(registry) == ["a", "b", "c", "d"]


# Unregistering


def test_unregistering_a_channel_leaves_the_topic_and_the_name(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t", "c")
    assert registry.unregister(first, "t", "c")
    assert hosts(registry, "t") == ["host1"]
    assert channels(registry, "t") == ["c"]
    assert list(json.loads(answers.debug(registry.debug_entries()))) == ["client::", "topic:t:"]


def test_unregistering_a_topic_removes_the_nsqd_from_its_channels(registry: Registry) -> None:
    first, second = nsqd(registry, 1), nsqd(registry, 2)
    for producer in (first, second):
        registry.register(producer, "t", "c")
        registry.register(producer, "t", "d")
        registry.register(producer, "u", "c")
    assert registry.unregister(first, "t")
    assert hosts(registry, "t") == ["host2"]
    assert (topics(registry), channels(registry, "t")) == (["t", "u"], ["c", "d"])
    found = json.loads(answers.debug(registry.debug_entries()))
    assert [entry["hostname"] for entry in found["channel:t:c"]] == ["host2"]
    assert [entry["hostname"] for entry in found["channel:u:c"]] == ["host1", "host2"]
    assert first.registrations == 2


def test_unregistering_an_unknown_name_does_nothing(registry: Registry) -> None:
    first, second = nsqd(registry, 1), nsqd(registry, 2)
    registry.register(first, "t", "c")
    for names in (("t", ""), ("t", "c"), ("t", "none"), ("none", "c"), ("none", "")):
        assert not registry.unregister(second, *names)
    assert hosts(registry, "t") == ["host1"]
    assert topics(registry) == ["t"]


def test_an_ephemeral_channel_goes_with_its_last_nsqd(registry: Registry) -> None:
    first, second = nsqd(registry, 1), nsqd(registry, 2)
    for producer in (first, second):
        registry.register(producer, "t", "c#ephemeral")
    registry.unregister(first, "t", "c#ephemeral")
    assert channels(registry, "t") == ["c#ephemeral"]
    registry.unregister(second, "t", "c#ephemeral")
    assert channels(registry, "t") == []


def test_an_ephemeral_topic_goes_with_its_last_nsqd_and_its_channels_stay(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t#ephemeral", "c")
    registry.register(first, "t#ephemeral", "d#ephemeral")
    registry.unregister(first, "t#ephemeral")
    assert hosts(registry, "t#ephemeral") is None
    assert topics(registry) == []
    assert channels(registry, "t#ephemeral") == ["c", "d#ephemeral"]
    registry.register(first, "t#ephemeral")
    assert json.loads(registry.lookup_json("t#ephemeral", NOW) or b"")["channels"] == ["c", "d#ephemeral"]


def test_an_ephemeral_name_created_over_http_goes_when_it_is_unregistered(registry: Registry) -> None:
    registry.create("t", "c#ephemeral")
    assert not registry.unregister(nsqd(registry), "t", "c#ephemeral")
    assert channels(registry, "t") == []


def test_a_lost_connection_leaves_all_names_even_ephemeral_ones(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t#ephemeral", "c#ephemeral")
    registry.register(first, "u", "c")
    registry.remove(first)
    assert hosts(registry, "t#ephemeral") == hosts(registry, "u") == []
    assert topics(registry) == ["t#ephemeral", "u"]
    assert channels(registry, "t#ephemeral") == ["c#ephemeral"]
    assert nodes(registry) == {}
    assert answers.debug(registry.debug_entries()) == b"{}"


# Names over HTTP


def test_names_are_created_without_producers(registry: Registry) -> None:
    registry.create("t")
    registry.create("u", "c")
    registry.create("u", "c")
    assert hosts(registry, "t") == hosts(registry, "u") == []
    assert (topics(registry), channels(registry, "u")) == (["t", "u"], ["c"])
    assert answers.debug(registry.debug_entries()) == b"{}"


def test_deleting_a_topic_deletes_its_channels_and_entries(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t", "c")
    registry.register(first, "u", "c")
    registry.delete_topic("t")
    assert hosts(registry, "t") is None
    assert (topics(registry), channels(registry, "t")) == (["u"], [])
    assert nodes(registry) == {"host1": {"u": False}}
    assert first.registrations == 2
    registry.register(first, "t")
    assert nodes(registry) == {"host1": {"u": False, "t": False}}


def test_deleting_a_topic_deletes_channels_of_an_unknown_topic(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t#ephemeral", "c")
    registry.unregister(first, "t#ephemeral")
    registry.delete_topic("t#ephemeral")
    assert channels(registry, "t#ephemeral") == []


@pytest.mark.parametrize("topic", ["", "*", "no such", "\udcff"])
def test_deleting_or_tombstoning_an_unknown_name_does_nothing(registry: Registry, topic: str) -> None:
    registry.register(nsqd(registry), "t", "c")
    registry.delete_topic(topic)
    assert registry.tombstone(topic, "b1:4151", NOW) == 0
    assert not registry.delete_channel(topic, "c")
    assert registry.lookup_json(topic, NOW) is None
    assert channels(registry, topic) == []
    assert hosts(registry, "t") == ["host1"]


def test_deleting_a_channel_leaves_the_topic(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t", "c")
    registry.register(first, "t", "d")
    assert registry.delete_channel("t", "c")
    assert not registry.delete_channel("t", "c")
    assert channels(registry, "t") == ["d"]
    assert hosts(registry, "t") == ["host1"]
    registry.unregister(first, "t")
    assert first.registrations == 0


def test_the_number_of_names_without_producers_is_limited() -> None:
    registry = make_registry(max_unused=3)
    first = nsqd(registry)
    registry.register(first, "kept", "c")
    for name in "abc":
        registry.create(name)
    assert topics(registry) == ["kept", "a", "b", "c"]
    registry.create("d")
    assert topics(registry) == ["kept", "b", "c", "d"]
    registry.register(first, "b")
    registry.create("e", "c")  # two names
    assert topics(registry) == ["kept", "b", "d", "e"]
    registry.remove(first)
    assert len(topics(registry)) + len(channels(registry, "kept")) + len(channels(registry, "e")) == 3


# Time


def test_an_nsqd_is_active_up_to_the_timeout(registry: Registry) -> None:
    registry.register(nsqd(registry), "t")
    assert hosts(registry, "t", NOW + INACTIVE) == ["host1"]
    assert nodes(registry, NOW + INACTIVE) == {"host1": {"t": False}}
    assert hosts(registry, "t", NOW + INACTIVE + 1) == []
    assert nodes(registry, NOW + INACTIVE + 1) == {}


def test_a_ping_keeps_an_nsqd_active_or_brings_it_back(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t")
    registry.ping(first, NOW + INACTIVE)
    assert hosts(registry, "t", NOW + 2 * INACTIVE) == ["host1"]
    late = NOW + 5 * INACTIVE
    assert nodes(registry, late) == {}
    registry.ping(first, late)
    assert hosts(registry, "t", late) == ["host1"]
    assert nodes(registry, late) == {"host1": {"t": False}}


def test_registering_does_not_make_an_nsqd_active(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t")
    registry.register(first, "u")
    assert first.last_update_ns == NOW


def test_a_tombstone_hides_an_nsqd_from_that_topic_until_it_ends(registry: Registry) -> None:
    for number in (1, 2):
        producer = nsqd(registry, number)
        registry.register(producer, "t", "c")
        registry.register(producer, "u")
    assert registry.tombstone("t", "b1:4151", NOW) == 1
    assert hosts(registry, "t") == ["host2"]
    assert hosts(registry, "u") == ["host1", "host2"]
    assert nodes(registry) == {"host1": {"t": True, "u": False}, "host2": {"t": False, "u": False}}
    assert hosts(registry, "t", NOW + LIFETIME - 1) == ["host2"]
    assert nodes(registry, NOW + LIFETIME - 1)["host1"] == {"t": True, "u": False}
    assert hosts(registry, "t", NOW + LIFETIME) == ["host1", "host2"]
    assert nodes(registry, NOW + LIFETIME)["host1"] == {"t": False, "u": False}


def test_a_second_tombstone_restarts_the_time(registry: Registry) -> None:
    registry.register(nsqd(registry), "t")
    registry.tombstone("t", "b1:4151", NOW)
    assert nodes(registry) == {"host1": {"t": True}}
    registry.tombstone("t", "b1:4151", NOW + LIFETIME - 1)
    assert hosts(registry, "t", NOW + LIFETIME) == []
    assert nodes(registry, NOW + LIFETIME) == {"host1": {"t": True}}


@pytest.mark.parametrize("node", ["b1", "b1:4150", "host1:4151", "b2:4151", ""])
def test_a_tombstone_needs_the_exact_node(registry: Registry, node: str) -> None:
    registry.register(nsqd(registry), "t")
    assert registry.tombstone("t", node, NOW) == 0
    assert hosts(registry, "t") == ["host1"]


def test_a_tombstone_hides_every_connection_of_the_node(registry: Registry) -> None:
    for _ in range(2):
        registry.register(nsqd(registry), "t")
    assert registry.tombstone("t", "b1:4151", NOW) == 2
    assert hosts(registry, "t") == []


def test_a_tombstone_ends_with_its_entry(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t")
    registry.tombstone("t", "b1:4151", NOW)
    registry.unregister(first, "t")
    assert hosts(registry, "t", NOW + LIFETIME) == []
    registry.register(first, "t")
    assert hosts(registry, "t") == ["host1"]


# Responses


def test_responses_have_the_documented_keys(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t", "c")
    producer = (
        '{"remote_address":"10.0.0.1:50000","hostname":"host1","broadcast_address":"b1","tcp_port":4150,'
        '"http_port":4151,"version":"1.3.0","topology_zone":"z","topology_region":"r"'
    )
    assert registry.lookup_json("t", NOW) == f'{{"channels":["c"],"producers":[{producer}}}]}}'.encode()
    node = f'{producer},"tombstones":[false],"topics":["t"]}}'
    assert registry.nodes_json(NOW) == f'{{"producers":[{node}]}}'.encode()


def test_empty_lists_are_never_null(registry: Registry) -> None:
    registry.create("t")
    assert registry.lookup_json("t", NOW) == b'{"channels":[],"producers":[]}'
    assert registry.channels_json("t") == registry.channels_json("none") == b'{"channels":[]}'
    assert make_registry().topics_json() == b'{"topics":[]}'
    assert registry.nodes_json(NOW) == b'{"producers":[]}'
    nsqd(registry)
    assert registry.nodes_json(NOW).endswith(b',"tombstones":[],"topics":[]}]}')


def test_debug_lists_everything_by_registration(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t", "c")
    registry.create("unused")
    registry.ping(first, NOW + 5)
    registry.tombstone("t", "b1:4151", NOW + 7)
    found = json.loads(answers.debug(registry.debug_entries()))
    assert list(found) == ["channel:t:c", "client::", "topic:t:"]
    entry = {
        "broadcast_address": "b1",
        "hostname": "host1",
        "http_port": 4151,
        "id": "10.0.0.1:50000",
        "last_update": NOW + 5,
        "tcp_port": 4150,
        "tombstoned": False,
        "tombstoned_at": GO_ZERO_TIME_NS,
        "topology_region": "r",
        "topology_zone": "z",
        "version": "1.3.0",
    }
    assert found["channel:t:c"] == found["client::"] == [entry]
    assert found["topic:t:"] == [{**entry, "tombstoned": True, "tombstoned_at": NOW + 7}]
    assert list(found["topic:t:"][0]) == sorted(entry)


def test_texts_of_a_peer_cannot_break_the_json(registry: Registry) -> None:
    peer = PeerInfo(remote_address="a", hostname='"},{\\\n', broadcast_address="é", tcp_port=1, http_port=1)
    registry.register(registry.identify(peer, NOW), "t")
    assert hosts(registry, "t") == ['"},{\\\n']
    assert nodes(registry) == {'"},{\\\n': {"t": False}}
    assert json.loads(answers.debug(registry.debug_entries()))["client::"][0]["broadcast_address"] == "é"


# Cost


def test_nodes_are_encoded_again_only_after_a_change(registry: Registry) -> None:
    first, second = nsqd(registry, 1), nsqd(registry, 2)
    registry.register(first, "t")
    whole = registry.nodes_json(NOW)
    part = second.node_json
    registry.ping(first, NOW + 1)
    registry.register(first, "t")
    registry.create("u")
    assert registry.nodes_json(NOW + 2) is whole
    registry.register(first, "u")
    assert registry.nodes_json(NOW + 3) is not whole
    assert second.node_json is part


def test_the_list_of_topics_is_encoded_again_only_after_a_change(registry: Registry) -> None:
    first = nsqd(registry)
    registry.register(first, "t")
    whole = registry.topics_json()
    registry.register(nsqd(registry, 2), "t", "c")
    registry.unregister(first, "t")
    assert registry.topics_json() is whole
    registry.create("u")
    assert registry.topics_json() is not whole
