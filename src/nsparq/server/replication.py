"""nsqd as a node of a cluster: it serves while it is the primary, and otherwise keeps a copy.

See nsparq.replication.node for the roles.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from nsparq.addresses import join_address, split_address
from nsparq.errors import NsparqError, StartError, StopError, TooFewReplicas
from nsparq.option_table import OptionError
from nsparq.options import NsqdOptions, default_node_id
from nsparq.replication.coordinator import Coordinator
from nsparq.replication.etcd import Etcd
from nsparq.replication.node import Node, NodeSettings
from nsparq.replication.primary import Primary
from nsparq.server.daemon import Nsqd
from nsparq.storage.files import Files

logger = logging.getLogger(__name__)

MIN_SECRET: Final = 16


class Replication:
    """What the primary's nsqd knows of its cluster."""

    def __init__(self, node: Node, primary: Primary, min_in_sync: int) -> None:
        self.name = node.settings.name
        self.switch_over = node.switch_over
        """Raises NotPossible."""
        self.when_safe = primary.when_safe
        self._cluster = node.settings.cluster
        self._primary = primary
        self._min_in_sync = min_in_sync

    def check(self) -> None:
        """Raises TooFewReplicas if nothing may be published now."""
        count = len(self._primary.acknowledging.membership.in_sync)
        if count < self._min_in_sync:
            raise TooFewReplicas(count, self._min_in_sync)

    def status(self) -> dict[str, Any]:
        membership = self._primary.acknowledging.membership
        return {
            "cluster": self._cluster,
            "epoch": membership.epoch,
            "primary": membership.primary,
            "in_sync": sorted(membership.in_sync),
            "min_in_sync": self._min_in_sync,
            "followers": self._primary.followers(),
        }


class ReplicatedNsqd:
    """One node: a daemon that is primary or follower. start() returns when it has begun to look for
    its role."""

    def __init__(self, options: NsqdOptions) -> None:
        self._options = options
        self._files = Files()
        self._lock_fd = -1
        self._task: asyncio.Task[None] | None = None
        self.node: Node
        self.nsqd: Nsqd | None = None
        """While this node is primary."""
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
        settings = NodeSettings(
            cluster=options.replication_cluster,
            name=options.replication_name,
            root=Path(options.data_path or "."),
            secret=_read_secret(Path(options.replication_secret_file)),
            listen=listen,
            address=address,
            lease_s=options.replication_lease,
            snapshot_rate=options.replication_snapshot_rate,
        )
        self._lock()
        try:
            self._coordinator = coordinator_of(options)
            self.node = Node(settings, self._coordinator, self._make_nsqd)
        except BaseException:
            self._unlock()
            raise
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
            self._unlock()
            self._coordinator.close()
        logger.info("REPLICATION: this node has stopped")

    def reload(self) -> None:
        if self.nsqd is not None:
            self.nsqd.reload()

    def _make_nsqd(self, node: Node, primary: Primary) -> _Serving:
        options = self._options
        if options.node_id == default_node_id(socket.gethostname()):
            # The message ids of all nodes of the cluster are the same.
            options = replace(options, node_id=default_node_id(options.replication_cluster))
        nsqd = Nsqd(options, files=primary.files, replication=Replication(node, primary, options.min_in_sync))
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
        self._daemon._unlock()
        await self._nsqd.start()
        self._daemon.nsqd = self._nsqd

    async def stop(self) -> None:
        self._daemon.nsqd = None
        try:
            await self._nsqd.stop()
        finally:
            self._daemon._lock()


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
