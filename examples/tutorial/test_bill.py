"""The real handler, a real broker, a few milliseconds."""

import asyncio

import pytest
from bill import Order, bill

from nsparq.client import Subscriptions
from nsparq.testing import Broker


def test_a_handler_is_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(bill(Order(1, "tea", 4.5)))
    assert capsys.readouterr().out == "billed order 1: tea, 4.50\n"


def test_orders_are_billed(nsq_broker: Broker, nsq_topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    app = Subscriptions(nsqd=[nsq_broker.tcp_address])
    app.subscribe(nsq_topic, "billing")(bill)
    nsq_broker.publish(nsq_topic, b'{"number": 2, "item": "coffee", "price": 3}')

    async def main() -> None:
        async with app:
            await nsq_broker.wait_empty_async(nsq_topic, "billing")

    asyncio.run(main())
    assert capsys.readouterr().out == "billed order 2: coffee, 3.00\n"
