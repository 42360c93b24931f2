"""The end of tasks of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait for their end. Their errors are not raised."""
    ending = [*tasks]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
