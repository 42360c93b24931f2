"""Log mode in the driver: where a query begins, how far it reads, nodes that are away."""

from __future__ import annotations

import gc
import json
import logging
import re
import shutil
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThanOrEqual, LessThan

from nsparq.broker.reclaim import reclaim
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access
from nsparq.spark.columns import chosen
from nsparq.spark.datasource import NsqDataSource
from nsparq.spark.errors import ChannelOwned, DataLoss, NoAnswer
from nsparq.spark.options import OptionError
from nsparq.spark.source import driver, filters, peers
from nsparq.spark.source.driver import LogSource
from nsparq.spark.source.plan import begins_epoch
from nsparq.spark.source.positions import Offsets
from nsparq.spark.source.range_reader import close_idle
from nsparq.spark.source.stream import SMALL_BYTES, LogStreamReader
from nsparq.spark.stream_api import ReadAllAvailable
from nsparq.spark.trigger import Limit
from nsparq.storage.files import Files
from nsparq.storage.state_files import read_channel_state
from nsparq.testing import Broker, run_broker, run_lookupd
from tests.spark.source.support import FakeClock, Query, bodies, numbered, options, read_batch
from tests.support import DEADLINE, BrokerProcess, BrokerThread, wait_until
from tests.support.auth_server import unused_port


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That nothing is new is noticed soon, and so is somebody who is away. An answer is waited for,
    also on a busy machine. Nothing stays open."""
    monkeypatch.setattr(driver, "IDLE_S", 0.02)
    monkeypatch.setattr(peers, "LATE_S", DEADLINE)
    monkeypatch.setattr(peers, "MAX_AWAY_S", 0.1)
    monkeypatch.setattr(peers, "SETTLE_S", 0.2)
    yield
    close_idle()


@pytest.fixture
def broker() -> Iterator[Broker]:
    with run_broker() as running:
        yield running


def depth(broker: Broker, topic: str = "t", channel: str = "c") -> int:
    stats = broker.channel_stats(topic, channel)
    assert stats is not None
    return int(stats["depth"])


def http_address(broker: BrokerProcess | BrokerThread) -> str:
    assert isinstance(broker.http_address, tuple)
    return "{}:{}".format(*broker.http_address)


def sequence(query: Query, topic: str = "t") -> int:
    """Where a query with a single node stands."""
    (place,) = query.at[topic].values()
    return int(place[1])


# rows


def test_rows_have_the_columns_of_the_source_and_the_ids_that_consumers_get() -> None:
    with BrokerThread(node_id=700, broadcast_address="127.0.0.1") as broker:
        broker.publish("t", *numbered(5))
        broker.control("create", "t", "other")
        with broker.connect() as consumer:
            consumer.sub("t", "other", rdy=5)
            seen = consumer.read_messages(5, finish=True)
        with Query(nsqd=http_address(broker)) as query:
            query.run_until(5)
        assert [row["id"].encode() for row in query.rows] == [message.id for message in seen]
        assert bodies(query.rows) == [message.body for message in seen]
        for row, message in zip(query.rows, seen, strict=True):
            assert row["topic"] == "t"
            assert row["node"] == http_address(broker)
            assert row["attempts"] == 0
            assert row["offset"] == int(row["id"], 16) - (700 << 54)
            since = row["timestamp"] - datetime.fromtimestamp(0, UTC)
            assert since.days * 86_400_000_000 + since.seconds * 1_000_000 + since.microseconds == (
                message.timestamp_ns // 1000
            )


def test_deferred_messages_are_rows_as_soon_as_they_are_published(broker: Broker) -> None:
    broker.publish("t", b"now")
    broker.publish("t", b"in an hour", defer=3600.0)
    with Query(nsqd=broker.http_address) as query:
        query.run_until(2)
        assert query.bodies == [b"now", b"in an hour"]
        query.drain()
        stats = broker.channel_stats("t", "c")
        assert stats is not None and (stats["depth"], stats["deferred_count"]) == (0, 0)


def test_a_schema_of_some_columns_gives_those(broker: Broker) -> None:
    from nsparq.spark.datasource import SCHEMA

    broker.publish("t", b"x")
    some = type(SCHEMA)([SCHEMA["body"], SCHEMA["topic"]])
    assert read_batch(some, nsqd=broker.http_address) == [{"body": b"x", "topic": "t"}]


# how far, how much


def test_offsets_are_the_same_text_as_long_as_nothing_happens(broker: Broker) -> None:
    broker.publish("t", *numbered(3))
    with Query(nsqd=broker.http_address) as query:
        query.run_until(3)
        before = json.dumps(query.offset)
        for _ in range(3):
            assert query.step() is None
            assert json.dumps(query.offset) == before
        ((name, (incarnation, at)),) = query.at["t"].items()
        assert name == broker.http_address
        assert re.fullmatch(r"[0-9a-f]{32}", incarnation) and type(at) is int


def test_rows_per_trigger_are_shared_by_what_each_node_has() -> None:
    with run_broker() as one, run_broker() as other:
        one.publish("t", *numbered(900))
        other.publish("t", *numbered(100, 900))
        addresses = f"{one.http_address},{other.http_address}"
        with Query(nsqd=addresses, maxRowsPerTrigger=100) as query:
            assert query.step() == 100
            assert {row["node"] for row in query.rows} == {one.http_address, other.http_address}
            assert sum(row["node"] == one.http_address for row in query.rows) == 90
            sizes = [len(query.rows)]
            while (count := query.step()) is not None:
                sizes.append(count)
            assert sizes == [100] * 10
            assert sorted(query.bodies) == numbered(1000)


def test_bytes_per_trigger_hold_about_and_let_a_big_message_pass(broker: Broker) -> None:
    broker.publish("t", *[b"x" * 1000] * 100)
    with Query(nsqd=broker.http_address, maxBytesPerTrigger="10k") as query:
        first = query.step()
        assert first is not None and 8 <= first <= 11
        query.drain()
        assert len(query.rows) == 100
    broker.publish("t", b"x" * 500_000)
    with Query(nsqd=broker.http_address, channel="d", maxBytesPerTrigger="1k") as query:
        assert query.drain(300).bodies[-1] == b"x" * 500_000


def test_a_range_is_cut_into_tasks_by_size(broker: Broker) -> None:
    broker.publish("t", *[b"x" * 1000] * 200)
    with Query(nsqd=broker.http_address, partitionBytes="50k") as query:
        assert query.plan()
        assert (
            query.partitions({}, {**query.offset, "began": {}}) == []
        )  # nothing without a place to begin at
        parts = query.partitions(query._initial, query.offset)
        assert len(parts) == 4
        assert sum(len(query.read(part)) for part in parts) == 200
        ranges = [work for part in parts for work in part.value]
        assert [work.end for work in ranges[:-1]] == [work.start for work in ranges[1:]]


def test_the_driver_reads_a_small_batch_and_leaves_trouble_to_the_task(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, broadcast_address="127.0.0.1") as broker:
        broker.publish("t", *numbered(3))
        with Query(nsqd=http_address(broker), retryFor="60s") as query:
            assert query.step() == 3
            assert query.rows_of_driver is not None
            broker.publish("t", *3 * [bytes(SMALL_BYTES)])
            assert query.step() == 3
            assert query.rows_of_driver is None
            broker.publish("t", *numbered(3, 3))
            assert query.plan()
            broker.kill()
            query.partitions(query.offsets[-2], query.offset)
            assert query.rows_of_driver is None


def test_available_now_ends_at_what_was_there_when_it_began(broker: Broker) -> None:
    broker.publish("t", *numbered(10))
    broker.create("t", "c")
    with Query(nsqd=broker.http_address, maxRowsPerTrigger=4) as query:
        query.start(available_now=True)
        broker.publish("t", *numbered(10, 10))
        sizes = []
        while (count := query.step()) is not None:
            sizes.append(count)
        assert sizes == [4, 4, 2]
        query.start(available_now=True).drain()
        assert query.bodies == numbered(20)


@pytest.fixture
def held(broker: Broker, clock: FakeClock) -> Iterator[LogSource]:
    """A source whose batches wait for five rows, or for a minute."""
    given = {"nsqd": broker.http_address, "minRowsPerTrigger": 5, "maxTriggerDelay": "1m"}
    source = LogSource(options(**given, discoveryInterval="50ms"), clock=clock, sleep=clock.sleep)
    yield source
    source.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def rows_between(start: Offsets, end: Offsets) -> int:
    return sum(place.sequence - start[topic][node].sequence for topic, node, place in end.items_flat())


def wait_seen(source: LogSource, at: Offsets, rows: int) -> None:
    """Until the source has seen so many rows, and does not give them out."""
    wait_until(lambda: source.latest(at, Limit()) == at and rows_between(at, source.report()) == rows)


def test_a_batch_waits_for_its_least_rows_or_for_its_time(
    broker: Broker, held: LogSource, clock: FakeClock
) -> None:
    broker.publish("t", b"x")
    start = held.initial()
    at = held.latest(start, Limit())
    assert rows_between(start, at) == 1  # the first is not held back
    broker.publish("t", *numbered(4))
    wait_seen(held, at, 4)
    broker.publish("t", b"x")
    following = held.latest(at, Limit())
    assert rows_between(at, following) == 5
    broker.publish("t", b"x")
    wait_seen(held, following, 1)
    clock.sleep(60.0)
    assert rows_between(following, held.latest(following, Limit())) == 1


def test_a_delayed_batch_returns_to_spark_each_time(
    broker: Broker, held: LogSource, clock: FakeClock
) -> None:
    """So that the query can be stopped."""
    broker.publish("t", b"x")
    at = held.latest(held.initial(), Limit())
    broker.publish("t", b"x")
    wait_seen(held, at, 1)
    before = clock.now
    assert held.latest(at, Limit()) == at
    assert clock.now - before <= driver.IDLE_S + driver.HELD_STEP_S


def test_a_full_batch_and_a_query_that_ends_are_not_delayed(broker: Broker, held: LogSource) -> None:
    broker.publish("t", b"x")
    at = held.latest(held.initial(), Limit())
    broker.publish("t", *numbered(4))
    wait_seen(held, at, 4)
    assert rows_between(at, held.latest(at, Limit(bytes=10))) == 1
    assert rows_between(at, held.latest(at, Limit(is_everything=True))) == 4
    held.prepare_available_now()
    assert rows_between(at, held.latest(at, Limit())) == 4


def test_a_new_log_is_added_without_delay(broker: Broker, clock: FakeClock) -> None:
    given = {"topic": None, "topicsPattern": ".*", "discoveryInterval": "1ms"}
    chosen = options(nsqd=broker.http_address, minRowsPerTrigger=5, **given)
    source = LogSource(chosen, clock=clock, sleep=clock.sleep)
    try:
        broker.publish("t", b"x")
        at = source.latest(source.initial(), Limit())
        broker.publish("u", b"x")
        ends = []
        wait_until(lambda: ends.append(source.latest(at, Limit())) or "u" in ends[-1])
        wait_seen(source, ends[-1], 1)
    finally:
        source.close()


def test_everything_is_asked_for_only_by_the_trigger_once(broker: Broker) -> None:
    for given in ({}, {"minRowsPerTrigger": 5}, {"maxRowsPerTrigger": 5}, {"maxBytesPerTrigger": 5}):
        with Query(nsqd=broker.http_address, **given) as query:
            default = query.reader.getDefaultReadLimit()
            assert not query.reader._limit(default).is_everything
            assert query.reader._limit(ReadAllAvailable()).is_everything == bool(given)


def test_the_latest_offset_is_reported_with_what_is_behind(broker: Broker) -> None:
    broker.publish("t", *numbered(10))
    with Query(nsqd=broker.http_address, maxRowsPerTrigger=4, topic=None, topicsPattern=".*") as query:
        query.step()
        reported = query.reader.reportLatestOffset()
        assert reported is not None
        (place,) = reported["logs"]["t"].values()
        assert place[1] - sequence(query) == 6
        size = query.reader._source._peers.status("t", broker.http_address).positions.bytes_per_message
        assert reported["behind"] == {"bytes": int(6 * size), "rows": 6} and size > 6
        # A log that is about to be entered is behind as a whole.
        broker.publish("u", *numbered(5))
        wait_until(lambda: query.step() is not None and "u" in query.at)
        query.drain()
        assert query.reader.reportLatestOffset()["behind"] == {"bytes": 0, "rows": 0}
        assert len(query.rows) == 15


# where it begins, where it ends


def test_latest_begins_behind_what_is_there(broker: Broker) -> None:
    broker.publish("t", b"before")
    with Query(nsqd=broker.http_address, startingPosition="latest") as query:
        query.start()
        broker.publish("t", b"after")
        assert query.run_until(1).drain().bodies == [b"after"]


def test_a_time_begins_with_the_first_message_published_then_or_later(broker: Broker) -> None:
    for number in range(20):
        broker.publish("t", b"%d" % number)
    stamp = broker.peek("t")[12].timestamp_ns
    for text in (
        f"{stamp // 10**9}.{stamp % 10**9:09d}",
        datetime.fromtimestamp(stamp // 10**9, UTC).isoformat(),
    ):
        rows = read_batch(nsqd=broker.http_address, startingPosition=text)
        assert bodies(rows) == [b"%d" % n for n in range(12 if "." in text else 0, 20)]
    rows = read_batch(nsqd=broker.http_address, endingPosition=f"{stamp // 10**9}.{stamp % 10**9:09d}")
    assert bodies(rows) == [b"%d" % number for number in range(12)]


def test_the_position_of_the_channel_is_where_its_consumers_are(broker: Broker) -> None:
    with BrokerThread(broadcast_address="127.0.0.1") as other:
        other.publish("t", *numbered(5))
        with other.connect() as consumer:
            consumer.sub("t", "c", rdy=2)
            messages = consumer.read_messages(2)
            consumer.rdy(0)
            for message in messages:
                consumer.fin(message.id)
            wait_until(lambda: other.channel_stats("t", "c")["in_flight_count"] == 0)  # type: ignore[index]
        with Query(nsqd=http_address(other), startingPosition="channel") as query:
            assert query.run_until(3).bodies == numbered(3, 2)


def test_a_channel_that_is_not_there_begins_by_the_rule_of_nsq(broker: Broker) -> None:
    broker.publish("t", b"kept for the first channel")
    with Query(nsqd=broker.http_address, startingPosition="channel") as query:
        assert query.run_until(1).bodies == [b"kept for the first channel"]
    with Query(nsqd=broker.http_address, startingPosition="channel", channel="second") as query:
        query.start()
        broker.publish("t", b"new")
        assert query.run_until(1).bodies == [b"new"]


def test_positions_can_be_given_by_topic_and_node(broker: Broker) -> None:
    broker.publish("t", *numbered(10))
    broker.publish("u", *numbered(10, 10))
    with Query(nsqd=broker.http_address) as query:
        query.start()
        first = sequence(query)
        incarnation = query.at["t"][broker.http_address][0]
    text = json.dumps({"t": {broker.http_address: [incarnation, first + 8]}, "u": "latest"})
    with Query(nsqd=broker.http_address, topic=None, topics="t,u", startingPosition=text) as query:
        assert query.drain().bodies == numbered(2, 8)
    start = json.dumps({"t": {broker.http_address: first + 2, "elsewhere:1": 5}})
    end = json.dumps({"t": {broker.http_address: first + 4}})
    assert bodies(
        read_batch(nsqd=broker.http_address, startingPosition=start, endingPosition=end)
    ) == numbered(2, 2)


def test_an_invalid_position_is_an_error_that_names_the_option(broker: Broker) -> None:
    broker.publish("t", b"x")
    (found,) = read_batch(nsqd=broker.http_address)
    beyond = json.dumps({"t": found["offset"] + 2})
    with pytest.raises(OptionError, match=r"option startingPosition: topic t on \S+ ends at \d+, before \d+"):
        read_batch(nsqd=broker.http_address, startingPosition=beyond)
    other = json.dumps({"t": ["0" * 32, found["offset"]]})
    with pytest.raises(OptionError, match="option endingPosition: .* deleted and created again"):
        read_batch(nsqd=broker.http_address, endingPosition=other)
    with pytest.raises(OptionError, match="option channel is missing"):
        read_batch(nsqd=broker.http_address, startingPosition="channel")


def test_a_position_for_a_topic_that_is_not_read_is_an_error(broker: Broker) -> None:
    broker.publish("t", b"x")
    for option in ("startingPosition", "endingPosition"):
        misspelt = {option: json.dumps({"tt": "latest"})}
        with pytest.raises(OptionError, match=f"option {option} names the topic tt, which is not among"):
            read_batch(nsqd=broker.http_address, **misspelt)
        with pytest.raises(OptionError, match=f"option {option} names the topic tt, which no nsqd has"):
            read_batch(nsqd=broker.http_address, topic=None, topicsPattern="t+", **misspelt)
    with Query(nsqd=broker.http_address, startingPosition='{"tt": "latest"}') as query:
        with pytest.raises(OptionError, match="option startingPosition names the topic tt"):
            query.start()


def test_an_end_before_the_start_is_an_error_that_names_both(broker: Broker) -> None:
    broker.publish("t", *numbered(10))
    first = broker.peek("t")[0].sequence
    for start, end, shown in (
        (first + 5, first + 3, rf"would end at {first + 3} and begin at {first + 5}"),
        ("latest", first + 3, rf"would end at {first + 3} and begin at {first + 10} \(latest\)"),
    ):
        given = {
            "startingPosition": json.dumps({"t": start}),
            "endingPosition": json.dumps({"t": end}),
        }
        with pytest.raises(OptionError, match=f"endingPosition is before startingPosition: .*{shown}"):
            read_batch(nsqd=broker.http_address, **given)
    # Where nothing was published, the times tell.
    given = {"startingPosition": "1970-01-01T00:00:02Z", "endingPosition": "1970-01-01T00:00:01Z"}
    with pytest.raises(OptionError, match=r"1970-01-01T00:00:01\+00:00.*1970-01-01T00:00:02\+00:00"):
        read_batch(nsqd=broker.http_address, **given)
    same = json.dumps({"t": first + 3})
    assert read_batch(nsqd=broker.http_address, startingPosition=same, endingPosition=same) == []


def test_a_batch_needs_a_topic_that_exists_and_a_pattern_does_not(broker: Broker) -> None:
    with pytest.raises(OptionError, match="option topic: no nsqd has a topic t"):
        read_batch(nsqd=broker.http_address)
    assert "t" not in json.dumps(broker.stats()["topics"])
    assert read_batch(nsqd=broker.http_address, topic=None, topicsPattern="t.*") == []


def test_an_empty_topic_is_an_empty_batch_and_a_stream_that_waits(broker: Broker) -> None:
    broker.create("t")
    assert read_batch(nsqd=broker.http_address) == []
    with Query(nsqd=broker.http_address) as query:
        assert query.step() is None
        broker.publish("t", b"x")
        assert query.run_until(1).bodies == [b"x"]


def test_filters_decide_what_a_batch_requests(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by what nsqd is asked for, in the driver and in tasks."""
    with run_broker() as other:
        for one in (broker, other):
            for topic in ("t", "u"):
                one.publish(topic, *numbered(10))
        real, asked = Client.read, []

        def counted(client: Client, topic: str, start: int, *rest: Any, **more: Any) -> Any:
            asked.append((client.url.removeprefix("http://"), topic, start))
            return real(client, topic, start, *rest, **more)

        monkeypatch.setattr(Client, "read", counted)
        first = broker.peek("t")[0].sequence
        addresses = f"{broker.http_address},{other.http_address}"
        given = {"topic": None, "topicsPattern": ".*", "nsqd": addresses, "pushFilters": True}

        def read(*filters: Filter) -> list[dict[str, Any]]:
            asked.clear()
            return read_batch(filters=filters, **given)

        assert len(read()) == 40 and len(asked) == 4
        rows = read(EqualTo(("topic",), "t"), EqualTo(("node",), broker.http_address))
        assert {(row["topic"], row["node"]) for row in rows} == {("t", broker.http_address)}
        assert len(rows) == 10 and asked == [(broker.http_address, "t", first)]
        rows = read(
            EqualTo(("topic",), "t"),
            EqualTo(("node",), broker.http_address),
            GreaterThanOrEqual(("offset",), first + 3),
            LessThan(("offset",), first + 5),
        )
        assert [row["offset"] for row in rows] == [first + 3, first + 4]
        assert asked == [(broker.http_address, "t", first + 3)]
        assert read(EqualTo(("topic",), "none")) == [] == asked


def test_a_filter_on_time_reads_what_was_published_about_then(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "CLOCK_SLACK_NS", 0)
    for number in range(20):
        broker.publish("t", b"%d" % number)
    stamps = [message.timestamp_ns // 1000 for message in broker.peek("t")]
    low, high = (datetime.fromtimestamp(0, UTC) + timedelta(microseconds=stamps[n]) for n in (5, 12))
    chosen = (GreaterThanOrEqual(("timestamp",), low), LessThan(("timestamp",), high))
    rows = read_batch(filters=chosen, nsqd=broker.http_address, pushFilters=True)
    assert bodies(rows) == [b"%d" % number for number in range(5, 12)]
    # A little more is read, since the clock may have been set back meanwhile.
    monkeypatch.setattr(filters, "CLOCK_SLACK_NS", (stamps[5] - stamps[2]) * 1000)
    rows = read_batch(filters=chosen, nsqd=broker.http_address, pushFilters=True)
    assert len(rows) > 7 and set(bodies(rows)) >= {b"%d" % number for number in range(2, 12)}


def test_only_the_named_columns_are_built(broker: Broker) -> None:
    broker.publish("t", b"x", b"y")
    first = broker.peek("t")[0].sequence
    rows = read_batch(chosen("offset, topic"), nsqd=broker.http_address, columns="offset, topic")
    assert rows == [{"offset": first, "topic": "t"}, {"offset": first + 1, "topic": "t"}]
    assert NsqDataSource({"columns": "offset, topic"}).schema() == chosen("offset,topic")
    for columns, reason in (("body,colour", "option columns names 'colour'"), ("body,body", "twice")):
        with pytest.raises(OptionError, match=reason):
            NsqDataSource({"columns": columns}).schema()
    with pytest.raises(OptionError, match="option columns cannot be combined with a schema"):
        read_batch(chosen("body"), nsqd=broker.http_address, columns="topic")


# topics and nodes that come and go


def test_a_topic_that_appears_later_is_read_from_its_first_message() -> None:
    with run_lookupd() as lookupd, run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as broker:
        with Query(nsqlookupd=lookupd.http_address) as query:
            assert query.start().at == {}
            assert query.step() is None
            broker.publish("t", *numbered(3))
            assert query.run_until(3).bodies == numbered(3)
            # It was announced: whoever reads first does not take the messages away.
            assert broker.channel_stats("t", "c") is not None


def test_the_topic_is_created_where_the_address_of_the_nsqd_was_given(broker: Broker) -> None:
    with Query(nsqd=broker.http_address) as query:
        query.start()
        assert depth(broker) == 0
        broker.publish("t", b"x")
        assert query.run_until(1).bodies == [b"x"]


def test_a_pattern_takes_up_new_topics_and_only_those_that_match_as_a_whole(broker: Broker) -> None:
    broker.publish("orders.eu", b"eu")
    broker.publish("all.orders.eu", b"no")
    with Query(nsqd=broker.http_address, topic=None, topicsPattern=r"orders\.\w+") as query:
        assert query.run_until(1).bodies == [b"eu"]
        broker.publish("orders.us", b"us")
        assert query.run_until(2).bodies == [b"eu", b"us"]
        assert {row["topic"] for row in query.rows} == {"orders.eu", "orders.us"}


def test_a_topic_removed_from_the_options_is_no_longer_read(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    for topic in ("t", "u", "v"):
        broker.publish(topic, b"1")
    with Query(nsqd=broker.http_address, topic=None, topics="t,u,v") as query:
        query.drain()
        for changed in ({"topics": "t,u"}, {"topics": "", "topicsPattern": "t"}):
            query.start(**changed)
            for topic in ("t", "u", "v"):
                broker.publish(topic, b"2")
            query.drain()
        assert sorted((row["topic"], row["body"]) for row in query.rows) == [
            *(("t", b"1"), ("t", b"2"), ("t", b"2")),
            *(("u", b"1"), ("u", b"2")),
            ("v", b"1"),
        ]
        assert [*query.at] == ["t"]
        # The channel keeps what has come since, until somebody decides that nobody needs it.
        assert (depth(broker, "u"), depth(broker, "v")) == (1, 2)
        said = [record.message for record in caplog.records if "is no longer read" in record.message]
        assert ["topic v" in said[0], "topic u" in said[1], len(said)] == [True, True, 2]
        assert all("Delete the channel" in text for text in said)
        # Put back in, it is read from what the log still has.
        query.start(topics="t,u", topicsPattern="").drain()
        assert [row["body"] for row in query.rows if row["topic"] == "u"][-1:] == [b"2"]


def test_a_node_that_joins_is_read_from_its_earliest_message() -> None:
    with run_lookupd() as lookupd, run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as one:
        one.publish("t", b"one")
        wait_until(lambda: lookupd.producers("t"))
        with Query(nsqlookupd=lookupd.http_address, startingPosition="latest") as query:
            query.start()
            with run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as other:
                other.publish("t", b"other")
                assert query.run_until(1).bodies == [b"other"]
                assert len(query.at["t"]) == 2


def test_the_start_of_a_new_log_is_in_the_checkpoint_before_its_rows_are_read(broker: Broker) -> None:
    with run_lookupd() as lookupd:
        with Query(nsqlookupd=lookupd.http_address) as query:
            query.start()
            broker.publish("t", *numbered(3))
            broker.register_with(lookupd)
            wait_until(lambda: query.step() is not None)
            assert query.rows == []
            assert query.run_until(3).bodies == numbered(3)


def test_a_node_that_is_away_holds_nobody_up_and_goes_on_where_it_was() -> None:
    with run_broker() as one, run_broker() as other:
        one.publish("t", b"1")
        other.publish("t", b"2")
        with Query(nsqd=f"{one.http_address},{other.http_address}") as query:
            query.run_until(2)
            other.stop()
            one.publish("t", b"3")
            assert query.run_until(3).bodies[-1] == b"3"
            assert len(query.at["t"]) == 2
            other.start()
            other.publish("t", b"4")
            assert query.run_until(4).bodies[-1] == b"4"


def test_a_query_whose_nodes_are_all_away_waits(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    broker.publish("t", b"1")
    with Query(nsqd=broker.http_address) as query:
        query.run_until(1)
        broker.stop()
        for _ in range(5):
            assert query.step() is None
        assert sum("does not answer; trying again: POST" in record.message for record in caplog.records) == 1
        broker.start()
        broker.publish("t", b"2")
        assert query.run_until(2).bodies == [b"1", b"2"]


def test_a_node_is_known_again_under_another_port() -> None:
    with BrokerThread(broadcast_address="127.0.0.1") as broker:
        broker.publish("t", *numbered(3))
        with Query(nsqd=http_address(broker)) as query:
            query.run_until(3)
            before = http_address(broker)
            broker.restart()
            assert http_address(broker) != before
            broker.publish("t", *numbered(3, 3))
            query.start(nsqd=http_address(broker))
            assert query.run_until(6).bodies == numbered(6)
            assert [*query.at["t"]] == [http_address(broker)]


def test_a_batch_planned_before_the_port_changed_is_read_from_the_new_one() -> None:
    with BrokerThread(broadcast_address="127.0.0.1") as broker:
        broker.publish("t", *numbered(3))
        with Query(nsqd=http_address(broker)) as query:
            assert query.plan()
            before = http_address(broker)
            broker.restart()
            query.start(nsqd=http_address(broker))
            assert query.bodies == numbered(3)
            assert {row["node"] for row in query.rows} == {before}


def test_one_log_under_two_addresses_is_read_once(broker: Broker) -> None:
    broker.publish("t", *numbered(3))
    with run_lookupd() as lookupd:
        broker.register_with(lookupd)
        wait_until(lambda: lookupd.producers("t"))
        other = broker.http_address.replace("127.0.0.1", "localhost")
        with Query(nsqd=other, nsqlookupd=lookupd.http_address) as query:
            assert query.run_until(3).drain().bodies == numbered(3)


def test_nobody_to_ask_at_the_beginning_is_an_error_that_names_the_options() -> None:
    with Query(nsqd="127.0.0.1:1", retryFor="100ms") as query:
        with pytest.raises(NoAnswer, match="options nsqlookupd, nsqd.*127.0.0.1:1"):
            query.start()
    with pytest.raises(NoAnswer, match="options nsqlookupd, nsqd"):
        read_batch(nsqlookupd="127.0.0.1:1", retryFor="100ms")


def test_a_batch_wants_all_nodes_and_a_stream_begins_with_some(broker: Broker) -> None:
    broker.publish("t", b"x")
    addresses = f"{broker.http_address},127.0.0.1:1"
    with pytest.raises(NoAnswer):
        read_batch(nsqd=addresses, retryFor="100ms")
    with Query(nsqd=addresses) as query:
        assert query.run_until(1).bodies == [b"x"]


# what is gone


def test_a_topic_deleted_after_all_of_it_was_read_is_dropped(broker: Broker) -> None:
    broker.publish("t", b"x")
    with Query(nsqd=broker.http_address) as query:
        query.run_until(1).drain()
        broker.delete("t")
        query.drain()
        assert query.at == {}
        broker.publish("t", b"y")
        assert query.run_until(2).bodies == [b"x", b"y"]


def test_a_topic_deleted_with_unread_messages_fails_the_query(broker: Broker) -> None:
    broker.publish("t", *numbered(10))
    with Query(nsqd=broker.http_address, maxRowsPerTrigger=4) as query:
        query.step()
        broker.delete("t")
        with pytest.raises(DataLoss, match=r"topic t on \S+ has been deleted with up to 6 .* failOnDataLoss"):
            query.step()


def test_a_topic_deleted_while_the_query_was_down_may_have_had_more(broker: Broker) -> None:
    broker.publish("t", b"x")
    with Query(nsqd=broker.http_address) as query:
        query.run_until(1)
        query.stop()
        broker.delete("t")
        with pytest.raises(DataLoss, match="perhaps with unread messages"):
            query.step()


def test_without_failing_a_topic_created_again_is_read_from_its_beginning(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.publish("t", *numbered(10))
    with Query(nsqd=broker.http_address, maxRowsPerTrigger=4, failOnDataLoss="false") as query:
        query.step()
        broker.delete("t")
        broker.publish("t", *numbered(2, 20))
        assert query.run_until(6).bodies == numbered(4) + numbered(2, 20)
        assert "created again with up to 6 unread messages" in caplog.text


def test_a_topic_created_again_with_unread_messages_fails_the_query(broker: Broker) -> None:
    broker.publish("t", *numbered(10))
    with Query(nsqd=broker.http_address, maxRowsPerTrigger=4) as query:
        query.step()
        broker.delete("t")
        broker.publish("t", b"other")
        with pytest.raises(DataLoss, match="deleted and created again with up to 6 unread messages"):
            query.step()


def test_messages_removed_before_they_were_read_fail_the_query_or_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with run_broker(max_bytes_per_file=10_000, mem_queue_size=10) as broker:
        broker.publish("t", *numbered(100))
        with Query(nsqd=broker.http_address, maxRowsPerTrigger=10) as query:
            query.step()
            query.stop()
            lose_what_is_unread(broker)
            with pytest.raises(DataLoss, match=r"topic t on \S+: up to \d+ messages from \d+ on were "):
                query.step()
            query.start(failOnDataLoss="false", maxRowsPerTrigger=1000)
            broker.publish("t", b"last")
            query.drain()
            assert query.bodies[-1] == b"last" and 11 <= len(query.rows) < 1100
            assert "were removed before they were read; the query continues without them" in caplog.text


def lose_what_is_unread(broker: Broker) -> None:
    """The channel is deleted while the query is down, and nsqd removes unread messages."""
    with Client(broker.http_address, Access()) as client:
        first = client.positions("t").earliest
    broker.create("t", "other")
    broker._call(lambda: broker._daemon.broker.topics["t"].delete_channel("c"))

    def removed() -> bool:
        broker.publish("t", *[b"x" * 100] * 100)
        topic = broker._daemon.broker.topics["t"]
        broker._call(lambda: topic.channels["other"].commit(topic.visible_end))
        with Client(broker.http_address, Access()) as client:
            return client.positions("t").earliest > first

    wait_until(removed, interval=0.2)


def test_a_killed_broker_causes_no_loss_and_no_alarm() -> None:
    # The second query reads what the first has finished, so nothing may leave the log.
    flags = {"broadcast_address": "127.0.0.1", "sync_timeout": 0.05, "retention_bytes": 1 << 20}
    with BrokerProcess(**flags) as broker:
        broker.publish("t", *numbered(10))
        with Query(nsqd=http_address(broker), maxRowsPerTrigger=4, partitionBytes=64) as query:
            query.step()
            for number in range(1, 4):
                broker.kill()
                broker.start()
                # Neither limits nor tasks are spent on the gap in the numbers.
                broker.publish("t", *numbered(10, number * 10))
                query.start(nsqd=http_address(broker))
                before = len(query.rows)
                query.run_until(before + 1)
                assert len(query.rows) - before <= 4
            batches = len(query.offsets)
            assert query.run_until(40).drain().bodies == numbered(40)
            assert len(query.offsets) - batches < 12
        with Query(nsqd=http_address(broker), channel="d", partitionBytes=64) as query:
            assert query.plan()
            parts = query.partitions(query._initial, query.offset)
            assert len(parts) < 80
            assert [row["body"] for part in parts for row in query.read(part)] == numbered(40)
        with Query(nsqd=http_address(broker), channel="e", maxRowsPerTrigger=100) as query:
            assert query.step() == 40, "a limit that is not reached does not stop at a gap"


def test_read_messages_that_a_killed_broker_has_removed_are_no_loss(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"broadcast_address": "127.0.0.1", "max_bytes_per_file": 2000}
    with BrokerProcess(tmp_path, **flags) as broker:
        broker.publish("t", *numbered(200))
        with Query(nsqd=http_address(broker)) as query:
            query.start()
            path = tmp_path / "topics" / "t.topic" / "c.channel"
            query.run_until(200).drain()
            query.stop()

            def is_checkpointed() -> bool:
                state = read_channel_state(Files(), path)
                return state is not None and state.cursor >= sequence(query)

            wait_until(is_checkpointed)
            broker.kill()
            broker.start()
            broker.publish("t", *numbered(10, 200))
            wait_until(lambda: earliest(broker) > sequence(query))
            query.start(nsqd=http_address(broker))
            assert query.run_until(210).bodies == numbered(210)


@pytest.mark.parametrize("is_away", [False, True])
def test_read_messages_may_be_removed_after_a_batch_was_planned(tmp_path: Path, is_away: bool) -> None:
    """A query stands at the end of what a killed broker had; the number behind it is far ahead.
    What lies before is removed as soon as the last channel has passed it: here, between the plan
    and its tasks."""
    address = f"127.0.0.1:{unused_port()}"
    flags = {"broadcast_address": "127.0.0.1", "http_address": address, "max_bytes_per_file": 2000}
    with BrokerProcess(tmp_path, **flags) as broker:
        broker.control("create", "t", "other")
        broker.publish("t", *numbered(200))
        with Query(nsqd=address) as query:
            query.run_until(200).drain()
            wait_until(lambda: broker.channel_stats("t", "c")["depth"] == 0)  # type: ignore[index]
            broker.kill()
            broker.start()
            broker.publish("t", *numbered(10, 200))
            wait_until(query.plan)
            start, end = query.offsets[-2:]
            if is_away:
                # Nobody can say where there are messages.
                query.reader._source._peers.reachable = lambda name: None  # type: ignore[method-assign]
                parts = query.partitions(start, end)
            broker.control("delete", "t", "other")
            wait_until(lambda: earliest(broker) > start["logs"]["t"][address][1])
            if not is_away:
                parts = query.partitions(start, end)
            (part,) = parts
            assert bodies(query.read(part)) == numbered(10, 200)


def earliest(broker: BrokerProcess) -> int:
    return int(json.loads(broker.http("GET", "/topic/positions", topic="t"))["earliest"])


def test_emptied_messages_give_no_rows(broker: Broker) -> None:
    broker.create("t", "c")
    broker.publish("t", b"before")

    def pause_and_empty() -> None:
        topic = broker._daemon.broker.topics["t"]
        topic.pause()

    broker._call(pause_and_empty)
    broker.publish("t", *numbered(5))
    with Query(nsqd=broker.http_address) as query:
        assert query.run_until(1).drain().bodies == [b"before"]
        broker._call(lambda: broker._daemon.broker.topics["t"].empty())
        broker._call(lambda: broker._daemon.broker.topics["t"].unpause())
        broker.publish("t", b"after")
        assert query.run_until(2).drain().bodies == [b"before", b"after"]
    assert bodies(read_batch(nsqd=broker.http_address)) == [b"before", b"after"]


# the channel


def test_the_depth_of_the_channel_is_the_lag_even_when_nothing_more_comes(broker: Broker) -> None:
    broker.publish("t", *numbered(10))
    with Query(nsqd=broker.http_address, maxRowsPerTrigger=4) as query:
        query.start()
        assert depth(broker) == 10
        query.step()
        assert depth(broker) == 10  # the sink has them; Spark has not asked again yet
        query.plan()
        assert depth(broker) == 6
        query._run()
        query.drain()
        # commit() was never called for the last batch.
        assert depth(broker) == 0


def test_a_channel_is_the_querys_own_until_it_is_released(broker: Broker) -> None:
    broker.publish("t", *numbered(10))
    first = Query(nsqd=broker.http_address, maxRowsPerTrigger=4)
    with first, Query(nsqd=broker.http_address) as second:
        first.step()
        assert owner(broker) == first.offset["query"]
        # With another checkpoint, while the first is down, and while it runs.
        for _ in range(2):
            with pytest.raises(ChannelOwned, match=rf"belongs to another query, {owner(broker)}, since 20.*"):
                second.step()
            assert second.rows == []
            first.start().step()
        assert depth(broker) == 2
        # Moved by nobody else, it can be read by anybody.
        rows = read_batch(nsqd=broker.http_address, channel="c", startingPosition="channel")
        assert bodies(rows) == numbered(2, 8)
        with Client(broker.http_address, Access()) as client:
            client.post("/channel/release", topic="t", channel="c")
        assert second.run_until(10).bodies == numbered(10)
        assert owner(broker) == second.offset["query"]
        with pytest.raises(ChannelOwned):
            first.start().step()


def owner(broker: Broker) -> str:
    stats = broker.channel_stats("t", "c")
    assert stats is not None
    return str(stats["owner"])


def test_a_query_that_owns_nothing_can_begin_again_and_leaves_the_channels_of_others_alone(
    broker: Broker,
) -> None:
    broker.publish("t", *numbered(10))
    for _ in range(2):
        with Query(nsqd=broker.http_address, ownChannel="false") as query:
            query.start()
            assert depth(broker) == 10
            assert query.run_until(10).drain().bodies == numbered(10)
            assert owner(broker) == "" == query.offset["query"]
    with Query(nsqd=broker.http_address) as query:
        query.run_until(10)
    with Query(nsqd=broker.http_address, ownChannel="false") as query:
        with pytest.raises(ChannelOwned):
            query.step()


def test_offsets_of_version_1_get_an_owner_once(broker: Broker) -> None:
    broker.publish("t", *numbered(5))
    with Query(nsqd=broker.http_address) as query:
        query.start()
        query.offsets, query.committed = [query.at], 1
        query.start()
        assert query.run_until(5).bodies == numbered(5)
        assert query.step() is None and len(query.offsets) == 2
        assert owner(broker) == query.offset["query"] != ""
        # With nothing new too, in a batch without rows.
        query.offsets.append(query.at)
        query.committed = 3
        with Client(broker.http_address, Access()) as client:
            client.post("/channel/release", topic="t", channel="c")
        assert query.start().step() == 0
        assert query.step() is None
        assert owner(broker) == query.offset["query"]


@pytest.mark.parametrize("position", ["earliest", "latest"])
def test_a_crash_in_the_first_batch_changes_neither_its_rows_nor_the_owner(
    broker: Broker, position: str
) -> None:
    broker.create("t")
    with Query(nsqd=broker.http_address, startingPosition=position) as query:
        query.start()
        broker.publish("t", *numbered(5))
        assert query.plan()
        query.partitions(query._initial, query.offset)
        claimed = owner(broker)
        # Spark asks for the beginning again, and that is another by now.
        query.stop()
        reader = NsqDataSource(query.given).streamReader(query.schema)
        assert isinstance(reader, LogStreamReader)
        query._initial, query._reader = reader.initialOffset(), reader
        query._run()
        assert query.bodies == numbered(5)
        broker.publish("t", *numbered(5, 5))
        assert query.run_until(10).bodies == numbered(10)
        assert owner(broker) == query.offset["query"] == claimed


def test_a_loss_is_reported_at_every_start_until_it_is_accepted(tmp_path: Path) -> None:
    """The channel is deleted while the query is down, then nsqd is killed."""
    flags: dict[str, Any] = {"broadcast_address": "127.0.0.1", "max_bytes_per_file": 2000}
    with BrokerProcess(tmp_path, **flags) as broker:
        broker.publish("t", *numbered(200))
        with Query(nsqd=http_address(broker), maxRowsPerTrigger=10) as query:
            query.step()
            query.stop()
            broker.control("create", "t", "other")
            broker.control("delete", "t", "c")
            broker.kill()
            broker.start()
            broker.publish("t", *numbered(10, 200))
            latest = json.loads(broker.http("GET", "/topic/positions", topic="t"))["latest"]
            broker.http("POST", "/channel/commit", topic="t", channel="other", sequence=latest - 10)
            wait_until(lambda: earliest(broker) > sequence(query) and begins_epoch(earliest(broker)))
            for _ in range(3):
                with pytest.raises(DataLoss, match="removed before they were read"):
                    query.start(nsqd=http_address(broker)).step()
                assert broker.channel_stats("t", "c") is None
            # Nor does it help that somebody creates the channel.
            broker.control("create", "t", "c")
            with pytest.raises(DataLoss, match="removed before they were read"):
                query.start().step()
            query.start(failOnDataLoss="false")
            assert query.run_until(20).bodies == numbered(10) + numbered(10, 200)
            query.start(failOnDataLoss="true").drain()
            assert owner_of(broker) == query.offset["query"]


def owner_of(broker: BrokerProcess) -> str:
    stats = broker.channel_stats("t", "c")
    assert stats is not None
    return str(stats["owner"])


def test_a_paused_channel_stops_the_query_on_its_topic(broker: Broker) -> None:
    broker.publish("t", b"1")
    broker.publish("u", b"2")
    channel = "c"
    with Query(nsqd=broker.http_address, topic=None, topics="t,u") as query:
        query.run_until(2)
        broker._call(lambda: broker._daemon.broker.topics["t"].channels[channel].pause())
        broker.publish("t", b"3")
        broker.publish("u", b"4")
        query.drain()
        assert sorted(query.bodies) == [b"1", b"2", b"4"]
        broker._call(lambda: broker._daemon.broker.topics["t"].channels[channel].unpause())
        assert query.run_until(4).bodies[-1] == b"3"


def test_a_paused_topic_is_read_up_to_where_it_was_paused(broker: Broker) -> None:
    broker.create("t", "other")
    broker.publish("t", b"1")
    broker._call(lambda: broker._daemon.broker.topics["t"].pause())
    broker.publish("t", b"2")
    with Query(nsqd=broker.http_address) as query:
        assert query.run_until(1).drain().bodies == [b"1"]
        broker._call(lambda: broker._daemon.broker.topics["t"].unpause())
        assert query.run_until(2).bodies == [b"1", b"2"]


def test_a_channel_deleted_from_outside_is_created_again_where_the_query_is(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.publish("t", *numbered(10))
    with Query(nsqd=broker.http_address, maxRowsPerTrigger=4) as query:
        query.step()
        broker._call(lambda: broker._daemon.broker.topics["t"].delete_channel("c"))
        query.drain(1)
        assert depth(broker) == 6
        assert query.drain().bodies == numbered(10)
        assert depth(broker) == 0
        assert sum("had been deleted: created again" in record.message for record in caplog.records) == 1


def test_a_channel_moved_from_outside_comes_back(broker: Broker) -> None:
    broker.publish("t", *numbered(10))
    with Query(nsqd=broker.http_address, maxRowsPerTrigger=4) as query:
        query.step()
        broker._call(lambda: broker._daemon.broker.topics["t"].channels["c"].empty())
        query.plan()
        assert depth(broker) == 6


def test_the_channel_of_a_broker_that_was_killed_is_moved_again() -> None:
    with BrokerProcess(broadcast_address="127.0.0.1", http_address=f"127.0.0.1:{free_port()}") as broker:
        broker.publish("t", *numbered(10))
        with Query(nsqd=http_address(broker)) as query:
            query.run_until(10).drain()
            broker.kill()
            broker.start()
            wait_until(lambda: query.drain() and channel_depth(broker) == 0)
            assert query.bodies == numbered(10)


def channel_depth(broker: BrokerProcess) -> int:
    stats = broker.channel_stats("t", "c")
    assert stats is not None
    return int(stats["depth"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_nsqd_keeps_what_the_query_has_yet_to_read() -> None:
    with run_broker(max_bytes_per_file=10_000, mem_queue_size=10) as broker:
        broker.create("t", "fast")
        broker.publish("t", *numbered(100))
        with Query(nsqd=broker.http_address, maxRowsPerTrigger=10) as query:
            query.step()
            for _ in range(10):
                broker.publish("t", *[b"x" * 100] * 100)
                topic = broker._daemon.broker.topics["t"]
                broker._call(lambda topic=topic: topic.channels["fast"].commit(topic.visible_end))
                broker._call(lambda topic=topic: reclaim(topic, 2e9))
            query.start(maxRowsPerTrigger=100_000)
            query.drain()
            assert query.bodies[:100] == numbered(100) and len(query.rows) == 1100


def test_restarts_at_every_point_give_each_row_once(broker: Broker) -> None:
    broker.publish("t", *numbered(50))
    with Query(nsqd=broker.http_address, maxRowsPerTrigger=7) as query:
        for number in range(30):
            if number % 3 == 0:
                query.plan()  # written to the offset log, and killed before it is run
                query.start()
            else:
                query.step()
            if number % 2:
                query.start()
        assert query.bodies == numbered(50)


def test_a_checkpoint_of_something_else_is_refused(broker: Broker) -> None:
    from nsparq.spark.source.positions import BadOffset

    broker.publish("t", b"x")
    with Query(nsqd=broker.http_address) as query:
        query.start()
        query.offsets.append({"b": 3})  # type: ignore[dict-item]
        query.committed = 1
        with pytest.raises(BadOffset, match="not an offset of format nsq in log mode"):
            query.plan()


def test_nothing_of_a_secret_is_logged(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    broker.publish("t", b"x")
    with Query(nsqd=broker.http_address, authToken="s3cret") as query:
        query.run_until(1)
        broker.stop()
        query.step()
        broker.start()
    assert "s3cret" not in caplog.text


def test_an_idle_query_polls_less_often_and_then_returns(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "IDLE_S", 0.25)
    broker.publish("t", b"x")
    now = 0.0
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        naps.append(seconds)

    source = LogSource(options(nsqd=broker.http_address), clock=lambda: now, sleep=sleep)
    try:
        start = source.latest(source.initial(), Limit())
        assert naps == []
        source.latest(start, Limit())
        assert naps == sorted(naps) and naps[-1] == driver.LAST_STEP_S
        before = len(naps)
        source.latest(start, Limit())
        assert set(naps[before:]) == {driver.LAST_STEP_S}
        broker.publish("t", b"y")
        assert source.latest(start, Limit()) != start
    finally:
        source.close()


def test_a_log_restored_from_an_older_copy_is_read_from_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    data.mkdir()
    with run_broker(data) as broker:
        broker.publish("t", *numbered(3))
        broker.create("t", "c")
        broker.stop()
        shutil.copytree(data, copy)
        broker.start()
        broker.publish("t", *numbered(3, 3))
        with Query(nsqd=broker.http_address) as query:
            query.run_until(6)
            query.stop()
            broker.stop()
            shutil.rmtree(data)
            shutil.copytree(copy, data)
            broker.start()
            with pytest.raises(DataLoss, match=r"ends at \d+, but the query has read it up to \d+"):
                query.step()
            query.start(failOnDataLoss="false").drain()
            broker.publish("t", *numbered(2, 6))
            assert query.run_until(8).bodies == numbered(8)
            assert "; the query continues without them" in caplog.text


def test_available_now_knows_a_log_by_either_of_its_addresses(broker: Broker) -> None:
    broker.publish("t", *numbered(3))
    with run_lookupd() as lookupd:
        broker.register_with(lookupd)
        wait_until(lambda: lookupd.producers("t"))
        with Query(nsqd=broker.http_address, nsqlookupd=lookupd.http_address) as query:
            query.start(available_now=True).drain()
            assert query.bodies == numbered(3)


def test_outside_of_spark_the_garbage_collector_is_left_alone(broker: Broker) -> None:
    broker.publish("t", b"x")
    frozen = gc.get_freeze_count()
    with Query(nsqd=broker.http_address) as query:
        query.run_until(1)
    # Fewer is no fault: a frozen object of another test may have died meanwhile.
    assert gc.get_freeze_count() <= frozen
