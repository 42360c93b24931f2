"""A replicated nsqd under faults: every acknowledged message is delivered, and no id names two
bodies.

    python -m tests.soak.failover --rounds 200 --coordinator etcd --seed 1

Real nodes, a real coordinator and clients (pynsq, gnsq, nsqjs, ours, and one that tries again at
once) run on machines of their own: network namespaces that a bridge joins. The disks of the nodes
are small. One fault follows the other: processes are killed, stopped and restarted, packets between
two machines or all packets of one get lost, disks are full, slow or stand still. In the end every
client must have received everything that was acknowledged to it. Prints for each kind of fault what
was acknowledged and lost, and how long clients stood still. Exit status 1 if a message was lost, an
id names two bodies, or a client does not work again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

from tests.replication.cluster import ClusterProcesses, NodeProcess
from tests.replication.coordinators import CoordinatorProcess, start_etcd, start_postgresql
from tests.soak.failover_traffic import CHANNEL, RETRYING, Library, Retrying, client_commands
from tests.support import bridge, wait_until
from tests.support.bridge import HERE, Network
from tests.support.lookupd import LookupdProcess

COORDINATOR = "coordinator"
DISK = "64m"
PATIENCE_S = 60.0
"""Clients that do not work again after this time are stuck."""
AFTER_A_KILL = ("kill_primary",)
AFTER_A_PARTITION = ("isolate_primary",)


class Machines(ClusterProcesses):
    """Nodes on machines and disks of their own."""

    def __init__(
        self, network: Network, directory: Path, coordinator: CoordinatorProcess, names: str, **flags: Any
    ) -> None:
        self.network = network
        self.coordinator = coordinator
        for name in names:
            (directory / name).mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(directory / name)]
            subprocess.run(mount, check=True)
        super().__init__(directory, coordinator.url, names, **flags)

    def close(self) -> None:
        super().close()
        subprocess.run(["umount", *(str(self._directory / name) for name in self.nodes)], check=True)

    def _data_path(self, name: str) -> Path:
        return self._directory / name / "data"

    def _host(self, name: str) -> str:
        return self.network.address(name)

    def _command(self, name: str) -> tuple[str, ...]:
        nsqd = [sys.executable, "-m", "tests.soak.slow_nsqd", str(self.pace(name))]
        return (*self.network.inside(name), *nsqd)

    def pace(self, name: str) -> Path:
        """The file that makes its disk slow."""
        return self._directory / f"{name}.pace"


class Faults:
    """One method for each kind of fault. Each returns when the fault is over."""

    def __init__(self, machines: Machines, chance: random.Random, scale: float) -> None:
        self._machines = machines
        self._chance = chance
        self._scale = scale
        """The times that faults last are multiplied by this."""

    def kill_primary(self, primary: str, follower: str) -> None:
        with self._killed(primary):
            self._wait(0, 8)

    def kill_follower(self, primary: str, follower: str) -> None:
        with self._killed(follower):
            self._wait(0, 8)

    def restart_everything(self, primary: str, follower: str) -> None:
        nodes = [*self._machines.nodes.values()]
        self._machines.coordinator.kill()
        for node in nodes:
            node.kill()
        self._chance.shuffle(nodes)
        for node in nodes[:1]:
            node.start()
        self._wait(0, 1)
        self._machines.coordinator.start()
        for node in nodes[1:]:
            node.start()

    def restart_coordinator(self, primary: str, follower: str) -> None:
        self._machines.coordinator.kill()
        self._wait(0, 8)
        self._machines.coordinator.start()

    def pause_primary(self, primary: str, follower: str) -> None:
        self._pause(self._machines.nodes[primary])

    def pause_follower(self, primary: str, follower: str) -> None:
        self._pause(self._machines.nodes[follower])

    def pause_coordinator(self, primary: str, follower: str) -> None:
        self._pause(self._machines.coordinator)

    def stop_primary(self, primary: str, follower: str) -> None:
        self._machines.nodes[primary].stop()
        self._machines.nodes[primary].start()

    def switch_over(self, primary: str, follower: str) -> None:
        self._machines.nodes[primary].http("POST", "/replication/switch_over")

    def cut_primary_and_follower(self, primary: str, follower: str) -> None:
        self._cut(primary, follower)

    def cut_primary_and_coordinator(self, primary: str, follower: str) -> None:
        self._cut(primary, COORDINATOR)

    def cut_follower_and_coordinator(self, primary: str, follower: str) -> None:
        self._cut(follower, COORDINATOR)

    def cut_primary_and_clients(self, primary: str, follower: str) -> None:
        self._cut(primary, HERE)

    def cut_follower_and_clients(self, primary: str, follower: str) -> None:
        self._cut(follower, HERE)

    def isolate_primary(self, primary: str, follower: str) -> None:
        self._isolate(primary)

    def isolate_follower(self, primary: str, follower: str) -> None:
        self._isolate(follower)

    def fill_disk_of_primary(self, primary: str, follower: str) -> None:
        self._fill(primary)

    def fill_disk_of_follower(self, primary: str, follower: str) -> None:
        self._fill(follower)

    def slow_disk_of_primary(self, primary: str, follower: str) -> None:
        self._slow(primary, self._chance.uniform(0.02, 0.3))

    def slow_disk_of_follower(self, primary: str, follower: str) -> None:
        self._slow(follower, self._chance.uniform(0.02, 0.3))

    def stall_disk_of_primary(self, primary: str, follower: str) -> None:
        self._slow(primary, PATIENCE_S)

    def stall_disk_of_follower(self, primary: str, follower: str) -> None:
        self._slow(follower, PATIENCE_S)

    def _wait(self, shortest: float, longest: float) -> None:
        time.sleep(self._chance.uniform(shortest, longest) * self._scale)

    @contextmanager
    def _killed(self, name: str) -> Iterator[None]:
        self._machines.nodes[name].kill()
        yield
        self._machines.nodes[name].start()

    def _pause(self, process: NodeProcess | CoordinatorProcess) -> None:
        process.signal(SIGSTOP)
        self._wait(0, 10)
        process.signal(SIGCONT)

    def _cut(self, first: str, second: str) -> None:
        """In both directions, or in one."""
        network = self._machines.network
        directions = [(first, second), (second, first)]
        for source, target in self._chance.choice([directions, directions, directions[:1], directions[1:]]):
            network.cut(source, target)
        self._wait(0, 12)
        network.heal()

    def _isolate(self, name: str) -> None:
        network = self._machines.network
        for other in (HERE, COORDINATOR, *self._machines.nodes):
            if other != name:
                network.cut(name, other)
                network.cut(other, name)
        self._wait(10, 20)
        network.heal()

    def _fill(self, name: str) -> None:
        path = self._machines.nodes[name].data_path.with_name("filling")
        with path.open("wb", buffering=0) as file, suppress(OSError):
            # Until no space is left.
            while file.write(bytes(1 << 16)):
                pass
        self._wait(0, 8)
        path.unlink()

    def _slow(self, name: str, pause: float) -> None:
        self._machines.pace(name).write_text(str(pause))
        self._wait(0, 12)
        self._machines.pace(name).unlink()


KINDS = [name for name in vars(Faults) if not name.startswith("_")]


class Run:
    def __init__(self, machines: Machines, lookupd: str, chance: random.Random, scale: float) -> None:
        self._machines = machines
        self._chance = chance
        self._names = "".join(machines.nodes)
        self._faults = Faults(machines, chance, scale)
        self.rounds: Counter[str] = Counter()
        self.stood_still: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        """Seconds, by fault, client, and publishing or consuming."""
        nsqd = [":".join(map(str, node.address)) for node in machines.nodes.values()]
        commands = client_commands()
        primary = machines.primary(self._names)
        for name in (RETRYING, *commands):
            primary.control("create", name.replace(" ", "-"), CHANNEL)
        self.clients: list[Library | Retrying] = [
            Retrying(machines),
            *(Library(name, command, lookupd, nsqd) for name, command in commands.items()),
        ]

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def fault(self, kind: str) -> None:
        primary = self._machines.name_of(self._machines.primary(self._names))
        follower = self._chance.choice([name for name in self._names if name != primary])
        self.await_clients(f"before {kind}")
        for client in self.clients:
            client.begin(kind)
        before = time.monotonic()
        getattr(self._faults, kind)(primary, follower)
        lasted = time.monotonic() - before
        self.await_clients(f"after {kind}")
        self.rounds[kind] += 1
        shown = []
        for client in self.clients:
            for what in ("publishing", "consuming"):
                longest = getattr(client, what).longest
                self.stood_still[kind, client.name, what].append(longest)
            shown.append(f"{client.name} {client.publishing.longest:.1f}/{client.consuming.longest:.1f}")
        say(f"round {self.rounds.total()}: {kind} of {primary}, {lasted:.1f} s; {', '.join(shown)} s")

    def await_clients(self, when: str) -> None:
        """Wait until all of them publish and consume."""
        since = time.monotonic()

        def stuck() -> list[Library | Retrying]:
            return [client for client in self.clients if not client.has_resumed(since)]

        def describe() -> str:
            node = self._machines.find()
            stats = [node and node.channel_stats(client.topic, CHANNEL) for client in stuck()]
            return "\n".join([f"{when}: not working:", *map(str, stuck()), *map(str, stats)])

        wait_until(lambda: not stuck(), PATIENCE_S, what=describe)

    def finish(self) -> None:
        """Wait until everything that was acknowledged has come, as far as it does."""
        for client in self.clients:
            client.stop_publishing()
        # Read the last acknowledgements.
        time.sleep(1)
        try:
            wait_until(lambda: not any(client.missing for client in self.clients), PATIENCE_S)
        except AssertionError:
            for client in self.clients:
                if client.missing:
                    say(f"lost: {client.name}: {sorted(client.missing)[:20]}")

    # the report

    @property
    def is_good(self) -> bool:
        return not any(client.missing or client.doubled_ids for client in self.clients)

    def report(self) -> None:
        acknowledged: Counter[str] = Counter()
        lost: Counter[str] = Counter()
        doubled: Counter[str] = Counter()
        for client in self.clients:
            acknowledged.update(client.acknowledged.values())
            lost.update(client.acknowledged[body] for body in client.missing)
            doubled.update(client.doubled_ids)
        say(
            f"\n{self.rounds.total()} faults, {acknowledged.total():,} messages acknowledged, "
            f"{lost.total()} lost, {doubled.total()} ids with two bodies"
        )
        say(
            f"{'fault':30}{'rounds':>7}{'acknowledged':>14}{'lost':>6}{'two bodies':>12}"
            f"{'publishing p50':>16}{'max':>7}{'consuming p50':>16}{'max':>7}"
        )
        for kind in sorted(self.rounds):
            counts = f"{acknowledged[kind]:14,}{lost[kind]:6}{doubled[kind]:12}"
            say(f"{kind:30}{self.rounds[kind]:7}{counts}{self._times([kind], RETRYING)}")
        for title, kinds in (("a kill", AFTER_A_KILL), ("a silent partition", AFTER_A_PARTITION)):
            if any(self.rounds[kind] for kind in kinds):
                say(f"\nafter {title} of the primary: seconds until it works again")
                say(f"{'':20}{'publishing p50':>16}{'max':>7}{'consuming p50':>16}{'max':>7}")
                for client in self.clients:
                    say(f"{client.name:20}{self._times(kinds, client.name)}")

    def _times(self, kinds: Sequence[str], client: str) -> str:
        shown = ""
        for what in ("publishing", "consuming"):
            times = [one for kind in kinds for one in self.stood_still[kind, client, what]]
            shown += f"{statistics.median(times):16.1f}{max(times):7.1f}"
        return shown


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def in_turn(kinds: list[str], chance: random.Random) -> Iterator[str]:
    """All kinds, in one random order after the other."""
    while True:
        yield from chance.sample(kinds, len(kinds))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=len(KINDS))
    parser.add_argument("--nodes", type=int, default=2, choices=range(2, 8))
    parser.add_argument("--coordinator", choices=["etcd", "postgresql"], default="etcd")
    parser.add_argument("--durability", choices=["os", "fsync"], default="os")
    parser.add_argument(
        "--lease", type=float, default=3.0, help="--replication-lease of the nodes, in seconds"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the times that faults last")
    parser.add_argument("--faults", default=",".join(KINDS), help="kinds of faults, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    kinds = arguments.faults.split(",")
    if not {*KINDS}.issuperset(kinds):
        parser.error(f"--faults: there are {', '.join(KINDS)}")
    bridge.enter()
    chance = random.Random(arguments.seed)
    names = "abcdefg"[: arguments.nodes]
    start = start_etcd if arguments.coordinator == "etcd" else start_postgresql
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="failover-")))
        directory.chmod(0o711)
        network = Network([*names, COORDINATOR])
        stack.callback(network.close)
        where = network.address(COORDINATOR), network.inside(COORDINATOR)
        coordinator = stack.enter_context(start(directory / COORDINATOR, *where))
        here = network.address(HERE)
        lookupd = LookupdProcess(
            tcp_address=f"{here}:4160", http_address=f"{here}:4161", broadcast_address=here
        )
        stack.callback(lookupd.close)
        machines = Machines(
            network,
            directory,
            coordinator,
            names,
            replication_lease=arguments.lease,
            lookupd_tcp_address=f"{here}:4160",
            durability=arguments.durability,
            msg_timeout=5.0,
            max_bytes_per_file=1 << 20,
        )
        stack.callback(machines.close)
        run = Run(machines, f"{here}:4161", chance, arguments.scale)
        stack.callback(run.close)
        run.await_clients("at the start")
        for kind in islice(in_turn(kinds, chance), arguments.rounds):
            run.fault(kind)
        run.finish()
        run.report()
        return 0 if run.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
