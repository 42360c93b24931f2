"""Tables that are no streams, for the steps of a pipeline to join with.

When a change is seen depends on the kind. Each micro-batch asks a database. Spark lists files once, when the
pipeline starts, and each micro-batch reads those. A Delta table is read once, when the pipeline starts:
deltalake knows which files of the directory count, and Spark does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no stubs
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from nsparq.pipeline.errors import PipelineError, in_words
from nsparq.pipeline.file.spec import (
    CsvTable,
    DeltaTable,
    FormatTable,
    JdbcTable,
    JsonTable,
    ParquetTable,
    Pipeline,
    Table,
)
from nsparq.pipeline.write.delta import is_installed
from nsparq.pipeline.write.jdbc import options_of

__all__ = ["load_tables"]


def load_tables(spark: SparkSession, pipeline: Pipeline) -> dict[str, DataFrame]:
    """By their names. Raises PipelineError."""
    return {table.name: _loaded(spark, pipeline, table) for table in pipeline.tables}


def _loaded(spark: SparkSession, pipeline: Pipeline, table: Table) -> DataFrame:
    place = f"[pipeline.{pipeline.name}.tables.{table.name}]"
    if isinstance(table, DeltaTable) and not is_installed():
        raise PipelineError(f"{place}: the package deltalake is missing: pip install 'nsparq[delta]'")
    try:
        return _frame(table, spark)
    except (PySparkException, Py4JError) as error:
        raise PipelineError(f"{place}: {in_words(error)}") from error
    except Exception as error:  # deltalake's errors have no class in common
        raise PipelineError(f"{place}: {error}") from error


@singledispatch
def _frame(table: Table, spark: SparkSession) -> DataFrame:
    raise NotImplementedError(type(table).__name__)


@_frame.register
def _(table: ParquetTable, spark: SparkSession) -> DataFrame:
    return _read(spark, "parquet", table.schema, {**table.options, "path": table.path})


@_frame.register
def _(table: CsvTable, spark: SparkSession) -> DataFrame:
    # A header that is not that of the schema is an error, and so is a line that does not fit.
    checks = {"header": "true", "mode": "FAILFAST", "enforceSchema": "false"}
    inferred = {} if table.schema else {"inferSchema": "true"}
    return _read(spark, "csv", table.schema, {**checks, **inferred, **table.options, "path": table.path})


@_frame.register
def _(table: JsonTable, spark: SparkSession) -> DataFrame:
    return _read(spark, "json", table.schema, {"mode": "FAILFAST", **table.options, "path": table.path})


@_frame.register
def _(table: FormatTable, spark: SparkSession) -> DataFrame:
    return _read(spark, table.format, table.schema, table.options)


@_frame.register
def _(table: JdbcTable, spark: SparkSession) -> DataFrame:
    return _read(spark, "jdbc", "", {**options_of(table), "url": table.url, "dbtable": table.table})


@_frame.register
def _(table: DeltaTable, spark: SparkSession) -> DataFrame:
    import deltalake

    found = deltalake.DeltaTable(table.path, storage_options=dict(table.storage_options) or None)
    return spark.createDataFrame(found.to_pyarrow_table())


def _read(spark: SparkSession, format: str, schema: str, options: Mapping[str, str]) -> DataFrame:
    reader = spark.read.format(format).options(**options)
    return (reader.schema(schema) if schema else reader).load()
