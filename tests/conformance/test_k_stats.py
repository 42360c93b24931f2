"""Group K: /stats, as JSON and as text."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from tests.support import REFERENCE, TEXT, unique_name, wait_until

MEMORY = (
    "heap_objects heap_idle_bytes heap_in_use_bytes heap_released_bytes gc_pause_usec_100 gc_pause_usec_99 "
    "gc_pause_usec_95 next_gc_bytes gc_total_runs".split()
)
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
TOP = ("version", "health", "start_time", "topics", "memory", "producers")


def assert_shape(value, shape):
    assert {key: type(value.get(key)) for key in shape} == shape
    known = [key for key in value if key in shape]
    assert known == list(shape), "in NSQ's order"


def stats(broker, query=""):
    return broker.request("GET", f"/stats?format=json{query}").expect_json()


def text(broker, query="include_mem=false"):
    answer = broker.request("GET", f"/stats?{query}")
    answer.expect_text(answer.body.decode())
    return answer.body.decode()


def test_case_141_json_of_an_empty_broker(own_broker):
    broker = own_broker()
    body = broker.request("GET", "/stats?format=json").body
    assert re.match(
        rb'\{"version":"[\d.]+","health":"OK","start_time":\d+,"topics":\[\],"memory":\{"heap_objects":\d+,',
        body,
    )
    # NSQ's keys, then ours.
    ours = b"" if REFERENCE else b',"corrupt_files":0,"warnings":[]'
    assert body.endswith(b',"producers":null' + ours + b"}")


def test_case_141_keys_of_the_whole_in_order(broker, topic):
    broker.publish(topic, b"x")
    found = stats(broker)
    assert [key for key in found if key in TOP] == list(TOP)
    assert (found["version"].count("."), found["health"], type(found["start_time"])) == (2, "OK", int)
    assert list(found["memory"])[: len(MEMORY)] == list(MEMORY)
    assert {type(value) for value in found["memory"].values()} == {int}
    assert min(found["memory"].values()) >= 0


def test_case_141_only_this_very_word_asks_for_json(broker):
    for query in ("", "?format=", "?format=text", "?format=JSON", "?format=xml", "?format=text&format=json"):
        answer = broker.request("GET", f"/stats{query}")
        assert answer.header("Content-Type") == TEXT
        assert answer.body.startswith(b"nsqd v")
    stats(broker, "&format=text")


def test_case_141_a_query_that_cannot_be_parsed_is_refused(broker):
    for query in ("%zz", "format=json;topic=t", "a=%"):
        broker.request("GET", f"/stats?{query}").expect_error(400, "INVALID_REQUEST")


def test_case_141_topic_channel_and_client_field_by_field(broker, topic, channel):
    with broker.connect() as consumer, broker.connect() as producer:
        consumer.identify(client_id="an id", hostname="a host", user_agent="agent/1", sample_rate=0)
        consumer.sub(topic, channel, rdy=3)
        producer.mpub(topic, [b"12345", b"1234567"])
        producer.dpub(topic, 60_000, b"deferred")
        first, second = consumer.read_messages(2)
        consumer.fin(first.id)
        consumer.req(second.id, 0)
        consumer.read_message()
        consumer.barrier()
        wait_until(lambda: broker.channel_stats(topic, channel)["deferred_count"] == 1)
        (found,) = stats(broker, f"&topic={topic}")["topics"]
    assert_shape(found, TOPIC)
    (in_channel,) = found.pop("channels")
    assert {key: found[key] for key in TOPIC if key != "channels"} == {
        "topic_name": topic,
        "depth": 0,
        "backend_depth": 0,
        "message_count": 3,
        "message_bytes": 20,
        "paused": False,
        "e2e_processing_latency": {"count": 0, "percentiles": None},
    }
    assert_shape(in_channel, CHANNEL)
    (client,) = in_channel.pop("clients")
    assert {key: in_channel[key] for key in CHANNEL if key != "clients"} == {
        "channel_name": channel,
        "depth": 0,
        "backend_depth": 0,
        "in_flight_count": 1,
        "deferred_count": 1,
        "message_count": 3,
        "requeue_count": 1,
        "timeout_count": 0,
        "client_count": 1,
        "paused": False,
        "e2e_processing_latency": {"count": 0, "percentiles": None},
    }
    assert_shape(client, CLIENT)
    assert {key: client[key] for key in CLIENT if key not in ("remote_address", "connect_ts")} == {
        "client_id": "an id",
        "hostname": "a host",
        "version": "V2",
        "state": 3,
        "ready_count": 3,
        "in_flight_count": 1,
        "message_count": 3,
        "finish_count": 1,
        "requeue_count": 1,
        "sample_rate": 0,
        "deflate": False,
        "snappy": False,
        "user_agent": "agent/1",
        "tls": False,
        "tls_cipher_suite": "",
        "tls_version": "",
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": False,
    }
    assert re.fullmatch(r"127\.0\.0\.1:\d+", client["remote_address"])
    # Left out while they are empty.
    assert not {"authed", "auth_identity", "auth_identity_url", "pub_counts"} & client.keys()
    # Counted by the topology experiment only; NSQ's sources of 1.3.0 count some without it.
    assert not {"zone_local_msg_count", "region_local_msg_count"} & in_channel.keys()


def test_case_141_before_identify_a_client_is_its_address(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        (client,) = stats(broker, f"&topic={topic}")["topics"][0]["channels"][0]["clients"]
    assert (client["client_id"], client["hostname"], client["user_agent"]) == ("127.0.0.1", "127.0.0.1", "")


def test_case_141_a_closing_client_is_in_state_4(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.cls()
        (client,) = stats(broker, f"&topic={topic}")["topics"][0]["channels"][0]["clients"]
    assert client["state"] == 4


def test_case_141_topics_and_channels_are_sorted_by_name(broker, topic):
    names = [f"{topic}_{end}" for end in ("b", "a", "B", "_", "0")]
    for name in names:
        broker.control("create", name)
    for channel in ("b", "a", "B", "_", "0"):
        broker.control("create", names[0], channel)
    found = stats(broker)["topics"]
    assert [one["topic_name"] for one in found if one["topic_name"] in names] == sorted(names)
    (whole,) = (one for one in found if one["topic_name"] == names[0])
    assert [one["channel_name"] for one in whole["channels"]] == ["0", "B", "_", "a", "b"]


@pytest.mark.parametrize("value", ["false", "0"])
def test_case_142_clients_can_be_left_out(broker, topic, channel, value):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.pub(topic, b"x")
        found = stats(broker, f"&topic={topic}&include_clients={value}")
        (in_channel,) = found["topics"][0]["channels"]
        assert (in_channel["clients"], in_channel["client_count"]) == (None, 1)
        assert found["producers"] is None
        assert connection.local_address.split(":")[1] not in text(broker, f"include_clients={value}")


@pytest.mark.parametrize("value", ["true", "", "False"])
def test_case_142_any_other_value_includes_the_clients(broker, topic, channel, value):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        found = stats(broker, f"&topic={topic}&include_clients={value}")
        assert len(found["topics"][0]["channels"][0]["clients"]) == 1


def test_case_142_a_channel_without_clients_has_an_empty_list(broker, topic, channel):
    broker.control("create", topic, channel)
    assert stats(broker, f"&topic={topic}")["topics"][0]["channels"][0]["clients"] == []


@pytest.mark.parametrize("value", ["false", "0"])
def test_case_142_memory_can_be_left_out(broker, value):
    assert "memory" not in stats(broker, f"&include_mem={value}")
    assert "Memory" not in text(broker, f"include_mem={value}")


@pytest.mark.parametrize("value", ["true", "", "False"])
def test_case_142_any_other_value_includes_the_memory(broker, value):
    assert "memory" in stats(broker, f"&include_mem={value}")
    assert "\nMemory:\n" in text(broker, f"include_mem={value}")


def test_case_143_filters(broker):
    first, second, bare = (unique_name("filter") for _ in range(3))
    shared, single = unique_name("channel"), unique_name("channel")
    broker.control("create", bare)
    for topic, channel in ((first, shared), (first, single), (second, shared)):
        broker.control("create", topic, channel)

    def found(query):
        topics = stats(broker, query)["topics"]
        return topics and {
            one["topic_name"]: [channel["channel_name"] for channel in one["channels"]] for one in topics
        }

    assert found(f"&topic={first}") == {first: [shared, single]}
    assert found(f"&topic={first}&channel={single}") == {first: [single]}
    assert found(f"&topic={bare}") == {bare: []}
    # A channel alone selects the topics that have it.
    assert found(f"&channel={shared}") == {first: [shared], second: [shared]}
    # Empty filters are none.
    assert {first, second, bare} <= found("&topic=&channel=").keys()
    # Unknown names: null for a topic, an empty list for a channel.
    assert stats(broker, "&topic=no_such_topic")["topics"] is None
    assert stats(broker, f"&topic=no_such_topic&channel={shared}")["topics"] is None
    assert stats(broker, f"&topic={second}&channel={single}")["topics"] == []
    assert stats(broker, f"&topic={bare}&channel={single}")["topics"] == []
    assert stats(broker, "&channel=no_such_channel")["topics"] == []
    # Names are compared, not checked.
    assert stats(broker, "&topic=t!")["topics"] is None
    # Exact match, neither part nor pattern.
    assert stats(broker, f"&topic={first[:-1]}")["topics"] is None
    assert stats(broker, f"&topic={first.upper()}")["topics"] is None


# Text


def test_case_144_text_of_an_empty_broker(own_broker):
    whole = text(own_broker(), "")
    head, memory, topics, producers = re.fullmatch(
        r"(.*?)\nMemory:\n(.*?)\n(Topics.*?)\n(Producers.*)", whole, re.DOTALL
    ).groups()
    version, start, uptime, blank, health, end = head.split("\n")
    assert re.fullmatch(r"nsqd v\d+\.\d+\.\d+ \(built w/[a-z0-9.-]+\)", version)
    assert start.startswith("start_time ")
    assert datetime.fromisoformat(start.removeprefix("start_time ")).tzinfo is not None
    assert re.fullmatch(r"uptime (\d+h)?(\d+m)?[\d.]+(ns|µs|ms|s)", uptime)
    assert (blank, health, end) == ("", "Health: OK", "")
    lines = [line for line in memory.split("\n") if line]
    for line, name in zip(lines, MEMORY, strict=True):
        assert re.fullmatch(rf"   {name:<25}\t\d+", line)
    assert (topics, producers) == ("Topics: None\n", "Producers: None\n")


def test_case_144_text_without_memory(own_broker):
    whole = text(own_broker())
    rest = whole.split("\n", 3)[3]
    assert rest == "\nHealth: OK\n\nTopics: None\n\nProducers: None\n"


def line_of(whole, part):
    (line,) = (line for line in whole.split("\n") if part in line)
    return line


def test_case_144_text_of_topics_and_channels(own_broker):
    broker = own_broker()
    broker.publish("a_topic", b"one", b"two")
    broker.control("create", "b_topic", "channel")
    broker.publish("b_topic", b"one")
    wait_until(lambda: broker.channel_stats("b_topic", "channel")["depth"] == 1)
    broker.control("pause", "b_topic")
    long = "a_topic_with_a_name_of_more_than_fifteen"
    broker.control("create", long, "a_channel_with_a_name_of_more_than_25")
    broker.control("create", long, "paused")
    broker.control("pause", long, "paused")
    whole = text(broker)
    topics = whole.split("\nTopics:\n")[1].split("\n\nProducers: ")[0]
    # Our nsqd adds a line about the lag.
    topics = re.sub(r"\n +oldest: .*", "", topics)
    counts = "depth: 0     be-depth: 0     inflt: 0    def: 0    re-q: 0     timeout: 0    "
    one_ready = counts.replace("depth: 0", "depth: 1", 1)
    assert topics == "\n".join(
        [
            "   [a_topic        ] depth: 2     be-depth: 0     msgs: 2        e2e%: ",
            "",
            f"   [{long}] depth: 0     be-depth: 0     msgs: 0        e2e%: ",
            f"      [a_channel_with_a_name_of_more_than_25] {counts} msgs: 0        e2e%: ",
            f"   *P [paused                   ] {counts} msgs: 0        e2e%: ",
            "",
            "*P [b_topic        ] depth: 0     be-depth: 0     msgs: 1        e2e%: ",
            f"      [channel                  ] {one_ready} msgs: 1        e2e%: ",
        ]
    )
    assert whole.endswith("\n\nProducers: None\n")


def test_case_144_text_of_consumers(broker, topic, channel):
    with broker.connect() as connection:
        connection.identify(hostname="h", user_agent="ua/1")
        connection.sub(topic, channel, rdy=2)
        broker.publish(topic, b"one", b"two")
        connection.fin(connection.read_message().id)
        connection.barrier()
        port = connection.local_address.split(":")[1]
        line = line_of(text(broker, f"topic={topic}"), f"h:{port}")
    name = f"h:{port} ua/1"
    assert re.fullmatch(
        rf"        \[V2 {re.escape(name.ljust(21))}\] state: 3 inflt: 1    rdy: 2    fin: 1        "
        r"re-q: 0        msgs: 2        connected: \d+s",
        line,
    )


def test_case_144_text_of_producers(broker, topic, channel):
    """A client that publishes is shown as a producer, also in its channel."""
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.mpub(topic, [b"one", b"two", b"three"])
        port = connection.local_address.split(":")[1]
        whole = text(broker, f"topic={topic}&include_mem=0")
    name = f"127.0.0.1:{port} ".ljust(21)
    form = rf"\[V2 {re.escape(name)}\] msgs: 3        topics: {topic}=3 connected: \d+s"
    in_channel, producers = whole.split("\nProducers:\n")
    assert re.search(rf"^        {form}$", in_channel, re.MULTILINE)
    assert re.search(rf"^   {form}$", producers, re.MULTILINE)


def test_case_144_text_has_latency_percentiles(shared_broker, topic, channel):
    broker = shared_broker(e2e_processing_latency_percentile=(0.99, 0.5))
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=10)
        broker.publish(topic, *([b"body"] * 20))
        connection.read_messages(20, finish=True)
        connection.barrier()
    whole = text(broker, f"topic={topic}")
    for part in (f"[{topic}", f"[{channel}"):
        assert re.search(r"e2e%: \d+\.\d(s|ms|us|ns), \d+\.\d(s|ms|us|ns)$", line_of(whole, part))


# Producers


def producer_of(found, connection):
    return producer_at(found, connection.local_address)


def producer_at(found, address):
    matching = [one for one in found["producers"] or [] if one["remote_address"] == address]
    return matching[0] if matching else None


def test_case_151_producers_are_the_connections_that_have_published(broker, topic):
    with broker.connect() as producer, broker.connect() as idle:
        idle.identify()
        producer.identify(client_id="p", hostname="h", user_agent="u")
        assert producer_of(stats(broker), producer) is None
        producer.pub(topic, b"one")
        producer.mpub(topic, [b"two", b"three"])
        producer.dpub(topic, 1000, b"four")
        found = stats(broker)
        assert producer_of(found, idle) is None
        one = producer_of(found, producer)
        assert (one["client_id"], one["hostname"], one["user_agent"], one["state"]) == ("p", "h", "u", 0)
        assert one["pub_counts"] == [{"topic": topic, "count": 4}]
        assert list(one).index("user_agent") < list(one).index("pub_counts") < list(one).index("tls")
        assert_shape(one, CLIENT)
    wait_until(lambda: producer_at(stats(broker), one["remote_address"]) is None)


def test_case_151_a_client_that_consumes_too_is_in_both_places(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.pub(topic, b"x")
        found = stats(broker, f"&topic={topic}")
        (client,) = found["topics"][0]["channels"][0]["clients"]
        assert client["pub_counts"] == [{"topic": topic, "count": 1}]
        assert producer_of(found, connection)["pub_counts"] == client["pub_counts"]


def test_case_151_with_a_topic_filter_pub_counts_are_those_of_the_topic(broker, topic):
    with broker.connect() as connection:
        connection.pub(topic, b"x")
        for _ in range(3):
            connection.pub(f"{topic}_b", b"x")
        found = producer_of(stats(broker, f"&topic={topic}_b"), connection)
        assert found["pub_counts"] == [{"topic": f"{topic}_b", "count": 3}]
        # With an unknown topic there is nothing at all.
        assert stats(broker, "&topic=no_such_topic")["producers"] is None


@pytest.mark.deviation("NSQ shows one of the topics, picked at random")
def test_case_151_without_a_filter_pub_counts_have_every_topic(broker, topic):
    with broker.connect() as connection:
        connection.pub(topic, b"x")
        connection.mpub(f"{topic}_b", [b"x", b"y"])
        found = producer_of(stats(broker), connection)
        expected = [{"topic": topic, "count": 1}, {"topic": f"{topic}_b", "count": 2}]
        assert sorted(found["pub_counts"], key=lambda one: one["topic"]) == expected
        port = connection.local_address.split(":")[1]
        line = line_of(text(broker, ""), f":{port} ")
    assert re.search(rf"\] msgs: 3        topics: {topic}=1,{topic}_b=2 connected: \d+s$", line)


def test_publishing_by_http_adds_no_producer(broker, topic):
    with broker.http_connect() as connection:
        connection.request("POST", f"/pub?topic={topic}", b"x").expect_ok()
        host, port = connection.socket.getsockname()
        producers = stats(broker)["producers"] or []
        assert f"{host}:{port}" not in [one["remote_address"] for one in producers]


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
