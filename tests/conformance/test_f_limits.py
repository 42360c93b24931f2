"""Group F: limits of timeouts, with small values; the tests wait at the same time."""

from __future__ import annotations

import time

import pytest

from tests.support import unique_name

from .conftest import LIMITS
from .overlap import Overlap

together = Overlap()


@pytest.fixture(scope="module")
def broker(shared_broker):
    return shared_broker(**LIMITS)


@together
def test_case_079_req_beyond_the_maximum_is_clamped(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    broker.publish(topic, b"later")
    with broker.connect() as connection:
        connection.sub(topic, channel, rdy=1)
        message = connection.read_message()
        start = time.monotonic()
        connection.req(message.id, 3_600_000)
        connection.barrier()
        assert broker.channel_stats(topic, channel)["deferred_count"] == 1
        assert connection.read_message().attempts == 2
        assert time.monotonic() - start >= 0.95


@together
def test_case_082_touch_cannot_go_beyond_delivery_plus_max_msg_timeout(broker):
    topic, channel = unique_name("topic"), unique_name("channel")
    broker.publish(topic, b"slow")
    with broker.connect() as connection:
        connection.identify(msg_timeout=1000)
        start = time.monotonic()
        connection.sub(topic, channel, rdy=1)
        message = connection.read_message()
        while True:
            connection.touch(message.id)
            try:
                again = connection.read_message(0.2)
            except TimeoutError:
                continue
            break
        assert (again.id, again.attempts) == (message.id, 2)
        assert time.monotonic() - start >= 1.45


def test_case_101_deferred_publish_limit_follows_its_flag(broker, topic):
    with broker.connect() as connection:
        connection.dpub(topic, 1000, b"at the limit")
        connection.command("DPUB", topic, 1001, body=b"beyond")
        connection.expect_fatal("E_INVALID DPUB timeout 1001 out of range 0-1000")
