"""Queue mode in Spark: a stream to Parquet, restarted from its checkpoint, killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nsparq.spark.datasource import NsqDataSource
from nsparq.spark.queue.reader import QueueStreamReader
from tests.spark.queue.support import TIMEOUT, address, numbered
from tests.support import TestBroker, start_broker, wait_until
from tests.support.file_sink import committed_rows
from tests.support.polling import SPARK_DEADLINE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with start_broker(broadcast_address="127.0.0.1") as found:
        found.control("create", "t", "c")
        yield found


class Stream:
    """From topic `t` to Parquet files, with a checkpoint, and the staging directory in it."""

    def __init__(self, spark: SparkSession, directory: Path, broker: TestBroker) -> None:
        self._spark, self._broker = spark, broker
        self._checkpoint, self._result = directory / "checkpoint", directory / "result"

    def read(self, source: str = "nsq", **options: str) -> DataFrame:
        given = {"mode": "queue", "topic": "t", "channel": "c", "messageTimeout": TIMEOUT, **options}
        given |= {"nsqd": address(self._broker), "staging": str(self._checkpoint / "staging")}
        return self._spark.readStream.format(source).options(**given).load()

    def run(self, frame: DataFrame, **trigger: Any) -> StreamingQuery:
        writer = frame.writeStream.option("checkpointLocation", str(self._checkpoint))
        if trigger:
            writer = writer.trigger(**trigger)
        return writer.format("parquet").start(str(self._result))

    def drain(self, frame: DataFrame) -> None:
        query = self.run(frame, availableNow=True)
        assert query.awaitTermination(SPARK_DEADLINE)
        assert query.exception() is None

    def counts(self) -> Counter[bytes]:
        rows = committed_rows(self._result, "body")
        return Counter(rows.column("body").to_pylist() if rows.num_rows else ())


def crashing(index: int, flag: Path) -> type[NsqDataSource]:
    """The source, with a worker process that is killed, once, right after it has staged a chunk and
    before it has finished its messages. Made here, so that it travels to the workers by value."""

    class Reader(QueueStreamReader):
        def read(self, partition: Any) -> Any:
            from nsparq.spark.queue.staging import Slot

            publish = Slot.publish

            def publish_and_die(self: Slot, number: int, *arguments: Any, **named: Any) -> bool:
                result = publish(self, number, *arguments, **named)
                if number == index and not flag.exists():
                    flag.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            Slot.publish = publish_and_die  # type: ignore[method-assign]
            try:
                return super().read(partition)
            finally:
                Slot.publish = publish  # type: ignore[method-assign]

    class Crashing(NsqDataSource):
        @classmethod
        def name(cls) -> str:
            return "nsq_crashing"

        def streamReader(self, schema: Any) -> Any:
            reader = super().streamReader(schema)
            reader.__class__ = Reader
            return reader

    return Crashing


def test_a_stream_to_parquet_restarted_and_killed_has_every_message_once(
    spark: SparkSession, tmp_path: Path, broker: TestBroker
) -> None:
    stream = Stream(spark, tmp_path, broker)
    # Two batches, and the end.
    broker.publish("t", *numbered(3000))
    stream.drain(stream.read(maxRowsPerTrigger="2000"))
    assert stream.counts() == Counter(numbered(3000))
    # On from the checkpoint, until a worker is killed.
    flag = tmp_path / "killed"
    spark.dataSource.register(crashing(1, flag))
    broker.publish("t", *numbered(6000, 3000))
    query = stream.run(stream.read("nsq_crashing"))
    with pytest.raises(Exception, match="crashed|Python worker"):
        query.awaitTermination(SPARK_DEADLINE)
    assert flag.exists()
    assert stream.counts() == Counter(numbered(3000))
    # And on from there; what the killed one held comes again by and by.
    broker.publish("t", *numbered(1000, 9000))
    query = stream.run(stream.read(), processingTime="200 milliseconds")
    wanted = set(numbered(10_000))
    while not wanted <= stream.counts().keys():
        assert not query.awaitTermination(0.2)
    assert stream.counts() == Counter(numbered(10_000))
    # A batch that Spark repeats after a restart reports no offset. The next report has one.
    wait_until(lambda: any("depth" in p["sources"][0]["latestOffset"] for p in query.recentProgress))
    query.stop()


def test_a_query_may_start_with_nothing_in_the_queue(
    spark: SparkSession, tmp_path: Path, broker: TestBroker
) -> None:
    once = Stream(spark, tmp_path / "once", broker)
    once.drain(once.read())
    assert not once.counts()
    always = Stream(spark, tmp_path / "always", broker)
    query = always.run(always.read(channel="d"), processingTime="100 milliseconds")
    wait_until(lambda: query.lastProgress or query.exception(), SPARK_DEADLINE)
    broker.publish("t", *numbered(10))
    while always.counts() != Counter(numbered(10)):
        assert not query.awaitTermination(0.1)
    query.stop()
    once.drain(once.read())
    assert once.counts() == Counter(numbered(10))


def test_a_batch_read_and_a_missing_option_are_named(spark: SparkSession, broker: TestBroker) -> None:
    given = {"mode": "queue", "topic": "t", "channel": "c", "nsqd": address(broker)}
    with pytest.raises(Exception, match="option mode: queue works only with readStream"):
        spark.read.format("nsq").options(**given).load().count()
    with pytest.raises(Exception, match="option staging is missing"):
        frame = spark.readStream.format("nsq").options(**given).load()
        frame.writeStream.format("noop").start().awaitTermination(SPARK_DEADLINE)
