"""Who is there: by nsqlookupd, by their own addresses, by both; and who is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nsparq.spark.cluster.http_client import Unreachable
from nsparq.spark.cluster.nodes import Cluster, Found
from nsparq.spark.options import NsqOptions, Use
from nsparq.testing import Broker, Lookupd, run_broker, run_lookupd
from tests.support import wait_until


@pytest.fixture(scope="module")
def lookupd() -> Iterator[Lookupd]:
    with run_lookupd() as running:
        yield running


@pytest.fixture(scope="module")
def broker(lookupd: Lookupd) -> Iterator[Broker]:
    with run_broker(lookupd_tcp_address=[lookupd.tcp_address]) as running:
        running.publish("orders", b"x")
        running.publish("other", b"x")
        wait_until(lambda: lookupd.producers("orders") and lookupd.producers("other"))
        yield running


def look(**given: str) -> Found:
    given = {"topic": "orders", **given} if "topicsPattern" not in given else given
    cluster = Cluster(NsqOptions.parse(given, Use.LOG_BATCH))
    try:
        return cluster.look()
    finally:
        cluster.close()


def test_nsqlookupd_names_the_nodes_of_a_topic(broker: Broker, lookupd: Lookupd) -> None:
    found = look(nsqlookupd=lookupd.http_address)
    assert found.topics == {"orders": {broker.http_address}}
    node = found.nodes[broker.http_address]
    assert (node.url, node.tcp_address) == (f"http://{broker.http_address}", broker.tcp_address)
    assert not node.is_given and found.is_complete


def test_a_node_whose_own_address_was_given_has_the_same_name(broker: Broker, lookupd: Lookupd) -> None:
    other = broker.http_address.replace("127.0.0.1", "localhost")
    for more in ({}, {"nsqlookupd": lookupd.http_address}):
        found = look(nsqd=other, **more)
        assert [*found.nodes] == [broker.http_address]
        assert found.nodes[broker.http_address].url == f"http://{other}"
        assert found.nodes[broker.http_address].is_given


def test_a_named_topic_is_looked_for_on_every_node_that_was_given(broker: Broker) -> None:
    assert look(nsqd=broker.http_address, topic="absent").topics == {"absent": {broker.http_address}}


def test_a_topic_that_nobody_has_is_no_error(broker: Broker, lookupd: Lookupd) -> None:
    found = look(nsqlookupd=lookupd.http_address, topic="absent")
    assert found.topics == {"absent": frozenset()} and found.is_complete and found.answers == 1


def test_a_pattern_is_matched_against_whole_names(broker: Broker, lookupd: Lookupd) -> None:
    for where in ({"nsqlookupd": lookupd.http_address}, {"nsqd": broker.http_address}):
        assert [*look(topicsPattern="o.*r", **where).topics] == ["other"]
        assert sorted(look(topicsPattern="o.*", **where).topics) == ["orders", "other"]


def test_several_nsqlookupds_know_more_together_and_one_is_enough(broker: Broker, lookupd: Lookupd) -> None:
    found = look(nsqlookupd=f"127.0.0.1:1,{lookupd.http_address}")
    assert [*found.nodes] == [broker.http_address]
    assert not found.is_complete and found.answers == 1
    assert "127.0.0.1:1" in found.failures[0]


def test_an_absence_is_logged_once(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(NsqOptions.parse({"topic": "t", "nsqlookupd": "127.0.0.1:1"}, Use.LOG_BATCH))
    for _ in range(3):
        assert cluster.look() == Found({}, {"t": frozenset()}, cluster.look().failures, 0)
    assert sum("trying again" in record.message for record in caplog.records) == 1
    cluster.close()


def test_a_node_that_was_known_keeps_its_name_while_it_is_away() -> None:
    with run_broker() as broker:
        cluster = Cluster(NsqOptions.parse({"topic": "t", "nsqd": broker.http_address}, Use.LOG_BATCH))
        before = cluster.look()
        broker.stop()
        now = cluster.look()
        assert now.nodes == before.nodes and now.topics == {"t": frozenset()} and not now.is_complete
        cluster.close()


def test_all_nodes_for_a_sink(broker: Broker, lookupd: Lookupd) -> None:
    def nodes(**given: Any) -> list[str]:
        cluster = Cluster(NsqOptions.parse(given, Use.SINK_BATCH))
        try:
            return [node.name for node in cluster.nodes()]
        finally:
            cluster.close()

    assert nodes(nsqlookupd=lookupd.http_address) == [broker.http_address]
    assert nodes(nsqd=broker.http_address) == [broker.http_address]
    assert nodes(nsqlookupd=lookupd.http_address, nsqd="127.0.0.1:1") == [broker.http_address]
    with pytest.raises(Unreachable, match="no nsqd could be found"):
        nodes(nsqd="127.0.0.1:1")
