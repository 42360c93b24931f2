"""ansq (asyncio) under load: see benchmarks.clients.__main__."""

from __future__ import annotations

import asyncio
import os

import ansq
from ansq.tcp.types import NSQMessage

from benchmarks.clients.load import Load


async def publish(load: Load) -> None:
    writer = await ansq.create_writer([load.address])
    body = load.body.decode()
    load.begin()

    async def work() -> None:
        for _ in range(load.count // load.tasks):
            assert (await writer.pub(load.topic, body)).is_ok

    await asyncio.gather(*(work() for _ in range(load.tasks)))
    load.end()


async def publish_batches(load: Load) -> None:
    writer = await ansq.create_writer([load.address])
    batch = [load.body.decode()] * load.batch
    load.begin()

    async def work() -> None:
        for _ in range(load.count // load.batch // load.tasks):
            assert (await writer.mpub(load.topic, *batch)).is_ok

    await asyncio.gather(*(work() for _ in range(load.tasks)))
    load.end()


async def consume(load: Load) -> None:
    load.begin()
    reader = await ansq.create_reader(load.topic, "bench", [load.address])
    for connection in reader.connections:
        await connection.rdy(load.in_flight)

    async def handle(message: NSQMessage) -> bool:
        return load.received(message.body)

    async for message in reader.messages():
        is_last = await handle(message)
        await message.fin()
        if is_last:
            break
    load.end()


if __name__ == "__main__":
    load = Load.from_arguments()
    load.run(globals()[load.what])
    os._exit(0)
