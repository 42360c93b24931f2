"""Which daemon listens where, and whether it can: what is taken is said before anything is started."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from nsparq.errors import StartError
from nsparq.listening import listen_on

__all__ = ["BASE", "MAX_NSQD", "MAX_PIPELINES", "Ports", "Wanted", "check_free", "free_port", "reachable"]

BASE: Final = 4150
"""Where NSQ's ports begin."""
MAX_NSQD: Final = 50
MAX_PIPELINES: Final = 10
_PORT_MAX: Final = 65535

# Distances from the base; with 4150 these are NSQ's own ports.
_LOOKUPD_TCP, _LOOKUPD_HTTP, _ADMIN, _PIPELINES, _FURTHER_NSQD = 10, 11, 21, 30, 50
_NSQD_BELOW_LOOKUPD: Final = 5
"""So many pairs fit below the ports of nsqlookupd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports as asked for: None follows from `base`, 0 is any that is free."""

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
        """Of the nsqd with this number, from 0 on: each two further than the one before."""
        step = 2 * number
        from_base = step
        if number >= _NSQD_BELOW_LOOKUPD:
            from_base = _FURTHER_NSQD + 2 * (number - _NSQD_BELOW_LOOKUPD)
        return self._of(self.nsqd_tcp, from_base, step), self._of(self.nsqd_http, from_base + 1, step)

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
    """A port somebody will listen on."""

    port: int
    owner: str
    """In words: `nsqd, TCP`."""
    flag: str
    """The flag by which it can be changed."""


def check_free(host: str, wanted: Iterable[Wanted]) -> None:
    """Raises StartError that names every port that cannot be had, whose it would be, and what to do."""
    problems: list[str] = []
    owners: dict[int, Wanted] = {}
    for one in wanted:
        if not one.port:
            continue
        if one.port > _PORT_MAX:
            problems.append(f"there is no port {one.port}, which {one.owner} would have: use {one.flag}")
            continue
        other = owners.setdefault(one.port, one)
        if other is not one:
            problems.append(
                f"port {one.port} would be that of {other.owner} and of {one.owner}: use {one.flag}"
            )
            continue
        reason = _why_not(host, one.port)
        if reason:
            problems.append(f"port {one.port} {reason}, and {one.owner} needs it: use {one.flag}")
    if problems:
        hint = "--port-base=N moves all of them, --port-base=0 takes any that are free"
        raise StartError("\n".join([*problems, hint]))


def _why_not(host: str, port: int) -> str:
    """Why nobody could listen there; empty if somebody can."""
    try:
        for probe in listen_on((host, port)):
            probe.close()
        return ""
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "is taken"
        if error.errno == errno.EACCES:
            return "is not for us to have (those below 1024 are the system's)"
        raise StartError(f"--host={host}: {error.strerror or error}") from error


def free_port(host: str) -> int:
    """One that nobody has now. Only for who cannot be told to take any: somebody may be faster."""
    probes = listen_on((host, 0))
    port: int = probes[0].getsockname()[1]
    for probe in probes:
        probe.close()
    return port


def reachable(host: str) -> str:
    """Where to connect to for what listens on this host: one that stands for all interfaces is none to go
    to."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"
