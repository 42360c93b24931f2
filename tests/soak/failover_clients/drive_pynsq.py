"""pynsq: see the package."""

from __future__ import annotations

import asyncio
import logging

import nsq

from tests.soak.failover_clients.driving import (
    ANSWER_S,
    CHANNEL,
    HEARTBEAT_S,
    IN_FLIGHT,
    PAUSE_S,
    POLL_S,
    Driver,
)


async def publish(writer: nsq.Writer, topic: str, body: bytes) -> bool:
    """Whether nsqd said OK in time."""
    answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def callback(connection: object, data: object) -> None:
        if not answered.done():
            answered.set_result(data == b"OK")

    writer.pub(topic, body, callback=callback)
    try:
        return await asyncio.wait_for(answered, ANSWER_S)
    except TimeoutError:
        return False


async def main() -> None:
    driver = Driver()

    def handle(message: nsq.Message) -> bool:
        driver.received(message.id, message.body)
        return True

    writer = nsq.Writer(driver.nsqd, reconnect_interval=POLL_S, heartbeat_interval=HEARTBEAT_S)
    reader = nsq.Reader(
        driver.topic,
        CHANNEL,
        message_handler=handle,
        lookupd_http_addresses=[f"http://{driver.lookupd}"],
        lookupd_poll_interval=POLL_S,
        heartbeat_interval=HEARTBEAT_S,
        max_in_flight=IN_FLIGHT,
        max_tries=0,
    )
    while not driver.is_over.is_set():
        body = driver.next_body()
        if await publish(writer, driver.topic, body):
            driver.acknowledged(body)
        await asyncio.sleep(PAUSE_S)
    await asyncio.Event().wait()
    reader.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
