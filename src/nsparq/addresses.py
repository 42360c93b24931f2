"""Addresses of daemons: `host:port`, or the path of a Unix socket."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any

_HOST_NAME = re.compile(rb"[A-Za-z0-9_.-]+")
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")


def remove_stale_socket(path: Path) -> None:
    """Remove the socket of a daemon that was killed: the next one could not listen there."""
    if path.is_socket():
        path.unlink()


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port, or None for a path."""
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or "/" in host:
        return None
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host(text: str) -> bool:
    """Whether a text is a possible host name or IP address, which a resolver accepts and which has
    no other meaning in a URL."""
    if ":" in text:
        address, percent, zone = text.partition("%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            return False
        return not percent or _ZONE.fullmatch(zone) is not None
    try:
        # Fails if a label is empty or too long.
        encoded = text.encode("idna")
    except UnicodeError:
        return False
    return len(encoded) <= 253 and _HOST_NAME.fullmatch(encoded) is not None


def heard_address(host: Any, port: Any) -> str | None:
    """`host:port` from values that another daemon sent, or None if they are not valid."""
    if not isinstance(host, str) or not is_host(host) or type(port) is not int or not 0 < port < 65536:
        return None
    return join_address(host, port)
