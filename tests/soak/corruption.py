"""One damaged file in a data path, tried many times: what does a start make of it?

    python -m tests.soak.corruption --trials 560 --seed 1

Each trial takes the data path of a broker that was stopped or killed, damages one file of it at
random (bytes zeroed, bits flipped, cut, emptied, removed, swapped with a neighbour's), starts a
broker on it, and takes everything that it delivers. Every message of which a whole copy is on disk
must come, under its own topic's name; whatever is missing must be in the log and in the counters.
Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nsparq.broker.stats import broker_stats
from nsparq.broker.transactions import AlreadyCommitted, Damaged, Incomplete
from nsparq.errors import CorruptBatch
from nsparq.packed import PackedBodies
from nsparq.storage.batch import data_range, decode_head, decode_lengths
from nsparq.storage.files import Files
from nsparq.storage.state_files import read_channel_state, read_topic_state
from tests.broker.rig import Clock, Delivered, FakeClient, Rig

TOPICS = ("orders", "mails", "clicks")
CHANNELS = ("first", "second")
DELAYS_MS = (5_000, 30_000, 600_000)
FLAGS = {"max_bytes_per_file": 4_000, "node_id": 5}
LONG_S = 3_600
"""Longer than any delay."""
KINDS = ("zero", "zero all", "flip", "cut", "empty", "remove", "swap")

Owner = tuple[str, str]
"""A topic and a channel."""


@dataclass
class Original:
    """A data path before the damage, and the messages it holds."""

    path: Path
    now_s: float
    unfinished: dict[Owner, set[bytes]]
    staged: dict[str, set[bytes]] = field(default_factory=dict)
    """Messages of an open transaction, by topic."""
    committed: set[bytes] = field(default_factory=set)
    incarnations: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """Errors of a trial; empty if there are none."""

    what: str
    problems: list[str] = field(default_factory=list)
    lost: int = 0
    uncounted: int = 0
    damaged: int = 0
    counted: int = 0


# building


def build(path: Path, seed: int) -> Original:
    """Several topics and channels, with messages in every state."""
    choose = random.Random(seed)
    path.mkdir(parents=True)
    rig = Rig(path, **FLAGS)
    clients = {(t, c): rig.subscribe(t, c, msg_timeout_ms=900_000) for t in TOPICS for c in CHANNELS}
    committed = _commit(rig, 1, choose)
    number = 0
    for _ in range(choose.randrange(8, 16)):
        topic = choose.choice(TOPICS)
        for _ in range(choose.randrange(1, 8)):
            count = choose.randrange(1, 12)
            bodies = [_body(topic, number + i, choose) for i in range(count)]
            number += count
            defer_ms = choose.choice(DELAYS_MS) if choose.random() < 0.25 else 0
            rig.publish(topic, *bodies, defer_ms=defer_ms)
        for owner, client in clients.items():
            if owner[0] == topic:
                _consume(rig, client, choose)
        rig.clock.advance(1)
        rig.maintain()
    staged = _stage(rig, 2, choose)
    if choose.random() < 0.5:
        rig.broker.transactions.promise("producer", 2, staged.counts).write_promise(sync=False)
    rig.turn()
    rig.maintain()
    unfinished = {owner: _unfinished(rig, owner) for owner in clients}
    incarnations = {name: topic.incarnation for name, topic in rig.broker.topics.items()}
    rig.maintain()
    if choose.random() < 0.5:
        rig.close()
    else:
        rig.drop()
    return Original(path, rig.clock.wall_now_ns / 1e9, unfinished, staged.bodies, committed, incarnations)


def _body(topic: str, number: int, choose: random.Random) -> bytes:
    return b"%s:%d:" % (topic.encode(), number) + choose.randbytes(choose.randrange(20, 150)).hex().encode()


def _consume(rig: Rig, client: FakeClient, choose: random.Random) -> None:
    """Receive some messages; finish most, requeue some, keep some in flight."""
    rig.ready(client, client.in_flight + choose.randrange(1, 60))
    for message in client.take():
        chance = choose.random()
        if chance < 0.9:
            rig.finish(client, message)
        elif chance < 0.93:
            rig.requeue(client, message, choose.choice(DELAYS_MS))
        elif chance < 0.95:
            rig.requeue(client, message)
    rig.ready(client, 0)


@dataclass
class _Staged:
    counts: dict[str, int]
    bodies: dict[str, set[bytes]]


def _stage(rig: Rig, sequence: int, choose: random.Random) -> _Staged:
    counts: dict[str, int] = {}
    bodies: dict[str, set[bytes]] = {topic: set() for topic in TOPICS}
    for part in ("0", "1"):
        for topic in TOPICS:
            new = [_body(topic, 10_000 * sequence + 100 * int(part) + i, choose) for i in range(5)]
            counts[part] = rig.broker.transactions.stage(
                "producer", sequence, part, topic, PackedBodies.of(new)
            )
            bodies[topic].update(new)
    return _Staged(counts, bodies)


def _commit(rig: Rig, sequence: int, choose: random.Random) -> set[bytes]:
    staged = _stage(rig, sequence, choose)
    commit(rig, sequence, staged.counts)
    return set().union(*staged.bodies.values())


def commit(rig: Rig, sequence: int, counts: dict[str, int]) -> None:
    """Raises AlreadyCommitted or Incomplete."""
    transactions = rig.broker.transactions
    transaction = transactions.promise("producer", sequence, counts)
    transactions.decide(transaction)
    transaction.write_promise(sync=False)
    for chunk in transaction.chunks[transaction.applied :]:
        transactions.apply(transaction, chunk, chunk.read(rig.broker.files))
    transactions.finish(transaction, transactions.write_committed(transaction, sync=False, remember_s=3600))
    rig.turn()


def _unfinished(rig: Rig, owner: Owner) -> set[bytes]:
    """All unfinished messages of the channel."""
    channel = rig.channel(owner[1], owner[0])
    sequences = {*channel.unfinished, *channel.cursor.next_messages(1_000_000)}
    return {_read(rig, owner, sequence) for sequence in sequences}


def _read(rig: Rig, owner: Owner, sequence: int) -> bytes:
    found = rig.channel(owner[1], owner[0]).delivery.find(sequence)
    assert found is not None
    batch, index = found
    return batch.only(index).data


# damaging


def damage(path: Path, choose: random.Random) -> tuple[str, set[Path]]:
    """Damage one file, or swap two. Gives a description and the files."""
    # Each kind of file as often as any other, though there are many more of some.
    suffixes = sorted({_kind_of(file) for file in _files(path)})
    suffix = choose.choice(suffixes)
    candidates = [file for file in _files(path) if _kind_of(file) == suffix]
    file = choose.choice(candidates)
    kind = choose.choice(KINDS)
    others = [other for other in candidates if other != file]
    if kind == "swap" and not others:
        kind = "zero"
    size = file.stat().st_size
    content = bytearray(file.read_bytes())
    start = choose.randrange(size) if size else 0
    touched = {file}
    if kind == "zero":
        end = min(size, start + choose.choice((1, 8, 113, 1000)))
        content[start:end] = bytes(end - start)
    elif kind == "zero all":
        content = bytearray(size)
    elif kind == "flip":
        for _ in range(choose.randrange(1, 4)):
            if size:
                content[choose.randrange(size)] ^= 1 << choose.randrange(8)
    elif kind == "cut":
        del content[start:]
    elif kind == "empty":
        content = bytearray()
    what = f"{kind} {file.relative_to(path)}"
    if kind == "remove":
        file.unlink()
    elif kind == "swap":
        other = choose.choice(others)
        touched.add(other)
        what += f" with {other.relative_to(path)}"
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        file.write_bytes(content)
    return what, touched


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.suffix != ".tmp")


def _kind_of(file: Path) -> str:
    return file.suffix if file.suffix in (".log", ".index", ".carry", ".channel", ".part") else file.name


def whole_bodies(path: Path, original: Path) -> Iterator[tuple[Path, bytes]]:
    """Messages in logs and carried-over files whose whole batch is undamaged."""
    for file in _files(original):
        if file.suffix not in (".log", ".carry"):
            continue
        relative = file.relative_to(original)
        damaged = path / relative
        now = damaged.read_bytes() if damaged.exists() else b""
        before = file.read_bytes()
        position = 0
        while (head := decode_head(before, position)) is not None:
            end = position + head.size
            if now[position:end] == before[position:end]:
                start, _ = data_range(head, position)
                for length in decode_lengths(head, before, position):
                    yield relative, before[start : start + length]
                    start += length
            position = end


# a trial


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def trial(original: Original, path: Path, choose: random.Random) -> Outcome:
    """Damage a copy of the data path at `path`, start, drain, and judge."""
    shutil.copytree(original.path, path)
    what, touched = damage(path, choose)
    outcome = Outcome(what)
    changed = {
        file
        for file in touched
        if not file.exists() or file.read_bytes() != (original.path / file.relative_to(path)).read_bytes()
    }
    if not changed:
        return outcome
    whole: dict[Owner, set[bytes]] = {owner: set() for owner in original.unfinished}
    for file, body in whole_bodies(path, original.path):
        topic = file.parent.name.removesuffix(".topic")
        for owner in whole:
            if owner[0] == topic and (file.suffix == ".log" or file.stem == owner[1]):
                whole[owner].add(body)
    must_be_said = any(map(_must_be_said, changed))
    records = _Records()
    package = logging.getLogger("nsparq")
    package.addHandler(records)
    try:
        _judge(original, path, outcome, whole, changed, records)
        if must_be_said and not records.texts:
            outcome.problems.append("the damage is not in the log")
        if must_be_said and not outcome.counted:
            outcome.problems.append("the damage is not counted")
    finally:
        package.removeHandler(records)
    return outcome


def _judge(
    original: Original,
    path: Path,
    outcome: Outcome,
    whole: dict[Owner, set[bytes]],
    changed: set[Path],
    records: _Records,
) -> None:
    clock = Clock()
    clock.wall_now_ns = int((original.now_s + 5) * 1e9)
    try:
        rig = Rig(path, clock=clock, **FLAGS)
    except Exception as error:
        outcome.problems.append(f"start failed: {error!r}")
        return
    try:
        for name, incarnation in original.incarnations.items():
            if rig.broker.topics[name].incarnation != incarnation:
                outcome.problems.append(f"{name} has become another log")
        missing = [owner for owner in original.unfinished if owner[1] not in rig.topic(owner[0]).channels]
        if missing:
            outcome.problems.append(f"channels are gone: {missing}")
        got = {owner: _drain(rig, owner) for owner in original.unfinished}
        stats = {topic["topic_name"]: topic for topic in broker_stats(rig.broker)["topics"]}
        for owner, bodies in original.unfinished.items():
            delivered = {message.body for message in got[owner]}
            foreign = {body for body in delivered if not body.startswith(owner[0].encode() + b":")}
            if foreign:
                outcome.problems.append(f"{owner}: {len(foreign)} of another topic")
            lost = (bodies & whole[owner]) - delivered
            if lost:
                outcome.lost += len(lost)
                outcome.problems.append(f"{owner}: {len(lost)} of {len(bodies)} lost, though undamaged")
            gone = bodies - delivered - lost
            outcome.damaged += len(gone)
            counted = _counted(stats[owner[0]], owner[1])
            if len(gone) > counted:
                outcome.uncounted += len(gone) - counted
                outcome.problems.append(f"{owner}: {len(gone)} gone, {counted} counted")
            if gone and not records.texts:
                outcome.problems.append(f"{owner}: {len(gone)} gone, and not a word of it")
        outcome.counted = _count_all(rig)
        _judge_transactions(original, rig, outcome, changed)
        _finish_all(rig, got)
        rig.restart()
        again = {owner: [m.body for m in _drain(rig, owner)] for owner in original.unfinished}
        if any(again.values()):
            outcome.problems.append(f"after another restart {Counter(map(len, again.values()))} came again")
    finally:
        rig.drop()


def _must_be_said(file: Path) -> bool:
    """Whether damage to this file must be in the log and in a counter, even if it has cost no
    message. The files of channels and topics hold earlier versions, too: if one of them is whole,
    it is used."""
    if file.suffix == ".channel":
        return read_channel_state(Files(), file) is None
    if file.name == "topic.json":
        state = read_topic_state(Files(), file.parent)
        return state is None or state.name != file.parent.name.removesuffix(".topic")
    return file.exists() and file.name.endswith((".carry", ".json", "nsqd.dat"))


def _drain(rig: Rig, owner: Owner) -> list[Delivered]:
    channel = rig.topic(owner[0]).channels.get(owner[1])
    if channel is None:
        return []
    client = rig.subscribe(*owner, rdy=100_000, msg_timeout_ms=900_000)
    got = client.take()
    rig.finish(client, *got)
    for _ in range(3):
        rig.pass_time(LONG_S)
        new = client.take()
        rig.finish(client, *new)
        got += new
    rig.disconnect(client)
    return got


def _finish_all(rig: Rig, got: dict[Owner, list[Delivered]]) -> None:
    for owner in got:
        _drain(rig, owner)
    rig.maintain()


def _counted(topic: dict[str, object], channel: str) -> int:
    channels = topic["channels"]
    assert isinstance(channels, list)
    (found,) = [c for c in channels if c["channel_name"] == channel]
    corrupt = topic["corrupt_messages"]
    assert isinstance(corrupt, int)
    return corrupt + int(found["dropped_count"])


def _count_all(rig: Rig) -> int:
    """Everything that the daemon has counted as damaged."""
    stats = broker_stats(rig.broker)
    count = int(stats["corrupt_files"])
    for topic in stats["topics"]:
        count += sum(topic[name] for name in ("corrupt_batches", "corrupt_messages", "corrupt_files"))
        count += sum(channel["dropped_count"] for channel in topic["channels"])
    return count


def _judge_transactions(original: Original, rig: Rig, outcome: Outcome, changed: set[Path]) -> None:
    """The producer does not know the outcome of its transactions, and repeats all requests."""
    is_touched = any("transactions" in file.parts for file in changed)
    counts = {"0": 15, "1": 15}
    try:
        with suppress(AlreadyCommitted):
            commit(rig, 2, counts)
    except (Incomplete, Damaged, CorruptBatch, FileNotFoundError):
        if not is_touched:
            outcome.problems.append("staged messages are gone")
        return
    for topic, bodies in original.staged.items():
        for channel in CHANNELS:
            delivered = {message.body for message in _drain(rig, (topic, channel))}
            if bodies - delivered:
                outcome.problems.append(f"{len(bodies - delivered)} staged for {topic} did not come")


# the program


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=560)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this trial alone")
    parser.add_argument("--verbose", action="store_true", help="show what the broker logs")
    options = parser.parse_args(arguments)
    if not options.verbose:
        logging.getLogger("nsparq").addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory() as directory:
        outcomes = run(Path(directory), options.seed, options.trials, options.only)
    bad = {number: outcome for number, outcome in outcomes.items() if outcome.problems}
    for number, outcome in bad.items():
        sys.stdout.write(f"trial {number}: {outcome.what}: {'; '.join(outcome.problems)}\n")
    lost = sum(outcome.lost > 0 for outcome in outcomes.values())
    uncounted = sum(outcome.uncounted > 0 for outcome in outcomes.values())
    sys.stdout.write(
        f"{len(outcomes)} trials, {sum(o.damaged > 0 for o in outcomes.values())} with damaged messages: "
        f"{lost} lost undamaged ones, {uncounted} did not count them, {len(bad)} with any problem\n"
    )
    return 1 if bad else 0


def run(directory: Path, seed: int, trials: int, only: int | None = None) -> dict[int, Outcome]:
    """The outcomes, by the number of the trial."""
    originals: dict[int, Original] = {}
    outcomes = {}
    for number in range(trials) if only is None else [only]:
        shape = number // 20
        if shape not in originals:
            originals = {shape: build(directory / f"original-{shape}", seed * 1000 + shape)}
        path = directory / f"trial-{number}"
        outcomes[number] = trial(originals[shape], path, random.Random(f"{seed}.{number}"))
        shutil.rmtree(path)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
