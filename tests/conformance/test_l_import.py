"""Group L: a data path with disk queues in the format of NSQ's nsqd."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import TestBroker
from tests.support.go_queue import GO_TIME_NS, GoMessage, GoQueue, go_messages, write_metadata


def read_all(broker: TestBroker, topic: str, channel: str, count: int):
    """Read and finish exactly this many messages; none may follow."""
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=100)
        messages = connection.read_messages(count, finish=True)
        connection.barrier()
        connection.expect_silence(0.2)
        connection.cls()
        return messages


def write_directory(path: Path) -> None:
    """A topic with three channels: one has a backlog, one is half consumed, one idle."""
    write_metadata(path, {"topic": ["full", "half", "idle"]})
    GoQueue(path, "topic").write(*go_messages(5, "topic ")).save()
    GoQueue(path, "topic", "full").write(*go_messages(40, "full "), GoMessage(b"tried", 3)).save()
    GoQueue(path, "topic", "half").write(*go_messages(100, "half "), max_bytes=500).consume(60).save()
    GoQueue(path, "topic", "idle").write(*go_messages(10)).consume(10).save()


EXPECTED = {
    "full": [*go_messages(40, "full "), GoMessage(b"tried", 3), *go_messages(5, "topic ")],
    "half": go_messages(40, "half ", start=60) + go_messages(5, "topic "),
    "idle": go_messages(5, "topic "),
}


def test_case_162_the_messages_of_a_go_data_directory_reach_their_channels(tmp_path: Path, own_broker):
    write_directory(tmp_path)
    broker = own_broker(data_path=tmp_path)
    for channel, messages in EXPECTED.items():
        if not broker.is_reference:  # there the topic's messages reach the channels a little later
            assert broker.channel_stats("topic", channel)["depth"] == len(messages)
        got = read_all(broker, "topic", channel, len(messages))
        assert sorted((m.body, m.attempts, m.timestamp_ns) for m in got) == sorted(
            (m.body, m.attempts + 1, m.timestamp_ns) for m in messages
        )
        assert broker.channel_stats("topic", channel)["depth"] == 0
    broker.restart()
    assert {name: broker.channel_stats("topic", name)["depth"] for name in EXPECTED} == dict.fromkeys(
        EXPECTED, 0
    )


def test_case_162_a_topic_without_channels_keeps_its_messages_for_the_first(tmp_path: Path, own_broker):
    write_metadata(tmp_path, {"topic": []})
    GoQueue(tmp_path, "topic").write(*go_messages(50), max_bytes=300).consume(7).save()
    broker = own_broker(data_path=tmp_path)
    assert broker.topic_stats("topic")["depth"] == 43
    messages = read_all(broker, "topic", "channel", 43)
    assert [m.body for m in messages] == [b"%d" % number for number in range(7, 50)]
    assert messages[0].timestamp_ns == GO_TIME_NS + 7000


def test_case_162_pause_flags_hold(tmp_path: Path, own_broker):
    write_metadata(tmp_path, {"topic": ["open", "paused"], "held": ["channel"]}, ["topic:paused", "held"])
    for topic, channel in [("topic", "open"), ("topic", "paused"), ("held", "channel"), ("held", "")]:
        GoQueue(tmp_path, topic, channel).write(*go_messages(3, channel)).save()
    broker = own_broker(data_path=tmp_path)
    assert len(read_all(broker, "topic", "open", 3)) == 3
    assert broker.channel_stats("topic", "paused")["depth"] == 3
    assert broker.topic_stats("held")["depth"] == 3
    with broker.connect() as connection:
        connection.sub("topic", "paused", rdy=10)
        connection.expect_silence(0.2)
        broker.control("unpause", "topic", "paused")
        connection.read_messages(3, finish=True)
    # Messages that are already in a channel are not held by its topic.
    assert {m.body for m in read_all(broker, "held", "channel", 3)} == {b"channel0", b"channel1", b"channel2"}
    broker.control("unpause", "held")
    assert {m.body for m in read_all(broker, "held", "channel", 3)} == {b"0", b"1", b"2"}


def test_case_162_what_a_crash_left_beyond_the_recorded_end_is_salvaged(tmp_path: Path, own_broker):
    write_metadata(tmp_path, {"topic": ["channel"]})
    queue = GoQueue(tmp_path, "topic", "channel").write(*go_messages(5)).consume(1).save()
    queue.write(*go_messages(5, start=5))
    broker = own_broker(data_path=tmp_path)
    messages = read_all(broker, "topic", "channel", 9)
    assert [m.body for m in messages] == [b"%d" % number for number in range(1, 10)]


@pytest.mark.deviation("ids are positions in our log; NSQ's files are kept aside")
def test_case_162_ids_are_new_and_the_files_are_set_aside(tmp_path: Path, own_broker):
    write_directory(tmp_path)
    names = {path.name for path in tmp_path.glob("*.diskqueue.*")}
    broker = own_broker(data_path=tmp_path)
    ids = {message.id for message in read_all(broker, "topic", "half", 45)}
    assert len(ids) == 45
    assert not any(message_id.startswith(b"0d1e5") for message_id in ids)
    assert not [*tmp_path.glob("*.diskqueue.*")]
    assert {path.name for path in (tmp_path / "imported-from-nsq").iterdir()} == names


@pytest.mark.deviation("NSQ ignores a queue without a state, and overwrites it")
def test_case_162_queues_without_state_or_mention_are_taken_over(tmp_path: Path, own_broker):
    GoQueue(tmp_path, "topic", "channel").write(*go_messages(30), max_bytes=300)
    broker = own_broker(data_path=tmp_path)
    assert broker.channel_stats("topic", "channel")["depth"] == 30
    assert len(read_all(broker, "topic", "channel", 30)) == 30
