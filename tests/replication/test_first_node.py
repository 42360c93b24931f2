"""The first node of a cluster, whose request for the record is not answered."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest

from nsparq.replication.coordinator import Found, NoAnswer, State
from nsparq.replication.follower import ForeignData
from nsparq.replication.membership import Membership
from nsparq.replication.node import Node, NodeSettings
from nsparq.replication.primary import Primary
from tests.replication.sim_parts import Record
from tests.support.aio import run, until


class Unanswering:
    """A coordinator that does not answer the first request for the record. It carries that out, or
    another node is faster."""

    def __init__(self, other: Membership | None) -> None:
        self.record = Record(monotonic)
        self.other = other
        self.is_first = True

    async def observe(self) -> State:
        return self.record.observe()

    async def compare_and_set(self, version: int, wanted: Membership) -> Found | None:
        found = self.record.compare_and_set(version, self.other or wanted if self.is_first else wanted)
        if self.is_first:
            self.is_first = False
            raise NoAnswer("no answer")
        return found

    async def keep_alive(self, name: str) -> None:
        self.record.keep_alive(name)

    async def release(self) -> None:
        pass

    def close(self) -> None:
        pass


class Server:
    def __init__(self, node: Node, primary: Primary) -> None:
        pass

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data path with data."""
    path = tmp_path / "a"
    path.mkdir()
    (path / "nsqd.dat").write_text("{}")
    return path


def new_node(root: Path, coordinator: Unanswering) -> Node:
    settings = NodeSettings(
        cluster="test", name="a", root=root, secret=b"secret", listen=("127.0.0.1", 0), address="127.0.0.1:1",
        lease_s=0.3,
    )  # fmt: skip
    return Node(settings, coordinator, Server)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_node_that_became_the_first_without_knowing_serves(root: Path, restarts: bool) -> None:
    async def scenario() -> None:
        coordinator = Unanswering(None)
        node = new_node(root, coordinator)
        running = asyncio.create_task(node.run())
        await until(lambda: not coordinator.is_first)
        if restarts:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            node = new_node(root, coordinator)
            running = asyncio.create_task(node.run())
        await until(lambda: node.primary is not None or running.done())
        assert node.primary is not None, running
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    run(scenario())


def test_data_of_a_node_that_did_not_become_the_first_is_no_copy(root: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        made = Primary(tmp_path / "b", Membership(1, "b", {"b": "1"}), b"secret", lambda wanted: None)
        port = await made.listen("127.0.0.1", 0)
        other = Membership(1, "b", {"b": "1"}, {"b": f"127.0.0.1:{port}"})
        with pytest.raises(ForeignData):
            await new_node(root, Unanswering(other)).run()
        await made.close()

    run(scenario())
