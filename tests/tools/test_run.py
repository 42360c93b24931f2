"""How a tool runs: exit status, signals, endings, timings."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from dataclasses import dataclass

import pytest

from nsparq.client import ConnectFailed
from nsparq.option_table import INT, OptionError, opt
from nsparq.tools.options import ToolTable
from nsparq.tools.run import Ending, Timings, run_tool, unless_ended
from tests.support.polling import DEADLINE


@dataclass(frozen=True)
class Options:
    number: int = opt(1, "a number", INT, bound="positive", heading="All")

    def validate(self) -> None:
        if self.number == 13:
            raise OptionError("not this one")


TABLE = ToolTable("tool", Options, command="tool", about="A tool.", examples=["tool"])


@pytest.mark.usefixtures("root_logger_restored", "signals_restored")
class TestRunning:
    def test_status_0_when_the_work_is_done(self) -> None:
        async def work(options: Options, ending: Ending) -> None:
            assert options.number == 5

        assert run_tool(TABLE, work, ["-number=5"]) == 0

    def test_status_1_and_one_line_after_a_failure(self, capsys: pytest.CaptureFixture[str]) -> None:
        async def work(options: Options, ending: Ending) -> None:
            ending.fail("%s is broken", "it")
            ending.fail("and this follows from it")
            assert await ending.wait()

        assert run_tool(TABLE, work, []) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert re.fullmatch(r"\[tool\] \d{4}/\S+ \S+ FATAL: it is broken", line)

    @pytest.mark.parametrize("error", [OptionError("no"), ConnectFailed("no")])
    def test_an_error_of_the_work_is_logged_in_one_line(
        self, error: Exception, capsys: pytest.CaptureFixture[str]
    ) -> None:
        async def work(options: Options, ending: Ending) -> None:
            raise error

        assert run_tool(TABLE, work, []) == 1
        assert capsys.readouterr().err.endswith(" FATAL: no\n")

    def test_options_are_checked_first(self, capsys: pytest.CaptureFixture[str]) -> None:
        async def work(options: Options, ending: Ending) -> None:
            raise AssertionError("not reached")

        assert run_tool(TABLE, work, ["-number=0"]) == 1
        assert run_tool(TABLE, work, ["-number=13"]) == 1
        texts = [line.partition("FATAL: ")[2] for line in capsys.readouterr().err.splitlines()]
        assert texts == ["--number must be positive", "not this one"]

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_is_an_ending_with_status_0(self, signum: signal.Signals) -> None:
        async def work(options: Options, ending: Ending) -> None:
            signal.raise_signal(signum)
            assert await ending.wait(DEADLINE)

        assert run_tool(TABLE, work, []) == 0


def test_work_is_cut_short_by_the_ending() -> None:
    async def run() -> None:
        ending = Ending()

        async def give() -> int:
            return 5

        async def fail() -> None:
            raise ValueError("no")

        cancelled = []

        async def wait() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        assert await unless_ended(ending, give()) == 5
        with pytest.raises(ValueError):
            await unless_ended(ending, fail())
        asyncio.get_running_loop().call_later(0.01, ending.end)
        assert await unless_ended(ending, wait()) is None
        assert cancelled == [True]

    asyncio.run(run())


def test_timings_are_logged_every_so_many(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    timings, silent = Timings(4, "things"), Timings(0, "things")
    for milliseconds in (1, 2, 3, 10, 5):
        timings.add(milliseconds / 1000)
        silent.add(milliseconds / 1000)
    assert [record.getMessage() for record in caplog.records] == [
        "4 things: average 4.0 ms, 50 % within 3.0 ms, 95 % within 10.0 ms, 99 % within 10.0 ms"
    ]
