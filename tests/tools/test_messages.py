"""nsparq peek and nsparq tail: they show messages, and consume none."""

from __future__ import annotations

import json
import time

import pytest

from nsparq.tools.log_reader import LogReader
from nsparq.tools.source import Source, SourceFlags
from nsparq.tools.times import parse_time
from tests.support import TestBroker

from .conftest import Run
from .processes import Tool, http, publish_with_headers, tcp


def test_peek_shows_the_newest_messages_of_a_topic(nsparq: Run, broker: TestBroker, topic: str) -> None:
    broker.publish(topic, b"one", b"\xff", b"three \x1b[31m")
    done = nsparq("peek", topic, "-n", "2")
    lines = done.out.decode().splitlines()
    # A terminal must not obey what a message contains.
    assert (done.status, lines[1], lines[3]) == (0, "    /w==  (base64)", "    three \\x1b[31m")
    first, *rest = map(json.loads, nsparq("peek", topic, "--json").out.splitlines())
    assert (first["body"], first["state"], first["node"], len(rest)) == ("one", "stored", http(broker), 2)
    number = str(first["sequence"] + 1)
    assert (
        json.loads(nsparq("peek", topic, f"--sequence={number}", "-n=1", "--json").out)["body_base64"]
        == "/w=="
    )


def test_peek_shows_the_unfinished_messages_of_a_channel(nsparq: Run, broker: TestBroker, topic: str) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, b"now")
    broker.http("POST", "/pub", b"later", topic=topic, defer="100000")
    states = [json.loads(line)["state"] for line in nsparq("peek", topic, "c", "--json").out.splitlines()]
    assert sorted(states) == ["deferred", "ready"]
    assert b"deferred  due " in nsparq("peek", topic, "c", "--state=deferred").out
    assert nsparq("peek", topic, "d").err == f"nsparq peek: the topic {topic} has no channel d\n"
    assert nsparq("peek", topic + "x").err == f"nsparq peek: there is no topic {topic}x\n"


def test_tail_since_prints_stored_messages_and_takes_none(
    nsparq: Run, broker: TestBroker, topic: str
) -> None:
    broker.publish(topic, b"one", b"x" * 100_000, b"\xff\x00")
    done = nsparq("tail", topic, "--since=1h")
    assert (done.status, done.out, done.err) == (0, b"one\n" + b"x" * 100_000 + b"\n\xff\x00\n", "")
    lines = [
        json.loads(line) for line in nsparq("tail", topic, "--since=1h", "-n=1", "--json").out.splitlines()
    ]
    assert [(line["body"], line["size"], line["topic"]) for line in lines] == [("one", 3, topic)]
    assert nsparq("tail", topic, f"--since={time.time() + 100:.0f}").out == b""
    stats = broker.topic_stats(topic)
    assert stats is not None and (stats["depth"], stats["channels"]) == (3, [])
    assert nsparq("tail", topic + "x", "--since=1h").err == f"nsparq tail: there is no topic {topic}x\n"


def test_peek_and_tail_show_headers(nsparq: Run, broker: TestBroker, topic: str) -> None:
    publish_with_headers(broker, topic, b"one", b"two", tenant="ac\x1bme")
    broker.publish(topic, b"plain")
    assert nsparq("peek", topic).out.count(b'\n    {"tenant": "ac\\u001bme"}\n') == 2
    for command in (("peek", topic), ("tail", topic, "--since=1h")):
        lines = [json.loads(line) for line in nsparq(*command, "--json").out.splitlines()]
        headers = {"tenant": "ac\x1bme"}
        assert [(one["body"], one.get("headers")) for one in lines] == [
            ("one", headers),
            ("two", headers),
            ("plain", None),
        ]
    printed = nsparq("tail", topic, "--since=1h", "--headers").out.decode().splitlines()
    assert printed[1:] == ['{"tenant": "ac\\u001bme"} | two', "{} | plain"]


def test_tail_follows_a_topic_that_does_not_exist_yet(broker: TestBroker, topic: str) -> None:
    with Tool(
        "main", "tail", topic, "--since=1h", "-f", "-n=3", f"--nsqd-http-address={http(broker)}"
    ) as tool:
        tool.wait_for_log(f"there is no topic {topic} yet; waiting for it")
        broker.publish(topic, b"one")
        tool.wait_for_out(b"one\n")
        broker.publish(topic, b"two", b"three", b"four")
        assert (tool.wait(), tool.out()) == (0, b"one\ntwo\nthree\n")


def test_tail_with_a_flag_of_nsq_tail_is_nsq_tail(broker: TestBroker, topic: str) -> None:
    broker.publish(topic, b"one")
    with Tool("main", "tail", f"--topic={topic}", "-n=1", f"--nsqd-tcp-address={tcp(broker)}") as tool:
        assert (tool.wait(), tool.out()) == (0, b"one\n")
        assert "connected to" in tool.err()


def test_a_time_is_found_in_the_log(broker: TestBroker, topic: str) -> None:
    for number in range(20):
        broker.publish(topic, *[b"%d" % number] * 3)
    source = Source(SourceFlags(nsqd_http_address=(http(broker),)))
    reader = LogReader(source, http(broker), topic)
    reader.start(0)
    stored = [*reader.read()]
    assert [message.body for message in stored] == [b"%d" % (number // 3) for number in range(60)]
    times = sorted({message.timestamp_ns for message in stored})
    for wanted_ns in (times[0] - 1, times[0], times[7], times[7] + 1, times[-1], times[-1] + 1):
        reader.start(wanted_ns)
        assert [*reader.read()] == [message for message in stored if message.timestamp_ns >= wanted_ns]


def test_times_are_ago_local_or_unix() -> None:
    now = 1_769_860_800.0  # 2026-01-31T12:00Z
    for text, ago in (("90m", 5400), ("2d", 172800), ("1d12h", 129600), ("1769860800", 0)):
        assert parse_time(text, now) == now - ago
    assert parse_time("2026-01-31T12:00Z", now + 5) == now
    assert time.localtime(parse_time("9:05", now))[:5] == (*time.localtime(now)[:3], 9, 5)


@pytest.mark.parametrize("text", ["", "x", "25:00", "2026-13-01", "5"])
def test_anything_else_is_not_a_time(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_time(text)
