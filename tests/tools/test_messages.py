"""nsparq peek and nsparq tail: they show messages, and consume none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from nsparq.fetch import Answer
from nsparq.tools.cluster import AskFailed
from nsparq.tools.log_reader import HEADER, LogReader
from nsparq.tools.source import Source, SourceFlags
from nsparq.tools.times import parse_time
from tests.support import TestBroker, start_broker, wait_until
from tests.support.web import HandlerServer

from .conftest import Run
from .processes import Tool, free_address, http, publish_with_headers, tcp


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


@contextmanager
def in_front_of(broker: TestBroker, fails: Callable[[str, bool], bool]) -> Iterator[tuple[str, list[str]]]:
    """The address of a proxy, and the paths that were requested. It closes the connection instead
    of answering if `fails` says so, which gets the path and whether the last answer had a body."""
    paths: list[str] = []
    had_body = False

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            nonlocal had_body
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            paths.append(path)
            if fails(path, had_body):
                had_body = False
                self.close_connection = True
                return
            found = broker.request(self.command, self.path, body)
            had_body = path == "/topic/read" and bool(found.body)
            self.send_response(found.status)
            for name, value in found.headers:
                if name.lower().startswith(("x-", "content-length")):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(found.body)

        do_GET = do_POST = answer

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HandlerServer(Handler)
    try:
        yield server.address, paths
    finally:
        server.close()


def test_what_tail_has_read_is_printed_if_the_next_request_fails(broker: TestBroker, topic: str) -> None:
    broker.control("create", topic)

    def fails(path: str, had_body: bool) -> bool:
        return path == "/topic/read" and had_body

    with (
        in_front_of(broker, fails) as (address, paths),
        Tool("main", "tail", topic, "-n=2", f"--nsqd-http-address={address}") as tool,
    ):
        wait_until(lambda: "/topics/positions" in paths)
        broker.publish(topic, b"one")
        tool.wait_for_out(b"one\n")
        broker.publish(topic, b"two")
        assert (tool.wait(), tool.out()) == (0, b"one\ntwo\n")
        assert "trying again" in tool.err()


def test_tail_since_prints_the_messages_of_the_others_if_one_nsqd_fails(
    nsparq: Run, broker: TestBroker, second: TestBroker, topic: str
) -> None:
    broker.publish(topic, b"one")
    second.publish(topic, b"two")
    with in_front_of(second, lambda path, _: path == "/topic/read") as (address, _):
        nodes = [f"--nsqd-http-address={one}" for one in (http(broker), address)]
        done = nsparq("tail", topic, "--since=1h", *nodes)
    assert (done.status, done.out) == (1, b"one\n")
    assert done.err.startswith(f"nsparq tail: GET http://{address}/topic/read: ")


@pytest.mark.parametrize("since", ["", "now", "1h"])
def test_of_an_nsqd_that_was_down_at_the_start_tail_prints_what_was_asked_for(
    broker: TestBroker, topic: str, since: str
) -> None:
    broker.control("create", topic)
    with start_broker(http_address=free_address()) as late:
        late.publish(topic, b"old", b"older")
        addresses = [f"--nsqd-http-address={http(one)}" for one in (broker, late)]
        late.stop()
        flags = [f"--since={time.time():.6f}" if since == "now" else f"--since={since}", "--follow"]
        with Tool("main", "tail", topic, *addresses, *(flags if since else ())) as tool:
            tool.wait_for_log("trying again")
            late.start()
            # Perhaps before tail asks again.
            late.publish(topic, b"new")
            tool.wait_for_out(b"new\n")
            assert tool.out() == (b"old\nolder\nnew\n" if since == "1h" else b"new\n")


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


@pytest.fixture
def reader(broker: TestBroker, topic: str) -> LogReader:
    broker.publish(topic, *(b"%d" % number for number in range(5)))
    reader = LogReader(Source(SourceFlags(nsqd_http_address=(http(broker),))), http(broker), topic)
    reader.start(0)
    return reader


def test_messages_behind_the_wanted_end_are_read_next(reader: LogReader) -> None:
    assert [message.body for message in reader.read(reader.next + 2)] == [b"0", b"1"]
    assert [message.body for message in reader.read()] == [b"2", b"3", b"4"]


def test_each_answer_is_taken_before_the_next_request(
    reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, answers = Source.fetch, iter((False, True, False, False))

    def fails(self: Source, *arguments: Any, **query: str) -> Answer:
        if next(answers):
            raise AskFailed("no answer")
        return fetch(self, *arguments, **query)

    monkeypatch.setattr(Source, "fetch", fails)
    found = reader.answers()
    assert len(next(found)) == 5
    with pytest.raises(AskFailed, match="no answer"):
        next(found)
    assert [*reader.answers()] == []


def test_of_a_log_that_was_set_back_nothing_is_printed_again(broker: TestBroker, reader: LogReader) -> None:
    """As after the restore of a backup."""
    reader.next += 100
    assert [*reader.read()] == []
    broker.publish(reader.topic, b"new")
    assert [message.body for message in reader.read()] == [b"new"]


NEXT = {"x-nsparq-next": "99", "x-nsparq-lost": "0", "x-nsparq-gaps": "[]"}


def batch(size: int = HEADER.size + 4 + 1, count: int = 1, magic: bytes = b"NQB1") -> bytes:
    return HEADER.pack(magic, 0, size, 0, 0, 0, 0, 0, count, 0) + b"\1\0\0\0x"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"<html>", {}),
        (batch(), {}),
        (batch(), NEXT | {"x-nsparq-next": "x"}),
        (batch(), NEXT | {"x-nsparq-gaps": "5"}),
        (batch(), NEXT | {"x-nsparq-gaps": "[5]"}),
        (batch(), NEXT | {"x-nsparq-gaps": "[" * 100_000}),
        (batch()[:-1], NEXT),
        (batch()[:20], NEXT),
        (batch(size=0), NEXT),
        (batch(count=1 << 31), NEXT),
        (batch(magic=b"NQB2"), NEXT),
        (batch(magic=b"HTML"), NEXT),
    ],
    ids=range(12),
)
def test_an_answer_that_is_not_a_log_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, body: bytes, headers: dict[str, str]
) -> None:
    source = Source(SourceFlags(nsqd_http_address=("a:1",)))
    monkeypatch.setattr(source, "fetch", lambda *_, **__: Answer(200, body, headers))
    with pytest.raises(AskFailed, match="^a:1 sent an invalid batch of messages"):
        [*LogReader(source, "a:1", "t", next=0).read()]


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
