"""Clusters of real nsqd processes for tests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tests.support import wait_until
from tests.support.brokers import BrokerProcess
from tests.support.connection import ConnectionClosed

# A node listens only while it is primary, so another process could take its ports meanwhile. Each
# node has a loopback address of its own instead: nothing else uses that.
_HOSTS = (f"127.{64 + os.getpid() // 256 % 64}.{os.getpid() % 256}.{number}" for number in count(1))


class NodeProcess(BrokerProcess):
    """A node whose ports stay the same, whatever its role."""

    def start(self) -> None:
        """Does not wait: a node listens for clients only while it is primary."""
        self.process = self.launch()
        self.address = _address(self.flags["tcp_address"])
        self.http_address = _address(self.flags["http_address"])

    def status(self) -> dict[str, Any] | None:
        """What the node says of its cluster; None while it does not answer."""
        try:
            answer = self.request("GET", "/replication")
        except (OSError, ConnectionClosed):
            return None
        status: dict[str, Any] | None = json.loads(answer.body) if answer.status == 200 else None
        return status


class ClusterProcesses:
    """Nodes `a`, `b`, …"""

    def __init__(self, directory: Path, coordinator: str, names: str = "ab", **flags: Any) -> None:
        secret = directory / "secret"
        secret.write_text("the secret of the cluster")
        self.nodes: dict[str, NodeProcess] = {}
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

    def add(self, name: str, **more: Any) -> NodeProcess:
        path = self._data_path(name)
        path.mkdir(exist_ok=True)
        ports = {"tcp_address": 4150, "http_address": 4151, "replication_address": 4153}
        host = self._host(name)
        addresses: dict[str, Any] = {flag: f"{host}:{port}" for flag, port in ports.items()}
        flags = {**self._flags, "replication_name": name, "broadcast_address": host, **addresses, **more}
        self.nodes[name] = node = NodeProcess(path, command=self._command(name), **flags)
        return node

    def _data_path(self, name: str) -> Path:
        return self._directory / name

    def _host(self, name: str) -> str:
        """Address of the node's own."""
        return next(_HOSTS)

    def _command(self, name: str) -> tuple[str, ...]:
        """What starts nsqd; nothing for the usual."""
        return ()

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()

    def primary(self, in_sync: str = "", *, other_than: str = "") -> NodeProcess:
        """The primary, once the in-sync set has at least these nodes."""
        return wait_until(lambda: self.find(in_sync, other_than), 120)

    def find(self, in_sync: str = "", other_than: str = "") -> NodeProcess | None:
        """The same, without waiting."""
        # One that is paused would not answer.
        asked = [node for name, node in self.nodes.items() if name != other_than and node.alive()]
        found = {node: node.status() for node in asked}
        # One that was cut off may not know yet that another has taken over.
        epoch, node = max(
            (
                (status["epoch"], node)
                for node, status in found.items()
                if status and status["role"] == "primary"
            ),
            key=lambda one: one[0],
            default=(0, None),
        )
        status = node and found[node]
        if not status or not {*in_sync} <= {*status["in_sync"]}:
            return None
        return node

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
