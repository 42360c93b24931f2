"""Database tables as sinks. Spark writes the rows; for an upsert the driver merges them into the
table.

Without a key, `sinks` appends with Spark's JDBC writer. With `batch_column` each micro-batch is one
transaction, and the numbers in the table show which batches it has.

With a key, `JdbcUpsert` takes four steps for each micro-batch, with a connection of the driver:

1. Read the last batch of this query in the table `nsparq_batches`, and write the name of a new
   staging table there. The name fences off another driver of the same query.
2. Create the staging table, with the column types of the table and a unique index on the key.
   Spark's tasks fill it. If a task runs twice, it violates the index and the batch runs again, so
   no row is there twice.
3. In one transaction, update the batch number, if the staging name is still there, and merge the
   rows.
4. Drop the staging table. After a crash the next batch drops it, by the name in `nsparq_batches`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final
from uuid import uuid4

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # it has no stubs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from nsparq.pipeline.errors import PipelineError
from nsparq.pipeline.file.sinks import Jdbc
from nsparq.pipeline.file.tables import JdbcTable
from nsparq.pipeline.write.upsert import Upsert, compute_only
from nsparq.pipeline.write.upsert_sql import DIALECTS, Merge, dialect_name
from nsparq.spark.checkpoint import CheckpointBehind, check_batch

BATCHES: Final = "nsparq_batches"
NONE: Final = "-"
"""No fingerprint, or no staging table. Not an empty string, which Oracle stores as null."""
KEY_TYPE: Final = "VARCHAR(255)"
"""Type of strings in `key` and `latest_by` of new tables. Databases cannot index long text."""

DRIVERS: Final = {
    "h2": "org.h2.Driver",
    "mariadb": "org.mariadb.jdbc.Driver",
    "mysql": "com.mysql.cj.jdbc.Driver",
    "oracle": "oracle.jdbc.OracleDriver",
    "postgresql": "org.postgresql.Driver",
    "sqlite": "org.sqlite.JDBC",
    "sqlserver": "com.microsoft.sqlserver.jdbc.SQLServerDriver",
}
"""Driver classes. Java does not find a driver in `spark.jars` by the URL."""


def options_of(table: Jdbc | JdbcTable) -> dict[str, str]:
    """Options for Spark's JDBC reader and writer."""
    driver = table.driver or DRIVERS.get(dialect_name(table.url), "")
    given = {"user": table.user, "password": table.password, "driver": driver}
    return {**table.options, **{name: value for name, value in given.items() if value}}


def last_batch(spark: SparkSession, sink: Jdbc) -> int:
    """The highest number in `batch_column`, or -1. Batches without rows do not matter."""
    try:
        table = spark.read.jdbc(sink.url, sink.table, properties=options_of(sink))
        found = table.agg(F.max(sink.batch_column).alias("last")).first()
    except Exception as error:
        if "SYNTAX_ERROR" in str(error):
            # The table does not exist yet.
            return -1
        raise
    return -1 if found is None or found["last"] is None else int(found["last"])


class Connection:
    """A connection of the driver, with Spark's class path and JDBC options. Each statement is a
    transaction unless `begin` was called. `close` rolls back an open transaction."""

    def __init__(self, spark: SparkSession, sink: Jdbc) -> None:
        jvm: Any = spark._jvm
        jdbc = jvm.org.apache.spark.sql.execution.datasources.jdbc
        options = {**options_of(sink), "url": sink.url, "dbtable": sink.table}
        self._dialect = jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(sink.url)
        settings = jdbc.JDBCOptions(jvm.PythonUtils.toScalaMap(options))
        self._connection = self._dialect.createConnectionFactory(settings).apply(-1)

    @property
    def version(self) -> int:
        return int(self._connection.getMetaData().getDatabaseMajorVersion())

    def quoted(self, name: str) -> str:
        return str(self._dialect.quoteIdentifier(name))

    def has_table(self, name: str) -> bool:
        try:
            self.first(self._dialect.getTableExistsQuery(name))
        except Py4JJavaError:
            # Databases have no common error for a missing table. Another error will come again.
            return False
        return True

    def execute(self, statement: str, *values: str | int) -> int:
        """Returns the number of changed rows."""
        with closing(self._prepare(statement, values)) as prepared:
            return int(prepared.executeUpdate())

    def first(self, statement: str, *values: str | int) -> tuple[str, ...] | None:
        with closing(self._prepare(statement, values)) as prepared:
            found = prepared.executeQuery()
            if not found.next():
                return None
            return tuple(found.getString(n + 1) for n in range(found.getMetaData().getColumnCount()))

    def _prepare(self, statement: str, values: tuple[str | int, ...]) -> Any:
        prepared = self._connection.prepareStatement(statement)
        for number, value in enumerate(values, 1):
            if isinstance(value, int):
                prepared.setLong(number, value)
            else:
                prepared.setString(number, value)
        return prepared

    def begin(self) -> None:
        self._connection.setAutoCommit(False)

    def commit(self) -> None:
        self._connection.commit()
        self._connection.setAutoCommit(True)

    def close(self) -> None:
        try:
            if not self._connection.getAutoCommit():
                self._connection.rollback()
        finally:
            self._connection.close()


class JdbcUpsert:
    """Upserts the micro-batches of one run of a query."""

    def __init__(self, sink: Jdbc, upsert: Upsert, place: str) -> None:
        self._sink, self._upsert, self._place = sink, upsert, place
        self._dialect = DIALECTS[dialect_name(sink.url)]
        self._schema = _schema_of(sink.table)
        self._batches = f"{self._schema}{BATCHES}"
        self._columns: dict[str, str] = {}

    def write(self, query: str, number: int, planned: str, batch: DataFrame) -> None:
        """Writes one micro-batch in one transaction. Raises CheckpointBehind, PipelineError."""
        with closing(Connection(batch.sparkSession, self._sink)) as database:
            self._make_tables(database, batch)
            staging = self._take(database, query, number, planned)
            if staging is None:
                compute_only(batch)
                return
            given = Merge(self._sink.table, staging, self._columns, self._upsert)
            self._stage(database, given, self._upsert.latest_rows(batch))
            self._merge(database, given, query, number, planned)
            database.execute(f"DROP TABLE {staging}")

    def _make_tables(self, database: Connection, batch: DataFrame) -> None:
        """Creates missing tables, once for each run."""
        if self._columns:
            return
        if not database.has_table(self._batches):
            database.execute(
                f"CREATE TABLE {self._batches} (query VARCHAR(64) NOT NULL PRIMARY KEY, batch NUMERIC(19) "
                "NOT NULL, planned VARCHAR(32) NOT NULL, staging VARCHAR(255) NOT NULL)"
            )
        if not database.has_table(self._sink.table):
            self._create_table(database, batch)
        self._columns = self._find_columns(database, batch)

    def _create_table(self, database: Connection, batch: DataFrame) -> None:
        short = {*self._upsert.key, *self._upsert.latest_by}
        texts = [one.name for one in batch.schema.fields if isinstance(one.dataType, StringType)]
        types = ", ".join(f"{name} {KEY_TYPE}" for name in texts if name in short)
        options = {"createTableColumnTypes": types} if types else {}
        empty = batch.sparkSession.createDataFrame([], batch.schema)
        self._write(empty, self._sink.table, {**options, **options_of(self._sink)})
        self._create_index(database, self._sink.table, [database.quoted(name) for name in self._upsert.key])

    def _create_index(self, database: Connection, table: str, columns: list[str]) -> None:
        name = f"nsparq_{uuid4().hex[:16]}"
        if self._dialect.is_index_qualified:
            name = self._schema + name
        database.execute(f"CREATE UNIQUE INDEX {name} ON {table} ({', '.join(columns)})")

    def _find_columns(self, database: Connection, batch: DataFrame) -> dict[str, str]:
        """Columns of the rows, and their names in the table. Many databases use upper case."""
        options = options_of(self._sink)
        found = batch.sparkSession.read.jdbc(self._sink.url, self._sink.table, properties=options).columns
        known = {name.lower(): name for name in found} | {name: name for name in found}
        names = {}
        for name in batch.columns:
            has = known.get(name) or known.get(name.lower())
            if has is None:
                raise PipelineError(
                    f"{self._place} jdbc: the table {self._sink.table} has no column {name!r}; it has "
                    f"{', '.join(found)}"
                )
            names[name] = database.quoted(has)
        return names

    def _take(self, database: Connection, query: str, number: int, planned: str) -> str | None:
        """Name of a new staging table. None if the table has the batch. Raises CheckpointBehind."""
        while True:
            found = database.first(
                f"SELECT batch, planned, staging FROM {self._batches} WHERE query = ?", query
            )
            if found is None:
                database.execute(f"INSERT INTO {self._batches} VALUES (?, ?, ?, ?)", query, -1, NONE, NONE)
                continue
            last, last_planned, left = found
            known = "" if last_planned == NONE else last_planned
            is_there = check_batch(f"the table {self._sink.table}", number, planned, int(last), known)
            if left != NONE and database.has_table(left):
                database.execute(f"DROP TABLE {left}")
            if is_there:
                return None
            staging = f"{self._schema}nsparq_{uuid4().hex[:16]}"
            change = f"UPDATE {self._batches} SET staging = ? WHERE query = ? AND batch = ? AND staging = ?"
            if database.execute(change, staging, query, int(last), left):
                return staging

    def _stage(self, database: Connection, given: Merge, rows: DataFrame) -> None:
        database.execute(self._dialect.copy_statement(given))
        self._create_index(database, given.staging, given.key)
        self._write(rows, given.staging, options_of(self._sink))

    def _write(self, rows: DataFrame, table: str, options: Mapping[str, str]) -> None:
        rows.write.jdbc(self._sink.url, table, mode="append", properties=dict(options))

    def _merge(self, database: Connection, given: Merge, query: str, number: int, planned: str) -> None:
        database.begin()
        change = f"UPDATE {self._batches} SET batch = ?, planned = ? WHERE query = ? AND staging = ?"
        if not database.execute(change, number, planned or NONE, query, given.staging):
            raise CheckpointBehind(
                f"batch {number} is refused: another driver of the same query writes to the table "
                f"{self._sink.table}. Run one driver only, with the newest checkpoint"
            )
        for statement in self._dialect.statements(given, database.version):
            database.execute(statement)
        database.commit()


def _schema_of(table: str) -> str:
    """The schema before the table's name: `shop.`, `"My shop".`, or nothing."""
    found = re.match(r'(?:.*\.)?(?=(?:"[^"]*"|`[^`]*`|\[[^\]]*\]|[^."`\[\]]*)$)', table)
    return found[0] if found else ""
