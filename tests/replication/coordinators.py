"""Real coordinators for tests: etcd and PostgreSQL, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGQUIT
from tempfile import TemporaryDirectory

from nsparq.fetch import FetchError, fetch
from tests.support import wait_until
from tests.support.auth_server import unused_port

POSTGRES = Path("/usr/lib/postgresql")


class CoordinatorProcess:
    """etcd or PostgreSQL. It can be killed and started again."""

    def __init__(self, command: Sequence[str], url: str, is_ready: Callable[[], bool]) -> None:
        self.url = url
        self._command = command
        self._is_ready = is_ready
        self.start()

    def start(self) -> None:
        output = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=output, stderr=output, cwd="/")
        wait_until(self._is_ready)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Without a clean stop. PostgreSQL's processes end with the first of them, as in a
        crash."""
        self.signal(SIGQUIT)
        self._process.wait()


def find_etcd() -> str:
    # `make test` unpacks it beside Python's packages.
    program = shutil.which("etcd") or shutil.which("etcd", path=Path(sys.prefix) / "etcd" / "usr" / "bin")
    assert program, "etcd is missing: apt-get install etcd-server"
    return program


@contextmanager
def start_etcd(
    directory: Path, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[CoordinatorProcess]:
    """On this address, by a command that begins with `prefix`."""
    program = find_etcd()
    client, peer = (f"http://{host}:{unused_port()}" for _ in range(2))
    command = [
        *prefix, program, "--data-dir", str(directory),
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"default={peer}",
    ]  # fmt: skip

    def is_healthy() -> bool:
        try:
            return b"true" in fetch(f"{client}/health").body
        except FetchError:
            return False

    process = CoordinatorProcess(command, client.replace("http://", "etcd://"), is_healthy)
    try:
        yield process
    finally:
        process.kill()


@contextmanager
def run_etcd(directory: Path) -> Iterator[str]:
    """Gives its URL."""
    with start_etcd(directory) as process:
        yield process.url.replace("etcd://", "http://")


@contextmanager
def start_postgresql(
    directory: Path, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[CoordinatorProcess]:
    """On this address, by a command that begins with `prefix`."""
    found = sorted(POSTGRES.glob("*/bin"))
    assert found, "PostgreSQL is missing: apt-get install postgresql"
    binaries, port = found[-1], unused_port()
    as_user: list[str] = []
    with ExitStack() as stack:
        if os.getuid() == 0:
            # It does not run as root, and no other user may enter the directories of tests.
            as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            own = TemporaryDirectory(prefix="nsparq-postgresql-", ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(own))
            shutil.chown(directory, "postgres")
        else:
            directory.mkdir()
        data = directory / "data"
        initialise = [*as_user, str(binaries / "initdb"), "-D", str(data)]
        subprocess.run(
            [*initialise, *"-U nsparq -A trust --no-sync -E UTF8".split()],
            check=True,
            capture_output=True,
            cwd="/",
        )
        with (data / "pg_hba.conf").open("a") as access:
            access.write("host all all samenet trust\n")
        command = [binaries / "postgres", "-D", data, "-p", port, "-k", directory, "-h", host, "-F"]

        def is_ready() -> bool:
            ready = [str(binaries / "pg_isready"), "-h", host, "-p", str(port)]
            return subprocess.run(ready, capture_output=True).returncode == 0

        url = f"postgresql://nsparq@{host}:{port}/postgres"
        process = CoordinatorProcess([*prefix, *as_user, *map(str, command)], url, is_ready)
        stack.callback(process.kill)
        yield process


@contextmanager
def run_postgresql(directory: Path) -> Iterator[str]:
    """Gives its URL."""
    with start_postgresql(directory) as process:
        yield process.url
