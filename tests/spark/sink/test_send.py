"""Requests over a bad network: staged ones arrive exactly once, others at least once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nsparq.spark.cluster.http_client import Access, Answer, Refused, Unreachable
from nsparq.spark.sink import send
from nsparq.spark.sink.nodes import SinkNode
from nsparq.spark.sink.pipe import Pipe
from nsparq.spark.sink.rows import Chunk, Chunks, RowError, SinkColumns
from nsparq.spark.sink.send import AlreadyCommitted, Published, Sender, Staged, StagingLost
from nsparq.testing import FaultProxy
from tests.spark.sink.support import address, ask, rows, stored
from tests.support import BrokerProcess, BrokerThread, unique_name, wait_until
from tests.support.polling import DEADLINE

ACCESS = Access(timeout=DEADLINE)


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as broker:
        yield broker


@pytest.fixture
def producer() -> str:
    return unique_name("producer")


@pytest.fixture
def topic() -> str:
    return unique_name("topic")


def node(where: str) -> SinkNode:
    return SinkNode(where, f"http://{where}")


def chunks(topic: str, bodies: list[bytes], size: int = 2000) -> list[Chunk]:
    made = Chunks(SinkColumns(0, None, None), topic, size)
    return [*made.add(rows(*bodies)), *made.finish()]


def numbered(count: int, size: int = 200) -> list[bytes]:
    return [b"%06d" % index + b"x" * (size - 6) for index in range(count)]


@contextmanager
def staging(
    where: str, producer: str, *, retry_for: float = 10.0, access: Access = ACCESS, sequence: int = 0
) -> Iterator[Staged]:
    sender = Staged(node(where), access, retry_for, producer, sequence, "part")
    try:
        yield sender
    finally:
        sender.close()


def send_all(sender: Sender, made: list[Chunk]) -> int:
    for chunk in made:
        sender.send(chunk)
    return sender.finish()


def commit(broker: BrokerThread | BrokerProcess, producer: str, messages: int, sequence: int = 0) -> None:
    path = f"/transaction/commit?producer={producer}&sequence={sequence}"
    answer = broker.request("POST", path, b'{"parts":{"part":%d}}' % messages)
    assert answer.status == 200, answer


# staging


def test_chunks_are_staged_in_their_order(broker: BrokerThread, producer: str, topic: str) -> None:
    bodies = numbered(1000)
    with staging(address(broker), producer) as sender:
        assert send_all(sender, chunks(topic, bodies)) == 1000
    assert stored(broker, topic) == []
    commit(broker, producer, 1000)
    assert stored(broker, topic) == bodies


@pytest.mark.parametrize("direction", ["to_client", "to_broker"])
@pytest.mark.parametrize("count", [700, 6_000])
def test_a_connection_that_keeps_breaking_costs_no_message_and_doubles_none(
    broker: BrokerThread, producer: str, topic: str, direction: str, count: int
) -> None:
    """Answers are lost, or requests are cut off, again and again."""
    bodies = numbered(300)
    with FaultProxy(address(broker)) as proxy:
        proxy.cut_after(count if direction == "to_client" else 4 * count, direction)  # type: ignore[arg-type]
        with staging(proxy.address, producer) as sender:
            assert send_all(sender, chunks(topic, bodies)) == 300
        assert proxy.accepted_count > 1
    commit(broker, producer, 300)
    assert stored(broker, topic) == bodies


def test_a_request_that_comes_late_from_a_dead_connection_is_not_added_again(
    broker: BrokerThread, producer: str, topic: str
) -> None:
    """The network delivers the first requests after the task has sent them again."""
    bodies = numbered(100)
    made = chunks(topic, bodies)
    with FaultProxy(address(broker)) as proxy:
        with staging(proxy.address, producer, access=Access(timeout=0.2)) as sender:
            sender.send(made[0])
            assert sender.finish() == made[0].messages
            proxy.delay(0.5, "to_broker")
            for chunk in made[1:]:
                sender.send(chunk)
            threading.Timer(0.5, proxy.heal).start()
            assert sender.finish() == 100
            assert proxy.accepted_count > 1
        wait_until(lambda: proxy.connection_count == 0)
    parts = ask(broker, "GET", "/transaction", producer=producer, sequence=0)["parts"]
    assert parts == {"part": 100}
    commit(broker, producer, 100)
    assert stored(broker, topic) == bodies


def test_a_broker_killed_while_tasks_stage_is_waited_for(producer: str, topic: str) -> None:
    bodies = numbered(2000)
    made = chunks(topic, bodies)
    with BrokerProcess() as broker:
        assert broker.http_address is not None
        broker.flags["http_address"] = address(broker)
        with staging(address(broker), producer, retry_for=30) as sender:
            for index, chunk in enumerate(made):
                if index in (40, 41, 120):
                    broker.kill()
                    broker.start()
                sender.send(chunk)
            assert sender.finish() == 2000
        broker.kill()
        broker.start()
        commit(broker, producer, 2000)
        assert stored(broker, topic) == bodies


def test_a_broker_that_stays_away_is_given_up_in_time(
    producer: str, topic: str, broker: BrokerThread
) -> None:
    with FaultProxy(address(broker)) as proxy:
        proxy.refuse()
        with (
            staging(proxy.address, producer, retry_for=0.2) as sender,
            pytest.raises(Unreachable, match=r"refused, for 0\.2 s"),
        ):
            send_all(sender, chunks(topic, [b"x"]))


def test_a_transaction_that_was_committed_is_noticed(broker: BrokerThread, producer: str, topic: str) -> None:
    with staging(address(broker), producer, sequence=7) as sender:
        send_all(sender, chunks(topic, [b"x"]))
    commit(broker, producer, 1, sequence=7)
    with staging(address(broker), producer, sequence=7) as sender:
        with pytest.raises(AlreadyCommitted) as caught:
            send_all(sender, chunks(topic, [b"y"]))
        assert caught.value.sequence == 7


def test_a_part_that_is_gone_from_the_broker_is_an_error(
    broker: BrokerThread, producer: str, topic: str
) -> None:
    made = chunks(topic, numbered(20))
    with staging(address(broker), producer) as sender:
        sender.send(made[0])
        sender.finish()
        broker.http("POST", "/transaction/abort", producer=producer, sequence="0")
        with pytest.raises(StagingLost, match="has 0 messages of a part and should have 9 or 18"):
            send_all(sender, made[1:])


def test_delays_go_with_the_request(broker: BrokerThread, producer: str, topic: str) -> None:
    broker.control("create", topic, "c")
    with staging(address(broker), producer) as sender:
        send_all(sender, [chunk._replace(defer_ms=60_000) for chunk in chunks(topic, [b"later"])])
    commit(broker, producer, 1)
    wait_until(lambda: (broker.channel_stats(topic, "c") or {}).get("deferred_count") == 1)


def test_a_message_that_is_too_large_is_named_with_its_size(producer: str, topic: str) -> None:
    with BrokerThread(max_msg_size=1000, max_body_size=5000) as broker:
        for bodies in ([b"x" * 10, b"y" * 1001], [b"z" * 6000]):
            with staging(address(broker), producer) as sender:
                largest = len(bodies[-1])
                with pytest.raises(RowError, match=rf"topic {topic}: \w+\. .* has {largest} bytes"):
                    send_all(sender, chunks(topic, bodies))


def test_a_delay_that_is_too_long_is_named(broker: BrokerThread, producer: str, topic: str) -> None:
    late = [chunk._replace(defer_ms=3_600_001) for chunk in chunks(topic, [b"x"])]
    with (
        staging(address(broker), producer) as sender,
        pytest.raises(RowError, match=r"a delay of 3600001 ms \(see nsqd's --max-req-timeout\)"),
    ):
        send_all(sender, late)


# publishing


@contextmanager
def publishing(*where: str, retry_for: float = 10.0) -> Iterator[Published]:
    sender = Published([*map(node, where)], ACCESS, retry_for)
    try:
        yield sender
    finally:
        sender.close()


def test_what_is_published_is_there_at_once(broker: BrokerThread, topic: str) -> None:
    bodies = numbered(1000)
    with publishing(address(broker)) as sender:
        assert send_all(sender, chunks(topic, bodies)) == 1000
    assert stored(broker, topic) == bodies


def test_deferred_messages_are_published_one_by_one(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic, "c")
    with publishing(address(broker)) as sender:
        late = [chunk._replace(defer_ms=60_000) for chunk in chunks(topic, numbered(100))]
        assert send_all(sender, late) == 100
    wait_until(lambda: (broker.channel_stats(topic, "c") or {}).get("deferred_count") == 100)


def test_a_broken_connection_doubles_at_most_what_was_not_answered(broker: BrokerThread, topic: str) -> None:
    bodies = numbered(300)
    with FaultProxy(address(broker)) as proxy:
        proxy.cut_after(2000)
        with publishing(proxy.address) as sender:
            send_all(sender, chunks(topic, bodies))
        assert proxy.accepted_count > 1
    found = stored(broker, topic)
    assert {*found} == {*bodies}
    assert len(found) > 300


def test_another_nsqd_is_taken_when_one_is_away(broker: BrokerThread, topic: str) -> None:
    with FaultProxy("127.0.0.1:1") as dead, publishing(dead.address, address(broker)) as sender:
        send_all(sender, chunks(topic, numbered(100)))
    assert stored(broker, topic) == numbered(100)


def test_a_refusal_for_now_repeats_only_what_was_refused(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = chunks(topic, numbered(90))
    hear = Pipe.receive
    answers = iter([0, 503, 0, 503, 0])

    def receive(pipe: Pipe) -> Answer:
        reply = hear(pipe)
        status = next(answers, 0)
        return reply._replace(status=status, body=b"") if status else reply

    monkeypatch.setattr(Pipe, "receive", receive)
    with publishing(address(broker)) as sender:
        send_all(sender, made)
    repeated = made[1].messages + made[3].messages
    assert len(stored(broker, topic)) == 90 + repeated


def test_a_refusal_for_good_is_an_error(broker: BrokerThread) -> None:
    wrong = [chunk._replace(topic="no such name!") for chunk in chunks("t", [b"x"])]
    with publishing(address(broker)) as sender, pytest.raises(Refused, match="400 INVALID_TOPIC"):
        send_all(sender, wrong)


def test_what_is_on_its_way_is_bounded(broker: BrokerThread, topic: str) -> None:
    made = chunks(topic, numbered(2000, 5000), size=100_000)
    with publishing(address(broker)) as sender:
        for chunk in made:
            sender.send(chunk)
            assert sender._bytes <= send.MAX_BYTES
            assert len(sender._unanswered) <= send.MAX_REQUESTS
        sender.finish()
    assert len(stored(broker, topic)) == 2000
