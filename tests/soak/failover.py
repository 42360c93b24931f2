"""A replicated nsqd under faults: every acknowledged message is delivered, and no id names two bodies.

    python -m tests.soak.failover --rounds 200 --coordinator etcd --seed 1

Publishers and a consumer work on a cluster of real processes while nodes are killed, stopped, cut
off from each other and from the coordinator, restarted and switched over. In the end everything that
was acknowledged must have been delivered. Prints how long publishing stood still after each kind of
fault. Exit status 1 if a message was lost, or an id was given twice.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP

from nsparq.testing import FaultProxy
from tests.replication.cluster import ClusterProcesses, NodeProcess, run_cluster
from tests.replication.coordinators import run_etcd, run_postgresql
from tests.support import wait_until
from tests.support.connection import ConnectionClosed, RawConnection

TOPIC, CHANNEL = "t", "c"
PUBLISHERS = 3
SILENCE_S = 2.0
"""An unanswered client tries again after this time."""
PAUSE_S = 0.002
"""Between two publishes of one publisher."""


class Clients:
    """Publishers and a consumer. Each looks for the node that serves."""

    def __init__(self, cluster: ClusterProcesses) -> None:
        self.acknowledged: list[bytes] = []
        self.delivered: dict[bytes, bytes] = {}
        """Ids by body."""
        self.doubled_ids: list[bytes] = []
        self.latest_ack = time.monotonic()
        self._cluster = cluster
        self._bodies: dict[bytes, bytes] = {}
        """Bodies by id."""
        self._stopping = threading.Event()
        self._consuming = threading.Event()
        self._threads = [
            *(threading.Thread(target=self._publish, args=[number]) for number in range(PUBLISHERS)),
            threading.Thread(target=self._consume),
        ]
        for thread in self._threads:
            thread.start()

    def stop_publishing(self) -> None:
        self._stopping.set()
        for thread in self._threads[:PUBLISHERS]:
            thread.join()

    def close(self) -> None:
        self._stopping.set()
        self._consuming.set()
        for thread in self._threads:
            thread.join()

    def _connect(self) -> Iterator[RawConnection]:
        """Connections to one node after the other."""
        while True:
            for node in [*self._cluster.nodes.values()]:
                try:
                    with RawConnection(node.address, timeout=SILENCE_S) as connection:
                        yield connection
                except (OSError, ConnectionClosed, AssertionError):
                    pass
            time.sleep(0.02)

    def _publish(self, number: int) -> None:
        count = 0
        for connection in self._connect():
            while not self._stopping.is_set():
                bodies = [b"%d-%d" % (number, count + one) for one in range(1 + count % 7)]
                count += len(bodies)
                try:
                    connection.mpub(TOPIC, bodies)
                except (OSError, ConnectionClosed, AssertionError):
                    break
                self.acknowledged += bodies
                self.latest_ack = time.monotonic()
                time.sleep(PAUSE_S)
            if self._stopping.is_set():
                return

    def _consume(self) -> None:
        for connection in self._connect():
            try:
                connection.sub(TOPIC, CHANNEL, rdy=100)
                while not self._consuming.is_set():
                    message = connection.read_message()
                    if self._bodies.setdefault(message.id, message.body) != message.body:
                        self.doubled_ids.append(message.id)
                    self.delivered[message.body] = message.id
                    connection.fin(message.id)
            except (OSError, ConnectionClosed, AssertionError):
                pass
            if self._consuming.is_set():
                return


class Faults:
    """One method for each kind of fault. Each returns when the fault is over."""

    def __init__(self, cluster: ClusterProcesses, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance

    def _follower(self, primary: NodeProcess) -> NodeProcess:
        return self._chance.choice([one for one in self._cluster.nodes.values() if one is not primary])

    def _wait(self, longest: float) -> None:
        time.sleep(self._chance.uniform(0, longest))

    def kill_primary(self, primary: NodeProcess) -> None:
        primary.kill()
        self._wait(6)
        primary.start()

    def kill_follower(self, primary: NodeProcess) -> None:
        follower = self._follower(primary)
        follower.kill()
        self._wait(6)
        follower.start()

    def kill_all(self, primary: NodeProcess) -> None:
        for node in self._cluster.nodes.values():
            node.kill()
        for node in self._chance.sample([*self._cluster.nodes.values()], len(self._cluster.nodes)):
            node.start()
            self._wait(0.5)

    def pause_primary(self, primary: NodeProcess) -> None:
        primary.signal(SIGSTOP)
        self._wait(8)
        primary.signal(SIGCONT)

    def pause_follower(self, primary: NodeProcess) -> None:
        follower = self._follower(primary)
        follower.signal(SIGSTOP)
        self._wait(8)
        follower.signal(SIGCONT)

    def stop_primary(self, primary: NodeProcess) -> None:
        primary.stop()
        primary.start()

    def switch_over(self, primary: NodeProcess) -> None:
        primary.http("POST", "/replication/switch_over")

    def cut_nodes(self, primary: NodeProcess) -> None:
        with self._cut(self._cluster.links[self._cluster.name_of(primary)]):
            self._wait(8)

    def cut_coordinator(self, primary: NodeProcess) -> None:
        with self._cut(self._cluster.coordinator_links[self._cluster.name_of(primary)]):
            self._wait(8)

    def isolate_primary(self, primary: NodeProcess) -> None:
        name = self._cluster.name_of(primary)
        with self._cut(self._cluster.links[name], self._cluster.coordinator_links[name]):
            self._wait(12)

    @contextmanager
    def _cut(self, *links: FaultProxy) -> Iterator[None]:
        """Nothing passes, in one direction or in both. Later all of it passes, or the rest is lost."""
        direction = self._chance.choice(["both", "both", "to_broker", "to_client"])
        fault = self._chance.choice(["stall", "drop"])
        for link in links:
            getattr(link, fault)(direction)
        yield
        for link in links:
            link.heal()
            if fault == "drop":
                link.reset()


KINDS = [name for name in vars(Faults) if not name.startswith("_")]


def run(directory: Path, coordinator: str, rounds: int, seed: int, kinds: list[str], nodes: int) -> bool:
    chance = random.Random(seed)
    names = "abcdefg"[:nodes]
    stood_still: dict[str, list[float]] = defaultdict(list)
    with run_cluster(
        directory, coordinator, names=names, has_links=True, msg_timeout=5.0, durability="os"
    ) as cluster:
        cluster.primary(names).control("create", TOPIC, CHANNEL)
        clients = Clients(cluster)
        try:
            faults = Faults(cluster, chance)
            for number in range(rounds):
                primary = cluster.primary(names)
                kind = chance.choice(kinds)
                before = time.monotonic()
                longest = _longest_silence(clients, lambda: getattr(faults, kind)(primary))  # noqa: B023
                stood_still[kind].append(longest)
                _say(
                    f"round {number + 1}: {kind}, {time.monotonic() - before:.1f} s, publishing stood still "
                    f"for {longest:.1f} s; {len(clients.acknowledged):,} acknowledged"
                )
            clients.stop_publishing()
            cluster.primary(names)
            missing: set[bytes] = set()

            def is_complete() -> bool:
                nonlocal missing
                missing = {*clients.acknowledged} - clients.delivered.keys()
                return not missing

            try:
                wait_until(is_complete, 120)
            except AssertionError:
                _say(f"lost: {sorted(missing)[:20]}")
        finally:
            clients.close()
    _say(
        f"{rounds} faults, {len(clients.acknowledged):,} acknowledged, {len(missing)} lost, "
        f"{len(clients.doubled_ids)} ids with two bodies"
    )
    for kind, times in sorted(stood_still.items()):
        median, longest = statistics.median(times), max(times)
        _say(f"  {kind:16} {len(times):4} times, median {median:5.1f} s, longest {longest:5.1f} s")
    return not missing and not clients.doubled_ids


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _longest_silence(clients: Clients, fault: Callable[[], None]) -> float:
    """Makes the fault. Gives the longest time without an acknowledgement, up to the first one after it."""
    longest, over = 0.0, threading.Event()

    def make() -> None:
        try:
            fault()
        finally:
            over.set()

    seen = clients.latest_ack
    thread = threading.Thread(target=make)
    thread.start()
    deadline = time.monotonic() + 120
    while True:
        ended, latest = over.is_set(), clients.latest_ack
        longest = max(longest, latest - seen, time.monotonic() - latest)
        if ended and latest > seen:
            break
        if not ended:
            seen = latest
        assert time.monotonic() < deadline, "publishing does not go on"
        time.sleep(0.01)
    thread.join()
    return longest


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=2, choices=range(2, 8))
    parser.add_argument("--coordinator", choices=["etcd", "postgresql"], default="etcd")
    parser.add_argument("--faults", default=",".join(KINDS), help="kinds of faults, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="failover-") as name:
        directory = Path(name)
        directory.chmod(0o711)
        started = (run_etcd if arguments.coordinator == "etcd" else run_postgresql)(directory / "coordinator")
        with started as url:
            coordinator = url.replace("http://", "etcd://")
            kinds = arguments.faults.split(",")
            is_good = run(directory, coordinator, arguments.rounds, arguments.seed, kinds, arguments.nodes)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
