"""Tries a pipeline on a few messages: the rows it would write, and the messages that do not decode.
Nothing is written, no channel is moved, and there is no checkpoint.

The messages are a batch with the columns of the source. Decoding, steps and the columns for the
sink are the same as in a run. Aggregations and windows give the complete result, as if all messages
had come in time and no more would follow: watermarks and output modes have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from nsparq.pipeline.decode.formats import UNDECODED
from nsparq.pipeline.decode.messages import dead_letters
from nsparq.pipeline.decode.samples import Sample
from nsparq.pipeline.errors import PipelineError, in_words
from nsparq.pipeline.execute.check import check_stream
from nsparq.pipeline.execute.queries import decoded
from nsparq.pipeline.execute.schemas import Bodies, schema_of
from nsparq.pipeline.execute.steps import transform
from nsparq.pipeline.execute.tables import load_tables
from nsparq.pipeline.file.spec import Output, Pipeline, PipelineFile, Source
from nsparq.pipeline.write.sinks import Target, prepared
from nsparq.spark.columns import SCHEMA

if TYPE_CHECKING:
    import pyarrow as pa

DEAD_LETTER: Final = "dead letter"
DROP: Final = "drop"
FAIL: Final = "fail"
"""What happens to a message that does not decode."""
QUICK: Final = {"spark.sql.shuffle.partitions": "1", "spark.sql.adaptive.enabled": "false"}
"""Spark settings for few rows."""


@dataclass(frozen=True, slots=True)
class Undecoded:
    """A message that does not decode."""

    source: Source
    letter: Mapping[str, Any]
    """Its dead letter, even if the pipeline would not write one."""

    @property
    def fate(self) -> str:
        return DEAD_LETTER if self.source.dead_letters else self.source.decode.on_error


@dataclass(frozen=True, slots=True)
class Trial:
    rows: Mapping[str, pa.Table]
    """The rows that each sink would get, by the names of the outputs."""
    undecoded: Sequence[Undecoded]


def try_out(
    spark: SparkSession,
    file: PipelineFile,
    pipeline: Pipeline,
    samples: Sequence[Sample],
    tables: Mapping[str, DataFrame] | None = None,
) -> Trial:
    """Each source gets the samples of its topics. `tables` replace tables of the file, by name.

    Raises PipelineError where a run would refuse or fail, except for messages that do not decode.
    """
    own = {one.name: [sample for sample in samples if one.reads(sample.topic)] for one in pipeline.sources}
    schemas = {one.name: schema_of(pipeline, one, _bodies(own[one.name])) for one in pipeline.sources}
    replaced = tables or {}
    named = tuple(one for one in pipeline.tables if one.name not in replaced)
    static = {**replaced, **load_tables(spark, replace(pipeline, tables=named))}

    def rows(messages: Mapping[str, DataFrame]) -> Iterator[tuple[Output, DataFrame]]:
        good = {
            one.name: decoded(messages[one.name], pipeline, one, schemas[one.name], bad=DROP)
            for one in pipeline.sources
        }
        results = transform(spark, pipeline, {**static, **good}, file.path.parent)
        for output in pipeline.outputs:
            yield output, prepared(output.sink, results[output.result], Target(file, pipeline, output))

    for output, stream in rows({name: _stand_in(spark) for name in own}):
        check_stream(stream, pipeline, output)
    messages = {name: _messages(spark, given) for name, given in own.items()}
    try:
        return Trial(
            {output.name: frame.toArrow() for output, frame in rows(messages)},
            [
                Undecoded(source, letter)
                for source in pipeline.sources
                for letter in _letters(pipeline, source, messages[source.name], schemas[source.name])
            ],
        )
    except PySparkException as error:
        raise PipelineError(f"[pipeline.{pipeline.name}]: {in_words(error)}") from error


def _letters(
    pipeline: Pipeline, source: Source, messages: DataFrame, schema: StructType
) -> list[dict[str, Any]]:
    if source.decode.format in UNDECODED:
        return []
    letters = dead_letters(messages, source.decode, schema, pipeline=pipeline.name, channel=source.channel())
    # Counting needs no Python process, and mostly there are none.
    return [json.loads(row.body) for row in letters.collect()] if letters.count() else []


def _bodies(samples: Sequence[Sample]) -> Bodies:
    return lambda: [sample.body for sample in samples]


def _messages(spark: SparkSession, samples: Sequence[Sample]) -> DataFrame:
    rows = [tuple(getattr(sample, name) for name in SCHEMA.names) for sample in samples]
    return spark.createDataFrame(rows, SCHEMA)


def _stand_in(spark: SparkSession) -> DataFrame:
    """A stream with the columns of the source, for Spark's checks of streams."""
    columns = (F.lit(None).cast(field.dataType).alias(field.name) for field in SCHEMA.fields)
    return spark.readStream.format("rate").load().select(*columns)
