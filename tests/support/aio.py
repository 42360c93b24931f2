"""Coroutines in tests: run them with a time limit, and check that they leave no tasks.

run(coroutine)                     its result; AssertionError if tasks are left over
run(coroutine, timeless=True)      instead of waiting, the clock jumps: times are exact, however
                                   busy the machine is. Not for code that waits for a thread or
                                   for another process
await until(fact)                  poll until fact() is truthy; its value
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .polling import DEADLINE

T = TypeVar("T")

KERNEL_S = 0.001
"""How long the loop waits for sockets before its clock jumps."""
# Set to run them on another event loop.
LOOP_FACTORY: Callable[[], asyncio.AbstractEventLoop] | None = None


class _JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while callbacks and sockets are ready, and then jumps to the next
    timer."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = selectors.DefaultSelector()
        look = selector.select

        def select(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is None:
                return look()
            # Bytes between two sockets of this process may need a moment to arrive.
            ready = look(min(timeout, KERNEL_S))
            if not ready:
                self._now += timeout
            return ready

        selector.select = select  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self._now


def run(work: Coroutine[Any, Any, T], *, within: float = 3 * DEADLINE, timeless: bool = False) -> T:
    async def main() -> T:
        async with asyncio.timeout(within):
            result = await work
        # Let closed sockets and cancelled tasks end.
        for _ in range(5):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left over: {left}"
        return result

    with asyncio.Runner(loop_factory=_JumpingLoop if timeless else LOOP_FACTORY) as runner:
        return runner.run(main())


async def until(fact: Callable[[], T], *, within: float = DEADLINE, what: object = "") -> T:
    """Poll until fact() is truthy and return that value; AssertionError with the last value
    otherwise."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + within
    while True:
        value = fact()
        if value:
            return value
        if clock() >= deadline:
            raise AssertionError(f"not within {within} s: {what or fact}, last value {value!r}")
        await asyncio.sleep(0.002)
