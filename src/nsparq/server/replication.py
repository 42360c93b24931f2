"""nsqd as a node of a cluster: it serves while it is the primary, and otherwise keeps a copy.

See nsparq.replication.node for the roles.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from nsparq.addresses import join_address, split_address
from nsparq.errors import NsparqError, StartError, StopError
from nsparq.option_table import OptionError
from nsparq.options import NsqdOptions, default_node_id
from nsparq.replication.coordinator import Coordinator
from nsparq.replication.etcd import Etcd
from nsparq.replication.frames import proof
from nsparq.replication.node import Node, NodeSettings
from nsparq.replication.primary import Primary
from nsparq.replication.tls import NodeTls
from nsparq.server.cluster_state import ClusterState
from nsparq.server.daemon import Nsqd
from nsparq.server.from_flags import topics_file_of
from nsparq.server.standby import Standby, address_for_clients
from nsparq.storage.files import Files

logger = logging.getLogger(__name__)

MIN_SECRET: Final = 16
TAG: Final = 16
"""Characters that tell clusters of the same name apart at nsqlookupd."""


class Replication:
    """What the primary's nsqd knows of its cluster."""

    def __init__(self, node: Node, primary: Primary, state: ClusterState) -> None:
        self.state = state
        self.switch_over = node.switch_over
        """Raises NotPossible."""
        self.when_safe = primary.when_safe
        self.check = state.check
        """Raises TooFewReplicas if nothing may be published now."""
        self.leads = node.leads
        """Whether the coordinator says now that this node is primary."""
        self.replaced_address = node.replaced.http_address if node.replaced is not None else ""
        """HTTP address of the primary before this one."""
        settings = node.settings
        # Only nodes with the secret can take this one's place at nsqlookupd.
        tag = proof(settings.secret, "nsqlookupd", b"", settings.cluster)[:TAG]
        self.identity: Mapping[str, str | int] = {
            "cluster": f"{settings.cluster}:{tag}",
            "epoch": state.membership.epoch,
        }
        """Fields of IDENTIFY at nsqlookupd."""


class ReplicatedNsqd:
    """One node: a daemon that is primary or follower. start() returns when it has begun to look for
    its role."""

    def __init__(self, options: NsqdOptions) -> None:
        self._options = options
        self._files = Files()
        self._lock_fd = -1
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None]
        self.node: Node
        self.nsqd: Nsqd | None = None
        """While this node is primary."""
        self.standby: Standby
        """HTTP while this node is not primary."""
        self.state: ClusterState
        self._tls: NodeTls | None = None
        self._coordinator: Coordinator

    async def start(self) -> None:
        """Raises StartError."""
        options = self._options
        options.validate()
        listen = split_address(options.replication_address)
        if listen is None:
            raise OptionError("--replication-address must be host:port")
        address = options.replication_broadcast_address or join_address(options.broadcast_address, listen[1])
        if split_address(address) is None:
            raise OptionError("--replication-broadcast-address must be host:port")
        self._tls = _tls_of(options)
        # nsqd would find a mistake only when it takes over.
        topics_file_of(options)
        settings = NodeSettings(
            cluster=options.replication_cluster,
            name=options.replication_name,
            root=Path(options.data_path or "."),
            secret=_read_secret(Path(options.replication_secret_file)),
            listen=listen,
            address=address,
            lease_s=options.replication_lease,
            snapshot_rate=options.replication_snapshot_rate,
            tcp_address=address_for_clients(options, options.tcp_address, options.broadcast_tcp_port),
            http_address=address_for_clients(options, options.http_address, options.broadcast_http_port),
            tls=self._tls,
        )
        self._lock()
        try:
            self._coordinator = coordinator_of(options)
            self.node = Node(settings, self._coordinator, self._make_nsqd)
            self.state = ClusterState(self.node, options.min_in_sync)
            self.standby = Standby(options, self.state)
            await self.standby.start()
        except BaseException:
            self._unlock()
            raise
        self._watching = asyncio.create_task(self.state.watch())
        self._task = asyncio.create_task(self.node.run())
        self._task.add_done_callback(_stop_process)

    async def stop(self) -> None:
        """Hand over and stop. Raises StopError."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.remove_done_callback(_stop_process)
        task.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await task
        except NsparqError as error:
            raise StopError(str(error)) from error
        finally:
            self._watching.cancel()
            await self.standby.stop()
            self._unlock()
            self._coordinator.close()
        logger.info("REPLICATION: this node has stopped")

    def reload(self) -> None:
        """SIGHUP. Both the present role and the next one use the new files."""
        if self._tls is not None:
            try:
                self._tls.load()
                logger.info("SIGHUP: certificates of replication reloaded")
            except StartError as error:
                logger.error("SIGHUP: the certificates of replication stay as they were: %s", error)
        self.standby.reload()
        if self.nsqd is not None:
            self.nsqd.reload()

    def _make_nsqd(self, node: Node, primary: Primary) -> _Serving:
        options = self._options
        if options.node_id == default_node_id(socket.gethostname()):
            # The message ids of all nodes of the cluster are the same.
            options = replace(options, node_id=default_node_id(options.replication_cluster))
        nsqd = Nsqd(options, files=primary.files, replication=Replication(node, primary, self.state))
        return _Serving(self, nsqd)

    def _lock(self) -> None:
        """While this node follows. nsqd takes the lock itself. Raises StartError."""
        if self._lock_fd < 0:
            self._lock_fd = self._files.lock_directory(Path(self._options.data_path or "."))

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            self._files.close(self._lock_fd)
            self._lock_fd = -1


class _Serving:
    """nsqd for as long as this node is primary."""

    def __init__(self, daemon: ReplicatedNsqd, nsqd: Nsqd) -> None:
        self._daemon = daemon
        self._nsqd = nsqd

    async def start(self) -> None:
        await self._daemon.standby.close()
        self._daemon._unlock()
        self._daemon.state.is_serving = True
        await self._nsqd.start()
        self._daemon.nsqd = self._nsqd

    async def stop(self) -> None:
        self._daemon.nsqd = None
        self._daemon.state.is_serving = False
        try:
            await self._nsqd.stop()
        finally:
            self._daemon._lock()
            try:
                await self._daemon.standby.start()
            except StartError as error:
                logger.error("REPLICATION: no HTTP while this node follows: %s", error)


def coordinator_of(options: NsqdOptions) -> Coordinator:
    """Raises StartError."""
    url, cluster, lease = (
        options.replication_coordinator, options.replication_cluster, options.replication_lease
    )  # fmt: skip
    scheme, _, rest = url.partition("://")
    if scheme in ("postgresql", "postgres"):
        try:
            from nsparq.replication.postgresql import PostgreSql
        except ModuleNotFoundError as error:
            reason = f"the package {error.name} is missing: pip install 'nsparq[postgresql]'"
            raise StartError(reason) from error
        return PostgreSql(url, cluster, lease)
    schemes = {"etcd": "http", "etcd+https": "https"}
    if scheme not in schemes or not rest:
        raise OptionError(
            "--replication-coordinator must be etcd://host:port,… or etcd+https://host:port,… or "
            "postgresql://user@host/database"
        )
    return Etcd([f"{schemes[scheme]}://{member}" for member in rest.split(",")], cluster, lease)


def _tls_of(options: NsqdOptions) -> NodeTls | None:
    """Raises StartError."""
    if not options.replication_tls_cert:
        return None
    files = (options.replication_tls_cert, options.replication_tls_key, options.replication_tls_root_ca_file)
    return NodeTls(*map(Path, files))


def _read_secret(path: Path) -> bytes:
    """Raises StartError."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise StartError(f"cannot read --replication-secret-file {path}: {error.strerror}") from error
    if len(secret) < MIN_SECRET:
        raise StartError(f"--replication-secret-file {path} must have at least {MIN_SECRET} characters")
    return secret


def _stop_process(task: asyncio.Task[None]) -> None:
    """The node has ended by itself: so does the process."""
    error = task.exception()
    logger.critical("REPLICATION: this node stops: %s", error, exc_info=error)
    os.kill(os.getpid(), signal.SIGTERM)
