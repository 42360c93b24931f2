"""Real coordinators for tests: etcd and PostgreSQL, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGQUIT

from nsparq.fetch import FetchError, fetch
from tests.support import wait_until
from tests.support.auth_server import unused_port

POSTGRES = Path("/usr/lib/postgresql")


@contextmanager
def _running(command: list[str], user: str | None = None) -> Iterator[None]:
    output = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=output, stderr=output, cwd="/", user=user, group=user)
    try:
        yield
    finally:
        # PostgreSQL's processes end with this one, at once.
        process.send_signal(SIGQUIT)
        process.wait()


@contextmanager
def run_etcd(directory: Path) -> Iterator[str]:
    """Gives its URL."""
    # `make test` unpacks it beside Python's packages.
    program = shutil.which("etcd") or shutil.which("etcd", path=Path(sys.prefix) / "etcd" / "usr" / "bin")
    assert program, "etcd is missing: apt-get install etcd-server"
    client, peer = (f"http://127.0.0.1:{unused_port()}" for _ in range(2))
    command = [
        program, "--data-dir", str(directory),
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"default={peer}",
    ]  # fmt: skip

    def is_healthy() -> bool:
        try:
            return b"true" in fetch(f"{client}/health").body
        except FetchError:
            return False

    with _running(command):
        wait_until(is_healthy)
        yield client


@contextmanager
def run_postgresql(directory: Path) -> Iterator[str]:
    """Gives its URL."""
    found = sorted(POSTGRES.glob("*/bin"))
    assert found, "PostgreSQL is missing: apt-get install postgresql"
    binaries, port = found[-1], unused_port()
    directory.mkdir()
    user = None
    if os.getuid() == 0:
        # It does not run as root.
        user = "postgres"
        shutil.chown(directory, user)
        for above in directory.parents:
            if above != Path("/") and not above.stat().st_mode & 0o001:
                above.chmod(above.stat().st_mode | 0o001)
    data = directory / "data"
    initialise = [binaries / "initdb", "-D", data, "-U", "nsparq", "-A", "trust", "--no-sync", "-E", "UTF8"]
    subprocess.run([*map(str, initialise)], check=True, capture_output=True, cwd="/", user=user, group=user)
    command = [binaries / "postgres", "-D", data, "-p", port, "-k", directory, "-h", "127.0.0.1", "-F"]

    def is_ready() -> bool:
        ready = [str(binaries / "pg_isready"), "-h", "127.0.0.1", "-p", str(port)]
        return subprocess.run(ready, capture_output=True).returncode == 0

    with _running([*map(str, command)], user):
        wait_until(is_ready)
        yield f"postgresql://nsparq@127.0.0.1:{port}/postgres"
