"""nsparq.client under load: see benchmarks.clients.__main__."""

from __future__ import annotations

import asyncio

from benchmarks.clients.load import Load
from nsparq.client import Consumer, Message, Producer


async def publish(load: Load) -> None:
    async with Producer(load.address) as producer:
        await producer.connect()
        body, headers = load.body, load.message_headers or None
        load.begin()

        async def work() -> None:
            for _ in range(load.count // load.tasks):
                await producer.publish(load.topic, body, headers=headers)

        await asyncio.gather(*(work() for _ in range(load.tasks)))
        load.end()


async def publish_batches(load: Load) -> None:
    batch = [load.body] * load.batch
    headers = load.batch_headers(load.batch)
    async with Producer(load.address) as producer:
        await producer.connect()
        load.begin()

        async def work() -> None:
            for _ in range(load.count // load.batch // load.tasks):
                await producer.publish_many(load.topic, batch, headers=headers)

        await asyncio.gather(*(work() for _ in range(load.tasks)))
        load.end()


async def consume(load: Load) -> None:
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        assert not load.headers or message.headers["traceparent"]
        if load.received(message.body):
            done.set()

    load.begin()
    async with Consumer(load.topic, "bench", handle, nsqd=[load.address], max_in_flight=load.in_flight):
        await done.wait()
        load.end()


async def consume_batches(load: Load) -> None:
    done = asyncio.Event()

    async def handle(messages: list[Message]) -> None:
        for message in messages:
            assert not load.headers or message.headers["traceparent"]
            if load.received(message.body):
                done.set()

    load.begin()
    async with Consumer(
        load.topic,
        "bench",
        batch_handler=handle,
        batch_size=load.batch,
        nsqd=[load.address],
        max_in_flight=load.in_flight,
    ):
        await done.wait()
        load.end()


if __name__ == "__main__":
    load = Load.from_arguments()
    load.run(globals()[load.what])
