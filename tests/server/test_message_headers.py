"""Message headers over TCP and HTTP, with a real nsqd: docs/reference/headers.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import BrokerProcess, BrokerThread, RawConnection, multi, start_process
from tests.support.connection import MESSAGE, header_block, sized, with_headers

A = {"trace": "abc", "n": "1"}
B = {"trace": "ümlaut", "empty": ""}


@pytest.fixture
def nsqd(tmp_path: Path) -> Iterator[BrokerThread]:
    with BrokerThread(tmp_path, max_msg_size=1000) as broker:
        yield broker


def connect(nsqd: BrokerThread | BrokerProcess) -> RawConnection:
    connection = nsqd.connect()
    assert connection.identify(headers=True)["headers"] is True
    return connection


def read(connection: RawConnection, count: int) -> list[tuple[bytes, dict[str, str]]]:
    return [(message.body, message.headers) for message in connection.read_messages(count, finish=True)]


def publish_all_kinds(nsqd: BrokerThread | BrokerProcess) -> list[tuple[bytes, dict[str, str]]]:
    with connect(nsqd) as producer:
        for topic in ("t", "t"):  # the second time the line is known
            producer.command("PUB", topic, "headers", body=with_headers(b"pub", A))
            producer.command(
                "MPUB", topic, "headers", body=multi([with_headers(b"one", B), sized(b"") + b"two"])
            )
            producer.command("PUB", topic, body=b"plain")
            for _ in range(3):
                producer.expect_ok()
        producer.command("DPUB", "t", 1, "headers", body=with_headers(b"later", A))
        producer.expect_ok()
    return [(b"pub", A), (b"one", B), (b"two", {}), (b"plain", {})] * 2 + [(b"later", A)]


def test_headers_reach_clients_that_asked_and_no_others(nsqd: BrokerThread) -> None:
    with connect(nsqd) as asked, nsqd.connect() as plain:
        asked.sub("t", "asked", rdy=100)
        plain.sub("t", "plain", rdy=100)
        published = publish_all_kinds(nsqd)
        assert read(asked, 9) == published
        frames = [plain.read_frame() for _ in published]
        assert [(frame.type, frame.data[26:]) for frame in frames] == [
            (MESSAGE, body) for body, _ in published
        ]


def test_clients_with_and_without_headers_share_a_channel(nsqd: BrokerThread) -> None:
    published = publish_all_kinds(nsqd)
    with connect(nsqd) as asked, nsqd.connect() as plain:
        asked.sub("t", "c", rdy=9)
        first = asked.read_messages(9)
        # Before the first REQ: otherwise its message may come back here.
        asked.rdy(0)
        for message in first:
            asked.req(message.id)
        plain.sub("t", "c", rdy=9)
        again = plain.read_messages(9)
        assert [(one.attempts, one.body, one.headers) for one in again] == [
            (2, body, {}) for body, _ in published
        ]
        plain.rdy(0)
        for message in again:
            plain.req(message.id)
        asked.rdy(9)
        assert [(one.attempts, one.body, one.headers) for one in asked.read_messages(9)] == [
            (3, *one) for one in published
        ]


def test_headers_survive_a_stop_and_a_crash(tmp_path: Path) -> None:
    with start_process(tmp_path) as nsqd:
        nsqd.http("POST", "/topic/create", topic="t")
        nsqd.http("POST", "/channel/create", topic="t", channel="c")
        published = publish_all_kinds(nsqd)
        nsqd.restart()
        published += publish_all_kinds(nsqd)
        nsqd.kill()
        nsqd.start()
        with connect(nsqd) as consumer:
            consumer.sub("t", "c", rdy=100)
            assert sorted(map(repr, read(consumer, 18))) == sorted(map(repr, published))


def test_without_negotiation_the_parameter_means_nothing(nsqd: BrokerThread) -> None:
    """NSQ ignores parameters behind the topic."""
    message = with_headers(b"body", A)
    with nsqd.connect() as connection:
        connection.command("PUB", "t", "headers", body=message)
        connection.expect_ok()
        assert "headers" not in connection.identify(headers=False)
        connection.command("PUB", "t", "headers", body=message)
        connection.expect_ok()
        assert connection.identify(headers=True)["headers"] is True
        connection.command("PUB", "t", "headers", body=message)
        connection.expect_ok()
        assert "headers" not in connection.identify(feature_negotiation=False, headers=True)
        connection.command("PUB", "t", "headers", body=message)
        connection.expect_ok()
    with connect(nsqd) as consumer:
        consumer.sub("t", "c", rdy=10)
        assert read(consumer, 4) == [(message, {}), (message, {}), (b"body", A), (message, {})]


def test_a_bad_block_is_refused_and_what_came_before_it_is_published(nsqd: BrokerThread) -> None:
    good, bad = with_headers(b"good", A), sized(header_block({"Name": "x"})) + b"bad"
    with connect(nsqd) as producer:
        for _ in range(2):
            producer.command("PUB", "t", "headers", body=good)
            producer.expect_ok()
        line = b"PUB t headers\n"
        producer.send(line + sized(good) + line + sized(good) + line + sized(bad) + line + sized(good))
        producer.expect_ok()
        producer.expect_ok()
        producer.expect_fatal("E_BAD_MESSAGE PUB bad header at byte 0")
    with connect(nsqd) as producer:
        producer.command("MPUB", "t", "headers", body=multi([good, good]))
        producer.expect_ok()
        producer.command("MPUB", "t", "headers", body=multi([good, bad]))
        producer.expect_fatal("E_BAD_MESSAGE MPUB bad header at byte 0")
    with connect(nsqd) as consumer:
        consumer.sub("t", "c", rdy=10)
        assert read(consumer, 6) == [(b"good", A)] * 6
        consumer.barrier()
        assert nsqd.stats("t")["topics"][0]["message_count"] == 6


def test_http_requests_name_headers_of_their_messages(nsqd: BrokerThread) -> None:
    trace = {"traceparent": "00-1-2-01", "tracestate": "a=1", "baggage": "k=v"}
    event = {"ce-specversion": "1.0", "ce-subject": "caf%C3%A9", "Content-Type": "application/json"}
    requests = [
        ({"X-Nsq-Header-Key": "a", "Content-Type": "text/plain"}, {"key": "a"}),
        (trace, trace),
        (event, {"ce-specversion": "1.0", "ce-subject": "café", "content-type": "application/json"}),
        ({}, {}),
    ]
    with connect(nsqd) as consumer:
        consumer.sub("t", "c", rdy=100)
        for sent, expected in requests:
            for _ in range(2):  # the second time the head of the request is known
                nsqd.request("POST", "/pub?topic=t", b"body", sent).expect_ok()
                assert read(consumer, 1) == [(b"body", expected)]
            nsqd.request("POST", "/mpub?topic=t", b"one\ntwo\n", sent).expect_ok()
            assert read(consumer, 2) == [(b"one", expected), (b"two", expected)]
            nsqd.request("POST", "/mpub?topic=t&binary=true", multi([b"x"]), sent).expect_ok()
            assert read(consumer, 1) == [(b"x", expected)]
        nsqd.request("POST", "/pub?topic=t&headers=true", with_headers(b"one", A), trace).expect_ok()
        assert read(consumer, 1) == [(b"one", A)]
        messages = multi([with_headers(b"one", B), sized(b"") + b"two"])
        nsqd.request("POST", "/mpub?topic=t&binary=true&headers=true", messages, trace).expect_ok()
        assert read(consumer, 2) == [(b"one", B), (b"two", {})]
        shown = nsqd.request("GET", "/topic/peek?topic=t&count=2").expect_json()["messages"]
        assert [(one["body"], one.get("headers")) for one in shown] == [("one", B), ("two", None)]


@pytest.mark.parametrize(
    ("target", "headers", "body", "status", "code"),
    [
        ("/pub?topic=t", {"X-Nsq-Header-a~b": "x"}, b"x", 400, "INVALID_HEADERS"),
        ("/pub?topic=t", {"X-Nsq-Header-": "x"}, b"x", 400, "INVALID_HEADERS"),
        ("/pub?topic=t", {"ce-subject": "%ff"}, b"x", 400, "INVALID_HEADERS"),
        ("/pub?topic=t", {"X-Nsq-Header-a": "x" * 100}, b"x" * 950, 413, "MSG_TOO_BIG"),
        ("/mpub?topic=t", {"X-Nsq-Header-a": "x" * 100}, b"x\n" + b"x" * 950, 413, "MSG_TOO_BIG"),
        ("/mpub?topic=t&headers=true", {}, b"x", 400, "INVALID_ARG_HEADERS"),
        ("/mpub?topic=t&binary=true&headers=yes", {}, multi([b"x"]), 400, "INVALID_ARG_HEADERS"),
        ("/mpub?topic=t&binary=true&headers=true", {}, multi([b"x"]), 413, "BAD_MESSAGE"),
        ("/pub?topic=t&headers=true", {}, b"x", 413, "BAD_MESSAGE"),
        ("/pub?topic=t&headers=yes", {}, b"x", 400, "INVALID_ARG_HEADERS"),
    ],
)
def test_http_refuses_headers_that_break_a_rule(
    nsqd: BrokerThread, target: str, headers: dict[str, str], body: bytes, status: int, code: str
) -> None:
    answer = nsqd.request("POST", target, body, headers)
    assert (answer.status, answer.json()["message"]) == (status, code)
    assert all(topic["message_count"] == 0 for topic in nsqd.stats()["topics"])


def test_a_number_of_too_many_digits_is_refused(tmp_path: Path) -> None:
    given = {"producer": "p", "epoch": "1", "number": "9" * 5000}
    headers = {f"X-Nsq-Header-nsq-{name}": value for name, value in given.items()}
    with BrokerThread(tmp_path) as nsqd:
        for body in (b"x", b"x\ny"):
            answer = nsqd.request("POST", "/mpub?topic=t", body, headers)
            assert (answer.status, answer.json()["message"]) == (400, "INVALID_HEADERS")
