"""Where a daemon listens: `host:port`, or the path of a Unix socket."""

from __future__ import annotations

from pathlib import Path


def remove_stale_socket(path: Path) -> None:
    """What a daemon that was killed has left would keep the next one from listening."""
    if path.is_socket():
        path.unlink()


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port; None for what is a path."""
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or "/" in host:
        return None
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
