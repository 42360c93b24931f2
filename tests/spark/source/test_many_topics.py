"""Thousands of topics: what a look, a commit and a batch cost, counted in requests and tasks."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from nsparq.spark.cluster.api import Client
from nsparq.spark.errors import NoAnswer
from nsparq.spark.source import driver, peers
from nsparq.spark.source.range_reader import close_idle
from nsparq.testing import Broker, FaultProxy, run_broker, run_lookupd
from tests.spark.source.support import Query, bodies, numbered, read_batch
from tests.support import DEADLINE, wait_until

TOPICS = [f"t{number:03}" for number in range(40)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That nothing is new is noticed soon. An answer is waited for, also on a busy machine."""
    monkeypatch.setattr(driver, "IDLE_S", 0.02)
    monkeypatch.setattr(peers, "LATE_S", DEADLINE)
    yield
    close_idle()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the driver and the tasks ask for, by path."""
    counts: Counter[str] = Counter()
    request = Client.request

    def counted(self: Client, method: str, path: str, *rest: Any, **more: Any) -> Any:
        counts[path] += 1
        return request(self, method, path, *rest, **more)

    monkeypatch.setattr(Client, "request", counted)
    return counts


def publish(broker: Broker, *bodies: bytes) -> None:
    for topic in TOPICS:
        broker.publish(topic, *bodies)


def depths(broker: Broker) -> set[int]:
    return {one["depth"] for topic in broker.stats()["topics"] for one in topic["channels"]}


def test_all_topics_of_a_node_are_asked_for_and_moved_in_one_request(requests: Counter[str]) -> None:
    with run_broker() as one, run_broker() as other:
        publish(one, b"1")
        publish(other, b"2")
        given = {"topic": None, "topicsPattern": "t.*", "discoveryInterval": "1h"}
        with Query(nsqd=f"{one.http_address},{other.http_address}", **given) as query:
            query.start()
            # The channels are created where the query begins: one request asks, one creates.
            assert requests["/topics/positions"] == 2
            assert requests["/channels/commit"] == requests["/channels/seek"] == 2
            requests.clear()
            assert query.plan()
            # They stand there already.
            assert requests == {"/topics/positions": 2}
            assert query._run() == 2 * len(TOPICS)
            requests.clear()
            assert query.step() is None
            assert requests.pop("/channels/commit") == 2
            assert {*requests} == {"/topics/positions"}
            assert depths(one) == depths(other) == {0}
            requests.clear()
            assert query.step() is None
            # One look at each, and one that waited for a change, if there was time for it.
            assert {*requests} == {"/topics/positions"} and requests["/topics/positions"] <= 4


def test_only_what_has_changed_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[list[str]] = []
    statuses = Client.statuses

    def noted(self: Client, *arguments: Any) -> Any:
        found = statuses(self, *arguments)
        answered.append([*found])
        return found

    monkeypatch.setattr(Client, "statuses", noted)
    with run_broker() as broker:
        publish(broker, b"1")
        with Query(nsqd=broker.http_address, topic=None, topicsPattern="t.*") as query:
            query.drain()
            assert sorted(answered[0]) == TOPICS
            answered.clear()
            broker.publish(TOPICS[7], b"2")
            assert query.step() == 1
            assert [found for found in answered if found] == [[TOPICS[7]]]


def test_topics_of_nsqlookupd_are_found_with_one_request(requests: Counter[str]) -> None:
    with run_lookupd() as lookupd, run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as broker:
        publish(broker, b"1")
        wait_until(lambda: lookupd.producers(TOPICS[-1]))
        given = {"topic": None, "topicsPattern": "t.*", "discoveryInterval": "1h"}
        with Query(nsqlookupd=lookupd.http_address, **given) as query:
            query.start()
            assert requests["/nodes"] == 1 and not {"/lookup", "/topics"} & {*requests}
            assert query.run_until(len(TOPICS)).bodies == [b"1"] * len(TOPICS)


def test_a_node_that_hangs_holds_up_only_its_own_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LATE_S", 0.2)
    with run_broker() as one, run_broker() as other, FaultProxy(other.http_address) as proxy:
        one.publish("t", b"1")
        other.publish("t", b"2")
        with Query(nsqd=f"{one.http_address},{proxy.address}", discoveryInterval="1h") as query:
            assert sorted(query.run_until(2).bodies) == [b"1", b"2"]
            proxy.stall()
            for number in range(3):
                one.publish("t", b"%d" % number)
                assert query.run_until(3 + number).bodies[-1] == b"%d" % number
            query.drain()
            # The commits have reached the one that answers.
            assert depths(one) == {0}
            other.publish("t", b"late")
            proxy.heal()
            assert query.run_until(6).bodies[-1] == b"late"
            wait_until(lambda: query.step() is None and depths(other) == {0})


def test_a_commit_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LATE_S", 0.2)
    awaited: list[Future[Any]] = []
    await_all = peers.Peers.await_all

    def noted(self: peers.Peers, futures: Iterable[Future[Any]]) -> None:
        found = [*futures]
        awaited.extend(found)
        await_all(self, found)

    monkeypatch.setattr(peers.Peers, "await_all", noted)
    commit_many, answers = Client.commit_many, threading.Event()
    with run_broker() as one, run_broker() as other:

        def hanging(self: Client, *arguments: Any) -> Any:
            if self.url.endswith(other.http_address):
                answers.wait()
            return commit_many(self, *arguments)

        one.publish("t", b"1")
        other.publish("t", b"2")
        with Query(nsqd=f"{one.http_address},{other.http_address}") as query:
            query.run_until(2)
            monkeypatch.setattr(Client, "commit_many", hanging)
            try:
                for number in range(3):
                    one.publish("t", b"%d" % number)
                    query.run_until(3 + number)
                assert query.step() is None and depths(one) == {0}
                assert len(awaited) == len({*map(id, awaited)}) and not all(one.done() for one in awaited)
            finally:
                answers.set()
            wait_until(lambda: query.step() is None and depths(other) == {0})


def test_a_batch_is_not_done_without_a_node_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses, abort, answers = Client.statuses, Client.abort, threading.Event()
    with run_broker() as one, run_broker() as other:
        one.publish("t", b"1")
        other.publish("t", b"2")

        def hanging(self: Client, *arguments: Any) -> Any:
            if self.url.endswith(other.http_address):
                answers.wait()
            return statuses(self, *arguments)

        def ending(self: Client) -> None:
            answers.set()
            abort(self)

        monkeypatch.setattr(Client, "statuses", hanging)
        monkeypatch.setattr(Client, "abort", ending)
        nodes = f"{one.http_address},{other.http_address}"
        given = {"nsqd": nodes, "requestTimeout": "100ms"}
        with pytest.raises(NoAnswer, match=f"nsqd {other.http_address} does not answer"):
            read_batch(**given, retryFor="100ms")
        assert sorted(bodies(read_batch(**given))) == [b"1", b"2"]


def test_small_ranges_of_many_topics_are_one_task(requests: Counter[str]) -> None:
    with run_broker() as broker:
        publish(broker, *numbered(2))
        with Query(nsqd=broker.http_address, topic=None, topicsPattern="t.*") as query:
            assert query.plan()
            (part,) = query.partitions(query._initial, query.at)
            rows = query.read(part)
            assert [row["topic"] for row in rows] == [topic for topic in TOPICS for _ in range(2)]
            assert [row["body"] for row in rows] == numbered(2) * len(TOPICS)
            # No topic is read twice, and no connection is made for each.
            assert requests["/topic/read"] == len(TOPICS)
            assert json.dumps(query.at).count("[") == len(TOPICS)
