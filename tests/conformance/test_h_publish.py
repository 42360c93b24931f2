"""Group H: PUB, DPUB, MPUB."""

from __future__ import annotations

import struct
import threading

import pytest

from tests.support import ERROR, RESPONSE, ConnectionClosed, multi, sized, wait_until
from tests.support.polling import DEADLINE


def depth(broker, topic) -> int:
    """Messages that the topic keeps for its first channel; 0 if it does not exist."""
    stats = broker.topic_stats(topic)
    return stats["depth"] if stats else 0


def test_case_095_pub_creates_the_topic_and_counts(broker, topic):
    with broker.connect() as connection:
        connection.pub(topic, b"seven b")
    stats = broker.topic_stats(topic)
    assert (stats["depth"], stats["message_count"], stats["message_bytes"]) == (1, 1, 7)
    assert stats["channels"] == []


def test_case_095_message_bytes_are_those_of_all_bodies(broker, topic):
    with broker.connect() as connection:
        connection.pub(topic, b"a" * 10)
        connection.mpub(topic, [b"b" * 20, b"c" * 30])
        connection.dpub(topic, 60_000, b"d" * 40)
    stats = broker.topic_stats(topic)
    assert (stats["message_count"], stats["message_bytes"]) == (4, 100)


def test_case_096_pub_body_is_limited(small_broker, topic):
    with small_broker.connect() as connection:
        connection.pub(topic, b"x" * 100)
        connection.command("PUB", topic, body=b"x" * 105)
        connection.expect_fatal("E_BAD_MESSAGE PUB message too big 105 > 100")
    assert depth(small_broker, topic) == 1


def test_case_095_a_publisher_that_leaves_without_reading_has_published(broker, topic):
    with broker.connect() as connection:
        connection.command("PUB", topic, body=b"one")
        connection.command("MPUB", topic, body=multi([b"two", b"three"]))
    wait_until(lambda: depth(broker, topic) == 3)


def test_case_096_messages_of_the_default_maximum_arrive_whole(broker, topic, channel):
    big = bytes(range(256)) * 4096
    assert len(big) == 1_048_576
    with broker.connect() as connection:
        connection.pub(topic, big)
        bodies = [bytes([number]) * (1_048_576 - 4 * number) for number in range(1, 5)]
        connection.mpub(topic, bodies)
        connection.sub(topic, channel, rdy=5)
        assert [message.body for message in connection.read_messages(5)] == [big, *bodies]
    with broker.connect() as connection:
        connection.send(b"PUB %s\n" % topic.encode() + struct.pack(">i", 1_048_577))
        connection.expect_fatal("E_BAD_MESSAGE PUB message too big 1048577 > 1048576")


@pytest.mark.parametrize("command", ["PUB {}", "DPUB {} 100"])
def test_case_096_the_size_alone_decides(small_broker, topic, command):
    with small_broker.connect() as connection:
        connection.send(command.format(topic).encode() + b"\n" + struct.pack(">i", 2**31 - 1))
        name = command.split()[0]
        connection.expect_fatal(f"E_BAD_MESSAGE {name} message too big 2147483647 > 100")


@pytest.mark.parametrize(("command", "size"), [("PUB {}", 0), ("DPUB {} 100", -1)])
def test_case_097_empty_and_negative_sizes_are_refused(broker, topic, command, size):
    with broker.connect() as connection:
        connection.send(command.format(topic).encode() + b"\n" + struct.pack(">i", size))
        connection.expect_fatal(f"E_BAD_MESSAGE {command.split()[0]} invalid message body size {size}")
    assert depth(broker, topic) == 0


def test_case_098_pub_needs_a_valid_topic(broker):
    with broker.connect() as connection:
        connection.command("PUB", "t!", body=b"body")
        connection.expect_fatal('E_BAD_TOPIC PUB topic name "t!" is not valid')
    with broker.connect() as connection:
        connection.send(b"PUB\n")
        connection.expect_fatal("E_INVALID PUB insufficient number of parameters")
    with broker.connect() as connection:
        connection.send(b"PUB \n")
        connection.expect_fatal('E_BAD_TOPIC PUB topic name "" is not valid')


def test_case_099_pub_works_in_every_state(broker, topic, channel):
    with broker.connect() as connection:
        connection.pub(topic, b"before identify")
        connection.identify()
        connection.pub(topic, b"after identify")
        connection.sub(topic, channel)
        connection.pub(topic, b"subscribed")
        connection.cls()
        connection.pub(topic, b"closing")
    wait_until(lambda: broker.channel_stats(topic, channel)["depth"] == 4)


def test_case_099_pub_errors_after_sub_are_the_same(small_broker, topic, channel):
    with small_broker.connect() as connection:
        connection.sub(topic, channel)
        connection.command("PUB", topic, body=b"x" * 105)
        connection.expect_fatal("E_BAD_MESSAGE PUB message too big 105 > 100")


# Case 100 is in test_f_timeouts.py: time has to pass.


def test_case_101_deferred_publish_up_to_the_maximum(broker, topic, channel):
    broker.control("create", topic, channel)
    with broker.connect() as connection:
        connection.dpub(topic, 3_600_000, b"in an hour")
        wait_until(lambda: broker.channel_stats(topic, channel)["deferred_count"] == 1)
        connection.command("DPUB", topic, 3_600_100, body=b"too late")
        connection.expect_fatal("E_INVALID DPUB timeout 3600100 out of range 0-3600000")
    assert broker.channel_stats(topic, channel)["message_count"] == 1


def test_case_101_deferred_publish_of_0_ms_is_an_ordinary_one(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=2)
        connection.command("DPUB", topic, 0, body=b"now")
        connection.command("DPUB", topic, "", body=b"now")
        replies = [connection.read_frame() for _ in range(4)]
    assert sorted(frame.type for frame in replies) == [0, 0, 2, 2]


@pytest.mark.parametrize("time", ["-1", "x", "1.5"])
def test_case_102_deferral_that_is_not_a_number_is_fatal(broker, topic, time):
    with broker.connect() as connection:
        connection.command("DPUB", topic, time, body=b"body")
        connection.expect_fatal(f"E_INVALID DPUB could not parse timeout {time}")


@pytest.mark.parametrize("line", ["DPUB", "DPUB t", "DPUB t!"])
def test_case_102_deferred_publish_needs_two_parameters(broker, line):
    with broker.connect() as connection:
        connection.command(line, body=b"body")
        connection.expect_fatal("E_INVALID DPUB insufficient number of parameters")


def test_case_102_deferred_publish_needs_a_valid_topic(broker):
    with broker.connect() as connection:
        connection.command("DPUB", "t!", "x", body=b"body")
        connection.expect_fatal('E_BAD_TOPIC DPUB topic name "t!" is not valid')


def test_case_103_mpub_stores_all(broker, topic, channel):
    with broker.connect() as connection:
        connection.mpub(topic, [b"%d" % number for number in range(5)])
        assert depth(broker, topic) == 5
        connection.sub(topic, channel, rdy=5)
        messages = connection.read_messages(5)
    assert sorted(message.body for message in messages) == [b"0", b"1", b"2", b"3", b"4"]
    assert len({message.id for message in messages}) == 5


def test_case_104_mpub_body_is_limited(small_broker, topic):
    body = multi([b"x" * 100] * 11)
    assert len(body) == 1148
    with small_broker.connect() as connection:
        connection.command("MPUB", topic, body=body)
        connection.expect_fatal("E_BAD_BODY MPUB body too big 1148 > 1000")
    assert depth(small_broker, topic) == 0


@pytest.mark.parametrize("size", [0, -1])
def test_case_104_mpub_body_size_must_be_positive(broker, topic, size):
    with broker.connect() as connection:
        connection.send(b"MPUB %s\n" % topic.encode() + struct.pack(">i", size))
        connection.expect_fatal(f"E_BAD_BODY MPUB invalid body size {size}")


def test_case_105_mpub_with_an_empty_message_stores_nothing(small_broker, topic):
    with small_broker.connect() as connection:
        connection.command("MPUB", topic, body=multi([b"x"] * 5 + [b""]))
        connection.expect_fatal("E_BAD_MESSAGE MPUB invalid message(5) body size 0")
    assert depth(small_broker, topic) == 0


def test_case_105_mpub_with_a_negative_message_size_stores_nothing(small_broker, topic):
    with small_broker.connect() as connection:
        connection.command("MPUB", topic, body=struct.pack(">i", 2) + sized(b"x") + struct.pack(">i", -5))
        connection.expect_fatal("E_BAD_MESSAGE MPUB invalid message(1) body size -5")
    assert depth(small_broker, topic) == 0


def test_case_106_mpub_with_a_too_big_message_stores_nothing(small_broker, topic):
    with small_broker.connect() as connection:
        connection.command("MPUB", topic, body=multi([b"x" * 100, b"x" * 101, b"x"]))
        connection.expect_fatal("E_BAD_MESSAGE MPUB message too big 101 > 100")
    assert depth(small_broker, topic) == 0


@pytest.mark.parametrize("count", [0, -1, 200, 2**31 - 1])
def test_case_107_mpub_count_must_fit_the_largest_body(small_broker, topic, count):
    with small_broker.connect() as connection:
        connection.command("MPUB", topic, body=struct.pack(">i", count) + sized(b"x"))
        connection.expect_fatal(f"E_BAD_BODY MPUB invalid message count {count}")
    assert depth(small_broker, topic) == 0


def test_case_107_the_largest_count_is_accepted(small_broker, topic):
    body = multi([b"x"] * 199)
    assert len(body) == 999
    with small_broker.connect() as connection:
        connection.command("MPUB", topic, body=body)
        connection.expect_ok()
    assert depth(small_broker, topic) == 199


def test_case_108_mpub_bad_topic_names_the_code_twice(broker):
    with broker.connect() as connection:
        connection.command("MPUB", "t!", body=multi([b"x"]))
        connection.expect_fatal('E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "t!" is not valid')
    with broker.connect() as connection:
        connection.send(b"MPUB\n")
        connection.expect_fatal("E_INVALID MPUB insufficient number of parameters")


@pytest.mark.parametrize("stated", [1, 5, 13, 500])
def test_case_109_mpub_body_size_that_does_not_match_is_tolerated(broker, topic, stated):
    contents = multi([b"one", b"two"])
    with broker.connect() as connection:
        connection.send(b"MPUB %s\n" % topic.encode() + struct.pack(">i", stated) + contents)
        connection.send(b"PUB %s\n" % topic.encode() + sized(b"three"))
        connection.expect_ok()
        connection.expect_ok()
    stats = broker.topic_stats(topic)
    assert (stats["depth"], stats["message_bytes"]) == (3, 11)


def test_case_109_count_smaller_than_the_contents_leaves_the_rest_as_commands(broker, topic):
    contents = struct.pack(">i", 1) + sized(b"one")
    with broker.connect() as connection:
        connection.send(b"MPUB %s\n" % topic.encode() + sized(contents + b"NOP\nASDF\n"))
        connection.expect_ok()
        connection.expect_fatal("E_INVALID invalid command ASDF")


def test_case_110_pipelined_publishes_are_answered_in_order(broker, topic):
    with broker.connect() as connection:
        stream = b"".join(b"PUB %s\n" % topic.encode() + sized(b"%d" % number) for number in range(100))
        connection.send(stream + b"MPUB %s\n" % topic.encode() + sized(multi([b"a", b"b"])) + b"PUB t!\n")
        for _ in range(101):
            connection.expect_ok()
        connection.expect_fatal('E_BAD_TOPIC PUB topic name "t!" is not valid')
    assert depth(broker, topic) == 102


def test_case_110_messages_come_in_the_order_they_were_published(broker, topic, channel):
    bodies = [b"%d" % number for number in range(200)]
    with broker.connect() as connection:
        for body in bodies[:100]:
            connection.pub(topic, body)
        connection.mpub(topic, bodies[100:])
        connection.sub(topic, channel, rdy=200)
        assert [message.body for message in connection.read_messages(200)] == bodies


def test_case_111_publish_while_the_topic_is_deleted_succeeds_or_fails_as_exiting(broker, topic):
    stop = threading.Event()
    unexpected: list[object] = []
    answered = [0, 0]

    def publish(index: int) -> None:
        connection = broker.connect()
        while not stop.is_set():
            connection.command("PUB", topic, body=b"body")
            try:
                frame = connection.read_frame()
            except (ConnectionClosed, OSError) as error:
                unexpected.append(error)
                break
            if frame == (ERROR, b"E_PUB_FAILED PUB failed exiting"):
                connection.expect_closed()
                connection.close()
                connection = broker.connect()
            elif frame != (RESPONSE, b"OK"):
                unexpected.append(frame)
                break
            answered[index] += 1
        connection.close()

    threads = [threading.Thread(target=publish, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            wait_until(lambda: depth(broker, topic) > 0 or unexpected)
            broker.control("delete", topic)
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)
    assert not unexpected
    assert min(answered) > 0
