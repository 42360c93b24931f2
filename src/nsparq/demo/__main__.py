"""The command line of the demo.

Exit status 0 if the result is right, 1 if not, 2 for a wrong command line, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nsparq.errors import NsparqError
from nsparq.up.output import LEVELS
from nsparq.up.ports import BASE, Ports

OK, FAILED = 0, 1
NEEDED: Final = ("rich", "pyspark", "pyarrow", "uvloop")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nsparq.demo",
        description="Sends a day of a shop's events through nsqd and Spark, into Parquet files and a topic "
        "of results, checks that every event arrived exactly once, and shows the result. At the end it "
        "stops everything that it started and keeps only a chart.",
    )
    parser.add_argument(
        "--events", type=int, default=1_000_000, metavar="N", help="number of events (%(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, default=20_000, metavar="N",
        help="events per second; 0 is as fast as possible (%(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--results", type=Path, default=Path("demo-results"), metavar="DIR",
        help="folder for the chart (%(default)s)",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", metavar="")
    command = commands.add_parser(
        "up",
        help="run the stack with a slow stream of events, until Ctrl-C",
        description="Runs nsqlookupd, nsqd, nsqadmin and, if Spark is installed, the demo's pipelines, with "
        "a slow stream of events, until Ctrl-C. It deletes its data at the end; `nsparq up` keeps it.",
    )
    command.add_argument(
        "--port-base", type=int, default=BASE, metavar="N", help="as for `nsparq up` (%(default)s)"
    )
    command.add_argument(
        "--trickle", type=float, default=200, metavar="N", help="events per second (%(default)g)"
    )
    command.add_argument(
        "--log-level",
        choices=LEVELS,
        default="warn",
        help="lowest level of the lines that are shown (%(default)s)",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "up":
            from nsparq.demo.live import up

            return up(Ports(base=arguments.port_base), arguments.trickle, arguments.log_level)
        return _demo(arguments)
    except NsparqError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    except KeyboardInterrupt:
        return 130


def _demo(arguments: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        text = f"{', '.join(missing)} is missing: pip install 'nsparq[server,tools,spark]'\n"
        sys.stderr.write(text)
        return FAILED
    from rich.console import Console

    from nsparq.demo.run import Settings, run
    from nsparq.demo.watching import DemoFailed

    settings = Settings(events=arguments.events, rate=arguments.rate, results=arguments.results)

    async def until_signal() -> bool:
        task = asyncio.current_task()
        assert task is not None
        # As Ctrl-C: the demo cleans up before it ends.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await run(settings, Console())

    try:
        return OK if asyncio.run(until_signal()) else FAILED
    except DemoFailed as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
