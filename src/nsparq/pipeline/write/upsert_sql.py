"""The SQL that merges a staging table into another one by key, for each database that knows how.

`t` is the table, `s` the staging table, which has each key once. Needs no Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from nsparq.pipeline.write.upsert import Upsert

__all__ = ["DIALECTS", "Dialect", "Merge", "dialect_name"]


@dataclass(frozen=True, slots=True)
class Merge:
    """What is to be merged."""

    table: str
    staging: str
    columns: Mapping[str, str]
    """Of the rows, and what the table calls them, quoted."""
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
        """Empty if all columns are part of the key."""
        key = self.key
        return ", ".join(f"{old}{name} = {new}{name}" for name in self.columns.values() if name not in key)

    def is_later(self, before: str = "", new: str = "s.") -> str:
        """The condition for a row to replace that of the table, behind a word; empty if each does."""
        condition = self.upsert.is_later(
            lambda name: f"{new}{self.columns[name]}", lambda name: f"t.{self.columns[name]}"
        )
        return condition and f" {before} ({condition})"


Statements = Callable[[Merge], list[str]]


def _merge(given: Merge) -> list[str]:
    changes = given.changes()
    matched = f" WHEN MATCHED{given.is_later('AND')} THEN UPDATE SET {changes}" if changes else ""
    return [_merge_statement(given, matched)]


def _oracle(given: Merge) -> list[str]:
    changes = given.changes()
    matched = f" WHEN MATCHED THEN UPDATE SET {changes}{given.is_later('WHERE')}" if changes else ""
    return [_merge_statement(given, matched)]


def _sql_server(given: Merge) -> list[str]:
    # Without the hint two merges at a time can both find that a key is missing.
    (statement,) = _merge(given)
    return [statement.replace(" t USING", " WITH (HOLDLOCK) AS t USING", 1) + ";"]


def _merge_statement(given: Merge, matched: str) -> str:
    return (
        f"MERGE INTO {given.table} t USING {given.staging} s ON ({given.is_same}){matched}"
        f" WHEN NOT MATCHED THEN INSERT ({given.names}) VALUES ({given.values})"
    )


def _on_conflict(given: Merge) -> list[str]:
    """Needs a unique index on the key; the database says so if there is none."""
    changes, is_later = given.changes(new="excluded."), given.is_later("WHERE", new="excluded.")
    action = f"DO UPDATE SET {changes}{is_later}" if changes else "DO NOTHING"
    # Without a WHERE, SQLite would take ON for the beginning of a join's condition.
    rows = f"SELECT {given.names} FROM {given.staging} WHERE 1 = 1"
    key = ", ".join(given.key)
    return [f"INSERT INTO {given.table} AS t ({given.names}) {rows} ON CONFLICT ({key}) {action}"]


def _update_and_insert(given: Merge) -> list[str]:
    """Not ON DUPLICATE KEY: that goes by any unique index, and adds rows twice to a table without one."""
    changes = given.changes(old="t.")
    update = f"UPDATE {given.table} t JOIN {given.staging} s ON {given.is_same} SET {changes}"
    insert = (
        f"INSERT INTO {given.table} ({given.names}) SELECT {given.values} FROM {given.staging} s"
        f" LEFT JOIN {given.table} t ON {given.is_same} WHERE t.{given.key[0]} IS NULL"
    )
    return [update + given.is_later("WHERE"), insert] if changes else [insert]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a database says what SQL has no common words for."""

    merge: Statements
    older: tuple[int, Statements] | None = None
    """Before this major version it is said so."""
    copy: str = "CREATE TABLE {staging} AS SELECT {names} FROM {table} WHERE 1 = 0"
    """A table without rows, with some columns of another one."""
    is_index_qualified: bool = False
    """The name of an index begins with its schema."""

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
    """The database of a JDBC URL, whether it is known or not."""
    return url.removeprefix("jdbc:").partition(":")[0]
