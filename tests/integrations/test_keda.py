"""KEDA's scaler `nsq`: the requests that it makes, and what it reads from the answers.

Its rules are in `Scaler`, as in pkg/scalers/nsq_scaler.go of KEDA 2.20. KEDA itself needs a
Kubernetes cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from nsparq.addresses import join_address
from nsparq.testing import Broker, Lookupd, run_broker, run_lookupd
from tests.support import unique_name, wait_until
from tests.support.polling import DEADLINE

from .go_json import decode

LOOKUP = {"producers": [{"broadcast_address": str, "http_port": int}]}
CHANNEL = {"channel_name": str, "depth": int, "paused": bool}
STATS = {"topics": [{"topic_name": str, "depth": int, "channels": [CHANNEL]}]}


class ScalerError(Exception):
    """KEDA keeps the number of replicas, or uses the `fallback`."""


class Scaler:
    def __init__(self, lookupds: list[str], topic: str, channel: str) -> None:
        self.lookupds, self.topic, self.channel = lookupds, topic, channel

    def depth(self) -> int:
        """The figure that replicas are computed from."""
        return sum(map(self._depth_at, self.hosts()))

    def hosts(self) -> set[str]:
        found: set[str] = set()
        for address in self.lookupds:
            status, answer = get(address, "lookup", topic=self.topic)
            if status == 404:
                continue
            if status != 200:
                raise ScalerError(f"{address}: status {status}")
            for one in decode(answer, LOOKUP)["producers"]:
                found.add(join_address(one["broadcast_address"], one["http_port"]))
        return found

    def _depth_at(self, host: str) -> int:
        query = {"format": "json", "include_clients": "false", "include_mem": "false", "topic": self.topic}
        status, answer = get(host, "stats", **query)
        if status != 200:
            raise ScalerError(f"{host}: status {status}")
        depth = 0
        for topic in decode(answer, STATS)["topics"]:
            if topic["topic_name"] != self.topic:
                continue
            own = [one for one in topic["channels"] if one["channel_name"] == self.channel]
            # Without the channel, it is the topic that has the messages.
            depth += sum(one["depth"] for one in own if not one["paused"]) if own else topic["depth"]
        return depth


def get(address: str, path: str, **query: str) -> tuple[int, Any]:
    # KEDA asks for this type at nsqlookupd.
    request = Request(f"http://{address}/{path}?{urlencode(query)}")
    request.add_header("Accept", "application/json; charset=utf-8")
    try:
        with urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        with error:
            return error.code, None
    except URLError as error:
        raise ScalerError(f"{address}: {error.reason}") from error


@pytest.fixture(scope="module")
def lookupds() -> Iterator[list[Lookupd]]:
    with run_lookupd() as one, run_lookupd() as two:
        yield [one, two]


@pytest.fixture(scope="module")
def nsqds(lookupds: list[Lookupd]) -> Iterator[list[Broker]]:
    addresses = [lookupd.tcp_address for lookupd in lookupds]
    with run_broker(lookupd_tcp_address=addresses) as one, run_broker(lookupd_tcp_address=addresses) as two:
        yield [one, two]


@pytest.fixture
def topic(lookupds: list[Lookupd], nsqds: list[Broker]) -> str:
    """A topic without channels, on both nsqds and known to both nsqlookupds."""
    return create(lookupds, nsqds, unique_name("keda"))


def create(lookupds: list[Lookupd], nsqds: list[Broker], name: str) -> str:
    for nsqd in nsqds:
        nsqd.create(name)
    for lookupd in lookupds:
        wait_until(lambda lookupd=lookupd: len(lookupd.producers(name)) == 2)  # type: ignore[misc]
    return name


def scaler(lookupds: list[Lookupd], topic: str, channel: str = "workers") -> Scaler:
    return Scaler([lookupd.http_address for lookupd in lookupds], topic, channel)


def post(address: str, path: str, **query: str) -> None:
    request = Request(f"http://{address}/{path}?{urlencode(query)}", method="POST")
    with urlopen(request, timeout=DEADLINE) as answer:
        assert answer.status == 200


def test_depth_is_the_sum_over_all_nodes(lookupds: list[Lookupd], nsqds: list[Broker], topic: str) -> None:
    keda = scaler(lookupds, topic)
    # Each node is registered with two nsqlookupds, and is asked once.
    assert keda.hosts() == {nsqd.http_address for nsqd in nsqds}
    assert keda.depth() == 0
    for nsqd in nsqds:
        nsqd.publish(topic, b"a", b"b")
    # Without a channel the messages are in the topic, so that the first worker is started.
    assert keda.depth() == 4
    for nsqd in nsqds:
        nsqd.create(topic, "workers")
    assert keda.depth() == 4
    nsqds[0].publish(topic, b"c", b"later", defer=600.0)
    # Deferred messages do not count, nor does a channel of another name.
    assert keda.depth() == 4
    assert scaler(lookupds, topic, "others").depth() == 0


def test_a_paused_channel_does_not_count(lookupds: list[Lookupd], nsqds: list[Broker], topic: str) -> None:
    for nsqd in nsqds:
        nsqd.create(topic, "workers")
        nsqd.publish(topic, b"a", b"b", b"c")
    post(nsqds[0].http_address, "channel/pause", topic=topic, channel="workers")
    assert scaler(lookupds, topic).depth() == 3


def test_ephemeral_names_are_found(lookupds: list[Lookupd], nsqds: list[Broker]) -> None:
    topic = create(lookupds, nsqds, f"{unique_name('keda')}#ephemeral")
    nsqds[0].create(topic, "workers#ephemeral")
    nsqds[0].publish(topic, b"a")
    assert scaler(lookupds, topic, "workers#ephemeral").depth() == 1


def test_a_topic_that_nobody_has_is_empty(lookupds: list[Lookupd], nsqds: list[Broker]) -> None:
    assert get(lookupds[0].http_address, "lookup", topic="nobody_has_it")[0] == 404
    assert scaler(lookupds, "nobody_has_it").depth() == 0
    # nsqlookupd may still name a node whose topic was deleted a moment ago.
    status, answer = get(nsqds[0].http_address, "stats", format="json", topic="nobody_has_it")
    assert (status, decode(answer, STATS)) == (200, {"topics": []})


def test_a_tombstoned_node_is_not_asked(lookupds: list[Lookupd], nsqds: list[Broker], topic: str) -> None:
    for nsqd in nsqds:
        nsqd.publish(topic, b"a")
    for lookupd in lookupds:
        post(lookupd.http_address, "topic/tombstone", topic=topic, node=nsqds[0].http_address)
    keda = scaler(lookupds, topic)
    assert keda.hosts() == {nsqds[1].http_address}
    assert keda.depth() == 1


def test_a_node_that_stops_is_forgotten_and_comes_back_with_its_messages(
    lookupds: list[Lookupd], nsqds: list[Broker], topic: str
) -> None:
    for nsqd in nsqds:
        nsqd.publish(topic, b"a")
    keda = scaler(lookupds, topic)
    nsqds[0].stop()
    try:
        wait_until(lambda: keda.hosts() == {nsqds[1].http_address})
        assert keda.depth() == 1
    finally:
        nsqds[0].start()
    wait_until(lambda: len(keda.hosts()) == 2)
    assert keda.depth() == 2


def test_a_daemon_that_does_not_answer_is_an_error(lookupds: list[Lookupd], topic: str) -> None:
    """One nsqlookupd that is down stops the scaling: KEDA needs all of them."""
    with run_lookupd() as third:
        keda = scaler([*lookupds, third], topic)
        assert keda.depth() == 0
    with pytest.raises(ScalerError, match="refused"):
        keda.depth()
