"""Transactions over HTTP: staged by several writers, published all or none, and once."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from nsparq.storage.files import Files
from tests.support import Answer, BrokerProcess, BrokerThread, unique_name, wait_until


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread(retention_bytes=1 << 30) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return unique_name("topic")


@pytest.fixture
def producer() -> str:
    return unique_name("producer")


def call(broker: Any, method: str, path: str, body: bytes = b"", **query: Any) -> Answer:
    answer: Answer = broker.request(method, f"{path}?{urlencode(query)}", body)
    return answer


def packed(bodies: list[bytes]) -> bytes:
    return struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(b)) + b for b in bodies)


def stage(broker: Any, which: dict[str, Any], part: str, topic: str, *bodies: bytes, **more: Any) -> Any:
    answer = call(
        broker, "POST", "/transaction/stage", packed([*bodies]), **which, part=part, topic=topic, **more
    )
    return answer.expect_json()["messages"]


def wanted(**parts: int) -> bytes:
    return json.dumps({"parts": parts}).encode()


def commit(broker: Any, which: dict[str, Any], **parts: int) -> Any:
    return call(broker, "POST", "/transaction/commit", wanted(**parts), **which).expect_json()


def state(broker: Any, which: dict[str, Any]) -> Any:
    return call(broker, "GET", "/transaction", **which).expect_json()


def refusal(answer: Answer) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["message"]


def stored(broker: Any, topic: str) -> list[bytes]:
    """Every message that the topic's log holds."""
    answer = call(broker, "GET", "/topic/peek", topic=topic, count=1000)
    if answer.status == 404:
        return []
    return [message["body"].encode() for message in answer.expect_json()["messages"]]


def test_what_is_staged_is_published_with_the_commit(broker: BrokerThread, producer: str, topic: str) -> None:
    which = {"producer": producer, "sequence": 0}
    other = topic + "-other"
    assert stage(broker, which, "a", topic, b"1", b"2") == 2
    assert stage(broker, which, "a", other, b"3") == 3
    assert stage(broker, which, "b", topic, b"4") == 1
    assert stored(broker, topic) == []
    assert commit(broker, which, b=1, a=3) == {"sequence": 0, "messages": 4, "already_committed": False}
    assert stored(broker, topic) == [b"4", b"1", b"2"], "in the order in which the parts are named"
    assert stored(broker, other) == [b"3"]


def test_a_consumer_gets_them_like_any_message(broker: BrokerThread, producer: str, topic: str) -> None:
    which = {"producer": producer, "sequence": 5}
    broker.control("create", topic, "c")
    stage(broker, which, "a", topic, b"now")
    stage(broker, which, "a", topic, b"later", defer=60_000)
    commit(broker, which, a=2)
    with broker.connect() as connection:
        connection.sub(topic, "c", rdy=10)
        assert connection.read_message().body == b"now"
    stats = broker.channel_stats(topic, "c")
    assert stats is not None and stats["deferred_count"] == 1


def test_a_commit_said_again_changes_nothing(broker: BrokerThread, producer: str, topic: str) -> None:
    which = {"producer": producer, "sequence": 7}
    stage(broker, which, "a", topic, b"1")
    commit(broker, which, a=1)
    assert commit(broker, which, a=1) == {"sequence": 7, "messages": 1, "already_committed": True}
    older = which | {"sequence": 6}
    assert commit(broker, older, a=1) == {"sequence": 6, "messages": None, "already_committed": True}
    answer = call(broker, "POST", "/transaction/stage", packed([b"x"]), **which, part="b", topic=topic)
    assert refusal(answer) == (409, "ALREADY_COMMITTED")
    assert json.loads(answer.body)["sequence"] == 7
    assert stored(broker, topic) == [b"1"]
    assert state(broker, which) == {
        "state": "committed",
        "committed_sequence": 7,
        "committed_note": "",
        "note": "",
    }


@pytest.mark.parametrize("parts", [{"a": 1}, {"a": 3}, {"a": 2, "b": 1}])
def test_what_is_not_as_staged_is_not_published(
    broker: BrokerThread, producer: str, topic: str, parts: dict[str, int]
) -> None:
    which = {"producer": producer, "sequence": 0}
    stage(broker, which, "a", topic, b"1", b"2")
    for verb in ("prepare", "commit"):
        answer = call(broker, "POST", f"/transaction/{verb}", wanted(**parts), **which)
        assert refusal(answer) == (409, "INCOMPLETE_TRANSACTION")
    assert stored(broker, topic) == []
    assert commit(broker, which, a=2)["messages"] == 2


def test_parts_that_are_not_named_are_dropped(broker: BrokerThread, producer: str, topic: str) -> None:
    which = {"producer": producer, "sequence": 0}
    stage(broker, which, "a", topic, b"1")
    stage(broker, which, "failed-attempt", topic, b"2")
    commit(broker, which, a=1)
    assert stored(broker, topic) == [b"1"]
    listed = call(broker, "GET", "/transactions").expect_json()["producers"]
    assert [p["open"] for p in listed if p["producer"] == producer] == [[]]


def test_an_empty_transaction_counts(broker: BrokerThread, producer: str) -> None:
    which = {"producer": producer, "sequence": 3}
    assert commit(broker, which) == {"sequence": 3, "messages": 0, "already_committed": False}
    assert state(broker, which)["committed_sequence"] == 3


def test_a_request_whose_answer_was_lost_can_be_sent_again(
    broker: BrokerThread, producer: str, topic: str
) -> None:
    which = {"producer": producer, "sequence": 0}
    stage(broker, which, "a", topic, b"1", b"2", at=0)
    again = call(
        broker, "POST", "/transaction/stage", packed([b"1", b"2"]), **which, part="a", topic=topic, at=0
    )
    assert refusal(again) == (409, "WRONG_POSITION")
    assert json.loads(again.body)["messages"] == 2
    assert stage(broker, which, "a", topic, b"3", at=2) == 3


def test_what_was_prepared_is_committed_later(broker: BrokerThread, producer: str, topic: str) -> None:
    which = {"producer": producer, "sequence": 0}
    stage(broker, which, "a", topic, b"1")
    body = json.dumps({"parts": {"a": 1}, "note": "all nodes"}).encode()
    call(broker, "POST", "/transaction/prepare", body, **which).expect_json()
    assert state(broker, which) == {
        "state": "prepared",
        "committed_sequence": None,
        "committed_note": "",
        "parts": {"a": 1},
        "prepared": ["a"],
        "note": "all nodes",
    }
    sealed = call(broker, "POST", "/transaction/stage", packed([b"x"]), **which, part="a", topic=topic)
    assert refusal(sealed) == (409, "PART_SEALED")
    stage(broker, which, "b", topic, b"of a replay")
    other = call(broker, "POST", "/transaction/commit", **which, promise="some nodes")
    assert refusal(other) == (409, "WRONG_PROMISE"), "another driver has prepared it since"
    committed = call(broker, "POST", "/transaction/commit", **which, promise="all nodes").expect_json()
    assert committed["messages"] == 1
    assert stored(broker, topic) == [b"1"]
    last = {"committed_sequence": 0, "committed_note": "all nodes"}
    assert state(broker, which) == last | {"state": "committed", "note": "all nodes"}
    assert state(broker, which | {"sequence": 1}) == last | {"state": "unknown"}


def test_without_a_promise_a_commit_needs_its_parts(broker: BrokerThread, producer: str, topic: str) -> None:
    which = {"producer": producer, "sequence": 0}
    assert refusal(call(broker, "POST", "/transaction/commit", **which)) == (409, "INCOMPLETE_TRANSACTION")
    stage(broker, which, "a", topic, b"1")
    assert refusal(call(broker, "POST", "/transaction/commit", **which)) == (409, "INCOMPLETE_TRANSACTION")


def test_who_was_given_up_undoes_nothing(broker: BrokerThread, producer: str, topic: str) -> None:
    which = {"producer": producer, "sequence": 0}
    stage(broker, which, "a", topic, b"1")

    def prepare(note: str, promise: str) -> Answer:
        body = json.dumps({"parts": {"a": 1}, "note": note}).encode()
        return call(broker, "POST", "/transaction/prepare", body, **which, promise=promise)

    assert prepare("first", "").status == 200
    assert prepare("second", "first").status == 200
    assert refusal(prepare("third", "first")) == (409, "WRONG_PROMISE")
    for verb in ("commit", "abort"):
        answer = call(broker, "POST", f"/transaction/{verb}", **which, promise="first")
        assert refusal(answer) == (409, "WRONG_PROMISE")
    assert state(broker, which)["note"] == "second"
    assert call(broker, "POST", "/transaction/abort", **which, promise="second").status == 200
    assert refusal(prepare("third", "second")) == (409, "WRONG_PROMISE"), "nothing is prepared now"


def test_an_aborted_transaction_is_gone(broker: BrokerThread, producer: str, topic: str) -> None:
    which = {"producer": producer, "sequence": 0}
    stage(broker, which, "a", topic, b"1")
    assert call(broker, "POST", "/transaction/abort", **which).status == 200
    assert state(broker, which)["state"] == "unknown"
    assert call(broker, "POST", "/transaction/abort", **which).status == 200, "as often as one likes"
    stage(broker, which, "a", topic, b"2")
    commit(broker, which, a=1)
    assert stored(broker, topic) == [b"2"]
    assert refusal(call(broker, "POST", "/transaction/abort", **which)) == (409, "ALREADY_COMMITTED")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"producer": None}, "MISSING_ARG_PRODUCER"),
        ({"producer": "a/b"}, "INVALID_ARG_PRODUCER"),
        ({"producer": "x" * 129}, "INVALID_ARG_PRODUCER"),
        ({"sequence": None}, "MISSING_ARG_SEQUENCE"),
        ({"sequence": "-1"}, "INVALID_ARG_SEQUENCE"),
        ({"part": None}, "MISSING_ARG_PART"),
        ({"part": ""}, "INVALID_ARG_PART"),
        ({"part": "../x"}, "INVALID_ARG_PART"),
        ({"topic": None}, "MISSING_ARG_TOPIC"),
        ({"topic": "a b"}, "INVALID_ARG_TOPIC"),
        ({"defer": "3600001"}, "INVALID_ARG_DEFER"),
        ({"at": "x"}, "INVALID_ARG_AT"),
    ],
)
def test_arguments_are_checked(broker: BrokerThread, changes: dict[str, Any], code: str) -> None:
    query = {"producer": "p", "sequence": 0, "part": "a", "topic": "t", **changes}
    query = {name: value for name, value in query.items() if value is not None}
    answer = call(broker, "POST", "/transaction/stage", packed([b"1"]), **query)
    assert refusal(answer) == (400, code)


@pytest.mark.parametrize(
    "body",
    [b"x", b"[]", b"{}", b'{"parts": []}', b'{"parts": {"a": -1}}', b'{"parts": {"a": true}}',
     b'{"parts": {}, "note": 1}', b'{"parts": {}, "more": 1}'],
)  # fmt: skip
def test_parts_are_checked(broker: BrokerThread, body: bytes) -> None:
    for verb in ("prepare", "commit"):
        answer = call(broker, "POST", f"/transaction/{verb}", body, producer="p", sequence=0)
        assert refusal(answer) == (400, "INVALID_PARTS")


@pytest.mark.parametrize("body", [b"", b"\0\0\0\1", packed([b""]), packed([b"1"])[:-1], packed([])])
def test_messages_are_checked(broker: BrokerThread, producer: str, body: bytes) -> None:
    query = {"producer": producer, "sequence": 0, "part": "a", "topic": "t"}
    assert call(broker, "POST", "/transaction/stage", body, **query).status == 413
    assert state(broker, {"producer": producer, "sequence": 0})["state"] == "unknown"


def test_everything_survives_a_clean_restart(tmp_path: Path, topic: str) -> None:
    first, second, third = ({"producer": name, "sequence": 0} for name in ("one", "two", "three"))
    with BrokerThread(tmp_path) as broker:
        stage(broker, first, "a", topic, b"1")
        commit(broker, first, a=1)
        stage(broker, second, "a", topic, b"2")
        call(broker, "POST", "/transaction/prepare", wanted(a=1), **second).expect_json()
        stage(broker, third, "a", topic, b"3")
        broker.restart()
        assert state(broker, first)["state"] == "committed"
        assert state(broker, third) | {"note": ""} == {
            "state": "open",
            "committed_sequence": None,
            "committed_note": "",
            "parts": {"a": 1},
            "prepared": None,
            "note": "",
        }
        assert call(broker, "POST", "/transaction/commit", **second).expect_json()["messages"] == 1
        stage(broker, third, "a", topic, b"4")
        commit(broker, third, a=2)
        assert sorted(stored(broker, topic)) == [b"1", b"2", b"3", b"4"]


class Refusing(Files):
    """A disk that refuses to write to logs while it is told to."""

    is_refusing = False

    def write(self, fd: int, buffers: Any, position: int) -> None:
        if self.is_refusing and any(bytes(buffer[:4]) == b"NQB1" for buffer in buffers):
            raise OSError(28, "No space left on device")
        super().write(fd, buffers, position)


def test_a_commit_that_the_disk_broke_off_is_finished_when_it_can_be(tmp_path: Path, topic: str) -> None:
    which = {"producer": "p", "sequence": 0}
    files = Refusing()
    with BrokerThread(tmp_path, files=files) as broker:
        for number in range(10):
            stage(broker, which, "a", topic, b"%d" % number)
        files.is_refusing = True
        assert refusal(call(broker, "POST", "/transaction/commit", wanted(a=10), **which)) == (
            503,
            "WRITE_FAILED",
        )
        assert state(broker, which)["state"] == "committed", "it is decided"
        files.is_refusing = False
        wait_until(lambda: len(stored(broker, topic)) == 10)
        assert commit(broker, which, a=10)["already_committed"]
        assert stored(broker, topic) == [b"%d" % number for number in range(10)]


def test_what_nobody_touches_is_dropped_in_the_end(tmp_path: Path, topic: str) -> None:
    flags = {"transaction_timeout": 0.2, "transaction_retention": 0.6, "checkpoint_interval": 0.05}
    with BrokerThread(tmp_path, **flags) as broker:
        which = {"producer": "p", "sequence": 0}
        stage(broker, which, "a", topic, b"1")
        stage(broker, which | {"producer": "q"}, "a", topic, b"1")
        call(broker, "POST", "/transaction/prepare", wanted(a=1), **which | {"producer": "q"}).expect_json()
        commit(broker, which | {"producer": "r"})
        wait_until(lambda: state(broker, which)["state"] == "unknown")
        wait_until(lambda: call(broker, "GET", "/transactions").expect_json()["producers"] == [])
        wait_until(lambda: not [*(tmp_path / "transactions").iterdir()])
        assert stored(broker, topic) == []


def test_a_transaction_is_synced_where_publishing_is(tmp_path: Path, topic: str) -> None:
    class Counting(Files):
        synced = 0

        def sync(self, fd: int) -> None:
            Counting.synced += 1
            super().sync(fd)

    which = {"producer": "p", "sequence": 0}
    with BrokerThread(tmp_path, files=Counting(), durability="fsync") as broker:
        stage(broker, which, "a", topic, b"1")
        before = Counting.synced
        commit(broker, which, a=1)
        assert Counting.synced >= before + 2, "the part before the decision, the log after the last message"


def test_staged_messages_outlive_a_killed_daemon(tmp_path: Path, topic: str) -> None:
    which = {"producer": "p", "sequence": 0}
    with BrokerProcess(tmp_path) as broker:
        stage(broker, which, "a", topic, b"1", b"2")
        broker.kill()
        broker.start()
        assert stage(broker, which, "a", topic, b"3", at=2) == 3
        commit(broker, which, a=3)
        broker.kill()
        broker.start()
        assert commit(broker, which, a=3)["already_committed"]
        assert stored(broker, topic) == [b"1", b"2", b"3"]
