"""No fsync runs on the event loop, and no request is answered before the fsync that it was
promised."""

from __future__ import annotations

import asyncio
import errno
import json
import struct
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsparq.storage.files import Files
from tests.support import BrokerThread, wait_until


class WatchedFiles(Files):
    """Notes every sync, and whether it ran in the thread of an event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.on_loop: list[str] = []
        self.count = 0
        self.gate = threading.Event()
        """Syncs wait until it is set."""
        self.gate.set()
        self.is_broken = False

    def _note(self) -> None:
        self.count += 1
        if asyncio._get_running_loop() is not None:
            self.on_loop.append("".join(traceback.format_stack(limit=8)[:-2]))
        else:
            self.gate.wait(60)
            if self.is_broken:
                raise OSError(errno.EIO, "Input/output error")

    def sync(self, fd: int) -> None:
        self._note()

    def sync_directory(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(path)
        self._note()


def packed(*bodies: bytes) -> bytes:
    return struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(b)) + b for b in bodies)


def use_everything(broker: BrokerThread) -> None:
    """Make every kind of change that writes to the disk."""
    both = {"topic": "t", "channel": "c"}
    broker.http("POST", "/topic/create", topic="t")
    broker.http("POST", "/channel/create", **both)
    broker.publish("by-tcp", b"1", b"2")
    with broker.connect() as consumer:
        consumer.sub("by-tcp", "c", rdy=1)
        consumer.fin(consumer.read_message().id)
        consumer.req(consumer.read_message().id, 60_000)
        consumer.barrier()
    broker.http("POST", "/pub", b"x", topic="t")
    for _ in range(80):  # until the files with the states have to be written anew
        for action in ("pause", "unpause"):
            broker.http("POST", f"/topic/{action}", topic="t")
            broker.http("POST", f"/channel/{action}", **both)
    broker.http("POST", "/channel/seek", to="start", **both)
    broker.http("POST", "/channel/empty", **both)
    broker.http("POST", "/topic/empty", topic="t")
    for durability in ("os", "memory", "fsync", None):
        settings = json.dumps({"durability": durability}).encode()
        broker.http("PUT", "/topic/settings", settings, topic="t")
        broker.http("POST", "/pub", b"x", topic="t")
    use_transactions(broker)
    for _ in range(2):
        broker.call(lambda it: it.maintain())
    broker.http("POST", "/channel/delete", **both)
    broker.http("POST", "/channel/create", **both)
    broker.http("POST", "/topic/delete", topic="t")


def use_transactions(broker: BrokerThread) -> None:
    wanted = json.dumps({"parts": {"a": 2}}).encode()
    for sequence, steps in enumerate((["prepare", "commit"], ["commit"], ["prepare", "abort"])):
        which = {"producer": "p", "sequence": str(sequence)}
        for topic in ("t", f"new-{sequence}"):
            broker.http("POST", "/transaction/stage", packed(b"m"), part="a", topic=topic, **which)
        for step in steps:
            body = b"" if step == "abort" or len(steps) == 2 and step == "commit" else wanted
            broker.http("POST", f"/transaction/{step}", body, **which)


@pytest.mark.parametrize("durability", ["fsync", "os", "memory"])
def test_the_event_loop_syncs_nothing(tmp_path: Path, durability: str) -> None:
    files = WatchedFiles()
    with BrokerThread(
        tmp_path, files=files, durability=durability, checkpoint_interval=0.02, sync_timeout=0.05
    ) as broker:
        files.on_loop.clear()
        use_everything(broker)
        assert not files.on_loop, f"{len(files.on_loop)}, first:\n{files.on_loop[0]}"
        assert files.count


REQUESTS: dict[str, Callable[[Any], Any]] = {
    "create a topic": lambda broker: broker.http("POST", "/topic/create", topic="new"),
    "create a channel": lambda broker: broker.http("POST", "/channel/create", topic="t", channel="new"),
    "subscribe": lambda broker: subscribe(broker),
    "pause": lambda broker: broker.http("POST", "/topic/pause", topic="t"),
    "pause a channel": lambda broker: broker.http("POST", "/channel/pause", topic="t", channel="c"),
    "empty": lambda broker: broker.http("POST", "/topic/empty", topic="t"),
    "empty a channel": lambda broker: broker.http("POST", "/channel/empty", topic="t", channel="c"),
    "seek": lambda broker: broker.http("POST", "/channel/seek", topic="t", channel="c", to="start"),
    "settings": lambda broker: broker.http("PUT", "/topic/settings", b'{"retention_age": 60}', topic="t"),
    "delete a channel": lambda broker: broker.http("POST", "/channel/delete", topic="t", channel="c"),
    "delete a topic": lambda broker: broker.http("POST", "/topic/delete", topic="t"),
}


def subscribe(broker: BrokerThread) -> None:
    with broker.connect() as consumer:
        consumer.sub("t", "by-sub")


def test_a_promised_change_is_answered_after_its_fsync_and_other_requests_do_not_wait(tmp_path: Path) -> None:
    files = WatchedFiles()
    for number, (name, request) in enumerate(REQUESTS.items()):
        (tmp_path / str(number)).mkdir()
        with BrokerThread(tmp_path / str(number), files=files, durability="fsync") as broker:
            broker.http("POST", "/topic/create", topic="t")
            broker.http("POST", "/channel/create", topic="t", channel="c")
            before = files.count
            files.gate.clear()
            try:
                asking = threading.Thread(target=request, args=(broker,), daemon=True)
                asking.start()
                wait_until(lambda before=before: files.count > before, what=name)
                broker.publish("other#ephemeral", b"served meanwhile")
                assert asking.is_alive(), f"{name}: answered before the fsync"
            finally:
                files.gate.set()
            asking.join(60)
            assert not asking.is_alive(), name


def test_a_change_whose_fsync_fails_is_answered_with_an_error(tmp_path: Path) -> None:
    files = WatchedFiles()
    with BrokerThread(tmp_path, files=files, durability="fsync") as broker:
        broker.http("POST", "/topic/create", topic="t")
        files.is_broken = True
        assert broker.request("POST", "/channel/create?topic=t&channel=c").status == 500
        assert broker.request("PUT", "/topic/settings?topic=t", b'{"retention_age": 60}').status == 500
        with broker.connect() as consumer:
            consumer.command("SUB", "t", "d")
            consumer.expect_fatal("E_SUB_FAILED SUB failed Input/output error")
        assert b"NOK - cannot sync" in broker.request("GET", "/ping").body
        files.is_broken = False
        broker.http("POST", "/channel/pause", topic="t", channel="c")
        wait_until(lambda: broker.request("GET", "/ping").body == b"OK")
