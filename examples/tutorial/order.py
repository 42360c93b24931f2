"""Publish a few orders."""

import asyncio
import json

from nsparq.client import Producer


async def main() -> None:
    async with Producer("127.0.0.1:4150") as producer:
        for number in range(1, 4):
            order = {"number": number, "item": "tea", "price": 4.5}
            await producer.publish("orders", json.dumps(order).encode())
            print("ordered", number)


asyncio.run(main())
