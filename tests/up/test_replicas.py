"""`nsparq up --replicas=2`: a pair of nsqds and etcd, and what happens when one of them dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nsparq.up.main import main
from tests.replication.coordinators import find_etcd
from tests.support import wait_until
from tests.up.support import Up
from tests.up.test_up import get

pytest.importorskip("uvloop")


def test_a_pair_starts_fails_over_and_starts_again(tmp_path: Path) -> None:
    path = f"{Path(find_etcd()).parent}{os.pathsep}{os.environ['PATH']}"
    with Up(tmp_path, "--replicas=2", PATH=path) as up:
        up.wait_until_ready()
        nodes = {name: up.address(name, "http") for name in ("nsqd-1", "nsqd-2")}
        status = get(nodes["nsqd-1"], "/replication")
        assert (status["role"], status["in_sync"]) == ("primary", ["nsqd-1", "nsqd-2"])
        assert (
            f"nsparq replication status --lookupd-http-address={up.address('nsqlookupd', 'http')}" in up.out()
        )
        os.kill(up.child("--replication-name=nsqd-1"), signal.SIGKILL)

        def is_whole_again() -> bool:
            status = get(nodes["nsqd-2"], "/replication")
            return status["epoch"] == 2 and len(status["in_sync"]) == 2

        # It is restarted, and may be the first to take over again.
        wait_until(is_whole_again)
        up.signal(signal.SIGTERM)
        assert up.wait() == 0
    # The whole stack comes back, whoever was primary.
    with Up(tmp_path, "--replicas=2", PATH=path) as up:
        up.wait_until_ready()
        assert get(up.address("nsqd-2", "http"), "/replication")["epoch"] > 2
        up.signal(signal.SIGTERM)
        assert up.wait() == 0


def test_it_says_how_to_get_etcd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([f"--data-path={tmp_path}", "--replicas=2"]) == 1
    said = capfd.readouterr().err
    assert "there is no etcd on this machine" in said and "apt-get install etcd-server" in said
    assert "--coordinator=etcd://host:2379" in said


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--replicas=2", "--nsqd=2"], "--replicas and --nsqd do not go together"),
        (["--coordinator=etcd://127.0.0.1:1"], "--coordinator needs --replicas"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 1
    assert reason in capfd.readouterr().err
