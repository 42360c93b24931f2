"""Somebody who has nothing to do with the fault, and must not notice it.

What may not happen is that the daemon computes for long before it answers the bystander. So a round
trip is measured in processor time of the daemon's event loop: on a busy machine it takes longer,
but no more of that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import TestBroker, wait_until
from tests.support.polling import DEADLINE

ENOUGH = 10
"""Round trips that a test waits for. Later ones, during a long fault, come more slowly."""


class RoundTrips(threading.Thread):
    """A normal client beside the fault: publishes and receives its own message, repeatedly."""

    def __init__(self, broker: TestBroker, topic: str = "side") -> None:
        super().__init__(daemon=True)
        self.broker = broker
        self.topic = topic
        self.stopping = threading.Event()
        self.longest = 0.0
        """Most CPU time of the daemon during one round trip, in seconds."""
        self.count = 0
        self.problem: BaseException | None = None
        self.consumer = broker.connect()
        self.consumer.identify(heartbeat_interval=60_000)
        self.consumer.sub(topic, "c", rdy=1)
        self.producer = broker.connect()
        self.producer.identify(heartbeat_interval=60_000)

    def run(self) -> None:
        try:
            while not self.stopping.wait(0.01 if self.count < ENOUGH else 0.03):
                started = self.broker.busy_s()
                body = b"%d" % self.count
                self.producer.pub(self.topic, body)
                message = self.consumer.read_message()
                assert message.body == body
                self.consumer.fin(message.id)
                self.longest = max(self.longest, self.broker.busy_s() - started)
                self.count += 1
        except BaseException as problem:
            self.problem = problem
        finally:
            self.consumer.close()
            self.producer.close()


@contextmanager
def well_served(broker: TestBroker, within: float) -> Iterator[RoundTrips]:
    """Another client's round trips work throughout, with less CPU time than this in each."""
    side = RoundTrips(broker)
    side.start()
    try:
        yield side
        wait_until(lambda: side.count >= ENOUGH or side.problem, what="ten round trips")
    finally:
        side.stopping.set()
        side.join(DEADLINE)
    assert side.problem is None, side.problem
    assert side.longest < within, f"{side.longest:.3f} s of work in one round trip (of {side.count})"
