"""`[pipeline.NAME.sink]`: the kinds of sinks, their keys, and the rules for the keys of one sink.
Needs no Spark.

`SINKS` is the list of kinds: the reader of files and the reference page go through it. How to add
one is described in `nsparq.pipeline.write`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from nsparq.flags import format_duration
from nsparq.pipeline.file.keys import (
    REQUIRED,
    choice,
    count,
    duration,
    flag,
    function_name,
    identifier,
    identifiers,
    is_local,
    key,
    settings,
    string,
    topic_name,
)
from nsparq.pipeline.write.upsert_sql import DIALECTS, dialect_name

Problem = tuple[str, str]
"""A key, and what is wrong with it."""

_KEY: Final = (
    "columns that are the key: a row replaces the row with the same key, or is added if there is none "
    "(upsert)"
)
_LATEST_BY: Final = (
    "with `key`: columns that say which of two rows with the same key is newer. The greater value wins, "
    "within a micro-batch and against the table; null is the smallest"
)
MIN_RETENTION_S: Final = 3600.0
_ORIGIN: Final = "`_timestamp` and `_offset`, if the rows have both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Where rows are written. A field `path` is a path relative to the pipeline file."""

    def problems(self) -> Iterator[Problem]:
        """Keys that do not fit together."""
        yield from ()

    def refused_mode(self, output_mode: str) -> str:
        """Why the sink cannot have this output mode. Empty if it can."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic(Sink):
    """Messages of another topic, exactly once with nsparq's nsqd."""

    topic: str = key("", topic_name, "the topic")
    topic_from: str = key("", identifier, "column with the topic; `topic` is for rows where it is null")
    body_from: str = key(
        "", identifier, "column with the message", shown="`body`, or the row as a JSON object"
    )
    defer_from: str = key("", identifier, "column with the milliseconds to defer the message")
    headers_from: str = key(
        "",
        identifier,
        "column with the [headers](headers.md) of the message, `map<string,string>`",
        shown="`_headers`, if the rows have it",
    )
    options: Mapping[str, str] = field(default_factory=dict)
    """More options of format("nsq")."""

    def problems(self) -> Iterator[Problem]:
        if not self.topic and not self.topic_from:
            yield "topic", "is missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files(Sink):
    """The keys that all sinks of files have."""

    path: str = key(REQUIRED, string, "the directory")
    partition_by: tuple[str, ...] = key(
        (),
        identifiers,
        "columns that become directories; `date` and `hour` (UTC) are taken from `date_from` if the rows "
        "have no such column",
    )
    date_from: str = key("_timestamp", identifier, "the timestamp for `date` and `hour`")

    def refused_mode(self, output_mode: str) -> str:
        return (
            "" if output_mode == "append" else "files can only be appended to: use 'append', with a watermark"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parquet(Files):
    """Parquet files, exactly once. Readers of the directory see complete files only."""

    path: str = key(REQUIRED, string, "the directory", name="parquet")
    compression: str = key("zstd", choice("zstd", "snappy", "gzip", "none"), "compression of the files")
    compact: int = key(
        0,
        count,
        "join the small files of a directory as soon as there are this many; needs `partition_by`",
        shown="never",
    )
    writer: str = key(
        "",
        choice("nsparq", "spark"),
        "`nsparq` writes to a file system; `spark` uses Spark's file sink, which can write to object stores",
        shown="`nsparq` for a path, `spark` for a URL such as `s3://…`",
    )

    @property
    def is_written_by_spark(self) -> bool:
        return self.writer == "spark" or not (self.writer or is_local(self.path))

    def problems(self) -> Iterator[Problem]:
        if self.writer == "nsparq" and not is_local(self.path):
            yield "writer", f"'nsparq' cannot write to a URL such as {self.path!r}: use 'spark'"
        if self.compact and self.is_written_by_spark:
            yield "compact", "needs the writer 'nsparq'"
        elif self.compact and not self.partition_by:
            yield (
                "compact",
                "needs 'partition_by': files in the table's own directory cannot be replaced in one step",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(Files):
    """A Delta table, exactly once. Needs the package deltalake."""

    path: str = key(
        REQUIRED,
        string,
        "the table: a directory, or `s3://…`, `gs://…`, `az://…`, `abfss://…`; new columns of the rows are "
        "added to the table",
        name="delta",
    )
    storage_options: Mapping[str, str] = key(
        dict,
        settings,
        "deltalake's options for an object store, such as `AWS_REGION` or `AWS_ENDPOINT_URL`",
        shown="from the environment",
    )
    key_columns: tuple[str, ...] = key((), identifiers, _KEY, name="key")
    latest_by: tuple[str, ...] = key((), identifiers, _LATEST_BY, shown=_ORIGIN)
    compact: int = key(
        0,
        count,
        "join small files of a partition in the background, as soon as there are this many of about the same "
        "size, or all of them have 128 MB",
        shown="never",
    )
    retention: float = key(
        0.0,
        duration,
        "how long old versions of the table are kept; after that they and unused files are removed, in the "
        'background: `"168h"` is a week',
        shown="for ever",
    )

    def problems(self) -> Iterator[Problem]:
        if self.latest_by and not self.key_columns:
            yield "latest_by", "needs 'key'"
        if self.compact and self.key_columns:
            text = "cannot be combined with 'key', as both would change the same files: use `nsparq pipeline"
            yield "compact", f"{text} compact` while the pipeline does not run"
        if 0 < self.retention < MIN_RETENTION_S:
            least = format_duration(MIN_RETENTION_S)
            text = f"must be at least {least}: files that are being written or read would be removed"
            yield "retention", text

    def refused_mode(self, output_mode: str) -> str:
        if self.key_columns:
            return _refused_by_key(output_mode)
        # Not super(): it does not work in a dataclass with slots.
        refused = Files.refused_mode(self, output_mode)
        return refused and f"{refused}, or set 'key'"


def _refused_by_key(output_mode: str) -> str:
    return "a sink with 'key' takes changed rows only: use 'update'" if output_mode == "complete" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jdbc(Sink):
    """A database table. Its JDBC driver must be on Spark's class path."""

    url: str = key(REQUIRED, string, "such as `jdbc:postgresql://host/db`", name="jdbc")
    table: str = key(REQUIRED, string, "the table; created if it does not exist")
    user: str = key("", string, "database user")
    password: str = key(
        "", string, "database password; `${PASSWORD}` takes it from the environment", is_secret=True
    )
    driver: str = key("", string, "class of the driver", shown="the usual driver for the URL")
    batch_column: str = key(
        "",
        identifier,
        "add the number of the micro-batch as this column, and write each micro-batch in one transaction: "
        "exactly once, if only one pipeline writes to the table; without it at least once",
    )
    key_columns: tuple[str, ...] = key((), identifiers, f"{_KEY}; exactly once", name="key")
    latest_by: tuple[str, ...] = key((), identifiers, _LATEST_BY, shown=_ORIGIN)
    options: Mapping[str, str] = key(dict, settings, "more options for Spark's JDBC writer")

    def problems(self) -> Iterator[Problem]:
        if not self.key_columns:
            if self.latest_by:
                yield "latest_by", "needs 'key'"
            return
        if self.batch_column:
            yield "batch_column", "cannot be combined with 'key', which is exactly once without it"
        name = dialect_name(self.url)
        if name not in DIALECTS:
            yield "key", f"upserts are not supported for {name!r}; they are for {', '.join(DIALECTS)}"

    def refused_mode(self, output_mode: str) -> str:
        return _refused_by_key(output_mode) if self.key_columns else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format(Sink):
    """Any format that Spark can write, with a JAR or your Python data source: Kafka, Iceberg,
    CSV."""

    format: str = key(REQUIRED, string, "Spark's name of the format, such as `kafka`, `iceberg` or `csv`")
    path: str = key("", string, "the file or directory, for formats that have one")
    table: str = key("", string, "the table, for formats with a catalog, such as `lake.shop.orders`")
    partition_by: tuple[str, ...] = key((), identifiers, "columns to partition by")
    batches: bool = key(
        False,
        flag,
        "write each micro-batch as a separate job, for formats that cannot write streams: at least once. "
        "With output mode `complete` each micro-batch overwrites the one before",
    )
    options: Mapping[str, str] = key(dict, settings, "options of the format; paths in them are not changed")

    def problems(self) -> Iterator[Problem]:
        if self.path and self.table:
            yield "table", "cannot be combined with 'path'"
        if self.format.lower() == "nsq":
            yield "format", 'for a topic, write { topic = "…" }'


@dataclass(frozen=True, slots=True, kw_only=True)
class Python(Sink):
    """A function of yours, called with each micro-batch: at least once, or exactly once if the
    function uses the batch number."""

    function: str = key(
        REQUIRED,
        function_name,
        "`module:function`, called with the DataFrame of a micro-batch and its number. A micro-batch that "
        "runs again after a crash has the same number and the same rows",
        name="python",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Console(Sink):
    """Rows on standard output."""

    rows: int = key(20, count, "rows to print of each micro-batch, at most", name="console")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Sink):
    """A table in the memory of the session, for tests and notebooks."""

    table: str = key(REQUIRED, identifier, "name of the table", name="memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noop(Sink):
    """Discards the rows: for measurements, or if only the dead letters are wanted."""


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
"""The kinds of sinks by the key that selects each."""


def describe(sink: Sink) -> str:
    """The kind of a sink, and its target."""
    kind = next(name for name, one in SINKS.items() if type(sink) is one)
    names = ("topic", "topic_from", "function", "format", "path", "table")
    values = (getattr(sink, name, "") for name in names)
    return next((f"{kind} {value}" for value in values if value), kind)
