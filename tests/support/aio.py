"""Coroutines in tests: run to the end within a time, and leave nothing running behind.

run(coroutine)                     its result; AssertionError if tasks are left over
run(coroutine, timeless=True)       where it would wait, the clock jumps: for what has neither sockets nor
                                    threads. However busy the machine is, times are exact
await until(fact)                  poll, with turns of the loop in between; the value of fact()
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .polling import DEADLINE

T = TypeVar("T")

# Another event loop to run them on.
LOOP_FACTORY: Callable[[], asyncio.AbstractEventLoop] | None = None


class _JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while something is to be done, and jumps to when there is next."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = selectors.DefaultSelector()
        look = selector.select

        def select(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            self._now += timeout or 0.0
            return look(timeout if timeout is None else 0)

        selector.select = select  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self._now


def run(work: Coroutine[Any, Any, T], *, within: float = 3 * DEADLINE, timeless: bool = False) -> T:
    async def main() -> T:
        async with asyncio.timeout(within):
            result = await work
        # What is about to end may do so: sockets that were closed, tasks that were cancelled.
        for _ in range(5):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left over: {left}"
        return result

    with asyncio.Runner(loop_factory=_JumpingLoop if timeless else LOOP_FACTORY) as runner:
        return runner.run(main())


async def until(fact: Callable[[], T], *, within: float = DEADLINE, what: object = "") -> T:
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
