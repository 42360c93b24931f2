"""Which servers are shown the secret of AUTH, and over which connections: it crosses them as it is."""

from __future__ import annotations

import logging
from ipaddress import ip_address
from typing import Final

from nsparq.addresses import split_address
from nsparq.client.config import Config
from nsparq.secret_scope import SecretScope

logger = logging.getLogger(__name__)

MAX_WARNED: Final = 1000
_warned_of: set[str] = set()
"""Servers that are shown a secret without TLS. A warning each is enough, however often they are connected."""


def reason_to_withhold(
    config: Config, address: str, host: str, *, is_encrypted: bool, is_nsqlookupd: bool = False
) -> str:
    """Why the server at `address` may not see the secret; nothing if it may. `host` is where that is, nothing
    for a Unix socket. An nsqlookupd is always one that the user has named."""
    place = split_address(address)
    if place is not None and not is_nsqlookupd and not SecretScope(config.auth_secret_for).covers(*place):
        return "auth_secret_for does not name it"
    if is_encrypted or _is_here(host):
        return ""
    if config.auth_requires_tls:
        return "tls_v1 is not set"
    if address not in _warned_of and len(_warned_of) < MAX_WARNED:
        _warned_of.add(address)
        logger.warning("%s: without TLS whoever is on the way can read the secret", address)
    return ""


def _is_here(host: str) -> bool:
    """Whether what is sent stays on this machine."""
    try:
        return not host or ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
