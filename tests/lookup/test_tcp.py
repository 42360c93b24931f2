"""TCP connections of nsqlookupd: turns, slow readers, silent peers, and log lines."""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from nsparq.lookup import daemon, tcp
from tests.support import wait_until
from tests.support.lookupd import NSQD, LookupdThread
from tests.support.polling import DEADLINE

OK = b"\0\0\0\x02OK"


@pytest.fixture
def lookupd() -> Iterator[LookupdThread]:
    with LookupdThread() as lookupd:
        yield lookupd


def test_a_peer_with_many_commands_does_not_block_others(
    lookupd: LookupdThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    handle = tcp.Connection._handle

    def counted(connection: tcp.Connection, commands: Iterator[tcp.Command]) -> None:
        counts = iter(commands)
        handled = 0

        def watched() -> Iterator[tcp.Command]:
            nonlocal handled
            for command in counts:
                handled += 1
                yield command

        handle(connection, watched())
        turns.append(handled)

    monkeypatch.setattr(tcp.Connection, "_handle", counted)
    with lookupd.peer() as busy:
        busy.send(b"PING\n" * 5000)
        for _ in range(5000):
            busy.expect_ok()
    assert max(turns) <= tcp.COMMANDS_PER_TURN


def test_an_error_comes_after_the_replies_to_earlier_commands(lookupd: LookupdThread) -> None:
    with lookupd.peer() as peer:
        peer.send(b"PING\n" * 1000 + b"REGISTER t c\nREGISTER bad!\n")
        for _ in range(1001):
            peer.expect_ok()
        peer.expect_fatal("E_BAD_TOPIC REGISTER topic name 'bad!' is not valid")
    assert lookupd.channels("t") == ["c"]


def test_a_peer_that_does_not_read_is_not_read_from(lookupd: LookupdThread) -> None:
    with lookupd.connect() as peer:
        # Otherwise the system buffers megabytes of small replies.
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            peer.socket.setsockopt(socket.SOL_SOCKET, buffer, 1 << 16)
        peer.socket.setblocking(False)
        (connection,) = wait_until(lambda: lookupd.lookupd.connections)
        sent, is_held_back = 0, False
        block = b"PING\n" * 10_000
        while not is_held_back:
            assert sent < 64 << 20, "no end of reading"
            try:
                sent += peer.socket.send(block[sent % 5 :])
            except BlockingIOError:
                is_held_back = connection._transport.get_write_buffer_size() > 0
                time.sleep(0.01)
        assert connection._transport.get_write_buffer_size() < 2 * tcp.WRITE_HIGH
        with lookupd.peer() as other:
            other.ping()
        # When it reads, it gets every reply.
        peer.socket.settimeout(DEADLINE)
        answers = 0
        while answers < sent // 5 * len(OK):
            received = peer.socket.recv(1 << 20)
            assert received == (OK * len(received))[answers % len(OK) :][: len(received)]
            answers += len(received)


def test_a_silent_peer_is_closed(
    lookupd: LookupdThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With or without IDENTIFY, and even if it sends half a command."""
    caplog.set_level(logging.WARNING)
    with lookupd.peer() as identified, lookupd.connect() as unknown, lookupd.peer() as lively:
        identified.register("t")
        lively.ping()
        silent = {one.socket.getsockname()[1] for one in (identified, unknown)}
        for connection in lookupd.lookupd.connections:
            if int(connection.address.rpartition(":")[2]) in silent:
                connection.last_command_s -= lookupd.lookupd.idle_limit_s + 1
        unknown.send(b"PIN")
        lively.ping()
        lookupd.call_daemon(lambda found: found._sweep())
        identified.expect_closed()
        unknown.expect_closed()
        lively.ping()
    wait_until(lambda: not lookupd.lookup("t")["producers"])
    assert caplog.text.count("no command for") == 2


def test_the_idle_limit_is_never_shorter_than_twice_the_inactive_timeout() -> None:
    with LookupdThread(inactive_producer_timeout=3600.0) as lookupd:
        assert lookupd.lookupd.idle_limit_s == 7200.0
    with LookupdThread(inactive_producer_timeout=1.0) as lookupd:
        assert lookupd.lookupd.idle_limit_s == daemon.IDLE_S


def test_tcp_keep_alive_is_on(lookupd: LookupdThread) -> None:
    with lookupd.connect() as peer:
        peer.ping()
        (connection,) = lookupd.lookupd.connections
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


@pytest.mark.parametrize("field", ["broadcast_address", "hostname", "version", "topology_zone"])
def test_a_long_text_in_identify_is_refused(lookupd: LookupdThread, field: str) -> None:
    body = json.dumps({**NSQD, field: "x" * (tcp.MAX_FIELD + 1)}).encode()
    with lookupd.connect() as peer:
        peer.command("IDENTIFY", body=body)
        peer.expect_fatal("E_BAD_BODY IDENTIFY field longer than 1024")
    assert lookupd.nodes() == []


def test_too_many_registrations_end_the_connection() -> None:
    with LookupdThread(max_registrations=2) as lookupd, lookupd.peer() as peer:
        peer.register("t", "c")
        peer.command("REGISTER", "u")
        peer.expect_fatal("E_INVALID REGISTER too many registrations")


def test_an_internal_error_ends_only_one_connection(
    lookupd: LookupdThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("bug")

    with lookupd.peer() as peer, lookupd.peer() as other:
        monkeypatch.setattr(lookupd.lookupd.registry, "register", fail)
        peer.command("REGISTER", "t")
        peer.expect_closed()
        other.ping()
    assert "internal error" in caplog.text


def test_a_peer_that_half_closes_gets_its_replies_and_is_closed(
    lookupd: LookupdThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lookupd.peer() as polite:
        polite.send(b"PING\n" * 1000)
        polite.end_of_stream()
        for _ in range(1000):
            polite.expect_ok()
        polite.expect_closed()
    monkeypatch.setattr(tcp, "LINGER_S", 0.1)
    with lookupd.peer() as rude:
        rude.socket.setblocking(False)
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 0.3:  # until it is not read from
            try:
                rude.socket.send(b"PING\n" * 10_000)
                quiet_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        (connection,) = lookupd.lookupd.connections
        lookupd.call_daemon(lambda _: connection.eof_received())
        wait_until(lambda: not lookupd.lookupd.connections)


def test_a_peer_that_resets_leaves_only_its_names(lookupd: LookupdThread) -> None:
    peer = lookupd.peer()
    peer.register("t", "c")
    peer.send(b"IDENTIFY\n" + struct.pack(">i", 100))
    peer.abort()
    wait_until(lambda: not lookupd.lookupd.connections)
    assert lookupd.debug() == {}
    assert lookupd.lookup("t") == {"channels": ["c"], "producers": []}


def test_peers_over_ipv6_are_named_with_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with LookupdThread(tcp_address="[::1]:0") as lookupd:
        with socket.create_connection(lookupd.address) as raw:
            body = json.dumps(NSQD).encode()
            raw.sendall(b"  V1IDENTIFY\n" + struct.pack(">i", len(body)) + body)
            (node,) = wait_until(lookupd.nodes)
            assert node["remote_address"] == f"[::1]:{raw.getsockname()[1]}"


def test_of_a_cluster_only_the_nsqd_of_the_last_epoch_is_listed(lookupd: LookupdThread) -> None:
    def listed() -> list[str]:
        return [one["broadcast_address"] for one in lookupd.lookup("t")["producers"]]

    # It stays connected, and says nothing: it may be partitioned or powered off.
    silent = lookupd.peer(broadcast_address="old", cluster="orders:1", epoch=1)
    silent.register("t", "c")
    another = lookupd.peer(broadcast_address="another", cluster="orders:2", epoch=7)
    another.register("t")
    with silent, another, lookupd.connect() as new:
        assert new.identify(broadcast_address="new", cluster="orders:1", epoch=2)["cluster"] == "orders:1"
        assert listed() == ["another"]
        new.register("t", "c")
        assert listed() == ["another", "new"]
        silent.expect_closed()
        # It comes back late.
        with lookupd.connect() as late:
            late.command("IDENTIFY", body=json.dumps({**NSQD, "cluster": "orders:1", "epoch": 1}).encode())
            late.expect_fatal("E_INVALID IDENTIFY epoch 1 of the cluster has ended: 2 is known")
        assert listed() == ["another", "new"]
        # The same primary connects again while its old connection hangs.
        with lookupd.peer(broadcast_address="new", cluster="orders:1", epoch=2) as again:
            again.register("t", "c")
            assert listed() == ["another", "new"]
            new.expect_closed()
        wait_until(lambda: listed() == ["another"])
    # Nobody of the cluster is connected: it may begin anew.
    with lookupd.peer(broadcast_address="old", cluster="orders:1", epoch=1) as first:
        first.register("t", "c")
        wait_until(lambda: listed() == ["old"])


def test_an_nsqd_without_a_cluster_gets_nsqs_reply(lookupd: LookupdThread) -> None:
    with lookupd.connect() as peer:
        assert "cluster" not in peer.identify()
