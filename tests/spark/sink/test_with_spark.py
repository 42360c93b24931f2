"""format("nsq") as a sink in Spark: batches, streams, repetitions, failures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.sink.support import address, ask, stored
from tests.support import BrokerProcess, BrokerThread, unique_name, wait_until

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from tests.support.polling import SPARK_DEADLINE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

pytestmark = pytest.mark.allow_leftovers("Spark keeps threads and sockets of its own")


@pytest.fixture(scope="module")
def brokers() -> Iterator[tuple[BrokerThread, BrokerThread]]:
    with BrokerThread() as one, BrokerThread() as other:
        yield one, other


@pytest.fixture
def broker(brokers: tuple[BrokerThread, BrokerThread]) -> BrokerThread:
    return brokers[0]


@pytest.fixture
def topic() -> str:
    return unique_name("topic")


def write(frame: DataFrame, *nsqd: Any, **options: Any) -> None:
    where = ",".join(map(address, nsqd))
    frame.write.format("nsq").options(nsqd=where, **options).mode("append").save()


def bodies(spark: SparkSession, count: int, partitions: int = 2, start: int = 0) -> DataFrame:
    return spark.range(start, start + count, 1, partitions).select(F.col("id").cast("string").alias("body"))


def numbers(*ranges: range) -> list[bytes]:
    return sorted(str(number).encode() for one in ranges for number in one)


class Folder:
    """Files that a stream reads, one micro-batch each."""

    def __init__(self, spark: SparkSession, path: Path) -> None:
        self._spark, self._path = spark, path
        self._count = 0
        path.mkdir()

    def add(self, count: int) -> None:
        """The next numbers, one a line."""
        part = self._path / f".{self._count}"
        part.write_text("".join(f"{number}\n" for number in range(self._count, self._count + count)))
        part.rename(self._path / f"{self._count}.txt")
        self._count += count

    def stream(self) -> DataFrame:
        reader = self._spark.readStream.option("maxFilesPerTrigger", 1)
        return reader.text(str(self._path)).select(F.col("value").alias("body"))


@pytest.fixture
def folder(spark: SparkSession, tmp_path: Path) -> Folder:
    return Folder(spark, tmp_path / "input")


def sink(frame: DataFrame, checkpoint: Path, topic: str, *nsqd: Any, **options: Any) -> DataStreamWriter:
    where = ",".join(map(address, nsqd))
    writer = frame.writeStream.format("nsq").options(nsqd=where, topic=topic, **options)
    return writer.option("checkpointLocation", str(checkpoint))


def run(writer: DataStreamWriter) -> StreamingQuery:
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(SPARK_DEADLINE)
    return query


def forget_last_commit(checkpoint: Path) -> None:
    """As if the driver had died before it noted that the last micro-batch is done."""
    folder = checkpoint / "commits"
    last = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    (folder / str(last)).unlink()
    (folder / f".{last}.crc").unlink(missing_ok=True)


def batch_of(query: StreamingQuery) -> int:
    """The last that is done; -1 before the first."""
    progress = query.lastProgress
    return -1 if progress is None else int(progress["batchId"])


def wait_next(query: StreamingQuery) -> None:
    """Until another micro-batch is done, or all are."""
    batch = batch_of(query)
    wait_until(lambda: not query.isActive or batch_of(query) > batch)


def wait_stored(broker: BrokerThread, topic: str, count: int) -> None:
    wait_until(lambda: len(stored(broker, topic)) >= count)


# batches


def test_a_frame_is_written_once_over_all_its_partitions(
    spark: SparkSession, broker: BrokerThread, topic: str
) -> None:
    write(bodies(spark, 1000, 3), broker, topic=topic)
    assert sorted(stored(broker, topic)) == numbers(range(1000))
    write(bodies(spark, 0), broker, topic=topic)
    assert len(stored(broker, topic)) == 1000


def test_topics_delays_and_large_bodies_come_from_columns(
    spark: SparkSession, broker: BrokerThread, topic: str
) -> None:
    broker.control("create", topic + "-later", "c")
    large = os.urandom(1 << 20)
    rows = [(bytearray(large), topic + "-now", None), (bytearray(b"\0\xff"), topic + "-later", 60_000)]
    frame = spark.createDataFrame(rows, "body binary, topic string, defer long")
    write(frame, broker)
    write(
        frame.selectExpr("'x' AS body", f"'{topic}-later' AS topic", "INTERVAL '90' SECOND AS defer"), broker
    )
    assert stored(broker, topic + "-now") == [large]
    assert sorted(stored(broker, topic + "-later")) == [b"\0\xff", b"x", b"x"]
    wait_until(lambda: (broker.channel_stats(topic + "-later", "c") or {})["deferred_count"] == 3)


def test_headers_come_from_a_column_and_are_read_back(
    spark: SparkSession, broker: BrokerThread, topic: str
) -> None:
    made = bodies(spark, 6).selectExpr(
        "body", "if(body < 4, map('Number', body, 'kind', 'ü'), null) AS headers"
    )
    expected = {b"%d" % n: {"number": str(n), "kind": "ü"} if n < 4 else None for n in range(6)}
    for delivery in ("exactly-once", "at-least-once"):
        write(made, broker, topic=topic, delivery=delivery)
        rows = spark.read.format("nsq").options(nsqd=address(broker), topic=topic).load()
        assert {bytes(row.body): row.headers for row in rows.collect()} == expected
        topic += "-copy"
    # What was read is written again, as a copy or a redrive does.
    write(rows.select("body", "headers"), broker, topic=topic)
    again = spark.read.format("nsq").options(nsqd=address(broker), topic=topic).load()
    assert {bytes(row.body): row.headers for row in again.collect()} == expected


@pytest.mark.parametrize(
    ("columns", "options", "text"),
    [
        (
            ["body", "map('a b', '') AS headers"],
            {"topic": "t"},
            r"row 0: column headers: not a header name: 'a b",
        ),
        (
            ["body", "'x' AS headers"],
            {"topic": "t"},
            r"column 'headers' is string and must be map<string,string>",
        ),
        (["body", "1.5 AS price"], {"topic": "t"}, r"column 'price' cannot be written .* AS body"),
        (["id AS body"], {"topic": "t"}, r"column 'body' is bigint and must be binary or string"),
        (["body"], {}, r"option topic is missing"),
        (["body"], {"topic": "t", "delivery": "twice"}, r"option delivery must be one of"),
        (["body", "'no good' AS topic"], {}, r"partition \d, row 0: 'no good' is not a valid topic name"),
        (["repeat(body, 1048577) AS body"], {"topic": "t"}, r"The largest .* has \d+ bytes .*--max-msg-size"),
    ],
)
def test_what_cannot_be_written_fails_with_a_reason_and_leaves_nothing(
    spark: SparkSession, broker: BrokerThread, columns: list[str], options: dict[str, str], text: str
) -> None:
    before = broker.call(lambda core: core.transactions.undecided_count())
    frame = spark.range(1).selectExpr("id", "'x' AS body").selectExpr(*columns)
    with pytest.raises(PySparkException, match=text):
        write(frame, broker, **options)
    assert broker.topic_stats("t") is None
    # One task alone failed, whose part nobody told the driver of: it expires.
    assert broker.call(lambda core: core.transactions.undecided_count()) <= before + 1


def test_a_batch_write_of_which_a_task_fails_publishes_nothing(
    spark: SparkSession, broker: BrokerThread, topic: str
) -> None:
    frame = bodies(spark, 1000, 2).withColumn("topic", F.expr("if(body = '999', 'no good', null)"))
    with pytest.raises(PySparkException, match=r"partition 1, row 499: 'no good'"):
        write(frame, broker, topic=topic)
    assert stored(broker, topic) == []


# streams


def test_each_micro_batch_is_published_once_with_every_trigger(
    spark: SparkSession, broker: BrokerThread, topic: str, folder: Folder, tmp_path: Path
) -> None:
    """Available now, the default and processing time, one after the other on one checkpoint."""
    checkpoint = tmp_path / "checkpoint"
    folder.add(10)
    folder.add(10)
    run(sink(folder.stream(), checkpoint, topic, broker))
    assert sorted(stored(broker, topic)) == numbers(range(20))
    triggers: list[dict[str, Any]] = [{}, {"processingTime": "50 milliseconds"}]
    for expected, trigger in zip((30, 40), triggers, strict=True):
        writer = sink(folder.stream(), checkpoint, topic, broker)
        query = (writer.trigger(**trigger) if trigger else writer).start()
        folder.add(10)
        wait_stored(broker, topic, expected)
        query.processAllAvailable()
        query.stop()
    assert sorted(stored(broker, topic)) == numbers(range(40))
    known = ask(broker, "GET", "/transactions")["producers"]
    mine = next(one for one in known if one["producer"] == f"spark:{query.id}")
    assert mine["committed_sequence"] == 3


def test_a_micro_batch_that_spark_repeats_is_not_published_again(
    spark: SparkSession,
    brokers: tuple[BrokerThread, BrokerThread],
    topic: str,
    folder: Folder,
    tmp_path: Path,
) -> None:
    """The commit log lacks the last entry, as after a crash of the driver."""
    for count in (1, 2):
        name, checkpoint = f"{topic}-{count}", tmp_path / f"checkpoint-{count}"
        writer = sink(folder.stream(), checkpoint, name, *brokers[:count])
        folder.add(500)
        run(writer)
        before = sorted(body for broker in brokers for body in stored(broker, name))
        assert len(before) == 500 * count
        last = max(
            (checkpoint / "commits").iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1
        )
        last.unlink()
        (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
        query = run(sink(folder.stream(), checkpoint, name, *brokers[:count]))
        assert query.lastProgress is not None and query.lastProgress["numInputRows"] == 500
        assert sorted(body for broker in brokers for body in stored(broker, name)) == before


def test_a_micro_batch_is_spread_over_the_nodes_and_published_on_all(
    spark: SparkSession,
    brokers: tuple[BrokerThread, BrokerThread],
    topic: str,
    folder: Folder,
    tmp_path: Path,
) -> None:
    folder.add(100)
    frame = folder.stream().repartition(4)
    run(sink(frame, tmp_path / "checkpoint", topic, *brokers))
    found = [stored(broker, topic) for broker in brokers]
    assert all(found)
    assert sorted(found[0] + found[1]) == numbers(range(100))


def test_for_each_batch_can_write_once_by_naming_its_batches(
    spark: SparkSession, broker: BrokerThread, topic: str, folder: Folder, tmp_path: Path
) -> None:
    def twice(frame: DataFrame, batch_id: int) -> None:
        for _ in range(2):
            write(frame, broker, topic=topic, producer=topic, sequence=batch_id)

    folder.add(10)
    folder.add(10)
    writer = folder.stream().writeStream.foreachBatch(twice)
    run(writer.option("checkpointLocation", str(tmp_path / "checkpoint")))
    assert sorted(stored(broker, topic)) == numbers(range(20))


def test_nsqd_killed_again_and_again_under_a_stream_costs_nothing_and_doubles_nothing(
    spark: SparkSession, topic: str, folder: Folder, tmp_path: Path
) -> None:
    with BrokerProcess() as broker:
        broker.flags["http_address"] = address(broker)
        for _ in range(6):
            folder.add(1000)
        writer = sink(folder.stream(), tmp_path / "checkpoint", topic, broker)
        query = writer.trigger(availableNow=True).start()
        for _ in range(3):
            wait_next(query)
            broker.kill()
            broker.start()
        assert query.awaitTermination(SPARK_DEADLINE)
        assert sorted(stored(broker, topic)) == numbers(range(6000))
