"""Listen on an address: the sockets at once, accepting when the daemon is ready."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""

BACKLOG: Final = 1024
FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
_NO_SUCH_FAMILY: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
_PORT_TRIES: Final = 20


def listen_on(address: Address) -> list[socket.socket]:
    """Listening sockets. Clients that connect wait until serve_on() accepts. Raises OSError or
    OverflowError, with nothing left open.

    `0.0.0.0`, `::` and an empty host mean every address of the machine, IPv4 and IPv6, as in Go. If
    the system has only one of the two, that one.
    """
    if isinstance(address, str):
        return [_listen(socket.AF_UNIX, address)]
    host, port = address
    wanted = _addresses(host)
    if port or len(wanted) == 1:
        return _listen_on_each(wanted, port)
    for _ in range(_PORT_TRIES):
        # All sockets need the same port, and a port that is free for one may be taken for another.
        with suppress(OSError):
            return _listen_on_each(wanted, 0)
    return _listen_on_each(wanted, 0)


def bound_address(sockets: Sequence[socket.socket]) -> Address:
    """The address of the first socket."""
    name = sockets[0].getsockname()
    return name if isinstance(name, str) else (name[0], name[1])


async def serve_on(
    sockets: Sequence[socket.socket], connect: Callable[[], asyncio.BaseProtocol]
) -> list[asyncio.AbstractServer]:
    """Accept connections. The servers close the sockets."""
    loop = asyncio.get_running_loop()
    servers: list[asyncio.AbstractServer] = []
    for sock in sockets:
        create = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
        servers.append(await create(connect, sock=sock, backlog=BACKLOG))
    return servers


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Families and addresses to listen on. The first is the requested one."""
    with suppress(ValueError):
        if not host or ipaddress.ip_address(host).is_unspecified:
            both = [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
            return both[::-1] if ":" in host else both
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:  # an empty or too long part, as in `a..b`
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from error
    return [*dict.fromkeys((family, str(name[0])) for family, *_, name in found if family in FAMILIES)]


def _listen_on_each(addresses: Sequence[tuple[socket.AddressFamily, str]], port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    try:
        for family, host in addresses:
            try:
                sockets.append(_listen(family, (host, port)))
            except OSError as error:
                if error.errno not in _NO_SUCH_FAMILY:
                    raise
                failure = error
            else:
                port = sockets[0].getsockname()[1]
        if failure is not None and not sockets:
            raise failure
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _listen(family: socket.AddressFamily, address: Address) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # IPv4 has its own socket, so that addresses of its clients have no `::ffff:` prefix.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        # Only a listening socket keeps others from taking its port.
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
