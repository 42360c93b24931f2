"""Dead letters under kills: every poison message becomes one dead letter, neither none nor two.

    python -m tests.soak.dead_letters --kills 100 --messages 300000
    python -m tests.soak.dead_letters --kills 100 --messages 300000 --redrive

Publishers send numbered messages, of which one in ten is poison: consumers requeue it whenever they
get it. nsqd is killed with SIGKILL at random moments and started again. In the end every
acknowledged message must have been finished, or be in the dead-letter topic exactly once. Exit
status 1 if not.

With --redrive, the letters go back to their channel meanwhile, one redrive after the other. There
they fail again and become new letters. So in the end each poison message must have exactly one
letter that was not put back. A last redrive, without consumers, must bring each back exactly once.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlencode

from tests.faults.load import READY, Publisher, Worker
from tests.support import BrokerProcess, RawConnection, wait_until

TOPIC, CHANNEL = "t", "c"
ATTEMPTS = 3
STUCK_S = 120.0


def is_poison(body: bytes) -> bool:
    """One message in ten: bodies are PUBLISHER-NUMBER, padded."""
    return body.partition(b"-")[2][7:8] == b"0"


class BulkPublisher(Publisher):
    """As many as it can, until it has published its share."""

    limit = 0

    def work(self, connection: RawConnection) -> None:
        while self._count < self.limit and not self.stopping.is_set():
            batch = tuple(b"%d-%08d" % (self.number, self._count + i) for i in range(100))
            self._count += len(batch)
            self.unanswered.append(batch)
            connection.mpub(self.topic, batch)
            self.acknowledged.append(self.unanswered.pop())
            # So that there is something to publish until the last kill.
            time.sleep(0.02)
        self.stopping.set()


class PoisonedConsumer(Worker):
    """Finishes good messages and requeues poison."""

    def __init__(self, broker: BrokerProcess, gate: threading.Event) -> None:
        super().__init__(broker, gate)
        self.finished: set[bytes] = set()

    def work(self, connection: RawConnection) -> None:
        connection.identify(msg_timeout=60_000)
        connection.sub(TOPIC, CHANNEL, rdy=READY)
        while not self.stopping.is_set():
            try:
                message = connection.read_message(timeout=0.2)
            except TimeoutError:
                continue
            if is_poison(message.body):
                connection.req(message.id)
            else:
                self.finished.add(message.body)
                connection.fin(message.id)


class Redriver(Worker):
    """Puts back all letters that there are, again and again."""

    def work(self, connection: RawConnection) -> None:
        while not self.stopping.is_set():
            start_redrive(self.broker)
            time.sleep(0.05)


def start_redrive(broker: BrokerProcess) -> None:
    """Unless one is under way."""
    query = urlencode({"topic": f"{TOPIC}.dead", "origin_topic": TOPIC})
    assert broker.request("POST", f"/dead_letters/redrive?{query}").status in (200, 409)


def await_redrive(broker: BrokerProcess) -> None:
    path = f"/dead_letters/redrive?topic={TOPIC}.dead"
    wait_until(lambda: broker.request("GET", path).expect_json()["state"] == "finished", STUCK_S)


def letter_states(broker: BrokerProcess) -> Counter[str]:
    """How many letters are in which state."""
    found: Counter[str] = Counter()
    start: int | None = 0
    while start is not None:
        path = f"/dead_letters?topic={TOPIC}.dead&start={start}"
        shown = json.loads(broker.request("GET", path).body)
        start = shown["next"]
        for group in shown["groups"]:
            found.update(group["states"])
    return found


def put_back(broker: BrokerProcess) -> Counter[bytes]:
    """Redrive without consumers. Bodies in the channel then, with how often each is there."""
    start_redrive(broker)
    await_redrive(broker)
    found: Counter[bytes] = Counter()
    depth = broker.channel_stats(TOPIC, CHANNEL)["depth"]
    with broker.connect() as connection:
        connection.sub(TOPIC, CHANNEL, rdy=READY)
        for _ in range(depth):
            message = connection.read_message()
            found[message.body] += 1
            connection.fin(message.id)
    return found


def letters(broker: BrokerProcess) -> Counter[bytes]:
    """Bodies in the dead-letter topic, with how often each is there."""
    found: Counter[bytes] = Counter()
    depth = broker.channel_stats(f"{TOPIC}.dead", "all")["depth"]
    with broker.connect() as connection:
        connection.sub(f"{TOPIC}.dead", "all", rdy=2500)
        for _ in range(depth):
            message = connection.read_message()
            found[json.loads(message.body)["text"].encode()] += 1
            connection.fin(message.id)
    return found


def run(kills: int, messages: int, seed: int, data_path: Path, *, redrives: bool = False) -> int:
    chance = random.Random(seed)
    gate = threading.Event()
    with BrokerProcess(data_path) as broker:
        broker.control("create", TOPIC, CHANNEL)
        broker.control("create", f"{TOPIC}.dead", "all")
        policy = json.dumps({"policy": {"max_attempts": ATTEMPTS}}).encode()
        broker.request("PUT", f"/channel/settings?topic={TOPIC}&channel={CHANNEL}", policy).expect_json()
        publishers = [BulkPublisher(broker, gate, TOPIC, number) for number in range(2)]
        consumers = [PoisonedConsumer(broker, gate) for _ in range(2)]
        redrivers = [Redriver(broker, gate)] if redrives else []
        for publisher in publishers:
            publisher.limit = messages // len(publishers)
        gate.set()
        for worker in (*publishers, *consumers, *redrivers):
            worker.start()
        for _ in range(kills):
            time.sleep(chance.uniform(0.05, 1.0))
            gate.clear()
            broker.kill()
            broker.start()
            gate.set()
        for publisher in publishers:
            publisher.join(STUCK_S)
            assert not publisher.problems, publisher.problems

        def is_settled() -> bool:
            stats = broker.channel_stats(TOPIC, CHANNEL)
            return not (stats["depth"] or stats["in_flight_count"] or stats["deferred_count"])

        for redriver in redrivers:
            redriver.stop()
            await_redrive(broker)
        wait_until(is_settled, STUCK_S)
        for consumer in consumers:
            consumer.stop()
        states = letter_states(broker)
        found = put_back(broker) if redrives else letters(broker)
    acknowledged = {body for publisher in publishers for batch in publisher.acknowledged for body in batch}
    finished = set().union(*(consumer.finished for consumer in consumers))
    poison = {body for body in acknowledged if is_poison(body)}
    lost = (acknowledged - poison - finished) | (poison - found.keys())
    doubled = [body for body, count in found.items() if count > 1]
    wrong = [body for body in found if not is_poison(body)]
    sys.stdout.write(
        f"{kills} kills, {len(acknowledged):,} acknowledged, {len(poison):,} of them poison, "
        f"{states.total():,} dead letters, {states['redriven']:,} put back, {len(lost)} lost, "
        f"{len(doubled)} doubled, {len(wrong)} wrong\n"
    )
    return 1 if lost or doubled or wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.dead_letters", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="of nsqd (%(default)s)")
    parser.add_argument("--messages", type=int, default=60_000, metavar="N", help="published (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments (%(default)s)")
    parser.add_argument("--redrive", action="store_true", help="put dead letters back meanwhile")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dead-letters-") as directory:
        return run(options.kills, options.messages, options.seed, Path(directory), redrives=options.redrive)


if __name__ == "__main__":
    raise SystemExit(main())
