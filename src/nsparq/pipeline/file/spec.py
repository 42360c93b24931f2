"""The values that a pipeline file becomes. A field made with `key()` is a key of the file. Needs no
Spark.

`nsparq.pipeline.file.reading` makes these values from TOML. The reference page is generated from
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nsparq.errors import NsparqError
from nsparq.pipeline.decode.formats import read_framing
from nsparq.pipeline.file.keys import (
    REQUIRED,
    choice,
    count,
    duration,
    flag,
    function_name,
    identifier,
    identifiers,
    key,
    output_name,
    settings,
    sql_query,
    string,
    topic_name,
    unread,
    whole,
)
from nsparq.pipeline.file.sinks import Sink, describe
from nsparq.pipeline.file.tables import Table

MESSAGES: Final = "messages"
"""The name in SQL for the decoded messages of the only source."""
INPUT: Final = "input"
"""The name in SQL for the input of a step."""


class SpecError(NsparqError):
    """A pipeline file with errors. The text has one line for each problem."""

    def __init__(self, path: str, problems: list[str]) -> None:
        super().__init__("\n".join(f"{path}: {problem}" for problem in problems))
        self.path, self.problems = path, problems


@dataclass(frozen=True, slots=True)
class Trigger:
    """When micro-batches start: at an interval, or until all existing messages have been read."""

    seconds: float = 1.0
    kind: str = "interval"

    @property
    def ends(self) -> bool:
        """The query ends by itself."""
        return self.kind != "interval"

    @classmethod
    def read(cls, value: Any) -> Trigger:
        if value in ("available-now", "once"):
            return cls(0.0, value)
        try:
            return cls(duration(value))
        except ValueError:
            raise ValueError('must be a duration such as "5s", "available-now" or "once"') from None


# [pipeline.NAME]

_DECODE: Final = "`json`, `csv`, `text`, `raw`, `message`, or a table"
_DEAD_LETTERS: Final = "topic for messages that do not decode, each with the reason and its origin"
_MODES: Final = choice("append", "update", "complete")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """How the bytes of a message become columns."""

    format: str = key(
        REQUIRED,
        choice("json", "csv", "avro", "protobuf", "text", "raw", "message"),
        "`json`: one object; `csv`: one line; `avro`: one record; `protobuf`: one message; `text`: a column "
        "`text`; `raw`: a column `body`, unchanged; `message`: the same, and the columns `topic`, `node`, "
        "`offset`, `timestamp` and `id` without the leading `_`",
    )
    schema: str = key(
        "",
        string,
        "columns of `json` and `csv`, as in CREATE TABLE: `number INT NOT NULL, price DOUBLE`. A message "
        "without a value for a NOT NULL column does not decode",
        shown="from `json_schema`, or inferred once from a sample and kept with the checkpoint",
    )
    json_schema: str = key(
        "",
        string,
        "file with a JSON Schema for `json`: a message that does not satisfy it does not decode. Without "
        "`schema` its properties are the columns",
    )
    schema_file: str = key(
        "", string, "file with the schema of `avro`: a record, whose fields are the columns"
    )
    descriptor_file: str = key(
        "",
        string,
        "file with the message types of `protobuf`, written by "
        "`protoc --include_imports --descriptor_set_out=FILE`",
    )
    message: str = key("", string, "the message type in that file, with its package: `shop.Order`")
    framing: str = key(
        "",
        read_framing,
        "bytes before a `json`, `avro` or `protobuf` message: `confluent` is the frame that serializers "
        "for Confluent's schema registry write. The frame is removed, and its schema id is not looked up. "
        "With `confluent:7` a message with another id than 7 does not decode",
        shown="none",
    )
    sample: int = key(1000, count, "number of messages to infer the schema from")
    on_error: str = key(
        "fail",
        choice("fail", "drop"),
        "what happens to a message that does not decode, if there is no `dead_letters`: `fail` stops the "
        "pipeline, `drop` skips the message and counts it",
    )
    options: Mapping[str, str] = key(
        dict, settings, "more options for Spark's JSON or CSV reader, such as `timestampFormat` or `sep`"
    )
    headers: bool = key(
        False,
        flag,
        "`true`: rows have a column `_headers` with the [headers](headers.md) of the message, "
        "`map<string,string>`, null without headers; with `message` its name is `headers`",
    )
    definition: bytes = field(default=b"", repr=False)
    """The content of `schema_file`, `descriptor_file` or `json_schema`."""

    @property
    def definition_key(self) -> str:
        """The key that names the schema file of this format. Empty if the format has none."""
        by_format = {"avro": "schema_file", "protobuf": "descriptor_file", "json": "json_schema"}
        return by_format.get(self.format, "")

    @property
    def is_inferred(self) -> bool:
        """The columns are inferred from messages."""
        return self.format in ("json", "csv") and not self.schema and not self.json_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """How late rows may come. Later rows are left out of windows that are closed."""

    column: str = key(REQUIRED, identifier, "a timestamp; `_timestamp` is when the message was published")
    delay: float = key(REQUIRED, duration, "how much older than the newest row a row may be")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Topics that are read together, and how their messages are decoded."""

    name: str = MESSAGES
    """The name of the decoded messages in SQL."""
    options: Mapping[str, str]
    """Options of format("nsq"), without the addresses and credentials of [nsq]."""
    decode: Decode = key(Decode(format="raw"), unread, _DECODE, shown="`raw`")
    dead_letters: str = key("", topic_name, _DEAD_LETTERS)
    watermark: Watermark | None = key(None, unread, "how late rows may come, for windows and joins")

    @property
    def topics(self) -> str:
        """The topics or the pattern, for people."""
        return self.options.get("topic") or self.options.get("topics") or self.options["topicsPattern"]

    @property
    def listed_topics(self) -> set[str]:
        """The topics that are named one by one."""
        return {*self.options.get("topics", "").split(","), self.options.get("topic", "")} - {""}

    @property
    def pattern(self) -> str:
        """A regular expression for the full names of all topics that the source reads."""
        named = "|".join(re.escape(topic.strip()) for topic in sorted(self.listed_topics))
        return self.options.get("topicsPattern", named)

    @property
    def is_queue(self) -> bool:
        return self.options.get("mode") == "queue"

    def reads(self, topic: str) -> bool:
        return re.fullmatch(self.pattern, topic) is not None

    def channel(self, output: str = "") -> str:
        """The channel of the query that writes to an output."""
        return _named(self.options["channel"], ".", output)

    @property
    def letters_channel(self) -> str:
        return f"{self.options['channel']}.dead"

    @property
    def letters_role(self) -> str:
        """Role of the query for the dead letters, and name of its checkpoint."""
        return _named("letters", "-", "" if self.name == MESSAGES else self.name)


def _named(base: str, separator: str, name: str) -> str:
    """Without a name `base` alone, as in older versions, for their checkpoints and channels."""
    return f"{base}{separator}{name}" if name else base


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One transformation. Its result is the `input` of the next step; later steps can name it."""

    name: str = key("", identifier, "name of the result, for later steps", shown="`step1`, `step2`, …")
    sql: str = key("", sql_query, "a query over `input` and the names of sources, tables and earlier steps")
    python: str = key(
        "", function_name, "instead of `sql`: a function `module:function` that takes and returns DataFrames"
    )
    sources: tuple[str, ...] = key(
        (),
        identifiers,
        "sources, tables or results that the step takes: `input` is the first of them, and a function gets "
        "all of them",
        name="from",
        shown="the step before, or the only source",
    )
    watermark: Watermark | None = key(None, unread, "watermark of the result, as for a source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A sink and the rows that go there. Each output is a separate streaming query."""

    name: str = key("", output_name, "part of the names of its checkpoint and channel; one sink may omit it")
    result: str = key("", identifier, "source or step that it writes", name="from", shown="the last step")
    output_mode: str = key("", _MODES, "as in the pipeline, for this sink", shown="that of the pipeline")
    sink: Sink

    @property
    def role(self) -> str:
        """Role of its query, and name of its checkpoint."""
        return _named("rows", "-", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One pipeline: sources, steps and outputs."""

    name: str
    sources: tuple[Source, ...]
    tables: tuple[Table, ...] = ()
    steps: tuple[Step, ...] = ()
    outputs: tuple[Output, ...]
    trigger: Trigger = Trigger()
    checkpoint: str
    retries: int | None = None
    """None for the value in [run]."""

    @property
    def topics(self) -> str:
        """The topics of all sources, for people."""
        return ",".join(source.topics for source in self.sources)

    @property
    def sinks(self) -> str:
        """All sinks, for people."""
        return ", ".join(describe(output.sink) for output in self.outputs)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of all its queries."""
        letters = (source.letters_role for source in self.sources if source.dead_letters)
        return *(output.role for output in self.outputs), *letters

    @property
    def is_paced_by_source(self) -> bool:
        """Whether the source keeps the interval of the trigger. It does not hold a full micro-batch
        up, so a backlog is read at full speed. Spark has to keep the interval of several sources,
        and of user code, whose timers may start micro-batches without messages."""
        is_one_log = len(self.sources) == 1 and not self.sources[0].is_queue
        return is_one_log and not self.trigger.ends and not any(step.python for step in self.steps)

    @property
    def pattern(self) -> str:
        """A regular expression for the full names of all topics that the pipeline reads."""
        if len(self.sources) == 1:
            return self.sources[0].pattern
        return "|".join(f"(?:{source.pattern})" for source in self.sources)

    def reads(self, topic: str) -> bool:
        return any(source.reads(topic) for source in self.sources)

    def place_of(self, source: Source, inner: str = "") -> str:
        """The table of a source, or one inside it, for error texts."""
        if source.name == MESSAGES:
            return f"[pipeline.{self.name}.{inner or 'source'}]"
        return f"[pipeline.{self.name}.sources.{source.name}{inner and f'.{inner}'}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineKeys:
    """[pipeline.NAME] as it is written in the file."""

    source: Source | None = key(None, unread, "a topic, or a table; see below", shown="*required*")
    sources: tuple[Source, ...] = key((), unread, "instead of `source`: several, each with a name; see below")
    decode: Decode = key(Decode(format="raw"), unread, f"{_DECODE}; see below", shown="`raw`")
    dead_letters: str = key("", topic_name, _DEAD_LETTERS)
    watermark: Watermark | None = key(None, unread, "how late rows may come, for windows; see below")
    tables: tuple[Table, ...] = key((), unread, "tables to join with, each with a name; see below")
    sql: str = key("", sql_query, "the transformation, if one query is enough: `SELECT … FROM input`")
    python: str = key(
        "", function_name, "instead of `sql`: a function `module:function`, DataFrame in, DataFrame out"
    )
    steps: tuple[Step, ...] = key((), unread, "several transformations, one after the other", name="step")
    outputs: tuple[Output, ...] = key(
        REQUIRED, unread, "`console`, `noop`, a table, or an array of tables; see below", name="sink"
    )
    output_mode: str = key(
        "append",
        _MODES,
        "which rows of an aggregation are written: `append` writes final rows (needs a watermark), `update` "
        "rows that a micro-batch changed, `complete` all rows each time",
    )
    trigger: Trigger = key(
        Trigger(),
        Trigger.read,
        'how often a micro-batch starts; `"0s"` as soon as possible; `"available-now"` ends when all '
        'messages that exist now have been read, `"once"` after one micro-batch',
        shown='`"1s"`',
    )
    checkpoint: str = key(
        "", string, "directory of the pipeline's checkpoint", shown="`NAME` in the `checkpoint` of `[run]`"
    )
    retries: int | None = key(None, whole, "as in `[run]`, for this pipeline", shown="that of `[run]`")


# the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Spark:
    """The Spark session. All pipelines of the file share it."""

    master: str = key(
        "local[*]", string, "where Spark runs: `local[*]` is this machine, `spark://host:7077` a cluster"
    )
    app_name: str = key("", string, "name of the application in Spark", shown="name of the file")
    ui_port: int = key(4040, whole, "port of Spark's web pages; 0 for none")
    conf: Mapping[str, str] = key(dict, settings, "Spark settings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How the pipelines of the file are run."""

    checkpoint: str = key(
        "", string, "directory of the checkpoints and the status file", shown="`checkpoints/FILE`"
    )
    metrics_address: str = key(
        "",
        string,
        "`host:port` for `/metrics` (Prometheus) and `/status` (JSON). An empty host, `0.0.0.0` and `[::]` "
        "mean every address of the machine, IPv4 and IPv6",
        shown="none",
    )
    retries: int = key(
        10,
        whole,
        "how many times in a row a failed pipeline is restarted; a successful micro-batch resets the count. "
        "An error that would come again is not retried (wrong SQL, a message that does not decode, lost "
        "messages, a refused checkpoint)",
    )
    retry_delay: float = key(
        1.0, duration, "delay before the first restart; it doubles each time", shown='`"1s"`'
    )
    retry_max_delay: float = key(60.0, duration, "limit of that delay", shown='`"1m"`')
    stop_grace: float = key(
        10.0, duration, "how long a micro-batch may continue after a signal", shown='`"10s"`'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """A whole file. Its paths are absolute; in the file they are relative to the file."""

    path: Path
    nsq: Mapping[str, str]
    """Options of format("nsq") with the addresses and credentials for nsqd."""
    spark: Spark
    run: Run
    pipelines: tuple[Pipeline, ...]
