"""The two writers as Spark uses them, without Spark: tasks write, the driver commits or aborts."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from nsparq.server.api import table
from nsparq.server.auth.policy_file import hash_generated
from nsparq.spark.cluster.http_client import Refused
from nsparq.spark.options import NsqOptions, OptionError, Use
from nsparq.spark.sink.rows import RowError, SchemaError
from nsparq.spark.sink.writers import FORGET_S, NsqWriter, PublishedRows, StagedRows, Task
from tests.spark.sink.support import (
    QUERY,
    SCHEMA,
    address,
    batch_writer,
    options,
    rows,
    run_batch,
    run_task,
    staged_count,
    stored,
    stream_writer,
)
from tests.support import BrokerThread, start_broker, unique_name, wait_until
from tests.support.certificates import certificates


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread(max_msg_size=2 << 20) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return unique_name("topic")


# a stream


def test_a_micro_batch_is_published_with_its_commit(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = stream_writer(address(broker), topic=topic, producer=topic)
    messages = run_batch(monkeypatch, writer, [[rows(b"1"), rows(b"2")], [], [rows(b"3")]])
    assert stored(broker, topic) == []
    writer.commit(messages, 0)
    assert sorted(stored(broker, topic)) == [b"1", b"2", b"3"]


def test_its_producer_is_the_query_and_its_sequence_number_the_batch(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = run_task(monkeypatch, stream_writer(address(broker), topic=topic), [rows(b"x")], 3, 17, 2)
    assert isinstance(message, StagedRows)
    assert (message.producer, message.sequence, message.messages) == (f"spark:{QUERY}", 17, 1)
    assert message.part.startswith("3-2-")


def test_a_repeated_micro_batch_sends_nothing_and_still_reads_all_its_rows(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before the sink in a task, a state store say, has to see the end of its rows."""
    writer = stream_writer(address(broker), topic=topic, producer=topic)
    writer.commit(run_batch(monkeypatch, writer, [[rows(b"1")]], 4), 4)
    taken = []

    def batches() -> Iterator[pa.RecordBatch]:
        for index in range(400):
            taken.append(index)
            yield rows(*[os.urandom(1000)] * 10)

    message = run_task(monkeypatch, writer, batches(), batch_id=4)
    assert isinstance(message, StagedRows)
    assert message.messages == 0
    assert taken == [*range(400)]
    writer.commit([message], 4)
    assert stored(broker, topic) == [b"1"]
    assert broker.http("GET", "/transactions").count(topic.encode()) == 1


def test_what_an_earlier_attempt_of_a_task_has_staged_is_dropped(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = stream_writer(address(broker), topic=topic, producer=topic)

    def fails() -> Iterator[pa.RecordBatch]:
        yield rows(*[b"x" * 1000] * 1000)
        raise RuntimeError("the task is lost")

    with pytest.raises(RuntimeError, match="the task is lost"):
        run_task(monkeypatch, writer, fails(), attempt=0)
    wait_until(lambda: staged_count(broker) > 0)
    message = run_task(monkeypatch, writer, [rows(b"y")], attempt=1)
    writer.commit([message], 0)
    assert stored(broker, topic) == [b"y"]


def test_a_micro_batch_without_rows_or_without_tasks_is_fine(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = stream_writer(address(broker), topic=topic, producer=topic)
    writer.commit([], 0)
    writer.commit(run_batch(monkeypatch, writer, [[], [rows()]], 1), 1)
    writer.abort([None], 2)
    writer.commit(run_batch(monkeypatch, writer, [[rows(b"x")]], 3), 3)
    assert stored(broker, topic) == [b"x"]


def test_a_query_that_spark_does_not_name_needs_a_name(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Task, "current", classmethod(lambda cls: Task()))
    with pytest.raises(Exception, match="set option producer"):
        stream_writer(address(broker)).write(iter([rows(b"x")]))


def test_writers_and_messages_can_be_pickled(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = pickle.loads(pickle.dumps(stream_writer(address(broker), topic=topic, producer=topic)))
    messages = pickle.loads(pickle.dumps(run_batch(monkeypatch, writer, [[rows(b"x")]])))
    stream_writer(address(broker), topic=topic, producer=topic).commit(messages, 0)
    assert stored(broker, topic) == [b"x"]


# a batch


def test_a_batch_write_is_one_transaction_that_is_soon_forgotten(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = batch_writer(address(broker), topic=topic)
    messages = [run_task(monkeypatch, writer, [rows(b"%d" % index)], index) for index in range(3)]
    assert stored(broker, topic) == []
    writer.commit(messages)
    assert sorted(stored(broker, topic)) == [b"0", b"1", b"2"]
    producer = messages[0].producer  # type: ignore[attr-defined]
    limits = broker.call(
        lambda core: core.transactions.producers[producer].committed.until_ns - core.wall_ns()
    )
    assert limits < (FORGET_S + 10) * 1e9


def test_an_aborted_batch_write_publishes_nothing_and_leaves_nothing(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = staged_count(broker)
    writer = batch_writer(address(broker), topic=topic)
    message = run_task(monkeypatch, writer, [rows(b"x")])
    assert staged_count(broker) == before + 1
    writer.abort([message, None])
    assert staged_count(broker) == before
    assert stored(broker, topic) == []


def test_two_batch_writes_have_nothing_to_do_with_each_other(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        writer = batch_writer(address(broker), topic=topic)
        writer.commit([run_task(monkeypatch, writer, [rows(b"x")])])
    assert stored(broker, topic) == [b"x", b"x"]


def test_a_batch_write_with_a_name_and_a_number_happens_once(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As foreachBatch needs it."""
    for sequence in (0, 1, 1, 2):
        writer = batch_writer(address(broker), topic=topic, producer=topic, sequence=sequence)
        writer.commit([run_task(monkeypatch, writer, [rows(b"%d" % sequence)])])
    assert stored(broker, topic) == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("given", "missing"), [({"producer": "p"}, "sequence"), ({"sequence": 3}, "producer")]
)
def test_a_batch_write_has_both_name_and_number_or_neither(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(OptionError, match=f"option {missing} is missing"):
        batch_writer("127.0.0.1:1", **given)


def test_a_topic_cannot_be_overwritten() -> None:
    with pytest.raises(OptionError, match=r'write with mode\("append"\)'):
        NsqWriter(SCHEMA, options(Use.SINK_BATCH, "127.0.0.1:1"), True)


# what is written


def test_columns_are_checked_before_anything_is_asked() -> None:
    with pytest.raises(SchemaError, match="column 'price'"):
        stream_writer("127.0.0.1:1", schema=StructType().add("body", "string").add("price", "double"))


def test_there_must_be_a_topic_somewhere() -> None:
    given = NsqOptions.parse({"nsqd": "127.0.0.1:1"}, Use.SINK_BATCH)
    with pytest.raises(OptionError, match="option topic is missing: set it, or add a column 'topic'"):
        NsqWriter(SCHEMA, given, False)


def test_large_and_binary_bodies_arrive_as_they_are(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [os.urandom(1 << 20), b"\0", bytes(range(256)), b"\xff" * (2 << 20), b"\r\n\r\n"]
    writer = stream_writer(address(broker), topic=topic, producer=topic)
    writer.commit(run_batch(monkeypatch, writer, [[rows(*bodies)]]), 0)
    assert stored(broker, topic) == bodies


def test_several_topics_and_delays_are_one_transaction(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = StructType().add("body", "string").add("topic", "string").add("defer", "integer")
    broker.control("create", topic + "-b", "c")
    batch = pa.record_batch(
        {
            "body": ["1", "2", "3", "4"],
            "topic": pa.array([topic + "-a", topic + "-b", None, topic + "-b"]),
            "defer": pa.array([0, 60_000, None, 0], pa.int32()),
        }
    )
    writer = stream_writer(address(broker), topic=topic, producer=topic, schema=schema)
    writer.commit(run_batch(monkeypatch, writer, [[batch]]), 0)
    assert stored(broker, topic + "-a") == [b"1"]
    assert stored(broker, topic) == [b"3"]
    assert sorted(stored(broker, topic + "-b")) == [b"2", b"4"]
    wait_until(lambda: (broker.channel_stats(topic + "-b", "c") or {})["deferred_count"] == 1)


def test_an_invalid_row_fails_the_task_and_publishes_nothing(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = StructType().add("body", "string").add("topic", "string")
    batch = pa.record_batch({"body": ["1", "2"], "topic": [topic, "no good"]})
    writer = batch_writer(address(broker), schema=schema)
    with pytest.raises(RowError, match="partition 1, row 1: 'no good' is not a valid topic name"):
        run_task(monkeypatch, writer, [batch], partition=1)
    assert stored(broker, topic) == []


# other brokers, other ways in


def test_nsqd_without_transactions_gets_every_row_at_least_once(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(table, "SUBJECTS", [one for one in table.SUBJECTS if one[0] != "Transactions"])
        broker = BrokerThread()
    with broker:
        writer = stream_writer(address(broker), topic=topic)
        for _ in range(2):
            messages = run_batch(monkeypatch, writer, [[rows(b"1", b"2")], [rows(b"3")]])
            assert messages == [PublishedRows(2), PublishedRows(1)]
            writer.commit(messages, 0)
            writer.abort(messages, 0)
        # Nobody can tell that the batch was repeated.
        assert sorted(stored(broker, topic)) == [b"1", b"1", b"2", b"2", b"3", b"3"]


def test_any_nsqd_can_be_written_to(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also NSQ's own, if the environment names one: see tests.support."""
    with start_broker() as broker:
        broker.control("create", topic, "c")
        writer = stream_writer(address(broker), topic=topic)
        bodies = [os.urandom(1000) for _ in range(2000)]
        writer.commit(run_batch(monkeypatch, writer, [[rows(*bodies[:1000])], [rows(*bodies[1000:])]]), 0)
        with broker.connect() as connection:
            connection.identify()
            connection.sub(topic, "c", rdy=2000)
            found = [message.body for message in connection.read_messages(2000, finish=True)]
        assert sorted(found) == sorted(bodies)


def test_a_token_with_the_right_to_publish_is_enough(
    topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f'[[identity]]\nname = "spark"\nsecret = "{hash_generated(b"secret")}"\n'
        f'[[identity.allow]]\ntopic = "^{topic}$"\nchannels = [".*"]\npermissions = ["publish"]\n'
    )
    with BrokerThread(auth_policy_file=str(policy)) as broker:
        writer = stream_writer(address(broker), topic=topic, authToken="secret")
        writer.commit(run_batch(monkeypatch, writer, [[rows(b"x")]]), 0)
        assert broker.call(lambda core: core.topics[topic].message_count) == 1
        with pytest.raises(Refused, match="403"):
            other = stream_writer(address(broker), topic="other", authToken="secret")
            run_batch(monkeypatch, other, [[rows(b"x")]], 1)
        with pytest.raises(Refused, match="401"):
            stream_writer(address(broker), topic=topic)


def test_tls_is_used_where_nsqd_wants_it(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = certificates()
    flags: dict[str, Any] = files.server_flags(tls_required=True)
    with BrokerThread(**flags) as broker:
        assert broker.https_address is not None
        host, port = broker.https_address
        bodies = [os.urandom(100_000) for _ in range(30)]
        for batch_id, where in enumerate((address(broker), f"https://{host}:{port}")):
            writer = stream_writer(where, topic=topic, tlsCaFile=str(files.ca.cert))
            writer.commit(run_batch(monkeypatch, writer, [[rows(*bodies)]], batch_id), batch_id)
        found = broker.call(lambda core: core.topics[topic].message_count)
    assert found == 60


def test_what_spark_says_about_a_task_is_used() -> None:
    assert Task.current() == Task(0, 0, None, 0), "there is no task here"
