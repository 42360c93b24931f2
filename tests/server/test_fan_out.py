"""Many channels of one topic share its frames: each gets all messages, whatever the others do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support import BrokerThread, RawConnection, unique_name
from tests.support.layered import LayeredConnection

CHANNELS = 6
BATCHES = 60
BODIES = [[b"%03d.%03d " % (batch, index) + b"x" * 300 for index in range(200)] for batch in range(BATCHES)]
EXPECTED = [body for batch in BODIES for body in batch]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as broker:
        yield broker


def take_all(connection: RawConnection) -> list[bytes]:
    bodies = []
    while len(bodies) < len(EXPECTED):
        message = connection.read_message()
        bodies.append(message.body)
        connection.fin(message.id)
    return bodies


def drain(connections: list[RawConnection]) -> list[list[bytes]]:
    """Run all of them at the same time."""
    received: list[list[bytes]] = [[] for _ in connections]

    def work(index: int) -> None:
        received[index] = take_all(connections[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(connections))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return received


@pytest.mark.parametrize("is_piled_up", [False, True], ids=["live", "piled up"])
def test_every_channel_gets_everything_in_order(broker: BrokerThread, is_piled_up: bool) -> None:
    topic = unique_name("topic")
    with ExitStack() as stack:
        consumers = [stack.enter_context(RawConnection(broker.address)) for _ in range(CHANNELS)]
        for number, consumer in enumerate(consumers):
            consumer.sub(topic, f"channel{number}", rdy=0 if is_piled_up else 2500)
        with RawConnection(broker.address) as publisher:
            for batch in BODIES:
                publisher.mpub(topic, batch)
        if is_piled_up:
            for consumer in consumers:
                consumer.rdy(2500)
        for bodies in drain(consumers):
            assert bodies == EXPECTED


def test_a_slow_consumer_and_one_with_a_layer_get_the_same_messages_later(broker: BrokerThread) -> None:
    topic = unique_name("topic")
    with ExitStack() as stack:
        consumers: list[RawConnection] = [
            stack.enter_context(RawConnection(broker.address)) for _ in range(CHANNELS - 1)
        ]
        layered = stack.enter_context(LayeredConnection(broker.address))
        layered.upgrade(snappy=True)
        consumers.append(layered)
        for number, consumer in enumerate(consumers):
            consumer.sub(topic, f"channel{number}", rdy=2500)
        stalled, *others = consumers
        with RawConnection(broker.address) as publisher:
            for batch in BODIES:
                publisher.mpub(topic, batch)
        for bodies in drain(others):
            assert bodies == EXPECTED
        assert take_all(stalled) == EXPECTED


def test_a_client_that_disconnects_during_the_delivery_does_not_affect_the_others(
    broker: BrokerThread,
) -> None:
    topic = unique_name("topic")
    with ExitStack() as stack:
        consumers = [stack.enter_context(RawConnection(broker.address)) for _ in range(CHANNELS)]
        for number, consumer in enumerate(consumers):
            consumer.sub(topic, f"channel{number}", rdy=2500)
        with RawConnection(broker.address) as publisher:
            for number, batch in enumerate(BODIES):
                publisher.mpub(topic, batch)
                if number == BATCHES // 2:
                    consumers[0].abort()
        for bodies in drain(consumers[1:]):
            assert bodies == EXPECTED
        with RawConnection(broker.address) as successor:
            successor.sub(topic, "channel0", rdy=2500)
            assert sorted(take_all(successor)) == EXPECTED
