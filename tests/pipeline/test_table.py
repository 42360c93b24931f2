"""Topics as a Delta table: its rows, its columns, a crash, and an object store."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

deltalake = pytest.importorskip("deltalake")

from nsparq.pipeline.execute.progress import State  # noqa: E402
from nsparq.pipeline.file import ready_made  # noqa: E402
from nsparq.pipeline.file.reading import parse  # noqa: E402
from nsparq.pipeline.write.direct_parquet import layout_of  # noqa: E402
from nsparq.testing import Broker  # noqa: E402
from tests.pipeline.conftest import Runs, bodies  # noqa: E402
from tests.support.s3 import run_s3  # noqa: E402
from tests.support.with_headers import publish_with_headers  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("spark"),
    pytest.mark.allow_leftovers("deltalake has threads with sockets, which stay"),
]


def text(broker: Broker, table: Path | str, checkpoint: Path, **more: Any) -> str:
    topics = ready_made.Topics(nsq={"nsqd": [broker.http_address]}, pattern="orders|clicks")
    return ready_made.table(topics, str(table), str(checkpoint), trigger="available-now", **more)


def rows(table: Path | str, storage: dict[str, str] | None = None) -> list[dict[str, Any]]:
    found = deltalake.DeltaTable(str(table), storage_options=storage).to_pyarrow_table()
    order = [("topic", "ascending"), ("offset", "ascending")]
    return found.sort_by(order).to_pylist(maps_as_pydicts="strict")  # type: ignore[no-any-return]


def test_unchanged_messages_are_the_rows_that_spark_would_have_written(
    run: Runs,
    broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    broker.publish("orders", *(b"%d" % number for number in range(500)))
    publish_with_headers(broker.http_address, "clicks", (b"\x00\xff", {"traceparent": "00-1"}))
    made = text(broker, ours, ours / "_nsparq" / "checkpoint")
    assert layout_of(parse(made).pipelines[0]) is not None
    figures = run(made)["table"]
    assert (figures.error, figures.rows, figures.rows_written, figures.lag) == ("", 501, 501, 0)
    through_spark = text(broker, theirs, tmp_path / "checkpoint", channel="other")
    through_spark = through_spark.replace("\ntrigger =", '\nsql = "SELECT * FROM input"\ntrigger =')
    assert run(through_spark)["table"].error == ""
    assert rows(ours) == rows(theirs)
    assert rows(ours)[0]["headers"] == {"traceparent": "00-1"}
    found, wanted = (deltalake.DeltaTable(str(path)).schema() for path in (ours, theirs))
    assert {one.name: one for one in found.fields} == {one.name: one for one in wanted.fields}
    # A reader that wants certain messages skips the files of others.
    table = deltalake.DeltaTable(str(ours))
    newest = max(row["offset"] for row in rows(ours))
    assert len(table.file_uris(file_pruning_predicate=f"offset > {newest}")) == 0
    assert len(table.file_uris(file_pruning_predicate=f"offset = {newest}")) == 1

    # A batch that runs again adds nothing, and the next run continues.
    before, checkpoint = rows(ours), ours / "_nsparq" / "checkpoint" / "table" / "rows"
    for path in (checkpoint / "commits").glob("*"):
        path.unlink()
    assert run(made)["table"].rows == 501
    assert rows(ours) == before
    broker.publish("orders", b"later")
    assert run(made)["table"].rows == 1
    assert [row["body"] for row in rows(ours)] == [b"\x00\xff", *(b"%d" % n for n in range(500)), b"later"]
    check_readers(ours, monkeypatch, capsys)


def check_readers(table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every example that reads a table finds the same."""
    pytest.importorskip("duckdb")
    pytest.importorskip("polars")
    directory = table.parent / "tables"
    directory.mkdir()
    (directory / "orders").symlink_to(table)
    monkeypatch.chdir(table.parent)
    # In the session of the tests.
    monkeypatch.setattr("pyspark.sql.SparkSession.stop", lambda self: None)
    examples = sorted((Path(__file__).parents[2] / "examples" / "table").glob("read_*.py"))
    assert [one.stem for one in examples] == ["read_duckdb", "read_pandas", "read_polars", "read_spark"]
    for one in examples:
        capsys.readouterr()
        runpy.run_path(str(one))
        assert capsys.readouterr().out == "502 messages, the newest is b'later'\n", one


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    pytest.importorskip("moto")
    with run_s3("lake") as storage:
        yield storage


def test_columns_of_messages_in_an_object_store(
    run: Runs, broker: Broker, s3: dict[str, str], tmp_path: Path
) -> None:
    def made(schema: str) -> str:
        options = ", ".join(f"{name} = {json.dumps(value)}" for name, value in s3.items())
        columns = {"schema": schema, "dead_letters": "orders.dead"}
        written = text(broker, "s3://lake/orders", tmp_path / "checkpoint", compact=2, **columns)
        return f"{written}storage_options = {{ {options} }}\n"

    def found(*names: str) -> list[tuple[Any, ...]]:
        table = deltalake.DeltaTable("s3://lake/orders", storage_options=s3).to_pyarrow_table()
        kept = table.sort_by([("_offset", "ascending")]).select([*names]).to_pylist()
        return [tuple(row.values()) for row in kept]

    broker.publish("orders", b'{"n": 1}', b'{"n": "one"}')
    assert run(made("n INT"))["table"].error == ""
    # A new column. Messages with another type than the table's are dead letters.
    broker.publish("orders", b'{"n": 2, "price": 1.5}', b'{"n": 3, "price": "much"}')
    assert run(made("n INT, price DOUBLE"))["table"].error == ""
    assert found("n", "price", "_topic") == [(1, None, "orders"), (2, 1.5, "orders")]
    assert [letter["error"] for letter in bodies(broker, "orders.dead")] == [
        'n: "one" is not INT',
        'price: "much" is not DOUBLE',
    ]
    # The upkeep has joined the two files.
    assert len(deltalake.DeltaTable("s3://lake/orders", storage_options=s3).file_uris()) == 1
    # The type of a column cannot change. Nothing is lost: the messages wait.
    broker.publish("orders", b'{"n": 4}')
    refused = run(made("n BIGINT, price DOUBLE"))["table"]
    assert refused.state is State.FAILED
    assert (
        "column 'n' of the table s3://lake/orders is INTEGER, and that of the rows is LONG" in refused.error
    )
    assert run(made("n INT, price DOUBLE"))["table"].error == ""
    assert found("n") == [(1,), (2,), (4,)]
