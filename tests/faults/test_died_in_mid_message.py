"""Clients that vanish in the middle of something: what they had sent is freed at once, by reference
counts.

The daemons hardly ever run the garbage collector. A connection in a reference cycle would stay in
memory, with everything that it had received: publishers that die in mid-message would exhaust the
machine.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nsparq.http.connection import HttpConnection
from nsparq.lookup import tcp as lookup_tcp
from nsparq.server.connection import Connection
from nsparq.wire.limits import MAX_IDENTIFY_BODY
from tests.admin.support import AdminThread
from tests.support import BrokerThread, RawConnection, multi, sized, wait_until
from tests.support.certificates import certificates
from tests.support.layered import LayeredConnection, Tls
from tests.support.lookupd import LookupdThread
from tests.support.memory import all_freed_without_collecting

LARGE = b"x" * 300_000

COMMANDS = {
    "nothing": b"",
    "half a line": b"PUB mid_mes",
    "half an IDENTIFY": b"IDENTIFY\n" + sized(LARGE[:MAX_IDENTIFY_BODY])[:-1],
    "half an AUTH": b"AUTH\n" + sized(LARGE)[:-1],
    "half a PUB": b"PUB mid\n" + sized(LARGE)[:-1],
    "half a DPUB": b"DPUB mid 10\n" + sized(LARGE)[:-1],
    "most of an MPUB": b"MPUB mid\n" + sized(multi([LARGE] * 4))[:-1],
    "a command behind half of one": b"SUB mid c#ephemeral\nRDY 5\nMPUB mid\n"
    + sized(multi([LARGE] * 2))[:-1],
    "what is refused": b"PUB mid\n" + struct.pack(">i", 1 << 30) + LARGE,
}
LAYERS = [
    {"snappy": True},
    {"deflate": True},
    {"tls": True},
    {"tls": True, "snappy": True},
    {"tls": True, "deflate": True},
]
REQUESTS = {
    "nothing": b"",
    "half a head": b"POST /pub?topic=mid HTTP/1.1\r\nHost: loc",
    "half a body": b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 400000\r\n\r\n" + LARGE,
    "half a chunk": b"POST %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n61a80\r\n"
    + LARGE,
    "a body that is refused": b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
    + LARGE,
    "a request and half of one": b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\nGET /pi",
}


def leaves(connection: RawConnection) -> None:
    connection.close()


def vanishes(connection: RawConnection) -> None:
    connection.abort()


DEPARTURES = pytest.mark.parametrize("depart", [leaves, vanishes])


@pytest.fixture(scope="module")
def nsqd() -> Iterator[BrokerThread]:
    with BrokerThread(**certificates().server_flags()) as broker:
        yield broker


@DEPARTURES
@pytest.mark.parametrize("said", COMMANDS)
def test_nsqd_over_tcp(nsqd: BrokerThread, said: str, depart: Callable[[RawConnection], None]) -> None:
    with all_freed_without_collecting(Connection):
        connection = nsqd.connect()
        connection.send(COMMANDS[said])
        has_arrived(nsqd, said)
        depart(connection)


@DEPARTURES
@pytest.mark.parametrize("layers", LAYERS, ids=" and ".join)
def test_nsqd_through_layers(
    nsqd: BrokerThread, layers: dict[str, Any], depart: Callable[[RawConnection], None]
) -> None:
    said = "most of an MPUB"
    with all_freed_without_collecting(Connection):
        connection = LayeredConnection(nsqd.address)
        context = certificates().client_context() if "tls" in layers else None
        connection.upgrade(**{**layers, "tls": context})
        connection.send(COMMANDS[said])
        has_arrived(nsqd, said)
        depart(connection)


def has_arrived(nsqd: BrokerThread, said: str) -> None:
    """A reset would discard what has not been read."""
    if "half" in said or "most" in said:
        wait_until(lambda: any(is_halfway(connection) for connection in [*nsqd.nsqd.connections]))


def is_halfway(connection: Connection) -> bool:
    return connection.protocol._held > 0


@DEPARTURES
@pytest.mark.parametrize("is_secure", [False, True], ids=["HTTP", "HTTPS"])
@pytest.mark.parametrize("said", REQUESTS)
def test_nsqd_over_http(
    nsqd: BrokerThread, said: str, is_secure: bool, depart: Callable[[RawConnection], None]
) -> None:
    with all_freed_without_collecting(HttpConnection):
        connection = LayeredConnection(nsqd.https_address if is_secure else nsqd.http_address, magic=b"")
        if is_secure:
            connection.begin_tls(certificates().client_context(), begun=None)
        connection.send(REQUESTS[said].replace(b"%b", b"/pub?topic=mid"))
        depart(connection)
    assert [server.gathered for server in nsqd.nsqd._http] == [0, 0]


@DEPARTURES
def test_a_tls_handshake_that_stops_halfway(
    nsqd: BrokerThread, depart: Callable[[RawConnection], None]
) -> None:
    with all_freed_without_collecting(Connection):
        connection = LayeredConnection(nsqd.address)
        connection.identify(tls_v1=True)
        connection.send(Tls(certificates().client_context(), "localhost").shake(b"")[0][:-1])
        depart(connection)


@DEPARTURES
@pytest.mark.parametrize("said", [b"", b"IDENT", b"IDENTIFY\n" + sized(b"{" * 10_000)[:-1], b"PING\n" * 5000])
def test_nsqlookupd_over_tcp(said: bytes, depart: Callable[[RawConnection], None]) -> None:
    with LookupdThread() as lookupd, all_freed_without_collecting(lookup_tcp.Connection):
        connection = lookupd.connect()
        connection.send(said)
        depart(connection)


@DEPARTURES
@pytest.mark.parametrize("daemon", [LookupdThread, AdminThread])
def test_the_other_daemons_over_http(
    daemon: type[LookupdThread | AdminThread], depart: Callable[[RawConnection], None]
) -> None:
    path = b"/api/topics" if daemon is AdminThread else b"/topic/create?topic=mid"
    flags = {"nsqd_http_address": ("127.0.0.1:1",)} if daemon is AdminThread else {}
    with daemon(**flags) as served, all_freed_without_collecting(HttpConnection):
        assert served.http_address is not None
        for request in REQUESTS.values():
            connection = RawConnection(served.http_address, magic=b"")
            connection.send(request.replace(b"%b", path))
            depart(connection)
