"""The producer: events to nsqd, in batches, no faster than asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from nsparq.client import Producer

__all__ = ["send"]

BATCH: Final = 500
MAX_LEAD_S: Final = 0.2
"""At a low rate a batch is what comes in so long."""


async def send(
    producer: Producer,
    topic: str,
    bodies: Iterable[bytes],
    *,
    rate: float = 0.0,
    acknowledged: Callable[[int], None] = lambda count: None,
) -> None:
    """All of them, in order; `rate` per second, or as fast as it goes. Raises what publishing raises."""
    size = BATCH if not rate else max(1, min(BATCH, int(rate * MAX_LEAD_S)))
    source = iter(bodies)
    began, sent = time.monotonic(), 0
    while batch := list(islice(source, size)):
        await producer.publish_many(topic, batch)
        sent += len(batch)
        acknowledged(len(batch))
        if rate:
            ahead = sent / rate - (time.monotonic() - began)
            if ahead > 0:
                await asyncio.sleep(ahead)
