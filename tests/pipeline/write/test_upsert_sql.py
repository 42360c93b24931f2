"""The SQL of upserts: as text for every database, and run where Python has the database."""

from __future__ import annotations

import sqlite3

import pytest

pytest.importorskip("pyspark")

from nsparq.pipeline.write.upsert import Upsert
from nsparq.pipeline.write.upsert_sql import DIALECTS, Merge, dialect_name

ROWS = {"id": '"ID"', "n": '"N"', "at": '"AT"'}
GIVEN = Merge("shop.t", "shop.x", ROWS, Upsert(("id",), ("at",)))
PLAIN = Merge("t", "x", {"id": "`id`", "n": "`n`"}, Upsert(("id",), ()))
ONLY_KEYS = Merge("t", "x", {"id": '"id"'}, Upsert(("id",), ()))

MERGE = (
    'MERGE INTO shop.t t USING shop.x s ON (t."ID" = s."ID") '
    'WHEN MATCHED AND (s."AT" >= t."AT" OR t."AT" IS NULL) THEN UPDATE SET "N" = s."N", "AT" = s."AT" '
    'WHEN NOT MATCHED THEN INSERT ("ID", "N", "AT") VALUES (s."ID", s."N", s."AT")'
)
CONFLICT = (
    'INSERT INTO shop.t AS t ("ID", "N", "AT") SELECT "ID", "N", "AT" FROM shop.x WHERE 1 = 1 '
    'ON CONFLICT ("ID") DO UPDATE SET "N" = excluded."N", "AT" = excluded."AT" '
    'WHERE (excluded."AT" >= t."AT" OR t."AT" IS NULL)'
)


@pytest.mark.parametrize(
    ("name", "version", "given", "expected"),
    [
        ("derby", 10, GIVEN, [MERGE]),
        ("h2", 2, GIVEN, [MERGE]),
        ("postgresql", 15, GIVEN, [MERGE]),
        ("postgresql", 14, GIVEN, [CONFLICT]),
        ("sqlite", 3, GIVEN, [CONFLICT]),
        ("sqlserver", 16, GIVEN, [MERGE.replace("shop.t t", "shop.t WITH (HOLDLOCK) AS t") + ";"]),
        (
            "oracle",
            19,
            GIVEN,
            [
                MERGE.replace('AND (s."AT" >= t."AT" OR t."AT" IS NULL) ', "").replace(
                    " WHEN NOT", ' WHERE (s."AT" >= t."AT" OR t."AT" IS NULL) WHEN NOT'
                )
            ],
        ),
        (
            "mysql",
            8,
            PLAIN,
            [
                "UPDATE t t JOIN x s ON t.`id` = s.`id` SET t.`n` = s.`n`",
                (
                    "INSERT INTO t (`id`, `n`) SELECT s.`id`, s.`n` FROM x s "
                    "LEFT JOIN t t ON t.`id` = s.`id` WHERE t.`id` IS NULL"
                ),
            ],
        ),
        (
            "postgresql",
            15,
            ONLY_KEYS,
            [
                (
                    'MERGE INTO t t USING x s ON (t."id" = s."id") '
                    'WHEN NOT MATCHED THEN INSERT ("id") VALUES (s."id")'
                )
            ],
        ),
    ],
)  # fmt: skip
def test_each_database_gets_its_own_sql(name: str, version: int, given: Merge, expected: list[str]) -> None:
    assert DIALECTS[name].statements(given, version) == expected


def test_newer_rows_replace_older_ones_and_new_keys_are_added() -> None:
    """In SQLite, whose SQL is that of PostgreSQL before version 15."""
    given = Merge("t", "x", ROWS, Upsert(("id",), ("at",)))
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE t (id PRIMARY KEY, n, at)")
    database.executemany("INSERT INTO t VALUES (?, ?, ?)", [(1, "a", 5), (2, "b", 5), (3, "c", None)])
    database.execute(DIALECTS["sqlite"].copy_statement(given))
    rows = [(1, "A", 4), (2, "B", 5), (3, "C", None), (4, "D", None)]
    database.executemany("INSERT INTO x VALUES (?, ?, ?)", rows)
    for statement in DIALECTS["sqlite"].statements(given, 3):
        database.execute(statement)
    found = database.execute("SELECT id, n, at FROM t ORDER BY id").fetchall()
    database.execute("CREATE TABLE keys (id PRIMARY KEY)")
    for statement in DIALECTS["sqlite"].statements(Merge("keys", "x", {"id": "id"}, Upsert(("id",), ())), 3):
        database.execute(statement)
        database.execute(statement)
    keys = database.execute("SELECT count(*) FROM keys").fetchall()
    database.close()
    assert found == [(1, "a", 5), (2, "B", 5), (3, "C", None), (4, "D", None)]
    assert keys == [(4,)]


@pytest.mark.parametrize(
    ("url", "expected"),
    [("jdbc:postgresql://h/d", "postgresql"), ("jdbc:sqlserver://h;x=y", "sqlserver"), ("jdbc:x", "x")],
)
def test_the_database_is_known_by_the_url(url: str, expected: str) -> None:
    assert dialect_name(url) == expected
