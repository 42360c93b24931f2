"""Messages written directly to files: which pipelines do it, the layout, and the tasks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

import pyarrow.dataset as ds  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from nsparq.pipeline.execute.progress import WRITTEN, Figures  # noqa: E402
from nsparq.pipeline.file import ready_made  # noqa: E402
from nsparq.pipeline.file.reading import parse  # noqa: E402
from nsparq.pipeline.write import direct_parquet, part_files  # noqa: E402
from nsparq.pipeline.write.direct_parquet import (  # noqa: E402
    DirectDataSource,
    DirectReader,
    Layout,
    described,
    layout_of,
    parts_of,
)
from nsparq.pipeline.write.parquet_table import ParquetDirectory  # noqa: E402
from nsparq.pipeline.write.part_files import Part, directory_of  # noqa: E402
from nsparq.spark.sink.writers import Task  # noqa: E402
from nsparq.spark.source.range_reader import close_idle  # noqa: E402
from nsparq.spark.source.stream import LogPartition  # noqa: E402
from nsparq.testing import Broker  # noqa: E402
from tests.support.brokers import BrokerProcess  # noqa: E402
from tests.support.polling import DEADLINE  # noqa: E402

_READERS: list[DirectReader] = []
QUERY = "0f0f0f0f-aaaa"
SINK = 'sink = { parquet = "t", partition_by = ["topic", "date"], date_from = "timestamp" }'


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    while _READERS:
        _READERS.pop().stop()
    close_idle()


def layout(text: str, path: Path | str = "p.toml") -> Layout | None:
    return layout_of(parse(f"[pipeline.p]\nsource = 'orders'\n{text}", path).pipelines[0])


# which pipelines


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (f"decode = 'message'\n{SINK}", ["body", "node", "offset", "timestamp", "id"]),
        (
            "sink = { parquet = 't' }",
            ["body", "_topic", "_node", "_offset", "_timestamp", "_attempts", "_id"],
        ),
        (
            "sink = { parquet = 't', partition_by = ['hour', '_node', 'date'] }",
            ["body", "_topic", "_offset", "_timestamp", "_attempts", "_id"],
        ),
        # Here Spark has to compute something.
        (f"decode = 'text'\n{SINK}", None),
        (f"decode = 'message'\nsql = 'SELECT * FROM input'\n{SINK}", None),
        (f"decode = 'message'\nwatermark = {{ column = 'timestamp', delay = '1s' }}\n{SINK}", None),
        ("sink = { parquet = 't', writer = 'spark' }", None),
        ("sink = { parquet = 't', partition_by = '_id' }", None),
        ("sink = { parquet = 't', partition_by = 'date', date_from = 'at' }", None),
        (
            "sink = { delta = 't', partition_by = 'date' }",
            ["body", "_topic", "_node", "_offset", "_timestamp", "_attempts", "_id"],
        ),
        ("sink = { delta = 't', key = '_id' }", None),
        ("sink = 'noop'", None),
    ],
)
def test_unchanged_messages_do_not_pass_through_spark(text: str, columns: list[str] | None) -> None:
    found = layout(text)
    assert (None if found is None else [*found.columns]) == columns


def test_a_queue_passes_through_spark() -> None:
    file = parse("[pipeline.p]\nsource = { topic = 't', mode = 'queue' }\nsink = { parquet = 't' }")
    assert layout_of(file.pipelines[0]) is None


# the layout


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_messages_are_split_where_the_day_or_the_hour_changes() -> None:
    times = ["2026-11-14T23:59:59.999999", "2026-11-15", "2026-11-15T05:10", "2026-11-14T23:59:58"]
    batch = pa.RecordBatch.from_pydict(
        {
            "body": [b"a", b"b", b"c", b"d"],
            "offset": [1, 2, 3, 4],
            "timestamp": pa.array(map(at, times), pa.timestamp("us", "UTC")),
        }
    )

    def found(*partition_by: str) -> list[tuple[str, list[bytes]]]:
        fixed = {name: name for name in partition_by if name in ("topic", "node")}
        one = Layout("", "zstd", partition_by, {"body": "body", "number": "offset"}, fixed)
        pieces = [*one.pieces(batch, "orders", "n/1")]
        assert all(rows.schema.names == ["body", "number"] for _, rows in pieces)
        return [(directory_of(values), rows["body"].to_pylist()) for values, rows in pieces]

    assert found() == [("", [b"a", b"b", b"c", b"d"])]
    assert found("node") == [("node=n%2F1", [b"a", b"b", b"c", b"d"])]
    assert found("topic", "date") == [
        ("topic=orders/date=2026-11-14", [b"a"]),
        ("topic=orders/date=2026-11-15", [b"b", b"c"]),
        ("topic=orders/date=2026-11-14", [b"d"]),
    ]
    assert [name for name, _ in found("hour")] == ["hour=23", "hour=0", "hour=5", "hour=23"]


def test_a_layout_and_descriptions_of_files_survive_their_way_through_spark() -> None:
    one = layout(f"decode = 'message'\n{SINK}")
    assert one is not None and Layout.loads(one.dumps()) == one
    made = [Part("/t/x.part", (("topic", "a"), ("date", None)), 3, 99, '{"a": 1}'), Part("/t/y", (), 1, 1)]
    assert parts_of([described(made), described([])]) == made


def test_messages_are_counted_where_spark_counts_files() -> None:
    figures = Figures("p")
    report = {
        "batchId": 7,
        "numInputRows": 4,
        "batchDuration": 500,
        "timestamp": "2026-11-15T12:00:00.000Z",
        "sink": {"numOutputRows": 4},
        "observedMetrics": {WRITTEN: {"rows": 1000, "bytes": 5}},
    }
    figures.add_rows(report, "decoded")
    figures.add_rows({**report, "batchId": 8, "observedMetrics": {WRITTEN: {"rows": None}}}, "decoded")
    assert (figures.rows, figures.rows_written, figures.batches, figures.rows_per_second) == (
        1000,
        1000,
        1,
        0,
    )


# the reader


class Archive:
    """A table, and its source as Spark sees it."""

    def __init__(self, broker: Broker | BrokerProcess, path: Path, topics: str, **given: Any) -> None:
        names = ["body", "node", "offset", "timestamp", "id"]
        self.layout = Layout(
            str(path / "table"), "zstd", ("topic", "date"), {name: name for name in names}, {"topic": "topic"}
        )
        options = {
            "nsqd": given.pop("nsqd", getattr(broker, "http_address", "")),
            "channel": "c",
            **({"topics": topics} if topics else {}),
            direct_parquet.LAYOUT: self.layout.dumps(),
            "discoveryInterval": "50ms",
            **given,
        }
        reader = DirectDataSource(options).streamReader(direct_parquet.DESCRIBED)
        assert isinstance(reader, DirectReader)
        self.reader = reader
        _READERS.append(reader)
        self.table = ParquetDirectory(path / "table")
        self.at: dict[str, Any] = reader.initialOffset()

    def plan(self) -> list[LogPartition]:
        """The tasks of the next batch."""
        end = self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit())
        planned = self.reader.partitions(self.at, end)
        self.at = end
        return [one for one in planned if isinstance(one, LogPartition)]

    def run(self, task: LogPartition) -> list[Part]:
        """As in another process."""
        reader = pickle.loads(pickle.dumps(self.reader))
        return parts_of(reader.read(pickle.loads(pickle.dumps(task))))

    def archive(self, batch: int = 0) -> list[Part]:
        made = [part for task in self.plan() for part in self.run(task)]
        self.table.commit(QUERY, batch, made)
        return made

    def rows(self) -> list[dict[str, Any]]:
        """As a reader of the directory sees them."""
        table = ds.dataset(str(self.table.path), format="parquet", partitioning="hive").to_table()
        found: list[dict[str, Any]] = table.sort_by(
            [("topic", "ascending"), ("offset", "ascending")]
        ).to_pylist()
        return found

    def waiting(self) -> list[Path]:
        """Files that are not part of the table."""
        return [path for path in self.table.path.rglob("*") if path.suffix == ".part"]


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The task that is running."""

    def be(partition: int = 0, attempt: int = 0, batch: int = 0) -> None:
        monkeypatch.setattr(Task, "current", classmethod(lambda cls: Task(partition, attempt, QUERY, batch)))

    be()
    return be


def test_every_message_of_several_topics_is_archived_unchanged(broker: Broker, tmp_path: Path) -> None:
    large = [bytes([number]) * (1 << 20) for number in range(3)]
    sent = {"a": [b"x", b"\x00\xff", *large], "b": [b"%d" % n for n in range(3000)], "c": [b"later"]}
    broker.publish("a", *sent["a"][:2])
    for body in large:
        broker.publish("a", body)
    broker.publish("b", *sent["b"])
    broker.publish("c", b"later", defer=3600.0)
    made = Archive(broker, tmp_path, "a,b,c")
    files = made.archive()
    found = made.rows()
    assert {topic: [row["body"] for row in found if row["topic"] == topic] for topic in sent} == sent
    assert sum(part.rows for part in files) == len(found) == 3006
    for topic in sent:
        origin = {(one.id, one.sequence, one.timestamp_ns // 1000) for one in broker.peek(topic, count=5000)}
        assert {
            (row["id"], row["offset"], round(row["timestamp"].timestamp() * 1e6))
            for row in found
            if row["topic"] == topic
        } == origin
    assert {row["node"] for row in found} == {broker.http_address}
    assert {row["date"] for row in found} == {row["timestamp"].date().isoformat() for row in found}


def test_after_a_killed_broker_left_a_gap_every_message_is_archived(tmp_path: Path) -> None:
    with BrokerProcess(broadcast_address="127.0.0.1", sync_timeout=0.05) as broker:
        broker.publish("t", b"1", b"2")
        broker.kill()
        broker.start()
        address = "{}:{}".format(*broker.http_address)
        broker.publish("t", b"3")
        made = Archive(broker, tmp_path, "t", nsqd=address)
        made.archive()
        numbers = [row["offset"] for row in made.rows()]
        assert [row["body"] for row in made.rows()] == [b"1", b"2", b"3"]
        assert numbers[2] - numbers[1] > 1000


def test_a_batch_without_messages_writes_nothing(broker: Broker, tmp_path: Path) -> None:
    broker.create("t", "c")
    made = Archive(broker, tmp_path, "t")
    assert made.archive() == []
    assert not [path for path in made.table.path.rglob("*") if path.name != "lock" and path.is_file()]


def test_a_task_that_fails_in_the_middle_leaves_nothing(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_files, "GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(direct_parquet, "CHUNK", 4 << 20)
    for _ in range(60):
        broker.publish("t", *(bytes(200_000) for _ in range(5)))
    made = Archive(broker, tmp_path, "t", retryFor="100ms", maxBytesPerTrigger="1g")
    (one, *_) = made.plan()
    seen: list[int] = []
    write = part_files.PartWriter.write

    def watched(self: Any, values: Any, rows: Any) -> None:
        write(self, values, rows)
        seen.append(len(made.waiting()))
        if len(seen) == 2:
            raise OSError(ENOSPC, "the disk is full")

    monkeypatch.setattr(part_files.PartWriter, "write", watched)
    with pytest.raises(OSError, match="the disk is full"):
        made.run(one)
    assert 1 in seen, "it should have begun to write"
    assert made.waiting() == []


def test_only_files_of_successful_attempts_become_part_of_the_table(
    broker: Broker, tmp_path: Path, task: Any
) -> None:
    broker.publish("t", b"1", b"2", b"3")
    made = Archive(broker, tmp_path, "t")
    (one,) = made.plan()
    first = made.run(one)
    task(attempt=1)
    second = made.run(one)
    assert {Path(part.path).name[32:] for part in first + second} == {"-0-0.part", "-0-1.part"}
    made.table.commit(QUERY, 0, second)
    assert [row["body"] for row in made.rows()] == [b"1", b"2", b"3"]
    # The stage runs again, although the batch is committed.
    task(attempt=2)
    made.table.commit(QUERY, 0, made.run(one))
    assert [row["body"] for row in made.rows()] == [b"1", b"2", b"3"]
    assert made.waiting() == []


def test_files_left_by_a_run_are_removed_unless_a_commit_has_begun(
    broker: Broker, tmp_path: Path, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.publish("t", b"1")
    made = Archive(broker, tmp_path, "t")
    (one,) = made.plan()
    committing = made.run(one)
    with monkeypatch.context() as patch:
        patch.setattr(ParquetDirectory, "_move", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.table.commit(QUERY, 0, committing)
    task(batch=1)
    made.run(one)
    assert len(made.waiting()) == 2
    made.table.clear_new_files(QUERY)
    assert made.waiting() == [Path(part.path) for part in committing]
    # A batch that runs again may find no messages any more: the record counts.
    made.table.commit(QUERY, 0, [])
    assert [row["body"] for row in made.rows()] == [b"1"]


# when


def test_a_batch_waits_for_its_time_unless_it_is_full(broker: Broker, tmp_path: Path) -> None:
    broker.publish("t", b"1")
    made = Archive(broker, tmp_path, "", topicsPattern="t|u", triggerInterval="1h", maxRowsPerTrigger="10")

    def rows() -> int:
        return sum(part.rows for task in made.plan() for part in made.run(task))

    # The first comes at once.
    assert rows() == 1
    broker.publish("t", *[b"x"] * 10)
    assert rows() == 0
    broker.publish("t", b"x")
    assert rows() == 10
    assert rows() == 0
    # A new topic gets a position at once, and is read later.
    broker.publish("u", b"x")
    deadline = time.monotonic() + DEADLINE
    while "u" not in made.at["logs"]:
        assert time.monotonic() < deadline
        made.plan()
    assert rows() == 0


def test_existing_messages_are_read_without_waiting(broker: Broker, tmp_path: Path) -> None:
    broker.publish("t", *[b"x"] * 25)
    made = Archive(broker, tmp_path, "t", triggerInterval="1h", maxRowsPerTrigger="10")
    made.reader.prepareForTriggerAvailableNow()
    assert [sum(part.rows for task in made.plan() for part in made.run(task)) for _ in range(4)] == [
        10,
        10,
        5,
        0,
    ]


def test_offsets_and_timestamps_are_stored_compactly(broker: Broker, tmp_path: Path) -> None:
    for _ in range(10):
        broker.publish("t", *[b"x" * 20] * 1000)
    made = Archive(broker, tmp_path, "t")
    (part,) = made.archive()
    (path,) = made.table.path.glob("topic=t/date=*/*.parquet")
    group = pq.read_metadata(path).row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert part.size == path.stat().st_size
    assert columns["offset"].total_compressed_size < 2000
    assert columns["offset"].statistics.max - columns["offset"].statistics.min == 9999
    assert columns["node"].total_compressed_size < 500
    assert columns["body"].statistics is None


def test_the_ready_made_archive_is_written_directly(tmp_path: Path) -> None:
    topics = ready_made.Topics(nsq={}, topics=["a", "b"], start="2026-11-15T12:00:00Z")
    assert layout_of(parse(ready_made.archive(topics, tmp_path / "out")).pipelines[0]) is not None
