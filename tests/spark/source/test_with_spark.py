"""format("nsq") in log mode as Spark runs it: each trigger, restarts, and what happens to topics
meanwhile.

The rules themselves are tested without Spark, in test_driver.py and test_range_reader.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from nsparq.broker.reclaim import reclaim
from nsparq.spark.datasource import SCHEMA
from nsparq.testing import Broker, run_broker, run_lookupd
from tests.spark.source.support import numbered
from tests.support import wait_until
from tests.support.file_sink import committed_rows
from tests.support.polling import SPARK_DEADLINE
from tests.support.with_headers import publish_with_headers


@pytest.fixture
def broker() -> Iterator[Broker]:
    with run_broker() as running:
        yield running


def source(spark: SparkSession, **given: Any) -> DataFrame:
    given = {"topic": "t", "channel": "c", "discoveryInterval": "100ms", **given}
    options = {name: str(value) for name, value in given.items() if value is not None}
    return spark.readStream.format("nsq").options(**options).load()


@contextmanager
def running(frame: DataFrame, path: Path, **trigger: Any) -> Iterator[StreamingQuery]:
    """A query into Parquet files, stopped at the end."""
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(path / "checkpoint"))
    query = (writer.trigger(**trigger) if trigger else writer).start(str(path / "out"))
    try:
        yield query
    finally:
        query.stop()


def run_available(frame: DataFrame, path: Path) -> list[int]:
    """Everything there is; the rows of each micro-batch."""
    with running(frame, path, availableNow=True) as query:
        assert query.awaitTermination(SPARK_DEADLINE)
        return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


def written(path: Path) -> list[bytes]:
    """The bodies in the sink, as the sink's own log has them, sorted."""
    rows = committed_rows(path / "out", "body")
    return sorted(rows.column("body").to_pylist()) if rows.num_rows else []


def wait_written(path: Path, bodies: list[bytes]) -> None:
    wait_until(lambda: len(written(path)) >= len(bodies), interval=0.05)
    assert written(path) == sorted(bodies)


def depth(broker: Broker) -> int:
    stats = broker.channel_stats("t", "c")
    assert stats is not None
    return int(stats["depth"])


def pause(broker: Broker, paused: bool) -> None:
    channel = broker._daemon.broker.topics["t"].channels["c"]
    broker._call(channel.pause if paused else channel.unpause)


def test_a_batch_reads_a_range_with_all_columns_and_any_bytes(spark: SparkSession, broker: Broker) -> None:
    sent = [b"\0\xff", "ü".encode(), b"x" * (1 << 20), *numbered(5)]
    broker.publish("t", *sent)
    reader = spark.read.format("nsq").option("nsqd", broker.http_address).option("topic", "t")
    frame = reader.load()
    assert frame.schema == SCHEMA
    rows = frame.orderBy("offset").collect()
    assert [bytes(row.body) for row in rows] == sent
    kept = broker.peek("t")
    assert [row.id for row in rows] == [message.id for message in kept]
    assert [row.offset for row in rows] == [message.sequence for message in kept]
    assert {(row.topic, row.node, row.attempts) for row in rows} == {("t", broker.http_address, 0)}
    start = json.dumps({"t": rows[3].offset})
    end = json.dumps({"t": {broker.http_address: rows[6].offset}})
    part = reader.option("startingPosition", start).option("endingPosition", end).load()
    assert sorted(bytes(row.body) for row in part.collect()) == numbered(3)
    assert part.count() == 3
    empty = reader.option("startingPosition", "latest").option("endingPosition", "latest").load()
    assert empty.collect() == []
    chosen = spark.read.format("nsq").schema("body binary not null, topic string not null")
    (row,) = chosen.options(nsqd=broker.http_address, topic="t").load().filter("length(body) > 10").collect()
    assert row.asDict() == {"body": b"x" * (1 << 20), "topic": "t"}


def test_headers_are_a_column_that_a_running_query_gets_without_a_new_checkpoint(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    broker.publish("t", b"plain")
    publish_with_headers(broker.http_address, "t", (b"traced", {"traceparent": "00-1"}), (b"again", {}))
    batch = spark.read.format("nsq").options(nsqd=broker.http_address, topic="t").load()
    found = {bytes(row.body): row.headers for row in batch.select("body", "headers").collect()}
    assert found == {b"plain": None, b"traced": {"traceparent": "00-1"}, b"again": None}
    assert batch.where("headers['traceparent'] = '00-1'").count() == 1

    def run(columns: str | None) -> None:
        """The query has state, and selects all columns."""
        frame = source(spark, nsqd=broker.http_address, columns=columns)
        run_available(
            frame.withWatermark("timestamp", "1 hour").dropDuplicatesWithinWatermark(["id"]), tmp_path
        )

    # As a query of an earlier version, whose source had no such column.
    run(",".join(SCHEMA.names[:7]))
    publish_with_headers(broker.http_address, "t", (b"later", {"kind": "new"}))
    run(None)
    later = spark.read.option("mergeSchema", "true").parquet(str(tmp_path / "out"))
    assert sorted((bytes(row.body), row.headers) for row in later.where("body <> 'traced'").collect()) == [
        (b"again", None),
        (b"later", {"kind": "new"}),
        (b"plain", None),
    ]


def rows_scanned(frame: DataFrame) -> int:
    """Rows that Spark has got from the source, before its own filters."""
    execution = frame._jdf.queryExecution()
    leaf = execution.executedPlan().collectLeaves().head()
    return int(leaf.metrics().apply("numOutputRows").value())


def test_filters_and_columns_decide_what_a_batch_reads(spark: SparkSession, broker: Broker) -> None:
    for topic in ("t", "u"):
        broker.publish(topic, *numbered(10))
    first = broker.peek("t")[0].sequence
    options = {"nsqd": broker.http_address, "topicsPattern": ".*", "columns": "offset,topic,timestamp"}

    def load(**more: str) -> DataFrame:
        return spark.read.format("nsq").options(**options, **more).load()

    assert load().columns == ["offset", "topic", "timestamp"]
    condition = f"topic = 't' AND offset >= {first + 7} AND offset <> {first + 8}"
    hour = "INTERVAL 1 HOUR"
    # What Spark does not push down it tests itself, on rows that are all read.
    plain = load().where(condition)
    assert sorted(row.offset for row in plain.collect()) == [first + 7, first + 9]
    with pytest.raises(PySparkException, match="spark.sql.python.filterPushdown.enabled"):
        load(pushFilters="true").where(condition).collect()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    pushed = load(pushFilters="true").where(condition)
    assert sorted(row.offset for row in pushed.collect()) == [first + 7, first + 9]
    assert (rows_scanned(plain), rows_scanned(pushed)) == (20, 3)
    # Spark tests nothing but what is not settled.
    (test, _) = pushed._jdf.queryExecution().optimizedPlan().toString().splitlines()
    assert re.fullmatch(rf"Filter NOT \(offset#\d+L = {first + 8}\)", test)
    with_headers = spark.read.format("nsq").options(**options | {"columns": "headers", "pushFilters": "true"})
    assert with_headers.load().where("headers IS NOT NULL").collect() == []
    past = load(pushFilters="true").where(f"timestamp < current_timestamp() - {hour}")
    assert past.collect() == [] and rows_scanned(past) == 0
    now = load(pushFilters="true").where(f"timestamp >= current_timestamp() - {hour} AND topic LIKE 'u%'")
    assert now.count() == 10
    # Without the option a DataFrame may be used as often as one likes.
    frame = load()
    assert frame.where(condition).count() == 2 and frame.count() == 20


def test_the_progress_of_a_query_says_what_it_has_read_and_what_is_behind(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    broker.publish("t", *numbered(10))
    frame = source(spark, nsqd=broker.http_address, maxRowsPerTrigger=4, minRowsPerTrigger=3)
    counted = frame.observe(
        "nsq", F.count(F.lit(1)).alias("rows"), F.sum(F.octet_length("body")).alias("bytes")
    )
    with running(counted, tmp_path) as query:
        wait_until(lambda: len([one for one in query.recentProgress if one.numInputRows]) == 2)
        progress = [json.loads(one.json) for one in query.recentProgress if one.numInputRows]
        assert [one["observedMetrics"]["nsq"] for one in progress] == [{"rows": 4, "bytes": 24}] * 2
        behind = [one["sources"][0]["latestOffset"]["behind"] for one in progress]
        assert [one["rows"] for one in behind] == [6, 2]
        assert behind[0]["bytes"] > behind[1]["bytes"] > 0
        # Two are too few: the query waits for more, and can be stopped while it does.
        broker.publish("t", b"one more")
        wait_written(tmp_path, [*numbered(10), b"one more"])
        broker.publish("t", b"too few")
    assert not query.isActive and len(written(tmp_path)) == 11


def test_available_now_reads_what_is_there_in_limited_batches_and_goes_on_from_its_checkpoint(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    broker.create("t")
    frame = source(spark, nsqd=broker.http_address, maxRowsPerTrigger=100)
    # An empty topic is an end, and no error.
    assert run_available(frame, tmp_path) == []
    broker.publish("t", *numbered(150))
    assert run_available(frame, tmp_path) == [100, 50]
    assert written(tmp_path) == numbered(150)
    # Large ones, any bytes, and one that no consumer would get before an hour has passed.
    others = [b"x" * (1 << 20), b"\xff\0\n", b"later"]
    broker.publish("t", *others[:2])
    broker.publish("t", others[2], defer=3600)
    assert run_available(frame, tmp_path) == [3]
    assert run_available(frame, tmp_path) == []
    assert written(tmp_path) == sorted([*numbered(150), *others])
    # A batch that was planned and not finished is run again, with the same rows.
    last = max(int(path.name) for path in (tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    (tmp_path / "checkpoint" / "commits" / str(last)).unlink()
    (tmp_path / "out" / "_spark_metadata" / str(last)).unlink()
    assert run_available(frame, tmp_path) == [3]
    assert written(tmp_path) == sorted([*numbered(150), *others])


def test_the_default_trigger_follows_a_topic_that_appears_later(spark: SparkSession, tmp_path: Path) -> None:
    with run_lookupd() as lookupd, run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as broker:
        with running(source(spark, nsqlookupd=lookupd.http_address), tmp_path) as query:
            broker.publish("t", *numbered(3))
            wait_written(tmp_path, numbered(3))
            broker.publish("t", *numbered(3, 3))
            wait_written(tmp_path, numbered(6))
            # Quiet now: Spark commits no more, and the channel shows no lag nevertheless.
            wait_until(lambda: depth(broker) == 0)
            progress = query.lastProgress
            assert progress is not None
            end, latest = (
                json.loads(getattr(progress.sources[0], name)) for name in ("endOffset", "latestOffset")
            )
            assert latest == {**end, "behind": {"bytes": 0, "rows": 0}}
            # And an idle query does not spin.
            before = len(query.recentProgress)
            wait_until(lambda: not query.status["isDataAvailable"])
            assert len(query.recentProgress) - before <= 2


def test_many_topics_are_few_tasks_and_those_taken_out_are_not_read(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    topics = [f"t{number}" for number in range(30)]
    for topic in topics:
        broker.publish(topic, topic.encode())
    frame = source(spark, nsqd=broker.http_address, topic=None, topicsPattern="t.*")
    with running(frame, tmp_path, availableNow=True) as query:
        assert query.awaitTermination(SPARK_DEADLINE)
        tracker = spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(str(query.runId))]
        stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
        assert [stage.numTasks for stage in stages if stage] == [1]
    assert written(tmp_path) == sorted(topic.encode() for topic in topics)
    for topic in topics[:2]:
        broker.publish(topic, b"again")
    frame = source(spark, nsqd=broker.http_address, topic=None, topics="t0")
    assert run_available(frame, tmp_path) == [1]
    assert run_available(frame, tmp_path) == []


def test_the_processing_time_trigger_takes_nodes_as_they_come_and_go(
    spark: SparkSession, tmp_path: Path
) -> None:
    with run_lookupd() as lookupd, run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as one:
        one.publish("t", b"1")
        frame = source(spark, nsqlookupd=lookupd.http_address, topic=None, topicsPattern="t")
        with running(frame, tmp_path, processingTime="100 milliseconds") as query:
            wait_written(tmp_path, [b"1"])
            with run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as other:
                other.publish("t", b"2")
                wait_written(tmp_path, [b"1", b"2"])
                one.stop()
                other.publish("t", b"3")
                wait_written(tmp_path, [b"1", b"2", b"3"])
                one.start()
                one.publish("t", b"4")
                wait_written(tmp_path, [b"1", b"2", b"3", b"4"])
                assert query.isActive


def test_a_topic_deleted_with_unread_messages_fails_the_query_unless_told_otherwise(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    broker.publish("t", *numbered(500))
    with running(source(spark, nsqd=broker.http_address, maxRowsPerTrigger=1), tmp_path) as query:
        wait_until(lambda: written(tmp_path))
        broker.delete("t")
        wait_until(lambda: not query.isActive)
        assert "has been deleted" in str(query.exception())
        assert "set option failOnDataLoss to false" in str(query.exception())
    seen = written(tmp_path)
    broker.publish("t", *numbered(3, 500))
    with running(source(spark, nsqd=broker.http_address, failOnDataLoss="false"), tmp_path):
        wait_written(tmp_path, seen + numbered(3, 500))


def test_a_channel_paused_or_deleted_from_outside_costs_no_row(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    broker.publish("t", b"1")
    with running(source(spark, nsqd=broker.http_address), tmp_path):
        wait_written(tmp_path, [b"1"])
        wait_until(lambda: depth(broker) == 0)
        pause(broker, True)
        wait_until(lambda: broker.channel_stats("t", "c")["paused"])  # type: ignore[index]
        broker.publish("t", b"2")
        pause(broker, False)
        wait_written(tmp_path, [b"1", b"2"])
        broker._call(lambda: broker._daemon.broker.topics["t"].delete_channel("c"))
        wait_until(lambda: broker.channel_stats("t", "c") is not None)
        broker.publish("t", b"3")
        wait_written(tmp_path, [b"1", b"2", b"3"])
        wait_until(lambda: depth(broker) == 0)


def test_a_channel_has_one_query(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    frame = source(spark, nsqd=broker.http_address)
    broker.publish("t", *numbered(5))
    run_available(frame, tmp_path / "one")
    broker.publish("t", *numbered(5, 5))
    # With another checkpoint, while the first is down.
    with running(frame, tmp_path / "two", availableNow=True) as query:
        with pytest.raises(PySparkException, match="the channel c of topic t on .* belongs to another query"):
            query.awaitTermination(SPARK_DEADLINE)
    assert depth(broker) == 5
    # And while it runs.
    with running(frame, tmp_path / "one"):
        wait_written(tmp_path / "one", numbered(10))
        with running(frame, tmp_path / "two") as query:
            with pytest.raises(PySparkException, match="belongs to another query"):
                query.awaitTermination(SPARK_DEADLINE)
        broker.publish("t", *numbered(5, 10))
        wait_written(tmp_path / "one", numbered(15))
    assert written(tmp_path / "two") == []


def test_a_loss_is_said_at_every_start(spark: SparkSession, tmp_path: Path) -> None:
    with run_broker(max_bytes_per_file=10_000, mem_queue_size=10) as broker:
        broker.publish("t", *numbered(10))
        given = {"nsqd": broker.http_address, "maxRowsPerTrigger": 1000}
        run_available(source(spark, **given), tmp_path)
        topic = broker._daemon.broker.topics["t"]
        broker.create("t", "other")
        broker._call(lambda: topic.delete_channel("c"))

        for _ in range(5):
            broker.publish("t", *[b"x" * 100] * 100)
            broker._call(lambda: topic.channels["other"].commit(topic.visible_end))
            broker._call(lambda: reclaim(topic, 2e9))
        for _ in range(2):
            with running(source(spark, **given), tmp_path, availableNow=True) as query:
                with pytest.raises(PySparkException, match="were removed before they were read"):
                    query.awaitTermination(SPARK_DEADLINE)
            assert broker.channel_stats("t", "c") is None
        run_available(source(spark, **given, failOnDataLoss="false"), tmp_path)
        assert written(tmp_path)[-1] == b"x" * 100


def test_errors_of_options_name_the_option(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    def read(schema: str = "", **options: str) -> None:
        reader = spark.read.format("nsq").options(nsqd=broker.http_address, **options)
        (reader.schema(schema) if schema else reader).load().collect()

    with pytest.raises(PySparkException, match="there is no option topik: did you mean topic"):
        read(topik="t")
    with pytest.raises(PySparkException, match="option startingPosition must be one of"):
        read(topic="t", startingPosition="yesterday")
    broker.publish("t", b"x")
    with pytest.raises(PySparkException, match="option startingPosition names the topic tt"):
        read(topic="t", startingPosition='{"tt": "latest"}')
    with pytest.raises(PySparkException, match="option endingPosition is before startingPosition"):
        read(topic="t", startingPosition="latest", endingPosition="2001-01-01T00:00:00Z")
    with pytest.raises(PySparkException, match="option mode: queue works only with readStream"):
        read(topic="t", mode="queue")
    with pytest.raises(PySparkException, match="the schema has body string"):
        read("body string", topic="t")
    frame = source(spark, nsqd=broker.http_address, channel=None)
    with running(frame, tmp_path, availableNow=True) as query:
        with pytest.raises(PySparkException, match="option channel is missing"):
            query.awaitTermination(SPARK_DEADLINE)
