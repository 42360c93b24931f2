"""The demo: starts the stack, sends events, checks and shows the results, stops everything."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from nsparq.client import Producer
from nsparq.demo.chart import draw
from nsparq.demo.events import DAY_S, KINDS, WINDOW_S, Shop
from nsparq.demo.results import find, problems
from nsparq.demo.sending import pipeline_file, send
from nsparq.demo.show import Bars, Timing, show
from nsparq.demo.watching import EVENTS, DemoFailed, Now, Series, look, pipelines_on_the_page
from nsparq.tasks import cancel_all
from nsparq.up.members import Plan
from nsparq.up.ports import Ports
from nsparq.up.stack import Stack

__all__ = ["Settings", "run"]

CHART: Final = "demo.svg"
PIPELINES: Final = {"events": "running", "activity": "running"}
POLL_S: Final = 0.5
STUCK_S: Final = 600.0
"""Without progress for this long, the demo fails. On a busy machine Spark's first micro-batch alone
may take minutes."""
STOP_S: Final = 60.0
"""Time for a micro-batch to end, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    events: int
    rate: float
    """Per second; 0 is as fast as possible."""
    results: Path
    """The folder for the chart."""


class Quiet:
    """Keeps the last lines of the children, to show them if the demo fails."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.lines: deque[str] = deque(maxlen=60)

    def line(self, name: str, text: str) -> None:
        self.lines.append(f"{name}: {text}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


async def run(settings: Settings, console: Console) -> bool:
    """Returns whether the result is right. Raises DemoFailed, NsparqError."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nsparq-demo-") as folder:
        directory = Path(folder)
        file = pipeline_file(directory / "shop")
        plan = Plan(data_path=directory / "data", pipelines=(file,), ports=Ports(base=0), stop_timeout=STOP_S)
        quiet = Quiet(console)
        console.print("Starting nsqlookupd, nsqd, nsqadmin and Spark …")
        try:
            async with Stack(plan, quiet) as stack:
                day = Day(settings, console, stack, began)
                await day.stream()
                wrong = await day.result(file.parent / "events")
        except DemoFailed:
            console.print("\n".join(quiet.lines), style="dim", markup=False, highlight=False)
            raise
    for problem in wrong:
        console.print(f"wrong: {problem}", style="bold red", markup=False)
    if not wrong:
        console.print(
            "OK: every message is in exactly one place, and every event is counted exactly once. "
            "All processes are stopped.",
            style="bold green",
            soft_wrap=True,
        )
    return not wrong


class Day:
    """One day of the shop, through a running stack."""

    def __init__(self, settings: Settings, console: Console, stack: Stack, began: float) -> None:
        self._settings, self._console, self._stack, self._began = settings, console, stack, began
        self._starting = time.monotonic() - began
        self._shop = Shop(settings.events)
        self._series = Series()
        self._published = 0
        self._publishing = self._until_results = 0.0

    async def stream(self) -> None:
        """Publish, and wait for all results. Raises DemoFailed, and what publishing raises."""
        page = self._stack.cluster.admin.page
        self._console.print(f"Ready after {self._starting:.1f} s. nsqadmin: {page}", highlight=False)
        windows = DAY_S // WINDOW_S * len(KINDS)
        self._series = Series()
        with Bars(self._console, self._settings.events, self._settings.events // 200, windows) as bars:
            sending = asyncio.create_task(self._send())
            watching = asyncio.create_task(self._stack.watch())
            try:
                await self._follow(bars, sending, watching)
            finally:
                await cancel_all([sending, watching])
        self._until_results = time.monotonic() - self._series.began

    async def _send(self) -> None:
        def acknowledged(count: int) -> None:
            self._published += count

        async with Producer(self._stack.cluster.nsqds[0].address("TCP")) as producer:
            messages = self._shop.day()
            await send(producer, EVENTS, messages, rate=self._settings.rate, acknowledged=acknowledged)
            await send(producer, EVENTS, [self._shop.closing()], acknowledged=acknowledged)
        self._publishing = time.monotonic() - self._series.began

    async def _follow(self, bars: Bars, sending: asyncio.Task[None], watching: asyncio.Task[None]) -> None:
        last, moved = (0, Now()), time.monotonic()
        while True:
            now = await look(self._stack.cluster)
            self._series.add(self._published, now.written)
            if sending.done():
                # Raises the error if sending failed.
                sending.result()
                expected = self._shop.expected
                bars.expect(expected.sent, expected.broken, len(expected.windows))
            bars.show(self._published, now)
            if sending.done() and self._is_out(now):
                return
            if now.errors:
                raise DemoFailed(now.errors)
            if last != (self._published, now):
                last, moved = (self._published, now), time.monotonic()
            if time.monotonic() - moved > STUCK_S:
                raise DemoFailed(
                    f"no progress for {STUCK_S / 60:.0f} minutes: {self._published:,} events published, "
                    f"{now.written:,} in Parquet, {now.results:,} results. A pipeline hangs, or this machine "
                    "is too busy; DEMO_ARGS=--events=100000 is less work"
                )
            await asyncio.wait({sending, watching}, timeout=POLL_S)
            if watching.done():
                watching.result()

    def _is_out(self, now: Now) -> bool:
        expected = self._shop.expected
        return (
            now.read >= expected.sent
            and now.letters >= expected.broken
            and now.results >= len(expected.windows)
        )

    async def result(self, files: Path) -> list[str]:
        """Show the result. Returns what is wrong with it. Raises DemoFailed."""
        shown = await pipelines_on_the_page(self._stack.cluster)
        wrong = [f"nsqadmin shows the pipelines as {shown}"] if shown != PIPELINES else []
        # The output of the pipelines is final only when they have stopped.
        if not await self._stack.stop_pipelines():
            raise DemoFailed("the pipelines did not stop and were killed")
        found = await find(self._stack.cluster, files)
        chart_file = self._settings.results / CHART
        chart_file.parent.mkdir(parents=True, exist_ok=True)
        chart_file.write_text(draw(found, self._series), encoding="utf-8")
        total = time.monotonic() - self._began
        timing = Timing(self._starting, self._publishing, self._until_results, total)
        show(self._console, self._shop.expected, found, timing)
        self._console.print(f"The chart is in {chart_file}", highlight=False, soft_wrap=True)
        return wrong + problems(self._shop.expected, found)
