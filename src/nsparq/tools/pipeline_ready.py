"""The ready-made pipelines as commands: archive, compact, replay and stats."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsparq.errors import StartError
from nsparq.pipeline.file import ready
from nsparq.pipeline.file.reading import DEFAULT_NSQD, parse
from nsparq.pipeline.file.spec import SpecError
from nsparq.tools.pipeline_common import END_S, OK, Stopping, add_running, add_spark, run_file, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["add_commands"]

logger = logging.getLogger(__name__)

TELL_S: Final = 10.0

ARCHIVE: Final = """\
Writes messages as they are to DIR/topic=TOPIC/date=DATE/*.parquet, each exactly once, until it is stopped.
Started again with the same directory, it goes on where it was. Columns: body, node, offset, timestamp, id.

  nsparq pipeline archive --topic-pattern='.*' --output-dir=archive --lookupd-http-address=127.0.0.1:4161
  nsparq pipeline archive --topic=orders --output-dir=archive --available-now
"""
REPLAY: Final = """\
Publishes messages again, in the order in which they were published first.

  nsparq pipeline replay --from-dir=archive --topic=orders --to=orders.again --rate=500
  nsparq pipeline replay --topic=orders --since=2026-11-15T08:00:00Z --to=orders.again --name=morning
"""
STATS: Final = """\
Counts, sizes and latencies of topics for each minute of publishing: of what nsqd has now, or with --follow
of what comes. A latency is how long after the time in --event-time a message was published or, with --follow
and without --event-time, how long after that it is read.

  nsparq pipeline stats --topic=orders --since=2026-11-15T08:00:00Z --event-time=at
  nsparq pipeline stats --topic-pattern='.*' --follow
"""


def add_commands(commands: Any) -> None:
    """To those of `nsparq pipeline`."""

    def add(
        name: str, run: Callable[[argparse.Namespace], int], help: str, about: str
    ) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name, help=help, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.set_defaults(run=run)
        return command

    command = add("archive", archive, "topics into Parquet files, by topic and date", ARCHIVE)
    _add_topics(command)
    command.add_argument("--output-dir", required=True, type=Path, metavar="DIR")
    command.add_argument("--interval", default="10s", help="how often files are written (%(default)s)")
    command.add_argument("--available-now", action="store_true", help="read what is there now, and end")
    command.add_argument(
        "--compact", type=int, default=16, metavar="N", help="join N files of a size; 0: never (%(default)s)"
    )
    command.add_argument("--channel", default="archive", help="%(default)s")
    command.add_argument("--show", action="store_true", help="print the pipeline file that this is, and end")
    add_running(command)

    command = add("compact", compact, "join the small files of an archive or of a Parquet sink", "")
    command.add_argument("directory", type=Path)

    command = add("replay", replay, "publish messages again, from an archive or a topic", REPLAY)
    command.add_argument("--from-dir", type=Path, metavar="DIR", help="Parquet files, as archive writes them")
    _add_topics(command)
    command.add_argument("--until", default="", metavar="TIME", help="messages published before (RFC 3339)")
    command.add_argument("--to", required=True, metavar="TOPIC", help="where they are published")
    command.add_argument(
        "--rate", type=float, default=0.0, metavar="N", help="messages per second; 0: no limit"
    )
    command.add_argument("--name", default="", help="a replay of this name that was broken off goes on")
    command.add_argument(
        "--to-nsqd-http-address", default="", metavar="HOST:PORT", help="instead of those read"
    )
    add_spark(command)

    command = add("stats", stats, "counts, sizes and latencies per topic and minute", STATS)
    _add_topics(command)
    command.add_argument("--until", default="", metavar="TIME", help="messages published before (RFC 3339)")
    command.add_argument("--every", default="1 minute", help="length of a line's time (%(default)s)")
    command.add_argument(
        "--event-time", default="", metavar="FIELD", help="field of JSON messages with a time"
    )
    command.add_argument("--follow", action="store_true", help="go on, and show what changes")
    command.add_argument("--to", default="", metavar="TOPIC", help="with --follow: publish what is complete")
    command.add_argument(
        "--show", action="store_true", help="with --follow: print the pipeline file, and end"
    )
    add_running(command)


def _add_topics(command: argparse.ArgumentParser) -> None:
    address: Any = {"action": "append", "default": [], "metavar": "HOST:PORT", "help": "repeatable"}
    command.add_argument("--topic", action="append", default=[], help="repeatable")
    command.add_argument(
        "--topic-pattern", default="", metavar="REGEX", help="topics whose whole name matches"
    )
    command.add_argument(
        "--since", default="", metavar="TIME", help="messages published from then on (RFC 3339)"
    )
    command.add_argument("--nsqd-http-address", **address)
    command.add_argument("--lookupd-http-address", **address)


def _topics(arguments: argparse.Namespace) -> ready.Topics:
    if bool(arguments.topic) == bool(arguments.topic_pattern):
        raise SpecError("nsparq pipeline", ["needs either --topic or --topic-pattern"])
    nsq: dict[str, Sequence[str]] = {}
    if arguments.lookupd_http_address:
        nsq["nsqlookupd"] = arguments.lookupd_http_address
    if arguments.nsqd_http_address or not nsq:
        nsq["nsqd"] = arguments.nsqd_http_address or [DEFAULT_NSQD]
    return ready.Topics(
        nsq=nsq,
        topics=arguments.topic,
        pattern=arguments.topic_pattern,
        start=arguments.since or "earliest",
    )


# archive and compact


def archive(arguments: argparse.Namespace) -> int:
    output = arguments.output_dir.absolute()
    text = ready.archive(
        _topics(arguments),
        output,
        trigger="available-now" if arguments.available_now else arguments.interval,
        compact=arguments.compact,
        channel=arguments.channel,
    )
    if arguments.show:
        sys.stdout.write(text)
        return OK
    return run_file(parse(text, output / "archive.toml"), arguments)


def compact(arguments: argparse.Namespace) -> int:
    from nsparq.pipeline.write.commits import Directory
    from nsparq.pipeline.write.compact import compact

    if not arguments.directory.is_dir():
        raise StartError(f"{arguments.directory} is no directory")
    joined = compact(Directory(arguments.directory))
    files = sum(one.files for one in joined)
    print(f"{files} files became {len(joined)}" if joined else "there is nothing to join")
    return OK


# stats


def stats(arguments: argparse.Namespace) -> int:
    topics = _topics(arguments)
    if not arguments.follow:
        return _stats_now(topics, arguments)
    sink, mode = 'sink = "console"', "update"
    if arguments.to:
        sink, mode = f"sink = {{ topic = {json.dumps(arguments.to)} }}", "append"
        topics = topics.without(arguments.to)
    with tempfile.TemporaryDirectory(prefix="nsparq-stats-") as directory:
        text = ready.stats(
            topics,
            Path(directory),
            every=arguments.every,
            event_time=arguments.event_time,
            sink=sink,
            mode=mode,
            # Gone when it ends, as what it has counted.
            channel=f"stats-{os.getpid()}#ephemeral",
        )
        if arguments.show:
            sys.stdout.write(text)
            return OK
        return run_file(parse(text, Path(directory) / "stats.toml"), arguments)


def _stats_now(topics: ready.Topics, arguments: argparse.Namespace) -> int:
    from nsparq.pipeline.execute import batch

    file = batch.file_of(topics)
    # Nothing is written: there is nothing to wait for.
    with session(file, arguments, Stopping(0.0)) as spark:
        sql = ready.stats_sql(arguments.every, arguments.event_time, live=False) + " ORDER BY time, topic"
        _print_rows(batch.query(spark, batch.messages(spark, file, arguments.until), sql))
    return OK


def _print_rows(frame: DataFrame) -> None:
    rows = [frame.columns, *([_cell(value) for value in row] for row in frame.collect())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(frame.columns))]
    for row in rows:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return f"{value:.0f}" if isinstance(value, float) else str(value)


# replay


def replay(arguments: argparse.Namespace) -> int:
    from nsparq.pipeline.execute import batch
    from nsparq.pipeline.execute.replay import Publisher
    from nsparq.pipeline.execute.replay import replay as publish

    topics = _topics(arguments)
    file, stopping = batch.file_of(topics), Stopping(END_S)
    with batch.nsqd_for(file, arguments.to_nsqd_http_address, arguments.name) as client:
        publisher = Publisher(client, arguments.to, arguments.name)
        with session(file, arguments, stopping) as spark:
            if arguments.from_dir:
                frame = batch.archived(spark, arguments.from_dir, topics, arguments.until)
            else:
                frame = batch.messages(spark, file, arguments.until)
            with _bar(frame.count(), arguments.to) as progress:
                done = publish(batch.bodies(frame), publisher, arguments.rate, progress, stopping.event)
    logger.info("published %d messages to %s", done, arguments.to)
    return OK


@contextlib.contextmanager
def _bar(total: int, topic: str) -> Iterator[Callable[[int], None]]:
    """What tells how far a replay is."""
    try:
        if not sys.stderr.isatty():
            raise ModuleNotFoundError
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        yield _teller(total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(f"-> {topic}", total=total)
        yield lambda count: shown.advance(task, count)


def _teller(total: int) -> Callable[[int], None]:
    done, said = 0, time.monotonic()

    def tell(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said >= TELL_S or done == total:
            said = time.monotonic()
            logger.info("%d of %d messages", done, total)

    return tell
