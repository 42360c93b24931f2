"""`nsparq run MODULE:APP`: run the subscriptions of a program until SIGTERM or Ctrl-C.

The exit status is 0 after a clean stop, 1 if the program cannot be loaded, if the HTTP address is
taken or if a worker had to be killed, and 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nsparq import logs
from nsparq.addresses import split_address
from nsparq.errors import StartError
from nsparq.flags import parse_duration
from nsparq.runner.supervisor import Plan, Supervisor
from nsparq.tools.parser import Parser

__all__ = ["main"]

MAX_WORKERS: Final = 1000

DESCRIPTION: Final = """\
Runs the subscriptions of a Python program in worker processes, until SIGTERM or Ctrl-C. Then it
takes no new messages, waits for those in flight, and ends. MODULE is imported from the current
folder; APP is the name of its `nsparq.client.Subscriptions` (app, if it is left out).

A worker that dies is started again. SIGHUP replaces the workers, one after the other.
"""
EPILOG: Final = """\
Examples:
  nsparq run shop:app
  nsparq run shop:app --workers=4 --http-address=0.0.0.0:8080
  nsparq run shop:app --reload

With --http-address:
  /ready    200 when every worker runs and every subscription is connected; 503 otherwise
  /live     200 unless the event loop of a worker has been blocked for a minute
  /metrics  figures of all workers together, for Prometheus
"""


def main(argv: Sequence[str]) -> int:
    plan, level = _read(argv)
    logs.configure(level, "[nsparq run] ")
    try:
        return asyncio.run(Supervisor(plan).run())
    except StartError as error:
        sys.stderr.write(f"nsparq run: {error}\n")
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nsparq run",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("target", type=_target, metavar="MODULE:APP", help="the program, such as shop:app")
    add("--workers", type=_workers, default=1, metavar="N", help="number of processes (%(default)s)")
    add("--reload", action="store_true", help="replace the workers when a Python file changes")
    add(
        "--reload-dir", type=Path, action="append", default=[], metavar="DIR",
        help="folder to watch with --reload, instead of the current one; repeatable",
    )  # fmt: skip
    add(
        "--http-address", type=_address, metavar="HOST:PORT",
        help="serve /ready, /live and /metrics there",
    )  # fmt: skip
    add(
        "--stop-timeout", type=_duration, default=30.0, metavar="DURATION",
        help="time for messages in flight when it stops (30s)",
    )  # fmt: skip
    add(
        "--log-level", choices=[*logs.LEVELS], default="info", help="lowest level that is shown (%(default)s)"
    )
    return parser


def _read(argv: Sequence[str]) -> tuple[Plan, str]:
    found = make_parser().parse_args(argv)
    plan = Plan(
        target=found.target,
        workers=found.workers,
        reload_dirs=tuple(found.reload_dir or [Path()]) if found.reload else (),
        http_address=found.http_address,
        stop_timeout=found.stop_timeout,
        log_level=found.log_level,
    )
    return plan, found.log_level


def _target(text: str) -> str:
    module, _, name = text.partition(":")
    if module.endswith(".py") or "/" in module:
        right = module.removesuffix(".py").strip("./").replace("/", ".")
        raise argparse.ArgumentTypeError(f"name the module, not the file: {right}:{name or 'app'}")
    if not all(part.isidentifier() for part in f"{module}.{name or 'app'}".split(".")):
        raise argparse.ArgumentTypeError(f"must be MODULE:APP, such as shop:app, not {text!r}")
    return f"{module}:{name or 'app'}"


def _workers(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to {MAX_WORKERS}, not {text!r}")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    found = split_address(text)
    if found is None or not 0 <= found[1] < 65536:
        raise argparse.ArgumentTypeError(f"must be host:port, not {text!r}")
    return found


def _duration(text: str) -> float:
    try:
        found = parse_duration(text)
    except ValueError:
        found = -1.0
    if found < 0:
        raise argparse.ArgumentTypeError(f"must be a duration such as 30s, not {text!r}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
