"""Queue mode in the driver: when a batch starts, who gives how much, nodes that are away."""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StringType, StructType

from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Refused
from nsparq.spark.cluster.nodes import Node
from nsparq.spark.datasource import SCHEMA, NsqDataSource
from nsparq.spark.options import NsqOptions, OptionError, Use
from nsparq.spark.queue.connection import QueueConnection
from nsparq.spark.queue.planner import Backlog, share, tcp_address
from nsparq.spark.queue.reader import QueueStreamReader
from nsparq.spark.queue.staging import StagingError
from tests.spark.queue.support import Query, address, numbered, options, tcp
from tests.support import BrokerThread, TestBroker, start_broker, start_process, wait_until
from tests.support.auth_server import unused_port
from tests.support.lookupd import LookupdThread


@pytest.fixture(scope="module")
def shared() -> Iterator[TestBroker]:
    with start_broker(broadcast_address="127.0.0.1") as found:
        yield found


@pytest.fixture
def broker(shared: TestBroker) -> Iterator[TestBroker]:
    yield shared
    for topic in shared.stats()["topics"] or []:
        shared.control("delete", topic["topic_name"])


@pytest.fixture
def query(tmp_path: Path, broker: TestBroker) -> Iterator[Query]:
    found = Query(tmp_path, broker)
    yield found
    found.kill()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsparq.spark.queue.reader.WAIT_S", 0.02)
    # A busy machine is silent at times.
    monkeypatch.setattr("nsparq.spark.queue.task.IDLE_S", 0.5)


def depth(broker: TestBroker, topic: str = "t") -> int:
    found = broker.channel_stats(topic, "c")
    assert found is not None
    return int(found["depth"])


# planning


def backlog(**depths: int) -> dict[tuple[str, str], Backlog]:
    return {("t", node): Backlog(depth, 100.0) for node, depth in depths.items()}


@pytest.mark.parametrize(
    ("depths", "most", "connections", "wanted"),
    [
        ({"a": 7}, 100, 1, {"a": [7]}),
        ({"a": 300, "b": 100}, 100, 1, {"a": [75], "b": [25]}),
        ({"a": 1_000_000, "b": 1}, 100, 1, {"a": [99], "b": [1]}),
        ({"a": 10_001}, 100_000, 2, {"a": [5001, 5000]}),
        ({"a": 10_001}, 100_000, 3, {"a": [3334, 3334, 3333]}),
        ({"a": 5_000}, 100_000, 3, {"a": [5000]}),
        ({"a": 5_001}, 100_000, 3, {"a": [2501, 2500]}),
    ],
)
def test_a_batch_is_shared_in_proportion_to_the_backlogs(
    depths: dict[str, int], most: int, connections: int, wanted: dict[str, list[int]]
) -> None:
    total = sum(depths.values())
    assert share(backlog(**depths), min(most, total), connections) == {"t": wanted}


def test_the_first_offset_creates_the_channel(query: Query, broker: TestBroker) -> None:
    reader = query.start()
    assert broker.channel_stats("t", "c") is None
    first = reader.initialOffset()
    assert depth(broker) == 0
    assert first == reader.initialOffset() == {"batch": 0, "staging": first["staging"], "take": {}}


def test_no_messages_no_batch(query: Query, broker: TestBroker) -> None:
    reader = query.start()
    first = reader.initialOffset()
    assert reader.latestOffset(first, reader.getDefaultReadLimit()) is first
    broker.publish("t", b"one")
    second = reader.latestOffset(first, reader.getDefaultReadLimit())
    assert second["batch"] == 1 and [*second["take"]["t"].values()] == [[1]]
    assert query.step() == 1
    assert query.step() is None


def test_an_offset_reads_the_same_from_the_checkpoint(query: Query, broker: TestBroker) -> None:
    broker.publish("t", b"one")
    query.step()
    (offset,) = query.offsets
    assert json.dumps(offset) == json.dumps(json.loads(json.dumps(offset)), sort_keys=True)


def test_deferred_messages_make_a_batch_when_they_are_due(query: Query, broker: TestBroker) -> None:
    query.step()
    with broker.connect() as connection:
        connection.dpub("t", 300, b"later")
    started = time.monotonic()
    query.drain_until([b"later"])
    assert time.monotonic() - started > 0.2 and len(query.offsets) == 2


@pytest.mark.parametrize("limit", ["option", "call"])
def test_a_batch_has_no_more_rows_than_allowed(tmp_path: Path, broker: TestBroker, limit: str) -> None:
    query = Query(tmp_path, broker, maxRowsPerTrigger="40")
    if limit == "call":
        query.limit = ReadMaxRows(30)
    broker.publish("t", *numbered(100))
    assert query.step() == (40 if limit == "option" else 30)
    query.drain_until(numbered(100))
    query.kill()


def test_a_batch_waits_for_its_least_rows(tmp_path: Path, broker: TestBroker) -> None:
    query = Query(tmp_path, broker, minRowsPerTrigger="5", maxBytesPerTrigger="1k")
    broker.publish("t", b"the first is not held back")
    assert query.step() == 1
    broker.publish("t", *numbered(4))
    assert query.step() is None and depth(broker) == 4
    broker.publish("t", *numbered(1, 4))
    assert query.step() == 5
    # What ends by itself does not wait, nor does what is full.
    broker.publish("t", b"once")
    assert query.step() is None
    query.limit = ReadAllAvailable()
    assert query.step() == 1
    query.limit = None
    broker.publish("t", b"available now")
    assert query.step() is None
    query.start(available_now=True)
    assert query.step() == 1
    broker.publish("t", *[b"x" * 5000] * 3)
    query.start()
    assert query.step() == query.step() == 1
    query.kill()


def test_a_batch_has_no_more_bytes_than_allowed(tmp_path: Path, broker: TestBroker) -> None:
    bodies = [b"%02d" % number * 5000 for number in range(50)]
    broker.control("create", "t", "c")
    broker.publish("t", *bodies)
    query = Query(tmp_path, broker, maxBytesPerTrigger="100k")
    rows = query.step()
    assert rows is not None and 8 <= rows <= 12
    query.drain_until(bodies)
    query.kill()


def test_all_that_is_available_is_what_waits_now(query: Query, broker: TestBroker) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(200))
    query.limit = ReadAllAvailable()
    assert query.step() == 200


def test_several_connections_share_a_node(
    tmp_path: Path, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsparq.spark.queue.planner.SLOT_ROWS", 100)
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(1000))
    query = Query(tmp_path, broker, connectionsPerNode="3")
    assert query.step() == 1000
    (rows,) = query.offsets[0]["take"]["t"].values()
    assert rows == [334, 333, 333]
    assert sorted(query.counts()) == numbered(1000)
    query.kill()


def test_several_topics_of_several_nodes_are_one_stream(tmp_path: Path, broker: TestBroker) -> None:
    with start_broker(broadcast_address="127.0.0.1") as other:
        query = Query(tmp_path, broker, other, topic="", topics="t, u")
        query.step()
        for number, (where, topic) in enumerate([(broker, "t"), (broker, "u"), (other, "t"), (other, "u")]):
            where.publish(topic, *numbered(50, number * 100))
        query.drain_until(
            [body for start in (0, 100, 200, 300) for body in numbered(50, start)],
        )
        seen = {(row["topic"], row["node"], row["body"][3:4]) for row in query.rows}
        assert {(topic, node) for topic, node, _ in seen} == {
            (topic, address(where)) for topic in "tu" for where in (broker, other)
        }
        assert max(query.counts().values()) == 1
        query.kill()


def test_equal_ids_of_two_nodes_are_not_taken_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when two nsqd on one host have the same --node-id.
    with start_broker(broadcast_address="127.0.0.1", node_id=1) as one:
        with start_broker(broadcast_address="127.0.0.1", node_id=1) as two:
            query = Query(tmp_path, one, two)
            query.step()
            for where, bodies in ((one, numbered(100)), (two, numbered(100, 100))):
                where.publish("t", *bodies)
                with where.connect() as connection:
                    connection.sub("t", "c", rdy=100)
                    messages = connection.read_messages(100)
                    connection.rdy(0)
                    for message in messages:
                        connection.req(message.id)
                    connection.barrier()
            monkeypatch.setattr(QueueConnection, "confirm_fins", lambda self: False)
            query.drain_until(numbered(200))
            assert {row["attempts"] for row in query.rows} == {2}
            assert max(query.counts().values()) == 1
            query.kill()


# available now


def test_available_now_takes_what_was_there_and_ends(query: Query, broker: TestBroker) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(100))
    query.limit = ReadMaxRows(40)
    query.start(available_now=True)
    counts = []
    while (count := query.step()) is not None:
        counts.append(count)
        broker.publish("t", *numbered(40, 1000 + 40 * len(counts)))
    assert counts == [40, 40, 20]
    assert depth(broker) == 120


def test_available_now_does_not_end_with_a_batch_that_failed(query: Query, broker: TestBroker) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(100))
    reader = query.start(available_now=True)
    assert query._plan(reader)
    part = query.partition()
    part.address = ""
    assert [*reader.read(part)] == []
    assert query.step() == 0
    assert query.step() == 100
    assert query.step() is None


def test_available_now_does_not_wait_for_ever_for_a_node(
    query: Query, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsparq.spark.queue.planner.tcp_address", lambda node: "")
    monkeypatch.setattr("nsparq.spark.queue.planner.RETRY_S", (0.02, 1.0))
    monkeypatch.setattr("nsparq.spark.queue.planner.GIVE_UP_S", 0.1)
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(100))
    query.start(available_now=True)
    counts = []
    while (count := query.step()) is not None:
        counts.append(count)
    assert counts == [0, 0, 0, 0]


def test_available_now_with_nothing_there_ends_at_once(query: Query, broker: TestBroker) -> None:
    """But for the first batch, which Spark runs in any case."""
    query.start(available_now=True)
    assert query.step() == 0
    assert query.step() is None
    broker.publish("t", *numbered(10))
    query.start(available_now=True)
    assert query.step() == 10
    assert query.step() is None


class Pump:
    """What NSQ's nsqd shows in /stats while it passes messages on from the topic to the channel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, int]]) -> None:
        """`looks`: of each look the messages that are not in the channel yet, and those of them
        that the topic shows; the others were on their way when it was asked."""
        stats = Client.stats

        def of_a_moment(client: Client, *given: str) -> list[dict[str, Any]]:
            found = stats(client, *given)
            missing, shown = looks.pop(0) if looks else (0, 0)
            for topic in found:
                topic["depth"] += shown
                for channel in topic["channels"]:
                    channel["depth"] -= missing
            return found

        monkeypatch.setattr(Client, "stats", of_a_moment)


def test_available_now_takes_what_is_on_its_way_to_the_channel(
    query: Query, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(100))
    Pump(monkeypatch, [(90, 80), (70, 60), (60, 50), (100, 30), (60, 0)])
    query.start(available_now=True)
    counts = []
    while (count := query.step()) is not None:
        counts.append(count)
    assert sum(counts) == 100 and len(counts) > 1


def test_available_now_waits_for_what_a_failed_task_had(query: Query, broker: TestBroker) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(100))
    reader = query.start(available_now=True)
    assert query._plan(reader)
    with broker.connect() as connection:
        connection.sub("t", "c", rdy=30)
        held = connection.read_messages(30)
        connection.rdy(0)
        assert query.step() == 70
        release = threading.Timer(0.2, lambda: [connection.req(message.id) for message in held])
        release.start()
        released = 0
        while (rows := query.step()) is not None:
            released += rows
        release.join()
    assert released == 30


# from outside


def test_a_paused_channel_makes_no_batches(query: Query, broker: TestBroker) -> None:
    broker.control("create", "t", "c")
    broker.control("pause", "t", "c")
    broker.publish("t", *numbered(10))
    assert (query.step(), query.step()) == (0, None)
    broker.control("unpause", "t", "c")
    query.drain_until(numbered(10))


def test_a_deleted_channel_is_created_again(query: Query, broker: TestBroker) -> None:
    query.step()
    broker.control("delete", "t", "c")
    query.step()
    broker.publish("t", *numbered(10))
    query.drain_until(numbered(10))
    broker.control("delete", "t")
    query.step()
    broker.publish("t", *numbered(10, 10))
    query.drain_until(numbered(20))


def test_a_topic_that_appears_later_is_waited_for(query: Query, broker: TestBroker) -> None:
    query.step()
    broker.control("delete", "t")
    assert query.step() is None
    broker.publish("t", *numbered(10))
    query.drain_until(numbered(10))


def test_a_pattern_takes_up_topics_as_they_appear_and_lets_deleted_ones_go(
    tmp_path: Path, broker: TestBroker
) -> None:
    query = Query(tmp_path, broker, topic="", topicsPattern=r"orders\.\w+", discoveryInterval="10ms")
    assert (query.step(), query.step()) == (0, None)
    broker.publish("orders", b"not this one")
    broker.publish("orders.eu", *numbered(10))
    query.drain_until(numbered(10))
    broker.publish("orders.us", *numbered(10, 10))
    query.drain_until(numbered(20))
    assert query.counts() == Counter(numbered(20))
    assert {row["topic"] for row in query.rows} == {"orders.eu", "orders.us"}
    broker.control("delete", "orders.us")
    assert query.step() is None
    assert broker.topic_stats("orders.us") is None
    broker.publish("orders.eu", *numbered(1, 20))
    query.drain_until(numbered(21))
    owner = json.loads((query.staging / "owner.json").read_bytes())
    assert (owner["topics"], owner["channel"]) == (r"orders\.\w+", "c")
    query.kill()


def test_a_node_that_gave_nothing_is_not_asked_again_at_once(query: Query, broker: TestBroker) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(10))
    reader = query.start()
    assert query._plan(reader)
    part = query.partition()
    part.address = ""
    assert [*reader.read(part)] == []
    assert query.step() == 0
    asked = len(query.offsets)
    query.step()
    assert len(query.offsets) == asked
    query.drain_until(numbered(10))


# nodes come and go


def test_nodes_are_found_through_nsqlookupd_while_the_query_runs(tmp_path: Path) -> None:
    with LookupdThread() as lookupd:
        given = {"nsqlookupd": address(lookupd), "discoveryInterval": "10ms"}
        flags = {"broadcast_address": "127.0.0.1", "lookupd_tcp_address": (tcp(lookupd),)}
        query = Query(tmp_path, **given)
        assert (query.step(), query.step()) == (0, None)
        with start_broker(**flags) as one:
            one.publish("t", *numbered(10))
            query.drain_until(numbered(10))
            with start_broker(**flags) as two:
                two.publish("t", *numbered(10, 10))
                query.drain_until(numbered(20))
            # The second has left.
            one.publish("t", *numbered(10, 20))
            query.drain_until(numbered(30))
        query.kill()


def test_without_nsqlookupd_the_nodes_stay_those_that_were_known(tmp_path: Path) -> None:
    with LookupdThread() as lookupd:
        given = {"nsqlookupd": address(lookupd), "discoveryInterval": "10ms"}
        with start_broker(broadcast_address="127.0.0.1", lookupd_tcp_address=(tcp(lookupd),)) as one:
            query = Query(tmp_path, **given)
            one.publish("t", *numbered(10))
            query.drain_until(numbered(10))
            lookupd.stop()
            one.publish("t", *numbered(10, 10))
            query.drain_until(numbered(20))
            query.kill()


def test_a_node_that_is_away_is_left_out_until_it_is_back(
    tmp_path: Path, broker: TestBroker, caplog: pytest.LogCaptureFixture
) -> None:
    http, tcp = unused_port(), unused_port()
    (tmp_path / "data").mkdir()
    flags: dict[str, Any] = {"http_address": f"127.0.0.1:{http}", "tcp_address": f"127.0.0.1:{tcp}"}
    query = Query(tmp_path, nsqd=f"{address(broker)},127.0.0.1:{http}", discoveryInterval="50ms")
    query.step()
    broker.publish("t", *numbered(10))
    query.drain_until(numbered(10))
    with start_process(tmp_path / "data", broadcast_address="127.0.0.1", **flags) as late:
        late.publish("t", *numbered(10, 10))
        query.drain_until(numbered(20))
        late.stop()
        broker.publish("t", *numbered(10, 20))
        with caplog.at_level(logging.WARNING):
            query.drain_until(numbered(30))
        late.start()
        late.publish("t", *numbered(10, 30))
        query.drain_until(numbered(40))
    assert max(query.counts().values()) == 1
    query.kill()


def test_a_batch_of_before_a_restart_finds_its_node_again(query: Query, broker: TestBroker) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(10))
    assert query._plan(query.start())
    query.start()
    assert query.step() == 10


def test_a_batch_of_a_node_that_is_gone_is_an_empty_one(
    tmp_path: Path, broker: TestBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with start_broker(broadcast_address="127.0.0.1") as other:
        query = Query(tmp_path, other)
        other.control("create", "t", "c")
        other.publish("t", *numbered(10))
        assert query._plan(query.start())
    query._options = options(broker, staging=query.staging)
    query.start()
    assert query.step() == 0
    assert "its address is unknown" in caplog.text
    query.kill()


def test_the_host_is_the_one_that_http_was_reached_at() -> None:
    assert tcp_address(Node("vm:4151", "http://10.0.0.7:80", "vm:4150")) == "10.0.0.7:4150"
    assert tcp_address(Node("vm:4151", "https://[::1]:80", "vm:4150")) == "[::1]:4150"
    assert tcp_address(Node("vm:4151", "http://10.0.0.7:80", "")) == ""


# whose checkpoint, whose directory


def test_a_new_query_cannot_have_the_directory_of_another(
    tmp_path: Path, query: Query, broker: TestBroker
) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(10))
    assert query.step() == 10
    query.kill()
    other = Query(tmp_path, broker)
    with pytest.raises(StagingError, match=r"option staging: .*Give a new query an empty directory"):
        other.step()
    other.kill()


def test_a_query_whose_directory_is_empty_says_so(query: Query, broker: TestBroker, tmp_path: Path) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(10))
    assert query.step() == 10
    query._options = options(broker, staging=tmp_path / "elsewhere")
    query.start()
    with pytest.raises(StagingError, match="contents of the former directory were not moved here"):
        query.step()


def test_a_directory_that_was_moved_along_serves(query: Query, broker: TestBroker, tmp_path: Path) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(10))
    assert query.step() == 10
    query.kill()
    query.staging.rename(tmp_path / "elsewhere")
    query._options = options(broker, staging=tmp_path / "elsewhere")
    broker.publish("t", *numbered(10, 10))
    query.drain_until(numbered(20))


def test_a_checkpoint_of_log_mode_is_refused(query: Query, broker: TestBroker) -> None:
    query.offsets, query.committed = [{"nodes": {}}], 1
    with pytest.raises(OptionError, match="option mode: this checkpoint was not written in queue mode"):
        query.step()


def test_commit_clears_what_the_sink_has(query: Query, broker: TestBroker) -> None:
    broker.control("create", "t", "c")
    for start in range(0, 30, 10):
        broker.publish("t", *numbered(10, start))
        assert query.step() == 10
    assert sorted(path.name for path in query.staging.glob("batch-*")) == ["batch-3"]


# the rest of the contract


def test_a_reader_can_be_pickled_for_the_executors(query: Query, broker: TestBroker) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", *numbered(10))
    reader = query.start()
    assert query._plan(reader)
    part = pickle.loads(pickle.dumps(query.partition()))
    copy = pickle.loads(pickle.dumps(QueueStreamReader(SCHEMA, query._options)))
    assert sum(map(len, copy.read(part))) == 10


def test_a_schema_may_name_some_of_the_columns(query: Query, broker: TestBroker) -> None:
    broker.control("create", "t", "c")
    broker.publish("t", b"one")
    assert query._plan(query.start())
    part = query.partition()
    schema = StructType([SCHEMA["body"], SCHEMA["attempts"]])
    (rows,) = QueueStreamReader(schema, query._options).read(part)
    assert rows.to_pylist() == [{"body": b"one", "attempts": 1}]


@pytest.mark.parametrize("name", ["body", "size"])
def test_a_schema_with_an_unknown_column_is_refused(query: Query, name: str) -> None:
    with pytest.raises(OptionError, match=f"the schema has {name} string; format nsq has topic string, "):
        QueueStreamReader(StructType().add(name, StringType()), query._options)


def test_progress_shows_how_much_waits(query: Query, broker: TestBroker) -> None:
    query.step()
    broker.publish("t", *numbered(10))
    query.limit = ReadMaxRows(4)
    query.step()
    query.step()
    assert query.reader is not None
    assert query.reader.reportLatestOffset() == {"depth": {"t": {address(broker): 6}}}


def test_stop_may_come_before_anything_and_twice(query: Query) -> None:
    reader = query.start()
    reader.stop()
    reader.initialOffset()
    reader.stop()
    reader.stop()


def test_a_secret_that_is_wrong_ends_the_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with BrokerThread(broadcast_address="127.0.0.1") as broker:
        query = Query(tmp_path, broker)

        def refuse(*_: object) -> Any:
            raise Refused("GET /stats", 403, "FORBIDDEN", {})

        query.step()
        assert query.reader is not None and query.reader._planner is not None
        monkeypatch.setattr(query.reader._planner, "_backlog", refuse)
        with pytest.raises(Refused, match="FORBIDDEN"):
            query.step()
        query.kill()


# options


def parse(**given: str) -> NsqOptions:
    return NsqOptions.parse({"mode": "queue", "nsqd": "127.0.0.1:4151", **given}, Use.QUEUE_STREAM)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"topic": "t", "channel": "c"}, "option staging is missing"),
        ({"topic": "t", "staging": "/s"}, "option channel is missing"),
        ({"channel": "c", "staging": "/s"}, "option topic is missing"),
        ({"topic": "t", "channel": "c", "staging": "s3://b/s"}, "option staging must be a directory"),
        ({"topic": "t", "channel": "c#ephemeral", "staging": "/s"}, "option channel cannot be ephemeral"),
        ({"topic": "t", "channel": "c", "staging": "/s", "messageTimeout": "1h"}, "option messageTimeout"),
        ({"topic": "t", "channel": "c", "staging": "/s", "batchDuration": "0"}, "option batchDuration"),
        ({"topic": "t", "channel": "c", "staging": "/s", "dedupe": "yes"}, "option dedupe must be true or"),
        (
            {"topic": "t", "channel": "c", "staging": "/s", "connectionsPerNode": "0"},
            "option connectionsPerNode must be",
        ),
    ],
)
def test_an_option_that_is_wrong_or_missing_is_named(given: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        parse(**given)


@pytest.mark.parametrize(
    ("text", "path"),
    [("/a/b", "/a/b"), ("file:///a/b%20c", "/a/b c"), ("file:/a", "/a"), ("/a/../b", "/b")],
)
def test_staging_may_be_a_path_or_a_file_url(text: str, path: str) -> None:
    assert parse(topic="t", channel="c", staging=text).staging == path


def test_a_batch_read_says_that_it_is_for_streams() -> None:
    given = {"mode": "queue", "topic": "t", "channel": "c", "nsqd": "127.0.0.1:4151", "staging": "/s"}
    with pytest.raises(OptionError, match="option mode: queue works only with readStream"):
        NsqDataSource(given).reader(SCHEMA)
    assert isinstance(NsqDataSource(given).streamReader(SCHEMA), QueueStreamReader)


def test_nobody_waits_for_a_batch_that_cannot_come(query: Query, broker: TestBroker) -> None:
    assert (query.step(), query.step()) == (0, None)
    wait_until(lambda: broker.channel_stats("t", "c"))
