"""Listening sockets: addresses, ports, and failures."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nsparq import listening
from nsparq.listening import bound_address, listen_on, serve_on
from tests.support.polling import DEADLINE

needs_ipv6 = pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")


@needs_ipv6
@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "0.0.0.0"), ("", "0.0.0.0"), ("::", "::")])
def test_all_addresses_means_ipv4_and_ipv6(host: str, shown: str) -> None:
    sockets = listen_on((host, 0))
    bound = bound_address(sockets)
    assert isinstance(bound, tuple) and bound[0] == shown
    assert {sock.getsockname()[1] for sock in sockets} == {bound[1]}
    for client_host in ("127.0.0.1", "::1"):
        socket.create_connection((client_host, bound[1]), timeout=DEADLINE).close()
    for sock in sockets:
        sock.close()


@needs_ipv6
@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_one_address_means_only_that_one(host: str, other: str) -> None:
    while True:
        (sock,) = listen_on((host, 0))
        port = sock.getsockname()[1]
        # Nobody else may listen at that port of the other address. A socket that only holds it
        # refuses.
        holder = socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET)
        with closing(sock), closing(holder):
            try:
                holder.bind((other, port))
            except OSError:
                continue
            assert sock.getsockname()[0] == host
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port), timeout=DEADLINE)
            return


@pytest.mark.parametrize("error", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_ipv6_only_ipv4_is_used(host: str, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ipv4Only(socket.socket):
        def bind(self, address: Any) -> None:
            if self.family == socket.AF_INET6:
                raise OSError(error, "no IPv6 here")
            super().bind(address)

    monkeypatch.setattr(listening.socket, "socket", Ipv4Only)
    (sock,) = listen_on((host, 0))
    assert sock.getsockname()[0] == "0.0.0.0"
    sock.close()


@needs_ipv6
def test_a_port_taken_for_one_family_is_an_error() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen_on(("0.0.0.0", port))
        socket.create_server(("127.0.0.1", port)).close()  # nothing is left open


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_name_that_no_host_can_have_is_an_error(host: str) -> None:
    with pytest.raises(OSError, match="not known"):
        listen_on((host, 0))


def test_early_connections_are_served_when_the_daemon_is_ready(tmp_path: Path) -> None:
    class Greeter(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"hello")
            transport.close()

    async def scenario(address: listening.Address) -> bytes:
        sockets = listen_on(address)
        bound = bound_address(sockets)
        connecting = (
            asyncio.open_unix_connection(bound) if isinstance(bound, str) else asyncio.open_connection(*bound)
        )
        reader, writer = await connecting
        servers = await serve_on(sockets, Greeter)
        said = await reader.read()
        writer.close()
        await writer.wait_closed()
        for server in servers:
            server.close()
        return said

    for address in (("127.0.0.1", 0), str(tmp_path / "socket")):
        assert asyncio.run(scenario(address)) == b"hello"
