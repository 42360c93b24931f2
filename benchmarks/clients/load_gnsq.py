"""gnsq (gevent) under load: see benchmarks.clients.__main__."""

from __future__ import annotations

import os

import gevent
import gevent.event
import gnsq

from benchmarks.clients.load import Load


def started(load: Load) -> gnsq.Producer:
    producer = gnsq.Producer(load.address)
    producer.start()
    gevent.sleep(0.3)
    return producer


def publish(load: Load) -> None:
    producer = started(load)
    body = load.body
    load.begin()

    def work() -> None:
        for _ in range(load.count // load.tasks):
            producer.publish(load.topic, body)

    gevent.joinall([gevent.spawn(work) for _ in range(load.tasks)], raise_error=True)
    load.end()


def publish_batches(load: Load) -> None:
    producer = started(load)
    batch = [load.body] * load.batch
    load.begin()

    def work() -> None:
        for _ in range(load.count // load.batch // load.tasks):
            producer.multipublish(load.topic, batch)

    gevent.joinall([gevent.spawn(work) for _ in range(load.tasks)], raise_error=True)
    load.end()


def consume(load: Load) -> None:
    done = gevent.event.Event()
    consumer = gnsq.Consumer(
        load.topic, "bench", nsqd_tcp_addresses=[load.address], max_in_flight=load.in_flight
    )

    @consumer.on_message.connect
    def handle(consumer: gnsq.Consumer, message: gnsq.Message) -> None:
        if load.received(message.body):
            done.set()

    load.begin()
    consumer.start(block=False)
    done.wait()
    load.end()


if __name__ == "__main__":
    load = Load.from_arguments()
    globals()[load.what](load)
    os._exit(0)
