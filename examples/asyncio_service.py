"""A producer and a consumer beside other work on one event loop, with a clean stop."""

import asyncio
import signal
from contextlib import suppress
from dataclasses import dataclass

from nsparq.client import Producer, Subscriptions

NSQD = "127.0.0.1:4150"


@dataclass
class Reading:
    number: int
    celsius: float


async def publish_readings(producer: Producer) -> None:
    number = 0
    while True:
        await producer.publish("readings", Reading(number, 20.5))
        number += 1
        await asyncio.sleep(0.1)


def make_consumers(producer: Producer) -> Subscriptions:
    consumers = Subscriptions(nsqd=[NSQD])

    @consumers.subscribe("readings", "alarms", retries=3, retry_delay=1)
    async def check(reading: Reading) -> None:
        if reading.celsius > 20:
            await producer.publish("alarms", f"reading {reading.number} is too warm")

    return consumers


async def main() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    # The producer is closed last: handlers of messages in flight still need it.
    async with Producer(NSQD, retry=True) as producer, make_consumers(producer):
        publishing = asyncio.create_task(publish_readings(producer))
        await stop.wait()
        publishing.cancel()
        with suppress(asyncio.CancelledError):
            await publishing


if __name__ == "__main__":
    asyncio.run(main())
