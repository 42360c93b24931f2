"""Consume with a handler, from all nsqd that nsqlookupd knows, until it is stopped."""

import asyncio

from nsparq.client import Config, Consumer, Message, Requeue

config = Config(max_attempts=10, lookupd_poll_interval=15, msg_timeout=120)


class Unavailable(Exception):
    pass


async def store(body: bytes) -> None:
    if body == b"broken":
        raise Unavailable
    print("stored", body.decode(), flush=True)


async def handle(message: Message) -> None:
    if message.body == b"not yet":
        raise Requeue(delay=5, backoff=False)  # not a failure: no back-off
    await store(message.body)  # if it raises: requeued, and the consumer backs off


async def main(stop: asyncio.Event) -> None:
    async with Consumer(
        "events", "storage", handle, nsqlookupd=["127.0.0.1:4161"], concurrency=20, config=config
    ):
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(asyncio.Event()))
