"""Which servers may get the auth secret. It is sent in clear text, so TLS matters."""

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
"""Servers that got the secret without TLS: one warning for each is enough."""


def reason_to_withhold(
    config: Config, address: str, host: str, *, is_encrypted: bool, is_nsqlookupd: bool = False
) -> str:
    """Why the server at `address` may not get the secret; empty if it may. `host` is its IP address
    or name, empty for a Unix socket. `auth_secret_for` is not for nsqlookupds: the user always
    names them."""
    # A URL may leave out the port of its scheme.
    place = split_address(address) or (host, 443 if is_encrypted else 80)
    is_path = "/" in address
    if not is_path and not is_nsqlookupd and not SecretScope(config.auth_secret_for).covers(*place):
        return "auth_secret_for does not include it"
    if is_encrypted or _is_local(host):
        return ""
    if config.auth_requires_tls:
        return "tls_v1 is not set"
    if address not in _warned_of and len(_warned_of) < MAX_WARNED:
        _warned_of.add(address)
        logger.warning("%s: the auth secret is sent without TLS and can be read on the network", address)
    return ""


def _is_local(host: str) -> bool:
    """Whether the host is this machine."""
    try:
        return not host or ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
