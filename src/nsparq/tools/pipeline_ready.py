"""The ready-made pipelines as commands: archive, table, compact, replay and stats."""

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
from typing import Any, Final

from nsparq.errors import StartError
from nsparq.flags import format_duration, parse_duration
from nsparq.pipeline.file import ready_made
from nsparq.pipeline.file.keys import is_local
from nsparq.pipeline.file.nsq_options import DEFAULT_NSQD
from nsparq.pipeline.file.reading import parse
from nsparq.pipeline.file.sinks import MIN_RETENTION_S
from nsparq.pipeline.file.spec import SpecError
from nsparq.tools.output import text_table
from nsparq.tools.pipeline_common import (
    END_S,
    OK,
    Stopping,
    add_running,
    add_spark,
    run_file,
    session,
)

__all__ = ["add_commands"]

logger = logging.getLogger(__name__)

LOG_S: Final = 10.0

ARCHIVE: Final = """\
Writes messages unchanged to DIR/topic=TOPIC/date=DATE/*.parquet, each exactly once, until it is stopped.
Started again with the same directory, it continues. Columns: body, node, offset, timestamp, id.

  nsparq pipeline archive --topic-pattern='.*' --output-dir=archive --lookupd-http-address=127.0.0.1:4161
  nsparq pipeline archive --topic=orders --output-dir=archive --available-now
"""
TABLE: Final = """\
Keeps topics as a Delta table, each message exactly once, until it is stopped. Started again with the same
table, it continues. Columns: topic, node, offset, timestamp, id, body, headers, date; or with --schema those
of JSON messages, and the others with a leading _. Small files are joined, and old versions removed, in the
background.

  nsparq pipeline table --topic=orders tables/orders
  nsparq pipeline table --topic=orders --schema='number BIGINT, price DOUBLE' --dead-letters=orders.dead \\
      s3://lake/orders
"""
COMPACT: Final = """\
Joins the small files of an archive, of a Parquet sink or of a Delta table. With --retention it removes
versions of the Delta table that are older, and files that no version needs.

  nsparq pipeline compact archive
  nsparq pipeline compact s3://lake/orders --retention=168h
"""
REPLAY: Final = """\
Publishes messages again, in the original order.

  nsparq pipeline replay --from-dir=archive --topic=orders --to=orders.again --rate=500
  nsparq pipeline replay --topic=orders --since=2026-11-15T08:00:00Z --to=orders.again --name=morning
"""
STATS: Final = """\
Counts, sizes and latencies of topics for each minute of publishing: of the messages that nsqd has now, or
with --follow of new messages. The latency is the time from --event-time to publishing or, with --follow and
without --event-time, the time from publishing to reading.

  nsparq pipeline stats --topic=orders --since=2026-11-15T08:00:00Z --event-time=at
  nsparq pipeline stats --topic-pattern='.*' --follow
"""


def add_commands(commands: Any) -> None:
    """Adds the commands to `nsparq pipeline`."""

    def add(
        name: str, run: Callable[[argparse.Namespace], int], help: str, about: str
    ) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name, help=help, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.set_defaults(run=run)
        return command

    command = add("archive", archive, "write topics to Parquet files, by topic and date", ARCHIVE)
    _add_topics(command)
    command.add_argument(
        "--output-dir", required=True, type=_directory, metavar="DIR", help="folder for the Parquet files"
    )
    command.add_argument("--interval", default="10s", help="how often to write files (%(default)s)")
    command.add_argument("--available-now", action="store_true", help="read the existing messages and end")
    command.add_argument(
        "--compact",
        type=int,
        default=16,
        metavar="N",
        help="join N similar files; 0: never (%(default)s)",
    )
    command.add_argument("--channel", default="archive", help="%(default)s")
    command.add_argument("--show", action="store_true", help="print the pipeline file and end")
    add_running(command)

    command = add("table", table, "keep topics as a Delta table", TABLE)
    _add_topics(command)
    command.add_argument("table", metavar="TABLE", help="a directory, or s3://…, gs://…, az://…, abfss://…")
    command.add_argument(
        "--schema",
        default="",
        help="columns of JSON messages, as in CREATE TABLE; default: messages unchanged",
    )
    command.add_argument(
        "--dead-letters", default="", metavar="TOPIC", help="with --schema: for messages that do not decode"
    )
    command.add_argument(
        "--partition-by", default="date", metavar="COLUMNS", help="separated by commas (%(default)s)"
    )
    command.add_argument(
        "--checkpoint", default="", metavar="DIR", help="default: _nsparq/checkpoint in the table"
    )
    command.add_argument("--interval", default="5s", help="how often to commit (%(default)s)")
    command.add_argument("--available-now", action="store_true", help="read the existing messages and end")
    command.add_argument(
        "--compact", type=int, default=16, metavar="N", help="join N similar files; 0: never (%(default)s)"
    )
    command.add_argument(
        "--retention", default="168h", help="how long to keep old versions; 0: for ever (%(default)s)"
    )
    command.add_argument("--channel", default="table", help="%(default)s")
    command.add_argument("--show", action="store_true", help="print the pipeline file and end")
    add_running(command)

    command = add(
        "compact", compact, "join the small files of an archive, a Parquet sink or a Delta table", COMPACT
    )
    command.add_argument("directory", metavar="DIR", help="or the URL of a Delta table")
    command.add_argument(
        "--retention",
        type=parse_duration,
        default=0.0,
        metavar="DURATION",
        help="remove older versions of a Delta table, and unused files",
    )

    command = add("replay", replay, "publish messages again, from an archive or a topic", REPLAY)
    command.add_argument("--from-dir", type=_directory, metavar="DIR", help="Parquet files of an archive")
    _add_topics(command)
    command.add_argument("--until", default="", metavar="TIME", help="only messages before (RFC 3339)")
    command.add_argument("--to", required=True, metavar="TOPIC", help="topic to publish to")
    command.add_argument(
        "--rate", type=float, default=0.0, metavar="N", help="messages per second; 0: no limit"
    )
    command.add_argument("--name", default="", help="continue an interrupted replay with the same name")
    command.add_argument(
        "--to-nsqd-http-address", default="", metavar="HOST:PORT", help="default: one that is read"
    )
    add_spark(command)

    command = add("stats", stats, "counts, sizes and latencies per topic and minute", STATS)
    _add_topics(command)
    command.add_argument("--until", default="", metavar="TIME", help="only messages before (RFC 3339)")
    command.add_argument("--every", default="1 minute", help="length of each time window (%(default)s)")
    command.add_argument(
        "--event-time", default="", metavar="FIELD", help="field of JSON messages with a time"
    )
    command.add_argument("--follow", action="store_true", help="keep running, and show changes")
    command.add_argument("--to", default="", metavar="TOPIC", help="with --follow: publish complete windows")
    command.add_argument("--show", action="store_true", help="with --follow: print the pipeline file and end")
    add_running(command)


def _directory(text: str) -> Path:
    if not is_local(text):
        raise argparse.ArgumentTypeError(
            "must be a directory; `nsparq pipeline table` writes to object stores"
        )
    return Path(text)


def _add_topics(command: argparse.ArgumentParser) -> None:
    address: Any = {"action": "append", "default": [], "metavar": "HOST:PORT", "help": "repeatable"}
    command.add_argument("--topic", action="append", default=[], help="repeatable")
    command.add_argument(
        "--topic-pattern", default="", metavar="REGEX", help="topics whose full name matches"
    )
    command.add_argument("--since", default="", metavar="TIME", help="only messages from (RFC 3339)")
    command.add_argument("--nsqd-http-address", **address)
    command.add_argument("--lookupd-http-address", **address)


def _topics(arguments: argparse.Namespace) -> ready_made.Topics:
    if bool(arguments.topic) == bool(arguments.topic_pattern):
        raise SpecError("nsparq pipeline", ["needs either --topic or --topic-pattern"])
    nsq: dict[str, Sequence[str]] = {}
    if arguments.lookupd_http_address:
        nsq["nsqlookupd"] = arguments.lookupd_http_address
    if arguments.nsqd_http_address or not nsq:
        nsq["nsqd"] = arguments.nsqd_http_address or [DEFAULT_NSQD]
    return ready_made.Topics(
        nsq=nsq,
        topics=arguments.topic,
        pattern=arguments.topic_pattern,
        start=arguments.since or "earliest",
    )


# archive, table and compact


def archive(arguments: argparse.Namespace) -> int:
    output = arguments.output_dir.absolute()
    text = ready_made.archive(
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


def table(arguments: argparse.Namespace) -> int:
    uri: str = arguments.table
    if is_local(uri):
        uri = os.path.abspath(uri)
    checkpoint = arguments.checkpoint or f"{uri}/_nsparq/checkpoint"
    text = ready_made.table(
        _topics(arguments),
        uri,
        os.path.abspath(checkpoint) if is_local(checkpoint) else checkpoint,
        schema=arguments.schema,
        dead_letters=arguments.dead_letters,
        partition_by=[name for name in arguments.partition_by.split(",") if name],
        trigger="available-now" if arguments.available_now else arguments.interval,
        compact=arguments.compact,
        retention="" if arguments.retention == "0" else arguments.retention,
        channel=arguments.channel,
    )
    if arguments.show:
        sys.stdout.write(text)
        return OK
    return run_file(parse(text, "table.toml"), arguments)


def compact(arguments: argparse.Namespace) -> int:
    given: str = arguments.directory
    if not is_local(given) or os.path.isdir(os.path.join(given, "_delta_log")):
        return _compact_delta(given, arguments.retention)
    from nsparq.pipeline.write.compact import compact
    from nsparq.pipeline.write.parquet_table import ParquetDirectory

    if not os.path.isdir(given):
        raise StartError(f"{given} is not a directory")
    if arguments.retention:
        raise StartError(f"--retention: {given} is not a Delta table, so it has no old versions")
    joined = compact(ParquetDirectory(given))
    _print_joined(sum(one.files for one in joined), len(joined))
    return OK


def _compact_delta(uri: str, retention: float) -> int:
    from nsparq.pipeline.write import delta_upkeep

    tended = delta_upkeep.Tended(uri, fan_in=1, retention=retention)
    if tended.open() is None:
        raise StartError(f"{uri} is not a Delta table")
    if retention and retention < MIN_RETENTION_S:
        raise StartError(f"--retention must be at least {format_duration(MIN_RETENTION_S)}")
    joined = [*delta_upkeep.compact(tended)]
    _print_joined(sum(files for files, _ in joined), len(joined))
    if retention:
        print(f"{delta_upkeep.expire(tended)} unused files were removed")
    return OK


def _print_joined(before: int, after: int) -> None:
    print(f"{before} files became {after}" if after else "there are no files to join")


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
        text = ready_made.stats(
            topics,
            Path(directory),
            every=arguments.every,
            event_time=arguments.event_time,
            sink=sink,
            mode=mode,
            # Temporary, like the counts.
            channel=f"stats-{os.getpid()}#ephemeral",
        )
        if arguments.show:
            sys.stdout.write(text)
            return OK
        return run_file(parse(text, Path(directory) / "stats.toml"), arguments)


def _stats_now(topics: ready_made.Topics, arguments: argparse.Namespace) -> int:
    from nsparq.pipeline.execute import batch_read

    file = batch_read.file_of(topics)
    # Nothing is written, so a signal may end it at once.
    with session(file, arguments, Stopping(0.0)) as spark:
        sql = (
            ready_made.stats_sql(arguments.every, arguments.event_time, live=False) + " ORDER BY time, topic"
        )
        frame = batch_read.query(spark, batch_read.messages(spark, file, arguments.until), sql)
        rows = [frame.columns, *([_cell(value) for value in row] for row in frame.collect())]
        print("\n".join(text_table(rows)))
    return OK


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return f"{value:.0f}" if isinstance(value, float) else str(value)


# replay


def replay(arguments: argparse.Namespace) -> int:
    from nsparq.pipeline.execute import batch_read
    from nsparq.pipeline.execute.replay import Publisher
    from nsparq.pipeline.execute.replay import replay as publish

    topics = _topics(arguments)
    file, stopping = batch_read.file_of(topics), Stopping(END_S)
    with batch_read.nsqd_for(file, arguments.to_nsqd_http_address, arguments.name) as client:
        publisher = Publisher(client, arguments.to, arguments.name)
        with session(file, arguments, stopping) as spark:
            if arguments.from_dir:
                frame = batch_read.archived(spark, arguments.from_dir, topics, arguments.until)
            else:
                frame = batch_read.messages(spark, file, arguments.until)
            with _bar(frame.count(), arguments.to) as progress:
                messages = batch_read.messages_of(frame)
                done = publish(messages, publisher, arguments.rate, progress, stopping.event)
    logger.info("published %d messages to %s", done, arguments.to)
    return OK


@contextlib.contextmanager
def _bar(total: int, topic: str) -> Iterator[Callable[[int], None]]:
    """Shows the progress of a replay."""
    try:
        if not sys.stderr.isatty():
            raise ModuleNotFoundError
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        yield _progress_log(total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(f"-> {topic}", total=total)
        yield lambda count: shown.advance(task, count)


def _progress_log(total: int) -> Callable[[int], None]:
    done, logged = 0, time.monotonic()

    def log(count: int) -> None:
        nonlocal done, logged
        done += count
        if time.monotonic() - logged >= LOG_S or done == total:
            logged = time.monotonic()
            logger.info("%d of %d messages", done, total)

    return log
