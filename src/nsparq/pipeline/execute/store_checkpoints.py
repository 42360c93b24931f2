"""Pipelines whose checkpoint is in an object store.

If Spark has a file system for the URL, such as Hadoop's JAR for S3, it writes the checkpoint
itself. Otherwise Spark gets a local directory, which `nsparq.spark.checkpoint_store` copies. That
works for pipelines without state: executors write the state, and it may be large.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from nsparq.errors import StartError
from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.execute.state_check import has_state
from nsparq.pipeline.file.sinks import Delta, Format, Jdbc, Memory, Parquet, Python, Topic
from nsparq.pipeline.file.spec import Output, Pipeline, PipelineFile
from nsparq.spark.checkpoint_store import NAME, PREFIX, SCHEMES, CheckpointStore
from nsparq.spark.session.build import has_file_system

_JAR: Final = "or add the store's file system to Spark, such as Hadoop's JAR for S3"


def is_mirrored(spark: SparkSession, pipeline: Pipeline) -> bool:
    """Whether Spark cannot write this checkpoint itself."""
    return _is_mirrored_here(pipeline) or (
        pipeline.checkpoint.startswith(SCHEMES) and not has_file_system(spark, pipeline.checkpoint)
    )


def check_mirrored(pipeline: Pipeline) -> None:
    """Refuses what cannot work with a copied checkpoint. Raises PipelineError."""
    place = f"[pipeline.{pipeline.name}] checkpoint:"
    try:
        CheckpointStore(_url(pipeline))
    except StartError as error:
        raise PipelineError(f"{place} {str(error).removeprefix('--archive ')}") from error
    if any(source.is_queue for source in pipeline.sources):
        raise PipelineError(
            f"{place} mode 'queue' keeps messages there, which all executors write: use a directory that "
            f"they share, {_JAR}"
        )
    for output in pipeline.outputs:
        if not _commits(output):
            raise PipelineError(
                f"{place} in an object store needs a sink that is a topic, Parquet files in a directory, a "
                f"Delta table, a database, or a function: Spark writes the others itself. Use a directory, "
                f"{_JAR}"
            )


def check_stateless(pipeline: Pipeline, output: Output, rows: DataFrame) -> None:
    """Raises PipelineError."""
    if isinstance(output.sink, Memory) or not has_state(rows, output.output_mode):
        return
    raise PipelineError(
        f"[pipeline.{pipeline.name}] checkpoint: this pipeline has state (an aggregation, a join of streams, "
        f"or the like), which executors write to the checkpoint: use a directory that they share, {_JAR}"
    )


def _commits(output: Output) -> bool:
    """Whether the sink asks for the batch's fingerprint before it writes."""
    match output.sink:
        case Parquet() as sink:
            return not sink.is_written_by_spark
        case Format() as sink:
            return sink.batches
        case Topic() | Delta() | Jdbc() | Python() | Memory():
            return True
    return False


@contextmanager
def local_checkpoints(spark: SparkSession, file: PipelineFile) -> Iterator[PipelineFile]:
    """The file, with temporary directories for checkpoints that Spark cannot write. Raises
    PipelineError."""
    with TemporaryDirectory(prefix=PREFIX) as base:
        pipelines = []
        for one in file.pipelines:
            if is_mirrored(spark, one):
                check_mirrored(one)
                directory = Path(base) / one.name
                directory.mkdir()
                (directory / NAME).write_text(json.dumps({"url": one.checkpoint}))
                one = replace(one, checkpoint=str(directory))
            pipelines.append(one)
        yield replace(file, pipelines=tuple(pipelines))


def fetch(pipeline: Pipeline) -> bool:
    """Fetches a checkpoint from its store, unless a run before has. Returns whether it has one."""
    if not _is_mirrored_here(pipeline):
        return False
    fetched = Path(pipeline.checkpoint) / "fetched"
    if not fetched.exists():
        CheckpointStore(_url(pipeline)).fetch(Path(pipeline.checkpoint), pipeline.roles)
        fetched.touch()
    return True


def _is_mirrored_here(pipeline: Pipeline) -> bool:
    return not pipeline.checkpoint.startswith(SCHEMES) and (Path(pipeline.checkpoint) / NAME).exists()


def _url(pipeline: Pipeline) -> str:
    if pipeline.checkpoint.startswith(SCHEMES):
        return pipeline.checkpoint
    return str(json.loads((Path(pipeline.checkpoint) / NAME).read_text())["url"])
