"""Repeated messages over TCP and HTTP, with a real nsqd: docs/reference/headers.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import BrokerThread, RawConnection, multi
from tests.support.connection import with_headers


@pytest.fixture
def nsqd(tmp_path: Path) -> Iterator[BrokerThread]:
    with BrokerThread(tmp_path, producer_window_count=10) as broker:
        yield broker


def connect(nsqd: BrokerThread) -> RawConnection:
    connection = nsqd.connect()
    connection.identify(headers=True)
    return connection


def message(number: int, epoch: int = 5) -> bytes:
    names = {"nsq-producer": "p", "nsq-epoch": str(epoch), "nsq-number": str(number)}
    return with_headers(b"%d" % number, names)


def stored(nsqd: BrokerThread) -> list[bytes]:
    with connect(nsqd) as consumer:
        consumer.sub("t", "c", rdy=100)
        depth = nsqd.call(lambda broker: broker.topics["t"].message_count)
        return [one.body for one in consumer.read_messages(depth, finish=True)]


def test_repeats_of_all_commands_are_acknowledged_and_not_stored(nsqd: BrokerThread) -> None:
    for _ in range(2):
        with connect(nsqd) as producer:
            producer.command("PUB", "t", "headers", body=message(0))
            producer.command("MPUB", "t", "headers", body=multi([message(1), message(2)]))
            producer.command("DPUB", "t", 1, "headers", body=message(3))
            for _ in range(3):
                producer.expect_ok()
    with connect(nsqd) as producer:
        producer.command("MPUB", "t", "headers", body=multi([message(2), message(4)]))
        producer.expect_ok()
    assert sorted(stored(nsqd)) == [b"0", b"1", b"2", b"3", b"4"]
    assert nsqd.topic_stats("t")["repeated_count"] == 5  # type: ignore[index]


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (message(1), "E_NUMBER_TOO_OLD PUB number 1 of producer p is before the window"),
        (message(30, epoch=4), "E_FENCED PUB epoch 4 of producer p is over"),
        (with_headers(b"x", {"nsq-producer": "p"}), "E_BAD_MESSAGE PUB a message with nsq-producer needs"),
    ],
)
def test_a_refused_number_ends_a_run_of_publishes(nsqd: BrokerThread, refused: bytes, error: str) -> None:
    """The commands before it are answered, those behind it are not executed."""
    with connect(nsqd) as producer:
        numbers = [message(number) for number in range(30)]
        producer.command("MPUB", "t", "headers", body=multi(numbers))
        producer.expect_ok()
        # The second time the line is known, and the commands are read together.
        producer.command("PUB", "t", "headers", body=message(30))
        producer.expect_ok()
        run = [message(31), message(32), refused, message(33)]
        producer.send(b"".join(b"PUB t headers\n%b%b" % (len(one).to_bytes(4), one) for one in run))
        producer.expect_ok()
        producer.expect_ok()
        assert producer.read_frame().data.decode().startswith(error)
        producer.expect_closed()
    assert stored(nsqd) == [b"%d" % number for number in range(33)]


def test_over_http(nsqd: BrokerThread) -> None:
    def post(target: str, body: bytes, number: str, epoch: str = "5") -> tuple[int, bytes]:
        headers = {f"X-Nsq-Header-nsq-{name}": value for name, value in
                   (("epoch", epoch), ("number", number), ("producer", "p"))}  # fmt: skip
        answer = nsqd.request("POST", f"{target}?topic=t", body, headers)
        return answer.status, answer.body

    for _ in range(2):
        assert post("/pub", b"a", "0") == (200, b"OK")
        # The number of the first message; the others have the next ones.
        assert post("/mpub", b"b\nc\nd", "1") == (200, b"OK")
    assert post("/mpub", b"d\ne", "3") == (200, b"OK")
    assert stored(nsqd) == [b"a", b"b", b"c", b"d", b"e"]
    status, body = post("/pub", b"f", "5", epoch="4")
    assert (status, b"FENCED" in body, b"epoch 4 of producer p is over" in body) == (409, True, True)
    status, body = post("/pub", b"f", "x")
    assert (status, b"INVALID_HEADERS" in body) == (400, True)
    assert post("/mpub", b"\n".join(b"x" for _ in range(30)), "5") == (200, b"OK")
    status, body = post("/pub", b"f", "0")
    assert (status, b"NUMBER_TOO_OLD" in body) == (409, True)
