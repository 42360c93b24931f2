"""The common main of daemons. tests/server/test_main.py has nsqd's, with signals."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsparq.errors import StartError
from nsparq.lookup.options import TABLE
from nsparq.process import load_runner, raise_file_limit, run_daemon
from tests.support import wait_until

pytestmark = pytest.mark.usefixtures("root_logger_restored", "signals_restored", "collector_restored")

COUNT_THREADS = """
import os
from nsparq.process import load_runner
from nsparq.server.main import load
load_runner(load)
print(len(os.listdir("/proc/self/task")))
"""


@pytest.fixture
def collector_restored() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.unfreeze()
    yield
    gc.freeze()  # see tests/conftest.py
    gc.set_threshold(*thresholds)


class Obedient:
    """A daemon that gets a stop signal as soon as it has started."""

    def __init__(self, options: Any) -> None:
        self.options = options

    async def start(self) -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)

    async def stop(self) -> None:
        pass

    def reload(self) -> None:
        pass


def run(make: Callable[[Any], Any], *argv: str) -> int:
    return run_daemon(TABLE, lambda: make, argv)


def test_a_daemon_that_is_told_to_stop_ends_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Obedient] = []

    def make(options: Any) -> Obedient:
        made.append(Obedient(options))
        return made[0]

    assert run(make, "-tombstone-lifetime=7s") == 0
    assert made[0].options.tombstone_lifetime == 7
    assert capsys.readouterr() == ("", "")


def test_the_options_configure_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    def make(options: Any) -> Obedient:
        logging.getLogger("x").info("hidden")
        logging.getLogger("x").warning("shown")
        return Obedient(options)

    assert run(make, "--log-level=warn", "--log-prefix=[mine] ") == 0
    err = capsys.readouterr().err
    assert err.startswith("[mine] ") and err.endswith(" shown\n") and "hidden" not in err


def test_warnings_of_the_command_line_are_logged(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.toml"
    path.write_text("nonsense = 1\n")
    assert run(Obedient, f"--config={path}") == 0
    assert "nonsense" in capsys.readouterr().err


def test_a_start_that_fails_is_status_1_with_a_fatal_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusing(Obedient):
        async def start(self) -> None:
            raise StartError("no")

    assert run(Refusing) == 1
    err = capsys.readouterr().err
    assert err.endswith(" FATAL: failed to instantiate nsqlookupd - no\n") and "Traceback" not in err


@pytest.mark.parametrize("where", ["start", "stop"])
def test_a_bug_is_status_1_with_a_traceback(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Obedient):
        async def start(self) -> None:
            if where == "start":
                raise RuntimeError("bug")
            await super().start()

        async def stop(self) -> None:
            raise RuntimeError("bug")

    assert run(Broken) == 1
    err = capsys.readouterr().err
    assert "FATAL: stopped by an unexpected error" in err and "RuntimeError: bug" in err


def test_signals_do_nothing_after_the_end() -> None:
    assert run(Obedient) == 0
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        assert signal.getsignal(signum) is signal.SIG_IGN


def test_the_collector_ignores_loaded_objects() -> None:
    frozen = []

    class Looking(Obedient):
        async def stop(self) -> None:
            frozen.append(gc.get_freeze_count())

    assert run(Looking) == 0
    assert frozen[0] > 1000 and gc.get_threshold()[0] >= 10_000


# Late imports


def test_a_missing_package_is_named_with_its_extra() -> None:
    def load() -> None:
        import no_such_package.inside  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(
        StartError, match=r"^the package no_such_package is missing: pip install 'nsparq\[server\]'$"
    ):
        load_runner(load)


def test_a_missing_module_of_ours_is_a_bug() -> None:
    def load() -> None:
        import nsparq.nonsense  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(ModuleNotFoundError):
        load_runner(load)


def test_load_runner_gives_uvloop_and_the_loaded_daemon() -> None:
    import uvloop

    assert load_runner(lambda: sys) == (uvloop.run, sys)


# Limits of the system


def test_the_limit_of_open_files_is_raised_to_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(10, 100)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    raise_file_limit()
    raise_file_limit()
    assert limits == [(10, 100), (100, 100)]


def test_a_refused_limit_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 100))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_file_limit()
    assert "cannot raise the limit of open files above 10: not allowed" in caplog.text


@pytest.mark.parametrize(("asked", "threads"), [("", 1), ("2", 2)])
def test_a_daemon_starts_with_a_single_thread_by_default(asked: str, threads: int) -> None:
    """NumPy's linear algebra would start a thread for each core."""
    environment = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    if asked:
        environment["OPENBLAS_NUM_THREADS"] = asked
    ran = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True, env=environment
    )
    assert int(ran.stdout) == threads


DAEMONS = {
    "nsqd": ("server", ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--data-path=."]),
    "nsqlookupd": ("lookup", ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]),
    "nsqadmin": ("admin", ["--http-address=127.0.0.1:0", "--nsqd-http-address=127.0.0.1:1"]),
}


def end_with_closed_files(closed: str, package: str, flags: list[str], log: Path, has_begun: Path) -> None:
    """Start a daemon with files closed by the shell, stop it, and check for a clean end."""
    code = f"import sys; from nsparq.{package}.main import main; sys.exit(main({flags!r}))"
    with log.open("w") as errors:
        command = ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
        process = subprocess.Popen(command, stderr=errors, cwd=log.parent)
        try:
            wait_until(lambda: has_begun.is_socket() or "HTTP: listening on" in log.read_text())
            process.terminate()
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("program", DAEMONS)
@pytest.mark.parametrize("closed", ["<&-", "<&- >&-"])
def test_a_daemon_with_closed_standard_files_ends_with_status_0(
    program: str, closed: str, tmp_path: Path
) -> None:
    end_with_closed_files(closed, *DAEMONS[program], tmp_path / "log", tmp_path / "none")


def test_a_daemon_that_cannot_log_ends_with_status_0(tmp_path: Path) -> None:
    flags = ["--tcp-address=nsqd.sock", "--http-address=", f"--data-path={tmp_path}"]
    end_with_closed_files("<&- >&- 2>&-", "server", flags, tmp_path / "log", tmp_path / "nsqd.sock")


@pytest.mark.parametrize(
    ("output", "reason"),
    [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")],
)
def test_a_help_that_cannot_be_written_is_status_1_with_a_fatal_line(output: str, reason: str) -> None:
    code = "import sys; from nsparq.lookup.main import main; sys.exit(main(['--help']))"
    command = ["/bin/sh", "-c", f'exec "$0" -c "$1" {output}', sys.executable, code]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith(f"FATAL: cannot write to standard output: {reason}\n")
    assert ended.stderr.count("\n") == 1
