"""Over which connections the secret of AUTH is shown: it crosses them as it is."""

from __future__ import annotations

import logging
from ipaddress import ip_address
from typing import Final

from nsparq.client.config import Config

logger = logging.getLogger(__name__)

MAX_WARNED: Final = 1000
_warned_of: set[str] = set()
"""Servers that are shown a secret without TLS. A warning each is enough, however often they are connected."""


def may_show_secret(config: Config, address: str, host: str, *, is_encrypted: bool) -> bool:
    """Whether the server at `address` may see it; `host` is where that is, nothing for a Unix socket."""
    if is_encrypted or _is_here(host):
        return True
    if config.auth_requires_tls:
        return False
    if address not in _warned_of and len(_warned_of) < MAX_WARNED:
        _warned_of.add(address)
        logger.warning("%s: without TLS whoever is on the way can read the secret", address)
    return True


def _is_here(host: str) -> bool:
    """Whether what is sent stays on this machine."""
    try:
        return not host or ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
