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


@pytest.mark.parametrize("line", ["SUB", "SUB only_a_topic"])
def test_case_049_missing_parameters_are_fatal(broker, line):
    with broker.connect() as connection:
        connection.command(line)
        connection.expect_fatal("E_INVALID SUB insufficient number of parameters")


def test_case_050_bad_topic_name_is_fatal(broker):
    with broker.connect() as connection:
        connection.command("SUB", "t!", "c")
        connection.expect_fatal('E_BAD_TOPIC SUB topic name "t!" is not valid')


def test_case_050_bad_channel_name_is_fatal(broker):
    with broker.connect() as connection:
        connection.command("SUB", "t", "c!")
        connection.expect_fatal('E_BAD_CHANNEL SUB channel name "c!" is not valid')


def test_case_050_two_spaces_make_an_empty_topic_name(broker):
    with broker.connect() as connection:
        connection.send(b"SUB  c d\n")
        connection.expect_fatal('E_BAD_TOPIC SUB topic name "" is not valid')


@pytest.mark.parametrize(
    "name",
    [
        "test",
        "test-with_period.",
        "a",
        ".",
        "-",
        "_",
        "a" * 64,
        "a#ephemeral",
        "a" * 54 + "#ephemeral",
        "0A.z",
    ],
)
def test_case_051_valid_names_for_topics_and_channels(broker, name):
    with broker.connect() as connection:
        connection.sub(name, name)


@pytest.mark.parametrize(
    "name",
    [
        "a" * 65,
        "a" * 55 + "#ephemeral",
        "#ephemeral",
        "test:ephemeral",
        "a#ephemeral#ephemeral",
        "a#Ephemeral",
        "a#",
        "a/b",
        "ä",
        "a*",
    ],
)
def test_case_051_invalid_names_for_topics_and_channels(broker, name):
    with broker.connect() as connection:
        connection.command("SUB", name, "c")
        connection.expect_fatal(f'E_BAD_TOPIC SUB topic name "{name}" is not valid')
    with broker.connect() as connection:
        connection.command("SUB", "t", name)
        connection.expect_fatal(f'E_BAD_CHANNEL SUB channel name "{name}" is not valid')


def test_case_052_second_sub_is_fatal(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.command("SUB", topic, channel)
        connection.expect_fatal("E_INVALID cannot SUB in current state")


def test_case_052_the_state_is_looked_at_before_the_parameters(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.command("SUB", "t!")
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
    """A topic of the metadata file without whatever we keep there beyond NSQ's keys."""
    channels = [{key: channel[key] for key in ("name", "paused")} for channel in topic["channels"]]
    return {"name": topic["name"], "paused": topic["paused"], "channels": channels}


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        (b't"x', r'"t\"x"'),
        (b"t\\x", r'"t\\x"'),
        (b"t\x01x", r'"t\x01x"'),
        (b"t\x00", r'"t\x00"'),
        (b"t\x7f", r'"t\x7f"'),
        (b"\a\b\f\v\t", r'"\a\b\f\v\t"'),
        (b"t\rx", r'"t\rx"'),
        (b"t\xff", r'"t\xff"'),
        (b"t\xc3", r'"t\xc3"'),
        (b"\xed\xa0\x80", r'"\xed\xa0\x80"'),
        ("tä".encode(), '"tä"'),
        ("日本".encode(), '"日本"'),
        ("🙂".encode(), '"🙂"'),
        ("\u00a0".encode(), r'"\u00a0"'),
        ("\u00ad".encode(), r'"\u00ad"'),
        ("\u200b".encode(), r'"\u200b"'),
        ("\u3000".encode(), r'"\u3000"'),
        ("\ufeff".encode(), r'"\ufeff"'),
        ("\ufffd".encode(), '"\ufffd"'),
        ("\x80".encode(), r'"\u0080"'),
        ("\U0010ffff".encode(), r'"\U0010ffff"'),
        ("\U000e0001".encode(), r'"\U000e0001"'),
        (b"it's", '"it\'s"'),
    ],
)
def test_case_055_odd_bytes_of_a_name_are_quoted_as_go_does(broker, name, quoted):
    with broker.connect() as connection:
        connection.command("SUB", name, "c")
        connection.expect_fatal(f"E_BAD_TOPIC SUB topic name {quoted} is not valid")
    with broker.connect() as connection:
        connection.command("PUB", name, body=b"body")
        connection.expect_fatal(f"E_BAD_TOPIC PUB topic name {quoted} is not valid")
