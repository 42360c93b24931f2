"""The disk of a simulated node, and what it sees of the coordinator."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any, Protocol

from nsparq.replication.coordinator import Found, NoAnswer, State
from nsparq.replication.membership import Membership
from nsparq.replication.recording import PrimaryFiles
from nsparq.storage.files import Buffer, Files
from tests.replication.sim_loop import PROCESS, Killed, Network, Process, SimLoop

LEASE_S = 2.0
COORDINATOR = "k"


class World(Protocol):
    """What they need of it."""

    chance: random.Random
    network: Network
    loop: SimLoop
    record: Record
    full: set[str]

    def kill(self, process: Process) -> None: ...
    def wall_ns(self, name: str = "") -> int: ...


WORLDS: list[World] = []
"""The last one is the present one."""


class SimFiles(Files):
    """The disk of a process. It may be full, and the process may die at any call that changes it,
    in the middle of a write."""

    def __init__(self) -> None:
        super().__init__()
        process = PROCESS.get()
        assert process is not None
        self._process = process
        self._world = WORLDS[-1]

    def _check(self) -> None:
        if not self._process.is_alive:
            raise Killed

    def _change(self, torn: Callable[[], None] = lambda: None) -> None:
        self._check()
        process = self._process
        if process.calls_left is not None:
            process.calls_left -= 1
            if process.calls_left < 0:
                torn()
                self._world.kill(process)
                raise Killed

    def _opened(self, fd: int) -> int:
        self._process.fds.add(fd)
        return fd

    def open(self, path: Path) -> int:
        self._change()
        return self._opened(super().open(path))

    def open_read(self, path: Path) -> int:
        self._check()
        return self._opened(super().open_read(path))

    def duplicate(self, fd: int) -> int:
        self._check()
        return self._opened(super().duplicate(fd))

    def lock_directory(self, path: Path) -> int:
        return self._opened(super().lock_directory(path))

    def close(self, fd: int) -> None:
        if self._process.is_alive and fd in self._process.fds:
            self._process.fds.discard(fd)
            super().close(fd)

    def read(self, fd: int, size: int, position: int) -> bytes:
        self._check()
        return super().read(fd, size, position)

    def write(self, fd: int, buffers: Sequence[Buffer], position: int) -> None:
        data = b"".join(buffers)

        def write_part() -> None:
            os.pwrite(fd, data[: self._world.chance.randint(0, len(data))], position)

        self._change(write_part)
        if self._process.name in self._world.full:
            write_part()
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(fd, [data], position)
        # The order of a snapshot depends on it.
        now_ns = self._world.wall_ns()
        os.utime(fd, ns=(now_ns, now_ns))

    def truncate(self, fd: int, size: int) -> None:
        self._change()
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._check()

    def sync_directory(self, path: Path) -> None:
        self._check()

    def allocate(self, path: Path, size: int) -> None:
        self._change()

    def unlink(self, path: Path) -> None:
        self._change()
        super().unlink(path)

    def rename(self, source: Path, target: Path) -> None:
        self._change()
        super().rename(source, target)

    def make_directory(self, path: Path) -> None:
        self._change()
        super().make_directory(path)

    def remove_tree(self, path: Path) -> None:
        self._change()
        super().remove_tree(path)


class SimPrimaryFiles(PrimaryFiles, SimFiles):
    pass


class SimCoordinator:
    """What one process sees of the coordinator. A request or its answer may be lost, and a request
    may arrive when nobody waits for it any more."""

    def __init__(self, world: World) -> None:
        self._world = world
        process = PROCESS.get()
        assert process is not None
        self._name = process.name

    async def _ask(self, act: Callable[[], Any]) -> Any:
        world, network = self._world, self._world.network
        await asyncio.sleep(network.delay())
        if network.is_cut(self._name, COORDINATOR):
            if world.chance.random() < 0.3:
                context = copy_context()
                context.run(PROCESS.set, None)
                world.loop.call_later(world.chance.uniform(0.5, 4.0), act, context=context)
            await asyncio.sleep(1.0)
            raise NoAnswer("the coordinator does not answer")
        answer = act()
        await asyncio.sleep(network.delay())
        if network.is_cut(COORDINATOR, self._name):
            await asyncio.sleep(1.0)
            raise NoAnswer("the coordinator does not answer")
        return answer

    async def observe(self) -> State:
        state: State = await self._ask(self._world.record.observe)
        return state

    async def compare_and_set(self, version: int, wanted: Membership) -> Found | None:
        found: Found | None = await self._ask(lambda: self._world.record.compare_and_set(version, wanted))
        return found

    async def keep_alive(self, name: str) -> None:
        await self._ask(lambda: self._world.record.keep_alive(name))

    async def release(self) -> None:
        await self._ask(lambda: self._world.record.release(self._name))

    def close(self) -> None:
        pass


class Record:
    """What the coordinator has."""

    def __init__(self, time: Callable[[], float]) -> None:
        self.found: Found | None = None
        self._alive, self._until = "", 0.0
        self._time = time

    def observe(self) -> State:
        return State(self.found, self._alive if self._time() < self._until else "")

    def compare_and_set(self, version: int, wanted: Membership) -> Found | None:
        if version != (self.found.version if self.found is not None else 0):
            return None
        self.found = Found(Membership.from_json(wanted.to_json()), version + 1)
        return self.found

    def keep_alive(self, name: str) -> None:
        self._alive, self._until = name, self._time() + LEASE_S

    def release(self, name: str) -> None:
        if self._alive == name:
            self._alive = ""
