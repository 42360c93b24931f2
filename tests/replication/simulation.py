"""A whole cluster under one seeded scheduler: real brokers, storage and replication code, with a
simulated network, coordinator, threads, clocks and disks that fail.

run_seed() gives what happened, and raises Violation if a promise is broken:

- What was acknowledged and not finished reaches a consumer of the primary in the end.
- No id names two bodies.
- What was finished, and is in a checkpoint that is safe, does not come back.
- A transaction is published whole, and once.
- When all faults have ended, a primary serves, and all nodes are in sync.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

from nsparq.broker.broker import Broker
from nsparq.errors import NsparqError
from nsparq.replication.node import Node, NodeSettings, NotPossible
from tests.broker.rig import SECOND, FakeClient
from tests.faults.power_cut import _stored
from tests.replication.sim_loop import PROCESS, Killed, Network, Process, SimLoop
from tests.replication.sim_parts import (
    COORDINATOR,
    LEASE_S,
    WORLDS,
    Record,
    SimCoordinator,
    SimFiles,
    SimPrimaryFiles,
)
from tests.replication.sim_serving import CHANNEL, TOPIC, Serving

logger = logging.getLogger(__name__)

WALL_NS = 1_700_000_000 * SECOND


class Violation(AssertionError):
    """A promise is broken."""


@dataclass
class Outcome:
    acknowledged: int
    commits: int
    takeovers: int
    faults: Counter[str] = field(default_factory=Counter)
    joined: int = 0


class World:
    def __init__(self, seed: int, directory: Path) -> None:
        self.chance = random.Random(seed)
        self.durability = "fsync" if seed % 4 == 0 else "os"
        self.directory = directory
        # The order of a set may differ between two runs. So that the same faults come all the same,
        # they have numbers of their own.
        self._fate = random.Random(f"faults {seed}")
        self.ids = random.Random(seed)
        self.network = Network(random.Random(f"network {seed}"))
        self.loop = SimLoop(self.network)
        self.record = Record(self.loop.time)
        self.names = "abc" if seed % 3 == 0 else "ab"
        self.snapshot_rate = self.chance.choice([3e4, 1e6])
        self.full: set[str] = set()
        self.slowed: set[str] = set()
        """Nodes whose disk was ever slow."""
        self.processes: dict[str, Process] = {}
        self.serving: dict[str, Serving] = {}
        self.faults: Counter[str] = Counter()
        self.acknowledged: set[bytes] = set()
        self.finished: set[bytes] = set()
        self.commits: dict[int, tuple[dict[str, list[bytes]], bool]] = {}
        self.takeovers = 0
        self._settled: set[bytes] = set()
        self._bodies: dict[int, bytes] = {}
        """By message id."""
        self._skew_ns = {name: self.chance.randint(-SECOND, SECOND) for name in self.names}
        self._published = 0
        self._found: list[str] = []

    def wall_ns(self, name: str = "") -> int:
        return WALL_NS + round(self.loop.time() * SECOND) + self._skew_ns.get(name, 0)

    # what must hold

    def _violate(self, text: str) -> None:
        self._found.append(f"{text} at {self.loop.time():.3f} s")

    def check_takeover(self, broker: Broker) -> None:
        self.takeovers += 1
        for number, (parts, is_acknowledged) in self.commits.items():
            counts = [
                Counter(_stored(broker.topics[name].log))[body] for name in parts for body in parts[name]
            ]
            if {*counts} > {0} or max(counts) > 1 or (is_acknowledged and 0 in counts):
                self._violate(f"transaction {number} has its messages {counts} times")

    def settle(self, bodies: list[bytes], error: Exception | None) -> None:
        if error is None:
            self._settled |= {*bodies}

    def committed(self, number: int, error: Exception | None) -> None:
        if error is None:
            self.commits[number] = (self.commits[number][0], True)

    def delivered(self, message_id: int, body: bytes, epoch: int) -> None:
        assert self.record.found is not None
        if self._bodies.setdefault(message_id, body) != body:
            self._violate(f"id {message_id:x} names two bodies")
        # A primary that is cut off may deliver what another one has.
        if body in self._settled and epoch == self.record.found.membership.epoch:
            self._violate(f"{body!r} was finished, and is back")

    # what happens

    def start(self, name: str) -> None:
        process = self.processes[name] = Process(name)
        context = copy_context()
        context.run(PROCESS.set, process)
        self.loop.create_task(self._run_node(process), context=context)

    async def _run_node(self, process: Process) -> None:
        root = self.directory / process.name
        root.mkdir(exist_ok=True)
        settings = NodeSettings(
            cluster="sim", name=process.name, root=root, secret=b"secret", listen=(process.name, 1),
            address=f"{process.name}:1", lease_s=LEASE_S, snapshot_rate=self.snapshot_rate,
        )  # fmt: skip
        node = Node(settings, SimCoordinator(self), lambda node, primary: Serving(self, node, primary))
        try:
            await node.run()
        except (NsparqError, OSError) as error:
            logger.warning("%s ends: %r", process.name, error)
            # As the daemon does: the process ends, and its supervisor starts it again.
            self.kill(process)
        except Exception as error:
            if not self.loop.is_ending:
                self._violate(f"{process.name} has ended with {error!r}")

    def kill(self, process: Process) -> None:
        """Its process ends, or its machine: then nobody tells its peers."""
        self.loop.kill(process, is_silent=self.chance.random() < 0.5)
        self.serving.pop(process.name, None)
        for fd in process.fds:
            os.close(fd)
        process.fds.clear()

    async def _clients(self) -> None:
        while True:
            await asyncio.sleep(self.chance.uniform(0.005, 0.15))
            able = [
                one
                for one in self.serving.values()
                if one.process and self.loop.now >= one.process.paused_until
            ]
            if not able:
                continue
            serving = self.chance.choice(able)
            self._published += 1
            size = self.chance.choice([10, 10, 200])
            bodies = [
                b"%d-%d-" % (self._published, n) + b"." * size for n in range(self.chance.randint(1, 4))
            ]
            acts: list[tuple[Callable[..., None], list[Any]]] = [
                (serving.publish, [bodies]), (serving.publish, [bodies]), (serving.consume, []),
                (serving.commit, [self._published]),
            ]  # fmt: skip
            act, arguments = self.chance.choices(acts, [6, 6, 6, 1])[0]
            try:
                serving.context.copy().run(act, *arguments)
            except Killed:
                pass

    async def _nemesis(self) -> None:
        for _ in range(self._fate.randint(4, 9)):
            await asyncio.sleep(self._fate.uniform(0.2, 3.0))
            fault = self._fate.choice(
                [self._kill, self._kill, self._cut, self._cut, self._pause, self._slow, self._fill,
                 self._away, self._switch]
            )  # fmt: skip
            self.faults[fault.__name__] += 1
            fault(self._fate.choice(self.names))

    def _later(self, seconds: tuple[float, float], act: Callable[[], object]) -> None:
        self.loop.call_later(self._fate.uniform(*seconds), act)

    def _kill(self, name: str) -> None:
        process = self.processes[name]
        if process.is_alive and self._fate.random() < 0.7:
            process.calls_left = self._fate.randint(0, 60)
        elif process.is_alive:
            self.kill(process)

        def restart() -> None:
            if process.is_alive:
                self.kill(process)
            if self.processes[name] is process:
                self.start(name)

        self._later((0.5, 5.0), restart)

    def _cut(self, name: str) -> None:
        other = self._fate.choice([one for one in (*self.names, COORDINATOR) if one != name])
        ways = self._fate.choice([{(name, other)}, {(other, name)}, {(name, other), (other, name)}])
        self.network.cut |= ways
        self._later((0.3, 8.0), lambda: self.network.cut.difference_update(ways))

    def _away(self, name: str) -> None:
        ways = {way for one in self.names for way in ((one, COORDINATOR), (COORDINATOR, one))}
        self.network.cut |= ways
        self._later((0.5, 5.0), lambda: self.network.cut.difference_update(ways))

    def _pause(self, name: str) -> None:
        process = self.processes[name]
        process.paused_until = float("inf")
        self._later((0.2, 8.0), lambda: self.loop.resume(process))

    def _slow(self, name: str) -> None:
        self.slowed.add(name)
        self.loop.disk_delay_s[name] = self._fate.choice([0.02, 0.5, 7.0])
        self._later((0.5, 6.0), lambda: self.loop.disk_delay_s.pop(name, None))

    def _fill(self, name: str) -> None:
        self.full.add(name)
        self._later((0.5, 4.0), lambda: self.full.discard(name))

    def _switch(self, name: str) -> None:
        for serving in [*self.serving.values()]:
            try:
                serving.context.copy().run(serving.node.switch_over)
            except NotPossible:
                pass

    async def run(self) -> None:
        for name in self.names:
            self.start(name)
        clients = asyncio.create_task(self._clients())
        await self._nemesis()
        await asyncio.sleep(self._fate.uniform(0.0, 4.0))
        clients.cancel()
        # All faults end.
        self.network.cut.clear()
        self.full.clear()
        self.loop.disk_delay_s.clear()
        for name, process in [*self.processes.items()]:
            self.loop.resume(process)
            process.calls_left = None
            if not process.is_alive:
                self.start(name)
        for _ in range(600):
            await asyncio.sleep(0.2)
            for name in self.names:
                if not self.processes[name].is_alive:
                    self.start(name)
            if self._found or self._is_whole():
                break
        else:
            self._violate("the cluster does not come to rest")
        if not self._found:
            await self._drain()

    def _is_whole(self) -> bool:
        found = self.record.found
        if found is None or found.membership.in_sync != frozenset(self.names):
            return False
        return found.membership.primary in self.serving

    async def _drain(self) -> None:
        """Everything that was acknowledged reaches a consumer."""
        assert self.record.found is not None
        for _ in range(400):
            if not self.acknowledged - self.finished:
                return
            await asyncio.sleep(0.05)
            serving = self.serving.get(self.record.found.membership.primary)
            if serving is not None:
                serving.context.copy().run(serving.consume)
                serving.context.copy().run(self._time_out, serving)
        lost = self.acknowledged - self.finished
        self._violate(f"{len(lost)} acknowledged messages are lost: {min(lost)!r}")

    def _time_out(self, serving: Serving) -> None:
        """What the consumer did not finish is requeued, as when it disconnects."""
        channel = serving.client.channel
        if channel is not None and self.chance.random() < 0.2:
            channel.remove_client(serving.client)
            serving.client = FakeClient()
            serving.broker.subscribe(serving.client, TOPIC, CHANNEL)

    def close(self) -> None:
        """End all tasks, without any effect."""
        for process in self.processes.values():
            if process.is_alive:
                self.kill(process)
        self.loop.is_ending = True
        for process in self.loop.killed:
            self.loop.resume(process)
        for _ in range(20):
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call_later(10.0, self.loop.stop)
            self.loop.run_forever()
        self.loop.close()

    def verdict(self) -> Outcome:
        if self._found:
            raise Violation("; ".join(self._found[:3]))
        for error in self.loop.errors:
            exception = error.get("exception")
            if exception is not None and not isinstance(exception, Killed):
                raise Violation(f"{error.get('message')}: {exception!r}") from exception
        commits = sum(is_acknowledged for _, is_acknowledged in self.commits.values())
        return Outcome(len(self.acknowledged), commits, self.takeovers - 1, self.faults)


@contextmanager
def _patched(world: World) -> Iterator[None]:
    with ExitStack() as stack:
        for target, value in {
            "nsparq.replication.primary.PrimaryFiles": SimPrimaryFiles,
            "nsparq.replication.node.Files": SimFiles,
            "nsparq.replication.node.monotonic": world.loop.time,
            "uuid.uuid4": lambda: UUID(int=world.ids.getrandbits(128)),
            "nsparq.replication.primary.Primary._wait": lambda self, event: SimLoop.wait(event),
        }.items():
            stack.enter_context(patch(target, value))
        yield


def run_seed(seed: int, directory: Path) -> Outcome:
    """Raises Violation."""
    directory.mkdir()
    world = World(seed, directory)
    WORLDS.append(world)
    with _patched(world):
        try:
            world.loop.run_until_complete(world.run())
        finally:
            errors = [*world.loop.errors]
            world.close()
            world.loop.errors = errors
            WORLDS.pop()
    return world.verdict()
