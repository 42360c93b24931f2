"""Starting and stopping nsqd: refused starts, files left behind, addresses."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from nsparq.addresses import join_address, split_address
from nsparq.errors import StartError
from nsparq.options import NsqdOptions, TlsRequired
from nsparq.server.daemon import Nsqd
from tests.support import BrokerThread, RawConnection, wait_until
from tests.support.auth_server import AuthServer, entry
from tests.support.go_queue import GoQueue, go_messages, write_metadata
from tests.support.http import HttpConnection


def options(tmp_path: Path, **more: object) -> NsqdOptions:
    local = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "data_path": str(tmp_path)}
    return NsqdOptions(**{**local, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:4150", ("127.0.0.1", 4150)),
        (":4150", ("", 4150)),
        ("[::1]:4150", ("::1", 4150)),
        ("nsqd.sock", None),
        ("/run/nsqd.sock", None),
        ("/run/nsqd:4150", None),
        ("host:port", None),
    ],
)
def test_an_address_is_host_and_port_or_a_path(address: str, expected: tuple[str, int] | None) -> None:
    assert split_address(address) == expected


def test_an_ipv6_host_is_joined_in_brackets() -> None:
    assert (join_address("::1", 4150), join_address("127.0.0.1", 1)) == ("[::1]:4150", "127.0.0.1:1")


@pytest.mark.parametrize("more", [{"tls_required": TlsRequired.YES}, {"tls_client_auth_policy": "require"}])
def test_a_certificate_without_a_key_is_refused(tmp_path: Path, more: dict[str, object]) -> None:
    with pytest.raises(StartError, match="cannot require TLS client connections without TLS key and cert"):
        asyncio.run(Nsqd(options(tmp_path, **more)).start())


def test_a_taken_port_is_named_and_the_data_path_is_unlocked(tmp_path: Path) -> None:
    async def scenario(address: str) -> None:
        with pytest.raises(StartError, match=rf"listen \({address}\) failed - "):
            await Nsqd(options(tmp_path, tcp_address=address)).start()
        again = Nsqd(options(tmp_path))
        await again.start()
        await again.stop()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(scenario(f"127.0.0.1:{taken.getsockname()[1]}"))


def test_stopping_twice_is_safe_and_the_port_is_free_afterwards(tmp_path: Path) -> None:
    async def scenario() -> tuple[str, int]:
        nsqd = Nsqd(options(tmp_path))
        await nsqd.start()
        assert isinstance(nsqd.tcp_address, tuple)
        await nsqd.stop()
        await nsqd.stop()
        return nsqd.tcp_address

    socket.create_server(asyncio.run(scenario())).close()


def test_the_socket_file_of_a_killed_daemon_is_replaced_and_ours_removed(tmp_path: Path) -> None:
    path = tmp_path / "nsqd.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))

    async def scenario() -> None:
        nsqd = Nsqd(options(tmp_path, tcp_address=str(path)))
        await nsqd.start()
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"XXXX")
        assert b"E_BAD_PROTOCOL" in await reader.read()
        writer.close()
        await writer.wait_closed()
        await nsqd.stop()

    asyncio.run(scenario())
    assert not path.exists()


def test_a_file_that_is_no_socket_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("mine")
    with pytest.raises(StartError, match="failed"):
        asyncio.run(Nsqd(options(tmp_path, tcp_address=str(path))).start())
    assert path.read_text() == "mine"


def test_a_port_that_cannot_be_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^listen \(127\.0\.0\.1:99999\) failed - "):
        asyncio.run(Nsqd(options(tmp_path, tcp_address="127.0.0.1:99999")).start())


def test_an_empty_tcp_address_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--tcp-address must not be empty"):
        asyncio.run(Nsqd(options(tmp_path, tcp_address="")).start())


@pytest.mark.parametrize("flag", ["tcp_address", "http_address"])
def test_a_start_that_fails_on_a_taken_port_has_changed_no_file(tmp_path: Path, flag: str) -> None:
    """In particular it has not imported the files of NSQ's nsqd."""
    write_metadata(tmp_path, {"t": ["c"]})
    GoQueue(tmp_path, "t:c").write(*go_messages(10)).save()

    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    async def scenario(address: str) -> None:
        with pytest.raises(StartError, match="failed - "):
            await Nsqd(options(tmp_path, **{flag: address})).start()

    before = content()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(scenario(f"127.0.0.1:{taken.getsockname()[1]}"))
    assert content() == before


def test_a_second_daemon_does_not_take_the_socket_file_of_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "nsqd.sock")

    async def scenario() -> None:
        first = Nsqd(options(tmp_path, tcp_address=path))
        await first.start()
        with pytest.raises(StartError, match="failed to lock data-path"):
            await Nsqd(options(tmp_path, tcp_address=path)).start()
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        await writer.wait_closed()
        await first.stop()

    asyncio.run(scenario())


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":0"])
def test_clients_connect_over_ipv4_and_ipv6(address: str) -> None:
    """0.0.0.0 is the default, and `localhost` may be IPv4 or IPv6."""
    made = pytest.importorskip("tests.support.certificates").certificates()
    flags = dict.fromkeys(("tcp_address", "http_address", "https_address"), address)
    with BrokerThread(**flags, **made.server_flags()) as broker:
        ports = broker.nsqd.tcp_port, broker.nsqd.http_port, broker.nsqd.https_address[1]
        for host in ("127.0.0.1", "::1"):
            with RawConnection((host, ports[0])) as client:
                client.sub("t", "c")
                (seen,) = broker.channel_stats("t", "c")["clients"]
                shown_host, port = split_address(seen["remote_address"])
                assert (shown_host, seen["remote_address"]) == (host, join_address(host, port))
            wait_until(lambda: not broker.channel_stats("t", "c")["clients"])
            with HttpConnection((host, ports[1])) as http:
                assert http.request("GET", "/ping").body == b"OK"
            with HttpConnection((host, ports[2]), tls=made.client_context()) as https:
                assert https.request("GET", "/ping").body == b"OK"


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_an_auth_server_is_told_the_ipv6_address_of_a_client() -> None:
    with (
        AuthServer() as auth_server,
        BrokerThread(tcp_address="[::1]:0", auth_http_address=(auth_server.address,)) as broker,
        broker.connect() as client,
    ):
        auth_server.grant(entry(".*", "publish"))
        client.command("AUTH", body=b"secret")
        client.read_frame()
        assert [query.fields["remote_ip"] for query in auth_server.queries] == ["::1"]
