"""Group L: which channel gets which messages, pause, empty, delete."""

from __future__ import annotations

import os

import pytest

from tests.support import unique_name, wait_until


def received(broker, topic, channel, count: int) -> list[bytes]:
    """Bodies of exactly this many messages of the channel, finished, in order."""
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=max(1, count))
        messages = connection.read_messages(count, finish=True)
        connection.barrier()
        connection.expect_silence(0.1)
        connection.cls()  # so that nothing more is sent here before the end is noticed
        return [message.body for message in messages]


def test_case_153_first_channel_gets_what_the_topic_kept_and_the_second_nothing(broker, topic):
    bodies = [b"%d" % number for number in range(5)]
    broker.publish(topic, *bodies)
    assert broker.topic_stats(topic)["depth"] == 5
    first, second = unique_name("first"), unique_name("second")
    broker.control("create", topic, first)
    wait_until(lambda: broker.channel_stats(topic, first)["depth"] == 5)
    assert broker.topic_stats(topic)["depth"] == 0
    broker.control("create", topic, second)
    assert sorted(received(broker, topic, first, 5)) == bodies
    assert received(broker, topic, second, 0) == []
    broker.publish(topic, b"from now on")
    assert received(broker, topic, second, 1) == received(broker, topic, first, 1) == [b"from now on"]


def test_case_154_after_its_last_channel_the_topic_keeps_messages_again(broker, topic, channel):
    broker.control("create", topic, channel)
    broker.publish(topic, b"lost with the channel")
    wait_until(lambda: broker.channel_stats(topic, channel)["depth"] == 1)
    broker.control("delete", topic, channel)
    assert broker.topic_stats(topic)["channels"] == []
    broker.publish(topic, b"one", b"two")
    assert broker.topic_stats(topic)["depth"] == 2
    assert sorted(received(broker, topic, unique_name("next"), 2)) == [b"one", b"two"]


def test_case_155_every_channel_gets_every_message(broker, topic):
    channels = unique_name("one"), unique_name("two")
    for channel in channels:
        broker.control("create", topic, channel)
    bodies = [b"%02d" % number for number in range(20)]
    broker.publish(topic, *bodies)
    for channel in channels:
        wait_until(lambda channel=channel: broker.channel_stats(topic, channel)["depth"] == 20)
        assert broker.channel_stats(topic, channel)["message_count"] == 20
        assert sorted(received(broker, topic, channel, 20)) == bodies


def test_case_159_empty_clears_queue_in_flight_and_deferred(broker, topic, channel):
    broker.control("create", topic, channel)
    broker.publish(topic, *(b"%d" % number for number in range(10)))
    with broker.connect() as connection, broker.connect() as publisher:
        publisher.dpub(topic, 60_000, b"deferred")
        connection.sub(topic, channel, rdy=3)
        messages = connection.read_messages(3)
        connection.req(messages[0].id, 60_000)
        messages[0] = connection.read_message()
        stats = wait_until(lambda: has(broker.channel_stats(topic, channel), deferred_count=2))
        assert (stats["in_flight_count"], stats["depth"], stats["message_count"]) == (3, 6, 11)

        broker.control("empty", topic, channel)
        stats = broker.channel_stats(topic, channel)
        assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (0, 0, 0)
        assert (stats["message_count"], stats["requeue_count"], stats["timeout_count"]) == (11, 1, 0)
        (client,) = stats["clients"]
        assert (client["in_flight_count"], client["ready_count"], client["message_count"]) == (0, 3, 4)
        for message in messages:
            connection.fin(message.id)
            connection.expect_error(f"E_FIN_FAILED FIN {message.id.decode()} failed ID not in flight")

        # Its clients get messages again without a new RDY.
        publisher.mpub(topic, [b"a", b"b", b"c", b"d"])
        assert sorted(message.body for message in connection.read_messages(3)) == [b"a", b"b", b"c"]
        connection.expect_silence(0.1)


def has(stats, **expected):
    """The stats if they have these values, for wait_until."""
    return stats if stats and all(stats[key] == value for key, value in expected.items()) else None


def test_case_159_empty_topic_leaves_its_channels_alone(broker, topic, channel):
    broker.control("create", topic, channel)
    broker.publish(topic, b"at the channel")
    wait_until(lambda: broker.channel_stats(topic, channel)["depth"] == 1)
    broker.control("pause", topic)
    broker.publish(topic, b"at the topic", b"at the topic")
    assert broker.topic_stats(topic)["depth"] == 2
    broker.control("empty", topic)
    assert broker.topic_stats(topic)["depth"] == 0
    broker.control("unpause", topic)
    assert received(broker, topic, channel, 1) == [b"at the channel"]


@pytest.mark.parametrize("what", ["topic", "channel"])
def test_case_160_delete_removes_everything_and_disconnects_the_clients(broker, topic, channel, what):
    broker.publish(topic, *(b"%d" % number for number in range(5)))
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=2)
        connection.read_messages(2)
        broker.control("delete", topic, channel if what == "channel" else "")
        connection.expect_closed()
    assert broker.channel_stats(topic, channel) is None
    if what == "topic":
        assert broker.topic_stats(topic) is None
    broker.publish(topic, b"anew")
    assert received(broker, topic, channel, 1) == [b"anew"]


def test_case_160_deleted_topic_leaves_the_metadata_and_its_files(broker, topic, channel):
    broker.publish(topic, b"one")
    broker.control("create", topic, channel)
    wait_until(lambda: topic in names(broker))
    broker.control("delete", topic)
    if broker.is_reference:
        # NSQ may write the metadata just before the topic is removed; any other change corrects it.
        broker.control("create", unique_name("another"))
    wait_until(lambda: topic not in names(broker))
    wait_until(lambda: not any(topic in path for path in paths_below(broker.data_path)))


def paths_below(directory) -> list[str]:
    # Not rglob, which fails if a directory is removed meanwhile.
    walk = os.walk(directory)
    return [f"{path}/{name}" for path, directories, files in walk for name in directories + files]


def names(broker) -> list[str]:
    return [topic["name"] for topic in broker.metadata()["topics"]]


def test_case_160_clients_of_other_channels_stay(broker, topic):
    gone, kept = unique_name("gone"), unique_name("kept")
    with broker.connect() as connection:
        connection.sub(topic, kept, rdy=1)
        broker.control("create", topic, gone)
        broker.control("delete", topic, gone)
        broker.publish(topic, b"still here")
        assert connection.read_message().body == b"still here"
