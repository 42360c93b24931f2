"""Group F: FIN, REQ, TOUCH, where no time has to pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nsparq.storage.files import Files
from nsparq.storage.state_files import read_channel_state
from tests.support import BrokerThread, wait_until

ABSENT = "0123456789abcdef"


@pytest.fixture
def delivered(broker, topic, channel):
    """A connection that holds one message in flight, and that message."""
    broker.publish(topic, b"body")
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        yield connection, connection.read_message()


def test_case_071_fin_takes_the_message_out_of_flight(broker, topic, channel, delivered):
    connection, message = delivered
    stats = broker.channel_stats(topic, channel)
    assert (stats["in_flight_count"], stats["clients"][0]["in_flight_count"]) == (1, 1)
    connection.fin(message.id)
    connection.barrier()
    stats = broker.channel_stats(topic, channel)
    (client,) = stats["clients"]
    assert (stats["in_flight_count"], stats["depth"], stats["requeue_count"]) == (0, 0, 0)
    assert (client["in_flight_count"], client["finish_count"], client["message_count"]) == (0, 1, 1)


def test_case_071_fin_has_no_reply(delivered):
    connection, message = delivered
    connection.fin(message.id)
    connection.expect_silence(0.2)


def test_case_072_fin_of_unknown_id_is_not_fatal(delivered):
    connection, message = delivered
    connection.fin(ABSENT.encode())
    connection.expect_error(f"E_FIN_FAILED FIN {ABSENT} failed ID not in flight")
    connection.fin(message.id)
    connection.fin(message.id)
    connection.expect_error(f"E_FIN_FAILED FIN {message.id.decode()} failed ID not in flight")


@pytest.mark.parametrize("name", ["REQ", "TOUCH"])
def test_case_072_req_and_touch_of_unknown_id_are_not_fatal(delivered, name):
    connection, message = delivered
    connection.command(name, ABSENT, *(["0"] if name == "REQ" else []))
    connection.expect_error(f"E_{name}_FAILED {name} {ABSENT} failed ID not in flight")
    connection.fin(message.id)
    connection.barrier()


@pytest.mark.parametrize("message_id", [b"0123456789ABCDEF", b"\xff" * 16, b"f" * 16])
def test_case_072_any_16_bytes_are_an_id_that_is_not_in_flight(delivered, message_id):
    connection, _ = delivered
    connection.fin(message_id)
    connection.expect_error(b"E_FIN_FAILED FIN " + message_id + b" failed ID not in flight")


def test_case_072_many_fins_in_one_segment_are_answered_one_by_one(broker, topic, channel):
    broker.publish(topic, *(b"%d" % number for number in range(100)))
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=100)
        messages = connection.read_messages(100)
        lines = []
        failing = []
        for number, message in enumerate(messages):
            lines.append(b"FIN " + message.id + (b"\r\n" if number % 7 == 0 else b"\n"))
            if number % 10 == 0:
                lines.append(b"FIN fffffffffffff%03d\n" % number)
                failing.append(b"fffffffffffff%03d" % number)
            if number % 25 == 0:
                lines.append(b"FIN " + message.id + b"\n")
                failing.append(message.id)
        connection.send(b"".join(lines))
        for message_id in failing:
            connection.expect_error(b"E_FIN_FAILED FIN " + message_id + b" failed ID not in flight")
        connection.barrier()
        stats = broker.channel_stats(topic, channel)
        (client,) = stats["clients"]
        assert (stats["in_flight_count"], client["in_flight_count"], client["finish_count"]) == (0, 0, 100)


def test_case_072_answers_of_all_kinds_in_one_segment_are_handled_in_order(broker, topic, channel):
    broker.publish(topic, *(b"%d" % number for number in range(4)))
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=4)
        one, two, three, four = (message.id for message in connection.read_messages(4))
        connection.send(
            b"RDY 0\nFIN %s\nREQ %s 60000\nTOUCH %s\nFIN %s\nNOP\n" % (one, two, three, three)
            + b"FIN %s\nTOUCH %s\nREQ %s 0\nFIN %s\n" % (two, one, four, four)
        )
        connection.expect_error(b"E_FIN_FAILED FIN " + two + b" failed ID not in flight")
        connection.expect_error(b"E_TOUCH_FAILED TOUCH " + one + b" failed ID not in flight")
        connection.expect_error(b"E_FIN_FAILED FIN " + four + b" failed ID not in flight")
        stats = broker.channel_stats(topic, channel)
        assert (stats["in_flight_count"], stats["deferred_count"], stats["depth"]) == (0, 1, 1)


def test_case_072_an_id_is_its_very_bytes_not_a_number(shared_broker, topic, channel):
    broker = shared_broker(node_id=0)
    broker.publish(topic, *(b"%d" % number for number in range(32)))
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=32)
        for message in connection.read_messages(32):
            text = message.id.decode()
            # A careless parser reads these as the same number.
            looks = {text.upper(), "+" + text[1:], "0x" + text[2:], " " + text[1:], text[0] + "_" + text[2:]}
            for other in sorted(look for look in looks if look != text and " " not in look):
                connection.fin(other.encode())
                connection.expect_error(f"E_FIN_FAILED FIN {other} failed ID not in flight")
        connection.barrier()
        assert broker.channel_stats(topic, channel)["in_flight_count"] == 32


@pytest.mark.parametrize("line", ["FIN 0123456789abcde", "REQ 0123456789abcdef0 0", "TOUCH "])
def test_case_073_malformed_id_is_fatal(broker, topic, channel, line):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.command(line)
        connection.expect_fatal("E_INVALID invalid message ID")


def test_case_073_malformed_id_is_reported_before_a_bad_timeout(broker, topic, channel):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.command("REQ", "short", "x")
        connection.expect_fatal("E_INVALID invalid message ID")


def test_case_074_messages_of_another_client_cannot_be_answered(broker, topic, channel, delivered):
    owner, message = delivered
    text = message.id.decode()
    with broker.connect() as other:
        other.sub(topic, channel)
        other.fin(message.id)
        other.expect_error(f"E_FIN_FAILED FIN {text} failed client does not own message")
        other.req(message.id, 0)
        other.expect_error(f"E_REQ_FAILED REQ {text} failed client does not own message")
        other.touch(message.id)
        other.expect_error(f"E_TOUCH_FAILED TOUCH {text} failed client does not own message")
        other.barrier()
    owner.fin(message.id)
    owner.barrier()
    assert broker.channel_stats(topic, channel)["in_flight_count"] == 0


def test_case_074_messages_of_another_channel_are_not_in_flight_here(broker, topic, channel, delivered):
    _, message = delivered
    with broker.connect() as other:
        other.sub(topic, channel + "_other")
        other.fin(message.id)
        other.expect_error(f"E_FIN_FAILED FIN {message.id.decode()} failed ID not in flight")


@pytest.mark.parametrize("line", ["FIN", "REQ", f"REQ {ABSENT}", "TOUCH"])
def test_case_076_missing_parameters_are_fatal(broker, topic, channel, line):
    with broker.connect() as connection:
        connection.sub(topic, channel)
        connection.command(line)
        connection.expect_fatal(f"E_INVALID {line.split()[0]} insufficient number of params")


@pytest.mark.parametrize("line", [f"FIN {ABSENT}", f"REQ {ABSENT} 0", "TOUCH"])
def test_case_076_answers_before_sub_are_fatal(broker, line):
    with broker.connect() as connection:
        connection.command(line)
        connection.expect_fatal(f"E_INVALID cannot {line.split()[0]} in current state")


def test_case_077_req_0_redelivers_at_once(broker, topic, channel, delivered):
    connection, message = delivered
    connection.req(message.id, 0)
    again = connection.read_message()
    assert (again.id, again.attempts, again.body) == (message.id, 2, message.body)
    stats = broker.channel_stats(topic, channel)
    (client,) = stats["clients"]
    assert (stats["requeue_count"], stats["timeout_count"], stats["message_count"]) == (1, 0, 1)
    assert (client["requeue_count"], client["message_count"], client["in_flight_count"]) == (1, 2, 1)


def test_case_077_req_with_an_empty_timeout_is_req_0(delivered):
    connection, message = delivered
    connection.command("REQ", message.id, "")
    assert connection.read_message().attempts == 2


def test_case_077_requeued_message_goes_to_another_client_when_its_owner_is_not_ready(
    broker, topic, channel, delivered
):
    connection, message = delivered
    connection.rdy(0)
    connection.req(message.id, 0)
    connection.barrier()
    with broker.connect() as other:
        other.sub(topic, channel, rdy=1)
        assert other.read_message().attempts == 2


@pytest.mark.parametrize("timeout", ["-1", "x", "1.5", "1s"])
def test_case_080_req_timeout_that_is_not_a_number_is_fatal(delivered, timeout):
    connection, message = delivered
    connection.command("REQ", message.id, timeout)
    connection.expect_fatal(f"E_INVALID REQ could not parse timeout {timeout}")


@pytest.mark.deviation("NSQ leaves the messages of a lost client in flight until their timeout")
def test_case_086_messages_of_a_lost_client_are_requeued_at_once(broker, topic, channel):
    broker.publish(topic, *(b"%d" % number for number in range(10)))
    connection = broker.connect()
    connection.sub(topic, channel, rdy=10)
    first = connection.read_messages(10)
    connection.fin(first[0].id)
    connection.barrier()
    connection.abort()
    wait_until(lambda: broker.channel_stats(topic, channel)["client_count"] == 0)
    stats = broker.channel_stats(topic, channel)
    assert (stats["in_flight_count"], stats["depth"], stats["timeout_count"]) == (0, 9, 0)
    with broker.connect() as other:
        other.sub(topic, channel, rdy=10)
        again = other.read_messages(9)
        assert {message.id for message in again} == {message.id for message in first[1:]}
        assert {message.attempts for message in again} == {2}
        other.expect_silence(0.1)


def write_attempts(broker: BrokerThread, attempts: int) -> None:
    """Write it into a stopped broker's file, to save as many deliveries."""
    broker.stop()
    path = broker.data_path / "topics" / "topic.topic" / "channel.channel"
    state = read_channel_state(Files(), path)
    assert state is not None
    assert state.attempts.tolist() == [1]
    path.write_bytes(replace(state, attempts=np.array([attempts], np.uint16)).encode())
    broker.start()


def test_case_087_attempts_wrap_after_65535(own_broker):
    broker = own_broker()
    broker.publish("topic", b"body")
    with broker.connect() as connection:
        connection.sub("topic", "channel", rdy=1)
        line = b"REQ " + connection.read_message().id + b" 0\n"
        for _ in range(65_533 if broker.is_reference else 0):
            connection.send(line)
            connection.read_raw_frame()
    if not broker.is_reference:
        write_attempts(broker, 65_534)
    with broker.connect() as connection:
        connection.sub("topic", "channel", rdy=1)
        seen = [connection.read_message().attempts]
        for _ in range(2):
            connection.send(line)
            seen.append(connection.read_message().attempts)
        assert seen == [65_535, 0, 1]
    broker.restart()
    with broker.connect() as connection:
        connection.sub("topic", "channel", rdy=1)
        assert connection.read_message().attempts == 2
