"""Groups E, F, H and L: timeouts and deferred messages. The tests wait at the same time."""

from __future__ import annotations

import time

from tests.support import unique_name, wait_until

from .overlap import Overlap

together = Overlap()

TIMEOUT_MS = 3000
"""Long enough for a few commands, even on a busy machine."""
LEAST_S = TIMEOUT_MS / 1000 - 0.05


def consumer(broker, topic, channel, *, rdy=1, **fields):
    connection = broker.connect()
    connection.identify(**fields)
    connection.sub(topic, channel, rdy=rdy)
    connection.barrier()
    return connection


@together
def test_cases_062_and_084_a_timeout_redelivers_with_one_more_attempt(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel, msg_timeout=TIMEOUT_MS) as connection:
        start = time.monotonic()
        broker.publish(topic, b"slow")
        first = connection.read_message()
        connection.rdy(0)
        wait_until(lambda: broker.channel_stats(topic, channel)["timeout_count"] == 1)
        assert time.monotonic() - start >= LEAST_S
        stats = broker.channel_stats(topic, channel)
        assert (stats["requeue_count"], stats["in_flight_count"], stats["depth"]) == (0, 0, 1)
        assert stats["clients"][0]["in_flight_count"] == 0
        for attempt in (2, 3):
            connection.rdy(1)
            again = connection.read_message()
            assert (again.id, again.attempts, again.timestamp_ns) == (first.id, attempt, first.timestamp_ns)


@together
def test_case_075_fin_after_the_timeout_is_refused(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel, msg_timeout=TIMEOUT_MS) as connection:
        broker.publish(topic, b"slow")
        message = connection.read_message()
        connection.rdy(0)
        wait_until(lambda: broker.channel_stats(topic, channel)["timeout_count"] == 1)
        text = message.id.decode()
        connection.fin(message.id)
        connection.expect_error(f"E_FIN_FAILED FIN {text} failed ID not in flight")
        connection.req(message.id, 0)
        connection.expect_error(f"E_REQ_FAILED REQ {text} failed ID not in flight")
        connection.touch(message.id)
        connection.expect_error(f"E_TOUCH_FAILED TOUCH {text} failed ID not in flight")
        with consumer(broker, topic, channel) as other:
            assert other.read_message().id == message.id
            connection.fin(message.id)
            connection.expect_error(f"E_FIN_FAILED FIN {text} failed client does not own message")


@together
def test_case_078_req_with_a_timeout_defers(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel) as connection:
        broker.publish(topic, b"later")
        message = connection.read_message()
        start = time.monotonic()
        connection.req(message.id, 2500)
        connection.barrier()
        stats = broker.channel_stats(topic, channel)
        assert (stats["deferred_count"], stats["in_flight_count"], stats["depth"]) == (1, 0, 0)
        assert (stats["requeue_count"], stats["message_count"]) == (1, 1)
        again = connection.read_message()
        assert time.monotonic() - start >= 2.45
        assert (again.id, again.attempts) == (message.id, 2)
        assert broker.channel_stats(topic, channel)["deferred_count"] == 0


@together
def test_case_081_touch_prevents_the_timeout(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel, msg_timeout=TIMEOUT_MS) as connection:
        broker.publish(topic, b"slow")
        message = connection.read_message()
        until = time.monotonic() + (7.0 if broker.is_reference else 4.5)
        while time.monotonic() < until:
            connection.touch(message.id)
            connection.expect_silence(0.2)
        connection.fin(message.id)
        connection.barrier()
        stats = broker.channel_stats(topic, channel)
        assert (stats["timeout_count"], stats["in_flight_count"], stats["depth"]) == (0, 0, 0)


@together
def test_case_083_touch_gives_the_client_its_own_msg_timeout_again(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel, msg_timeout=TIMEOUT_MS) as connection:
        broker.publish(topic, b"slow")
        message = connection.read_message()
        time.sleep(0.2)
        touched = time.monotonic()
        connection.touch(message.id)
        assert connection.read_message().attempts == 2
        # The server's own default is 60 s.
        assert time.monotonic() - touched >= LEAST_S


@together
def test_case_085_many_messages_time_out_within_the_scan_resolution(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel, rdy=250, msg_timeout=TIMEOUT_MS) as connection:
        broker.publish(topic, *(b"%d" % number for number in range(250)))
        connection.read_messages(250)
        connection.rdy(0)
        wait_until(lambda: broker.channel_stats(topic, channel)["timeout_count"] == 250)
        stats = broker.channel_stats(topic, channel)
        assert (stats["in_flight_count"], stats["depth"], stats["requeue_count"]) == (0, 250, 0)


@together
def test_case_085_what_was_answered_or_touched_does_not_time_out_with_the_rest(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel, rdy=10, msg_timeout=TIMEOUT_MS) as connection:
        broker.publish(topic, *(b"%d" % number for number in range(10)))
        messages = connection.read_messages(10)
        connection.rdy(0)
        for message in messages[:3]:
            connection.fin(message.id)
        connection.req(messages[3].id, 0)
        connection.req(messages[4].id, 60_000)
        while broker.channel_stats(topic, channel)["timeout_count"] < 4:
            connection.touch(messages[5].id)
            connection.expect_silence(0.3)
        stats = broker.channel_stats(topic, channel)
        assert (stats["timeout_count"], stats["in_flight_count"], stats["deferred_count"]) == (4, 1, 1)
        assert (stats["depth"], stats["requeue_count"]) == (5, 2)
        connection.fin(messages[5].id)
        connection.barrier()
        connection.rdy(10)
        again = {message.body: message.attempts for message in connection.read_messages(5)}
        assert again == {message.body: 2 for message in (messages[3], *messages[6:])}


@together
def test_paused_channel_still_times_messages_out(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel, msg_timeout=TIMEOUT_MS) as connection:
        broker.publish(topic, b"slow")
        connection.read_message()
        broker.control("pause", topic, channel)
        wait_until(lambda: broker.channel_stats(topic, channel)["timeout_count"] == 1)
        connection.expect_silence(0.2)
        broker.control("unpause", topic, channel)
        assert connection.read_message().attempts == 2


@together
def test_case_086_messages_of_a_lost_client_reach_another_one(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel, msg_timeout=TIMEOUT_MS) as connection:
        broker.publish(topic, b"slow")
        message = connection.read_message()
    with consumer(broker, topic, channel) as other:
        again = other.read_message()
        assert (again.id, again.attempts) == (message.id, 2)


@together
def test_case_100_deferred_publish_arrives_after_its_delay(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel) as connection, broker.connect() as publisher:
        start = time.monotonic()
        publisher.dpub(topic, 2500, b"later")
        stats = wait_until(lambda: has(broker.channel_stats(topic, channel), deferred_count=1))
        assert (stats["message_count"], stats["depth"], stats["in_flight_count"]) == (1, 0, 0)
        message = connection.read_message()
        assert time.monotonic() - start >= 2.45
        assert (message.body, message.attempts) == (b"later", 1)


@together
def test_case_100_deferred_publish_reaches_every_channel(broker):
    topic, channels = unique_name("topic"), [unique_name("channel") for _ in range(2)]
    with consumer(broker, topic, channels[0]) as one, consumer(broker, topic, channels[1]) as two:
        with broker.connect() as publisher:
            publisher.dpub(topic, 2500, b"later")
            publisher.pub(topic, b"now")
        for connection in (one, two):
            now = connection.read_message()
            assert now.body == b"now"
            connection.fin(now.id)
            assert connection.read_message().body == b"later"


def has(stats, **expected):
    """The stats if they have these values, for wait_until."""
    return stats if stats and all(stats[key] == value for key, value in expected.items()) else None


@together
def test_case_100_deferred_publish_on_an_ephemeral_topic(broker):
    topic, channel = unique_name("topic") + "#ephemeral", unique_name("channel") + "#ephemeral"
    with consumer(broker, topic, channel, rdy=5) as connection, broker.connect() as publisher:
        start = time.monotonic()
        publisher.dpub(topic, 600, b"later")
        publisher.pub(topic, b"now")
        message = connection.read_message()
        assert message.body == b"now"
        connection.req(message.id, 300)
        # Which of the two is due first depends on how busy the machine is.
        found = {(again.body, again.attempts) for again in connection.read_messages(2)}
        assert found == {(b"now", 2), (b"later", 1)}
        assert time.monotonic() - start >= 0.55


@together
def test_case_173_first_timeout_of_a_new_channel_is_not_late(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    with consumer(broker, topic, channel, rdy=2, msg_timeout=TIMEOUT_MS) as connection:
        start = time.monotonic()
        broker.publish(topic, b"slow", b"deferred")
        slow, deferred = connection.read_messages(2)
        connection.req(deferred.id, 30_000)
        again = connection.read_message()
        assert time.monotonic() - start >= LEAST_S
        # NSQ may check a new channel five seconds late.
        assert broker.is_reference or again.id == slow.id
