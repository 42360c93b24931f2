"""Publish one message, several at once, a deferred one, an object; and handle errors."""

import asyncio
from dataclasses import dataclass

from nsparq.client import ClientError, Producer, PublishFailed


@dataclass
class Order:
    number: int
    item: str


async def main() -> None:
    async with Producer("127.0.0.1:4150", "127.0.0.1:4250") as producer:
        await producer.publish("events", b"one")
        await producer.publish_many("events", [b"two", b"three"])  # all of them or none
        await producer.publish("events", b"in a minute", defer=60)
        await producer.publish("orders", Order(1, "tea"))  # {"number":1,"item":"tea"}
        # Many tasks may share a producer: their messages are sent together.
        await asyncio.gather(*(producer.publish("events", b"%d" % number) for number in range(100)))
        try:
            await producer.publish("events", b"x" * 2_000_000)
        except PublishFailed as error:
            print("the broker refused:", error.code)
        except ClientError as error:
            print("not acknowledged, and perhaps not published:", error)


asyncio.run(main())
