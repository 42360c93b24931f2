"""`nsparq up` with real daemons: it is ready when it says so, restarts them, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from nsparq.client.sync import Producer, consume
from nsparq.storage.files import Files
from nsparq.up import main as main_module
from nsparq.up.main import main
from tests.support import wait_until
from tests.support.polling import DEADLINE
from tests.up.support import Up, is_alive, wait_until_gone

pytest.importorskip("uvloop")


def get(address: str, path: str) -> Any:
    with urlopen(f"http://{address}{path}", timeout=DEADLINE) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two nsqds, for all tests that only look, or kill one of the children."""
    with Up(tmp_path_factory.mktemp("up"), "--nsqd=2") as up:
        up.wait_until_ready()
        yield up
        up.signal(signal.SIGTERM)
        assert up.wait() == 0


# ready


def test_when_it_is_ready_every_address_answers(up: Up) -> None:
    for name in ("nsqd-1", "nsqd-2", "nsqlookupd"):
        with urlopen(f"http://{up.address(name, 'http')}/ping", timeout=DEADLINE) as answer:
            assert answer.read() == b"OK"
        host, _, port = up.address(name, "tcp").partition(":")
        socket.create_connection((host, int(port)), DEADLINE).close()
    with urlopen(f"http://{up.address('nsqadmin', 'http')}/", timeout=DEADLINE) as answer:
        assert "<html" in answer.read().decode()


def test_the_nsqds_are_known_to_nsqlookupd_and_to_nsqadmin(up: Up) -> None:
    tcp_ports = {int(up.address(name, "tcp").partition(":")[2]) for name in ("nsqd-1", "nsqd-2")}
    producers = get(up.address("nsqlookupd", "http"), "/nodes")["producers"]
    assert {one["tcp_port"] for one in producers} == tcp_ports
    assert {one["broadcast_address"] for one in producers} == {"127.0.0.1"}
    nodes = get(up.address("nsqadmin", "http"), "/api/nodes")["nodes"]
    assert {one["tcp_port"] for one in nodes} == tcp_ports


def test_a_message_published_to_one_nsqd_is_found_through_nsqlookupd(up: Up) -> None:
    with Producer(up.address("nsqd-2", "tcp")) as producer:
        producer.publish("greetings", b"hello")
    lookupd = [up.address("nsqlookupd", "http")]
    assert next(message.body for message in consume("greetings", "look", nsqlookupd=lookupd)) == b"hello"


def test_all_data_is_in_one_folder(up: Up) -> None:
    folder = up.directory / "nsparq-data"
    assert {path.name for path in folder.iterdir()} == {"nsqd-1", "nsqd-2", "up.lock"}
    assert {path.name for path in up.directory.iterdir()} == {"nsparq-data", "out", "err"}


def test_two_nsqds_do_not_make_the_same_message_ids(up: Up) -> None:
    commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in up.children()]
    ids = [one for command in commands for one in command if one.startswith("--node-id=")]
    assert sorted(ids) == ["--node-id=0", "--node-id=1"]


def test_log_lines_have_the_name_of_their_daemon_in_front(up: Up) -> None:
    for name in ("nsqd-1", "nsqd-2", "nsqlookupd", "nsqadmin"):
        assert re.search(rf"(?m)^{name} +\| \S+ \S+ INFO: HTTP: listening on ", up.err())
    assert "\x1b" not in up.err() + up.out()


# refusing


def test_a_second_one_in_the_same_folder_is_refused(up: Up, capfd: pytest.CaptureFixture[str]) -> None:
    folder = up.directory / "nsparq-data"
    assert main([f"--data-path={folder}", "--port-base=0"]) == 1
    assert f"--data-path={folder} is in use by another `nsparq up`" in capfd.readouterr().err


def test_ports_in_use_are_refused_before_anything_is_started(
    up: Up, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tcp, admin = (
        up.address(*which).rpartition(":")[2] for which in (("nsqd-1", "tcp"), ("nsqadmin", "http"))
    )
    flags = ["--port-base=0", f"--nsqd-tcp-port={tcp}", f"--admin-port={admin}"]
    assert main([f"--data-path={tmp_path}", *flags]) == 1
    said = capfd.readouterr().err
    assert f"port {tcp} for nsqd, TCP is in use: use --nsqd-tcp-port" in said
    assert f"port {admin} for nsqadmin, HTTP is in use: use --admin-port" in said
    assert "listening" not in said
    assert not (tmp_path / "nsqd-1").exists()


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--nsqd=0", "must be a number from 1 to 50"),
        ("--port-base=x", "must be a port"),
        ("--admin-port=65536", "must be a port"),
        ("--stop-timeout=soon", "must be a duration such as 15s"),
        ("--nsqds=2", "there is no flag --nsqds; did you mean --nsqd?"),
    ],
)
def test_a_wrong_command_line_has_status_2(
    flag: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_wrong_pipeline_file_is_named_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shop.toml"
    file.write_text('[pipeline.shop]\nsource = "events"\nsinc = "console"\n')
    assert main([f"--pipeline={file}", f"--data-path={tmp_path / 'data'}", "--port-base=0"]) == 1
    assert "did you mean 'sink'?" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_two_pipeline_files_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_module, "_check_pipelines", lambda files: None)
    flags = [f"--pipeline={tmp_path / name / 'shop.toml'}" for name in ("a", "b")]
    assert main([*flags, f"--data-path={tmp_path / 'data'}"]) == 1
    assert "need different names" in capsys.readouterr().err


def test_pipelines_without_spark_are_refused_with_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shop.toml"
    file.write_text('[pipeline.shop]\nsource = "events"\nsink = "console"\n')
    monkeypatch.setattr(main_module.importlib.util, "find_spec", lambda name: None)
    assert main([f"--pipeline={file}", f"--data-path={tmp_path / 'data'}", "--port-base=0"]) == 1
    assert "pip install 'nsparq[spark]'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([f"--data-path={tmp_path / 'file' / 'data'}", "--port-base=0"]) == 1
    assert f"--data-path={tmp_path / 'file' / 'data'}: " in capsys.readouterr().err


# deaths


def test_a_child_that_dies_is_restarted_with_its_port_and_data(up: Up) -> None:
    with Producer(up.address("nsqd-1", "tcp")) as producer:
        producer.publish("kept", b"still here")
    os.kill(up.child("/nsqd-1"), signal.SIGKILL)
    up.wait_for(lambda: "nsqd-1 answers again" in up.err(), "it is back")
    assert "nsqd-1 was killed by SIGKILL; restarting it in 0.5 s" in up.err()
    found = consume("kept", "look", nsqd=[up.address("nsqd-1", "tcp")])
    assert next(message.body for message in found) == b"still here"
    assert up.process.poll() is None


def test_nsqlookupd_can_die_and_all_reconnect(up: Up) -> None:
    os.kill(up.child("nsparq.lookup.main"), signal.SIGKILL)
    up.wait_for(lambda: "nsqlookupd answers again" in up.err(), "it is back")

    def is_registered() -> bool:
        return len(get(up.address("nsqlookupd", "http"), "/nodes")["producers"]) == 2

    wait_until(is_registered, what="both nsqds are registered again")


def test_a_member_that_cannot_start_stops_all_and_its_last_output_is_shown(tmp_path: Path) -> None:
    data = tmp_path / "nsparq-data" / "nsqd-1"
    data.mkdir(parents=True)
    taken = Files().lock_directory(data)
    try:
        with Up(tmp_path) as up:
            assert up.wait() == 1
            last = up.err().partition("nsparq up: ")[2].splitlines()
    finally:
        os.close(taken)
    assert last[0] == "nsqd exited with status 1; its last output:"
    assert any("FATAL: " in line and "nsqd-1" in line for line in last[1:])
    assert up.out() == ""


# stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_stops_all_of_them_in_order(tmp_path: Path, number: int) -> None:
    with Up(tmp_path) as up:
        up.wait_until_ready()
        children = up.children()
        assert len(children) == 3
        up.signal(number)
        assert up.wait() == 0
        assert not any(map(is_alive, children))
        said = up.err()
    last = ("nsqadmin .*HTTP: closing", "nsqd .*NSQ: bye", "nsqlookupd .*TCP: closing")
    order = [re.search(pattern, said).start() for pattern in last]  # type: ignore[union-attr]
    assert order == sorted(order)
    assert said.splitlines()[-1] == "up         | stopped"


def test_a_signal_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with Up(tmp_path) as up:
        up.wait_for(up.children, "a child")
        children = up.children()
        up.signal(signal.SIGTERM)
        assert up.wait() == 0
        assert not any(map(is_alive, children))
        assert up.out() == ""


def test_a_member_that_does_not_stop_in_time_is_killed(tmp_path: Path) -> None:
    with Up(tmp_path, "--stop-timeout=500ms") as up:
        up.wait_until_ready()
        children = up.children()
        os.kill(up.child("nsparq.server.main"), signal.SIGSTOP)
        up.signal(signal.SIGTERM)
        assert up.wait() == 1
        assert not any(map(is_alive, children))
        assert "nsqd did not stop within 0.5 s and was killed" in up.err()


def test_a_second_ctrl_c_kills_all_at_once(tmp_path: Path) -> None:
    with Up(tmp_path, "--stop-timeout=1h") as up:
        up.wait_until_ready()
        children = up.children()
        os.kill(up.child("/nsqd-1"), signal.SIGSTOP)
        up.signal(signal.SIGINT)
        up.wait_for(lambda: "| stopping" in up.err(), "it stops")
        up.signal(signal.SIGINT)
        assert up.wait() == 1
        assert not any(map(is_alive, children))
        assert "killing all" in up.err()


def test_the_children_stop_when_it_is_killed(tmp_path: Path) -> None:
    with Up(tmp_path, "--stop-timeout=1s") as up:
        up.wait_until_ready()
        children = up.children()
        with Producer(up.address("nsqd", "tcp")) as producer:
            producer.publish("kept", b"x")
        up.signal(signal.SIGKILL)
        up.wait()
        wait_until_gone(children)
    # They have stopped as for a signal: what was in memory is on disk.
    assert json.loads((tmp_path / "nsparq-data" / "nsqd-1" / "nsqd.dat").read_text())["topics"]
