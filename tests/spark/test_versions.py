"""What has to work with every version of Spark that we claim to support.

`make test` runs it with the installed one, `make test-spark-versions` with others. Few and short:
each version starts a session of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from nsparq.spark.session import doctor
from nsparq.spark.session.doctor import State
from nsparq.testing import Broker, run_broker

CAN_STREAM = importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


def test_a_topic_is_read_and_written_as_a_table(spark: SparkSession, broker: Broker) -> None:
    broker.publish("orders", *(b"%d" % number for number in range(20)))
    orders = spark.read.format("nsq").options(topic="orders", nsqd=broker.http_address).load()
    assert sorted(int(row.body) for row in orders.collect()) == list(range(20))
    rows = orders.where("CAST(body AS STRING) < '2'").select("body")
    rows.write.format("nsq").options(topic="small", nsqd=broker.http_address).mode("append").save()
    assert len(broker.peek("small")) == rows.count() == 12


def test_a_stream_is_written_to_a_topic(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    """Of files, so that it needs no source of ours."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("tea\ncake\n")
    stream = spark.readStream.text(str(tmp_path / "in")).selectExpr("value AS body")
    writer = stream.writeStream.format("nsq").options(topic="written", nsqd=broker.http_address)
    query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
    query.awaitTermination()
    assert {message.body for message in broker.peek("written")} == {b"tea", b"cake"}


def test_a_topic_is_read_as_a_stream_or_the_version_is_named(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    options = {"topic": "streamed", "channel": "c", "nsqd": broker.http_address, "maxRowsPerTrigger": "3"}
    checkpoint = str(tmp_path / "checkpoint")

    def read() -> None:
        stream = spark.readStream.format("nsq").options(**options).load().select("body")
        writer = stream.writeStream.format("nsq").options(topic="copied", nsqd=broker.http_address)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()

    broker.publish("streamed", *(b"%d" % number for number in range(7)))
    if not CAN_STREAM:
        with pytest.raises(PySparkException, match="cannot read a topic as a stream"):
            read()
        assert next(one for one in doctor.examine() if one.subject == "streams").state is State.NOTE
        return
    read()
    broker.publish("streamed", b"7")
    read()
    assert sorted(int(message.body) for message in broker.peek("copied", count=100)) == list(range(8))
