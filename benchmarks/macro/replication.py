"""What replication costs: `python -m benchmarks.macro.replication --help`.

The same loads on a single nsqd and on a pair with etcd, everything on this machine, in turns. With
`--older` also on the nsqd of another checkout, without replication. Then a new follower joins a
node that has a large backlog, while publishing goes on. Ratios are medians of the rounds: the
machine may become slower, and then it does so for all sides.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from urllib.request import urlopen

from benchmarks.macro.brokers import OURS, BrokerFailed, Spawned, cpu_seconds, expand_command
from benchmarks.macro.crew import Crew
from benchmarks.macro.loads import Figure, Figures, Parameters, Round, both, latency, single_pub
from benchmarks.macro.report import describe_machine, number, print_facts
from tests.replication.coordinators import run_etcd
from tests.support.auth_server import unused_port

SINGLE, PAIR, OLDER = "single", "pair", "older"
LIMITS: Final = {
    "publish": 0.5,
    "latency at 1000/s, p50": 2.0,
    "publish, CPU": 1.3,
    "both, CPU": 1.3,
}
"""Ratios of a pair to a single nsqd that we promise. More is better for rates, less for the
others."""
BODY: Final = b"x" * 1000


class Pair(Spawned):
    """A primary, which is what is measured, and its follower."""

    def __init__(self, coordinator: str, parent: Path | None, more: str = "") -> None:
        super().__init__(OURS, [], parent)
        self._coordinator = coordinator
        self._more = more
        self._name = self.data.name
        self._follower: subprocess.Popen[bytes] | None = None
        (self.data / "secret").write_text("the secret of this benchmark")
        self.template = self._command("a")

    def _command(self, name: str) -> str:
        flags = {
            "replication-cluster": self._name,
            "replication-name": name,
            "replication-coordinator": self._coordinator,
            "replication-secret-file": self.data / "secret",
            "replication-address": f"127.0.0.1:{unused_port()}",
            "broadcast-address": "127.0.0.1",
        }
        return " ".join([OURS, *(f"--{flag}={value}" for flag, value in flags.items()), self._more])

    def __enter__(self) -> Pair:
        super().__enter__()
        self.add_follower()
        self.await_follower()
        return self

    def add_follower(self) -> None:
        storage = self.data / "follower"
        storage.mkdir()
        command = expand_command(self._command("b"), storage, [])
        with (self.data / "follower.log").open("wb") as log:
            self._follower = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def is_in_sync(self) -> bool:
        host, port = self.http_address
        with urlopen(f"http://{host}:{port}/replication", timeout=60) as answer:
            return len(json.load(answer)["in_sync"]) == 2

    def await_follower(self, timeout: float = 600.0) -> float:
        """Gives the seconds that it took."""
        began = time.monotonic()
        while not self.is_in_sync():
            if time.monotonic() - began > timeout:
                raise BrokerFailed("the follower does not get in sync:\n" + self.last_words())
            time.sleep(0.1)
        return time.monotonic() - began

    @property
    def follower_pid(self) -> int:
        assert self._follower is not None
        return self._follower.pid

    def kill(self) -> None:
        super().kill()
        if self._follower is not None:
            self._follower.kill()
            self._follower.wait()


class Single(Spawned):
    def __init__(self, template: str, parent: Path | None, more: str = "") -> None:
        super().__init__(f"{template} {more}", [], parent)


# loads


def per_message(name: str, count: int, run: Round, load: Callable[[Round], Figures]) -> Figures:
    """A load, and the processor time of the broker for each of its messages."""
    broker = run.broker
    assert isinstance(broker, Spawned)
    pids = {f"{name}, CPU": broker.pid}
    if isinstance(broker, Pair):
        pids[f"{name}, CPU of the follower"] = broker.follower_pid
    before = {label: cpu_seconds(pid) for label, pid in pids.items()}
    figures = load(run)
    for label, pid in pids.items():
        figures[label] = Figure(1e6 * (cpu_seconds(pid) - before[label]) / count, "us")
    return figures


def measure(broker: Spawned, crew: Crew, parameters: Parameters) -> Figures:
    count, single = parameters.messages, parameters.single_messages

    def fresh() -> Round:
        return Round(broker, crew, parameters)

    return {
        **per_message(
            "publish", count, fresh(), lambda run: {"publish": Figure(run.publish(count), "msg/s")}
        ),
        **per_message("both", count, fresh(), both),
        **per_message("single_pub", single, fresh(), single_pub),
        **latency(fresh()),
    }


# catching up


class Load:
    """Publishes at a steady rate, and notes how long an answer took."""

    def __init__(self, broker: Spawned, rate: float, crew: Crew, parameters: Parameters) -> None:
        self.answers = 0
        self.slowest = 0.0
        self._broker = broker
        self._pause = parameters.batch / rate
        self._parameters = parameters
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        from benchmarks.macro.wire import connect, encode_mpub, expect_ok

        command = encode_mpub("load", [BODY] * self._parameters.batch)
        with connect(self._broker.address, timeout=60) as connection:
            while not self._is_over.wait(self._pause):
                began = time.monotonic()
                connection.sendall(command)
                expect_ok(connection)
                self.answers += 1
                self.slowest = max(self.slowest, time.monotonic() - began)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


def catch_up(
    coordinator: str, crew: Crew, parameters: Parameters, size: int, rate: float, parent: Path | None
) -> Figures:
    """A new follower gets a backlog of `size` bytes while publishing goes on."""
    pair = Pair(coordinator, parent)
    try:
        pair.start()
        run = Round(pair, crew, Parameters(size=len(BODY), deadline=600.0))
        run.create_channel()
        run.publish(size // len(BODY))
        before = {name: memory(pair.pid)[name] for name in ("VmRSS", "VmHWM")}
        load = Load(pair, rate, crew, parameters)
        try:
            time.sleep(2)
            load.answers, load.slowest = 0, 0.0
            pair.add_follower()
            seconds = pair.await_follower()
            answers, slowest = load.answers, load.slowest
        finally:
            load.stop()
        primary, follower = memory(pair.pid), memory(pair.follower_pid)
        return {
            "catch-up": Figure(seconds, "s"),
            "catch-up, rate": Figure(size / seconds / (1 << 20), "MiB/s"),
            "published meanwhile": Figure(answers * parameters.batch / seconds, "msg/s"),
            "slowest answer meanwhile": Figure(1e3 * slowest, "ms"),
            "primary, resident before": Figure(before["VmRSS"], "MiB"),
            "primary, peak before": Figure(before["VmHWM"], "MiB"),
            "primary, peak": Figure(primary["VmHWM"], "MiB"),
            "follower, peak": Figure(follower["VmHWM"], "MiB"),
        }
    finally:
        pair.__exit__()


def memory(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {name: int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}


# the report


def show(found: dict[str, dict[str, list[Figure]]]) -> bool:
    """Whether all limits are kept."""
    is_good = True
    print(f"{'':32}{'unit':>8}{'single':>12}{'pair':>12}{'ratio':>8}{'limit':>8}{'older':>12}{'ratio':>8}")
    for name, sides in found.items():
        unit = next(iter(sides.values()))[0].unit
        cells = {
            side: statistics.median(one.value for one in sides[side]) if side in sides else None
            for side in (SINGLE, PAIR, OLDER)
        }
        ratio = _ratio(sides, PAIR, SINGLE)
        limit = LIMITS.get(name)
        is_kept = limit is None or ratio is None or (ratio >= limit if unit == "msg/s" else ratio <= limit)
        is_good = is_good and is_kept
        print(
            f"{name:32}{unit:>8}{number(cells[SINGLE]):>12}{number(cells[PAIR]):>12}"
            f"{number(ratio):>8}{number(limit):>8}"
            f"{number(cells[OLDER]):>12}{number(_ratio(sides, SINGLE, OLDER)):>8}"
            + ("" if is_kept else "  missed")
        )
    return is_good


def _ratio(sides: dict[str, list[Figure]], above: str, below: str) -> float | None:
    """Median of the ratios of each round."""
    if above not in sides or below not in sides:
        return None
    return statistics.median(
        one.value / other.value for one, other in zip(sides[above], sides[below], strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.macro.replication", description=__doc__)
    parser.add_argument(
        "--messages", type=int, default=1_000_000, metavar="N", help="of a load (%(default)s)"
    )
    parser.add_argument(
        "--single-messages", type=int, default=50_000, metavar="N", help="published one by one (%(default)s)"
    )
    parser.add_argument("--size", type=int, default=200, metavar="BYTES", help="of a message (%(default)s)")
    parser.add_argument(
        "--window",
        type=int,
        default=1,
        metavar="N",
        help="MPUBs a producer may have unanswered (%(default)s)",
    )
    parser.add_argument(
        "--connections", type=int, default=16, metavar="N", help="that publish one by one (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each side (%(default)s)")
    parser.add_argument(
        "--flags", default="", help="further flags of all nsqd, for instance --durability=fsync"
    )
    parser.add_argument(
        "--older", type=Path, metavar="DIR", help="another checkout, with its kernel built, to compare with"
    )
    parser.add_argument(
        "--catch-up-bytes",
        type=int,
        default=2 << 30,
        metavar="N",
        help="backlog for a new follower; 0 to leave that out (%(default)s)",
    )
    parser.add_argument(
        "--catch-up-rate",
        type=float,
        default=20_000,
        metavar="N",
        help="messages of 1,000 bytes a second meanwhile (%(default)s)",
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where data paths are made")
    options = parser.parse_args()
    parameters = Parameters(
        messages=options.messages,
        single_messages=options.single_messages,
        size=options.size,
        window=options.window,
        connections=options.connections,
        latency_seconds=4.0,
    )
    print_facts(
        [
            *describe_machine({}).items(),
            *(
                (name, getattr(options, name))
                for name in (
                    "messages",
                    "single_messages",
                    "size",
                    "window",
                    "connections",
                    "rounds",
                    "flags",
                )
            ),
        ]
    )
    found: dict[str, dict[str, list[Figure]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-etcd-")))
        coordinator = stack.enter_context(run_etcd(directory / "data")).replace("http://", "etcd://")
        crew = stack.enter_context(Crew())
        sides: dict[str, Callable[[], Spawned]] = {
            SINGLE: lambda: Single(OURS, options.data_dir, options.flags),
            PAIR: lambda: Pair(coordinator, options.data_dir, options.flags),
        }
        if options.older:
            older = f"env PYTHONPATH={shlex.quote(str(options.older.resolve() / 'src'))} {OURS}"
            sides[OLDER] = lambda: Single(older, options.data_dir, options.flags)
        for place in range(options.rounds):
            for side in [*sides] if place % 2 == 0 else [*reversed(sides)]:
                with sides[side]() as broker:
                    for name, figure in measure(broker, crew, parameters).items():
                        found[name][side].append(figure)
                print(f"round {place + 1}: {side} is done", file=sys.stderr)
        is_good = show(found) if options.rounds else True
        if options.catch_up_bytes:
            print(f"\na new follower gets {options.catch_up_bytes / (1 << 30):.1f} GiB")
            for name, (value, unit) in catch_up(
                coordinator, crew, parameters, options.catch_up_bytes, options.catch_up_rate, options.data_dir
            ).items():
                print(f"{name:32}{unit:>8}{number(value):>12}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
