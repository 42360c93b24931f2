"""Files of a micro-batch are added to the table once, despite crashes, and can be joined."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

import pyarrow.dataset as ds  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from nsparq.pipeline.errors import PipelineError  # noqa: E402
from nsparq.pipeline.write import compact, parquet_table, part_files  # noqa: E402
from nsparq.pipeline.write.compact import CannotExchange  # noqa: E402
from nsparq.pipeline.write.file_sink import ParquetFiles  # noqa: E402
from nsparq.pipeline.write.parquet_table import ParquetDirectory  # noqa: E402
from nsparq.pipeline.write.part_files import Part, PartWriter, directory_of, split, write_parts  # noqa: E402
from nsparq.spark.checkpoint import CheckpointBehind  # noqa: E402

QUERY = "0f0f0f0f-aaaa"


def rows(*numbers: int, topic: str = "a") -> Any:
    return pa.RecordBatch.from_pydict({"n": list(numbers), "topic": [topic] * len(numbers)})


def written(table: Path, batch: int, *batches: Any) -> list[Part]:
    return ParquetFiles(table, ("topic",), "zstd", 0).write(iter(batches), QUERY, batch)


def numbers(table: Path) -> list[int]:
    """As a reader of the directory sees it."""
    found = ds.dataset(str(table), format="parquet")
    return sorted(found.to_table(columns=["n"]).column("n").to_pylist()) if "n" in found.schema.names else []


# rows into files


def test_rows_are_split_by_partition_values() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "n": [1, 2, 3, 4, 5],
            "topic": ["a", "b/c", "a", None, ""],
            "day": [date(2026, 1, 1), date(2026, 1, 2), date(2026, 1, 1), None, date(2026, 1, 1)],
        }
    )
    found = {
        directory_of(values): one.column("n").to_pylist() for values, one in split(batch, ("topic", "day"))
    }
    assert found == {
        "topic=a/day=2026-01-01": [1, 3],
        "topic=b%2Fc/day=2026-01-02": [2],
        "topic=__HIVE_DEFAULT_PARTITION__/day=__HIVE_DEFAULT_PARTITION__": [4],
        # As Spark writes an empty string.
        "topic=__HIVE_DEFAULT_PARTITION__/day=2026-01-01": [5],
    }
    ((values, whole),) = split(batch, ())
    assert (directory_of(values), whole.num_rows) == ("", 5)
    assert list(split(batch.slice(0, 0), ("topic",))) == []


@pytest.mark.parametrize(
    ("number", "kind", "directory"),
    [
        (2_932_897, pa.date32(), "+10000-01-01"),
        (-719_163, pa.date32(), "0000-12-31"),
        (-719_529, pa.date32(), "-0001-12-31"),
        (253_402_300_800_000_000, pa.timestamp("us", "UTC"), "+10000-01-01 00%3A00%3A00.000000+00%3A00"),
        (253_402_300_800_000_000, pa.timestamp("us"), "+10000-01-01 00%3A00%3A00.000000"),
    ],
)
def test_years_that_python_does_not_know_are_written(
    tmp_path: Path, number: int, kind: pa.DataType, directory: str
) -> None:
    column = pa.array([number], pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
    batch = pa.RecordBatch.from_arrays([pa.array([1]), column, column], ["n", "at", "day"])
    table = ParquetDirectory(tmp_path)
    (part,) = write_parts(PartWriter(table.creator(QUERY, 0), "zstd"), split(batch, ("day",)))
    assert directory_of(part.values) == f"day={directory}"
    # Readers skip files by this range, so there is none for the column.
    assert json.loads(part.stats) == {"numRecords": 1, "minValues": {"n": 1}, "maxValues": {"n": 1}}
    table.commit(QUERY, 0, [part])
    (file,) = tmp_path.glob("*/*.parquet")
    assert pq.read_table(str(file), partitioning=None).column("at").chunk(0) == column


def test_small_batches_become_large_row_groups(tmp_path: Path) -> None:
    writer = PartWriter(ParquetDirectory(tmp_path).creator(QUERY, 0), "zstd")
    for start in range(0, 3000, 10):
        writer.write((), pa.RecordBatch.from_pydict({"n": list(range(start, start + 10))}))
    (part,) = writer.finish()
    metadata = pq.read_metadata(part.path)
    assert (metadata.num_rows, metadata.num_row_groups, part.rows) == (3000, 1, 3000)
    assert part.size == os.path.getsize(part.path)


def test_the_number_of_open_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "MAX_OPEN", 2)
    writer = PartWriter(ParquetDirectory(tmp_path).creator(QUERY, 0), "zstd")
    for number, topic in enumerate("abcabc"):
        writer.write((("topic", topic),), rows(number))
    found = writer.finish()
    assert sorted(part.values[0][1] for part in found) == ["a", "a", "b", "b", "c", "c"]
    assert sum(part.rows for part in found) == 6


def test_a_task_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def failing() -> Iterator[Any]:
        yield rows(1)
        raise OSError("the connection broke")

    with pytest.raises(OSError, match="broke"):
        ParquetFiles(tmp_path, ("topic",), "zstd", 0).write(failing(), QUERY, 0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# committing


def test_nothing_is_seen_before_the_commit_and_everything_after(tmp_path: Path) -> None:
    made = written(tmp_path, 0, rows(1, 2), rows(3, topic="b"))
    assert numbers(tmp_path) == []
    changed = ParquetDirectory(tmp_path).commit(QUERY, 0, made)
    assert numbers(tmp_path) == [1, 2, 3]
    assert changed == [tmp_path / "topic=a", tmp_path / "topic=b"]
    assert sorted(path.name for path in tmp_path.rglob("*.parquet")) == [
        "0000000000-0f0f0f0f-0000.parquet",
        "0000000000-0f0f0f0f-0001.parquet",
    ]


def test_a_batch_that_is_run_again_changes_nothing(tmp_path: Path) -> None:
    table = ParquetDirectory(tmp_path)
    table.commit(QUERY, 0, written(tmp_path, 0, rows(1, 2)))
    # The second run may split the rows into files in another way.
    table.commit(QUERY, 0, written(tmp_path, 0, rows(2), rows(1, topic="b")))
    assert numbers(tmp_path) == [1, 2]
    table.commit(QUERY, 1, written(tmp_path, 1, rows(3)))
    assert numbers(tmp_path) == [1, 2, 3]
    assert not list(tmp_path.rglob("*.part"))


def test_a_replanned_batch_is_refused(tmp_path: Path) -> None:
    """The checkpoint is an older copy, or a stopped driver continues beside its successor."""
    table = ParquetDirectory(tmp_path)
    for batch in range(3):
        table.commit(QUERY, batch, written(tmp_path, batch, rows(batch)), f"plan {batch}")
    for batch, plan in ((2, "another"), (1, "plan 1"), (0, "")):
        with pytest.raises(CheckpointBehind, match=f"batch {batch} is refused"):
            table.commit(QUERY, batch, written(tmp_path, batch, rows(7)), plan)
        with pytest.raises(CheckpointBehind):
            # A batch without rows is another batch too.
            table.commit(QUERY, batch, [], plan)
    table.commit(QUERY, 2, written(tmp_path, 2, rows(2)), "plan 2")
    assert numbers(tmp_path) == [0, 1, 2]
    # Batches without a fingerprint, of older versions, are compared by number only.
    done = tmp_path / "_nsparq" / "commits" / QUERY / "2.done"
    done.write_text(json.dumps({"moves": json.loads(done.read_text())["moves"]}))
    table.commit(QUERY, 2, written(tmp_path, 2, rows(7)), "plan 2")
    assert numbers(tmp_path) == [0, 1, 2]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(12))
def test_after_a_kill_at_any_moment_of_a_commit_every_row_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Dies before the nth change of the file system, and runs again as in Spark."""
    table = ParquetDirectory(tmp_path)
    table.commit(QUERY, 6, written(tmp_path, 6, rows(0)))
    made = written(tmp_path, 7, rows(1, 2), rows(3, topic="b"), rows(4, topic="c"))
    left = moment
    with monkeypatch.context() as patch:
        for name in ("rename", "fsync"):
            real = getattr(os, name)

            def counted(*arguments: Any, real: Any = real) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return real(*arguments)

            patch.setattr(parquet_table.os, name, counted)
        try:
            table.commit(QUERY, 7, made)
        except Killed:
            pass
    table.abort(QUERY, 7, made)  # which Spark may still do, or not
    assert set(numbers(tmp_path)) <= {0, 1, 2, 3, 4}
    table.commit(QUERY, 7, written(tmp_path, 7, rows(4, 3, 2, 1)))
    assert numbers(tmp_path) == [0, 1, 2, 3, 4]
    table.commit(QUERY, 8, written(tmp_path, 8, rows(5)))
    assert numbers(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_files_that_the_driver_does_not_see_are_an_error(tmp_path: Path) -> None:
    lost = Part(str(tmp_path / "on another machine"), (), 1, 1)
    with pytest.raises(PipelineError, match="must be on a file system that driver and executors share"):
        ParquetDirectory(tmp_path).commit(QUERY, 0, [lost])


def test_a_partition_with_too_long_a_name_is_refused_before_it_is_recorded(tmp_path: Path) -> None:
    table = ParquetDirectory(tmp_path)
    with pytest.raises(PipelineError, match="longer than the file system allows"):
        table.commit(QUERY, 0, written(tmp_path, 0, rows(1, topic="x" * 300)))
    # The SQL was changed, and the batch runs again.
    table.commit(QUERY, 0, written(tmp_path, 0, rows(1, topic="x" * 30)))
    assert numbers(tmp_path) == [1]


def test_an_aborted_batch_leaves_nothing(tmp_path: Path) -> None:
    made = written(tmp_path, 0, rows(1))
    ParquetDirectory(tmp_path).abort(QUERY, 0, made)
    assert not list(tmp_path.rglob("*.part"))


def test_two_queries_may_write_to_one_table(tmp_path: Path) -> None:
    table = ParquetDirectory(tmp_path)
    for query in ("query-1", "query-2"):
        made = ParquetFiles(tmp_path, ("topic",), "zstd", 0).write(iter([rows(1)]), query, 0)
        table.commit(query, 0, made)
    assert numbers(tmp_path) == [1, 1]


# the layout


def test_the_columns_of_an_older_table_are_taken_from_its_directories(tmp_path: Path) -> None:
    table = ParquetDirectory(tmp_path)
    assert table.layout() is None
    table.commit(QUERY, 0, written(tmp_path, 0, rows(1)))
    record = tmp_path / "_nsparq" / "table.json"
    assert json.loads(record.read_text()) == {"format": 1, "partition_by": ["topic"]}
    record.unlink()
    assert table.layout() == ("topic",)
    for columns, shown in (((), "nothing"), (("topic", "n"), r"\['topic', 'n'\]")):
        otherwise = ParquetFiles(tmp_path, columns, "zstd", 0).write(iter([rows(2)]), QUERY, 1)
        with pytest.raises(PipelineError, match=rf"partitioned by \['topic'\], and partition_by is {shown}"):
            table.commit(QUERY, 1, otherwise)
    table.commit(QUERY, 1, written(tmp_path, 1, rows(2)))
    assert record.exists()
    assert numbers(tmp_path) == [1, 2]


def test_a_table_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    table = ParquetDirectory(tmp_path)
    table.commit(QUERY, 0, written(tmp_path, 0, rows(1)))
    (tmp_path / "_nsparq" / "table.json").write_text('{"format": 2, "partition_by": ["topic"]}')
    with pytest.raises(PipelineError, match="has format 2, and this version of nsparq reads formats up to 1"):
        table.commit(QUERY, 1, written(tmp_path, 1, rows(2)))
    with pytest.raises(PipelineError, match="has format 2"):
        compact.compact(table)


# joining


def fill(table: Path, *batches: Any, first: int = 0) -> None:
    for number, batch in enumerate(batches, first):
        ParquetDirectory(table).commit(QUERY, number, written(table, number, batch))


def test_small_files_are_joined(tmp_path: Path) -> None:
    fill(tmp_path, *(rows(number) for number in range(5)), rows(9, topic="b"))
    (joined,) = compact.compact(ParquetDirectory(tmp_path))
    assert (joined.directory, joined.files, joined.rows) == (tmp_path / "topic=a", 5, 5)
    assert numbers(tmp_path) == [0, 1, 2, 3, 4, 9]
    assert len(list((tmp_path / "topic=a").iterdir())) == 1
    assert compact.compact(ParquetDirectory(tmp_path)) == []


def test_partitions_whose_column_begins_with_an_underscore_are_joined(tmp_path: Path) -> None:
    table = ParquetDirectory(tmp_path)
    for batch in range(3):
        sink = ParquetFiles(tmp_path, ("_topic",), "zstd", 0)
        renamed = rows(batch).rename_columns(["n", "_topic"])
        table.commit(QUERY, batch, sink.write(iter([renamed]), QUERY, batch))
    (joined,) = compact.compact(table)
    assert (joined.directory, joined.files, joined.rows) == (tmp_path / "_topic=a", 3, 3)


def test_a_directory_with_subdirectories_is_never_replaced(tmp_path: Path) -> None:
    """An older table whose partition_by was changed, and a table with foreign files."""
    fill(tmp_path, *(rows(number) for number in range(3)))
    deeper = tmp_path / "topic=a" / "date=2026-11-15"
    deeper.mkdir()
    pq.write_table(pa.table({"n": [7]}), deeper / "x.parquet")
    with pytest.raises(PipelineError, match="date=2026-11-15 contains files"):
        compact.compact(ParquetDirectory(tmp_path))
    (tmp_path / "_nsparq" / "table.json").unlink()
    with pytest.raises(PipelineError, match="files partitioned by .* and files partitioned by"):
        compact.compact(ParquetDirectory(tmp_path))
    assert numbers(tmp_path) == [0, 1, 2, 7]
    (deeper / "x.parquet").rename(deeper / "notes.txt")
    with pytest.raises(CannotExchange, match="date=2026-11-15 is not a file"):
        compact.compact(ParquetDirectory(tmp_path))
    assert numbers(tmp_path) == [0, 1, 2, 7]


def test_a_reader_with_the_old_directory_open_finds_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, *(rows(number) for number in range(5)))
    before = sorted(os.listdir(tmp_path / "topic=a"))
    opened = os.open(tmp_path / "topic=a", os.O_RDONLY)
    try:
        assert compact.compact(ParquetDirectory(tmp_path))
        assert sorted(os.listdir(opened)) == before
        monkeypatch.setattr(compact, "KEEP_REPLACED_S", -1)
        compact.compact(ParquetDirectory(tmp_path))
        assert not list((tmp_path / "_nsparq").glob("scratch/*"))
    finally:
        os.close(opened)


def test_large_files_and_files_of_other_schemas_are_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "LARGE", 5000)
    fill(tmp_path, rows(1), rows(2))
    pq.write_table(pa.table({"n": [3], "more": ["x"]}), tmp_path / "topic=a" / "other.parquet")
    pq.write_table(pa.table({"n": list(range(100, 5000))}), tmp_path / "topic=a" / "large.parquet")
    (joined,) = compact.compact(ParquetDirectory(tmp_path))
    assert joined.files == 2
    names = {path.name.partition("-")[0] for path in (tmp_path / "topic=a").iterdir()}
    assert names == {"joined", "other.parquet", "large.parquet"}


def test_files_are_joined_with_those_of_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "SMALLEST", 2000)
    fill(tmp_path, *(rows(number) for number in range(3)))
    pq.write_table(
        pa.table({"n": list(range(100, 3000))}, rows(1).schema.remove(1)),
        tmp_path / "topic=a" / "big.parquet",
    )
    (joined,) = compact.compact(ParquetDirectory(tmp_path), fan_in=3)
    assert joined.files == 3
    assert (tmp_path / "topic=a" / "big.parquet").exists()


def test_a_batch_run_again_after_its_files_were_joined_changes_nothing(tmp_path: Path) -> None:
    sink = ParquetFiles(tmp_path, ("topic",), "zstd", 2)
    for number in range(2):
        sink.commit(QUERY, number, sink.write(iter([rows(number)]), QUERY, number), None)  # type: ignore[arg-type]
    assert len(list((tmp_path / "topic=a").iterdir())) == 1
    sink.commit(QUERY, 1, sink.write(iter([rows(1)]), QUERY, 1), None)  # type: ignore[arg-type]
    assert numbers(tmp_path) == [0, 1]


def test_readers_see_every_row_once_while_files_are_joined(tmp_path: Path) -> None:
    fill(tmp_path, *(rows(*range(start, start + 10)) for start in range(0, 100, 10)))
    directory = tmp_path / "topic=a"
    stop = threading.Event()
    wrong: list[object] = []
    reads = 0

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            try:
                found = [
                    n
                    for path in sorted(directory.glob("*.parquet"))
                    for n in pq.read_table(path)["n"].to_pylist()
                ]
            except FileNotFoundError:
                continue  # listed before, opened after: list again
            reads += 1
            if sorted(found) != list(range(len(found))) or len(found) < 100:
                wrong.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(20):
            compact.compact(ParquetDirectory(tmp_path))
            fill(tmp_path, rows(100 + turn), first=10 + turn)
    finally:
        stop.set()
        reader.join()
    assert reads and not wrong
    assert numbers(tmp_path) == list(range(120))


def test_where_directories_cannot_be_exchanged_nothing_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(one: Path, other: Path) -> None:
        raise CannotExchange("this file system cannot")

    monkeypatch.setattr(compact, "exchange", refuse)
    sink = ParquetFiles(tmp_path, ("topic",), "zstd", 2)
    for number in range(3):
        sink.commit(QUERY, number, sink.write(iter([rows(number)]), QUERY, number), None)  # type: ignore[arg-type]
    assert numbers(tmp_path) == [0, 1, 2]
    assert "cannot join small files" in caplog.text
