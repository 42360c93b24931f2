"""Pipelines that are ready to run: each is a pipeline file made of a few choices, which may be shown and
changed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

__all__ = ["Topics", "archive", "stats"]

ARCHIVE_BATCH: Final = "512m"
"""At most about so much in a micro-batch of the archive, which is a few seconds' work."""
ARCHIVE_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Messages of an archive do not pass through the JVM: to make its code fast would take more than it gives."""
ARCHIVE_TASK: Final = "128m"
"""At most so much in a task, and so in a file, before compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """What to read, and where."""

    nsq: Mapping[str, str | Sequence[str]]
    """Keys of [nsq]."""
    topics: Sequence[str] = ()
    pattern: str = ""
    start: str = "earliest"

    def without(self, topic: str) -> Topics:
        """The same but for a topic that the pattern may match: one that the pipeline writes itself."""
        if not self.pattern:
            return self
        return replace(self, pattern=f"(?!{re.escape(topic)}$)(?:{self.pattern})")

    def toml(self) -> str:
        """[nsq], and the table of the source for one line."""
        return "\n".join(["[nsq]", *(f"{key} = {json.dumps(value)}" for key, value in self.nsq.items())])

    def source(self, **more: str | int) -> str:
        chosen: dict[str, object] = (
            {"topics_pattern": self.pattern} if self.pattern else {"topic": list(self.topics)}
        )
        if self.start != "earliest":
            chosen["starting_position"] = self.start
        return (
            "{ "
            + ", ".join(f"{key} = {json.dumps(value)}" for key, value in {**chosen, **more}.items())
            + " }"
        )


def archive(
    topics: Topics,
    output: Path,
    *,
    trigger: str = "10s",
    compact: int = 16,
    channel: str = "archive",
    run: Mapping[str, str] | None = None,
) -> str:
    """Topics into Parquet files, by topic and by the day on which a message was published. Messages stay as
    they are, in the column `body`."""
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
        'decode = "message"',
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


def stats_sql(every: str, event_time: str, *, live: bool) -> str:
    """Counts, sizes and latencies of a topic for each minute. A latency is how long after the time in a field
    of the message it was published or, live, how long after that it is read here."""
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
    """The same as a pipeline that goes on. With `mode` append a line comes once, when its time is over."""
    lines = [
        topics.toml(),
        "",
        "[run]",
        f"checkpoint = {json.dumps(str(checkpoint))}",
        "",
        "[pipeline.stats]",
        # Its checkpoint is gone with it.
        f"source = {topics.source(channel=channel, own_channel=False)}",
        f'watermark = {{ column = "_timestamp", delay = {json.dumps(delay)} }}',
        f"sql = {json.dumps(stats_sql(every, event_time, live=True))}",
        f'output_mode = "{mode}"',
        f"trigger = {json.dumps(trigger)}",
        sink,
    ]
    return "\n".join(lines) + "\n"
