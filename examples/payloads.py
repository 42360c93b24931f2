"""Payloads as values of your own types."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

import msgspec
import pydantic

from nsparq.client import Message, Subscriptions

app = Subscriptions(nsqd=["127.0.0.1:4150"])


class Currency(Enum):
    EURO = "EUR"
    DOLLAR = "USD"


@dataclass
class Item:
    sku: str
    price: float


@dataclass
class Order:
    number: int
    placed: datetime
    currency: Currency
    items: list[Item]
    note: str | None = None
    labels: dict[str, str] = field(default_factory=dict)


@app.subscribe("orders", "dataclass")
async def by_dataclass(order: Order) -> None:
    print(order.placed.year, sum(item.price for item in order.items), order.currency.name, flush=True)


class Visit(pydantic.BaseModel):
    page: str
    seconds: pydantic.PositiveFloat


@app.subscribe("visits", "pydantic")
async def by_pydantic(visit: Visit, message: Message) -> None:
    print(visit.page, "attempt", message.attempts, flush=True)


class Reading(msgspec.Struct):
    sensor: str
    value: float


@app.subscribe("readings", "msgspec", batch_size=50, batch_timeout=0.1)
async def by_msgspec(readings: list[Reading]) -> None:
    print(max(readings, key=lambda reading: reading.value).sensor, flush=True)


@app.subscribe("lines", "text")
def by_text(line: str) -> None:
    print(line.upper(), flush=True)


if __name__ == "__main__":
    app.run()
