"""Group G: CLS and NOP."""

from __future__ import annotations

import pytest


@pytest.fixture
def closing(broker, topic, channel):
    """A connection after CLS with four of six messages in flight, and those messages."""
    broker.publish(topic, *(b"%d" % number for number in range(6)))
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=4)
        messages = connection.read_messages(4)
        connection.cls()
        yield connection, messages


def test_case_088_after_cls_no_more_messages_come(broker, topic, channel, closing):
    connection, messages = closing
    connection.fin(messages[0].id)
    connection.expect_silence(0.3)
    stats = broker.channel_stats(topic, channel)
    (client,) = stats["clients"]
    assert (client["state"], client["ready_count"]) == (4, 0)
    assert (stats["depth"], stats["in_flight_count"]) == (2, 3)


def test_case_088_after_cls_messages_are_still_answered(broker, topic, channel, closing):
    connection, messages = closing
    connection.fin(messages[0].id)
    connection.req(messages[1].id, 0)
    connection.req(messages[2].id, 60_000)
    connection.touch(messages[3].id)
    connection.barrier()
    stats = broker.channel_stats(topic, channel)
    (client,) = stats["clients"]
    assert (client["finish_count"], client["requeue_count"], client["in_flight_count"]) == (1, 2, 1)
    assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (3, 1, 1)


@pytest.mark.parametrize("count", ["5", "abc"])
def test_case_088_after_cls_rdy_is_ignored_with_any_count(closing, count):
    connection, _ = closing
    connection.command("RDY", count)
    connection.barrier()
    connection.expect_silence(0.1)


def test_case_088_after_cls_publishing_works(topic, closing):
    connection, _ = closing
    connection.pub(topic, b"more")
    connection.mpub(topic, [b"more", b"and more"])
    connection.dpub(topic, 60_000, b"later")


@pytest.mark.parametrize("line", ["CLS", "SUB t c", "IDENTIFY", "AUTH"])
def test_case_088_after_cls_these_commands_are_fatal(closing, line):
    connection, _ = closing
    connection.command(line)
    connection.expect_fatal(f"E_INVALID cannot {line.split()[0]} in current state")


def test_case_088_the_server_does_not_close_by_itself(closing):
    connection, messages = closing
    for message in messages:
        connection.fin(message.id)
    connection.barrier()
    connection.expect_silence(0.3)


def test_case_089_cls_before_sub_is_fatal(broker):
    with broker.connect() as connection:
        connection.command("CLS")
        connection.expect_fatal("E_INVALID cannot CLS in current state")


def test_case_090_nop_has_no_reply_in_any_state(broker, topic, channel):
    with broker.connect() as connection:
        connection.nop()
        connection.expect_silence(0.1)
        connection.identify()
        connection.nop()
        connection.sub(topic, channel)
        connection.nop()
        connection.barrier()
        connection.cls()
        connection.nop()
        connection.barrier()
        connection.expect_silence(0.1)
