"""Loads the tables of a pipeline, for its steps to join with.

When a change becomes visible depends on the kind. Each micro-batch queries a database. Spark lists
files once, when the pipeline starts, and each micro-batch reads those files. A Delta table is read
once, when the pipeline starts: only deltalake, not Spark, knows which files of the directory belong
to the table.
"""

from __future__ import annotations

from collections.abc import Mapping

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no stubs
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from nsparq.pipeline.errors import PipelineError, in_words
from nsparq.pipeline.file.spec import Pipeline
from nsparq.pipeline.file.tables import (
    CsvTable,
    DeltaTable,
    FormatTable,
    JdbcTable,
    JsonTable,
    ParquetTable,
    Table,
)
from nsparq.pipeline.write.delta import is_installed
from nsparq.pipeline.write.jdbc import options_of


def load_tables(spark: SparkSession, pipeline: Pipeline) -> dict[str, DataFrame]:
    """The tables by name. Raises PipelineError."""
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


def _frame(table: Table, spark: SparkSession) -> DataFrame:
    match table:
        case ParquetTable():
            return _read(spark, "parquet", table.schema, {**table.options, "path": table.path})
        case CsvTable():
            # A header that differs from the schema is an error, and so is a line that does not fit.
            checks = {"header": "true", "mode": "FAILFAST", "enforceSchema": "false"}
            inferred = {} if table.schema else {"inferSchema": "true"}
            options = {**checks, **inferred, **table.options, "path": table.path}
            return _read(spark, "csv", table.schema, options)
        case JsonTable():
            options = {"mode": "FAILFAST", **table.options, "path": table.path}
            return _read(spark, "json", table.schema, options)
        case FormatTable():
            return _read(spark, table.format, table.schema, table.options)
        case JdbcTable():
            return _read(spark, "jdbc", "", {**options_of(table), "url": table.url, "dbtable": table.table})
        case DeltaTable():
            import deltalake

            found = deltalake.DeltaTable(table.path, storage_options=dict(table.storage_options) or None)
            return spark.createDataFrame(found.to_pyarrow_table())
    raise NotImplementedError(type(table).__name__)


def _read(spark: SparkSession, format: str, schema: str, options: Mapping[str, str]) -> DataFrame:
    reader = spark.read.format(format).options(**options)
    return (reader.schema(schema) if schema else reader).load()
