"""TLS with a client certificate, compression, and a secret."""

import asyncio
import os

from nsparq.client import Config, Producer

config = Config(
    tls_v1=True,
    tls_root_ca_file="ca.pem",
    tls_cert="client.pem",
    tls_key="client.key",
    deflate=True,
    auth_secret=os.environ["NSQ_SECRET"],
)


async def main() -> None:
    async with Producer("nsqd.example.com:4150", config=config) as producer:
        await producer.publish("events", b"for your eyes only")


asyncio.run(main())
