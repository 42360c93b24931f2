"""Pipeline files that commands write: `new`, `archive`, `table` and `stats`. Needs no Spark."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from nsparq.pipeline.decode.samples import guess_format, infer_json
from nsparq.pipeline.file.nsq_options import DEFAULT_NSQD
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access, Refused, Unreachable

ARCHIVE_BATCH: Final = "512m"
"""Limit of a micro-batch of the archive, which takes a few seconds."""
ARCHIVE_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Little code runs in the JVM for an archive, so optimizing it costs more than it gains."""
ARCHIVE_TASK: Final = "128m"
"""Limit of a task, and so of a file before compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """The topics to read, and the addresses of nsqd."""

    nsq: Mapping[str, str | Sequence[str]]
    """Keys of [nsq]."""
    topics: Sequence[str] = ()
    pattern: str = ""
    start: str = "earliest"

    def without(self, topic: str) -> Topics:
        """Excludes a topic from the pattern, because the pipeline itself writes it."""
        if not self.pattern:
            return self
        return replace(self, pattern=f"(?!{re.escape(topic)}$)(?:{self.pattern})")

    def toml(self) -> str:
        """The table [nsq]."""
        return "\n".join(["[nsq]", *(f"{key} = {json.dumps(value)}" for key, value in self.nsq.items())])

    def source(self, **more: str | int) -> str:
        """The source as an inline table."""
        chosen: dict[str, object] = (
            {"topics_pattern": self.pattern} if self.pattern else {"topic": list(self.topics)}
        )
        if self.start != "earliest":
            chosen["starting_position"] = self.start
        keys = (f"{key} = {json.dumps(value)}" for key, value in {**chosen, **more}.items())
        return f"{{ {', '.join(keys)} }}"


def archive(
    topics: Topics,
    output: Path,
    *,
    trigger: str = "10s",
    compact: int = 16,
    channel: str = "archive",
    run: Mapping[str, str] | None = None,
) -> str:
    """Topics to Parquet files, by topic and by date of publishing, with the message in `body` and
    `headers`."""
    source = topics.source(channel=channel, max_bytes_per_trigger=ARCHIVE_BATCH, partition_bytes=ARCHIVE_TASK)
    lines = [
        topics.toml(),
        "",
        "[run]",
        f"checkpoint = {json.dumps(str(output / '_nsparq' / 'checkpoint'))}",
        *(f"{key} = {json.dumps(value)}" for key, value in (run or {}).items()),
        "",
        "[spark]",
        f'conf = {{ "spark.driver.extraJavaOptions" = {json.dumps(ARCHIVE_JAVA)} }}',
        "",
        "[pipeline.archive]",
        f"source = {source}",
        'decode = { format = "message", headers = true }',
        f"trigger = {json.dumps(trigger)}",
        "",
        "[pipeline.archive.sink]",
        f"parquet = {json.dumps(str(output))}",
        'partition_by = ["topic", "date"]',
        'date_from = "timestamp"',
    ]
    if compact:
        lines.append(f"compact = {compact}")
    return "\n".join(lines) + "\n"


def table(
    topics: Topics,
    uri: str,
    checkpoint: str,
    *,
    schema: str = "",
    dead_letters: str = "",
    partition_by: Sequence[str] = ("date",),
    trigger: str = "5s",
    compact: int = 16,
    retention: str = "168h",
    channel: str = "table",
) -> str:
    """Topics as a Delta table: messages with their origin or, with `schema`, the columns of JSON
    messages."""
    decode = f'decode = {{ format = "json", schema = {json.dumps(schema)}, headers = true }}'
    if not schema:
        decode = 'decode = { format = "message", headers = true }'
    elif dead_letters:
        topics = topics.without(dead_letters)
        decode += f"\ndead_letters = {json.dumps(dead_letters)}"
    source = topics.source(channel=channel, max_bytes_per_trigger=ARCHIVE_BATCH, partition_bytes=ARCHIVE_TASK)
    lines = [
        topics.toml(),
        "",
        "[run]",
        f"checkpoint = {json.dumps(checkpoint)}",
        "",
        "[spark]",
        f'conf = {{ "spark.driver.extraJavaOptions" = {json.dumps(ARCHIVE_JAVA)} }}',
        "",
        "[pipeline.table]",
        f"source = {source}",
        decode,
        f"trigger = {json.dumps(trigger)}",
        "",
        "[pipeline.table.sink]",
        f"delta = {json.dumps(uri)}",
        f"partition_by = {json.dumps([*partition_by])}",
        f"date_from = {json.dumps('_timestamp' if schema else 'timestamp')}",
    ]
    if compact:
        lines.append(f"compact = {compact}")
    if retention:
        lines.append(f"retention = {json.dumps(retention)}")
    return "\n".join(lines) + "\n"


def stats_sql(every: str, event_time: str, *, live: bool) -> str:
    """Counts, sizes and latencies of a topic for each minute. The latency is the time from the
    field `event_time` to publishing or, without it and live, from publishing to reading."""
    columns = [
        "window.start AS time",
        "_topic AS topic",
        "count(*) AS messages",
        "sum(size) AS bytes",
        "round(avg(size)) AS mean_bytes",
        "max(size) AS max_bytes",
    ]
    given = ["_topic", "_timestamp", "length(body) AS size"]
    if event_time or live:
        columns += [
            "round(percentile_approx(late, 0.5)) AS p50_ms",
            "round(percentile_approx(late, 0.95)) AS p95_ms",
            "round(max(late)) AS max_ms",
        ]
        given.append(f"{_late(event_time)} / 1000 AS late")
    rows = f"SELECT {', '.join(given)} FROM input"
    return f"SELECT {', '.join(columns)} FROM ({rows}) GROUP BY window(_timestamp, '{every}'), _topic"


def _late(event_time: str) -> str:
    if not event_time:
        return "(unix_micros(current_timestamp()) - unix_micros(_timestamp))"
    path = ("$." + event_time).replace("\\", "\\\\").replace("'", "\\'")
    time = f"try_to_timestamp(get_json_object(CAST(body AS STRING), '{path}'))"
    return f"(unix_micros(_timestamp) - unix_micros({time}))"


def stats(
    topics: Topics,
    checkpoint: Path,
    *,
    every: str = "1 minute",
    event_time: str = "",
    sink: str = 'sink = "console"',
    mode: str = "update",
    trigger: str = "5s",
    delay: str = "10s",
    channel: str = "stats",
) -> str:
    """The same as a running pipeline. With `mode` append, each window is written once, at its
    end."""
    lines = [
        topics.toml(),
        "",
        "[run]",
        f"checkpoint = {json.dumps(str(checkpoint))}",
        "",
        "[pipeline.stats]",
        # Its checkpoint is temporary.
        f"source = {topics.source(channel=channel, own_channel=False)}",
        f'watermark = {{ column = "_timestamp", delay = {json.dumps(delay)} }}',
        f"sql = {json.dumps(stats_sql(every, event_time, live=True))}",
        f'output_mode = "{mode}"',
        f"trigger = {json.dumps(trigger)}",
        sink,
    ]
    return "\n".join(lines) + "\n"


# new


def peek(nsqd: str, topic: str, count: int = 100) -> tuple[list[bytes], str]:
    """The newest messages of a topic, without taking them, or the reason why there are none."""
    try:
        with Client(nsqd, Access(timeout=5.0)) as client:
            answer = client.get("/topic/peek", topic=topic, count=count).json()
    except Unreachable as error:
        return [], f"{error}"
    except Refused as error:
        reason = "this topic does not exist yet" if error.code == "TOPIC_NOT_FOUND" else str(error)
        return [], f"{topic}: {reason}"
    bodies = [
        base64.b64decode(one["body_base64"]) if "body_base64" in one else one["body"].encode()
        for one in answer["messages"]
    ]
    return bodies, "" if bodies else f"{topic} has no messages yet"


def starter(topic: str, bodies: Sequence[bytes], *, nsqd: str = DEFAULT_NSQD, name: str = "") -> str:
    """A pipeline that shows the topic on the console, with comments about the next steps."""
    name = name or re.sub(r"[^A-Za-z0-9_-]+", "-", topic).strip("-") or "first"
    format = guess_format(bodies) if bodies else "json"
    schema = infer_json(bodies) if format == "json" else ""
    lines = [
        f"# nsparq pipeline run FILE      reads the topic {topic} and shows it on the console",
        "# nsparq pipeline check FILE    checks the file without running it",
        "",
        "[nsq]",
        f"nsqd = [{json.dumps(nsqd)}]",
        "",
        f"[pipeline.{name}]",
        f"source = {json.dumps(topic)}",
        *_decode(format, schema, bool(bodies)),
    ]
    if format != "raw":
        lines.append(
            f"dead_letters = {json.dumps(f'{topic}.dead')}    # topic for messages that are not {format}"
        )
    lines += [
        f'sql = "SELECT {_columns(format, schema)} FROM input"',
        'sink = "console"',
        "",
        "# Other sinks:",
        f'#   sink = {{ topic = "{topic}.out" }}',
        f'#   sink = {{ parquet = "data/{name}", partition_by = ["date"] }}',
        "# A count for every minute of publishing, written when the minute is over:",
        '#   watermark = { column = "_timestamp", delay = "10s" }',
        '#   sql = """SELECT window.start AS minute, count(*) AS messages',
        '#            FROM input GROUP BY window(_timestamp, \'1 minute\')"""',
    ]
    return "\n".join(lines) + "\n"


def _decode(format: str, schema: str, was_seen: bool) -> list[str]:
    if format != "json":
        return [f'decode = "{format}"']
    if not schema:
        comment = (
            "" if was_seen else "    # the columns are inferred from the first messages; or set a schema:"
        )
        lines = [f'decode = "json"{comment}']
        if not was_seen:
            lines.append(
                '# decode = { format = "json", schema = "number INT NOT NULL, item STRING, price DOUBLE" }'
            )
        return lines
    if len(schema) < 100 and '"' not in schema and "\\" not in schema:
        return [f'decode = {{ format = "json", schema = "{schema}" }}']
    return [f"decode = {{ format = \"json\", schema = '''{schema}''' }}"]


def _columns(format: str, schema: str) -> str:
    if format == "json" and schema:
        return "*"
    return {"text": "_timestamp, text", "raw": "_timestamp, hex(body) AS body"}.get(format, "*")
