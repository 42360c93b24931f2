"""Delta tables: changed columns, repeated batches, upserts, and an object store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
deltalake = pytest.importorskip("deltalake")

from pyspark.sql.types import IntegerType, StructType  # noqa: E402

from nsparq.pipeline.errors import PipelineError  # noqa: E402
from nsparq.pipeline.execute.progress import State  # noqa: E402
from nsparq.pipeline.write.delta import DeltaFiles  # noqa: E402
from nsparq.pipeline.write.upsert import Upsert  # noqa: E402
from nsparq.spark.checkpoint import CheckpointBehind  # noqa: E402
from nsparq.testing import Broker  # noqa: E402
from tests.pipeline.conftest import Runs  # noqa: E402
from tests.support.s3 import run_s3  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.allow_leftovers("deltalake has threads with sockets, which stay")

QUERY = "0f0f0f0f-aaaa"


def columns_of(text: str) -> StructType:
    """`n INTEGER NOT NULL, item STRING`, without a session."""
    found = StructType()
    for one in text.split(", "):
        name, kind, *more = one.split(" ")
        found.add(name, kind.lower(), not more)
    return found


def add(table: DeltaFiles, batch: int, schema: str, planned: str = "a0", **columns: list[Any]) -> None:
    """Writes and commits one batch with these columns."""
    from pyspark.sql.pandas.types import to_arrow_schema

    wanted = columns_of(schema)
    rows = pa.RecordBatch.from_pydict(columns, to_arrow_schema(wanted, timezone="UTC"))
    table.commit(QUERY, batch, table.write(iter([rows]), QUERY, batch), wanted, planned.rjust(15, "0"))


def found(path: Path | str, storage: dict[str, str] | None = None) -> list[dict[str, Any]]:
    table = deltalake.DeltaTable(str(path), storage_options=storage)
    return sorted(table.to_pyarrow_table().to_pylist(), key=lambda row: row["n"])


def test_a_new_column_is_added_and_one_that_is_missing_is_null(tmp_path: Path) -> None:
    table = DeltaFiles(str(tmp_path), ())
    add(table, 0, "n INTEGER", n=[1])
    add(table, 1, "n INTEGER, item STRING", n=[2], item=["tea"])
    add(table, 2, "n INTEGER", n=[3])
    assert found(tmp_path) == [{"n": 1, "item": None}, {"n": 2, "item": "tea"}, {"n": 3, "item": None}]


@pytest.mark.parametrize(
    ("schema", "columns", "reason"),
    [
        ("n STRING", {"n": ["1"]}, "column 'n' of the table .* is INTEGER, and that of the rows is STRING"),
        ("n LONG", {"n": [1]}, "is INTEGER, and that of the rows is LONG"),
        (
            "n INTEGER, ITEM STRING",
            {"n": [1], "ITEM": ["x"]},
            "has a column 'item', and the rows have 'ITEM'",
        ),
    ],
)
def test_rows_that_do_not_fit_the_table_are_refused_before_a_commit(
    tmp_path: Path, schema: str, columns: dict[str, list[Any]], reason: str
) -> None:
    table = DeltaFiles(str(tmp_path), ())
    add(table, 0, "n INTEGER, item STRING", n=[1], item=["tea"])
    with pytest.raises(PipelineError, match=reason):
        table.check(columns_of(schema))
    with pytest.raises(PipelineError, match=reason):
        add(table, 1, schema, **columns)
    assert found(tmp_path) == [{"n": 1, "item": "tea"}]
    assert deltalake.DeltaTable(str(tmp_path)).version() == 1


def test_a_column_that_is_not_null_stays_so(tmp_path: Path) -> None:
    field = pa.field("n", pa.int32(), nullable=False)
    deltalake.DeltaTable.create(str(tmp_path), pa.schema([field]))
    table = DeltaFiles(str(tmp_path), ())
    for schema in ("n INTEGER", "m INTEGER"):
        with pytest.raises(PipelineError, match="'n' .* is NOT NULL, but the rows may have null there"):
            table.check(columns_of(schema))
    add(table, 0, "n INTEGER NOT NULL", n=[1])
    assert found(tmp_path) == [{"n": 1}]


@pytest.mark.parametrize("days", [-719_163, 2_932_897, 2**31 - 1])
def test_a_date_with_which_the_table_could_not_be_read_is_refused(tmp_path: Path, days: int) -> None:
    table, schema = DeltaFiles(str(tmp_path), ("day",)), columns_of("n INTEGER, day DATE")
    add(table, 0, "n INTEGER, day DATE", n=[1, 2], day=[date.min, date.max])
    column = pa.array([None, days], pa.int32()).cast(pa.date32())
    rows = pa.RecordBatch.from_arrays([pa.array([3, 4], pa.int32()), column], ["n", "day"])
    with pytest.raises(PipelineError, match="the years 1 to 9999 as partitions, and the column 'day' has"):
        table.write(iter([rows]), QUERY, 1)
    by_number = Upsert(("n",), ())
    with pytest.raises(PipelineError, match="Replace such dates in SQL"):
        table.merge(QUERY, 1, pa.Table.from_batches([rows]), schema, by_number)
    assert [row["n"] for row in found(tmp_path)] == [1, 2]


def test_an_empty_text_is_null_as_a_partition(tmp_path: Path) -> None:
    table = DeltaFiles(str(tmp_path), ("item", "day"))
    day = date(2026, 11, 16)
    add(
        table,
        0,
        "n INTEGER, item STRING, day DATE",
        n=[1, 2, 3],
        item=["", None, "a/b %"],
        day=[day, None, day],
    )
    assert found(tmp_path) == [
        {"n": 1, "item": None, "day": day},
        {"n": 2, "item": None, "day": None},
        {"n": 3, "item": "a/b %", "day": day},
    ]
    with pytest.raises(PipelineError, match="is partitioned by .*'day'.*, and partition_by is"):
        DeltaFiles(str(tmp_path), ("item",)).check(columns_of("n INTEGER"))


def test_a_batch_is_added_once_and_a_replanned_one_is_refused(tmp_path: Path) -> None:
    table = DeltaFiles(str(tmp_path), ())
    add(table, 0, "n INTEGER", "a0", n=[1])
    add(table, 0, "n INTEGER", "a0", n=[1])
    with pytest.raises(CheckpointBehind, match="has another batch 0 of the same query"):
        add(table, 0, "n INTEGER", "b0", n=[2])
    add(table, 1, "n INTEGER", "a1", n=[2])
    with pytest.raises(CheckpointBehind, match="has batches up to 1"):
        add(table, 0, "n INTEGER", "a0", n=[1])
    with pytest.raises(CheckpointBehind):
        table.commit(QUERY, 0, [], columns_of("n INTEGER"), "a0".rjust(15, "0"))
    assert found(tmp_path) == [{"n": 1}, {"n": 2}]


def test_only_one_of_two_drivers_adds_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reads the table and stops; the second adds the batch; the first continues."""
    first, second = DeltaFiles(str(tmp_path), ()), DeltaFiles(str(tmp_path), ())
    add(first, 0, "n INTEGER", "a0", n=[1])
    for planned, refused in (("a1", False), ("b2", True)):
        batch = int(planned[1])
        opened = first._open()
        monkeypatch.setattr(first, "_open", lambda opened=opened: opened)
        add(second, batch, "n INTEGER", f"a{batch}", n=[batch + 1])
        if refused:
            with pytest.raises(CheckpointBehind):
                add(first, batch, "n INTEGER", planned, n=[9])
        else:
            add(first, batch, "n INTEGER", planned, n=[9])
        monkeypatch.undo()
    assert found(tmp_path) == [{"n": 1}, {"n": 2}, {"n": 3}]


# upserts


def merge(table: DeltaFiles, batch: int, planned: str = "a0", **columns: list[Any]) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    wanted = columns_of("n INTEGER, item STRING, at INTEGER" + (", new STRING" if "new" in columns else ""))
    rows = pa.Table.from_pydict(columns, to_arrow_schema(wanted, timezone="UTC"))
    upsert = Upsert(("n",), ("at",))
    table.merge(QUERY, batch, rows, wanted, upsert, planned.rjust(15, "0"))


def test_a_row_replaces_the_row_of_its_key_unless_it_is_older(tmp_path: Path) -> None:
    table = DeltaFiles(str(tmp_path), ("item",))
    merge(table, 0, n=[1, 2, 3, 4], item=["tea", "tea", "", "milk"], at=[5, 5, 5, None])
    assert not table.has(QUERY, 1) and table.has(QUERY, 0)
    # The last of them moves to another partition.
    merge(table, 1, n=[1, 2, 3, 4], item=["tea"] * 4, at=[4, 5, 6, 1], new=["a", "b", "c", "d"])
    merge(table, 2, n=[], item=[], at=[])
    assert found(tmp_path) == [
        {"n": 1, "item": "tea", "at": 5, "new": None},
        {"n": 2, "item": "tea", "at": 5, "new": "b"},
        {"n": 3, "item": "tea", "at": 6, "new": "c"},
        {"n": 4, "item": "tea", "at": 1, "new": "d"},
    ]


def test_columns_of_any_name_are_merged(tmp_path: Path) -> None:
    table, name = DeltaFiles(str(tmp_path), ()), 'a`b.c"d e'
    schema = StructType().add("n", IntegerType()).add(name, IntegerType())
    for batch in range(2):
        rows = pa.table({"n": pa.array([1], pa.int32()), name: pa.array([batch], pa.int32())})
        table.merge(QUERY, batch, rows, schema, Upsert(("n",), ()))
    assert found(tmp_path) == [{"n": 1, name: 1}]


def test_a_batch_is_merged_once_and_a_replanned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, second = DeltaFiles(str(tmp_path), ()), DeltaFiles(str(tmp_path), ())
    merge(table, 0, n=[1], item=["tea"], at=[1])
    opened = table._open()
    monkeypatch.setattr(table, "_open", lambda: opened)
    # The first driver has read the table and stops. The second merges the batch.
    merge(second, 1, "a1", n=[1], item=["milk"], at=[2])
    merge(table, 1, "a1", n=[1], item=["twice"], at=[2])
    with pytest.raises(CheckpointBehind, match="has another batch 1 of the same query"):
        merge(table, 1, "b1", n=[2], item=["other"], at=[2])
    monkeypatch.undo()
    with pytest.raises(CheckpointBehind, match="has batches up to 1"):
        merge(table, 0, n=[1], item=["tea"], at=[9])
    assert found(tmp_path) == [{"n": 1, "item": "milk", "at": 2}]


# Spark, and an object store


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    pytest.importorskip("moto")
    with run_s3("lake") as storage:
        yield storage


def test_a_table_in_an_object_store_follows_the_pipeline(
    s3: dict[str, str], run: Runs, broker: Broker, spark: SparkSession
) -> None:
    def text(sql: str) -> str:
        options = ", ".join(f"{name} = {json.dumps(value)}" for name, value in s3.items())
        return f"""
[pipeline.lake]
source = "orders"
decode = {{ format = "json", schema = "n INT, item STRING, price DOUBLE" }}
sql = "SELECT {sql} FROM input"
trigger = "available-now"
[pipeline.lake.sink]
delta = "s3://lake/orders"
partition_by = ["item"]
storage_options = {{ {options} }}
"""

    broker.publish("orders", b'{"n": 1, "item": ""}', b'{"n": 2, "item": "tea"}')
    assert run(text("n, item"))["lake"].error == ""
    broker.publish("orders", b'{"n": 3, "item": "tea", "price": 1.5}')
    assert run(text("n, item, price"))["lake"].error == ""
    broker.publish("orders", b'{"n": 4, "item": "tea", "price": 1.5}')
    refused = run(text("n, item, CAST(price AS STRING) AS price"))["lake"]
    assert refused.state is State.FAILED
    assert "column 'price' of the table s3://lake/orders is DOUBLE" in refused.error
    assert found("s3://lake/orders", s3) == [
        {"n": 1, "item": None, "price": None},
        {"n": 2, "item": "tea", "price": None},
        {"n": 3, "item": "tea", "price": 1.5},
    ]
