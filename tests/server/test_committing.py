"""Changes of one producer's transactions come one after the other, also if somebody gives up
waiting."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, TypeVar
from urllib.parse import urlencode

import pytest

from nsparq.http.api import ApiError
from nsparq.packed import PackedBodies
from nsparq.storage.files import Files
from tests.support import BrokerThread, wait_until
from tests.support.polling import DEADLINE

T = TypeVar("T")
Parts = tuple[dict[str, int], str]

WANTED: Parts = ({"w": 2}, "")
BODY = b'{"parts": {"w": 2}}'
WHICH = {"producer": "p", "sequence": "1"}


class SlowFiles(Files):
    """Writing a file with the name `slow` waits until `may_go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = ""
        self.is_broken = False
        self.has_begun, self.may_go = Event(), Event()

    def replace(self, path: Path, content: bytes, *, sync: bool) -> None:
        if path.name == self.slow and sync:
            self.slow = ""
            self.has_begun.set()
            assert self.may_go.wait(DEADLINE)
            if self.is_broken:
                raise OSError(errno.EIO, "Input/output error")
        super().replace(path, content, sync=sync)


@pytest.fixture
def files() -> SlowFiles:
    return SlowFiles()


@pytest.fixture
def broker(tmp_path: Path, files: SlowFiles) -> Iterator[BrokerThread]:
    with BrokerThread(tmp_path, files=files, durability="fsync", retention_bytes=1 << 30) as broker:
        try:
            bodies = PackedBodies.of([b"one", b"two"])
            broker.call(lambda it: it.transactions.stage("p", 1, "w", "t", bodies, owner="alice"))
            yield broker
        finally:
            files.may_go.set()


def begin(broker: BrokerThread, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
    return broker.call_daemon(lambda nsqd: nsqd.launch(work()))


def pass_turns(broker: BrokerThread) -> None:
    for _ in range(10):
        broker.call(lambda _: None)


def result(task: asyncio.Task[T]) -> T:
    wait_until(task.done)
    return task.result()


def stored(broker: BrokerThread) -> int:
    return broker.call(lambda it: it.topics["t"].positions().messages if "t" in it.topics else 0)


def is_locked(broker: BrokerThread) -> bool:
    return broker.call_daemon(lambda nsqd: nsqd.committer._lock("p").locked())


def test_a_client_that_disconnects_leaves_the_producer_locked_until_its_thread_has_ended(
    broker: BrokerThread, files: SlowFiles
) -> None:
    files.slow = "promise.json"
    assert isinstance(broker.http_address, tuple)
    with socket.create_connection(broker.http_address) as client:
        line = f"POST /transaction/prepare?{urlencode(WHICH)} HTTP/1.1"
        client.sendall(f"{line}\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
        assert files.has_begun.wait(DEADLINE)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: broker.call_daemon(lambda nsqd: nsqd.http_connection_count) == 0)
    pass_turns(broker)
    assert is_locked(broker)
    with ThreadPoolExecutor(1) as client_thread:
        path = f"/transaction/commit?{urlencode(WHICH)}"
        answer = client_thread.submit(broker.request, "POST", path, BODY)
        pass_turns(broker)
        assert stored(broker) == 0
        files.may_go.set()
        assert answer.result(DEADLINE).expect_json()["messages"] == 2
    assert stored(broker) == 2
    assert not is_locked(broker)


@pytest.mark.parametrize("slow", ["promise.json", "committed.json"])
def test_a_cancelled_commit_ends_after_its_thread(broker: BrokerThread, files: SlowFiles, slow: str) -> None:
    files.slow = slow
    committer = broker.nsqd.committer
    first = begin(broker, lambda: committer.commit("p", 1, wanted=WANTED))
    assert files.has_begun.wait(DEADLINE)
    for _ in range(2):
        broker.call(lambda _: first.cancel())
        pass_turns(broker)
        assert not first.done()
    files.may_go.set()
    wait_until(first.done)
    assert first.cancelled()
    second = begin(broker, lambda: committer.commit("p", 1, wanted=WANTED))
    assert result(second)["messages"] == 2
    assert stored(broker) == 2


def test_a_write_that_fails_after_its_request_was_cancelled_is_logged(
    broker: BrokerThread, files: SlowFiles, caplog: pytest.LogCaptureFixture
) -> None:
    files.slow, files.is_broken = "promise.json", True
    committer = broker.nsqd.committer
    task = begin(broker, lambda: committer.prepare("p", 1, WANTED, promise=None, identity="alice"))
    assert files.has_begun.wait(DEADLINE)
    broker.call(lambda _: task.cancel())
    files.may_go.set()
    wait_until(task.done)
    assert isinstance(task.exception(), ApiError)
    assert "transaction p/1: [Errno 5] Input/output error" in caplog.text


def test_an_owner_is_not_removed_while_a_thread_writes_it(broker: BrokerThread, files: SlowFiles) -> None:
    files.slow = "owner.json"
    committer = broker.nsqd.committer
    prepare = begin(broker, lambda: committer.prepare("p", 1, WANTED, promise=None, identity="alice"))
    assert files.has_begun.wait(DEADLINE)
    disown = begin(broker, lambda: committer.disown("p"))
    pass_turns(broker)
    assert not disown.done()
    files.may_go.set()
    result(prepare)
    result(disown)
    assert broker.call(lambda it: it.transactions.is_owner("p", "bob"))
    broker.restart()
    assert broker.call(lambda it: it.transactions.is_owner("p", "bob"))


def test_an_owner_that_cannot_be_removed_stays(
    broker: BrokerThread, files: SlowFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files, "unlink", refuse)
        disown = begin(broker, lambda: broker.nsqd.committer.disown("p"))
        with pytest.raises(ApiError, match="WRITE_FAILED"):
            result(disown)
    assert not broker.call(lambda it: it.transactions.is_owner("p", "bob"))


def test_an_internal_error_does_not_end_the_finishing_of_commits(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a crash or a disk error has interrupted, of all producers."""
    committer = broker.nsqd.committer
    rounds: list[str] = []

    async def fail(producer: str, sequence: int) -> None:
        rounds.append(producer)
        raise RuntimeError("a mistake")

    class Interrupted:
        def __init__(self, name: str) -> None:
            self.producer, self.sequence = self, 1
            self.name = name

    def interrupt(_: object) -> None:
        monkeypatch.setattr(committer, "commit", fail)
        found = [Interrupted("p"), Interrupted("q")]
        monkeypatch.setattr(committer._transactions, "unfinished", lambda: found)

    broker.call(interrupt)
    wait_until(lambda: len(rounds) >= 4)
    monkeypatch.undo()
    assert rounds[:4] == ["p", "q", "p", "q"]
