"""The shape of stats: NSQ's keys are all there, with the right types. Further keys are ours to add."""

from __future__ import annotations

from typing import Any

TOPIC = {
    "topic_name": str,
    "channels": list,
    "depth": int,
    "backend_depth": int,
    "message_count": int,
    "message_bytes": int,
    "paused": bool,
    "e2e_processing_latency": dict,
}
CHANNEL = {
    "channel_name": str,
    "depth": int,
    "backend_depth": int,
    "in_flight_count": int,
    "deferred_count": int,
    "message_count": int,
    "requeue_count": int,
    "timeout_count": int,
    "client_count": int,
    "clients": list,
    "paused": bool,
    "e2e_processing_latency": dict,
}
CLIENT = {
    "client_id": str,
    "hostname": str,
    "version": str,
    "remote_address": str,
    "state": int,
    "ready_count": int,
    "in_flight_count": int,
    "message_count": int,
    "finish_count": int,
    "requeue_count": int,
    "connect_ts": int,
    "sample_rate": int,
    "deflate": bool,
    "snappy": bool,
    "user_agent": str,
    "tls": bool,
    "tls_cipher_suite": str,
    "tls_version": str,
    "tls_negotiated_protocol": str,
    "tls_negotiated_protocol_is_mutual": bool,
}


def assert_shape(value: dict[str, Any], shape: dict[str, type]) -> None:
    assert {key: type(value.get(key)) for key in shape} == shape
    known = [key for key in value if key in shape]
    assert known == list(shape), "in NSQ's order"


def test_stats_have_the_keys_of_nsq(broker, topic, channel):
    with broker.connect() as connection:
        connection.identify(client_id="id")
        connection.sub(topic, channel, rdy=1)
        connection.pub(topic, b"body")
        connection.read_message()
        stats = broker.stats(topic)
        assert (stats["version"].count("."), stats["health"], type(stats["start_time"])) == (2, "OK", int)
        (found,) = stats["topics"]
        assert_shape(found, TOPIC)
        assert_shape(found["channels"][0], CHANNEL)
        assert_shape(found["channels"][0]["clients"][0], CLIENT)
        assert found["e2e_processing_latency"] == {"count": 0, "percentiles": None}
        (producer,) = (one for one in stats["producers"] if one["remote_address"] == connection.local_address)
        assert_shape(producer, CLIENT)
        # Left out when it would say nothing.
        assert "authed" not in producer and "auth_identity" not in producer


def test_stats_without_clients_still_count_them(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        stats = broker.stats(topic, include_clients=False)
        found = stats["topics"][0]["channels"][0]
        assert (found["client_count"], found["clients"]) == (1, None)
        assert stats["producers"] is None


def test_stats_of_what_does_not_exist(broker, topic, channel):
    broker.control("create", topic, channel)
    assert broker.stats("no_such_topic")["topics"] is None
    assert broker.stats(topic, "no_such_channel")["topics"] == []
    names = [found["topic_name"] for found in broker.stats()["topics"]]
    assert topic in names and names == sorted(names)


def test_latency_percentiles_are_reported_in_nanoseconds(shared_broker, topic, channel):
    broker = shared_broker(e2e_processing_latency_percentile=(0.99, 0.5))
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=10)
        broker.publish(topic, *([b"body"] * 20))
        connection.read_messages(20, finish=True)
        connection.barrier()
    for stats in (broker.topic_stats(topic), broker.channel_stats(topic, channel)):
        latency = stats["e2e_processing_latency"]
        assert latency["count"] == 20
        assert [one["quantile"] for one in latency["percentiles"]] == [0.99, 0.5]
        assert all(0 < one["value"] < 10_000_000_000 for one in latency["percentiles"])
