"""Random lives of a broker on a recorded disk, and what docs/guarantees.md promises after a power
cut.

A life notes facts: what a client asked for, the calls to the disk before the request and before its
answer. A fact *holds* after a cut if its answer was there before it, and under `os` also older than
--sync-timeout. A request that was made, and whose answer is not there or too young, may hold or
not.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nsparq.broker.broker import Broker
from nsparq.broker.transaction import Transaction
from nsparq.errors import CorruptBatch
from nsparq.headers import ORIGIN, encode_headers
from nsparq.options import NsqdOptions
from nsparq.packed import PackedBodies
from nsparq.storage.files import Files
from tests.broker.rig import SECOND, Clock, FakeClient, Later, Receipt, publish
from tests.support.power_cut import MODELS, RecordedFiles, cut

DURABILITIES = ("fsync", "os")
TOPICS = ("a", "b")
CHANNELS = ("x", "y")
PRODUCER = "p"
SYNC_TIMEOUT = 2.0
FLAGS: dict[str, Any] = {
    "node_id": 5, "max_bytes_per_file": 1500, "mem_queue_size": 20, "sync_timeout": SYNC_TIMEOUT,
    "retention_bytes": 6000,
}  # fmt: skip


class QuickFiles(Files):
    """The disk of the checks after a cut: nothing is synced."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


@dataclass
class Fact:
    kind: str
    topic: str = ""
    channel: str = ""
    begun: int = 0
    """Calls to the disk before the request."""
    done: int | None = None
    """Calls before the answer; None if there was no answer."""
    bodies: list[bytes] = field(default_factory=list)
    parts: dict[str, list[bytes]] = field(default_factory=dict)
    """Messages of a transaction, by topic."""
    value: Any = None
    blocks: list[bytes] = field(default_factory=list)
    """Header blocks with the numbers of an idempotent producer, if it is one."""
    position: int = 0
    """End of the log before a publish."""

    def __str__(self) -> str:
        place = ":".join(filter(None, (self.topic, self.channel)))
        return f"{self.kind} {place} {self.value if self.value is not None else ''}".strip()


class Seen(NamedTuple):
    """A message that a consumer got."""

    moment: int
    topic: str
    id: int
    body: bytes


class Life:
    """A broker with random clients, on a disk that records every call."""

    def __init__(self, path: Path, durability: str, chance: random.Random) -> None:
        path.mkdir()
        self.path = path
        self.durability = durability
        self.clock = Clock()
        self.files = self.new_files()
        self.facts: list[Fact] = []
        self.seen: list[Seen] = []
        self.broker: Broker
        self._chance = chance
        self._later = Later()
        self._clients: dict[tuple[str, str], FakeClient] = {}
        self._unfinished: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
        self._number = 0
        self._sequence = 0
        self._maintained_ns = 0
        self.start()

    def new_files(self) -> Any:
        """Files with `now()`, the number of calls so far, and `times`, the time of each."""
        return RecordedFiles(self.path, self.clock)

    def start(self) -> None:
        options = NsqdOptions(data_path=str(self.path), durability=self.durability, **FLAGS)
        self.broker = Broker(
            options,
            files=self.files,
            wall_ns=self.clock.wall,
            monotonic_ns=self.clock,
            background=self._later,
        )
        self.broker.open()

    def live(self, steps: int) -> None:
        """Take some steps, and end without a stop."""
        self.step(steps)
        drop(self.broker)

    def step(self, steps: int) -> None:
        actions: dict[Callable[[], None], int] = {
            self.publish: 12, self.repeat: 4, self.consume: 8, self.create_channel: 3, self.delete_channel: 1,
            self.delete_topic: 1, self.pause_channel: 1, self.pause_topic: 1, self.empty: 1, self.seek: 1,
            self.commit: 3, self.settings: 1, self.restart: 1, self.wait: 4,
        }  # fmt: skip
        for _ in range(steps):
            (action,) = self._chance.choices([*actions], [*actions.values()])
            action()
            self._rest()

    def _rest(self) -> None:
        """A little time passes. Background work is done; with `fsync`, not always at once."""
        self.broker.turn()
        self.clock.advance(self._chance.choice([0.001, 0.05, 0.4]))
        if self.clock() - self._maintained_ns >= SECOND:
            self._maintain()
        if self.durability == "os" or self._chance.random() < 0.7:
            self._later.run_all()
        self._take()

    def _maintain(self) -> None:
        self._maintained_ns = self.clock()
        self.broker.maintain()
        if self.durability == "os":
            self._later.run_all()

    def _take(self) -> None:
        """Note the messages that consumers received."""
        for place, client in self._clients.items():
            for message in client.take():
                self._unfinished.setdefault(place, []).append((message.id, message.body))
                self.seen.append(Seen(self.files.now(), place[0], message.id, message.body))

    def _fact(self, kind: str, topic: str = "", channel: str = "", **more: Any) -> Fact:
        fact = Fact(kind, topic, channel, self.files.now(), **more)
        self.facts.append(fact)
        return fact

    def _new_bodies(self, topic: str) -> list[bytes]:
        size = self._chance.choice([10, 10, 200])
        count = self._chance.randint(1, 6)
        self._number += count
        numbers = range(self._number - count, self._number)
        return [b"%s-%d-" % (topic.encode(), number) + b"." * size for number in numbers]

    def _topic(self) -> str:
        return self._chance.choice(TOPICS)

    def _place(self) -> tuple[str, str] | None:
        """An existing channel."""
        found = [(t.name, c) for t in self.broker.topics.values() for c in t.channels]
        return self._chance.choice(found) if found else None

    # what clients do

    def wait(self) -> None:
        for _ in range(self._chance.randint(1, 4)):
            self.clock.advance(1.0)
            self._maintain()

    def publish(self) -> None:
        name = self._topic()
        fact = self._fact("publish", name, bodies=self._new_bodies(name))
        if self._chance.random() < 0.5:
            fact.blocks = [_numbered(body) for body in fact.bodies]
        fact.position = self.broker.get_topic(name).log.end
        self._publish(fact)

    def repeat(self) -> None:
        """An idempotent producer sends something again, whether it has the answer or not."""
        if facts := repeatable(self.facts):
            self._publish(self._chance.choice(facts))

    def _publish(self, fact: Fact) -> None:
        def done(error: Exception | None) -> None:
            if error is None and fact.done is None:
                fact.done = self.files.now()

        publish(self.broker, fact.topic, fact.bodies, done, blocks=fact.blocks)

    def create_channel(self) -> None:
        name, channel = self._topic(), self._chance.choice(CHANNELS)
        if name in self.broker.topics and channel in self.broker.topics[name].channels:
            return
        self.broker.turn()
        fact = self._fact("create", name, channel)
        self.broker.get_topic(name).get_channel(channel)
        self._answer(fact)

    def _answer(self, fact: Fact) -> None:
        """As the HTTP API does: when nsqd.dat is on disk."""

        def done(error: OSError | None) -> None:
            fact.done = self.files.now()

        self.broker.changes.when_durable(done)

    def consume(self) -> None:
        place = self._place()
        if place is None:
            return
        client = self._clients.get(place)
        if client is None or client.channel is None:
            client = self._clients[place] = FakeClient()
            self.broker.subscribe(client, *place)
        assert client.channel is not None
        client.channel.set_ready(client, self._chance.choice([0, 3, 50]))
        self.broker.turn()
        self._take()
        held = self._unfinished.get(place, [])
        some = [one for one in held if self._chance.random() < 0.6]
        if some:
            fact = self._fact("finish", *place, bodies=[body for _, body in some])
            client.channel.delivery.finish(client, [(i, i + 1) for i, _ in some], self.clock())
            fact.done = self.files.now()
            self._unfinished[place] = [one for one in held if one not in some]

    def _forget(self, name: str, channel: str = "") -> None:
        for place in [p for p in self._clients if p[0] == name and channel in ("", p[1])]:
            del self._clients[place]
            self._unfinished.pop(place, None)

    def delete_channel(self) -> None:
        place = self._place()
        if place is None:
            return
        self._take()
        self._forget(*place)
        fact = self._fact("delete", *place)
        self.broker.topics[place[0]].delete_channel(place[1])
        self._answer(fact)

    def delete_topic(self) -> None:
        name = self._topic()
        if name not in self.broker.topics or self._chance.random() < 0.5:
            return
        self._take()
        self._forget(name)
        fact = self._fact("delete", name)
        self.broker.delete_topic(name)
        self._answer(fact)

    def pause_channel(self) -> None:
        place = self._place()
        if place is None:
            return
        channel = self.broker.topics[place[0]].channels[place[1]]
        fact = self._fact("pause", *place, value=not channel.paused)
        channel.pause() if fact.value else channel.unpause()
        self._answer(fact)

    def pause_topic(self) -> None:
        name = self._topic()
        if name not in self.broker.topics:
            return
        topic = self.broker.topics[name]
        self.broker.turn()
        fact = self._fact("pause", name, value=not topic.paused)
        topic.pause() if fact.value else topic.unpause()
        self._answer(fact)

    def empty(self) -> None:
        place = self._place()
        if place is None:
            return
        self._take()
        self.broker.turn()
        self._unfinished.pop(place, None)
        topic = self.broker.topics[place[0]]
        # A paused topic holds back what the channel has not seen yet, and keeps.
        fact = self._fact("empty", *place, value=topic.paused)
        topic.channels[place[1]].empty()
        self._answer(fact)

    def seek(self) -> None:
        place = self._place()
        if place is None:
            return
        self.broker.turn()
        self._take()
        self._unfinished.pop(place, None)
        topic = self.broker.topics[place[0]]
        if topic.paused:
            return
        fact = self._fact("seek", *place, bodies=_stored(topic.log))
        topic.channels[place[1]].seek(topic.log.start)
        self._answer(fact)

    def settings(self) -> None:
        name = self._topic()
        if name not in self.broker.topics:
            return
        fact = self._fact("settings", name, value=float(self._chance.randint(3600, 7200)))
        self.broker.topics[name].change_settings({"retention_age": fact.value})
        self._answer(fact)

    def commit(self) -> None:
        """A transaction with messages of both topics, as the HTTP API does it."""
        self.broker.turn()
        self._sequence += 1
        parts = {name: self._new_bodies(name) for name in TOPICS}
        fact = self._fact("commit", parts=parts, value=self._sequence)
        transactions = self.broker.transactions
        for name, bodies in parts.items():
            transactions.stage(PRODUCER, self._sequence, name, name, PackedBodies.of(bodies))
        counts = {name: len(bodies) for name, bodies in parts.items()}
        transaction = transactions.promise(PRODUCER, self._sequence, counts)
        transactions.decide(transaction)
        transaction.write_promise(sync=transaction.is_synchronous)
        finish(self.broker, transaction, self._later.run_all)
        fact.done = self.files.now()

    def restart(self) -> None:
        if self._chance.random() < 0.5:
            self.stop_and_start()

    def stop_and_start(self) -> None:
        self._later.run_all()
        self._take()
        self.broker.close()
        self._later.run_all()
        self._clients.clear()
        self._unfinished.clear()
        self.clock.advance(0.5)
        self.start()


def _numbered(body: bytes) -> bytes:
    """The header block of a message of an idempotent producer."""
    values = PRODUCER, "1", body.split(b"-")[1].decode()
    return encode_headers(dict(zip(ORIGIN, values, strict=True)))


def repeatable(facts: list[Fact]) -> list[Fact]:
    """Publishes that an idempotent producer may repeat: those in topics that were not deleted
    since."""
    deleted = {fact.topic: n for n, fact in enumerate(facts) if fact.kind == "delete" and not fact.channel}
    return [fact for n, fact in enumerate(facts) if fact.blocks and n > deleted.get(fact.topic, -1)]


def finish(broker: Broker, transaction: Transaction, run: Callable[[], None]) -> None:
    """Finish a decided transaction."""
    transactions = broker.transactions
    for chunk in transaction.chunks[transaction.applied :]:
        transactions.apply(transaction, chunk, chunk.read(broker.files))
        broker.turn()
    for name in transaction.topics:
        receipt = Receipt()
        broker.topics[name].publishing.when_committed(receipt)
        run()
        assert receipt.is_ok
    committed = transactions.write_committed(transaction, sync=transaction.is_synchronous, remember_s=1000)
    transactions.finish(transaction, committed)


def _stored(log: Any) -> list[bytes]:
    found: list[bytes] = []
    sequence = log.start
    while (batch := log.read(sequence, wait=True)) is not None:
        found += batch.bodies()[max(0, sequence - batch.base) :]
        sequence = batch.end
    return found


def drop(broker: Broker) -> None:
    """As kill -9 does."""
    for topic in broker.topics.values():
        topic.log.discard()
    broker.files.close(broker.data_path._lock_fd)
    broker.data_path._lock_fd = -1


# what must be there


class ExpectedChannel:
    def __init__(self, exists: bool | None) -> None:
        self.exists = exists
        """None if both are possible."""
        self.must: set[bytes] = set()
        """Messages that are to be delivered."""
        self.must_not: set[bytes] = set()
        """Messages that were emptied."""
        self.published: set[bytes] = set()
        self.paused: bool | None = False


class ExpectedTopic:
    def __init__(self, exists: bool | None) -> None:
        self.exists = exists
        self.channels: dict[str, ExpectedChannel] = {}
        self.kept: set[bytes] = set()
        """Messages that wait for the first channel."""
        self.paused: bool | None = False
        self.retention_s: float | None = 0.0
        """None if it is not known."""


class Expectation:
    """What the broker must still have, given the requests before the cut."""

    def __init__(self, life: Life, moment: int, *, is_power_cut: bool) -> None:
        self.topics: dict[str, ExpectedTopic] = {}
        self.halves: list[dict[str, list[bytes]]] = []
        """Transactions that must be published whole or not at all."""
        self._latest_ns = life.files.times[moment - 1] if moment else 0
        for fact in life.facts:
            if fact.begun < moment:
                sure = fact.done is not None and fact.done <= moment
                if sure and is_power_cut and life.durability == "os":
                    assert fact.done is not None
                    age_ns = self._latest_ns - (life.files.times[fact.done - 1] if fact.done else 0)
                    sure = age_ns > SYNC_TIMEOUT * SECOND
                self._apply(fact, sure, is_strict=life.durability == "fsync")

    def _apply(self, fact: Fact, sure: bool, is_strict: bool) -> None:
        if fact.kind == "commit":
            for name, bodies in fact.parts.items():
                self._publish(name, bodies, sure)
            if not sure and is_strict:
                self.halves.append(fact.parts)
            return
        if fact.kind == "publish":
            self._publish(fact.topic, fact.bodies, sure)
            return
        topic = self._topic(fact.topic, sure)
        if not fact.channel:
            self._apply_to_topic(fact, topic, sure)
        elif fact.kind == "create":
            self._create(topic, fact.channel, sure)
        elif fact.channel in topic.channels:
            self._apply_to_channel(fact, topic, sure)

    def _topic(self, name: str, sure: bool) -> ExpectedTopic:
        """A topic that a request names, which creates it."""
        topic = self.topics.get(name)
        if topic is None or topic.exists is False:
            topic = self.topics[name] = ExpectedTopic(True if sure else None)
        elif sure:
            topic.exists = True
        return topic

    def _publish(self, name: str, bodies: list[bytes], sure: bool) -> None:
        topic = self._topic(name, sure)
        there = [channel for channel in topic.channels.values() if channel.exists is not False]
        for channel in there:
            channel.published |= {*bodies}
            if sure and channel.exists:
                channel.must |= {*bodies}
        if sure and not there:
            topic.kept |= {*bodies}

    def _create(self, topic: ExpectedTopic, name: str, sure: bool) -> None:
        is_first = all(channel.exists is False for channel in topic.channels.values())
        channel = topic.channels[name] = ExpectedChannel(True if sure else None)
        if is_first:
            channel.published |= topic.kept
            if sure:
                channel.must |= topic.kept
            topic.kept = set()

    def _apply_to_topic(self, fact: Fact, topic: ExpectedTopic, sure: bool) -> None:
        match fact.kind:
            case "delete":
                self.topics[fact.topic] = ExpectedTopic(False if sure else None)
            case "pause":
                topic.paused = fact.value if sure else None
            case "settings":
                topic.retention_s = fact.value if sure else None

    def _apply_to_channel(self, fact: Fact, topic: ExpectedTopic, sure: bool) -> None:
        channel = topic.channels[fact.channel]
        match fact.kind:
            case "delete":
                topic.channels[fact.channel] = ExpectedChannel(False if sure else None)
                topic.kept = set()
            case "pause":
                channel.paused = fact.value if sure else None
            case "finish":
                channel.must -= {*fact.bodies}
            case "empty":
                channel.must = set()
                channel.must_not = {*channel.published} if sure and not fact.value else set()
            case "seek":
                channel.must = {*fact.bodies} & channel.must if not sure else {*fact.bodies}
                channel.must_not = set()


# what is there


def violations(life: Life, moment: int, model: str, chance: random.Random, target: Path) -> Iterator[str]:
    """Cut the power after a call, start on what is left, and compare."""
    cut(life.files, moment, model, chance, target)
    yield from compare(life, moment, target, is_power_cut=True)


def compare(life: Life, moment: int, target: Path, *, is_power_cut: bool) -> Iterator[str]:
    """Start on what is left of a life after a call, and compare."""
    expected = Expectation(life, moment, is_power_cut=is_power_cut)
    clock = Clock()
    clock.wall_now_ns = life.clock.wall() + SECOND
    options = NsqdOptions(data_path=str(target), durability=life.durability, **FLAGS)
    broker = Broker(options, files=QuickFiles(), wall_ns=clock.wall, monotonic_ns=clock)
    broker.open()
    try:
        for transaction in broker.transactions.unfinished():
            try:
                finish(broker, transaction, lambda: None)
            except (OSError, CorruptBatch):
                # A part is lost, and nsqd asks what to do. That happens only where it was not
                # synced.
                if life.durability == "fsync":
                    raise
        yield from _compare(broker, expected)
        yield from _compare_repeats(broker, repeatable([f for f in life.facts if f.begun < moment]))
        yield from _compare_messages(broker, expected, [s for s in life.seen if s.moment <= moment])
    finally:
        drop(broker)


def _compare(broker: Broker, expected: Expectation) -> Iterator[str]:
    for name, wanted in expected.topics.items():
        topic = broker.topics.get(name)
        if wanted.exists is False and topic is not None:
            yield f"topic {name} is back"
        if wanted.exists and topic is None:
            yield f"topic {name} is gone"
        if not wanted.exists or topic is None:
            continue
        if wanted.paused not in (None, topic.paused):
            yield f"topic {name}: paused is {topic.paused}"
        if wanted.retention_s not in (None, topic.settings.retention_age or 0.0):
            yield f"topic {name}: retention_age is {topic.settings.retention_age}"
        for channel_name, channel in wanted.channels.items():
            there = topic.channels.get(channel_name)
            if channel.exists is False and there is not None:
                yield f"channel {name}:{channel_name} is back"
            if channel.exists and there is None:
                yield f"channel {name}:{channel_name} is gone"
            if channel.exists and there is not None and channel.paused not in (None, there.paused):
                yield f"channel {name}:{channel_name}: paused is {there.paused}"


def _compare_messages(broker: Broker, expected: Expectation, seen: list[Seen]) -> Iterator[str]:
    is_strict = broker.options.durability == "fsync"
    ids = {(one.topic, one.id): one.body for one in seen}
    for topic in [*broker.topics.values()]:
        publish(broker, topic.name, [b"new-1", b"new-2"], Receipt())
        broker.turn()
        wanted_topic = expected.topics.get(topic.name, ExpectedTopic(None))
        if not topic.channels:
            stored = {*_stored(topic.log)}
            if missing := wanted_topic.kept - stored:
                yield f"topic {topic.name}: {_some(missing)} lost"
            topic.get_channel("late")
        topic.unpause()
        for channel in [*topic.channels.values()]:
            wanted = wanted_topic.channels.get(channel.name, ExpectedChannel(None))
            got = _drain(broker, topic.name, channel.name)
            bodies = [body for _, body in got]
            if wanted.exists and (missing := wanted.must - {*bodies}):
                yield f"channel {channel}: {_some(missing)} lost"
            if wanted.exists and (back := wanted.must_not & {*bodies}):
                yield f"channel {channel}: {_some(back)} back after an emptying"
            if is_strict and (twice := {body for body in bodies if bodies.count(body) > 1}):
                yield f"channel {channel}: {_some(twice)} there twice"
            for message_id, body in got:
                if ids.get((topic.name, message_id), body) != body:
                    yield f"channel {channel}: id {message_id:x} named two messages"
    for parts in expected.halves:
        stored_parts = {
            name: {*_stored(broker.topics[name].log)} & {*bodies} if name in broker.topics else set()
            for name, bodies in parts.items()
        }
        there = sum(map(len, stored_parts.values()))
        if there not in (0, sum(map(len, parts.values()))):
            yield f"half a transaction: {there} messages"


def _compare_repeats(broker: Broker, facts: list[Fact]) -> Iterator[str]:
    """An idempotent producer repeats everything: each message is then there, once."""
    for fact in facts:
        topic = broker.topics.get(fact.topic)
        if topic is None:
            continue
        receipt = Receipt()
        publish(broker, fact.topic, fact.bodies, receipt, blocks=fact.blocks)
        broker.turn()
        stored = _stored(topic.log)
        # What every channel has finished may have been removed.
        if (missing := {*fact.bodies} - {*stored}) and topic.log.start <= fact.position:
            yield f"topic {topic}: the repeat of {_some(missing)} was acknowledged, and they are not there"
        twice = {body for body in fact.bodies if stored.count(body) > 1}
        if twice and broker.options.durability == "fsync":
            yield f"topic {topic}: {_some(twice)} stored twice"


def _drain(broker: Broker, topic: str, channel: str) -> list[tuple[int, bytes]]:
    """All messages that consumers with enough RDY receive."""
    there = broker.topics[topic].channels[channel]
    there.unpause()
    client = FakeClient()
    there.add_client(client)
    there.set_ready(client, 2500)
    for _ in range(20):
        broker.turn()
    got = [(message.id, message.body) for message in client.take()]
    there.remove_client(client)
    return got


def _some(bodies: set[bytes]) -> str:
    first = min(bodies).rstrip(b".").decode()
    return f"{len(bodies)} messages ({first} …)"


def campaign(
    directory: Path, durability: str, seed: int, *, lives: int, cuts: int, steps: int = 60
) -> Iterator[list[str]]:
    """`cuts` power cuts in each of `lives` lives, half of them by each model. Gives what is wrong
    after each."""
    for number in range(seed, seed + lives):
        name = f"{durability}-{number}"
        life = Life(directory / name, durability, random.Random(name))
        life.live(steps)
        for trial in range(cuts):
            chance = random.Random(f"{name}-{trial}")
            moment = chance.randint(1, life.files.now())
            model = MODELS[trial % len(MODELS)]
            target = directory / "cut"
            yield [
                f"{name}, cut {trial} ({model}) at call {moment}: {violation}"
                for violation in violations(life, moment, model, chance, target)
            ]
            shutil.rmtree(target)
        shutil.rmtree(directory / name)
