"""Dead letters under kills: every poison message becomes one dead letter, neither none nor two.

    python -m tests.soak.dead_letters --kills 100 --messages 300000

Publishers send numbered messages, of which one in ten is poison: consumers requeue it whenever they
get it. nsqd is killed with SIGKILL at random moments and started again. In the end every
acknowledged message must have been finished, or be in the dead-letter topic exactly once. Exit
status 1 if not.
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


def run(kills: int, messages: int, seed: int, data_path: Path) -> int:
    chance = random.Random(seed)
    gate = threading.Event()
    with BrokerProcess(data_path) as broker:
        broker.control("create", TOPIC, CHANNEL)
        broker.control("create", f"{TOPIC}.dead", "all")
        policy = json.dumps({"policy": {"max_attempts": ATTEMPTS}}).encode()
        broker.request("PUT", f"/channel/settings?topic={TOPIC}&channel={CHANNEL}", policy).expect_json()
        publishers = [BulkPublisher(broker, gate, TOPIC, number) for number in range(2)]
        consumers = [PoisonedConsumer(broker, gate) for _ in range(2)]
        for publisher in publishers:
            publisher.limit = messages // len(publishers)
        gate.set()
        for worker in (*publishers, *consumers):
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

        wait_until(is_settled, STUCK_S)
        for consumer in consumers:
            consumer.stop()
        found = letters(broker)
    acknowledged = {body for publisher in publishers for batch in publisher.acknowledged for body in batch}
    finished = set().union(*(consumer.finished for consumer in consumers))
    poison = {body for body in acknowledged if is_poison(body)}
    lost = (acknowledged - poison - finished) | (poison - found.keys())
    doubled = [body for body, count in found.items() if count > 1]
    wrong = [body for body in found if not is_poison(body)]
    sys.stdout.write(
        f"{kills} kills, {len(acknowledged):,} acknowledged, {len(poison):,} of them poison, "
        f"{sum(found.values()):,} dead letters, {len(lost)} lost, {len(doubled)} doubled, "
        f"{len(wrong)} wrong\n"
    )
    return 1 if lost or doubled or wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.dead_letters", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="of nsqd (%(default)s)")
    parser.add_argument("--messages", type=int, default=60_000, metavar="N", help="published (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dead-letters-") as directory:
        return run(options.kills, options.messages, options.seed, Path(directory))


if __name__ == "__main__":
    raise SystemExit(main())
