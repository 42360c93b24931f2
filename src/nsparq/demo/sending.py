"""What the demo puts into the stack: its pipeline file, and the events at a given rate."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Final

from nsparq.client import Producer

__all__ = ["pipeline_file", "send"]

BATCH: Final = 500
MAX_LEAD_S: Final = 0.2
"""Seconds. At a low rate a batch has the events of this time."""


async def send(
    producer: Producer,
    topic: str,
    bodies: Iterable[bytes],
    *,
    rate: float = 0.0,
    acknowledged: Callable[[int], None] = lambda count: None,
) -> None:
    """In order, `rate` per second; 0 is as fast as possible. Raises what publishing raises."""
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


def pipeline_file(directory: Path) -> Path:
    """A copy of the demo's pipeline file. Its results are written beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "shop.toml"
    with resources.as_file(resources.files("nsparq.demo") / target.name) as source:
        shutil.copyfile(source, target)
    return target
