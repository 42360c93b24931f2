"""A FastAPI service that publishes orders, and the function that handles them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from nsparq.client import ClientError, Config, Producer, Subscriptions

NSQD = "127.0.0.1:4150"


class Order(BaseModel):
    number: int
    item: str


consumers = Subscriptions(nsqd=[NSQD])


@consumers.subscribe("orders", "billing", retries=3, retry_delay=1, dead_letter="orders.dead")
async def bill(order: Order) -> None:
    print(f"billed order {order.number}: {order.item}", flush=True)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Producer(NSQD, config=Config(publish_timeout=5)) as producer, consumers:
        app.state.producer = producer
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def order(order: Order) -> dict[str, str]:
    try:
        await app.state.producer.publish("orders", order)
    except ClientError as error:
        raise HTTPException(503, "the order was not accepted: try again") from error
    return {"status": "accepted"}


@app.get("/metrics", response_class=PlainTextResponse)
async def metrics() -> str:
    return consumers.metrics()
