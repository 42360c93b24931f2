"""A pipeline as streaming queries of Spark: one for each output, and one for the dead letters of each source
that has `dead_letters`.

Why a query for each rather than one with several outputs: each has a checkpoint and a sink of its own, so
each is exactly once by Spark's own means, with any sink, any output mode, and aggregations, which would
swallow the letters on their way. All of them begin at the same place of the log, and use the same expression
to tell messages apart, so that every message is in exactly one of rows and letters. The price is that each
query reads and decodes the messages by itself, and that one output may be a moment ahead of another.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from nsparq.pipeline.decode.bodies import SchemaFileError
from nsparq.pipeline.decode.samples import Sample, infer_csv, infer_json
from nsparq.pipeline.decode.split import ORIGIN, dead_letters, declared_columns, good_rows
from nsparq.pipeline.errors import NothingYet, PipelineError, in_words, retry_helps
from nsparq.pipeline.execute.memory import PipelineMemory
from nsparq.pipeline.execute.progress import WRITTEN, decoded_name
from nsparq.pipeline.execute.state import judge
from nsparq.pipeline.execute.static_tables import load_tables
from nsparq.pipeline.execute.steps import parse, transform
from nsparq.pipeline.file.spec import (
    MESSAGES,
    Format,
    Memory,
    Output,
    Parquet,
    Pipeline,
    PipelineFile,
    Source,
    Trigger,
    is_local,
)
from nsparq.pipeline.write import direct
from nsparq.pipeline.write.commits import Directory
from nsparq.pipeline.write.layout import NAMES, Layout, layout_of
from nsparq.pipeline.write.sinks import Target, letters_writer, prepared, sink_place, writer_of
from nsparq.spark.options import TABLE, NsqOptions, Use
from nsparq.spark.session.build import activate
from nsparq.spark.source.positions import decode, encode

__all__ = ["Abandoned", "Frames", "build", "check", "register", "start"]

CHECK_RETRY: Final = "1s"
"""How long a check waits for an nsqd that is away."""
WAYS_OUT: Final = (
    "Either run it under another name beside the old one, or with another checkpoint and another channel: "
    "both begin at starting_position, without state"
)

Bodies = Callable[[], list[bytes]]
"""Messages to infer a schema from, asked for only if need be."""


class Abandoned(NsparqError):
    """Nobody waits for this start any more. Nothing has been written down."""


@dataclass(frozen=True, slots=True)
class Frames:
    """What a pipeline comes to, before anything runs."""

    rows: Mapping[str, DataFrame]
    """By the names of the outputs."""
    letters: Mapping[str, DataFrame]
    """By the names of the sources that have dead letters."""
    steps: Mapping[str, Sequence[DataFrame]]
    """The results of all steps, by the names of the outputs."""


def register(spark: SparkSession) -> None:
    """What our sinks need in a session, in the thread that calls this. Twice is safe."""
    from nsparq.pipeline.write.direct import DirectDataSource
    from nsparq.pipeline.write.files import FilesDataSource

    activate(spark)
    with _registering:
        if spark not in _REGISTERED:
            spark.dataSource.register(FilesDataSource)
            spark.dataSource.register(DirectDataSource)
            _REGISTERED.add(spark)


_REGISTERED: Final[WeakSet[SparkSession]] = WeakSet()
_registering: Final = threading.Lock()
"""Spark refuses to register a source that another thread has registered since it looked."""


def build(
    spark: SparkSession,
    file: PipelineFile,
    pipeline: Pipeline,
    tables: Mapping[str, DataFrame] | None = None,
) -> Frames:
    """Everything that Spark can check without reading a message. Raises PipelineError."""
    if tables is None:
        tables = load_tables(spark, pipeline)
    schemas = {source.name: _schema(spark, file, pipeline, source) for source in pipeline.sources}
    rows: dict[str, DataFrame] = {}
    steps: dict[str, list[DataFrame]] = {}
    for output in pipeline.outputs:
        messages = {
            source.name: _rows(spark, file, pipeline, source, output, schemas[source.name])
            for source in pipeline.sources
        }
        results = transform(spark, pipeline, {**tables, **messages}, file.path.parent)
        rows[output.name] = prepared(output.sink, results[output.result], Target(file, pipeline, output))
        steps[output.name] = [results[step.name] for step in pipeline.steps]
        _check_source(rows[output.name], pipeline, output)
    letters = {
        source.name: dead_letters(
            _messages(spark, file, pipeline, source, None),
            source.decode,
            schemas[source.name],
            pipeline=pipeline.name,
            channel=source.channel(),
        )
        for source in pipeline.sources
        if source.dead_letters
    }
    return Frames(rows, letters, steps)


def _check_source(rows: DataFrame, pipeline: Pipeline, output: Output) -> None:
    if not rows.isStreaming:
        place = sink_place(pipeline, output)
        raise PipelineError(f"{place} from: {output.result!r} is made of tables only, of no source")


def check(spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> Frames | None:
    """The same, and whether Spark would run it as a stream. Raises PipelineError.

    Needs no nsqd, unless a schema has to be inferred. If it cannot be, since nsqd is away or there is no
    message yet, the columns are unknown: then only the syntax of the SQL is checked, and the result is None.
    """
    tables = load_tables(spark, pipeline)
    try:
        frames = build(spark, replace_option(file, "retryFor", CHECK_RETRY), pipeline, tables)
    except PipelineError as error:
        if not retry_helps(error):
            raise
        parse(spark, pipeline)
        return None
    for output in pipeline.outputs:
        rows = frames.rows[output.name]
        writer_of(output.sink, rows, Target(file, pipeline, output))
        check_stream(rows, pipeline, output)
    return frames


def check_stream(rows: DataFrame, pipeline: Pipeline, output: Output) -> None:
    """Whether Spark would run a stream of these rows. Raises PipelineError."""
    _check_source(rows, pipeline, output)
    jvm: Any = rows.sparkSession._jvm
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, output.output_mode.capitalize())()
    try:
        checker.checkForStreaming(rows._jdf.queryExecution().analyzed(), mode)
    except PySparkException as error:
        raise _refused(pipeline, output.name, error) from error


def check_state(pipeline: Pipeline, frames: Frames) -> list[str]:
    """Whether the checkpoints of a pipeline fit it as it is now. What somebody should know nevertheless.
    Raises PipelineError."""
    notes = []
    for output in pipeline.outputs:
        if isinstance(output.sink, Memory):
            continue
        if not is_local(pipeline.checkpoint):
            return [f"{pipeline.checkpoint} is not on this machine: whether its state fits is not known"]
        checkpoint = Path(pipeline.checkpoint) / output.role
        steps = frames.steps[output.name]
        named = {f"step {at}": one for at, one in enumerate(steps, 1) if len(steps) > 1 and one.isStreaming}
        verdict = judge(frames.rows[output.name], output.output_mode, checkpoint, named)
        if verdict.refused:
            raise PipelineError(
                f"[pipeline.{pipeline.name}] does not fit its checkpoint {checkpoint}: {verdict.refused}. "
                + WAYS_OUT
            )
        if verdict.note:
            notes.append(f"{checkpoint}: {verdict.note}")
    return notes


def replace_option(file: PipelineFile, name: str, value: str) -> PipelineFile:
    """The file with another value for an option of format("nsq")."""
    return replace(file, nsq={**file.nsq, name: value})


def start(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, abandoned: threading.Event
) -> dict[str, StreamingQuery]:
    """Running queries by their role. Raises PipelineError, and Abandoned if that is set meanwhile."""
    for output in pipeline.outputs:
        _clear_unfinished(pipeline, output)
    layout = layout_of(pipeline)
    if layout is not None and _is_utc(spark):
        (output,) = pipeline.outputs
        return {output.role: _start_direct(spark, file, pipeline, layout)}
    _settle_schemas(spark, file, pipeline, abandoned)
    settle_beginning(spark, file, pipeline, abandoned)
    frames = build(spark, file, pipeline)
    started: dict[str, StreamingQuery] = {}
    try:
        for output in pipeline.outputs:
            rows = writer_of(output.sink, frames.rows[output.name], Target(file, pipeline, output))
            started[output.role] = _start_output(rows, pipeline, output)
        for source in pipeline.sources:
            if source.dead_letters:
                letters = letters_writer(frames.letters[source.name], source.dead_letters, file.nsq)
                name = _spaced(pipeline.name, "" if source.name == MESSAGES else source.name, "dead letters")
                started[source.letters_role] = _start(letters, pipeline, source.letters_role, name)
    except BaseException:
        for query in started.values():
            query.stop()
        raise
    return started


def _clear_unfinished(pipeline: Pipeline, output: Output) -> None:
    """Files that an earlier run has written and not made part of the table."""
    sink, metadata = output.sink, Path(pipeline.checkpoint) / output.role / "metadata"
    if isinstance(sink, Parquet) and sink.writer == "nsparq" and metadata.is_file():
        Directory(sink.path).clear_new_files(json.loads(metadata.read_text())["id"])


def _is_utc(spark: SparkSession) -> bool:
    """Whether dates are those of UTC; Spark counts days by the time of its session."""
    return spark.conf.get("spark.sql.session.timeZone") in ("UTC", "Etc/UTC", "GMT", "Z")


def _start_direct(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, layout: Layout
) -> StreamingQuery:
    """Of messages that go to files as they are; see `direct`."""
    (source,), (output,) = pipeline.sources, pipeline.outputs
    options = {
        **source_options(file, pipeline, source, output),
        direct.LAYOUT: layout.dumps(),
        direct.INTERVAL: str(pipeline.trigger.seconds),
    }
    files = _load(spark, pipeline, source, direct.FORMAT, options)
    counted = files.observe(WRITTEN, F.sum("rows").alias("rows"), F.sum("size").alias("bytes"))
    writer = writer_of(output.sink, counted, Target(file, pipeline, output)).option("described", "true")
    # The source knows when the next batch is due.
    trigger = pipeline.trigger if pipeline.trigger.ends else Trigger(0.0)
    return _start_output(writer, replace(pipeline, trigger=trigger), output)


def _start_output(writer: DataStreamWriter, pipeline: Pipeline, output: Output) -> StreamingQuery:
    writer = writer.outputMode(output.output_mode)
    if isinstance(output.sink, Memory):
        # A table in memory has the name of its query, and is gone with it: it begins anew each time.
        return _triggered(writer, pipeline, output)
    return _start(writer, pipeline, output.role, _spaced(pipeline.name, output.name), output)


def _start(
    writer: DataStreamWriter, pipeline: Pipeline, role: str, name: str, output: Output | None = None
) -> StreamingQuery:
    writer = writer.queryName(name).option("checkpointLocation", f"{pipeline.checkpoint}/{role}")
    return _triggered(writer, pipeline, output)


def _triggered(writer: DataStreamWriter, pipeline: Pipeline, output: Output | None) -> StreamingQuery:
    sink = None if output is None else output.sink
    # Spark takes the name of a catalog's table only when the query starts.
    table = sink.table if isinstance(sink, Format) and not sink.batches else ""
    trigger = pipeline.trigger
    if trigger.kind == "available-now":
        writer = writer.trigger(availableNow=True)
    elif trigger.kind == "once":
        writer = writer.trigger(once=True)
    else:
        writer = writer.trigger(processingTime=f"{round(trigger.seconds * 1000)} milliseconds")
    try:
        return writer.toTable(table) if table else writer.start()
    except PySparkException as error:
        raise _refused(pipeline, "" if output is None else output.name, error) from error


def _spaced(*words: str) -> str:
    return " ".join(filter(None, words))


def _refused(pipeline: Pipeline, output: str, error: PySparkException) -> PipelineError:
    text, said = in_words(error), str(error).lower()
    if "output mode" in said and "watermark" in said:
        text += '; either set output_mode = "update", or add a watermark'
    place = f"pipeline.{pipeline.name}" + (f".sink {output}" if output else "")
    return PipelineError(f"[{place}]: {text}")


# messages


def source_options(
    file: PipelineFile, pipeline: Pipeline, source: Source, output: Output | None
) -> dict[str, str]:
    """Options of format("nsq") for the query of an output, or without one for that of the dead letters."""
    options = {**file.nsq, **source.options}
    if source.is_queue:
        place = "staging" if source.name == MESSAGES else f"staging-{source.name}"
        options.setdefault("staging", f"{pipeline.checkpoint}/{place}")
    if output is None:
        options["channel"] = source.letters_channel
        return options
    options["channel"] = source.channel(output.name)
    if isinstance(output.sink, Memory):
        # Its checkpoint is gone with it.
        options.setdefault("ownChannel", "false")
    return options


def _rows(
    spark: SparkSession,
    file: PipelineFile,
    pipeline: Pipeline,
    source: Source,
    output: Output,
    schema: StructType,
) -> DataFrame:
    bad = "drop" if source.dead_letters else source.decode.on_error
    return decoded(_messages(spark, file, pipeline, source, output), pipeline, source, schema, bad=bad)


def decoded(
    messages: DataFrame, pipeline: Pipeline, source: Source, schema: StructType, *, bad: str
) -> DataFrame:
    """The decoded messages of a source; see `good_rows`."""
    observed = decoded_name(source.name)
    if source.decode.format in NAMES and len(pipeline.sources) > 1:
        # Spark counts the messages of all sources together.
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
        raise PipelineError(f"{_source_place(pipeline, source)}: {in_words(error)}") from error


def _source_place(pipeline: Pipeline, source: Source, *more: str) -> str:
    """How errors call a source, or a table of it."""
    named = ("source",) if source.name == MESSAGES and not more else ("sources", source.name)
    words = more if source.name == MESSAGES and more else (*named, *more)
    return f"[{'.'.join(('pipeline', pipeline.name, *words))}]"


# where the queries begin


class Beginnings:
    """Where the queries of a pipeline begin. It is settled once for those that start together: what is
    `latest` to the one would not be to the other."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._memory = pipeline, PipelineMemory(pipeline)
        self._is_needed = len(pipeline.roles) > 1
        self._known: dict[str, dict[str, Any]] = {}
        if not self._is_needed:
            return
        before = self._memory.get("beginning")
        if before is not None:
            # Of an nsparq whose pipelines had one source and one output.
            self._known = {role: {MESSAGES: before} for role in ("rows", "letters")}
        self._known |= self._memory.get("beginnings") or {}

    @property
    def missing(self) -> list[str]:
        """Roles of queries that are new. One that has a checkpoint goes on from there, and its channel must
        stay where it is: it may have yet to read what is before the beginning of the others."""
        if not self._is_needed:
            return []
        return [
            role for role in self._pipeline.roles if role not in self._known and not self._has_begun(role)
        ]

    def _has_begun(self, role: str) -> bool:
        """Whether Spark has written down a beginning."""
        offsets = Path(self._pipeline.checkpoint) / role / "offsets"
        return offsets.is_dir() and any(one.name.isdigit() for one in offsets.iterdir())

    def of(self, role: str, source: Source) -> dict[str, Any] | None:
        """What is to be the startingPosition of a source. Topics that it no longer reads are left out."""
        found = self._known.get(role, {}).get(source.name)
        if found is None:
            return None
        return {topic: nodes for topic, nodes in _places(found).items() if source.reads(topic)}

    def keep(self, found: Mapping[str, Any], abandoned: threading.Event) -> None:
        """The same for all that are new, by the sources' names. Raises Abandoned."""
        known = self._memory.get("beginnings") or {}
        _keep(self._memory, "beginnings", {**known, **dict.fromkeys(self.missing, dict(found))}, abandoned)


def _places(beginning: Mapping[str, Any]) -> dict[str, Any]:
    """Places by topic and node, of an offset in any version."""
    offsets = decode(beginning)
    return {topic: {node: [*place] for node, place in nodes.items()} for topic, nodes in offsets.items()}


def settle_beginning(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, abandoned: threading.Event
) -> None:
    """Where the queries that are new begin. From now on nsqd keeps the messages for all of them. Raises
    PipelineError, Abandoned."""
    beginnings = Beginnings(pipeline)
    new = beginnings.missing
    if not new:
        return
    reads = {role: sources for role, sources in _reads(spark, file, pipeline).items() if role in new}
    found: dict[str, Any] = {}
    for source in pipeline.sources:
        options = [
            source_options(file, pipeline, source, output)
            for role, output in _queries(pipeline)
            if source.name in reads.get(role, ()) and not source.is_queue
        ]
        for one in options:
            if source.name in found:
                one["startingPosition"] = json.dumps(_places(found[source.name]))
            begun = _begin(pipeline, source, one)
            found.setdefault(source.name, begun)
    beginnings.keep(found, abandoned)


def _begin(pipeline: Pipeline, source: Source, options: dict[str, str]) -> dict[str, Any]:
    """Where a query with these options begins. Its channel is there from now on."""
    from nsparq.spark.source.driver import LogSource

    try:
        opened = LogSource(NsqOptions.parse(options, Use.LOG_STREAM))
        try:
            return encode(opened.initial())
        finally:
            opened.close()
    except NsparqError as error:
        raise PipelineError(f"{_source_place(pipeline, source)}: {error}") from error


def _queries(pipeline: Pipeline) -> Iterator[tuple[str, Output | None]]:
    """The roles of all queries; without an output those of dead letters."""
    for output in pipeline.outputs:
        yield output.role, output
    for source in pipeline.sources:
        if source.dead_letters:
            yield source.letters_role, None


def _reads(spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> dict[str, set[str]]:
    """Which sources each query reads: those that its plan names, by their channels."""
    found = {source.letters_role: {source.name} for source in pipeline.sources if source.dead_letters}
    if len(pipeline.sources) == 1:
        # Whatever an output is, it is made of this one.
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


def _keep(memory: PipelineMemory, key: str, value: Any, abandoned: threading.Event) -> None:
    """Unless the start has been given up: another runner may have the checkpoint by now."""
    if abandoned.is_set():
        raise Abandoned
    memory.put(key, value)


# the schema


def _settle_schemas(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, abandoned: threading.Event
) -> None:
    """What was inferred stays, so that a restart does not change it."""
    memory = PipelineMemory(pipeline)
    for source in pipeline.sources:
        if source.decode.is_inferred and memory.get(_schema_key(source)) is None:
            found = _inferred(pipeline, source, partial(_sampled_bodies, spark, file, pipeline, source))
            _keep(memory, _schema_key(source), found, abandoned)


def _schema_key(source: Source) -> str:
    return "schema" if source.name == MESSAGES else f"schema-{source.name}"


def _schema(spark: SparkSession, file: PipelineFile, pipeline: Pipeline, source: Source) -> StructType:
    return schema_of(pipeline, source, partial(_sampled_bodies, spark, file, pipeline, source))


def schema_of(pipeline: Pipeline, source: Source, bodies: Bodies) -> StructType:
    """The columns of a source's messages. If they have to be inferred, it is from these. Raises
    PipelineError."""
    decode = source.decode
    if decode.format in ("text", "raw", "message"):
        return StructType()
    at = _source_place(pipeline, source, "decode")
    try:
        given = declared_columns(decode) or _inferred(pipeline, source, bodies)
    except SchemaFileError as error:
        raise PipelineError(f"{at} {decode.definition_key}: {error}") from error
    place = f"{at} {'schema' if decode.schema or decode.is_inferred else decode.definition_key}"
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


def _schema_place(pipeline: Pipeline, source: Source) -> str:
    return f"{_source_place(pipeline, source, 'decode')} schema"


def _inferred(pipeline: Pipeline, source: Source, sampled: Bodies) -> str:
    """As it was once, or as the messages are now. Raises PipelineError."""
    known = PipelineMemory(pipeline).get(_schema_key(source))
    if known is not None:
        return str(known)
    decode = source.decode
    bodies = sampled()
    separator = decode.options.get("sep", decode.options.get("delimiter", ","))
    found = infer_json(bodies) if decode.format == "json" else infer_csv(bodies, separator)
    if not found:
        raise NothingYet(
            f"{_schema_place(pipeline, source)}: none was given, and none can be inferred: "
            f"{source.topics} has "
            + (f"no {decode.format.upper()} among {len(bodies)} messages" if bodies else "no messages yet")
        )
    return found


def _sampled_bodies(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, source: Source
) -> list[bytes]:
    return [one.body for one in sample(spark, file, pipeline, source, source.decode.sample)]


def sample(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, source: Source, count: int
) -> list[Sample]:
    """Messages, the oldest that there are. No channel is needed, and none is moved. Raises PipelineError."""
    options = {**file.nsq, **source.options}
    kept = {name: value for name, value in options.items() if name not in _STREAM_ONLY}
    try:
        rows = spark.read.format("nsq").options(**kept).load().limit(count).toArrow().to_pylist()
    except PySparkException as error:
        place = _source_place(pipeline, source)
        raise PipelineError(f"{place}: no message can be read: {in_words(error)}") from error
    return [Sample(**row) for row in rows]


_STREAM_ONLY: Final = {
    one.name
    for one in TABLE.values()
    if Use.LOG_BATCH not in one.uses or one.name in ("channel", "startingPosition")
}
