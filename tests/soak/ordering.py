"""An ordered channel under changing consumers: each key in order, one message of it at a time.

    python -m tests.soak.ordering --deliveries 10000000
    python -m tests.soak.ordering --deliveries 300000 --tcp
    python -m tests.soak.ordering --deliveries 100000 --tcp --max-attempts 2

Messages have one of many keys, some keys far more often than others, and a number within their key.
Consumers join, die, requeue with and without a delay, and let messages time out. Without --tcp the
broker runs in this process with a clock of its own, and is also restarted and crashed; a crash may
deliver what was finished since the last checkpoint once more, in order. With --tcp nsqd is a
process of its own, and the consumers are those of the client library. Exit status 1 after a
violation.

Over TCP the consumers have the client library's own limit of attempts, as most clients do. Each
consumer that dies costs the messages that it had an attempt, so some reach the limit. Then the
client finishes such a message without calling its handler, and nsqd sends the next one of the key.
That is no violation: the message counts as done when the client gives it up. A judgement by the
handlers alone takes it for one, because the next message comes and this one is not done.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Hashable
from pathlib import Path

from nsparq.client import Config, Consumer, Message, Producer
from tests.broker.rig import SECOND, Delivered, FakeClient, Rig, parse_frames
from tests.support import BrokerProcess

TOPIC, CHANNEL, ORDERED_BY = "t", "c", "/k"
TIMEOUT_S = 5
BACKLOG = 20_000
"""Unfinished messages, at most."""
CHUNK = 500
"""Messages published at a time."""


def body_of(key: int, number: int) -> bytes:
    return b'{"k":"%07d","n":"%09d"}' % (key, number)


def parse_body(body: bytes) -> tuple[int, int]:
    return int(body[6:13]), int(body[20:29])


Delivery = Delivered | Message


class Keys:
    """What was published and finished of each key, and who has a message of it."""

    def __init__(self, count: int, chance: random.Random) -> None:
        self._chance = chance
        self.published, self.done = [0] * count, [0] * count
        self.unfinished = 0
        self.deliveries = 0
        self._holders: dict[int, tuple[Delivery, Hashable, int]] = {}
        """The delivery, its client, and the time until which the message is the client's."""
        self.violations: list[str] = []
        self._may_go_back: set[int] = set()
        """Keys of which finished messages may come once more, because of a crash."""

    def new_bodies(self) -> list[bytes]:
        count = len(self.published)
        bodies = []
        for _ in range(CHUNK):
            key = int(count * self._chance.random() ** 2)
            bodies.append(body_of(key, self.published[key]))
            self.published[key] += 1
        self.unfinished += CHUNK
        return bodies

    def deliver(self, message: Delivery, client: Hashable, now_ns: int, deadline_ns: int) -> None:
        """Check a delivery, and note it."""
        key, number = parse_body(message.body)
        self.deliveries += 1
        expected = self.done[key]
        if number < expected and key in self._may_go_back:
            self.unfinished += expected - number
            self.done[key] = number
        elif number != expected:
            self.violations.append(f"key {key}: message {number} came, and {expected} is the next one")
        self._may_go_back.discard(key)
        holder = self._holders.get(key)
        if holder is not None and now_ns < holder[2]:
            self.violations.append(f"key {key}: message {number} went to two clients at once")
        self._holders[key] = message, client, deadline_ns

    def is_held(self, message: Delivery, key: int, now_ns: int) -> bool:
        """Whether the client that got this delivery may answer it."""
        holder = self._holders.get(key)
        return holder is not None and holder[0] is message and now_ns < holder[2]

    def finish(self, key: int) -> None:
        del self._holders[key]
        self.done[key] += 1
        self.unfinished -= 1

    def give_back(self, key: int) -> None:
        del self._holders[key]

    def is_out(self, key: int) -> bool:
        """Whether a client has a message of this key. After its connection is lost, a message of
        the client library counts as answered, and nsqd may send it to another client."""
        holder = self._holders.get(key)
        if holder is not None and isinstance(holder[0], Message) and holder[0].is_answered:
            del self._holders[key]
        return key in self._holders

    def lose(self, client: Hashable) -> None:
        """A client is gone."""
        for key in [key for key, holder in self._holders.items() if holder[1] is client]:
            del self._holders[key]

    def lose_all(self, *, is_crash: bool) -> None:
        self._holders.clear()
        if is_crash:
            self._may_go_back = {key for key, number in enumerate(self.done) if number}


class LeanClient(FakeClient):
    """Checks what it gets at once, and forgets what was taken."""

    def __init__(self, run: InProcess) -> None:
        super().__init__(msg_timeout_ms=TIMEOUT_S * 1000)
        self._run = run

    def _keep(self, data: bytes | memoryview) -> None:
        now_ns = self._run.rig.clock()
        for message in parse_frames(bytes(data)):
            self._run.keys.deliver(message, self, now_ns, now_ns + TIMEOUT_S * SECOND)
            self.messages.append(message)

    def take(self) -> list[Delivered]:
        taken, self.messages = self.messages, []
        return taken


class InProcess:
    """The broker without a server."""

    def __init__(self, keys: Keys, chance: random.Random, directory: Path) -> None:
        self.keys, self.chance = keys, chance
        self.rig = Rig(directory, max_bytes_per_file=4 << 20)
        self.rig.channel().ordering.change(ORDERED_BY)
        self.clients: list[LeanClient] = []
        self.events: Counter[str] = Counter()
        self.most_parked = 0

    def run(self, deliveries: int) -> None:
        while (self.keys.deliveries < deliveries or self.keys.unfinished) and not self.keys.violations:
            is_draining = self.keys.deliveries >= deliveries
            if not is_draining and self.keys.unfinished < BACKLOG:
                self.rig.publish(TOPIC, *self.keys.new_bodies())
            if len(self.clients) < 2 or (self.chance.random() < 0.02 and len(self.clients) < 12):
                self.join()
            for client in [*self.clients]:
                self.answer(client, is_draining)
            self.most_parked = max(self.most_parked, len(self.rig.channel().unfinished.parked))
            self.disturb()

    def join(self) -> None:
        client = LeanClient(self)
        self.rig.broker.clients.add(client)
        self.rig.broker.subscribe(client, TOPIC, CHANNEL)
        self.clients.append(client)
        self.events["joined"] += 1
        self.rig.ready(client, self.chance.choice((1, 20, 300, 2500)))

    def answer(self, client: LeanClient, is_draining: bool) -> None:
        keys, now_ns = self.keys, self.rig.clock()
        finished: list[Delivered] = []
        requeued: list[tuple[int, Delivered]] = []
        for message in client.take():
            key, luck = parse_body(message.body)[0], self.chance.random()
            if not keys.is_held(message, key, now_ns):
                continue  # it has timed out
            if is_draining or luck > 0.04:
                finished.append(message)
            elif luck > 0.01:
                requeued.append((key, message))
            else:
                self.events["timed out"] += 1
        for message in finished:
            keys.finish(parse_body(message.body)[0])
        assert self.rig.finish(client, *finished) == []
        for key, message in requeued:
            keys.give_back(key)
            self.events["requeued"] += 1
            self.rig.requeue(client, message, self.chance.choice((0, 0, 100, 3000)))

    def disturb(self) -> None:
        luck = self.chance.random()
        if luck < 0.02:
            client = self.chance.choice(self.clients)
            self.clients.remove(client)
            self.keys.lose(client)
            self.events["died"] += 1
            self.rig.disconnect(client)
        elif luck < 0.12:
            self.rig.pass_time(self.chance.choice((0.1, 1, TIMEOUT_S)))
        elif luck < 0.16:
            self.rig.maintain()
        elif luck < 0.162:
            is_crash = self.chance.random() < 0.5
            self.events["crashes" if is_crash else "restarts"] += 1
            self.clients.clear()
            self.keys.lose_all(is_crash=is_crash)
            self.rig.crash() if is_crash else self.rig.restart()


class OverTcp:
    """nsqd as a process, and the client library. Nothing is lost or doubled here but an answer of a
    consumer that dies, so its last message of a key may come once more."""

    def __init__(self, keys: Keys, chance: random.Random, broker: BrokerProcess, max_attempts: int) -> None:
        self.keys, self.chance = keys, chance
        self.config = Config(max_attempts=max_attempts)
        assert isinstance(broker.address, tuple)
        self.address = "{}:{}".format(*broker.address)
        self.consumers: list[Consumer] = []
        self.events: Counter[str] = Counter()

    async def run(self, deliveries: int) -> None:
        async with Producer(self.address) as producer:
            while (self.keys.deliveries < deliveries or self.keys.unfinished) and not self.keys.violations:
                if self.keys.deliveries < deliveries and self.keys.unfinished < BACKLOG:
                    await producer.publish_many(TOPIC, self.keys.new_bodies())
                if len(self.consumers) < 2 or (self.chance.random() < 0.3 and len(self.consumers) < 8):
                    await self.join()
                if self.chance.random() < 0.1:
                    await self.die()
                await asyncio.sleep(0.02)
        while self.consumers:
            await self.die()

    async def join(self) -> None:
        consumer = Consumer(
            TOPIC, CHANNEL, lambda message: self.handle(consumer, message), nsqd=[self.address],
            concurrency=self.chance.choice((1, 10)), max_in_flight=self.chance.choice((1, 50, 500)),
            on_give_up=lambda message: self.give_up(consumer, message), config=self.config,
        )  # fmt: skip
        self.consumers.append(consumer)
        self.events["joined"] += 1
        await consumer.start()

    async def die(self) -> None:
        """Without answering what it has."""
        consumer = self.consumers.pop(self.chance.randrange(len(self.consumers)))
        self.events["died"] += 1
        await consumer.stop(grace=0)
        self.keys.lose(consumer)

    def receive(self, consumer: Consumer, message: Message) -> int | None:
        """Check a delivery. Gives the key, or None if the message is done and only its answer was
        lost."""
        key, number = parse_body(message.body)
        is_out = self.keys.is_out(key)
        if number == self.keys.done[key] - 1 and message.attempts > 1:
            self.events["answers lost"] += 1
            if is_out:
                self.keys.violations.append(f"key {key}: message {number} came again after the next one")
            return None
        self.keys.deliver(message, consumer, time.monotonic_ns(), 1 << 62)
        return key

    async def give_up(self, consumer: Consumer, message: Message) -> None:
        """The client finishes a message that was tried too often. The handler does not get it."""
        key = self.receive(consumer, message)
        if key is not None:
            self.events["given up"] += 1
            self.keys.finish(key)

    async def handle(self, consumer: Consumer, message: Message) -> None:
        key = self.receive(consumer, message)
        if key is None:
            return
        if self.chance.random() < 0.05:
            await asyncio.sleep(0)
        if message.is_answered:
            return  # the consumer was stopped meanwhile
        if self.chance.random() < 0.03:
            self.keys.give_back(key)
            self.events["requeued"] += 1
            message.requeue(self.chance.choice((0, 0.1)), backoff=False)
        else:
            self.keys.finish(key)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.ordering", description=__doc__)
    parser.add_argument("--deliveries", type=int, default=1_000_000, metavar="N", help="(%(default)s)")
    parser.add_argument("--keys", type=int, default=10_000, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="(%(default)s)")
    parser.add_argument("--tcp", action="store_true", help="nsqd as a process, consumers over TCP")
    parser.add_argument(
        "--max-attempts",
        type=int,
        default=5,
        metavar="N",
        help="of a consumer over TCP (%(default)s)",
    )
    options = parser.parse_args()
    chance = random.Random(options.seed)
    keys = Keys(options.keys, chance)
    start, detail = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="ordering-") as directory:
        if options.tcp:
            with BrokerProcess(Path(directory)) as broker:
                broker.control("create", TOPIC, CHANNEL)
                path = f"/channel/settings?topic={TOPIC}&channel={CHANNEL}"
                broker.request("PUT", path, b'{"ordered_by": "%s"}' % ORDERED_BY.encode()).expect_json()
                over_tcp = OverTcp(keys, chance, broker, options.max_attempts)
                asyncio.run(over_tcp.run(options.deliveries))
                events = over_tcp.events
        else:
            in_process = InProcess(keys, chance, Path(directory))
            in_process.run(options.deliveries)
            in_process.rig.close()
            events = in_process.events
            detail = f", at most {in_process.most_parked:,} parked"
    seconds = time.monotonic() - start
    sys.stdout.write(
        f"{keys.deliveries:,} deliveries of {sum(keys.done):,} messages over {options.keys:,} keys in "
        f"{seconds:.0f} s; {', '.join(f'{count:,} {name}' for name, count in events.items())}{detail}; "
        f"{len(keys.violations)} violations\n"
    )
    sys.stdout.writelines(f"{violation}\n" for violation in keys.violations[:20])
    return 1 if keys.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
