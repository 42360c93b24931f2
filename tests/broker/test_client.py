"""broker.client: its capacity, and its stats."""

from __future__ import annotations

import pytest

from nsparq.broker.stats import client_stats
from nsparq.wire.server import SUBSCRIBED
from tests.broker.rig import FakeClient


@pytest.mark.parametrize(
    ("rdy", "in_flight", "capacity"), [(0, 0, 0), (3, 0, 3), (3, 2, 1), (3, 3, 0), (1, 3, -2)]
)
def test_rdy_limits_the_messages_in_flight(rdy: int, in_flight: int, capacity: int):
    client = FakeClient()
    client.ready_count, client.in_flight = rdy, in_flight
    assert client.capacity == capacity


def test_a_client_that_does_not_read_has_no_capacity():
    client = FakeClient()
    client.ready_count = 5
    client.is_writable = False
    assert client.capacity == 0


def test_the_message_timeout_is_the_one_it_asked_for():
    assert FakeClient(msg_timeout_ms=1500).msg_timeout_ns == 1_500_000_000


def test_stats_show_every_field_in_nsqs_order():
    client = FakeClient(
        "reader",
        address="10.0.0.1:999",
        user_agent="agent/1",
        topology_zone="z",
        topology_region="r",
        sample_rate=7,
    )
    client.state = SUBSCRIBED
    client.ready_count, client.in_flight = 10, 4
    client.message_count, client.finish_count, client.requeue_count = 9, 3, 2
    shown = client_stats(client)
    assert list(shown.items()) == [
        ("client_id", "reader"),
        ("hostname", "reader"),
        ("version", "V2"),
        ("remote_address", "10.0.0.1:999"),
        ("state", 3),
        ("ready_count", 10),
        ("in_flight_count", 4),
        ("message_count", 9),
        ("finish_count", 3),
        ("requeue_count", 2),
        ("connect_ts", 1_700_000_000),
        ("sample_rate", 7),
        ("deflate", False),
        ("snappy", False),
        ("user_agent", "agent/1"),
        ("topology_zone", "z"),
        ("topology_region", "r"),
        ("tls", False),
        ("tls_cipher_suite", ""),
        ("tls_version", ""),
        ("tls_negotiated_protocol", ""),
        ("tls_negotiated_protocol_is_mutual", False),
    ]


def test_a_publisher_shows_its_counts_between_topology_and_tls():
    client = FakeClient()
    client.publish_counts["t"] = 3
    shown = client_stats(client)
    assert shown["pub_counts"] == [{"topic": "t", "count": 3}]
    keys = list(shown)
    assert keys[keys.index("topology_region") + 1] == "pub_counts"
    assert keys[keys.index("pub_counts") + 1] == "tls"


def test_a_publisher_asked_about_one_topic_shows_that_topic_only():
    client = FakeClient()
    client.publish_counts.update({"t": 3, "u": 1})
    assert client_stats(client, "u")["pub_counts"] == [{"topic": "u", "count": 1}]


def test_a_publisher_asked_about_a_topic_it_never_published_to_shows_no_counts():
    client = FakeClient()
    client.publish_counts["t"] = 3
    assert "pub_counts" not in client_stats(client, "other")
    assert client.publish_counts == {"t": 3}
