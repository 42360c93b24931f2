"""Which port each daemon gets, and a check before the start that all of them are free."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from nsparq.errors import StartError
from nsparq.listening import listen_on
from nsparq.private_random import private_random

__all__ = ["BASE", "MAX_NSQD", "MAX_PIPELINES", "FreePorts", "Ports", "Wanted", "check_free", "reachable"]

BASE: Final = 4150
"""The first of NSQ's ports."""
MAX_NSQD: Final = 50
MAX_PIPELINES: Final = 10
_PORT_MAX: Final = 65535
_NOT_FOR_CLIENTS: Final = range(10_000, 32_768)
"""Systems give the ports above to clients, and to servers that listen on port 0."""

# Offsets from the base. With 4150 they give NSQ's own ports.
_LOOKUPD_TCP, _LOOKUPD_HTTP, _ADMIN, _PIPELINES, _FURTHER_NSQD = 10, 11, 21, 30, 50
_ETCD, _REPLICAS = 12, 150
_NSQD_BELOW_LOOKUPD: Final = 5
"""Pairs of ports that fit below those of nsqlookupd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """None: derived from `base`. 0: any free port."""

    base: int = BASE
    lookupd_tcp: int | None = None
    lookupd_http: int | None = None
    nsqd_tcp: int | None = None
    nsqd_http: int | None = None
    admin: int | None = None
    pipeline: int | None = None

    def for_lookupd(self) -> tuple[int, int]:
        return self._of(self.lookupd_tcp, _LOOKUPD_TCP), self._of(self.lookupd_http, _LOOKUPD_HTTP)

    def for_nsqd(self, number: int) -> tuple[int, int]:
        """TCP and HTTP port of the nsqd with this number, counted from 0."""
        step = 2 * number
        from_base = step
        if number >= _NSQD_BELOW_LOOKUPD:
            from_base = _FURTHER_NSQD + 2 * (number - _NSQD_BELOW_LOOKUPD)
        return self._of(self.nsqd_tcp, from_base, step), self._of(self.nsqd_http, from_base + 1, step)

    def for_replica(self, number: int) -> int:
        """Port on which the node is reached by the other nodes of its cluster."""
        return self._of(None, _REPLICAS + number)

    def for_etcd(self) -> tuple[int, int]:
        """Ports of etcd, for clients and for other members."""
        return self._of(None, _ETCD), self._of(None, _ETCD + 1)

    def for_admin(self) -> int:
        return self._of(self.admin, _ADMIN)

    def for_pipeline(self, number: int) -> int:
        return self._of(self.pipeline, _PIPELINES + number, number)

    def _of(self, given: int | None, from_base: int, step: int = 0) -> int:
        if given is not None:
            return given + step if given else 0
        return self.base + from_base if self.base else 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A port that a member needs."""

    port: int
    owner: str
    """Such as `nsqd, TCP`."""
    flag: str
    """The flag that changes the port."""


def check_free(host: str, wanted: Iterable[Wanted]) -> None:
    """Raises StartError with every port that cannot be used, its owner, and its flag."""
    problems: list[str] = []
    owners: dict[int, Wanted] = {}
    for one in wanted:
        if not one.port:
            continue
        if one.port > _PORT_MAX:
            problems.append(f"port {one.port} for {one.owner} is above {_PORT_MAX}: use {one.flag}")
            continue
        other = owners.setdefault(one.port, one)
        if other is not one:
            problems.append(
                f"port {one.port} is assigned to {other.owner} and to {one.owner}: use {one.flag}"
            )
            continue
        reason = _why_not(host, one.port)
        if reason:
            problems.append(f"port {one.port} for {one.owner} {reason}: use {one.flag}")
    if problems:
        hint = "--port-base=N moves all ports, --port-base=0 uses any free ports"
        raise StartError("\n".join([*problems, hint]))


def _why_not(host: str, port: int) -> str:
    """Why the port cannot be used; empty if it can."""
    try:
        for probe in listen_on((host, port)):
            probe.close()
        return ""
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "is in use"
        if error.errno == errno.EACCES:
            return "needs root rights, as all ports below 1024 do"
        raise StartError(f"--host={host}: {error.strerror or error}") from error


class FreePorts:
    """Ports of a host that are free now, each given once. Another process may take one: prefer
    port 0."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._candidates = iter(private_random.sample(_NOT_FOR_CLIENTS, len(_NOT_FOR_CLIENTS)))

    def take(self) -> int:
        """Raises StartError."""
        for port in self._candidates:
            if not _why_not(self._host, port):
                return port
        raise StartError(f"--host={self._host}: no port is free")


def reachable(host: str) -> str:
    """The address to connect to: 127.0.0.1 or ::1 for a host that stands for all interfaces."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"
