"""The roles of a node whose coordinator answers in an unexpected way."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic

import pytest

from nsparq.replication.acknowledging import Fenced, Progress
from nsparq.replication.coordinator import Found, State
from nsparq.replication.membership import Membership
from nsparq.replication.node import Node, NodeSettings
from nsparq.replication.primary import Primary
from tests.replication.sim_parts import Record
from tests.support.aio import run, until


class Coordinator:
    """In memory. Calls raise an error, if there is one."""

    def __init__(self) -> None:
        self.record = Record(monotonic)
        self.at_reading: Exception | None = None
        self.at_changing: Exception | None = None

    async def observe(self) -> State:
        if self.at_reading is not None:
            raise self.at_reading
        return self.record.observe()

    async def compare_and_set(self, version: int, wanted: Membership) -> Found | None:
        if self.at_changing is not None:
            raise self.at_changing
        return self.record.compare_and_set(version, wanted)

    async def keep_alive(self, name: str) -> None:
        self.record.keep_alive(name)

    async def release(self) -> None:
        self.record.release("a")

    def close(self) -> None:
        pass


class Server:
    stopped = 0

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.stopped += 1


@asynccontextmanager
async def running(
    root: Path, coordinator: Coordinator, server: Server, lease_s: float
) -> AsyncIterator[tuple[Node, Primary]]:
    """A node that is primary."""
    settings = NodeSettings(
        cluster="test", name="a", root=root, secret=b"secret", listen=("127.0.0.1", 0), address="127.0.0.1:1",
        lease_s=lease_s,
    )  # fmt: skip
    node = Node(settings, coordinator, lambda node, primary: server)
    task = asyncio.create_task(node.run())
    try:
        yield node, await until(lambda: node.primary)
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_a_primary_that_cannot_read_the_record_ends_its_role_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        coordinator, server = Coordinator(), Server()
        async with running(tmp_path, coordinator, server, lease_s=0.3) as (node, primary):
            coordinator.at_reading = ValueError("the record has format 3")
            await until(lambda: server.stopped)
            refused: list[Exception | None] = []
            primary.when_safe(refused.append)
            assert isinstance(refused[0], Fenced) and "the record has format 3" in str(refused[0])
            await until(lambda: node.primary is None and node.follower is not None)
            assert "the record has format 3" in node.coordinator_error
            assert not await node.leads()
            assert (tmp_path / "replica.json").exists()
            coordinator.at_reading = None
            await until(lambda: node.primary)
            assert node.coordinator_error == ""

    run(scenario())
    (shown,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "the record has format 3" in shown.getMessage()


def test_a_mistake_while_the_set_is_changed_ends_the_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        coordinator, server = Coordinator(), Server()
        # It gives a sign of life only at the beginning.
        async with running(tmp_path, coordinator, server, lease_s=1e6) as (node, primary):
            coordinator.at_changing = RuntimeError("a mistake")
            primary.acknowledging.caught_up("b", "copy", Progress(0, 0))
            await until(lambda: server.stopped)
            assert primary.acknowledging.is_fenced

    run(scenario())
    assert "RuntimeError: a mistake" in caplog.text


def test_a_primary_that_is_stopped_as_it_asks_for_another_set_leaves_nothing(tmp_path: Path) -> None:
    """The guards of the tests look for work that never began."""

    async def scenario() -> None:
        coordinator, server = Coordinator(), Server()
        async with running(tmp_path, coordinator, server, lease_s=1e6) as (node, primary):
            assert node._record is not None
            node._record.change_set(primary.acknowledging.membership)
            # Its task is cancelled before it has begun.
            await node._record.close()

    run(scenario())
    gc.collect()
