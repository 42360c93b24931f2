"""Three nsqd and two nsqlookupd, killed under load: consumers go on, registrations heal, nothing is
lost."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nsparq.server.lookup_peer import LAST_RETRY_S
from tests.support import REFERENCE, BrokerProcess, HttpConnection, RawConnection, wait_until
from tests.support.lookupd import LookupdProcess
from tests.support.polling import DEADLINE

from .load import LOST, Batch, Publisher

TOPIC = "t"
NODES = 3
LOOKUPDS = 2
CHECKPOINT = 0.2
HEALED_S = LAST_RETRY_S + 3.0
"""The longest it may take after a daemon is back until all the nsqlookupds say what they should."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(REFERENCE), reason="the reference loses what it holds in memory"),
]

Address = tuple[str, int]


class Directory:
    """An nsqlookupd that keeps its ports, for others know them, and that may be away."""

    def __init__(self, stack: ExitStack) -> None:
        self.process = stack.enter_context(LookupdProcess())
        self.tcp, self.http = _host_port(self.process.address), _host_port(self.process.http_address)
        self.process.flags["tcp_address"] = "{}:{}".format(*self.tcp)
        self.process.flags["http_address"] = "{}:{}".format(*self.http)

    def lookup(self, topic: str) -> tuple[set[int], set[str]]:
        """Ports of the producers, and channels. Raises OSError while it is away."""
        with HttpConnection(self.http) as connection:
            answer = connection.request("GET", f"/lookup?topic={topic}")
        if answer.status == 404:
            return set(), set()
        found = json.loads(answer.body)
        return {producer["tcp_port"] for producer in found["producers"]}, set(found["channels"])


class CalmPublisher(Publisher):
    """So many messages as five processes and pynsq can take on a busy machine."""

    def next_batch(self) -> Batch:
        time.sleep(0.005)
        return super().next_batch()[:5]


class Node:
    """An nsqd and the one who publishes to it."""

    def __init__(self, stack: ExitStack, path: Path, number: int, directories: list[Directory]) -> None:
        data_path = path / str(number)
        data_path.mkdir()
        self.process = stack.enter_context(
            BrokerProcess(
                data_path,
                node_id=number,
                broadcast_address="127.0.0.1",
                lookupd_tcp_address=tuple("{}:{}".format(*directory.tcp) for directory in directories),
                checkpoint_interval=CHECKPOINT,
            )
        )
        self.gate = threading.Event()
        """Closed while the broker is away, when its port may be anybody's."""
        self.publisher = CalmPublisher(self.process, self.gate, TOPIC, number)

    @property
    def port(self) -> int:
        return _host_port(self.process.address)[1]

    def start_publishing(self) -> None:
        self.gate.set()
        self.publisher.start()

    def stop_publishing(self) -> None:
        self.gate.set()
        if self.publisher.is_alive():
            self.publisher.stop()

    def acknowledged(self) -> set[bytes]:
        return {body for batch in tuple(self.publisher.acknowledged) for body in batch}


class Consumer:
    """Asks the nsqlookupds again and again, and has a connection to every nsqd that they name."""

    def __init__(self, directories: list[Directory], channel: str) -> None:
        self.received: Counter[bytes] = Counter()
        self.problems: list[BaseException] = []
        self._directories = directories
        self._channel = channel
        self._readers: dict[int, threading.Thread] = {}
        self._stopping = threading.Event()
        self._finder = threading.Thread(target=self._discover, daemon=True)
        self._finder.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in (self._finder, *self._readers.copy().values()):
            thread.join(DEADLINE)
            assert not thread.is_alive()
        assert not self.problems, self.problems

    def _discover(self) -> None:
        while not self._stopping.wait(0.05):
            for directory in self._directories:
                try:
                    ports, _ = directory.lookup(TOPIC)
                except LOST:
                    continue
                for port in ports - self._readers.keys():
                    reader = threading.Thread(target=self._read, args=(port,), daemon=True)
                    self._readers[port] = reader
                    reader.start()

    def _read(self, port: int) -> None:
        try:
            with RawConnection(("127.0.0.1", port)) as connection:
                connection.identify()
                connection.sub(TOPIC, self._channel, rdy=200)
                while not self._stopping.is_set():
                    try:
                        message = connection.read_message(0.1)
                    except TimeoutError:
                        continue
                    self.received[message.body] += 1
                    connection.fin(message.id)
        except LOST:
            time.sleep(0.01)
        except BaseException as problem:
            self.problems.append(problem)
        finally:
            del self._readers[port]


class PynsqConsumer:
    """A published client, in a process of its own."""

    def __init__(self, directories: list[Directory], channel: str) -> None:
        self.received: Counter[bytes] = Counter()
        script = Path(__file__).with_name("drive_pynsq_cluster.py")
        addresses = ["{}:{}".format(*directory.http) for directory in directories]
        self._process = subprocess.Popen(
            [sys.executable, str(script), TOPIC, channel, *addresses], stdout=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.received[line.rstrip(b"\n")] += 1

    def stop(self) -> None:
        died = self._process.poll() is not None
        self._process.kill()
        self._process.wait()
        self._reader.join(DEADLINE)
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert not died, "pynsq gave up"


class Cluster:
    """Everything together. `facts` gathers what is worth printing."""

    def __init__(self, stack: ExitStack, path: Path) -> None:
        self.directories = [Directory(stack) for _ in range(LOOKUPDS)]
        self.nodes = [Node(stack, path, number, self.directories) for number in range(NODES)]
        for node in self.nodes:
            for channel in ("own", "pynsq"):
                node.process.control("create", TOPIC, channel)
        self.consumers: dict[str, Consumer | PynsqConsumer] = {
            "own": Consumer(self.directories, "own"),
            "pynsq": PynsqConsumer(self.directories, "pynsq"),
        }
        stack.callback(self.stop)
        self.facts: list[str] = []

    def start(self) -> None:
        self.await_registered(TOPIC, {"own", "pynsq"})
        for node in self.nodes:
            node.start_publishing()
        self.await_progress(self.nodes, "everything is there")

    def stop(self) -> None:
        with ExitStack() as stack:
            for thing in self.consumers.values():
                stack.callback(thing.stop)
            for node in self.nodes:
                stack.callback(node.stop_publishing)

    def await_registered(self, topic: str, channels: set[str], among: list[Directory] | None = None) -> None:
        """Until the nsqlookupds name all nsqd, these and no others, and all channels."""
        wanted = {node.port for node in self.nodes}

        def is_so() -> bool:
            found = [directory.lookup(topic) for directory in among or self.directories]
            return all(ports == wanted and channels <= known for ports, known in found)

        wait_until(is_so, HEALED_S, what=f"{topic} registered by {wanted} with {channels}")

    def await_progress(self, nodes: list[Node], when: str, messages: int = 200) -> None:
        """Until each of these nsqd has acknowledged further messages, and each consumer has
        received one of those of each nsqd."""
        before = [node.acknowledged() for node in nodes]
        for node, known in zip(nodes, before, strict=True):

            def has_gone_on(node: Node = node, known: set[bytes] = known) -> bool:
                new = node.acknowledged() - known
                return len(new) >= messages and all(
                    not new.isdisjoint(consumer.received.copy()) for consumer in self.consumers.values()
                )

            wait_until(has_gone_on, interval=0.02, what=f"node {node.publisher.number} goes on: {when}")

    def timed(self, what: str, wait: Callable[[], None]) -> None:
        started = time.monotonic()
        wait()
        self.facts.append(f"{what} {time.monotonic() - started:.2f} s")

    def crash_directory(self, directory: Directory) -> None:
        number = self.directories.index(directory)
        directory.process.kill()
        self.await_progress(self.nodes, f"nsqlookupd {number} is away", 50)
        # What comes meanwhile is to be found as well.
        for node in self.nodes:
            node.process.control("create", f"meanwhile-{number}", "c")
        directory.process.start()
        self.timed(f"nsqlookupd {number} healed in", lambda: self._all_registered(number))
        self.await_progress(self.nodes, f"nsqlookupd {number} is back", 50)

    def _all_registered(self, number: int) -> None:
        self.await_registered(TOPIC, {"own", "pynsq"})
        self.await_registered(f"meanwhile-{number}", {"c"})

    def crash_node(self, node: Node) -> None:
        number = self.nodes.index(node)
        others = [other for other in self.nodes if other is not node]
        node.gate.clear()
        node.process.kill()
        self.await_progress(others, f"nsqd {number} is away", 50)
        node.process.start()
        node.gate.set()
        self.timed(f"nsqd {number} healed in", lambda: self.await_registered(TOPIC, {"own", "pynsq"}))
        self.await_progress(self.nodes, f"nsqd {number} is back", 50)

    def finish(self) -> None:
        """Stop publishing; all that was acknowledged must have arrived on every channel."""
        for node in self.nodes:
            node.stop_publishing()
        acknowledged = {body for node in self.nodes for body in node.acknowledged()}
        for name, consumer in self.consumers.items():
            wait_until(
                lambda: acknowledged <= consumer.received.copy().keys(),  # noqa: B023  # called at once
                interval=0.05,
                what=f"all {len(acknowledged)} messages on the channel {name}",
            )
            again = consumer.received.total() - len(consumer.received)
            self.facts.append(f"{again} of {len(acknowledged)} twice on {name}")
        assert not [node.publisher.failed for node in self.nodes if node.publisher.failed]


@contextmanager
def running_cluster(path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(stack, path)
        cluster.start()
        try:
            yield cluster
        finally:
            sys.stdout.write("\n".join(cluster.facts) + "\n")


def _host_port(address: object) -> Address:
    assert isinstance(address, tuple)
    host, port = address
    return str(host), int(port)


def test_each_daemon_is_killed_in_turn_under_load_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        for directory in cluster.directories:
            cluster.crash_directory(directory)
        for node in cluster.nodes:
            cluster.crash_node(node)
        cluster.finish()


def test_without_any_nsqlookupd_brokers_and_consumers_go_on(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        for directory in cluster.directories:
            directory.process.kill()
        cluster.await_progress(cluster.nodes, "no nsqlookupd is there")
        # A broker that restarts meanwhile is found when they are back.
        node = cluster.nodes[0]
        node.gate.clear()
        node.process.restart()
        node.gate.set()
        cluster.await_progress(cluster.nodes[1:], "one nsqd is unknown", 50)
        for directory in cluster.directories:
            directory.process.start()
        cluster.timed("all healed in", lambda: cluster.await_registered(TOPIC, {"own", "pynsq"}))
        cluster.await_progress(cluster.nodes, "all are back", 50)
        cluster.finish()


def test_a_clean_stop_is_withdrawn_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        directories = [Directory(stack) for _ in range(LOOKUPDS)]
        node = Node(stack, tmp_path, 0, directories)
        node.process.control("create", TOPIC, "c")
        for directory in directories:
            wait_until(lambda: directory.lookup(TOPIC) == ({node.port}, {"c"}))  # noqa: B023
        node.process.stop()
        for directory in directories:
            wait_until(lambda: directory.lookup(TOPIC) == (set(), {"c"}))  # noqa: B023
