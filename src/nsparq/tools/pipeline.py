"""`nsparq pipeline`: runs, checks, creates and watches pipelines; see `pipeline_ready` for
ready-made ones.

Exit status: 0 if the work is done or was ended by a signal, 1 if a pipeline has failed, 2 for a
wrong command line or a wrong pipeline file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from nsparq.errors import NsparqError, StartError
from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.execute.progress import Figures, State
from nsparq.pipeline.execute.status import FILE_NAME, read_status
from nsparq.pipeline.execute.view import HEADINGS, cells
from nsparq.pipeline.file import ready_made
from nsparq.pipeline.file.keys import is_local
from nsparq.pipeline.file.nsq_options import DEFAULT_NSQD
from nsparq.pipeline.file.reading import load
from nsparq.pipeline.file.sinks import describe
from nsparq.pipeline.file.spec import Pipeline, PipelineFile, Source, SpecError, Trigger
from nsparq.tools import pipeline_ready, pipeline_try
from nsparq.tools.output import text_table
from nsparq.tools.parser import Parser
from nsparq.tools.pipeline_common import (
    FAILED,
    OK,
    WRONG,
    add_running,
    chosen,
    configure_logs,
    run_file,
    small_session,
)
from nsparq.tools.times import TIME_HELP, parse_time

__all__ = ["main", "make_parser"]

logger = logging.getLogger(__name__)

DESCRIPTION: Final = """\
Pipelines: Spark reads the messages of topics, decodes them, transforms them with SQL and writes the rows.

A TOML file describes them:

  [pipeline.orders]
  source = "orders"
  decode = "json"
  sql = "SELECT item, price FROM input WHERE price > 100"
  sink = { topic = "orders.large" }

Start with `nsparq pipeline new --topic=orders`.
"""


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    configure_logs()
    try:
        status: int = arguments.run(arguments)
    except SpecError as error:
        print(error, file=sys.stderr)
        return WRONG
    except (NsparqError, OSError) as error:
        logger.critical("%s", error)
        return FAILED
    except ModuleNotFoundError:
        # `nsparq` itself names the extra to install.
        raise
    except Exception:
        logger.critical("stopped by an unexpected error", exc_info=True)
        return FAILED
    return status


def make_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="nsparq pipeline", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "run",
        help="run the pipelines of a file until they end or a signal arrives",
        description="Runs the pipelines of a file until they end or a signal arrives. After a crash the same "
        "command continues where they were.",
    )
    command.add_argument("file", type=Path, help="the pipeline file")
    command.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run only this pipeline; repeatable"
    )
    command.add_argument("--available-now", action="store_true", help="read the existing messages and end")
    command.add_argument(
        "--since",
        type=_moment,
        metavar="TIME",
        help=f"begin with messages of this time: {TIME_HELP}. Only for pipelines that have not begun yet; "
        "default: starting_position of the source",
    )
    command.add_argument("--checkpoint", metavar="DIR", help="instead of checkpoint in [run]")
    command.add_argument(
        "--fail-fast", action="store_true", help="stop all pipelines when one has failed permanently"
    )
    add_running(command)
    command.set_defaults(run=run)

    command = commands.add_parser(
        "check",
        help="check a pipeline file",
        description="Checks a pipeline file, with its schemas and SQL, and prints what it declares. "
        "It consumes nothing.",
    )
    command.add_argument("file", type=Path, help="the pipeline file")
    command.add_argument(
        "--spark",
        action=argparse.BooleanOptionalAction,
        help="start Spark to check schemas and SQL, which takes seconds; the default if PySpark is installed",
    )
    command.set_defaults(run=check)

    pipeline_try.add_command(commands)

    command = commands.add_parser(
        "new",
        help="write a first pipeline file for a topic",
        description="Writes a first pipeline file for a topic, with the columns of its newest messages.",
    )
    command.add_argument("file", type=Path, nargs="?", help="file to write; default: standard output")
    command.add_argument(
        "--topic",
        default="orders",
        help="topic to read; the columns are taken from its messages (%(default)s)",
    )
    command.add_argument("--nsqd-http-address", default=DEFAULT_NSQD, metavar="HOST:PORT", help="%(default)s")
    command.set_defaults(run=new)

    command = commands.add_parser(
        "status",
        help="show the status of running pipelines; exit status 1 if they do not run",
        description="Shows the status of running pipelines. The exit status is 1 if they do not run.",
    )
    command.add_argument("file", type=Path, help="the pipeline file, or its checkpoint directory")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=status)

    pipeline_ready.add_commands(commands)
    return parser


# run


def run(arguments: argparse.Namespace) -> int:
    file = load(arguments.file)
    selected = chosen(file, arguments.only)
    if arguments.available_now:
        selected = [replace(one, trigger=Trigger(0.0, "available-now")) for one in selected]
    if arguments.checkpoint:
        given: str = arguments.checkpoint
        directory = os.path.abspath(given) if is_local(given) else given
        selected = [_moved(one, file.run.checkpoint, directory) for one in selected]
        file = replace(file, run=replace(file.run, checkpoint=directory))
    if arguments.since is not None:
        selected = [_beginning(one, arguments.since) for one in selected]
    return run_file(replace(file, pipelines=tuple(selected)), arguments, fail_fast=arguments.fail_fast)


def _moved(pipeline: Pipeline, old: str, new: str) -> Pipeline:
    has_own = pipeline.checkpoint != f"{old}/{pipeline.name}"
    return pipeline if has_own else replace(pipeline, checkpoint=f"{new}/{pipeline.name}")


def _moment(text: str) -> float:
    try:
        return parse_time(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _beginning(pipeline: Pipeline, since: float) -> Pipeline:
    """A new pipeline that begins at a time. Raises StartError."""
    from nsparq.pipeline.execute.beginnings import Beginnings

    if not is_local(pipeline.checkpoint):
        reason = f"nobody can say here whether it has begun, in {pipeline.checkpoint}"
    elif Beginnings(pipeline).have_begun:
        reason = f"it has begun, and continues where {pipeline.checkpoint} says"
    elif any(source.is_queue for source in pipeline.sources):
        reason = 'a source with mode = "queue" has no times'
    else:
        at = {"startingPosition": datetime.fromtimestamp(since, UTC).isoformat()}
        sources = (replace(one, options={**one.options, **at}) for one in pipeline.sources)
        return replace(pipeline, sources=tuple(sources))
    raise StartError(f"--since: pipeline {pipeline.name}: {reason}")


# check


def check(arguments: argparse.Namespace) -> int:
    file = load(arguments.file)
    if arguments.spark is not False:
        try:
            import pyspark  # noqa: F401

            _check_with_spark(file)
            return OK
        except ModuleNotFoundError:
            if arguments.spark:
                raise
            print("PySpark is not installed: schemas and SQL have not been checked", file=sys.stderr)
    for one in file.pipelines:
        print(_summary(one))
    return OK


def _check_with_spark(file: PipelineFile) -> None:
    from nsparq.pipeline.execute import check, queries

    spark = small_session(file)
    problems = []
    try:
        queries.register(spark)
        for one in file.pipelines:
            try:
                frames = check.check(spark, file, one)
                notes = check.check_state(spark, one, frames) if frames is not None else []
            except PipelineError as error:
                problems.append(str(error))
                continue
            print(_summary(one))
            if frames is None:
                print(
                    "  columns unknown and not checked: there is no schema, and no message to infer it from"
                )
                continue
            for note in notes:
                print(f"  note: {note}")
            for output in one.outputs:
                if len(one.outputs) > 1:
                    print(f"  {describe(output.sink)}:")
                indent = "  " if len(one.outputs) == 1 else "    "
                for field in frames.rows[output.name].schema.fields:
                    print(f"{indent}{field.name:<24} {field.dataType.simpleString()}")
    finally:
        spark.stop()
    if problems:
        raise SpecError(str(file.path), problems)


def _summary(one: Pipeline) -> str:
    steps = {0: "", 1: " -> 1 step"}.get(len(one.steps), f" -> {len(one.steps)} steps")
    sources = " + ".join(map(_source_summary, one.sources))
    return f"{one.name}: {sources}{steps} -> {one.sinks}"


def _source_summary(one: Source) -> str:
    letters = f" (dead letters: {one.dead_letters})" if one.dead_letters else ""
    return f"{one.topics} -> {one.decode.format}{letters}"


# new


def new(arguments: argparse.Namespace) -> int:
    bodies, why_none = ready_made.peek(arguments.nsqd_http_address, arguments.topic)
    text = ready_made.starter(arguments.topic, bodies, nsqd=arguments.nsqd_http_address)
    if arguments.file is None:
        sys.stdout.write(text)
    else:
        try:
            with arguments.file.open("x") as file:
                file.write(text)
        except FileExistsError:
            raise StartError(f"{arguments.file} exists already; it was not changed") from None
        print(f"nsparq pipeline run {arguments.file}")
    if why_none:
        print(f"no message to infer columns from: {why_none}", file=sys.stderr)
    return OK


# status


def status(arguments: argparse.Namespace) -> int:
    path: Path = arguments.file
    checkpoint = str(path) if path.is_dir() else load(path).run.checkpoint
    if not is_local(checkpoint):
        raise StartError(f"the checkpoint {checkpoint} has no status: set metrics_address, and ask /status")
    directory = Path(checkpoint)
    found = read_status(directory)
    if found is None:
        raise StartError(f"{directory / FILE_NAME} does not exist: these pipelines have never been run")
    print(json.dumps(found, indent=1) if arguments.json else _status_text(found))
    return OK if found["is_running"] else FAILED


def _status_text(found: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(found["updated"]).strftime("%Y-%m-%d %H:%M:%S")
    state = f"running, process {found['pid']}" if found["is_running"] else f"not running since {at}"
    known = {one.name for one in fields(Figures)}
    figures = [
        # A newer version may have added keys to the file.
        Figures(
            **{name: value for name, value in one.items() if name in known} | {"state": State(one["state"])}
        )
        for one in found["pipelines"]
    ]
    rows = [HEADINGS, *map(cells, figures)]
    lines = [f"{found['file']}: {state}", *text_table(rows, left=2)]
    lines += [f"{one.name}: {one.error}" for one in figures if one.error]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
