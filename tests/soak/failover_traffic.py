"""What publishers and consumers saw of a cluster under faults: a process for each client library,
and clients of our own that try again at once and so show what the cluster itself does."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.replication.cluster import ClusterProcesses
from tests.support.connection import ConnectionClosed, RawConnection

DRIVERS = Path(__file__).parent / "failover_clients"
NODE_MODULES = Path(__file__).parents[1] / "conformance" / "nsqjs" / "node_modules"
CHANNEL = "c"
RETRYING = "retrying at once"
PUBLISHERS = 3
SILENCE_S = 2.0
"""A client that retries at once does so without an answer for this time."""
PAUSE_S = 0.02
"""Between two publishes of one publisher."""


def client_commands() -> dict[str, list[str]]:
    """The client libraries that are installed."""
    found = {}
    for name, package in {"pynsq": "nsq", "gnsq": "gnsq", "ours": "nsparq"}.items():
        if importlib.util.find_spec(package):
            found[name] = [sys.executable, "-m", f"tests.soak.failover_clients.drive_{name}"]
    if (node := shutil.which("node")) and (NODE_MODULES / "nsqjs").exists():
        found["nsqjs"] = [node, str(DRIVERS / "drive_nsqjs.js")]
    return found


class Stream:
    """Acknowledgements, or deliveries. Any thread may note one."""

    def __init__(self) -> None:
        self.latest = time.monotonic()
        self.longest = 0.0
        """Longest time without one, since begin()."""

    def note(self) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - self.latest)
        self.latest = now

    def begin(self) -> None:
        self.longest = 0.0


class Traffic:
    """One topic: what was acknowledged, and what came."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.topic = name.replace(" ", "-")
        self.kind = ""
        """The present fault."""
        self.acknowledged: dict[str, str] = {}
        """The fault during which a body was acknowledged."""
        self.received: set[str] = set()
        self.doubled_ids: Counter[str] = Counter()
        """Ids that came with two bodies, by fault."""
        self.publishing, self.consuming = Stream(), Stream()
        self._bodies: dict[str, str] = {}
        """By id."""

    def __str__(self) -> str:
        now = time.monotonic()
        published, consumed = now - self.publishing.latest, now - self.consuming.latest
        return f"{self.name}: published {published:.1f} s ago, consumed {consumed:.1f} s ago"

    def note_acknowledged(self, *bodies: str) -> None:
        self.acknowledged.update(dict.fromkeys(bodies, self.kind))
        self.publishing.note()

    def note_received(self, message_id: str, body: str) -> None:
        if self._bodies.setdefault(message_id, body) != body:
            self.doubled_ids[self.kind] += 1
        self.received.add(body)
        self.consuming.note()

    @property
    def missing(self) -> set[str]:
        return {*self.acknowledged} - self.received

    def begin(self, kind: str) -> None:
        self.kind = kind
        self.publishing.begin()
        self.consuming.begin()

    def has_resumed(self, since: float) -> bool:
        return min(self.publishing.latest, self.consuming.latest) > since


class Library(Traffic):
    """A client library in a process of its own."""

    def __init__(self, name: str, command: Sequence[str], lookupd: str, nsqd: Sequence[str]) -> None:
        super().__init__(name)
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*command, lookupd, self.topic, *nsqd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "NODE_PATH": str(NODE_MODULES)},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __str__(self) -> str:
        """With its last words, without what a follower makes every client say."""
        self._log.seek(0)
        said = [
            line for line in self._log.read().decode(errors="replace").splitlines() if "refused" not in line
        ]
        return "\n".join([super().__str__(), *said[-40:]])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event, *words = line.split()
            if event == "acknowledged":
                self.note_acknowledged(*words)
            else:
                self.note_received(*words)

    def stop_publishing(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()


class Retrying(Traffic):
    """Publishers and a consumer that look for the node that serves, at once."""

    def __init__(self, cluster: ClusterProcesses) -> None:
        super().__init__(RETRYING)
        self._cluster = cluster
        self._stopping = threading.Event()
        self._is_over = threading.Event()
        self._publishers = [threading.Thread(target=self._publish, args=[one]) for one in range(PUBLISHERS)]
        self._consumer = threading.Thread(target=self._consume)
        for thread in (*self._publishers, self._consumer):
            thread.start()

    def stop_publishing(self) -> None:
        self._stopping.set()
        for thread in self._publishers:
            thread.join()

    def close(self) -> None:
        self._is_over.set()
        self.stop_publishing()
        self._consumer.join()

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
                bodies = [f"{number}-{count + one}" for one in range(1 + count % 7)]
                count += len(bodies)
                try:
                    connection.mpub(self.topic, [body.encode() for body in bodies])
                except (OSError, ConnectionClosed, AssertionError):
                    break
                self.note_acknowledged(*bodies)
                time.sleep(PAUSE_S)
            if self._stopping.is_set():
                return

    def _consume(self) -> None:
        for connection in self._connect():
            try:
                connection.sub(self.topic, CHANNEL, rdy=100)
                while not self._is_over.is_set():
                    message = connection.read_message()
                    self.note_received(message.id.decode(), message.body.decode())
                    connection.fin(message.id)
            except (OSError, ConnectionClosed, AssertionError):
                pass
            if self._is_over.is_set():
                return
