"""`nsparq up --replicas`: the coordinator, and what the nodes of the cluster have in common."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nsparq.errors import StartError

__all__ = ["cluster_flags", "find_etcd", "main"]

SECRET_FILE: Final = "replication.secret"
HOW_TO_GET_IT: Final = (
    "--replicas needs a coordinator, and there is no etcd on this machine.\n"
    "Install it (Debian: apt-get install etcd-server, macOS: brew install etcd), or name one that runs:\n"
    "--coordinator=etcd://host:2379 or --coordinator=postgresql://user@host/database"
)


def find_etcd() -> str:
    """Raises StartError."""
    found = shutil.which("etcd")
    if found is None:
        raise StartError(HOW_TO_GET_IT)
    return found


def cluster_flags(data_path: Path, coordinator: str, *, node: str, listen: str, reach: str) -> list[str]:
    """The flags of one node. The secret is made at the first start. Raises OSError."""
    path = data_path / SECRET_FILE
    if not path.exists():
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    # Other stacks may use the same coordinator.
    tag = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return [
        f"--replication-cluster=up-{tag}",
        f"--replication-name={node}",
        f"--replication-coordinator={coordinator}",
        f"--replication-secret-file={path}",
        f"--replication-address={listen}",
        f"--replication-broadcast-address={reach}",
    ]


def main(arguments: Sequence[str]) -> int:
    """Runs a program as a child that ends with this process: `PROGRAM ARGUMENTS`."""
    process = subprocess.Popen([*arguments])

    def stop(signum: int, frame: object) -> None:
        process.terminate()

    signal.signal(signal.SIGTERM, stop)
    status = process.wait()
    # etcd ends with SIGTERM as if it were killed.
    return 0 if status == -signal.SIGTERM else abs(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
