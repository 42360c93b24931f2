"""Publish one message, several at once, a deferred one; and handle errors."""

import asyncio

from nsparq.client import ClientError, Producer, PublishFailed


async def main() -> None:
    async with Producer("127.0.0.1:4150", "127.0.0.1:4250") as producer:
        await producer.publish("events", b"one")
        await producer.publish_many("events", [b"two", b"three"])  # all of them or none
        await producer.publish("events", b"in a minute", defer=60)
        # Many tasks may share a producer: their messages are sent together.
        await asyncio.gather(*(producer.publish("events", b"%d" % number) for number in range(100)))
        try:
            await producer.publish("events", b"x" * 2_000_000)
        except PublishFailed as error:
            print("the broker refused:", error.code)
        except ClientError as error:
            print("not acknowledged, and perhaps not published:", error)


asyncio.run(main())
