"""server.api.log, cursors and settings: read, peek, seek, commit, hold, settings."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from nsparq.http.api import Endpoint, endpoints_of
from nsparq.options import NsqdOptions
from nsparq.server.api import cursors, parameters
from nsparq.server.api import log as log_api
from nsparq.server.api import settings as settings_api
from nsparq.server.api.log import BATCHES_TYPE, MAX_PEEK
from nsparq.server.daemon import Nsqd
from nsparq.storage.raw_batch import CorruptRange, iter_batches
from tests.support import Answer, BrokerProcess, BrokerThread, HttpConnection, unique_name, wait_until

KEPT = {"retention_bytes": 1 << 30}
MISSING = "no such thing"


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread(**KEPT) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return unique_name("topic")


def target(path: str, query: dict[str, Any]) -> str:
    return f"{path}?{urlencode(query)}"


def get(broker: BrokerThread, path: str, **query: Any) -> Any:
    return broker.request("GET", target(path, query)).expect_json()


def post(broker: BrokerThread | BrokerProcess, path: str, **query: Any) -> Any:
    return broker.request("POST", target(path, query)).expect_json()


def positions(broker: BrokerThread, topic: str) -> Any:
    return get(broker, "/topic/positions", topic=topic)


def bodies(count: int, start: int = 0) -> list[bytes]:
    return [b"message %d " % i + b"x" * (i * 37 % 500) for i in range(start, start + count)]


# Positions


def test_positions_say_where_the_log_begins_and_ends(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic, "c")
    empty = positions(broker, topic)
    assert (empty["topic"], empty["messages"], empty["bytes"]) == (topic, 0, 0)
    assert empty["earliest"] == empty["latest"] == empty["visible"]
    assert empty["first_timestamp"] == empty["last_timestamp"] == 0
    broker.publish(topic, *bodies(10))
    broker.publish(topic, *bodies(5))
    found = positions(broker, topic)
    assert (found["earliest"], found["latest"]) == (empty["earliest"], empty["latest"] + 15)
    assert (found["visible"], found["messages"]) == (found["latest"], 15)
    assert found["bytes"] > sum(map(len, bodies(15)[:10]))
    assert 0 < found["first_timestamp"] <= found["last_timestamp"]
    assert found["incarnation"] == empty["incarnation"]


def test_the_visible_end_is_the_position_of_a_pause(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, *bodies(2))
    broker.control("pause", topic)
    broker.publish(topic, *bodies(3))
    found = positions(broker, topic)
    assert found["latest"] - found["visible"] == 3
    broker.control("unpause", topic)
    assert positions(broker, topic)["visible"] == found["latest"]


def test_a_topic_of_the_same_name_is_another_log(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic)
    before = positions(broker, topic)
    broker.control("delete", topic)
    broker.control("create", topic)
    after = positions(broker, topic)
    assert after["incarnation"] != before["incarnation"]
    assert after["earliest"] >= before["latest"], "no number means two messages"


# Reading


class Part(NamedTuple):
    """One response of /topic/read."""

    data: bytes
    incarnation: str
    first: int
    next: int
    latest: int
    gaps: list[list[int]]
    lost: int


def read(broker: BrokerThread | HttpConnection, topic: str, start: int, **query: Any) -> Part:
    answer = broker.request("GET", target("/topic/read", {"topic": topic, "from": start, **query}))
    assert (answer.status, answer.header("Content-Type")) == (200, BATCHES_TYPE), answer
    told = {
        name: answer.header(f"X-Nsparq-{name.title()}") or ""
        for name in ("incarnation", "first", "next", "latest", "gaps", "lost")
    }
    return Part(
        answer.body,
        told["incarnation"],
        int(told["first"]),
        int(told["next"]),
        int(told["latest"]),
        json.loads(told["gaps"]),
        int(told["lost"]),
    )


def messages(part: Part, start: int) -> list[tuple[int, bytes]]:
    """Numbers and bodies of the messages from a number on."""
    return [
        (batch.base + i, body)
        for batch in iter_batches(part.data)
        for i, body in enumerate(batch.bodies())
        if batch.base + i >= start and not any(low <= batch.base + i < high for low, high in part.gaps)
    ]


def follow(broker: BrokerThread | HttpConnection, topic: str, start: int, **query: Any) -> list[bytes]:
    """Every message from a number to the end of the log, with as many requests as needed."""
    found: list[bytes] = []
    while True:
        part = read(broker, topic, start, **query)
        assert part.first <= part.next and part.next <= part.latest
        if not part.data:
            assert part.next == start
            return found
        assert part.next > start, "it goes on"
        found += [body for _, body in messages(part, start)]
        start = part.next


@pytest.mark.parametrize("durability", ["os", "memory"])
@pytest.mark.parametrize("max_bytes", [1, 10_000, None])
def test_following_the_log_gives_everything_that_was_published(
    broker: BrokerThread, topic: str, durability: str, max_bytes: int | None
) -> None:
    broker.control("create", topic)
    broker.request("PUT", f"/topic/settings?topic={topic}", json.dumps({"durability": durability}).encode())
    sent = bodies(3_000)
    for start in range(0, len(sent), 250):
        broker.publish(topic, *sent[start : start + 250])
    limit = {} if max_bytes is None else {"max_bytes": max_bytes}
    with broker.http_connect() as connection:
        assert follow(connection, topic, positions(broker, topic)["earliest"], **limit) == sent


def test_a_range_begins_at_the_given_number(broker: BrokerThread, topic: str) -> None:
    broker.publish(topic, *bodies(10))
    broker.publish(topic, *bodies(10, 10))
    about = positions(broker, topic)
    for skipped in (0, 3, 9, 10, 15, 19):
        start = about["earliest"] + skipped
        part = read(broker, topic, start)
        assert part.first <= start, "a batch is not cut"
        assert part._replace(data=b"", first=0) == Part(
            b"", about["incarnation"], 0, about["latest"], about["latest"], [], 0
        )
        assert messages(part, start) == [
            (start + i, body) for i, body in enumerate(bodies(20 - skipped, skipped))
        ]
    end = read(broker, topic, about["latest"])
    assert (end.data, end.next) == (b"", about["latest"])


def test_the_size_of_a_range_is_limited(
    broker: BrokerThread, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_api, "DEFAULT_READ", 200_000)
    monkeypatch.setattr(log_api, "MAX_READ", 400_000)
    for _ in range(60):
        broker.publish(topic, b"x" * 20_000)
    start = positions(broker, topic)["earliest"]
    assert 100_000 < len(read(broker, topic, start).data) <= 200_000
    for wanted in (10_000_000, 2**63 - 1):
        assert 300_000 < len(read(broker, topic, start, max_bytes=wanted).data) <= 400_000


def test_messages_carry_the_time_of_their_delivery(broker: BrokerThread, topic: str) -> None:
    broker.publish(topic, b"now")
    broker.http("POST", "/pub", b"later", topic=topic, defer="60000")
    now, later = iter_batches(read(broker, topic, positions(broker, topic)["earliest"]).data)
    assert now.due_ns == 0
    assert 59e9 < later.due_ns - later.timestamp_ns < 61e9


def test_emptied_messages_are_reported_as_a_gap(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, b"before")
    broker.control("pause", topic)
    broker.publish(topic, b"dropped", b"dropped")
    broker.control("empty", topic)
    broker.control("unpause", topic)
    broker.publish(topic, b"after")
    start = positions(broker, topic)["earliest"]
    assert read(broker, topic, start).gaps == [[start + 1, start + 3]]
    assert follow(broker, topic, start) == [b"before", b"after"]


def test_an_ephemeral_topic_is_readable_as_far_as_it_is_in_memory(broker: BrokerThread, topic: str) -> None:
    name = f"{topic}#ephemeral"
    broker.publish(name, *bodies(5))
    assert follow(broker, name, positions(broker, name)["earliest"]) == bodies(5)


def test_a_reader_keeps_up_while_others_publish(broker: BrokerThread, topic: str) -> None:
    count, parts = 40, 100
    broker.control("create", topic, "c")
    start = positions(broker, topic)["earliest"]
    sent = [b"%d" % i for i in range(count * parts)]

    def publish() -> None:
        with broker.connect() as connection:
            for begin in range(0, len(sent), parts):
                connection.mpub(topic, sent[begin : begin + parts])

    publisher = threading.Thread(target=publish)
    publisher.start()
    found: list[bytes] = []
    with broker.http_connect() as connection:

        def has_all() -> bool:
            nonlocal start
            part = read(connection, topic, start, max_bytes=3_000)
            found.extend(body for _, body in messages(part, start))
            start = part.next
            return len(found) >= len(sent)

        wait_until(has_all, interval=0)
    publisher.join()
    assert found == sent


def test_a_removed_number_and_a_future_one_are_different_errors(tmp_path: Path) -> None:
    with BrokerThread(tmp_path, max_bytes_per_file=2_000, checkpoint_interval=0.05) as broker:
        broker.control("create", "t", "c")
        start = positions(broker, "t")["earliest"]
        for i in range(10):
            broker.publish("t", *bodies(20, i))
        with broker.connect() as consumer:
            consumer.sub("t", "c", rdy=200)
            consumer.read_messages(200, finish=True)
            wait_until(lambda: positions(broker, "t")["earliest"] > start)
        about = positions(broker, "t")
        gone = broker.request("GET", target("/topic/read", {"topic": "t", "from": start}))
        assert (gone.status, gone.json()) == (410, {"message": "OFFSET_GONE", "earliest": about["earliest"]})
        ahead = broker.request("GET", target("/topic/read", {"topic": "t", "from": about["latest"] + 1}))
        assert (ahead.status, ahead.json()) == (416, {"message": "OFFSET_AHEAD", "latest": about["latest"]})
        assert read(broker, "t", about["earliest"]).first == about["earliest"]


def test_numbers_of_another_incarnation_are_refused_with_the_current_one(
    broker: BrokerThread, topic: str
) -> None:
    broker.control("create", topic, "c")
    incarnation = positions(broker, topic)["incarnation"]
    start = positions(broker, topic)["earliest"]
    assert read(broker, topic, start, incarnation=incarnation).incarnation == incarnation
    for method, path, query in (
        ("GET", "/topic/read", {"from": start}),
        ("POST", "/channel/seek", {"channel": "c", "sequence": start}),
        ("POST", "/channel/commit", {"channel": "c", "sequence": start}),
    ):
        answer = broker.request(method, target(path, {"topic": topic, "incarnation": "0" * 32, **query}))
        assert (answer.status, answer.json()) == (
            409,
            {"message": "WRONG_INCARNATION", "incarnation": incarnation},
        )


def segments(broker: BrokerThread, topic: str) -> list[Path]:
    return sorted((broker.data_path / "topics" / f"{topic}.topic").glob("*.log"))


def flip(path: Path, marker: bytes) -> None:
    """Damage the first occurrence of these bytes."""
    content = bytearray(path.read_bytes())
    content[content.index(marker)] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def test_damage_is_sent_as_it_is_and_left_out_with_verify(tmp_path: Path) -> None:
    with BrokerThread(tmp_path) as broker:
        for i in range(5):
            broker.publish("t", *[b"batch %d" % i] * 10)
        start = positions(broker, "t")["earliest"]
        (segment,) = segments(broker, "t")
        flip(segment, b"batch 2")
        as_it_is = read(broker, "t", start)
        assert (as_it_is.next, as_it_is.lost) == (start + 50, 0)
        with pytest.raises(CorruptRange) as caught:
            messages(as_it_is, start)
        # The reader asks again from the number that it has reached.
        assert caught.value.sequence == start + 20
        part = read(broker, "t", start + 20, verify="true")
        assert (part.next, part.lost) == (start + 50, 10)
        assert messages(part, start + 20) == [(start + i, b"batch %d" % (i // 10)) for i in range(30, 50)]
        # It is counted once.
        read(broker, "t", start, verify="1")
        stats = broker.topic_stats("t")
        assert stats is not None and (stats["corrupt_batches"], stats["corrupt_messages"]) == (1, 10)


def test_verify_changes_nothing_without_damage(broker: BrokerThread, topic: str) -> None:
    broker.publish(topic, *bodies(100))
    start = positions(broker, topic)["earliest"]
    assert read(broker, topic, start, verify="true") == read(broker, topic, start, verify="false")
    assert follow(broker, topic, start, verify="true") == bodies(100)


def test_a_truncated_file_is_an_error_unless_verified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with BrokerThread(tmp_path) as broker:
        for i in range(3):
            broker.publish("t", *[b"batch %d" % i] * 10)
        start = positions(broker, "t")["earliest"]
        (segment,) = segments(broker, "t")
        content = segment.read_bytes()
        with segment.open("r+b") as file:
            file.truncate(content.index(b"batch 2"))
        broker.request("GET", f"/topic/read?topic=t&from={start}").expect_error(500, "LOG_DAMAGED")
        part = read(broker, "t", start, verify="true")
        assert (part.next, part.lost, len(messages(part, start))) == (start + 30, 10, 20)
        with segment.open("r+b") as file:
            file.write(content)
    assert not [record for record in caplog.records if record.exc_info], "no traceback"


class Gate:
    """Blocks reads from disk until released."""

    def __init__(self, broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reading = self.most = 0
        self.opened = threading.Event()
        original = broker.nsqd.in_disk_thread

        async def held(work: Callable[[], Any], **_: Any) -> Any:
            self.reading += 1
            self.most = max(self.most, self.reading)
            try:
                while not self.opened.is_set():  # noqa: ASYNC110  # set by another thread
                    await asyncio.sleep(0.005)
                return await original(work)
            finally:
                self.reading -= 1

        monkeypatch.setattr(broker.nsqd, "in_disk_thread", held)


def test_the_number_of_concurrent_reads_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_api, "MAX_READERS", 2)
    with BrokerThread(tmp_path) as broker:
        broker.publish("t", *bodies(10))
        start = positions(broker, "t")["earliest"]
        gate = Gate(broker, monkeypatch)
        connections = [broker.http_connect() for _ in range(6)]
        for connection in connections:
            connection.send_request("GET", f"/topic/read?topic=t&from={start}")
        wait_until(lambda: gate.reading == 2)
        assert broker.request("GET", "/ping").status == 200
        assert gate.most == 2
        gate.opened.set()
        for connection in connections:
            assert connection.read_answer().status == 200
            connection.close()
        assert gate.most == 2


def test_a_topic_may_be_deleted_while_a_reader_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_api, "MAX_READERS", 1)
    with BrokerThread(tmp_path) as broker:
        broker.publish("t", *bodies(10))
        start = positions(broker, "t")["earliest"]
        gate = Gate(broker, monkeypatch)
        with broker.http_connect() as first, broker.http_connect() as second:
            first.send_request("GET", f"/topic/read?topic=t&from={start}&verify=true")
            wait_until(lambda: gate.reading == 1)
            second.send_request("GET", f"/topic/read?topic=t&from={start}")
            wait_until(lambda: broker.nsqd.http_connection_count == 2)
            broker.control("delete", "t")
            gate.opened.set()
            answer = first.read_answer()
            assert answer.status == 200, "it had begun"
            assert [body for batch in iter_batches(answer.body) for body in batch.bodies()] == bodies(10)
            second.read_answer().expect_error(404, "TOPIC_NOT_FOUND")


def test_readers_that_disconnect_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_api, "MAX_READERS", 1)
    with BrokerThread(tmp_path) as broker:
        broker.publish("t", *bodies(10))
        start = positions(broker, "t")["earliest"]
        gate = Gate(broker, monkeypatch)
        for _ in range(3):
            connection = broker.http_connect()
            connection.send_request("GET", f"/topic/read?topic=t&from={start}")
            wait_until(lambda: gate.reading == 1)
            connection.abort()
            wait_until(lambda: gate.reading == 0)
        gate.opened.set()
        assert follow(broker, "t", start) == bodies(10)


# Peeking


def peek(broker: BrokerThread, topic: str, channel: str = "", **query: Any) -> list[dict[str, Any]]:
    where = {"topic": topic, "channel": channel} if channel else {"topic": topic}
    found = get(broker, "/channel/peek" if channel else "/topic/peek", **where, **query)
    assert found["missing"] == 0
    shown: list[dict[str, Any]] = found["messages"]
    return shown


def test_the_newest_messages_of_a_topic_are_shown(broker: BrokerThread, topic: str) -> None:
    broker.publish(topic, *bodies(25))
    about = positions(broker, topic)
    found = peek(broker, topic)
    assert [message["body"].encode() for message in found] == bodies(25)[15:]
    assert [message["sequence"] for message in found] == [*range(about["latest"] - 10, about["latest"])]
    last = found[-1]
    assert last.keys() == {"id", "sequence", "timestamp", "attempts", "state", "size", "body"}
    assert (last["state"], last["attempts"], last["size"]) == ("stored", 0, len(bodies(25)[-1]))
    assert last["timestamp"] == about["last_timestamp"]
    assert len(peek(broker, topic, count=3)) == 3
    assert len(peek(broker, topic, count=MAX_PEEK)) == 25


def test_peek_starts_at_the_given_number(broker: BrokerThread, topic: str) -> None:
    broker.publish(topic, *bodies(25))
    about = positions(broker, topic)
    found = peek(broker, topic, **{"from": about["earliest"] + 5, "count": 4})
    assert [message["body"].encode() for message in found] == bodies(4, 5)
    assert peek(broker, topic, **{"from": about["latest"]}) == []


def test_peek_goes_back_from_a_number_and_starts_at_a_time(broker: BrokerThread, topic: str) -> None:
    broker.publish(topic, *bodies(10))
    time.sleep(0.002)
    broker.publish(topic, *bodies(10, 10))
    start = positions(broker, topic)["earliest"]
    found = peek(broker, topic, before=start + 7, count=3)
    assert [message["body"].encode() for message in found] == bodies(3, 4)
    assert [one["sequence"] for one in peek(broker, topic, before=start + 2)] == [start, start + 1]
    assert peek(broker, topic, before=start) == peek(broker, topic, before=0) == []
    (middle,) = peek(broker, topic, **{"from": start + 10, "count": 1})
    at = f"{middle['timestamp'] // 10**9}.{middle['timestamp'] % 10**9:09}"
    assert peek(broker, topic, time=at, count=1) == [middle]
    assert peek(broker, topic, time="1", count=1)[0]["sequence"] == start
    assert peek(broker, topic, time="8000000000") == []
    where = f"/topic/peek?topic={topic}"
    broker.request("GET", f"{where}&time=noon").expect_error(400, "INVALID_ARG_TIME")
    broker.request("GET", f"{where}&before=-1").expect_error(400, "INVALID_ARG_BEFORE")
    broker.request("GET", f"{where}&from=1&before=2").expect_error(400, "INVALID_ARG_FROM")


def test_the_ready_messages_of_a_channel_are_shown_from_a_number_on(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, *bodies(10))
    broker.http("POST", "/pub", b"deferred", topic=topic, defer="50000")
    start = positions(broker, topic)["earliest"]
    found = peek(broker, topic, "c", **{"from": start + 6, "count": 3})
    assert [one["sequence"] for one in found] == [start + 6, start + 7, start + 8]
    assert [one["state"] for one in peek(broker, topic, "c", **{"from": 0, "count": 20})] == ["ready"] * 10


def test_a_binary_body_comes_in_base64_and_a_long_one_is_cut(broker: BrokerThread, topic: str) -> None:
    broker.publish(topic, b"\xff\x00", b"x" * 100_000, "ä\n".encode())
    odd, long, text = peek(broker, topic)
    assert "body" not in odd and odd["body_base64"] == "/wA="
    assert (len(long["body"]), long["size"]) == (65_536, 100_000)
    assert text["body"] == "ä\n"


def test_a_channel_shows_its_messages_in_every_state(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic, "c")
    with broker.connect() as consumer:
        consumer.sub(topic, "c", rdy=3)
        broker.publish(topic, b"put back", b"put off", b"held")
        put_back, put_off, held = sorted(consumer.read_messages(3), key=lambda message: message.id)
        consumer.rdy(0)
        consumer.req(put_back.id, 0)
        consumer.req(put_off.id, 60_000)
        consumer.barrier()
        broker.publish(topic, b"waiting")
        broker.http("POST", "/pub", b"deferred", topic=topic, defer="50000")
        found = {message["body"]: message for message in peek(broker, topic, "c")}
        assert {body: (message["state"], message["attempts"]) for body, message in found.items()} == {
            "held": ("in_flight", 1),
            "put back": ("requeued", 1),
            "put off": ("deferred", 1),
            "deferred": ("deferred", 0),
            "waiting": ("ready", 0),
        }
        assert found["held"]["id"] == held.id.decode()
        assert found["held"]["client"] == consumer.local_address
        assert found["held"]["timestamp"] == held.timestamp_ns
        assert 0 < found["held"]["deadline"] - held.timestamp_ns < 61e9
        assert found["deferred"]["due"] < found["put off"]["due"]
        extra = {"due", "deadline", "client"}
        assert {body: extra & message.keys() for body, message in found.items()} == {
            "held": {"deadline", "client"},
            "put back": set(),
            "put off": {"due"},
            "deferred": {"due"},
            "waiting": set(),
        }

        def states(text: str, **more: Any) -> list[str]:
            return [message["state"] for message in peek(broker, topic, "c", state=text, **more)]

        assert states("ready") == ["ready"]
        assert states("deferred,in_flight") == ["deferred", "deferred", "in_flight"]
        assert states("ready,ready,requeued") == ["ready", "requeued"]
        assert states("deferred,in_flight", count=1) == ["deferred"]
        # Peeking has changed nothing.
        stats = broker.channel_stats(topic, "c")
        assert stats is not None
        assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (2, 1, 2)
        consumer.fin(held.id)
        consumer.rdy(3)
        assert {message.body for message in consumer.read_messages(2)} == {b"put back", b"waiting"}


def test_messages_lost_to_damage_are_counted(tmp_path: Path) -> None:
    with BrokerThread(tmp_path) as broker:
        broker.control("create", "t", "c")
        for i in range(3):
            broker.publish("t", b"batch %d" % i)
        flip(segments(broker, "t")[0], b"batch 1")
        found = get(broker, "/topic/peek", topic="t")
        assert ([message["body"] for message in found["messages"]], found["missing"]) == (
            ["batch 0", "batch 2"],
            1,
        )


# Seeking


class Moved(NamedTuple):
    cursor: int
    target: int
    again: int
    skipped: int


def seek(broker: BrokerThread, topic: str, channel: str = "c", **query: Any) -> Moved:
    return Moved(**post(broker, "/channel/seek", topic=topic, channel=channel, **query))


@pytest.fixture
def consumed(broker: BrokerThread, topic: str) -> tuple[str, int]:
    """A topic of five batches of ten, all consumed by its channel, and its first number."""
    broker.control("create", topic, "c")
    for i in range(5):
        broker.publish(topic, *bodies(10, 10 * i))
    with broker.connect() as consumer:
        consumer.sub(topic, "c", rdy=100)
        consumer.read_messages(50, finish=True)
        consumer.barrier()
    return topic, positions(broker, topic)["earliest"]


def delivered(broker: BrokerThread, topic: str, count: int) -> list[bytes]:
    """The messages that a new consumer gets: exactly this many."""
    with broker.connect() as consumer:
        consumer.sub(topic, "c", rdy=1000)
        found = consumer.read_messages(count, finish=True)
        consumer.barrier()
        consumer.expect_silence(0.02)
        assert {message.attempts for message in found} <= {1}
        return [message.body for message in sorted(found, key=lambda message: message.id)]


def test_seeking_to_the_start_delivers_everything_again(
    broker: BrokerThread, consumed: tuple[str, int]
) -> None:
    topic, start = consumed
    assert seek(broker, topic, to="start") == Moved(start + 50, start, 50, 0)
    assert delivered(broker, topic, 50) == bodies(50)


def test_seeking_to_the_end_delivers_no_old_messages(broker: BrokerThread, consumed: tuple[str, int]) -> None:
    topic, start = consumed
    broker.publish(topic, *bodies(10))
    assert seek(broker, topic, to="end") == Moved(start + 50, start + 60, 0, 10)
    broker.publish(topic, b"new")
    assert delivered(broker, topic, 1) == [b"new"]


def test_seeking_to_a_number_delivers_from_there_on(broker: BrokerThread, consumed: tuple[str, int]) -> None:
    topic, start = consumed
    assert seek(broker, topic, sequence=start + 33) == Moved(start + 50, start + 33, 17, 0)
    assert delivered(broker, topic, 17) == bodies(17, 33)


@pytest.mark.parametrize("sequence", [0, 2**63 - 1])
def test_seeking_beyond_the_log_goes_to_its_end(
    broker: BrokerThread, consumed: tuple[str, int], sequence: int
) -> None:
    topic, start = consumed
    found = seek(broker, topic, sequence=sequence)
    assert found.target == (start if sequence == 0 else start + 50)


def as_seconds(timestamp_ns: int) -> str:
    return f"{timestamp_ns // 10**9}.{timestamp_ns % 10**9:09d}"


def test_seeking_to_a_time_delivers_messages_published_then_or_later(
    broker: BrokerThread, consumed: tuple[str, int]
) -> None:
    topic, start = consumed
    shown = peek(broker, topic, count=50)
    for number in (0, 10, 40):
        at_ns = shown[number]["timestamp"]
        for text, target in (
            (as_seconds(at_ns), number),
            (as_seconds(at_ns + 1), number + 10),
            (as_seconds(at_ns - 1), number),
        ):
            assert seek(broker, topic, time=text, dry_run="true").target == start + target
    seek(broker, topic, time=as_seconds(shown[40]["timestamp"]))
    assert delivered(broker, topic, 10) == bodies(10, 40)
    assert seek(broker, topic, time=0).target == start
    assert seek(broker, topic, time="9000000000").target == start + 50


def test_a_time_may_be_in_rfc_3339(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, b"a")
    (shown,) = peek(broker, topic)
    start = shown["sequence"]
    before_us = datetime.fromtimestamp(shown["timestamp"] // 10**9, UTC).replace(
        microsecond=shown["timestamp"] % 10**9 // 1000
    )
    texts = [
        before_us.isoformat(),
        before_us.isoformat().replace("+00:00", "Z"),
        before_us.isoformat().replace("+00:00", "+00"),
    ]
    for text in texts:
        assert seek(broker, topic, time=text, dry_run="1").target == start
    assert seek(broker, topic, time="2200-01-01T01:02:03+02:00", dry_run="1").target == start + 1
    assert seek(broker, topic, time="1970-01-01T00:00:00Z", dry_run="1").target == start


def test_a_dry_run_reports_the_effect_and_changes_nothing(
    broker: BrokerThread, consumed: tuple[str, int]
) -> None:
    topic, start = consumed
    for answer in ("true", "1"):
        assert seek(broker, topic, to="start", dry_run=answer) == Moved(start + 50, start, 50, 0)
    stats = broker.channel_stats(topic, "c")
    assert stats is not None and stats["depth"] == 0
    for answer in ("false", "0"):
        assert seek(broker, topic, sequence=start + 48, dry_run=answer).again == 2
        assert len(delivered(broker, topic, 2)) == 2


def test_a_mistyped_dry_run_is_refused(broker: BrokerThread, consumed: tuple[str, int]) -> None:
    topic, _ = consumed
    for text in ("yes", "True", "", "2"):
        query = {"topic": topic, "channel": "c", "to": "start", "dry_run": text}
        broker.request("POST", target("/channel/seek", query)).expect_error(400, "INVALID_ARG_DRY_RUN")
    stats = broker.channel_stats(topic, "c")
    assert stats is not None and stats["depth"] == 0


def test_consumers_see_a_seek_at_once(broker: BrokerThread, consumed: tuple[str, int]) -> None:
    topic, start = consumed
    with broker.connect() as consumer:
        consumer.sub(topic, "c", rdy=100)
        broker.publish(topic, b"held")
        held = consumer.read_message()
        seek(broker, topic, sequence=start + 45)
        found = consumer.read_messages(6)
        assert sorted(message.body for message in found) == sorted([*bodies(5, 45), b"held"])
        consumer.fin(held.id)
        consumer.barrier()


# Committing


def commit(broker: BrokerThread, topic: str, sequence: int) -> dict[str, int]:
    answer: dict[str, int] = post(broker, "/channel/commit", topic=topic, channel="c", sequence=sequence)
    return answer


def test_a_commit_finishes_everything_before_it(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, *bodies(20))
    start = positions(broker, topic)["earliest"]
    assert commit(broker, topic, start + 5) == {"cursor": start + 5, "depth": 15}
    assert commit(broker, topic, start + 2) == {"cursor": start + 5, "depth": 15}, "never back"
    assert commit(broker, topic, 0) == {"cursor": start + 5, "depth": 15}
    with broker.connect() as consumer:
        consumer.sub(topic, "c", rdy=3)
        held = consumer.read_messages(3)
        assert commit(broker, topic, start + 7)["cursor"] >= start + 7
        consumer.fin(held[0].id)
        # Other messages were sent instead.
        assert {message.body for message in consumer.read_messages(2)} == {*bodies(2, 8)}
        consumer.expect_error(b"E_FIN_FAILED FIN %b failed ID not in flight" % held[0].id)
    assert commit(broker, topic, start + 20) == {"cursor": start + 20, "depth": 0}
    ahead = broker.request("POST", f"/channel/commit?topic={topic}&channel=c&sequence={start + 21}")
    assert (ahead.status, ahead.json()) == (416, {"message": "OFFSET_AHEAD", "latest": start + 20})


def test_a_commit_survives_a_restart(tmp_path: Path) -> None:
    with BrokerThread(tmp_path) as broker:
        broker.control("create", "t", "c")
        broker.publish("t", *bodies(20))
        before = positions(broker, "t")
        commit(broker, "t", before["earliest"] + 12)
        broker.restart()
        after = positions(broker, "t")
        assert after["incarnation"] == before["incarnation"]
        stats = broker.channel_stats("t", "c")
        assert stats is not None and stats["depth"] == 8
        assert follow(broker, "t", after["earliest"])[-8:] == bodies(8, 12)


# Owners


def owned(broker: BrokerThread | BrokerProcess, topic: str, **query: Any) -> Answer:
    """A commit."""
    given = urlencode({"topic": topic, "channel": "c", "sequence": 0, **query})
    return broker.request("POST", f"/channel/commit?{given}")


def owner_in_stats(broker: BrokerThread, topic: str) -> Any:
    stats = broker.channel_stats(topic, "c")
    assert stats is not None
    return stats["owner"]


def test_a_channel_with_an_owner_takes_commits_of_that_owner_only(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic, "c")
    broker.publish(topic, *bodies(20))
    start = positions(broker, topic)["earliest"]
    assert commit(broker, topic, start + 2)["cursor"] == start + 2, "nobody's, so anybody's"
    assert owner_in_stats(broker, topic) == ""
    assert owned(broker, topic, owner="one", sequence=start + 5).status == 200
    assert owner_in_stats(broker, topic) == "one"
    for query in ({"owner": "two"}, {"owner": "two", "sequence": start + 9}, {"sequence": start + 9}):
        refused = owned(broker, topic, **query)
        said = refused.json()
        assert (refused.status, said["message"], said["owner"]) == (409, "CHANNEL_OWNED", "one"), query
        assert datetime.fromisoformat(said["since"]).tzinfo is not None
    where = {"topic": topic, "channel": "c", "sequence": start}
    seek = broker.request("POST", f"/channel/seek?{urlencode({**where, 'owner': 'two'})}")
    assert (seek.status, seek.json()["message"]) == (409, "CHANNEL_OWNED")
    # Asking for the position needs no owner. A seek without an owner is an operator's.
    assert owned(broker, topic).json() == {"cursor": start + 5, "depth": 15}
    post(broker, "/channel/seek", **where)
    post(broker, "/channel/seek", **where, owner="one")
    assert commit(broker, topic, 0) == {"cursor": start, "depth": 20}
    # Consumers are not affected.
    with broker.connect() as consumer:
        consumer.sub(topic, "c", rdy=1)
        assert consumer.read_messages(1, finish=True)[0].body == bodies(1)[0]


def test_an_owner_survives_a_restart_and_stays_until_release_or_deletion(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        broker.control("create", "t", "c")
        broker.publish("t", *bodies(5))
        assert owned(broker, "t", owner="one").status == 200
        broker.kill()
        broker.start()
        assert owned(broker, "t", owner="two").status == 409
        assert post(broker, "/channel/release", topic="t", channel="c") == {"owner": "one"}
        assert post(broker, "/channel/release", topic="t", channel="c") == {"owner": ""}
        broker.kill()
        broker.start()
        assert owned(broker, "t", owner="two").status == 200
        broker.control("delete", "t", "c")
        broker.control("create", "t", "c")
        assert owned(broker, "t", owner="three").status == 200


# Settings


def change(broker: BrokerThread, topic: str, changes: Any) -> Answer:
    body = changes if isinstance(changes, bytes) else json.dumps(changes).encode()
    return broker.request("PUT", f"/topic/settings?topic={topic}", body)


def settings(broker: BrokerThread, topic: str) -> Any:
    return get(broker, "/topic/settings", topic=topic)


NO_ARCHIVE: dict[str, Any] = {
    "archive": False,
    "archive_retention_age": 0.0,
    "archive_retention_bytes": 0,
    "archive_local_bytes": 0,
}


def test_the_flags_apply_until_a_topic_has_its_own_settings(tmp_path: Path) -> None:
    with BrokerThread(tmp_path, retention_age=7.5, durability="fsync") as broker:
        broker.control("create", "t")
        nothing = dict.fromkeys(("retention_age", "retention_bytes", "durability", "policy", *NO_ARCHIVE))
        flags = {"retention_age": 7.5, "retention_bytes": 0, "durability": "fsync", "policy": None}
        flags |= NO_ARCHIVE
        assert settings(broker, "t") == {**nothing, "effective": flags, "channel_policies": {}}
        own = {"retention_age": 86_400.0, "retention_bytes": 1000, "durability": "memory", "policy": None}
        own |= {**NO_ARCHIVE, "archive_retention_bytes": 5, "archive_local_bytes": 7}
        answer = change(broker, "t", {**own, "retention_age": "24h"}).expect_json()
        assert answer == settings(broker, "t") == {**own, "effective": own, "channel_policies": {}}
        # Only named settings change. Null restores the flag.
        assert change(broker, "t", {"durability": None}).status == 200
        assert change(broker, "t", {"retention_age": 3}).status == 200
        assert change(broker, "t", {}).status == 200
        wanted = {**own, "retention_age": 3.0, "durability": None}
        expected = {**wanted, "effective": {**wanted, "durability": "fsync"}, "channel_policies": {}}
        assert settings(broker, "t") == expected
        broker.restart()
        assert settings(broker, "t") == expected
        broker.control("create", "other")
        assert settings(broker, "other") == {**nothing, "effective": flags, "channel_policies": {}}
        broker.publish("t", b"x")


def test_an_ephemeral_topic_has_no_own_settings(broker: BrokerThread, topic: str) -> None:
    name = f"{topic}%23ephemeral"
    broker.control("create", f"{topic}#ephemeral")
    found = broker.request("GET", f"/topic/settings?topic={name}").expect_json()
    none = {"retention_age": 0.0, "retention_bytes": 0, "durability": "memory", "policy": None}
    none |= NO_ARCHIVE
    assert found["effective"] == none
    answer = change(broker, name, {"durability": "os"})
    assert (answer.status, answer.json()["message"]) == (400, "INVALID_SETTINGS")
    assert "ephemeral" in answer.json()["reason"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", ""),
        (b"null", "not an object"),
        (b'{"durability":' + b"[" * 60_000, ""),
        (b'{"retention_bytes":' + b"9" * 5_000 + b"}", ""),
        ({"retention_age": "soon"}, "retention_age"),
        ({"durability": "os", "nonsense": 1}, "there is no setting 'nonsense'"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_invalid_settings_are_refused_with_the_reason(
    broker: BrokerThread, changes: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker.control("create", "settings", "c")
    before = settings(broker, "settings")
    answer = change(broker, "settings", changes)
    assert (answer.status, answer.json()["message"]) == (400, "INVALID_SETTINGS"), answer
    assert reason in answer.json()["reason"] and answer.json()["reason"]
    assert settings(broker, "settings") == before
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_topic_with_changed_durability_is_synced_from_then_on(broker: BrokerThread, topic: str) -> None:
    broker.control("create", topic, "c")
    change(broker, topic, {"durability": "fsync"})
    broker.publish(topic, b"x")
    assert broker.call(lambda inner: inner.topics[topic].log.unsynced) == 0


# Errors: every one in the table


def test_a_hold_stops_delivery_until_it_ends(broker: BrokerThread) -> None:
    broker.control("create", "held", "c")
    hold = post(broker, "/channel/hold", topic="held", channel="c", for_seconds=600)["hold"]
    with broker.connect() as consumer:
        consumer.identify()
        consumer.sub("held", "c", rdy=5)
        broker.publish("held", b"1", b"2")
        consumer.expect_silence(0.05)
        assert broker.channel_stats("held", "c")["paused"] is False
        commit = {"topic": "held", "channel": "c", "sequence": 0, "hold": hold}
        post(broker, "/channel/commit", **commit)
        # A later hold replaces it: the end of the first does not end the second.
        later = post(broker, "/channel/hold", topic="held", channel="c", for_seconds=1)["hold"]
        for path, query in (("/channel/commit", commit), ("/channel/hold", {**commit, "for_seconds": 0})):
            refused = broker.request("POST", f"{path}?{urlencode(query)}")
            assert (refused.status, refused.json()["message"]) == (409, "NOT_HELD")
        # Nobody ends it: it expires.
        assert [message.body for message in consumer.read_messages(2)] == [b"1", b"2"]
        assert later != hold
        again = post(broker, "/channel/hold", topic="held", channel="c", for_seconds=600)["hold"]
        broker.publish("held", b"3")
        consumer.expect_silence(0.05)
        assert post(broker, "/channel/hold", topic="held", channel="c", for_seconds=0, hold=again) == {
            "hold": ""
        }
        assert [message.body for message in consumer.read_messages(1)] == [b"3"]


def table() -> list[Endpoint]:
    nsqd = Nsqd(NsqdOptions())
    subjects = (log_api.LogApi(nsqd), settings_api.SettingsApi(nsqd), cursors.CursorsApi(nsqd))
    return [endpoint for subject in subjects for endpoint in endpoints_of(subject, "The log")]


GOOD: dict[str, dict[str, Any]] = {
    "GET /topic/positions": {},
    "GET /topic/read": {"from": 0},
    "GET /topic/peek": {},
    "GET /topic/settings": {},
    "PUT /topic/settings": {},
    "GET /channel/settings": {},
    "PUT /channel/settings": {},
    "POST /channel/seek": {"to": "end"},
    "POST /channel/commit": {"sequence": 0},
    "POST /channel/release": {},
    "POST /channel/hold": {},
    "GET /channel/peek": {},
}
BAD_NUMBERS = ["", "x", "-1", "1.5", "0x1", "１", str(2**63), "0" * 20]
WRONG: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("*", "MISSING_ARG_TOPIC"): [{"topic": MISSING}],
    ("*", "INVALID_ARG_TOPIC"): [{"topic": text} for text in ("", "a b", "x" * 65, "t/..", "\udcff")],
    ("*", "TOPIC_NOT_FOUND"): [{"topic": "nobody"}, {"topic": "nobody#ephemeral"}],
    ("*", "MISSING_ARG_CHANNEL"): [{"channel": MISSING}],
    ("*", "INVALID_ARG_CHANNEL"): [{"channel": text} for text in ("", "a b", "x" * 65)],
    ("*", "CHANNEL_NOT_FOUND"): [{"channel": "nobody"}],
    ("*", "WRONG_INCARNATION"): [{"incarnation": text} for text in ("", "x", "0" * 32)],
    ("*", "INVALID_ARG_COUNT"): [{"count": text} for text in [*BAD_NUMBERS, "0", str(MAX_PEEK + 1)]],
    ("*", "INVALID_ARG_BEFORE"): [{"before": text} for text in BAD_NUMBERS],
    ("GET /topic/peek", "INVALID_ARG_TIME"): [{"time": "noon"}],
    ("*", "INVALID_ARG_FROM"): [{"from": text} for text in BAD_NUMBERS],
    ("*", "OFFSET_GONE"): [{"from": 0}],
    ("GET /topic/read", "OFFSET_AHEAD"): [{"from": 2**62}],
    ("GET /topic/peek", "OFFSET_AHEAD"): [{"from": 2**62}],
    ("GET /topic/read", "MISSING_ARG_FROM"): [{"from": MISSING}],
    ("GET /topic/read", "INVALID_ARG_MAX_BYTES"): [{"max_bytes": text} for text in [*BAD_NUMBERS, "0"]],
    ("GET /topic/read", "INVALID_ARG_VERIFY"): [{"verify": text} for text in ("yes", "", "TRUE")],
    ("GET /topic/read", "LOG_DAMAGED"): [],  # see the test of a truncated file
    ("*", "ARCHIVE_UNAVAILABLE"): [],  # see tests/faults/test_archive_store.py
    ("PUT /topic/settings", "INVALID_SETTINGS"): [{}],
    ("PUT /channel/settings", "INVALID_SETTINGS"): [{}],
    ("POST /channel/seek", "MISSING_ARG_TARGET"): [
        {"to": MISSING},
        {"to": "end", "sequence": 0},
        {"to": "end", "time": 0},
        {"to": MISSING, "sequence": 0, "time": 0},
    ],
    ("POST /channel/seek", "INVALID_ARG_TO"): [{"to": text} for text in ("", "END", "middle")],
    ("POST /channel/seek", "INVALID_ARG_SEQUENCE"): [{"to": MISSING, "sequence": t} for t in BAD_NUMBERS],
    ("*", "INVALID_ARG_DRY_RUN"): [{"dry_run": "maybe"}],
    ("POST /channel/seek", "INVALID_ARG_TIME"): [
        {"to": MISSING, "time": text}
        for text in (
            *("", "now", "-1", "nan", "inf", "-inf", "1e10", "1e999999999", "1e400", str(2**63), "sNaN"),
            *("2024-01-01", "2024-01-01T00:00:00", "2024-13-01T00:00:00Z", "1969-12-31T23:59:59Z"),
            *("2999-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "9" * 10_000),
        )
    ],
    ("GET /channel/peek", "INVALID_ARG_STATE"): [
        {"state": text} for text in ("", "READY", "ready,", "ready, deferred", "stored")
    ],
    ("POST /channel/commit", "MISSING_ARG_SEQUENCE"): [{"sequence": MISSING}],
    ("POST /channel/commit", "INVALID_ARG_SEQUENCE"): [{"sequence": text} for text in BAD_NUMBERS],
    ("POST /channel/commit", "OFFSET_AHEAD"): [{"sequence": 2**62}],
    ("POST /channel/commit", "NOT_HELD"): [{"hold": "0" * 16}, {"hold": ""}],
    ("POST /channel/hold", "NOT_HELD"): [{"for_seconds": 0, "hold": "0" * 16}, {"hold": ""}],
    ("POST /channel/hold", "INVALID_ARG_FOR_SECONDS"): [
        {"for_seconds": text} for text in [*BAD_NUMBERS, "601"]
    ],
    ("*", "INVALID_ARG_OWNER"): [{"owner": text} for text in ("", "x" * 101, "a\nb", "ü")],
    ("*", "CHANNEL_OWNED"): [{"channel": "owned", "owner": "two"}],
}
CASES = [(endpoint, status, code) for endpoint in table() for status, code in endpoint.errors]


def wrongs(endpoint: Endpoint, code: str) -> list[dict[str, Any]]:
    name = f"{endpoint.method} {endpoint.path}"
    return WRONG[(name, code) if (name, code) in WRONG else ("*", code)]


def test_every_error_in_the_table_is_reached(broker: BrokerThread) -> None:
    broker.control("create", "errors", "c")
    broker.publish("errors", b"x")
    broker.control("create", "errors", "owned")
    post(broker, "/channel/commit", topic="errors", channel="owned", sequence=0, owner="one")
    for endpoint, status, code in CASES:
        body = b"nonsense" if endpoint.keeps_body else None
        good = {"topic": "errors", "channel": "c", **GOOD[f"{endpoint.method} {endpoint.path}"]}
        for wrong in wrongs(endpoint, code):
            query = {name: value for name, value in {**good, **wrong}.items() if value != MISSING}
            text = urlencode(query, errors="surrogateescape")
            answer = broker.request(endpoint.method, f"{endpoint.path}?{text}", body)
            found = answer.status, answer.json()["message"]
            assert found == (status, code), (endpoint.path, wrong, answer)


def test_the_table_lists_every_error() -> None:
    known = {f"{endpoint.method} {endpoint.path}": dict(endpoint.errors) for endpoint in table()}
    assert known.keys() == GOOD.keys()
    modules = (log_api, settings_api, cursors, parameters)
    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)
    said = {
        line.split('"')[1] for line in source.splitlines() if "ApiError(4" in line or "ApiError(5" in line
    }
    listed = {code for endpoint in table() for _, code in endpoint.errors}
    said = {code for code in said if "{" not in code}
    assert said <= listed
    assert {code for _, code in WRONG} == listed
