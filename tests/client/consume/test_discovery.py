"""Which nsqd a consumer connects to, how often it tries, and lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from nsparq.client.config import Config
from nsparq.client.connect.lookup import LookupFailed
from nsparq.client.consume.discovery import Discovery
from nsparq.client.errors import ClientError, ConnectFailed
from tests.support import aio
from tests.support.aio import until


def run(work: Coroutine[Any, Any, None]) -> None:
    # Nothing here is real, so time is simulated too.
    aio.run(work, timeless=True)


class FakeConnection:
    def __init__(self, world: World, address: str) -> None:
        self.address = address
        self.closed = asyncio.Event()
        self._world = world

    def close(self) -> None:
        self.end()

    def end(self) -> None:
        self.closed.set()
        self._world.discovery.lost(self)  # type: ignore[arg-type]


class World:
    """The present state of brokers and nsqlookupds."""

    def __init__(self, *named: str, has_lookupd: bool = False, **options: Any) -> None:
        self.addresses = ["lookupd:1"] if has_lookupd else []
        self.known: list[str] | None = []
        """The answer of nsqlookupd; None while it is down."""
        self.error: Exception | None = None
        """Raised instead of an answer."""
        self.before_the_answer: list[list[str] | None] = []
        self.late: asyncio.Event | None = None
        """When a second nsqlookupd answers, which knows late:1. Never without it."""
        self.asked: list[float] = []
        self.refusing: set[str] = set()
        self.stalled: set[str] = set()
        self.attempts: list[tuple[str, float]] = []
        self.opened: list[str] = []
        settings = {"reconnect_delay": 0.01, "lookupd_poll_interval": 60, "lookupd_poll_jitter": 0, **options}
        self.discovery = Discovery(
            Config(**settings),
            "t",
            self,  # type: ignore[arg-type]
            named,
            self._open,  # type: ignore[arg-type]
            lambda connection: self.opened.append(connection.address),
        )

    async def producers(self, topic: str) -> AsyncGenerator[list[str] | None, None]:
        assert topic == "t"
        self.asked.append(asyncio.get_running_loop().time())
        for found in self.before_the_answer:
            yield found
        if self.error is not None:
            raise self.error
        if self.known is None:
            raise LookupFailed("none answered")
        yield self.known
        if self.late is not None:
            await self.late.wait()
            yield [*self.known, "late:1"]

    async def _open(self, address: str) -> FakeConnection:
        self.attempts.append((address, asyncio.get_running_loop().time()))
        if address in self.stalled:
            await asyncio.sleep(3600)
        await asyncio.sleep(0)
        if address in self.refusing:
            raise ConnectFailed(f"{address}: refused")
        return FakeConnection(self, address)

    @property
    def connected(self) -> set[str]:
        return set(self.discovery.connections)

    def lose(self, address: str) -> None:
        self.discovery.connections[address].end()  # type: ignore[attr-defined]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Discovery]:
        self.discovery.start()
        try:
            yield self.discovery
        finally:
            await self.discovery.stop()


# Named addresses


def test_named_brokers_are_reconnected() -> None:
    async def main() -> None:
        world = World("a:1", "b:1")
        async with world.running():
            await until(lambda: world.connected == {"a:1", "b:1"})
            world.lose("a:1")
            assert world.connected == {"b:1"}
            await until(lambda: world.opened.count("a:1") == 2)
            assert world.opened.count("b:1") == 1

    run(main())


def test_the_reconnect_delay_grows_up_to_a_limit() -> None:
    async def main() -> None:
        world = World("a:1", reconnect_delay=0.01, max_reconnect_delay=0.05)
        world.refusing = {"a:1"}
        async with world.running():
            await until(lambda: len(world.attempts) >= 8)
            gaps = [later - before for before, later in pairwise(at for _, at in world.attempts)]
            assert all(0.025 <= gap <= 0.051 for gap in gaps[-3:]), "half of the limit, at least"
            assert gaps[0] < max(gaps)
            world.refusing = set()
            await until(lambda: world.connected)

    run(main())


def test_a_connection_that_does_not_last_counts_as_a_failure() -> None:
    async def main() -> None:
        world = World("a:1", reconnect_delay=0.005, max_reconnect_delay=10)
        async with world.running():
            began = asyncio.get_running_loop().time()
            for count in range(1, 7):
                await until(lambda count=count: len(world.opened) == count)
                world.lose("a:1")
            await until(lambda: len(world.opened) == 7)
            assert asyncio.get_running_loop().time() - began > 0.1, "5 + 10 + 20 + … ms, at least half of it"

    run(main())


def test_a_connection_that_lasted_is_replaced_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsparq.client.consume.discovery.STEADY_S", 0.02)

    async def main() -> None:
        world = World("a:1", reconnect_delay=0.005, max_reconnect_delay=10)
        async with world.running():
            for count in range(1, 8):
                await until(lambda count=count: len(world.opened) == count)
                await asyncio.sleep(0.03)
                lost = asyncio.get_running_loop().time()
                world.lose("a:1")
                await until(lambda count=count: len(world.opened) == count + 1)
                assert asyncio.get_running_loop().time() - lost < 0.1

    run(main())


def test_connect_reports_its_outcome_and_then_keeps_the_connection() -> None:
    async def main() -> None:
        world = World()
        async with world.running() as discovery:
            world.refusing = {"b:1"}
            with pytest.raises(ConnectFailed, match="b:1: refused"):
                await discovery.connect("b:1")
            await asyncio.sleep(0.05)
            assert len(world.attempts) == 1
            await discovery.connect("a:1")
            with pytest.raises(ClientError, match="a:1: already connected"):
                await discovery.connect("a:1")
            world.lose("a:1")
            with pytest.raises(ClientError, match="a:1: already connected"):
                await discovery.connect("a:1")
            await until(lambda: world.connected == {"a:1"})

    run(main())


def test_a_forgotten_address_is_not_reconnected() -> None:
    async def main() -> None:
        world = World("a:1", "b:1")
        world.refusing = {"b:1"}
        async with world.running() as discovery:
            await until(lambda: world.connected == {"a:1"})
            connection = discovery.forget("a:1")
            assert connection is not None
            connection.close()
            assert discovery.forget("b:1") is None
            for address in ("a:1", "b:1"):
                with pytest.raises(ClientError, match="not connected"):
                    discovery.forget(address)
            world.refusing = set()
            count = len(world.attempts)
            await asyncio.sleep(0.1)
            assert (len(world.attempts), world.connected) == (count, set())
            await discovery.connect("a:1")
            await discovery.connect("b:1")

    run(main())


def test_an_address_can_be_forgotten_while_it_connects() -> None:
    async def main() -> None:
        world = World()
        world.stalled = {"a:1"}
        async with world.running() as discovery:
            connecting = asyncio.create_task(discovery.connect("a:1"))
            await until(lambda: world.attempts)
            assert discovery.forget("a:1") is None
            with pytest.raises(ConnectFailed, match="a:1: disconnected"):
                await connecting

    run(main())


@pytest.mark.parametrize("turns", range(8))
def test_a_connect_that_is_cancelled_at_any_moment_leaves_no_connection(turns: int) -> None:
    async def main() -> None:
        world = World()
        async with world.running() as discovery:
            connecting = asyncio.create_task(discovery.connect("a:1"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if connecting.done():
                return
            connecting.cancel()
            await asyncio.wait({connecting})
            await asyncio.sleep(0.05)
            assert world.connected == set()

    run(main())


# Addresses from nsqlookupd


def test_nsqlookupd_is_asked_at_once_and_then_regularly() -> None:
    async def main() -> None:
        world = World(has_lookupd=True, lookupd_poll_interval=0.03)
        async with world.running():
            await until(lambda: world.asked)
            world.known = ["a:1"]
            await until(lambda: world.connected == {"a:1"})
            world.known = ["b:1"]
            await until(lambda: world.connected == {"a:1", "b:1"}, what="what is missing is not disconnected")
            assert world.opened == ["a:1", "b:1"]

    run(main())


def test_the_first_interval_is_longer_by_a_random_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsparq.client.consume.discovery.private_random.uniform", lambda low, high: high)

    async def main() -> None:
        world = World(has_lookupd=True, lookupd_poll_interval=0.05, lookupd_poll_jitter=1)
        async with world.running():
            await until(lambda: len(world.asked) >= 4)
            gaps = [later - before for before, later in pairwise(world.asked)]
            assert gaps[:3] == pytest.approx([0.1, 0.05, 0.05])

    run(main())


def test_nsqlookupd_is_asked_again_when_a_connection_is_lost() -> None:
    async def main() -> None:
        world = World(has_lookupd=True)
        world.known = ["a:1", "b:1"]
        async with world.running():
            await until(lambda: len(world.connected) == 2)
            world.lose("a:1")
            await until(lambda: len(world.connected) == 2)
            assert len(world.asked) == 2

    run(main())


def test_a_lost_broker_is_searched_until_it_is_back() -> None:
    async def main() -> None:
        world = World(has_lookupd=True)
        world.known = ["a:1"]
        async with world.running():
            await until(lambda: world.connected)
            world.refusing = {"a:1"}
            world.lose("a:1")
            await until(lambda: len(world.attempts) >= 4)
            world.refusing = set()
            await until(lambda: world.connected)

    run(main())


def test_a_broker_that_stays_away_is_not_searched_forever() -> None:
    async def main() -> None:
        world = World(has_lookupd=True, reconnect_delay=0.005, max_reconnect_delay=0.02)
        world.known = ["a:1"]
        async with world.running():
            await until(lambda: world.connected)
            world.known = []
            world.lose("a:1")
            await asyncio.sleep(0.3)
            count = len(world.asked)
            assert 3 <= count <= 8
            await asyncio.sleep(0.1)
            assert len(world.asked) == count, "only with the next regular question, a minute later"

    run(main())


def test_a_loss_while_nsqlookupd_is_being_asked_is_not_overlooked() -> None:
    async def main() -> None:
        world = World(has_lookupd=True)
        world.known = ["a:1", "b:1"]
        ask = world.producers

        async with world.running():
            await until(lambda: len(world.connected) == 2)

            async def slow(topic: str) -> AsyncGenerator[list[str] | None, None]:
                async for found in ask(topic):
                    if len(world.asked) == 2:
                        # Another connection is lost while this answer arrives, and another nsqd is
                        # found.
                        world.lose("b:1")
                        world.refusing = {"b:1"}
                    yield found

            world.producers = slow  # type: ignore[method-assign]
            world.lose("a:1")
            await until(lambda: len(world.asked) >= 3)
            world.refusing = set()
            await until(lambda: len(world.connected) == 2)

    run(main())


def test_without_an_answer_nsqlookupd_is_asked_again_soon() -> None:
    async def main() -> None:
        world = World(has_lookupd=True)
        world.known = None
        async with world.running():
            await until(lambda: len(world.asked) >= 4)
            world.known = ["a:1"]
            await until(lambda: world.connected)
            count = len(world.asked)
            await asyncio.sleep(0.1)
            assert len(world.asked) == count

    run(main())


def test_what_a_late_nsqlookupd_knows_is_connected_too() -> None:
    async def main() -> None:
        world = World(has_lookupd=True)
        world.known, world.late = ["a:1"], asyncio.Event()
        async with world.running():
            await until(lambda: world.connected == {"a:1"})
            world.late.set()
            await until(lambda: world.connected == {"a:1", "late:1"})
            assert len(world.asked) == 1

    run(main())


def test_a_silent_nsqlookupd_does_not_delay_the_next_question() -> None:
    async def main() -> None:
        world = World(has_lookupd=True)
        world.known, world.late = ["a:1", "b:1"], asyncio.Event()
        async with world.running():
            await until(lambda: world.connected == {"a:1", "b:1"})
            world.lose("a:1")
            await until(lambda: world.connected == {"a:1", "b:1"})
            # Of the two questions only the last one still waits.
            world.late.set()
            await until(lambda: "late:1" in world.connected)
            assert world.opened.count("late:1") == 1

    run(main())


def test_a_broker_that_only_a_silent_nsqlookupd_knows_stays_connected() -> None:
    async def main() -> None:
        world = World(has_lookupd=True, lookupd_poll_interval=0.03)
        world.known, world.late = ["a:1"], asyncio.Event()
        world.late.set()
        async with world.running():
            await until(lambda: world.connected == {"a:1", "late:1"})
            world.late.clear()
            count = len(world.asked)
            await until(lambda: len(world.asked) == count + 5)
            assert (world.connected, world.opened) == ({"a:1", "late:1"}, ["a:1", "late:1"])

    run(main())


def test_without_an_answer_nobody_knows_whether_the_topic_exists() -> None:
    async def main() -> None:
        world = World(has_lookupd=True)
        world.before_the_answer, world.known, world.late = [None], [], asyncio.Event()
        async with world.running() as discovery:
            assert not discovery.is_ready
            await until(lambda: discovery.is_ready)
            world.late.set()
            await until(lambda: world.connected)
            world.lose("late:1")
            assert not discovery.is_ready, "one that answered late had the topic"
            world.late, world.known, world.before_the_answer = None, None, [None]
            count = len(world.asked)
            await until(lambda: len(world.asked) == count + 3)
            assert not discovery.is_ready, "None is not an answer"

    run(main())


def test_nsqlookupd_is_asked_again_after_an_unexpected_error(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World(has_lookupd=True)
        world.error = ZeroDivisionError()
        async with world.running():
            await until(lambda: len(world.asked) == 3)
            world.error, world.known = None, ["a:1"]
            await until(lambda: world.connected)

    run(main())
    assert "ZeroDivisionError" in caplog.text


def test_a_stalled_broker_does_not_delay_the_others() -> None:
    async def main() -> None:
        world = World(has_lookupd=True, lookupd_poll_interval=0.02)
        world.known, world.stalled = ["slow:1", "a:1"], {"slow:1"}
        async with world.running() as discovery:
            await until(lambda: world.connected == {"a:1"})
            world.known = ["slow:1", "a:1", "b:1"]
            await until(lambda: world.connected == {"a:1", "b:1"})
            assert [address for address, _ in world.attempts].count("slow:1") == 1
            with pytest.raises(ClientError, match="already connected"):
                await discovery.connect("slow:1")

    run(main())


def test_a_broker_that_is_named_and_known_is_connected_once() -> None:
    async def main() -> None:
        world = World("a:1", has_lookupd=True, lookupd_poll_interval=0.01)
        world.known = ["a:1"]
        async with world.running():
            await asyncio.sleep(0.1)
            world.lose("a:1")
            await until(lambda: world.connected)
            await asyncio.sleep(0.1)
            assert world.opened == ["a:1", "a:1"]

    run(main())


def test_stop_ends_all_tasks() -> None:
    async def main() -> None:
        world = World("a:1", "slow:1", has_lookupd=True, lookupd_poll_interval=0.01)
        world.known, world.stalled = ["slower:1"], {"slow:1", "slower:1"}
        async with world.running():
            await until(lambda: len(world.attempts) == 3)
        count = len(world.asked)
        await asyncio.sleep(0.05)
        assert (len(world.asked), world.connected) == (count, {"a:1"})
        await world.discovery.stop()

    run(main())


def test_unexpected_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World("a:1")

        async def fail(address: str) -> FakeConnection:
            raise ZeroDivisionError

        world.discovery._open_connection = fail  # type: ignore[assignment]
        async with world.running():
            await asyncio.sleep(0.02)

    run(main())
    assert "ZeroDivisionError" in caplog.text
