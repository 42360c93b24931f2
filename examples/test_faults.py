"""Tests of a program while the network fails."""

import asyncio

import pytest

from nsparq.client import Config, Consumer, Message, Producer, PublishTimeout
from nsparq.testing import Broker, FaultProxy, run_broker


def test_a_silent_broker_is_an_error_in_time(nsq_proxy: FaultProxy, nsq_topic: str) -> None:
    async def main() -> None:
        async with Producer(nsq_proxy.address, config=Config(publish_timeout=0.5)) as producer:
            await producer.publish(nsq_topic, b"arrives")
            nsq_proxy.stall()
            with pytest.raises(PublishTimeout):  # instead of waiting forever
                await producer.publish(nsq_topic, b"may arrive, or not")
            nsq_proxy.heal()

    asyncio.run(main())


def test_messages_outlive_a_connection_cut_in_the_middle_of_one(
    nsq_broker: Broker, nsq_proxy: FaultProxy, nsq_topic: str
) -> None:
    seen: set[bytes] = set()

    async def handle(message: Message) -> None:
        seen.add(message.body)

    async def main() -> None:
        config = Config(reconnect_delay=0.01)
        async with Consumer(nsq_topic, "test", handle, nsqd=[nsq_proxy.address], config=config):
            await asyncio.to_thread(nsq_proxy.wait_connections, 1)
            nsq_proxy.cut_after(200)
            nsq_broker.publish(nsq_topic, b"x" * 1000, b"y" * 1000)
            await asyncio.to_thread(nsq_proxy.wait_connections, 0)
            nsq_proxy.heal()
            await nsq_broker.wait_empty_async(nsq_topic, "test")

    asyncio.run(main())
    assert seen == {b"x" * 1000, b"y" * 1000}


def test_messages_outlive_a_restart_of_the_broker() -> None:
    with run_broker() as broker:
        broker.publish("events", b"kept")
        broker.restart()
        assert [message.body for message in broker.peek("events")] == [b"kept"]
