"""gnsq: see the package."""

from __future__ import annotations

import logging

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


def publish(producer: gnsq.Producer, topic: str, body: bytes) -> bool:
    """Whether nsqd said OK in time."""
    try:
        with gevent.Timeout(ANSWER_S):
            producer.publish(topic, body)
    # KeyError: gnsq removes the answer queue of a lost connection while it is still in use.
    except (NSQException, KeyError, gevent.Timeout):
        return False
    return True


def new_producer() -> gnsq.Producer:
    producer = gnsq.Producer(driver.nsqd, **settings)
    # It connects to one nsqd after the other, and one may be silent.
    gevent.spawn(producer.start)
    return producer


def handle(consumer: gnsq.Consumer, message: gnsq.Message) -> None:
    driver.received(message.id, message.body)


logging.basicConfig(level=logging.WARNING)
driver = Driver()
settings = {"heartbeat_interval": HEARTBEAT_S, "timeout": 2 * HEARTBEAT_S, "max_backoff_duration": POLL_S}
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
producer = new_producer()
while not driver.is_over.is_set():
    body = driver.next_body()
    if publish(producer, driver.topic, body):
        driver.acknowledged(body)
    else:
        # It does not try an nsqd again after a connect that timed out.
        producer.close()
        producer = new_producer()
    gevent.sleep(PAUSE_S)
while True:
    gevent.sleep(1)
