"""Spark reads what is archived from the store, and the rest from nsqd: each message once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nsparq.archive.store import Store
from nsparq.errors import ArchiveUnavailable
from nsparq.spark.datasource import NsqDataSource
from nsparq.spark.errors import DataLoss
from nsparq.spark.options import OptionError, Use
from nsparq.spark.source import archived
from nsparq.spark.source.archived import ArchivedLogs, Part, cut_evenly, parts, time_bounds
from nsparq.spark.source.range_reader import close_idle
from nsparq.storage.gaps import Gaps
from nsparq.storage.manifest import Manifest, SegmentEntry, place_of, segment_key
from nsparq.testing import Broker, run_broker
from tests.spark.source.support import FakeClock, Query, bodies, copied, numbered, options, read_batch
from tests.support import wait_until
from tests.support.s3 import run_s3

SEGMENT = 100_000
"""Bytes of a log file: 100 publishes of 20 messages of 1000 bytes fill about 20."""


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    close_idle()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def start(url: str, **flags: Any) -> Broker:
    """Every file that is complete leaves the disk as soon as the archive has it."""
    given = {"archive_local_bytes": 1, "mem_queue_size": 1, "sync_timeout": 0.1, "checkpoint_interval": 0.1}
    return run_broker(archive=url, max_bytes_per_file=SEGMENT, **(given | flags))


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    with start(url) as running:
        yield running


def publish_only(broker: Broker, count: int, first: int = 0) -> list[bytes]:
    sent = [number + b"x" * 994 for number in numbered(count, first)]
    for at in range(0, count, 20):
        broker.publish("t", *sent[at : at + 20])
    return sent


def publish(broker: Broker, count: int = 2000, first: int = 0) -> list[bytes]:
    """Publish, and wait until all but the newest file are only in the archive."""
    sent = publish_only(broker, count, first)
    wait_until(lambda: len(local_files(broker)) == 1)
    return sent


def local_files(broker: Broker) -> list[Path]:
    return [*broker.data_path.glob("topics/t.topic/*.log")]


def fetched(broker: Broker) -> int:
    """Segments that nsqd had to fetch from the archive for readers."""
    return int(broker._daemon.broker.archive.cache.fetched_segments)


def manifest_of(broker: Broker, url: str) -> Manifest:
    found = ArchivedLogs(options(nsqd=broker.http_address, archive=url)).manifest("t", incarnation(broker))
    assert found is not None
    return found


def at(number: int) -> str:
    """A position in topic t, as an option."""
    return json.dumps({"t": number})


def incarnation(broker: Broker) -> str:
    return str(broker._daemon.broker.topics["t"].incarnation)


# planning, without a store


def entry(base: int, end: int, last_ns: int = 0, size: int = 1000) -> SegmentEntry:
    return SegmentEntry(base, end, size, 0, last_ns, 0, 0)


def manifest(*segments: SegmentEntry, gaps: tuple[tuple[int, int], ...] = ()) -> Manifest:
    return Manifest(topic="t", incarnation="i", segments=segments, gaps=gaps)


def test_a_range_is_cut_at_the_borders_of_archived_segments() -> None:
    first, second, third = entry(0, 10), entry(10, 20), entry(30, 40)
    known = manifest(first, second, third)
    assert parts(known, 5, 45, Gaps()) == [
        Part(5, 10, first),
        Part(10, 20, second),
        Part(20, 30, None),
        Part(30, 40, third),
        Part(40, 45, None),
    ]
    assert parts(known, 12, 15, Gaps()) == [Part(12, 15, second)]
    assert parts(known, 20, 30, Gaps()) == [Part(20, 30, None)]
    assert parts(known, 50, 60, Gaps()) == [Part(50, 60, None)]
    assert parts(known, 7, 7, Gaps()) == []


def test_every_number_is_in_exactly_one_part() -> None:
    known = manifest(entry(3, 5), entry(5, 9), entry(12, 13))
    for low in range(16):
        for high in range(low, 16):
            found = parts(known, low, high, Gaps())
            assert [n for part in found for n in range(part.start, part.end)] == [*range(low, high)]
            assert all(p.entry is None or p.entry.base <= p.start < p.end <= p.entry.end for p in found)


def test_parts_without_a_message_are_left_out() -> None:
    known = manifest(entry(0, 10), entry(4096, 5000))
    assert [part.end for part in parts(known, 0, 5000, Gaps([(10, 4096)]))] == [10, 5000]
    assert [part.end for part in parts(known, 0, 5000, Gaps([(12, 4096)]))] == [10, 4096, 5000]


def test_a_large_segment_is_cut_into_several_pieces() -> None:
    large = entry(100, 1100, size=100_000)
    pieces = cut_evenly(Part(100, 1100, large), 30_000)
    assert [(piece.start, piece.end) for piece in pieces] == [(100, 350), (350, 600), (600, 850), (850, 1100)]
    assert [piece.size_bytes for piece in pieces] == [25_000] * 4
    assert cut_evenly(Part(200, 300, large), 30_000) == [Part(200, 300, large)]


def test_a_time_is_looked_for_in_one_segment_and_before_it() -> None:
    second = entry(20, 30, last_ns=200)
    known = manifest(entry(0, 10, last_ns=100), second, gaps=((10, 20),))
    assert time_bounds(known, 0, 150) == (20, second)
    assert time_bounds(manifest(*known.segments), 0, 150) == (10, second)
    assert time_bounds(known, 0, 300) == (30, None)
    assert time_bounds(known, 25, 50) == (20, second)


def test_the_store_is_asked_again_only_after_a_while(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def latest(_store: Store, topic: str, incarnation: str) -> Manifest:
        asked.append(topic)
        if len(asked) > 2:
            raise ArchiveUnavailable("it is away")
        return manifest(entry(0, 10))

    monkeypatch.setattr(archived, "latest_manifest", latest)
    clock = FakeClock()
    logs = ArchivedLogs(options(nsqd="127.0.0.1:1", archive=url), clock)
    for _ in range(3):
        assert logs.manifest("t", "i", 5) == manifest(entry(0, 10))
    assert logs.manifest("t", "i", 10) is None
    assert len(asked) == 1
    clock.now += archived.FRESH_S
    assert logs.manifest("t", "i", 10) is None and len(asked) == 1
    assert logs.manifest("t", "i", 5) is not None and len(asked) == 2
    clock.now += archived.FRESH_AT_END_S
    assert logs.manifest("t", "i", 10) is None and len(asked) == 3


def test_option_archive_must_be_the_url_of_a_store() -> None:
    with pytest.raises(OptionError, match="option archive must be the URL of a store.* not '/data'"):
        options(Use.LOG_BATCH, nsqd="127.0.0.1:1", archive="/data")
    assert options(Use.LOG_BATCH, nsqd="127.0.0.1:1").archive is None


# reading, with nsqd and a store


def test_a_batch_has_the_same_rows_and_nsqd_serves_only_the_rest(broker: Broker, url: str) -> None:
    sent = publish(broker)
    rows = read_batch(nsqd=broker.http_address, archive=url)
    assert fetched(broker) == 0
    assert bodies(rows) == sent
    assert rows == read_batch(nsqd=broker.http_address)
    assert fetched(broker) > 10


def test_offsets_and_times_are_found_without_nsqd(broker: Broker, url: str) -> None:
    sent = publish(broker)
    rows = read_batch(nsqd=broker.http_address, archive=url)
    places = {"startingPosition": at(rows[333]["offset"]), "endingPosition": at(rows[444]["offset"])}
    assert bodies(read_batch(nsqd=broker.http_address, archive=url, **places)) == sent[333:444]
    for number in (0, 20, 500, 1000, 1980):
        places = {"startingPosition": rows[number]["timestamp"].isoformat()}
        found = read_batch(nsqd=broker.http_address, archive=url, **places)
        since = [row for row in rows if row["timestamp"] >= rows[number]["timestamp"]]
        assert 0 <= len(found) - len(since) <= 20  # a publish within the same microsecond
        assert found[-len(since) :] == since
    late = datetime.now(UTC).isoformat()
    assert read_batch(nsqd=broker.http_address, archive=url, startingPosition=late) == []
    assert fetched(broker) == 0


def test_a_stream_goes_over_the_border_once(broker: Broker, url: str) -> None:
    sent = publish(broker)
    with Query(nsqd=broker.http_address, archive=url, maxRowsPerTrigger=700) as query:
        query.drain()
        assert query.bodies == sent and query.committed > 2
        assert fetched(broker) == 0
        sent += publish(broker, 300, 2000)
        query.start().drain()
        assert query.bodies == sent


def test_a_limit_in_bytes_counts_archived_messages(broker: Broker, url: str) -> None:
    sent = publish(broker)
    with Query(nsqd=broker.http_address, archive=url, maxBytesPerTrigger="500k") as query:
        query.drain()
        assert query.bodies == sent
        assert 4 <= query.committed <= 5


def planned(broker: Broker, url: str, **given: Any) -> tuple[Any, list[Any]]:
    """A batch that is planned, and not read yet."""
    given = {"nsqd": broker.http_address, "topic": "t", "archive": url, "retryFor": "100ms", **given}
    source = NsqDataSource({name: str(value) for name, value in given.items()})
    reader = source.reader(source.schema())
    return reader, [copied(part) for part in reader.partitions()]


def read_parts(reader: Any, found: list[Any]) -> list[bytes]:
    rows = [batch for part in found for batch in copied(reader).read(part)]
    return [body for batch in rows for body in batch["body"].to_pylist()]


def entries(found: list[Any]) -> list[SegmentEntry]:
    return [work.entry for part in found for work in part.value if work.entry is not None]


def test_segments_that_are_archived_and_removed_after_planning_are_read_once(url: str) -> None:
    with start(url) as broker:
        broker.create("t", "c")
        sent = publish(broker, 1000)
        topic = broker._daemon.broker.topics["t"]
        broker._call(topic.change_settings, {"archive": False})
        sent += publish_only(broker, 1000, 1000)
        assert len(local_files(broker)) > 5
        reader, found = planned(broker, url)
        in_store = len(entries(found))
        broker._call(topic.change_settings, {"archive": True})
        publish(broker, 20, 2000)
        assert len(entries(planned(broker, url)[1])) > in_store + 5
        assert read_parts(reader, found) == sent


def test_what_has_left_the_store_comes_from_nsqd(broker: Broker, url: str) -> None:
    sent = publish(broker)
    reader, found = planned(broker, url)
    gone = entries(found)[3]
    # nsqd has fetched this segment before.
    read_batch(nsqd=broker.http_address, startingPosition=at(gone.base))
    Store(url).delete([segment_key(place_of("t", incarnation(broker)), gone)])
    assert read_parts(reader, found) == sent


def test_a_damaged_object_is_read_from_nsqd(url: str, tmp_path: Path) -> None:
    with start(url, archive_local_bytes=0) as broker:
        broker.create("t", "c")
        sent = publish_only(broker, 1000)
        wait_until(
            lambda: broker.stats("t")["topics"][0]["archive"]["segments"] >= len(local_files(broker)) - 1
        )
        reader, found = planned(broker, url)
        path = tmp_path / "store" / segment_key(place_of("t", incarnation(broker)), entries(found)[2])
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        path.write_bytes(damaged)
        assert read_parts(reader, found) == sent


def test_what_neither_has_is_a_loss(broker: Broker, url: str, tmp_path: Path) -> None:
    publish(broker, 500)
    planned_both = [planned(broker, url, failOnDataLoss=fails) for fails in (True, False)]
    broker.delete("t")
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(DataLoss, match="the topic has been deleted"):
        read_parts(*planned_both[0])
    assert read_parts(*planned_both[1]) == []


def test_a_store_that_does_not_answer_leaves_everything_to_nsqd(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with run_broker() as broker:
        broker.publish("t", *numbered(10))
        assert bodies(read_batch(nsqd=broker.http_address, archive="s3://nobody")) == numbered(10)
    assert "topic t is read from nsqd alone" in caplog.text


def test_tasks_for_the_archive_need_no_nsqd(broker: Broker, url: str) -> None:
    sent = publish(broker)
    end = at(manifest_of(broker, url).end)
    reader, found = planned(broker, url, endingPosition=end)
    assert len(entries(found)) == sum(len(part.value) for part in found)
    broker.stop()
    got = read_parts(reader, found)
    assert 1800 < len(got) and got == sent[: len(got)]


def test_emptied_messages_are_not_rows(broker: Broker, url: str) -> None:
    """The topic is emptied after the last commit of the archive, so its manifest does not say
    it."""
    broker.create("t", "c")
    kept = publish(broker, 500)
    topic = broker._daemon.broker.topics["t"]
    broker._call(topic.pause)
    publish(broker, 500, 500)
    broker._call(topic.empty)
    broker._call(topic.unpause)
    later = publish(broker, 20, 1000)
    assert not manifest_of(broker, url).gaps
    assert bodies(read_batch(nsqd=broker.http_address, archive=url)) == kept + later
    assert fetched(broker) == 0


def test_gaps_in_the_archive_are_not_behind(broker: Broker, url: str) -> None:
    broker.create("t", "other")
    publish(broker, 500)
    topic = broker._daemon.broker.topics["t"]
    broker._call(topic.pause)
    publish(broker, 500, 500)
    broker._call(topic.empty)
    broker._call(topic.unpause)
    publish(broker, 500, 1000)
    assert manifest_of(broker, url).gaps
    with Query(nsqd=broker.http_address, archive=url, maxRowsPerTrigger=100) as query:
        assert query.step() == 100
        reported = query.reader.reportLatestOffset()
        assert reported is not None and reported["behind"]["rows"] == 900


def test_rows_come_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto")
    with run_s3("lake") as settings:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        url = f"s3://lake/{tmp_path.name}"
        with start(url) as broker:
            sent = publish(broker, 500)
            assert bodies(read_batch(nsqd=broker.http_address, archive=url)) == sent
            assert fetched(broker) == 0
        close_idle()


def test_spark_reads_the_archive_itself(spark: SparkSession, broker: Broker, url: str) -> None:
    sent = publish(broker)

    def rows(**given: str) -> list[Any]:
        reader = spark.read.format("nsq").options(nsqd=broker.http_address, topic="t", **given)
        return reader.load().orderBy("offset").collect()

    found = rows(archive=url)
    assert fetched(broker) == 0
    assert [bytes(row.body) for row in found] == sent
    assert found == rows()
    assert fetched(broker) > 10
