"""Sockets of a daemon: bound before anything is loaded, served when it is ready."""

from __future__ import annotations

import socket
from pathlib import Path

from nsparq.addresses import remove_stale_socket, split_address
from nsparq.errors import StartError
from nsparq.listening import Address, bound_address, listen_on


class Listeners:
    """Sockets that listen and do not accept yet, by their purpose."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[socket.socket]] = {}
        self._unix_paths: list[Path] = []

    def bind(self, name: str, address: str) -> Address:
        """Listen on the address of an option. Raises StartError."""
        wanted = split_address(address)
        try:
            if wanted is None:
                remove_stale_socket(Path(address))
            sockets = self._waiting[name] = listen_on(address if wanted is None else wanted)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", "") or error
            raise StartError(f"listen ({address}) failed - {reason}") from error
        bound = bound_address(sockets)
        if isinstance(bound, str):
            self._unix_paths.append(Path(bound))
        return bound

    def take(self) -> dict[str, list[socket.socket]]:
        """All sockets. Who takes them closes them."""
        waiting, self._waiting = self._waiting, {}
        return waiting

    def close(self) -> None:
        """Close sockets that were not taken, and remove the names of Unix sockets."""
        for sockets in self.take().values():
            for sock in sockets:
                sock.close()
        for path in self._unix_paths:
            path.unlink(missing_ok=True)
        self._unix_paths = []
