"""The nsqadmin command as a process: its output, its exit; and the checked-in reference pages."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nsparq.admin.options import TABLE
from nsparq.admin.show.api.reference import page
from tests.admin.support import AdminProcess, AdminThread
from tests.support import wait_until
from tests.support.http import HttpConnection
from tests.support.polling import DEADLINE

LINE = r"\[nsqadmin\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} "
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nsparq.admin.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)


def test_version_is_one_line_of_the_shape_that_harnesses_parse() -> None:
    result = run("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"nsqadmin v1\.3\.0 \(built w/[a-z0-9.-]+\)\n", result.stdout)


def test_a_wrong_flag_is_status_2_with_a_short_text_on_stderr() -> None:
    result = run("--nope")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "nsqadmin: flag provided but not defined: -nope\n`nsqadmin --help` lists the flags\n"
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_logs_its_address_survives_sighup_and_stops_cleanly(signum: int) -> None:
    with AdminProcess(nsqd_http_address=("127.0.0.1:1",)) as admin:
        line = rf"^{LINE}INFO: HTTP: listening on 127\.0\.0\.1:\d+$"
        assert re.search(line, admin.stderr_text(), re.MULTILINE)

        def is_told() -> bool:
            # Until it has started a hangup is ignored.
            admin.signal(signal.SIGHUP)
            return "SIGHUP" in admin.stderr_text()

        wait_until(is_told, interval=0.1)
        assert admin.call("GET", "/ping").body == b"OK"
        admin.signal(signum)
        assert admin.wait(DEADLINE) == 0
        assert re.search(rf"^{LINE}INFO: HTTP: closing ", admin.stderr_text(), re.MULTILINE)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_it_listens_on_ipv4_and_ipv6() -> None:
    with AdminThread(http_address="0.0.0.0:0", nsqd_http_address=("127.0.0.1:1",)) as admin:
        for host in ("127.0.0.1", "::1"):
            with HttpConnection((host, admin.http_address[1])) as http:
                assert http.request("GET", "/ping").body == b"OK"


def test_a_policy_file_that_cannot_be_used_is_a_start_error(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("nonsense = 1\n")
    result = run("--nsqd-http-address=127.0.0.1:1", f"--auth-policy-file={policy}")
    assert result.returncode == 1
    assert "FATAL: failed to instantiate nsqadmin - " in result.stderr and "nonsense" in result.stderr


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nsqadmin-options.md", TABLE.markdown),
        ("nsqadmin.example.toml", TABLE.toml),
        ("nsqadmin-http.md", page),
    ],
)
def test_the_reference_pages_are_up_to_date(name: str, content: object) -> None:
    assert (REFERENCE / name).read_text() == content()  # type: ignore[operator]
