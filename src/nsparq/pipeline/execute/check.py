"""`nsparq pipeline check`: whether Spark would run a pipeline, and continue from its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from nsparq.pipeline.errors import PipelineError, retry_helps
from nsparq.pipeline.execute import store_checkpoints
from nsparq.pipeline.execute.queries import Frames, build, check_has_source, refusal
from nsparq.pipeline.execute.state_check import judge
from nsparq.pipeline.execute.steps import parse
from nsparq.pipeline.execute.tables import load_tables
from nsparq.pipeline.file.keys import is_local
from nsparq.pipeline.file.sinks import Memory
from nsparq.pipeline.file.spec import Output, Pipeline, PipelineFile
from nsparq.pipeline.write.sinks import Target, writer_of

_RETRY: Final = "1s"
"""How long a check waits for an nsqd that does not answer."""
_ALTERNATIVES: Final = (
    "Either run it under another name beside the old one, or with another checkpoint and another channel: "
    "both begin at starting_position, without state"
)


def impatient(file: PipelineFile) -> PipelineFile:
    """The file, but nsqd has a second to answer."""
    return replace(file, nsq={**file.nsq, "retryFor": _RETRY})


def check(spark: SparkSession, file: PipelineFile, pipeline: Pipeline) -> Frames | None:
    """Builds the DataFrames and has Spark check them as streams. Raises PipelineError.

    Needs nsqd only to infer a schema. If that is impossible because nsqd does not answer or has no
    message yet, only the syntax of the SQL is checked, and the result is None.
    """
    is_copied = store_checkpoints.is_mirrored(spark, pipeline)
    if is_copied:
        store_checkpoints.check_mirrored(pipeline)
    tables = load_tables(spark, pipeline)
    try:
        frames = build(spark, impatient(file), pipeline, tables)
    except PipelineError as error:
        if not retry_helps(error):
            raise
        parse(spark, pipeline)
        return None
    for output in pipeline.outputs:
        rows = frames.rows[output.name]
        writer_of(output.sink, rows, Target(file, pipeline, output))
        check_stream(rows, pipeline, output)
        if is_copied:
            store_checkpoints.check_stateless(pipeline, output, rows)
    return frames


def check_stream(rows: DataFrame, pipeline: Pipeline, output: Output) -> None:
    """Has Spark check whether it can run a stream of these rows. Raises PipelineError."""
    check_has_source(rows, pipeline, output)
    jvm: Any = rows.sparkSession._jvm
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, output.output_mode.capitalize())()
    try:
        checker.checkForStreaming(rows._jdf.queryExecution().analyzed(), mode)
    except PySparkException as error:
        raise refusal(pipeline, output.name, error) from error


def check_state(spark: SparkSession, pipeline: Pipeline, frames: Frames) -> list[str]:
    """Checks whether the pipeline can continue from its checkpoints. Returns notes for the user.
    Raises PipelineError."""
    notes = []
    for output in pipeline.outputs:
        if isinstance(output.sink, Memory):
            continue
        if not is_local(pipeline.checkpoint):
            if store_checkpoints.is_mirrored(spark, pipeline):
                return []
            return [f"{pipeline.checkpoint} is not on this machine, so its state was not checked"]
        checkpoint = Path(pipeline.checkpoint) / output.role
        steps = frames.steps[output.name]
        named = {f"step {at}": one for at, one in enumerate(steps, 1) if len(steps) > 1 and one.isStreaming}
        verdict = judge(frames.rows[output.name], output.output_mode, checkpoint, named)
        if verdict.refused:
            raise PipelineError(
                f"[pipeline.{pipeline.name}] does not fit its checkpoint {checkpoint}: {verdict.refused}. "
                + _ALTERNATIVES
            )
        if verdict.note:
            notes.append(f"{checkpoint}: {verdict.note}")
    return notes
