"""A pynsq consumer that finds its brokers by nsqlookupd: TOPIC CHANNEL HOST:PORT…; prints each
body."""

from __future__ import annotations

import asyncio
import logging
import sys

import nsq


def handle(message: nsq.Message) -> bool:
    sys.stdout.write(message.body.decode() + "\n")
    sys.stdout.flush()
    return True


async def main() -> None:
    topic, channel, *lookupds = sys.argv[1:]
    nsq.Reader(
        topic,
        channel,
        message_handler=handle,
        lookupd_http_addresses=lookupds,
        lookupd_poll_interval=1,  # of one of them, in turn
        max_in_flight=300,
        max_tries=0,
    )
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("nsq.client").setLevel(logging.CRITICAL)  # a line for each FIN that comes too late
    asyncio.run(main())
