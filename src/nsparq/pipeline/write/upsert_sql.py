"""SQL that merges a staging table into a table by key, for each supported database. Needs no Spark.

In the SQL `t` is the table and `s` the staging table, which has each key once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nsparq.pipeline.write.upsert import Upsert


@dataclass(frozen=True, slots=True)
class Merge:
    """The tables and columns of a merge."""

    table: str
    staging: str
    columns: Mapping[str, str]
    """Columns of the rows, and their quoted names in the table."""
    upsert: Upsert

    @property
    def key(self) -> list[str]:
        return [self.columns[name] for name in self.upsert.key]

    @property
    def names(self) -> str:
        return ", ".join(self.columns.values())

    @property
    def values(self) -> str:
        return ", ".join(f"s.{name}" for name in self.columns.values())

    @property
    def is_same(self) -> str:
        return " AND ".join(f"t.{name} = s.{name}" for name in self.key)

    def changes(self, old: str = "", new: str = "s.") -> str:
        """Assignments for UPDATE. Empty if all columns are part of the key."""
        key = self.key
        return ", ".join(f"{old}{name} = {new}{name}" for name in self.columns.values() if name not in key)

    def is_later(self, before: str = "", new: str = "s.") -> str:
        """`before`, and the condition for a row to replace the table's. Empty if it always does."""
        condition = self.upsert.is_later(
            lambda name: f"{new}{self.columns[name]}", lambda name: f"t.{self.columns[name]}"
        )
        return condition and f" {before} ({condition})"


Statements = Callable[[Merge], list[str]]


def _merge(given: Merge) -> list[str]:
    return [_merge_statement(given, f"WHEN MATCHED{given.is_later('AND')} THEN UPDATE SET {given.changes()}")]


def _oracle(given: Merge) -> list[str]:
    update = f"WHEN MATCHED THEN UPDATE SET {given.changes()}{given.is_later('WHERE')}"
    return [_merge_statement(given, update)]


def _sql_server(given: Merge) -> list[str]:
    # Without the hint two concurrent merges can both find that a key is missing.
    (statement,) = _merge(given)
    return [statement.replace(" t USING", " WITH (HOLDLOCK) AS t USING", 1) + ";"]


def _merge_statement(given: Merge, update: str) -> str:
    """`update` is left out if all columns are part of the key."""
    matched = f" {update}" if given.changes() else ""
    return (
        f"MERGE INTO {given.table} t USING {given.staging} s ON ({given.is_same}){matched}"
        f" WHEN NOT MATCHED THEN INSERT ({given.names}) VALUES ({given.values})"
    )


def _on_conflict(given: Merge) -> list[str]:
    """Needs a unique index on the key. The database reports an error if there is none."""
    changes, is_later = given.changes(new="excluded."), given.is_later("WHERE", new="excluded.")
    action = f"DO UPDATE SET {changes}{is_later}" if changes else "DO NOTHING"
    # Without WHERE, SQLite would read ON as the condition of a join.
    rows = f"SELECT {given.names} FROM {given.staging} WHERE 1 = 1"
    key = ", ".join(given.key)
    return [f"INSERT INTO {given.table} AS t ({given.names}) {rows} ON CONFLICT ({key}) {action}"]


def _update_and_insert(given: Merge) -> list[str]:
    """Not ON DUPLICATE KEY, which uses any unique index, and without one adds rows twice."""
    changes = given.changes(old="t.")
    update = f"UPDATE {given.table} t JOIN {given.staging} s ON {given.is_same} SET {changes}"
    insert = (
        f"INSERT INTO {given.table} ({given.names}) SELECT {given.values} FROM {given.staging} s"
        f" LEFT JOIN {given.table} t ON {given.is_same} WHERE t.{given.key[0]} IS NULL"
    )
    return [update + given.is_later("WHERE"), insert] if changes else [insert]


@dataclass(frozen=True, slots=True)
class Dialect:
    """SQL that differs between databases."""

    merge: Statements
    older: tuple[int, Statements] | None = None
    """Statements for versions before this major version."""
    copy: str = "CREATE TABLE {staging} AS SELECT {names} FROM {table} WHERE 1 = 0"
    """Creates an empty table with some columns of another table."""
    is_index_qualified: bool = False
    """Whether the name of an index includes the schema."""

    def statements(self, given: Merge, version: int) -> list[str]:
        if self.older is not None and version < self.older[0]:
            return self.older[1](given)
        return self.merge(given)

    def copy_statement(self, given: Merge) -> str:
        return self.copy.format(staging=given.staging, names=given.names, table=given.table)


DIALECTS: Final[Mapping[str, Dialect]] = {
    "derby": Dialect(
        _merge,
        copy="CREATE TABLE {staging} AS SELECT {names} FROM {table} WITH NO DATA",
        is_index_qualified=True,
    ),
    "h2": Dialect(_merge),
    "mariadb": Dialect(_update_and_insert),
    "mysql": Dialect(_update_and_insert),
    "oracle": Dialect(_oracle),
    "postgresql": Dialect(_merge, older=(15, _on_conflict)),
    "sqlite": Dialect(_on_conflict),
    "sqlserver": Dialect(_sql_server, copy="SELECT {names} INTO {staging} FROM {table} WHERE 1 = 0"),
}


def dialect_name(url: str) -> str:
    """The database in a JDBC URL, supported or not."""
    return url.removeprefix("jdbc:").partition(":")[0]
