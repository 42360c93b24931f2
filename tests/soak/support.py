"""What the long runs share: daemons that come back on the same addresses, and a Spark driver that
is started again whenever it has ended, as a supervisor would.

    with Cluster(directory) as cluster:             two nsqd, and an nsqlookupd that they register with
    with Pair(directory) as cluster:                one nsqd, as a pair of nodes
        cluster.nodes, cluster.lookupd              BrokerProcess, LookupdProcess: kill(), start()
        with Supervised(directory, "tests.soak.some_driver", {...}) as driver:
            driver.find("jvm")                      pids of one kind among all that the run has started
            kill(pid)
            driver.finish()                         ask the program to end, and wait for it
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nsparq.storage.raw_batch import iter_batches
from tests.replication.cluster import ClusterProcesses
from tests.replication.coordinators import start_etcd
from tests.support import BrokerProcess, wait_until
from tests.support.lookupd import LookupdProcess

MARK = "NSPARQ_SOAK_RUN"
"""Environment variable that marks every process of a run."""
PORTS = range(12_000, 32_000)
"""Below the kernel's ports for outgoing connections, so that a port stays free during a restart."""
SMALL_FILE = 1 << 20
"""Bytes of a log file, so that what has been read is removed while a run lasts."""


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


class Cluster:
    """Real processes with data directories of their own."""

    def __init__(self, directory: Path, *, nodes: int = 2, **flags: Any) -> None:
        self.directory = directory
        self.nodes: list[BrokerProcess] = []
        self.lookupd: LookupdProcess
        self._count = nodes
        self._flags = {"max_bytes_per_file": SMALL_FILE, **flags}

    def __enter__(self) -> Cluster:
        ports = [f"127.0.0.1:{port}" for port in free_ports(2 * (self._count + 1))]
        self.lookupd = LookupdProcess(tcp_address=ports.pop(), http_address=ports.pop())
        try:
            for number in range(self._count):
                data = self.directory / f"nsqd-{number}"
                data.mkdir()
                self.nodes.append(
                    BrokerProcess(
                        data,
                        tcp_address=ports.pop(),
                        http_address=ports.pop(),
                        https_address="",
                        broadcast_address="127.0.0.1",
                        lookupd_tcp_address=self.lookupd.flags["tcp_address"],
                        **self._flags,
                    )
                )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for name, daemon in self.daemons():
            daemon.kill()
            shutil.copyfile(daemon.log, self.directory / f"{name}.log")
            daemon.log.unlink(missing_ok=True)

    def daemons(self) -> Iterator[tuple[str, BrokerProcess]]:
        yield from ((f"nsqd-{number}", node) for number, node in enumerate(self.nodes))
        yield "nsqlookupd", self.lookupd

    @property
    def serving(self) -> list[BrokerProcess]:
        """The nsqds that clients use."""
        return self.nodes

    def is_ready(self, node: BrokerProcess) -> bool:
        """Whether it may be killed."""
        return node.alive()

    @property
    def lookupd_address(self) -> str:
        return str(self.lookupd.flags["http_address"])


class Pair(Cluster):
    """One nsqd as two nodes with etcd: when the one that serves is killed, the other takes over."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._stack = ExitStack()

    def __enter__(self) -> Pair:
        with ExitStack() as stack:
            ports = [f"127.0.0.1:{port}" for port in free_ports(2)]
            self.lookupd = LookupdProcess(tcp_address=ports.pop(), http_address=ports.pop())
            url = stack.enter_context(start_etcd(self.directory / "etcd")).url
            self._pair = ClusterProcesses(
                self.directory, url, lookupd_tcp_address=self.lookupd.flags["tcp_address"], **self._flags
            )
            self.nodes = [*self._pair.nodes.values()]
            self._pair.primary("ab")
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        super().close()
        self._stack.close()

    @property
    def serving(self) -> list[BrokerProcess]:
        return [self._pair.primary()]

    def is_ready(self, node: BrokerProcess) -> bool:
        """Only if the other node has everything, too."""
        return self._pair.find("ab") is node

    @property
    def fail_overs(self) -> int:
        status = self._pair.primary().status()
        assert status is not None
        return int(status["epoch"]) - 1


# processes


class Process(NamedTuple):
    pid: int
    parent: int
    command: str

    @property
    def is_alive(self) -> bool:
        found = _look_at(self.pid)
        return found is not None and found.command == self.command


def _look_at(pid: int) -> Process | None:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return None if status[0] == "Z" else Process(pid, int(status[1]), command)


def marked(run: str) -> list[Process]:
    """All processes of a run, except this one."""
    wanted = f"{MARK}={run}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = wanted in (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or not ours to look at
            continue
        process = _look_at(int(entry.name)) if is_ours else None
        if process is not None and process.pid != os.getpid():
            found.append(process)
    return found


def kill(*pids: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


DAEMONS = ("pyspark.daemon", "nsparq.spark.session.daemon")


def kind_of(process: Process, all_of_them: dict[int, Process]) -> str | None:
    """Which part of Spark it is: jvm, executor, worker (Python that runs tasks), source (Python
    that says how far to read) or planner (Python that the driver starts for the rest, a sink's
    commit for instance)."""
    command = process.command
    if "org.apache.spark.deploy.SparkSubmit" in command:
        return "jvm"
    if "CoarseGrainedExecutorBackend" in command:
        return "executor"
    if any(f"-m {name}" in command for name in DAEMONS):
        parent = all_of_them.get(process.parent)
        if parent is None or parent.command != command:
            return None  # the one that they are forked from
        return "worker" if command.rstrip().endswith("pyspark.worker") else "planner"
    if "python_streaming_source_runner" in command:
        return "source"
    return None


class Supervised:
    """One of our Spark programs, restarted when it ends.

    It is called with the path of a file with its arguments, as JSON, and ends when a line comes on
    its input.
    """

    def __init__(self, directory: Path, module: str, arguments: dict[str, Any], *, run: str) -> None:
        self.directory = directory
        self.run = run
        self.starts = 0
        self.log = directory / "driver.log"
        self._file = directory / "driver.json"
        self._file.write_text(json.dumps(arguments))
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._supervise)

    def __enter__(self) -> Supervised:
        self._start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_supervision()
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def find(self, kind: str) -> list[int]:
        all_of_them = {process.pid: process for process in marked(self.run)}
        return [pid for pid, process in all_of_them.items() if kind_of(process, all_of_them) == kind]

    def finish(self, timeout: float = 120.0) -> None:
        """Wait for the program to end; its exit code must be 0."""
        self._end_supervision()
        assert self._process is not None and self._process.stdin is not None
        assert self.is_alive, self.last_words()
        self._process.stdin.write(b"finish\n")
        self._process.stdin.close()
        status = self._process.wait(timeout)
        assert status == 0, self.last_words()

    def ask_for_threads(self) -> None:
        """Java writes what each of its threads does to its standard output: the driver's log, or a
        file beside an executor's."""
        for kind in ("jvm", "executor"):
            for pid in self.find(kind):
                os.kill(pid, signal.SIGQUIT)

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def _start(self) -> None:
        command = [sys.executable, "-m", self._module, str(self._file)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, MARK: self.run}, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        self.starts += 1

    def _supervise(self) -> None:
        while not self._is_over.wait(0.05):
            process = self._process
            if process is not None and process.poll() is not None:
                if process.stdin is not None:
                    process.stdin.close()
                if self._is_over.wait(0.3):
                    return
                self._start()

    def _end_supervision(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()


def end_all(run: str, grace: float = 15.0) -> list[str]:
    """Wait for the processes of a run, and kill those that do not end; gives their command
    lines."""
    try:
        wait_until(lambda: not marked(run), grace, interval=0.1)
    except AssertionError:
        left = marked(run)
        kill(*(process.pid for process in left))
        wait_until(lambda: not marked(run), 10, interval=0.1)
        return [process.command[:200] for process in left]
    return []


def read_log(node: BrokerProcess, topic: str) -> Iterator[bytes]:
    """All messages of a topic's log."""
    positions = node.request("GET", f"/topic/positions?topic={topic}").expect_json()
    at = positions["earliest"]
    while at < positions["latest"]:
        answer = node.request("GET", f"/topic/read?topic={topic}&from={at}&verify=true")
        assert (answer.status, answer.header("X-Nsparq-Lost")) == (200, "0"), answer.headers
        gaps = json.loads(answer.header("X-Nsparq-Gaps") or "[]")
        for batch in iter_batches(answer.body):
            batch = batch.between(at, positions["latest"])
            for number, body in enumerate(batch.bodies(), batch.base):
                if not any(low <= number < high for low, high in gaps):
                    yield bytes(body)
        at = int(answer.header("X-Nsparq-Next") or 0)


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set for processes started meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def batches(checkpoint: Path, log: str = "commits") -> int:
    """Number of committed micro-batches (`offsets`: of planned ones)."""
    try:
        numbers = [int(name) for name in os.listdir(checkpoint / log) if name.isdigit()]
    except FileNotFoundError:
        return 0
    return max(numbers, default=-1) + 1


def table(rows: list[tuple[str, Any]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        f"{name:<{width}}  {value:>12,}" if isinstance(value, int) else f"{name:<{width}}  {value:>12}"
        for name, value in rows
    )


def clock() -> str:
    return time.strftime("%H:%M:%S")
