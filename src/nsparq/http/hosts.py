"""The host names under which a daemon answers browsers.

An attacker can point a DNS name at our address (DNS rebinding). A page that a browser loaded under
that name may then send us any request, as if it were our own page: neither the browser nor a
firewall stops it. But the Host header has that name, and a script can change neither it nor the
headers by which we recognize a browser.

So programs may use any name, and browsers may use
- an IP address, because DNS is not involved,
- a name that nobody can register: one without a dot, such as `localhost` or `nsqd`, or one under a
  suffix for private networks, such as `nsqd.default.svc.cluster.local`,
- our own names: the host name, the broadcast address, and those of `--allowed-host`.

TLS needs no such check, because the name must be in our certificate. An API with secrets needs
none, because the page does not have a secret.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

from nsparq.http.api import ApiError, Request

PRIVATE_SUFFIXES: Final = ("localhost", "local", "localdomain", "internal", "lan", "home.arpa", "svc", "test")
"""Suffixes that are reserved, or only used in private networks."""
BROWSER_HEADERS: Final = frozenset(
    (b"origin", b"referer", b"cookie", b"accept-language", b"sec-fetch-site", b"sec-fetch-mode")
)
"""A browser sends at least one of these, and a script cannot prevent it: Accept-Language with a
GET, Origin with other methods."""
MAX_KNOWN: Final = 1024
MAX_LENGTH: Final = 300
"""Longest value of Host that is remembered. A host name has at most 253 characters."""


class HostNames:
    """The names of one daemon."""

    def __init__(self, *names: str, allowed: Iterable[str] = ()) -> None:
        """`names` may be empty, and may be addresses with a port."""
        own = (socket.gethostname(), *names, *allowed)
        self._own = frozenset(host_of(name) for name in own)
        self._good: set[bytes] = {b""}
        """Values of Host that have passed the check: most clients always send the same one."""

    def check(self, request: Request) -> None:
        """Raise ApiError for a browser that uses a name which may be an attacker's."""
        host = b""
        for name, value in request.headers:
            if len(name) == 4 and name.lower() == b"host":
                host = value
                break
        if host in self._good or request.secure is not None or not request.peer:
            return
        shown = host_of(host.decode("latin-1"))
        if self._is_ours(shown):
            if len(self._good) < MAX_KNOWN and len(host) <= MAX_LENGTH:
                self._good.add(host)
        elif _is_browser(request):
            reason = (
                f"this daemon does not answer browsers under the host name {shown[:100]!r}; "
                "--allowed-host permits it"
            )
            raise ApiError(403, "FORBIDDEN", reason=reason)

    def _is_ours(self, host: str) -> bool:
        if host in self._own or "." not in host:
            return True
        try:
            ipaddress.ip_address(host.partition("%")[0])
            return True
        except ValueError:
            return host.endswith(tuple(f".{suffix}" for suffix in PRIVATE_SUFFIXES))


def host_of(address: str) -> str:
    """The host of `host:port`, of `[::1]:4151` or of a bare host, in lower case."""
    if address.startswith("["):
        return address[1:].partition("]")[0].lower()
    host = address if address.count(":") > 1 else address.partition(":")[0]
    return host.lower().removesuffix(".")


def _is_browser(request: Request) -> bool:
    return any(
        name.lower() in BROWSER_HEADERS or (name.lower() == b"user-agent" and b"Mozilla/" in value)
        for name, value in request.headers
    )
