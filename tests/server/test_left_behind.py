"""Clients that come and go leave no objects behind in nsqd and nsqlookupd."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path

from nsparq.broker.channel import Channel
from nsparq.broker.client import Client
from nsparq.broker.topic import Topic
from nsparq.http.connection import HttpConnection
from nsparq.http.reading import RequestReader
from nsparq.lookup.registry import Producer
from nsparq.lookup.tcp import Connection as LookupConnection
from nsparq.server.connection import Connection
from nsparq.wire.server import ServerProtocol
from tests.support import BrokerThread, TestBroker, wait_until
from tests.support.lookupd import LookupdThread

COUNTED = (
    Channel, Client, Topic, HttpConnection, RequestReader, Producer, LookupConnection, Connection,
    ServerProtocol,
    asyncio.TimerHandle, asyncio.Task,
)  # fmt: skip


def objects() -> Counter[str]:
    gc.collect()
    return Counter(type(o).__qualname__ for o in gc.get_objects() if isinstance(o, COUNTED))


def come_and_go(broker: TestBroker, topic: str) -> None:
    """Create, use and delete a topic, with clients that disconnect in the middle of a command."""
    with broker.connect() as consumer, broker.connect() as publisher:
        consumer.identify(client_id=topic)
        consumer.sub(topic, "c", rdy=3)
        publisher.mpub(topic, [b"finished", b"requeued", b"in flight"])
        publisher.dpub(topic, 60_000, b"later")
        first, second, _ = consumer.read_messages(3)
        consumer.fin(first.id)
        consumer.req(second.id, 60_000)
        consumer.barrier()
        # It disconnects in the middle of a message.
        publisher.send(b"PUB %b\n\x00\x00\x10\x00half" % topic.encode())
    broker.http("POST", "/pub", b"x", topic=topic)
    broker.http("GET", "/stats", topic=topic)
    broker.http("POST", "/topic/delete", topic=topic)


def test_clients_that_come_and_go_leave_nothing_behind(tmp_path: Path):
    with (
        LookupdThread() as lookupd,
        BrokerThread(tmp_path, lookupd_tcp_address=("{}:{}".format(*lookupd.address),)) as broker,
    ):

        def use(rounds: range) -> None:
            for number in rounds:
                come_and_go(broker, f"t{number}")
            wait_until(lambda: not broker.call(lambda b: b.clients))

        def grown() -> dict[str, int]:
            return {name: n for name, n in objects().items() if n > first[name] + 90}

        use(range(20))
        first = objects()
        use(range(20, 150))
        # The queue scan's heap may hold some that are gone; their number does not grow with use.
        # A deleted topic stays until nsqlookupd has answered for it, which a busy one does late.
        wait_until(lambda: not grown(), what=grown)
