"""A new pipeline begins with the archive, reads it in bounded micro-batches, and goes over into
live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pytest

from nsparq.pipeline.execute.progress import CatchUp
from nsparq.spark.session.build import register
from nsparq.testing import Broker, run_broker
from tests.pipeline.conftest import Runs
from tests.support import wait_until
from tests.support.s3 import run_s3

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("moto")

SIZE = 1000
FEED = """
[pipeline.history]
source = {{ topic = "t", archive = "{url}", max_bytes_per_trigger = "400k" }}
sql = "SELECT cast(substring(cast(body AS string), 1, 6) AS int) AS number FROM input"
sink = {{ delta = "{table}" }}
trigger = "100ms"
"""


@pytest.fixture
def store(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server that nsqd, the driver and the executors know."""
    with run_s3("lake") as settings:
        environment = spark.sparkContext.environment
        before = dict(environment)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
            # As `spark.executorEnv.NAME` does when a session starts.
            environment[name] = value
        register(spark)
        yield "s3://lake/nsq"
        environment.clear()
        environment.update(before)
        register(spark)


class Feed:
    """Publishes numbered messages."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.sent = 0

    def publish(self, count: int) -> None:
        for _ in range(count // 20):
            numbers = range(self.sent, self.sent + 20)
            self._broker.publish("t", *((b"%06d" % number).ljust(SIZE, b".") for number in numbers))
            self.sent += 20


def test_a_new_pipeline_reads_the_archive_and_goes_over_into_live(
    spark: SparkSession, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimates: list[float | None] = []
    original = CatchUp.estimate

    def noted(self: CatchUp, *report: Any) -> float | None:
        estimates.append(original(self, *report))
        return estimates[-1]

    monkeypatch.setattr(CatchUp, "estimate", noted)
    flags: dict[str, Any] = {
        "max_bytes_per_file": 100_000,
        "archive_local_bytes": 1,
        "mem_queue_size": 1,
        "sync_timeout": 0.1,
        "checkpoint_interval": 0.1,
    }
    with run_broker(archive=store, **flags) as broker:
        run, feed = Runs(spark, broker, tmp_path), Feed(broker)
        broker.create("t", "other")
        feed.publish(3000)
        wait_until(lambda: len(local_files(broker)) == 1)
        text = FEED.format(url=store, table=tmp_path / "table")

        first = run(text, until=lambda now: now["history"].rows >= 400)["history"]
        assert first.rows < 3000 or first.batches >= 7, "bounded micro-batches"
        assert segments_fetched(broker) == 0, "Spark reads from the store"

        def has_caught_up(now: Any) -> bool:
            """Publishes, so that files are archived and leave the disk while the archive is
            read."""
            if feed.sent < 4000:
                feed.publish(200)
            return now["history"].rows + first.rows == feed.sent and now["history"].lag == 0

        second = run(text, until=has_caught_up)["history"]
        assert (second.error, second.catch_up_seconds) == ("", 0.0)
        assert any(estimates), "when it will have caught up"
        archived = broker.stats("t")["topics"][0]["archive"]["segments"]
        assert archived > 30
    found = deltalake.DeltaTable(tmp_path / "table").to_pyarrow_table()["number"].to_pylist()
    assert sorted(found) == [*range(feed.sent)]


def local_files(broker: Broker) -> list[Path]:
    return [*broker.data_path.glob("topics/t.topic/*.log")]


def segments_fetched(broker: Broker) -> int:
    """Segments that nsqd had to fetch from the archive for readers."""
    return int(broker._daemon.broker.archive.cache.fetched_segments)
