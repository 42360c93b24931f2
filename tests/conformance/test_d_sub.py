"""Group D: SUB, and the names of topics and channels."""

from __future__ import annotations

import pytest

from tests.support import unique_name, wait_until


def test_case_048_nothing_is_delivered_before_rdy(broker, topic, channel):
    broker.publish(topic, b"waiting")
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.expect_silence(0.3)
        (client,) = broker.channel_stats(topic, channel)["clients"]
        assert client["ready_count"] == 0
        connection.rdy(1)
        assert connection.read_message().body == b"waiting"


def test_case_049_missing_parameters_are_fatal(broker):
    with broker.connect() as connection:
        connection.command("SUB only_a_topic")
        connection.expect_fatal("E_INVALID SUB insufficient number of parameters")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"SUB t! c\n", 'E_BAD_TOPIC SUB topic name "t!" is not valid'),
        (b"SUB t c!\n", 'E_BAD_CHANNEL SUB channel name "c!" is not valid'),
        (b"SUB  c d\n", 'E_BAD_TOPIC SUB topic name "" is not valid'),
    ],
)
def test_case_050_bad_names_are_fatal(broker, line, error):
    with broker.connect() as connection:
        connection.send(line)
        connection.expect_fatal(error)


@pytest.mark.parametrize("name", ["test-with_period.", "a" * 64, "a" * 54 + "#ephemeral"])
def test_case_051_valid_names_for_topics_and_channels(broker, name):
    with broker.connect() as connection:
        connection.sub(name, name)


@pytest.mark.parametrize("name", ["a" * 65, "#ephemeral", "a#Ephemeral", "a/b"])
def test_case_051_invalid_names_for_topics_and_channels(broker, name):
    with broker.connect() as connection:
        connection.command("SUB", name, "c")
        connection.expect_fatal(f'E_BAD_TOPIC SUB topic name "{name}" is not valid')
    with broker.connect() as connection:
        connection.command("SUB", "t", name)
        connection.expect_fatal(f'E_BAD_CHANNEL SUB channel name "{name}" is not valid')


@pytest.mark.parametrize("params", [("t", "c"), ("t!",)])
def test_case_052_second_sub_is_fatal_with_any_parameters(broker, topic, channel, params):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.command("SUB", *params)
        connection.expect_fatal("E_INVALID cannot SUB in current state")


def test_case_053_consumers_of_a_channel_are_limited(small_broker, topic, channel):
    with small_broker.connect() as first:
        first.sub(topic, channel)
        with small_broker.connect() as second:
            second.command("SUB", topic, channel)
            text = f"E_SUB_FAILED SUB failed consumers for {topic}:{channel} exceeds limit of 1"
            second.expect_fatal(text)
        with small_broker.connect() as elsewhere:
            elsewhere.sub(topic, unique_name("other"))
    wait_until(lambda: small_broker.channel_stats(topic, channel)["client_count"] == 0)
    with small_broker.connect() as next_one:
        next_one.sub(topic, channel)


def test_case_054_sub_creates_topic_and_channel(broker, topic, channel):
    assert broker.topic_stats(topic) is None
    with broker.connect() as connection:
        connection.sub(topic, channel)
        assert broker.channel_stats(topic, channel)["client_count"] == 1
    expected = {"name": topic, "paused": False, "channels": [{"name": channel, "paused": False}]}

    def listed():
        return [found for found in map(plain, broker.metadata()["topics"]) if found["name"] == topic]

    wait_until(lambda: listed() == [expected], what="topic and channel in nsqd.dat")


def plain(topic: dict) -> dict:
    """A topic of the metadata file, with NSQ's keys only."""
    channels = [{key: channel[key] for key in ("name", "paused")} for channel in topic["channels"]]
    return {"name": topic["name"], "paused": topic["paused"], "channels": channels}


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        (b't"\\\x01\rx', r'"t\"\\\x01\rx"'),
        (b"\a\b\f\v\t\xff", r'"\a\b\f\v\t\xff"'),
        ("tä日🙂".encode(), '"tä日🙂"'),
        ("\u00a0\U0010ffff".encode(), r'"\u00a0\U0010ffff"'),
    ],
)
def test_case_055_odd_bytes_of_a_name_are_quoted_as_go_does(broker, name, quoted):
    with broker.connect() as connection:
        connection.command("SUB", name, "c")
        connection.expect_fatal(f"E_BAD_TOPIC SUB topic name {quoted} is not valid")
    with broker.connect() as connection:
        connection.command("PUB", name, body=b"body")
        connection.expect_fatal(f"E_BAD_TOPIC PUB topic name {quoted} is not valid")
