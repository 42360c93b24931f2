"""Bill every order."""

from dataclasses import dataclass

from nsparq.client import Subscriptions

app = Subscriptions(nsqd=["127.0.0.1:4150"])


@dataclass
class Order:
    number: int
    item: str
    price: float


@app.subscribe("orders", "billing", dead_letter="orders.dead")
async def bill(order: Order) -> None:
    print(f"billed order {order.number}: {order.item}, {order.price:.2f}", flush=True)


if __name__ == "__main__":
    app.run()
