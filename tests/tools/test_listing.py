"""nsparq topics, channels and nodes: tables for people, stable keys for programs."""

from __future__ import annotations

import json
import re

from tests.support import TestBroker

from .conftest import Run
from .processes import http


def test_topics_channels_and_nodes_as_tables_and_as_json(nsparq: Run, broker: TestBroker, topic: str) -> None:
    broker.publish(topic, b"one", b"two")
    broker.control("create", topic, "c")
    broker.publish(topic + "-alone", b"one")
    done = nsparq("topics", f"{topic}*")
    assert (done.status, done.err) == (0, "")
    head, row, alone = done.out.decode().splitlines()
    assert (
        head.split() == "TOPIC CHANNELS IN TOPIC IN CHANNELS DEFERRED MESSAGES ON DISK NODES PAUSED".split()
    )
    assert row.split()[:6] == [topic, "1", "0", "2", "0", "2"]
    assert alone.split()[:4] == [f"{topic}-alone", "0", "1", "0"]
    topics = json.loads(nsparq("topics", topic, "--json").out)
    assert topics["unreachable"] == []
    assert {*topics["topics"][0]} == {
        "topic", "depth", "backend_depth", "message_count", "message_bytes", "log_bytes", "channels_depth",
        "deferred_count", "channels", "paused", "nodes",
    }  # fmt: skip
    head, row = nsparq("channels", topic).out.decode().splitlines()
    assert head.split()[:7] == "TOPIC CHANNEL WAITING LAG DRAIN IN FLIGHT".split()
    assert row.split()[:3] == [topic, "c", "2"]
    # In the first seconds nsqd does not know how fast the channel drains.
    assert re.match(r"<?\d", row.split()[3]) and row.split()[4] in ("-", "never")
    channels = json.loads(nsparq("channels", topic, "--json").out)["channels"]
    assert [(one["topic"], one["channel"], one["depth"], one["paused"]) for one in channels] == [
        (topic, "c", 2, False)
    ]
    (node,) = json.loads(nsparq("nodes", "--json").out)["nodes"]
    assert (node["node"], node["health"]) == (http(broker), "OK")
    assert http(broker) in nsparq("nodes").out.decode()


def test_nothing_to_list_is_said(nsparq: Run) -> None:
    assert nsparq("topics", "no-such-*").out == b"There are no topics that match no-such-*.\n"
