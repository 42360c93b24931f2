"""pynsq (Tornado) under load: see benchmarks.clients.__main__."""

from __future__ import annotations

import asyncio
import os

import nsq

from benchmarks.clients.load import Load


async def connected(load: Load) -> nsq.Writer:
    writer = nsq.Writer([load.address])
    # pynsq does not report when it is connected.
    await asyncio.sleep(0.3)
    assert writer.conns
    return writer


async def publish(load: Load, command: str = "pub", messages: int = 1) -> None:
    writer = await connected(load)
    done = asyncio.get_running_loop().create_future()
    commands = load.count // messages
    payload = load.body if messages == 1 else [load.body] * messages
    left, sent = commands, 0

    def answered(connection: object, data: object) -> None:
        nonlocal left
        assert data == b"OK", data
        left -= 1
        if left == 0:
            done.set_result(None)
        elif sent < commands:
            send()

    def send() -> None:
        nonlocal sent
        sent += 1
        getattr(writer, command)(load.topic, payload, callback=answered)

    load.begin()
    for _ in range(load.tasks):
        send()
    await done
    load.end()


async def publish_batches(load: Load) -> None:
    await publish(load, "mpub", load.batch)


async def consume(load: Load) -> None:
    done = asyncio.get_running_loop().create_future()

    def handle(message: nsq.Message) -> bool:
        if load.received(message.body):
            done.set_result(None)
        return True

    load.begin()
    nsq.Reader(
        topic=load.topic,
        channel="bench",
        nsqd_tcp_addresses=[load.address],
        message_handler=handle,
        max_in_flight=load.in_flight,
    )
    await done
    load.end()


if __name__ == "__main__":
    load = Load.from_arguments()
    load.run(globals()[load.what])
    os._exit(0)
