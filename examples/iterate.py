"""Consume without a handler: a message is finished when the next one is requested."""

import asyncio

from nsparq.client import Consumer


async def main() -> None:
    async with Consumer("events", "reader", nsqd=["127.0.0.1:4150"]) as consumer:
        async for message in consumer:
            print(message.attempts, message.body.decode())
            if message.body == b"end":
                message.finish()
                break


asyncio.run(main())
