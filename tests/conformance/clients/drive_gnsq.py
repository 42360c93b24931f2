"""Drive gnsq (gevent) through the scenario: python drive_gnsq.py HOST PORT TOPIC."""

from __future__ import annotations

import logging

import gevent
import gnsq
import scenario
from gnsq.errors import NSQException


def publish_until_acknowledged(producer: gnsq.Producer, *bodies: str, defer: int | None = None) -> None:
    """Publish several bodies as MPUB, one as PUB, a deferred one as DPUB."""
    while True:
        try:
            if len(bodies) > 1:
                producer.multipublish(run.topic, [body.encode() for body in bodies])
            else:
                producer.publish(run.topic, bodies[0].encode(), defer=defer)
        # KeyError: gnsq removes the answer queue of a lost connection while it is still in use.
        except (NSQException, KeyError):
            gevent.sleep(0.05)
        else:
            return


def touch_and_finish(message: gnsq.Message) -> None:
    gevent.sleep(scenario.TOUCH_AFTER)
    message.touch()
    gevent.sleep(scenario.FINISH_TOUCHED_AFTER - scenario.TOUCH_AFTER)
    message.finish()
    run.finish(message.body)


def handle(consumer: gnsq.Consumer, message: gnsq.Message) -> None:
    message.enable_async()
    match run.action(message.body, message.attempts):
        case "finish":
            message.finish()
            run.finish(message.body)
        case "requeue":
            message.requeue(0, backoff=False)
        case "touch":
            gevent.spawn(touch_and_finish, message)


logging.basicConfig(level=logging.WARNING)
run = scenario.Scenario()

producer = gnsq.Producer(run.address, max_backoff_duration=1)
producer.start()
publish_until_acknowledged(producer, scenario.SINGLE)
run.published("PUB", [scenario.SINGLE])
publish_until_acknowledged(producer, *scenario.MULTI)
run.published("MPUB", scenario.MULTI)
publish_until_acknowledged(producer, scenario.DEFERRED, defer=scenario.DEFER_MS)
run.published("DPUB", [scenario.DEFERRED])

consumer = gnsq.Consumer(
    run.topic,
    scenario.CHANNEL,
    run.address,
    message_handler=handle,
    max_in_flight=scenario.MAX_IN_FLIGHT,
    max_backoff_duration=1,
)
consumer.start(block=False)
while not run.worked:
    gevent.sleep(0.02)
run.report("worked")

publish_until_acknowledged(producer, *scenario.KEPT)
run.published("MPUB", scenario.KEPT)
while not run.restarted.is_set():
    gevent.sleep(0.02)
publish_until_acknowledged(producer, scenario.AFTER)
run.published("PUB", [scenario.AFTER])
while not run.recovered:
    gevent.sleep(0.02)
gevent.sleep(0.2)
consumer.close()
producer.close()
run.report("done")
