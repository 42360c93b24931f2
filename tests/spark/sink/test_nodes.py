"""The nodes of a sink and its delivery guarantee, which is never weaker than requested."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from pyspark.sql.types import MapType, StringType, StructType

from nsparq.server.api import table
from nsparq.spark.cluster.http_client import Refused, Unreachable
from nsparq.spark.options import NsqOptions, OptionError, Use
from nsparq.spark.sink import nodes
from nsparq.spark.sink.nodes import Plan, find_plan
from nsparq.testing import FaultProxy
from tests.spark.sink.support import address, options, stream_writer
from tests.support import BrokerThread, wait_until
from tests.support.lookupd import LookupdThread


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process remembers from one micro-batch to the next."""
    monkeypatch.setattr(nodes, "_plans", {})
    monkeypatch.setattr(nodes, "_warned", set())


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as broker:
        yield broker


@pytest.fixture
def plain_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerThread]:
    """An nsqd without transactions, as NSQ's own."""
    with monkeypatch.context() as patch:
        patch.setattr(table, "SUBJECTS", [one for one in table.SUBJECTS if one[0] != "Transactions"])
        broker = BrokerThread()
    with broker:
        yield broker


def plan(*nsqd: str, **given: str) -> Plan:
    return find_plan(options(Use.SINK_STREAM, *nsqd, **given))


def urls(found: Plan) -> set[str]:
    return {node.url.removeprefix("http://") for node in found.nodes}


def test_nsqd_with_transactions_gets_exactly_once(broker: BrokerThread) -> None:
    found = plan(address(broker))
    assert found.exactly_once
    assert urls(found) == {address(broker)}


def test_nsqd_without_transactions_gets_at_least_once_and_the_log_says_so(
    broker: BrokerThread, plain_broker: BrokerThread, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        found = plan(address(broker), address(plain_broker))
        nodes._plans.clear()
        assert not found.exactly_once
        assert urls(found) == {address(broker), address(plain_broker)}
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert f"AT LEAST ONCE: http://{address(plain_broker)} has no transactions" in said[0]


def test_asking_exactly_once_of_nsqd_without_transactions_is_an_error(plain_broker: BrokerThread) -> None:
    with pytest.raises(
        OptionError, match=rf"option delivery: exactly-once .*{address(plain_broker)} has none"
    ):
        plan(address(plain_broker), delivery="exactly-once")


def test_at_least_once_can_be_asked_for_and_then_nobody_has_to_be_there(broker: BrokerThread) -> None:
    assert not plan(address(broker), delivery="at-least-once").exactly_once
    assert not plan("127.0.0.1:1", delivery="at-least-once").exactly_once


def test_one_nsqd_by_two_addresses_is_one_node(broker: BrokerThread) -> None:
    """Or its second commit would be taken for a repetition of its first."""
    with FaultProxy(address(broker)) as proxy:
        found = plan(address(broker), proxy.address, f"localhost:{address(broker).partition(':')[2]}")
    assert len(found.nodes) == 1


def test_a_node_that_is_away_is_waited_for_and_does_not_weaken_the_promise(broker: BrokerThread) -> None:
    with FaultProxy(address(broker)) as proxy:
        proxy.refuse()
        with pytest.raises(Unreachable, match=r"refused, for 0\.1 s"):
            plan(proxy.address, retryFor="100ms")
        proxy.heal()
        assert plan(proxy.address).exactly_once


def test_a_plan_is_kept_for_the_next_micro_batches(broker: BrokerThread) -> None:
    with FaultProxy(address(broker)) as proxy:
        asked = options(Use.SINK_STREAM, proxy.address)
        find_plan(asked)
        count = proxy.accepted_count
        # The options come anew with each micro-batch.
        assert find_plan(
            NsqOptions.parse({"topic": "t", "retryFor": "10s", "nsqd": proxy.address}, Use.SINK_STREAM)
        )
        assert proxy.accepted_count == count


def test_nodes_are_those_that_nsqlookupd_knows(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    with LookupdThread() as lookupd, BrokerThread(lookupd_tcp_address=_tcp(lookupd)) as other:
        wait_until(lambda: len(lookupd.nodes()) == 1)
        asked = {"nsqlookupd": address(lookupd)}
        assert {name.rpartition(":")[2] for name in _names(plan(**asked))} == {
            address(other).partition(":")[2]
        }
        nodes._plans.clear()
        # Both ways together.
        assert len(plan(address(broker), **asked).nodes) == 2
        nodes._plans.clear()

        before = plan(**asked)
        monkeypatch.setattr(nodes, "FRESH_S", 0.0)
        lookupd.stop()
        assert plan(**asked) == before, "nsqlookupd is away, and the nodes that it named are not"
        nodes._plans.clear()
        with pytest.raises(Unreachable, match=r"/nodes: .*, for 0\.1 s"):
            plan(**asked, retryFor="100ms")


def test_nsqlookupd_without_nodes_is_waited_for() -> None:
    with LookupdThread() as lookupd, pytest.raises(Unreachable, match="knows no nsqd, for 0.1 s"):
        plan(nsqlookupd=address(lookupd), retryFor="100ms")


def test_a_refusal_is_not_waited_for(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(client: object) -> bool:
        raise Refused("GET", 403, "FORBIDDEN", {})

    monkeypatch.setattr(nodes, "_has_transactions", refuse)
    with pytest.raises(Refused, match="403 FORBIDDEN"):
        plan(address(broker))


def _tcp(lookupd: LookupdThread) -> tuple[str, ...]:
    assert not isinstance(lookupd.address, str)
    host, port = lookupd.address
    return (f"{host}:{port}",)


def _names(found: Plan) -> list[str]:
    return [node.name for node in found.nodes]


def test_headers_go_only_to_an_nsqd_that_knows_them(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would publish them as a part of the body."""
    for delivery in ("exactly-once", "at-least-once"):
        given = options(Use.SINK_STREAM, address(broker), delivery=delivery)
        assert find_plan(given, headers=True).exactly_once is (delivery == "exactly-once")
        with monkeypatch.context() as patch:
            patch.setattr(nodes, "_plans", {})
            patch.setattr(nodes.Client, "info", lambda self: {"version": "1.3.0"})
            with pytest.raises(OptionError, match=f"headers: .*{address(broker)} does not know message head"):
                find_plan(given, headers=True)
            find_plan(given)


def test_deferred_rows_with_headers_need_transactions(broker: BrokerThread) -> None:
    headers = MapType(StringType(), StringType())
    schema = StructType().add("body", "binary").add("defer", "long").add("headers", headers)
    stream_writer(address(broker), schema=schema)
    with pytest.raises(OptionError, match="columns defer and headers: both together need transactions"):
        stream_writer(address(broker), schema=schema, delivery="at-least-once")
