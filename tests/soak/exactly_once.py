"""Exactly-once under kills: nsq -> Spark -> Parquet, topics, the archive, Delta, databases.

    python -m tests.soak.exactly_once --kills 20 --sink parquet
    python -m tests.soak.exactly_once --kills 20 --sink topic
    python -m tests.soak.exactly_once --kills 20 --sink archive,table
    python -m tests.soak.exactly_once --kills 20 --sink delta-upsert
    python -m tests.soak.exactly_once --kills 20 --sink jdbc,jdbc-upsert --master 'local[2]'
    python -m tests.soak.exactly_once --kills 10 --sink parquet,topic --replicated --victims nsqd

Runs two nsqd, an nsqlookupd, a publisher of numbered messages for each nsqd, and a Spark query.
Kills one of them after the other with SIGKILL, at random moments, and starts it again. In the end
every published number must be in the result exactly once. Exit status 1 if not, or if it gets
stuck. With `--replicated` there is one nsqd, as a pair of nodes: each kill of nsqd is a fail-over.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow.feather

from tests.soak.exactly_once_driver import PIPELINES, READY_MADE, SINKS, TIMES, Sink
from tests.soak.exactly_once_publisher import Publisher
from tests.soak.exactly_once_report import Report, Result
from tests.soak.support import (
    MARK,
    Cluster,
    Pair,
    Supervised,
    batches,
    clock,
    end_all,
    environment_variable,
    kill,
    read_log,
)
from tests.support import ConnectionClosed, wait_until
from tests.support.spark import FAST
from tests.support.spark_cluster import SparkCluster

TOPIC, RESULT = "numbers", "results"
VICTIMS = ("driver", "python", "jvm", "executor", "worker", "source", "planner", "nsqd", "nsqlookupd")
"""`driver` is Spark's driver, Python and JVM, at once; `python` and `jvm` are one half of it.
`worker` is a Python process that runs tasks, `source` the one that plans what they read, `planner`
one that the driver has for the rest, such as the sink's commit. Executors are JVMs, if the master
has any."""
HOPELESS = ("DataLoss", "CheckpointBehind")
"""Errors that end a query for good. They must not happen: nothing was lost."""
MAX_STARTS = 5
"""Limit on restarts of the driver without a kill, when nsqd or nsqlookupd is away for long."""
STALLED_S = 300.0
"""Without a commit for so long, something is stuck. On a very busy machine a killed driver takes
two minutes to come back."""


@dataclass(frozen=True, kw_only=True)
class Options:
    sinks: tuple[str, ...]
    kills: int = 20
    seconds: float = 0.0
    """Least time of killing."""
    most_seconds: float = inf
    """Longest time of killing, whatever `kills` says."""
    rate: float = 2000.0
    """Messages a second, all publishers together."""
    master: str = "standalone"
    executors: int = 2
    """Of the standalone cluster, with one core each."""
    victims: tuple[str, ...] = VICTIMS
    max_rows: int = 20_000
    seed: int = 0
    outages_s: tuple[float, float] = (4.0, 20.0)
    """How long nsqd and nsqlookupd are away at most; and sometimes, so that a driver starts without
    them."""
    waits_s: tuple[float, float] = (0.0, 2.0)
    """How long to wait before a kill, once the query has recovered from the last."""
    hurry: float = 0.3
    """How often a kill comes before it has."""
    is_replicated: bool = False
    """One nsqd as a pair of nodes, instead of two nsqds."""
    progress: int = 2
    """Micro-batches that show that it has. The first may have been as good as done when the kill
    came."""


Say = Callable[[str], None]


class Killable(Protocol):
    def kill(self) -> None: ...
    def start(self) -> None: ...


class Run:
    """One run, from the first message to the report."""

    def __init__(self, options: Options, directory: Path, say: Say) -> None:
        self.options = options
        self.directory = directory
        self.say = say
        self.chance = random.Random(options.seed)
        self.report = Report()
        self.name = f"{os.getpid()}-{time.time_ns()}"
        self.sinks = {name: self._sink(name) for name in options.sinks}
        self.failures = directory / "failures.jsonl"
        self.spark: SparkCluster | None = None
        self._restarts: list[threading.Thread] = []
        self._not_restarted: list[Exception] = []

    def run(self) -> Report:
        began = time.monotonic()
        with environment_variable(MARK, self.name):
            try:
                with ExitStack() as stack:
                    self.cluster = stack.enter_context(self._make_cluster())
                    self._create_topics()
                    master, conf = self._master(stack)
                    self.driver = stack.enter_context(self._driver(master, conf))
                    publishers = self._publishers()
                    try:
                        self._kill_them()
                    finally:
                        for thread in self._restarts:
                            thread.join()
                        for publisher in publishers:
                            publisher.stop()
                    self._catch_up()
                    self._compare(publishers)
                    self.report.starts = self.driver.starts
                    if isinstance(self.cluster, Pair):
                        self.report.fail_overs = self.cluster.fail_overs
            finally:
                self.report.left_over = end_all(self.name)
        self.report.seconds = time.monotonic() - began
        self.report.failures = self._failures()
        return self.report

    # setting up

    def _make_cluster(self) -> Cluster:
        return Pair(self.directory) if self.options.is_replicated else Cluster(self.directory)

    def _sink(self, name: str) -> Sink:
        result = self.directory / name
        inside = {kind: result / "_nsparq" / "checkpoint" / kind / "rows" for kind in READY_MADE}
        inside |= {kind: result / kind / "rows" for kind in PIPELINES}
        return Sink(
            kind=name,
            channel=f"to-{name}",
            result=RESULT if name == "topic" else str(result),
            checkpoint=str(inside.get(name, self.directory / f"checkpoint-{name}")),
            numbers=str(self.directory / f"{name}.feather"),
        )

    def _create_topics(self) -> None:
        for node in self.cluster.serving:
            node.http("POST", "/topic/create", topic=TOPIC)
            # Of the topic that is read nothing is kept but what its channel has not passed; the
            # result, which has no channel, is kept.
            node.http("POST", "/topic/create", topic=RESULT)
            node.http("PUT", "/topic/settings", b'{"retention_bytes": 1099511627776}', topic=RESULT)

    def _master(self, stack: ExitStack) -> tuple[str, dict[str, str]]:
        if self.options.master != "standalone":
            return self.options.master, FAST
        folder = self.directory / "spark"
        folder.mkdir()
        self.spark = stack.enter_context(SparkCluster(folder, executors=self.options.executors))
        return self.spark.url, self.spark.conf

    def _driver(self, master: str, conf: dict[str, str]) -> Supervised:
        arguments = {
            "master": master,
            "conf": conf,
            "sinks": [asdict(sink) for sink in self.sinks.values()],
            "lookupd": self.cluster.lookupd_address,
            "topic": TOPIC,
            "max_rows": self.options.max_rows,
            "failures": str(self.failures),
        }
        arguments |= self._keys()
        return Supervised(self.directory, "tests.soak.exactly_once_driver", arguments, run=self.name)

    def _keys(self) -> dict[str, str]:
        """More arguments of the driver."""
        return {}

    def _publishers(self) -> list[Publisher]:
        addresses = [[str(node.flags["http_address"])] for node in self.cluster.nodes]
        if self.options.is_replicated:
            addresses = [sum(addresses, [])]
        publishers = [
            Publisher(some, TOPIC, index, len(addresses), self.options.rate / len(addresses))
            for index, some in enumerate(addresses)
        ]
        for publisher in publishers:
            publisher.start()
        return publishers

    # killing

    def _kill_them(self) -> None:
        began = time.monotonic()
        deadline = began + self.options.seconds
        order: list[str] = []
        in_a_hurry = False
        while self.report.kills.total() < self.options.kills or time.monotonic() < deadline:
            if not in_a_hurry:
                self._await_progress()
            if time.monotonic() - began > self.options.most_seconds:
                self.say(f"{clock()} no more time for kills")
                break
            if not order:
                order = [*self.options.victims]
                self.chance.shuffle(order)
            time.sleep(self.chance.uniform(*self.options.waits_s))
            victim = order.pop()
            if not self._kill(victim):
                order.insert(0, victim)
            in_a_hurry = self.chance.random() < self.options.hurry

    def _await_progress(self) -> None:
        """Wait until all sinks have committed some more micro-batches."""
        targets = [before + self.options.progress for before in self._batches()]

        def has_come() -> bool:
            self._check_failures()
            return all(now >= target for now, target in zip(self._batches(), targets, strict=True))

        try:
            wait_until(has_come, STALLED_S, interval=0.05)
        except AssertionError as error:
            raise AssertionError(self._what_is_stuck(str(error))) from None

    def _what_is_stuck(self, error: str) -> str:
        """Save everything that helps to find the reason; the logs then have Java's threads."""
        self.driver.ask_for_threads()
        away = [name for name, daemon in self.cluster.daemons() if not daemon.alive()]
        failures = [f"{sink}: {text[:3000]}" for sink, text in self._failures()[-2:]]
        said = [f"{error}; batches {self._batches()}, away: {away}, logs in {self.directory}"]
        cluster = self.spark.logs() if self.spark is not None else ""
        return "\n".join([*said, *failures, self.driver.last_words(), cluster])

    def _batches(self) -> list[int]:
        return [batches(Path(sink.checkpoint)) for sink in self.sinks.values()]

    def _check_failures(self) -> None:
        ended = sum(self.report.kills[name] for name in ("driver", "python", "jvm"))
        assert self.driver.starts <= ended + MAX_STARTS, "the driver does not stay up"
        assert not self._not_restarted, self._not_restarted
        for _, failure in self._failures():
            assert not any(name in failure for name in HOPELESS), failure

    def _kill(self, victim: str) -> bool:
        """False if there is none: it has not come back from the last kill."""
        if victim == "nsqd":
            ready = [node for node in self.cluster.nodes if self.cluster.is_ready(node)]
            done = bool(ready) and self._kill_daemon(self.chance.choice(ready))
        elif victim == "nsqlookupd":
            done = self.cluster.lookupd.alive() and self._kill_daemon(self.cluster.lookupd)
        elif victim in ("driver", "python"):
            pids = [self.driver.pid] if self.driver.is_alive else []
            if victim == "driver":
                pids += self.driver.find("jvm")
            kill(*pids)
            done = bool(pids)
        else:
            pids = self.driver.find(victim)
            done = bool(pids)
            if done:
                kill(self.chance.choice(pids))
        at = ", ".join(map(str, self._batches()))
        self.say(f"{clock()} batch {at:>4}  {'killed' if done else 'missed'} {victim}")
        if done:
            self.report.kills[victim] += 1
        return done

    def _kill_daemon(self, daemon: Killable) -> bool:
        daemon.kill()
        short, long = self.options.outages_s
        outage = (
            self.chance.uniform(short, long) if self.chance.random() < 0.25 else self.chance.uniform(0, short)
        )

        def restart() -> None:
            time.sleep(outage)
            try:
                daemon.start()
            except Exception as error:
                self._not_restarted.append(error)

        thread = threading.Thread(target=restart)
        thread.start()
        self._restarts.append(thread)
        return True

    # the end

    def _catch_up(self) -> None:
        self.say(f"{clock()} the query catches up")
        deadline, done = time.monotonic() + STALLED_S, self._batches()
        while not self._has_caught_up():
            self._check_failures()
            if self._batches() != done:
                # A backlog may take long, and is no standstill.
                deadline, done = time.monotonic() + STALLED_S, self._batches()
            if time.monotonic() > deadline:
                raise AssertionError(self._what_is_stuck("the query does not catch up"))
            time.sleep(0.5)
        self.driver.finish()

    def _has_caught_up(self) -> bool:
        """Wait for depth 0 in all channels: then the sinks have everything."""
        channels = [sink.channel for sink in self.sinks.values()]
        try:
            found = [
                node.channel_stats(TOPIC, channel) for node in self.cluster.serving for channel in channels
            ]
        except (OSError, ConnectionClosed):
            return False
        return all(stats is not None and stats["depth"] == 0 for stats in found)

    def _compare(self, publishers: list[Publisher]) -> None:
        certain = _numbers(one for publisher in publishers for one in publisher.certain)
        uncertain = _numbers(one for publisher in publishers for one in publisher.uncertain)
        self.report.published, self.report.uncertain = len(certain), len(uncertain)
        known = np.concatenate([certain, uncertain])
        for name, sink in self.sinks.items():
            found, rows = self._found(sink)
            distinct, counts = np.unique(found, return_counts=True)
            duplicates = distinct[counts > 1].tolist()
            shown = set(duplicates[:5])
            self.report.results[name] = Result(
                batches=batches(Path(sink.checkpoint)),
                found=len(found),
                lost=np.setdiff1d(certain, distinct).tolist(),
                duplicates=duplicates,
                unknown=np.setdiff1d(distinct, known).tolist(),
                origins=[text for number, text in rows() if number in shown] if shown else [],
            )

    def _found(self, sink: Sink) -> tuple[npt.NDArray[np.int64], Callable[[], Iterator[tuple[int, str]]]]:
        """The numbers in the result, and where each comes from."""
        if sink.kind != "topic":
            read = pyarrow.feather.read_table(sink.numbers)
            numbers = read["number"].to_numpy()
            if TIMES in read.column_names:
                numbers = np.repeat(numbers, read[TIMES].to_numpy())
            return numbers, lambda: (
                (row["number"], " ".join(map(str, row.values()))) for row in read.to_pylist()
            )
        bodies = [body.decode() for node in self.cluster.serving for body in read_log(node, RESULT)]
        numbers = np.array([int(body.split()[0]) for body in bodies], np.int64)
        return numbers, lambda: ((int(body.split()[0]), body) for body in bodies)

    def _failures(self) -> list[tuple[str, str]]:
        if not self.failures.exists():
            return []
        whole = self.failures.read_text().rpartition("\n")[0]
        return [(sink, text) for sink, text in map(json.loads, whole.splitlines())]


def _numbers(blocks: Iterator[range]) -> npt.NDArray[np.int64]:
    return np.array([number for block in blocks for number in block], np.int64)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.exactly_once",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sink", required=True, metavar="LIST", help=f"of {','.join(SINKS)}, at the same time"
    )
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="at least (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=0.0, metavar="N", help="of killing, at least (%(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, default=2000.0, metavar="N", help="messages a second (%(default)g)"
    )
    parser.add_argument(
        "--max-rows", type=int, default=20_000, metavar="N", help="of a micro-batch (%(default)s)"
    )
    parser.add_argument(
        "--master",
        default="standalone",
        help="a Spark master such as local[2], or standalone: a cluster with two executors (%(default)s)",
    )
    parser.add_argument("--victims", metavar="LIST", help=f"of {','.join(VICTIMS)}; default: all there are")
    parser.add_argument(
        "--replicated", action="store_true", help="one nsqd as a pair of nodes, instead of two nsqds"
    )
    parser.add_argument("--seed", type=int, help="of the random choices, to have the same again")
    parser.add_argument("--directory", type=Path, help="where everything is kept, also afterwards")
    given = parser.parse_args(arguments)
    victims = tuple(given.victims.split(",")) if given.victims else VICTIMS
    if given.master.startswith("local["):
        victims = tuple(name for name in victims if name != "executor")
    if not set(VICTIMS).issuperset(victims):
        parser.error(f"--victims: there are {', '.join(VICTIMS)}")
    sinks = tuple(given.sink.split(","))
    if not set(SINKS).issuperset(sinks):
        parser.error(f"--sink: there are {', '.join(SINKS)}")
    if given.master == "standalone" and any(name.startswith("jdbc") for name in sinks):
        parser.error("--sink jdbc: only one process can open the database: use --master 'local[2]'")
    options = Options(
        sinks=sinks,
        kills=given.kills,
        seconds=given.minutes * 60,
        rate=given.rate,
        master=given.master,
        victims=victims,
        max_rows=given.max_rows,
        is_replicated=given.replicated,
        seed=random.randrange(1 << 32) if given.seed is None else given.seed,
    )
    directory = given.directory or Path(tempfile.mkdtemp(prefix="nsparq-soak-"))
    directory.mkdir(exist_ok=True, parents=True)
    say(f"{options}\nin {directory}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    is_exact = False
    try:
        report = Run(options, directory.resolve(), say).run()
        is_exact = report.is_exact
        say(str(report))
    except AssertionError as error:
        say(str(error))
    finally:
        if is_exact and given.directory is None:
            shutil.rmtree(directory, ignore_errors=True)
    say(f"{'exactly once' if is_exact else 'NOT exactly once'}; seed {options.seed}")
    return 0 if is_exact else 1


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
