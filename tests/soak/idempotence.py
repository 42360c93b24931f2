"""Idempotent publishing under cut connections and kills: every message is stored once, and no
publish raises.

    python -m tests.soak.idempotence --cuts 1000 --kills 20

Producers publish through proxies that cut each connection after a random number of bytes, in the
middle of commands and of answers. From time to time an nsqd is killed with SIGKILL and started
again. In the end every message must be in the topics exactly once, over all nsqds, and every
publish must have returned without an error. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from nsparq.addresses import join_address
from nsparq.client import Config, Producer
from nsparq.testing import FaultProxy
from tests.soak.support import free_ports
from tests.support import BrokerProcess

TOPIC, CHANNEL = "t", "all"
TASKS = 20
"""Publishes that are on their way at a time."""
HANDSHAKE = {"to_broker": 700, "to_client": 700}
"""Bytes of a new connection before the first publish and its answer, or a little more."""
PUBLISHING = {"to_broker": 8000, "to_client": 300}
"""Bytes after that, at most, before a connection is cut: some dozens of publishes."""
STUCK_S = 120.0


@dataclass(slots=True)
class Result:
    published: list[bytes] = field(default_factory=list)
    """Bodies whose publish has returned."""
    errors: list[str] = field(default_factory=list)
    """Publishes that raised."""
    stored: Counter[bytes] = field(default_factory=Counter)
    repeated: int = 0
    """Messages that an nsqd has recognised, before its last kill too."""
    cuts: int = 0
    """Connections that were cut."""

    @property
    def lost(self) -> set[bytes]:
        return {*self.published} - self.stored.keys()

    @property
    def doubled(self) -> list[bytes]:
        return [body for body, count in self.stored.items() if count > 1]

    @property
    def is_good(self) -> bool:
        return not (self.errors or self.lost or self.doubled) and self.repeated > 0

    def __str__(self) -> str:
        return (
            f"{self.cuts} connections cut, {len(self.published):,} messages published, "
            f"{self.repeated:,} repeats recognised, {len(self.errors)} errors, {len(self.lost)} lost, "
            f"{len(self.doubled)} doubled"
        )


class Node:
    """An nsqd behind a proxy."""

    def __init__(self, directory: Path, durability: str) -> None:
        tcp, http = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.broker = BrokerProcess(
            directory, tcp_address=tcp, http_address=http, https_address="", durability=durability
        )
        self.broker.control("create", TOPIC, CHANNEL)
        self.proxy = FaultProxy(join_address(*self.broker.address))  # type: ignore[misc]

    def close(self) -> None:
        self.proxy.close()
        self.broker.close()

    def repeated(self) -> int:
        found: int = self.broker.topic_stats(TOPIC)["repeated_count"]  # type: ignore[index]
        return found

    def stored(self) -> Counter[bytes]:
        found: Counter[bytes] = Counter()
        depth = self.broker.channel_stats(TOPIC, CHANNEL)["depth"]  # type: ignore[index]
        with self.broker.connect() as connection:
            connection.sub(TOPIC, CHANNEL, rdy=2500)
            for _ in range(depth):
                message = connection.read_message()
                found[message.body] += 1
                connection.fin(message.id)
        return found


async def publish(producer: Producer, number: int, result: Result, stopping: asyncio.Event) -> None:
    """One task: one publish after the other, single ones and batches."""
    count = 0
    while not stopping.is_set():
        size = 1 + 4 * (count % 3 == 0)
        bodies = [b"%d-%d" % (number, count + index) for index in range(size)]
        count += size
        try:
            if size > 1:
                await producer.publish_many(TOPIC, bodies, headers={"tenant": "a"})
            else:
                await producer.publish(TOPIC, bodies[0])
        except Exception as error:
            result.errors.append(repr(error))
        result.published += bodies


async def disturb(nodes: list[Node], cuts: int, kills: int, chance: random.Random, result: Result) -> None:
    kill_at = {cuts * (number + 1) // (kills + 1) for number in range(kills)}
    while result.cuts < cuts:
        for node in nodes:
            direction = chance.choice(("to_broker", "to_client"))
            node.proxy.heal()
            count = HANDSHAKE[direction] + chance.randrange(PUBLISHING[direction])
            node.proxy.cut_after(count, direction, reset=chance.random() < 0.5)  # type: ignore[arg-type]
        before = result.cuts
        while result.cuts < before + 5:
            await asyncio.sleep(0.005)
            result.cuts = sum(node.proxy.accepted_count - node.proxy.connection_count for node in nodes)
        if kill_at & {*range(before, result.cuts)}:
            node = chance.choice(nodes)
            result.repeated += node.repeated()
            node.broker.kill()
            # Meanwhile the producers try the other nsqd, or wait.
            await asyncio.sleep(chance.uniform(0, 0.5))
            await asyncio.to_thread(node.broker.start)


async def publish_under_faults(
    nodes: list[Node], cuts: int, kills: int, chance: random.Random, result: Result
) -> None:
    stopping = asyncio.Event()
    config = Config(publish_timeout=STUCK_S, reconnect_delay=0.01, max_reconnect_delay=0.1)
    async with Producer(*(node.proxy.address for node in nodes), idempotent=True, config=config) as producer:
        tasks = [asyncio.create_task(publish(producer, number, result, stopping)) for number in range(TASKS)]
        await disturb(nodes, cuts, kills, chance, result)
        for node in nodes:
            node.proxy.heal()
        stopping.set()
        await asyncio.wait_for(asyncio.gather(*tasks), STUCK_S)


def run(
    directory: Path, *, cuts: int, kills: int, nodes: int = 1, seed: int = 1, durability: str = "os"
) -> Result:
    result = Result()
    with ExitStack() as stack:
        running = []
        for number in range(nodes):
            (directory / str(number)).mkdir()
            running.append(Node(directory / str(number), durability))
            stack.callback(running[-1].close)
        asyncio.run(publish_under_faults(running, cuts, kills, random.Random(seed), result))
        for node in running:
            result.repeated += node.repeated()
            result.stored += node.stored()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.idempotence", description=__doc__)
    parser.add_argument("--cuts", type=int, default=1000, metavar="N", help="connections cut (%(default)s)")
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="of nsqd (%(default)s)")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="nsqds (%(default)s)")
    parser.add_argument("--durability", default="os", help="of the topics (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the faults (%(default)s)")
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="idempotence-") as directory:
        result = run(Path(directory), **options)
    sys.stdout.write(f"{options['kills']} kills, {result}\n")
    return 0 if result.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
