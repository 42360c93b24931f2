"""The nsqlookupd command as a process: output, imports and exit status."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.support import wait_until
from tests.support.http import HttpConnection
from tests.support.lookupd import LookupdProcess, LookupdThread
from tests.support.polling import DEADLINE

LINE = r"\[nsqlookupd\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} "


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nsparq.lookup.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, **more)


def test_version_is_one_line_that_scripts_can_parse() -> None:
    result = run("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"nsqlookupd v1\.3\.0 \(built w/[a-z0-9.-]+\)\n", result.stdout)


def test_a_wrong_flag_is_status_2_with_a_short_text_on_stderr() -> None:
    result = run("--nope")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "nsqlookupd: flag provided but not defined: -nope\n`nsqlookupd --help` lists the flags\n"
    )


def test_a_wrong_value_is_status_1_with_a_fatal_line() -> None:
    result = run("--max-registrations=0")
    assert result.returncode == 1
    expected = "FATAL: failed to instantiate nsqlookupd - --max-registrations must be positive\n"
    assert re.fullmatch(LINE + expected, result.stderr)


def test_the_daemon_does_not_need_numpy() -> None:
    code = "import sys; import nsparq.lookup.daemon; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_it_logs_its_addresses_survives_a_hangup_and_stops_cleanly() -> None:
    with LookupdProcess() as lookupd:
        for kind in ("TCP", "HTTP"):
            line = rf"^{LINE}INFO: {kind}: listening on 127\.0\.0\.1:\d+$"
            assert re.search(line, lookupd.stderr_text(), re.MULTILINE)
        with lookupd.peer() as peer:
            lookupd.signal(signal.SIGHUP)
            peer.register("t")
            wait_until(lambda: "SIGHUP" in lookupd.stderr_text())
            assert lookupd.topics() == ["t"]
            assert lookupd.terminate() == 0
            peer.expect_closed()


def test_it_stops_within_seconds_if_peers_stay_connected() -> None:
    with LookupdProcess() as lookupd, lookupd.peer() as peer, lookupd.http_connect() as half:
        half.send(b"GET /lookup?topic=t HTTP/1.1\r\nHost: x\r\n")
        peer.send(b"REGISTER t")
        lookupd.signal(signal.SIGINT)
        assert lookupd.wait(DEADLINE) == 0


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_clients_of_ipv4_and_ipv6_can_connect() -> None:
    with LookupdThread(tcp_address="0.0.0.0:0", http_address="0.0.0.0:0") as lookupd:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, lookupd.address[1]), timeout=DEADLINE) as connection:
                connection.sendall(b"  V1PING\n")
                assert connection.recv(6) == b"\0\0\0\2OK"
            with HttpConnection((host, lookupd.http_address[1])) as http:
                assert http.request("GET", "/ping").body == b"OK"


def test_an_address_in_use_is_a_start_error() -> None:
    with LookupdProcess() as first:
        tcp, http = ("{}:{}".format(*address) for address in (first.address, first.http_address))
        for taken, arguments in (
            (tcp, (f"--tcp-address={tcp}", "--http-address=127.0.0.1:0")),
            (http, ("--tcp-address=127.0.0.1:0", f"--http-address={http}")),
        ):
            second = run(*arguments)
            assert second.returncode == 1
            expected = re.escape(f"failed to instantiate nsqlookupd - listen ({taken}) failed - ")
            assert re.search(LINE + "FATAL: " + expected, second.stderr)


def test_an_address_without_a_port_is_a_start_error() -> None:
    result = run("--tcp-address=localhost")
    assert result.returncode == 1
    assert "FATAL: failed to instantiate nsqlookupd - listen (localhost) failed - " in result.stderr
