"""Group M: topics and channels that end in #ephemeral."""

from __future__ import annotations

import pytest

from tests.support import RESPONSE, unique_name, wait_until


@pytest.fixture
def topic() -> str:
    return unique_name("topic") + "#ephemeral"


@pytest.fixture
def channel() -> str:
    return unique_name("channel") + "#ephemeral"


@pytest.fixture
def durable() -> str:
    return unique_name("durable")


def test_case_174_ephemeral_channel_goes_with_its_last_client(broker, durable, channel):
    with broker.connect() as first:
        first.sub(durable, channel)
        with broker.connect() as second:
            second.sub(durable, channel)
        wait_until(lambda: broker.channel_stats(durable, channel)["client_count"] == 1)
    wait_until(lambda: broker.channel_stats(durable, channel) is None)
    assert broker.topic_stats(durable) is not None


def test_case_174_ephemeral_topic_goes_with_its_last_channel(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        broker.publish(topic, b"body")
        connection.fin(connection.read_message().id)
        connection.barrier()
        assert broker.topic_stats(topic)["message_count"] == 1
    wait_until(lambda: broker.topic_stats(topic) is None)


def test_case_174_ephemeral_topic_stays_without_having_had_a_channel(broker, topic):
    broker.publish(topic, b"one", b"two")
    assert broker.topic_stats(topic)["depth"] == 2
    with broker.connect() as connection:
        connection.sub(topic, "c#ephemeral", rdy=2)
        assert len(connection.read_messages(2)) == 2


def test_case_174_ephemeral_topic_stays_while_it_has_a_durable_channel(broker, topic, durable):
    with broker.connect() as connection:
        connection.sub(topic, durable)
    wait_until(lambda: broker.channel_stats(topic, durable)["client_count"] == 0)
    broker.publish(topic, b"body")
    wait_until(lambda: broker.channel_stats(topic, durable)["depth"] == 1)
    broker.control("delete", topic, durable)
    wait_until(lambda: broker.topic_stats(topic) is None)


def test_case_174_ephemeral_channel_made_without_a_client_waits_for_its_first(broker, durable, channel):
    broker.control("create", durable, channel)
    broker.publish(durable, b"body")
    wait_until(lambda: broker.channel_stats(durable, channel)["depth"] == 1)
    with broker.connect() as connection:
        connection.sub(durable, channel, rdy=1)
        assert connection.read_message().body == b"body"
    wait_until(lambda: broker.channel_stats(durable, channel) is None)


def test_case_175_ephemeral_names_are_not_in_the_metadata(broker, topic, channel, durable):
    with broker.connect() as one, broker.connect() as two, broker.connect() as three:
        one.sub(topic, channel)
        two.sub(durable, channel)
        three.sub(topic, durable)
        marker = unique_name("marker")
        broker.control("create", marker)

        def listed():
            return {found["name"]: found["channels"] for found in broker.metadata()["topics"]}

        wait_until(lambda: marker in listed())
        assert topic not in listed()
        assert listed()[durable] == []


def test_case_175_overflow_of_an_ephemeral_topic_is_dropped_with_ok(shared_broker, topic):
    broker = shared_broker(mem_queue_size=5)
    with broker.connect() as connection:
        for number in range(20):
            connection.pub(topic, b"%02d" % number)
        stats = broker.topic_stats(topic)
        assert (stats["depth"], stats["backend_depth"], stats["message_count"]) == (5, 0, 20)
        connection.sub(topic, "c#ephemeral", rdy=20)
        connection.read_messages(5)
        connection.expect_silence(0.3)


def test_case_175_overflow_of_an_ephemeral_channel_is_dropped_with_ok(shared_broker, durable, channel):
    broker = shared_broker(mem_queue_size=5)
    with broker.connect() as connection, broker.connect() as publisher:
        connection.sub(durable, channel)
        for number in range(20):
            publisher.pub(durable, b"%02d" % number)
        stats = wait_until(lambda: depth_is(broker.channel_stats(durable, channel), 5))
        assert (stats["backend_depth"], stats["message_count"]) == (0, 20)
        connection.rdy(20)
        connection.read_messages(5)
        connection.expect_silence(0.3)


def depth_is(stats, depth):
    return stats if stats and stats["depth"] == depth else None


@pytest.mark.deviation("NSQ drops the newest and does not count")
def test_case_175_overflow_drops_the_oldest_and_counts_them(shared_broker, topic, channel, durable):
    broker = shared_broker(mem_queue_size=5)
    newest = [b"15", b"16", b"17", b"18", b"19"]
    with broker.connect() as connection, broker.connect() as publisher:
        publisher.mpub(topic, [b"%02d" % number for number in range(20)])
        assert broker.topic_stats(topic)["dropped_count"] == 15
        connection.sub(topic, "c#ephemeral", rdy=20)
        assert [message.body for message in connection.read_messages(5)] == newest
    with broker.connect() as connection, broker.connect() as publisher:
        connection.sub(durable, channel)
        for number in range(20):
            publisher.pub(durable, b"%02d" % number)
        assert broker.channel_stats(durable, channel)["dropped_count"] == 15
        connection.rdy(20)
        assert [message.body for message in connection.read_messages(5)] == newest


def test_a_message_held_long_on_an_ephemeral_topic_is_still_redelivered(shared_broker, topic, channel):
    broker = shared_broker(mem_queue_size=5)
    with broker.connect() as holder, broker.connect() as other, broker.connect() as publisher:
        holder.sub(topic, channel, rdy=1)
        holder.barrier()
        publisher.pub(topic, b"held")
        held = holder.read_message()
        other.sub(topic, channel, rdy=1)
        for number in range(100):
            publisher.pub(topic, b"%d" % number)
            other.fin(other.read_message().id)
        other.rdy(0)
        other.barrier()
        holder.req(held.id, 0)
        again = holder.read_message()
        assert (again.body, again.attempts) == (b"held", 2)


def test_case_175_nothing_of_an_ephemeral_topic_is_written_to_disk(shared_broker, topic):
    broker = shared_broker(mem_queue_size=5)
    broker.publish(topic, *([b"needle in the data path"] * 20))
    marker = unique_name("marker")
    broker.publish(marker, *([b"durable and on disk"] * 20))
    contents = [path.read_bytes() for path in broker.data_path.rglob("*") if path.is_file()]
    assert not any(b"needle in the data path" in content for content in contents)
    wait_until(
        lambda: any(
            b"durable and on disk" in path.read_bytes()
            for path in broker.data_path.rglob("*")
            if path.is_file()
        )
    )


def test_case_175_ephemerals_are_gone_after_a_restart(own_broker):
    broker = own_broker()
    broker.publish("topic#ephemeral", b"body")
    broker.control("create", "topic", "channel#ephemeral")
    broker.publish("topic", b"body")
    broker.restart()
    assert broker.topic_stats("topic#ephemeral") is None
    assert broker.topic_stats("topic")["channels"] == []


def test_case_176_sub_right_after_the_last_client_left_works(broker, topic, channel, durable):
    for name in (topic, durable) * 30:
        with broker.connect() as connection:
            connection.command("SUB", name, channel)
            frame = connection.read_frame()
            # NSQ retries in one of the two race conditions with a disappearing channel, not in the
            # other.
            if not (broker.is_reference and frame.data == b"E_SUB_FAILED SUB failed exiting"):
                assert frame == (RESPONSE, b"OK")
    wait_until(lambda: broker.channel_stats(durable, channel) is None)
    with broker.connect() as connection:
        connection.sub(durable, channel, rdy=1)
        connection.barrier()
        broker.publish(durable, b"body")
        assert connection.read_message().body == b"body"
