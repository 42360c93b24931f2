"""A broker on a simulated primary, and its clients."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import Any

from nsparq.broker.broker import Broker
from nsparq.broker.transaction import Transaction
from nsparq.errors import NsparqError
from nsparq.options import NsqdOptions
from nsparq.packed import PackedBodies
from nsparq.replication.node import Node
from nsparq.replication.primary import Primary
from tests.broker.rig import SECOND, FakeClient, publish
from tests.replication.sim_loop import PROCESS

TOPIC, CHANNEL, LEDGERS = "t", "x", ("u", "v")
"""Messages for a consumer, and the topics of transactions, which nobody reads."""


class Replicas:
    def __init__(self, primary: Primary) -> None:
        self.when_safe = primary.when_safe

    def check(self) -> None:
        pass


class Serving:
    """What nsqd is to a node, and its clients."""

    def __init__(self, world: Any, node: Node, primary: Primary) -> None:
        self._world = world
        self.node, self.primary = node, primary
        self.process = PROCESS.get()
        self.context = copy_context()
        self.broker: Broker
        self.client = FakeClient()
        self.finished: list[bytes] = []
        """Since the last upkeep."""
        self._upkeep: asyncio.Task[None] | None = None

    async def start(self) -> None:
        world, loop = self._world, self._world.loop
        options = NsqdOptions(
            data_path=str(self.node.settings.root), durability=world.durability, node_id=5,
            max_bytes_per_file=1500, mem_queue_size=20, sync_timeout=2.0,
        )  # fmt: skip
        self.broker = Broker(
            options,
            files=self.primary.files,
            wall_ns=lambda: world.wall_ns(self.node.settings.name),
            monotonic_ns=lambda: round(loop.time() * SECOND) + SECOND,
            wake=lambda: loop.call_soon(self._turn),
            background=loop.in_thread,
            replicas=Replicas(self.primary),
        )
        self.broker.open()
        for transaction in self.broker.transactions.unfinished():
            self._finish(transaction)
        channel = self.broker.get_topic(TOPIC).get_channel(CHANNEL)
        for name in LEDGERS:
            self.broker.get_topic(name)
        world.check_takeover(self.broker)
        self.broker.subscribe(self.client, TOPIC, channel.name)
        world.serving[self.node.settings.name] = self
        self._upkeep = loop.create_task(self._keep_up())

    async def stop(self) -> None:
        self._world.serving.pop(self.node.settings.name, None)
        if self._upkeep is not None:
            self._upkeep.cancel()
        self.broker.close()

    def _turn(self) -> None:
        self.broker.turn()

    async def _keep_up(self) -> None:
        earlier: list[bytes] = []
        while True:
            await asyncio.sleep(1.0)
            assert self.process is not None
            is_done = not self.process.background and self.process.name not in self._world.full
            self.broker.maintain()
            # The files of this upkeep have what was finished before the one before.
            ready, earlier, self.finished = earlier, self.finished, []
            if self.broker.health.errors or not is_done:
                # A checkpoint has failed, or takes long.
                ready = earlier = []
            # Checkpoints that took long are rarer from then on.
            if ready and self.process.name not in self._world.slowed:
                self.primary.when_safe(lambda error, ready=ready: self._world.settle(ready, error))

    # clients

    def publish(self, bodies: list[bytes]) -> None:
        def done(error: Exception | None) -> None:
            if error is None:
                self._world.acknowledged |= {*bodies}

        try:
            publish(self.broker, TOPIC, bodies, done)
        except (NsparqError, OSError):
            pass  # refused

    def commit(self, number: int) -> None:
        transactions = self.broker.transactions
        parts = {name: [b"%s-%d-%d" % (name.encode(), number, n) for n in range(2)] for name in LEDGERS}
        self._world.commits[number] = (parts, False)
        try:
            for name, bodies in parts.items():
                transactions.stage("p", number, name, name, PackedBodies.of(bodies))
            transaction = transactions.promise("p", number, dict.fromkeys(parts, 2))
            transactions.decide(transaction)
            transaction.write_promise(sync=False)
            self._finish(transaction)
        except (NsparqError, OSError):
            return  # refused, or left to the next start
        self.primary.when_safe(lambda error: self._world.committed(number, error))

    def _finish(self, transaction: Transaction) -> None:
        """As nsqd does, but without waiting for syncs: no node loses power here."""
        transactions = self.broker.transactions
        for chunk in transaction.chunks[transaction.applied :]:
            transactions.apply(transaction, chunk, chunk.read(self.broker.files))
        committed = transactions.write_committed(transaction, sync=False, remember_s=1000)
        transactions.finish(transaction, committed)

    def consume(self) -> None:
        channel, world = self.client.channel, self._world
        if channel is None:
            return
        channel.set_ready(self.client, 10)
        self.broker.turn()
        for message in self.client.take():
            world.delivered(message.id, message.body, self.primary.acknowledging.membership.epoch)
            if world.chance.random() < 0.7:
                self.finished.append(message.body)
                world.finished.add(message.body)
                span = [(message.id, message.id + 1)]
                channel.delivery.finish(self.client, span, self.broker.monotonic_ns())
