"""pytest fixtures, available wherever nsparq is installed.

nsq_broker    a broker for all tests; override nsq_broker_options to set its options
nsq_topic     the name of a topic that no other test uses
nsq_lookupd   an nsqlookupd with which the broker registers
nsq_proxy     a FaultProxy in front of the broker, for one test
nsq_spark     a local Spark session for all tests, for try_pipeline()

Nothing is imported or started before a test uses it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nsparq.testing import Broker, FaultProxy, Lookupd

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def nsq_broker_options() -> dict[str, Any]:
    """Options of nsqd, in snake_case, for nsq_broker. Override it in conftest.py."""
    return {}


@pytest.fixture(scope="session")
def nsq_broker(nsq_broker_options: dict[str, Any]) -> Iterator[Broker]:
    """A running broker, the same for all tests: see nsparq.testing.Broker."""
    from nsparq.testing import run_broker

    with run_broker(**nsq_broker_options) as broker:
        yield broker


@pytest.fixture
def nsq_topic(request: pytest.FixtureRequest, nsq_broker: Broker) -> Iterator[str]:
    """The name of a topic for this test alone, deleted afterwards."""
    # A name has at most 64 characters; this leaves room for what a test adds.
    readable = re.sub(r"[^a-zA-Z0-9_.-]+", "_", request.node.name)[:40]
    topic = f"{readable}_{next(_numbers)}"
    yield topic
    nsq_broker.delete(topic)


@pytest.fixture(scope="session")
def nsq_lookupd(nsq_broker: Broker) -> Iterator[Lookupd]:
    """A running nsqlookupd that knows the topics of nsq_broker. Clients use its `http_address`."""
    from nsparq.testing import run_lookupd

    with run_lookupd() as lookupd:
        nsq_broker.register_with(lookupd)
        yield lookupd
        nsq_broker.register_with()


@pytest.fixture
def nsq_proxy(nsq_broker: Broker) -> Iterator[FaultProxy]:
    """A FaultProxy in front of nsq_broker. The client connects to its `address`."""
    from nsparq.testing import FaultProxy

    with FaultProxy(nsq_broker.tcp_address) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def nsq_spark() -> Iterator[SparkSession]:
    """A local Spark session for all tests; try_pipeline() uses it. One core, no web UI."""
    from nsparq.testing.pipelines import local_session

    spark = local_session()
    yield spark
    spark.stop()
