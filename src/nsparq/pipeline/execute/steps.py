"""The steps of a pipeline, one after the other: SQL over named views, or the user's functions."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import TimestampNTZType, TimestampType

from nsparq.pipeline.errors import PipelineError, in_words
from nsparq.pipeline.file.spec import INPUT, MESSAGES, Pipeline, Step, Watermark
from nsparq.pipeline.user_code import load_function

_one_at_a_time: Final = threading.Lock()
"""Pipelines start in parallel in one session, and use the same names for their views."""

Frames = Mapping[str, DataFrame]


def transform(spark: SparkSession, pipeline: Pipeline, given: Frames, directory: Path) -> Frames:
    """Adds the result of each step to `given`, the tables and the decoded messages of each source,
    all by name. Modules of functions are searched in `directory` first. Raises PipelineError."""
    with _one_at_a_time:
        return _transform(spark, pipeline, given, directory)


def parse(spark: SparkSession, pipeline: Pipeline) -> None:
    """Checks the syntax of the SQL, without knowing the columns. Raises PipelineError."""
    session: Any = spark._jsparkSession
    for at, step in _places(pipeline):
        try:
            if step.sql:
                session.sessionState().sqlParser().parsePlan(step.sql)
        except PySparkException as error:
            raise PipelineError(f"{at} sql: {in_words(error)}") from error


def _places(pipeline: Pipeline) -> Iterator[tuple[str, Step]]:
    """The steps, with the place of each for error texts."""
    place = f"[pipeline.{pipeline.name}]"
    for number, step in enumerate(pipeline.steps, 1):
        yield (place if step.name == "result" else f"{place} step {number}"), step


def _transform(spark: SparkSession, pipeline: Pipeline, given: Frames, directory: Path) -> Frames:
    results = dict(given)
    for source in pipeline.sources:
        place = f"[pipeline.{pipeline.name}{'' if source.name == MESSAGES else f'.sources.{source.name}'}]"
        results[source.name] = _marked(given[source.name], source.watermark, f"{place} watermark")
    # With several sources the first step has no `input`.
    latest = (pipeline.sources[0].name,) if len(pipeline.sources) == 1 else ()
    for at, step in _places(pipeline):
        chosen = [results[name] for name in step.sources or latest]
        made = _query(spark, step, results, chosen, at) if step.sql else _call(step, chosen, at, directory)
        results[step.name] = _marked(made, step.watermark, f"{at} watermark")
        latest = (step.name,)
    return results


def _query(
    spark: SparkSession, step: Step, results: Frames, given: Sequence[DataFrame], place: str
) -> DataFrame:
    """Drops the views at once, because pipelines share a session and use the same names."""
    views = {**results, INPUT: given[0]} if given else results
    try:
        for name, frame in views.items():
            frame.createOrReplaceTempView(name)
        return spark.sql(step.sql)
    except PySparkException as error:
        raise PipelineError(f"{place} sql: {in_words(error)}") from error
    finally:
        for name in views:
            spark.catalog.dropTempView(name)


def _call(step: Step, given: Sequence[DataFrame], place: str, directory: Path) -> DataFrame:
    function = load_function(step.python, place, directory)
    try:
        made = function(*given)
    except Exception as error:
        raise PipelineError(
            f"{place} python: {step.python} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, DataFrame):
        raise PipelineError(
            f"{place} python: {step.python} must return a DataFrame, not {type(made).__name__}"
        )
    return made


def _marked(frame: DataFrame, watermark: Watermark | None, place: str) -> DataFrame:
    if watermark is None:
        return frame
    types = {one.name: one.dataType for one in frame.schema.fields}
    if watermark.column not in types:
        raise PipelineError(f"{place}: there is no column {watermark.column!r}; there are {', '.join(types)}")
    if not isinstance(types[watermark.column], TimestampType | TimestampNTZType):
        shown = types[watermark.column].simpleString().upper()
        raise PipelineError(f"{place}: {watermark.column!r} is {shown}; it must be TIMESTAMP")
    return frame.withWatermark(watermark.column, f"{round(watermark.delay * 1000)} milliseconds")
