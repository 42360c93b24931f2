"""One transaction on several nsqd: wherever the driver dies, the batch is published once."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from pyspark.sql.datasource import WriterCommitMessage

from nsparq.errors import NsparqError
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access, Answer, Unreachable
from nsparq.spark.sink.commit import CheckpointBehind, Coordinator, TransactionDamaged
from nsparq.spark.sink.nodes import SinkNode
from nsparq.spark.sink.send import StagingLost
from nsparq.spark.sink.writers import NsqStreamWriter
from nsparq.testing import FaultProxy
from tests.spark.sink.support import (
    QUERY,
    address,
    batch_writer,
    rows,
    run_batch,
    run_task,
    staged_count,
    state,
    stored,
    stream_writer,
)
from tests.support import BrokerProcess, BrokerThread, unique_name
from tests.support.polling import DEADLINE

Brokers = tuple[BrokerThread, BrokerThread]
PRODUCER = f"spark:{QUERY}"
REQUESTS = 6
"""Of a commit on two nodes: two states, two promises, two commits."""


class DriverDied(BaseException):
    """No handler may stand in its way, as none would stand in that of kill -9."""


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    with BrokerThread() as one, BrokerThread() as other:
        yield one, other


@pytest.fixture
def topic() -> str:
    return unique_name("topic")


class Mortal:
    """Counts the driver's requests, and has it die before one of them is sent.

    To die before a request leaves the brokers as dying before the answer to the last one does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.last: int | None = None
        ask = Client.request

        def request(client: Client, *arguments: Any, **more: Any) -> Answer:
            if self.count == self.last:
                raise DriverDied
            self.count += 1
            return ask(client, *arguments, **more)

        monkeypatch.setattr(Client, "request", request)

    def lives(self, requests: int | None) -> None:
        """For so many requests; None is forever."""
        self.count, self.last = 0, requests


def everything(brokers: Brokers, topic: str) -> list[bytes]:
    return sorted(body for broker in brokers for body in stored(broker, topic))


def delete(brokers: Brokers, topic: str) -> None:
    """Thousands of topics would take their time at the end."""
    for broker in brokers:
        if broker.topic_stats(topic) is not None:
            broker.control("delete", topic)


PARTITIONS = {
    "as before": [[rows(b"1", b"2")], [rows(b"3")], [rows(b"4")]],
    "other rows elsewhere": [[rows(b"3")], [rows(b"4", b"1")], [rows(b"2")]],
    "on one node only": [[rows(b"1", b"2", b"3", b"4")]],
    "on the other only": [[], [rows(b"4", b"3", b"2", b"1")]],
}


@pytest.mark.parametrize("again", PARTITIONS)
def test_wherever_the_driver_dies_the_batch_is_published_once(
    brokers: Brokers, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in a row, at each pair of requests, with other nodes for the rows each time."""
    mortal = Mortal(monkeypatch)
    batch_id = 0
    for first, second in product(range(REQUESTS + 1), (None, *range(0, REQUESTS, 2))):
        topic, producer = unique_name("topic"), unique_name("producer")
        nsqd = [*map(address, brokers)]
        for life, partitions in zip((first, second, None), ("as before", again, "as before"), strict=True):
            writer = stream_writer(*nsqd, topic=topic, producer=producer)
            messages = run_batch(monkeypatch, writer, PARTITIONS[partitions], batch_id)
            mortal.lives(life)
            try:
                writer.commit(messages, batch_id)
            except DriverDied:
                continue
            finally:
                mortal.lives(None)
        assert everything(brokers, topic) == [b"1", b"2", b"3", b"4"], (first, second)
        assert [state(broker, batch_id, producer) for broker in brokers].count("committed") >= 1
        assert [state(broker, batch_id, producer) for broker in brokers].count("prepared") == 0
        delete(brokers, topic)


class Puppet(threading.Thread):
    """A driver that commits, one request at a time, when it is told to."""

    def __init__(self, writer: NsqStreamWriter, messages: list[WriterCommitMessage]) -> None:
        super().__init__()
        self._writer, self._messages = writer, messages
        self.stops: SimpleQueue[bool] = SimpleQueue()
        """True before each request, False at the end."""
        self.may_go = threading.Semaphore(0)
        self.start()

    def run(self) -> None:
        try:
            self._writer.commit(self._messages, 0)
        except NsparqError:
            pass
        finally:
            self.stops.put(False)

    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.stops.get(timeout=DEADLINE):
                self.stops.put(False)
                return
            self.may_go.release()

    def finish(self) -> None:
        self.step(100)
        self.join(DEADLINE)
        assert not self.is_alive()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("as before", "other rows elsewhere"),
        ("as before", "on one node only"),
        ("as before", "on the other only"),
        ("on the other only", "as before"),
        ("on one node only", "on the other only"),
    ],
)
def test_a_driver_that_was_given_up_and_still_works_does_no_harm(
    brokers: Brokers, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two drivers commit the same batch, each with its own parts, in turns of any length."""
    request = Client.request

    def gated(client: Client, *arguments: Any, **more: Any) -> Answer:
        if isinstance(puppet := threading.current_thread(), Puppet):
            puppet.stops.put(True)
            puppet.may_go.acquire(timeout=30)
        return request(client, *arguments, **more)

    monkeypatch.setattr(Client, "request", gated)
    # If one has no turn before the other is done, the lengths of turns do not matter.
    for steps, other_steps in [(1, 0), *product(range(1, REQUESTS), range(1, REQUESTS + 1))]:
        topic, producer = unique_name("topic"), unique_name("producer")
        nsqd = [*map(address, brokers)]
        writers = [stream_writer(*nsqd, topic=topic, producer=producer) for _ in range(3)]
        puppets = [
            Puppet(writer, run_batch(monkeypatch, writer, PARTITIONS[name]))
            for writer, name in zip(writers, (old, new), strict=False)
        ]
        puppets[0].step(steps)
        puppets[1].step(other_steps)
        puppets[0].finish()
        puppets[1].finish()
        # Whoever of them failed, Spark runs the batch again.
        writers[2].commit(run_batch(monkeypatch, writers[2], PARTITIONS["as before"]), 0)
        assert everything(brokers, topic) == [b"1", b"2", b"3", b"4"], (steps, other_steps)
        delete(brokers, topic)


def test_a_batch_on_several_nodes_is_spread_over_them(
    brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = stream_writer(*map(address, brokers), topic=topic, producer=unique_name("producer"))
    writer.commit(run_batch(monkeypatch, writer, PARTITIONS["as before"]), 0)
    assert sorted(len(stored(broker, topic)) for broker in brokers) == [1, 3]


def test_batches_of_one_partition_take_turns_at_the_nodes(
    brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = unique_name("producer")
    for batch_id in range(4):
        writer = stream_writer(*map(address, brokers), topic=topic, producer=producer)
        writer.commit(run_batch(monkeypatch, writer, [[rows(b"x")]], batch_id), batch_id)
    assert [len(stored(broker, topic)) for broker in brokers] == [2, 2]


def test_a_batch_whose_staging_is_gone_is_not_published_in_part(
    brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = unique_name("producer")
    writer = stream_writer(*map(address, brokers), topic=topic, producer=producer)
    messages = run_batch(monkeypatch, writer, PARTITIONS["as before"])
    brokers[1].http("POST", "/transaction/abort", producer=producer, sequence="0")
    with pytest.raises(StagingLost, match=r"has lost staged messages .*has published none of them"):
        writer.commit(messages, 0)
    assert everything(brokers, topic) == []
    # And is, when Spark runs it again.
    writer.commit(run_batch(monkeypatch, writer, PARTITIONS["as before"]), 0)
    assert everything(brokers, topic) == [b"1", b"2", b"3", b"4"]


def test_a_node_that_is_away_is_waited_for_before_anything_is_published(
    brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(address(brokers[1])) as proxy:
        nsqd = [address(brokers[0]), proxy.address]
        writer = stream_writer(*nsqd, topic=topic, producer=unique_name("producer"), retryFor="200ms")
        messages = run_batch(monkeypatch, writer, PARTITIONS["on one node only"])
        proxy.refuse()
        proxy.reset()
        with pytest.raises(Unreachable, match=r"refused, for 0\.2 s"):
            writer.commit(messages, 0)
        assert everything(brokers, topic) == []
        proxy.heal()
        writer.commit(messages, 0)
    assert everything(brokers, topic) == [b"1", b"2", b"3", b"4"]


def test_a_node_named_in_a_promise_is_asked_even_if_it_is_not_among_the_nodes_any_more(
    brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nsqlookupd may have forgotten a node that has committed its share."""
    producer = unique_name("producer")
    mortal = Mortal(monkeypatch)
    writer = stream_writer(*map(address, brokers), topic=topic, producer=producer)
    messages = run_batch(monkeypatch, writer, PARTITIONS["as before"])
    mortal.lives(5)  # two states, two promises, one commit
    with pytest.raises(DriverDied):
        writer.commit(messages, 0)
    mortal.lives(None)
    left = [broker for broker in brokers if state(broker, 0, producer) == "prepared"]
    assert len(left) == 1
    writer = stream_writer(address(left[0]), topic=topic, producer=producer)
    writer.commit(run_batch(monkeypatch, writer, PARTITIONS["as before"]), 0)
    assert everything(brokers, topic) == [b"1", b"2", b"3", b"4"]


def test_a_checkpoint_that_has_gone_back_is_an_error_and_not_silence(
    brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, producer = brokers[0], unique_name("producer")
    for batch_id in range(3):
        writer = stream_writer(address(broker), topic=topic, producer=producer)
        writer.commit(run_batch(monkeypatch, writer, [[rows(b"x")]], batch_id), batch_id)
    with pytest.raises(CheckpointBehind, match=r"batch 0 is refused: .* up to 2 .* option producer"):
        run_task(monkeypatch, stream_writer(address(broker), topic=topic, producer=producer), [rows(b"y")])
    nodes = [SinkNode("a", f"http://{address(broker)}")]
    with Coordinator(producer, 1, nodes, Access(), 1.0) as coordinator, pytest.raises(CheckpointBehind):
        coordinator.commit({"a": {"part": 1}})


def test_the_last_batch_planned_anew_is_no_repetition(
    brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its number is that of the last batch. What Spark has written down about it is not."""
    broker, producer = brokers[0], unique_name("producer")
    planned = tmp_path / "offsets" / "0"
    planned.parent.mkdir()

    def run(body: bytes) -> None:
        writer = stream_writer(address(broker), topic=topic, producer=producer, checkpoint=tmp_path)
        writer.commit(run_batch(monkeypatch, writer, [[rows(body)]]), 0)

    for content in ("one range", "one range"):
        planned.write_text(content)
        run(b"1")
    planned.write_text("another range")
    with pytest.raises(CheckpointBehind, match="has another batch 0 of the same query"):
        run(b"2")
    assert stored(broker, topic) == [b"1"]
    given = {"topic": topic, "producer": producer, "sequence": 0, "fingerprint": "of-foreachBatch"}
    writer = batch_writer(address(broker), **given)
    with pytest.raises(CheckpointBehind, match="has another batch 0 of the same query"):
        writer.commit([run_task(monkeypatch, writer, [rows(b"3")])])


def test_nsqd_killed_between_staging_and_commit_publishes_it_all_the_same(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BrokerProcess() as broker:
        broker.flags["http_address"] = address(broker)
        writer = stream_writer(address(broker), topic=topic)
        bodies = [b"%d" % index for index in range(1000)]
        messages = run_batch(monkeypatch, writer, [[rows(*bodies[:500])], [rows(*bodies[500:])]])
        broker.kill()
        broker.start()
        writer.commit(messages, 0)
        assert sorted(stored(broker, topic)) == sorted(bodies)
        broker.kill()
        broker.start()
        # The answer was lost, say, and the batch is repeated.
        writer.commit(run_batch(monkeypatch, writer, [[rows(*bodies)]]), 0)
        assert len(stored(broker, topic)) == 1000


# damage


def half_committed(brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """One node has committed, and the driver is dead. Gives the index of the other node."""
    mortal = Mortal(monkeypatch)
    writer = stream_writer(*map(address, brokers), topic=topic)
    messages = run_batch(monkeypatch, writer, PARTITIONS["as before"])
    mortal.lives(5)  # two states, two promises, one commit
    with pytest.raises(DriverDied):
        writer.commit(messages, 0)
    mortal.lives(None)
    return [state(broker, 0) for broker in brokers].index("prepared")


def resolve(error: BaseException, brokers: Brokers, body: bytes = b"") -> Any:
    """What an operator does who reads the message."""
    found = re.search(r"POST http://127\.0\.0\.1:(\d+)(\S+)", str(error))
    assert found is not None
    broker = next(broker for broker in brokers if address(broker).endswith(found[1]))
    return broker.request("POST", found[2], body).expect_json()


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_promise_that_was_damaged_stops_the_query_until_an_operator_accepts_it(
    tmp_path: Path, topic: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "01":
        (tmp_path / name).mkdir()
    with BrokerThread(tmp_path / "0") as one, BrokerThread(tmp_path / "1") as other:
        brokers = one, other
        for broker in brokers:
            broker.flags["http_address"] = address(broker)
        promised = half_committed(brokers, topic, monkeypatch)
        published = everything(brokers, topic)
        brokers[promised].stop()
        directory = tmp_path / str(promised) / "transactions" / f"{PRODUCER}.producer" / "0"
        if damage == "cut":
            for part in directory.glob("*.part"):
                part.write_bytes(b"")
        else:
            shutil.rmtree(directory)
        brokers[promised].start()
        writer = stream_writer(*map(address, brokers), topic=topic)
        for _ in range(2):
            messages = run_batch(monkeypatch, writer, PARTITIONS["as before"])
            with pytest.raises(TransactionDamaged) as raised:
                writer.commit(messages, 0)
        resolve(raised.value, brokers, b"" if damage == "cut" else b'{"parts": {}}')
        writer.commit(run_batch(monkeypatch, writer, PARTITIONS["as before"]), 0)
        assert everything(brokers, topic) == published
        writer.commit(run_batch(monkeypatch, writer, [[rows(b"next")]], 1), 1)
        assert b"next" in everything(brokers, topic)


# aborting


def test_an_aborted_batch_leaves_nothing_behind(
    brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [staged_count(broker) for broker in brokers]
    producer = unique_name("producer")
    writer = stream_writer(*map(address, brokers), topic=topic, producer=producer)
    messages = run_batch(monkeypatch, writer, PARTITIONS["as before"])
    writer.abort([messages[0], None, None], 0)
    assert [staged_count(broker) for broker in brokers] == before
    assert everything(brokers, topic) == []


def test_aborting_a_repetition_leaves_alone_what_had_been_promised(
    brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node has committed, the other only promised, and the first repetition fails as well."""
    producer = unique_name("producer")
    mortal = Mortal(monkeypatch)
    writer = stream_writer(*map(address, brokers), topic=topic, producer=producer)
    messages = run_batch(monkeypatch, writer, PARTITIONS["as before"])
    mortal.lives(5)
    with pytest.raises(DriverDied):
        writer.commit(messages, 0)
    mortal.lives(None)
    for _ in range(2):
        writer = stream_writer(*map(address, brokers), topic=topic, producer=producer)
        messages = run_batch(monkeypatch, writer, PARTITIONS["other rows elsewhere"])
        writer.abort(messages, 0)
    writer.commit(run_batch(monkeypatch, writer, PARTITIONS["as before"]), 0)
    assert everything(brokers, topic) == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize(("requests", "is_published"), [(2, False), (3, False), (4, False), (5, True)])
def test_a_batch_write_that_fails_in_its_commit_is_not_left_half_done(
    brokers: Brokers, topic: str, requests: int, is_published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody repeats it. What one node has committed cannot be taken back, so the others follow."""
    mortal = Mortal(monkeypatch)
    before = [staged_count(broker) for broker in brokers]
    writer = batch_writer(*map(address, brokers), topic=topic)
    messages = [
        run_task(monkeypatch, writer, batches, index) for index, batches in enumerate(PARTITIONS["as before"])
    ]
    mortal.lives(requests)
    with pytest.raises(DriverDied):
        writer.commit(messages)
    mortal.lives(None)
    writer.abort(messages)
    assert everything(brokers, topic) == ([b"1", b"2", b"3", b"4"] if is_published else [])
    assert [staged_count(broker) for broker in brokers] == before


def test_an_abort_that_reaches_nobody_is_no_error(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultProxy(address(brokers[0])) as proxy:
        writer = stream_writer(proxy.address, producer=unique_name("producer"), retryFor="100ms")
        messages = run_batch(monkeypatch, writer, [[rows(b"x")]])
        proxy.refuse()
        proxy.reset()
        writer.abort(messages, 0)


def test_a_note_of_another_program_is_ignored(
    brokers: Brokers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, producer = brokers[0], unique_name("producer")
    writer = stream_writer(address(broker), topic=topic, producer=producer)
    (message,) = run_batch(monkeypatch, writer, [[rows(b"x")]])
    body = json.dumps({"parts": {message.part: 1}, "note": "hello"}).encode()  # type: ignore[attr-defined]
    assert broker.request("POST", f"/transaction/prepare?producer={producer}&sequence=0", body).status == 200
    writer.commit(run_batch(monkeypatch, writer, [[rows(b"x")]]), 0)
    assert stored(broker, topic) == [b"x"]
