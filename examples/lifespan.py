"""A producer that handlers share, for as long as the subscriptions run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nsparq.client import Producer, Subscriptions

producer: Producer


@asynccontextmanager
async def lifespan() -> AsyncIterator[None]:
    global producer
    async with Producer("127.0.0.1:4150") as producer:
        yield


app = Subscriptions(nsqd=["127.0.0.1:4150"], lifespan=lifespan)


@app.subscribe("words", "upper")
async def upper(word: str) -> None:
    await producer.publish("words.upper", word.upper())


if __name__ == "__main__":
    app.run()
