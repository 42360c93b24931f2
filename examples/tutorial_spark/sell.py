"""A small shop that publishes orders. In its time a second passes between two orders."""

import json
import sys
import time
from datetime import UTC, datetime, timedelta

from nsparq.client.sync import Producer

ITEMS = {"tea": 4.5, "cake": 3.0, "coffee": 3.8}
count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000

with Producer("127.0.0.1:4150") as producer:
    opened = datetime(2026, 11, 15, 8, 0, tzinfo=UTC)
    for number in range(count):
        item = list(ITEMS)[number % 3]
        at = opened + timedelta(seconds=number)
        order = {"number": number, "item": item, "price": ITEMS[item], "at": at.isoformat()}
        producer.publish("orders", json.dumps(order).encode())
        time.sleep(0.01)
print(count, "orders")
