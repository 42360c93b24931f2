"""Group E: RDY, delivery, output buffering, sampling."""

from __future__ import annotations

import time

import pytest

from tests.support import DEADLINE, unique_name, wait_until

HELD_MS = 30_000
"""The longest output buffer timeout that a client may request."""


def bodies(count: int) -> list[bytes]:
    return [b"message %d" % number for number in range(count)]


def ready_count(broker, topic, channel) -> int:
    (client,) = broker.channel_stats(topic, channel)["clients"]
    return client["ready_count"]


def test_case_056_rdy_limits_what_is_unanswered_and_fin_makes_room(broker, topic, channel):
    broker.publish(topic, *bodies(6))
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=3)
        first = connection.read_messages(3)
        connection.expect_silence(0.2)
        connection.fin(first[0].id)
        fourth = connection.read_message()
        connection.expect_silence(0.1)
        connection.fin(first[1].id)
        connection.fin(fourth.id)
        rest = connection.read_messages(2)
        assert {message.body for message in (*first, fourth, *rest)} == set(bodies(6))
        connection.expect_silence(0.1)


def test_case_056_a_lower_rdy_blocks_until_enough_is_answered(broker, topic, channel):
    broker.publish(topic, *bodies(5))
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=3)
        first = connection.read_messages(3)
        connection.rdy(1)
        connection.fin(first[0].id)
        connection.fin(first[1].id)
        connection.expect_silence(0.2)
        connection.fin(first[2].id)
        connection.read_message()
        connection.expect_silence(0.1)


def test_case_057_rdy_without_parameter_is_1_and_with_an_empty_one_0(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.send(b"RDY\n")
        connection.barrier()
        assert ready_count(broker, topic, channel) == 1
        connection.send(b"RDY \n")
        connection.barrier()
        assert ready_count(broker, topic, channel) == 0


def test_case_058_rdy_up_to_the_maximum(small_broker, topic, channel):
    with small_broker.connect() as connection:
        connection.sub(topic, channel, rdy=50)
        connection.barrier()
        assert ready_count(small_broker, topic, channel) == 50
        connection.rdy(51)
        connection.expect_fatal("E_INVALID RDY count 51 out of range 0-50")


@pytest.mark.parametrize("count", ["-1", "abc"])
def test_case_059_rdy_that_is_not_a_number_is_fatal(broker, topic, channel, count):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.command("RDY", count)
        connection.expect_fatal(f"E_INVALID RDY could not parse count {count}")


def test_case_059_rdy_wraps_at_64_bits(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=5)
        connection.rdy(2**64)
        connection.barrier()
        assert ready_count(broker, topic, channel) == 0
        connection.rdy(2**64 + 7)
        connection.barrier()
        assert ready_count(broker, topic, channel) == 7
        connection.rdy(2**63)
        connection.expect_fatal(f"E_INVALID RDY count {-(2**63)} out of range 0-2500")


def test_case_060_rdy_before_sub_is_fatal(broker):
    with broker.connect() as connection:
        connection.rdy(1)
        connection.expect_fatal("E_INVALID cannot RDY in current state")


def test_case_061_rdy_0_stops_delivery_and_a_later_rdy_resumes(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        broker.publish(topic, b"first")
        connection.fin(connection.read_message().id)
        connection.rdy(0)
        connection.barrier()
        broker.publish(topic, b"second")
        connection.expect_silence(0.3)
        connection.rdy(1)
        assert connection.read_message().body == b"second"


def test_case_062_first_delivery_is_attempt_1_and_each_requeue_adds_one(broker, topic, channel):
    broker.publish(topic, b"again and again")
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        for attempt in range(1, 6):
            message = connection.read_message()
            assert message.attempts == attempt
            connection.req(message.id, 0)


# Attempts after a timeout: test_f_timeouts.py.


def test_case_063_channels_share_ids_and_count_attempts_apart(broker, topic):
    channels = unique_name("one"), unique_name("two")
    with broker.connect() as one, broker.connect() as two:
        one.sub(topic, channels[0], rdy=1)
        two.sub(topic, channels[1], rdy=1)
        broker.publish(topic, b"to both")
        at_one, at_two = one.read_message(), two.read_message()
        assert at_one == at_two
        assert at_one.attempts == 1
        one.req(at_one.id, 0)
        assert one.read_message().attempts == 2
        two.req(at_two.id, 0)
        assert two.read_message().attempts == 2


def test_case_064_id_and_timestamp_stay_the_same_over_redeliveries(broker, topic, channel):
    before = time.time_ns()
    broker.publish(topic, b"dated")
    after = time.time_ns()
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        first = connection.read_message()
        assert before <= first.timestamp_ns <= after
        connection.req(first.id, 0)
        second = connection.read_message()
    assert (second.id, second.timestamp_ns, second.body) == (first.id, first.timestamp_ns, first.body)


def receive_a_lone_message(broker, topic, channel, rdy: int, **fields) -> None:
    """A published message reaches a waiting consumer long before anything else flushes it."""
    with broker.connect() as connection:
        connection.identify(heartbeat_interval=60_000, **fields)
        connection.sub(topic, channel, rdy=rdy)
        connection.barrier()
        broker.publish(topic, b"lone")
        assert connection.read_message(HELD_MS / 1000 - 5).body == b"lone"


@pytest.mark.deviation("output is flushed at the end of the event loop's turn, never held for a timer")
def test_case_065_a_lone_message_does_not_wait_for_the_output_buffer(broker, topic, channel):
    receive_a_lone_message(
        broker, topic, channel, rdy=10, output_buffer_size=65_536, output_buffer_timeout=HELD_MS
    )


def test_case_066_with_rdy_1_a_message_is_sent_at_once(broker, topic, channel):
    receive_a_lone_message(
        broker, topic, channel, rdy=1, output_buffer_size=65_536, output_buffer_timeout=HELD_MS
    )


@pytest.mark.deviation("output is flushed at the end of the event loop's turn, never held for a reply")
def test_case_067_a_lone_message_is_not_held_without_a_flush_timer(broker, topic, channel):
    receive_a_lone_message(
        broker, topic, channel, rdy=10, output_buffer_size=65_536, output_buffer_timeout=-1
    )


def test_case_068_without_output_buffer_a_message_is_sent_at_once(broker, topic, channel):
    receive_a_lone_message(broker, topic, channel, rdy=10, output_buffer_size=-1)


def consume_sampled(broker, topic, channel, rate: int, count: int) -> list[bytes]:
    broker.publish(topic, *bodies(count))
    with broker.connect() as connection:
        connection.identify(sample_rate=rate)
        connection.sub(topic, channel, rdy=2500)
        received = []
        while True:
            stats = broker.channel_stats(topic, channel)
            done = stats["message_count"] == count and stats["depth"] == 0
            try:
                while True:
                    message = connection.read_message(0.3 if done else 0.05)
                    received.append(message.body)
                    assert message.attempts == 1
                    connection.fin(message.id)
            except TimeoutError:
                if done:
                    break
        connection.barrier()
        stats = broker.channel_stats(topic, channel)
        assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (0, 0, 0)
        (client,) = stats["clients"]
        assert client["message_count"] == client["finish_count"] == len(received)
        return received


def test_case_069_sampling_delivers_its_share_and_drops_the_rest(broker, topic, channel):
    received = consume_sampled(broker, topic, channel, rate=42, count=10_000)
    assert len(set(received)) == len(received)
    assert 3700 <= len(received) <= 4700


def test_case_069_sampling_of_99_percent_delivers_everything(broker, topic, channel):
    assert sorted(consume_sampled(broker, topic, channel, rate=99, count=1000)) == sorted(bodies(1000))


def test_case_069_sampling_does_not_touch_other_channels(broker, topic):
    sampled, whole = unique_name("sampled"), unique_name("whole")
    broker.control("create", topic, whole)
    broker.control("create", topic, sampled)
    consume_sampled(broker, topic, sampled, rate=1, count=500)
    with broker.connect() as connection:
        connection.sub(topic, whole, rdy=500)
        received = connection.read_messages(500, finish=True)
    assert {message.body for message in received} == set(bodies(500))


def test_case_070_clients_of_a_channel_share_its_messages(broker, topic, channel):
    with broker.connect() as one, broker.connect() as two:
        one.sub(topic, channel, rdy=10)
        two.sub(topic, channel, rdy=10)
        one.barrier()
        two.barrier()
        broker.publish(topic, *bodies(20))
        # Ten in flight at each is all that their RDY allows, so each must get exactly ten.
        received = one.read_messages(10) + two.read_messages(10)
    assert sorted(message.body for message in received) == sorted(bodies(20))
    assert {message.attempts for message in received} == {1}


def test_case_070_a_small_backlog_does_not_all_go_to_one_client(broker, topic, channel):
    received = {0: 0, 1: 0}
    with broker.connect() as one, broker.connect() as two:
        for connection in (one, two):
            connection.sub(topic, channel, rdy=100)
            connection.barrier()
        for number in range(100):
            broker.publish(topic, b"%d" % number)
        deadline = time.monotonic() + DEADLINE
        while sum(received.values()) < 100 and time.monotonic() < deadline:
            for index, connection in enumerate((one, two)):
                try:
                    connection.read_message(0.05)
                    received[index] += 1
                except TimeoutError:
                    continue
    assert sum(received.values()) == 100
    assert min(received.values()) >= 10, received


def test_paused_channel_delivers_nothing_until_unpaused(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=5)
        broker.control("pause", topic, channel)
        broker.publish(topic, b"held")
        connection.expect_silence(0.3)
        assert broker.channel_stats(topic, channel)["depth"] == 1
        broker.control("unpause", topic, channel)
        assert connection.read_message().body == b"held"


def test_paused_topic_keeps_its_messages_until_unpaused(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=5)
        broker.control("pause", topic)
        broker.publish(topic, b"held")
        connection.expect_silence(0.3)
        stats = broker.topic_stats(topic)
        assert (stats["depth"], stats["paused"], stats["channels"][0]["depth"]) == (1, True, 0)
        broker.control("unpause", topic)
        assert connection.read_message().body == b"held"
        wait_until(lambda: broker.topic_stats(topic)["depth"] == 0)


def test_where_nobody_asked_for_policies_or_headers_everything_is_as_in_nsq(broker, topic, channel):
    broker.publish(topic, b'{"key": 1, "n": 1}', b'{"key": 1, "n": 2}')
    topics = {one["topic_name"] for one in broker.stats()["topics"]}
    with broker.connect() as connection:
        assert "headers" not in connection.identify(feature_negotiation=True)
        connection.sub(topic, channel, rdy=2)
        # Both at a time: the same value of a field is no key.
        first, second = connection.read_messages(2)
        connection.fin(second.id)
        for attempt in range(2, 22):
            connection.req(first.id)
            (again,) = connection.read_messages(1)
            assert (again.id, again.body, again.attempts) == (first.id, first.body, attempt)
        connection.fin(first.id)
        connection.barrier()
    assert {one["topic_name"] for one in broker.stats()["topics"]} == topics
