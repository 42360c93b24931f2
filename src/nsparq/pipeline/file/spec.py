"""What a pipeline file can say, as values. A field made with `key()` is a key of the file. Needs no Spark.

`nsparq.pipeline.file.reading` makes these of TOML; the reference page is made of them too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nsparq.errors import NsparqError
from nsparq.pipeline.decode.bodies import read_framing
from nsparq.pipeline.file.tables import (
    REQUIRED,
    choice,
    count,
    duration,
    flag,
    key,
    settings,
    strings,
    text,
    topic_name,
    unread,
    whole,
)

__all__ = [
    "INPUT",
    "MESSAGES",
    "SINKS",
    "TABLES",
    "Console",
    "CsvTable",
    "Decode",
    "Delta",
    "DeltaTable",
    "FileTable",
    "Files",
    "Format",
    "FormatTable",
    "Jdbc",
    "JdbcTable",
    "JsonTable",
    "Memory",
    "Noop",
    "Output",
    "Parquet",
    "ParquetTable",
    "Pipeline",
    "PipelineFile",
    "PipelineKeys",
    "Python",
    "Run",
    "Sink",
    "Source",
    "Spark",
    "SpecError",
    "Step",
    "Table",
    "Topic",
    "Trigger",
    "Watermark",
    "describe",
    "is_identifier",
    "is_local",
]

MESSAGES: Final = "messages"
"""The decoded messages of the only source, as SQL calls them."""
INPUT: Final = "input"
"""What a step is given, as SQL calls it."""


class SpecError(NsparqError):
    """A pipeline file that cannot be; the text has a line for each problem."""

    def __init__(self, path: str, problems: list[str]) -> None:
        super().__init__("\n".join(f"{path}: {problem}" for problem in problems))
        self.path, self.problems = path, problems


# values of keys


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a micro-batch begins: every so many seconds, or only as long as there is something now."""

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


def is_identifier(value: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) is not None


def _identifier(value: Any) -> str:
    if not isinstance(value, str) or not is_identifier(value):
        raise ValueError("must be a name that SQL can use: letters, digits, _")
    return value


def _output_name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", value):
        raise ValueError("must be a name of letters, digits, _ and -")
    return value


def _identifiers(value: Any) -> tuple[str, ...]:
    return tuple(map(_identifier, [value] if isinstance(value, str) else strings(value)))


def _sql(value: Any) -> str:
    # No environment variables: $ may be part of the query.
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a query")
    return value.strip().rstrip(";")


def _function(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError("must name a function of a module as module:function")
    return value


# [pipeline.NAME]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """What becomes of the bytes of a message."""

    format: str = key(
        REQUIRED,
        choice("json", "csv", "avro", "protobuf", "text", "raw", "message"),
        "`json`: one object; `csv`: one line; `avro`: one record; `protobuf`: one message; `text`: a column "
        "`text`; `raw`: a column `body`, as it came; `message`: the same, with `topic`, `node`, `offset`, "
        "`timestamp` and `id` under these names",
    )
    schema: str = key(
        "",
        text,
        "columns of `json` and `csv`, as in CREATE TABLE: `number INT NOT NULL, price DOUBLE`. A message "
        "without a value for a NOT NULL column does not decode",
        shown="that of `json_schema`, or inferred from a sample, once; kept with the checkpoint",
    )
    json_schema: str = key(
        "",
        text,
        "file with a JSON Schema for `json`: a message that does not satisfy it does not decode. Without "
        "`schema` its properties are the columns",
    )
    schema_file: str = key("", text, "file with the schema of `avro`: a record, whose fields are the columns")
    descriptor_file: str = key(
        "",
        text,
        "file with the messages of `protobuf`, as `protoc --include_imports --descriptor_set_out=FILE` makes "
        "it",
    )
    message: str = key("", text, "which of them it is, with its package: `shop.Order`")
    framing: str = key(
        "",
        read_framing,
        "what comes before a `json`, `avro` or `protobuf` message: `confluent` is the frame that serializers "
        "for Confluent's schema registry write. It is taken away, and the id in it is not looked up. With "
        "`confluent:7` a message whose id is not 7 does not decode",
        shown="nothing",
    )
    sample: int = key(1000, count, "so many messages of the topic are looked at to infer the schema")
    on_error: str = key(
        "fail",
        choice("fail", "drop"),
        "what to do about a message that does not decode, where there is no `dead_letters`: `fail` the "
        "pipeline, or `drop` it and count it",
    )
    options: Mapping[str, str] = key(
        dict, settings, "further options of Spark's JSON or CSV reader, such as `timestampFormat` or `sep`"
    )
    definition: bytes = field(default=b"", repr=False)
    """The content of `schema_file`, `descriptor_file` or `json_schema`."""

    @property
    def definition_key(self) -> str:
        """Which of the three has a file for this format; empty if none has."""
        by_format = {"avro": "schema_file", "protobuf": "descriptor_file", "json": "json_schema"}
        return by_format.get(self.format, "")

    @property
    def is_inferred(self) -> bool:
        """The columns have to be taken from messages."""
        return self.format in ("json", "csv") and not self.schema and not self.json_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """How late rows may come: later ones are left out of windows that are closed."""

    column: str = key(REQUIRED, _identifier, "a timestamp; `_timestamp` is when the message was published")
    delay: float = key(REQUIRED, duration, "how much older than the newest row a row may be")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Topics that are read together, and what becomes of their messages."""

    name: str = MESSAGES
    """Of the decoded messages, for SQL."""
    options: Mapping[str, str]
    """Of format("nsq"), without those that say where nsqd is."""
    decode: Decode = key(
        Decode(format="raw"), unread, "`json`, `csv`, `text`, `raw`, `message`, or a table", shown="`raw`"
    )
    dead_letters: str = key(
        "", topic_name, "topic for messages that do not decode, each with the reason and where it came from"
    )
    watermark: Watermark | None = key(None, unread, "how late rows may come, for windows and joins")

    @property
    def topics(self) -> str:
        """In words."""
        return self.options.get("topic") or self.options.get("topics") or self.options["topicsPattern"]

    @property
    def listed_topics(self) -> set[str]:
        """Those that are named one by one."""
        return {*self.options.get("topics", "").split(","), self.options.get("topic", "")} - {""}

    @property
    def pattern(self) -> str:
        """The whole names of all topics that are read match it."""
        named = "|".join(re.escape(topic.strip()) for topic in sorted(self.listed_topics))
        return self.options.get("topicsPattern", named)

    @property
    def is_queue(self) -> bool:
        return self.options.get("mode") == "queue"

    def reads(self, topic: str) -> bool:
        return re.fullmatch(self.pattern, topic) is not None

    def channel(self, output: str = "") -> str:
        """By which the query of an output reads it."""
        return _named(self.options["channel"], ".", output)

    @property
    def letters_channel(self) -> str:
        return f"{self.options['channel']}.dead"

    @property
    def letters_role(self) -> str:
        """Of the query for the dead letters, and the name of its checkpoint."""
        return _named("letters", "-", "" if self.name == MESSAGES else self.name)


def _named(base: str, separator: str, name: str) -> str:
    """What has no name is called as it was when there could be only one."""
    return f"{base}{separator}{name}" if name else base


# [pipeline.NAME.tables.NAME]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that is no stream, to join with."""

    name: str
    """For SQL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTable(Table):
    """What tables of files have in common."""

    path: str = key(REQUIRED, text, "the file, or a directory of them")
    schema: str = key("", text, "its columns, as in `decode`", shown="found in the files")
    options: Mapping[str, str] = key(dict, settings, "further options of Spark's reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetTable(FileTable):
    """Parquet files. Which files there are is seen when the pipeline starts."""

    path: str = key(REQUIRED, text, "the file, or a directory of them", name="parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvTable(FileTable):
    """CSV files, with a header unless `options` say otherwise. Which files there are is seen when the
    pipeline starts."""

    path: str = key(REQUIRED, text, "the file, or a directory of them", name="csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonTable(FileTable):
    """JSON files, an object in each line. Which files there are is seen when the pipeline starts."""

    path: str = key(REQUIRED, text, "the file, or a directory of them", name="json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTable(Table):
    """A Delta table as it is when the pipeline starts; needs the package deltalake, and memory for all of
    it."""

    path: str = key(REQUIRED, text, "the table: a directory, or `s3://…` and the like", name="delta")
    storage_options: Mapping[str, str] = key(
        dict, settings, "deltalake's options for an object store", shown="the environment's"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JdbcTable(Table):
    """A table of a database, asked by each micro-batch; its JDBC driver must be on Spark's class path."""

    url: str = key(REQUIRED, text, "such as `jdbc:postgresql://host/db`", name="jdbc")
    table: str = key(REQUIRED, text, "the table, or a query in brackets with a name: `(SELECT …) AS t`")
    user: str = key("", text, "for the database")
    password: str = key("", text, "for the database; `${PASSWORD}` takes it from the environment")
    driver: str = key("", text, "class of the driver", shown="the usual one for the URL")
    options: Mapping[str, str] = key(dict, settings, "further options of Spark's JDBC reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTable(Table):
    """Whatever Spark can read as a batch."""

    format: str = key(REQUIRED, text, "a format of Spark's, such as `orc` or `iceberg`")
    schema: str = key("", text, "its columns, as in `decode`", shown="those that the format tells")
    options: Mapping[str, str] = key(dict, settings, "options of the format, such as `path`")


TABLES: Final[dict[str, type[Table]]] = {
    "parquet": ParquetTable,
    "csv": CsvTable,
    "json": JsonTable,
    "delta": DeltaTable,
    "jdbc": JdbcTable,
    "format": FormatTable,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One transformation. Its result is the `input` of the next, and has a name for all that follow."""

    name: str = key("", _identifier, "of the result, for later steps", shown="`step1`, `step2`, …")
    sql: str = key("", _sql, "a query over `input`, and the names of sources, tables and earlier steps")
    python: str = key(
        "", _function, "instead: a function `module:function` that takes DataFrames and returns one"
    )
    sources: tuple[str, ...] = key(
        (),
        _identifiers,
        "sources, tables or results that are the step's input: `input` is the first, and a function is given "
        "all of them",
        name="from",
        shown="the step before; the only source",
    )
    watermark: Watermark | None = key(None, unread, "of the result, as for a source")


# [pipeline.NAME.sink]


_KEY: Final = (
    "columns that are the key: a row replaces the one with the same key, or is added if there is none "
    "(upsert)"
)
_LATEST_BY: Final = (
    "with `key`: columns that say which of two rows with the same key is the later. The greater one counts, "
    "in a micro-batch and against the table; null is the least"
)
_ORIGIN: Final = "`_timestamp` and `_offset`, if the rows have both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Where the rows go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic(Sink):
    """Messages of another topic; exactly once with nsparq's nsqd."""

    topic: str = key("", topic_name, "the topic")
    topic_from: str = key("", _identifier, "instead, or for rows that have one: the column with the topic")
    body_from: str = key(
        "", _identifier, "column that is the message", shown="`body`, or the row as a JSON object"
    )
    defer_from: str = key("", _identifier, "column with the milliseconds to defer the message")
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options of format("nsq")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files(Sink):
    """What sinks of files have in common."""

    path: str = key(REQUIRED, text, "the directory")
    partition_by: tuple[str, ...] = key(
        (),
        _identifiers,
        "columns that become directories; `date` and `hour` (UTC) are made of `date_from` if the rows have "
        "no such column",
    )
    date_from: str = key("_timestamp", _identifier, "the timestamp for `date` and `hour`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parquet(Files):
    """Parquet files, exactly once; whoever reads the directory sees whole files only."""

    path: str = key(REQUIRED, text, "the directory", name="parquet")
    compression: str = key("zstd", choice("zstd", "snappy", "gzip", "none"), "of the files")
    compact: int = key(
        0,
        count,
        "join the small files of a directory as soon as there are so many; needs `partition_by`",
        shown="never",
    )
    writer: str = key(
        "",
        choice("nsparq", "spark"),
        "`nsparq` writes to a file system, `spark` uses Spark's file sink, which knows object stores",
        shown="by the path: `spark` for `s3://…` and the like",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(Files):
    """A Delta table, exactly once; needs the package deltalake."""

    path: str = key(
        REQUIRED,
        text,
        "the table: a directory, or `s3://…`, `gs://…`, `az://…`, `abfss://…`; new columns of the rows are "
        "added to it",
        name="delta",
    )
    storage_options: Mapping[str, str] = key(
        dict,
        settings,
        "deltalake's options for an object store, such as `AWS_REGION` or `AWS_ENDPOINT_URL`",
        shown="the environment's",
    )
    key_columns: tuple[str, ...] = key((), _identifiers, _KEY, name="key")
    latest_by: tuple[str, ...] = key((), _identifiers, _LATEST_BY, shown=_ORIGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jdbc(Sink):
    """A table of a database; its JDBC driver must be on Spark's class path."""

    url: str = key(REQUIRED, text, "such as `jdbc:postgresql://host/db`", name="jdbc")
    table: str = key(REQUIRED, text, "the table; made if there is none")
    user: str = key("", text, "for the database")
    password: str = key("", text, "for the database; `${PASSWORD}` takes it from the environment")
    driver: str = key("", text, "class of the driver", shown="the usual one for the URL")
    batch_column: str = key(
        "",
        _identifier,
        "add the number of the micro-batch as this column and write each in one transaction: exactly once, "
        "if one pipeline writes to the table; without it at least once",
    )
    key_columns: tuple[str, ...] = key((), _identifiers, f"{_KEY}; exactly once", name="key")
    latest_by: tuple[str, ...] = key((), _identifiers, _LATEST_BY, shown=_ORIGIN)
    options: Mapping[str, str] = key(dict, settings, "further options of Spark's JDBC writer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format(Sink):
    """Whatever Spark can write, with a JAR or a Python data source of yours: Kafka, Iceberg, CSV."""

    format: str = key(REQUIRED, text, "as Spark calls it, such as `kafka`, `iceberg` or `csv`")
    path: str = key("", text, "the file or directory, for formats that have one")
    table: str = key("", text, "instead, for formats with a catalog: the table, such as `lake.shop.orders`")
    partition_by: tuple[str, ...] = key((), _identifiers, "columns to partition by")
    batches: bool = key(
        False,
        flag,
        "write each micro-batch as a job of its own, for formats that cannot write streams: at least once. "
        "With output mode `complete` each micro-batch overwrites the one before",
    )
    options: Mapping[str, str] = key(dict, settings, "options of the format; paths in them are not changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Python(Sink):
    """A function of yours, called with each micro-batch; at least once, or better if it uses the number."""

    function: str = key(
        REQUIRED,
        _function,
        "`module:function`, called with the DataFrame of a micro-batch and its number. A micro-batch that is "
        "run again after a crash has the same number and the same rows",
        name="python",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Console(Sink):
    """Rows on standard output, to see what comes."""

    rows: int = key(20, count, "at most so many of a micro-batch", name="console")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Sink):
    """A table in the memory of the session, for tests and notebooks."""

    table: str = key(REQUIRED, _identifier, "its name", name="memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noop(Sink):
    """Nowhere: to measure, or to have the dead letters only."""


SINKS: Final[dict[str, type[Sink]]] = {
    "topic": Topic,
    "parquet": Parquet,
    "delta": Delta,
    "jdbc": Jdbc,
    "format": Format,
    "python": Python,
    "console": Console,
    "memory": Memory,
    "noop": Noop,
}


# a pipeline

_MODES: Final = choice("append", "update", "complete")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A sink, and what goes there. Each is a streaming query of its own."""

    name: str = key("", _output_name, "names its checkpoint and channel; one sink may have none")
    result: str = key(
        "", _identifier, "source or step whose rows it gets", name="from", shown="the last step"
    )
    output_mode: str = key("", _MODES, "as in the pipeline, for this sink", shown="that of the pipeline")
    sink: Sink

    @property
    def role(self) -> str:
        """Of its query, and the name of its checkpoint."""
        return _named("rows", "-", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Topics in, rows out."""

    name: str
    sources: tuple[Source, ...]
    tables: tuple[Table, ...] = ()
    steps: tuple[Step, ...] = ()
    outputs: tuple[Output, ...]
    trigger: Trigger = Trigger()
    checkpoint: str
    retries: int | None = None
    """None for those of the file."""

    @property
    def topics(self) -> str:
        """In words."""
        return ",".join(source.topics for source in self.sources)

    @property
    def sinks(self) -> str:
        """In words."""
        return ", ".join(describe(output.sink) for output in self.outputs)

    @property
    def roles(self) -> tuple[str, ...]:
        """Of all its queries."""
        letters = (source.letters_role for source in self.sources if source.dead_letters)
        return *(output.role for output in self.outputs), *letters

    @property
    def pattern(self) -> str:
        """The whole names of all topics that it reads match it."""
        if len(self.sources) == 1:
            return self.sources[0].pattern
        return "|".join(f"(?:{source.pattern})" for source in self.sources)

    def reads(self, topic: str) -> bool:
        return any(source.reads(topic) for source in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineKeys:
    """[pipeline.NAME] as it is written."""

    source: Source | None = key(None, unread, "a topic, or a table; see below", shown="*required*")
    sources: tuple[Source, ...] = key((), unread, "instead: several, each with a name; see below")
    decode: Decode = key(
        Decode(format="raw"),
        unread,
        "`json`, `csv`, `text`, `raw`, `message`, or a table; see below",
        shown="`raw`",
    )
    dead_letters: str = key(
        "", topic_name, "topic for messages that do not decode, each with the reason and where it came from"
    )
    watermark: Watermark | None = key(None, unread, "how late rows may come, for windows; see below")
    tables: tuple[Table, ...] = key((), unread, "tables to join with, each with a name; see below")
    sql: str = key("", _sql, "the transformation, if one query will do: `SELECT … FROM input`")
    python: str = key("", _function, "the same as a function, `module:function`: DataFrame in, DataFrame out")
    steps: tuple[Step, ...] = key((), unread, "several transformations, one after the other", name="step")
    outputs: tuple[Output, ...] = key(
        REQUIRED, unread, "`console`, `noop`, a table, or an array of tables; see below", name="sink"
    )
    output_mode: str = key(
        "append",
        _MODES,
        "which rows of an aggregation are written: `append` the final ones (needs a watermark), `update` "
        "what a micro-batch has changed, `complete` all of them, each time",
    )
    trigger: Trigger = key(
        Trigger(),
        Trigger.read,
        'how often a micro-batch begins; `"0s"` as soon as possible; `"available-now"` ends when all that '
        'is there has been read, `"once"` after one micro-batch',
        shown='`"1s"`',
    )
    checkpoint: str = key(
        "", text, "directory of what the pipeline has to remember", shown="`NAME` in that of `[run]`"
    )
    retries: int | None = key(None, whole, "as in `[run]`, for this pipeline", shown="that of `[run]`")


# the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Spark:
    """The Spark session, which all pipelines of the file share."""

    master: str = key(
        "local[*]", text, "where Spark runs: `local[*]` is this machine, `spark://host:7077` a cluster"
    )
    app_name: str = key("", text, "what Spark calls it", shown="name of the file")
    ui_port: int = key(4040, whole, "Spark's own web pages; 0 for none")
    conf: Mapping[str, str] = key(dict, settings, "settings of Spark")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How the pipelines of the file are run."""

    checkpoint: str = key(
        "", text, "directory of checkpoints and of the status file", shown="`checkpoints/FILE`"
    )
    metrics_address: str = key(
        "", text, "`host:port` for `/metrics` (Prometheus) and `/status` (JSON)", shown="none"
    )
    retries: int = key(
        10,
        whole,
        "how often a failed pipeline is started again, in a row; a micro-batch that works resets it. After "
        "what would only happen again (wrong SQL, a message that does not decode, lost messages, a refused "
        "checkpoint) it is not",
    )
    retry_delay: float = key(
        1.0, duration, "before the first of them; then twice as long each time", shown='`"1s"`'
    )
    retry_max_delay: float = key(60.0, duration, "but no longer than this", shown='`"1m"`')
    stop_grace: float = key(
        10.0, duration, "how long a micro-batch may go on after a signal", shown='`"10s"`'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """A whole file. Paths in it are absolute: they were relative to the file."""

    path: Path
    nsq: Mapping[str, str]
    """Options of format("nsq") that say where nsqd is, and who we are."""
    spark: Spark
    run: Run
    pipelines: tuple[Pipeline, ...]


def is_local(path: str) -> bool:
    """A directory of this machine, or one that looks like it."""
    return "://" not in path


def describe(sink: Sink) -> str:
    """A sink in a word or two."""
    kind = next(name for name, one in SINKS.items() if type(sink) is one)
    names = ("topic", "topic_from", "function", "format", "path", "table")
    values = (getattr(sink, name, "") for name in names)
    return next((f"{kind} {value}" for value in values if value), kind)
