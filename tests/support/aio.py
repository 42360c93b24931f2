"""Coroutines in tests: run to the end within a time, and leave nothing running behind.

run(coroutine, within=20)           its result; AssertionError if tasks are left over
await until(fact, within=5)         poll, with turns of the loop in between; the value of fact()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Another event loop to run them on.
LOOP_FACTORY: Callable[[], asyncio.AbstractEventLoop] | None = None


def run(work: Coroutine[Any, Any, T], *, within: float = 20.0) -> T:
    async def main() -> T:
        async with asyncio.timeout(within):
            result = await work
        # What is about to end may do so: sockets that were closed, tasks that were cancelled.
        for _ in range(5):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left over: {left}"
        return result

    with asyncio.Runner(loop_factory=LOOP_FACTORY) as runner:
        return runner.run(main())


async def until(fact: Callable[[], T], *, within: float = 5.0, what: object = "") -> T:
    """Poll until fact() is truthy and return that value; AssertionError with the last value otherwise."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + within
    while True:
        value = fact()
        if value:
            return value
        if clock() >= deadline:
            raise AssertionError(f"not within {within} s: {what or fact}, last value {value!r}")
        await asyncio.sleep(0.002)
