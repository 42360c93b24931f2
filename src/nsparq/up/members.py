"""The members of the stack: how each is started, where it listens, whether it answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nsparq.addresses import join_address
from nsparq.errors import StartError
from nsparq.fetch import FetchError, fetch
from nsparq.up.ports import FreePorts, Ports, Wanted, reachable
from nsparq.up.replicas import cluster_flags, find_etcd

__all__ = ["Admin", "Cluster", "Etcd", "Lookupd", "Member", "Nsqd", "Pipelines", "Plan"]

ASK_S: Final = 2.0
"""Timeout of a readiness check."""
DAEMON_READY_S: Final = 30.0
SPARK_READY_S: Final = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    data_path: Path
    nsqd: int = 1
    replicas: int = 1
    """With more than one, the nsqds are nodes of one cluster, and keep the same messages."""
    coordinator: str = ""
    """Of the cluster; empty means an etcd of our own."""
    pipelines: tuple[Path, ...] = ()
    host: str = "127.0.0.1"
    """All members listen on this address."""
    ports: Ports = field(default_factory=Ports)
    log_level: str = "info"
    stop_timeout: float = 15.0
    """Seconds that each may take to stop before it is killed."""


class Member:
    """One child process. Its arguments have the ports of others: they are made at its start."""

    module = ""
    port_flags: Mapping[str, str] = {}
    """The flag of each port."""
    ready_within_s = DAEMON_READY_S
    may_finish = False
    """Exit status 0 means that its work is finished."""
    is_vital = True
    """The stack cannot run without it."""

    def __init__(self, cluster: Cluster, name: str, **ports: int) -> None:
        self.cluster, self.name = cluster, name
        self.ports = ports
        """By their names in the log: TCP, HTTP, metrics. 0 until the port is known."""

    def address(self, of: str) -> str:
        """`host:port` for clients."""
        return join_address(reachable(self.cluster.plan.host), self.ports[of])

    def listens(self, of: str) -> str:
        return join_address(self.cluster.plan.host, self.ports[of])

    def arguments(self) -> list[str]:
        """The command line. Raises OSError if a folder cannot be created."""
        raise NotImplementedError

    def why_not_ready(self) -> str:
        """Asks the member; may block for ASK_S. Empty if it is ready."""
        raise NotImplementedError

    def wanted(self) -> Iterator[Wanted]:
        for kind, flag in self.port_flags.items():
            yield Wanted(self.ports[kind], f"{self.name}, {kind}", flag)

    def _common(self) -> list[str]:
        level = "debug" if self.cluster.plan.log_level == "debug" else "info"
        return [f"--log-level={level}", "--log-prefix="]

    def _broadcast(self) -> list[str]:
        """0.0.0.0 is no address for clients: then the daemon broadcasts the machine's name."""
        host = self.cluster.plan.host
        return [f"--broadcast-address={host}"] if reachable(host) == host else []


class Lookupd(Member):
    module = "nsparq.lookup.main"
    port_flags: Mapping[str, str] = {"TCP": "--lookupd-tcp-port", "HTTP": "--lookupd-http-port"}

    def arguments(self) -> list[str]:
        return [
            f"--tcp-address={self.listens('TCP')}",
            f"--http-address={self.listens('HTTP')}",
            *self._broadcast(),
            *self._common(),
        ]

    def why_not_ready(self) -> str:
        return _get(self.address("HTTP"), "/ping")[1] or _why_no_connection(self)


class Nsqd(Member):
    module = "nsparq.server.main"
    port_flags: Mapping[str, str] = {"TCP": "--nsqd-tcp-port", "HTTP": "--nsqd-http-port"}

    def __init__(self, cluster: Cluster, name: str, number: int, **ports: int) -> None:
        super().__init__(cluster, name, **ports)
        self.number = number
        self.replication_port = cluster.plan.ports.for_replica(number) or cluster.free_ports.take()

    @property
    def data_path(self) -> Path:
        return self.cluster.plan.data_path / f"nsqd-{self.number + 1}"

    def arguments(self) -> list[str]:
        self.data_path.mkdir(mode=0o700, exist_ok=True)
        return [
            f"--tcp-address={self.listens('TCP')}",
            f"--http-address={self.listens('HTTP')}",
            "--https-address=",
            f"--lookupd-tcp-address={self.cluster.lookupd.address('TCP')}",
            f"--data-path={self.data_path}",
            # The default is derived from the host name, which all nsqds here share. Nodes of a
            # cluster have the same: their messages are the same.
            f"--node-id={0 if self.cluster.is_replicated else self.number}",
            *self._replication(),
            *self._broadcast(),
            *self._common(),
        ]

    def _replication(self) -> list[str]:
        if not self.cluster.is_replicated:
            return []
        plan = self.cluster.plan
        return cluster_flags(
            plan.data_path,
            self.cluster.coordinator,
            node=self.name,
            listen=join_address(plan.host, self.replication_port),
            reach=join_address(reachable(plan.host), self.replication_port),
        )

    def wanted(self) -> Iterator[Wanted]:
        yield from super().wanted()
        if self.cluster.is_replicated:
            yield Wanted(self.replication_port, f"{self.name}, replication", "--port-base")

    def why_not_ready(self) -> str:
        if self.cluster.is_replicated:
            return self._why_not_in_sync()
        return (
            _get(self.address("HTTP"), "/ping")[1]
            or _why_no_connection(self)
            or self._why_not_registered(self.cluster.lookupd.address("HTTP"))
        )

    def _why_not_in_sync(self) -> str:
        status, reason = _ask(self.address("HTTP"), "/replication")
        if reason:
            return reason
        if not isinstance(status, dict) or not status.get("primary"):
            return "the cluster has no primary yet"
        if self.number == 0:
            # The others start next. One of them may be the primary.
            return ""
        if status.get("role") == "waiting" or self.name not in status.get("in_sync", ()):
            return "it does not have everything yet"
        return ""

    def _why_not_registered(self, lookupd: str) -> str:
        answer, reason = _ask(lookupd, "/nodes")
        nodes = (answer.get("producers") or ()) if isinstance(answer, dict) else ()
        if any(one.get("tcp_port") == self.ports["TCP"] for one in nodes):
            return ""
        return reason or "not registered with nsqlookupd yet"


class Admin(Member):
    module = "nsparq.admin.main"
    port_flags: Mapping[str, str] = {"HTTP": "--admin-port"}

    def arguments(self) -> list[str]:
        pipelines = (one.address("metrics") for one in self.cluster.pipelines)
        return [
            f"--http-address={self.listens('HTTP')}",
            f"--lookupd-http-address={self.cluster.lookupd.address('HTTP')}",
            *(f"--pipeline-http-address={address}" for address in pipelines),
            *self._common(),
        ]

    @property
    def page(self) -> str:
        return f"http://{self.address('HTTP')}/"

    def why_not_ready(self) -> str:
        answer, reason = _ask(self.address("HTTP"), "/api/nodes")
        if reason:
            return reason
        # Of a cluster only the primary is registered.
        expected = 1 if self.cluster.is_replicated else len(self.cluster.nsqds)
        is_known = isinstance(answer, dict) and len(answer.get("nodes") or ()) >= expected
        return "" if is_known else "does not list all nsqds yet"


class Etcd(Member):
    """The coordinator of the cluster, if no other is named."""

    module = "nsparq.up.replicas"
    port_flags: Mapping[str, str] = {"client": "--port-base", "peer": "--port-base"}

    def arguments(self) -> list[str]:
        client, peer = (f"http://{self.address(kind)}" for kind in ("client", "peer"))
        return [
            self.cluster.etcd_program,
            f"--data-dir={self.cluster.plan.data_path / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--log-level=warn",
        ]

    def why_not_ready(self) -> str:
        body, reason = _get(self.address("client"), "/health")
        return reason or ("" if b"true" in body else "not healthy yet")


class Pipelines(Member):
    """The runner of one pipeline file."""

    module = "nsparq.up.pipelines"
    port_flags: Mapping[str, str] = {"metrics": "--pipeline-port"}
    ready_within_s = SPARK_READY_S
    may_finish = True
    is_vital = False

    def __init__(self, cluster: Cluster, name: str, file: Path, **ports: int) -> None:
        super().__init__(cluster, name, **ports)
        self.file = file

    @property
    def checkpoint(self) -> Path:
        return self.cluster.plan.data_path / "pipelines" / self.name

    def arguments(self) -> list[str]:
        return [
            str(self.file),
            f"--nsqlookupd={self.cluster.lookupd.address('HTTP')}",
            f"--checkpoint={self.checkpoint}",
            f"--metrics-address={self.listens('metrics')}",
        ]

    def why_not_ready(self) -> str:
        answer, reason = _ask(self.address("metrics"), "/status")
        if reason:
            return reason
        pipelines = answer.get("pipelines", []) if isinstance(answer, dict) else []
        behind = [one for one in pipelines if one["state"] in ("starting", "waiting", "failed")]
        return "; ".join(f"{one['name']} is {one['state']}: {one['error']}".rstrip(": ") for one in behind)


class Cluster:
    """All members, as planned."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.free_ports = FreePorts(plan.host)
        ports = plan.ports
        tcp, http = ports.for_lookupd()
        self.lookupd = Lookupd(self, "nsqlookupd", TCP=tcp, HTTP=http)
        self.is_replicated = plan.replicas > 1
        self.etcd: Etcd | None = None
        self.etcd_program = ""
        if self.is_replicated and not plan.coordinator:
            self.etcd_program = find_etcd()
            client, peer = (port or self.free_ports.take() for port in ports.for_etcd())
            self.etcd = Etcd(self, "etcd", client=client, peer=peer)
        self.nsqds: list[Nsqd] = []
        count = plan.replicas if self.is_replicated else plan.nsqd
        for number in range(count):
            name = "nsqd" if count == 1 else f"nsqd-{number + 1}"
            tcp, http = ports.for_nsqd(number)
            if self.is_replicated:
                # Others must know the ports of a node that does not listen yet.
                tcp, http = tcp or self.free_ports.take(), http or self.free_ports.take()
            self.nsqds.append(Nsqd(self, name, number, TCP=tcp, HTTP=http))
        self.admin = Admin(self, "nsqadmin", HTTP=ports.for_admin())
        self.pipelines: list[Pipelines] = []
        for number, (name, file) in enumerate(_named(plan.pipelines)):
            # nsqadmin needs the port before the runner starts, so the runner cannot choose it.
            port = ports.for_pipeline(number) or self.free_ports.take()
            self.pipelines.append(Pipelines(self, name, file, metrics=port))

    @property
    def stages(self) -> list[Sequence[Member]]:
        """In the order of starting. Stopping goes the other way round."""
        if not self.is_replicated:
            return [[self.lookupd], self.nsqds, [self.admin], self.pipelines]
        first: list[Member] = [self.lookupd, *([self.etcd] if self.etcd else [])]
        # A cluster begins with the messages of its first node.
        return [first, self.nsqds[:1], self.nsqds[1:], [self.admin], self.pipelines]

    @property
    def coordinator(self) -> str:
        return f"etcd://{self.etcd.address('client')}" if self.etcd else self.plan.coordinator

    @property
    def members(self) -> list[Member]:
        return [member for stage in self.stages for member in stage]

    def wanted(self) -> Iterator[Wanted]:
        for member in self.members:
            yield from member.wanted()


def _named(files: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """A checkpoint has the name of its file. Raises StartError for two files of one name."""
    known: dict[str, Path] = {}
    for file in files:
        name = f"pipeline-{file.stem}"
        other = known.setdefault(name, file)
        if other is not file:
            raise StartError(f"--pipeline: {other} and {file} need different names")
        yield name, file


def _why_no_connection(member: Member) -> str:
    try:
        with socket.create_connection((reachable(member.cluster.plan.host), member.ports["TCP"]), ASK_S):
            return ""
    except OSError as error:
        return f"{member.address('TCP')}: {error.strerror or error}"


def _get(address: str, path: str) -> tuple[bytes, str]:
    """The body of the answer, and why there is none."""
    try:
        answer = fetch(f"http://{address}{path}", connect_timeout=ASK_S, request_timeout=ASK_S)
    except FetchError as error:
        return b"", str(error)
    if answer.status != 200:
        shown = answer.body[:200].decode(errors="replace")
        return b"", f"{address}{path} answers {answer.status}: {shown}"
    return answer.body, ""


def _ask(address: str, path: str) -> tuple[Any, str]:
    """The JSON answer, or None and the reason."""
    body, reason = _get(address, path)
    try:
        return (None, reason) if reason else (json.loads(body), "")
    except ValueError as error:
        return None, str(error)
