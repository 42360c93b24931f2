"""Addresses to which a secret may be sent, if another party chooses the address.

Any process can register with nsqlookupd, which passes its address on to everybody. A secret that is
sent to such an address may reach an attacker. A SecretScope is the operator's list of trusted
addresses.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from nsparq.addresses import is_host, split_address

__all__ = ["SecretScope"]

_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.*-]+")


class SecretScope:
    """A list of patterns:

    `*`                         every address
    `10.1.0.0/16`, `fd00::/8`   a network; it matches addresses, but no names
    `10.1.2.3`, `nsqd-1.local`  one address or name
    `*.nsq.example.com`         names; `*` stands for one label or a part of it

    All but networks may have a port, as in `10.1.2.3:4151`.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ValueError. Its text has the pattern."""
        self.patterns = tuple(patterns)
        self._is_everywhere = "*" in self.patterns
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._addresses: list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]] = []
        """With a port, or 0 for any port."""
        self._names: list[tuple[re.Pattern[str], int]] = []
        for pattern in self.patterns:
            if pattern != "*":
                self._add(pattern)

    def _add(self, pattern: str) -> None:
        if "/" in pattern:
            try:
                self._networks.append(ipaddress.ip_network(pattern, strict=False))
            except ValueError as error:
                raise ValueError(f"{pattern!r} is not a network: {error}") from None
            return
        address = _ip(pattern)
        if address is not None:
            self._addresses.append((address, 0))
            return
        host, port = split_address(pattern) or (pattern, 0)
        address = _ip(host)
        if address is not None:
            self._addresses.append((address, port))
        elif _NAME_PATTERN.fullmatch(host) and is_host(host.replace("*", "x")):
            expression = re.escape(host.rstrip(".")).replace(r"\*", "[^.]*")
            self._names.append((re.compile(expression, re.IGNORECASE), port))
        else:
            raise ValueError(f"{pattern!r} is not a host, a network or a pattern such as *.example.com")

    def covers(self, host: str, port: int) -> bool:
        if self._is_everywhere:
            return True
        address = _ip(host)
        if address is None:
            name = host.rstrip(".")
            return any(known.fullmatch(name) and wanted in (0, port) for known, wanted in self._names)
        return any(address in network for network in self._networks) or any(
            address == known and wanted in (0, port) for known, wanted in self._addresses
        )


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
