"""Dead letters for tests, made as a broker makes them."""

from __future__ import annotations

import json

from tests.support import TestBroker, wait_until


def give_up(broker: TestBroker, topic: str, *bodies: bytes) -> None:
    """Make dead letters of these messages, in channel `c`."""
    broker.control("create", topic, "c")
    policy = json.dumps({"policy": {"max_attempts": 1}}).encode()
    broker.request("PUT", f"/channel/settings?topic={topic}&channel=c", policy).expect_json()
    with broker.connect() as connection:
        connection.sub(topic, "c", rdy=1)
        for body in bodies:
            connection.pub(topic, body)
            connection.req(connection.read_message().id)
        wait_until(lambda: broker.channel_stats(topic, "c")["dead_letter_count"] >= len(bodies))  # type: ignore[index]
