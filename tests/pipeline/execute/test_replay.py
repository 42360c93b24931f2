"""A replay keeps the order and the rate, and continues where it was interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from nsparq.headers import encode_headers
from nsparq.pipeline.execute import replay as module
from nsparq.pipeline.execute.replay import MAX_CHUNK, Message, Publisher, ReplayFailed, chunks, replay
from nsparq.spark.cluster.api import Client
from nsparq.spark.cluster.http_client import Access, Refused, Unreachable
from nsparq.testing import Broker, run_broker


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with run_broker() as broker:
        yield broker


@pytest.fixture
def client(broker: Broker) -> Iterator[Client]:
    with Client(broker.http_address, Access()) as client:
        yield client
    for topic in broker.stats()["topics"]:
        broker.delete(topic["topic_name"])


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def messages(count: int) -> list[Message]:
    return [(b"", body) for body in numbered(count)]


def published(broker: Broker, topic: str = "out") -> list[bytes]:
    return [message.body for message in broker.peek(topic, count=1000)]


class Clock:
    """Time passes only by waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self.event = threading.Event()

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.event.is_set()

    def is_set(self) -> bool:
        return self.event.is_set()


def test_messages_are_published_in_their_order(broker: Broker, client: Client) -> None:
    told: list[int] = []
    done = replay(messages(300), Publisher(client, "out"), 0.0, told.append, threading.Event())
    assert (done, sum(told)) == (300, 300)
    assert published(broker) == numbered(300)


def test_the_rate_is_kept(broker: Broker, client: Client) -> None:
    clock, at = Clock(), list[float]()
    replay(messages(100), Publisher(client, "out"), 50.0, lambda count: at.append(clock.now), clock, clock)  # type: ignore[arg-type]
    assert at == pytest.approx([number / 10 for number in range(20)])


@pytest.mark.parametrize(
    ("sizes", "rate", "expected"),
    [
        ([1] * 5, 0.0, [5]),
        ([1] * 5, 20.0, [2, 2, 1]),
        ([1] * 3, 0.5, [1, 1, 1]),
        ([600_000] * 3, 0.0, [1, 1, 1]),
        ([5_000_000, 1], 0.0, [1, 1]),
        ([1] * (MAX_CHUNK + 1), 1e9, [MAX_CHUNK, 1]),
        ([], 0.0, []),
    ],
)
def test_a_chunk_is_a_tenth_of_a_second_and_no_more_than_nsqd_takes(
    sizes: list[int], rate: float, expected: list[int]
) -> None:
    assert [len(chunk) for chunk in chunks(((b"", b"x" * size) for size in sizes), rate)] == expected


def test_a_replay_with_a_name_continues_where_it_was_interrupted(broker: Broker, client: Client) -> None:
    stop = threading.Event()

    def stop_soon(count: int) -> None:
        if publisher.published >= 30:
            stop.set()

    publisher = Publisher(client, "out", "morning")
    assert replay(messages(100), publisher, 100.0, stop_soon, stop) == 30
    broker.restart()
    told: list[int] = []
    again = Publisher(client, "out", "morning")
    # Another rate makes other chunks, but publishes the same messages.
    assert replay(messages(100), again, 0.0, told.append, threading.Event()) == 70
    assert told == [30, 70]
    assert published(broker) == numbered(100)
    assert replay(messages(100), Publisher(client, "out", "morning"), 0.0, told.append, stop) == 0


def test_a_lost_answer_does_no_harm(broker: Broker, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = client.post, {"/transaction/stage": 1, "/transaction/commit": 1}

    def post(path: str, body: bytes = b"", **parameters: str | int) -> object:
        answer = real(path, body, **parameters)
        if lost[path]:
            lost[path] -= 1
            raise Unreachable("the connection broke")
        return answer

    monkeypatch.setattr(client, "post", post)
    assert replay(messages(10), Publisher(client, "out"), 0.0, lambda count: None, threading.Event()) == 10
    assert published(broker) == numbered(10)
    assert not any(lost.values())


def test_a_refusal_by_nsqd_ends_the_replay(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReplayFailed, match="INVALID_ARG_TOPIC"):
        Publisher(client, "no topic").publish([(b"", b"x")])
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    publisher = Publisher(client, "out")

    def refuse(*_: object, **__: object) -> None:
        raise Refused("POST", 503, "WRITE_FAILED", {})

    monkeypatch.setattr(client, "post", refuse)
    with pytest.raises(ReplayFailed, match="WRITE_FAILED"):
        publisher.publish([(b"", b"x")])


def test_an_nsqd_without_transactions_gets_plain_messages(
    broker: Broker, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_headers = [(encode_headers({"a": "1"}), b"a"), (b"", b"b")]
    Publisher(client, "kept").publish(with_headers)
    assert [(one.body, one.headers) for one in broker.peek("kept")] == [(b"a", {"a": "1"}), (b"b", {})]
    real = client.get

    def get(path: str, **parameters: str | int) -> object:
        if path == "/transaction":
            raise Refused("GET", 404, "NOT_FOUND", {})
        return real(path, **parameters)

    monkeypatch.setattr(client, "get", get)
    publisher = Publisher(client, "out")
    assert not publisher.is_exact
    publisher.publish(with_headers)
    assert [(one.body, one.headers) for one in broker.peek("out")] == [(b"a", {}), (b"b", {})]
    assert "headers are left out" in caplog.text
    with pytest.raises(ReplayFailed, match="a replay to it cannot have a name"):
        Publisher(client, "out", "morning")


def test_an_unreachable_nsqd_ends_the_replay() -> None:
    with Client("127.0.0.1:9", Access()) as client, pytest.raises(ReplayFailed):
        Publisher(client, "out")
