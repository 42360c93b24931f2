"""Somebody who has nothing to do with the fault, and must not notice it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import BrokerProcess, wait_until


class RoundTrips(threading.Thread):
    """A well-behaved client on the side: publishes, receives its own message, again and again."""

    def __init__(self, broker: BrokerProcess, topic: str = "side") -> None:
        super().__init__(daemon=True)
        self.topic = topic
        self.stopping = threading.Event()
        self.longest = 0.0
        self.count = 0
        self.problem: BaseException | None = None
        self.consumer = broker.connect(timeout=10)
        self.consumer.identify(heartbeat_interval=1000)
        self.consumer.sub(topic, "c", rdy=1)
        self.producer = broker.connect(timeout=10)
        self.producer.identify(heartbeat_interval=1000)

    def run(self) -> None:
        try:
            while not self.stopping.wait(0.002):
                started = time.monotonic()
                body = b"%d" % self.count
                self.producer.pub(self.topic, body)
                message = self.consumer.read_message()
                assert message.body == body
                self.consumer.fin(message.id)
                self.longest = max(self.longest, time.monotonic() - started)
                self.count += 1
        except BaseException as problem:
            self.problem = problem
        finally:
            self.consumer.close()
            self.producer.close()


@contextmanager
def well_served(broker: BrokerProcess, within: float) -> Iterator[RoundTrips]:
    """Somebody else's round trips work throughout, and none takes longer than this."""
    side = RoundTrips(broker)
    side.start()
    try:
        yield side
        wait_until(lambda: side.count >= 10 or side.problem, 10, what="ten round trips")
    finally:
        side.stopping.set()
        side.join(20)
    assert side.problem is None, side.problem
    assert side.longest < within, f"a round trip took {side.longest:.3f} s (of {side.count})"
