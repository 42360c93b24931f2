"""Group K: topics and channels by HTTP, /ping, /info, /debug."""

from __future__ import annotations

import resource
import shutil
import time
from urllib.parse import quote

import pytest

from tests.support import JSON, TEXT, wait_until

ACTIONS = ("create", "delete", "empty", "pause", "unpause")
OTHER_ACTIONS = ACTIONS[1:]
INFO = {
    "version": str,
    "broadcast_address": str,
    "hostname": str,
    "http_port": int,
    "tcp_port": int,
    "start_time": int,
    "max_heartbeat_interval": int,
    "max_output_buffer_size": int,
    "max_output_buffer_timeout": int,
    "max_deflate_level": int,
    "topology_zone": str,
    "topology_region": str,
}
NEWER_INFO = ("topology_zone", "topology_region")


def post(broker, kind, action, **query):
    text = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    return broker.request("POST", f"/{kind}/{action}" + (f"?{text}" if text else ""))


# Topics


def test_case_134_create_a_topic(broker, topic):
    post(broker, "topic", "create", topic=topic).expect_empty()
    stats = broker.topic_stats(topic)
    assert (stats["depth"], stats["channels"], stats["paused"]) == (0, [], False)
    # Again, with a message in it.
    broker.publish(topic, b"x")
    post(broker, "topic", "create", topic=topic).expect_empty()
    assert broker.topic_stats(topic)["depth"] == 1


def test_case_134_create_a_channel(broker, topic, channel):
    post(broker, "topic", "create", topic=topic)
    post(broker, "channel", "create", topic=topic, channel=channel).expect_empty()
    post(broker, "channel", "create", topic=topic, channel=channel).expect_empty()
    assert broker.channel_stats(topic, channel)["depth"] == 0


def test_case_134_creating_a_channel_does_not_create_its_topic(broker, topic, channel):
    post(broker, "channel", "create", topic=topic, channel=channel).expect_error(404, "TOPIC_NOT_FOUND")
    assert broker.topic_stats(topic) is None


def test_case_134_ephemeral_topics_and_channels_can_be_created(broker, topic):
    name = f"{topic}#ephemeral"
    post(broker, "topic", "create", topic=name).expect_empty()
    post(broker, "channel", "create", topic=name, channel="c#ephemeral").expect_empty()
    assert broker.channel_stats(name, "c#ephemeral")["client_count"] == 0


def test_case_134_the_body_is_read_and_ignored(broker, topic):
    with broker.http_connect() as connection:
        for body in (b"", b"x" * 100_000, [b"x" * 50_000] * 4):
            connection.request("POST", f"/topic/create?topic={topic}", body).expect_empty()


@pytest.mark.parametrize("action", ACTIONS)
def test_case_138_every_topic_endpoint_needs_a_topic(broker, action):
    post(broker, "topic", action).expect_error(400, "MISSING_ARG_TOPIC")
    post(broker, "topic", action, channel="c").expect_error(400, "MISSING_ARG_TOPIC")
    for query in ("topic=%zz", "topic=a;b", "%"):
        answer = broker.request("POST", f"/topic/{action}?{query}")
        answer.expect_error(400, "INVALID_REQUEST")


@pytest.mark.parametrize("action", ACTIONS)
def test_case_138_a_bad_topic_name_is_invalid_or_merely_not_there(broker, action):
    for name in ("", "t!", "t\r\nX: y"):
        answer = post(broker, "topic", action, topic=name)
        if action in ("create", "empty"):
            answer.expect_error(400, "INVALID_TOPIC")
        else:
            answer.expect_error(404, "TOPIC_NOT_FOUND")


@pytest.mark.parametrize("action", OTHER_ACTIONS)
def test_case_138_an_unknown_topic_is_not_found(broker, topic, action):
    post(broker, "topic", action, topic=topic).expect_error(404, "TOPIC_NOT_FOUND")
    assert broker.topic_stats(topic) is None


def test_case_138_delete_a_topic(broker, topic, channel):
    broker.control("create", topic, channel)
    broker.publish(topic, b"x")
    with broker.connect() as connection:
        connection.sub(topic, channel)
        post(broker, "topic", "delete", topic=topic).expect_empty()
        connection.expect_closed()
    assert broker.topic_stats(topic) is None
    post(broker, "topic", "delete", topic=topic).expect_error(404, "TOPIC_NOT_FOUND")
    # A topic of that name starts empty.
    broker.publish(topic, b"new")
    assert broker.topic_stats(topic)["message_count"] == 1


def test_case_138_empty_a_topic(broker, topic, channel):
    broker.publish(topic, b"one", b"two")
    post(broker, "topic", "empty", topic=topic).expect_empty()
    stats = broker.topic_stats(topic)
    assert (stats["depth"], stats["message_count"]) == (0, 2)
    # Messages that reached a channel no longer belong to the topic.
    broker.control("create", topic, channel)
    broker.publish(topic, b"three")
    wait_until(lambda: broker.channel_stats(topic, channel)["depth"] == 1)
    post(broker, "topic", "empty", topic=topic).expect_empty()
    assert broker.channel_stats(topic, channel)["depth"] == 1


def test_case_135_a_paused_topic_keeps_its_messages(broker, topic, channel):
    broker.control("create", topic, channel)
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=5)
        post(broker, "topic", "pause", topic=topic).expect_empty()
        assert broker.topic_stats(topic)["paused"]
        broker.request("POST", f"/pub?topic={topic}", b"x").expect_ok()
        connection.expect_silence(0.2)
    stats = broker.topic_stats(topic)
    assert (stats["depth"], stats["channels"][0]["depth"], stats["paused"]) == (1, 0, True)
    # A second time has no effect.
    post(broker, "topic", "pause", topic=topic).expect_empty()
    assert broker.topic_stats(topic)["paused"]


def test_case_136_unpause_lets_the_messages_move_to_the_channel(broker, topic, channel):
    broker.control("create", topic, channel)
    post(broker, "topic", "pause", topic=topic).expect_empty()
    broker.publish(topic, b"one", b"two")
    assert broker.topic_stats(topic)["depth"] == 2
    post(broker, "topic", "unpause", topic=topic).expect_empty()
    wait_until(lambda: broker.channel_stats(topic, channel)["depth"] == 2)
    stats = broker.topic_stats(topic)
    assert (stats["depth"], stats["paused"]) == (0, False)
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=2)
        assert {message.body for message in connection.read_messages(2)} == {b"one", b"two"}
    post(broker, "topic", "unpause", topic=topic).expect_empty()


def test_case_135_the_metadata_is_on_disk_before_the_answer(broker, topic, channel):
    def paused():
        found = next(one for one in broker.metadata()["topics"] if one["name"] == topic)
        return found["paused"], [one["paused"] for one in found["channels"]]

    broker.control("create", topic, channel)
    post(broker, "topic", "pause", topic=topic).expect_empty()
    assert paused()[0]
    post(broker, "channel", "pause", topic=topic, channel=channel).expect_empty()
    assert paused() == (True, [True])
    post(broker, "topic", "unpause", topic=topic).expect_empty()
    assert paused() == (False, [True])
    post(broker, "channel", "unpause", topic=topic, channel=channel).expect_empty()
    assert paused() == (False, [False])


# Channels


@pytest.mark.parametrize("action", ACTIONS)
def test_case_139_channel_endpoints_check_in_order(broker, topic, action):
    broker.control("create", topic)

    def check(code, status=400, **query):
        post(broker, "channel", action, **query).expect_error(status, code)

    check("MISSING_ARG_TOPIC")
    check("MISSING_ARG_TOPIC", channel="c")
    check("INVALID_ARG_TOPIC", topic="t!")
    check("INVALID_ARG_TOPIC", topic="", channel="c")
    check("INVALID_ARG_TOPIC", topic="t!", channel="c!")
    check("MISSING_ARG_CHANNEL", topic=topic)
    check("MISSING_ARG_CHANNEL", topic="no_such_topic")
    check("INVALID_ARG_CHANNEL", topic=topic, channel="c!")
    check("INVALID_ARG_CHANNEL", topic=topic, channel="")
    check("INVALID_ARG_CHANNEL", topic="no_such_topic", channel="n" * 65)
    check("TOPIC_NOT_FOUND", 404, topic="no_such_topic", channel="c")
    if action != "create":
        check("CHANNEL_NOT_FOUND", 404, topic=topic, channel="c")
    broker.request("POST", f"/channel/{action}?topic=%zz").expect_error(400, "INVALID_REQUEST")


def test_case_139_empty_a_channel(broker, topic, channel):
    broker.control("create", topic, channel)
    broker.publish(topic, b"one", b"two", b"three")
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        connection.read_message()
        connection.rdy(0)
        connection.dpub(topic, 60_000, b"later")
        connection.barrier()
        wait_until(lambda: broker.channel_stats(topic, channel)["deferred_count"] == 1)
        post(broker, "channel", "empty", topic=topic, channel=channel).expect_empty()
        stats = broker.channel_stats(topic, channel)
    assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (0, 0, 0)
    assert stats["message_count"] == 4


def test_case_137_pause_and_unpause_a_channel(broker, topic, channel):
    broker.control("create", topic, channel)
    broker.control("create", topic, "other")
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        post(broker, "channel", "pause", topic=topic, channel=channel).expect_empty()
        assert broker.channel_stats(topic, channel)["paused"]
        assert not broker.channel_stats(topic, "other")["paused"]
        assert not broker.topic_stats(topic)["paused"]
        broker.publish(topic, b"x")
        connection.expect_silence(0.2)
        wait_until(lambda: broker.channel_stats(topic, channel)["depth"] == 1)
        post(broker, "channel", "unpause", topic=topic, channel=channel).expect_empty()
        assert connection.read_message().body == b"x"
    assert not broker.channel_stats(topic, channel)["paused"]


def test_case_137_delete_a_channel(broker, topic, channel):
    broker.control("create", topic, channel)
    broker.control("create", topic, "other")
    with broker.connect() as connection:
        connection.sub(topic, channel)
        post(broker, "channel", "delete", topic=topic, channel=channel).expect_empty()
        connection.expect_closed()
    assert broker.channel_stats(topic, channel) is None
    assert broker.channel_stats(topic, "other") is not None
    answer = post(broker, "channel", "delete", topic=topic, channel=channel)
    answer.expect_error(404, "CHANNEL_NOT_FOUND")


# /info, /ping, /debug


def test_case_145_info_has_every_key_in_order(shared_broker):
    broker = shared_broker(
        broadcast_address="b.example.com",
        max_deflate_level=4,
        max_heartbeat_interval=90.5,
        max_output_buffer_size=12_345,
        max_output_buffer_timeout=1.5,
    )
    info = broker.request("GET", "/info").expect_json()
    known = [key for key in INFO if key in info]
    # The released NSQ 1.3.0 has no topologies yet.
    assert known == [key for key in INFO if key in info or not (broker.is_reference and key in NEWER_INFO)]
    assert [key for key in info if key in INFO] == known
    assert {key: type(info[key]) for key in known} == {key: INFO[key] for key in known}
    assert info["version"].count(".") == 2
    assert (info["tcp_port"], info["http_port"]) == (broker.address[1], broker.http_address[1])
    assert info["broadcast_address"] == "b.example.com"
    assert 0 <= time.time() - info["start_time"] < 3600
    assert info["start_time"] == broker.request("GET", "/stats?format=json").json()["start_time"]
    # Durations are nanoseconds.
    assert info["max_heartbeat_interval"] == 90_500_000_000
    assert info["max_output_buffer_timeout"] == 1_500_000_000
    assert (info["max_output_buffer_size"], info["max_deflate_level"]) == (12_345, 4)


@pytest.mark.deviation("NSQ 1.3.0 as released has no topologies")
def test_case_145_info_tells_the_topology(shared_broker):
    broker = shared_broker(topology_zone="z1", topology_region="r1")
    info = broker.request("GET", "/info").expect_json()
    assert (info["topology_zone"], info["topology_region"]) == ("z1", "r1")


def test_case_145_info_has_the_real_ports_not_those_that_are_broadcast(shared_broker):
    broker = shared_broker(broadcast_tcp_port=1234, broadcast_http_port=1235)
    info = broker.request("GET", "/info").expect_json()
    assert (info["tcp_port"], info["http_port"]) == (broker.address[1], broker.http_address[1])


def test_case_146_ping(broker):
    answer = broker.request("GET", "/ping")
    assert (answer.status, answer.body, answer.header("Content-Type")) == (200, b"OK", TEXT)
    assert answer.header("X-NSQ-Content-Type") is None


def break_disk(broker):
    """Every write to a new or longer file fails."""
    if broker.is_reference:
        # Its files are opened as they are needed.
        shutil.move(broker.data_path, f"{broker.data_path}.away")
    else:
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (4 << 10, resource.RLIM_INFINITY))


def mend_disk(broker):
    if broker.is_reference:
        shutil.move(f"{broker.data_path}.away", broker.data_path)
    else:
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_case_146_ping_and_stats_tell_of_a_failed_write_until_the_next_good_one(own_process, topic):
    broker = own_process(mem_queue_size=0)
    pub = f"/pub?topic={topic}"
    broker.control("create", topic)
    assert broker.request("GET", "/ping").body == b"OK"
    break_disk(broker)
    try:
        body = b"x" * 50_000
        refused = wait_until(
            lambda: (answer := broker.request("POST", pub, body)).status != 200 and answer, interval=0
        )
        refused.expect_error(503, "EXITING")
        broker.request("POST", f"/mpub?topic={topic}", body + b"\n" + body).expect_error(503, "EXITING")
        broker.request("POST", f"{pub}&defer=1000", body).expect_error(503, "EXITING")
        ping = broker.request("GET", "/ping")
        assert (ping.status, ping.header("Content-Type")) == (500, TEXT)
        assert ping.header("X-NSQ-Content-Type") is None
        assert ping.body.startswith(b"NOK - ") and len(ping.body) > 6
        stats = broker.request("GET", "/stats?format=json&include_mem=false").expect_json()
        assert stats["health"] == ping.body.decode()
        text = broker.request("GET", "/stats")
        assert f"\nHealth: {ping.body.decode()}\n".encode() in text.body
    finally:
        mend_disk(broker)
    # Nothing was written since, so it still fails.
    assert broker.request("GET", "/ping").status == 500 or not broker.is_reference
    broker.request("POST", pub, b"fine").expect_ok()
    wait_until(lambda: broker.request("GET", "/ping").body == b"OK")
    assert broker.stats()["health"] == "OK"


@pytest.mark.deviation("NSQ does the work, then answers 500 INTERNAL_ERROR")
def test_debug_freememory_answers_200(broker):
    broker.request("POST", "/debug/freememory").expect_empty()


@pytest.mark.deviation("it turns a knob of Go's runtime")
def test_debug_setblockrate_is_absent(broker):
    broker.request("PUT", "/debug/setblockrate?rate=10").expect_error(404, "NOT_FOUND")


def test_debug_has_an_index_behind_its_slash(broker):
    answer = broker.request("GET", "/debug/pprof")
    assert (answer.status, answer.header("Location")) == (301, "/debug/pprof/")
    answer = broker.request("GET", "/debug/pprof/")
    assert answer.status == 200 and answer.header("Content-Type") != JSON
    assert answer.header("X-NSQ-Content-Type") is None


@pytest.mark.parametrize("name", ["mutex", "allocs", "trace", "nope"])
def test_debug_profiles_that_do_not_exist(broker, name):
    broker.request("GET", f"/debug/pprof/{name}").expect_error(404, "NOT_FOUND")
