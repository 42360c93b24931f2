"""How NSQ's tools run: logging, signals, exit status, and consuming until the end.

Data goes to standard output, everything else to standard error. The exit status is 0 when the work
is done or after a signal, 1 after a FATAL line, 2 for a wrong command line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from nsparq import logs
from nsparq.client import ClientError, ConfigError, Consumer
from nsparq.errors import StartError
from nsparq.option_table import CommandLineExit
from nsparq.streams import run_with_output
from nsparq.tasks import cancel_all
from nsparq.tools.options import T, ToolTable

__all__ = [
    "GRACE_S",
    "Ending",
    "Timings",
    "on_signal",
    "run_consumers",
    "run_tool",
    "run_work",
    "unless_ended",
]

logger = logging.getLogger(__name__)

GRACE_S: Final = 30.0
"""How long the tool waits for messages in flight when it ends."""
FAILED_GRACE_S: Final = 1.0
"""The same after a failure: enough time to requeue them."""

R = TypeVar("R")


class Ending:
    """When the tool ends and with which status: work done, signal, or failure."""

    def __init__(self) -> None:
        self.status = 0
        self._event = asyncio.Event()

    def end(self) -> None:
        self._event.set()

    def fail(self, text: str, *arguments: object) -> None:
        """End with status 1, and log the first failure. Unfinished messages stay with nsqd."""
        if not self.status:
            logger.critical(text, *arguments)
        self.status = 1
        self._event.set()

    @property
    def is_due(self) -> bool:
        return self._event.is_set()

    async def wait(self, seconds: float | None = None) -> bool:
        """Whether the end came within this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


Work = Callable[[T, Ending], Coroutine[Any, Any, None]]


def run_tool(table: ToolTable[T], work: Work[T], argv: Sequence[str] | None = None) -> int:
    """The main function of a tool. `work` has to return soon after the ending is due."""
    return run_with_output(partial(_run_tool, table, work, argv), partial(logger.critical, "%s"))


def _run_tool(table: ToolTable[T], work: Work[T], argv: Sequence[str] | None) -> int:
    logs.configure("info", f"[{table.program}] ")
    try:
        options = table.read(sys.argv[1:] if argv is None else argv)
        level, prefix = getattr(options, "log_level", "info"), getattr(options, "log_prefix", None)
        logs.configure(level, f"[{table.program}] " if prefix is None else prefix)
        try:
            table.check(options)
        except ConfigError as error:
            table.refuse(f"invalid value of --consumer-opt or --producer-opt: {error}")
        return run_work(work, options)
    except CommandLineExit as leave:
        (sys.stderr if leave.status else sys.stdout).write(leave.text)
        return leave.status
    except (StartError, ClientError) as error:
        logger.critical("%s", error)
        return 1
    except KeyboardInterrupt:
        return 130


def run_work(work: Work[T], options: T) -> int:
    """Run it until it ends or a signal arrives. Returns the exit status."""
    return asyncio.run(_run(work, options))


async def _run(work: Work[T], options: T) -> int:
    ending = Ending()

    def interrupt() -> None:
        # A second Ctrl-C does not wait for messages in flight; nsqd requeues them.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        ending.end()

    try:
        on_signal(signal.SIGINT, interrupt)
        on_signal(signal.SIGTERM, ending.end)
        await work(options, ending)
    finally:
        # Another signal from here on must not change the status.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    return ending.status


def on_signal(signum: signal.Signals, callback: Callable[[], None]) -> None:
    """Run the callback on the event loop whenever the signal arrives."""
    loop = asyncio.get_running_loop()
    signal.signal(signum, lambda *_: loop.call_soon_threadsafe(callback))


async def run_consumers(consumers: Sequence[Consumer], nsqd: Sequence[str], ending: Ending) -> None:
    """Consume until the ending is due, then wait for messages in flight. Raises ConnectFailed if an
    nsqd that was given by address cannot be reached at the start; later it is reconnected."""
    try:
        await unless_ended(ending, _start(consumers, nsqd))
        await ending.wait()
    finally:
        grace = FAILED_GRACE_S if ending.status else GRACE_S
        await asyncio.gather(*(consumer.stop(grace) for consumer in consumers))
        for consumer in consumers:
            if consumer.messages_given_up:
                logger.warning("%s: %d messages were given up", consumer, consumer.messages_given_up)


async def unless_ended(ending: Ending, work: Coroutine[Any, Any, R]) -> R | None:
    """The result of the work; None if the ending was due first, which cancels the work."""
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(ending.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await cancel_all([working, waiting])


async def _start(consumers: Sequence[Consumer], nsqd: Sequence[str]) -> None:
    for consumer in consumers:
        await consumer.start()
    for consumer in consumers:
        for address in nsqd:
            await consumer.connect(address)


class Timings:
    """Logs how long requests take, after every `every` of them."""

    def __init__(self, every: int, what: str) -> None:
        self._every, self._what = every, what
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        if self._every <= 0:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < self._every:
            return
        ordered, self._seconds = sorted(self._seconds), []
        count = len(ordered)
        p50, p95, p99 = (ordered[min(int(share * count), count - 1)] * 1000 for share in (0.5, 0.95, 0.99))
        average = sum(ordered) / count * 1000
        logger.info(
            "%d %s: average %.1f ms, 50 %% within %.1f ms, 95 %% within %.1f ms, 99 %% within %.1f ms",
            count, self._what, average, p50, p95, p99,
        )  # fmt: skip
