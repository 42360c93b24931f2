"""Queue mode under kills: a channel of two nsqd -> Spark -> Parquet.

    python -m tests.soak.spark_queue --kills 20
    python -m tests.soak.spark_queue --kills 20 --nsqd /path/to/another/nsqd

Runs two nsqd, an nsqlookupd, a publisher of numbered messages for each nsqd, and a Spark query.
Kills one after the other with SIGKILL, at random moments, and starts it again. In the end every
published number must be in the result: exit status 1 if one is not. Duplicates are counted; only a
killed nsqd may cause some, because it delivers messages again whose FIN was not on disk yet. NSQ's
own nsqd is never killed, because it would lose what it has in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.soak.exactly_once_publisher import Publisher
from tests.soak.support import MARK, Cluster, Supervised, batches, clock, end_all, kill, table
from tests.support import BrokerProcess, ConnectionClosed, wait_until
from tests.support.file_sink import committed_rows
from tests.support.spark import FAST

TOPIC, CHANNEL = "numbers", "spark"
VICTIMS = ("driver", "jvm", "worker", "source", "nsqd", "nsqlookupd")
"""`driver` is the driver's Python and its JVM at once. `worker` is a Python process that runs
tasks, `source` the one that plans what they read."""
NOTED_S = 1.0
"""How often nsqd writes down which messages are finished."""
STALLED_S = 240.0
"""Without a commit for so long, something is stuck."""
HURRY = 0.3
"""How often a kill comes before the query has recovered from the last."""
OUTAGES_S = (2.0, 15.0)
"""For how long a daemon is away, at most; and how long sometimes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    kills: int
    rate: float
    max_rows: int
    nsqd: str
    dedupe: bool
    victims: tuple[str, ...]
    seed: int


class PlainPublisher(Publisher):
    """One that any nsqd understands."""

    def _publish(self, numbers: range) -> None:
        while not self._by_mpub(numbers):
            time.sleep(0.02)


class Run:
    """One run, from the first message to the figures."""

    def __init__(self, options: Options, directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.chance = random.Random(options.seed)
        self.kills: Counter[str] = Counter()
        self.checkpoint = directory / "checkpoint"
        self.failures = directory / "failures.jsonl"
        self.is_good = False
        self._restarts: list[threading.Thread] = []

    def run(self) -> list[tuple[str, Any]]:
        """The figures."""
        began = time.monotonic()
        name = f"{os.getpid()}-{time.time_ns()}"
        # Whatever is started inherits it, and is found by it in the end.
        os.environ[MARK] = name
        try:
            with ExitStack() as stack:
                command = {"command": (self.options.nsqd,)} if self.options.nsqd else {}
                self.cluster = stack.enter_context(Cluster(self.directory, **command))
                for node in self.cluster.nodes:
                    node.control("create", TOPIC, CHANNEL)
                self.driver = stack.enter_context(self._driver(name))
                publishers = self._publish()
                try:
                    self._kill_them()
                finally:
                    for thread in self._restarts:
                        thread.join()
                    for publisher in publishers:
                        publisher.stop()
                say(f"{clock()} the query catches up")
                wait_until(self._has_caught_up, STALLED_S, interval=0.1)
                self.driver.finish()
        finally:
            del os.environ[MARK]
            left = end_all(name)
        figures: list[tuple[str, Any]] = [(f"killed: {one}", n) for one, n in sorted(self.kills.items())]
        figures += [
            ("killed in all", self.kills.total()),
            ("starts of the driver", self.driver.starts),
            ("failures of the query", len(self._failures())),
            ("micro-batches", batches(self.checkpoint)),
            ("seconds", round(time.monotonic() - began)),
            *self._compare(publishers),
            ("processes left over", len(left)),
        ]
        return figures

    def _driver(self, name: str) -> Supervised:
        options = {
            "mode": "queue",
            "topic": TOPIC,
            "channel": CHANNEL,
            "nsqlookupd": self.cluster.lookupd_address,
            "staging": str(self.checkpoint / "staging"),
            "maxRowsPerTrigger": str(self.options.max_rows),
            "messageTimeout": "5s",
            "dedupe": str(self.options.dedupe).lower(),
        }
        arguments = {
            "master": "local[2]",
            "conf": FAST,
            "options": options,
            "result": str(self.directory / "parquet"),
            "checkpoint": str(self.checkpoint),
            "failures": str(self.failures),
        }
        return Supervised(self.directory, "tests.soak.spark_queue_driver", arguments, run=name)

    def _publish(self) -> list[PlainPublisher]:
        nodes = self.cluster.nodes
        rate = self.options.rate / len(nodes)
        found = [PlainPublisher(node, TOPIC, n, len(nodes), rate) for n, node in enumerate(nodes)]
        for publisher in found:
            publisher.start()
        return found

    # killing

    def _kill_them(self) -> None:
        self._await_progress()
        order: list[str] = []
        while self.kills.total() < self.options.kills:
            if not order:
                order = [*self.options.victims]
                self.chance.shuffle(order)
            time.sleep(self.chance.uniform(0, 2))
            self._kill(order.pop())
            if self.chance.random() >= HURRY:
                self._await_progress()

    def _await_progress(self) -> None:
        """Until two more micro-batches have been committed: one may have been about to be when the
        kill came."""
        target = batches(self.checkpoint) + 2
        try:
            wait_until(lambda: batches(self.checkpoint) >= target, STALLED_S, interval=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._failures()[-1:]}\n{self.driver.last_words()}") from None

    def _kill(self, victim: str) -> None:
        """Nothing, if there is none now: it has not come back from the last time."""
        if victim in ("nsqd", "nsqlookupd"):
            daemons = self.cluster.nodes if victim == "nsqd" else [self.cluster.lookupd]
            alive = [daemon for daemon in daemons if daemon.alive()]
            if alive:
                self._kill_daemon(self.chance.choice(alive))
            is_done = bool(alive)
        else:
            pids = self.driver.find("jvm" if victim == "driver" else victim)
            if victim == "driver":
                pids += [self.driver.pid] if self.driver.is_alive else []
            elif pids:
                pids = [self.chance.choice(pids)]
            kill(*pids)
            is_done = bool(pids)
        did = "killed" if is_done else "missed"
        say(f"{clock()} batch {batches(self.checkpoint):>4}  {did} {victim}")
        self.kills[victim] += is_done

    def _kill_daemon(self, daemon: BrokerProcess) -> None:
        daemon.kill()
        short, long = OUTAGES_S
        outage = self.chance.uniform(0, long if self.chance.random() < 0.25 else short)

        def restart() -> None:
            time.sleep(outage)
            daemon.start()

        thread = threading.Thread(target=restart)
        thread.start()
        self._restarts.append(thread)

    # the end

    def _has_caught_up(self) -> bool:
        """Wait until no messages wait or are in flight, and the sink has all."""
        try:
            found = [node.channel_stats(TOPIC, CHANNEL) for node in self.cluster.nodes]
        except (OSError, ConnectionClosed):
            return False
        is_empty = all(
            stats is not None and stats["depth"] == stats["in_flight_count"] == stats["deferred_count"] == 0
            for stats in found
        )
        return is_empty and batches(self.checkpoint, "offsets") == batches(self.checkpoint)

    def _compare(self, publishers: list[PlainPublisher]) -> list[tuple[str, Any]]:
        certain = _numbers(block for publisher in publishers for block in publisher.certain)
        uncertain = _numbers(block for publisher in publishers for block in publisher.uncertain)
        rows = committed_rows(self.directory / "parquet", "number", "attempts")
        numbers = rows["number"].to_numpy()
        distinct = np.unique(numbers)
        lost = np.setdiff1d(certain, distinct)
        unknown = np.setdiff1d(distinct, np.concatenate([certain, uncertain]))
        extra, bound = len(numbers) - len(distinct), self._bound()
        self.is_good = not len(lost) and not len(unknown) and extra <= bound
        return [
            ("messages published", len(certain)),
            ("... without an answer", len(uncertain)),
            ("rows in the result", len(numbers)),
            ("... delivered more than once", int((rows["attempts"].to_numpy() > 1).sum())),
            ("lost", len(lost)),
            ("never published", len(unknown)),
            ("duplicates", extra),
            ("... may be up to", bound),
        ]

    def _bound(self) -> int:
        """Duplicates that there may be: of an nsqd that was killed, what it has handed out since it
        last noted what was finished; without dedupe, of every kill, what was in flight."""
        of_nsqd = self.kills["nsqd"] * (self.options.max_rows + int(self.options.rate * NOTED_S))
        others = self.kills.total() - self.kills["nsqd"] - self.kills["nsqlookupd"]
        return of_nsqd + (0 if self.options.dedupe else others * 2 * 2500)

    def _failures(self) -> list[str]:
        if not self.failures.exists():
            return []
        return [json.loads(line) for line in self.failures.read_text().splitlines()]


def _numbers(blocks: Iterable[range]) -> npt.NDArray[np.int64]:
    return np.array([number for block in blocks for number in block], np.int64)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.spark_queue",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="at least (%(default)s)")
    parser.add_argument("--rate", type=float, default=2000.0, metavar="N", help="messages a second")
    parser.add_argument("--max-rows", type=int, default=20_000, metavar="N", help="of a micro-batch")
    parser.add_argument("--nsqd", default="", metavar="PATH", help="another nsqd than ours")
    parser.add_argument("--no-dedupe", action="store_true", help="with option dedupe=false")
    parser.add_argument("--victims", metavar="LIST", help=f"of {','.join(VICTIMS)}; default: all there are")
    parser.add_argument("--seed", type=int, help="of the random choices, to have the same again")
    parser.add_argument("--directory", type=Path, help="where everything is kept, also afterwards")
    given = parser.parse_args(arguments)
    victims = tuple(given.victims.split(",")) if given.victims else VICTIMS
    if not set(VICTIMS).issuperset(victims):
        parser.error(f"--victims: there are {', '.join(VICTIMS)}")
    if given.nsqd:
        victims = tuple(name for name in victims if name != "nsqd")
    options = Options(
        kills=given.kills,
        rate=given.rate,
        max_rows=given.max_rows,
        nsqd=given.nsqd,
        dedupe=not given.no_dedupe,
        victims=victims,
        seed=random.randrange(1 << 32) if given.seed is None else given.seed,
    )
    directory = given.directory or Path(tempfile.mkdtemp(prefix="nsparq-queue-"))
    directory.mkdir(parents=True, exist_ok=True)

    say(f"{options}\nin {directory}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    run = Run(options, directory.resolve())
    say(table(run.run()))
    if run.is_good and given.directory is None:
        shutil.rmtree(directory, ignore_errors=True)
    say("nothing lost" if run.is_good else "NOT as promised")
    return 0 if run.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
