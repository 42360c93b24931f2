"""Telegraf's and Redpanda Connect's plugins for NSQ: what they ask for, and what they read.

Both use go-nsq 1.1 for messages. The requests and fields are those of Telegraf's inputs `nsq` and
`nsq_consumer` and output `nsq` (1.40), and of Redpanda Connect's input and output `nsq` (4.106).
Neither program is a package of Debian, PyPI or npm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from nsparq.options import TlsRequired
from tests.support import DEADLINE, BrokerThread, RawConnection, unique_name, wait_until
from tests.support.certificates import certificates
from tests.support.lookupd import LookupdThread

from .go_json import decode

GO_NSQ_IDENTIFY: dict[str, Any] = {
    "client_id": "host",
    "hostname": "host.example",
    "short_id": "host",
    "long_id": "host.example",
    "user_agent": "go-nsq/1.1.0",
    "tls_v1": False,
    "deflate": False,
    "deflate_level": 6,
    "snappy": False,
    "feature_negotiation": True,
    "heartbeat_interval": 30000,
    "sample_rate": 0,
    "output_buffer_size": 16384,
    "output_buffer_timeout": 250,
    "msg_timeout": 0,
}
IDENTIFY_ANSWER = {
    "max_rdy_count": int,
    "tls_v1": bool,
    "deflate": bool,
    "snappy": bool,
    "auth_required": bool,
}
LOOKUP_ANSWER = {
    "channels": [str],
    "producers": [
        {
            "remote_address": str,
            "hostname": str,
            "broadcast_address": str,
            "tcp_port": int,
            "http_port": int,
            "version": str,
        }
    ],
}
DEFAULT_REQUEUE_MS = 90_000

TELEGRAF_CLIENT = {
    "client_id": str,
    "hostname": str,
    "version": str,
    "remote_address": str,
    "state": int,
    "ready_count": int,
    "in_flight_count": int,
    "message_count": int,
    "finish_count": int,
    "requeue_count": int,
    "connect_ts": int,
    "sample_rate": int,
    "deflate": bool,
    "snappy": bool,
    "user_agent": str,
    "tls": bool,
    "tls_cipher_suite": str,
    "tls_version": str,
    "tls_negotiated_protocol": str,
    "tls_negotiated_protocol_is_mutual": bool,
}
TELEGRAF_CHANNEL = {
    "channel_name": str,
    "depth": int,
    "backend_depth": int,
    "in_flight_count": int,
    "deferred_count": int,
    "message_count": int,
    "requeue_count": int,
    "timeout_count": int,
    "paused": bool,
    "clients": [TELEGRAF_CLIENT],
}
TELEGRAF_STATS = {
    "version": str,
    "health": str,
    "start_time": int,
    "topics": [
        {
            "topic_name": str,
            "depth": int,
            "backend_depth": int,
            "message_count": int,
            "paused": bool,
            "channels": [TELEGRAF_CHANNEL],
        }
    ],
}


@pytest.fixture(scope="module")
def nsqd() -> Iterator[BrokerThread]:
    with BrokerThread() as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return unique_name("metrics")


def connect(nsqd: BrokerThread, **fields: Any) -> RawConnection:
    """What go-nsq does first, and the checks of its answer."""
    connection = nsqd.connect()
    connection.command("IDENTIFY", body=json.dumps({**GO_NSQ_IDENTIFY, **fields}).encode())
    answer = decode(json.loads(connection.read_frame().data), IDENTIFY_ANSWER)
    # Neither program can send a secret.
    assert not answer["auth_required"]
    assert answer["max_rdy_count"] >= 100
    return connection


def test_telegraf_reads_the_statistics(nsqd: BrokerThread, topic: str) -> None:
    with connect(nsqd) as consumer:
        consumer.sub(topic, "consumer", rdy=1)
        nsqd.publish(topic, b"a", b"b", b"c")
        consumer.req(consumer.read_message().id, DEFAULT_REQUEUE_MS)
        consumer.read_message()
        answer = nsqd.request("GET", "/stats?format=json")
        assert answer.status == 200
        stats = decode(json.loads(answer.body), TELEGRAF_STATS)
        # An empty version would be the format of NSQ before 1.0, and "OK" counts as one server.
        assert stats["version"] and stats["health"] == "OK"
        (of_topic,) = (one for one in stats["topics"] if one["topic_name"] == topic)
        (channel,) = of_topic["channels"]
        counts = {name: channel[name] for name in TELEGRAF_CHANNEL if name.endswith(("depth", "count"))}
        assert counts == {
            "depth": 1,
            "backend_depth": 0,
            "in_flight_count": 1,
            "deferred_count": 1,
            "message_count": 3,
            "requeue_count": 1,
            "timeout_count": 0,
        }
        (client,) = channel["clients"]
        assert client["user_agent"] == "go-nsq/1.1.0"
        assert client["remote_address"] == consumer.local_address
        # A topic without a channel has an empty list or null, both are none.
        nsqd.publish(unique_name("metrics"), b"a")
        decode(json.loads(nsqd.request("GET", "/stats?format=json").body), TELEGRAF_STATS)


def test_telegraf_reads_the_statistics_over_https() -> None:
    made = certificates()
    with BrokerThread(**made.server_flags(tls_required=TlsRequired.YES)) as nsqd:
        with nsqd.http_connect(https=True, tls=made.client_context()) as connection:
            decode(json.loads(connection.request("GET", "/stats?format=json").body), TELEGRAF_STATS)


def test_telegraf_publishes_and_consumes(nsqd: BrokerThread, topic: str) -> None:
    """The output sends one PUB for each metric. The input has a message finished when its outputs
    have written it, in any order, and requeued when they have not."""
    with connect(nsqd) as output, connect(nsqd) as consumer:
        for line in (b"cpu usage=1\n", b"cpu usage=2\n", b"cpu usage=3\n"):
            output.pub(topic, line)
        consumer.sub(topic, "consumer", rdy=100)
        first, second, third = consumer.read_messages(3)
        consumer.fin(third.id)
        consumer.req(first.id, DEFAULT_REQUEUE_MS)
        consumer.fin(second.id)
        consumer.barrier()
        left = nsqd.channel_stats(topic, "consumer")
        assert (left["in_flight_count"], left["deferred_count"], left["depth"]) == (0, 1, 0)
        consumer.cls()


@pytest.mark.parametrize("user_agent", ["", "connect/1"])
def test_redpanda_connect_publishes_and_consumes(nsqd: BrokerThread, topic: str, user_agent: str) -> None:
    """Without `user_agent` in its configuration it sends an empty one, not that of go-nsq."""
    with connect(nsqd, user_agent=user_agent) as output:
        output.nop()  # how go-nsq's producer pings when the output connects
        output.pub(topic, b"hello")
    with connect(nsqd, user_agent=user_agent) as consumer:
        consumer.sub(topic, "connect", rdy=100)
        message = consumer.read_message()
        # Its metadata nsq_id, nsq_attempts and nsq_timestamp.
        assert len(message.id.decode()) == 16
        assert (message.attempts, message.body) == (1, b"hello")
        assert message.timestamp_ns > 1_700_000_000 * 10**9
        stats = nsqd.stats(topic, "connect")["topics"][0]["channels"][0]["clients"]
        assert [client["user_agent"] for client in stats] == [user_agent]
        consumer.req(message.id, 0)
        again = consumer.read_message()
        assert (again.id, again.attempts) == (message.id, 2)
        consumer.fin(again.id)
        consumer.cls()


def test_both_find_nsqd_through_nsqlookupd(topic: str) -> None:
    with LookupdThread() as lookupd:
        host, port = lookupd.address
        with BrokerThread(lookupd_tcp_address=(f"{host}:{port}",), broadcast_address="127.0.0.1") as nsqd:
            nsqd.control("create", topic, "consumer")
            headers = {"Accept": "application/vnd.nsq; version=1.0"}
            answer = wait_until(lambda: found(lookupd, topic, headers), DEADLINE)
            # Without this header go-nsq would expect the format of NSQ before 1.0.
            assert answer.header("X-NSQ-Content-Type") == "nsq; version=1.0"
            (producer,) = decode(json.loads(answer.body), LOOKUP_ANSWER)["producers"]
            assert (producer["broadcast_address"], producer["tcp_port"]) == nsqd.address


def found(lookupd: LookupdThread, topic: str, headers: dict[str, str]) -> Any:
    answer = lookupd.request("GET", f"/lookup?topic={topic}", headers=headers)
    return answer if answer.status == 200 and json.loads(answer.body)["channels"] else None
