"""Does a daemon leak? The memory of nsqd, nsqlookupd and nsqadmin while clients and topics come and
go.

    python -m tests.soak.memory --minutes 24

Four threads repeat one round: they create a topic, connect clients that publish, finish, requeue
and defer messages and leave in the middle of a command, and delete the topic. Beside them one
thread publishes to a lasting topic and consumes it, and one loads the pages of nsqadmin. The table
shows the memory of each daemon (RssAnon) at each tenth of the run. The exit status is 1 if nsqd or
nsqlookupd grew by more than `--allowed` MB a minute in the second half. nsqadmin is not judged: its
history fills for a week, up to `--history-memory`. Topic names repeat, because nsqlookupd remembers
the name of every topic, as in NSQ.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from tests.faults.load import anonymous_mib
from tests.server.test_left_behind import come_and_go
from tests.soak.support import Cluster, clock, free_ports
from tests.support import BrokerProcess, wait_until

THREADS = 4
NAMES = 250
"""Topic names of each thread."""
PAGES = ("/", "/topics", "/nodes", "/topics/lasting", "/api/topics")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def lasting(nsqd: BrokerProcess) -> None:
    """A thousand messages through a topic that stays."""
    with nsqd.connect() as consumer, nsqd.connect() as publisher:
        consumer.identify(client_id="lasting")
        consumer.sub("lasting", "c", rdy=1000)
        publisher.mpub("lasting", [b"%d" % i for i in range(1000)])
        for message in consumer.read_messages(1000):
            consumer.fin(message.id)
        consumer.barrier()


class Load:
    """Threads that repeat a step until told to stop."""

    def __init__(self) -> None:
        self.rounds = 0
        self.problems: list[BaseException] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def repeat(self, step: Callable[[int], object], *, pause_s: float = 0.0) -> None:
        def run() -> None:
            number = 0
            try:
                while not self._stopping.wait(pause_s):
                    step(number)
                    number += 1
                    self.rounds += 1
            except BaseException as problem:
                self.problems.append(problem)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)


def growth_mb_per_minute(samples: list[tuple[float, float]]) -> float:
    """Slope of the line through samples of (seconds, MB) by least squares."""
    mean_s = sum(second for second, _ in samples) / len(samples)
    mean_mb = sum(mb for _, mb in samples) / len(samples)
    covariance = sum((second - mean_s) * (mb - mean_mb) for second, mb in samples)
    return 60 * covariance / sum((second - mean_s) ** 2 for second, _ in samples)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.memory", description=__doc__)
    parser.add_argument("--minutes", type=float, default=24.0)
    parser.add_argument("--allowed", type=float, default=0.1, help="MB a minute in the second half")
    arguments = parser.parse_args()
    duration_s = 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory), nodes=1) as cluster:
        (nsqd,) = cluster.nodes
        (port,) = free_ports(1)
        base = f"http://127.0.0.1:{port}"
        log = (Path(directory) / "nsqadmin.log").open("wb")
        admin = subprocess.Popen(
            [sys.executable, "-m", "nsparq.admin.main", f"--http-address=127.0.0.1:{port}"]
            + [f"--lookupd-http-address={cluster.lookupd_address}", "--poll-interval=2s"],
            stderr=log,
        )

        refused: Counter[int] = Counter()

        def page(number: int) -> None:
            try:
                with urlopen(base + PAGES[number % len(PAGES)], timeout=60) as answer:
                    answer.read()
            except HTTPError as error:
                refused[error.code] += 1

        def is_up() -> bool:
            try:
                page(0)
            except OSError:
                return False
            return True

        load = Load()
        pids = {"nsqd": nsqd.pid, "nsqlookupd": cluster.lookupd.pid, "nsqadmin": admin.pid}
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
        try:
            wait_until(is_up, what="nsqadmin")
            lasting(nsqd)
            for thread in range(THREADS):
                load.repeat(
                    lambda number, thread=thread: come_and_go(nsqd, f"t-{thread}-{number % NAMES}"),
                    pause_s=0.1,
                )
            load.repeat(lambda _: lasting(nsqd), pause_s=1.0)
            load.repeat(page, pause_s=1.0)
            began = time.monotonic()
            say(f"{'':8}" + "".join(f"{name:>12}" for name in pids) + f"{'rounds':>12}")
            for tenth in range(1, 11):
                while (now_s := time.monotonic() - began) < tenth * duration_s / 10 and not load.problems:
                    for name, pid in pids.items():
                        samples[name].append((now_s, anonymous_mib(pid)))
                    time.sleep(min(2.0, duration_s / 100))
                say(
                    f"{clock()}"
                    + "".join(f"{samples[name][-1][1]:>9.1f} MB" for name in pids)
                    + f"{load.rounds:>12,}"
                )
        finally:
            load.stop()
            admin.terminate()
            admin.wait(60)
            log.close()
    if refused:
        say(f"pages of nsqadmin that were refused, by status: {dict(refused)}")
    for problem in load.problems:
        say(f"problem: {problem!r}")
    too_much = bool(load.problems)
    for name, points in samples.items():
        growth = growth_mb_per_minute(points[len(points) // 2 :])
        is_judged = name != "nsqadmin"
        too_much |= is_judged and growth > arguments.allowed
        say(f"{name}: {growth:+.3f} MB a minute in the second half" + ("" if is_judged else " (history)"))
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
