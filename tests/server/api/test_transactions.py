"""Transactions over HTTP: several writers, published all or none, and once."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from nsparq.broker.transactions import MIN_REQUEST
from nsparq.storage.checked_json import write_json
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
    """Every message of the topic's log."""
    answer = call(broker, "GET", "/topic/peek", topic=topic, count=1000)
    if answer.status == 404:
        return []
    return [message["body"].encode() for message in answer.expect_json()["messages"]]


def test_staged_messages_are_published_with_the_commit(
    broker: BrokerThread, producer: str, topic: str
) -> None:
    which = {"producer": producer, "sequence": 0}
    other = topic + "-other"
    assert stage(broker, which, "a", topic, b"1", b"2") == 2
    assert stage(broker, which, "a", other, b"3") == 3
    assert stage(broker, which, "b", topic, b"4") == 1
    assert stored(broker, topic) == []
    assert commit(broker, which, b=1, a=3) == {"sequence": 0, "messages": 4, "already_committed": False}
    assert stored(broker, topic) == [b"4", b"1", b"2"], "in the order in which the parts are named"
    assert stored(broker, other) == [b"3"]


def test_a_consumer_gets_committed_messages_like_any_other(
    broker: BrokerThread, producer: str, topic: str
) -> None:
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


def test_a_repeated_commit_changes_nothing(broker: BrokerThread, producer: str, topic: str) -> None:
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
def test_a_commit_that_differs_from_the_staged_parts_publishes_nothing(
    broker: BrokerThread, producer: str, topic: str, parts: dict[str, int]
) -> None:
    which = {"producer": producer, "sequence": 0}
    stage(broker, which, "a", topic, b"1", b"2")
    for verb in ("prepare", "commit"):
        answer = call(broker, "POST", f"/transaction/{verb}", wanted(**parts), **which)
        assert refusal(answer) == (409, "INCOMPLETE_TRANSACTION")
    assert stored(broker, topic) == []
    assert commit(broker, which, a=2)["messages"] == 2


def test_parts_that_the_commit_does_not_name_are_dropped(
    broker: BrokerThread, producer: str, topic: str
) -> None:
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


def test_a_prepared_transaction_is_committed_later(broker: BrokerThread, producer: str, topic: str) -> None:
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


def test_a_replaced_client_cannot_undo_the_work_of_its_successor(
    broker: BrokerThread, producer: str, topic: str
) -> None:
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
    """A disk that refuses writes to logs on request, from the given write on."""

    is_refusing = False
    writes_left = 0

    def write(self, fd: int, buffers: Any, position: int) -> None:
        if self.is_refusing and any(bytes(buffer[:4]) == b"NQB1" for buffer in buffers):
            if not self.writes_left:
                raise OSError(28, "No space left on device")
            self.writes_left -= 1
        super().write(fd, buffers, position)


def test_a_commit_interrupted_by_the_disk_is_finished_later(tmp_path: Path, topic: str) -> None:
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


def set_forward(broker: BrokerThread, seconds: int) -> None:
    """Set both clocks of the broker forward."""
    clocks = broker.nsqd.broker
    monotonic_ns, wall_ns = clocks.monotonic_ns, clocks.wall_ns
    clocks.monotonic_ns = lambda: monotonic_ns() + seconds * 10**9
    clocks.wall_ns = lambda: wall_ns() + seconds * 10**9


def test_an_abandoned_transaction_expires(tmp_path: Path, topic: str) -> None:
    flags = {"transaction_timeout": 60.0, "transaction_retention": 600.0, "checkpoint_interval": 0.05}
    with BrokerThread(tmp_path, **flags) as broker:
        which = {"producer": "p", "sequence": 0}
        prepared = which | {"producer": "q"}
        stage(broker, which, "a", topic, b"1")
        stage(broker, prepared, "a", topic, b"1")
        call(broker, "POST", "/transaction/prepare", wanted(a=1), **prepared).expect_json()
        commit(broker, which | {"producer": "r"})
        set_forward(broker, 100)
        wait_until(lambda: state(broker, which)["state"] == "unknown")
        assert state(broker, prepared)["state"] == "prepared"
        set_forward(broker, 1000)
        wait_until(lambda: call(broker, "GET", "/transactions").expect_json()["producers"] == [])
        wait_until(lambda: not [*(tmp_path / "transactions").iterdir()])
        assert stored(broker, topic) == []


def test_a_transaction_is_synced_if_publishing_is(tmp_path: Path, topic: str) -> None:
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


def test_staged_messages_survive_a_killed_daemon(tmp_path: Path, topic: str) -> None:
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


def refuse_after(files: Refusing, chunks: int) -> None:
    files.is_refusing, files.writes_left = True, chunks


def test_a_decided_transaction_is_finished_before_a_later_one(tmp_path: Path) -> None:
    first, second = {"producer": "p", "sequence": 0}, {"producer": "p", "sequence": 1}
    files = Refusing()
    with BrokerThread(tmp_path, files=files) as broker:
        stage(broker, first, "a", "one", b"1")
        stage(broker, first, "a", "two", b"1")
        stage(broker, second, "a", "one", b"2")
        refuse_after(files, 1)
        answer = call(broker, "POST", "/transaction/commit", wanted(a=2), **first)
        assert refusal(answer) == (503, "WRITE_FAILED")
        answer = call(broker, "POST", "/transaction/commit", wanted(a=1), **second)
        assert refusal(answer) == (503, "EARLIER_TRANSACTION_UNFINISHED")
        assert json.loads(answer.body)["sequence"] == 0
        assert broker.request("GET", "/ping").status == 500
        files.is_refusing = False
        assert commit(broker, second, a=1)["already_committed"] is False
        assert [stored(broker, topic) for topic in ("one", "two")] == [[b"1", b"2"], [b"1"]]
        assert commit(broker, first, a=2)["already_committed"]
        assert broker.request("GET", "/ping").body == b"OK"


def test_older_transactions_are_refused_once_a_later_one_is_decided(tmp_path: Path) -> None:
    old, new = {"producer": "p", "sequence": 0}, {"producer": "p", "sequence": 1}
    files = Refusing()
    with BrokerThread(tmp_path, files=files) as broker:
        stage(broker, old, "a", "t", b"old")
        stage(broker, new, "a", "t", b"new")
        files.is_refusing = True
        assert call(broker, "POST", "/transaction/commit", wanted(a=1), **new).status == 503
        assert commit(broker, old, a=1)["already_committed"]
        answer = call(broker, "POST", "/transaction/stage", packed([b"x"]), **old, part="a", topic="t")
        assert refusal(answer) == (409, "ALREADY_COMMITTED")
        files.is_refusing = False
        wait_until(lambda: stored(broker, "t") == [b"new"])


# damage


def metric(broker: BrokerThread, name: str) -> int:
    lines = broker.request("GET", "/metrics").body.decode().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"nsqd_transactions_{name} ")))


def flip(path: Path, position: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[position] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize("is_published_before", [False, True])
def test_a_decided_transaction_with_a_damaged_chunk_waits_for_an_operator(
    tmp_path: Path, is_published_before: bool
) -> None:
    """The second of three chunks cannot be read. The messages published before are not lost."""
    which, later = {"producer": "p", "sequence": 0}, {"producer": "p", "sequence": 1}
    part = tmp_path / "transactions" / "p.producer" / "0" / "a.part"
    files = Refusing()
    with BrokerThread(tmp_path, files=files) as broker:
        for body in (b"1", b"2", b"3"):
            stage(broker, which, "a", "t", body)
        refuse_after(files, 2 if is_published_before else 1)
        assert call(broker, "POST", "/transaction/commit", wanted(a=3), **which).status == 503
        broker.stop()
        flip(part, part.stat().st_size * 2 // 3 - 1)
        files.is_refusing = False
        broker.start()
        if is_published_before:
            wait_until(lambda: state(broker, which)["committed_sequence"] == 0)
            assert stored(broker, "t") == [b"1", b"2", b"3"]
            return
        wait_until(lambda: stored(broker, "t") == [b"1", b"3"])
        told = {"lost_messages": 1, "decided": True, "state": "damaged"}
        for again in (False, True):
            if again:
                broker.restart()
            wait_until(lambda: state(broker, which).items() >= told.items())
            assert metric(broker, "damaged") == 1
            for one in (which, later):
                answer = call(broker, "POST", "/transaction/commit", wanted(), **one)
                assert refusal(answer) == (409, "DAMAGED_TRANSACTION")
                assert json.loads(answer.body)["sequence"] == 0
            assert refusal(call(broker, "POST", "/transaction/abort", **which))[0] == 409
            holds = broker.call(lambda _: broker.nsqd.broker.topics["t"].holds.copy())
            assert holds == {}, "no log is kept for it"
        assert broker.request("GET", "/ping").body == b"OK"
        resolved = call(broker, "POST", "/transaction/resolve", **which).expect_json()
        assert resolved == {"sequence": 0, "messages": 2, "already_committed": False, "lost_messages": 1}
        assert commit(broker, which, a=3) == resolved | {"already_committed": True}
        assert state(broker, which)["lost_messages"] == 1
        assert commit(broker, later)["already_committed"] is False
        assert stored(broker, "t") == [b"1", b"3"]
        assert metric(broker, "damaged") == 0


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_promise_whose_part_is_lost_is_not_committed_without_it(tmp_path: Path, damage: str) -> None:
    which = {"producer": "p", "sequence": 0}
    part = tmp_path / "transactions" / "p.producer" / "0" / "a.part"
    with BrokerThread(tmp_path) as broker:
        stage(broker, which, "a", "t", b"1")
        stage(broker, which, "a", "t", b"2")
        stage(broker, which, "b", "t", b"3")
        call(broker, "POST", "/transaction/prepare", wanted(a=2, b=1), **which).expect_json()
        broker.stop()
        size = part.stat().st_size
        if damage == "flipped":
            flip(part, size - 1)
        elif damage == "cut":
            part.write_bytes(part.read_bytes()[: size - 1])
        else:
            part.unlink()
        lost = 2 if damage == "missing" else 1
        broker.start()
        answer = call(broker, "POST", "/transaction/commit", **which)
        assert refusal(answer) == (409, "DAMAGED_TRANSACTION")
        assert stored(broker, "t") == []
        told = {"state": "damaged", "decided": False, "lost_messages": lost}
        assert state(broker, which).items() >= told.items()
        resolved = call(broker, "POST", "/transaction/resolve", **which).expect_json()
        assert (resolved["messages"], resolved["lost_messages"]) == (3 - lost, lost)
        assert stored(broker, "t") == ([b"3"] if damage == "missing" else [b"1", b"3"])
        assert metric(broker, "lost_messages_total") == lost


def test_an_unreadable_transaction_is_retried_until_an_operator_resolves_it(tmp_path: Path) -> None:
    class Unreadable(Files):
        def open_read(self, path: Path) -> int:
            if path.name == "bad.part":
                raise OSError(5, "Input/output error")
            return super().open_read(path)

    which = {"producer": "p", "sequence": 0}
    with BrokerThread(tmp_path, files=Unreadable()) as broker:
        stage(broker, which, "bad", "t", b"1")
        stage(broker, which, "good", "t", b"2")
        answer = call(broker, "POST", "/transaction/commit", wanted(bad=1, good=1), **which)
        assert refusal(answer) == (503, "WRITE_FAILED")
        assert b"transaction p/0: the commit was interrupted" in broker.request("GET", "/ping").body
        assert call(broker, "POST", "/transaction/resolve", **which).expect_json()["lost_messages"] == 1
        assert stored(broker, "t") == [b"2"]
        assert broker.request("GET", "/ping").body == b"OK"


def test_a_damaged_prepared_transaction_can_be_prepared_again_or_aborted(tmp_path: Path) -> None:
    which = {"producer": "p", "sequence": 0}
    with BrokerThread(tmp_path) as broker:
        stage(broker, which, "a", "t", b"1")
        call(broker, "POST", "/transaction/prepare", wanted(a=1), **which).expect_json()
        broker.stop()
        (tmp_path / "transactions" / "p.producer" / "0" / "a.part").unlink()
        broker.start()
        stage(broker, which, "b", "t", b"1")
        call(broker, "POST", "/transaction/prepare", wanted(b=1), **which).expect_json()
        assert call(broker, "POST", "/transaction/commit", **which).expect_json()["messages"] == 1
        assert stored(broker, "t") == [b"1"]


def test_only_a_damaged_or_stuck_transaction_can_be_resolved(broker: BrokerThread, producer: str) -> None:
    which = {"producer": producer, "sequence": 0}
    assert refusal(call(broker, "POST", "/transaction/resolve", **which)) == (409, "NOT_DAMAGED")
    stage(broker, which, "a", "t", b"1")
    assert refusal(call(broker, "POST", "/transaction/resolve", **which)) == (409, "NOT_DAMAGED")
    commit(broker, which, a=1)
    assert call(broker, "POST", "/transaction/resolve", **which).expect_json()["already_committed"]


def test_promises_of_the_previous_format_without_chunks_still_open(tmp_path: Path) -> None:
    whole, torn = ({"producer": name, "sequence": 0} for name in ("whole", "torn"))
    with BrokerThread(tmp_path) as broker:
        for which in (whole, torn):
            stage(broker, which, "a", "t", b"1")
            call(broker, "POST", "/transaction/prepare", wanted(a=1), **which).expect_json()
        broker.stop()
        for promise in tmp_path.glob("transactions/*/0/promise.json"):
            write_json(Files(), promise, {"parts": ["a"], "note": ""}, sync=False)
        (tmp_path / "transactions" / "torn.producer" / "0" / "a.part").unlink()
        broker.start()
        assert call(broker, "POST", "/transaction/commit", **whole).expect_json()["messages"] == 1
        answer = call(broker, "POST", "/transaction/commit", **torn)
        assert refusal(answer) == (409, "DAMAGED_TRANSACTION")
        resolved = call(broker, "POST", "/transaction/resolve", **torn).expect_json()
        assert (resolved["messages"], resolved["lost_messages"]) == (0, 1)
        assert stored(broker, "t") == [b"1"]


def test_staged_bytes_are_limited_per_producer_and_in_total(tmp_path: Path) -> None:
    """A small request counts as 16 KiB. Finished ones free their room, also after a restart."""
    flags = {"max_staged_bytes": 5 * MIN_REQUEST, "max_staged_bytes_per_producer": 3 * MIN_REQUEST}

    def fill(producer: str) -> tuple[int, list[Any]]:
        for number in range(10):
            which = {"producer": producer, "sequence": number, "part": f"{number}", "topic": "t"}
            answer = call(broker, "POST", "/transaction/stage", packed([b"1"]), **which)
            if answer.status != 200:
                return number, [*refusal(answer), json.loads(answer.body)["limit"]]
        raise AssertionError("there is no bound")

    with BrokerThread(tmp_path, **flags) as broker:
        own = [409, "TOO_MUCH_STAGED", flags["max_staged_bytes_per_producer"]]
        everybody = [503, "STAGING_FULL", flags["max_staged_bytes"]]
        assert fill("one") == (3, own)
        assert fill("two") == (2, everybody)
        broker.restart()
        assert fill("three") == (0, everybody)
        for sequence in range(3):
            call(broker, "POST", "/transaction/abort", producer="one", sequence=sequence)
        assert fill("three") == (3, own)
        commit(broker, {"producer": "two", "sequence": 1}, **{"1": 1})
        assert broker.call(lambda core: core.transactions.staged) == 3 * MIN_REQUEST


def test_staged_parts_keep_no_files_open(broker: BrokerThread, producer: str) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for part in range(20):
        stage(broker, {"producer": producer, "sequence": 0}, f"part-{part}", "t", b"1")
    assert len([*Path("/proc/self/fd").iterdir()]) < before + 10
