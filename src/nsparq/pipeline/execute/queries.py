"""A pipeline as streaming queries of Spark: one for each output, and one for the dead letters of
each source that has `dead_letters`.

Each query has its own checkpoint and sink, so Spark makes each exactly once by itself, with any
sink, any output mode and any aggregation. All queries of a pipeline begin at the same position of
the log and decide in the same way which messages do not decode, so every message is in either the
rows or the dead letters. The price: each query reads and decodes the messages itself, and one
output may be ahead of another.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakSet

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from nsparq.pipeline.decode.formats import UNDECODED
from nsparq.pipeline.decode.messages import dead_letters, good_rows
from nsparq.pipeline.errors import PipelineError, in_words
from nsparq.pipeline.execute import store_checkpoints
from nsparq.pipeline.execute.beginnings import Beginnings, source_options
from nsparq.pipeline.execute.progress import WRITTEN, decoded_name
from nsparq.pipeline.execute.schemas import sampled_bodies, schema_of, settle_schemas
from nsparq.pipeline.execute.steps import transform
from nsparq.pipeline.execute.tables import load_tables
from nsparq.pipeline.file.sinks import Delta, Format, Memory, Parquet
from nsparq.pipeline.file.spec import MESSAGES, Output, Pipeline, PipelineFile, Source, Trigger
from nsparq.pipeline.write import direct_parquet
from nsparq.pipeline.write.parquet_table import ParquetDirectory
from nsparq.pipeline.write.sinks import Target, letters_writer, prepared, sink_place, writer_of
from nsparq.spark.session.build import activate

LARGEST_LETTER: Final = 1 << 20
"""The default of nsqd's --max-msg-size. A larger message would stop the pipeline."""

_REGISTERED: Final[WeakSet[SparkSession]] = WeakSet()
_registering: Final = threading.Lock()
"""Spark refuses a source that another thread registers at the same time."""


@dataclass(frozen=True, slots=True)
class Frames:
    """The DataFrames of a pipeline, before anything runs."""

    rows: Mapping[str, DataFrame]
    """By the names of the outputs."""
    letters: Mapping[str, DataFrame]
    """By the names of the sources that have dead letters."""
    steps: Mapping[str, Sequence[DataFrame]]
    """The results of all steps, by the names of the outputs."""


def register(spark: SparkSession) -> None:
    """Registers our data sources in a session, and activates it in this thread. Twice is safe."""
    from nsparq.pipeline.write.file_sink import FilesDataSource

    activate(spark)
    with _registering:
        if spark not in _REGISTERED:
            spark.dataSource.register(FilesDataSource)
            spark.dataSource.register(direct_parquet.DirectDataSource)
            _REGISTERED.add(spark)


def build(
    spark: SparkSession,
    file: PipelineFile,
    pipeline: Pipeline,
    tables: Mapping[str, DataFrame] | None = None,
) -> Frames:
    """Builds and checks the DataFrames, without reading a message. Raises PipelineError."""
    if tables is None:
        tables = load_tables(spark, pipeline)
    schemas = {
        source.name: schema_of(pipeline, source, sampled_bodies(spark, file, pipeline, source))
        for source in pipeline.sources
    }
    rows: dict[str, DataFrame] = {}
    steps: dict[str, list[DataFrame]] = {}
    for output in pipeline.outputs:
        messages = {
            source.name: decoded(
                _messages(spark, file, pipeline, source, output),
                pipeline,
                source,
                schemas[source.name],
                bad="drop" if source.dead_letters else source.decode.on_error,
            )
            for source in pipeline.sources
        }
        results = transform(spark, pipeline, {**tables, **messages}, file.path.parent)
        rows[output.name] = prepared(output.sink, results[output.result], Target(file, pipeline, output))
        steps[output.name] = [results[step.name] for step in pipeline.steps]
        check_has_source(rows[output.name], pipeline, output)
    letters = {
        source.name: dead_letters(
            _messages(spark, file, pipeline, source, None),
            source.decode,
            schemas[source.name],
            pipeline=pipeline.name,
            channel=source.channel(),
            largest=LARGEST_LETTER,
        )
        for source in pipeline.sources
        if source.dead_letters
    }
    return Frames(rows, letters, steps)


def check_has_source(rows: DataFrame, pipeline: Pipeline, output: Output) -> None:
    """Raises PipelineError."""
    if not rows.isStreaming:
        place = sink_place(pipeline, output)
        raise PipelineError(f"{place} from: {output.result!r} reads tables only; it must read a source")


def start(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, abandoned: threading.Event
) -> dict[str, StreamingQuery]:
    """Starts the queries, and returns them by role. Raises PipelineError, and Abandoned if that
    event is set meanwhile."""
    is_copied = store_checkpoints.fetch(pipeline)
    for output in pipeline.outputs:
        _clear_unfinished(pipeline, output)
    layout = direct_parquet.layout_of(pipeline)
    # Spark takes dates in the time zone of the session; direct writing knows only UTC.
    is_utc = spark.conf.get("spark.sql.session.timeZone") in ("UTC", "Etc/UTC", "GMT", "Z")
    if layout is not None and is_utc:
        (output,) = pipeline.outputs
        return {output.role: _start_direct(spark, file, pipeline, layout)}
    settle_schemas(spark, file, pipeline, abandoned)
    settle_beginnings(spark, file, pipeline, abandoned)
    frames = build(spark, file, pipeline)
    for output in pipeline.outputs if is_copied else ():
        store_checkpoints.check_stateless(pipeline, output, frames.rows[output.name])
    started: dict[str, StreamingQuery] = {}
    try:
        for output in pipeline.outputs:
            writer = writer_of(output.sink, frames.rows[output.name], Target(file, pipeline, output))
            started[output.role] = _start_output(writer, pipeline, output)
        for source in pipeline.sources:
            if source.dead_letters:
                writer = letters_writer(frames.letters[source.name], source.dead_letters, file.nsq)
                name = _spaced(pipeline.name, "" if source.name == MESSAGES else source.name, "dead letters")
                started[source.letters_role] = _start(writer, pipeline, source.letters_role, name)
    except BaseException:
        for query in started.values():
            query.stop()
        raise
    return started


def _clear_unfinished(pipeline: Pipeline, output: Output) -> None:
    """Removes files that an earlier run wrote and did not commit."""
    sink, metadata = output.sink, Path(pipeline.checkpoint) / output.role / "metadata"
    if isinstance(sink, Parquet) and not sink.is_written_by_spark and metadata.is_file():
        ParquetDirectory(sink.path).clear_new_files(json.loads(metadata.read_text())["id"])


def _start_direct(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, layout: direct_parquet.Layout
) -> StreamingQuery:
    """For messages that go to files unchanged; see `direct_parquet`."""
    (source,), (output,) = pipeline.sources, pipeline.outputs
    options = {
        **source_options(file, pipeline, source, output),
        direct_parquet.LAYOUT: layout.dumps(),
    }
    if isinstance(output.sink, Delta):
        options[direct_parquet.STORAGE] = json.dumps(dict(output.sink.storage_options))
    files = _load(spark, pipeline, source, direct_parquet.FORMAT, options)
    counted = files.observe(WRITTEN, F.sum("rows").alias("rows"), F.sum("size").alias("bytes"))
    target = Target(file, pipeline, output, layout.schema)
    writer = writer_of(output.sink, counted, target).option("described", layout.schema.json())
    return _start_output(writer, pipeline, output)


def _start_output(writer: DataStreamWriter, pipeline: Pipeline, output: Output) -> StreamingQuery:
    writer = writer.outputMode(output.output_mode)
    if isinstance(output.sink, Memory):
        # A table in memory has the name of its query, and ends with it. It starts empty each time.
        return _triggered(writer, pipeline, output)
    return _start(writer, pipeline, output.role, _spaced(pipeline.name, output.name), output)


def _start(
    writer: DataStreamWriter, pipeline: Pipeline, role: str, name: str, output: Output | None = None
) -> StreamingQuery:
    writer = writer.queryName(name).option("checkpointLocation", f"{pipeline.checkpoint}/{role}")
    return _triggered(writer, pipeline, output)


def _triggered(writer: DataStreamWriter, pipeline: Pipeline, output: Output | None) -> StreamingQuery:
    sink = None if output is None else output.sink
    # Spark takes the name of a catalog table only when the query starts.
    table = sink.table if isinstance(sink, Format) and not sink.batches else ""
    trigger = Trigger(0.0) if pipeline.is_paced_by_source else pipeline.trigger
    if trigger.kind == "available-now":
        writer = writer.trigger(availableNow=True)
    elif trigger.kind == "once":
        writer = writer.trigger(once=True)
    else:
        writer = writer.trigger(processingTime=f"{round(trigger.seconds * 1000)} milliseconds")
    try:
        return writer.toTable(table) if table else writer.start()
    except PySparkException as error:
        raise refusal(pipeline, "" if output is None else output.name, error) from error


def _spaced(*words: str) -> str:
    return " ".join(filter(None, words))


def refusal(pipeline: Pipeline, output: str, error: PySparkException) -> PipelineError:
    """The error for a query that Spark refuses to start."""
    text, lower = in_words(error), str(error).lower()
    if "output mode" in lower and "watermark" in lower:
        text += '; either set output_mode = "update", or add a watermark'
    place = f"pipeline.{pipeline.name}" + (f".sink {output}" if output else "")
    return PipelineError(f"[{place}]: {text}")


# messages


def decoded(
    messages: DataFrame, pipeline: Pipeline, source: Source, schema: StructType, *, bad: str
) -> DataFrame:
    """The decoded messages of a source; see `good_rows`."""
    observed = decoded_name(source.name)
    if source.decode.format in UNDECODED and len(pipeline.sources) > 1:
        # Spark itself counts the messages of all sources together.
        messages = messages.observe(observed, F.count(F.lit(1)).alias("rows"))
    return good_rows(messages, source.decode, schema, bad=bad, observed=observed)


def _messages(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, source: Source, output: Output | None
) -> DataFrame:
    options = source_options(file, pipeline, source, output)
    role = source.letters_role if output is None else output.role
    beginning = Beginnings(pipeline).of(role, source)
    if beginning is not None:
        options["startingPosition"] = json.dumps(beginning)
    return _load(spark, pipeline, source, "nsq", options)


def _load(
    spark: SparkSession, pipeline: Pipeline, source: Source, format: str, options: dict[str, str]
) -> DataFrame:
    try:
        return spark.readStream.format(format).options(**options).load()
    except PySparkException as error:
        raise PipelineError(f"{pipeline.place_of(source)}: {in_words(error)}") from error


def settle_beginnings(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, abandoned: threading.Event
) -> None:
    """Determines where new queries begin; see `beginnings`. Raises PipelineError, Abandoned."""
    beginnings = Beginnings(pipeline)
    if beginnings.missing:
        beginnings.settle(file, _sources_read(spark, file, pipeline), abandoned)


def _sources_read(spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> dict[str, set[str]]:
    """The sources that each query reads, by role: those whose channel is in its plan."""
    found = {source.letters_role: {source.name} for source in pipeline.sources if source.dead_letters}
    if len(pipeline.sources) == 1:
        # Every output reads the only source.
        return {**found, **{output.role: {pipeline.sources[0].name} for output in pipeline.outputs}}
    frames = build(spark, file, pipeline)
    for output in pipeline.outputs:
        found_leaves = frames.rows[output.name]._jdf.queryExecution().analyzed().collectLeaves()
        leaves = [found_leaves.apply(at) for at in range(found_leaves.size())]
        channels = {
            leaf.extraOptions().get("channel")
            for leaf in leaves
            if leaf.getClass().getSimpleName() == "StreamingRelationV2"
        }
        found[output.role] = {
            source.name for source in pipeline.sources if source.channel(output.name) in channels
        }
    return found
