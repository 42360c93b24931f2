"""Headers: beside the body, for what programs between producer and consumer need to know."""

import asyncio

from nsparq.client import Consumer, HeadersNotSupported, Message, Producer

CLOUD_EVENT = {
    "ce-specversion": "1.0",
    "ce-id": "17",
    "ce-source": "/shop",
    "ce-type": "com.example.order.placed",
    "content-type": "application/json",
}


async def publish() -> None:
    async with Producer("127.0.0.1:4150") as producer:
        try:
            await producer.publish("orders", {"number": 1}, headers={"tenant": "acme"})
        except HeadersNotSupported as error:
            print("not published:", error)  # NSQ's own nsqd
        await producer.publish("orders", {"number": 2}, defer=0.1, headers=CLOUD_EVENT)
        # The same headers for all messages, or those of each.
        await producer.publish_many("orders", [b"3", b"4"], headers={"tenant": "acme"})
        await producer.publish_many("orders", [b"5", b"6"], headers=[{"tenant": "apex"}, None])


async def consume(count: int) -> None:
    done = asyncio.Semaphore(0)

    async def handle(message: Message) -> None:
        print(message.headers.get("ce-type") or message.headers.get("tenant", "-"), message.body.decode())
        done.release()

    async with Consumer("orders", "print", handle, nsqd=["127.0.0.1:4150"]):
        for _ in range(count):
            await done.acquire()


if __name__ == "__main__":
    asyncio.run(publish())
    asyncio.run(consume(6))
