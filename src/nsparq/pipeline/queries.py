"""A pipeline as streaming queries of Spark: one for its rows and, with `dead_letters`, one for the messages
that do not decode.

Why two queries rather than one with two outputs: each has a checkpoint and a sink of its own, so each is
exactly once by Spark's own means, with any sink, any output mode, and aggregations, which would swallow the
letters on their way. Both read the same ranges of the log from the same place on, and use the same expression
to tell messages apart, so that every message is in exactly one of them. The price is that messages are read
and decoded twice where `dead_letters` is set, and that letters may come a moment before or after the rows of
their time.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from nsparq.errors import NsparqError
from nsparq.pipeline import direct
from nsparq.pipeline.commits import Directory
from nsparq.pipeline.decode import ORIGIN, dead_letters, good_rows
from nsparq.pipeline.errors import NothingYet, PipelineError, in_words, retry_helps
from nsparq.pipeline.layout import Layout, layout_of
from nsparq.pipeline.memory import PipelineMemory
from nsparq.pipeline.progress import WRITTEN
from nsparq.pipeline.samples import infer_csv, infer_json
from nsparq.pipeline.sinks import LETTERS, ROWS, Target, letters_writer, prepared, writer_of
from nsparq.pipeline.spec import Memory, Parquet, Pipeline, PipelineFile, Trigger
from nsparq.pipeline.steps import parse, transform
from nsparq.spark.options import TABLE, NsqOptions, Use
from nsparq.spark.session import activate

__all__ = ["LETTERS", "ROWS", "Abandoned", "Frames", "build", "check", "register", "start"]

CHECK_RETRY: Final = "1s"
"""How long a check waits for an nsqd that is away."""


class Abandoned(NsparqError):
    """Nobody waits for this start any more. Nothing has been written down."""


@dataclass(frozen=True, slots=True)
class Frames:
    """What a pipeline comes to, before anything runs."""

    rows: DataFrame
    letters: DataFrame | None


def register(spark: SparkSession) -> None:
    """What our sinks need in a session, in the thread that calls this. Twice is safe."""
    from nsparq.pipeline.direct import DirectDataSource
    from nsparq.pipeline.files import FilesDataSource

    activate(spark)
    if spark not in _REGISTERED:
        spark.dataSource.register(FilesDataSource)
        spark.dataSource.register(DirectDataSource)
        _REGISTERED.add(spark)


_REGISTERED: Final[WeakSet[SparkSession]] = WeakSet()


def build(spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> Frames:
    """Everything that Spark can check without reading a message. Raises PipelineError."""
    decode = pipeline.decode
    schema = _schema(spark, file, pipeline)
    bad = "drop" if pipeline.dead_letters else decode.on_error
    messages = good_rows(_messages(spark, file, pipeline, ROWS), decode, schema, bad=bad)
    result = transform(spark, pipeline, messages, file.path.parent)
    rows = prepared(pipeline.sink, result, _target(file, pipeline))
    if not pipeline.dead_letters:
        return Frames(rows, None)
    letters = dead_letters(
        _messages(spark, file, pipeline, LETTERS),
        decode,
        schema,
        pipeline=pipeline.name,
        channel=pipeline.source.options["channel"],
    )
    return Frames(rows, letters)


def check(spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> Frames | None:
    """The same, and whether Spark would run it as a stream. Raises PipelineError.

    Needs no nsqd, unless the schema has to be inferred. If it cannot be, since nsqd is away or there is no
    message yet, the columns are unknown: then only the syntax of the SQL is checked, and the result is None.
    """
    try:
        frames = build(spark, replace_option(file, "retryFor", CHECK_RETRY), pipeline)
    except PipelineError as error:
        if not retry_helps(error):
            raise
        parse(spark, pipeline)
        return None
    writer_of(pipeline.sink, frames.rows, _target(file, pipeline))
    jvm: Any = spark._jvm
    plan = frames.rows._jdf.queryExecution().analyzed()
    mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, pipeline.output_mode.capitalize())()
    try:
        jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming(plan, mode)
    except PySparkException as error:
        raise _refused(pipeline, error) from error
    return frames


def replace_option(file: PipelineFile, name: str, value: str) -> PipelineFile:
    """The file with another value for an option of format("nsq")."""
    return replace(file, nsq={**file.nsq, name: value})


def start(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, abandoned: threading.Event
) -> dict[str, StreamingQuery]:
    """Running queries by their role. Raises PipelineError, and Abandoned if that is set meanwhile."""
    _clear_unfinished(pipeline)
    layout = layout_of(pipeline)
    if layout is not None and _is_utc(spark):
        return {ROWS: _start_direct(spark, file, pipeline, layout)}
    settle_beginning(file, pipeline, abandoned)
    _settle_schema(spark, file, pipeline, abandoned)
    frames = build(spark, file, pipeline)
    started: dict[str, StreamingQuery] = {}
    try:
        rows = writer_of(pipeline.sink, frames.rows, _target(file, pipeline))
        started[ROWS] = _start(rows.outputMode(pipeline.output_mode), pipeline, ROWS)
        if frames.letters is not None:
            letters = letters_writer(frames.letters, pipeline.dead_letters, file.nsq)
            started[LETTERS] = _start(letters.outputMode("append"), pipeline, LETTERS)
    except BaseException:
        for query in started.values():
            query.stop()
        raise
    return started


def _clear_unfinished(pipeline: Pipeline) -> None:
    """Files that an earlier run has written and not made part of the table."""
    sink, metadata = pipeline.sink, Path(pipeline.checkpoint) / ROWS / "metadata"
    if isinstance(sink, Parquet) and sink.writer == "nsparq" and metadata.is_file():
        Directory(sink.path).clear_new_files(json.loads(metadata.read_text())["id"])


def _is_utc(spark: SparkSession) -> bool:
    """Whether dates are those of UTC; Spark counts days by the time of its session."""
    return spark.conf.get("spark.sql.session.timeZone") in ("UTC", "Etc/UTC", "GMT", "Z")


def _start_direct(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, layout: Layout
) -> StreamingQuery:
    """Of messages that go to files as they are; see `direct`."""
    options = {
        **source_options(file, pipeline),
        direct.LAYOUT: layout.dumps(),
        direct.INTERVAL: str(pipeline.trigger.seconds),
    }
    files = _load(spark, pipeline, direct.FORMAT, options)
    counted = files.observe(WRITTEN, F.sum("rows").alias("rows"), F.sum("size").alias("bytes"))
    writer = writer_of(pipeline.sink, counted, _target(file, pipeline)).option("described", "true")
    # The source knows when the next batch is due.
    trigger = pipeline.trigger if pipeline.trigger.ends else Trigger(0.0)
    return _start(writer.outputMode("append"), replace(pipeline, trigger=trigger), ROWS)


def _start(writer: DataStreamWriter, pipeline: Pipeline, role: str) -> StreamingQuery:
    if not (role == ROWS and isinstance(pipeline.sink, Memory)):
        # A table in memory has the name of its query, and is gone with it: it begins anew each time.
        writer = writer.queryName(pipeline.name if role == ROWS else f"{pipeline.name} dead letters")
        writer = writer.option("checkpointLocation", f"{pipeline.checkpoint}/{role}")
    try:
        return _triggered(writer, pipeline.trigger).start()
    except PySparkException as error:
        raise _refused(pipeline, error) from error


def _refused(pipeline: Pipeline, error: PySparkException) -> PipelineError:
    text, said = in_words(error), str(error).lower()
    if "output mode" in said and "watermark" in said:
        text += '; either set output_mode = "update", or add a watermark'
    return PipelineError(f"[pipeline.{pipeline.name}]: {text}")


def _triggered(writer: DataStreamWriter, trigger: Trigger) -> DataStreamWriter:
    if trigger.kind == "available-now":
        return writer.trigger(availableNow=True)
    if trigger.kind == "once":
        return writer.trigger(once=True)
    return writer.trigger(processingTime=f"{round(trigger.seconds * 1000)} milliseconds")


def _target(file: PipelineFile, pipeline: Pipeline) -> Target:
    return Target(pipeline, file.nsq)


# messages


def source_options(file: PipelineFile, pipeline: Pipeline, role: str = ROWS) -> dict[str, str]:
    """Options of format("nsq") for one of the queries."""
    options = {**file.nsq, **pipeline.source.options}
    if options.get("mode") == "queue":
        options.setdefault("staging", f"{pipeline.checkpoint}/staging")
    if isinstance(pipeline.sink, Memory):
        # Its checkpoint is gone with it.
        options.setdefault("ownChannel", "false")
    if role == LETTERS:
        options["channel"] = f"{options['channel']}.dead"
    return options


def _messages(spark: SparkSession, file: PipelineFile, pipeline: Pipeline, role: str) -> DataFrame:
    options = source_options(file, pipeline, role)
    if pipeline.dead_letters:
        beginning = PipelineMemory(pipeline).get("beginning")
        if beginning is not None:
            read = {topic: places for topic, places in beginning.items() if pipeline.source.reads(topic)}
            options["startingPosition"] = json.dumps(read)
    return _load(spark, pipeline, "nsq", options)


def _load(spark: SparkSession, pipeline: Pipeline, format: str, options: dict[str, str]) -> DataFrame:
    try:
        return spark.readStream.format(format).options(**options).load()
    except PySparkException as error:
        raise PipelineError(f"[pipeline.{pipeline.name}.source]: {in_words(error)}") from error


def settle_beginning(file: PipelineFile, pipeline: Pipeline, abandoned: threading.Event) -> None:
    """Where the queries begin, once for both of them: what is `latest` to the one would not be to the other.
    Raises PipelineError, Abandoned."""
    memory = PipelineMemory(pipeline)
    if not pipeline.dead_letters or memory.get("beginning") is not None:
        return
    from nsparq.spark.log_source import LogSource
    from nsparq.spark.positions import encode

    try:
        source = LogSource(NsqOptions.parse(source_options(file, pipeline), Use.LOG_STREAM))
        try:
            beginning = encode(source.initial())
            _keep(memory, "beginning", beginning, abandoned)
        finally:
            source.close()
    except Abandoned:
        raise
    except NsparqError as error:
        raise PipelineError(f"[pipeline.{pipeline.name}.source]: {error}") from error


def _keep(memory: PipelineMemory, key: str, value: Any, abandoned: threading.Event) -> None:
    """Unless the start has been given up: another runner may have the checkpoint by now."""
    if abandoned.is_set():
        raise Abandoned
    memory.put(key, value)


# the schema


def _settle_schema(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, abandoned: threading.Event
) -> None:
    """What was inferred stays, so that a restart does not change it."""
    memory = PipelineMemory(pipeline)
    if _is_inferred(pipeline) and memory.get("schema") is None:
        _keep(memory, "schema", _inferred(spark, file, pipeline), abandoned)


def _is_inferred(pipeline: Pipeline) -> bool:
    return pipeline.decode.format not in ("text", "raw", "message") and not pipeline.decode.schema


def _schema(spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> StructType:
    decode = pipeline.decode
    if decode.format in ("text", "raw", "message"):
        return StructType()
    place = _schema_place(pipeline)
    given = decode.schema or _inferred(spark, file, pipeline)
    try:
        schema = StructType.fromDDL(given)
    except PySparkException as error:
        raise PipelineError(f"{place}: {in_words(error)}, in {given!r}") from error
    if not isinstance(schema, StructType):
        raise PipelineError(f"{place}: names no columns: {given!r}")
    taken = [one for one in schema.names if one in {f"_{name}" for name in ORIGIN}]
    if taken:
        raise PipelineError(f"{place}: {taken[0]!r} is the name of a column that every message has")
    return schema


def _schema_place(pipeline: Pipeline) -> str:
    return f"[pipeline.{pipeline.name}.decode] schema"


def _inferred(spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> str:
    """As it was once, or as the messages are now. Raises PipelineError."""
    known = PipelineMemory(pipeline).get("schema")
    if known is not None:
        return str(known)
    decode = pipeline.decode
    bodies = sample(spark, file, pipeline, decode.sample)
    separator = decode.options.get("sep", decode.options.get("delimiter", ","))
    found = infer_json(bodies) if decode.format == "json" else infer_csv(bodies, separator)
    if not found:
        raise NothingYet(
            f"{_schema_place(pipeline)}: none was given, and none can be inferred: "
            f"{pipeline.source.topics} has "
            + (f"no {decode.format.upper()} among {len(bodies)} messages" if bodies else "no messages yet")
        )
    return found


def sample(spark: SparkSession, file: PipelineFile, pipeline: Pipeline, count: int) -> list[bytes]:
    """Bodies of messages, the oldest that there are. Raises PipelineError."""
    options = source_options(file, pipeline)
    kept = {name: value for name, value in options.items() if name not in _STREAM_ONLY}
    try:
        rows = spark.read.format("nsq").options(**kept).load().select("body").limit(count).collect()
    except PySparkException as error:
        raise PipelineError(f"{_schema_place(pipeline)}: no sample can be read: {in_words(error)}") from error
    return [bytes(row.body) for row in rows]


_STREAM_ONLY: Final = {
    one.name
    for one in TABLE.values()
    if Use.LOG_BATCH not in one.uses or one.name in ("channel", "startingPosition")
}
