"""The command of a benchmark whose parameters are the fields of a data class: each field is a
flag."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.macro.report import describe_machine, print_facts

__all__ = ["run_command"]


def run_command(
    name: str,
    about: str | None,
    parameters: type[Any],
    help: Mapping[str, str],
    run: Callable[[Any, Path], int],
    arguments: list[str] | None = None,
) -> int:
    """Read the flags, print machine and parameters, and call `run` with a folder that is removed
    then."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.spark.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for one in fields(parameters):
        text = f"{help[one.name]} ({one.default})"
        flag = f"--{one.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(one.default), default=one.default, help=text)
    given = parameters(**vars(parser.parse_args(arguments)))
    print_facts([*describe_machine({}).items(), *vars(given).items()])
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-"))
    try:
        return run(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
