"""gnsq: see the package."""

from __future__ import annotations

import logging
import time
from itertools import cycle

import gevent
import gnsq
from gnsq.errors import NSQException

from tests.soak.failover_clients.driving import (
    ANSWER_S,
    CHANNEL,
    HEARTBEAT_S,
    IN_FLIGHT,
    PAUSE_S,
    POLL_S,
    Driver,
)

SILENT_S = 3.0


def publish(producer: gnsq.Producer, topic: str, body: bytes) -> bool:
    """Whether nsqd said OK in time."""
    try:
        with gevent.Timeout(ANSWER_S):
            producer.publish(topic, body, block=False)
    # KeyError: gnsq removes the answer queue of a lost connection while it is still in use.
    except (NSQException, KeyError, gevent.Timeout):
        return False
    return True


def connect(address: str) -> gnsq.Producer:
    """One nsqd for each producer: it does not try another while the first is silent, and not the
    same again after a connect that timed out."""
    producer = gnsq.Producer([address], **settings)
    with gevent.Timeout(ANSWER_S, False):
        producer.start()
    return producer


def handle(consumer: gnsq.Consumer, message: gnsq.Message) -> None:
    global received_at
    received_at = time.monotonic()
    driver.received(message.id, message.body)


def consume() -> None:
    """A new consumer when nothing has come for some time: gnsq asks for no message any more after
    an nsqd was silent while it connected (AttributeError in a greenlet of its)."""
    global received_at
    while True:
        received_at = time.monotonic()
        consumer = gnsq.Consumer(
            driver.topic,
            CHANNEL,
            lookupd_http_addresses=[driver.lookupd],
            message_handler=handle,
            lookupd_poll_interval=POLL_S,
            max_in_flight=IN_FLIGHT,
            **settings,
        )
        consumer.start(block=False)
        while time.monotonic() - received_at < SILENT_S:
            gevent.sleep(PAUSE_S)
        consumer.close()


logging.basicConfig(level=logging.WARNING)
driver = Driver()
received_at = 0.0
settings = {"heartbeat_interval": HEARTBEAT_S, "timeout": 2 * HEARTBEAT_S, "max_backoff_duration": POLL_S}
gevent.spawn(consume)
for address in cycle(driver.nsqd):
    producer = connect(address)
    while not driver.is_over.is_set():
        body = driver.next_body()
        if not publish(producer, driver.topic, body):
            break
        driver.acknowledged(body)
        gevent.sleep(PAUSE_S)
    producer.close()
    if driver.is_over.is_set():
        break
    gevent.sleep(PAUSE_S)
while True:
    gevent.sleep(1)
