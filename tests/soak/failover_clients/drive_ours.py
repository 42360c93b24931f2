"""nsparq.client: see the package."""

from __future__ import annotations

import asyncio
import logging

from nsparq.client import ClientError, Config, Consumer, Message, Producer
from tests.soak.failover_clients.driving import (
    ANSWER_S,
    CHANNEL,
    HEARTBEAT_S,
    IN_FLIGHT,
    PAUSE_S,
    POLL_S,
    Driver,
)


async def main() -> None:
    driver = Driver()
    config = Config(
        heartbeat_interval=HEARTBEAT_S,
        read_timeout=2 * HEARTBEAT_S,
        publish_timeout=ANSWER_S,
        lookupd_poll_interval=POLL_S,
        max_attempts=0,
    )

    async def handle(message: Message) -> None:
        driver.received(message.id, message.body)

    async with (
        Consumer(
            driver.topic,
            CHANNEL,
            handle,
            nsqlookupd=[driver.lookupd],
            max_in_flight=IN_FLIGHT,
            config=config,
        ),
        Producer(*driver.nsqd, config=config) as producer,
    ):
        while not driver.is_over.is_set():
            body = driver.next_body()
            try:
                await producer.publish(driver.topic, body)
            except ClientError:
                pass
            else:
                driver.acknowledged(body)
            await asyncio.sleep(PAUSE_S)
        await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
