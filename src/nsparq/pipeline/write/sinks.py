"""The stream writer for each kind of sink: `prepared` gives the rows the columns that the sink
needs, and `writer_of` writes them.

Topics, Parquet files and Delta tables get every micro-batch exactly once, and so does a database
with `key` or `batch_column`; without them at least once. Console, memory and noop are for looking
at rows.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from nsparq.pipeline.decode.formats import HEADERS, MESSAGE_COLUMNS
from nsparq.pipeline.errors import FunctionFailed, PipelineError, in_words, retry_helps
from nsparq.pipeline.file.keys import is_local
from nsparq.pipeline.file.sinks import (
    Console,
    Delta,
    Files,
    Format,
    Jdbc,
    Memory,
    Noop,
    Parquet,
    Python,
    Sink,
    Topic,
)
from nsparq.pipeline.file.spec import Output, Pipeline, PipelineFile
from nsparq.pipeline.pipeline_json import PipelineJson
from nsparq.pipeline.user_code import load_function
from nsparq.pipeline.write.file_sink import FORMAT
from nsparq.pipeline.write.jdbc import JdbcUpsert, last_batch, options_of
from nsparq.pipeline.write.parquet_table import ParquetDirectory
from nsparq.pipeline.write.upsert import Upsert, column, compute_only
from nsparq.spark.checkpoint import check_batch, fingerprint
from nsparq.spark.session.build import has_file_system

if TYPE_CHECKING:
    from nsparq.pipeline.write.delta import DeltaFiles

logger = logging.getLogger(__name__)

Writer = DataStreamWriter
OnBatch = Callable[[DataFrame, int], None]
_NO_DIRECTORY: Final = (BinaryType, ArrayType, MapType, StructType)


def sink_place(pipeline: Pipeline, output: Output) -> str:
    """The table of a sink, for error texts."""
    return f"[pipeline.{pipeline.name}.sink{f' {output.name}' if output.name else ''}]"


class Target:
    """What a sink may need to know besides the rows and its own keys."""

    def __init__(
        self, file: PipelineFile, pipeline: Pipeline, output: Output, described: StructType | None = None
    ) -> None:
        """`described` are the columns of the table, if the rows only describe files."""
        self.described = described
        self.place = sink_place(pipeline, output)
        self.name, self.output_mode = output.name, output.output_mode
        self.nsq = file.nsq
        self.directory = file.path.parent
        """Where modules of functions are searched first."""
        self.read_pattern = pipeline.pattern
        """A regular expression for the full names of all topics that the pipeline reads."""
        self.checkpoint = f"{pipeline.checkpoint}/{output.role}"
        self._kept = PipelineJson(pipeline)

    def planned(self, batch: int) -> str:
        """The fingerprint of a batch; see `nsparq.spark.checkpoint`. Every sink calls this before
        it writes, because it copies a checkpoint that belongs into an object store."""
        return fingerprint(self.checkpoint, batch)

    def recall(self, key: str) -> Any:
        """A value of this output in `pipeline.json`, or None. Raises PipelineError."""
        return self._kept.get(self._named(key, "-"))

    def remember(self, key: str, value: Any) -> None:
        """Raises PipelineError."""
        self._kept.put(self._named(key, "-"), value)

    @property
    def identity(self) -> str:
        """Identifies this output with this checkpoint."""
        return self._named(self._kept.identity, ":")

    def _named(self, base: str, separator: str) -> str:
        return f"{base}{separator}{self.name}" if self.name else base


# the columns that a sink gets


@singledispatch
def prepared(sink: Sink, rows: DataFrame, target: Target) -> DataFrame:
    """The rows with the columns that the sink needs. Raises PipelineError."""
    return rows


@prepared.register
def _(sink: Topic, rows: DataFrame, target: Target) -> DataFrame:
    for key in ("topic_from", "body_from", "defer_from", "headers_from"):
        name = getattr(sink, key)
        if name and name not in rows.columns:
            known = ", ".join(rows.columns)
            raise PipelineError(f"{target.place} {key}: there is no column {name!r}; there are {known}")
    columns = [_body(sink, rows, target).alias("body")]
    if sink.topic_from:
        columns.append(F.col(sink.topic_from).cast("string").alias("topic"))
    if sink.defer_from:
        columns.append(F.col(sink.defer_from).cast("bigint").alias("defer"))
    headers = sink.headers_from or (f"_{HEADERS}" if f"_{HEADERS}" in rows.columns else "")
    if headers:
        kind = rows.schema[headers].dataType.simpleString()
        if kind != "map<string,string>":
            raise PipelineError(f"{target.place} headers_from: {headers!r} is {kind}, not map<string,string>")
        columns.append(F.col(headers).alias(HEADERS))
    return rows.select(*columns)


def _body(sink: Topic, rows: DataFrame, target: Target) -> Any:
    types = {one.name: one.dataType for one in rows.schema.fields}
    name = sink.body_from or ("body" if "body" in types else "")
    if name:
        if not isinstance(types[name], BinaryType | StringType):
            shown = types[name].simpleString().upper()
            raise PipelineError(f"{target.place} body_from: {name!r} is {shown}, not STRING or BINARY")
        return F.col(name)
    used = {*MESSAGE_COLUMNS, sink.topic_from, sink.defer_from, sink.headers_from}
    own = [one for one in rows.columns if one not in used]
    if not own:
        raise PipelineError(f"{target.place} topic: the rows have no columns to make a message of")
    return F.to_json(F.struct(*map(column, own)), {"ignoreNullFields": "false"})


@prepared.register
def _(sink: Files, rows: DataFrame, target: Target) -> DataFrame:
    types = {one.name: one.dataType for one in rows.schema.fields}
    made = {"date": F.to_date, "hour": F.hour}
    for name in sink.partition_by:
        if isinstance(types.get(name), _NO_DIRECTORY):
            shown = types[name].simpleString().upper()
            raise PipelineError(
                f"{target.place} partition_by: {name!r} is {shown}, which cannot be the name of a directory; "
                "cast it to STRING"
            )
        if name in types:
            continue
        if name not in made:
            raise PipelineError(
                f"{target.place} partition_by: there is no column {name!r}; there are {', '.join(types)}"
            )
        if not isinstance(types.get(sink.date_from), TimestampType | TimestampNTZType):
            raise PipelineError(
                f"{target.place} partition_by: {name!r} is taken from the column {sink.date_from!r}, which "
                f"must be a TIMESTAMP; set date_from, or select a column {name!r}"
            )
        rows = rows.withColumn(name, made[name](sink.date_from))
    if len(rows.columns) == len(sink.partition_by):
        raise PipelineError(f"{target.place} partition_by: no column is left for the files")
    return rows


# writers


@singledispatch
def writer_of(sink: Sink, rows: DataFrame, target: Target) -> Writer:
    """A writer for `prepared` rows, without checkpoint and trigger. Raises PipelineError."""
    raise NotImplementedError(type(sink).__name__)


@writer_of.register
def _(sink: Topic, rows: DataFrame, target: Target) -> Writer:
    options = {**target.nsq, **sink.options, **({"topic": sink.topic} if sink.topic else {})}
    if sink.topic_from:
        # The topics in the rows are not known in advance.
        options["refuseTopics"] = target.read_pattern
    if target.output_mode != "update":
        return rows.writeStream.format("nsq").options(**options)
    # Spark has no updates for Python sinks, so each batch is written as a transaction of its own.
    producer = f"nsparq:{target.identity}"

    def publish(batch: DataFrame, number: int) -> None:
        named = {**options, "producer": producer, "sequence": str(number)}
        if planned := target.planned(number):
            named["fingerprint"] = planned
        batch.write.format("nsq").options(**named).mode("append").save()

    return rows.writeStream.foreachBatch(publish)


def letters_writer(letters: DataFrame, topic: str, nsq: Mapping[str, str]) -> Writer:
    return letters.writeStream.format("nsq").options(**nsq, topic=topic)


@writer_of.register
def _(sink: Parquet, rows: DataFrame, target: Target) -> Writer:
    if sink.is_written_by_spark:
        _check_spark_files(rows.sparkSession, sink.path, f"{target.place} parquet:", target)
        writer = rows.writeStream.format("parquet").option("path", sink.path)
        writer = writer.option("compression", sink.compression)
        return writer.partitionBy(*sink.partition_by) if sink.partition_by else writer
    ParquetDirectory(sink.path).check_layout(sink.partition_by)
    return rows.writeStream.format(FORMAT).options(
        table="parquet",
        path=sink.path,
        partitionBy=",".join(sink.partition_by),
        compression=sink.compression,
        compact=str(sink.compact),
    )


def _check_spark_files(spark: SparkSession, path: str, place: str, target: Target) -> None:
    """Spark's file sink skips every batch up to the last number in its log, even if the batch is
    another one. So this refuses a checkpoint that is behind that log, because it was deleted or is
    an older copy. Raises PipelineError."""
    if not (is_local(path) or has_file_system(spark, path)):
        raise PipelineError(
            f"{place} Spark has no file system for {path}: add its JAR, such as Hadoop's for S3, or use delta"
        )
    try:
        last = _last_number(spark, f"{path}/_spark_metadata")
        planned = _last_number(spark, f"{target.checkpoint}/offsets")
    except Exception as error:  # Hadoop's file systems raise many kinds
        raise PipelineError(f"{place} {in_words(error)}") from error
    if last > planned:
        raise PipelineError(
            f"{place} {path} has batches up to {last}, but the checkpoint only up to {planned}: it was "
            "deleted, or is an older copy. Use the newest checkpoint, or write to another directory"
        )


def _last_number(spark: SparkSession, directory: str) -> int:
    """The last number in a directory that is a log of Spark's, or -1."""
    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(directory)
    files = path.getFileSystem(spark._jsc.hadoopConfiguration())
    if not files.exists(path):
        return -1
    names = (one.getPath().getName().removesuffix(".compact") for one in files.listStatus(path))
    return max((int(name) for name in names if name.isdigit()), default=-1)


@writer_of.register
def _(sink: Delta, rows: DataFrame, target: Target) -> Writer:
    from nsparq.pipeline.write.delta import DeltaFiles, is_installed

    if not is_installed():
        raise PipelineError(
            f"{target.place} delta: the package deltalake is missing: pip install 'nsparq[delta]'"
        )
    table = DeltaFiles(sink.path, sink.partition_by, sink.storage_options, sink.retention)
    try:
        table.check(target.described or rows.schema)
    except Exception as error:  # deltalake's errors have no class in common
        raise PipelineError(f"{target.place} delta: {error}") from error
    if sink.key_columns:
        return rows.writeStream.foreachBatch(_delta_merge(sink, table, rows, target))
    return rows.writeStream.format(FORMAT).options(
        table="delta",
        path=sink.path,
        partitionBy=",".join(sink.partition_by),
        retention=str(sink.retention),
        storageSecrets=json.dumps(dict(sink.storage_options)),
    )


def _delta_merge(sink: Delta, table: DeltaFiles, rows: DataFrame, target: Target) -> OnBatch:
    upsert = Upsert.of(sink.key_columns, sink.latest_by, rows.schema, target.place)
    types = {one.name: one.dataType for one in rows.schema.fields}
    empty_is_null = [
        name for name in sink.key_columns if name in sink.partition_by and isinstance(types[name], StringType)
    ]

    def merge(batch: DataFrame, number: int) -> None:
        query, planned = _query_of(batch), target.planned(number)
        if table.has(query, number, planned):
            compute_only(batch)
            return
        latest = upsert.latest_rows(batch, empty_is_null)
        table.merge(query, number, latest.toArrow(), latest.schema, upsert, planned)

    return merge


@writer_of.register
def _(sink: Jdbc, rows: DataFrame, target: Target) -> Writer:
    if sink.key_columns:
        upsert = Upsert.of(sink.key_columns, sink.latest_by, rows.schema, target.place)
        table = JdbcUpsert(sink, upsert, target.place)

        def merge(batch: DataFrame, number: int) -> None:
            table.write(_query_of(batch), number, target.planned(number), batch)

        return rows.writeStream.foreachBatch(merge)
    is_first = True

    def insert(batch: DataFrame, number: int) -> None:
        nonlocal is_first
        planned = target.planned(number)
        if sink.batch_column:
            if is_first:
                # Only the first batch of a run can be in the table already, and the query is slow.
                last = last_batch(batch.sparkSession, sink)
                # A batch that this checkpoint has not begun is from another pipeline.
                is_ours = target.recall("batch") == last
                begun = str(target.recall("planned") or "") if is_ours else "not by us"
                if check_batch(f"the table {sink.table}", number, planned, last, begun):
                    compute_only(batch)
                    return
                is_first = False
            target.remember("planned", planned)
            target.remember("batch", number)
            # One task is one transaction.
            batch = batch.coalesce(1).withColumn(sink.batch_column, F.lit(number).cast("bigint"))
        batch.write.jdbc(sink.url, sink.table, mode="append", properties=options_of(sink))

    return rows.writeStream.foreachBatch(insert)


def _query_of(batch: DataFrame) -> str:
    """The id of the query of a micro-batch. It is the same for every run with a checkpoint."""
    return str(batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId"))


# formats of Spark, and functions


@writer_of.register
def _(sink: Format, rows: DataFrame, target: Target) -> Writer:
    is_a = _provider(rows.sparkSession, sink, target)
    if sink.batches:
        return rows.writeStream.foreachBatch(_save(sink, target))
    if not is_a(*_STREAMING):
        raise PipelineError(
            f"{target.place} format: {sink.format!r} cannot write streams; set batches = true"
        )
    if sink.path and is_a(*_FILES):
        _check_spark_files(rows.sparkSession, sink.path, f"{target.place} path:", target)
    writer = rows.writeStream.format(sink.format).options(**sink.options)
    if sink.path:
        writer = writer.option("path", sink.path)
    return writer.partitionBy(*sink.partition_by) if sink.partition_by else writer


_FILES: Final = ("execution.datasources.FileFormat", "execution.datasources.v2.FileDataSourceV2")
_STREAMING: Final = (*_FILES, "sources.StreamSinkProvider", "connector.catalog.TableProvider")
"""Spark's interfaces, in org.apache.spark.sql."""


def _provider(spark: SparkSession, sink: Format, target: Target) -> Callable[..., bool]:
    """Tells whether a format implements any of some interfaces. Raises PipelineError."""
    jvm: Any = spark._jvm
    session: Any = spark._jsparkSession
    try:
        found = jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource(
            sink.format, session.sessionState().conf()
        )
    except Exception as error:  # PySpark converts only some of Java's exceptions
        raise PipelineError(
            f"{target.place} format: Spark does not know {sink.format!r}: the name is wrong, or its JAR is "
            "missing (spark.jars or spark.jars.packages in the conf of [spark])"
        ) from error
    classes = jvm.java.lang.Class
    return lambda *names: any(
        classes.forName(f"org.apache.spark.sql.{name}").isAssignableFrom(found) for name in names
    )


def _save(sink: Format, target: Target) -> OnBatch:
    mode = "overwrite" if target.output_mode == "complete" else "append"

    def save(batch: DataFrame, number: int) -> None:
        target.planned(number)
        writer = batch.write.format(sink.format).options(**sink.options).mode(mode)
        if sink.partition_by:
            writer = writer.partitionBy(*sink.partition_by)
        if sink.table:
            writer.saveAsTable(sink.table)
        else:
            writer.save(sink.path or None)

    return save


@writer_of.register
def _(sink: Python, rows: DataFrame, target: Target) -> Writer:
    function = load_function(sink.function, target.place, target.directory)
    try:
        inspect.signature(function).bind(rows, 0)
    except TypeError as error:
        raise PipelineError(
            f"{target.place} python: {sink.function} must take a DataFrame and the number of the "
            f"micro-batch: {error}"
        ) from error

    def call(batch: DataFrame, number: int) -> None:
        target.planned(number)
        try:
            function(batch, number)
        except Exception as error:
            text = f"{target.place} python: {sink.function} raised {type(error).__name__} in batch {number}"
            logger.warning("%s", text, exc_info=True)
            kind = FunctionFailed if retry_helps(error) else PipelineError
            # `from None`, because Spark would add the text of the cause.
            raise kind(f"{text}: {in_words(error)}") from None

    return rows.writeStream.foreachBatch(call)


# to look at


@writer_of.register
def _(sink: Console, rows: DataFrame, target: Target) -> Writer:
    return rows.writeStream.format("console").option("numRows", str(sink.rows)).option("truncate", "false")


@writer_of.register
def _(sink: Memory, rows: DataFrame, target: Target) -> Writer:
    return rows.writeStream.format("memory").queryName(sink.table)


@writer_of.register
def _(sink: Noop, rows: DataFrame, target: Target) -> Writer:
    return rows.writeStream.format("noop")
