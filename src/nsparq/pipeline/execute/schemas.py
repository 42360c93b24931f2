"""The columns of a source's messages: declared in the file, or inferred once from a sample of
messages.

An inferred schema is kept in `pipeline.json`, so that a restart does not change it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from nsparq.pipeline.decode.formats import HEADERS, ORIGIN, SchemaFileError
from nsparq.pipeline.decode.messages import declared_columns
from nsparq.pipeline.decode.samples import Sample, infer_csv, infer_json
from nsparq.pipeline.errors import NothingYet, PipelineError, in_words
from nsparq.pipeline.file.spec import MESSAGES, Pipeline, PipelineFile, Source
from nsparq.pipeline.pipeline_json import PipelineJson
from nsparq.spark.options import TABLE, Use

Bodies = Callable[[], list[bytes]]
"""Reads messages to infer a schema from. Called only if needed."""
_STREAM_ONLY: Final = {
    one.name
    for one in TABLE.values()
    if Use.LOG_BATCH not in one.uses or one.name in ("channel", "startingPosition")
}
"""Options of format("nsq") that a batch read does not have, or must not have here."""


def settle_schemas(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, abandoned: threading.Event
) -> None:
    """Infers the schemas that are missing, and keeps them. Raises PipelineError, Abandoned."""
    kept = PipelineJson(pipeline)
    for source in pipeline.sources:
        if source.decode.is_inferred and kept.get(_key(source)) is None:
            found = _inferred(pipeline, source, sampled_bodies(spark, file, pipeline, source))
            kept.put(_key(source), found, abandoned)


def schema_of(pipeline: Pipeline, source: Source, bodies: Bodies) -> StructType:
    """The columns of a source's messages, inferred from `bodies` if need be. Raises
    PipelineError."""
    decode = source.decode
    if decode.format in ("text", "raw", "message"):
        return StructType()
    at = pipeline.place_of(source, "decode")
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
    own = {f"_{name}" for name in (*ORIGIN, *([HEADERS] if decode.headers else ()))}
    taken = [one for one in schema.names if one in own]
    if taken:
        raise PipelineError(f"{place}: {taken[0]!r} is the name of a column that every message has")
    return schema


def _key(source: Source) -> str:
    return "schema" if source.name == MESSAGES else f"schema-{source.name}"


def _inferred(pipeline: Pipeline, source: Source, sampled: Bodies) -> str:
    """The schema in `pipeline.json`, or else that of the messages. Raises PipelineError."""
    known = PipelineJson(pipeline).get(_key(source))
    if known is not None:
        return str(known)
    decode = source.decode
    bodies = sampled()
    separator = decode.options.get("sep", decode.options.get("delimiter", ","))
    found = infer_json(bodies) if decode.format == "json" else infer_csv(bodies, separator)
    if not found:
        none = f"no {decode.format.upper()} among {len(bodies)} messages" if bodies else "no messages yet"
        raise NothingYet(
            f"{pipeline.place_of(source, 'decode')} schema: is missing and cannot be inferred: "
            f"{source.topics} has {none}"
        )
    return found


def sampled_bodies(spark: SparkSession, file: PipelineFile, pipeline: Pipeline, source: Source) -> Bodies:
    return lambda: [one.body for one in sample(spark, file, pipeline, source, source.decode.sample)]


def sample(
    spark: SparkSession, file: PipelineFile, pipeline: Pipeline, source: Source, count: int
) -> list[Sample]:
    """The oldest messages that nsqd has. Needs and moves no channel. Raises PipelineError."""
    options = {**file.nsq, **source.options}
    kept = {name: value for name, value in options.items() if name not in _STREAM_ONLY}
    try:
        rows = spark.read.format("nsq").options(**kept).load().limit(count).toArrow().to_pylist()
    except PySparkException as error:
        place = pipeline.place_of(source)
        raise PipelineError(f"{place}: no message can be read: {in_words(error)}") from error
    return [Sample(**{**row, "headers": dict(row["headers"] or ()) or None}) for row in rows]
