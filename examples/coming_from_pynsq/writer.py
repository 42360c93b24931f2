import asyncio

from nsparq.client import ClientError, Producer


async def main() -> None:
    async with Producer("127.0.0.1:4150") as producer:
        try:
            await producer.publish("events", b"hello")
            print("OK")
        except ClientError as error:
            print("failed:", error)


asyncio.run(main())
