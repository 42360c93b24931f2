"""`nsparq pipeline try`: shows what pipelines would write for a few messages."""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsparq.errors import StartError
from nsparq.pipeline.decode.samples import Sample
from nsparq.pipeline.errors import PipelineError, retry_helps
from nsparq.pipeline.file.reading import load
from nsparq.pipeline.file.sinks import describe
from nsparq.pipeline.file.spec import Pipeline, PipelineFile, SpecError
from nsparq.tools.output import text_table
from nsparq.tools.pipeline_common import FAILED, OK, chosen, small_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nsparq.pipeline.execute.trial import Trial, Undecoded

__all__ = ["add_command"]

COUNT: Final = 20
MIN_WIDTH: Final = 8
"""Minimum width of a column on a terminal."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "try",
        help="show what would be written for the first messages of a topic or a file",
        description="Shows what would be written for the first messages of a topic or a file. It writes "
        "nothing, and moves no channel.",
    )
    command.add_argument("file", type=Path, help="the pipeline file")
    command.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="try only this pipeline; repeatable"
    )
    command.add_argument(
        "--messages",
        action="append",
        default=[],
        metavar="[TOPIC=]FILE",
        help="read the messages from a file, one per line; - is standard input; repeatable",
    )
    command.add_argument(
        "--count",
        type=int,
        default=COUNT,
        metavar="N",
        help="messages of each source (%(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print a JSON object for each row and message")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    file = load(arguments.file)
    pipelines = chosen(file, arguments.only)
    given = _given(pipelines, arguments.messages, arguments.count) if arguments.messages else None

    from nsparq.pipeline.execute import check, runner, trial

    show = _show_json if arguments.json else _show
    problems, fails = [], False
    spark = small_session(file, trial.QUICK)
    try:
        runner.prepare(spark, file)
        quick = check.impatient(file)
        for one in pipelines:
            try:
                samples = _read(spark, quick, one, arguments.count) if given is None else given
                done = trial.try_out(spark, file, one, samples)
            except PipelineError as error:
                if retry_helps(error):
                    raise
                problems.append(str(error))
                continue
            show(one, done, sum(one.reads(sample.topic) for sample in samples))
            fails = fails or any(letter.fate == trial.FAIL for letter in done.undecoded)
    finally:
        spark.stop()
    if problems:
        raise SpecError(str(file.path), problems)
    return FAILED if fails else OK


# messages


def _read(spark: SparkSession, file: PipelineFile, pipeline: Pipeline, count: int) -> list[Sample]:
    """The first messages of each source. Raises PipelineError."""
    from nsparq.pipeline.execute.schemas import sample

    if any(source.is_queue for source in pipeline.sources):
        raise PipelineError(
            f"[pipeline.{pipeline.name}]: reading in mode 'queue' would take the messages; use --messages"
        )
    found = [one for source in pipeline.sources for one in sample(spark, file, pipeline, source, count)]
    # Several sources may read the same topic.
    return list(dict.fromkeys(found))


def _given(pipelines: Sequence[Pipeline], files: Sequence[str], count: int) -> list[Sample]:
    """The messages of the files. Raises StartError."""
    found: list[Sample] = []
    for text in files:
        topic, path = _topic_of(pipelines, text)
        now = datetime.now(UTC)
        for line in _lines(path)[:count]:
            number = len(found)
            found.append(Sample(topic=topic, body=line, timestamp=now, offset=number, id=f"{number:016x}"))
    return found


def _topic_of(pipelines: Sequence[Pipeline], text: str) -> tuple[str, str]:
    """The topic of the messages in a file, and the path of the file."""
    topic, equals, path = text.partition("=")
    if equals and any(one.reads(topic) for one in pipelines):
        return topic, path
    listed = {topic for one in pipelines for source in one.sources for topic in source.listed_topics}
    if len(listed) != 1 or any(not one.reads(*listed) for one in pipelines):
        topics = ", ".join(dict.fromkeys(one.topics for one in pipelines))
        raise StartError(f"--messages: name the topic, as in TOPIC={text}; the pipelines read {topics}")
    return listed.pop(), text


def _lines(path: str) -> list[bytes]:
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    return content.removesuffix(b"\n").split(b"\n") if content else []


# as text


def _show(pipeline: Pipeline, done: Trial, count: int) -> None:
    print(f"{pipeline.name}: {_counted(count, 'message')} of {pipeline.topics}")
    for output in pipeline.outputs:
        rows = done.rows[output.name]
        print(f"-> {describe(output.sink)}: {_counted(rows.num_rows, 'row')}")
        if rows.num_rows:
            cells = [[_text(value) for value in row.values()] for row in _rows(rows)]
            print("\n".join(_table([rows.column_names, *cells])))
    for one in done.undecoded:
        letter = one.letter
        body = letter["text"] if letter["text"] is not None else letter["base64"]
        print(_cut(f"{_fate(one)}: {letter['error']}: {_one_line(body)}", _width()))


def _fate(one: Undecoded) -> str:
    if one.source.dead_letters:
        return f"-> topic {one.source.dead_letters}, does not decode"
    return "does not decode, dropped" if one.fate == "drop" else "does not decode, FAILS the pipeline"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _width() -> int:
    """Width of the terminal, or unlimited for a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 20


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    columns = list(zip(*rows, strict=True))
    room = _width() - 2 * (len(columns) - 1)
    widths = [min(max(map(len, column)), max(room, MIN_WIDTH)) for column in columns]
    while sum(widths) > room and max(widths) > MIN_WIDTH:
        # Narrow the widest column first.
        widths[widths.index(max(widths))] -= 1
    cut = [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return text_table(cut, left=len(widths))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _one_line(text: str) -> str:
    """Escapes control characters, which would reach the terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _text(value: Any) -> str:
    if value is None:
        return "null"
    plain = _plain(value)
    return _one_line(plain if isinstance(plain, str) else json.dumps(plain, default=str, ensure_ascii=False))


# as JSON


def _show_json(pipeline: Pipeline, done: Trial, count: int) -> None:
    for output in pipeline.outputs:
        to = {"pipeline": pipeline.name, "output": output.name, "sink": describe(output.sink)}
        for row in _rows(done.rows[output.name]):
            _print_json({**to, "row": {name: _plain(value) for name, value in row.items()}})
    for one in done.undecoded:
        to = {"pipeline": pipeline.name, "source": one.source.name, "fate": one.fate}
        _print_json({**to, "undecoded": one.letter})


def _print_json(content: Mapping[str, Any]) -> None:
    print(json.dumps(content, default=str))


def _rows(table: Any) -> list[dict[str, Any]]:
    import pyarrow as pa

    rows: list[dict[str, Any]]
    try:
        rows = table.to_pylist(maps_as_pydicts="lossy")
    except (OverflowError, ValueError):
        # A date or a time in a year that Python does not know.
        shown = pa.schema([one.with_type(_with_text(one.type)) for one in table.schema])
        rows = table.cast(shown).to_pylist(maps_as_pydicts="lossy")
    return rows


def _with_text(kind: Any) -> Any:
    """The Arrow type, with texts instead of dates and times."""
    import pyarrow as pa

    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_with_text(one.type)) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(_with_text(kind.key_type), _with_text(kind.item_type))
    return pa.list_(_with_text(kind.value_type)) if pa.types.is_list(kind) else kind


def _plain(value: Any) -> Any:
    """A value of Arrow as JSON has it."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(_plain(name)): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
