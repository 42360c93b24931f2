"""`make up`: the stack of `nsparq up` with a slow stream of a shop's events, to look at.

A day of the shop takes a quarter of an hour. Without Spark there are no pipelines, but the events
have consumers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

from nsparq.client import Consumer, Message, Producer
from nsparq.demo.events import Shop
from nsparq.demo.sending import pipeline_file, send
from nsparq.demo.watching import ACTIVITY, EVENTS
from nsparq.up.main import run_until_signal
from nsparq.up.members import Plan
from nsparq.up.output import Output
from nsparq.up.ports import Ports
from nsparq.up.stack import Stack, together

__all__ = ["up"]

SECONDS_PER_DAY: Final = 960.0
"""A quarter of an hour of the shop takes 10 seconds."""


class LiveStack(Stack):
    """A stack with a shop that sends events, and consumers."""

    def __init__(self, plan: Plan, output: Output, rate: float) -> None:
        super().__init__(plan, output)
        self._output, self._rate = output, rate

    async def watch(self) -> None:
        await together([self._trade(), super().watch()])

    async def _trade(self) -> None:
        """Send events, and consume them beside the pipelines."""
        shop = Shop(round(self._rate * SECONDS_PER_DAY))

        async def handle(message: Message) -> None:
            pass

        nsqds = [one.address("TCP") for one in self.cluster.nsqds]
        async with (
            Producer(*nsqds, retry=True) as producer,
            # By address: nsqlookupd does not know the topics yet.
            Consumer(EVENTS, "mailing", handle, nsqd=nsqds),
            Consumer(ACTIVITY, "dashboard", handle, nsqd=nsqds),
        ):
            self._output.say(f"a shop sends {self._rate:g} events per second to topic {EVENTS}")
            await send(producer, EVENTS, _days(shop), rate=self._rate)


def _days(shop: Shop) -> Iterator[bytes]:
    for number in count():
        yield from shop.day(number)


def up(ports: Ports, rate: float, level: str) -> int:
    """Runs until a signal. Returns the exit status. Raises NsparqError."""
    output = Output(level=level)
    with tempfile.TemporaryDirectory(prefix="nsparq-up-") as folder:
        directory = Path(folder)
        plan = Plan(data_path=directory / "data", ports=ports, log_level=level)
        if importlib.util.find_spec("pyspark") is not None:
            plan = replace(plan, pipelines=(pipeline_file(directory / "shop"),))
        else:
            output.say("Spark is not installed: there are no pipelines (pip install 'nsparq[spark]')")
        return asyncio.run(run_until_signal(LiveStack(plan, output, rate), output))
