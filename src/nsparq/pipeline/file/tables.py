"""`[pipeline.NAME.tables.TABLE]`: the kinds of tables that SQL can join with, and their keys. Needs
no Spark.

`nsparq.pipeline.execute.tables` loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nsparq.pipeline.file.keys import REQUIRED, key, settings, string


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table to join with. It is not a stream."""

    name: str
    """Its name in SQL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTable(Table):
    """The keys that all tables of files have."""

    path: str = key(REQUIRED, string, "the file, or a directory of files")
    schema: str = key("", string, "columns, as in `decode`", shown="read from the files")
    options: Mapping[str, str] = key(dict, settings, "more options for Spark's reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetTable(FileTable):
    """Parquet files. Spark lists the files once, when the pipeline starts."""

    path: str = key(REQUIRED, string, "the file, or a directory of files", name="parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvTable(FileTable):
    """CSV files, by default with a header. Spark lists the files once, when the pipeline starts."""

    path: str = key(REQUIRED, string, "the file, or a directory of files", name="csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonTable(FileTable):
    """JSON files, one object in each line. Spark lists the files once, when the pipeline starts."""

    path: str = key(REQUIRED, string, "the file, or a directory of files", name="json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTable(Table):
    """A Delta table, read once, when the pipeline starts. Needs the package deltalake, and enough
    memory for the whole table."""

    path: str = key(REQUIRED, string, "the table: a directory, or a URL such as `s3://…`", name="delta")
    storage_options: Mapping[str, str] = key(
        dict, settings, "deltalake's options for an object store", shown="from the environment"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JdbcTable(Table):
    """A database table; each micro-batch queries it. Spark's class path needs its JDBC driver."""

    url: str = key(REQUIRED, string, "such as `jdbc:postgresql://host/db`", name="jdbc")
    table: str = key(REQUIRED, string, "the table, or a query in brackets with a name: `(SELECT …) AS t`")
    user: str = key("", string, "database user")
    password: str = key(
        "", string, "database password; `${PASSWORD}` takes it from the environment", is_secret=True
    )
    driver: str = key("", string, "class of the driver", shown="the usual driver for the URL")
    options: Mapping[str, str] = key(dict, settings, "more options for Spark's JDBC reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTable(Table):
    """Any format that Spark can read as a batch."""

    format: str = key(REQUIRED, string, "Spark's name of the format, such as `orc` or `iceberg`")
    schema: str = key("", string, "columns, as in `decode`", shown="from the format")
    options: Mapping[str, str] = key(dict, settings, "options of the format, such as `path`")


TABLES: Final[dict[str, type[Table]]] = {
    "parquet": ParquetTable,
    "csv": CsvTable,
    "json": JsonTable,
    "delta": DeltaTable,
    "jdbc": JdbcTable,
    "format": FormatTable,
}
