"""`nsparq spark`: check whether Spark can run, make it start faster, package it."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence

from nsparq.errors import NsparqError
from nsparq.spark.session.doctor import Finding, State, examine, try_session
from nsparq.tools.parser import Parser

__all__ = ["main", "make_parser"]

WIDTH = 110

DESCRIPTION = """\
The Spark connector: spark.read.format("nsq"), spark.readStream.format("nsq"), and the same for writing.

Everything it needs comes with pip install 'nsparq[spark]', Java included.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nsparq spark", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "doctor",
        help="report what was found, what is missing, and how to fix it",
        description="Looks for everything that Spark needs. The exit status is 1 if something is missing.",
    )
    command.add_argument("--run", action="store_true", help="also start a session and run some jobs")
    command.add_argument(
        "--master", default="local[2]", help="the Spark master to run them on (default %(default)s)"
    )
    command.set_defaults(run_command=doctor)
    command = commands.add_parser(
        "warm",
        help="make sessions on this machine start faster",
        description="Runs a trial session and caches the classes that it loads (200 MB). Sessions with the "
        "same Java and the same Spark then start in about half the time.",
    )
    command.set_defaults(run_command=warm)
    command = commands.add_parser(
        "package",
        help="write the connector to a file for spark-submit --py-files, and print its path",
        description="A session that nsparq builds sends this file to its executors by itself.",
    )
    command.set_defaults(run_command=package)
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        status: int = arguments.run_command(arguments)
    except NsparqError as error:
        print(f"nsparq spark: {error}", file=sys.stderr)
        return 1
    return status


def doctor(arguments: argparse.Namespace) -> int:
    missing = 0
    for finding in examine():
        missing += _show(finding)
    if arguments.run and missing:
        print("\nThe session was not tried, because these are missing.")
    elif arguments.run:
        for finding in try_session(arguments.master):
            missing += _show(finding)
    elif not missing:
        print("\nNothing is missing. `nsparq spark doctor --run` starts a session to be sure.")
    return 1 if missing else 0


def _show(finding: Finding) -> bool:
    """Print a finding; True if something is missing that a session needs."""
    head = f"{finding.state:<9}{finding.subject:<18}"
    _print(head, finding.text, len(head))
    if finding.advice:
        _print(f"{'':<{len(head)}}-> ", finding.advice, len(head) + 3)
    sys.stdout.flush()
    return finding.state is State.MISSING


def _print(head: str, text: str, indent: int) -> None:
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    print(head + f"\n{'':<{indent}}".join(lines))


def warm(arguments: argparse.Namespace) -> int:
    from nsparq.spark.session.class_archive import make_archive

    print("Running a trial session; this takes a minute.", file=sys.stderr)
    began = time.monotonic()
    path = make_archive()
    print(f"{path}, {path.stat().st_size >> 20} MiB, after {time.monotonic() - began:.0f} s")
    return 0


def package(arguments: argparse.Namespace) -> int:
    from nsparq.spark.session.package import package_file

    print(package_file())
    return 0
