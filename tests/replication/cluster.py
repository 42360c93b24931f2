"""Clusters of real nsqd processes for tests."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from nsparq.testing import FaultProxy
from tests.support import wait_until
from tests.support.brokers import BrokerProcess

# A node listens only while it is primary, so another process could take its ports meanwhile. Each node
# has a loopback address of its own instead: nothing else uses that.
_HOSTS = (f"127.{64 + os.getpid() // 256 % 64}.{os.getpid() % 256}.{number}" for number in count(1))


class NodeProcess(BrokerProcess):
    """A node whose ports stay the same, whatever its role."""

    def start(self) -> None:
        """Does not wait: a node listens for clients only while it is primary."""
        self.process = self.launch()
        self.address = _address(self.flags["tcp_address"])
        self.http_address = _address(self.flags["http_address"])

    def status(self) -> dict[str, Any] | None:
        """What the node says of its cluster; None while it does not serve."""
        try:
            status: dict[str, Any] = json.loads(self.http("GET", "/replication"))
        except OSError:
            return None
        return status


class ClusterProcesses:
    """Nodes `a`, `b`, … With `has_links` each reaches the coordinator, and is reached by the others,
    through a proxy of its own."""

    def __init__(
        self, directory: Path, coordinator: str, names: str = "ab", *, has_links: bool = False, **flags: Any
    ) -> None:
        secret = directory / "secret"
        secret.write_text("the secret of the cluster")
        self.nodes: dict[str, NodeProcess] = {}
        self.links: dict[str, FaultProxy] = {}
        """To each node."""
        self.coordinator_links: dict[str, FaultProxy] = {}
        """From each node."""
        self._has_links = has_links
        self._flags = {
            # Several tests share a coordinator.
            "replication_cluster": directory.name,
            "replication_coordinator": coordinator,
            "replication_secret_file": str(secret),
            "replication_lease": 2.0,
            **flags,
        }
        self._directory = directory
        for name in names:
            self.add(name)

    def add(self, name: str) -> NodeProcess:
        path = self._directory / name
        path.mkdir(exist_ok=True)
        ports = {"tcp_address": 4150, "http_address": 4151, "replication_address": 4153}
        host = next(_HOSTS)
        addresses: dict[str, Any] = {flag: f"{host}:{port}" for flag, port in ports.items()}
        flags = {**self._flags, "replication_name": name, "broadcast_address": host, **addresses}
        if self._has_links:
            self.links[name] = FaultProxy(flags["replication_address"])
            flags["replication_broadcast_address"] = self.links[name].address
            target = re.search(r"[\w.]+:\d+", flags["replication_coordinator"])
            assert target
            self.coordinator_links[name] = link = FaultProxy(target[0])
            flags["replication_coordinator"] = flags["replication_coordinator"].replace(
                target[0], link.address
            )
        self.nodes[name] = node = NodeProcess(path, **flags)
        return node

    def close(self) -> None:
        for proxy in (*self.links.values(), *self.coordinator_links.values()):
            proxy.heal()
        for node in self.nodes.values():
            node.close()
        for proxy in (*self.links.values(), *self.coordinator_links.values()):
            proxy.close()

    def primary(self, in_sync: str = "", *, other_than: str = "") -> NodeProcess:
        """The primary, once the in-sync set has at least these nodes."""
        return wait_until(lambda: self._find(in_sync, other_than), 120)

    def _find(self, in_sync: str, other_than: str) -> NodeProcess | None:
        for name, node in self.nodes.items():
            if name != other_than and node.alive() and (status := node.status()) is not None:
                if status["primary"] == name and {*in_sync} <= {*status["in_sync"]}:
                    return node
        return None

    def name_of(self, node: NodeProcess) -> str:
        return next(name for name, one in self.nodes.items() if one is node)


@contextmanager
def run_cluster(directory: Path, coordinator: str, **more: Any) -> Iterator[ClusterProcesses]:
    cluster = ClusterProcesses(directory, coordinator, **more)
    try:
        yield cluster
    finally:
        cluster.close()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)
