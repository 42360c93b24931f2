"""The nsqd command: exit status, output, and signals."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsparq.errors import StartError
from nsparq.kernel import BUILD
from nsparq.options import NsqdOptions
from nsparq.process import serve
from nsparq.server import main as main_module
from nsparq.server.main import main
from nsparq.version import NSQ_VERSION, __version__
from tests.support import BrokerProcess, wait_until
from tests.support.polling import DEADLINE

uvloop = pytest.importorskip("uvloop")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FATAL = r"\[nsqd\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} FATAL: "


pytestmark = pytest.mark.usefixtures("root_logger_restored", "signals_restored")


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nsparq.server.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, **more)


# Exit before the start


def test_version_is_one_line_of_the_shape_that_harnesses_parse() -> None:
    result = run("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"nsqd v\d+\.\d+\.\d+ \(built w/[a-z0-9.-]+\)\n", result.stdout)
    assert result.stdout.startswith(f"nsqd v{NSQ_VERSION} (built w/nsparq-{__version__}-{BUILD}-python3.")


def test_help_goes_to_stdout_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage of nsqd:\n") and err == ""


def test_a_wrong_flag_is_status_2_with_a_short_text_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nope"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "nsqd: flag provided but not defined: -nope\n`nsqd --help` lists the flags\n"


def test_a_wrong_value_is_status_1_with_a_fatal_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--node-id=1024"]) == 1
    assert re.fullmatch(
        FATAL + r"failed to instantiate nsqd - --node-id must be \[0,1024\)\n", capsys.readouterr().err
    )


def test_an_unusable_config_file_is_status_1_with_a_fatal_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.toml"
    assert main(["--config", str(path)]) == 1
    expected = FATAL + re.escape(f"failed to load config file {path}: No such file or directory\n")
    assert re.fullmatch(expected, capsys.readouterr().err)


def test_without_the_server_extra_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert main([]) == 1
    assert (
        "FATAL: failed to instantiate nsqd - the package uvloop is missing: pip install 'nsparq[server]'"
        in (capsys.readouterr().err)
    )


@pytest.mark.parametrize("build", ["python", BUILD])
def test_a_build_without_the_kernel_says_so_at_the_start(build: str, tmp_path: Path) -> None:
    variables = {**os.environ, "NSPARQ_NO_EXTENSIONS": "1" if build == "python" else ""}
    result = run(f"--data-path={tmp_path}/none", env=variables)
    assert result.returncode == 1
    assert ("WARNING: no compiled kernel: throughput is about half" in result.stderr) == (build == "python")


# Serving, with a daemon that only records


class RecordingNsqd:
    """Replaces the daemon: sends itself signals at given points, and records the calls."""

    def __init__(self, options: NsqdOptions) -> None:
        self.calls: list[str] = []
        instances.append(self)

    async def start(self) -> None:
        self.calls.append("start")

    def reload(self) -> None:
        self.calls.append("reload")

    async def stop(self) -> None:
        self.calls.append("stop")


instances: list[RecordingNsqd] = []


def serve_recorded(nsqd_class: type[RecordingNsqd]) -> list[str]:
    instances.clear()
    uvloop.run(serve(nsqd_class, NsqdOptions()))  # type: ignore[arg-type]
    return instances[0].calls


async def send_self(*signums: int) -> None:
    for signum in signums:
        os.kill(os.getpid(), signum)
        await asyncio.sleep(0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_stops_the_daemon(signum: int) -> None:
    class Stopped(RecordingNsqd):
        async def start(self) -> None:
            await super().start()
            asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signum)

    assert serve_recorded(Stopped) == ["start", "stop"]


def test_further_signals_while_stopping_are_swallowed() -> None:
    class Impatient(RecordingNsqd):
        async def start(self) -> None:
            await super().start()
            os.kill(os.getpid(), signal.SIGTERM)

        async def stop(self) -> None:
            await send_self(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
            await super().stop()

    assert serve_recorded(Impatient)[-1] == "stop"
    # They do not kill the process after the end of the event loop either.
    for signum in SIGNALS:
        os.kill(os.getpid(), signum)


def test_a_stop_signal_during_the_start_stops_after_it() -> None:
    class Slow(RecordingNsqd):
        async def start(self) -> None:
            await send_self(signal.SIGTERM)
            await super().start()

    assert serve_recorded(Slow) == ["start", "stop"]


def test_a_hangup_reloads_and_an_error_in_it_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    class Reloading(RecordingNsqd):
        async def start(self) -> None:
            await super().start()
            await send_self(signal.SIGHUP)  # too early to act on, and harmless
            asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGHUP)

        def reload(self) -> None:
            super().reload()
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("cannot reload")

    assert serve_recorded(Reloading) == ["start", "reload", "stop"]
    assert "reload failed" in caplog.text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StartError("listen (x) failed - y"), r"failed to instantiate nsqd - listen \(x\) failed - y\n"),
        (RuntimeError("bug"), r"stopped by an unexpected error\nTraceback[^$]*RuntimeError: bug\n"),
    ],
)
def test_a_failed_start_is_status_1_with_a_fatal_line(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(RecordingNsqd):
        async def start(self) -> None:
            raise error

    monkeypatch.setattr(main_module, "load", lambda: Failing)
    assert main([]) == 1
    assert re.fullmatch(FATAL + text, capsys.readouterr().err)


# The real daemon


def test_nsqd_tells_its_address_survives_a_hangup_and_stops_cleanly(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, log_prefix="[x] ") as nsqd:
        line = r"^\[x\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} INFO: TCP: listening on 127\.0\.0\.1:\d+$"
        assert re.search(line, nsqd.stderr_text(), re.MULTILINE)
        nsqd.signal(signal.SIGHUP)
        nsqd.publish("t", b"still here")
        assert nsqd.terminate() == 0


def test_repeated_stop_signals_still_end_in_status_0(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as nsqd:

        def ended() -> bool:
            nsqd.signal(signal.SIGTERM)
            return not nsqd.alive()

        wait_until(ended, interval=0.001)
        assert nsqd.wait() == 0
